"""POST /plan with the nodes that the scheduler gave."""

from typing import Any

import pytest

from planner.plan import Calibration, Plan
from tests.api.conftest import Client, plan_request
from tests.timed import made_up_run
from tests.unit.placed import cluster, impairments

HELD = {"tp": 1, "pp": 1, "zero_stage": 0}
# Three nodes of two GPUs, of the four given.
SIX = {**HELD, "dp": 6}


def body(**changes: Any) -> dict[str, Any]:
    document = cluster(impairments=impairments("n1=0.5")).model_dump(mode="json")
    training = {"global_batch_size": 48, "seq_len": 256}
    fields = {"topology": document, "training": training, "constraints": HELD, **changes}
    return plan_request(**fields)


def planned(client: Client, **changes: Any) -> Plan:
    answer = client.post("/plan", json=body(**changes))
    assert answer.status_code == 200, answer.text
    return Plan.model_validate_json(answer.content)


def test_an_allocation_is_planned_and_its_order_makes_no_other_plan(client: Client) -> None:
    plans = [planned(client, allocation=hosts) for hosts in (["n0", "n2"], ["n2", "n0"])]
    assert plans[0] == plans[1]
    assert plans[0].ranks.hosts == ("n0", "n2")
    assert client.get(f"/plans/{plans[0].id}").json()["ranks"]["hosts"] == ["n0", "n2"]
    assert planned(client, allocation=["n2", "n3"]).id != plans[0].id
    page = client.get(f"/plans/{plans[0].id}/page")
    assert page.status_code == 200
    assert "--master-addr n0" in page.text


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"allocation": ["n0", "n0"]}, "allocation", "names 'n0' twice"),
        ({"allocation": ["n0", "x"]}, "allocation", "names 'x', which topology"),
        ({"allocation": [f"n{i}" for i in range(7)]}, "allocation", "has 7 nodes"),
        ({"allocation": []}, "allocation", "at least 1"),
        ({"allocation": ["n 0"]}, "allocation", "n 0"),
        ({"allocation": "n0"}, "allocation", ""),
        ({"allocation": ["n0"], "nodes": 2}, "", "nodes=2 but allocation names 1; leave nodes"),
    ],
)
def test_a_bad_allocation_is_422_and_says_where(
    client: Client, changes: dict[str, Any], where: str, says: str
) -> None:
    answer = client.post("/plan", json=body(**changes))
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert where in str(error)
    assert says in error["message"]


def test_a_run_of_a_plan_without_its_weak_node_is_calibrated(client: Client) -> None:
    given = {"allocation": ["n0", "n1", "n2", "n3"], "constraints": SIX}
    plan = planned(client, **given)
    assert plan.ranks.hosts == ("n0", "n2", "n3")
    answer = client.post(
        "/calibrations", json=made_up_run(plan, compute_s=0.05).model_dump(mode="json")
    )
    assert answer.status_code == 200, answer.text
    calibration = Calibration.model_validate_json(answer.content)
    after = planned(client, **given)
    assert after.provenance.calibration_id == calibration.id
    # of healthy nodes: with the weak one, half of it would be put down to its speed
    assert after.ranks.hosts == plan.ranks.hosts
    assert after.prediction.breakdown.compute_s == pytest.approx(0.05, rel=0.05)
