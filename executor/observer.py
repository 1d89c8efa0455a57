"""Time the collectives and steps of a training script that knows nothing of commplan.

The script keeps its own process groups, model and loop; two lines observe it::

    with executor.observe(plan) as observer:
        for batch in loader:
            with observer.step():
                ...

Nothing the script does changes: what was asynchronous stays so, and nothing is sent before the
block ends (``executor.watch`` says how).

What is recorded, of the steps after the warm-up:

* a call: from its start until the wait for it returned, under the axis of the plan whose group has
  exactly these members;
* per step: wall time; time that stood still in calls and waits (barriers and calls that are left
  out included); time in ``Optimizer.step``; and the rest as forward and backward. The rest holds
  whatever else the loop body does, such as reading data.

**Not timed** are collectives that C++ makes itself: the gradient all_reduces and buffer broadcasts
of ``DistributedDataParallel`` (a communication hook would see them, but is the script's to set),
the backward of ``all_to_all_single_autograd``, and compiled graphs. Their number per group is
known from the group's sequence number and reported as left out, and the wait for them counts as
backward. FSDP2 and tensor parallelism (DTensor) go through Python and are timed.
"""

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from executor.errors import ExecutorError
from executor.peers import naming_lost_peers
from executor.version import own_version
from executor.watch import BACKEND, LeftOut, StepSeconds, Watch
from planner.plan import CalibrationRun, Plan, RankTimings, document_hash

__all__ = ["Observer", "observe"]

logger = logging.getLogger(__name__)

_Gathered = tuple[RankTimings | None, tuple[LeftOut, ...]]


@contextmanager
def observe(plan: Plan, *, num_warmup_steps: int = 1) -> "Iterator[Observer]":
    """Time the enclosed part of a script; on leaving, all ranks gather what they measured.

    To be entered by all ranks after ``init_process_group`` and left before
    ``destroy_process_group``. After an exception nothing is gathered. Patches are process-wide, so
    observe once at a time.

    Args:
        plan: Names the axes; a plan for another world size is warned about.
        num_warmup_steps: First steps, which are not timed: they open connections.

    Raises:
        ExecutorError: There is no process group, or it is not gloo's alone: other backends return
            before the transfer ends, and the host's seconds would not be its time.
    """
    _check_backend()
    world_size = dist.get_world_size()
    if dist.get_rank() == 0 and world_size != plan.layout.world_size:
        logger.warning(
            "plan %s is for %d ranks (%s), this job has %d: axes are named where groups match",
            plan.id,
            plan.layout.world_size,
            plan.layout,
            world_size,
        )
    watch = Watch(plan, dist.get_rank())
    observer = Observer(plan, watch, num_warmup_steps=num_warmup_steps)
    with watch.patched():
        yield observer
    observer.gather()


class Observer:
    """What ``observe`` yields.

    Attributes:
        run: On rank 0 after the block: what all ranks measured; None if they timed no steps, or
            not equally many, which is logged.
        left_out: On rank 0 after the block: calls of any rank that the run does not hold.
    """

    def __init__(self, plan: Plan, watch: Watch, *, num_warmup_steps: int) -> None:
        self.run: CalibrationRun | None = None
        self.left_out: tuple[LeftOut, ...] = ()
        self._plan = plan
        self._watch = watch
        self._num_warmup_steps = num_warmup_steps
        self._num_begun = 0
        self._seconds: list[StepSeconds] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the enclosed step; one that ends in an exception has no step time."""
        self._num_begun += 1
        if self._num_begun <= self._num_warmup_steps:
            yield
            return
        with self._watch.on() as seconds:
            yield
        self._seconds.append(seconds)

    def gather(self) -> None:
        """Fill ``run`` and ``left_out``; ``observe`` calls it on all ranks as its block ends."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = (self._my_timings(rank) if self._seconds else None, self._watch.left_out())
        gathered: list[_Gathered] | None = [mine] * world_size if rank == 0 else None
        with naming_lost_peers("gather of the timings", rank=rank, world_size=world_size):
            dist.gather_object(mine, gathered)
        if gathered is None:
            return
        self.left_out = tuple(dict.fromkeys(left for _, several in gathered for left in several))
        for left in self.left_out:
            logger.warning("observed, but not timed: %s", left)
        timings = [found for found, _ in gathered if found is not None]
        counts = sorted({len(found.step_s) for found in timings})
        if len(timings) < world_size or len(counts) > 1:
            logger.warning(
                "no run: %d of %d ranks timed steps, %s each; need equally many on every rank, "
                "after %d warm-up steps",
                len(timings),
                world_size,
                counts,
                self._num_warmup_steps,
            )
            return
        self.run = CalibrationRun(
            plan_id=self._plan.id,
            plan_hash=document_hash(self._plan),
            topology=self._plan.topology,
            backend=BACKEND,
            executor_version=own_version(),
            torch_version=torch.__version__,
            num_warmup_steps=self._num_warmup_steps,
            ranks=tuple(timings),
        )

    def _my_timings(self, rank: int) -> RankTimings:
        return RankTimings(
            rank=rank,
            host=platform.node(),
            step_s=tuple(seconds.step_s for seconds in self._seconds),
            forward_backward_s=tuple(seconds.forward_backward_s for seconds in self._seconds),
            optimizer_s=tuple(seconds.optimizer_s for seconds in self._seconds),
            communication_s=tuple(seconds.blocked_s for seconds in self._seconds),
            collectives=self._watch.recorder.timings(),
        )


def _check_backend() -> None:
    if not dist.is_initialized():
        raise ExecutorError("observe needs a process group; call init_process_group before it")
    world = c10d._get_default_group()
    backends = {world._get_backend(device).name() for device in world._device_types}
    if backends != {BACKEND}:
        raise ExecutorError(
            f"observe times {BACKEND}, but this job runs on {', '.join(sorted(backends))}, whose "
            f"calls return before the transfer ends; try init_process_group({BACKEND!r})"
        )
