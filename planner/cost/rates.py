"""What calls of an operation see of a fabric: the levels by their path, and rates on them."""

from dataclasses import replace
from typing import Final

import numpy as np

from planner.constants import ACHIEVED_FRACTION, MESSAGE_ISSUE_S, PATH_ALPHA, PATH_RATE
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.plan import CallPath, Collective
from planner.topology.fabric import CallLevels, Fabric, Level

__all__ = ["LIKE_LIBRARY", "achieved_bytes_per_s", "calls_of", "rate_of"]

# Paths that see the levels as the library's calls do.
LIKE_LIBRARY: Final[tuple[CallPath, ...]] = ("library", "nccl_zero_cta", "mori")


def achieved_bytes_per_s(level: Level) -> float:
    """Return what large transfers reach on a level; a measured level already says it."""
    return level.bytes_per_s * (1.0 if level.measured else ACHIEVED_FRACTION[level.kind].value)


def rate_of(
    level: Level, group: Group, inside: Column, *, direct: bool, nominal: bool = False
) -> Column | float:
    """Return bytes/s that each member reaches on a level, shape [rows] or one for all rows.

    Args:
        level: Which level.
        group: Whose stride says which members of a mesh are joined.
        inside: Members inside one unit of the level, shape [rows].
        direct: Whether each sends for itself (all-to-all, sends) rather than along rings or trees.
        nominal: The links' own rate rather than what large transfers reach.
    """
    rate = level.bytes_per_s if nominal else achieved_bytes_per_s(level)
    if direct:
        rate *= level.direct_share
    if level.mesh is None:
        return rate
    shares = np.asarray(level.mesh.direct if direct else level.mesh.ring)
    strides = np.minimum(group.stride, len(shares)) - 1
    return rate * shares[strides, np.minimum(inside, shares.shape[1]) - 1]


def calls_of(fabric: Fabric, op: Collective, path: CallPath) -> CallLevels:
    """Return the levels as calls of ``op`` by ``path`` see them."""
    for measured in fabric.calls:
        if (measured.op, measured.path) == (op, path):
            return measured
    issue_s = MESSAGE_ISSUE_S[fabric.library].value
    if path in LIKE_LIBRARY:
        return CallLevels(op, path, fabric.levels, issue_s)
    alpha, rate = PATH_ALPHA[path].value, PATH_RATE[path].value
    levels = tuple(
        replace(
            level,
            alpha_s=level.alpha_s * alpha,
            bytes_per_s=level.bytes_per_s * (rate if level.kind == "loopback" else 1.0),
        )
        for level in fabric.levels
    )
    return CallLevels(op, path, levels, issue_s * alpha)
