"""Seconds of every collective algorithm on a fabric, and the choice between them.

Alpha-beta on the levels that a group spans. Symbols: a group of ``n`` ranks has ``m[i]`` members
inside one unit of level ``i`` (``m[-1] = 1``, the last ``= n``); level ``i`` gives every GPU
``B[i]`` bytes/s out of its unit below, so ``m[i-1]`` members of one unit leave it with
``m[i-1] * B[i]`` together. ``B`` is less for few members of a mesh without switches and, where
GPUs have no NIC of their own, less for direct, pairwise and point_to_point than for rings and
trees. ``S`` is nccl-tests' size: the buffer on one rank for all_reduce, all_to_all and send_recv,
the full output of all_gather, the full input of reduce_scatter.

==================  =============================================  ==========================
algorithm           latency                                        bytes over the slowest level
==================  =============================================  ==========================
ring, one pass      sum_i (n/m[i-1] - n/m[i]) alpha[i]             S (n-1)/n / m[i-1]
tree (all_reduce)   2 ((m[0]-1) alpha[0] + sum log2(.) alpha[i])   2 S / m[i-1]
hierarchical        ring inside the node, ring of S/m[0] across    the sum of both
direct              max alpha + (n-1) issue                        S (n - m[i-1]) / n
pairwise            sum_i (m[i] - m[i-1]) alpha[i]                 S (n - m[i-1]) / n
point_to_point      alpha of the highest level between neighbours  S
==================  =============================================  ==========================

An all_reduce is two ring passes. A group of one is a ``singleton``: no call, no cost. Every call
of more pays ``COLLECTIVE_LAUNCH_S``; a hierarchy is two or three calls. gloo emulates
reduce_scatter by all_reduce (pytorch#149869), so there it costs one.

What the model leaves out: protocol switches (LL, LL128), in-switch reduction, contention between
axes. Ring and tree latencies follow NCCL's own model (src/graph/tuning.cc).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.constants import (
    ACHIEVED_FRACTION,
    ALL_TO_ALL_ISSUE_S,
    COLLECTIVE_LAUNCH_S,
    TREE_EFFICIENCY,
)
from planner.frameworks import runs_hierarchical
from planner.layout.candidates import Column
from planner.layout.groups import Group, inner_group, outer_group
from planner.plan import Algorithm, Axis, Collective, Framework, SizeThreshold
from planner.topology.fabric import Fabric, Level

__all__ = [
    "RING_PASSES",
    "Choice",
    "Terms",
    "achieved_bytes_per_s",
    "choose",
    "collective_terms",
    "inside_parts",
    "legal_algorithms",
    "members_below",
    "rate_of",
    "runs_as",
    "thresholds",
]

# Passes of a ring, each of which sends S (n-1)/n.
RING_PASSES: Final[dict[Collective, int]] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
}

# What each library runs, its default first: NCCL's tuner, gloo's ring and pairwise exchange.
# RCCL, HCCL and oneCCL are taken to run what NCCL runs.
_NCCL: Final[dict[Collective, tuple[Algorithm, ...]]] = {
    "all_reduce": ("ring", "tree"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "all_to_all": ("direct",),
    "send_recv": ("point_to_point",),
}
_LEGAL: Final[dict[str, dict[Collective, tuple[Algorithm, ...]]]] = {
    **dict.fromkeys(("nccl", "rccl", "hccl", "oneccl"), _NCCL),
    "gloo": {
        "all_reduce": ("ring",),
        "all_gather": ("ring",),
        "reduce_scatter": ("ring",),
        "all_to_all": ("pairwise",),
        "send_recv": ("point_to_point",),
    },
}


@dataclass(frozen=True, slots=True)
class Terms:
    """Parts of the time of one call, shape [rows]; a group of one has zeros.

    Attributes:
        fixed_s: Launch.
        latency_s: Hops.
        transfer_s: Bytes over the slowest level.
    """

    fixed_s: Column
    latency_s: Column
    transfer_s: Column

    def total_s(self) -> Column:
        """Return seconds of the call."""
        return self.fixed_s + self.latency_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest legal algorithm per row, and the next.

    Attributes:
        algorithms: What was compared; ``index`` and ``runner_up`` point into it.
        seconds: Of the cheapest.
        runner_up_s: Of the next; equals ``seconds`` when there is only one, infinite when the
            next makes no sense for the group.
    """

    algorithms: tuple[Algorithm, ...]
    index: Column
    seconds: Column
    runner_up: Column
    runner_up_s: Column


def legal_algorithms(
    fabric: Fabric, framework: Framework, axis: Axis, op: Collective
) -> tuple[Algorithm, ...]:
    """Return what can run ``op`` on ``axis``, the library's default first.

    A hierarchy needs two levels, and a framework that makes the groups for it.
    """
    algorithms = _LEGAL[fabric.library].get(op, ())
    if len(fabric.levels) > 1 and runs_hierarchical(framework, axis, op):
        algorithms = (*algorithms, "hierarchical")
    return algorithms


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


def collective_terms(
    op: Collective, algorithm: Algorithm, fabric: Fabric, group: Group, size_bytes: Column
) -> Terms:
    """Return the parts of one call's time, shape [rows].

    Args:
        op: Operation.
        algorithm: One of ``legal_algorithms``.
        fabric: Levels with bandwidth and latency.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S as in the module docstring, shape [rows].
    """
    op = runs_as(fabric, op)
    if algorithm == "hierarchical":
        latency, transfer = _hierarchical(op, fabric, group, size_bytes)
    else:
        latency, transfer = _FLAT[algorithm](op, fabric, group, size_bytes)
    several = group.degree > 1
    launch = COLLECTIVE_LAUNCH_S[fabric.library].value
    return Terms(
        np.where(several, launch * _num_calls(op, algorithm), 0.0),
        np.where(several, latency, 0.0),
        np.where(several, transfer, 0.0),
    )


def choose(
    op: Collective,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    algorithms: tuple[Algorithm, ...],
) -> Choice:
    """Return the cheapest of the legal ``algorithms`` and its runner-up for every row."""
    seconds = np.stack(
        [collective_terms(op, a, fabric, group, size_bytes).total_s() for a in algorithms]
    )
    if "hierarchical" in algorithms:
        seconds[algorithms.index("hierarchical"), ~group.has_hierarchy()] = np.inf
    order = np.argsort(seconds, axis=0, kind="stable")
    first, second = order[0], order[min(1, len(algorithms) - 1)]
    rows = np.arange(seconds.shape[1])
    return Choice(algorithms, first, seconds[first, rows], second, seconds[second, rows])


def thresholds(
    op: Collective,
    fabric: Fabric,
    group: Group,
    algorithms: tuple[Algorithm, ...],
    *,
    largest_bytes: int = 1 << 33,
) -> tuple[SizeThreshold, ...]:
    """Return the best algorithm by message size for one group (one row).

    Sizes are powers of two from 1 KiB; between two that differ the break is found by bisection, to
    one byte. The last threshold is open.
    """

    def best(sizes: Column) -> Column:
        wide = group.repeat(len(sizes))
        return choose(op, fabric, wide, sizes, algorithms).index

    sizes = 2.0 ** np.arange(10, int(largest_bytes).bit_length())
    chosen = best(sizes)
    closed: list[SizeThreshold] = []
    for at in np.flatnonzero(np.diff(chosen)):
        low, high = int(sizes[at]), int(sizes[at + 1])
        while high - low > 1:
            middle = (low + high) // 2
            if best(np.array([float(middle)]))[0] == chosen[at]:
                low = middle
            else:
                high = middle
        closed.append(SizeThreshold(up_to_bytes=low, algorithm=algorithms[int(chosen[at])]))
    return (*closed, SizeThreshold(up_to_bytes=None, algorithm=algorithms[int(chosen[-1])]))


def runs_as(fabric: Fabric, op: Collective) -> Collective:
    """Return what the library does when asked for ``op``."""
    return "all_reduce" if fabric.library == "gloo" and op == "reduce_scatter" else op


def _num_calls(op: Collective, algorithm: Algorithm) -> int:
    return 1 + len(inside_parts(op)) if algorithm == "hierarchical" else 1


def inside_parts(op: Collective) -> tuple[Collective, ...]:
    """Return what a hierarchy runs inside the innermost units; ``op`` itself runs across them.

    all_reduce = reduce_scatter inside, all_reduce of the shard across, all_gather inside;
    all_gather and reduce_scatter have one pass of each.
    """
    return ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)


def members_below(group: Group) -> list[Column]:
    """Return members inside one unit of the level below, per level: ``m[i-1]``."""
    return [np.ones_like(group.degree), *group.members[:-1]]


def _slowest(
    fabric: Fabric, group: Group, bytes_out: list[Column], *, direct: bool = False
) -> Column:
    """Return the largest over the levels in use of bytes out of a unit over what it can send."""
    worst = np.zeros(len(group.degree))
    for level, below, inside, num_bytes in zip(
        fabric.levels, members_below(group), group.members, bytes_out, strict=True
    ):
        seconds = num_bytes / (below * rate_of(level, group, inside, direct=direct))
        worst = np.maximum(worst, np.where(inside > below, seconds, 0.0))
    return worst


def _ring(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    n, passes = group.degree, RING_PASSES[op]
    hops = sum(
        (n / below - n / inside) * level.alpha_s
        for level, below, inside in zip(
            fabric.levels, members_below(group), group.members, strict=True
        )
    )
    over_each_link = size_bytes * (n - 1) / n
    transfer = _slowest(fabric, group, [over_each_link] * len(fabric.levels))
    return passes * np.asarray(hops), passes * transfer


def _tree(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    """Double binary tree: a chain inside the innermost unit, a tree across units."""
    latency = (group.members[0] - 1) * fabric.levels[0].alpha_s
    for level, below, inside in zip(
        fabric.levels[1:], group.members[:-1], group.members[1:], strict=True
    ):
        latency = latency + np.log2(inside / below) * level.alpha_s
    both_ways = 2 * size_bytes / TREE_EFFICIENCY.value
    transfer = _slowest(fabric, group, [both_ways] * len(fabric.levels))
    return 2 * latency, transfer


def _hierarchical(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    """Inside the node all of S, across nodes the shard of each member, one after the other."""
    inner, outer = inner_group(group), outer_group(group)
    latency, transfer = _ring(op, fabric, outer, size_bytes / inner.degree)
    for part in inside_parts(op):
        more = _ring(runs_as(fabric, part), fabric, inner, size_bytes)
        latency, transfer = latency + more[0], transfer + more[1]
    return latency, transfer


def _exchange(fabric: Fabric, group: Group, size_bytes: Column) -> Column:
    """Return the transfer of an all-to-all: what leaves each unit, on the slowest level.

    One GPU sends ``S (n - m[i-1]) / n`` out of its unit and all members of the unit send.
    """
    n = group.degree
    return _slowest(
        fabric,
        group,
        [size_bytes * (n - below) / n * below for below in members_below(group)],
        direct=True,
    )


def _direct(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    latency = _highest_alpha(fabric, group) + (group.degree - 1) * ALL_TO_ALL_ISSUE_S.value
    return latency, _exchange(fabric, group, size_bytes)


def _pairwise(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    latency = sum(
        (inside - below) * level.alpha_s
        for level, below, inside in zip(
            fabric.levels, members_below(group), group.members, strict=True
        )
    )
    return np.asarray(latency), _exchange(fabric, group, size_bytes)


def _point_to_point(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    """A send between neighbours; the pair that sits farthest apart decides."""
    slowest = np.zeros(len(group.degree))
    for level, below, inside in zip(
        fabric.levels, members_below(group), group.members, strict=True
    ):
        pair = np.minimum(inside, 2)
        seconds = size_bytes / rate_of(level, group, pair, direct=True)
        slowest = np.where(inside > below, np.maximum(slowest, seconds), slowest)
    return _highest_alpha(fabric, group), slowest


def _highest_alpha(fabric: Fabric, group: Group) -> Column:
    alpha = np.zeros(len(group.degree))
    for level, below, inside in zip(
        fabric.levels, members_below(group), group.members, strict=True
    ):
        alpha = np.where(inside > below, np.maximum(alpha, level.alpha_s), alpha)
    return alpha


_FLAT: Final = {
    "ring": _ring,
    "tree": _tree,
    "direct": _direct,
    "pairwise": _pairwise,
    "point_to_point": _point_to_point,
}
