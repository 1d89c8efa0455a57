"""One check for all collectives of all implementations: the right result, and untouched inputs.

Values are small integers, so that every order of reduction gives the same bits in every dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from executor.collectives.protocol import Op
from executor.mesh import RankGroup
from tests.unit.gloo_ranks import on_ranks

__all__ = ["check_op", "leave_together", "small_integers"]


def check_op(
    make: Callable[[RankGroup], Any],
    op_name: str,
    size: int,
    numel: int,
    dtype: torch.dtype,
    reduce_op: Op,
    units: Sequence[Sequence[int]],
    root: int = 0,
) -> None:
    """Raise AssertionError if a collective's result differs from what it should be.

    Reductions are compared with gloo's all_reduce on the same group, data movement with the
    inputs themselves.

    Args:
        make: Makes the implementation on each member.
        op_name: A method of ``Collectives``.
        size: Members, which are threads.
        numel: Of the tensor of an all_reduce, reduce and broadcast; of one member's shard; of an
            all_to_all the largest piece.
        dtype: Of all tensors.
        reduce_op: Of the three reductions.
        units: Members by unit; empty if all lie on one.
        root: Member, of the four that have one.
    """

    def check(group: RankGroup) -> None:
        _CHECKS[op_name](make(group), _Case(group, numel, dtype, reduce_op, root))
        leave_together(group)

    on_ranks(size, check, units=units)


def leave_together(group: RankGroup) -> None:
    """Wait for all: gloo fails on members that still connect to one that has left."""
    if group.process_group is not None:
        group.process_group.barrier().wait()


def small_integers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return [numel] of -2 to 2, without the negative ones where the dtype has none."""
    drawn = torch.randint(-2, 3, (numel,), generator=torch.Generator().manual_seed(seed))
    if dtype.is_complex:
        return torch.complex(drawn.double(), drawn.flip(0).double()).to(dtype)
    return (drawn if dtype.is_signed else drawn.abs()).to(dtype)


@dataclass(frozen=True, slots=True)
class _Case:
    group: RankGroup
    numel: int
    dtype: torch.dtype
    op: Op
    root: int

    @property
    def members(self) -> range:
        return range(self.group.size)

    @property
    def is_root(self) -> bool:
        return self.group.index == self.root

    def held(self, member: int, parts: int = 1) -> torch.Tensor:
        return small_integers(parts * self.numel, self.dtype, seed=member)

    def mine(self, parts: int = 1) -> torch.Tensor:
        return self.held(self.group.index, parts)

    def blank(self, parts: int = 1) -> torch.Tensor:
        return torch.full((parts * self.numel,), 7, dtype=torch.float32).to(self.dtype)

    def reduced(self, parts: int = 1) -> torch.Tensor:
        tensor = self.mine(parts)
        if self.group.process_group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(self.op)
            self.group.process_group.allreduce([tensor], options).wait()
        return tensor

    def part(self, whole: torch.Tensor, member: int) -> torch.Tensor:
        return whole[member * self.numel : (member + 1) * self.numel]

    def gathered(self) -> torch.Tensor:
        return torch.cat([self.held(member) for member in self.members])


def _check_all_reduce(made: Any, case: _Case) -> None:
    expected, tensor = case.reduced(), case.mine()
    made.all_reduce(tensor, case.op)
    _assert_same(tensor, expected)


def _check_all_gather(made: Any, case: _Case) -> None:
    whole, shard = case.blank(case.group.size), case.mine()
    made.all_gather(whole, shard)
    _assert_same(whole, case.gathered())
    _assert_same(shard, case.mine())


def _check_reduce_scatter(made: Any, case: _Case) -> None:
    size = case.group.size
    expected = case.part(case.reduced(size), case.group.index)
    shard, whole = case.blank(), case.mine(size)
    made.reduce_scatter(shard, whole, case.op)
    _assert_same(shard, expected)
    _assert_same(whole, case.mine(size))


def _check_all_to_all(made: Any, case: _Case) -> None:
    even, rows = case.blank(case.group.size), case.mine(case.group.size)
    made.all_to_all(even, rows, None, None)
    sent = [case.held(member, case.group.size) for member in case.members]
    _assert_same(even, torch.cat([case.part(one, case.group.index) for one in sent]))
    _assert_same(rows, case.mine(case.group.size))
    _check_uneven_all_to_all(made, case)


def _check_uneven_all_to_all(made: Any, case: _Case) -> None:
    def rows_of(sender: int) -> list[torch.Tensor]:
        counts = [(3 * sender + 5 * to + case.numel) % (case.numel + 1) for to in case.members]
        values = small_integers(2 * sum(counts), case.dtype, seed=sender).view(-1, 2)
        return list(torch.split(values, counts))

    pieces = rows_of(case.group.index)
    expected = [rows_of(sender)[case.group.index] for sender in case.members]
    received = torch.empty(sum(len(e) for e in expected), 2, dtype=case.dtype)
    rows = torch.cat(pieces)
    made.all_to_all(received, rows, [len(p) for p in pieces], [len(e) for e in expected])
    _assert_same(received, torch.cat(expected))
    _assert_same(rows, torch.cat(pieces))


def _check_broadcast(made: Any, case: _Case) -> None:
    tensor = case.mine()
    made.broadcast(tensor, case.root)
    _assert_same(tensor, case.held(case.root))


def _check_reduce(made: Any, case: _Case) -> None:
    expected, tensor = case.reduced(), case.mine()
    made.reduce(tensor, case.op, case.root)
    if case.is_root:
        _assert_same(tensor, expected)


def _check_gather(made: Any, case: _Case) -> None:
    whole, shard = case.blank(case.group.size) if case.is_root else None, case.mine()
    made.gather(whole, shard, case.root)
    if whole is not None:
        _assert_same(whole, case.gathered())
    _assert_same(shard, case.mine())


def _check_scatter(made: Any, case: _Case) -> None:
    shard, whole = case.blank(), case.mine(case.group.size) if case.is_root else None
    made.scatter(shard, whole, case.root)
    sent = case.held(case.root, case.group.size)
    _assert_same(shard, case.part(sent, case.group.index))
    if whole is not None:
        _assert_same(whole, sent)


def _assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.dtype == torch.bool:  # gloo adds the bytes, so its True may be a 2
        got, expected = got.view(torch.uint8) != 0, expected.view(torch.uint8) != 0
    elif got.dtype.itemsize == 1:  # float8 cannot be compared
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(got, expected)


_CHECKS: Final[dict[str, Callable[[Any, _Case], None]]] = {
    "all_reduce": _check_all_reduce,
    "all_gather": _check_all_gather,
    "reduce_scatter": _check_reduce_scatter,
    "all_to_all": _check_all_to_all,
    "broadcast": _check_broadcast,
    "reduce": _check_reduce,
    "gather": _check_gather,
    "scatter": _check_scatter,
}
