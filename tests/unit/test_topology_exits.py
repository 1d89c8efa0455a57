"""The way out of a node: closed forms, and linear programs that know every path of a message.

The exact program lets sends and receives share a link as they like. Ours gives each half of a
link below which both a GPU and a NIC hang, and is otherwise exact: it is never above the exact
program, and equal to the one that halves.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import networkx as nx
import numpy as np
import pytest
from scipy.optimize import linprog

from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import Impairment, TopologyDocument
from planner.topology.exits import Exit, nic_exit
from planner.topology.graph import node_graph
from planner.topology.impair import degraded
from tests.unit.clusters import cluster, link, network, part

GpuDirect = Literal["off", "pxb", "phb"]


def way_out(document: TopologyDocument) -> Exit:
    assert document.network is not None
    graph = node_graph(document)
    return nic_exit(graph, document.node.workers(), document.network.gpudirect)


def rates(document: TopologyDocument) -> tuple[float, float]:
    found = way_out(document)
    return found.bytes_per_s, found.direct_bytes_per_s


# ------------------------------------------------------------------------- machines with names


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "direct_bytes_per_s", "path"),
    [
        ("dgx-h100", 50e9, 50e9, "gpudirect"),
        ("gb200-nvl72", 50e9, 50e9, "gpudirect"),
        ("frontier", 12.5e9, 12.5e9, "gpudirect"),  # a NIC of 25 behind each pair of dies
        ("gh200-x4-slingshot", 25e9, 25e9, "gpudirect"),  # C2C is coherent: the NIC reads over it
        ("azure-nd-mi300x-v5", 50e9, 50e9, "gpudirect"),
        ("dgx1-v100", 6.25e9, 6.25e9, "gpudirect"),  # four NICs of 12.5 for eight GPUs
    ],
)
def test_machines_leave_by_their_nics(
    name: str, bytes_per_s: float, direct_bytes_per_s: float, path: str
) -> None:
    found = way_out(load_topology(name))
    assert found.bytes_per_s == pytest.approx(bytes_per_s)
    assert found.direct_bytes_per_s == pytest.approx(direct_bytes_per_s)
    assert found.path == path


# --------------------------------------------------------------------------------- closed forms

NVSWITCH = part("nvswitch", "nvswitch")
NVLINK = link("gpu", "nvswitch", "nvlink", 300e9)


def box(
    *more: dict[str, Any],
    gpudirect: GpuDirect = "pxb",
    nvlink: bool = True,
    nics: int = 8,
    nic_links: list[dict[str, Any]] | None = None,
    nic_bytes_per_s: float = 50e9,
    uplink_bytes_per_s: float = 60e9,
) -> TopologyDocument:
    """Return two nodes of 8 GPUs on 4 PCIe switches under 2 CPUs."""
    parts = [
        part("gpu", "gpu", 8),
        part("pcie", "pcie_switch", 4),
        part("cpu", "cpu", 2),
        part("nic", "nic", nics),
        *([NVSWITCH] if nvlink else []),
    ]
    links = [
        link("gpu", "pcie", "pcie", 60e9),
        link("pcie", "cpu", "pcie", uplink_bytes_per_s),
        link("cpu", "cpu", "smp", 20e9, pattern="all"),
        *(nic_links or [link("nic", "pcie", "pcie", 60e9)]),
        *([NVLINK] if nvlink else []),
        *more,
    ]
    return cluster(parts, links, 2, network=network(nic_bytes_per_s, gpudirect=gpudirect))


def test_gpudirect_off_stages_over_an_uplink_that_both_ways_share() -> None:
    """60 GB/s up to the CPU serve two GPUs sending and two NICs fetching: 15 for each GPU."""
    found = way_out(box(gpudirect="off"))
    assert found.path == "staged"
    assert found.bytes_per_s == pytest.approx(60e9 / 2 / 2)
    assert found.direct_bytes_per_s == pytest.approx(60e9 / 2 / 2)
    assert way_out(box()).path == "gpudirect"
    assert rates(box()) == pytest.approx((50e9, 50e9))


def test_a_nic_for_two_gpus_gives_each_half() -> None:
    assert rates(box(nics=4)) == pytest.approx((25e9, 25e9))
    assert rates(box(nics=4, nvlink=False)) == pytest.approx((25e9, 25e9))


NEAR_ONE_SOCKET = [link(f"nic{i}", f"pcie{i // 2}", "pcie", 60e9) for i in range(4)]


def test_nvlink_carries_to_the_nics_of_the_other_socket() -> None:
    found = way_out(box(nics=4, nic_links=NEAR_ONE_SOCKET))
    assert found.bytes_per_s == found.direct_bytes_per_s == pytest.approx(4 * 50e9 / 8)
    assert found.path == "gpudirect"


def test_without_nvlink_the_far_socket_is_staged_over_the_link_between_sockets() -> None:
    """Rings leave by the near GPUs; in an all-to-all four far GPUs share 20 GB/s."""
    found = way_out(box(nics=4, nic_links=NEAR_ONE_SOCKET, nvlink=False))
    assert found.bytes_per_s == pytest.approx(4 * 50e9 / 8)
    assert found.direct_bytes_per_s == pytest.approx(20e9 / 4)
    assert found.path == "gpudirect"


def test_the_level_has_the_share_of_the_node_that_is_worst_off() -> None:
    document = box(nics=4, nic_links=NEAR_ONE_SOCKET, nvlink=False)
    rail = compile_fabric(document).levels[-1]
    assert rail.direct_share * rail.bytes_per_s == pytest.approx(5e9)
    for node in range(2):
        weak = Impairment(link=(f"n{node}/cpu0", f"n{node}/cpu1"), factor=0.5)
        rail = compile_fabric(degraded(document, [weak])).levels[-1]
        assert rail.bytes_per_s == pytest.approx(25e9)
        assert rail.direct_share * rail.bytes_per_s == pytest.approx(2.5e9)


def test_xgmi_does_not_forward_to_a_nic() -> None:
    mesh = link("gpu", "gpu", "xgmi", 64e9, pattern="all")
    nics = [link("nic", "pcie0", "pcie", 60e9)]
    with_mesh = box(mesh, nics=1, nic_links=nics, nvlink=False)
    assert rates(with_mesh) == rates(box(nics=1, nic_links=nics, nvlink=False))
    assert way_out(with_mesh).direct_bytes_per_s == pytest.approx(20e9 / 4)
    assert way_out(with_mesh).bytes_per_s == pytest.approx(50e9 / 8)


def test_xgmi_to_a_cpu_carries_nothing_to_a_nic_as_it_carries_nothing_between_gpus() -> None:
    parts = [part("gpu", "gpu", 2), part("cpu", "cpu"), part("nic", "nic")]
    links = [
        link("gpu", "gpu", "xgmi", 50e9, pattern="all"),
        link("gpu0", "cpu", "pcie", 30e9),
        link("gpu1", "cpu", "xgmi", 30e9),
        link("nic", "cpu", "pcie", 30e9),
    ]
    found = way_out(cluster(parts, links, 2, network=network(20e9, gpudirect="phb")))
    assert (found.bytes_per_s, found.direct_bytes_per_s) == (10e9, 0)


def test_a_nic_passes_nothing_on_to_what_hangs_behind_it() -> None:
    parts = [
        part("gpu", "gpu"),
        part("cpu", "cpu"),
        part("pcie", "pcie_switch"),
        part("nic", "nic", 2),
    ]
    links = [
        link("gpu", "cpu", "pcie", 60e9),
        link("nic0", "cpu", "pcie", 60e9),
        link("nic0", "pcie", "pcie", 60e9),
        link("nic1", "pcie", "pcie", 60e9),
    ]
    assert rates(cluster(parts, links, 2, network=network(20e9))) == (20e9, 20e9)


ON_CPUS = [part("gpu", "gpu", 2), part("cpu", "cpu", 2), part("nic", "nic")]


def on_cpus(gpudirect: GpuDirect, nic_at: str = "cpu0") -> TopologyDocument:
    """Return two nodes of two GPUs, each on a CPU of its own, and one NIC."""
    links = [
        link("gpu", "cpu", "pcie", 30e9),
        link("nic", nic_at, "pcie", 30e9),
        link("cpu", "cpu", "smp", 4e9, pattern="all"),
    ]
    return cluster(ON_CPUS, links, 2, network=network(20e9, gpudirect=gpudirect))


@pytest.mark.parametrize(
    ("gpudirect", "path"), [("off", "staged"), ("pxb", "staged"), ("phb", "gpudirect")]
)
def test_a_nic_on_the_cpu_reads_gpu_memory_only_where_the_document_says_so(
    gpudirect: GpuDirect, path: str
) -> None:
    found = way_out(on_cpus(gpudirect))
    assert found.path == path
    assert found.bytes_per_s == pytest.approx(20e9 / 2)
    assert found.direct_bytes_per_s == pytest.approx(4e9)  # the far GPU, always staged


def test_nics_behind_the_gpus_are_staged_over_the_link_to_the_cpu_twice() -> None:
    """Two dies share a NIC of 25; 20 GB/s to the CPU carry each die's own and what NICs fetch."""
    parts = [part("gpu", "gpu", 2), part("cpu", "cpu"), part("nic", "nic")]
    links = [link("gpu", "cpu", "c2c", 20e9), link("gpu", "nic", "pcie", 30e9)]

    def frontier_like(gpudirect: GpuDirect) -> TopologyDocument:
        return cluster(parts, links, 2, network=network(25e9, gpudirect=gpudirect))

    assert rates(frontier_like("pxb")) == pytest.approx((12.5e9, 12.5e9))
    assert way_out(frontier_like("pxb")).path == "gpudirect"
    assert rates(frontier_like("off")) == pytest.approx((10e9, 10e9))
    assert way_out(frontier_like("off")).path == "staged"


def test_grace_is_read_over_c2c_and_pcie_is_not() -> None:
    parts = [part("gpu", "gpu"), part("cpu", "cpu"), part("nic", "nic")]
    for kind, path in (("c2c", "gpudirect"), ("pcie", "staged")):
        links = [link("gpu", "cpu", kind, 400e9), link("nic", "cpu", "pcie", 60e9)]
        found = way_out(cluster(parts, links, 2, network=network(50e9)))
        assert (found.bytes_per_s, found.path) == (50e9, path)


def test_what_a_nic_reads_and_what_is_staged_share_its_link() -> None:
    """One GPU beside the NIC, one on the CPU: 30 GB/s of PCIe, though the NIC has 50."""
    parts = [
        part("gpu", "gpu", 2),
        part("pcie", "pcie_switch"),
        part("cpu", "cpu"),
        part("nic", "nic"),
    ]
    links = [
        link("gpu0", "pcie", "pcie", 60e9),
        link("gpu1", "cpu", "pcie", 60e9),
        link("pcie", "cpu", "pcie", 120e9),
        link("nic", "pcie", "pcie", 30e9),
    ]
    found = way_out(cluster(parts, links, 2, network=network(50e9)))
    assert found.bytes_per_s == pytest.approx(30e9 / 2)
    assert found.direct_bytes_per_s == pytest.approx(30e9 / 2)
    assert found.path == "gpudirect"


def test_a_path_is_mixed_where_one_nic_reads_and_another_does_not() -> None:
    nics = [link("nic0", "pcie0", "pcie", 60e9), link("nic1", "cpu1", "pcie", 60e9)]
    assert way_out(box(nics=2, nic_links=nics)).path == "mixed"


def test_a_weak_nic_decides_for_all_and_a_dead_one_is_left_out() -> None:
    healthy = box()
    for ends in (("n0/nic3", "n0/pcie1"), ("n0/nic3", "leaf0")):
        weak = degraded(healthy, [Impairment(link=ends, factor=0.25)])
        full = 60e9 if ends[1] == "n0/pcie1" else 50e9
        assert compile_fabric(weak).levels[1].bytes_per_s == pytest.approx(full / 4)
        dead = degraded(healthy, [Impairment(link=ends, factor=0)])
        assert compile_fabric(dead).levels[1].bytes_per_s == pytest.approx(7 * 50e9 / 8)


def test_names_of_parts_mean_nothing() -> None:
    parts = [part("gpu", "gpu", 2), part("pcie", "pcie_switch"), part("nic", "nic")]
    for name in ("nic", "sink", "source", "staged", "down", "port"):
        links = [link("gpu", "pcie", "pcie", 30e9), link(name, "pcie", "pcie", 30e9)]
        named = [*parts[:2], part(name, "nic")]
        found = way_out(cluster(named, links, 2, network=network(20e9)))
        assert found == replace(found, bytes_per_s=10e9, direct_bytes_per_s=10e9), name
        assert found.path == "gpudirect", name


def test_the_gpu_farthest_from_its_nearest_nic_sets_the_latency() -> None:
    assert way_out(box()).alpha_s == pytest.approx(2e-6)
    # gpu, switch, cpu, cpu, switch, nic: five links; by NVLink two and then two
    far: dict[str, Any] = {"nics": 4, "nic_links": NEAR_ONE_SOCKET}
    assert way_out(box(**far, nvlink=False)).alpha_s == pytest.approx(5e-6)
    assert way_out(box(**far)).alpha_s == pytest.approx(4e-6)


def test_processes_leave_through_the_cpu() -> None:
    parts = [part("rank", "process", 4), part("cpu", "cpu"), part("nic", "nic")]
    links = [link("rank", "cpu", "loopback", 2e9), link("cpu", "nic", "pcie", 10e9)]
    node = {"components": parts, "links": links, "source": "made up", "cores": 8}
    document = cluster(parts, links, 2, node=node, library="gloo", network=network(3e9))
    assert rates(document) == pytest.approx((0.75e9, 0.75e9))
    assert way_out(document).path == "peer"


# --------------------------------------------------------------------------- no way out at all


def lonely_die(num_nodes: int) -> TopologyDocument:
    """Return nodes of two dies, of which only the first is on PCIe."""
    parts = [part("gpu", "gpu", 2), part("pcie", "pcie_switch"), part("nic", "nic")]
    links = [
        link("gpu0", "gpu1", "xgmi", 50e9),
        link("gpu0", "pcie", "pcie", 30e9),
        link("nic", "pcie", "pcie", 30e9),
    ]
    return cluster(parts, links, num_nodes, network=network(25e9))


def test_a_gpu_that_reaches_no_nic_is_refused_where_it_would_need_one() -> None:
    assert way_out(lonely_die(2)).direct_bytes_per_s == 0
    with pytest.raises(InvalidInputError, match="a GPU of n0 reaches no NIC that is up"):
        compile_fabric(lonely_die(2))
    assert len(compile_fabric(lonely_die(2), 1).levels) == 1


@pytest.mark.parametrize("nic_bytes_per_s", [3.3e9, 12.3e9, 12.5e9, 19e9])
def test_a_gpu_without_a_way_sends_nothing_and_not_a_rounding_error(nic_bytes_per_s: float) -> None:
    for count in (4, 8, 16):
        parts = [
            part("gpu", "gpu", count),
            part("die", "gpu"),
            part("pcie", "pcie_switch"),
            part("nic", "nic"),
        ]
        links = [
            link("gpu", "pcie", "pcie", 30e9),
            link("nic", "pcie", "pcie", 30e9),
            link("gpu0", "die", "xgmi", 50e9),
        ]
        document = cluster(parts, links, 2, network=network(nic_bytes_per_s))
        assert way_out(document).direct_bytes_per_s == 0
        assert way_out(document).bytes_per_s == pytest.approx(nic_bytes_per_s / (count + 1))


def test_a_node_without_a_nic_that_is_up_works_alone_only() -> None:
    document = degraded(box(), [Impairment(part=f"n1/nic{i}", factor=0) for i in range(8)])
    with pytest.raises(InvalidInputError, match="n1 has no NIC that is up"):
        compile_fabric(document)
    assert compile_fabric(document, [1]).num_gpus == 8
    assert compile_fabric(document, [0]).num_gpus == 8


def test_a_nic_that_no_gpu_reaches_is_not_counted() -> None:
    """Its PCIe link is down, its cable up: the library does not see it."""
    document = degraded(box(nics=4), [Impairment(link=("n0/nic0", "n0/pcie0"), factor=0)])
    assert compile_fabric(document).levels[1].bytes_per_s == pytest.approx(3 * 50e9 / 8)


# ----------------------------------------------------------- linear programs over every path


@dataclass
class Node:
    """A random node: a tree below each CPU, NVLink between all GPUs or none."""

    graph: "nx.Graph[str]" = field(default_factory=nx.Graph)
    gpus: list[str] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    gpudirect: GpuDirect = "pxb"


def random_node(seed: int) -> Node:
    rng = random.Random(seed)
    node = Node(gpudirect=rng.choice(("off", "pxb", "phb")))
    graph = node.graph
    cpus = [f"cpu{i}" for i in range(rng.choice((1, 1, 2)))]
    graph.add_nodes_from(cpus, kind="cpu")
    if len(cpus) == 2:
        join(node, cpus[0], cpus[1], "smp", rng)
    hubs = list(cpus)
    for i in range(rng.choice((0, 1, 2, 3))):
        graph.add_node(f"switch{i}", kind="pcie_switch")
        join(node, rng.choice(hubs), f"switch{i}", "pcie", rng)
        hubs.append(f"switch{i}")
    for i in range(rng.choice((1, 2, 3, 4))):
        node.gpus.append(f"gpu{i}")
        graph.add_node(f"gpu{i}", kind="gpu")
        at = rng.choice(hubs)
        coherent = at in cpus and rng.random() < 0.25
        join(node, at, f"gpu{i}", "c2c" if coherent else "pcie", rng)
    for i in range(rng.choice((1, 2, 3))):
        node.nics.append(f"nic{i}")
        graph.add_node(f"nic{i}", kind="nic", bytes_per_s=1e9 * rng.choice((4, 8, 16)))
        at = rng.choice(node.gpus if rng.random() < 0.15 else hubs)
        join(node, at, f"nic{i}", "pcie", rng)
    if rng.random() < 0.4:
        for i, gpu in enumerate(node.gpus):
            for other in node.gpus[:i]:
                graph.add_edge(
                    gpu, other, kind="nvlink", bandwidth_bytes_per_s=1e12, latency_s=1e-6
                )
    return node


def join(node: Node, a: str, b: str, kind: str, rng: random.Random) -> None:
    rate = 1e9 * rng.choice((2, 4, 8, 16, 32))
    node.graph.add_edge(a, b, kind=kind, bandwidth_bytes_per_s=rate, latency_s=1e-6)


def routes(node: Node, gpu: str, nic: str) -> list[list[tuple[str, str]]]:
    """Return every way from a GPU to a NIC, each as the directed links it takes."""
    graph = node.graph
    host = nx.Graph(
        (a, b) for a, b, e in graph.edges(data=True) if e["kind"] not in ("nvlink", "smp")
    )
    joined = [other for other in node.gpus if graph.get_edge_data(gpu, other)]
    starts: list[tuple[str, list[tuple[str, str]]]] = [(gpu, [])]
    starts += [(other, [(gpu, other)]) for other in joined]
    found: list[list[tuple[str, str]]] = []
    for start, before in starts:
        if nx.has_path(host, start, nic):
            path = nx.shortest_path(host, start, nic)
            if read_by_nic(node, path):
                found.append(before + list(pairwise(path)))
        cpu, other = root(node, host, start), root(node, host, nic)
        hops = [nx.shortest_path(host, start, cpu), nx.shortest_path(host, other, nic)]
        between = [(cpu, other)] if cpu != other else []
        up, down = (list(pairwise(path)) for path in hops)
        found.append(before + up + between + down)
    return found


def root(node: Node, host: "nx.Graph[str]", name: str) -> str:
    return next(
        n for n in nx.node_connected_component(host, name) if node.graph.nodes[n]["kind"] == "cpu"
    )


def read_by_nic(node: Node, path: list[str]) -> bool:
    cpus = [name for name in path if node.graph.nodes[name]["kind"] == "cpu"]
    coherent = any(e["kind"] == "c2c" for cpu in cpus for e in node.graph[cpu].values())
    return node.gpudirect != "off" and (not cpus or node.gpudirect == "phb" or coherent)


def halved(node: Node) -> set[frozenset[str]]:
    """Return the links whose removal cuts a GPU and a NIC off from every CPU."""
    host = nx.Graph(
        (a, b) for a, b, e in node.graph.edges(data=True) if e["kind"] not in ("nvlink", "smp")
    )
    found = set()
    for a, b in list(host.edges):
        host.remove_edge(a, b)
        for end in (a, b):
            kinds = {node.graph.nodes[n]["kind"] for n in nx.node_connected_component(host, end)}
            if "cpu" not in kinds and {"gpu", "nic"} <= kinds:
                found.add(frozenset((a, b)))
        host.add_edge(a, b)
    return found


def program(node: Node, *, halves: bool) -> tuple[float, float]:
    """Return what a ring and an all-to-all bring out per GPU.

    Receives mirror sends, so a link carries in each direction what is sent in both.
    """
    ways = [(g, n, r) for g in node.gpus for n in node.nics for r in routes(node, g, n)]
    uses: dict[Any, list[int]] = {}
    in_half = halved(node)
    capacities: dict[Any, float] = {}
    for i, (_, _, route) in enumerate(ways):
        for a, b in route:
            pair = frozenset((a, b))
            rate = node.graph.edges[a, b]["bandwidth_bytes_per_s"]
            key: Any = (a, b) if halves else pair
            capacities[key] = rate / 2 if halves and pair in in_half else rate
            uses.setdefault(key, []).append(i)
    limit = np.zeros((len(uses), len(ways) + 1))
    for row, key in enumerate(uses):
        for i in uses[key]:
            limit[row, i] += 1
    most = [capacities[key] for key in uses]

    def even(of: Callable[[tuple[Any, ...]], str], ends: list[str], more: Any, top: Any) -> float:
        """Maximise the last variable, which every one of ``ends`` carries."""
        equal = np.array([[float(of(way) == end) for way in ways] + [-1.0] for end in ends])
        found = linprog(
            [*np.zeros(len(ways)), -1.0],
            A_ub=np.vstack([limit, more]) if len(more) else limit,
            b_ub=[*most, *top],
            A_eq=equal,
            b_eq=np.zeros(len(ends)),
        )
        assert found.x is not None, found.message
        return float(found.x[-1])

    nic_most = min(node.graph.nodes[nic]["bytes_per_s"] for nic in node.nics)
    last = np.zeros((1, len(ways) + 1))
    last[0, -1] = 1
    per_nic = even(lambda way: way[1], node.nics, last, [nic_most])
    ring = per_nic * len(node.nics) / len(node.gpus)
    by_nic = np.array([[float(way[1] == nic) for way in ways] + [0.0] for nic in node.nics])
    caps = [per_nic] * len(node.nics)
    direct = even(lambda way: way[0], node.gpus, np.vstack([by_nic, last]), [*caps, ring])
    return ring, direct


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_rates_are_those_of_the_program_that_halves_and_never_above_the_exact_one(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        node = random_node(seed)
        found = nic_exit(node.graph, node.gpus, node.gpudirect)
        ring, direct = program(node, halves=True)
        assert found.bytes_per_s == pytest.approx(ring, rel=1e-6), seed
        assert found.direct_bytes_per_s == pytest.approx(direct, rel=1e-6), seed
        ring, direct = program(node, halves=False)
        assert found.bytes_per_s <= ring * (1 + 1e-6), seed
        assert found.direct_bytes_per_s <= direct * (1 + 1e-6), seed
