"""Seconds of every op: the only reader of kernel figures, and where collectives are chosen.

Of what may run beside compute it says what that costs, too.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from planner.constants import LAUNCH_S, SUSTAINED_CLOCK
from planner.cost.collectives import Choice, choose, legal_methods
from planner.cost.offload import host_copy_s
from planner.cost.overlap import BLOCK_OVERLAPS, RANK_OVERLAPS
from planner.cost.problem import Problem
from planner.cost.sharing import (
    Processors,
    level_shares,
    lost_share,
    moved_bytes,
    needs_no_processor,
)
from planner.cost.work import (
    AttentionCore,
    Communication,
    Gemm,
    HostCopy,
    Launches,
    MemoryBound,
    Op,
)
from planner.frameworks import overlaps_data_parallel
from planner.hardware.kernels import attention_s, gemm_s, grouped_gemm_s, memory_bound_s
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import Group, axis_group
from planner.plan import Axis, Collective

__all__ = ["Timed", "seconds"]


@dataclass(frozen=True, slots=True)
class Timed:
    """An op and its time.

    Attributes:
        op: What is done.
        seconds: One occurrence, shape [rows].
        total_s: All occurrences, shape [rows].
        choice: Of the algorithm, for a collective.
        lost_share: Of compute's rate, while the collective runs beside it, shape [rows]; 0 of
            what never does.
        level_shares: Part of ``seconds`` that it keeps each level busy, shape [rows]; empty where
            nothing else runs at the same time.
    """

    op: Op
    seconds: Column
    total_s: Column
    choice: Choice | None = None
    lost_share: Column | float = 0.0
    level_shares: tuple[Column, ...] = ()

    def take(self, rows: Column) -> "Timed":
        """Return the op gathered to ``rows``, without its choice."""
        columns = {
            f.name: getattr(self.op, f.name)[rows]
            for f in fields(self.op)
            if isinstance(getattr(self.op, f.name), np.ndarray)
        }
        lost = self.lost_share
        return Timed(
            replace(self.op, **columns),
            self.seconds[rows],
            self.total_s[rows],
            lost_share=lost[rows] if isinstance(lost, np.ndarray) else lost,
            level_shares=tuple(share[rows] for share in self.level_shares),
        )


def seconds(
    problem: Problem, c: Candidates, ops: list[Op], processors: Processors | None = None
) -> list[Timed]:
    """Return the ops with their times, in the same order.

    Args:
        problem: What stays fixed.
        c: Candidates.
        ops: Of the candidates.
        processors: Of ``problem.fabric``; one for many calls saves work.
    """
    processors = processors or Processors(problem.fabric)
    axes = {op.axis for op in ops if isinstance(op, Communication)}
    groups = {axis: axis_group(problem.fabric, c, axis) for axis in axes}
    chosen: dict[tuple[Collective, Axis, bytes], Choice] = {}
    timed = [_timed(problem, groups, op, chosen) for op in ops]
    return _beside_compute(problem, processors, groups, timed)


def _timed(
    problem: Problem,
    groups: dict[Axis, Group],
    op: Op,
    chosen: dict[tuple[Collective, Axis, bytes], Choice],
) -> Timed:
    """Return one op with its time; calls that are alike, of many layers' parts, are chosen once."""
    if isinstance(op, Communication):
        key = op.op, op.axis, op.size_bytes.tobytes()
        if key not in chosen:
            legal = legal_methods(problem.fabric, problem.framework, op.op)
            chosen[key] = choose(op.op, problem.fabric, groups[op.axis], op.size_bytes, legal)
        choice = chosen[key]
        return Timed(op, choice.seconds, choice.seconds * op.repeats, choice)
    if isinstance(op, Launches):
        # a CPU runs what it issues: its kernels' times hold that
        each = LAUNCH_S[problem.training.launch].value * (problem.fabric.cores_per_node is None)
        once = op.num_kernels * each
        return Timed(op, once, once * op.repeats)
    if isinstance(op, HostCopy):
        copied = host_copy_s(problem, op)
        return Timed(op, copied, copied * op.repeats)
    once = _compute_s(problem, op) / problem.fabric.slowest_share
    return Timed(op, once, once * op.repeats)


def _beside_compute(
    problem: Problem, processors: Processors, groups: dict[Axis, Group], timed: list[Timed]
) -> list[Timed]:
    """Return the ops, with what they share where they run beside compute."""
    fabric, shared = problem.fabric, overlaps_data_parallel(problem.framework)
    named = {*BLOCK_OVERLAPS, *(RANK_OVERLAPS if shared else ())}
    calls = {
        number: one.op
        for number, one in enumerate(timed)
        if isinstance(one.op, Communication) and one.op.name in named and one.op.repeats.any()
    }
    meeting = {call.axis for call in calls.values()} if problem.model.experts else ()
    levels = {axis: tuple(level_shares(fabric, groups[axis])) for axis in meeting}
    found = list(timed)
    for number, call in calls.items():
        one, group = timed[number], groups[call.axis]
        held = processors.taken(call.op, group, call.size_bytes)
        assert one.choice is not None, "a collective has a choice"
        engines = np.array([needs_no_processor(method) for method in one.choice.methods])
        if engines.any():
            held = np.where(engines[one.choice.index], 0.0, held)
        moved = moved_bytes(call.op, group, call.size_bytes)
        lost = lost_share(problem.device, fabric, held, moved, one.seconds)
        found[number] = replace(one, lost_share=lost, level_shares=levels.get(call.axis, ()))
    return found


def _compute_s(problem: Problem, op: Gemm | AttentionCore | MemoryBound) -> Column:
    device, precision = problem.device, problem.training.precision
    if isinstance(op, MemoryBound):
        scale = problem.optimizer_scale if op.phase == "step" else problem.compute_scale
        return memory_bound_s(device, op.num_bytes, op.num_kernels) * scale
    clock = SUSTAINED_CLOCK.get(device.tables or device.name, SUSTAINED_CLOCK[""]).value
    if isinstance(op, Gemm) and op.experts is not None:
        once = grouped_gemm_s(
            device,
            precision,
            op.m,
            op.n,
            op.k,
            op.experts.num_local,
            uneven=op.experts.uneven,
        )
    elif isinstance(op, Gemm):
        once = gemm_s(device, precision, op.m, op.n, op.k)
    else:
        once = attention_s(
            device,
            precision,
            op.flop,
            seq_len=op.seq_len,
            batch=op.batch,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            backward=op.phase == "backward",
        )
    return np.asarray(once) * (problem.compute_scale / clock)
