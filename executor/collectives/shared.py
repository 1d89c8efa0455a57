"""Collectives among ranks of one host through memory that all map: the CPU's copy engine.

Every call runs in rounds. In a round each member writes to its slot of one half of the memory,
meets the others at a barrier, and reads their slots; the next round takes the other half. One
barrier a round is enough: a member that writes to a half again has passed the barrier of the round
between, which the others enter only when they have read what they wanted of the round before it.
What only one member reads, it may also reduce in place.
"""

from collections.abc import Sequence
from typing import Final

import torch

from executor.collectives.host import HostSegment, open_segment
from executor.collectives.protocol import Op
from executor.collectives.reduction import accumulate, average, require_reducible
from executor.mesh import RankGroup
from planner.segments import SHARED_CAPACITY_BYTES, SHARED_SMALL_BYTES

__all__ = ["SharedMemory"]

_ALIGNMENT_BYTES: Final = 64


class SharedMemory:
    """The collectives of a group whose members are all on one host.

    All members call the same in the same order, as in ``executor.collectives.protocol``, which
    these are but for all_to_all. Reductions go in member order, so the result does not depend on
    who does them, nor on the size of the memory.
    """

    def __init__(self, segment: HostSegment) -> None:
        self._segment = segment
        self.size, self.index = len(segment.ranks), segment.index
        self._others = [(self.index + step) % self.size for step in range(1, self.size)]
        self._halves = segment.memory.view(2, self.size, -1)
        self._slot_bytes = self._halves.shape[2]
        self._half = 0

    @classmethod
    def open(
        cls, group: RankGroup, *, capacity_bytes: int = SHARED_CAPACITY_BYTES, timeout_s: float
    ) -> "SharedMemory":
        """Return the shared memory of ``group``; all members call this together.

        Args:
            group: The members.
            capacity_bytes: Of the memory, rounded up. A call takes a round for every
                ``capacity_bytes / (2 * size)`` bytes of a member.
            timeout_s: How long a member waits for another, within a factor of two.

        Raises:
            UnsupportedPlanError: A member cannot have it; then all members raise this.
            LostPeerError: A member died meanwhile.
        """
        unit = 2 * group.size * group.size * _ALIGNMENT_BYTES  # each slot has a piece for each
        num_bytes = -(-capacity_bytes // unit) * unit
        return cls(open_segment(group, num_bytes=num_bytes, timeout_s=timeout_s))

    def close(self) -> None:
        """Let go of the memory. Members that still wait for this one raise a LostPeerError."""
        self._halves = self._halves.new_empty(0)
        self._segment.close()

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place."""
        require_reducible(tensor, op)
        flat = tensor.view(-1)
        if flat.nbytes <= min(SHARED_SMALL_BYTES, self._slot_bytes):
            self._reduce_everywhere(flat, op)
            return
        for blocks in self._by_rounds(flat):
            self._reduce_block(blocks[self.index], blocks, op)
            self._spread_blocks(blocks)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        blocks = _as_bytes(whole).tensor_split(self.size)
        blocks[self.index].copy_(_as_bytes(shard))
        self._spread_blocks(blocks)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``."""
        require_reducible(whole, op)
        blocks = whole.view(-1).tensor_split(self.size)
        mine = shard.view(-1)
        mine.copy_(blocks[self.index])
        self._reduce_block(mine, blocks, op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``."""
        for part in torch.split(_as_bytes(tensor), self.size * self._slot_bytes):
            memory = self._next_half(torch.uint8).view(-1)[: part.numel()]
            if self.index == root:
                memory.copy_(part)
            self._segment.barrier()
            if self.index != root:
                part.copy_(memory)

    def reduce(self, tensor: torch.Tensor, op: Op, root: int) -> None:
        """Reduce ``tensor`` into that of ``root``; elsewhere it is partly reduced."""
        require_reducible(tensor, op)
        for blocks in self._by_rounds(tensor.view(-1)):
            self._reduce_block(blocks[self.index], blocks, op)
            self._spread_blocks(blocks, root)

    def _by_rounds(self, flat: torch.Tensor) -> list[Sequence[torch.Tensor]]:
        """Return the members' blocks of each part that a slot has room for."""
        room = self._slot_bytes // flat.element_size()
        return [part.tensor_split(self.size) for part in torch.split(flat, room)]

    def _reduce_everywhere(self, flat: torch.Tensor, op: Op) -> None:
        slots = self._next_half(flat.dtype)[:, : flat.numel()]
        slots[self.index].copy_(flat)
        self._segment.barrier()
        flat.copy_(slots[0])
        for member in range(1, self.size):
            accumulate(flat, slots[member], op)
        average(flat, op, self.size)

    def _reduce_block(self, mine: torch.Tensor, blocks: Sequence[torch.Tensor], op: Op) -> None:
        """Reduce the others' blocks of this member into ``mine``, which has its own already."""
        room = self._slot_bytes // mine.element_size() // self.size
        for start in range(0, blocks[0].numel(), room):
            slots = self._next_half(mine.dtype).view(self.size, self.size, room)
            for member in self._others:
                piece = blocks[member][start : start + room]
                slots[self.index, member, : piece.numel()].copy_(piece)
            self._segment.barrier()
            piece = mine[start : start + room]
            self._reduce_piece(piece, slots[:, self.index, : piece.numel()], op)

    def _reduce_piece(self, mine: torch.Tensor, slots: torch.Tensor, op: Op) -> None:
        """Reduce all members' pieces in member order into ``mine``, in the slots at first."""
        total = slots[0] if self.index else mine
        for member in range(1, self.size):
            if member == self.index:  # addition commutes, so this spares a copy
                accumulate(mine, total, op)
                total = mine
            else:
                accumulate(total, slots[member], op)
        average(mine, op, self.size)

    def _spread_blocks(self, blocks: Sequence[torch.Tensor], root: int | None = None) -> None:
        """Fill all members' blocks, of which each has its own; only on ``root`` if one is named."""
        room = self._slot_bytes // blocks[0].element_size()
        for start in range(0, blocks[0].numel(), room):
            slots = self._next_half(blocks[0].dtype)
            piece = blocks[self.index][start : start + room]
            slots[self.index, : piece.numel()].copy_(piece)
            self._segment.barrier()
            if root is not None and root != self.index:
                continue
            for member in self._others:
                piece = blocks[member][start : start + room]
                piece.copy_(slots[member, : piece.numel()])

    def _next_half(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the slots [size, elements] of the half that nobody reads any more."""
        self._half = 1 - self._half
        return self._halves[self._half].view(dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
