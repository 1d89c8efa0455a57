"""What the lab makes of topology documents."""

from typing import Any

import pytest

from benchmarks.lab import lab_topology, with_nic_rate
from benchmarks.lab.cluster import cluster_of
from benchmarks.lab.documents import LAB_TOPOLOGIES
from planner.errors import InvalidInputError
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument, parse_topology

pytestmark = pytest.mark.lab


def changed(name: str, **fields: Any) -> TopologyDocument:
    """Return a document of the lab with other fields; those of ``network`` and ``node`` merged."""
    document = lab_topology(name).model_dump(mode="json")
    for field, value in fields.items():
        merged = isinstance(value, dict) and isinstance(document[field], dict)
        document[field] = {**document[field], **value} if merged else value
    return parse_topology(document)


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("lab-2x2", {"loopback": 2, "leaf": 4}),
        ("lab-2x4", {"loopback": 4, "leaf": 8}),
        ("lab-4x2", {"loopback": 2, "leaf": 4, "spine": 8}),
        ("loopback", {"loopback": 4}),
    ],
)
def test_the_planner_sees_the_levels_that_are_built(name: str, levels: dict[str, int]) -> None:
    document = lab_topology(name)
    fabric = compile_fabric(document)
    assert {level.name: level.unit_size for level in fabric.levels} == levels
    assert fabric.num_gpus == cluster_of(document).world_size
    if document.network is not None:
        rate = document.network.nic_bandwidth_bytes_per_s / document.gpus_per_node
        assert fabric.levels[1].bytes_per_s == rate


def test_each_lab_topology_is_tested() -> None:
    assert set(LAB_TOPOLOGIES) == {"lab-2x2", "lab-2x4", "lab-4x2", "loopback"}


@pytest.mark.parametrize(
    ("order", "units"),
    [("natural", ((0, 1), (2, 3))), ("interleaved", ((0, 2), (1, 3)))],
)
def test_units_are_the_ranks_of_hosts(order: Any, units: tuple[tuple[int, ...], ...]) -> None:
    cluster = cluster_of(lab_topology("lab-2x2"), order)
    assert cluster.units == units
    assert [cluster.context(rank).local_rank for rank in units[1]] == [0, 1]


def test_another_nic_rate_changes_every_link_in_proportion() -> None:
    before = cluster_of(lab_topology("lab-4x2")).links
    after = cluster_of(with_nic_rate(lab_topology("lab-4x2"), 25e6)).links
    assert [link.bytes_per_s for link in after] == [2 * link.bytes_per_s for link in before]


def test_an_impaired_link_is_built_with_what_it_has_left() -> None:
    weak = changed("lab-2x2", impairments=[{"link": ["n1/nic", "leaf0"], "factor": 0.5}])
    assert [link.bytes_per_s for link in cluster_of(weak).links] == [12.5e6, 6.25e6]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"impairments": [{"part": "n1", "factor": 0.5}]}, "n1=0.5: the lab slows links only"),
        ({"impairments": [{"part": "n1/nic", "factor": 0}]}, "the NIC of host n1 is down"),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        cluster_of(changed("lab-2x2", **fields))


def test_a_host_with_two_nics_is_refused() -> None:
    node = lab_topology("lab-2x2").node.model_dump(mode="json")
    for component in node["components"]:
        component["count"] += component["kind"] == "nic"
    with pytest.raises(InvalidInputError, match="host n0 has 2 NICs; the lab gives each 1"):
        cluster_of(changed("lab-2x2", node=node))


NVSWITCH = {"id": "sw", "kind": "nvswitch"}
SECOND_CPU = {"id": "cpu2", "kind": "cpu"}


def link(kind: str, *between: str) -> dict[str, Any]:
    figures = {"bandwidth_bytes_per_s": 1e9, "latency_s": 0, "source": "chosen"}
    return {"between": between, "kind": kind, "pattern": "all", **figures}


@pytest.mark.parametrize("name", ["lab-2x2", "loopback"])
@pytest.mark.parametrize(
    ("components", "links", "words"),
    [
        ([NVSWITCH], [], "nvswitch sw is not emulated"),
        ([NVSWITCH], [link("nvlink", "rank", "sw")], "nvlink rank-sw is not emulated"),
        ([], [link("loopback", "rank", "rank")], "loopback rank-rank is not emulated"),
        ([SECOND_CPU], [link("smp", "cpu", "cpu2")], "has 2 CPUs; the lab gives each 1"),
    ],
)
def test_what_a_host_of_the_lab_lacks_is_refused_by_name(
    name: str, components: list[Any], links: list[Any], words: str
) -> None:
    node = lab_topology(name).node.model_dump(mode="json")
    node["components"] += components
    node["links"] += links
    with pytest.raises(InvalidInputError, match=f"host n0:? {words}"):
        cluster_of(changed(name, node=node))


def test_processes_joined_as_gpus_are_refused_by_name() -> None:
    node = lab_topology("loopback").node.model_dump(mode="json")
    node["links"][0]["kind"] = "nvlink"
    with pytest.raises(InvalidInputError, match="nvlink rank-cpu is not emulated"):
        cluster_of(changed("loopback", node=node))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"'lab-9x9': no bundled name .* lab-2x2"):
        lab_topology("lab-9x9")


def test_a_rate_needs_a_network() -> None:
    with pytest.raises(InvalidInputError, match="has no network"):
        with_nic_rate(lab_topology("loopback"), 1e6)
