"""The best candidate of a ranking as the parts of a plan, and what came after it."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from planner.constants import GRADIENT_BUCKET_BYTES
from planner.cost.collectives import basis_of, collective_terms, thresholds
from planner.cost.defaults import chooses_knowingly, library_default, library_methods
from planner.cost.problem import Problem
from planner.cost.step import Exposed, Priced, timed_ops
from planner.cost.traffic import bytes_per_level, lower_bound_s
from planner.cost.work import AttentionCore, Communication, Gemm, HostCopy, Launches, MemoryBound
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
    Column,
)
from planner.layout.groups import Group, axis_group
from planner.model.blocks import model_flop_per_token, parameter_count
from planner.model.spec import ModelSpec
from planner.plan import (
    Axis,
    BatchSplit,
    Breakdown,
    Collective,
    CollectiveChoice,
    Crossing,
    Interval,
    ModelSummary,
    Pipeline,
    Prediction,
    Probe,
    RankRule,
    RejectedReason,
    RunnerUp,
    Sharding,
    Stage,
    TimedOp,
    document_hash,
)
from planner.request import Constraints
from planner.search.explain import why_slower
from planner.search.nearby import stage_memory
from planner.search.rank import Ranking, rank
from planner.topology.fabric import Fabric, Level

__all__ = ["answer"]

_PROBED_LAYOUTS: Final = 8
# A spread beyond says no more: measured times may be ten times the predicted.
_WIDEST: Final = 0.9


def answer(
    problem: Problem, ranking: Ranking, *, top_k: int, interval: tuple[float, str]
) -> dict[str, Any]:
    """Return the fields of a ``Plan`` that follow from the ranking.

    Args:
        problem: What was searched.
        ranking: Best first.
        top_k: Runners-up to list.
        interval: Half its width as a fraction of the step time, and what that rests on.
    """
    best = ranking.candidates.take(np.array([0]))
    ops = timed_ops(problem, best)
    layout = best.layout(0)
    collectives = tuple(_collectives(problem, best, ops))
    return {
        "model": _model(problem.model),
        "layout": layout,
        "ranks": _ranks(problem, best, collectives),
        "batch": BatchSplit(
            micro_batch_size=int(best.micro_batch_size[0]),
            num_micro_batches=int(best.num_micro_batches[0]),
        ),
        "pipeline": _pipeline(problem, best),
        "sharding": _sharding(problem, best),
        "recompute": RECOMPUTE_MODES[int(best.recompute[0])],
        "recompute_layers": int(best.recompute_layers[0]) or None,
        "collectives": collectives,
        "prediction": _prediction(problem, ranking.priced, *interval),
        "memory": stage_memory(problem, best),
        "ops": tuple(
            _timed_op(best, op) for op in ops if op.repeats[0] > 0 and op.exposed_s[0] > 0
        ),
        "probes": tuple(_probes(problem, best)),
        "crossings": tuple(_crossings(problem, best, ops)),
        "runners_up": _runners_up(ranking, top_k),
        "rejected": tuple(
            RejectedReason(reason=reason, count=count)
            for reason, count in sorted(ranking.rejected.items(), key=lambda item: -item[1])
        ),
        "num_candidates": ranking.num_candidates,
    }


def _ranks(
    problem: Problem, best: Candidates, collectives: tuple[CollectiveChoice, ...]
) -> RankRule:
    levels, world_size = problem.fabric.levels, best.layout(0).world_size
    methods = {method.algorithm for choice in collectives for method in choice.methods()}
    return RankRule(
        order=RANK_ORDERS[int(best.order[0])],
        ranks_per_node=min(problem.fabric.gpus_per_node, world_size),
        ranks_per_unit=min(levels[0].unit_size, world_size),
        units=None if levels[0].unit_sizes is None else _units(levels[0], world_size),
        outer_units=_units(levels[1], world_size) if "three_level" in methods else None,
    )


def _units(level: Level, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each unit of a level."""
    sizes = level.unit_sizes or (level.unit_size,) * -(-world_size // level.unit_size)
    ends = np.minimum(np.cumsum(sizes), world_size).tolist()
    return tuple(tuple(range(a, b)) for a, b in zip([0, *ends[:-1]], ends, strict=True))


def _crossings(problem: Problem, best: Candidates, ops: list[Exposed]) -> Iterator[Crossing]:
    """Yield what each axis sends over each level, most first."""
    found: dict[tuple[Axis, int], float] = {}
    for exposed in ops:
        op, choice = exposed.timed.op, exposed.timed.choice
        if not isinstance(op, Communication) or choice is None or exposed.repeats[0] == 0:
            continue
        group = axis_group(problem.fabric, best, op.axis)
        method = choice.methods[int(choice.index[0])]
        sent = bytes_per_level(
            op.op, method, problem.fabric, group, op.size_bytes, closed=op.axis == "cp"
        )
        for depth, size in enumerate(sent):
            key = op.axis, depth
            found[key] = found.get(key, 0.0) + float((size * exposed.repeats)[0])
    for (axis, depth), total in sorted(found.items(), key=lambda item: -item[1]):
        if total > 0:
            name = problem.fabric.levels[depth].name
            yield Crossing(axis=axis, level=name, depth=depth, bytes_per_step=total)


def _model(model: ModelSpec) -> ModelSummary:
    return ModelSummary(
        name=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_params=parameter_count(model),
        num_active_params=parameter_count(model, active=True),
        num_mtp_modules=model.num_mtp_modules,
        fingerprint=document_hash(model),
    )


def _pipeline(problem: Problem, best: Candidates) -> Pipeline:
    pp, sizes = int(best.pp[0]), problem.splits.layers[int(best.split[0])]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Pipeline(
        schedule=SCHEDULES[int(best.schedule[0])],
        stages=tuple(
            Stage(
                pp_rank=stage % pp,
                chunk=stage // pp,
                first_layer=int(starts[stage]),
                num_layers=size,
                embedding=stage == 0,
                head=stage == len(sizes) - 1,
            )
            for stage, size in enumerate(sizes)
        ),
    )


def _sharding(problem: Problem, best: Candidates) -> Sharding:
    overlap, zero = problem.overlaps_data_parallel, int(best.zero_stage[0])
    return Sharding(
        zero_stage=zero,
        sequence_parallel=bool(best.sequence_parallel[0]),
        context_exchange=CONTEXT_EXCHANGES[int(best.context_exchange[0])],
        overlap_gradient_reduce=overlap,
        overlap_parameter_gather=overlap and zero > 0,
        gradient_bucket_bytes=int(GRADIENT_BUCKET_BYTES[problem.framework].value),
    )


def _collectives(
    problem: Problem, best: Candidates, ops: list[Exposed]
) -> Iterator[CollectiveChoice]:
    """Yield a choice per axis and operation, at the size that costs the step most."""
    heaviest: dict[tuple[str, str], Exposed] = {}
    for exposed in ops:
        op = exposed.timed.op
        if isinstance(op, Communication) and exposed.timed.seconds[0] > 0 < exposed.repeats[0]:
            key = (op.axis, op.op)
            total = exposed.timed.seconds[0] * exposed.repeats[0]
            now = heaviest.get(key)
            if now is None or total > now.timed.seconds[0] * now.repeats[0]:
                heaviest[key] = exposed
    for exposed in heaviest.values():
        op, choice = exposed.timed.op, exposed.timed.choice
        assert isinstance(op, Communication), "only these were collected"
        assert choice is not None, "every collective was chosen"
        group = axis_group(problem.fabric, best, op.axis)
        bound = lower_bound_s(op.op, problem.fabric, group, op.size_bytes)
        chosen, following = (choice.methods[int(at[0])] for at in (choice.index, choice.runner_up))
        has_next = chosen != following and np.isfinite(choice.runner_up_s[0])
        yield CollectiveChoice(
            axis=op.axis,
            op=op.op,
            group_size=int(group.degree[0]),
            size_bytes=round(float(op.size_bytes[0])),
            algorithm=chosen.algorithm,
            path=chosen.path,
            predicted_s=float(choice.seconds[0]),
            runner_up=following.algorithm if has_next else None,
            runner_up_path=following.path if has_next else "library",
            runner_up_s=float(choice.runner_up_s[0]) if has_next else None,
            thresholds=thresholds(op.op, problem.fabric, group, choice.methods),
            bound_s=float(bound[0]),
            basis=basis_of(op.op, chosen, problem.fabric, group, op.size_bytes),
            **_library_default(problem.fabric, op.op, group, op.size_bytes),
        )


def _library_default(
    fabric: Fabric, op: Collective, group: Group, size_bytes: Column
) -> dict[str, Any]:
    """Return what the library would take, where it has a choice, and its seconds."""
    if not chooses_knowingly(fabric, op):
        return {}
    methods = library_methods(fabric, op)
    method = methods[int(library_default(op, fabric, group, size_bytes)[0])]
    seconds = collective_terms(op, method, fabric, group, size_bytes).total_s()
    return {"library_default": method.algorithm, "library_default_s": float(seconds[0])}


def _prediction(problem: Problem, priced: Priced, spread: float, basis: str) -> Prediction:
    training, gpus = problem.training, problem.fabric.num_gpus
    breakdown = Breakdown(
        **{name: float(getattr(priced, name)[0]) for name in Breakdown.model_fields}
    )
    step_time_s = breakdown.total_s()
    num_tokens = training.global_batch_size * training.seq_len
    flop = num_tokens * model_flop_per_token(problem.model, training.seq_len, training.packing)
    peak = problem.device.peak_flop_per_s[training.precision] * gpus
    return Prediction(
        step_time_s=step_time_s,
        interval=Interval(
            # of |predicted / measured - 1|: so far may what is measured lie from it
            low_s=step_time_s / (1 + spread),
            high_s=step_time_s / (1 - min(spread, _WIDEST)),
            basis=basis,
        ),
        breakdown=breakdown,
        tokens_per_s=num_tokens / step_time_s,
        tokens_per_s_per_gpu=num_tokens / step_time_s / gpus,
        model_flop_per_step=flop,
        mfu=None if problem.fabric.cores_per_node else flop / step_time_s / peak,
        bubble_fraction=breakdown.bubble_s / step_time_s,
    )


def _timed_op(best: Candidates, exposed: Exposed) -> TimedOp:
    timed = exposed.timed
    op = timed.op
    common = {
        "name": op.name,
        "phase": op.phase,
        "block": exposed.block or "",
        "pp_rank": int(exposed.pp_rank[0]),
        "seconds": float(timed.seconds[0]),
        "repeats": float(exposed.repeats[0]),
        "exposed_s": float(exposed.exposed_s[0]),
    }
    match op:
        case Communication():
            assert timed.choice is not None, "every collective was chosen"
            method = timed.choice.methods[int(timed.choice.index[0])]
            return TimedOp(
                **common,
                axis=op.axis,
                op=op.op,
                algorithm=method.algorithm,
                path=method.path,
                # a message has two ends, however many ranks are in the group
                group_size=2 if op.op == "send_recv" else best.layout(0).degree(op.axis),
                size_bytes=round(float(op.size_bytes[0])),
            )
        case MemoryBound() | HostCopy():
            return TimedOp(**common, memory_bytes=float(op.num_bytes[0]))
        case Launches():
            return TimedOp(**common)
        case Gemm() | AttentionCore():
            return TimedOp(**common, flop=float(op.flop[0]))


def _probes(problem: Problem, best: Candidates) -> Iterator[Probe]:
    """Yield what the executor times before training, so that layouts not run can be priced.

    The messages of the best layouts of the whole space, whatever this request holds fixed, in
    five geometric steps on the winner's largest group: that tells latency and bandwidth apart.
    Other frameworks run no probes.
    """
    layout = best.layout(0)
    axes: tuple[Axis, ...] = ("tp", "dp_cp")
    axis = max(axes, key=layout.degree)
    if problem.framework != "executor" or layout.degree(axis) == 1:
        return
    free = rank(problem, Constraints())
    sizes = [
        float(op.timed.op.size_bytes[0])
        for row in _distinct_layouts(free)[:_PROBED_LAYOUTS]
        for op in timed_ops(problem, free.candidates.take(np.array([row])))
        if isinstance(op.timed.op, Communication) and op.exposed_s[0] > 0
    ]
    if sizes:
        steps = np.geomspace(min(sizes), max(sizes), 5)
        whole = {8 * round(size / 8) for size in steps}
        yield Probe(axis=axis, op="all_reduce", sizes_bytes=tuple(sorted(whole)))


def _distinct_layouts(ranking: Ranking) -> list[int]:
    """Return the best row of every layout in every order of its axes, in rank order."""
    c = ranking.candidates
    degrees = [c.tp, c.cp, c.pp, c.ep, c.etp, c.dp_shard, c.dp_replicate, c.virtual_stages]
    _, first = np.unique(np.stack([*degrees, c.order], axis=1), axis=0, return_index=True)
    return sorted(int(row) for row in first)


def _runners_up(ranking: Ranking, top_k: int) -> tuple[RunnerUp, ...]:
    c, times = ranking.candidates, ranking.priced.step_time_s()
    return tuple(
        RunnerUp(
            layout=c.layout(row),
            order=RANK_ORDERS[int(c.order[row])],
            micro_batch_size=int(c.micro_batch_size[row]),
            recompute=RECOMPUTE_MODES[int(c.recompute[row])],
            recompute_layers=int(c.recompute_layers[row]) or None,
            zero_stage=int(c.zero_stage[row]),
            step_time_s=float(times[row]),
            slower_by=float(times[row] / times[0] - 1),
            peak_memory_bytes=round(float(ranking.peak_bytes[row])),
            why=why_slower(ranking.priced, row),
        )
        for row in _distinct_layouts(ranking)[1 : top_k + 1]
    )
