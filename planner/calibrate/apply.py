"""Measured constants put in place of priors."""

from collections.abc import Iterable
from dataclasses import replace

from planner.cost.rates import calls_of
from planner.plan import Calibration, CallFit, LevelFit
from planner.topology.fabric import CallLevels, Fabric, Level

__all__ = ["calibrated_fabric", "fitted_fabric", "with_calls", "with_fits"]


def calibrated_fabric(fabric: Fabric, calibration: Calibration | None) -> Fabric:
    """Return the fabric with the levels and curves that were measured; others stay priors.

    Curves of the calibration go first. Those that the fabric had, of boards like its own, stay
    only where no level was fitted: what was measured here goes before what others measured.
    """
    if calibration is None:
        return fabric
    source = f"calibration {calibration.id}"
    fitted = with_fits(fabric, calibration.levels, calibration.calls, source=source)
    is_fitted = any(level.measured for level in fitted.levels)
    others = () if is_fitted else fabric.curves
    return replace(fitted, curves=(*calibration.curves, *others))


def with_fits(
    fabric: Fabric, levels: Iterable[LevelFit], calls: Iterable[CallFit], *, source: str
) -> Fabric:
    """Return the fabric with fitted levels, and operations and paths fitted by themselves."""
    return with_calls(fitted_fabric(fabric, levels, source=source), calls)


def fitted_fabric(fabric: Fabric, fits: Iterable[LevelFit], *, source: str) -> Fabric:
    """Return the fabric with alpha and bandwidth of the fitted levels in place of their own."""
    return replace(fabric, levels=_fitted(fabric.levels, fits, source))


def with_calls(fabric: Fabric, fits: Iterable[CallFit]) -> Fabric:
    """Return the fabric with the fitted operations and paths as measured by themselves."""
    names = {level.name for level in fabric.levels}
    calls = (
        _fitted_call(calls_of(fabric, fit.op, fit.path), fit)
        for fit in fits
        if names & {level.level for level in fit.levels}
    )
    return replace(fabric, calls=tuple(calls))


def _fitted_call(seen: CallLevels, fit: CallFit) -> CallLevels:
    issue_s = seen.issue_s if fit.issue_s is None else fit.issue_s
    levels = _fitted(seen.levels, fit.levels, f"{fit.op} by {fit.path}")
    return replace(seen, levels=levels, issue_s=issue_s)


def _fitted(levels: tuple[Level, ...], fits: Iterable[LevelFit], source: str) -> tuple[Level, ...]:
    by_name = {fit.level: fit for fit in fits}
    return tuple(
        replace(
            level,
            alpha_s=by_name[level.name].alpha_s,
            bytes_per_s=by_name[level.name].bytes_per_s,
            measured=True,
            source=source,
        )
        if level.name in by_name
        else level
        for level in levels
    )
