"""The graph has every part and every link, and no tier loses or makes capacity."""

from collections import Counter
from typing import Any

import networkx as nx
import pytest

from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology, topology_names
from planner.topology.document import TopologyDocument
from planner.topology.graph import build_graph, node_graph


def uplink_bytes_per_s(graph: "nx.Graph[str]", lower: set[str], upper: set[str]) -> float:
    return sum(
        edge["bandwidth_bytes_per_s"]
        for a, b, edge in graph.edges(data=True)
        if {a, b} & lower and {a, b} & upper
    )


def members(graph: "nx.Graph[str]", **wanted: Any) -> set[str]:
    return {
        name
        for name, data in graph.nodes.items()
        if all(data.get(key) == value for key, value in wanted.items())
    }


@pytest.mark.parametrize("name", topology_names())
def test_every_part_and_every_link_is_there(name: str) -> None:
    document = load_topology(name)
    nodes = min(3, document.max_nodes)
    graph = build_graph(document, nodes)
    kinds = Counter(data["kind"] for _, data in graph.nodes(data=True))
    for component in document.node.components:
        assert kinds[component.kind] >= nodes * component.count
    assert kinds["gpu"] + kinds["process"] == nodes * document.gpus_per_node
    assert nx.is_connected(graph)
    for _, _, edge in graph.edges(data=True):
        assert edge["bandwidth_bytes_per_s"] > 0
        assert edge["latency_s"] >= 0


def test_a_dgx_h100_gpu_has_18_nvlinks() -> None:
    graph = node_graph(load_topology("dgx-h100"))
    for gpu in members(graph, kind="gpu"):
        links = [edge for _, _, edge in graph.edges(gpu, data=True) if edge["kind"] == "nvlink"]
        assert sum(edge["bandwidth_bytes_per_s"] for edge in links) == 18 * 25e9


def test_rails_have_their_own_leaves() -> None:
    graph = build_graph(load_topology("dgx-h100"), 64)
    leaves = members(graph, tier="rail")
    assert leaves == {f"rail{unit}/rail{rail}" for unit in (0, 1) for rail in range(8)}
    assert graph.degree("rail0/rail3") == 32 + 1
    assert graph.has_edge("n40/nic3", "rail1/rail3")
    assert members(graph, tier="spine") == {"spine0"}


def oversubscribed(document: TopologyDocument, *factors: float) -> TopologyDocument:
    assert document.network is not None
    tiers = tuple(
        tier.model_copy(update={"oversubscription": factor})
        for tier, factor in zip(document.network.tiers, factors, strict=True)
    )
    return document.model_copy(
        update={"network": document.network.model_copy(update={"tiers": tiers})}
    )


@pytest.mark.parametrize("factors", [(1, 1, 1), (1, 2, 4)])
@pytest.mark.parametrize("nodes", [33, 300])
def test_capacity_is_conserved_up_to_oversubscription(factors: Any, nodes: int) -> None:
    graph = build_graph(oversubscribed(load_topology("dgx-h100"), *factors), nodes)
    lower, carried = members(graph, kind="nic"), nodes * 8 * 50e9
    for tier, factor in zip(("rail", "spine", "core"), factors, strict=True):
        upper = members(graph, tier=tier)
        carried /= factor
        assert uplink_bytes_per_s(graph, lower, upper) == pytest.approx(carried)
        lower = upper


def test_trays_of_one_rack_share_its_switches_and_racks_do_not() -> None:
    graph = build_graph(load_topology("gb200-nvl72"), 20)
    switches = members(graph, kind="nvswitch")
    assert len(switches) == 2 * 18
    assert graph.degree("domain0/nvswitch0") == 72
    assert graph.degree("domain1/nvswitch0") == 8
    gpu = [edge for _, _, edge in graph.edges("n19/gpu3", data=True) if edge["kind"] == "nvlink"]
    assert sum(edge["bandwidth_bytes_per_s"] for edge in gpu) == 900e9


def test_a_single_node_has_no_network() -> None:
    assert not members(build_graph(load_topology("dgx-h100"), 1), kind="switch")


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="from 1 to 4096"):
        build_graph(load_topology("dgx-h100"), 5000)


def test_the_largest_dgx_h100_has_all_its_parts() -> None:
    graph = build_graph(load_topology("dgx-h100"), 4096)
    switches = 4096 // 32 * 8 + 4096 // 256 + 1
    assert graph.number_of_nodes() == 4096 * 26 + switches
