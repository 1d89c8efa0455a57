"""Seconds of every op: the only reader of kernel figures, and where collectives are chosen.

Of what may run beside compute it says what that costs, too.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from planner.constants import GRAPH_LAUNCH_S, OLDER_ATTENTION
from planner.cost.collectives import Choice, choose, legal_methods
from planner.cost.expert_traffic import copies_per_token, deduplicated_s
from planner.cost.offload import host_copy_s
from planner.cost.overlap import block_overlap, rank_overlap
from planner.cost.problem import Problem
from planner.cost.sharing import (
    Processors,
    level_shares,
    lost_share,
    moved_bytes,
    needs_no_processor,
)
from planner.cost.work import (
    EXPERT_EXCHANGES,
    EXPERT_PRODUCTS,
    KEPT_IN_16_BITS,
    AttentionCore,
    Communication,
    Gemm,
    HostCopy,
    Launches,
    MemoryBound,
    Op,
)
from planner.hardware.gpus import architecture_of
from planner.hardware.kernels import attention_s, gemm_s, grouped_gemm_s, memory_bound_s
from planner.hardware.roofline import CAST_PRECISIONS
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import Group, axis_group
from planner.plan import Axis, Collective, Precision
from planner.topology.fabric import NETWORK_KINDS, Fabric

__all__ = ["Known", "Timed", "seconds", "slowed"]


@dataclass(frozen=True, slots=True)
class Timed:
    """An op and its time.

    Attributes:
        op: What is done.
        seconds: One occurrence, shape [rows]; 0 of what occurs in no row.
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


class Known:
    """What is the same in every call of ``seconds`` on one fabric, worked out once.

    Attributes:
        processors: That collectives take.
        choices: Of algorithms, by operation, sizes and group.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.processors = Processors(fabric)
        self.choices: dict[tuple[Collective, bytes, bytes], Choice] = {}


def seconds(
    problem: Problem, c: Candidates, ops: list[Op], known: Known | None = None
) -> list[Timed]:
    """Return the ops with their times, in the same order.

    Args:
        problem: What stays fixed.
        c: Candidates.
        ops: Of the candidates.
        known: Of ``problem.fabric`` and ``problem.framework``; one for many calls saves work.
    """
    known = known or Known(problem.fabric)
    axes = {op.axis for op in ops if isinstance(op, Communication)}
    groups = {axis: axis_group(problem.fabric, c, axis) for axis in axes}
    timed = [_timed(problem, groups, op, known) for op in ops]
    return _beside_compute(problem, known.processors, groups, timed)


def _timed(
    problem: Problem,
    groups: dict[Axis, Group],
    op: Op,
    known: Known,
) -> Timed:
    """Return one op with its time; calls that are alike, of many layers' parts, are chosen once."""
    if not op.repeats.any():
        nothing = np.zeros(len(op.repeats))
        return Timed(op, nothing, nothing)
    if isinstance(op, Communication):
        group = groups[op.axis]
        key = op.op, op.size_bytes.tobytes(), np.stack([*group.members, group.stride]).tobytes()
        if key not in known.choices:
            legal = legal_methods(problem.fabric, problem.framework, op.op)
            known.choices[key] = choose(op.op, problem.fabric, group, op.size_bytes, legal)
        choice, longer = known.choices[key], slowed(problem, group)
        if op.name in EXPERT_EXCHANGES and problem.training.dispatcher == "deduplicated":
            once = _deduplicated_s(problem, op, group) * longer
            return Timed(op, once, once * op.repeats, choice)
        return Timed(op, choice.seconds * longer, choice.seconds * longer * op.repeats, choice)
    if isinstance(op, Launches):
        is_graph = problem.training.launch == "cuda_graph"
        each = GRAPH_LAUNCH_S.value if is_graph else problem.step_constants.launch_s
        once = op.num_kernels * each
        return Timed(op, once, once * op.repeats)
    if isinstance(op, HostCopy):
        copied = host_copy_s(problem, op)
        return Timed(op, copied, copied * op.repeats)
    once = _compute_s(problem, op) / problem.fabric.slowest_share
    return Timed(op, once, once * op.repeats)


def _deduplicated_s(problem: Problem, op: Communication, group: Group) -> Column:
    """Return what an exchange of tokens with experts takes where none is sent twice to a node.

    Evenly loaded; rows of a capacity, or beyond the mean, count as tokens of their own.
    """
    moe = problem.model.experts
    assert moe is not None, "tokens are exchanged with experts"
    token = op.size_bytes / moe.top_k

    def copies(parts: Column) -> Column:
        numbers, rows = np.unique(parts, return_inverse=True)
        each = [copies_per_token(moe.num_experts, moe.top_k, int(number)) for number in numbers]
        return np.array(each)[rows]

    units = np.maximum(1, group.degree // group.members[0])
    to_ranks, to_units = token * copies(group.degree), token * copies(units)
    return np.where(
        group.degree > 1, deduplicated_s(problem.fabric, group, to_ranks, to_units), 0.0
    )


def slowed(problem: Problem, group: Group) -> Column:
    """Return what a collective takes in a training step over what it takes alone, [rows]."""
    constants, levels = problem.step_constants, problem.fabric.levels
    on_network = np.array([level.kind in NETWORK_KINDS for level in levels])
    whole = [inside == group.degree for inside in group.members[: len(levels) - 1]]
    outermost = np.argmax([*whole, np.ones(len(group.degree), dtype=bool)], axis=0)
    return np.where(on_network[outermost], constants.network_time, constants.collective_time)


def _beside_compute(
    problem: Problem, processors: Processors, groups: dict[Axis, Group], timed: list[Timed]
) -> list[Timed]:
    """Return the ops, with what they share where they run beside compute."""
    fabric = problem.fabric
    calls = {
        number: one.op
        for number, one in enumerate(timed)
        if isinstance(one.op, Communication)
        and (block_overlap(problem, one.op) or rank_overlap(problem, one.op))
        and one.op.repeats.any()
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
    device, constants = problem.device, problem.step_constants
    if isinstance(op, MemoryBound):
        scale = problem.optimizer_scale if op.phase == "step" else problem.compute_scale
        moved = op.num_bytes / constants.memory_rate
        return memory_bound_s(device, moved, op.num_kernels) * scale
    precision, scale = _precision_of(problem, op), problem.compute_scale
    if isinstance(op, AttentionCore):
        slowed = constants.attention_time * _generation(problem)
        return (
            slowed
            * scale
            * attention_s(
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
        )
    if op.experts is None:
        once = gemm_s(device, precision, op.m, op.n, op.k, with_cast=False)
    else:
        once = grouped_gemm_s(
            device,
            precision,
            op.m,
            op.n,
            op.k,
            op.experts.num_local,
            uneven=op.experts.uneven,
            with_cast=False,
        )
        once = once * (constants.grouped_time if op.name in EXPERT_PRODUCTS else 1.0)
    return once * (scale / constants.clock(architecture_of(device.name)))


def _generation(problem: Problem) -> float:
    """Return what the job's attention kernels take over the fastest of the architecture."""
    older = OLDER_ATTENTION.get(problem.training.attention_kernel, {})
    known = older.get(architecture_of(problem.device.name)) or older.get("")
    return known.value if known else 1.0


def _precision_of(problem: Problem, op: Gemm | AttentionCore) -> Precision:
    """Return what a product is computed in: below 16 bits some stay at 16."""
    asked = problem.training.precision
    return "bf16" if op.name in KEPT_IN_16_BITS and asked in CAST_PRECISIONS else asked
