"""``POST /topologies/import``: texts in, a topology out; whatever is wrong with them is a 4xx."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.topology.document import parse_topology
from planner.topology.importers.cluster import ImportOptions, import_topology
from tests.api.conftest import Client, plan_request
from tests.api.test_bad_input import check_error
from tests.unit.imported_samples import SAMPLES

NODE = (SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt").read_text()
TREE = (SAMPLES / "slurm" / "tree-topograph-oci.conf").read_text()


def test_texts_become_a_topology_and_its_levels(client: Client) -> None:
    body = {"node": NODE, "gpu": "H200", "fabric": TREE, "nic_gbps": 400, "name": "mine"}
    answer = client.post("/topologies/import", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    document = parse_topology(told["document"])
    assert (
        document
        == import_topology(
            NODE,
            node_source="node",
            gpu="H200",
            fabric_text=TREE,
            options=ImportOptions(nic_gbps=400, name="mine"),
        ).document
    )
    assert (document.name, document.max_nodes, told["nodes"]) == ("mine", 96, 4)
    assert [level["name"] for level in told["levels"]] == ["nvlink", "leaf"]
    assert told["levels"][0]["bytes_per_s"] == 450e9
    assert told["num_gpus"] == 32


def test_the_document_is_planned_on_as_it_is(client: Client) -> None:
    body = {"node": NODE, "gpu": "H200", "nodes": 1}
    document = client.post("/topologies/import", json=body).json()["document"]
    training = {"global_batch_size": 16, "seq_len": 128, "precision": "bf16"}
    request = plan_request(topology=document, training=training)
    answer = client.post("/plan", json=request)
    assert answer.status_code == 200, answer.text
    assert answer.json()["ranks"]["ranks_per_node"] == 8


def test_remarks_have_their_line(client: Client) -> None:
    text = (SAMPLES / "nvidia-smi-topo" / "pcie-x8-pix-phb-1nic.txt").read_text()
    told = client.post("/topologies/import", json={"node": text, "gpu": "RTX 4090"}).json()
    assert told["remarks"] == ["node, line 3: no row for NIC0: taken from the columns"]


@pytest.mark.parametrize(
    ("body", "status", "where", "said"),
    [
        ({}, 422, "node", "add it"),
        ({"node": ""}, 422, "node", "empty"),
        ({"node": "hello"}, 422, "node", "nvidia-smi topo -m"),
        ({"node": 7}, 422, "node", "got 7"),
        ({"node": "\x00"}, 422, "node", "binary"),
        ({"node": NODE}, 422, "gpu", "--gpu H100"),
        ({"node": NODE, "gpu": "H10"}, 404, "GPU model", "H100"),
        ({"node": NODE, "gpu": "H200", "nodes": 8}, 422, "nic_gbps", "rate"),
        ({"node": NODE, "gpu": "H200", "nodes": 0}, 422, "nodes", "got 0"),
        ({"node": NODE, "gpu": "H200", "layout": "ring"}, 422, "layout", "'rail' or 'tree'"),
        ({"node": NODE, "gpu": "H200", "nodez": 1}, 422, "nodez", "not a known field"),
        ({"node": NODE, "gpu": "H200", "fabric": NODE}, 422, "fabric", "one node"),
        ({"node": TREE, "gpu": "H200"}, 422, "node", "describes a fabric"),
        ({"node": NODE, "gpu": "A100"}, 422, "node", "line 2"),
        ({"node": NODE, "gpu": "L4"}, 422, "node", "line 2"),
        (
            {"node": NODE, "gpu": "H200", "fabric": "SwitchName=a Switches=a"},
            422,
            "fabric",
            "line 1",
        ),
    ],
)
def test_texts_of_no_use_are_told_where_and_what(
    client: Client, body: dict[str, Any], status: int, where: str, said: str
) -> None:
    error = check_error(client.post("/topologies/import", json=body), status)
    assert error["where"] == where
    assert said in error["message"]


def test_a_body_beyond_the_limit_is_refused_and_the_setting_named(make_client: Any) -> None:
    client = make_client(max_body_bytes=10_000)
    answer = client.post("/topologies/import", json={"node": NODE + " " * 10_000, "gpu": "H200"})
    error = check_error(answer, 413)
    assert "COMMPLAN_MAX_BODY_BYTES" in error["message"]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_text_is_an_answer_or_a_message(client: Client, data: st.DataObject) -> None:
    folder = data.draw(st.sampled_from(["nvidia-smi-topo", "rocm-smi-showtopo", "nccl-topo-xml"]))
    files = sorted(path for path in (SAMPLES / folder).glob("*.*") if path.suffix != ".md")
    text = data.draw(st.sampled_from(files)).read_text()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 200))
    junk = data.draw(st.text(max_size=20))
    damaged = (text[:start] + junk + text[start + length :]).encode("utf-8", "replace").decode()
    gpu = data.draw(st.sampled_from(["H100", "A100", "V100", "MI300X", "MI250X", "L4", None]))
    body = {"node": damaged, "gpu": gpu, "nodes": data.draw(st.sampled_from([None, 4]))}
    answer = client.post("/topologies/import", json={**body, "nic_gbps": body["nodes"] and 100})
    if answer.status_code != 200:
        check_error(answer, answer.status_code)
        assert answer.status_code in (404, 422)
