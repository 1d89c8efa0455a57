"""A request in, a plan out: ``make_plan(resolve(request), calibration)``.

``resolve`` looks up bundled names; ``make_plan`` is pure. The same resolved request, calibration
and version give the same bytes.
"""

from dataclasses import dataclass
from typing import Final

from planner import __version__
from planner.calibrate.apply import calibrated_fabric
from planner.constants import (
    CALIBRATED_SPREAD,
    STEP_SPREAD,
)
from planner.cost.problem import Problem
from planner.errors import InfeasiblePlanError, InvalidInputError
from planner.frameworks import refused_training
from planner.hardware.devices import Device, custom_device, device
from planner.model.blocks import block_flop_per_token, layer_kinds
from planner.model.bundled import load_model
from planner.model.huggingface import model_from_config
from planner.model.spec import ModelSpec
from planner.pipeline.partition import split_table
from planner.plan import (
    Calibration,
    Plan,
    Provenance,
    document_hash,
)
from planner.request import HuggingFaceModel, PlanRequest
from planner.search.answer import answer
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
    "closed form, not simulated; collectives of different axes do not contend",
)


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
    _check_length(model, request.training.seq_len)
    _check_training(model, request)
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
            pipelines(model, prior.num_gpus, request.constraints),
            {
                kind: block_flop_per_token(model, kind, request.training.seq_len)
                for kind in ("embedding", "head", *set(layer_kinds(model)))
            },
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
    return Plan(
        id=_plan_id(resolved, calibration),
        topology=resolved.topology.name,
        framework=request.framework,
        training=request.training,
        assumptions=(
            *model.assumptions,
            *_ASSUMPTIONS,
            *(("experts are loaded evenly",) if model.experts else ()),
        ),
        provenance=_provenance(resolved, problem, calibration),
        **answer(
            problem,
            ranking,
            top_k=request.top_k,
            interval=_interval(calibration),
        ),
    )


def _interval(calibration: Calibration | None) -> tuple[float, str]:
    """Return half the width of the interval as a fraction of the step time, and its basis."""
    if calibration is None:
        return STEP_SPREAD.value, STEP_SPREAD.source
    own = f"the runs calibrated on are met within {calibration.residual:.1%}"
    spread = max(CALIBRATED_SPREAD.value, calibration.residual)
    return spread, f"{own}; {CALIBRATED_SPREAD.source}"


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


def _check_length(model: ModelSpec, seq_len: int) -> None:
    if model.learned_positions and seq_len > model.learned_positions:
        raise InvalidInputError(
            f"training.seq_len={seq_len}: {model.name} has {model.learned_positions} learned "
            "positions; use at most that many, or a spec with more learned_positions",
            where="training.seq_len",
        )


def _check_training(model: ModelSpec, request: PlanRequest) -> None:
    """Refuse what no layout makes run: on this framework, or with this model."""
    if refused := refused_training(request.framework, request.training):
        where, why = refused
        raise InvalidInputError(f"{where}={why}", where=where)
    capacity = request.training.expert_capacity
    if capacity is not None and model.experts is None:
        raise InvalidInputError(
            f"training.expert_capacity of factor {capacity.factor:g}: {model.name} is dense; "
            "need a model with experts, or leave it out",
            where="training.expert_capacity",
        )


def _check_precision(hardware: Device, request: PlanRequest) -> None:
    if request.training.precision not in hardware.peak_flop_per_s:
        raise InvalidInputError(
            f"training.precision={request.training.precision!r}: {hardware.name} computes in "
            f"{', '.join(hardware.peak_flop_per_s)}",
            where="training.precision",
        )
