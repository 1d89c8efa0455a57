"""POST and GET /calibrations, and what they change for the next plan."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import api.jobs
from planner.calibrate.runs import Measured, check_run
from planner.errors import InvalidInputError
from planner.plan import Calibration, Plan, document_hash
from tests.api.conftest import Client, plan_request
from tests.timed import made_up_run

DP4 = {"tp": 1, "pp": 1}


def planned(client: Client, **changes: Any) -> Plan:
    answer = client.post("/plan", json=plan_request(**{"constraints": DP4, **changes}))
    assert answer.status_code == 200, answer.text
    return Plan.model_validate_json(answer.content)


def calibrated(client: Client, plan: Plan, **options: Any) -> Calibration:
    run = made_up_run(plan, **options).model_dump(mode="json")
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 200, answer.text
    return Calibration.model_validate_json(answer.content)


def test_a_run_comes_back_as_a_calibration_that_is_listed_and_read(client: Client) -> None:
    assert client.get("/calibrations").json() == []
    calibration = calibrated(client, planned(client))
    [line] = client.get("/calibrations").json()
    assert (line["id"], line["topology"], line["num_runs"]) == (calibration.id, "local-gloo", 1)
    read = client.get(f"/calibrations/{calibration.id}")
    assert Calibration.model_validate_json(read.content) == calibration


def test_the_next_plan_uses_the_calibration_and_says_so(client: Client) -> None:
    before = planned(client)
    calibration = calibrated(client, before)
    after = planned(client)
    assert after.provenance.calibration_id == calibration.id
    assert after.id != before.id
    assert after.prediction.step_time_s != before.prediction.step_time_s
    assert planned(client, calibration=calibration.id) == after
    assert planned(client, calibration="none") == before


def test_a_calibration_is_for_its_topology_only(client: Client) -> None:
    calibration = calibrated(client, planned(client))
    document = client.get("/topologies/local-gloo").json()["document"]
    same = planned(client, topology=document)
    assert same.provenance.calibration_id == calibration.id
    other = planned(client, topology={**document, "description": "another machine"})
    assert other.provenance.calibration_id is None


def test_a_calibration_named_for_another_topology_is_422(client: Client) -> None:
    calibration = calibrated(client, planned(client))
    document = client.get("/topologies/local-gloo").json()["document"] | {"name": "other"}
    request = plan_request(topology=document, calibration=calibration.id)
    answer = client.post("/plan", json=request)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["where"] == "calibration"


def test_a_second_run_refits_from_both_and_becomes_the_latest(client: Client) -> None:
    plan = planned(client)
    first = calibrated(client, plan)
    second = calibrated(client, plan, compute_s=0.7)
    assert len(first.run_hashes) == 1
    assert set(first.run_hashes) < set(second.run_hashes)
    assert [line["id"] for line in client.get("/calibrations").json()] == [second.id, first.id]
    assert planned(client).provenance.calibration_id == second.id


def test_runs_of_several_plans_on_a_topology_are_fitted_together(client: Client) -> None:
    first = calibrated(client, planned(client))
    training = {"global_batch_size": 32, "seq_len": 128, "precision": "fp32"}
    other = planned(client, training=training, calibration="none")
    second = calibrated(client, other)
    assert set(first.run_hashes) < set(second.run_hashes)


def test_a_stored_run_that_this_version_cannot_read_is_left_out(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(client)
    [old] = calibrated(client, plan).run_hashes

    def checked(measured: Measured) -> None:
        if document_hash(measured.run) == old:
            raise InvalidInputError("of another time")
        check_run(measured)

    monkeypatch.setattr(api.jobs, "check_run", checked)
    assert old not in calibrated(client, plan, compute_s=0.7).run_hashes


def test_the_same_run_twice_is_one_run(client: Client) -> None:
    plan = planned(client)
    assert calibrated(client, plan) == calibrated(client, plan)
    assert len(client.get("/calibrations").json()) == 1


def test_the_same_runs_give_the_same_calibration_elsewhere(
    make_client: Callable[..., Client], tmp_path: Any
) -> None:
    clients = [make_client(data_dir=tmp_path / name) for name in ("a", "b")]
    first, second = (calibrated(client, planned(client)) for client in clients)
    assert first == second


def test_a_run_of_an_unknown_plan_is_404(client: Client) -> None:
    run = made_up_run(planned(client), plan_id="0123456789abcdef")
    answer = client.post("/calibrations", json=run.model_dump(mode="json"))
    assert answer.status_code == 404
    assert answer.json()["error"]["where"] == "plan_id"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"plan_hash": "0123456789abcdef"}, "plan_hash"),
        ({"topology": "dgx-h100"}, "topology"),
        ({"schema_version": 2}, "schema_version"),
        ({"ranks": []}, "ranks"),
    ],
)
def test_a_run_of_something_else_is_422_and_not_kept(
    client: Client, changes: dict[str, Any], where: str
) -> None:
    run = made_up_run(planned(client)).model_dump(mode="json") | changes
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["where"] == where
    assert client.get("/calibrations").json() == []


RANK_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"forward_backward_s": [1.0]}, "forward_backward_s"),
    ({"optimizer_s": []}, "optimizer_s"),
    ({"step_s": [0.0, 0.0, 0.0]}, "step_s[0]"),
    ({"forward_backward_s": [1e300, 1, 1]}, "forward_backward_s[0]"),
]
TIMING_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"axis": "tp"}, "group_size"),
    ({"group_size": 2}, "group_size"),
    ({"algorithm": "pairwise"}, "algorithm"),
    ({"size_bytes": 0}, "size_bytes"),
    ({"seconds": [0.0]}, "seconds[0]"),
    ({"seconds": [5e-324, 1, 1]}, "seconds[0]"),
]


@pytest.mark.parametrize(("changes", "where"), RANK_CHANGES)
def test_figures_no_clock_gives_are_refused(
    client: Client, changes: dict[str, Any], where: str
) -> None:
    run = made_up_run(planned(client)).model_dump(mode="json")
    run["ranks"][1] |= changes
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["where"] == f"ranks[1].{where}"


@pytest.mark.parametrize(("changes", "where"), TIMING_CHANGES)
def test_collectives_the_plan_does_not_have_are_refused(
    client: Client, changes: dict[str, Any], where: str
) -> None:
    run = made_up_run(planned(client)).model_dump(mode="json")
    run["ranks"][1]["collectives"][0] |= changes
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["where"] == f"ranks[1].collectives[0].{where}"


def test_a_run_without_collectives_still_calibrates_compute(client: Client) -> None:
    plan = planned(client)
    run = made_up_run(plan).model_dump(mode="json")
    for rank in run["ranks"]:
        rank["collectives"] = []
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 200, answer.text
    assert answer.json()["levels"] == []


def test_a_run_that_saw_nothing_of_its_collectives_is_refused(client: Client) -> None:
    """As of a script whose gradients are reduced in C++: they would count as compute."""
    run = made_up_run(planned(client)).model_dump(mode="json")
    for rank in run["ranks"]:
        rank["collectives"], rank["communication_s"] = [], [0.0] * 3
    answer = client.post("/calibrations", json=run)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["where"] == "ranks.communication_s"
    assert "collectives on dp_shard_cp" in answer.json()["error"]["message"]


SECONDS = st.floats(0, 1e308)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rank=st.fixed_dictionaries(
        {},
        optional={
            name: st.lists(SECONDS, max_size=4)
            for name in ("step_s", "forward_backward_s", "optimizer_s", "communication_s")
        },
    ),
    timing=st.fixed_dictionaries(
        {},
        optional={
            "axis": st.sampled_from(["tp", "dp", "dp_cp", "pp", "ep", "edp"]),
            "op": st.sampled_from(["all_gather", "all_to_all", "broadcast", "send_recv"]),
            "algorithm": st.sampled_from(["singleton", "tree", "hierarchical", "point_to_point"]),
            "size_bytes": st.integers(0, 10**29),
            "group_size": st.integers(2, 5),
            "seconds": st.lists(SECONDS, max_size=4),
        },
    ),
)
def test_no_run_gives_a_500(client: Client, rank: dict[str, Any], timing: dict[str, Any]) -> None:
    run = made_up_run(planned(client, calibration="none")).model_dump(mode="json")
    run["ranks"][0] |= rank
    run["ranks"][0]["collectives"][0] |= timing
    answer = client.post("/calibrations", json=run)
    assert answer.status_code in (200, 422), answer.text
