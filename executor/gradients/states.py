"""Gradients, master weights and optimizer states of one kind of parameters, by ZeRO stage.

Dense parameters are one kind, experts the other: their gradients are summed over different ranks.
ZeRO-0 keeps all of it on every rank, ZeRO-1 shares out optimizer states (Rajbhandari et al. 2020,
arXiv 1910.02054): a rank updates its part of every bucket and gathers the others'. ZeRO-3 is
``executor.shards.fsdp``.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

import torch
from torch import nn

from executor.collectives.communicator import Communicator
from executor.gradients.buffer import GradientBuffer, in_buffer_order
from executor.shards.parameters import LocalParameter

__all__ = ["FlatStates", "States", "bucket_layout", "sum_of_squares"]


class States(Protocol):
    """What a trainer does with parameters of one kind, whoever holds which part.

    Attributes:
        parameters: In buffer order.
        masters: Plain tensors for the optimizer, with their gradients in ``grad``.
    """

    parameters: tuple[LocalParameter, ...]
    masters: list[torch.Tensor]

    def reduce(self) -> None:
        """Sum the gradients over the ranks that trained on other tokens."""

    def sum_of_squares(self) -> torch.Tensor:
        """Return that of the gradients which no other rank counts, a scalar."""

    def publish(self) -> None:
        """Bring the weights up to date with the masters, and clear the gradients."""


def bucket_layout(
    num_elements: int, *, element_bytes: int, bucket_bytes: int, num_shards: int
) -> tuple[int, int]:
    """Return (buckets, elements of each): equal, about ``bucket_bytes``, padded to the shards.

    >>> bucket_layout(1000, element_bytes=4, bucket_bytes=1500, num_shards=4)
    (3, 336)
    """
    buckets = max(1, ceil(num_elements * element_bytes / bucket_bytes))
    return buckets, ceil(num_elements / buckets / num_shards) * num_shards


class FlatStates:
    """ZeRO-0 and ZeRO-1: weights and gradients lie in flat tensors, cut into buckets."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        *,
        tp: Communicator,
        pp: Communicator,
        shard: Communicator | None,
        replicate: Communicator | None,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        """Move the parameters into a flat tensor, in place, and collect their gradients.

        Args:
            parameters: Of one kind, at least one.
            tp: Completes partial gradients.
            pp: Completes tied gradients.
            shard: Shares out states; None keeps them whole (ZeRO-0).
            replicate: Ranks with the same part; None where there are none.
            bucket_bytes: Of gradients in one call.
            dtype: Of gradients and master weights.
        """
        self.parameters = in_buffer_order(parameters)
        self._tp, self._pp, self._shard, self._replicate = tp, pp, shard, replicate
        tensors = [p.parameter.detach() for p in self.parameters]
        num_shards, index = (1, 0) if shard is None else (shard.size, shard.index)
        buckets, self._bucket = bucket_layout(
            sum(tensor.numel() for tensor in tensors),
            element_bytes=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            num_shards=num_shards,
        )
        self.gradients = GradientBuffer(
            self.parameters,
            [tensor.shape for tensor in tensors],
            dtype=dtype,
            num_elements=buckets * self._bucket,
        )
        weights = torch.zeros(buckets * self._bucket, dtype=tensors[0].dtype)
        _move_into(weights, [p.parameter for p in self.parameters])
        for p, view in zip(self.parameters, self.gradients.views, strict=True):
            p.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _adding_to(view)
            )
        piece = self._bucket // num_shards
        self._first = index * piece
        self._weights = torch.split(weights, self._bucket)
        self._gradients = torch.split(self.gradients.flat, self._bucket)
        self._own_weights = [bucket[self._first :][:piece] for bucket in self._weights]
        self.masters = [weight.to(dtype) for weight in self._own_weights]
        for master, bucket in zip(self.masters, self._gradients, strict=True):
            master.grad = bucket if num_shards == 1 else torch.zeros_like(master)

    def reduce(self) -> None:
        """Sum the gradients over the ranks that trained on other tokens, bucket by bucket."""
        self.gradients.complete(self._tp, self._pp)
        for bucket, master in zip(self._gradients, self.masters, strict=True):
            assert master.grad is not None, "set when it was made"
            if self._shard is not None:
                self._shard.reduce_scatter_into(master.grad, bucket)
            if self._replicate is not None:
                self._replicate.all_reduce(master.grad)

    def sum_of_squares(self) -> torch.Tensor:
        """Return that of the gradients which no other rank counts, a scalar."""
        skipped = self.gradients.num_skipped(self._tp)
        pieces = [
            master.grad[max(0, skipped - number * self._bucket - self._first) :]
            for number, master in enumerate(self.masters)
            if master.grad is not None
        ]
        return sum_of_squares(pieces, self._replicate)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the weights up to date with the masters, and clear the gradients."""
        for bucket, own, master in zip(self._weights, self._own_weights, self.masters, strict=True):
            if master is not own:
                own.copy_(master)
            if self._shard is not None:
                self._shard.all_gather_into(bucket, own.clone())
        self.gradients.flat.zero_()


def sum_of_squares(
    gradients: Sequence[torch.Tensor], replicate: Communicator | None
) -> torch.Tensor:
    """Return the sum of squares of ``gradients``, 0 on all but the first of equal ranks."""
    total = gradients[0].new_zeros(())
    if replicate is None or replicate.index == 0:
        for gradient in gradients:
            total += gradient.square().sum()
    return total


@torch.no_grad()
def _move_into(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    start = 0
    for parameter in parameters:
        view = flat[start : start + parameter.numel()].view(parameter.shape)
        view.copy_(parameter)
        parameter.data = view
        start += parameter.numel()


def _adding_to(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
        view.add_(parameter.grad)
        parameter.grad = None

    return add
