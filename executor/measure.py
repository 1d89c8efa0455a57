"""Timed steps and probes, gathered into one ``CalibrationRun``."""

import logging
import platform
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.protocol import Collectives
from executor.job import Job
from executor.mesh import RankGroup
from executor.peers import naming_lost_peers
from executor.timing import CallKey
from executor.trainer import StepResult, Trainer
from executor.version import own_version
from planner.plan import (
    CalibrationRun,
    Collective,
    CollectiveTiming,
    Method,
    Probe,
    RankTimings,
    document_hash,
)

__all__ = ["calibration_run", "call_of", "run_probes", "timed_step"]

logger = logging.getLogger(__name__)

_PROBE_CALLS: Final = 5  # timed after one untimed call that opens the connections
_PROBE_DTYPE: Final = torch.float32


def timed_step(trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
    """Run a step that all ranks start at the same time; the barrier is not part of it."""
    _barrier(trainer)
    return trainer.step(inputs, targets)


def run_probes(trainer: Trainer) -> tuple[CollectiveTiming, ...]:
    """Run the plan's probes and return their timings; all ranks call this together.

    A probe of an axis where this layout has a single rank has nobody to talk to: it is left out,
    and rank 0 logs that.
    """
    trainer.recorder.clear()
    for number, probe in enumerate(trainer.plan.probes, start=1):
        if trainer.mesh.rank == 0:
            logger.info(
                "probe %d of %d: %s on %s", number, len(trainer.plan.probes), probe.op, probe.axis
            )
        group = trainer.mesh.groups[probe.axis]
        if group.process_group is None:
            if trainer.mesh.rank == 0:
                logger.warning("probe of %s on %s left out: one rank", probe.op, probe.axis)
            continue
        for size_bytes in probe.sizes_bytes:
            _run_probe(trainer, probe, group, size_bytes)
    timings = trainer.recorder.timings()
    trainer.recorder.clear()
    return timings


def calibration_run(
    job: Job,
    trainer: Trainer,
    results: list[StepResult],
    *,
    num_warmup_steps: int,
    probes: tuple[CollectiveTiming, ...] = (),
) -> CalibrationRun | None:
    """Return what all ranks measured on rank 0, None elsewhere; all ranks call this together.

    Args:
        job: This process's place in the job.
        trainer: Its recorder holds the calls of exactly the steps in ``results``.
        results: The timed steps.
        num_warmup_steps: Steps run before them.
        probes: What ``run_probes`` returned.
    """
    mine = RankTimings(
        rank=job.rank,
        host=platform.node(),
        step_s=tuple(result.step_s for result in results),
        forward_backward_s=tuple(result.forward_backward_s for result in results),
        optimizer_s=tuple(result.optimizer_s for result in results),
        communication_s=tuple(result.communication_s for result in results),
        collectives=(*trainer.recorder.timings(), *probes),
    )
    gathered: list[RankTimings] | None = [mine] * job.world_size if job.rank == 0 else None
    with naming_lost_peers(
        "gather of the timings on all ranks", rank=job.rank, world_size=job.world_size
    ):
        dist.gather_object(mine, gathered)
    if gathered is None:
        return None
    plan = trainer.plan
    return CalibrationRun(
        plan_id=plan.id,
        plan_hash=document_hash(plan),
        topology=plan.topology,
        backend=job.backend,
        executor_version=own_version(),
        torch_version=torch.__version__,
        num_warmup_steps=num_warmup_steps,
        ranks=tuple(gathered),
    )


def _barrier(trainer: Trainer) -> None:
    world_size = trainer.plan.layout.world_size
    with naming_lost_peers("barrier on all ranks", rank=trainer.mesh.rank, world_size=world_size):
        dist.barrier()


def _run_probe(trainer: Trainer, probe: Probe, group: RankGroup, size_bytes: int) -> None:
    if probe.op == "send_recv":
        _run_send_recv(trainer, probe, group, size_bytes)
        return
    part = torch.zeros(
        max(1, -(-size_bytes // (group.size * _PROBE_DTYPE.itemsize))), dtype=_PROBE_DTYPE
    )
    actual_bytes = part.nbytes * group.size
    communicator = trainer.communicators[probe.axis]
    runner = communicator.runner(probe.op, actual_bytes)
    if probe.algorithm is not None:
        runner = communicator.runner_of(probe.op, Method(probe.algorithm, probe.path))
    algorithm, path = runner.method
    key = CallKey(
        probe.axis, probe.op, algorithm, actual_bytes, group.size, is_probe=True, path=path
    )
    call = call_of(runner.collectives, probe.op, group, part)
    with trainer.recorder.naming_lost_peers(key):
        call()
    for _ in range(_PROBE_CALLS):
        _barrier(trainer)
        with trainer.recorder.call(key):
            call()


def call_of(
    collectives: Collectives, op: Collective, group: RankGroup, part: torch.Tensor
) -> Callable[[], None]:
    """Return a call of ``op`` on a whole of which every member has a ``part``."""
    whole = torch.zeros(part.numel() * group.size, dtype=part.dtype)
    out, at_root = torch.zeros_like(whole), whole if group.index == 0 else None
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: collectives.all_reduce(whole, dist.ReduceOp.SUM),
        "all_gather": lambda: collectives.all_gather(whole, part),
        "reduce_scatter": lambda: collectives.reduce_scatter(part, whole, dist.ReduceOp.SUM),
        "all_to_all": lambda: collectives.all_to_all(out, whole, None, None),
        "broadcast": lambda: collectives.broadcast(whole, 0),
        "gather": lambda: collectives.gather(at_root, part, 0),
        "scatter": lambda: collectives.scatter(part, at_root, 0),
    }
    return calls[op]


def _run_send_recv(trainer: Trainer, probe: Probe, group: RankGroup, size_bytes: int) -> None:
    """Send from each even member of the group to its next; a last one without partner idles."""
    is_send = group.index % 2 == 0
    peer = group.index + 1 if is_send else group.index - 1
    message = torch.zeros(max(1, -(-size_bytes // _PROBE_DTYPE.itemsize)), dtype=_PROBE_DTYPE)
    key = trainer.recorder.p2p_key(
        probe.axis,
        message.numel() * _PROBE_DTYPE.itemsize,
        peer,
        is_send=is_send,
        is_probe=True,
    )
    for repeat in range(_PROBE_CALLS + 1):
        _barrier(trainer)
        if peer >= group.size:
            continue
        start = time.perf_counter()
        with trainer.recorder.naming_lost_peers(key):
            if is_send:
                dist.send(message, group=group.process_group, group_dst=peer)
            else:
                dist.recv(message, group=group.process_group, group_src=peer)
        if repeat:
            trainer.recorder.note(key, start, time.perf_counter() - start)
