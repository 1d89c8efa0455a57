"""Laws of the collective costs, and closed forms on one level."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.constants import COLLECTIVE_LAUNCH_S, PATH_ALPHA
from planner.cost.collectives import Terms, choose, collective_terms, legal_methods, thresholds
from planner.cost.rates import achieved_bytes_per_s, rate_of
from planner.layout.groups import lay_group
from planner.plan import Algorithm, Collective, Method
from planner.topology.fabric import Fabric, Level, Mesh
from tests.unit.problems import NVLINK, RAIL, SPINE, fabric

OPS: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree", "hierarchical"),
    "all_gather": ("ring", "hierarchical"),
    "reduce_scatter": ("ring", "hierarchical"),
    "all_to_all": ("direct", "pairwise"),
    "send_recv": ("point_to_point",),
}
PAIRS = [(op, algorithm) for op in OPS for algorithm in ALGORITHMS[op]]
GROUPS = [(1, 1), (2, 1), (8, 1), (2, 8), (8, 8), (64, 1), (16, 4), (512, 8), (6, 1)]


def seconds(
    op: Collective,
    algorithm: Algorithm,
    degree: int,
    stride: int,
    size: float,
    on: Fabric | None = None,
) -> Terms:
    where = on or fabric(4096)
    group = lay_group(where, np.array([degree]), np.array([stride]))
    return collective_terms(op, Method(algorithm), where, group, np.array([float(size)]))


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_a_group_of_one_costs_nothing(op: Collective, algorithm: Algorithm) -> None:
    assert seconds(op, algorithm, 1, 1, 1e9).total_s()[0] == 0.0


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
@given(
    group=st.sampled_from(GROUPS[1:]),
    size=st.floats(1, 1e10),
    factor=st.floats(1.0, 100.0),
)
def test_time_never_falls_when_the_message_grows(
    op: Collective, algorithm: Algorithm, group: tuple[int, int], size: float, factor: float
) -> None:
    small = seconds(op, algorithm, *group, size).total_s()[0]
    assert seconds(op, algorithm, *group, size * factor).total_s()[0] >= small > 0


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
@pytest.mark.parametrize("group", GROUPS[1:])
def test_twice_the_bandwidth_halves_the_transfer_and_nothing_else(
    op: Collective, algorithm: Algorithm, group: tuple[int, int]
) -> None:
    slow = fabric(4096)
    fast = replace(
        slow, levels=tuple(replace(v, bytes_per_s=2 * v.bytes_per_s) for v in slow.levels)
    )
    before, after = (seconds(op, algorithm, *group, 1e8, on) for on in (slow, fast))
    assert after.transfer_s[0] == pytest.approx(before.transfer_s[0] / 2, rel=1e-12)
    assert after.latency_s[0] == before.latency_s[0]
    assert after.fixed_s[0] == before.fixed_s[0]


@pytest.mark.parametrize(
    ("op", "share"),
    [("all_reduce", 2.0), ("all_gather", 1.0), ("reduce_scatter", 1.0), ("all_to_all", 1.0)],
)
@pytest.mark.parametrize("group", GROUPS[1:])
def test_no_algorithm_beats_the_bytes_that_must_leave_a_unit(
    op: Collective, share: float, group: tuple[int, int]
) -> None:
    """Members of one unit receive at least the (n-m)/n of S that others hold (all_reduce: twice,
    out and in again reduced, halved here because both directions run at once)."""
    on, size = fabric(4096), 1e9
    laid = lay_group(on, np.array([group[0]]), np.array([group[1]]))
    n, m = group[0], int(laid.members[0][0])
    if m == n:
        bound = size * (n - 1) / n / NVLINK.bytes_per_s
    else:
        bound = size * (n - m) / n / (m * RAIL.bytes_per_s)
        if op == "all_to_all":  # each of the m members sends its own (n-m)/n
            bound *= m
    bound *= share / 2 if op == "all_reduce" else share
    for algorithm in ALGORITHMS[op]:
        assert seconds(op, algorithm, *group, size).transfer_s[0] >= bound * (1 - 1e-12)


def test_ring_bus_bandwidth_is_the_links_when_latency_is_nothing() -> None:
    size, n = 8e9, 8
    time = seconds("all_reduce", "ring", n, 1, size).transfer_s[0]
    busbw = size / time * 2 * (n - 1) / n
    assert busbw == pytest.approx(achieved_bytes_per_s(NVLINK), rel=1e-12)


def test_an_all_reduce_on_a_ring_is_a_reduce_scatter_and_an_all_gather() -> None:
    for group in GROUPS[1:]:
        halves: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        parts = [seconds(op, "ring", *group, 1e8) for op in halves]
        whole = seconds("all_reduce", "ring", *group, 1e8)
        assert whole.transfer_s[0] == pytest.approx(sum(p.transfer_s[0] for p in parts))
        assert whole.latency_s[0] == pytest.approx(sum(p.latency_s[0] for p in parts))


def test_hierarchical_on_one_level_is_flat() -> None:
    """Of what goes in one piece."""
    ops: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    for op in ops:
        flat = seconds(op, "ring", 8, 1, 2.5e5)
        nested = seconds(op, "hierarchical", 8, 1, 2.5e5)
        assert nested.transfer_s[0] == pytest.approx(flat.transfer_s[0])
        assert nested.latency_s[0] == pytest.approx(flat.latency_s[0])


def test_hierarchical_sends_the_shard_across_nodes() -> None:
    """2(H-1)/H of S/m over each NIC, against 2(n-1)/n of S over the m NICs of a node."""
    on, size, hosts, inside = fabric(4096), 2.5e5, 4, 8
    group = lay_group(on, np.array([hosts * inside]), np.array([1]))
    nested = collective_terms("all_reduce", Method("hierarchical"), on, group, np.array([size]))
    inner = seconds("all_reduce", "ring", inside, 1, size).transfer_s[0]
    across = nested.transfer_s[0] - inner
    expected = 2 * (hosts - 1) / hosts * size / inside / achieved_bytes_per_s(RAIL)
    assert across == pytest.approx(expected)


def test_gloo_reduce_scatter_costs_an_all_reduce() -> None:
    on = fabric(8, library="gloo")
    group = lay_group(on, np.array([4]), np.array([1]))
    scatter, reduce = (
        collective_terms(op, Method("ring"), on, group, np.array([1e6])).total_s()[0]
        for op in ("reduce_scatter", "all_reduce")
    )
    assert scatter == reduce


def test_the_choice_is_the_cheapest_and_thresholds_agree_with_it() -> None:
    on = fabric(4096)
    group = lay_group(on, np.array([64]), np.array([1]))
    methods = (Method("ring"), Method("tree"))
    steps = thresholds("all_reduce", on, group, methods)
    assert steps[-1].up_to_bytes is None
    assert len({s.algorithm for s in steps}) > 1  # latency-bound and bandwidth-bound differ
    for size in [*2.0 ** np.arange(10, 33), *np.linspace(1e5, 5e9, 97)]:
        best = choose("all_reduce", on, group, np.array([size]), methods)
        times = [
            collective_terms("all_reduce", m, on, group, np.array([size])).total_s()[0]
            for m in best.methods
        ]
        assert best.seconds[0] == min(times)
        planned = next(s.algorithm for s in steps if s.up_to_bytes is None or size <= s.up_to_bytes)
        assert planned == best.methods[int(best.index[0])].algorithm, size


def test_every_call_of_several_ranks_pays_the_launch() -> None:
    launch = COLLECTIVE_LAUNCH_S["nccl"].value
    assert seconds("all_gather", "ring", 8, 1, 0).fixed_s[0] == launch
    assert seconds("all_reduce", "hierarchical", 64, 1, 0).fixed_s[0] == 3 * launch


def test_no_hierarchy_is_chosen_where_there_is_none() -> None:
    on = fabric(4096)
    # one node; one node; one GPU per node; two nodes unevenly
    for degree, stride in ((8, 1), (4, 2), (32, 8), (6, 1), (12, 1)):
        group = lay_group(on, np.array([degree]), np.array([stride]))
        best = choose(
            "all_gather", on, group, np.array([1e8]), (Method("ring"), Method("hierarchical"))
        )
        assert best.methods[int(best.index[0])].algorithm == "ring"
        assert not np.isfinite(best.runner_up_s[0])


def test_a_framework_adds_its_own_methods_to_the_librarys() -> None:
    on = fabric(64)
    assert legal_methods(on, "megatron", "all_reduce") == (Method("ring"), Method("tree"))
    assert legal_methods(on, "megatron", "all_gather") == (Method("ring"), Method("pat"))
    assert legal_methods(on, "executor", "all_gather") == (
        *(Method("ring"), Method("pat")),
        Method("hierarchical"),
    )
    gloo = legal_methods(fabric(64, library="gloo"), "executor", "all_reduce")
    assert gloo[0] == Method("ring")  # the default wins ties
    assert {Method("ring", "executor"), Method("hierarchical", "shm")} < set(gloo)


def test_hierarchies_need_as_many_levels() -> None:
    node = fabric(8, library="gloo", levels=(NVLINK,))
    two = fabric(64, library="gloo", levels=(NVLINK, RAIL))
    for on, expected in ((node, set()), (two, {"hierarchical"})):
        legal = {m.algorithm for m in legal_methods(on, "executor", "all_reduce")}
        assert legal & {"hierarchical", "three_level"} == expected


# ------------------------------------------------------------ closed forms on three levels
# 512 ranks next to each other: 8 in a node, 256 behind a rail, all behind the spine.
# Latencies of NCCL's model (src/graph/tuning.cc): a hop costs its level's alpha.

SIZE = 1e9


def rate(level: Level) -> float:
    """Return bytes/s of large transfers: 0.80 of NVLink, 0.94 of InfiniBand."""
    return level.bytes_per_s * (0.80 if level.kind == "nvlink" else 0.94)


def test_ring_on_three_levels() -> None:
    found = seconds("all_gather", "ring", 512, 1, SIZE)
    # the piece that goes farthest crosses all edges of the ring but one
    hops = (512 - 64 - 1) * 3e-6 + (64 - 2) * 15e-6 + 2 * 20e-6
    assert found.latency_s[0] == pytest.approx(hops)
    links = max(1 / rate(NVLINK), 1 / (8 * rate(RAIL)), 1 / (256 * rate(SPINE)))
    assert found.transfer_s[0] == pytest.approx(SIZE * 511 / 512 * links)


def test_tree_goes_up_and_down_a_chain_inside_and_a_tree_across() -> None:
    found = seconds("all_reduce", "tree", 512, 1, SIZE)
    up = (8 - 1) * 3e-6 + 5 * 15e-6 + 1 * 20e-6  # 32 nodes behind a rail, 2 rails
    assert found.latency_s[0] == pytest.approx(2 * up)
    assert found.transfer_s[0] == pytest.approx(2 * SIZE / 0.92 / rate(NVLINK))


def test_direct_exchange_posts_a_message_per_peer() -> None:
    found = seconds("all_to_all", "direct", 512, 1, SIZE)
    assert found.latency_s[0] == pytest.approx(20e-6 + 511 * 1e-6)
    # what leaves a GPU, a node and a rail, over a GPU's share of each level
    shares = (511 / rate(NVLINK), 504 / rate(RAIL), 256 / rate(SPINE))
    assert found.transfer_s[0] == pytest.approx(SIZE / 512 * max(shares))


def test_pairwise_exchange_waits_for_every_peer_in_turn() -> None:
    found = seconds("all_to_all", "pairwise", 512, 1, SIZE)
    assert found.latency_s[0] == pytest.approx(7 * 3e-6 + 248 * 15e-6 + 256 * 20e-6)
    assert found.transfer_s[0] == seconds("all_to_all", "direct", 512, 1, SIZE).transfer_s[0]


def test_hierarchical_keeps_the_levels_between_node_and_spine() -> None:
    """64 nodes, 32 to a rail: an eighth of S in a ring of them, and S inside the node."""
    found = seconds("all_gather", "hierarchical", 512, 1, SIZE)
    across = (64 - 2 - 1) * 15e-6 + 2 * 20e-6
    assert found.latency_s[0] == pytest.approx(7 * 3e-6 + across)
    slowest = max(1 / rate(RAIL), 1 / (32 * rate(SPINE)))
    expected = SIZE * 7 / 8 / rate(NVLINK) + SIZE / 8 * 63 / 64 * slowest
    assert found.transfer_s[0] == pytest.approx(expected)
    assert found.fixed_s[0] == 2 * COLLECTIVE_LAUNCH_S["nccl"].value


def test_a_send_is_as_slow_as_its_slowest_level_wherever_that_is() -> None:
    """Four ranks 128 apart cross a rail and the spine; here the rail is the worse one."""
    bad_rail = replace(RAIL, bytes_per_s=5e9, alpha_s=90e-6)
    on = fabric(4096, levels=(NVLINK, bad_rail, SPINE))
    found = seconds("send_recv", "point_to_point", 4, 128, SIZE, on)
    assert found.transfer_s[0] == pytest.approx(SIZE / (5e9 * 0.94))
    assert found.latency_s[0] == 90e-6
    inside = seconds("send_recv", "point_to_point", 4, 2, SIZE, on)
    assert inside.transfer_s[0] == pytest.approx(SIZE / (450e9 * 0.80))
    assert inside.latency_s[0] == 3e-6


def test_a_measured_level_is_taken_at_its_word() -> None:
    assert achieved_bytes_per_s(replace(RAIL, measured=True)) == RAIL.bytes_per_s
    assert achieved_bytes_per_s(RAIL) == pytest.approx(0.94 * RAIL.bytes_per_s)


def test_gloo_emulates_the_scatter_inside_a_hierarchy_too() -> None:
    """all_reduce = scatter (emulated: two passes), across, gather: three passes inside."""
    flat, size = fabric(4096, library="gloo"), 2.5e5
    found = seconds("all_reduce", "hierarchical", 32, 1, size, flat).transfer_s[0]
    inside = 3 * size * 7 / 8 / rate(NVLINK)
    assert found == pytest.approx(inside + 2 * size / 8 * 3 / 4 / rate(RAIL))


def test_pieces_of_a_hierarchy_are_on_both_levels_at_a_time() -> None:
    """64 MiB go in 16 pieces: the longer side, and one piece of the other."""
    size, on = 2.0**26, fabric(4096)
    found = seconds("all_reduce", "hierarchical", 32, 1, size)
    inside = 16 * 2 * 7 * on.levels[0].alpha_s + 2 * size * 7 / 8 / rate(NVLINK)
    across = 16 * 2 * 3 * on.levels[1].alpha_s + 2 * size / 8 * 3 / 4 / rate(RAIL)
    longer, shorter = max(inside, across), min(inside, across)
    assert (found.latency_s + found.transfer_s)[0] == pytest.approx(longer + shorter / 16)


# ------------------------------------------------------------ meshes, shared NICs, unequal units


def full_mesh(size: int) -> Mesh:
    """Return a mesh in which every pair has one link of ``size - 1``."""
    shares = tuple(max(m - 1, 1) / (size - 1) for m in range(1, size + 1))
    return Mesh((shares,) * size, (shares,) * size)


MESH = replace(NVLINK, kind="xgmi", mesh=full_mesh(8))
LINK_BYTES_PER_S = 450e9 / 7


def mesh_rate(num_links: int) -> float:
    return num_links * LINK_BYTES_PER_S * achieved_bytes_per_s(MESH) / MESH.bytes_per_s


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_two_gpus_of_a_mesh_have_one_link(stride: int) -> None:
    on = fabric(8, levels=(MESH,))
    reduce = seconds("all_reduce", "ring", 2, stride, SIZE, on)
    assert reduce.transfer_s[0] == pytest.approx(2 * SIZE / 2 / mesh_rate(1))
    send = seconds("send_recv", "point_to_point", 2, stride, SIZE, on)
    assert send.transfer_s[0] == pytest.approx(SIZE / mesh_rate(1))


def test_a_send_along_a_mesh_has_one_link_however_many_ranks_send() -> None:
    on = fabric(8, levels=(MESH,))
    found = seconds("send_recv", "point_to_point", 8, 1, SIZE, on).transfer_s[0]
    assert found == pytest.approx(SIZE / mesh_rate(1))


def test_all_of_a_mesh_exchange_over_all_its_links() -> None:
    on = fabric(8, levels=(MESH,))
    for degree in (2, 4, 8):
        found = seconds("all_to_all", "direct", degree, 1, SIZE, on).transfer_s[0]
        assert found == pytest.approx(SIZE / degree / mesh_rate(1))


def test_rings_and_sends_have_meshes_of_their_own() -> None:
    ring, direct = (tuple((x, x) for _ in range(2)) for x in (0.5, 0.25))
    on = fabric(2, levels=(replace(NVLINK, mesh=Mesh(ring, direct)),))
    by_ring = seconds("all_gather", "ring", 2, 1, SIZE, on).transfer_s[0]
    assert by_ring == pytest.approx(SIZE / 2 / (0.5 * rate(NVLINK)))
    by_all = seconds("all_to_all", "direct", 2, 1, SIZE, on).transfer_s[0]
    assert by_all == pytest.approx(SIZE / 2 / (0.25 * rate(NVLINK)))


def test_the_stride_says_which_members_of_a_mesh_are_joined() -> None:
    shares = tuple(tuple(1 / (stride + members) for members in (1, 2)) for stride in (1, 2))
    level = replace(NVLINK, mesh=Mesh(shares, shares))
    on = fabric(4, levels=(replace(level, unit_size=4),))
    for stride, expected in ((1, 1 / 3), (2, 1 / 4)):
        group = lay_group(on, np.array([2]), np.array([stride]))
        found = rate_of(level, group, group.members[0], direct=False, nominal=True)
        assert np.asarray(found)[0] == pytest.approx(expected * level.bytes_per_s)


SHARED = replace(RAIL, direct_share=0.25)


@pytest.mark.parametrize(
    ("op", "algorithm", "factor"),
    [
        ("all_to_all", "direct", 4.0),
        ("all_to_all", "pairwise", 4.0),
        ("send_recv", "point_to_point", 4.0),
        ("all_reduce", "ring", 1.0),
        ("all_reduce", "tree", 1.0),
        ("all_reduce", "hierarchical", 1.0),
    ],
)
def test_only_those_who_send_for_themselves_feel_that_nics_are_shared(
    op: Collective, algorithm: Algorithm, factor: float
) -> None:
    own, shared = (fabric(64, levels=(NVLINK, level)) for level in (RAIL, SHARED))
    before, after = (seconds(op, algorithm, 16, 4, SIZE, on) for on in (own, shared))
    assert after.transfer_s[0] == pytest.approx(factor * before.transfer_s[0])
    assert after.latency_s[0] == before.latency_s[0]


def test_nominal_rates_leave_out_what_large_transfers_lose() -> None:
    group = lay_group(fabric(16), np.array([16]), np.array([1]))
    found = rate_of(SHARED, group, group.members[1], direct=True, nominal=True)
    assert found == pytest.approx(0.25 * 50e9)
    achieved = rate_of(SHARED, group, group.members[1], direct=True)
    assert achieved == pytest.approx(0.94 * 0.25 * 50e9)


UNEVEN = replace(NVLINK, unit_sizes=(8, 8, 6, 2, 4, 4))


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
@given(
    which=st.sampled_from([("bytes_per_s", 0), ("bytes_per_s", 1), ("direct_share", 1)]),
    inner=st.sampled_from([MESH, UNEVEN, replace(UNEVEN, mesh=full_mesh(8))]),
    group=st.sampled_from([(2, 1), (4, 1), (8, 1), (32, 1), (2, 8), (4, 8), (2, 16), (16, 2)]),
    factor=st.floats(0.01, 1.0),
)
def test_time_never_falls_when_a_level_of_an_uneven_fabric_weakens(
    op: Collective,
    algorithm: Algorithm,
    which: tuple[str, int],
    inner: Level,
    group: tuple[int, int],
    factor: float,
) -> None:
    name, index = which
    levels = [inner, replace(SHARED, unit_size=32)]
    healthy = seconds(op, algorithm, *group, SIZE, fabric(32, levels=tuple(levels)))
    weaker = getattr(levels[index], name) * factor
    levels[index] = replace(levels[index], **{name: weaker})
    weak = seconds(op, algorithm, *group, SIZE, fabric(32, levels=tuple(levels)))
    assert weak.total_s()[0] >= healthy.total_s()[0] * (1 - 1e-12)
    if algorithm != "hierarchical":  # of which the other side may be the longer then
        assert weak.latency_s[0] == healthy.latency_s[0]


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_names_and_sources_of_levels_mean_nothing(op: Collective, algorithm: Algorithm) -> None:
    plain = fabric(64, levels=(MESH, SHARED, SPINE))
    named = replace(
        plain,
        topology="another",
        levels=tuple(replace(v, name=f"x{i}", source="?") for i, v in enumerate(plain.levels)),
    )
    for group in ((2, 1), (16, 4), (64, 1)):
        one, other = (seconds(op, algorithm, *group, SIZE, on) for on in (plain, named))
        assert one.total_s()[0] == other.total_s()[0]


# ------------------------------------------------------------ messages posted, pieces that fill
# Hops of our own messages on an NVLink node or behind a rail; the library posts one in 1 us.

HOP_S, RAIL_HOP_S = (level.alpha_s * PATH_ALPHA["executor"].value for level in (NVLINK, RAIL))
ISSUE_S = 1e-6 * PATH_ALPHA["executor"].value
MIB = 2.0**20


def own_terms(op: Collective, algorithm: Algorithm, degree: int, size: float) -> Terms:
    """Return the terms of a call of our own messages by all ranks of one node or of several."""
    on = fabric(degree, levels=(NVLINK, RAIL) if degree > NVLINK.unit_size else (NVLINK,))
    group = lay_group(on, np.array([degree]), np.array([1]))
    return collective_terms(op, Method(algorithm, "executor"), on, group, np.array([size]))


@pytest.mark.parametrize(("op", "passes"), [("gather", 1), ("scatter", 1), ("all_reduce", 2)])
def test_direct_messages_are_posted_to_each_other_member(op: Collective, passes: int) -> None:
    found = own_terms(op, "direct", 6, MIB).latency_s[0]
    assert found == pytest.approx(passes * (HOP_S + 5 * ISSUE_S))


def test_a_two_level_exchange_posts_to_members_inside_and_to_units() -> None:
    """24 ranks in three nodes of eight."""
    found = own_terms("all_to_all", "hierarchical", 24, MIB).latency_s[0]
    assert found == pytest.approx(HOP_S + 7 * ISSUE_S + RAIL_HOP_S + 2 * ISSUE_S)


@pytest.mark.parametrize(("op", "ways"), [("broadcast", 1), ("all_reduce", 2)])
def test_a_double_tree_posts_the_messages_of_its_other_tree(op: Collective, ways: int) -> None:
    """In a node of eight a tree is three high; four nodes are chains of seven hops below two."""
    node = own_terms(op, "tree", 8, MIB).latency_s[0]
    assert node == pytest.approx(ways * 3 * (HOP_S + ISSUE_S))
    nodes = own_terms(op, "tree", 32, MIB).latency_s[0]
    assert nodes == pytest.approx(ways * (7 * HOP_S + 2 * RAIL_HOP_S + 9 * ISSUE_S))


def test_a_chain_is_filled_by_a_piece_per_hop_behind_the_first() -> None:
    """1 MiB goes along six members in 8 pieces: the fifth hop waits for four of them."""
    found = own_terms("broadcast", "ring", 6, MIB).transfer_s[0]
    assert found == pytest.approx((MIB + 4 * MIB / 8) / rate(NVLINK))


@pytest.mark.parametrize(("op", "mib_out", "hops"), [("broadcast", 6, 2), ("all_reduce", 12, 4)])
def test_a_double_tree_is_filled_by_a_piece_per_hop_behind_the_first(
    op: Collective, mib_out: int, hops: int
) -> None:
    """Each tree of four members is two high and carries 3 MiB in 12 pieces."""
    found = own_terms(op, "tree", 4, 6 * MIB).transfer_s[0]
    assert found == pytest.approx((mib_out + (hops - 1) * 3 / 12) * MIB / rate(NVLINK))
