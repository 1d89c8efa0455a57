"""Collectives on levels equal those of one level, and send few bytes from unit to unit."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore  # public without their types

from executor.collectives import hierarchical
from executor.collectives.all_to_all import TwoLevelAllToAll
from executor.collectives.direct import Direct
from executor.collectives.hierarchical import Hierarchical
from executor.collectives.protocol import Op
from executor.collectives.ring import Ring
from executor.mesh import RankGroup, SplitGroup
from planner.segments import hierarchy_pieces
from tests.unit.collective_checks import check_op
from tests.unit.gloo_ranks import Sent, on_ranks, split_by_units

Units = Sequence[Sequence[int]]

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
EVEN: Final = [[0, 1], [2, 3], [4, 5]]
INTERLEAVED: Final = [[3, 0], [1, 2]]
UNEVEN: Final = [[1, 3], [0], [2, 5, 4]]
ALL_UNITS: Final = [EVEN, INTERLEAVED, UNEVEN, [[0], [2], [1]], [[0, 1, 2]]]


def two_levels(units: Units) -> Callable[[RankGroup], Hierarchical]:
    """Return what makes a member's end: messages to all inside, a ring across."""
    store = HashStore()

    def make(whole: RankGroup) -> Hierarchical:
        split = split_by_units(whole, units, store)
        return Hierarchical(Direct(split.inside), Ring(split.across), split, whole)

    return make


def three_levels(units: Units, pods: Units) -> Callable[[RankGroup], Hierarchical]:
    """Return the same with the units themselves in ``pods``, which may be uneven."""
    store = HashStore()

    def make(whole: RankGroup) -> Hierarchical:
        split = split_by_units(whole, units, PrefixStore("units", store))
        if split.across.size == 1:
            return Hierarchical(Direct(split.inside), Direct(split.across), split, whole)
        across = replace(split.across, units=tuple(map(tuple, pods)))
        mates = [[across.ranks[unit] for unit in pod] for pod in pods]
        above = split_by_units(across, mates, PrefixStore("pods", store))
        upper = Hierarchical(Direct(above.inside), Ring(above.across), above, across)
        return Hierarchical(Direct(split.inside), upper, split, whole)

    return make


def count(units: Units) -> int:
    return sum(map(len, units))


@pytest.mark.parametrize("units", ALL_UNITS, ids=str)
@pytest.mark.parametrize("op_name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_two_levels_equal_one(op_name: str, units: Units) -> None:
    for numel, reduce_op in ((7, AVG), (1, MAX), (0, SUM)):
        make = two_levels(units)
        check_op(make, op_name, count(units), numel, torch.float32, reduce_op, units)


@pytest.mark.parametrize("units", ALL_UNITS, ids=str)
def test_two_levels_broadcast_from_every_root(units: Units) -> None:
    for root in range(count(units)):
        check_op(two_levels(units), "broadcast", count(units), 5, torch.int64, SUM, units, root)


@pytest.mark.parametrize("op_name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize(
    ("units", "pods"),
    [([[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 2], [1, 3]]), (UNEVEN, [[0, 2], [1]])],
    ids=["even", "uneven"],
)
def test_three_levels_equal_one(op_name: str, units: Units, pods: Units) -> None:
    make = three_levels(units, pods)
    check_op(make, op_name, count(units), 7, torch.float64, AVG, units, root=count(units) - 1)


def sent_across(units: Units, call: Callable[[Hierarchical, int], None]) -> list[int]:
    """Return the bytes that each member sends to other units when each makes ``call``."""
    store = HashStore()

    def run(whole: RankGroup) -> int:
        split = split_by_units(whole, units, store)
        made = Hierarchical(Direct(split.inside), Ring(split.across), split, whole)
        call(made, whole.index)
        across: Any = split.across.process_group
        return across.bytes_to.total() if across is not None else 0

    return on_ranks(count(units), run, units=units)


def by_unit(units: Units, sent_bytes: list[int]) -> list[int]:
    return [sum(sent_bytes[member] for member in unit) for unit in units]


@pytest.mark.parametrize("units", [EVEN, INTERLEAVED, UNEVEN], ids=str)
def test_each_unit_sends_what_a_ring_of_units_does(units: Units) -> None:
    num_units, size_bytes = len(units), 8 * 12

    def all_reduce(made: Hierarchical, member: int) -> None:
        made.all_reduce(torch.ones(12).double(), SUM)

    expected = 2 * (num_units - 1) * size_bytes // num_units
    assert by_unit(units, sent_across(units, all_reduce)) == [expected] * num_units


@pytest.mark.parametrize("units", [EVEN, INTERLEAVED], ids=str)
def test_pieces_sum_up_and_send_what_the_whole_does(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(made: Hierarchical, member: int) -> None:
        made.all_reduce(torch.ones(72).double(), SUM)

    whole = sent_across(units, all_reduce)
    monkeypatch.setattr(hierarchical, "hierarchy_pieces", lambda _: 6)
    assert sent_across(units, all_reduce) == whole
    for numel, reduce_op in ((72, AVG), (67, SUM), (25, MAX)):
        make = two_levels(units)
        check_op(make, "all_reduce", count(units), numel, torch.float32, reduce_op, units)


class Meeting:
    """A level whose second piece is reduced inside only while the first one is on its way."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_behind = threading.Event()

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        self.num_inside += 1
        if self.num_inside == 2:
            self.is_behind.set()

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        assert self.is_behind.wait(10.0), "the second piece waits for the first to have crossed"

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass


def test_a_piece_is_reduced_inside_while_the_one_before_it_crosses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hierarchical, "hierarchy_pieces", lambda _: 2)
    level = Meeting()
    whole = RankGroup((0, 1, 2, 3), 0, None, ((0, 1), (2, 3)))
    split = SplitGroup(RankGroup((0, 1), 0, None), RankGroup((0, 2), 0, None), is_even=True)
    Hierarchical(level, level, split, whole).all_reduce(torch.ones(4), SUM)
    assert level.num_inside == 2


class Counting:
    """A level that does nothing but count its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        self.calls["reduce_scatter"] += 1

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        self.calls["all_reduce"] += 1

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self.calls["all_gather"] += 1

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.calls["broadcast"] += 1


@pytest.mark.parametrize("kib", [0, 4, 1023, 1024, 2304, 4096, 10_000, 65_536])
def test_a_tensor_goes_in_as_many_pieces_as_the_model_prices(kib: int) -> None:
    inside, across = Counting(), Counting()
    whole = RankGroup((0, 1, 2, 3), 0, None, ((0, 1), (2, 3)))
    split = SplitGroup(RankGroup((0, 1), 0, None), RankGroup((0, 2), 0, None), is_even=True)
    tensor = torch.empty(kib * 1024 // 4)
    Hierarchical(inside, across, split, whole).all_reduce(tensor, SUM)
    pieces = int(hierarchy_pieces(tensor.nbytes))
    assert inside.calls == {"reduce_scatter": pieces, "all_gather": pieces}
    assert across.calls == {"all_reduce": pieces}


@pytest.mark.parametrize("units", [EVEN, INTERLEAVED, UNEVEN], ids=str)
def test_shards_leave_their_unit_once_per_other_unit(units: Units) -> None:
    """Those of the largest unit do; smaller units send as many."""
    shard_bytes, num_largest = 8 * 3, max(map(len, units))

    def all_gather(made: Hierarchical, member: int) -> None:
        made.all_gather(torch.ones(3 * count(units)).double(), torch.ones(3).double())

    def reduce_scatter(made: Hierarchical, member: int) -> None:
        made.reduce_scatter(torch.ones(3).double(), torch.ones(3 * count(units)).double(), SUM)

    expected = [(len(units) - 1) * num_largest * shard_bytes] * len(units)
    assert by_unit(units, sent_across(units, all_gather)) == expected
    assert by_unit(units, sent_across(units, reduce_scatter)) == expected


def test_a_broadcast_crosses_to_each_other_unit_once_between_members_of_one_position() -> None:
    def broadcast(made: Hierarchical, member: int) -> None:
        made.broadcast(torch.ones(3).double(), 3)

    positions = [sent_across(EVEN, broadcast)[position::2] for position in (0, 1)]
    assert [sum(sent_bytes) for sent_bytes in positions] == [0, 2 * 8 * 3]


@pytest.mark.parametrize("units", [*ALL_UNITS, [[0, 1, 2, 3], [5], [4, 6]]], ids=str)
def test_all_to_all_in_two_phases_equals_one(units: Units) -> None:
    for numel in (4, 1, 0):
        check_op(TwoLevelAllToAll, "all_to_all", count(units), numel, torch.float32, SUM, units)


def test_all_to_all_sends_one_message_to_each_member_inside_and_to_each_unit() -> None:
    units = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def messages(whole: RankGroup) -> tuple[int, int, int]:
        made, sent = TwoLevelAllToAll(whole), whole.process_group
        assert isinstance(sent, Sent)
        made.all_to_all(torch.empty(8, 5), torch.ones(8, 5), None, None)
        even, away = sent.num_messages, units[1 - whole.index // 4]
        across_bytes = sum(sent.bytes_to[to] for to in away)
        made.all_to_all(torch.empty(8, 5), torch.ones(8, 5), [1] * 8, [1] * 8)
        return even, sent.num_messages - even, across_bytes

    inside, other_units, row_bytes = 3, 1, 4 * 5
    counts = on_ranks(8, messages, units=units)
    assert {c[:2] for c in counts} == {(inside + other_units, 2 * inside + other_units)}
    assert sum(c[2] for c in counts) == 2 * 4 * 4 * row_bytes  # 4 rows of each of 4, both ways
