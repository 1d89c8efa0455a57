"""The boxes of whole tensors that a rank holds, as torch.distributed.checkpoint takes them.

Of a tensor of the whole model a rank has the part cut by tp or ep; of that, the rows that FSDP2
left here, or the elements in ZeRO-1's pieces of flat buckets. All of these are boxes, or a few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from executor.collectives.communicator import Communicator
from executor.gradients.states import FlatStates, States
from executor.shards.parameters import LocalParameter
from planner.plan import Axis

__all__ = ["LoadPlanner", "Piece", "SavePlanner", "WholeTensor", "boxes_of_range", "pieces"]


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """The boxes that this rank holds of one tensor of the whole model.

    Has the methods by which torch.distributed.checkpoint asks for the parts of a tensor
    (torch/distributed/_checkpointable.py).

    Attributes:
        shape: Of the whole.
        boxes: By the offsets of their first element.
    """

    shape: torch.Size
    boxes: dict[torch.Size, torch.Tensor]

    def size(self) -> torch.Size:
        """Return the shape of the whole, as a tensor does."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.shape) for offsets, box in self.boxes.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.boxes[chunk.offsets]),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def box(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box that torch means by ``index``."""
        assert index.offset is not None, "boxes are found by offset"
        return self.boxes[index.offset]


class SavePlanner(DefaultSavePlanner):
    """Finds boxes; torch's own looks for them in classes of tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box to write."""
        whole: WholeTensor = self.state_dict[index.fqn]
        return whole.box(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds boxes by full names; torch's own puts None in place of what is no class of tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the boxes as they are."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box to read into."""
        whole: WholeTensor = self.state_dict[index.fqn]
        return whole.box(index)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter as it lies on this rank, and where a master has its elements.

    Attributes:
        parameter: The parameter.
        offsets: Of the box in the parameter.
        sizes: Of the box.
        master: Tensor of the optimizer.
        start: Of the box's elements in ``master``, where they follow each other.
    """

    parameter: LocalParameter
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    master: torch.Tensor
    start: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box as a view into ``tensor``, which is laid out like ``master``."""
        return tensor.view(-1)[self.start :][: prod(self.sizes)].view(self.sizes)


def pieces(states: States, communicators: Mapping[Axis, Communicator]) -> Iterator[Piece]:
    """Yield the boxes of parameters that this rank updates; none is empty."""
    if not isinstance(states, FlatStates):
        return _rows(states)
    axis: Axis = "edp" if states.parameters[0].is_expert else "dp_shard_cp"
    return _pieces_of_buckets(states, communicators[axis].index)


def _rows(states: States) -> Iterator[Piece]:
    """Yield the rows that FSDP2 left here of each parameter."""
    for parameter, master in zip(states.parameters, states.masters, strict=True):
        shared_out = parameter.parameter
        assert isinstance(shared_out, DTensor), "FSDP2 made it one"
        [chunk] = shared_out.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if master.numel():
            yield Piece(parameter, tuple(chunk.offsets), tuple(master.shape), master, 0)


def _pieces_of_buckets(states: FlatStates, shard_index: int) -> Iterator[Piece]:
    """Yield boxes of the parameters that lie one after the other in a flat tensor of buckets.

    A rank updates all of each bucket (ZeRO-0), or the piece at its place in the shard group.
    """
    size = states.masters[0].numel()
    bucket = states.gradients.flat.numel() // len(states.masters)
    first = shard_index * size if size < bucket else 0
    start = 0
    for parameter in states.parameters:
        shape = parameter.parameter.shape
        end = start + shape.numel()
        for number in range(start // bucket, -(-end // bucket)):
            begin = number * bucket + first
            low, high = max(start, begin), min(end, begin + size)
            at = low - begin
            for offsets, sizes in boxes_of_range(shape, low - start, high - start):
                yield Piece(parameter, offsets, sizes, states.masters[number], at)
                at += prod(sizes)
        start = end


Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return (offsets, sizes) of the boxes that elements [start, stop) of a tensor consist of.

    They are in the order of the elements, at most 2 * dimensions - 1, and none is empty.

    Args:
        shape: Of the tensor, which is contiguous; at least one dimension.
        start: First element.
        stop: After the last one; there is none unless it is greater than ``start``.

    >>> boxes_of_range((3, 4), 2, 9)
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row_size = prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size  # of the whole rows

    def in_row(row: int, start: int, stop: int) -> list[Box]:
        inner = boxes_of_range(shape[1:], start - row * row_size, stop - row * row_size)
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in inner]

    if first > last:
        return in_row(last, start, stop)
    zeros = (0,) * (len(shape) - 1)
    whole = [((first, *zeros), (last - first, *shape[1:]))] if first < last else []
    head = in_row(first - 1, start, first * row_size)
    return head + whole + in_row(last, last * row_size, stop)
