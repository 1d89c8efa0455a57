"""GET /topologies and /models, /healthz, /metrics: what there is, and whether it works."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from planner import __version__
from planner.model.bundled import model_names
from planner.model.spec import ModelSpec
from planner.topology.bundled import topology_names
from planner.topology.document import TopologyDocument
from tests.api.conftest import Client, plan_request


def test_every_bundled_topology_is_listed_and_shown(client: Client) -> None:
    listed = client.get("/topologies").json()
    assert [line["name"] for line in listed] == list(topology_names())
    for name in topology_names():
        shown = client.get(f"/topologies/{name}").json()
        assert TopologyDocument.model_validate(shown["document"]).name == name
        assert shown["levels"][-1]["unit_size"] >= shown["num_gpus"]


def test_the_levels_follow_the_number_of_nodes(client: Client) -> None:
    one, many = (client.get(f"/topologies/dgx-h100?nodes={n}").json() for n in (1, 64))
    assert (one["num_gpus"], many["num_gpus"]) == (8, 512)
    assert len(one["levels"]) < len(many["levels"])
    assert one["fingerprint"] == many["fingerprint"]


def test_a_shown_topology_and_model_can_be_sent_back_inline(client: Client) -> None:
    document = client.get("/topologies/local-gloo").json()["document"]
    spec = client.get("/models/example-gpt").json()["spec"]
    inline = client.post("/plan", json=plan_request(topology=document, model=spec))
    named = client.post("/plan", json=plan_request())
    assert inline.status_code == 200, inline.text
    assert inline.content == named.content


def test_every_bundled_model_is_listed_and_shown(client: Client) -> None:
    listed = {line["name"]: line for line in client.get("/models").json()}
    assert list(listed) == list(model_names())
    for name in model_names():
        shown = client.get(f"/models/{name}").json()
        assert shown == listed[name]
        assert ModelSpec.model_validate(shown["spec"]).num_layers >= 1
        assert 0 < shown["num_active_params"] <= shown["num_params"]
        assert bool(shown["num_mtp_params"]) == ("mtp" in shown["num_blocks"])
    deepseek = listed["deepseek-v3"]
    blocks = {"embedding": 1, "dense": 3, "moe": 58, "mtp": 1, "head": 1}
    assert deepseek["num_blocks"] == blocks
    assert list(deepseek["num_blocks"]) == list(blocks)
    assert deepseek["num_mtp_params"] == pytest.approx(11.6e9, rel=0.01)


def test_health_says_version_and_database(client: Client) -> None:
    answer = client.get("/healthz")
    assert answer.json() == {"status": "ok", "version": __version__, "database": "ok"}


def test_without_its_database_health_fails_and_requests_are_503(client: Client) -> None:
    store = client.app.state.store
    with Session(store._engine) as session, session.begin():
        session.execute(text("drop table requests"))
    answer = client.post("/plan", json=plan_request())
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "StorageError"
    assert "requests" not in answer.text


def test_an_unreachable_database_is_told_by_health(
    make_client: Callable[..., Client], tmp_path: Path
) -> None:
    client = make_client(data_dir=tmp_path / "data")
    client.app.state.store.close()
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    (tmp_path / "data").rmdir()
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (503, "failing")


def test_metrics_count_requests_by_route_not_by_address(client: Client) -> None:
    for path in ("/plans/a", "/plans/b", "/nothing/1", "/nothing/2"):
        client.get(path)
    lines = client.get("/metrics").text.splitlines()
    for route in ("/plans/{plan_id}", "unmatched"):
        line = f'commplan_requests_total{{method="GET",route="{route}",status="404"}} 2.0'
        assert line in lines


@pytest.mark.parametrize("name", ["../models", "dgx-h100.json", "__init__", ""])
def test_no_other_file_can_be_read_by_name(client: Client, name: str) -> None:
    quoted = name.replace("/", "%2f") or "%20"
    for kind in ("topologies", "models"):
        assert client.get(f"/{kind}/{quoted}").status_code == 404
    if name:
        answer = client.post("/plan", json=plan_request(topology=name))
        assert answer.status_code == 404


def test_a_weak_cable_halves_every_level_it_feeds(client: Client) -> None:
    body = {"topology": "dgx-h100", "link": ["n7/nic3:rail0/rail3=0.5"], "node": ["n9=down"]}
    answer = client.post("/topologies/degrade", json=body)
    assert answer.status_code == 200, answer.text
    view = answer.json()
    assert view["nodes"] == 4095
    rates = {level["name"]: level["bytes_per_s"] for level in view["levels"]}
    before = {level["name"]: level["bytes_per_s"] for level in view["before"]}
    assert rates["nvlink"] == before["nvlink"]
    assert [rates[n] / before[n] for n in ("rail", "spine", "core")] == [0.5] * 3
    again = {**body, "topology": view["document"], "link": ["n8/nic0:rail0/rail0=0.25"]}
    twice = client.post("/topologies/degrade", json=again).json()
    assert {lv["name"]: lv["bytes_per_s"] for lv in twice["levels"]}["rail"] == 12.5e9


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "name what is weak or broken"),
        ({"link": ["n7/nic3=0.5"]}, "need A:B=FACTOR"),
        ({"link": ["n7/nic9:rail0/rail3=0.5"]}, "n7 has no 'n7/nic9'"),
        ({"node": ["n7=1"]}, "must be down, or a number from 0 up to but not 1"),
        ({"node": ["n5000=down"]}, "nothing is called n5000"),
        ({"node": [f"{'n' * 121}=down"]}, "part must have at most 120 characters"),
        ({"node": ["n7=down"] * 4097}, "node must have at most 4096 items"),
    ],
)
def test_a_weak_part_that_is_none_is_refused_in_words(
    client: Client, more: dict[str, list[str]], said: str
) -> None:
    answer = client.post("/topologies/degrade", json={"topology": "dgx-h100", **more})
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]
