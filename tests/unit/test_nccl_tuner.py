"""NCCL's own choice: against its logs, its source worked by hand, and what must hold of any row."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from planner.cost import nccl_tuner
from planner.cost.nccl_graphs import graphs_of, reach_of
from planner.cost.nccl_tuner import ALGORITHMS, PROTOCOLS, DefaultChoice, default_choice
from planner.errors import InvalidInputError
from planner.layout.groups import Group, lay_group
from planner.plan import Collective
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [1 << power for power in range(3, 35)]
COLLECTIVES: tuple[Collective, ...] = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
)


@cache
def fabric_of(name: str, num_nodes: int = 1) -> Fabric:
    return compile_fabric(load_topology(name), num_nodes)


def group_of(fabric: Fabric, degree: int | None = None, stride: int = 1) -> Group:
    return lay_group(fabric, np.array([degree or fabric.num_gpus]), np.array([stride]))


def chosen(
    fabric: Fabric,
    sizes: list[int],
    *,
    op: Collective = "all_reduce",
    degree: int | None = None,
    stride: int = 1,
    **options: Any,
) -> DefaultChoice:
    group = group_of(fabric, degree, stride).repeat(len(sizes))
    return default_choice(op, fabric, group, np.array(sizes, dtype=float), **options)


def names(choice: DefaultChoice) -> list[tuple[str, str]]:
    return [
        (ALGORITHMS[a], PROTOCOLS[p])
        for a, p in zip(choice.algorithm.tolist(), choice.protocol.tolist(), strict=True)
    ]


# ---------------------------------------------------------------------------- what logs say


@pytest.mark.parametrize(
    ("name", "num_nodes", "degree", "num_nics", "ring", "tree"),
    [
        # Logs of NCCL: 8 H100 (2.19), two A100; 8 H800 with two NICs of 400 Gb/s.
        ("dgx-h100", 1, 8, None, (12, 30), (12, 30)),
        ("dgx-a100", 1, 2, None, (12, 20), (12, 40)),
        ("hgx-h100-2x400", 2, 16, 2, (4, 24), None),
    ],
)
def test_graphs_are_those_that_nccl_logs(
    name: str,
    num_nodes: int,
    degree: int,
    num_nics: int | None,
    ring: tuple[int, int],
    tree: tuple[int, int] | None,
) -> None:
    fabric = fabric_of(name, num_nodes)
    reach = reach_of(fabric, group_of(fabric, degree), num_nics)
    graphs = graphs_of(fabric.architecture, reach)
    assert (graphs.ring.channels[0], graphs.ring.intra_bytes_per_s[0] / 1e9) == ring
    if tree:
        assert (graphs.tree.channels[0], graphs.tree.intra_bytes_per_s[0] / 1e9) == tree


def test_eight_h100_have_eight_heads_of_40_in_and_60_out_as_logged() -> None:
    fabric = fabric_of("dgx-h100")
    nvls = graphs_of("hopper", reach_of(fabric, group_of(fabric), None)).nvls
    found = nvls.channels[0], nvls.intra_bytes_per_s[0] / 1e9, nvls.inter_bytes_per_s[0] / 1e9
    assert found == (8, 40, 60)


def test_heads_across_nodes_share_links_with_one_more_than_they_are() -> None:
    fabric = fabric_of("dgx-h100", 2)
    nvls = graphs_of("hopper", reach_of(fabric, group_of(fabric), None)).nvls
    found = nvls.channels[0], nvls.intra_bytes_per_s[0] / 1e9, nvls.inter_bytes_per_s[0] / 1e9
    assert found == (8, 40, 48)  # 9 x 40 of 370.8, and NICs of 50


def test_the_search_stops_at_half_the_best_speed() -> None:
    fabric = fabric_of("dgx-h100")
    links = np.array([59e9])  # five rings of 11 would carry more than one of 50
    reach = reach_of(fabric, group_of(fabric), None)
    ring = graphs_of("hopper", replace(reach, bytes_per_s=links, pair_bytes_per_s=links)).ring
    assert (ring.channels[0], ring.intra_bytes_per_s[0] / 1e9) == (2, 25)


def test_an_h200_node_takes_ring_ll_to_1_mib_and_nvls_from_2_as_logged() -> None:
    choice = names(chosen(fabric_of("hgx-h200-8x400"), SIZES))
    switch = SIZES.index(2 * MIB)
    assert set(choice[:switch]) == {("ring", "ll")}
    assert set(choice[switch:]) == {("nvls", "simple")}


@pytest.mark.parametrize(
    ("name", "first"),
    [("hgx-h200-8x400", 5), ("dgx-b200", 6)],  # aws-ofi-nccl 2daf7d30; 1.00x at 4, ml-engineering
)
def test_nvls_starts_at_so_many_gpus(name: str, first: int) -> None:
    fabric = fabric_of(name)
    with_nvls = [
        degree
        for degree in range(2, 9)
        if ("nvls", "simple") in names(chosen(fabric, SIZES, degree=degree))
    ]
    assert with_nvls == list(range(first, 9))


def test_two_mi350x_nodes_take_what_rccl_printed() -> None:
    sizes = [32 * MIB, 64 * MIB, 128 * MIB]  # rocm-systems, before a retune
    found = names(chosen(fabric_of("mi350x-8x400-roce", 2), sizes))
    assert found == [("tree", "ll128"), ("ring", "ll128"), ("ring", "simple")]


def test_three_gb200_partitions_without_nvls_take_rings_for_16_gib() -> None:
    fabric = fabric_of("gb200-nvl4", 3)  # a thread measured the tree 19 % faster
    assert names(chosen(fabric, [16 * GIB], nvls=False, cpu="arm"))[0][0] == "ring"


# ------------------------------------------------------------------- the source worked by hand


@dataclass(frozen=True)
class Worked:
    """A call worked out by hand: what is taken, microseconds before it moves, GB/s of its size."""

    topology: str
    num_nodes: int
    size: int
    taken: tuple[str, str]
    latency_us: float
    rate: float
    op: Collective = "all_reduce"
    per_node: int = 8
    cpu: str = "intel"


WORKED = {
    "ring LL over NVLink: 15.0 us": Worked(
        "dgx-h100", 1, 8, ("ring", "ll"), 6.6 + 14 * 0.6, 141 * 8 / 14
    ),
    "NVLS": Worked("dgx-h100", 1, GIB, ("nvls", "simple"), 25, 8 * 40 * 0.85 * 7 / 8 * 2 * 8 / 14),
    "NVLS trees": Worked(
        "dgx-h100", 2, GIB, ("nvls_tree", "simple"), 25 + 2 * 20.9, 8 * 57.7 * 16 / 30
    ),
    "LL128, bound by channels": Worked(
        "dgx-h100",
        2,
        8 * MIB,
        ("ring", "ll128"),
        14 + 14 * 1.9 + 4,
        8 * 36.7 * 16 / 15,
        op="all_gather",
    ),
    "plateau of rings, Intel": Worked(
        "dgx-a100",
        2,
        128 * MIB,
        ("ring", "simple"),
        1.4 * (8.4 + 28 * 3.4 + 2 * 14),
        8 * 24 * 16 / 30,
    ),
    "plateau of rings, AMD posts in 2 us": Worked(
        "dgx-a100",
        2,
        128 * MIB,
        ("ring", "simple"),
        1.4 * (8.4 + 28 * 6 + 2 * 14),
        8 * 24 * 16 / 30,
        cpu="amd",
    ),
    "trees by LL, bound by the CPU, corrected by size": Worked(
        "dgx-h100",
        4,
        16 * KIB,
        ("tree", "ll"),
        6.8 + 2 * (7 * 0.6 + 2 * 5),
        20.4 * 0.5 * 0.7,
    ),
    "plain trees of one GPU a node": Worked(
        "dgx-h100",
        4,
        16 * KIB,
        ("tree", "ll"),
        6.8 + 2 * 2 * 5,
        2 * 24 * 0.92 / 3.8 * 0.85 * 0.5 * 0.7,
        per_node=1,
    ),
    "PCIe behind a bus between CPUs": Worked(
        "l40s-x8", 1, GIB, ("ring", "simple"), 8.4 + 14 * 5.7, 15 * 8 / 14
    ),
    "RCCL: LL before LL128, of which it believes the same": Worked(
        "mi300x-8x400-roce", 1, 8, ("ring", "ll"), 12 + 14 * 0.8, 0.08 * 7 * 48 * 8 / 14
    ),
    "RCCL: LL helps broadcasts of a node": Worked(
        "mi300x-8x400-roce",
        1,
        256 * KIB,
        ("ring", "ll"),
        12 + 8 * 0.8,
        1.65 * 0.08 * 7 * 48,
        op="broadcast",
    ),
}


@pytest.mark.parametrize("case", WORKED.values(), ids=WORKED.keys())
def test_beliefs_are_those_of_the_source_worked_by_hand(case: Worked) -> None:
    fabric = fabric_of(case.topology, case.num_nodes)
    place: dict[str, Any] = {
        "op": case.op,
        "degree": case.num_nodes * case.per_node,
        "stride": 8 // case.per_node,
        "cpu": case.cpu,
    }
    choice = chosen(fabric, [case.size], **place)
    assert names(choice) == [case.taken]
    expected_us = case.latency_us + case.size / (1e3 * case.rate)
    assert float(choice.believed_s[0]) * 1e6 == pytest.approx(expected_us, rel=1e-6)


def test_trees_by_simple_pay_the_networks_latency_twice_a_step() -> None:
    fabric = fabric_of("aws-p4d", 2)
    quick = chosen(fabric, [GIB])
    slow = chosen(fabric, [GIB], net_latency_s=75e-6)
    assert names(quick) == names(slow) == [("tree", "simple")]
    assert slow.believed_s[0] - quick.believed_s[0] == pytest.approx(2 * 2 * 75e-6)


@pytest.mark.parametrize(
    ("op", "num_nodes", "edges"),
    [
        # Bytes of a call up to which LL and LL128 go: RCCL's ranges are of a rank's share.
        ("reduce_scatter", 2, (16 * 131_072, 16 * 3_211_264)),
        ("all_gather", 2, (16 * 98_304, 16 * 5_046_272)),
        ("all_reduce", 2, (524_288, 4_415_057)),
        ("all_reduce", 4, (524_288, 16_777_216)),
    ],
)
def test_rccl_takes_protocols_by_ranges_of_bytes(
    op: Collective, num_nodes: int, edges: tuple[int, int]
) -> None:
    fabric = fabric_of("mi300x-8x400-roce", num_nodes)
    sizes = [edges[0], edges[0] + 64, edges[1], edges[1] + 64]
    found = [protocol for _, protocol in names(chosen(fabric, sizes, op=op))]
    assert found == ["ll", "ll128", "ll128", "simple"]


def test_ring_ll_takes_a_channel_per_512_threads_with_64_bytes_each() -> None:
    sizes = [KIB, 32 * KIB, 64 * KIB, 96 * KIB, MIB]
    assert chosen(fabric_of("dgx-h100"), sizes).channels.tolist() == [1, 1, 2, 3, 24]


def test_pat_is_for_one_gpu_a_node() -> None:
    fabric = fabric_of("dgx-h100", 4)  # behind a network so slow that two a node would want it
    for op in ("all_gather", "reduce_scatter"):
        one, two = (
            names(chosen(fabric, SIZES, op=op, degree=d, stride=32 // d, net_latency_s=75e-6))
            for d in (4, 8)
        )
        assert ("pat", "simple") in one
        assert ("pat", "simple") not in two


def test_large_gathers_of_one_node_stay_rings() -> None:
    for op in ("all_gather", "reduce_scatter"):  # NVLS sends or receives all of S
        assert names(chosen(fabric_of("dgx-h100"), [GIB], op=op)) == [("ring", "simple")]


def test_the_networks_switches_need_their_plugin() -> None:
    fabric = fabric_of("dgx-a100", 4)
    assert "collnet" not in {a for a, _ in names(chosen(fabric, SIZES))}
    assert "collnet" in {a for a, _ in names(chosen(fabric, SIZES, sharp=True))}


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize(("name", "num_nodes"), [("l40s-x8", 1), ("v100-pcie-x2-ib", 2)])
def test_ll128_is_off_over_pcie(op: Collective, name: str, num_nodes: int) -> None:
    assert "ll128" not in {p for _, p in names(chosen(fabric_of(name, num_nodes), SIZES, op=op))}


def test_without_nvls_none_is_taken() -> None:
    for num_nodes in (1, 2):
        fabric = fabric_of("dgx-h100", num_nodes)
        assert any(a.startswith("nvls") for a, _ in names(chosen(fabric, SIZES)))
        assert not any(a.startswith("nvls") for a, _ in names(chosen(fabric, SIZES, nvls=False)))


# ------------------------------------------------------------------------------------- laws


def mixed_rows(fabric: Fabric, rows: int) -> tuple[Group, Any]:
    rng = np.random.default_rng(0)
    degree = 2 ** rng.integers(0, 7, rows)
    stride = np.minimum(2 ** rng.integers(0, 4, rows), fabric.num_gpus // degree)
    return lay_group(fabric, degree, stride), np.exp(rng.uniform(0, 22, rows))


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("name", ["dgx-h100", "mi300x-8x400-roce", "dgx1-v100"])
def test_a_choice_depends_on_its_row_alone(op: Collective, name: str) -> None:
    fabric = fabric_of(name, 8)
    group, sizes = mixed_rows(fabric, 40)
    together = default_choice(op, fabric, group, sizes)
    for row in range(0, 40, 3):
        one = lay_group(fabric, group.degree[[row]], group.stride[[row]])
        alone = default_choice(op, fabric, one, sizes[[row]])
        for field in DefaultChoice.__dataclass_fields__:
            assert getattr(alone, field)[0] == getattr(together, field)[row]
    assert np.isfinite(together.believed_s).all()
    assert (together.channels[group.degree > 1] >= 1).all()


def test_graphs_are_searched_once_per_kind_of_group(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(fabric: Fabric, group: Group, num_nics: int | None) -> Any:
        searched.append(len(group.degree))
        return reach_of(fabric, group, num_nics)

    monkeypatch.setattr(nccl_tuner, "reach_of", counted)
    fabric = fabric_of("dgx-h100", 8)
    group, sizes = mixed_rows(fabric, 20_000)
    default_choice("all_reduce", fabric, group, sizes)
    kinds = {*zip(group.degree.tolist(), group.stride.tolist(), strict=True)}
    assert searched == [len(kinds)]


def test_a_slow_network_is_believed_slow_and_never_moves_trees_to_rings() -> None:
    fabric = fabric_of("aws-p4d", 4)
    quick, slow = chosen(fabric, SIZES), chosen(fabric, SIZES, net_latency_s=75e-6)
    assert (slow.believed_s > quick.believed_s).all()
    trees = {row for row, (a, _) in enumerate(names(quick)) if a == "tree"}
    assert trees <= {row for row, (a, _) in enumerate(names(slow)) if a == "tree"}


def test_a_group_of_one_is_believed_to_take_no_time() -> None:
    choice = chosen(fabric_of("dgx-h100"), [MIB], degree=1)
    assert choice.believed_s.tolist() == [0.0]


# -------------------------------------------------------------------- where nothing is chosen


@pytest.mark.parametrize(
    ("op", "algorithm", "edge"),
    [("all_to_all", "direct", 128 * KIB), ("send_recv", "point_to_point", 16 * KIB)],
)
def test_pairs_send_small_messages_by_ll_inside_a_node(
    op: Collective, algorithm: str, edge: int
) -> None:
    one, two = fabric_of("dgx-h100"), fabric_of("dgx-h100", 2)
    inside = names(chosen(one, [edge, edge + 8], op=op))
    assert inside == [(algorithm, "ll"), (algorithm, "simple")]
    assert names(chosen(two, [8], op=op, degree=2, stride=8)) == [(algorithm, "simple")]


def test_gloo_takes_its_only_method_and_refuses_what_it_lacks() -> None:
    fabric = fabric_of("local-gloo")
    assert names(chosen(fabric, [MIB], op="broadcast", degree=2))[0][0] == "tree"
    with pytest.raises(InvalidInputError, match=r"reduce: gloo .* try one of all_gather"):
        chosen(fabric, [MIB], op="reduce", degree=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net_latency_s": -1.0}, "net_latency_s=-1.0; need seconds from 0 on"),
        ({"num_nics": 0}, "num_nics=0; need 1 or more"),
        ({"cpu": "zilog"}, "cpu='zilog'; need one of intel"),
    ],
)
def test_figures_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        chosen(fabric_of("dgx-h100"), [MIB], **options)


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_sizes_that_make_no_sense_are_refused(size: float) -> None:
    fabric = fabric_of("dgx-h100")
    with pytest.raises(InvalidInputError, match="need finite sizes from 0 on"):
        default_choice("all_reduce", fabric, group_of(fabric), np.array([size]))
