"""Every member talks to every other one at once: one step of latency, n - 1 messages each.

All send to the next member first, then to the one after it, so that nobody is everybody's first.
Reductions go in member order: whoever does them gets the same result.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Op, Splits
from executor.collectives.reduction import accumulate, average, require_reducible
from executor.mesh import RankGroup

__all__ = ["Direct", "pieces"]

_Tensors = Sequence[torch.Tensor]
_Works = list[dist.Work | None]  # by member, None for this one


class Direct:
    """The collectives of one group by direct exchange (``protocol.Collectives``)."""

    def __init__(self, group: RankGroup) -> None:
        self._size, self._index = group.size, group.index
        self._messages = Messages(group)
        steps = range(1, self._size)
        self._following = [(self._index + step) % self._size for step in steps]
        self._preceding = [(self._index - step) % self._size for step in steps]

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` in place: each member its part for all (two-shot).

        A tensor with fewer elements than members is reduced by every member (one-shot).
        """
        require_reducible(tensor, op)
        flat = tensor.view(-1)
        if flat.numel() < self._size:
            self._reduce_everywhere(flat, op)
            return
        parts = flat.tensor_split(self._size)
        mine = parts[self._index]
        blocks = self._blocks(mine)
        received = self._receive_all(blocks)
        # A member overwrites nothing too early: it has a part reduced once it has sent its own.
        gathered = self._receive_all(parts)
        sent = self._send_all(parts)
        self._reduce(blocks, received, op)
        wait(*self._send_all([mine] * self._size), *gathered, *sent)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the shards, everyone's sent to everyone."""
        self._exchange(pieces(whole, None, self._size), [shard] * self._size)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with the reduction of the blocks that the members sent for it."""
        require_reducible(whole, op)
        parts = pieces(whole, None, self._size)
        blocks = self._blocks(shard.view(-1))
        received = self._receive_all(blocks)
        sent = self._send_all(parts)
        blocks[self._index].copy_(parts[self._index])
        self._reduce(blocks, received, op)
        wait(*sent)

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send all pieces of ``rows`` and receive all of ``received`` at once."""
        into = pieces(received, out_splits, self._size)
        self._exchange(into, pieces(rows, in_splits, self._size))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Send ``tensor`` from ``root`` to all."""
        if self._index == root:
            wait(*self._send_all([tensor] * self._size))
        else:
            wait(self._messages.receive(tensor, root))

    def reduce(self, tensor: torch.Tensor, op: Op, root: int) -> None:
        """Send all tensors to ``root``, which holds n - 1 of them beside its own to reduce them."""
        require_reducible(tensor, op)
        if self._index == root:
            blocks = self._blocks(tensor.view(-1))
            self._reduce(blocks, self._receive_all(blocks), op)
        else:
            wait(self._messages.send(tensor, root))

    def gather(self, whole: torch.Tensor | None, shard: torch.Tensor, root: int) -> None:
        """Send all shards to ``root``."""
        if self._index != root:
            wait(self._messages.send(shard, root))
            return
        assert whole is not None, f"gather: member {root} is the root and has no tensor to fill"
        parts = pieces(whole, None, self._size)
        received = self._receive_all(parts)
        parts[root].copy_(shard.view(-1))
        wait(*received)

    def scatter(self, shard: torch.Tensor, whole: torch.Tensor | None, root: int) -> None:
        """Send its part of ``whole``, contiguous or not, from ``root`` to everyone."""
        if self._index != root:
            wait(self._messages.receive(shard, root))
            return
        assert whole is not None, f"scatter: member {root} is the root and has no tensor to send"
        parts = pieces(whole.contiguous(), None, self._size)
        sent = self._send_all(parts)
        shard.view(-1).copy_(parts[root])
        wait(*sent)

    def _exchange(self, into: _Tensors, out: _Tensors) -> None:
        received = self._receive_all(into)
        sent = self._send_all(out)
        into[self._index].copy_(out[self._index].view_as(into[self._index]))
        wait(*received, *sent)

    def _receive_all(self, into: _Tensors) -> _Works:
        works: _Works = [None] * self._size
        for member in self._preceding:
            works[member] = self._messages.receive(into[member], member)
        return works

    def _send_all(self, out: _Tensors) -> _Works:
        works: _Works = [None] * self._size
        for member in self._following:
            works[member] = self._messages.send(out[member], member)
        return works

    def _blocks(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return room for every member's like of ``mine``, which is this member's."""
        others = mine.new_empty(self._size - 1, mine.numel()).unbind()
        return [*others[: self._index], mine, *others[self._index :]]

    def _reduce(self, blocks: list[torch.Tensor], received: _Works, op: Op) -> None:
        """Reduce the blocks in member order into this member's own."""
        total = blocks[0]
        wait(received[0])
        for member in range(1, self._size):
            wait(received[member])
            if member == self._index:  # into ours, at its turn: no copy of the result
                accumulate(blocks[member], total, op)
                total = blocks[member]
            else:
                accumulate(total, blocks[member], op)
        average(total, op, self._size)

    def _reduce_everywhere(self, flat: torch.Tensor, op: Op) -> None:
        """Gather all tensors and reduce them, with the same operands in the same order on all."""
        rows = flat.new_empty(self._size, flat.numel())
        self.all_gather(rows, flat)
        for row in rows[1:]:
            accumulate(rows[0], row, op)
        average(rows[0], op, self._size)
        flat.copy_(rows[0])


def pieces(tensor: torch.Tensor, splits: Splits, size: int) -> _Tensors:
    """Return each member's piece of a contiguous tensor, as views.

    Args:
        tensor: [rows, ...].
        splits: Rows of each member; None = ``size`` equal flat pieces.
        size: Members.
    """
    if splits is None:
        return tensor.view(size, tensor.numel() // size).unbind()
    return torch.split(tensor, list(splits))
