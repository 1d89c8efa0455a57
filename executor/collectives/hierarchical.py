"""Collectives inside the units of a fabric and across them, so that few bytes cross.

Below, n = members, U = units, S = nccl-tests' size in bytes; a *position* is a member's index in
its unit. Where units hold equally many members, those of one position form a group across and each
carries its part; where they do not, the first member of each unit, its *head*, carries all.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist

from executor.collectives.protocol import Op
from executor.collectives.reduction import average, require_reducible
from executor.mesh import RankGroup, SplitGroup
from planner.segments import hierarchy_pieces

__all__ = ["Hierarchical", "LevelCollectives"]


class LevelCollectives(Protocol):
    """What a level needs of the levels that it is made of (``protocol.Collectives``)."""

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``, which stays."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``."""


class Hierarchical:
    """The collectives of a group on two levels; on three, if ``across`` is hierarchical itself.

    Results are in member order of the whole group, whichever members a unit holds. The bytes given
    below are those that the units send each other if ``across`` is a ring or halving-doubling.
    """

    def __init__(
        self,
        inside: LevelCollectives,
        across: LevelCollectives,
        split: SplitGroup,
        whole: RankGroup,
    ) -> None:
        """Make the two levels one.

        Args:
            inside: The collectives of ``split.inside``.
            across: The collectives of ``split.across``.
            split: The group by units.
            whole: The group, with its ``units`` in the order of ``split.across``.
        """
        self._inside, self._across, self._is_even = inside, across, split.is_even
        self._size = whole.size
        self._units = whole.units or (tuple(range(whole.size)),)
        self._place = {
            member: (unit, position)
            for unit, members in enumerate(self._units)
            for position, member in enumerate(members)
        }
        self._unit, self._position = self._place[whole.index]
        mine = tuple(whole.ranks[member] for member in self._units[self._unit])
        assert mine == split.inside.ranks, f"unit {mine} of the group is not {split.inside.ranks}"

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place. Each unit sends 2 (U - 1) / U S.

        Even units: reduce_scatter, all_reduce across, all_gather, of large tensors by pieces, so
        that the levels work at the same time; a size that the unit does not divide is padded in a
        copy. Else: all_reduce inside, across from head to head, broadcast.
        """
        require_reducible(tensor, op)
        if self._is_even:
            self._all_reduce_by_shards(tensor.view(-1), op)
            return
        self._inside.all_reduce(tensor, _summed(op))
        if self._position == 0:
            self._across.all_reduce(tensor, _summed(op))
            average(tensor, op, self._size)
        self._inside.broadcast(tensor, 0)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards.

        Even units: across, then inside; each unit sends (U - 1) / U S. Else: inside, from head to
        head in blocks as long as the largest unit, of g members, needs, and a broadcast; each unit
        sends (U - 1) g / n S.
        """
        blocks = shard.new_empty(len(self._slots()), shard.numel())
        if self._is_even:
            shards = shard.new_empty(len(self._units), shard.numel())
            self._across.all_gather(shards, shard)
            self._inside.all_gather(blocks, shards)
        else:
            own = shard.new_empty(self._largest, shard.numel())
            self._inside.all_gather(own[: len(self._units[self._unit])], shard)
            if self._position == 0:
                self._across.all_gather(blocks, own)
            self._inside.broadcast(blocks, 0)
        for block, part in self._paired(blocks, whole):
            part.copy_(block)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``.

        The mirror of all_gather: the same steps backwards, and the same bytes.
        """
        require_reducible(whole, op)
        blocks = shard.new_zeros(len(self._slots()), shard.numel())
        for block, part in self._paired(blocks, whole):
            block.copy_(part)
        if self._is_even:
            mine = shard.new_empty(len(self._units), shard.numel())
            self._inside.reduce_scatter(mine, blocks, _summed(op))
            self._across.reduce_scatter(shard, mine, _summed(op))
        else:
            self._inside.all_reduce(blocks, _summed(op))
            own = shard.new_empty(self._largest, shard.numel())
            if self._position == 0:
                self._across.reduce_scatter(own, blocks, _summed(op))
            self._inside.broadcast(own, 0)
            shard.view(-1).copy_(own[self._position])
        average(shard, op, self._size)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``: across to its position, then inside each unit.

        Uneven units: inside the root's unit, from head to head, inside the other units. Each unit
        but the root's gets S once.
        """
        unit, position = self._place[root]
        carrier = position if self._is_even else 0
        has_it_first = self._unit == unit and position != carrier
        if has_it_first:
            self._inside.broadcast(tensor, position)
        if self._position == carrier:
            self._across.broadcast(tensor, unit)
        if not has_it_first:
            self._inside.broadcast(tensor, carrier)

    def _all_reduce_by_shards(self, flat: torch.Tensor, op: Op) -> None:
        unit_size = len(self._units[self._unit])
        padding = -flat.numel() % unit_size
        padded = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
        per_piece = -(-padded.numel() // int(hierarchy_pieces(padded.nbytes)))
        pieces = torch.split(padded, max(1, -(-per_piece // unit_size)) * unit_size)
        if len(pieces) == 1:
            shard = self._shard_of(padded, op)
            self._cross(shard, op)
            self._inside.all_gather(padded, shard)
        else:
            self._all_reduce_in_line(pieces, op)
        if padding:
            flat.copy_(padded[: flat.numel()])

    def _all_reduce_in_line(self, pieces: Sequence[torch.Tensor], op: Op) -> None:
        """Have a piece cross while the one behind it is reduced inside, and the one before spread.

        Only the second thread calls ``across`` meanwhile, and only this one ``inside``, all members
        in the same order.
        """
        with ThreadPoolExecutor(max_workers=1) as second:
            before: tuple[torch.Tensor, torch.Tensor, Future[None]] | None = None
            for piece in pieces:
                shard = self._shard_of(piece, op)
                crossing = second.submit(self._cross, shard, op)
                if before is not None:
                    self._spread(*before)
                before = piece, shard, crossing
            assert before is not None, "there are pieces"
            self._spread(*before)

    def _shard_of(self, piece: torch.Tensor, op: Op) -> torch.Tensor:
        shard = piece.new_empty(piece.numel() // len(self._units[self._unit]))
        self._inside.reduce_scatter(shard, piece, _summed(op))
        return shard

    def _cross(self, shard: torch.Tensor, op: Op) -> None:
        self._across.all_reduce(shard, _summed(op))
        average(shard, op, self._size)

    def _spread(self, piece: torch.Tensor, shard: torch.Tensor, crossing: Future[None]) -> None:
        crossing.result()
        self._inside.all_gather(piece, shard)

    @property
    def _largest(self) -> int:
        return max(map(len, self._units))

    def _slots(self) -> list[int | None]:
        """Return the member of each block on its way across; None pads a smaller unit.

        Even units: by position, then unit, so that a position's blocks for all units lie together.
        Else by unit, then position.
        """
        if self._is_even:
            return [member for mates in zip(*self._units, strict=True) for member in mates]
        return [
            unit[position] if position < len(unit) else None
            for unit in self._units
            for position in range(self._largest)
        ]

    def _paired(
        self, blocks: torch.Tensor, whole: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each member's block and its part of ``whole``."""
        parts = whole.view(-1).tensor_split(self._size)
        slots = enumerate(self._slots())
        return [(blocks[slot], parts[member]) for slot, member in slots if member is not None]


def _summed(op: Op) -> Op:
    """Return what the levels do: an average of averages over uneven units would be wrong."""
    return dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
