"""Measured constants put in place of priors."""

from collections.abc import Iterable
from dataclasses import replace

from planner.plan import Calibration, LevelFit
from planner.topology.fabric import Fabric

__all__ = ["calibrated_fabric", "fitted_fabric"]


def calibrated_fabric(fabric: Fabric, calibration: Calibration | None) -> Fabric:
    """Return the fabric with the levels that the calibration measured; others stay priors."""
    if calibration is None:
        return fabric
    return fitted_fabric(fabric, calibration.levels, source=f"calibration {calibration.id}")


def fitted_fabric(fabric: Fabric, fits: Iterable[LevelFit], *, source: str) -> Fabric:
    """Return the fabric with alpha and bandwidth of the fitted levels in place of their own."""
    by_name = {fit.level: fit for fit in fits}
    levels = tuple(
        replace(
            level,
            alpha_s=by_name[level.name].alpha_s,
            bytes_per_s=by_name[level.name].bytes_per_s,
            measured=True,
            source=source,
        )
        if level.name in by_name
        else level
        for level in fabric.levels
    )
    return replace(fabric, levels=levels)
