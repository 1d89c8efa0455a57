"""Flat gradients in which all micro-batches add up, ready to be sent in contiguous pieces."""

from collections.abc import Sequence

import torch

from executor.collectives.communicator import Communicator
from executor.shards.parameters import LocalParameter

__all__ = ["GradientBuffer", "in_buffer_order"]


def in_buffer_order(parameters: Sequence[LocalParameter]) -> tuple[LocalParameter, ...]:
    """Return tied copies first, then parameters with partial gradients, then the others."""
    return tuple(sorted(parameters, key=_place))


def _place(parameter: LocalParameter) -> int:
    if parameter.is_tied_copy:
        return 0
    return 1 if parameter.is_partial else 2


class GradientBuffer:
    """The gradients of this rank's tensors in one flat tensor.

    Gradients may be summed in a wider dtype than they are computed in (Megatron-LM's
    ``main_grad``), and a reduction sends pieces of it without copying.

    Attributes:
        flat: [elements], zeros where it is padded.
        views: ``flat`` cut into the tensors' shapes.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        shapes: Sequence[torch.Size],
        *,
        dtype: torch.dtype,
        num_elements: int | None = None,
    ) -> None:
        """Lay out gradients for parameters that are ``in_buffer_order``.

        Args:
            parameters: What the gradients belong to.
            shapes: Of the tensor that this rank has of each.
            dtype: To sum in.
            num_elements: Length of ``flat``, if it is to be padded.
        """
        sizes = [shape.numel() for shape in shapes]
        places = [_place(parameter) for parameter in parameters]
        self._num_tied = sum(size for size, place in zip(sizes, places, strict=True) if place == 0)
        self._num_partial = sum(s for s, place in zip(sizes, places, strict=True) if place == 1)
        self.flat = torch.zeros(num_elements or sum(sizes), dtype=dtype)
        self.views = [
            piece.view(shape)
            for piece, shape in zip(
                torch.split(self.flat[: sum(sizes)], sizes), shapes, strict=True
            )
        ]
        self._tied = [
            (view, parameter.tied_stage)
            for view, parameter in zip(self.views, parameters, strict=True)
            if parameter.tied_stage is not None
        ]

    def complete(self, tp: Communicator, pp: Communicator) -> None:
        """Add what other ranks of this replica have: of partial gradients, of tied embeddings."""
        if self._num_partial:
            tp.all_reduce(self.flat[self._num_tied :][: self._num_partial])
        for view, stage in self._tied:
            view.add_(pp.exchange(view, stage))

    def num_skipped(self, tp: Communicator) -> int:
        """Return how many leading elements are counted by another rank in a global norm."""
        return self._num_tied + (self._num_partial if tp.index > 0 else 0)
