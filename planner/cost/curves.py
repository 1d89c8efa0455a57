"""Measured curves as the cost model reads them: which fit a group, and their seconds by size.

Inside its range a curve is interpolated; beyond it says nothing (NaN), and the model must.
"""

from dataclasses import replace

import numpy as np

from planner.layout.candidates import Column
from planner.layout.groups import Group, lay_group
from planner.plan import Collective, MeasuredCurve
from planner.topology.fabric import Fabric

__all__ = ["matching", "measured_s"]


def measured_s(curve: MeasuredCurve, size_bytes: Column) -> Column:
    """Return the seconds of a call, shape [rows]; NaN outside the sizes that were measured.

    A straight line in log size and log seconds between neighbours: exact at measured sizes, and
    between two of them never outside their seconds.

    Args:
        curve: Of the operation and group.
        size_bytes: S as in nccl-tests, shape [rows].
    """
    sizes, seconds = np.array(curve.sizes_bytes, dtype=float), np.array(curve.seconds)
    size = np.clip(size_bytes, sizes[0], sizes[-1])
    low = np.searchsorted(sizes, size, side="right") - 1
    high = np.minimum(low + 1, len(sizes) - 1)
    span = np.where(high > low, np.log(sizes[high] / sizes[low]), 1.0)
    part = np.log(size / sizes[low]) / span
    found = seconds[low] * (seconds[high] / seconds[low]) ** part
    return np.where(size == size_bytes, found, np.nan)


def matching(fabric: Fabric, op: Collective, group: Group) -> list[tuple[MeasuredCurve, Column]]:
    """Return the curves of ``op`` that were measured on groups like some of the rows'.

    Alike are the number of ranks and of those on each node, and how these lie inside it: a
    benchmark takes neighbours. Behind NVSwitches all places are alike; of direct links only
    neighbours have what neighbours had. Where its nodes stood in the network a curve does not say.

    Returns:
        Each curve with its rows, bool [rows]; in the order of ``fabric.curves``, without those
        that no row is like.
    """
    on_node, even = _members_on_node(fabric, group)
    found = []
    for curve in fabric.curves:
        members = curve.group_size // curve.num_nodes
        if curve.op == op and members <= fabric.gpus_per_node:
            alike = (group.degree == curve.group_size) & even & (on_node == members)
            alike &= _lies_like_neighbours(fabric, group, members)
            if alike.any():
                found.append((curve, alike))
    return found


def _members_on_node(fabric: Fabric, group: Group) -> tuple[Column, Column]:
    """Return the members on one node, and whether every node of the group has as many."""
    node = replace(fabric.levels[0], unit_size=fabric.gpus_per_node, unit_sizes=None)
    laid = lay_group(replace(fabric, levels=(node, fabric.levels[-1])), group.degree, group.stride)
    apart = group.stride >= fabric.gpus_per_node
    return laid.members[0], laid.even[0] | apart


def _lies_like_neighbours(fabric: Fabric, group: Group, members: int) -> Column:
    """Return whether ``members`` on a node are in its units as so many in a row would be."""
    row = lay_group(fabric, np.array([members]), np.array([1]))
    alike = np.ones(len(group.degree), dtype=bool)
    for level, inside, of_row in zip(fabric.levels, group.members, row.members, strict=True):
        if level.unit_size <= fabric.gpus_per_node:
            alike &= np.minimum(inside, members) == of_row
        if level.mesh is not None:
            alike &= (group.stride == 1) | (members == 1)
    return alike
