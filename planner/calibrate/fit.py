"""Constants of one cluster, refitted from what jobs on it measured.

Few and physical: alpha and bandwidth of each level, one factor on forward and backward compute,
one on the optimizer, seconds per step for what is neither. Each is fitted against the same
functions that predict it; no formula is written twice. The priors are always the uncalibrated
ones, so that the result depends on the runs alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from planner.calibrate.apply import fitted_fabric
from planner.calibrate.runs import NOT_TRANSFERS, Measured, plan_candidate
from planner.cost.collectives import collective_terms
from planner.cost.step import mean_compute_s, price
from planner.errors import InvalidInputError
from planner.layout.candidates import Column
from planner.layout.groups import Group, axis_group
from planner.plan import (
    Algorithm,
    Axis,
    Calibration,
    Collective,
    LevelFit,
    document_hash,
)
from planner.topology.checks import BANDWIDTH_RANGE_BYTES_PER_S, LATENCY_RANGE_S
from planner.topology.fabric import Fabric

__all__ = ["fit_calibration"]

_UNLIMITED_BYTES_PER_S: Final = 1e30
# What is left of a measurement for the level it is fitted to, where other terms would take all.
_LEAST_SHARE: Final = 0.05
# A device a hundred times off its prior is a slip of units, or a made-up run.
_SCALE_RANGE: Final = (1e-2, 1e2)
# A fit whose median point is off by its own size says nothing.
_WORST_RESIDUAL: Final = 1.0


class _Call(NamedTuple):
    """What calls share whose seconds belong together."""

    axis: Axis
    op: Collective
    algorithm: Algorithm
    size_bytes: int
    is_probe: bool


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One collective at one size: its group on the levels, and how long the bytes took."""

    op: Collective
    algorithm: Algorithm
    group: Group
    size_bytes: Column
    seconds: float


def fit_calibration(measured: Sequence[Measured]) -> Calibration:
    """Return the calibration that all ``measured`` runs of one topology support.

    Args:
        measured: Runs that passed ``planner.calibrate.runs.check_run``.

    Raises:
        InvalidInputError: There is no run, or no constants that a machine can have explain them.
    """
    if not measured:
        raise InvalidInputError("nothing to calibrate on: no run was given", where="runs")
    fabric, levels = _fit_levels(measured)
    compute_scale = _median(
        _mean_over_ranks(one, "forward_backward_s") / _prior_compute_s(one) for one in measured
    )
    optimizer_scale = _median(
        _mean_over_ranks(one, "optimizer_s") / _prior_optimizer_s(one) for one in measured
    )
    fitted = [
        replace(
            one,
            problem=replace(
                one.problem,
                fabric=fabric,
                compute_scale=compute_scale,
                optimizer_scale=optimizer_scale,
            ),
        )
        for one in measured
    ]
    host_s = _host_s(fitted)
    errors = [abs((_predicted_s(one) + host_s) / _measured_s(one) - 1) for one in fitted]
    residual = _median(errors)
    for name, scale in (("compute", compute_scale), ("optimizer", optimizer_scale)):
        _check_range(f"{name} at {scale:.3g} times its prior", scale, _SCALE_RANGE)
    if residual > _WORST_RESIDUAL:
        raise InvalidInputError(
            f"the runs follow no constants: with the best ones their steps are off by "
            f"{residual:.0%} at the median; need at most {_WORST_RESIDUAL:.0%}; check that the "
            "collectives' seconds are those of the step",
            where="ranks",
        )
    fields = {
        "schema_version": 1,
        "topology": measured[0].plan.topology,
        "levels": [level.model_dump(mode="json") for level in levels],
        "compute_scale": compute_scale,
        "optimizer_scale": optimizer_scale,
        "host_overhead_s": host_s,
        "residual": residual,
        "run_hashes": sorted({document_hash(one.run) for one in measured}),
    }
    return Calibration.model_validate({**fields, "id": document_hash(fields)})


# ----------------------------------------------------------------------- compute and host


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _mean_over_ranks(one: Measured, name: str) -> float:
    """Return the median over steps of the mean over ranks, in seconds."""
    steps = np.array([getattr(timings, name) for timings in one.run.ranks])
    return float(np.median(steps.mean(axis=0)))


def _prior_compute_s(one: Measured) -> float:
    return float(mean_compute_s(one.problem, plan_candidate(one.problem, one.plan))[0])


def _prior_optimizer_s(one: Measured) -> float:
    return float(price(one.problem, plan_candidate(one.problem, one.plan)).optimizer_s[0])


def _measured_s(one: Measured) -> float:
    """Return the step time: ranks start together and the last one ends the step."""
    steps = np.array([timings.step_s for timings in one.run.ranks])
    return float(np.median(steps.max(axis=0)))


def _predicted_s(one: Measured) -> float:
    return float(price(one.problem, plan_candidate(one.problem, one.plan)).step_time_s()[0])


def _host_s(fitted: Sequence[Measured]) -> float:
    """Return seconds per step that the fitted terms leave over.

    Python and the data loader, and the wait for ranks that the host ran later. In a pipeline
    errors of the bubble would be in it, so pipelines count only where there is nothing else.
    """
    whole = [one for one in fitted if one.plan.layout.pp == 1] or fitted
    return _median(max(0.0, _measured_s(one) - _predicted_s(one)) for one in whole)


# --------------------------------------------------------------------------------- levels


def _fit_levels(measured: Sequence[Measured]) -> tuple[Fabric, list[LevelFit]]:
    """Return the fabric with every level that some collective spans refitted, innermost first.

    A transfer says something about the highest level it spans; the share of lower levels is
    taken from their own fit.
    """
    fabric = measured[0].problem.fabric
    by_level: dict[int, list[_Transfer]] = defaultdict(list)
    for one in measured:
        for transfer in _transfers(one):
            by_level[_highest_level(transfer.group)].append(transfer)
    fits = []
    for index in sorted(by_level):
        fits.append(_fit_level(fabric, index, by_level[index]))
        fabric = fitted_fabric(fabric, fits, source="fitted to the runs")
    return fabric, fits


def _highest_level(group: Group) -> int:
    """Return the last level on which the group has more members than below."""
    inside = [1, *(int(members[0]) for members in group.members)]
    return max(index for index in range(len(group.members)) if inside[index + 1] > inside[index])


def _transfers(one: Measured) -> list[_Transfer]:
    """Return each collective and size of a run, in training and in probes.

    The i-th call of a group took as long as on the rank that waited least.
    """
    calls: dict[_Call, dict[int, tuple[float, ...]]] = defaultdict(dict)
    for timings in one.run.ranks:
        for timing in timings.collectives:
            if timing.op not in NOT_TRANSFERS:
                key = _Call(
                    timing.axis, timing.op, timing.algorithm, timing.size_bytes, timing.is_probe
                )
                calls[key][timings.rank] = timing.seconds
    candidate = plan_candidate(one.problem, one.plan)
    found: list[_Transfer] = []
    for call, seconds in calls.items():
        fastest = [
            np.min([seconds[rank] for rank in group], axis=0)
            for group in one.plan.groups(call.axis)
            if all(rank in seconds for rank in group)
            and len({len(seconds[rank]) for rank in group}) == 1
        ]
        if fastest:
            group = axis_group(one.problem.fabric, candidate, call.axis)
            size, median = np.array([float(call.size_bytes)]), float(np.median(fastest))
            found.append(_Transfer(call.op, call.algorithm, group, size, median))
    return found


def _fit_level(fabric: Fabric, index: int, transfers: list[_Transfer]) -> LevelFit:
    """Fit alpha and seconds per byte of one level, relative errors weighted equally."""
    rows = np.array([_coefficients(fabric, index, transfer) for transfer in transfers])
    measured_s = np.array([transfer.seconds for transfer in transfers])
    hops, transfer_s_at_one, rest_s = rows.T
    target = np.maximum(measured_s - rest_s, _LEAST_SHARE * measured_s)
    level = fabric.levels[index]
    sizes = {float(transfer.size_bytes[0]) for transfer in transfers}
    if len(sizes) > 1:
        design = np.stack([hops, transfer_s_at_one], axis=1) / measured_s[:, None]
        (alpha_s, s_per_byte), _ = nnls(design, target / measured_s)
    else:  # one size cannot tell the two apart: the prior latency stays
        alpha_s = level.alpha_s
        left = np.maximum(target - hops * alpha_s, _LEAST_SHARE * target)
        s_per_byte = float(np.median(left / transfer_s_at_one))
    bytes_per_s = 1 / s_per_byte if s_per_byte > 0 else level.bytes_per_s
    predicted_s = hops * alpha_s + transfer_s_at_one / bytes_per_s + rest_s
    residual = float(np.median(np.abs(predicted_s / measured_s - 1)))
    _check_range(f"level {level.name!r} at {alpha_s:.3g} s a hop", alpha_s, LATENCY_RANGE_S)
    rate = f"level {level.name!r} at {bytes_per_s:.3g} bytes/s"
    _check_range(rate, bytes_per_s, BANDWIDTH_RANGE_BYTES_PER_S)
    if residual > _WORST_RESIDUAL:
        raise InvalidInputError(
            f"the {len(transfers)} timings on level {level.name!r} follow no latency and "
            f"bandwidth: the best ({alpha_s:.3g} s, {bytes_per_s:.3g} bytes/s) is off by "
            f"{residual:.0%} at the median; need at most {_WORST_RESIDUAL:.0%}; time again on a "
            "machine that does nothing else",
            where="ranks.collectives",
        )
    return LevelFit(
        level=level.name,
        alpha_s=float(alpha_s),
        bytes_per_s=float(bytes_per_s),
        num_points=len(transfers),
        residual=residual,
    )


def _check_range(what: str, value: float, allowed: tuple[float, float]) -> None:
    if not allowed[0] <= value <= allowed[1]:
        raise InvalidInputError(
            f"the timings put {what}; possible is {allowed[0]:g} to {allowed[1]:g}; check that "
            "they are in seconds and sizes in bytes",
            where="ranks",
        )


def _coefficients(fabric: Fabric, index: int, transfer: _Transfer) -> tuple[float, float, float]:
    """Return (hops on the level, its seconds at 1 byte/s, seconds of everything else).

    Read off the cost function itself by setting the level's figures to one and the others' to
    nothing.
    """

    def terms(alpha_s: float, bytes_per_s: float, others: bool) -> tuple[float, float, float]:
        levels = tuple(
            replace(level, alpha_s=alpha_s, bytes_per_s=bytes_per_s, measured=True)
            if i == index
            else level
            if others
            else replace(level, alpha_s=0.0, bytes_per_s=_UNLIMITED_BYTES_PER_S, measured=True)
            for i, level in enumerate(fabric.levels)
        )
        changed = replace(fabric, levels=levels)
        found = collective_terms(
            transfer.op, transfer.algorithm, changed, transfer.group, transfer.size_bytes
        )
        return float(found.fixed_s[0]), float(found.latency_s[0]), float(found.transfer_s[0])

    _, hops, _ = terms(1.0, _UNLIMITED_BYTES_PER_S, others=False)
    _, _, at_one = terms(0.0, 1.0, others=False)
    fixed_s, other_hops_s, _ = terms(0.0, _UNLIMITED_BYTES_PER_S, others=True)
    return hops, at_one, fixed_s + other_hops_s
