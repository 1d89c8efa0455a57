"""Op seconds folded into step time: the last of work, seconds, step; ``price`` is all three.

A step is the pipeline law over block seconds, then what data parallelism could not hide, the
optimizer and the host. Block seconds depend on few columns and are priced once per distinct value;
everything else is priced in chunks of rows that stay in cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from planner.cost.offload import host_work
from planner.cost.overlap import Beside, BesidePass, block_overlap, exposed_s, rank_overlap
from planner.cost.problem import Problem
from planner.cost.seconds import Known, Timed, seconds
from planner.cost.shares import fullest_profile, rank_parameters, recomputed_share
from planner.cost.stragglers import expected_maximum
from planner.cost.work import (
    BLOCK_COLUMNS,
    RANK_COLUMNS,
    AttentionCore,
    Communication,
    Gemm,
    HostCopy,
    Launches,
    MemoryBound,
    block_work,
    rank_work,
    stage_send,
)
from planner.errors import InvalidInputError
from planner.layout.candidates import SCHEDULES, Candidates, Column, distinct
from planner.layout.groups import axis_group
from planner.model.blocks import BLOCK_KINDS, BlockKind, block_kinds
from planner.pipeline.laws import HostShare, StageSeconds, has_time_law, step_s

__all__ = ["CHUNK_ROWS", "Exposed", "Priced", "mean_compute_s", "price", "timed_ops"]

CHUNK_ROWS: Final = 8192

_FOLD_COLUMNS: Final = (*BLOCK_COLUMNS, "split", "recompute_layers", "virtual_stages")
# Where an exposed second is booked; etp belongs to the experts.
_PARTS: Final = ("compute", "tp", "cp", "ep", "launch")
_COMPUTE: Final = 0
_LAUNCH: Final = _PARTS.index("launch")
_ENDS: Final = [BLOCK_KINDS.index("embedding"), BLOCK_KINDS.index("head")]
_BACKWARD: Final = 1
_PHASES: Final = {"forward": 0, "recompute": 2}
_PART_OF_AXIS: Final = {"tp": "tp", "cp": "cp", "ep": "ep", "etp": "ep"}


@dataclass(frozen=True, slots=True)
class Priced:
    """Step time and its parts on the slowest pipeline rank, shape [rows]; they add up."""

    compute_s: Column
    tp_exposed_s: Column
    cp_exposed_s: Column
    ep_exposed_s: Column
    dp_exposed_s: Column
    pp_exposed_s: Column
    bubble_s: Column
    optimizer_s: Column
    launch_s: Column
    straggler_s: Column
    host_s: Column

    def step_time_s(self) -> Column:
        """Return the sum of the parts, shape [rows]."""
        return np.sum([getattr(self, f.name) for f in fields(self)], axis=0)

    def take(self, rows: Column) -> "Priced":
        """Return the chosen rows."""
        return Priced(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Exposed:
    """A timed op with what is left of it after overlap.

    ``repeats`` and ``exposed_s`` are per step on pipeline rank ``pp_rank``, shape [rows]: the
    slowest, or for what is done once per step the one with most parameters. ``block`` is empty for
    what the whole rank does.
    """

    timed: Timed
    block: BlockKind | None
    pp_rank: Column
    repeats: Column
    exposed_s: Column


def price(problem: Problem, candidates: Candidates, known: Known | None = None) -> Priced:
    """Return step time and breakdown of every candidate.

    Args:
        problem: What stays fixed.
        candidates: One row or a million.
        known: As of ``seconds``.

    Raises:
        InvalidInputError: A row has a schedule of which only the memory is known.
    """
    if not has_time_law(candidates.schedule).all():
        unknown = candidates.schedule[~has_time_law(candidates.schedule)]
        raise InvalidInputError(
            f"schedule {SCHEDULES[int(unknown[0])]!r}: its memory is known and its time is not; "
            "use 1f1b or interleaved_1f1b",
            where="schedule",
        )
    keys, inverse = distinct(candidates, _FOLD_COLUMNS)
    known = known or Known(problem.fabric)
    folded = _fold(problem, keys, known)
    chunks = []
    for start in range(0, len(candidates), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        chunk = candidates.take(rows)
        rank_keys, rank_inverse = distinct(chunk, RANK_COLUMNS)
        rank = seconds(problem, rank_keys, rank_work(problem, rank_keys), known)
        of_rows = [timed.take(rank_inverse) for timed in rank]
        of_rows += seconds(problem, chunk, [*host_work(problem, chunk)], known)
        chunks.append(_price_rows(problem, chunk, folded.take(inverse[rows]), of_rows, known))
    return Priced(
        **{f.name: np.concatenate([getattr(p, f.name) for p in chunks]) for f in fields(Priced)}
    )


def timed_ops(problem: Problem, candidate: Candidates) -> list[Exposed]:
    """Return every op of one candidate, each on the pipeline rank that decides about it.

    Priced by the same functions as ``price``; a test adds them up to its breakdown.
    """
    folded = _fold(problem, candidate)
    m = candidate.num_micro_batches
    # ranks that share cores: what a second of compute becomes in the step
    stretched = price(problem, candidate).compute_s / (m * folded.slowest[:, :, _COMPUTE].sum())
    waits = _waiting_share(problem, candidate, folded)
    first_rank = problem.splits.first_rank
    slowest = first_rank[candidate.split, folded.profile]
    fullest = first_rank[candidate.split, fullest_profile(*rank_parameters(problem, candidate))]
    found: list[Exposed] = []
    for index, kind in _kinds(problem):
        for timed, exposed in _timed_block(problem, candidate, kind):
            times = folded.counts[:, index] * m
            if timed.op.phase == "recompute":
                times = times * folded.redone
            if isinstance(timed.op, Launches):
                exposed = exposed * waits[int(timed.op.phase != "forward")]
            elif not isinstance(timed.op, Communication):
                exposed = exposed * stretched
            found.append(Exposed(timed, kind, slowest, timed.op.repeats * times, exposed * times))
    ends = folded.counts[:, _ENDS].sum(axis=1)
    send = seconds(problem, candidate, [stage_send(problem, candidate, ends)])[0]
    filled = _fill_sends(candidate) * send.seconds
    found.append(Exposed(send, None, slowest, np.asarray(send.op.repeats), filled))
    ops = [*rank_work(problem, candidate), *host_work(problem, candidate)]
    rank = seconds(problem, candidate, ops)
    for timed, exposed in zip(rank, _exposed_rank(problem, candidate, folded, rank), strict=True):
        unit = timed.op.unit if isinstance(timed.op, Communication) else None
        found.append(Exposed(timed, unit, fullest, np.asarray(timed.op.repeats), exposed))
    return found


def mean_compute_s(problem: Problem, candidates: Candidates) -> Column:
    """Return forward and backward compute per step, mean over pipeline ranks, shape [rows].

    With every rank of a host computing; this is what a rank can measure as its own.
    """
    total = _fold(problem, candidates).total[:, _COMPUTE]
    load = _host_share(problem, candidates).load
    return candidates.num_micro_batches * total / candidates.pp * load


# ------------------------------------------------------------------------------ block seconds


def _kinds(problem: Problem) -> Iterator[tuple[int, BlockKind]]:
    return ((BLOCK_KINDS.index(kind), kind) for kind in block_kinds(problem.model))


def _timed_block(
    problem: Problem, c: Candidates, kind: BlockKind, known: Known | None = None
) -> list[tuple[Timed, Column]]:
    """Return each op of a block with its exposed seconds per micro-batch."""
    timed = seconds(problem, c, block_work(problem, c, kind), known)
    return [(t, _exposed_in_block(problem, c, t, timed)) for t in timed]


def _exposed_in_block(problem: Problem, c: Candidates, timed: Timed, block: list[Timed]) -> Column:
    if not isinstance(timed.op, Communication):
        return timed.total_s
    beside = block_overlap(problem, timed.op)
    if beside is None:
        return timed.total_s
    budget = beside.share * np.sum(
        [t.total_s for t in block if _hides(beside, t)], axis=0, initial=0.0
    )
    first = timed.total_s / c.tp if beside.in_chunks else 0.0
    return exposed_s(timed.total_s, budget, timed.lost_share, first)


def _hides(beside: Beside, timed: Timed) -> bool:
    computes = isinstance(timed.op, Gemm | AttentionCore | MemoryBound)
    named = timed.op.name in beside.ops if beside.ops else computes
    return named and timed.op.phase == beside.phase


def _block_table(problem: Problem, c: Candidates, known: Known | None) -> Column:
    """Return exposed seconds per micro-batch, shape [rows, kinds, phases, parts].

    Phases are forward, backward, and what is recomputed for the backward. Launches are all that the
    host issues; what of them counts, ``_launches_exposed`` says of a whole pass.
    """
    table = np.zeros((len(c), len(BLOCK_KINDS), 3, len(_PARTS)))
    for index, kind in _kinds(problem):
        for timed, exposed in _timed_block(problem, c, kind, known):
            cell = table[:, index, _PHASES.get(timed.op.phase, _BACKWARD)]
            part = "launch" if isinstance(timed.op, Launches) else "compute"
            if isinstance(timed.op, Communication):
                part = _PART_OF_AXIS[timed.op.axis]
            cell[:, _PARTS.index(part)] += exposed
    return table


@dataclass(frozen=True, slots=True)
class _Folded:
    """Block seconds added up over pipeline ranks, per micro-batch.

    Attributes:
        profile: Of the slowest pipeline rank, shape [rows].
        counts: Blocks of each kind there, shape [rows, kinds].
        slowest: Its seconds, shape [rows, (forward, backward), parts].
        total: Of all pipeline ranks, shape [rows, parts].
        redone: Part of that rank's layers that is recomputed, shape [rows].
    """

    profile: Column
    counts: Column
    slowest: Column
    total: Column
    redone: Column

    def take(self, rows: Column) -> "_Folded":
        return _Folded(*(getattr(self, f.name)[rows] for f in fields(self)))


def _fold(problem: Problem, c: Candidates, known: Known | None = None) -> _Folded:
    """Add block seconds up by the split; reads ``_FOLD_COLUMNS``.

    A layer that is not recomputed goes without the seconds of its recomputation.
    """
    keys, inverse = distinct(c, BLOCK_COLUMNS)
    table = _block_table(problem, keys, known)
    again = table[:, :, 2][inverse]
    table[:, :, _BACKWARD] += table[:, :, 2]
    table = table[:, :, :2][inverse]
    splits = problem.splits
    counts = splits.counts[c.split]
    spared = counts * (1 - recomputed_share(c, counts))[:, :, None]
    together = np.add if problem.training.launch == "blocking" else np.maximum
    passes = _pass_seconds(table, again, counts, spared, together)
    profile = np.argmax(passes.sum(axis=2), axis=1)
    rows = np.arange(len(c))
    chosen = counts[rows, profile]
    blocks = (splits.counts * splits.multiplicity[:, :, None]).sum(axis=1)[c.split]
    slowest = np.einsum("rk,rkdq->rdq", chosen, table)
    slowest[:, _BACKWARD] -= np.einsum("rk,rkq->rq", spared[rows, profile], again)
    total = np.einsum("rk,rkdq->rdq", blocks, table)
    total[:, _BACKWARD] -= np.einsum("rpk,rp,rkq->rq", spared, splits.multiplicity[c.split], again)
    for passes in (slowest, total):
        passes[:, :, _LAUNCH] = _launches_exposed(problem, passes)
    return _Folded(profile, chosen, slowest, total.sum(axis=1), recomputed_share(c, chosen))


def _waiting_share(problem: Problem, candidate: Candidates, folded: _Folded) -> list[float]:
    """Return what counts of the launches of one candidate's forward, and of its backward."""
    issued = np.zeros(2)
    for index, kind in _kinds(problem):
        for timed, all_s in _timed_block(problem, candidate, kind):
            if isinstance(timed.op, Launches):
                share = folded.redone[0] if timed.op.phase == "recompute" else 1.0
                direction = int(timed.op.phase != "forward")
                issued[direction] += folded.counts[0, index] * all_s[0] * share
    exposed = folded.slowest[0, :, _LAUNCH]
    return [
        float(one / whole) if whole else 0.0 for one, whole in zip(exposed, issued, strict=True)
    ]


def _pass_seconds(
    table: Column, again: Column, counts: Column, spared: Column, together: np.ufunc
) -> Column:
    """Return seconds of every profile's passes, [rows, profiles, passes].

    ``together`` is of what the device does and what the host issues.
    """
    passes = []
    for direction in (0, _BACKWARD):
        run, issued = table[:, :, direction, :_LAUNCH].sum(axis=2), table[:, :, direction, _LAUNCH]
        seconds_of = [np.einsum("rpk,rk->rp", counts, one) for one in (run, issued)]
        if direction == _BACKWARD:
            redone = again[:, :, :_LAUNCH].sum(axis=2), again[:, :, _LAUNCH]
            seconds_of = [
                one - np.einsum("rpk,rk->rp", spared, less)
                for one, less in zip(seconds_of, redone, strict=True)
            ]
        passes.append(together(*seconds_of))
    return np.stack(passes, axis=2)


def _launches_exposed(problem: Problem, passes: Column) -> Column:
    """Return what of all launches of a pass [..., parts] is not hidden by what the device does.

    The host issues ahead of the device: the longer of both counts, unless it waits for each kernel.
    """
    if problem.training.launch == "blocking":
        return passes[..., _LAUNCH]
    return np.maximum(0.0, passes[..., _LAUNCH] - passes[..., :_LAUNCH].sum(axis=-1))


# -------------------------------------------------------------------------------- per step


def _exposed_rank(
    problem: Problem, c: Candidates, folded: _Folded, rank: list[Timed]
) -> list[Column]:
    """Return what data-parallel overlap leaves of each rank op, and the optimizer, per step.

    Ops that run beside the same pass share its seconds; each has what it adds to those before it
    in the list.
    """
    # while the device waits for launches, messages travel too
    compute = folded.slowest[:, :, [_COMPUTE, _LAUNCH]].sum(axis=2)
    beside = {
        name: BesidePass(budget)
        for name, budget in zip(("forward", "backward"), compute.T, strict=True)
    }
    load = _host_share(problem, c).load
    free = c.num_micro_batches * compute.sum(axis=1)  # beside which copies to the host hide
    found: list[Column] = []
    for timed in rank:
        op, exposed = timed.op, timed.total_s
        under = rank_overlap(problem, op) if isinstance(op, Communication) else None
        if isinstance(op, HostCopy):
            if op.hides:
                exposed, free = (
                    np.maximum(0.0, exposed - free),
                    np.maximum(0.0, free - exposed),
                )
        elif not isinstance(op, Communication):
            exposed = exposed * load
        elif under is not None and exposed.any():
            passes = np.maximum(1, op.passes)
            exposed = passes * beside[under].add(
                timed.total_s / passes,
                timed.lost_share,
                always_s=timed.seconds * op.edges,
                level_shares=timed.level_shares,
                of_experts=op.axis == "edp",
            )
        found.append(exposed)
    return found


def _host_share(problem: Problem, c: Candidates) -> HostShare:
    fabric = problem.fabric
    if fabric.cores_per_node is None:
        return HostShare(1.0, np.ones(len(c)))
    load = min(fabric.gpus_per_node, fabric.num_gpus) / fabric.cores_per_node
    return HostShare(load, axis_group(fabric, c, "pp").members[0])


def _fill_sends(c: Candidates) -> Column:
    """Return the sends that the pipeline's filling and draining waits for."""
    stages = np.where(
        c.schedule == SCHEDULES.index("interleaved_1f1b"), c.pp * c.virtual_stages, c.pp
    )
    return 2 * (stages - 1)


def _price_rows(
    problem: Problem, c: Candidates, folded: _Folded, rank: list[Timed], known: Known
) -> Priced:
    nobody = np.zeros(len(c))
    send = seconds(problem, c, [stage_send(problem, c, nobody)], known)[0].seconds
    m = c.num_micro_batches
    slowest = folded.slowest.sum(axis=1)
    waiting = slowest[:, _COMPUTE + 1 :].sum(axis=1)
    host = _host_share(problem, c)
    stage = StageSeconds(
        slowest_compute=slowest[:, _COMPUTE],
        slowest_waiting=waiting,
        total_compute=folded.total[:, _COMPUTE],
        total_waiting=folded.total[:, _COMPUTE + 1 :].sum(axis=1),
        send=send,
    )
    loop = step_s(stage, host, c.schedule, c.pp, m, c.virtual_stages)
    filled = np.minimum(_fill_sends(c) * send, np.maximum(0.0, loop - m * waiting))
    compute = np.minimum(m * slowest[:, _COMPUTE] * host.load, loop - m * waiting - filled)
    booked = {"tp": m * slowest[:, _PARTS.index("tp")], "pp": filled}
    booked |= {"dp": nobody, "optimizer": nobody}
    for timed, exposed in zip(rank, _exposed_rank(problem, c, folded, rank), strict=True):
        axis = timed.op.axis if isinstance(timed.op, Communication) else "optimizer"
        part = axis if axis in booked else "dp"
        booked[part] = booked[part] + exposed
    ranks = c.tp * c.cp * c.pp * c.dp
    return Priced(
        compute_s=compute,
        tp_exposed_s=booked["tp"],
        cp_exposed_s=m * slowest[:, _PARTS.index("cp")],
        ep_exposed_s=m * slowest[:, _PARTS.index("ep")],
        dp_exposed_s=booked["dp"],
        pp_exposed_s=booked["pp"],
        bubble_s=np.where(c.pp > 1, np.maximum(0.0, loop - compute - m * waiting - filled), 0.0),
        optimizer_s=booked["optimizer"],
        launch_s=m * slowest[:, _LAUNCH],
        straggler_s=problem.jitter * expected_maximum(ranks) * compute,
        host_s=np.full(len(c), problem.host_overhead_s + problem.step_constants.host_s),
    )
