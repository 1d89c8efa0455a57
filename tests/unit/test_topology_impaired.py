"""Weak and broken parts: what they leave of each level, and that weakening is never a gain."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.cost.collectives import collective_terms
from planner.cost.step import price
from planner.errors import InvalidInputError
from planner.layout.groups import lay_group
from planner.plan import Algorithm, Collective, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric, live_nodes
from planner.topology.document import Impairment, TopologyDocument, parse_topology
from planner.topology.fabric import Fabric, Level
from planner.topology.graph import build_graph
from planner.topology.impair import trouble
from tests.unit.clusters import changed, cluster, link, network, part, shape, tier, weak
from tests.unit.problems import problem, row

NVL72 = load_topology("gb200-nvl72")
DGX = load_topology("dgx-h100")


def test_a_slow_node_slows_the_job_that_uses_it() -> None:
    slow = weak(weak(DGX, 0.9, "n3"), 0.8, "n2/gpu5")
    assert compile_fabric(slow, 2).slowest_share == 1
    assert compile_fabric(slow, 4).slowest_share == 0.8
    assert compile_fabric(slow, [3, 4]).slowest_share == 0.9
    graph = build_graph(weak(slow, 0.5, "n2"), 4)
    shares = [graph.nodes[name].get("compute_share") for name in ("n2/gpu5", "n2/gpu0", "n0/gpu0")]
    assert shares == [0.5, 0.5, None]
    assert build_graph(slow, 4).nodes["n2/gpu5"]["compute_share"] == 0.8


def test_a_node_that_is_down_is_passed_over_and_refused_by_name() -> None:
    down = weak(DGX, 0, "n1")
    assert compile_fabric(down, 3).nodes == (0, 2, 3)
    assert len(live_nodes(down)) == 4095
    with pytest.raises(InvalidInputError, match="n1 is down; leave it out"):
        compile_fabric(down, [0, 1])
    with pytest.raises(InvalidInputError, match="1 of its 4096 are down; ask for 4095"):
        compile_fabric(down, 4096)
    assert compile_fabric(weak(DGX, 0, "n1/gpu4"), 3).nodes == (0, 2, 3)


@pytest.mark.parametrize(
    "ends", [("n9/nic0", "rail0/rail0"), ("n9/gpu0", "n9/pcie0"), ("n9",), ("rail1/rail0",)]
)
def test_what_is_wrong_elsewhere_changes_nothing(ends: tuple[str, ...]) -> None:
    for factor in (0, 0.5):
        impaired = weak(DGX, factor, *ends)
        assert compile_fabric(impaired, 4) == compile_fabric(DGX, 4)
        healthy, there = (build_graph(document, 4) for document in (DGX, impaired))
        assert dict(there.nodes) == dict(healthy.nodes)
        assert list(there.edges(data=True)) == list(healthy.edges(data=True))


def test_switches_that_nodes_in_use_do_not_cross_change_nothing() -> None:
    for name in ("rail0/rail3", "rail1/rail3"):
        impaired = weak(DGX, 0.5, name, "spine0")
        assert compile_fabric(impaired, 32) == compile_fabric(DGX, 32)
    assert compile_fabric(weak(DGX, 0.5, "spine1"), 64) == compile_fabric(DGX, 64)
    assert compile_fabric(weak(DGX, 0.5, "core0"), 64) == compile_fabric(DGX, 64)


def rate_at(document: TopologyDocument, nodes: int, name: str) -> float:
    levels = compile_fabric(document, nodes).levels
    return next(level.bytes_per_s for level in levels if level.name == name)


def test_a_weak_uplink_of_one_rail_slows_every_rail_and_a_broken_one_is_done_without() -> None:
    assert rate_at(weak(DGX, 0.5, "rail0/rail3", "spine0"), 64, "spine") == pytest.approx(25e9)
    assert rate_at(weak(DGX, 0, "spine0", "rail0/rail3"), 64, "spine") == pytest.approx(
        7 / 8 * 50e9
    )
    two = weak(weak(DGX, 0, "rail0/rail3", "spine0"), 0, "rail0/rail4", "spine0")
    assert rate_at(two, 64, "spine") == pytest.approx(6 / 8 * 50e9)
    elsewhere = weak(weak(DGX, 0, "rail0/rail3", "spine0"), 0, "rail1/rail4", "spine0")
    assert rate_at(elsewhere, 64, "spine") == pytest.approx(7 / 8 * 50e9)
    assert rate_at(two, 64, "rail") == 50e9


def test_a_cable_listed_twice_is_broken_once() -> None:
    cable = {"link": ["rail0/rail3", "spine0"], "factor": 0}
    other_way = {"link": ["spine0", "rail0/rail3"], "factor": 0}
    document = changed(DGX, impairments=[cable, cable, other_way])
    assert rate_at(document, 64, "spine") == pytest.approx(7 / 8 * 50e9)
    weak_twice = changed(DGX, impairments=[{"part": "n1/nic0", "factor": 0.5}] * 2)
    assert rate_at(weak_twice, 4, "rail") == rate_at(weak(DGX, 0.5, "n1/nic0"), 4, "rail")


def test_the_weakest_of_several_cables_decides() -> None:
    cables = [
        {"link": [f"rail{unit}/rail3", "spine0"], "factor": factor}
        for unit, factor in ((0, 0.5), (1, 0.75))
    ]
    for listed in (cables, cables[::-1]):
        assert rate_at(changed(DGX, impairments=listed), 64, "spine") == pytest.approx(25e9)


def test_a_switch_of_the_first_tier_is_every_cable_to_its_nics() -> None:
    assert rate_at(weak(DGX, 0.5, "rail0/rail3"), 4, "rail") == pytest.approx(25e9)
    assert rate_at(weak(DGX, 0, "rail0/rail3"), 4, "rail") == pytest.approx(7 / 8 * 50e9)


def test_a_switch_above_is_every_cable_up_to_it_and_from_it() -> None:
    half = weak(DGX, 0.5, "spine0")
    assert rate_at(half, 32, "rail") == 50e9
    assert rate_at(half, 64, "spine") == pytest.approx(25e9)
    assert rate_at(half, 512, "core") == pytest.approx(25e9)
    assert rate_at(weak(DGX, 0.5, "core0"), 512, "core") == pytest.approx(25e9)
    assert rate_at(weak(DGX, 0.5, "core0"), 512, "spine") == 50e9
    with pytest.raises(InvalidInputError, match="spine0=down leaves rail0 no way to the others"):
        compile_fabric(weak(DGX, 0, "spine0"), 64)
    with pytest.raises(InvalidInputError, match="core0=down leaves spine0 no way"):
        compile_fabric(weak(DGX, 0, "core0"), 512)
    # A job under one leaf crosses no cable above it.
    assert rate_at(weak(DGX, 0, "spine0"), 32, "rail") == 50e9


def tree(oversubscription: float) -> TopologyDocument:
    """Return four leaves of two nodes, two leaves under a spine, two spines under a core."""
    parts = [part("gpu", "gpu"), part("pcie", "pcie_switch"), part("nic", "nic")]
    links = [link("gpu", "pcie", "pcie", 60e9), link("nic", "pcie", "pcie", 60e9)]
    top = tier("core", oversubscription=oversubscription)
    tiers = (tier("leaf", 2), tier("spine", 4), top)
    return cluster(parts, links, 8, network=network(40e9, *tiers))


@pytest.mark.parametrize(("oversubscription", "core"), [(1, 20e9), (2, 20e9), (4, 10e9)])
def test_a_weak_cable_and_a_thin_tier_cost_the_worse_of_them(
    oversubscription: float, core: float
) -> None:
    document = weak(tree(oversubscription), 0.5, "leaf0", "spine0")
    rates = [rate for _, _, rate in shape(compile_fabric(document))]
    assert rates == [pytest.approx(rate) for rate in (40e9, 20e9, core)]


def test_parts_that_are_named_twice_are_weakened_twice_and_removed_once() -> None:
    nic, cable = "n0/nic0", ("n0/nic0", "rail0/rail0")
    for first, second in product((0, 0.5), repeat=2):
        document = weak(weak(DGX, first, nic), second, *cable)
        left = first * second
        expected = 50e9 * left if left else 7 / 8 * 50e9
        assert rate_at(document, 4, "rail") == pytest.approx(expected)
        graph = build_graph(document, 4)
        assert graph.has_edge(*cable) is bool(left)
    assert rate_at(weak(weak(DGX, 0, nic), 0, "rail0/rail0"), 4, "rail") == pytest.approx(
        7 / 8 * 50e9
    )


def test_of_one_part_impaired_again_the_last_counts() -> None:
    once = weak(DGX, 0.5, "n0/nic0", "rail0/rail0")
    for ends in (("n0/nic0", "rail0/rail0"), ("rail0/rail0", "n0/nic0")):
        again = weak(once, 0.25, *ends)
        assert len(again.impairments) == 1
        assert rate_at(again, 4, "rail") == pytest.approx(12.5e9)


def test_a_switch_of_an_nvlink_domain_slows_that_domain_only() -> None:
    racks = changed(NVL72, max_nodes=18 * 1100)
    for unit in (1, 1000):  # 1000 is not 100
        first = 18 * unit
        one = weak(racks, 0.5, f"domain{unit}/nvswitch3")
        rate = compile_fabric(one, range(first, first + 18)).levels[0].bytes_per_s
        assert rate == pytest.approx(17.5 / 18 * 900e9)
        for other in (0, 100):
            used = range(18 * other, 18 * other + 18)
            assert compile_fabric(one, used) == compile_fabric(racks, used)
        tray = weak(racks, 0, f"n{first + 3}/gpu1", f"domain{unit}/nvswitch3")
        rate = compile_fabric(tray, range(first, first + 18)).levels[0].bytes_per_s
        assert rate == pytest.approx(17 / 18 * 900e9)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (("n0/nic9", "rail0/rail0"), "n0 has no 'n0/nic9'"),
        (("n0/nic0", "rail0/rail1"), "no link nic0:rail0/rail1"),
        (("n0/gpu0", "n1/gpu0"), "n0 has no 'n1/gpu0'"),
        (("rail0/rail0", "rail0/rail1"), "rail0/rail0 is below spine0"),
        (("spine0", "spine1"), "spine0 is below core0"),
        (("nowhere",), "nothing is called nowhere; nodes are called n0 to n4095"),
        (("n5000",), "nothing is called n5000"),
        (("domain0/nvswitch0",), "nothing is called domain0/nvswitch0"),
    ],
)
def test_what_names_nothing_is_refused_with_what_there_is(
    ends: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidInputError) as error:
        compile_fabric(weak(DGX, 0.5, *ends), 4)
    assert message in str(error.value)


def test_domains_without_a_number_are_refused() -> None:
    for name in ("domainx/nvswitch0", "domain9" + "9" * 90, "domain01/nvswitch0"):
        with pytest.raises(InvalidInputError):
            compile_fabric(weak(NVL72, 0.5, name), 4)


def without_link(document: TopologyDocument, a: str, b: str) -> TopologyDocument:
    data = document.model_dump(mode="json")
    singles = [single for single in document.node.single_links() if {single.a, single.b} != {a, b}]
    assert len(singles) == len(document.node.single_links()) - 1
    data["node"]["links"] = [
        link(s.a, s.b, s.kind, s.bandwidth_bytes_per_s, latency_s=s.latency_s) for s in singles
    ]
    return parse_topology(data)


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("azure-nd-mi300x-v5", "gpu0", "gpu1"),
        ("dgx1-v100", "gpu0", "gpu3"),
        ("frontier", "gpu4", "nic2"),
        ("dgx-h100", "gpu2", "pcie1"),
        ("a100-pcie-x4-pairs", "gpu0", "gpu1"),
    ],
)
def test_a_broken_link_is_a_link_that_is_not_in_the_document(name: str, a: str, b: str) -> None:
    document = load_topology(name)
    broken = document
    for node in range(2):
        broken = weak(broken, 0, f"n{node}/{a}", f"n{node}/{b}")
    gone = without_link(document, a, b)
    for nodes in (1, 2):
        one, other = (compile_fabric(d, nodes) for d in (broken, gone))
        sources = [replace(level, source="") for level in one.levels]
        assert sources == [replace(level, source="") for level in other.levels]


def test_names_of_hosts_change_nothing() -> None:
    base = changed(DGX, max_nodes=64)
    named = changed(base, hosts=[f"gpu-{i:03d}" for i in range(64)])
    assert compile_fabric(named, 40) == compile_fabric(base, 40)
    for ends in (("{}/nic0", "rail0/rail0"), ("{}",), ("{}/gpu3",), ("{}/nic1",)):
        plain = weak(base, 0.5, *(end.format("n7") for end in ends))
        other = weak(named, 0.5, *(end.format("gpu-007") for end in ends))
        assert compile_fabric(plain, 40) == compile_fabric(other, 40)
        assert compile_fabric(plain, 40) != compile_fabric(base, 40)


# ------------------------------------------------------ laws: weakening a link is never a gain

RUNS: tuple[tuple[Collective, tuple[Algorithm, ...]], ...] = (
    ("all_reduce", ("ring", "tree")),
    ("all_gather", ("ring",)),
    ("all_to_all", ("direct", "pairwise")),
    ("send_recv", ("point_to_point",)),
)


def costs(fabric: Fabric) -> list[float]:
    """Return seconds of every algorithm on every group.

    The whole of them: a slower link may make another protocol the better one.
    """
    found: list[float] = []
    n = fabric.num_gpus
    shapes = [(d, s) for d in range(2, n + 1) for s in range(1, n + 1) if n % (d * s) == 0]
    degrees, strides = (np.array(column) for column in zip(*shapes, strict=True))
    group = lay_group(fabric, degrees, strides)
    size = np.full(len(shapes), 1e8)
    for op, algorithms in RUNS:
        for algorithm in algorithms:
            found += collective_terms(op, Method(algorithm), fabric, group, size).total_s().tolist()
    return found


def all_links(document: TopologyDocument, nodes: int) -> Iterator[tuple[str, str]]:
    """Yield one link of the first node for each kind of pair it joins, and some trunks."""
    seen: set[Any] = set()
    graph = build_graph(document, nodes)
    for a, b in graph.edges:
        if not (a.startswith("n0/") or b.startswith("n0/") or "/" not in b):
            continue
        kind = tuple(name.partition("/")[2].rstrip("0123456789") or name for name in (a, b))
        of_mesh = kind[0] == kind[1] and "n0/gpu0" in (a, b)  # these differ: all of one GPU
        if of_mesh or kind not in seen:
            seen.add(kind)
            yield a, b


CASES = [
    ("dgx-h100", 2),
    ("azure-nd-mi300x-v5", 2),
    ("frontier", 2),
    ("dgx1-v100", 2),
    ("a100-pcie-x4-pairs", 2),
    ("gh200-x4-slingshot", 2),
    ("gb200-nvl72", 3),
    ("l40s-x8", 1),
]


@pytest.mark.parametrize(("name", "nodes"), CASES)
def test_weakening_a_link_never_raises_a_rate_nor_lowers_a_cost(name: str, nodes: int) -> None:
    document = load_topology(name)
    nodes = min(nodes, document.max_nodes)
    healthy = replace(compile_fabric(document, nodes), curves=())  # of whole boards alone
    before = costs(healthy)
    for a, b in all_links(document, nodes):
        last = before
        for factor in (0.6, 0.1):
            fabric = compile_fabric(weak(document, factor, a, b), nodes)
            for level, better in zip(fabric.levels, healthy.levels, strict=True):
                check_not_faster(level, better)
            now = costs(replace(fabric, curves=()))
            assert all(x >= y * (1 - 1e-9) for x, y in zip(now, last, strict=True)), (a, b)
            last = now
        try:
            gone = compile_fabric(weak(document, 0, a, b), nodes)
        except InvalidInputError:
            continue  # nothing else joins what it joined
        now = costs(replace(gone, curves=()))
        assert all(x >= y * (1 - 1e-9) for x, y in zip(now, before, strict=True)), (a, b)


def check_not_faster(level: Level, better: Level) -> None:
    assert level.unit_size == better.unit_size
    assert level.bytes_per_s <= better.bytes_per_s * (1 + 1e-9)
    direct = level.direct_share * level.bytes_per_s
    assert direct <= better.direct_share * better.bytes_per_s * (1 + 1e-9)
    assert (level.mesh is None) == (better.mesh is None)
    if level.mesh is not None and better.mesh is not None:
        for which in ("ring", "direct"):
            ours, theirs = (np.array(getattr(m, which)) for m in (level.mesh, better.mesh))
            assert (ours * level.bytes_per_s <= theirs * better.bytes_per_s * (1 + 1e-9)).all()


def test_nodes_that_are_weak_in_too_many_ways_are_refused_in_words() -> None:
    document = load_topology("dgx-h100")
    for count, fits in ((100, True), (200, False)):
        ways = tuple(
            Impairment(link=(f"n{i}/gpu0", f"n{i}/nvswitch-outer0"), factor=0.5 + i / 1000)
            for i in range(count)
        )
        wrong = document.model_copy(update={"impairments": ways})
        if fits:
            assert compile_fabric(wrong, 200).levels[0].bytes_per_s < 450e9
            continue
        with pytest.raises(InvalidInputError, match="weak in 200 different ways"):
            compile_fabric(wrong, 200)


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 8, "dp_shard": 4},
    {"tp": 2, "dp_shard": 16},
    {"tp": 4, "pp": 2, "dp_shard": 4, "schedule": "1f1b"},
    {"cp": 2, "tp": 2, "dp_shard": 8},
)


@pytest.mark.parametrize("name", ["dgx-h100", "azure-nd-mi300x-v5"])
def test_no_step_is_quicker_for_a_weak_part(name: str) -> None:
    document = load_topology(name)
    healthy = compile_fabric(document, 4)
    parts: tuple[tuple[str, ...], ...] = (
        ("n1/gpu0",),
        ("n2",),
        ("n1/nic0",),
        next(all_links(document, 1)),
        next(end for end in all_links(document, 4) if "/nic" in end[0]),
    )
    for layout in LAYOUTS:
        before = step_s(healthy, layout)
        for ends in parts:
            assert step_s(compile_fabric(weak(document, 0.2, *ends), 4), layout) >= before
        assert step_s(compile_fabric(weak(document, 0.2, "n2"), 4), layout) > before


def step_s(fabric: Fabric, layout: dict[str, Any]) -> float:
    """Return seconds of a step on H100."""
    on = problem(on=replace(fabric, device="h100-sxm-80gb"), pipelines=((layout.get("pp", 1), 1),))
    return float(price(on, row(**layout, num_micro_batches=4)).step_time_s()[0])


def test_what_is_wrong_with_a_switch_is_worked_out_once_for_all_nodes_on_it() -> None:
    # node by node, a thousand weak leaves take seconds and large ones minutes
    document = weak(load_topology("dgx-h100"), 0.5, "rail1/rail0")
    found, _ = trouble(weak(document, 0.5, "n40/nic3"))
    assert sorted(found) == list(range(32, 64))
    assert len({id(what) for what in found.values()}) == 2
    assert [str(impairment) for impairment in found[32].links] == ["nic0:rail1/rail0=0.5"]
