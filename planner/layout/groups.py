"""How an axis lies on the fabric: the only place that knows.

Ranks fill units in order (``RankRule.order``), so a group of an axis is an arithmetic
progression: ``degree`` ranks, ``stride`` apart. On a level whose units hold ``u`` ranks, the
group has ``gcd(degree * stride, u) / stride`` members in one unit: all of them when the group
fits, ``u / stride`` when it fills whole units, and for a straddling axis (tp 6 on 8 GPUs) the
smallest part that any of its groups has in a unit it shares with another part, since a group
costs what its worst member costs. Where units are unequal (nodes of an allocation, spread over
leaves), the smallest part is looked for among the real ones.
"""

from dataclasses import dataclass

import numpy as np

from planner.layout.candidates import Candidates, Column
from planner.plan import Axis
from planner.topology.fabric import Fabric, Level

__all__ = ["Group", "axis_group", "inner_group", "lay_group", "outer_group", "regular"]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of every candidate, on the levels of one fabric.

    Attributes:
        degree: Ranks in the group, shape [rows].
        stride: Ranks from one member to the next, shape [rows].
        members: Per level, innermost first, the ranks inside one unit of it, shape [rows]; the
            last entry equals ``degree``.
        even: Per level but the last, whether every unit of it that the group enters holds
            ``members``, shape [rows]; where that is one it may be False, for want of use.
    """

    degree: Column
    stride: Column
    members: tuple[Column, ...]
    even: tuple[Column, ...]

    def has_hierarchy(self, level: int = 0) -> Column:
        """Return whether equally many units below lie in each of several units of ``level``."""
        if level + 1 >= len(self.members):
            return np.zeros(len(self.degree), dtype=bool)
        inside, below = self.members[level], self.members[level - 1] if level else 1
        return self.even[level] & (inside > below) & (inside < self.degree)

    def take(self, rows: Column) -> "Group":
        """Return some rows."""
        return Group(
            self.degree[rows],
            self.stride[rows],
            tuple(members[rows] for members in self.members),
            tuple(even[rows] for even in self.even),
        )

    def repeat(self, times: int) -> "Group":
        """Return the only row ``times`` times."""
        return Group(
            np.repeat(self.degree, times),
            np.repeat(self.stride, times),
            tuple(np.repeat(members, times) for members in self.members),
            tuple(np.repeat(even, times) for even in self.even),
        )


def regular(candidates: Candidates, *, has_experts: bool) -> Column:
    """Return whether all groups are arithmetic progressions, shape [rows].

    With data parallelism outermost runs of tp * cp ranks lie a replica apart. The cp ranks of
    several runs (dp_cp) are no progression, and neither are experts on more or less than a run.
    """
    c = candidates
    one_run = (c.cp == 1) & ((c.etp * c.ep == c.tp * c.cp) | (not has_experts))
    return (c.stages_between == 1) | one_run


def axis_group(fabric: Fabric, candidates: Candidates, axis: Axis) -> Group:
    """Return the group of ``axis`` for every candidate.

    With data parallelism outermost the stages lie between its ranks. Rows must be ``regular``.
    """
    c, between = candidates, candidates.stages_between
    degree, stride = {
        "tp": (c.tp, np.ones_like(c.tp)),
        "cp": (c.cp, c.tp),
        "dp": (c.dp, c.tp * c.cp * between),
        "dp_shard": (c.dp_shard, c.tp * c.cp * between),
        "dp_replicate": (c.dp_replicate, c.tp * c.cp * c.dp_shard * between),
        "dp_cp": (c.dp * c.cp, c.tp * between),
        "dp_shard_cp": (c.dp_shard * c.cp, c.tp * between),
        "pp": (c.pp, np.where(between > 1, c.tp * c.cp, c.stage_size)),
        "etp": (c.etp, np.ones_like(c.etp)),
        "ep": (c.ep, c.etp),
        "edp": (c.edp, c.etp * c.ep * between),
    }[axis]
    return lay_group(fabric, degree, stride)


def lay_group(fabric: Fabric, degree: Column, stride: Column) -> Group:
    """Return groups of ``degree`` ranks, ``stride`` apart, on the levels of ``fabric``."""
    laid = [_lay(level, fabric.num_gpus, degree, stride) for level in fabric.levels[:-1]]
    members = [on_level for on_level, _ in laid]
    for inner in range(1, len(members)):
        members[inner] = np.maximum(members[inner - 1], members[inner])
    return Group(degree, stride, (*members, degree), tuple(even for _, even in laid))


def _lay(level: Level, num_gpus: int, degree: Column, stride: Column) -> tuple[Column, Column]:
    """Return the fewest members of a group in a unit, and whether all its units have as many."""
    span = degree * stride
    if level.unit_sizes is None:
        least = np.gcd(span, level.unit_size)
        even = (level.unit_size % span == 0) | (span % level.unit_size == 0)
    else:
        spans, rows = np.unique(span, return_inverse=True)
        ends = np.cumsum(level.unit_sizes)
        parts = [_parts(ends, num_gpus, int(one)) for one in spans]
        least = np.array([part.min() for part in parts])[rows]
        even = np.array([part.min() == part.max() for part in parts])[rows]
    return np.maximum(1, least // stride), even & (least % stride == 0)


def _parts(ends: Column, num_gpus: int, span: int) -> Column:
    """Return the lengths that unit borders and group borders together cut the ranks into.

    >>> _parts(np.array([7, 16]), 16, 8).tolist()
    [7, 1, 8]
    """
    borders = np.unique(np.concatenate([[0], ends, np.arange(span, num_gpus, span)]))
    return np.diff(borders)


def inner_group(group: Group, level: int = 0) -> Group:
    """Return the part of the group inside one unit of ``level`` (a node)."""
    inside = group.members[level]
    members = tuple(np.minimum(inside, m) for m in group.members)
    return Group(inside, group.stride, members, group.even)


def outer_group(group: Group, level: int = 0) -> Group:
    """Return what is left when every unit of ``level`` is one member: a hierarchy's outer ring."""
    inside = group.members[level]
    members = tuple(np.maximum(1, m // inside) for m in group.members)
    return Group(group.degree // inside, group.stride * inside, members, group.even)
