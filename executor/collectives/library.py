"""The collectives of torch.distributed's own backend, by whatever algorithm that chooses."""

import torch
import torch.distributed as dist

from executor.collectives.protocol import Op, Splits
from executor.mesh import RankGroup

__all__ = ["Library"]


class Library:
    """The collectives of one group by ``torch.distributed``'s calls (``protocol.Collectives``).

    What is only moved goes as bytes, because gloo refuses int16 and float8, and complex in gather.
    """

    def __init__(self, group: RankGroup) -> None:
        self._size, self._group = group.size, group.process_group

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, op=op, group=self._group)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        if self._group is None:
            _copy(whole, shard)
            return
        dist.all_gather_single(_as_bytes(whole), _as_bytes(shard), group=self._group)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``."""
        if self._group is None:
            _copy(shard, whole)
            return
        dist.reduce_scatter_single(shard.view(-1), whole.view(-1), op=op, group=self._group)

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th piece of ``rows`` to member i; fill ``received`` in member order."""
        if self._group is None:
            _copy(received, rows)
            return
        dist.all_to_all_single(
            _as_bytes(received),
            _as_bytes(rows),
            _in_bytes(out_splits, received),
            _in_bytes(in_splits, rows),
            group=self._group,
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``."""
        if self._group is not None:
            dist.broadcast(_as_bytes(tensor), group=self._group, group_src=root)

    def reduce(self, tensor: torch.Tensor, op: Op, root: int) -> None:
        """Reduce ``tensor`` into that of ``root``; elsewhere it holds anything afterwards."""
        if self._group is not None:
            dist.reduce(tensor, op=op, group=self._group, group_dst=root)

    def gather(self, whole: torch.Tensor | None, shard: torch.Tensor, root: int) -> None:
        """Fill ``whole`` on ``root`` with all shards."""
        if self._group is None:
            assert whole is not None, "gather: the only member is the root"
            _copy(whole, shard)
            return
        pieces = None if whole is None else list(_as_bytes(whole).tensor_split(self._size))
        dist.gather(_as_bytes(shard), pieces, group=self._group, group_dst=root)

    def scatter(self, shard: torch.Tensor, whole: torch.Tensor | None, root: int) -> None:
        """Fill ``shard`` with this member's part of the ``whole`` of ``root``, contiguous or not.

        gloo sends the wrong elements of a piece that is not contiguous (pytorch issue 192920).
        """
        sent = None if whole is None else _as_bytes(whole.contiguous())
        if self._group is None:
            assert sent is not None, "scatter: the only member is the root"
            _as_bytes(shard).copy_(sent)
            return
        pieces = None if sent is None else list(sent.tensor_split(self._size))
        dist.scatter(_as_bytes(shard), pieces, group=self._group, group_src=root)


def _copy(into: torch.Tensor, of: torch.Tensor) -> None:
    into.view(-1).copy_(of.view(-1))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _in_bytes(splits: Splits, rows: torch.Tensor) -> list[int] | None:
    """Return the bytes of each member's rows [rows, ...]."""
    if splits is None:
        return None
    row_bytes = rows[:1].nbytes if rows.shape[0] else 0
    return [split * row_bytes for split in splits]
