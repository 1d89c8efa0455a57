"""Seconds of every collective method on a fabric, and the choice between them.

Alpha-beta on the phases of ``planner.cost.algorithms``, whose symbols are used here: level ``i``
gives every GPU ``B[i]`` bytes/s out of its unit below, so the ``b`` members of one unit leave it
with ``b * B[i]`` together. ``B`` is less for few members of a mesh without switches and, where GPUs
have no NIC of their own, less for direct, pairwise and point_to_point than for rings and trees. ::

    seconds = calls * launch + sum over phases (sum_i hops[i] alpha[i] + issued * issue
                                                + max_i out[i] / (b B[i]) / efficiency + fill)

Pieces of a hierarchy are on different levels at a time: then the longer side counts, and one piece
of the other; of latencies and of transfers each, which is an upper bound where both matter. Inside
a host both sides need the same links, and their transfers add up.

A group of one is a ``singleton``: no call, no cost. A hierarchy is two or three calls. Alpha and B
are the level's own and issue the library's, as its calls see them; other paths have their own by
factors, and an operation that was measured on a path has what was measured.

What the model leaves out: protocol switches (LL, LL128), in-switch reduction, contention between
axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from planner.constants import (
    ACHIEVED_FRACTION,
    COLLECTIVE_LAUNCH_S,
    MESSAGE_ISSUE_S,
    PATH_ALPHA,
    PATH_RATE,
)
from planner.cost.algorithms import Phase, is_possible, members_below, phases
from planner.frameworks import own_methods
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import LIBRARY_METHODS
from planner.plan import CallPath, Collective, Framework, Method, SizeThreshold
from planner.topology.fabric import NETWORK_KINDS, CallLevels, Fabric, Level

__all__ = [
    "PRICED_PATHS",
    "Choice",
    "Terms",
    "achieved_bytes_per_s",
    "calls_of",
    "choose",
    "collective_terms",
    "legal_methods",
    "rate_of",
    "thresholds",
]

# Of a hierarchy: reduce_scatter, all_reduce and all_gather of an all_reduce, else two.
_CALLS: Final[dict[str, dict[str, int]]] = {
    "hierarchical": {"all_reduce": 3, "": 2},
    "three_level": {"all_reduce": 5, "": 3},
}


PRICED_PATHS: Final[tuple[CallPath, ...]] = ("library", "executor", "shm")


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
    """The cheapest legal method per row, and the next.

    Attributes:
        methods: What was compared; ``index`` and ``runner_up`` point into it.
        seconds: Of the cheapest.
        runner_up_s: Of the next; equals ``seconds`` when there is only one, infinite when the
            next makes no sense for the group.
    """

    methods: tuple[Method, ...]
    index: Column
    seconds: Column
    runner_up: Column
    runner_up_s: Column


def legal_methods(fabric: Fabric, framework: Framework, op: Collective) -> tuple[Method, ...]:
    """Return what can run ``op``, the library's default first."""
    own = own_methods(framework, fabric.library, op)
    num_levels = len(fabric.levels)
    needs = {"hierarchical": 2, "three_level": 3}
    return (
        *LIBRARY_METHODS[fabric.library].get(op, ()),
        *(method for method in own if needs.get(method.algorithm, 1) <= num_levels),
    )


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
    if path == "library":
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


def collective_terms(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Terms:
    """Return the parts of one call's time, shape [rows].

    Args:
        op: Operation.
        method: One of ``legal_methods`` that is possible for the group.
        fabric: Levels with bandwidth and latency.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S as in ``planner.cost.algorithms``, shape [rows].
    """
    seen = calls_of(fabric, op, method.path)
    parts = phases(op, method, fabric.library, group, size_bytes)
    pieces = parts[0].pieces
    latency = _in_line(parts, [_latency_s(phase, seen) for phase in parts], pieces)
    at_a_time = np.where(_share_links(parts, seen.levels), 1.0, pieces)
    transfer = _in_line(parts, [_transfer_s(phase, seen.levels) for phase in parts], at_a_time)
    several = group.degree > 1
    calls = _CALLS.get(method.algorithm, {"": 1})
    launch = COLLECTIVE_LAUNCH_S[fabric.library].value * calls.get(op, calls[""])
    return Terms(
        np.where(several, launch, 0.0),
        np.where(several, latency, 0.0),
        np.where(several, transfer, 0.0),
    )


def _in_line(parts: Sequence[Phase], seconds: Sequence[Column], pieces: Column | float) -> Column:
    """Return the seconds of all parts, of which those that cross and others work side by side.

    The longer of both, and one of ``pieces`` of the other.
    """
    nothing = np.zeros(len(parts[0].group.degree))
    crossing, inside = (
        sum((s for p, s in zip(parts, seconds, strict=True) if p.crosses is way), nothing)
        for way in (True, False)
    )
    shorter = np.minimum(crossing, inside)
    return np.asarray(np.maximum(crossing, inside) + shorter / pieces)


def _share_links(parts: Sequence[Phase], levels: tuple[Level, ...]) -> Column:
    """Return whether parts that cross do so inside a host, by links of those that do not."""
    shared = np.zeros(len(parts[0].group.degree), dtype=bool)
    for phase in parts:
        spans = zip(levels, members_below(phase.group), phase.group.members, strict=True)
        for level, below, inside in spans if phase.crosses else ():
            if level.kind not in NETWORK_KINDS:
                shared |= inside > below
    return shared


def _latency_s(phase: Phase, seen: CallLevels) -> Column:
    hops = np.stack(
        [steps * level.alpha_s for steps, level in zip(phase.hops, seen.levels, strict=True)]
    )
    once = hops.max(axis=0) if phase.at_once else hops.sum(axis=0)
    return (once + phase.issued * seen.issue_s) * phase.pieces


def _transfer_s(phase: Phase, levels: tuple[Level, ...]) -> Column:
    """Return the largest over the levels in use of bytes out of a unit over what it can send."""
    slowest = filling = np.zeros(len(phase.group.degree))
    fill = phase.fill or [slowest] * len(levels)
    for level, below, inside, out, first in zip(
        levels, members_below(phase.group), phase.group.members, phase.out, fill, strict=True
    ):
        members, senders = (np.minimum(inside, 2), 1) if phase.is_pair else (inside, below)
        capacity = senders * rate_of(level, phase.group, members, direct=phase.is_direct)
        slowest = np.maximum(slowest, np.where(inside > below, out / capacity, 0.0))
        filling = filling + first / capacity
    return slowest / phase.efficiency + filling


def choose(
    op: Collective,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    methods: tuple[Method, ...],
) -> Choice:
    """Return the cheapest of the legal ``methods`` and its runner-up for every row."""
    seconds = np.stack(
        [
            np.where(
                is_possible(op, method, group),
                collective_terms(op, method, fabric, group, size_bytes).total_s(),
                np.inf,
            )
            for method in methods
        ]
    )
    order = np.argsort(seconds, axis=0, kind="stable")
    first, second = order[0], order[min(1, len(methods) - 1)]
    rows = np.arange(seconds.shape[1])
    return Choice(methods, first, seconds[first, rows], second, seconds[second, rows])


def thresholds(
    op: Collective,
    fabric: Fabric,
    group: Group,
    methods: tuple[Method, ...],
    *,
    largest_bytes: int = 1 << 33,
) -> tuple[SizeThreshold, ...]:
    """Return the best method by message size for one group (one row).

    Sizes are powers of two from 1 KiB; between two that differ the breaks are found by bisection,
    to one byte. The last threshold is open.
    """

    def best(*sizes: float) -> Column:
        wide = group.repeat(len(sizes))
        return choose(op, fabric, wide, np.array(sizes, dtype=float), methods).index

    def threshold(up_to_bytes: int | None, index: int) -> SizeThreshold:
        algorithm, path = methods[index]
        return SizeThreshold(up_to_bytes=up_to_bytes, algorithm=algorithm, path=path)

    sizes = [1 << power for power in range(10, largest_bytes.bit_length())]
    chosen = best(*sizes).tolist()
    closed: list[SizeThreshold] = []
    for at in np.flatnonzero(np.diff(chosen)):
        low, current = sizes[at], chosen[at]
        while current != chosen[at + 1]:  # a third method may be the best for less than an octave
            high = sizes[at + 1]
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if best(middle)[0] == current else (low, middle)
            closed.append(threshold(low, current))
            low, current = high, int(best(high)[0])
    return (*closed, threshold(None, chosen[-1]))
