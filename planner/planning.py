"""A request in, a plan out: ``make_plan(resolve(request), calibration)``.

``resolve`` looks up bundled names; ``make_plan`` is pure. The same resolved request, calibration
and version give the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner import __version__
from planner.calibrate.apply import calibrated_fabric
from planner.constants import (
    CALIBRATED_SPREAD,
    GRADIENT_BUCKET_BYTES,
    STEP_SPREAD,
)
from planner.cost.collectives import thresholds
from planner.cost.memory import memory
from planner.cost.problem import Problem
from planner.cost.step import Exposed, Priced, timed_ops
from planner.cost.work import AttentionCore, Communication, Gemm, HostWork, MemoryBound
from planner.errors import InfeasiblePlanError, InvalidInputError
from planner.frameworks import overlaps_data_parallel
from planner.hardware.devices import Device, custom_device, device
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates
from planner.layout.groups import Group, axis_group
from planner.model.blocks import (
    BlockKind,
    attention_flop_per_token,
    block_parameters,
    layer_kinds,
    model_flop_per_token,
    parameter_count,
)
from planner.model.bundled import load_model
from planner.model.huggingface import model_from_config
from planner.model.spec import ModelSpec
from planner.pipeline.partition import split_table
from planner.plan import (
    Axis,
    BatchSplit,
    Breakdown,
    Calibration,
    CollectiveChoice,
    Interval,
    MemoryParts,
    ModelSummary,
    Pipeline,
    Plan,
    Prediction,
    Probe,
    Provenance,
    RankRule,
    RejectedReason,
    RunnerUp,
    Sharding,
    Stage,
    StageMemory,
    TimedOp,
    document_hash,
)
from planner.request import Constraints, HuggingFaceModel, PlanRequest
from planner.search.explain import why_slower
from planner.search.rank import Ranking, rank
from planner.search.space import pipelines
from planner.search.suggest import smallest_change
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument

__all__ = [
    "ResolvedRequest",
    "build_problem",
    "make_plan",
    "resolve",
    "topology_fingerprint",
]

_ASSUMPTIONS: Final = (
    "attention is fused; no score matrix is stored",
    "experts are loaded evenly",
    "closed form, not simulated; collectives of different axes do not contend",
)


_PROBED_LAYOUTS: Final = 8


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with its documents in place of their names."""

    request: PlanRequest
    topology: TopologyDocument
    num_nodes: int
    model: ModelSpec


def resolve(request: PlanRequest) -> ResolvedRequest:
    """Return the request with bundled names looked up and configs read.

    Raises:
        UnknownNameError: No bundled topology or model has that name.
        InvalidInputError: A config cannot be planned, or ``nodes`` is out of range.
    """
    topology = (
        load_topology(request.topology) if isinstance(request.topology, str) else request.topology
    )
    if isinstance(request.model, str):
        model = load_model(request.model)
    elif isinstance(request.model, HuggingFaceModel):
        model = model_from_config(request.model.huggingface, request.model.name)
    else:
        model = request.model
    return ResolvedRequest(request, topology, topology.checked_num_nodes(request.nodes), model)


def topology_fingerprint(topology: TopologyDocument) -> str:
    """Return what a calibration is filed under: the hash of the document."""
    return document_hash(topology)


def build_problem(resolved: ResolvedRequest, calibration: Calibration | None = None) -> Problem:
    """Return what the cost model needs: fabric, device, splits, measured scales.

    Raises:
        InvalidInputError: The device cannot compute in the requested precision.
    """
    request, model = resolved.request, resolved.model
    prior = compile_fabric(resolved.topology, resolved.num_nodes)
    hardware = _device(resolved.topology)
    _check_precision(hardware, request)
    scales = (
        {}
        if calibration is None
        else {
            "compute_scale": calibration.compute_scale,
            "optimizer_scale": calibration.optimizer_scale,
            "host_overhead_s": calibration.host_overhead_s,
        }
    )
    return Problem(
        model=model,
        training=request.training,
        fabric=calibrated_fabric(prior, calibration),
        device=hardware,
        splits=split_table(
            layer_kinds(model),
            pipelines(model, prior.num_gpus),
            _kind_costs(model, request.training.seq_len),
        ),
        framework=request.framework,
        **scales,
    )


def make_plan(resolved: ResolvedRequest, calibration: Calibration | None = None) -> Plan:
    """Return the fastest plan that fits, with its reasons.

    Raises:
        InvalidInputError: The batch or a constraint is impossible.
        InfeasiblePlanError: Nothing fits; ``suggestion`` holds the smallest change found that
            does, as fields of a request.
    """
    problem = build_problem(resolved, calibration)
    try:
        ranking = rank(problem, resolved.request.constraints)
    except InfeasiblePlanError as error:
        change = smallest_change(
            resolved.request, lambda changed: build_problem(resolve(changed), calibration)
        )
        if change is None:
            raise InfeasiblePlanError(
                f"{error}; no single change of constraints, nodes or seq_len makes it fit",
                rejected=error.rejected,
            ) from error
        said = ", ".join(f"{name}={value}" for name, value in change.items())
        raise InfeasiblePlanError(
            f"{error}; try {said}", rejected=error.rejected, suggestion=change
        ) from error
    return _plan(resolved, problem, ranking, calibration)


# ------------------------------------------------------------------------------- the document


def _plan(
    resolved: ResolvedRequest,
    problem: Problem,
    ranking: Ranking,
    calibration: Calibration | None,
) -> Plan:
    request, model = resolved.request, resolved.model
    best = ranking.candidates.take(np.array([0]))
    ops = timed_ops(problem, best)
    layout = best.layout(0)
    runners_up = _runners_up(ranking, request.top_k)
    return Plan(
        id=_plan_id(resolved, calibration),
        topology=resolved.topology.name,
        model=_summary(model),
        framework=request.framework,
        training=request.training,
        layout=layout,
        ranks=RankRule(ranks_per_node=min(problem.fabric.gpus_per_node, layout.world_size)),
        batch=BatchSplit(
            micro_batch_size=int(best.micro_batch_size[0]),
            num_micro_batches=int(best.num_micro_batches[0]),
        ),
        pipeline=_pipeline(problem, best),
        sharding=_sharding(problem, best),
        recompute=RECOMPUTE_MODES[int(best.recompute[0])],
        collectives=tuple(_collectives(problem, best, ops)),
        prediction=_prediction(problem, ranking.priced, calibration),
        memory=tuple(_memory(problem, best)),
        ops=tuple(_timed_op(best, op) for op in ops if op.repeats[0] > 0 and op.exposed_s[0] > 0),
        probes=tuple(_probes(problem, best)),
        runners_up=runners_up,
        rejected=tuple(
            RejectedReason(reason=reason, count=count)
            for reason, count in sorted(ranking.rejected.items(), key=lambda item: -item[1])
        ),
        num_candidates=ranking.num_candidates,
        assumptions=(*model.assumptions, *_ASSUMPTIONS),
        provenance=_provenance(resolved, problem, calibration),
    )


def _plan_id(resolved: ResolvedRequest, calibration: Calibration | None) -> str:
    request = resolved.request
    return document_hash(
        {
            "topology": resolved.topology.model_dump(mode="json"),
            "nodes": resolved.num_nodes,
            "model": resolved.model.model_dump(mode="json"),
            "training": request.training.model_dump(mode="json"),
            "constraints": request.constraints.model_dump(mode="json"),
            "framework": request.framework,
            "top_k": request.top_k,
            "calibration": calibration.id if calibration else None,
            "version": __version__,
        }
    )


def _summary(model: ModelSpec) -> ModelSummary:
    return ModelSummary(
        name=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_params=parameter_count(model),
        num_active_params=parameter_count(model, active=True),
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
    overlap, zero = overlaps_data_parallel(problem.framework), int(best.zero_stage[0])
    return Sharding(
        zero_stage=zero,
        sequence_parallel=bool(best.sequence_parallel[0]),
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
        first, second = int(choice.index[0]), int(choice.runner_up[0])
        has_next = first != second and np.isfinite(choice.runner_up_s[0])
        yield CollectiveChoice(
            axis=op.axis,
            op=op.op,
            group_size=int(group.degree[0]),
            size_bytes=round(float(op.size_bytes[0])),
            algorithm=choice.algorithms[first],
            predicted_s=float(choice.seconds[0]),
            runner_up=choice.algorithms[second] if has_next else None,
            runner_up_s=float(choice.runner_up_s[0]) if has_next else None,
            thresholds=thresholds(op.op, problem.fabric, _first_row(group)),
        )


def _first_row(group: Group) -> Group:
    return Group(group.degree[:1], tuple(members[:1] for members in group.members))


def _prediction(problem: Problem, priced: Priced, calibration: Calibration | None) -> Prediction:
    training, gpus = problem.training, problem.fabric.num_gpus
    breakdown = Breakdown(
        **{name: float(getattr(priced, name)[0]) for name in Breakdown.model_fields}
    )
    step_time_s = breakdown.total_s()
    num_tokens = training.global_batch_size * training.seq_len
    flop = num_tokens * model_flop_per_token(problem.model, training.seq_len)
    peak = problem.device.peak_flop_per_s[training.precision] * gpus
    spread = STEP_SPREAD if calibration is None else CALIBRATED_SPREAD
    return Prediction(
        step_time_s=step_time_s,
        interval=Interval(
            low_s=step_time_s * (1 - spread.value),
            high_s=step_time_s * (1 + spread.value),
            basis=spread.source,
        ),
        breakdown=breakdown,
        tokens_per_s=num_tokens / step_time_s,
        tokens_per_s_per_gpu=num_tokens / step_time_s / gpus,
        model_flop_per_step=flop,
        mfu=None if problem.fabric.cores_per_node else flop / step_time_s / peak,
        bubble_fraction=breakdown.bubble_s / step_time_s,
    )


def _memory(problem: Problem, best: Candidates) -> Iterator[StageMemory]:
    """Yield one entry per distinct pipeline rank content, at its earliest rank."""
    parts = memory(problem, best)
    split = int(best.split[0])
    for profile in np.flatnonzero(problem.splits.multiplicity[split] > 0):
        rounded = MemoryParts(
            **{
                name: round(float(getattr(parts, name)[0, profile]))
                for name in MemoryParts.model_fields
            }
        )
        yield StageMemory(
            pp_rank=int(problem.splits.first_rank[split, profile]),
            parts=rounded,
            total_bytes=rounded.total_bytes(),
            capacity_bytes=round(problem.device.memory_bytes),
        )


def _timed_op(best: Candidates, exposed: Exposed) -> TimedOp:
    timed = exposed.timed
    op = timed.op
    common = {
        "name": op.name,
        "phase": op.phase,
        "block": exposed.block or "",
        "seconds": float(timed.seconds[0]),
        "repeats": float(exposed.repeats[0]),
        "exposed_s": float(exposed.exposed_s[0]),
    }
    match op:
        case Communication():
            assert timed.choice is not None, "every collective was chosen"
            return TimedOp(
                **common,
                axis=op.axis,
                op=op.op,
                algorithm=timed.choice.algorithms[int(timed.choice.index[0])],
                group_size=best.layout(0).degree(op.axis),
                size_bytes=round(float(op.size_bytes[0])),
            )
        case MemoryBound():
            return TimedOp(**common, memory_bytes=float(op.num_bytes[0]))
        case Gemm() | AttentionCore():
            return TimedOp(**common, flop=float(op.flop[0]))
        case HostWork():
            return TimedOp(**common)


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
    """Return the best row of every layout, in rank order."""
    c = ranking.candidates
    degrees = np.stack(
        [c.tp, c.cp, c.pp, c.ep, c.etp, c.dp_shard, c.dp_replicate, c.virtual_stages], axis=1
    )
    _, first = np.unique(degrees, axis=0, return_index=True)
    return sorted(int(row) for row in first)


def _runners_up(ranking: Ranking, top_k: int) -> tuple[RunnerUp, ...]:
    c, times = ranking.candidates, ranking.priced.step_time_s()
    return tuple(
        RunnerUp(
            layout=c.layout(row),
            micro_batch_size=int(c.micro_batch_size[row]),
            recompute=RECOMPUTE_MODES[int(c.recompute[row])],
            zero_stage=int(c.zero_stage[row]),
            step_time_s=float(times[row]),
            slower_by=float(times[row] / times[0] - 1),
            peak_memory_bytes=round(float(ranking.peak_bytes[row])),
            why=why_slower(ranking.priced, row),
        )
        for row in _distinct_layouts(ranking)[1 : top_k + 1]
    )


def _provenance(
    resolved: ResolvedRequest, problem: Problem, calibration: Calibration | None
) -> Provenance:
    if calibration is None:
        said = "priors only: nothing was measured on this cluster"
    else:
        levels = ", ".join(fit.level for fit in calibration.levels) or "no level"
        said = (
            f"measured here in {len(calibration.run_hashes)} run(s): {levels}; compute "
            f"{calibration.compute_scale:.3g} x prior"
        )
    return Provenance(
        commplan_version=__version__,
        calibration_id=calibration.id if calibration else None,
        calibration=said,
        simulated=False,
        sources=(
            f"model: {resolved.model.source}",
            f"device: {problem.device.source}",
            *(f"level {level.name}: {level.source}" for level in problem.fabric.levels),
        ),
    )


def _kind_costs(model: ModelSpec, seq_len: int) -> dict[BlockKind, float]:
    """Return forward flop per token of each block kind, to balance stages by."""
    cores = attention_flop_per_token(model, seq_len)
    costs: dict[BlockKind, float] = {
        "embedding": 0.0,
        "head": 2.0 * model.hidden_size * model.vocab_size,
        "dense": 0.0,
        "moe": 0.0,
    }
    for kind in set(layer_kinds(model)):
        block = block_parameters(model, kind)
        active = block.attention + block.feed_forward
        if kind == "moe" and model.experts is not None:
            active += block.experts * model.experts.top_k // model.experts.num_experts
        costs[kind] = 2.0 * active + cores
    return costs


def _device(topology: TopologyDocument) -> Device:
    """Return the bundled device, or the one whose figures the document gives."""
    if isinstance(topology.device, str):
        return device(topology.device)
    figures = topology.device
    return custom_device(
        name=figures.name,
        memory_bytes=figures.memory_bytes,
        memory_bytes_per_s=figures.memory_bytes_per_s,
        peak_flop_per_s=figures.peak_flop_per_s,
        source=figures.source,
        kernels_like="cpu-core" if topology.node.cores else "h100-sxm-80gb",
    )


def _check_precision(hardware: Device, request: PlanRequest) -> None:
    if request.training.precision not in hardware.peak_flop_per_s:
        raise InvalidInputError(
            f"training.precision={request.training.precision!r}: {hardware.name} computes in "
            f"{', '.join(hardware.peak_flop_per_s)}",
            where="training.precision",
        )
