"""Constants of one cluster, refitted from what jobs on it measured.

Few and physical: alpha and bandwidth of each level, one factor on forward and backward compute,
one on the optimizer, seconds per step for what is neither. Each is fitted against the same
functions that predict it; no formula is written twice. The priors are always the uncalibrated
ones, so that the result depends on the runs alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from planner.calibrate.apply import with_fits
from planner.calibrate.levels import (
    WORST_RESIDUAL,
    Transfer,
    check_range,
    fit_transfers,
)
from planner.calibrate.runs import NOT_TRANSFERS, Measured, plan_candidate
from planner.cost.algorithms import is_possible
from planner.cost.step import mean_compute_s, price
from planner.errors import InvalidInputError
from planner.layout.groups import axis_group
from planner.plan import Axis, Calibration, Collective, Method, document_hash

__all__ = ["fit_calibration"]

# A device a hundred times off its prior is a slip of units, or a made-up run.
_SCALE_RANGE: Final = (1e-2, 1e2)


class _Call(NamedTuple):
    """What calls share whose seconds belong together."""

    axis: Axis
    op: Collective
    method: Method
    size_bytes: int
    is_probe: bool


def fit_calibration(measured: Sequence[Measured]) -> Calibration:
    """Return the calibration that all ``measured`` runs of one topology support.

    Args:
        measured: Runs that passed ``planner.calibrate.runs.check_run``.

    Raises:
        InvalidInputError: There is no run, or no constants that a machine can have explain them.
    """
    if not measured:
        raise InvalidInputError("nothing to calibrate on: no run was given", where="runs")
    topologies = sorted({one.plan.topology for one in measured})
    if len(topologies) > 1:
        raise InvalidInputError(
            f"the runs are of {', '.join(topologies)}; calibrate each topology by itself",
            where="topology",
        )
    levels, calls = fit_transfers([transfer for one in measured for transfer in _transfers(one)])
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
                fabric=with_fits(one.problem.fabric, levels, calls, source="fitted to the runs"),
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
        check_range(f"{name} at {scale:.3g} times its prior", scale, _SCALE_RANGE)
    if residual > WORST_RESIDUAL:
        raise InvalidInputError(
            f"the runs follow no constants: with the best ones their steps are off by "
            f"{residual:.0%} at the median; need at most {WORST_RESIDUAL:.0%}; check that the "
            "collectives' seconds are those of the step",
            where="ranks",
        )
    fields = {
        "schema_version": 1,
        "topology": measured[0].plan.topology,
        "levels": [level.model_dump(mode="json") for level in levels],
        "calls": [call.model_dump(mode="json") for call in calls],
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


# ------------------------------------------------------------------------------ transfers


def _transfers(one: Measured) -> list[Transfer]:
    """Return each collective and size of a run, in training and in probes.

    The i-th call of a group took as long as on the rank that waited least. What the model has no
    price for on such a group (halving on six ranks) says nothing.
    """
    calls: dict[_Call, dict[int, tuple[float, ...]]] = defaultdict(dict)
    for timings in one.run.ranks:
        for timing in timings.collectives:
            if timing.op not in NOT_TRANSFERS:
                key = _Call(
                    timing.axis,
                    timing.op,
                    Method(timing.algorithm, timing.path),
                    timing.size_bytes,
                    timing.is_probe,
                )
                calls[key][timings.rank] = timing.seconds
    candidate = plan_candidate(one.problem, one.plan)
    axes = {call.axis for call in calls}
    groups = {axis: axis_group(one.problem.fabric, candidate, axis) for axis in axes}
    found: list[Transfer] = []
    for call, seconds in calls.items():
        fastest = [
            np.min([seconds[rank] for rank in group], axis=0)
            for group in one.plan.groups(call.axis)
            if all(rank in seconds for rank in group)
            and len({len(seconds[rank]) for rank in group}) == 1
        ]
        group = groups[call.axis]
        if fastest and is_possible(call.op, call.method, group)[0]:
            size, median = np.array([float(call.size_bytes)]), float(np.median(fastest))
            found.append(Transfer(one.problem.fabric, call.op, call.method, group, size, median))
    return found
