"""Recursive halving and doubling: log2(n) exchanges, the largest with the nearest member.

Members stand in the order of ``RankGroup.circle``. Halving exchanges S/2 with the neighbour, then
S/4 at distance 2, and so on; doubling is the same backwards. So of two units with n/2 members each
only the smallest pieces, S/n a member, cross between them. Of S bytes (nccl-tests' S) a member
sends 2(n-1)/n S in an all_reduce, half of it in an all_gather or a reduce_scatter. Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

If n is no power of two, P of the members take part, as in MPICH's all_reduce: on each of the first
n - P pairs of the circle the second hands what it holds to the first before, and gets the result
after. That is, besides what P members send: S and S in an all_reduce, a shard and S in an
all_gather, S and a shard in a reduce_scatter.
"""

from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import NamedTuple

import torch
import torch.distributed as dist

from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Op
from executor.collectives.reduction import accumulate, average, require_reducible
from executor.mesh import RankGroup

__all__ = ["HalvingDoubling"]


class _Exchange(NamedTuple):
    """One with a partner: halving keeps one half of a range and gives the other."""

    partner: int
    kept: torch.Tensor
    given: torch.Tensor


class HalvingDoubling:
    """all_reduce, all_gather and reduce_scatter of ``Collectives``; needs room for S again.

    A block is reduced along one tree, by one member: all members get the same bits. Blocks lie in
    the order that keeps every exchange contiguous: a member's is at its position, bits reversed.
    """

    def __init__(self, group: RankGroup) -> None:
        self._messages = Messages(group)
        self._size = group.size
        self._num_exchanges = group.size.bit_length() - 1
        num_takers = 1 << self._num_exchanges
        num_paired = 2 * (group.size - num_takers)
        circle = group.circle
        self._teams = [circle[i : i + 2] for i in range(0, num_paired, 2)]
        self._teams += [(member,) for member in circle[num_paired:]]
        self._position = next(p for p, team in enumerate(self._teams) if group.index in team)
        self._first, *self._second = self._teams[self._position]
        self._is_second = group.index != self._first
        blocks = [self._teams[self._reversed(block)] for block in range(num_takers)]
        self._order = [member for block in blocks for member in block]
        self._places = [self._order.index(member) for member in range(group.size)]
        self._place = self._places[group.index]
        self._block_ends = [0, *running_sums(len(block) for block in blocks)]

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place.

        Raises:
            RuntimeError: gloo has no such reduction of this dtype.
        """
        require_reducible(tensor, op)
        flat = tensor.view(-1)
        if self._is_second:
            self._hand_over(flat, flat)
            return
        num_takers = len(self._teams)
        ends = [flat.numel() * block // num_takers for block in range(num_takers + 1)]
        exchanges = self._exchanges(flat, ends)
        halves = self._receive_halves(exchanges)
        rest = self._receive_given(exchanges)
        self._take_over(flat, op)
        self._halve(exchanges, halves, op)
        average(exchanges[-1].kept if exchanges else flat, op, self._size)
        self._double(exchanges, rest)
        self._give_back(flat)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        flat = whole.view(-1)
        in_order = self._places == list(range(self._size))
        blocks = flat if in_order else torch.empty_like(flat)
        parts = blocks.tensor_split(self._size)
        if self._is_second:
            self._hand_over(shard.view(-1), blocks)
        else:
            parts[self._place].copy_(shard.view(-1))
            exchanges = self._exchanges(blocks, [shard.numel() * end for end in self._block_ends])
            rest = self._receive_given(exchanges)
            wait(*(self._messages.receive(parts[self._place + 1], m) for m in self._second))
            self._double(exchanges, rest)
            self._give_back(blocks)
        if not in_order:
            torch.cat([parts[place] for place in self._places], out=flat)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``, which stays.

        Raises:
            RuntimeError: gloo has no such reduction of this dtype.
        """
        require_reducible(whole, op)
        members = whole.view(-1).tensor_split(self._size)
        blocks = torch.cat([members[member] for member in self._order])
        if self._is_second:
            self._hand_over(blocks, shard.view(-1))
            return
        exchanges = self._exchanges(blocks, [shard.numel() * end for end in self._block_ends])
        halves = self._receive_halves(exchanges)
        self._take_over(blocks, op)
        self._halve(exchanges, halves, op)
        mine, *others = blocks.tensor_split(self._size)[self._place :]
        average(exchanges[-1].kept if exchanges else mine, op, self._size)
        shard.view(-1).copy_(mine)
        self._give_back(others[0] if self._second else mine)

    def _reversed(self, position: int) -> int:
        bits = f"{position:b}".zfill(self._num_exchanges)
        return int(bits[::-1], 2)

    def _exchanges(self, flat: torch.Tensor, ends: Sequence[int]) -> list[_Exchange]:
        """Return the exchanges of halving ``flat``, whose blocks begin and end at ``ends``."""
        exchanges = []
        low, high = 0, len(self._teams)
        for i in range(self._num_exchanges):
            middle = (low + high) // 2
            lower, upper = flat[ends[low] : ends[middle]], flat[ends[middle] : ends[high]]
            partner = self._teams[self._position ^ (1 << i)][0]
            if self._position >> i & 1:
                low = middle
                exchanges.append(_Exchange(partner, kept=upper, given=lower))
            else:
                high = middle
                exchanges.append(_Exchange(partner, kept=lower, given=upper))
        return exchanges

    # A receive is posted as early as may be: a sender waits for it. Nothing arrives too early, as
    # what a member sends back depends on what it was given.

    def _receive_halves(
        self, exchanges: Sequence[_Exchange]
    ) -> list[tuple[torch.Tensor, dist.Work | None]]:
        halves = [torch.empty_like(exchange.kept) for exchange in exchanges]
        works = [
            self._messages.receive(half, e.partner)
            for half, e in zip(halves, exchanges, strict=True)
        ]
        return list(zip(halves, works, strict=True))

    def _receive_given(self, exchanges: Sequence[_Exchange]) -> list[dist.Work | None]:
        return [self._messages.receive(e.given, e.partner) for e in exchanges]

    def _halve(
        self,
        exchanges: Sequence[_Exchange],
        halves: Sequence[tuple[torch.Tensor, dist.Work | None]],
        op: Op,
    ) -> None:
        for (partner, kept, given), (half, receive) in zip(exchanges, halves, strict=True):
            send = self._messages.send(given, partner)
            wait(receive)
            accumulate(kept, half, op)
            wait(send)

    def _double(self, exchanges: Sequence[_Exchange], receives: Sequence[dist.Work | None]) -> None:
        for exchange, receive in zip(reversed(exchanges), reversed(receives), strict=True):
            wait(self._messages.send(exchange.kept, exchange.partner), receive)

    def _hand_over(self, held: torch.Tensor, result: torch.Tensor) -> None:
        """As the second of a pair: give what is held to the first, and wait for the result."""
        receive = self._messages.receive(result, self._first)
        wait(self._messages.send(held, self._first), receive)

    def _take_over(self, held: torch.Tensor, op: Op) -> None:
        """As the first of a pair: reduce what the second holds into what is held."""
        for second in self._second:
            other = torch.empty_like(held)
            wait(self._messages.receive(other, second))
            accumulate(held, other, op)

    def _give_back(self, result: torch.Tensor) -> None:
        """As the first of a pair: give the second its result."""
        wait(*(self._messages.send(result, second) for second in self._second))
