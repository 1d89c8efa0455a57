"""Axes on levels against an enumeration of every rank."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from planner.layout.candidates import distinct
from planner.layout.groups import axis_group, inner_group, lay_group, outer_group
from planner.plan import AXES, Axis, Layout, groups
from planner.topology.fabric import Level
from tests.unit.problems import fabric, row

UNIT = 8


def fewest_in_a_shared_unit(ranks: list[tuple[int, ...]], unit_size: int) -> int:
    """Return the smallest number of members that any group has in a unit it enters."""
    return min(
        min(np.unique(np.array(group) // unit_size, return_counts=True)[1]) for group in ranks
    )


ALIGNED = [
    Layout(tp=t, cp=c, dp_shard=d, pp=p)
    for t, c, d, p in product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4))
    if (t * c * d * p) % UNIT == 0
]


@pytest.mark.parametrize("layout", ALIGNED, ids=str)
def test_members_per_node_equal_the_enumeration(layout: Layout) -> None:
    candidate = row(**{name: getattr(layout, name) for name in Layout.model_fields})
    for axis in AXES:
        found = axis_group(fabric(layout.world_size), candidate, axis).members[0][0]
        assert found == fewest_in_a_shared_unit(groups(layout, axis), UNIT), axis


@pytest.mark.parametrize(
    ("tp", "world", "expected"), [(6, 24, 2), (3, 24, 1), (12, 24, 4), (16, 144, 8), (24, 48, 8)]
)
def test_a_straddling_axis_counts_its_smallest_part(tp: int, world: int, expected: int) -> None:
    layout = Layout(tp=tp, dp_shard=world // tp)
    assert fewest_in_a_shared_unit(groups(layout, "tp"), UNIT) == expected
    found = axis_group(fabric(world), row(tp=tp, dp_shard=world // tp), "tp").members[0][0]
    assert found == expected


def test_tp_16_stays_inside_an_nvl72_domain() -> None:
    domain = Level("nvl72", "nvlink", 72, 9e11, 1e-6, "test")
    rail = Level("rail", "infiniband", 1 << 20, 5e10, 1e-5, "test")
    rack = fabric(144, gpus_per_node=4, levels=(domain, rail))
    assert axis_group(rack, row(tp=8, dp_shard=18), "tp").members[0][0] == 8
    assert axis_group(rack, row(tp=16, dp_shard=9), "tp").members[0][0] == 8  # 72 = 4.5 x 16


def test_a_group_is_its_inner_part_times_its_outer_part() -> None:
    degree, stride = np.array([1, 2, 8, 16, 64, 512]), np.array([1, 4, 2, 1, 8, 1])
    group = lay_group(fabric(4096), degree, stride)
    assert (inner_group(group).degree * outer_group(group).degree == degree).all()
    assert (group.members[-1] == degree).all()
    for below, inside in zip(group.members, group.members[1:], strict=False):
        assert (below <= inside).all()


def test_distinct_values_gather_back_to_every_row() -> None:
    rng = np.random.default_rng(0)
    template = row()
    many = template.take(np.zeros(5000, dtype=int))
    many = replace(
        many,
        tp=rng.choice([1, 2, 4, 8], 5000),
        micro_batch_size=rng.choice([1, 2, 1_000_000_007], 5000),
    )

    keys, inverse = distinct(many, ("tp", "micro_batch_size"))
    assert len(keys) == 4 * 3
    again = keys.take(inverse)
    assert (again.tp == many.tp).all()
    assert (again.micro_batch_size == many.micro_batch_size).all()


NODE = Level("node", "nvlink", 4, 9e11, 1e-6, "test")
LEAF = Level("leaf", "infiniband", 16, 5e10, 1e-5, "test")
CORE = Level("core", "infiniband", 1 << 20, 2e10, 2e-5, "test")

# Degrees of every row below, in the order that ranks are numbered in: Megatron-LM's
# tp-cp-ep-dp-pp (core/parallel_state), replicas outside shards.
DENSE_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
EXPERT_ORDER = ("etp", "ep", "edp", "pp")
HYBRID = Layout(tp=2, cp=2, dp_shard=4, dp_replicate=2, pp=2, ep=4, etp=2)
ALONG: dict[Axis, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp": (DENSE_ORDER, ("tp",)),
    "cp": (DENSE_ORDER, ("cp",)),
    "dp": (DENSE_ORDER, ("dp_shard", "dp_replicate")),
    "dp_shard": (DENSE_ORDER, ("dp_shard",)),
    "dp_replicate": (DENSE_ORDER, ("dp_replicate",)),
    "dp_cp": (DENSE_ORDER, ("cp", "dp_shard", "dp_replicate")),
    "dp_shard_cp": (DENSE_ORDER, ("cp", "dp_shard")),
    "pp": (DENSE_ORDER, ("pp",)),
    "etp": (EXPERT_ORDER, ("etp",)),
    "ep": (EXPERT_ORDER, ("ep",)),
    "edp": (EXPERT_ORDER, ("edp",)),
}
SIZES = {"tp": 2, "cp": 2, "dp_shard": 4, "dp_replicate": 2, "pp": 2, "etp": 2, "ep": 4, "edp": 4}


def enumerated(axis: Axis) -> list[tuple[int, ...]]:
    """Return the groups of ``axis`` by walking every coordinate; the first degree runs fastest."""
    order, along = ALONG[axis]
    found: dict[tuple[int, ...], list[int]] = {}
    places = product(*(range(SIZES[name]) for name in reversed(order)))
    for rank, place in enumerate(places):
        of_name = dict(zip(reversed(order), place, strict=True))
        fixed = tuple(of_name[name] for name in order if name not in along)
        found.setdefault(fixed, []).append(rank)
    return sorted(tuple(ranks) for ranks in found.values())


@pytest.mark.parametrize("axis", AXES)
def test_hybrid_sharding_and_experts_lie_as_enumerated(axis: Axis) -> None:
    assert sorted(groups(HYBRID, axis)) == enumerated(axis)
    degrees = {name: getattr(HYBRID, name) for name in Layout.model_fields}
    small = fabric(64, gpus_per_node=4, levels=(NODE, LEAF, CORE))
    group = axis_group(small, row(**degrees), axis)
    inside = [fewest_in_a_shared_unit(enumerated(axis), unit) for unit in (4, 16, 64)]
    assert [int(members[0]) for members in group.members] == inside


def test_the_outer_ring_keeps_every_level() -> None:
    """512 ranks: 8 in a node, 256 behind a rail; as nodes 64, of which 32 behind a rail."""
    outer = outer_group(lay_group(fabric(4096), np.array([512]), np.array([1])))
    assert int(outer.degree[0]) == 64
    assert [int(members[0]) for members in outer.members] == [1, 32, 64]
    inner = inner_group(lay_group(fabric(4096), np.array([512]), np.array([1])))
    assert int(inner.degree[0]) == 8
    assert [int(members[0]) for members in inner.members] == [8, 8, 8]


@pytest.mark.parametrize(
    ("degree", "stride", "expected"),
    [(512, 1, True), (2, 1, False), (8, 1, False), (16, 8, False), (8, 4, True), (12, 1, False)],
)
def test_a_hierarchy_needs_several_in_each_of_several_nodes(
    degree: int, stride: int, expected: bool
) -> None:
    group = lay_group(fabric(4096), np.array([degree]), np.array([stride]))
    assert bool(group.has_hierarchy()[0]) is expected


# --------------------------------------------------------- unequal units, every group enumerated


def counts_in_units(sizes: tuple[int, ...], degree: int, stride: int) -> list[list[int]]:
    """Return how many members each group has in each unit that it enters."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    span = degree * stride
    return [
        np.unique(unit[first + j : first + span : stride], return_counts=True)[1].tolist()
        for first in range(0, len(unit), span)
        for j in range(stride)
    ]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("equal", [True, False])
def test_members_and_evenness_are_those_of_every_group_of_the_axis(equal: bool) -> None:
    rng = np.random.default_rng(7)
    for _ in range(150):
        num_units = int(rng.integers(1, 6))
        sizes = tuple(rng.integers(1, 13, 1 if equal else num_units).tolist())
        sizes = sizes * num_units if equal else sizes
        world = sum(sizes)
        node = replace(NODE, unit_size=max(sizes))
        if len(set(sizes)) > 1:
            node = replace(node, unit_sizes=sizes)
        wide = fabric(world, levels=(node, replace(CORE, unit_size=world)))
        laid = [(s // d, d) for s in divisors(world) for d in divisors(s)]
        degrees, strides = (np.array(column) for column in zip(*laid, strict=True))
        group = lay_group(wide, degrees, strides)
        for i, (degree, stride) in enumerate(laid):
            counts = counts_in_units(sizes, degree, stride)
            fewest = min(map(min, counts))
            assert group.members[0][i] == fewest, (sizes, degree, stride)
            even = all(count == fewest for of_group in counts for count in of_group)
            several = bool(1 < fewest < degree)
            assert bool(group.has_hierarchy()[i]) is (several and even), (sizes, degree, stride)
            if fewest > 1:
                assert bool(group.even[0][i]) is even, (sizes, degree, stride)


def test_members_of_unequal_levels_never_shrink_outwards() -> None:
    """Nodes of 4, leaves of 12 and 4: a pair of nodes may share a leaf or not."""
    leaf = replace(LEAF, unit_size=12, unit_sizes=(12, 4))
    wide = fabric(16, levels=(NODE, leaf, replace(CORE, unit_size=16)))
    degrees, strides = np.array([16, 8, 4, 2, 2]), np.array([1, 1, 1, 8, 4])
    group = lay_group(wide, degrees, strides)
    assert [m.tolist() for m in group.members] == [
        [4, 4, 4, 1, 1],
        [4, 4, 4, 1, 1],
        [16, 8, 4, 2, 2],
    ]
    # 80 ranks on leaves of 72: as if leaves went on for ever, 20 ranks might have 4 in one; the
    # real nodes below say 8
    nodes = replace(NODE, unit_sizes=(20, 20, 20, 12, 8))
    levels = (nodes, replace(LEAF, unit_size=72), replace(CORE, unit_size=80))
    group = lay_group(fabric(80, levels=levels), np.array([20]), np.array([1]))
    assert [int(m[0]) for m in group.members] == [8, 8, 20]


def test_a_stride_that_does_not_divide_a_node_leaves_nodes_uneven() -> None:
    """tp 3 on nodes of 8: dp 8 apart by 3 has 3, 3 and 2 members on three nodes."""
    group = axis_group(fabric(24), row(tp=3, dp_shard=8), "dp")
    assert int(group.members[0][0]) == 2
    assert not group.has_hierarchy()[0]
