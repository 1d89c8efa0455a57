"""Collectives by the copy engines of GPUs, which leave the compute units free.

Two implementations, both inside one load/store domain (NVLink, xGMI), and both only copy:

- ``nccl_zero_cta``: NCCL's own all_gather and all_to_all on symmetric memory. NCCL decides call by
  call, so a condition that fails costs no correctness, only compute units.
- ``mori``: AMD's SDMA all_gather, under the conditions of DeepSpeed#7999. The class DeepSpeed calls
  (``AllGatherIntoTensor``) is in no release of ROCm/mori; ``AllgatherSdma`` is, since 1.2.0.

**Neither ever ran on hardware in this project.** What is tested is which calls are let through
(``copy_conditions``), that all ranks agree, and which calls of torch and mori are made;
``ran_with_copy_engine`` reads in NCCL's log what did run.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from executor.collectives.copy_conditions import (
    MORI_MAX_SHARD_BYTES,
    CopyEngineFacts,
    agreed,
    gather_facts,
    refusal,
)
from executor.collectives.protocol import Splits
from executor.errors import ExecutorError
from executor.mesh import RankGroup
from planner.plan import CallPath, Collective

__all__ = [
    "CopyEngineCollectives",
    "MoriCopyEngine",
    "NcclCopyEngine",
    "Route",
    "with_copy_engine",
]

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """Who runs a call, and why it is not who was planned; None where it is."""

    path: CallPath
    fallback: str | None


class NcclCopyEngine:
    """NCCL's all_gather and all_to_all on symmetric memory, without SMs if NCCL agrees.

    Data of other tensors goes through a symmetric buffer, which costs a copy on this GPU on either
    side; a ``whole`` that is symmetric memory, on all ranks or on none, is filled directly. All is
    sent as bytes, so any dtype will do. ``async_op=True`` runs the call on a stream of the process
    group's own: before NCCL 2.29.7 it fails on the default stream (NVIDIA/nccl#2003). Make all
    calls on one stream: the buffer is used again by the next.
    """

    def __init__(
        self, group: RankGroup, device: torch.device, *, memory: Any = None, calls: Any = dist
    ) -> None:
        """Choose NCCL's symmetric memory for this process; all ranks of the group do.

        Args:
            group: Its communicator exists, as after ``agreed``.
            device: Of the tensors.
            memory: ``torch.distributed._symmetric_memory``, alpha and private in torch 2.13.
            calls: ``torch.distributed``.
        """
        self._group, self._device, self._calls = group, device, calls
        self._memory = memory or import_module("torch.distributed._symmetric_memory")
        self._memory.set_backend("NCCL")
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        is_symmetric = self._memory.is_symm_mem_tensor(whole)
        if is_symmetric:
            self._memory.rendezvous(whole, self._group.process_group)  # torch keeps what it did
        target = _bytes(whole) if is_symmetric else self._staged(whole.nbytes)
        mine = target.view(self._group.size, -1)[self._group.index]
        mine.copy_(_bytes(shard))  # in place, so that both ends lie in one registered window
        self._calls.all_gather_single(
            target, mine, group=self._group.process_group, async_op=True
        ).wait()
        if not is_symmetric:
            _bytes(whole).copy_(target)

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th of equal pieces of ``rows`` to member i.

        Raises:
            ExecutorError: The pieces are counted one by one: NCCL has no copy-engine call for it.
        """
        if in_splits is not None or out_splits is not None:
            raise ExecutorError(
                "NCCL has no copy-engine all_to_all of counted pieces; leave in_splits and "
                "out_splits out on all ranks, or call the library"
            )
        landing, sent = self._staged(2 * rows.nbytes).view(2, -1)
        sent.copy_(_bytes(rows))
        self._calls.all_to_all_single(
            landing, sent, group=self._group.process_group, async_op=True
        ).wait()
        _bytes(received).copy_(landing)

    def _staged(self, num_bytes: int) -> torch.Tensor:
        """Return symmetric memory; all ranks ask for the same sizes, so they grow it together."""
        if self._buffer.numel() < num_bytes:
            self._buffer = self._memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._memory.rendezvous(self._buffer, self._group.process_group)
        return self._buffer[:num_bytes]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class MoriCopyEngine:
    """mori's SDMA all_gather over all ranks of the job, on the current stream."""

    def __init__(
        self,
        group: RankGroup,
        *,
        find: Callable[[str], Any] = import_module,
        runtime: Any = torch,
    ) -> None:
        """Start mori's shared memory and its buffers; all ranks of the job do.

        Args:
            group: All ranks of the job.
            find: Imports a module by name.
            runtime: The torch module.

        Raises:
            ExecutorError: mori did not start, or sees other ranks than the group has.
        """
        shmem, ccl = find("mori.shmem"), find("mori.ccl")
        # mori looks the job's group up by this name, under which torch does not know it.
        runtime._C._distributed_c10d._register_process_group(
            "default", runtime.distributed.group.WORLD
        )
        status = shmem.shmem_torch_process_group_init("default")
        rank, num_ranks = shmem.shmem_mype(), shmem.shmem_npes()
        if status != 0 or (rank, num_ranks) != (group.index, group.size):
            raise ExecutorError(
                f"mori started with status {status} as rank {rank} of {num_ranks}; needed 0, as "
                f"rank {group.index} of {group.size}: plan without mori, or see mori's own log"
            )
        self._runtime = runtime
        self._gather = ccl.AllgatherSdma(
            rank,
            num_ranks,
            input_buffer_size=MORI_MAX_SHARD_BYTES,
            output_buffer_size=MORI_MAX_SHARD_BYTES * num_ranks,
            copy_output_to_user=True,
        )

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards.

        Raises:
            ExecutorError: mori refused. The other ranks may be inside the call, so that this one
                cannot take another instead.
        """
        stream = self._runtime.cuda.current_stream()
        if not self._gather(shard, whole, shard.numel(), stream):
            raise ExecutorError(
                f"mori refused an all_gather of {shard.nbytes} bytes per rank that all ranks had "
                "agreed on; start again with MORI_ENABLE_SDMA=0, which keeps RCCL's call"
            )


class _AllGather(Protocol):
    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None: ...


class _Exchange(_AllGather, Protocol):
    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None: ...


class CopyEngineCollectives:
    """The planned copy engine where it can run a call, the library where it cannot.

    Attributes:
        ran: Calls made so far, by route: what to report, rather than what was planned.
    """

    def __init__(
        self,
        path: CallPath,
        facts: CopyEngineFacts,
        start: Callable[[], _AllGather],
        library: _Exchange,
    ) -> None:
        """Keep what decides.

        Args:
            path: Planned: nccl_zero_cta or mori.
            facts: Agreed by the group.
            start: Makes the engine, on the first call that it can run. What fails there or in a
                call is raised: other ranks may be waiting in it.
            library: Makes the other calls.
        """
        self._path, self._facts, self._start, self._library = path, facts, start, library
        self._engine: _AllGather | None = None
        self.ran: Counter[Route] = Counter()

    def route(self, op: Collective, shard_bytes: int, dtype: torch.dtype) -> Route:
        """Return who runs a call; the same on every rank of the group."""
        reason = refusal(self._path, op, self._facts, shard_bytes, dtype)
        return Route(self._path, None) if reason is None else Route("library", reason)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        taken = self._take(self.route("all_gather", shard.nbytes, shard.dtype))
        taken.all_gather(whole, shard)

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th piece of ``rows`` to member i; counted pieces are the library's."""
        if in_splits is not None or out_splits is not None:
            route = Route("library", "NCCL has no copy-engine all_to_all of counted pieces")
        else:
            route = self.route("all_to_all", rows.nbytes, rows.dtype)
        # of engines, refusal lets only NCCL's through here
        taken = cast(_Exchange, self._take(route))
        taken.all_to_all(received, rows, in_splits, out_splits)

    def _take(self, route: Route) -> _AllGather:
        if route.fallback is not None and route not in self.ran:
            logger.info("%s is left to the library: %s", self._path, route.fallback)
        self.ran[route] += 1
        if route.path == "library":
            return self._library
        self._engine = self._engine or self._start()
        return self._engine


def with_copy_engine(
    path: CallPath,
    group: RankGroup,
    device: torch.device,
    environment: Mapping[str, str],
    library: _Exchange,
) -> CopyEngineCollectives:
    """Return the group's collectives with the planned copy engine; all its ranks call this.

    Args:
        path: Planned: nccl_zero_cta or mori.
        group: Whose ranks agree here, by one all_reduce.
        device: Of this rank's tensors.
        environment: Variables of this process.
        library: Makes the calls that the copy engine cannot.
    """
    facts = agreed(group, device, lambda: gather_facts(group, device, environment))
    start: Callable[[], _AllGather] = (
        (lambda: MoriCopyEngine(group))
        if path == "mori"
        else (lambda: NcclCopyEngine(group, device))
    )
    return CopyEngineCollectives(path, facts, start, library)
