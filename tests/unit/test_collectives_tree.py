"""Two binary trees do the collectives, and send what their geometry says."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.collectives.protocol import Op
from executor.collectives.reduction import REDUCIBLE
from executor.collectives.tree import Tree, double_binary_tree
from executor.mesh import RankGroup
from planner import segments
from tests.unit.collective_checks import check_op
from tests.unit.gloo_ranks import Sent, on_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
Units = tuple[tuple[int, ...], ...]
Reduction = tuple[Op, torch.dtype]

REDUCTIONS = [(op, dtype) for op, dtypes in REDUCIBLE.items() for dtype in dtypes]


@st.composite
def unit_lists(draw: st.DrawFn, *, max_members: int = 9) -> Units:
    """Members in any order, cut into units of any size."""
    members = draw(st.permutations(range(draw(st.integers(1, max_members)))))
    cuts = draw(st.sets(st.integers(1, len(members) - 1))) if len(members) > 1 else set()
    edges = [0, *sorted(cuts), len(members)]
    return tuple(tuple(members[a:b]) for a, b in pairwise(edges))


def size_of(units: Units) -> int:
    return sum(map(len, units))


def depth(parents: Mapping[int, int | None], member: int) -> int:
    above = parents[member]
    return 0 if above is None else 1 + depth(parents, above)


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Iterator[None]:
    """Cut small tensors into many segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_MESSAGE_COST_BYTES", 512)
        yield


def sent_bytes(units: Units, call: Callable[[Tree], None]) -> list[dict[int, int]]:
    """Return the bytes that each member sent to each, in one call."""

    def member(group: RankGroup) -> dict[int, int]:
        call(Tree(group))
        return dict(getattr(group.process_group, "bytes_to", {}))

    return on_ranks(size_of(units), member, units=units)


def total(sent: list[dict[int, int]]) -> int:
    return sum(sum(to.values()) for to in sent)


def leaving(units: Units, sent: list[dict[int, int]]) -> list[int]:
    return [
        sum(count for member in unit for to, count in sent[member].items() if to not in unit)
        for unit in units
    ]


def entering(units: Units, sent: list[dict[int, int]]) -> list[int]:
    return [
        sum(
            to.get(member, 0)
            for sender, to in enumerate(sent)
            if sender not in unit
            for member in unit
        )
        for unit in units
    ]


@given(units=unit_lists(max_members=40))
def test_both_trees_span_the_group_and_join_units_by_as_few_edges_as_can_be(units: Units) -> None:
    unit_of = {member: number for number, unit in enumerate(units) for member in unit}
    for parents in double_binary_tree(units):
        assert sorted(parents) == list(range(size_of(units)))
        assert list(parents.values()).count(None) == 1
        edges = [(low, high) for low, high in parents.items() if high is not None]
        assert sum(unit_of[a] != unit_of[b] for a, b in edges) == len(units) - 1
        for member in parents:
            assert depth(parents, member) < len(parents)


@given(units=unit_lists())
def test_units_are_chains_from_the_first_member_in_one_tree_and_from_the_last_in_the_other(
    units: Units,
) -> None:
    first, second = double_binary_tree(units)
    for unit in units:
        assert first[unit[0]] not in unit
        assert second[unit[-1]] not in unit
        for before, after in pairwise(unit):
            assert first[after] == before
            assert second[before] == after


@given(count=st.integers(1, 70))
def test_trees_of_units_are_binary_as_flat_as_can_be_and_no_unit_is_inner_in_both(
    count: int,
) -> None:
    inner = []
    for parents in double_binary_tree([(member,) for member in range(count)]):
        above = [parent for parent in parents.values() if parent is not None]
        assert all(above.count(parent) <= 2 for parent in above)
        assert max(depth(parents, member) for member in parents) == count.bit_length() - 1
        inner.append(set(above))
    assert not inner[0] & inner[1]


@given(
    units=unit_lists(),
    call=st.sampled_from(["all_reduce", "reduce", "broadcast"]),
    numel=st.one_of(st.integers(0, 20), st.integers(0, 30_000)),
    reduction=st.sampled_from(REDUCTIONS),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_results_are_those_of_the_built_in(
    units: Units, call: str, numel: int, reduction: Reduction, data: st.DataObject
) -> None:
    op, dtype = reduction
    root = data.draw(st.integers(0, size_of(units) - 1))
    check_op(Tree, call, size_of(units), numel, dtype, op, units, root)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_every_reduction_of_every_dtype(reduction: Reduction) -> None:
    op, dtype = reduction
    check_op(Tree, "all_reduce", 3, 5, dtype, op, ())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16])
def test_dtypes_that_gloo_does_not_know_are_broadcast(dtype: torch.dtype) -> None:
    check_op(Tree, "broadcast", 3, 5, dtype, SUM, (), root=2)


@given(units=unit_lists(), numel=st.integers(0, 5_000))
@settings(max_examples=15, deadline=None)
def test_all_reduce_sends_a_half_over_every_edge_of_both_trees_in_both_directions(
    units: Units, numel: int
) -> None:
    sent = sent_bytes(units, lambda tree: tree.all_reduce(torch.ones(numel), SUM))
    halves = (4 * (numel // 2), 4 * (numel - numel // 2))
    for member, to in enumerate(sent):
        edges = [
            list(parents.values()).count(member) + (parents[member] is not None)
            for parents in double_binary_tree(units)
        ]
        assert sum(to.values()) == sum(n * half for n, half in zip(edges, halves, strict=True))
    assert total(sent) == 2 * 4 * numel * (size_of(units) - 1)
    assert sum(entering(units, sent)) == 2 * 4 * numel * (len(units) - 1)


@given(units=unit_lists(), numel=st.integers(0, 5_000), data=st.data())
@settings(max_examples=15, deadline=None)
def test_broadcast_enters_every_unit_but_the_root_s_once(
    units: Units, numel: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size_of(units) - 1))
    sent = sent_bytes(units, lambda tree: tree.broadcast(torch.ones(numel), root))
    assert total(sent) == 4 * numel * (size_of(units) - 1)
    assert entering(units, sent) == [0 if root in unit else 4 * numel for unit in units]


@given(units=unit_lists(), numel=st.integers(0, 5_000), data=st.data())
@settings(max_examples=15, deadline=None)
def test_reduce_leaves_every_unit_but_the_root_s_once(
    units: Units, numel: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size_of(units) - 1))
    sent = sent_bytes(units, lambda tree: tree.reduce(torch.ones(numel), SUM, root))
    assert total(sent) == 4 * numel * (size_of(units) - 1)
    assert leaving(units, sent) == [0 if root in unit else 4 * numel for unit in units]


@pytest.mark.parametrize("op", [SUM, AVG])
def test_all_members_get_the_same_bits(op: Op) -> None:
    def reduced(group: RankGroup) -> torch.Tensor:
        tensor = torch.randn(3_001, generator=torch.Generator().manual_seed(group.index))
        Tree(group).all_reduce(tensor, op)
        return tensor.view(torch.int32)

    first, *others = on_ranks(7, reduced, units=((0, 3, 5), (1, 6), (2,), (4,)))
    assert all(torch.equal(first, other) for other in others)


def test_number_of_segments_grows_with_the_root_of_the_size() -> None:
    def num_messages(numel: int) -> int:
        def member(group: RankGroup) -> int:
            Tree(group).broadcast(torch.ones(numel), 0)
            counted = group.process_group
            assert isinstance(counted, Sent)
            return counted.num_messages

        return on_ranks(2, member)[0]  # one edge in each tree

    assert [num_messages(256 * factor) for factor in (1, 4, 16, 64)] == [2, 4, 8, 16]
