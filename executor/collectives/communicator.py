"""The collectives of one axis, timed: all that a training step calls.

(But for pipelining, which makes its own sends and receives: ``executor.timing`` catches them.) A
group of one calls nothing. Sizes are nccl-tests' S: of an all_gather and a reduce_scatter the whole
tensor, of an all_to_all what a rank sends, its own part included.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.library import Library
from executor.collectives.methods import Runner, Runners, runners
from executor.collectives.protocol import Collectives
from executor.errors import PlanMismatchError
from executor.mesh import Mesh, RankGroup
from executor.timing import CallKey, Recorder, tensor_bytes
from planner.plan import AXES, Axis, Collective, Method, Plan

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
        runners: Of what the plan chose beside the library's own calls.
        plan: Asked for the method of every message.
        recorder: Times every call.
    """

    axis: Axis
    group: RankGroup
    runners: Runners
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
        if self.group.process_group is not None:
            with self._call("all_reduce", tensor_bytes(tensor)) as collectives:
                collectives.all_reduce(tensor, op)
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
        with self._call("all_gather", tensor_bytes(whole)) as collectives:
            collectives.all_gather(whole, shard)

    def reduce_scatter(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part along ``dim`` of the sum of ``whole`` over the group."""
        if self.group.process_group is None:
            return whole
        rows = whole.movedim(dim, 0).contiguous()
        if rows.shape[0] % self.size:
            raise PlanMismatchError(
                f"reduce_scatter on {self.axis}: {rows.shape[0]} rows cannot be shared out among "
                f"{self.size} ranks; pad them to a multiple"
            )
        shard = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        self.reduce_scatter_into(shard, rows)
        return _moved_back(shard, dim)

    def reduce_scatter_into(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill ``shard`` [rows, ...] with this rank's part of the sum of ``whole``."""
        if self.group.process_group is None:
            shard.copy_(whole)
            return
        with self._call("reduce_scatter", tensor_bytes(whole)) as collectives:
            collectives.reduce_scatter(shard, whole, dist.ReduceOp.SUM)

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
        with self._call("all_to_all", size) as collectives:
            collectives.all_to_all(received, rows, in_splits, out_splits)
        return received

    def gather(self, rows: torch.Tensor, root: int) -> torch.Tensor | None:
        """Return all ranks' ``rows``, joined in group order, on member ``root``; None elsewhere."""
        if self.group.process_group is None:
            return rows
        rows, whole = rows.contiguous(), None
        if self.index == root:
            whole = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        with self._call("gather", tensor_bytes(rows) * self.size) as collectives:
            collectives.gather(whole, rows, root)
        return whole

    def scatter(
        self, pieces: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int
    ) -> torch.Tensor:
        """Return this rank's one of the ``pieces`` that member ``root`` holds; shaped ``like``."""
        if self.group.process_group is None:
            assert pieces is not None, "the only rank is the root"
            return pieces[0]
        mine = torch.empty_like(like, memory_format=torch.contiguous_format)
        whole = torch.stack(list(pieces)) if pieces is not None and self.index == root else None
        with self._call("scatter", tensor_bytes(mine) * self.size) as collectives:
            collectives.scatter(mine, whole, root)
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

    @contextmanager
    def _call(self, op: Collective, size_bytes: int) -> Iterator[Collectives]:
        """Time the enclosed call of what runs ``op`` at this size."""
        runner = self.runner(op, size_bytes)
        algorithm, path = runner.method
        key = CallKey(self.axis, op, algorithm, size_bytes, self.size, path=path)
        with self.recorder.call(key), torch.no_grad():
            yield runner.collectives

    def runner(self, op: Collective, size_bytes: int) -> Runner:
        """Return what runs ``op`` at this size: the planned method, or the library's call."""
        return self.runner_of(op, self.plan.method(self.axis, op, size_bytes))

    def runner_of(self, op: Collective, method: Method) -> Runner:
        """Return what runs ``op`` if ``method`` is asked for."""
        found = self.runners.by_method.get((op, method))
        if found is None:
            return Runner(self.recorder.library_method(op, method), Library(self.group))
        return found


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


def communicators(
    plan: Plan, mesh: Mesh, recorder: Recorder, *, timeout_s: float
) -> dict[Axis, Communicator]:
    """Return this rank's communicator of every axis; all ranks call this together.

    Args:
        plan: What runs.
        mesh: This rank's groups.
        recorder: Times the calls.
        timeout_s: How long a member waits for another in shared memory.
    """
    return {
        axis: Communicator(
            axis,
            mesh.groups[axis],
            runners(plan, axis, mesh, timeout_s=timeout_s),
            plan,
            recorder,
        )
        for axis in AXES
    }
