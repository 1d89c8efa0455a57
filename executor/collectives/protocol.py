"""What every implementation of collectives offers: plain calls on the tensors of one group."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Collectives", "Op", "Splits"]

Op = dist.ReduceOp.RedOpType  # SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR
Splits = Sequence[int] | None  # rows per member; None = evenly many


class Collectives(Protocol):
    """The collectives of one group by one method; an implementation has some of them.

    All members make the same calls in the same order. Tensors are contiguous, of any dtype that
    the backend sends, of any size, none included. ``whole`` has ``size`` equal parts along its
    first dimension (or is flat), in member order; ``root`` is a member's index. A call returns
    when this rank's result is there and its buffers may be used again. A group of one copies.
    """

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``, which stays."""

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th piece of ``rows`` to member i; fill ``received`` in member order."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``."""

    def reduce(self, tensor: torch.Tensor, op: Op, root: int) -> None:
        """Reduce ``tensor`` into that of ``root``; elsewhere it holds anything afterwards."""

    def gather(self, whole: torch.Tensor | None, shard: torch.Tensor, root: int) -> None:
        """Fill ``whole`` on ``root``, the only member that has one, with all shards."""

    def scatter(self, shard: torch.Tensor, whole: torch.Tensor | None, root: int) -> None:
        """Fill ``shard`` with this member's part of ``whole``, which ``root`` has."""
