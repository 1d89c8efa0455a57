"""Groups follow Megatron's order, partition the world and are built alike on every rank."""

from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist

from executor.mesh import Mesh, build_mesh
from planner.plan import AXES, Layout, Plan
from tests.dist.plans import make_plan


def sixteen_ranks() -> Plan:
    plan = make_plan(tp=4, pp=2, dp=2)
    return plan.model_copy(update={"layout": Layout(tp=2, cp=2, dp_replicate=2, pp=2, ep=4)})


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Note the groups that are asked of torch, in order; nothing is connected."""
    asked: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], *, timeout: timedelta, sort_ranks: bool) -> Any:
        assert not sort_ranks, "the plan's order is the ring's order"
        asked.append(tuple(ranks))

    monkeypatch.setattr(dist, "new_group", new_group)
    return asked


def meshes(plan: Plan) -> list[Mesh]:
    return [
        build_mesh(plan, rank=rank, timeout=timedelta(seconds=1))
        for rank in range(plan.layout.world_size)
    ]


# Megatron-LM core/parallel_state.py, initialize_model_parallel, run for these degrees: 16 ranks,
# tp 2, cp 2, dp 2, pp 2, ep 4, default order tp-cp-ep-dp-pp.
def test_groups_are_megatrons(created: list[tuple[int, ...]]) -> None:
    by_rank = meshes(sixteen_ranks())
    assert by_rank[3].groups["tp"].ranks == (2, 3)
    assert by_rank[3].groups["cp"].ranks == (1, 3)
    assert by_rank[3].groups["dp"].ranks == (3, 7)
    assert by_rank[3].groups["pp"].ranks == (3, 11)
    assert by_rank[3].groups["dp_cp"].ranks == (1, 3, 5, 7)
    assert by_rank[3].groups["ep"].ranks == (0, 1, 2, 3)
    assert by_rank[3].groups["edp"].ranks == (3, 7)
    assert by_rank[3].groups["dp_cp"].index == 1


def test_every_rank_creates_the_same_groups_in_the_same_order(
    created: list[tuple[int, ...]],
) -> None:
    first: list[tuple[int, ...]] | None = None
    plan = sixteen_ranks()
    for rank in range(plan.layout.world_size):
        created.clear()
        build_mesh(plan, rank=rank, timeout=timedelta(seconds=1))
        first = first or list(created)
        assert created == first
    assert first is not None
    assert len(first) == len(set(first)), "axes with the same members share a group"


def test_groups_of_an_axis_partition_the_world(created: list[tuple[int, ...]]) -> None:
    by_rank = meshes(sixteen_ranks())
    for axis in AXES:
        distinct = {mesh.groups[axis].ranks for mesh in by_rank}
        assert sorted(rank for ranks in distinct for rank in ranks) == list(range(16))
        for mesh in by_rank:
            group = mesh.groups[axis]
            assert group.ranks[group.index] == mesh.rank


def test_two_axes_of_one_generator_meet_in_one_rank(created: list[tuple[int, ...]]) -> None:
    for mesh in meshes(sixteen_ranks()):
        for generator in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
            for one, other in combinations(generator, 2):
                shared = set(mesh.groups[one].ranks) & set(mesh.groups[other].ranks)  # type: ignore[index]
                assert shared == {mesh.rank}


def test_hierarchical_reduction_splits_dp_by_unit(created: list[tuple[int, ...]]) -> None:
    plan = make_plan(dp=8, ranks_per_node=2, ranks_per_unit=4, gradient_algorithm="hierarchical")
    for mesh in meshes(plan):
        assert mesh.split_dp_cp is not None
        unit, place = divmod(mesh.rank, 4)
        assert mesh.split_dp_cp.inside.ranks == tuple(range(4 * unit, 4 * unit + 4))
        assert mesh.split_dp_cp.across.ranks == (place, place + 4)


def test_no_unit_groups_are_built_for_a_flat_plan(created: list[tuple[int, ...]]) -> None:
    build_mesh(make_plan(dp=4, ranks_per_unit=2), rank=0, timeout=timedelta(seconds=1))
    assert created == [(0, 1, 2, 3)]
