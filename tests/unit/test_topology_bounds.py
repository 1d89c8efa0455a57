"""Bounds equal closed forms, published figures and the enumeration of all cuts, and keep laws."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.topology.bounds import (
    Bound,
    all_gather_bound,
    all_reduce_bound,
    all_to_all_bound,
    broadcast_bound,
    links_of_kinds,
    node_bounds,
    reduce_scatter_bound,
)
from planner.topology.bundled import load_topology
from planner.topology.graph import build_graph, node_graph

GB = 1e9
Cluster = tuple["nx.Graph[str]", list[str]]
Find = Callable[["nx.Graph[str]", Sequence[str]], Bound]

# The bound of all_to_all is over a family of cuts that depends on the graph, so it has fewer laws.
EXACT: list[Find] = [all_gather_bound, reduce_scatter_bound, broadcast_bound, all_reduce_bound]


def cluster(links: dict[tuple[str, str], float]) -> Cluster:
    graph: nx.Graph[str] = nx.Graph()
    for (a, b), gb_per_s in links.items():
        graph.add_edge(a, b, bandwidth_bytes_per_s=gb_per_s * GB)
    return graph, sorted(vertex for vertex in graph if "gpu" in vertex)


def mesh(gb_per_s: dict[tuple[int, int], float]) -> Cluster:
    return cluster({(f"gpu{a:02}", f"gpu{b:02}"): rate for (a, b), rate in gb_per_s.items()})


def counts(matrix: str) -> dict[tuple[int, int], int]:
    """Return the links above the diagonal of a matrix of digits."""
    return {
        (a, b): int(digit)
        for a, row in enumerate(matrix.split())
        for b, digit in enumerate(row)
        if a < b and digit != "0"
    }


def ring(num_gpus: int) -> Cluster:
    return mesh({(i, (i + 1) % num_gpus): 25 for i in range(num_gpus)})


def nvswitch_node(multicast: bool = False) -> Cluster:
    """Eight H100 on four switches, 18 links of 25 GB/s each."""
    per_switch = {0: 5, 1: 4, 2: 4, 3: 5}
    graph, gpus = cluster(
        {(f"gpu{i}", f"switch{j}"): 25 * n for i in range(8) for j, n in per_switch.items()}
    )
    nx.set_node_attributes(graph, {f"switch{j}": multicast for j in per_switch}, "multicast")
    return graph, gpus


def two_nodes() -> Cluster:
    """Two nodes of eight H100; every GPU has a NIC of 50 GB/s, all on one switch."""
    inside = {(f"n{n}/gpu{i}", f"n{n}/nvswitch"): 450.0 for n in (0, 1) for i in range(8)}
    outside = {(f"n{n}/gpu{i}", "leaf"): 50.0 for n in (0, 1) for i in range(8)}
    return cluster(inside | outside)


def spine_2_to_1() -> Cluster:
    """Four nodes of two GPUs, two nodes to a leaf, half of a leaf's 200 GB/s up to the spine."""
    links: dict[tuple[str, str], float] = {}
    for node, gpu in product(range(4), range(2)):
        links[f"n{node}/gpu{gpu}", f"n{node}/nvswitch"] = 450
        links[f"n{node}/gpu{gpu}", f"leaf{node // 2}"] = 50
    return cluster(links | {("leaf0", "spine"): 100, ("leaf1", "spine"): 100})


# How many NVLinks of 25 GB/s join the GPUs of a DGX-1 with V100, as nvidia-smi topo -m shows it.
V100_NVLINKS = """
01122000
10210200
12020010
21200001
20000112
02001021
00101202
00012120
"""
V100_CUBE_MESH = mesh({pair: 25 * count for pair, count in counts(V100_NVLINKS).items()})
MI300X_FULL_MESH = mesh(dict.fromkeys(combinations(range(8), 2), 64))

CLOSED_FORMS = {
    "8 H100 on NVSwitch": (nvswitch_node(), 7 / 8 / 450, 1 / 450, 2 * 7 / 8 / 450, 7 / 8 / 450),
    "8 MI300X": (MI300X_FULL_MESH, 7 / 8 / 448, 1 / 448, 2 * 7 / 8 / 448, 7 / 8 / 448),
    "8 V100": (V100_CUBE_MESH, 7 / 8 / 150, 1 / 150, 2 * 7 / 8 / 150, 4 * 4 / 8 / 150),
    "ring of 8": (ring(8), 7 / 8 / 50, 1 / 50, 2 * 7 / 8 / 50, 4 * 4 / 8 / 50),
    "ring of 3": (ring(3), 2 / 3 / 50, 1 / 50, 2 * 2 / 3 / 50, 2 / 3 / 50),
    "two nodes": (two_nodes(), 15 / 16 / 500, 1 / 400, 2 * 15 / 16 / 500, 8 * 8 / 16 / 400),
    "2:1 spine": (spine_2_to_1(), 6 / 8 / 100, 1 / 100, 2 * 3 / 400, 4 * 4 / 8 / 100),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_bounds_equal_the_closed_forms(name: str) -> None:
    (graph, gpus), gather, broadcast, reduce, exchange = CLOSED_FORMS[name]
    halves = [gpus[: len(gpus) // 2], gpus]
    assert all_gather_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(gather)
    assert reduce_scatter_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(gather)
    assert broadcast_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(broadcast)
    assert all_reduce_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(reduce)
    assert all_to_all_bound(graph, gpus, halves).seconds_per_byte * GB == pytest.approx(exchange)


def a100_nodes(num_nodes: int) -> Cluster:
    """A100 boxes as ForestColl has them: even NICs on one InfiniBand switch, odd on another."""
    links: dict[tuple[str, str], float] = {}
    for node, i in product(range(num_nodes), range(8)):
        links[f"n{node}/gpu{i}", f"n{node}/nvswitch"] = 300
        if num_nodes > 1:
            links[f"n{node}/gpu{i}", f"n{node}/nic{i}"] = 25
            links[f"n{node}/nic{i}", f"ib{i % 2}"] = 25
    return cluster(links)


# xGMI links of 50 GB/s between the 16 dies of a node of MI250, from ForestColl's topologies.py.
MI250_XGMI_LINKS = """
0400200010000000
4000010001100000
0004001001100000
0040000200010000
2000041000000000
0100401100000000
0010110400000000
0002014000000000
1000000004002000
0110000040000100
0110000000040010
0001000000400002
0000000020000410
0000000001004011
0000000000101104
0000000000020140
"""


def mi250_nodes(num_nodes: int) -> Cluster:
    links: dict[tuple[str, str], float] = {}
    for node in range(num_nodes):
        for (a, b), count in counts(MI250_XGMI_LINKS).items():
            links[f"n{node}/gpu{a:02}", f"n{node}/gpu{b:02}"] = 50 * count
        if num_nodes > 1:
            links |= {(f"n{node}/gpu{i:02}", "ib"): 16 for i in range(16)}
    return cluster(links)


@pytest.mark.parametrize(
    ("nodes", "gb_per_s"),
    [
        (a100_nodes(1), 342.85714285714283),
        (a100_nodes(2), 346.6666666666667),
        (a100_nodes(4), 266.6666666666667),
        (mi250_nodes(1), 342.85714285714283),
        (mi250_nodes(2), 354.1333333333333),
    ],
    ids=["8 A100", "16 A100", "32 A100", "16 MI250", "32 MI250"],
)
def test_all_gather_equals_the_optimum_that_forestcoll_prints(
    nodes: Cluster, gb_per_s: float
) -> None:
    """Figures of OptimalBranchingsAlgo.binary_search, liangyuRain/ForestColl at 3c13aee."""
    bound = all_gather_bound(*nodes)
    assert 1 / bound.seconds_per_byte / GB == pytest.approx(gb_per_s, rel=1e-12)


def test_the_bottleneck_is_named() -> None:
    graph, gpus = a100_nodes(4)
    gather = all_gather_bound(graph, gpus)
    assert [len(side) for side in gather.sides] == [24, 8]
    assert len({gpu.split("/")[0] for gpu in gather.sides[1]}) == 1
    assert gather.bytes_per_s == 8 * 25 * GB
    reduce = all_reduce_bound(graph, gpus)
    assert reduce.sides == tuple(tuple(gpus[i : i + 8]) for i in range(0, 32, 8))
    assert reduce.bytes_per_s == 4 * 8 * 25 * GB


def test_an_all_to_all_is_held_up_by_the_unit_it_is_told_of() -> None:
    graph, gpus = spine_2_to_1()
    assert all_to_all_bound(graph, gpus, [gpus[:4]]).sides == (tuple(gpus[:4]), tuple(gpus[4:]))


def test_a_multicast_switch_needs_each_byte_once_in_each_direction() -> None:
    plain, gpus = nvswitch_node()
    helped, _ = nvswitch_node(multicast=True)
    assert all_reduce_bound(helped, gpus).seconds_per_byte == pytest.approx(1 / (450 * GB))
    assert all_gather_bound(helped, gpus) == all_gather_bound(plain, gpus)


def test_switches_that_reduce_inside_nodes_leave_the_bound_between_nodes() -> None:
    graph, gpus = a100_nodes(4)
    plain = all_reduce_bound(graph, gpus)
    nx.set_node_attributes(graph, {f"n{n}/nvswitch": True for n in range(4)}, "multicast")
    assert all_reduce_bound(graph, gpus) == plain
    nx.set_node_attributes(graph, {"ib0": True, "ib1": True}, "multicast")
    assert all_reduce_bound(graph, gpus).seconds_per_byte == pytest.approx(1 / (200 * GB))


def test_the_gpus_of_a_switch_that_reduces_are_one_part() -> None:
    """A GPU has less to leave by than its node, but no more than S to send."""
    links: dict[tuple[str, str], float] = {}
    for node, i in product(range(3), range(8)):
        links[f"n{node}/gpu{i}", f"n{node}/nvswitch"] = 100
        links[f"n{node}/gpu{i}", "leaf"] = 50
    graph, gpus = cluster(links)
    nx.set_node_attributes(graph, {f"n{n}/nvswitch": True for n in range(3)}, "multicast")
    assert all_reduce_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(1 / 150)


def test_two_passes_are_no_lower_bound_where_one_gpu_is_slow() -> None:
    """Three fast GPUs sum first; S in and out of the slow one is all that it needs."""
    graph, gpus = cluster({(f"gpu{i}", "switch"): 10 if i == 0 else 1000 for i in range(4)})
    assert all_reduce_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(1 / 10)
    assert all_gather_bound(graph, gpus).seconds_per_byte * GB == pytest.approx(3 / 4 / 10)


def test_a_bundled_node_has_its_data_sheets_bound() -> None:
    document = load_topology("dgx-h100")
    graph = links_of_kinds(node_graph(document), ("nvlink",))
    bound = all_gather_bound(graph, document.node.workers())
    assert bound.seconds_per_byte == pytest.approx(7 / 8 / (450 * GB))
    nodes = build_graph(document, 2)
    gpus = [vertex for vertex, data in nodes.nodes.items() if data["kind"] == "gpu"]
    links = links_of_kinds(nodes, ("nvlink", "pcie", "infiniband"))
    assert broadcast_bound(links, gpus).seconds_per_byte == pytest.approx(1 / (400 * GB))


# ----------------------------------------------------------------------- against enumeration


@st.composite
def clusters(draw: st.DrawFn, max_gpus: int = 6, max_switches: int = 3) -> Cluster:
    """Connected graphs with bandwidths of all kinds."""
    gpus = [f"gpu{i}" for i in range(draw(st.integers(2, max_gpus)))]
    switches = [f"switch{i}" for i in range(draw(st.integers(0, max_switches)))]
    vertices = draw(st.permutations(gpus + switches))
    bandwidth = st.one_of(st.integers(1, 8).map(float), st.floats(0.1, 100))
    links = {
        (vertex, vertices[draw(st.integers(0, i - 1))]): draw(bandwidth)
        for i, vertex in enumerate(vertices)
        if i
    }
    for a, b in combinations(vertices, 2):
        if (b, a) not in links and draw(st.booleans()):
            links[a, b] = draw(bandwidth)
    return cluster(links)[0], gpus


def leaving(graph: "nx.Graph[str]", side: frozenset[str]) -> float:
    return sum(
        link["bandwidth_bytes_per_s"]
        for a, b, link in graph.edges(data=True)
        if (a in side) != (b in side)
    )


def all_cuts(graph: "nx.Graph[str]", gpus: list[str]) -> Iterator[tuple[int, float]]:
    """Yield GPUs inside and bytes/s out of every set of vertices that parts the GPUs."""
    vertices = sorted(graph)
    subsets = chain.from_iterable(combinations(vertices, size) for size in range(len(vertices)))
    for side in map(frozenset, subsets):
        inside = len(side & set(gpus))
        if 0 < inside < len(gpus):
            yield inside, leaving(graph, side)


@settings(max_examples=60, deadline=None)
@given(clusters(max_gpus=8))
def test_cuts_are_the_worst_of_all_cuts(case: Cluster) -> None:
    graph, gpus = case
    n, cuts = len(gpus), list(all_cuts(*case))
    gather, broadcast = all_gather_bound(*case), broadcast_bound(*case)
    assert gather.seconds_per_byte == pytest.approx(max(k / n / b for k, b in cuts), rel=1e-9)
    assert broadcast.seconds_per_byte == pytest.approx(max(1 / b for _, b in cuts), rel=1e-9)
    worst = max(k * (n - k) / n / b for k, b in cuts)
    exchange = all_to_all_bound(graph, gpus).seconds_per_byte
    assert broadcast.seconds_per_byte * (n - 1) / n <= exchange * (1 + 1e-9)
    assert exchange <= worst * (1 + 1e-9)


def partitions(gpus: list[str]) -> Iterator[list[frozenset[str]]]:
    if not gpus:
        yield []
        return
    for parts in partitions(gpus[1:]):
        yield [*parts, frozenset(gpus[:1])]
        for part in parts:
            yield [part | {gpus[0]}, *(other for other in parts if other != part)]


def worst_of_all_partitions(graph: "nx.Graph[str]", gpus: list[str]) -> float:
    """Every switch stands in a part or, unless it reduces, in none."""
    switches = sorted(set(graph) - set(gpus))
    worst = 0.0
    for parts in partitions(gpus):
        places = [
            range(len(parts) + (not graph.nodes[switch].get("multicast", False)))
            for switch in switches
        ]
        for placed in product(*places) if len(parts) > 1 else ():
            full = [
                part | {s for s, place in zip(switches, placed, strict=True) if place == index}
                for index, part in enumerate(parts)
            ]
            out = sum(leaving(graph, side) for side in full)
            worst = max(worst, 2 * (len(parts) - 1) / out)
    return worst


@settings(max_examples=35, deadline=None)
@given(clusters(max_gpus=5, max_switches=2))
def test_an_all_reduce_is_held_up_by_the_worst_of_all_partitions(case: Cluster) -> None:
    found = all_reduce_bound(*case).seconds_per_byte
    assert found == pytest.approx(worst_of_all_partitions(*case), rel=1e-9)


@settings(max_examples=35, deadline=None)
@given(clusters(max_gpus=5, max_switches=2), st.integers(0, 3))
def test_help_of_switches_is_never_underrated(case: Cluster, helping: int) -> None:
    """The bound stays one when switches reduce, and never falls below the least cut's."""
    graph, gpus = case
    plain = all_reduce_bound(graph, gpus).seconds_per_byte
    for index, switch in enumerate(sorted(set(graph) - set(gpus))):
        graph.nodes[switch]["multicast"] = bool(helping >> index & 1)
    found = all_reduce_bound(graph, gpus).seconds_per_byte
    assert found <= plain
    assert found <= worst_of_all_partitions(graph, gpus) * (1 + 1e-9)
    assert found >= broadcast_bound(graph, gpus).seconds_per_byte


# -------------------------------------------------------------------------------------- laws


@settings(max_examples=35, deadline=None)
@given(clusters())
def test_twice_the_bandwidth_is_half_the_time(case: Cluster) -> None:
    graph, gpus = case
    fast = graph.copy()
    for _, _, link in fast.edges(data=True):
        link["bandwidth_bytes_per_s"] *= 2
    for find in (*EXACT, all_to_all_bound):
        assert find(fast, gpus).seconds_per_byte == find(graph, gpus).seconds_per_byte / 2


@settings(max_examples=35, deadline=None)
@given(clusters(), st.randoms(use_true_random=False), st.booleans())
def test_one_more_link_never_raises_a_bound(
    case: Cluster, chance: random.Random, multicast: bool
) -> None:
    graph, gpus = case
    nx.set_node_attributes(graph, {v: multicast for v in graph if v == "switch0"}, "multicast")
    before = [find(graph, gpus).seconds_per_byte for find in EXACT]
    a, b = chance.sample(sorted(graph), 2)
    old = graph.get_edge_data(a, b, default={"bandwidth_bytes_per_s": 0.0})
    graph.add_edge(a, b, bandwidth_bytes_per_s=old["bandwidth_bytes_per_s"] + 3 * GB)
    after = [find(graph, gpus).seconds_per_byte for find in EXACT]
    assert all(new <= old for new, old in zip(after, before, strict=True))


@settings(max_examples=35, deadline=None)
@given(clusters(), st.randoms(use_true_random=False))
def test_names_and_order_change_nothing(case: Cluster, chance: random.Random) -> None:
    graph, gpus = case
    names = [f"x{i}" for i in range(len(graph))]
    chance.shuffle(names)
    renamed = nx.relabel_nodes(graph, dict(zip(graph, names, strict=True)))
    workers = [names[list(graph).index(gpu)] for gpu in gpus]
    chance.shuffle(workers)
    for find in EXACT:
        assert find(renamed, workers).seconds_per_byte == find(graph, gpus).seconds_per_byte


@settings(max_examples=35, deadline=None)
@given(clusters())
def test_an_all_reduce_takes_one_to_two_all_gathers(case: Cluster) -> None:
    """One contains what a gather moves; two passes are a way to do the other."""
    one = all_gather_bound(*case).seconds_per_byte
    assert one * (1 - 1e-12) <= all_reduce_bound(*case).seconds_per_byte <= 2 * one * (1 + 1e-12)


def test_a_group_of_one_costs_nothing() -> None:
    graph, gpus = ring(4)
    for find in (*EXACT, all_to_all_bound):
        assert find(graph, gpus[:1]) == Bound(seconds_per_byte=0.0, sides=(), bytes_per_s=0.0)


def test_gpus_outside_the_group_forward() -> None:
    graph, gpus = ring(4)
    assert broadcast_bound(graph, [gpus[0], gpus[2]]).bytes_per_s == 50 * GB


# ------------------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ([], "0 workers is empty"),
        (["gpu00", "gpu00"], "gpu00 twice"),
        (["gpu00", "gpu99"], "gpu99, not in the graph"),
        (["gpu00", "alone"], "leads from gpu00 to alone"),
    ],
)
def test_workers_that_cannot_be_a_group_are_refused(workers: list[str], says: str) -> None:
    graph, _ = ring(4)
    graph.add_node("alone")
    for find in (*EXACT, all_to_all_bound):
        with pytest.raises(InvalidInputError, match=says):
            find(graph, workers)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan, None])
def test_a_link_without_bandwidth_is_refused(bandwidth: float | None) -> None:
    graph, gpus = ring(4)
    attributes = {} if bandwidth is None else {"bandwidth_bytes_per_s": bandwidth}
    graph.remove_edge("gpu00", "gpu01")
    graph.add_edge("gpu00", "gpu01", **attributes)
    with pytest.raises(InvalidInputError, match="gpu00->gpu01: bandwidth_bytes_per_s"):
        all_gather_bound(graph, gpus)


def test_a_unit_of_others_is_refused() -> None:
    graph, gpus = ring(4)
    with pytest.raises(InvalidInputError, match="gpu03, which is none of the 3 workers"):
        all_to_all_bound(graph, gpus[:3], [gpus[2:]])


@pytest.mark.parametrize(
    ("name", "gather", "reduce"),
    [
        ("dgx-h100", 450 * 8 / 7, 450),  # switches that reduce
        ("dgx-a100", 300 * 8 / 7, 300 * 4 / 7),
        ("mi300x-8x400-roce", 448 * 8 / 7, 448 * 4 / 7),
        ("rtx-pro-6000-x8", 63 * 8 / 7, 63 * 4 / 7),  # of its own slot each
    ],
)
def test_bounds_of_a_node_are_over_what_one_communicator_uses(
    name: str, gather: float, reduce: float
) -> None:
    found = node_bounds(load_topology(name))
    assert 1e-9 / found["all_gather"].seconds_per_byte == pytest.approx(gather)
    assert 1e-9 / found["all_reduce"].seconds_per_byte == pytest.approx(reduce)


@pytest.mark.parametrize("name", ["local-gloo", "a40-x1-ib"])
def test_a_node_without_several_gpus_has_no_bounds(name: str) -> None:
    assert node_bounds(load_topology(name)) == {}
