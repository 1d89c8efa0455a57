"""Measured constants put in place of priors."""

from dataclasses import replace

from planner.plan import Calibration
from planner.topology.fabric import Fabric

__all__ = ["calibrated_fabric"]


def calibrated_fabric(fabric: Fabric, calibration: Calibration | None) -> Fabric:
    """Return the fabric with the levels that the calibration measured; others stay priors."""
    if calibration is None:
        return fabric
    fits = {fit.level: fit for fit in calibration.levels}
    levels = tuple(
        replace(
            level,
            alpha_s=fits[level.name].alpha_s,
            bytes_per_s=fits[level.name].bytes_per_s,
            measured=True,
            source=f"calibration {calibration.id}",
        )
        if level.name in fits
        else level
        for level in fabric.levels
    )
    return replace(fabric, levels=levels)
