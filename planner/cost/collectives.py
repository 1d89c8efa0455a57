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
from itertools import groupby
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
from planner.hardware.protocols import Family, Protocol
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import library_rules
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
    "library_methods",
    "rate_of",
    "thresholds",
]

PRICED_PATHS: Final[tuple[CallPath, ...]] = ("library", "executor", "shm")
# Paths that see the levels as the library's calls do.
_LIKE_LIBRARY: Final[tuple[CallPath, ...]] = ("library", "nccl_zero_cta", "mori")


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
        *library_methods(fabric, op),
        *(method for method in own if needs.get(method.algorithm, 1) <= num_levels),
    )


def library_methods(fabric: Fabric, op: Collective) -> tuple[Method, ...]:
    """Return how the library of this fabric can run ``op`` there."""
    has = {
        "multicast": fabric.levels[0].multicast,
        "network": len(fabric.levels) > 1,
        "sharp": fabric.sharp,
    }
    return tuple(
        Method(rule.algorithm)
        for rule in library_rules(fabric.library, op)
        if all(has[need] for need in rule.needs)
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
    if path in _LIKE_LIBRARY:
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


def lines_of(fabric: Fabric, path: CallPath, family: Family) -> tuple[Protocol, ...]:
    """Return the protocols that calls of a family may take: the library's own, or the one line."""
    if path in _LIKE_LIBRARY and fabric.protocols is not None:
        return fabric.protocols.lines[family]
    return (Protocol("simple", COLLECTIVE_LAUNCH_S[fabric.library].value),)


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
    fixed: Column | float = 0.0
    latencies: list[Column] = []
    transfers: list[Column] = []
    for _, call in groupby(parts, key=lambda phase: phase.call):
        launch, latency, transfer = _cheapest_line(list(call), seen, fabric, method.path)
        fixed = fixed + launch
        latencies += latency
        transfers += transfer
    pieces = parts[0].pieces
    latency_s = _in_line(parts, latencies, pieces)
    at_a_time = np.where(_share_links(parts, seen.levels), 1.0, pieces)
    transfer_s = _in_line(parts, transfers, at_a_time)
    several = group.degree > 1
    return Terms(
        np.where(several, fixed, 0.0),
        np.where(several, latency_s, 0.0),
        np.where(several, transfer_s, 0.0),
    )


def _cheapest_line(
    call: Sequence[Phase], seen: CallLevels, fabric: Fabric, path: CallPath
) -> tuple[Column | float, list[Column], list[Column]]:
    """Return launch, and latency and transfer of every phase of one call, by its best protocol."""
    family = call[0].family
    lines = lines_of(fabric, path, family)
    own_share = 0.0 if fabric.protocols is None else fabric.protocols.own_share[family]
    hops = [_hops(phase, seen) for phase in call]
    ways = [_ways(phase, seen.levels, own_share) for phase in call]
    by_line = [
        (
            line.launch_s,
            [_latency_s(phase, at, seen, line) for phase, at in zip(call, hops, strict=True)],
            [
                _transfer_s(phase, way, [_share(fabric, line, level) for level in seen.levels])
                for phase, way in zip(call, ways, strict=True)
            ],
        )
        for line in lines
    ]
    if len(by_line) == 1:
        return by_line[0]
    totals = [
        launch + np.add.reduce(latency) + np.add.reduce(transfer)
        for launch, latency, transfer in by_line
    ]
    best = np.argmin(totals, axis=0)
    launches = np.array([launch for launch, _, _ in by_line])
    numbers = range(len(call))
    return (
        launches[best],
        [np.choose(best, [latency[number] for _, latency, _ in by_line]) for number in numbers],
        [np.choose(best, [transfer[number] for _, _, transfer in by_line]) for number in numbers],
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


def _hops(phase: Phase, seen: CallLevels) -> list[Column]:
    """Return seconds of the hops on every level."""
    return [steps * level.alpha_s for steps, level in zip(phase.hops, seen.levels, strict=True)]


def _latency_s(
    phase: Phase, hops: Sequence[Column], seen: CallLevels, line: Protocol
) -> Column:
    ratios = [
        line.network_hop_ratio if level.kind in NETWORK_KINDS else line.hop_ratio
        for level in seen.levels
    ]
    by_level = np.stack([ratio * one for ratio, one in zip(ratios, hops, strict=True)])
    once = by_level.max(axis=0) if phase.at_once else by_level.sum(axis=0)
    return (once + phase.issued * seen.issue_s) * phase.pieces


def _ways(phase: Phase, levels: tuple[Level, ...], own_share: float) -> list[tuple[Column, Column]]:
    """Return, per level in use, seconds out of a unit and until the exits are busy."""
    nothing = np.zeros(len(phase.group.degree))
    fill = phase.fill or [nothing] * len(levels)
    found = []
    for depth, (level, below, inside, out, first) in enumerate(
        zip(levels, members_below(phase.group), phase.group.members, phase.out, fill, strict=True)
    ):
        members, senders = (np.minimum(inside, 2), 1) if phase.is_pair else (inside, below)
        capacity = senders * rate_of(level, phase.group, members, direct=phase.is_direct)
        moved = out if depth else out + own_share * phase.own
        found.append((np.where(inside > below, moved / capacity, 0.0), first / capacity))
    return found


def _transfer_s(
    phase: Phase, ways: Sequence[tuple[Column, Column]], shares: Sequence[float]
) -> Column:
    """Return the largest over the levels of bytes out of a unit over what it can send."""
    slowest = filling = np.zeros(len(phase.group.degree))
    for share, (busy, first) in zip(shares, ways, strict=True):
        slowest = np.maximum(slowest, busy / share)
        filling = filling + first / share
    return slowest / phase.efficiency + filling


def _share(fabric: Fabric, line: Protocol, level: Level) -> float:
    """Return the part of what a level reaches that a protocol reaches there."""
    if level.kind in NETWORK_KINDS:
        return line.network_share
    if level.measured and fabric.protocols is not None:
        return line.share / fabric.protocols.largest_share
    return line.share


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
