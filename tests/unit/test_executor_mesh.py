"""Groups follow Megatron's order, partition the world and are built alike on every rank.

Up to 128 ranks without as many processes: what a plan says of groups is compared with nested loops
for every layout, and meshes are built on torch's fake backend, which connects nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import combinations, product
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.mesh import Mesh, build_mesh
from planner.plan import AXES, Axis, Layout, Plan, RankOrder, RankRule, coordinates, groups
from tests.dist.plans import make_plan

MAX_WORLD: Final = 128
WORLDS: Final = range(1, MAX_WORLD + 1)
DENSE: Final[tuple[Axis, ...]] = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
EXPERT: Final[tuple[Axis, ...]] = ("etp", "ep", "edp", "pp")

USUAL: Final[RankOrder] = "tp-cp-ep-dp-pp"
OTHER: Final[RankOrder] = "tp-cp-ep-pp-dp"

Groups = dict[Axis, list[tuple[int, ...]]]

# ------------------------------------------------------------------------ layouts, systematically


def factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered choice of factors that multiply to ``number``."""
    if num_factors == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in factorizations(number // factor, num_factors - 1):
                yield (factor, *rest)


@cache
def dense_layouts(world_size: int) -> list[Layout]:
    """Return every layout of the dense axes, each with one of its expert layouts in turn."""
    layouts: list[Layout] = []
    for tp, cp, dp_shard, dp_replicate, pp in factorizations(world_size, 5):
        experts = list(factorizations(world_size // pp, 3))
        etp, ep, _ = experts[len(layouts) % len(experts)]
        layouts.append(
            Layout(
                tp=tp, cp=cp, dp_shard=dp_shard, dp_replicate=dp_replicate, pp=pp, ep=ep, etp=etp
            )
        )
    return layouts


def expert_layouts(world_size: int) -> list[Layout]:
    """Return every layout of the expert axes."""
    return [
        Layout(dp_shard=world_size // pp, pp=pp, ep=ep, etp=etp)
        for etp, ep, _, pp in factorizations(world_size, 4)
    ]


def some_layouts(world_size: int) -> list[Layout]:
    """Return three of the dense layouts, from the first, the second and the last third."""
    layouts = dense_layouts(world_size)
    return [layouts[len(layouts) * part // 6] for part in (1, 3, 5)]


# ------------------------------------------------------------------------------ by nested loops


def dense_by_hand(layout: Layout, order: RankOrder = USUAL) -> tuple[Groups, list[dict[Axis, int]]]:
    """Return groups and coordinates as Megatron numbers ranks: tp fastest, then cp, dp, pp.

    In the other order the last two change places.
    """
    found: dict[Axis, dict[tuple[int, ...], list[int]]] = {
        axis: {} for axis in (*DENSE, "dp", "dp_cp", "dp_shard_cp")
    }
    places: list[dict[Axis, int]] = []
    rank = 0
    for p, r, s in outer_loops(layout, order):
        for c in range(layout.cp):
            for t in range(layout.tp):
                # a group is all ranks that share every coordinate but the axis' own
                found["tp"].setdefault((p, r, s, c), []).append(rank)
                found["cp"].setdefault((p, r, s, t), []).append(rank)
                found["dp_shard"].setdefault((p, r, c, t), []).append(rank)
                found["dp_replicate"].setdefault((p, s, c, t), []).append(rank)
                found["pp"].setdefault((r, s, c, t), []).append(rank)
                found["dp"].setdefault((p, c, t), []).append(rank)
                found["dp_cp"].setdefault((p, t), []).append(rank)
                found["dp_shard_cp"].setdefault((p, r, t), []).append(rank)
                places.append({"tp": t, "cp": c, "dp_shard": s, "dp_replicate": r, "pp": p})
                rank += 1
    return as_groups(found), places


def outer_loops(layout: Layout, order: RankOrder) -> Iterator[tuple[int, int, int]]:
    """Yield (pp, dp_replicate, dp_shard) as the three outer loops run."""
    stages, replicas = range(layout.pp), range(layout.dp_replicate)
    if order == USUAL:
        yield from product(stages, replicas, range(layout.dp_shard))
    else:
        for r, s, p in product(replicas, range(layout.dp_shard), stages):
            yield p, r, s


def experts_on_the_ranks_of_a_stage(
    layout: Layout, order: RankOrder
) -> tuple[Groups, list[dict[Axis, int]]]:
    """Return the same of the expert axes, laid over what ``dense_by_hand`` says is a stage."""
    found: dict[Axis, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in EXPERT}
    stage_of = [place["pp"] for place in dense_by_hand(layout, order)[1]]
    places: list[dict[Axis, int]] = [{} for _ in stage_of]
    for p in range(layout.pp):
        ranks = (rank for rank, stage in enumerate(stage_of) if stage == p)
        for d in range(layout.edp):
            for e in range(layout.ep):
                for t in range(layout.etp):
                    rank = next(ranks)
                    found["etp"].setdefault((p, d, e), []).append(rank)
                    found["ep"].setdefault((p, d, t), []).append(rank)
                    found["edp"].setdefault((p, e, t), []).append(rank)
                    found["pp"].setdefault((d, e, t), []).append(rank)
                    places[rank] = {"etp": t, "ep": e, "edp": d, "pp": p}
    return {axis: sorted(listed) for axis, listed in as_groups(found).items()}, places


def expert_by_hand(layout: Layout) -> tuple[Groups, list[dict[Axis, int]]]:
    """Return the same of the expert axes: etp fastest, then ep, edp, pp."""
    found: dict[Axis, dict[tuple[int, ...], list[int]]] = {axis: {} for axis in EXPERT}
    places: list[dict[Axis, int]] = []
    rank = 0
    for p in range(layout.pp):
        for d in range(layout.edp):
            for e in range(layout.ep):
                for t in range(layout.etp):
                    found["etp"].setdefault((p, d, e), []).append(rank)
                    found["ep"].setdefault((p, d, t), []).append(rank)
                    found["edp"].setdefault((p, e, t), []).append(rank)
                    found["pp"].setdefault((d, e, t), []).append(rank)
                    places.append({"etp": t, "ep": e, "edp": d, "pp": p})
                    rank += 1
    return as_groups(found), places


def as_groups(found: dict[Axis, dict[tuple[int, ...], list[int]]]) -> Groups:
    return {axis: [tuple(ranks) for ranks in by_rest.values()] for axis, by_rest in found.items()}


def check_against(
    layout: Layout, by_hand: tuple[Groups, list[dict[Axis, int]]], order: RankOrder = USUAL
) -> None:
    """Compare all groups, and the coordinates of the first, a middle and the last rank."""
    expected, places = by_hand
    assert len(places) == layout.world_size
    for axis, listed in expected.items():
        assert groups(layout, axis, order) == listed, (layout, axis)
    for rank in {0, layout.world_size // 2, layout.world_size - 1}:
        found = coordinates(layout, rank, order)
        assert {axis: found[axis] for axis in places[rank]} == places[rank], (layout, rank)


def test_dense_groups_of_every_layout_up_to_128_ranks_are_those_of_nested_loops() -> None:
    for world_size in WORLDS:
        for layout in dense_layouts(world_size):
            check_against(layout, dense_by_hand(layout))


def test_expert_groups_of_every_layout_up_to_128_ranks_are_those_of_nested_loops() -> None:
    for world_size in WORLDS:
        for layout in expert_layouts(world_size):
            check_against(layout, expert_by_hand(layout))


def test_groups_of_every_layout_up_to_64_ranks_are_those_of_nested_loops_with_dp_outermost() -> (
    None
):
    for world_size in range(1, 65):
        for layout in dense_layouts(world_size):
            check_against(layout, dense_by_hand(layout, OTHER), OTHER)
            check_against(layout, experts_on_the_ranks_of_a_stage(layout, OTHER), OTHER)


def test_the_orders_differ_where_there_are_several_stages_and_replicas() -> None:
    for world_size in range(1, 65):
        for layout in dense_layouts(world_size):
            same = all(groups(layout, axis) == groups(layout, axis, OTHER) for axis in AXES)
            assert same == (layout.pp == 1 or layout.dp == 1), layout


def test_expert_groups_do_not_depend_on_how_the_dense_axes_share_a_stage() -> None:
    for world_size in WORLDS:
        for layout in dense_layouts(world_size):
            plain = expert_groups(layout.stage_size, layout.pp, layout.ep, layout.etp)
            assert {axis: groups(layout, axis) for axis in EXPERT} == plain, layout


@cache
def expert_groups(stage_size: int, pp: int, ep: int, etp: int) -> Groups:
    layout = Layout(dp_shard=stage_size, pp=pp, ep=ep, etp=etp)
    return {axis: groups(layout, axis) for axis in EXPERT}


def test_groups_of_an_axis_partition_the_world() -> None:
    for world_size in WORLDS:
        for layout in some_layouts(world_size):
            for axis in AXES:
                listed = [rank for ranks in groups(layout, axis) for rank in ranks]
                assert sorted(listed) == list(range(world_size)), (layout, axis)


def test_two_axes_of_one_generator_meet_in_at_most_one_rank() -> None:
    for world_size in WORLDS:
        for layout in some_layouts(world_size):
            for generator in (DENSE, EXPERT):
                for one, other in combinations(generator, 2):
                    # two ranks in the same pair of groups would make fewer pairs than ranks
                    pairs = zip(group_of(layout, one), group_of(layout, other), strict=True)
                    assert len(set(pairs)) == world_size, (layout, one, other)


def group_of(layout: Layout, axis: Axis) -> list[int]:
    """Return the number of each rank's group."""
    numbers = {rank: n for n, ranks in enumerate(groups(layout, axis)) for rank in ranks}
    return [numbers[rank] for rank in range(layout.world_size)]


# Megatron-LM core/parallel_state.py, initialize_model_parallel, run for these degrees: 16 ranks,
# tp 2, cp 2, dp 2, pp 2, ep 4, default order tp-cp-ep-dp-pp.
def test_groups_are_megatrons() -> None:
    layout = Layout(tp=2, cp=2, dp_replicate=2, pp=2, ep=4)
    assert groups(layout, "tp")[:3] == [(0, 1), (2, 3), (4, 5)]
    assert groups(layout, "cp")[:3] == [(0, 2), (1, 3), (4, 6)]
    assert groups(layout, "dp")[:5] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)]
    assert groups(layout, "pp")[:2] == [(0, 8), (1, 9)]
    assert groups(layout, "dp_cp")[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups(layout, "ep")[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(layout, "edp")[:2] == [(0, 4), (1, 5)]


# ------------------------------------------------------------------------ on torch's fake backend


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[list[tuple[int, ...]]]:
    """Be one rank of a world, and yield the groups that are asked of torch, in order."""
    asked: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], *, timeout: timedelta, sort_ranks: bool) -> Any:
        assert not sort_ranks, "the plan's order is the ring's order"
        asked.append(tuple(ranks))
        return new_group(ranks, timeout=timeout, sort_ranks=sort_ranks)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with patch.object(dist, "new_group", noted):
            yield asked
    finally:
        dist.destroy_process_group()


def build(plan: Plan, rank: int) -> tuple[Mesh, list[tuple[int, ...]]]:
    """Return the mesh of ``rank`` and the groups asked for, the mesh checked against torch."""
    with fake_world(rank, plan.layout.world_size) as asked:
        mesh = build_mesh(plan, rank=rank, timeout=timedelta(seconds=1))
        for group in mesh.groups.values():
            assert group.ranks[group.index] == rank
            assert (group.process_group is None) == (group.size == 1)
            if group.process_group is not None:
                assert dist.get_process_group_ranks(group.process_group) == list(group.ranks)
                assert dist.get_rank(group.process_group) == group.index
    return mesh, asked


def plan_of(layout: Layout, order: RankOrder = USUAL) -> Plan:
    plan = make_plan(order=order)
    return plan.model_copy(update={"layout": layout})


@pytest.mark.parametrize(
    ("first", "order"), [*((first, USUAL) for first in range(1, MAX_WORLD, 32)), (33, OTHER)]
)
def test_meshes_of_every_world_are_built_alike_on_its_ranks(first: int, order: RankOrder) -> None:
    for world_size in range(first, first + 32):
        for layout in some_layouts(world_size):
            plan = plan_of(layout, order)
            built = [build(plan, rank) for rank in sorted({0, world_size // 2, world_size - 1})]
            asked = built[0][1]
            assert len(asked) == len(set(asked)), "axes with the same members share a group"
            for mesh, asked_here in built:
                assert asked_here == asked, layout
                assert mesh.coordinates == {axis: g.index for axis, g in mesh.groups.items()}
                assert {axis: g.ranks for axis, g in mesh.groups.items()} == {
                    axis: next(ranks for ranks in plan.groups(axis) if mesh.rank in ranks)
                    for axis in AXES
                }


def test_every_rank_of_64_builds_the_same_groups_in_the_same_order() -> None:
    plan = plan_of(Layout(tp=2, cp=2, dp_shard=2, dp_replicate=2, pp=4, ep=4, etp=2))
    orders = [build(plan, rank)[1] for rank in range(64)]
    assert all(order == orders[0] for order in orders)
    # each of the axes' groups, those of one rank left out and those of equal members made once
    expected = {ranks for axis in AXES for ranks in plan.groups(axis) if len(ranks) > 1}
    assert set(orders[0]) == expected


# ----------------------------------------------------------------------------- splits by unit


def splits_of(
    units: tuple[tuple[int, ...], ...],
    axis: Axis = "dp_cp",
    order: RankOrder = USUAL,
    **degrees: int,
) -> list[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Return (inside, across, is_even) of each rank of a plan that reduces hierarchically."""
    rule = {"order": order, "units": units}
    plan = make_plan(**degrees, **rule, gradient_algorithm="hierarchical")  # type: ignore[arg-type]  # degrees are integers
    found = []
    orders = []
    for rank in range(plan.layout.world_size):
        mesh, asked = build(plan, rank)
        orders.append(asked)
        split = mesh.splits[axis]
        for group in (split.inside, split.across):
            assert group.ranks[group.index] == rank
            assert (group.process_group is None) == (group.size == 1)
        found.append((split.inside.ranks, split.across.ranks, split.is_even))
    assert all(order == orders[0] for order in orders)
    return found


def test_even_units_are_joined_at_each_position() -> None:
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    found = splits_of((first, second), dp=8)
    assert found == [
        (first if rank < 4 else second, (rank % 4, rank % 4 + 4), True) for rank in range(8)
    ]


def test_interleaved_units_keep_the_order_of_the_axis() -> None:
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    found = splits_of((even, odd), dp=8)
    assert found == [
        (odd if rank % 2 else even, (rank // 2 * 2, rank // 2 * 2 + 1), True) for rank in range(8)
    ]


def test_uneven_units_are_joined_at_their_first_ranks() -> None:
    three, five = (0, 1, 2), (3, 4, 5, 6, 7)
    found = splits_of((three, five), dp=8)
    across = {0: (0, 3), 3: (0, 3)}
    assert found == [
        (three if rank < 3 else five, across.get(rank, (rank,)), False) for rank in range(8)
    ]


def test_units_of_one_rank_leave_everything_across() -> None:
    found = splits_of(tuple((rank,) for rank in range(4)), dp=4)
    assert found == [((rank,), (0, 1, 2, 3), True) for rank in range(4)]


def test_one_unit_leaves_everything_inside() -> None:
    found = splits_of(((0, 1, 2, 3),), dp=4)
    assert found == [((0, 1, 2, 3), (rank,), True) for rank in range(4)]


def test_units_split_one_group_evenly_and_another_not() -> None:
    # of the dp group (0, 2, 4, 6) the units hold 2 + 2, of (1, 3, 5, 7) 3 + 1
    found = splits_of(((0, 1, 2, 3, 5), (4, 6, 7)), tp=2, dp=4)
    assert found[0] == ((0, 2), (0, 4), True)
    assert found[6] == ((4, 6), (2, 6), True)
    assert found[1] == ((1, 3, 5), (1, 7), False)
    assert found[3] == ((1, 3, 5), (3,), False)
    assert found[7] == ((7,), (1, 7), False)


def test_expert_gradients_split_their_own_groups() -> None:
    # ep 2 * edp 4: the expert gradients of even ranks meet over (0, 2, 4, 6)
    found = splits_of(((0, 1, 2, 3), (4, 5, 6, 7)), "edp", dp=8, ep=2)
    assert found[2] == ((0, 2), (2, 6), True)
    assert found[7] == ((5, 7), (3, 7), True)


def test_gradients_of_whole_replicas_in_a_unit_meet_across_units() -> None:
    # dp outermost: the replicas (0, 1), (2, 3), ... of two stages; stage 0 is (0, 2, 4, 6)
    found = splits_of(((0, 1, 2, 3), (4, 5, 6, 7)), order=OTHER, pp=2, dp=4)
    assert found[0] == ((0, 2), (0, 4), True)
    assert found[7] == ((5, 7), (3, 7), True)


def test_no_unit_groups_are_built_for_a_flat_plan() -> None:
    mesh, asked = build(make_plan(dp=4, ranks_per_unit=2), 0)
    assert asked == [(0, 1, 2, 3)]
    assert mesh.splits == {}


# ---------------------------------------------------------------------------------- real clusters


def units_of(plan: Plan, axis: Axis) -> list[set[int]]:
    """Return the units that each group of ``axis`` lies on."""
    return [{plan.ranks.unit_of(rank) for rank in ranks} for ranks in plan.groups(axis)]


def on_units(ranks_per_unit: int, *, hierarchical: bool = False, **degrees: int) -> Plan:
    algorithm = "hierarchical" if hierarchical else "ring"
    plan = make_plan(**degrees, gradient_algorithm=algorithm)  # type: ignore[arg-type]  # degrees are integers
    rule = RankRule(ranks_per_node=ranks_per_unit, ranks_per_unit=ranks_per_unit)
    return plan.model_copy(update={"ranks": rule})


def test_tp_6_on_nodes_of_8_straddles_nodes() -> None:
    plan = on_units(8, tp=6, dp=4, hierarchical=True)
    assert plan.layout.world_size == 24
    assert units_of(plan, "tp") == [{0}, {0, 1}, {1, 2}, {2}]
    # gradients of tp rank 0 meet over (0, 6, 12, 18), of which node 0 holds two
    mesh, _ = build(plan, 12)
    split = mesh.splits["dp_cp"]
    assert mesh.groups["tp"].ranks == tuple(range(12, 18))
    assert (split.inside.ranks, split.across.ranks, split.is_even) == ((12,), (0, 12, 18), False)


def test_tp_16_fits_the_first_nvl72_four_times_and_then_straddles() -> None:
    plan = on_units(72, tp=16, dp=8)
    assert plan.layout.world_size == 128
    assert units_of(plan, "tp") == [*[{0}] * 4, {0, 1}, *[{1}] * 3]
    mesh, _ = build(plan, 71)
    assert mesh.groups["tp"].ranks == tuple(range(64, 80))
    assert mesh.coordinates["tp"] == 7
    assert mesh.groups["dp"].ranks == tuple(range(7, 128, 16))


@pytest.mark.parametrize(
    ("tp", "num_straddling"), [(1, 0), (2, 0), (3, 2), (4, 0), (6, 2), (8, 0), (12, 2), (24, 1)]
)
def test_24_gpus_straddle_nodes_of_8_unless_tp_divides_8(tp: int, num_straddling: int) -> None:
    plan = plan_of(Layout(tp=tp, dp_shard=24 // tp)).model_copy(
        update={"ranks": RankRule(ranks_per_node=8, ranks_per_unit=8)}
    )
    straddling = [units for units in units_of(plan, "tp") if len(units) > 1]
    assert len(straddling) == num_straddling
    assert (not straddling) == (8 % tp == 0)
    for rank in (0, 11, 23):
        mesh, _ = build(plan, rank)
        assert mesh.groups["tp"].ranks == tuple(range(rank // tp * tp, rank // tp * tp + tp))
        assert mesh.groups["dp"].ranks == tuple(range(rank % tp, 24, tp))
