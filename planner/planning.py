"""A request in, a plan out: ``make_plan(resolve(request), calibration)``.

``make_plan`` is pure: the same resolved request, calibration and version give the same bytes.
Where nodes are weak or of several types it prices what can be done about it (keep them, leave
them out, take others) and plans for the fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from planner import __version__
from planner.constants import CALIBRATED_SPREAD, MEMORY_SPREAD, STEP_SPREAD
from planner.cost.expert_traffic import load_assumptions
from planner.cost.memory import memory
from planner.cost.problem import Problem
from planner.errors import InfeasiblePlanError, PlannerError
from planner.hardware.gpus import architecture_of
from planner.hardware.roofline import DERIVED
from planner.model.sequence import attended
from planner.plan import (
    Calibration,
    CollectiveChoice,
    PlacementOption,
    Plan,
    Provenance,
    RankRule,
    TrainingSpec,
    Waiting,
    document_hash,
)
from planner.resolving import ResolvedRequest, build_problem, resolve, topology_fingerprint
from planner.search.answer import answer
from planner.search.rank import Ranking, rank
from planner.search.suggest import smallest_change
from planner.topology.compile import live_nodes
from planner.topology.placement import Placement, packed_nodes, placements
from planner.units import counted, format_count, format_seconds

__all__ = ["make_plan"]

_FUSED: Final = "attention is fused; no score matrix is stored"
_UNFUSED: Final = "attention is not fused: score matrices are stored, in memory and in time"
_ASSUMPTIONS: Final = ("closed form, not simulated; collectives of different axes do not contend",)
_PUBLISHED: Final = "published tables of such boards"
# Architectures with published runs.
_PUBLISHED_ON: Final = ("volta", "ampere", "hopper", "blackwell")
# Part of a step that other nodes must save to be taken in place of those asked for.
_WORTH_MOVING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class _Option:
    """A placement that fits, with its search."""

    placement: Placement
    problem: Problem
    ranking: Ranking

    def step_time_s(self) -> float:
        return float(self.ranking.priced.step_time_s()[0])


def make_plan(resolved: ResolvedRequest, calibration: Calibration | None = None) -> Plan:
    """Return the fastest plan that fits, with its reasons.

    Raises:
        InvalidInputError: The batch or a constraint is impossible.
        InfeasiblePlanError: Nothing fits; ``suggestion`` holds the smallest change found that
            does, as fields of a request.
    """
    spares = () if resolved.hosts else sorted({*live_nodes(resolved.topology)} - {*resolved.nodes})
    tried = placements(resolved.topology, resolved.nodes, spares)
    priced = [_priced(resolved, placement, calibration) for placement in tried]
    options = [option for option in priced if isinstance(option, _Option)]
    if not options:
        refused = priced[0]  # of the nodes asked for
        assert isinstance(refused, PlannerError), "what is no option is an error"
        if isinstance(refused, InfeasiblePlanError):
            raise _with_suggestion(refused, resolved, calibration) from refused
        raise refused
    fastest = _fastest(options)
    times = {option.placement: option.step_time_s() for option in options}
    return _plan(resolved, fastest, _placements(resolved, tried, times, fastest), calibration)


def _fastest(options: Sequence[_Option]) -> _Option:
    """Return the fastest; the nodes as asked for where others would hardly save a thing."""
    fastest = min(options, key=_Option.step_time_s)
    asked = options[0]
    enough = (1 - _WORTH_MOVING) * asked.step_time_s()
    is_kept = asked.placement.choice == "keep" and fastest.step_time_s() > enough
    return asked if is_kept else fastest


def _priced(
    resolved: ResolvedRequest, placement: Placement, calibration: Calibration | None
) -> _Option | PlannerError:
    """Return the best there, or why there is nothing: a degree may not divide fewer nodes."""
    try:
        problem = build_problem(resolved, calibration, placement.nodes)
        return _Option(placement, problem, rank(problem, resolved.request.constraints))
    except PlannerError as error:
        return error


def _with_suggestion(
    error: InfeasiblePlanError, resolved: ResolvedRequest, calibration: Calibration | None
) -> InfeasiblePlanError:
    """Return the error with the smallest change that makes it fit, if one was found."""
    change = smallest_change(
        resolved.request, lambda changed: build_problem(resolve(changed), calibration)
    )
    if change is None:
        return InfeasiblePlanError(
            f"{error}; no single change of constraints, nodes or seq_len makes it fit",
            rejected=error.rejected,
        )
    asked = resolved.request.training.model_dump()
    fields = {name: value for name, value in change.items() if name != "training"}
    training = change.get("training")
    for name, value in (training if isinstance(training, dict) else {}).items():
        if value != asked.get(name):
            words = "+".join(value) if isinstance(value, tuple | list) else value
            fields[f"training.{name}"] = words
    said = ", ".join(f"{name}={value}" for name, value in fields.items())
    return InfeasiblePlanError(f"{error}; try {said}", rejected=error.rejected, suggestion=change)


# ------------------------------------------------------------------------------- the document


def _plan(
    resolved: ResolvedRequest,
    fastest: _Option,
    options: tuple[PlacementOption, ...],
    calibration: Calibration | None,
) -> Plan:
    request, problem = resolved.request, fastest.problem
    fields = answer(
        problem, fastest.ranking, top_k=request.top_k, interval=_interval(calibration, problem)
    )
    fields["ranks"] = _with_hosts(fields["ranks"], resolved, fastest.placement)
    return Plan(
        id=_plan_id(resolved, calibration),
        topology=resolved.topology.name,
        framework=request.framework,
        training=request.training,
        placements=options,
        waiting=_waiting(resolved, fastest, calibration),
        assumptions=tuple(_assumptions(resolved, fastest)),
        provenance=_provenance(resolved, problem, calibration, fields["collectives"]),
        **fields,
    )


def _with_hosts(ranks: RankRule, resolved: ResolvedRequest, placement: Placement) -> RankRule:
    """Return the rule with the hosts in rank order, where it matters which they are."""
    topology = resolved.topology
    if not (resolved.hosts or topology.hosts or topology.impairments or topology.islands):
        return ranks
    return ranks.model_copy(update={"hosts": tuple(map(resolved.host, placement.nodes))})


def _placements(
    resolved: ResolvedRequest,
    tried: Sequence[Placement],
    times: dict[Placement, float],
    fastest: _Option,
) -> tuple[PlacementOption, ...]:
    if len(tried) == 1:
        return ()
    return tuple(
        PlacementOption(
            choice=placement.choice,
            num_nodes=len(placement.nodes),
            left_out=tuple(map(resolved.host, placement.left_out)),
            added=tuple(map(resolved.host, placement.added)),
            step_time_s=times.get(placement),
            is_chosen=placement is fastest.placement,
        )
        for placement in tried
    )


def _waiting(
    resolved: ResolvedRequest, fastest: _Option, calibration: Calibration | None
) -> Waiting | None:
    """Price as many healthy nodes as were asked for, under as few switches as the cluster has."""
    packed = packed_nodes(resolved.topology, resolved.nodes)
    if packed is None:
        return None
    then = _priced(resolved, Placement("move", packed), calibration)
    if isinstance(then, PlannerError) or then.step_time_s() >= fastest.step_time_s():
        return None
    return Waiting(
        hosts=tuple(map(resolved.topology.host, packed)),
        step_time_s=then.step_time_s(),
        gain=1 - then.step_time_s() / fastest.step_time_s(),
    )


def _packing_assumptions(training: TrainingSpec) -> Iterator[str]:
    if training.packing is not None:
        length = attended(training.seq_len, training.packing).kernel_length
        yield (
            "documents are packed in every sequence as given; attention does their own flop alone, "
            f"as efficiently as over {length:,.0f} tokens, their mean length weighted with flop, "
            "and every rank has an equal share"
        )


def _assumptions(resolved: ResolvedRequest, fastest: _Option) -> Iterator[str]:
    yield from resolved.model.assumptions
    yield _FUSED if resolved.request.training.fused_attention else _UNFUSED
    yield from _ASSUMPTIONS
    if resolved.request.training.dispatcher == "deduplicated":
        yield (
            "tokens go to a node once in the step's time; the collectives and bytes listed are "
            "those of an all_to_all"
        )
    if fastest.problem.jitter:
        yield (
            f"ranks' compute differs by {fastest.problem.jitter:.1%} (standard deviation), and a "
            "step waits for the slowest: training.jitter"
        )
    yield from _packing_assumptions(resolved.request.training)
    yield from _kernel_assumptions(fastest.problem)
    yield from _tight_memory(fastest)
    yield from load_assumptions(fastest.problem, fastest.ranking.candidates.take(slice(1)))
    yield from resolved.assumptions
    fabric, topology = fastest.problem.fabric, resolved.topology
    request = resolved.request
    if request.nodes is None and not resolved.hosts and len(resolved.nodes) < topology.max_nodes:
        yield (
            f"nodes are not given: planned for {len(resolved.nodes):,} of "
            f"{topology.max_nodes:,}, the default of topology {topology.name!r}"
        )
    if topology.assumptions:
        yield (
            f"what topology {topology.name!r} itself assumes, {len(topology.assumptions)} in "
            "number, is in its document; 'commplan topology show' lists it"
        )
    if fabric.slowest_share < 1:
        yield f"every GPU waits for the slowest, at {fabric.slowest_share:g} of its speed"
    types = {
        topology.device_name if island is None else island.device_name
        for island in map(topology.island_of, fastest.placement.nodes)
    }
    if len(types) > 1:
        yield f"of {', '.join(sorted(types))} every GPU counts as {fastest.problem.device.name}"
    if topology.impairments:
        yield (
            f"{format_count(len(topology.impairments))} weak or broken parts are taken as stated; "
            "a level has the figures of its worst unit in use"
        )


def _beyond_published(problem: Problem) -> str:
    """Return what the published runs behind the interval do not hold of this one."""
    is_known = architecture_of(problem.device.name) in _PUBLISHED_ON
    beyond = [
        *([] if is_known or problem.fabric.cores_per_node else [problem.device.name]),
        *([problem.training.precision] if problem.training.precision in ("fp32", "fp64") else []),
    ]
    return f"; no run with {', '.join(beyond)} is among them" if beyond else ""


def _tight_memory(fastest: _Option) -> Iterator[str]:
    """Yield how sure memory is, where what is left is less than it is usually off by."""
    problem = fastest.problem
    if problem.fabric.cores_per_node is not None:
        return
    peak = float(memory(problem, fastest.ranking.candidates.take(slice(1))).total_bytes().max())
    left = 1 - peak / problem.capacity_bytes
    if left < MEMORY_SPREAD.value:
        yield f"{left:.1%} of a GPU's memory is left, and memory is not that sure: " + (
            MEMORY_SPREAD.source
        )


def _kernel_assumptions(problem: Problem) -> Iterator[str]:
    """Yield what compute's seconds rest on, where they were not measured on the device."""
    on, precision = problem.device, problem.training.precision
    if problem.fabric.cores_per_node is not None:
        return
    if on.basis == "roofline" or precision in ("fp32", "fp64"):
        yield f"no {precision} kernels of {on.name} were measured: rooflines of its data sheet"
    elif on.basis == "borrowed":
        yield f"kernels of {on.name} are {on.kernel_source.partition(':')[0]}"
    if precision in DERIVED and on.tables:
        yield f"{precision} products use as much of their peak as measured fp8 products of theirs"


def _interval(calibration: Calibration | None, problem: Problem) -> tuple[float, str]:
    """Return how far predicted may be off, as a fraction of what is measured, and its basis."""
    if calibration is None or not calibration.run_hashes:  # curves say nothing of a step
        known = STEP_SPREAD["experts" if problem.model.experts else "dense"]
        return known.value, f"{known.source}{_beyond_published(problem)}"
    own = f"the runs calibrated on are met within {calibration.residual:.1%}"
    if len(calibration.run_hashes) == 1:
        own = "calibrated on one run, which nothing checks"
    spread = max(CALIBRATED_SPREAD.value, calibration.residual)
    return spread, f"{own}; {CALIBRATED_SPREAD.source}"


def _plan_id(resolved: ResolvedRequest, calibration: Calibration | None) -> str:
    request = resolved.request
    return document_hash(
        {
            "topology": topology_fingerprint(resolved.topology),
            "nodes": len(resolved.nodes),
            "allocation": [*map(resolved.host, resolved.nodes)] if resolved.hosts else None,
            "model": resolved.model.model_dump(mode="json"),
            "training": request.training.model_dump(mode="json"),
            "constraints": request.constraints.model_dump(mode="json"),
            "framework": request.framework,
            "top_k": request.top_k,
            "calibration": calibration.id if calibration else None,
            "version": __version__,
        }
    )


def _measured(calibration: Calibration, problem: Problem) -> str:
    """Return what was measured, what was not, and what is left over."""
    curves = [curve.op for curve in calibration.curves]
    logs = f"{counted(len(curves), 'measured curve')} ({', '.join(dict.fromkeys(curves))}), whose "
    logs += "times calls marked measured have"
    if {*problem.fabric.curves} - {*calibration.curves}:
        logs += f", or those of {_PUBLISHED}"
    if not calibration.run_hashes:
        return f"priors and {logs}; no run of a plan was timed here"
    levels = [fit.level for fit in calibration.levels]
    calls = [f"{call.op} ({call.path})" for call in calibration.calls]
    missing = [level.name for level in problem.fabric.levels if level.name not in levels]
    parts = [
        f"measured here in {len(calibration.run_hashes)} run(s): {', '.join(levels) or 'no level'}",
        f"by themselves {', '.join(calls)}" if calls else "",
        logs if curves else "",
        f"not {', '.join(missing)}: calibrate on a plan whose groups span it" if missing else "",
        f"compute {calibration.compute_scale:.3g} x prior",
        f"{format_seconds(calibration.host_overhead_s)} a step is neither compute nor collectives",
    ]
    return "; ".join(part for part in parts if part)


def _provenance(
    resolved: ResolvedRequest,
    problem: Problem,
    calibration: Calibration | None,
    calls: Sequence[CollectiveChoice],
) -> Provenance:
    if calibration is None:
        said = "priors only: nothing was measured on this cluster"
        if any(call.basis == "measured" for call in calls):
            said += f"; calls marked measured have the times of {_PUBLISHED}"
    else:
        said = _measured(calibration, problem)
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
