"""A request in, a plan out: ``make_plan(resolve(request), calibration)``.

``make_plan`` is pure: the same resolved request, calibration and version give the same bytes.
Where nodes are weak or of several types it prices what can be done about it (keep them, leave
them out, take others) and plans for the fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from planner import __version__
from planner.constants import CALIBRATED_SPREAD, STEP_SPREAD
from planner.cost.problem import Problem
from planner.errors import InfeasiblePlanError
from planner.plan import (
    Calibration,
    PlacementOption,
    Plan,
    Provenance,
    RankRule,
    Waiting,
    document_hash,
)
from planner.resolving import ResolvedRequest, build_problem, resolve
from planner.search.answer import answer
from planner.search.rank import Ranking, rank
from planner.search.suggest import smallest_change
from planner.topology.compile import live_nodes
from planner.topology.placement import Placement, packed_nodes, placements
from planner.units import format_count

__all__ = ["make_plan"]

_ASSUMPTIONS: Final = (
    "attention is fused; no score matrix is stored",
    "closed form, not simulated; collectives of different axes do not contend",
)


@dataclass(frozen=True, slots=True)
class _Option:
    """A placement with its search; ``ranking`` is None where nothing fits."""

    placement: Placement
    problem: Problem
    ranking: Ranking | None

    def step_time_s(self) -> float | None:
        return None if self.ranking is None else float(self.ranking.priced.step_time_s()[0])


def make_plan(resolved: ResolvedRequest, calibration: Calibration | None = None) -> Plan:
    """Return the fastest plan that fits, with its reasons.

    Raises:
        InvalidInputError: The batch or a constraint is impossible.
        InfeasiblePlanError: Nothing fits; ``suggestion`` holds the smallest change found that
            does, as fields of a request.
    """
    problem = build_problem(resolved, calibration)
    try:
        options = list(_options(resolved, problem, calibration))
    except InfeasiblePlanError as error:
        raise _with_suggestion(error, resolved, calibration) from error
    fastest = min(
        (option for option in options if option.ranking is not None),
        key=lambda option: option.step_time_s() or 0.0,
    )
    return _plan(resolved, options, fastest, calibration)


def _options(
    resolved: ResolvedRequest, problem: Problem, calibration: Calibration | None
) -> Iterator[_Option]:
    """Yield every placement, priced; the first keeps the nodes asked for.

    Raises:
        InfeasiblePlanError: Nothing fits anywhere.
    """
    spares = () if resolved.hosts else sorted({*live_nodes(resolved.topology)} - {*resolved.nodes})
    refused: InfeasiblePlanError | None = None
    none_fits = True
    for placement in placements(resolved.topology, resolved.nodes, spares):
        if placement.choice != "keep" or placement.nodes != resolved.nodes:
            problem = build_problem(resolved, calibration, placement.nodes)
        try:
            ranking = rank(problem, resolved.request.constraints)
            none_fits = False
        except InfeasiblePlanError as error:
            ranking, refused = None, refused or error
        yield _Option(placement, problem, ranking)
    if none_fits and refused is not None:
        raise refused


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
    said = ", ".join(f"{name}={value}" for name, value in change.items())
    return InfeasiblePlanError(f"{error}; try {said}", rejected=error.rejected, suggestion=change)


# ------------------------------------------------------------------------------- the document


def _plan(
    resolved: ResolvedRequest,
    options: Sequence[_Option],
    fastest: _Option,
    calibration: Calibration | None,
) -> Plan:
    request, problem = resolved.request, fastest.problem
    assert fastest.ranking is not None, "the fastest option has a ranking"
    fields = answer(problem, fastest.ranking, top_k=request.top_k, interval=_interval(calibration))
    fields["ranks"] = _with_hosts(fields["ranks"], resolved, fastest.placement)
    return Plan(
        id=_plan_id(resolved, calibration),
        topology=resolved.topology.name,
        framework=request.framework,
        training=request.training,
        placements=_placements(resolved, options, fastest),
        waiting=_waiting(resolved, fastest, calibration),
        assumptions=tuple(_assumptions(resolved, fastest)),
        provenance=_provenance(resolved, problem, calibration),
        **fields,
    )


def _with_hosts(ranks: RankRule, resolved: ResolvedRequest, placement: Placement) -> RankRule:
    """Return the rule with the hosts in rank order, where they are known by name."""
    if not resolved.hosts and not resolved.topology.hosts and placement.choice == "keep":
        return ranks
    return ranks.model_copy(update={"hosts": tuple(map(resolved.host, placement.nodes))})


def _placements(
    resolved: ResolvedRequest, options: Sequence[_Option], fastest: _Option
) -> tuple[PlacementOption, ...]:
    if len(options) == 1:
        return ()
    return tuple(
        PlacementOption(
            choice=option.placement.choice,
            num_nodes=len(option.placement.nodes),
            left_out=tuple(map(resolved.host, option.placement.left_out)),
            added=tuple(map(resolved.host, option.placement.added)),
            step_time_s=option.step_time_s(),
            is_chosen=option is fastest,
        )
        for option in options
    )


def _waiting(
    resolved: ResolvedRequest, fastest: _Option, calibration: Calibration | None
) -> Waiting | None:
    """Price as many nodes under as few switches as the cluster has, for an allocation."""
    packed = packed_nodes(resolved.topology, len(fastest.placement.nodes))
    if not resolved.hosts or packed is None:
        return None
    problem = build_problem(resolved, calibration, packed)
    if replace(problem.fabric, nodes=None) == replace(fastest.problem.fabric, nodes=None):
        return None
    now_s = fastest.step_time_s()
    then_s = float(rank(problem, resolved.request.constraints).priced.step_time_s()[0])
    if now_s is None or then_s >= now_s:
        return None
    return Waiting(
        hosts=tuple(map(resolved.topology.host, packed)),
        step_time_s=then_s,
        gain=1 - then_s / now_s,
    )


def _assumptions(resolved: ResolvedRequest, fastest: _Option) -> Iterator[str]:
    yield from resolved.model.assumptions
    yield from _ASSUMPTIONS
    if resolved.model.experts:
        yield "experts are loaded evenly"
    yield from resolved.assumptions
    fabric, topology = fastest.problem.fabric, resolved.topology
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
