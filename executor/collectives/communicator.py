"""The collectives of one axis, timed: all that a training step calls.

(But for pipelining, which makes its own sends and receives: ``executor.timing`` catches them.) A
group of one calls nothing. Sizes are nccl-tests' S: of an all_gather and a reduce_scatter the whole
tensor, of an all_to_all what a rank sends, its own part included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.hierarchical import hierarchical_all_reduce
from executor.mesh import Mesh, RankGroup, SplitGroup
from executor.timing import CallKey, Recorder, tensor_bytes
from planner.plan import AXES, Algorithm, Axis, Collective, Plan

__all__ = ["Communicator", "RingPass", "communicators"]

# The recorder replaces these names while it watches torch's pipelining: ours are not pipeline's.
_ISEND: Final = dist.isend
_IRECV: Final = dist.irecv


@dataclass(frozen=True, slots=True)
class Communicator:
    """This rank's end of one axis. All ranks of the group make the same calls in the same order.

    Attributes:
        axis: The axis.
        group: Its ranks, this one among them.
        split: The group by unit of the fabric, if the plan chose a hierarchical algorithm.
        plan: Asked for the algorithm of every message.
        recorder: Times every call.
    """

    axis: Axis
    group: RankGroup
    split: SplitGroup | None
    plan: Plan
    recorder: Recorder

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's position in the group."""
        return self.group.index

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce ``tensor`` over the group in place, and return it. It must be contiguous."""
        if self.group.process_group is None:
            return tensor
        size = tensor_bytes(tensor)
        if self.split is not None and self._planned("all_reduce", size) == "hierarchical":
            with self.recorder.call(self._key("all_reduce", size, "hierarchical")):
                hierarchical_all_reduce(tensor, self.split, op)
            return tensor
        with self.recorder.call(self._key("all_reduce", size)):
            dist.all_reduce(tensor, op=op, group=self.group.process_group)
        return tensor

    def all_gather(self, shard: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the ranks' shards joined along ``dim``, in group order; all have one shape."""
        if self.group.process_group is None:
            return shard
        mine = shard.movedim(dim, 0).contiguous()
        whole = mine.new_empty(self.size * mine.shape[0], *mine.shape[1:])
        self.all_gather_into(whole, mine)
        return _moved_back(whole, dim)

    def all_gather_into(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` [n * rows, ...] with the ranks' ``shard`` [rows, ...]; both contiguous."""
        if self.group.process_group is None:
            whole.copy_(shard)
            return
        with self.recorder.call(self._key("all_gather", tensor_bytes(whole))):
            dist.all_gather_single(whole, shard, group=self.group.process_group)

    def reduce_scatter(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part along ``dim`` of the sum of ``whole`` over the group."""
        if self.group.process_group is None:
            return whole
        rows = whole.movedim(dim, 0).contiguous()
        shard = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        self.reduce_scatter_into(shard, rows)
        return _moved_back(shard, dim)

    def reduce_scatter_into(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill ``shard`` [rows, ...] with this rank's part of the sum of ``whole``."""
        if self.group.process_group is None:
            shard.copy_(whole)
            return
        with self.recorder.call(self._key("reduce_scatter", tensor_bytes(whole))):
            dist.reduce_scatter_single(shard, whole, group=self.group.process_group)

    def all_to_all(
        self,
        rows: torch.Tensor,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        *,
        size_bytes: int | None = None,
    ) -> torch.Tensor:
        """Send the i-th piece of ``rows`` to rank i; return what the ranks sent here, in order.

        Args:
            rows: [rows, ...].
            in_splits: Rows for each rank; even if left out.
            out_splits: Rows from each rank; even if left out.
            size_bytes: To record; bytes of ``rows`` if left out.
        """
        if self.group.process_group is None:
            return rows
        rows = rows.contiguous()
        count = rows.shape[0] if out_splits is None else sum(out_splits)
        received = rows.new_empty(count, *rows.shape[1:])
        size = tensor_bytes(rows) if size_bytes is None else size_bytes
        with self.recorder.call(self._key("all_to_all", size)):
            dist.all_to_all_single(
                received,
                rows,
                None if out_splits is None else list(out_splits),
                None if in_splits is None else list(in_splits),
                group=self.group.process_group,
            )
        return received

    def gather(self, rows: torch.Tensor, root: int) -> torch.Tensor | None:
        """Return all ranks' ``rows``, joined in group order, on member ``root``; None elsewhere."""
        if self.group.process_group is None:
            return rows
        rows = rows.contiguous()
        pieces = [torch.empty_like(rows) for _ in range(self.size)] if self.index == root else None
        with self.recorder.call(self._key("gather", tensor_bytes(rows) * self.size)):
            dist.gather(rows, pieces, group=self.group.process_group, group_dst=root)
        return torch.cat(pieces) if pieces is not None else None

    def scatter(
        self, pieces: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int
    ) -> torch.Tensor:
        """Return this rank's one of the ``pieces`` that member ``root`` holds; shaped ``like``."""
        if self.group.process_group is None:
            assert pieces is not None, "the only rank is the root"
            return pieces[0]
        mine = torch.empty_like(like, memory_format=torch.contiguous_format)
        # gloo's scatter is wrong for pieces that are not contiguous (pytorch issue 192920)
        sent = [piece.contiguous() for piece in pieces] if pieces is not None else None
        with self.recorder.call(self._key("scatter", tensor_bytes(mine) * self.size)):
            dist.scatter(mine, sent, group=self.group.process_group, group_src=root)
        return mine

    def start_ring_pass(self, tensor: torch.Tensor) -> "RingPass":
        """Start sending ``tensor`` to the next rank and receiving its like from the one before."""
        return self._start(tensor, to=(self.index + 1) % self.size, of=(self.index - 1) % self.size)

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Return what member ``peer`` holds, which gets ``tensor`` in return."""
        return self._start(tensor, to=peer, of=peer).wait()

    def _start(self, tensor: torch.Tensor, *, to: int, of: int) -> "RingPass":
        assert self.group.process_group is not None, "there is nobody to send to"
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        key = CallKey(
            self.axis, "send_recv", "point_to_point", tensor_bytes(tensor), 2, peer=to, is_send=True
        )
        start = time.perf_counter()
        with self.recorder.naming_lost_peers(key):
            works = (
                _ISEND(tensor, group=self.group.process_group, group_dst=to),
                _IRECV(received, group=self.group.process_group, group_src=of),
            )
        issued_s = time.perf_counter() - start
        ends = tuple(zip(works, (to, of), strict=True))
        return RingPass(self.recorder, key, ends, tensor, received, start, issued_s)

    def _planned(self, op: Collective, size_bytes: int) -> Algorithm:
        return self.plan.method(self.axis, op, size_bytes).algorithm

    def _key(self, op: Collective, size_bytes: int, algorithm: Algorithm | None = None) -> CallKey:
        runs = algorithm or self.recorder.library_method(self.axis, op, size_bytes).algorithm
        return CallKey(self.axis, op, runs, size_bytes, self.size)


@dataclass(frozen=True, slots=True)
class RingPass:
    """A message on its way out and another on its way in, recorded as one send_recv."""

    recorder: Recorder
    key: CallKey
    ends: tuple[tuple[dist.Work | None, int], ...]  # a message, and whom it goes to or comes from
    sent: torch.Tensor  # kept alive until it has left
    received: torch.Tensor
    start: float
    issued_s: float

    def wait(self) -> torch.Tensor:
        """Return what was received, once both messages are through. To be called once."""
        start = time.perf_counter()
        for work, peer in self.ends:
            with self.recorder.naming_lost_peers(replace(self.key, peer=peer)):
                if work is not None:
                    work.wait()
        waited_s = time.perf_counter() - start
        self.recorder.note(self.key, self.start, self.issued_s + waited_s)
        return self.received


def _moved_back(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``tensor`` with its first dimension at ``dim``, contiguous and no view."""
    if dim == 0:
        return tensor
    return tensor.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def communicators(plan: Plan, mesh: Mesh, recorder: Recorder) -> dict[Axis, Communicator]:
    """Return this rank's communicator of every axis."""
    return {
        axis: Communicator(axis, mesh.groups[axis], mesh.splits.get(axis), plan, recorder)
        for axis in AXES
    }
