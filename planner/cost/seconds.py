"""Seconds of every op: the only reader of kernel figures, and where collectives are chosen."""

from dataclasses import dataclass, fields, replace

import numpy as np

from planner.constants import SUSTAINED_CLOCK
from planner.cost.collectives import Choice, choose, legal_methods
from planner.cost.problem import Problem
from planner.cost.work import AttentionCore, Communication, Gemm, MemoryBound, Op
from planner.hardware.kernels import attention_s, gemm_s, memory_bound_s
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import Group, axis_group
from planner.plan import Axis

__all__ = ["Timed", "seconds"]


@dataclass(frozen=True, slots=True)
class Timed:
    """An op and its time.

    Attributes:
        op: What is done.
        seconds: One occurrence, shape [rows].
        total_s: All occurrences, shape [rows].
        choice: Of the algorithm, for a collective.
    """

    op: Op
    seconds: Column
    total_s: Column
    choice: Choice | None = None

    def take(self, rows: Column) -> "Timed":
        """Return the op gathered to ``rows``, without its choice."""
        columns = {
            f.name: getattr(self.op, f.name)[rows]
            for f in fields(self.op)
            if isinstance(getattr(self.op, f.name), np.ndarray)
        }
        return Timed(replace(self.op, **columns), self.seconds[rows], self.total_s[rows])


def seconds(problem: Problem, c: Candidates, ops: list[Op]) -> list[Timed]:
    """Return the ops with their times, in the same order."""
    axes = {op.axis for op in ops if isinstance(op, Communication)}
    groups = {axis: axis_group(problem.fabric, c, axis) for axis in axes}
    return [_timed(problem, groups, op) for op in ops]


def _timed(problem: Problem, groups: dict[Axis, Group], op: Op) -> Timed:
    if isinstance(op, Communication):
        legal = legal_methods(problem.fabric, problem.framework, op.op)
        choice = choose(op.op, problem.fabric, groups[op.axis], op.size_bytes, legal)
        return Timed(op, choice.seconds, choice.seconds * op.repeats, choice)
    once = _compute_s(problem, op) / problem.fabric.slowest_share
    return Timed(op, once, once * op.repeats)


def _compute_s(problem: Problem, op: Gemm | AttentionCore | MemoryBound) -> Column:
    device, precision = problem.device, problem.training.precision
    if isinstance(op, MemoryBound):
        scale = problem.optimizer_scale if op.phase == "step" else problem.compute_scale
        return memory_bound_s(device, op.num_bytes) * scale
    clock = SUSTAINED_CLOCK.get(device.name, SUSTAINED_CLOCK[""]).value
    if isinstance(op, Gemm):
        once = gemm_s(device, precision, op.m, op.n, op.k, op.groups)
    else:
        once = attention_s(
            device,
            precision,
            op.flop,
            seq_len=op.seq_len,
            num_heads=op.num_heads,
            head_dim=op.head_dim,
            backward=op.phase == "backward",
        )
    return np.asarray(once) * (problem.compute_scale / clock)
