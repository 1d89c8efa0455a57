"""Flat gradients in which all micro-batches add up, and the weights that the optimizer updates."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["GradientBuffer", "MasterWeights", "local_tensor"]


class GradientBuffer:
    """Flat gradients of this rank's parameters, in the order given.

    Each backward adds to it and drops ``parameter.grad`` (Megatron-LM's ``main_grad``), so that
    gradients may be summed in a wider dtype than they are computed in, and a reduction sends
    contiguous pieces without copying.

    Attributes:
        flat: All gradients, shape [sum of local parameter sizes].
        views: ``flat`` cut into the parameters' local shapes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        shapes = [local_tensor(parameter).shape for parameter in parameters]
        sizes = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(sum(sizes), dtype=dtype)
        self.views = [
            piece.view(shape)
            for piece, shape in zip(torch.split(self.flat, sizes), shapes, strict=True)
        ]
        for parameter, view in zip(parameters, self.views, strict=True):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # in torch
                _adding_to(view)
            )

    def buckets(self, bucket_bytes: int) -> tuple[torch.Tensor, ...]:
        """Return ``flat`` cut into pieces of ``bucket_bytes``; the last one may be smaller."""
        return torch.split(self.flat, max(1, bucket_bytes // self.flat.element_size()))


class MasterWeights:
    """What the optimizer works on: the local weights themselves, or copies in the gradients' dtype.

    Plain tensors, so that the optimizer never dispatches through DTensor.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: GradientBuffer) -> None:
        self._weights = [local_tensor(parameter) for parameter in parameters]
        self.tensors = [weight.to(gradients.flat.dtype) for weight in self._weights]
        for tensor, view in zip(self.tensors, gradients.views, strict=True):
            tensor.grad = view

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step and bring the weights up to date."""
        optimizer.step()
        for weight, tensor in zip(self._weights, self.tensors, strict=True):
            if tensor is not weight:
                weight.copy_(tensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard this rank holds, sharing its memory; a plain tensor is its own shard."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _adding_to(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None, "the hook runs after a gradient was accumulated"
        view.add_(_local_gradient(parameter, grad))
        parameter.grad = None

    return add


def _local_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the part of ``grad`` that belongs to this rank's shard of ``parameter``.

    torch 2.13 computes the gradient of a vocabulary-split embedding whole on every rank (no
    strategy of ``_embedding_ops.py`` splits it by rows); it is cut here, which sends nothing.
    """
    if (
        isinstance(parameter, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != parameter.placements
    ):
        grad = grad.redistribute(placements=parameter.placements)
    return local_tensor(grad)
