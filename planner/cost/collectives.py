"""Seconds of every collective method on a fabric, and the choice between them.

Alpha-beta on the phases of ``planner.cost.algorithms``, whose symbols are used here: level ``i``
gives every GPU ``B[i]`` bytes/s out of its unit below, so the ``b`` members of one unit leave it
with ``b * B[i]`` together. ``B`` is less for few members of a mesh without switches and, where GPUs
have no NIC of their own, less for direct, pairwise and point_to_point than for rings and trees. ::

    seconds = min over protocols of
              sum over calls of launch + sum over phases (sum_i ratio hops[i] alpha[i]
                  + issued * issue + max_i out[i] / (b B[i] share) / efficiency + fill)

Protocols are the library's (``planner.hardware.protocols``): launch, ratio and share are theirs.
Pieces of a hierarchy are on different levels at a time: then the longer side counts, and one piece
of the other; of latencies and of transfers each, which is an upper bound where both matter. Inside
a host both sides need the same links, and their transfers add up.

A group of one is a ``singleton``: no call, no cost. Alpha and B are the level's own and issue the
library's, as its calls see them; other paths have their own by factors, and an operation that was
measured on a path has what was measured. Measured curves go before all that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from planner.constants import COLLECTIVE_LAUNCH_S
from planner.cost.algorithms import Phase, is_possible, members_below, phases
from planner.cost.curves import matching, measured_s
from planner.cost.defaults import library_default, library_methods
from planner.cost.rates import LIKE_LIBRARY, calls_of, rate_of
from planner.frameworks import own_methods
from planner.hardware.protocols import Family, Protocol
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import is_validated
from planner.plan import Basis, CallPath, Collective, Framework, Method, SizeThreshold
from planner.topology.fabric import NETWORK_KINDS, CallLevels, Fabric, Level

__all__ = [
    "PRICED_PATHS",
    "Choice",
    "Terms",
    "basis_of",
    "choose",
    "collective_terms",
    "legal_methods",
    "lines_of",
    "measured_over_model",
    "thresholds",
]

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
        *library_methods(fabric, op),
        *(method for method in own if needs.get(method.algorithm, 1) <= num_levels),
    )


def lines_of(fabric: Fabric, path: CallPath, family: Family) -> tuple[Protocol, ...]:
    """Return the protocols that calls of a family may take: the library's own, or the one line."""
    if path in LIKE_LIBRARY and fabric.protocols is not None:
        return fabric.protocols.lines[family]
    return (Protocol("simple", COLLECTIVE_LAUNCH_S[fabric.library].value),)


def collective_terms(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Terms:
    """Return the parts of one call's time, shape [rows].

    The model's, times what calls of the library took over what the model says of them where the
    fabric carries measured curves.

    Args:
        op: Operation.
        method: One of ``legal_methods`` that is possible for the group.
        fabric: Levels with bandwidth and latency.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S as in ``planner.cost.algorithms``, shape [rows].
    """
    terms = _modelled(op, method, fabric, group, size_bytes)
    if not fabric.curves or method.path != "library":
        return terms
    over, _ = measured_over_model(op, method, fabric, group, size_bytes)
    return Terms(terms.fixed_s * over, terms.latency_s * over, terms.transfer_s * over)


def measured_over_model(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    """Return measured over modelled seconds, and whether that method was measured, [rows].

    A curve of the method itself goes first. One of whatever the library took says how the machine
    does over all: what the library takes there by its own rule is measured, and its other methods
    keep their distance. Beyond its ends a curve counts by the end, and nothing there is measured.
    """
    over, is_measured = np.ones(len(size_bytes)), np.zeros(len(size_bytes), dtype=bool)
    left = np.ones(len(size_bytes), dtype=bool)
    curves = [
        (curve, alike)
        for curve, alike in matching(fabric, op, group)
        if curve.algorithm in (None, method.algorithm)
    ]
    for curve, alike in sorted(curves, key=lambda one: one[0].algorithm is None):
        rows = np.flatnonzero(alike & left)
        if len(rows) == 0:
            continue
        part, size = group.take(rows), size_bytes[rows]
        at = np.clip(size, curve.sizes_bytes[0], curve.sizes_bytes[-1])
        took = measured_s(curve, at)
        ran = [method] if curve.algorithm else list(library_methods(fabric, op))
        taken = (
            np.zeros(len(rows), dtype=int)
            if curve.algorithm
            else library_default(op, fabric, part, at)
        )
        said = np.choose(taken, [_modelled(op, one, fabric, part, at).total_s() for one in ran])
        over[rows] = took / said
        is_method = np.array([one == method for one in ran])[taken]
        is_measured[rows] = is_method & (at == size)
        left[rows] = False
    return over, is_measured


def basis_of(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Basis:
    """Return what the seconds of one call (one row) rest on."""
    if method.path == "library" and fabric.curves:
        _, is_measured = measured_over_model(op, method, fabric, group, size_bytes)
        if is_measured[0]:
            return "measured"
    return "modelled" if is_validated(fabric.library, op, method) else "not validated"


def _modelled(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Terms:
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


def _latency_s(phase: Phase, hops: Sequence[Column], seen: CallLevels, line: Protocol) -> Column:
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
