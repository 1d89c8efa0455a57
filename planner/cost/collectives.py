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
of the other. Inside a host both sides need the same links, and their transfers add up.

A group of one is a ``singleton``: no call, no cost. Alpha and B are the level's own and issue the
library's, as its calls see them; other paths have their own by factors, and an operation that was
measured on a path has what was measured. Measured curves go before all that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
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
from planner.methods import OTHER_METHODS, is_validated
from planner.plan import Basis, CallPath, Collective, Framework, Method, SizeThreshold
from planner.topology.fabric import NETWORK_KINDS, CallLevels, Fabric, Level

__all__ = [
    "PRICED_PATHS",
    "Choice",
    "Explained",
    "Terms",
    "bases_of",
    "basis_of",
    "choose",
    "collective_terms",
    "explain_call",
    "legal_methods",
    "lines_of",
    "measured_over_model",
    "thresholds",
]

# What runs beside the library: a curve of the library's calls says nothing of it.
_OF_OTHERS: Final = frozenset(
    method for by_op in OTHER_METHODS.values() for ways in by_op.values() for method, _ in ways
)
# Where ``thresholds`` looks for changes.
_SIZES_AN_OCTAVE: Final = 4
# Of the time at a curve's end: then a transfer, whose error grows with it, and no late start.
_MOSTLY: Final = 0.5
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


@dataclass(frozen=True, slots=True)
class Explained:
    """How a call spends its time, shape [rows].

    Attributes:
        terms: Its parts.
        protocols: Name of the cheapest line of each call of the library that it is made of.
        level_s: Per level, seconds that its bytes keep the busiest exit of that level busy.
    """

    terms: Terms
    protocols: tuple[Column, ...]
    level_s: tuple[Column, ...]

    def bottleneck(self) -> Column:
        """Return the index of the level that is busy longest."""
        return np.argmax(self.level_s, axis=0)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the library by its best protocol, with phases that follow each other.

    Attributes:
        phases: Of the algorithm.
        lines: That the call may take.
        line: Which it takes, shape [rows].
        launch_s: Shape [rows].
        latencies: Of each phase, shape [rows].
        transfers: Of each phase, shape [rows].
    """

    phases: list[Phase]
    lines: tuple[Protocol, ...]
    line: Column
    launch_s: Column
    latencies: list[Column]
    transfers: list[Column]


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
    told = _told_by_curves(op, fabric, group, size_bytes) if method.path == "library" else None
    return _terms(op, method, fabric, group, size_bytes, told)


def explain_call(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Explained:
    """Return what ``collective_terms`` is made of, for the same arguments."""
    modelled, calls = _modelled(op, method, fabric, group, size_bytes)
    terms = collective_terms(op, method, fabric, group, size_bytes)
    seen = calls_of(fabric, op, method.path)
    busy = np.zeros((len(seen.levels), len(size_bytes)))
    for call in calls:
        own_share = _own_share(fabric, call.phases[0].family)
        shares = [
            np.array([_share(fabric, line, level) for line in call.lines])[call.line]
            for level in seen.levels
        ]
        for phase in call.phases:
            for depth, (out_s, _) in enumerate(_ways(phase, seen.levels, own_share)):
                busy[depth] += out_s / shares[depth] / phase.efficiency
    took, said = terms.total_s(), modelled.total_s()
    level_s = busy * np.where(said > 0, took / np.where(said > 0, said, 1.0), 0.0)
    protocols = tuple(np.array([line.name for line in call.lines])[call.line] for call in calls)
    return Explained(terms, protocols, tuple(level_s))


@dataclass(frozen=True, slots=True)
class _Told:
    """What measured curves say, an entry for each curve and row that it is like.

    Attributes:
        rows: Of the group; where several curves are like one, the last entry counts.
        over: Measured over modelled seconds, of what ran.
        ran: Index into ``library_methods``.
        only: Whether the curve is of that method, rather than of what the library took.
        inside: Whether the size is inside the curve's.
    """

    rows: Column
    over: Column
    ran: Column
    only: Column
    inside: Column


def _told_by_curves(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> _Told | None:
    """Return what the fabric's curves say; None where none is like any row."""
    methods = library_methods(fabric, op)
    number_of = {method.algorithm: number for number, method in enumerate(methods)}
    found = []
    for curve, alike in matching(fabric, op, group) if fabric.curves else ():
        known = curve.algorithm is None or curve.algorithm in number_of
        if curve.path != "library" or not known:
            continue
        rows = np.flatnonzero(alike)
        at = np.clip(size_bytes[rows], curve.sizes_bytes[0], curve.sizes_bytes[-1])
        number = -1 if curve.algorithm is None else number_of[curve.algorithm]
        is_inside = at == size_bytes[rows]
        for inside in (False, True):
            some = is_inside == inside
            if some.any():
                took = measured_s(curve, at[some])
                found.append((inside, number >= 0, rows[some], at[some], took, number))
    if not found:
        return None
    found.sort(key=lambda one: one[:2])  # what was measured there, and of one method, goes last
    rows, at, took = (np.concatenate([one[i] for one in found]) for i in (2, 3, 4))
    ran = np.concatenate([np.full(len(one[2]), one[5]) for one in found])
    part, only = group.take(rows), ran >= 0
    ran = np.where(only, ran, library_default(op, fabric, part, at))
    here = size_bytes[rows]

    def said(sizes: Column) -> tuple[Column, Column]:
        terms = [_modelled(op, one, fabric, part, sizes)[0] for one in methods]
        return (
            np.choose(ran, [one.total_s() for one in terms]),
            np.choose(ran, [one.transfer_s for one in terms]),
        )

    at_end = said(at)
    over = took / at_end[0]
    if (here != at).any():
        now = said(here)
        # what the model missed at the end grows with the transfer where that was most of it
        moving = at_end[1] / at_end[0]
        moving = np.where(moving > _MOSTLY, moving, 0.0)
        growth = np.divide(now[1], at_end[1], out=np.ones(len(here)), where=at_end[1] > 0)
        missed = (took - at_end[0]) * (1 - moving + moving * growth)
        over = np.where(here > at, (now[0] + missed) / now[0], over)
        over = np.where(here < at, np.minimum(1.0, took / now[0]), over)
    return _Told(rows, over, ran, only, at == here)


def _told_of(
    told: _Told | None, op: Collective, method: Method, fabric: Fabric, num_rows: int
) -> tuple[Column, Column]:
    """Return ``measured_over_model`` of one method."""
    over, is_measured = np.ones(num_rows), np.zeros(num_rows, dtype=bool)
    if told is not None:
        methods = library_methods(fabric, op)
        is_method = told.ran == (methods.index(method) if method in methods else -1)
        counts = ~told.only | is_method
        over[told.rows[counts]] = told.over[counts]
        is_measured[told.rows[counts]] = (is_method & told.inside)[counts]
    return over, is_measured


def measured_over_model(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Column, Column]:
    """Return measured over modelled seconds, and whether that method was measured, [rows].

    A curve of the method itself goes first. One of whatever the library took says how the machine
    does over all: what the library takes there by its own rule is measured, and its other methods
    keep their distance. Above its largest size the model goes on from there: what it missed grows
    with the transfer where that was most of the time. Below its smallest the model stands, unless
    it is longer than the smallest took. Nothing there is measured, and another curve goes first.
    """
    told = _told_by_curves(op, fabric, group, size_bytes)
    return _told_of(told, op, method, fabric, len(size_bytes))


def _terms(
    op: Collective,
    method: Method,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    told: _Told | None,
) -> Terms:
    terms, _ = _modelled(op, method, fabric, group, size_bytes)
    if told is None or method.path != "library" or method in _OF_OTHERS:
        return terms
    over, _ = _told_of(told, op, method, fabric, len(size_bytes))
    return Terms(terms.fixed_s * over, terms.latency_s * over, terms.transfer_s * over)


def bases_of(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> list[Basis]:
    """Return what the seconds of every row rest on."""
    modelled: Basis = "modelled" if is_validated(fabric.library, op, method) else "not validated"
    if method.path != "library":
        return [modelled] * len(size_bytes)
    _, is_measured = measured_over_model(op, method, fabric, group, size_bytes)
    return ["measured" if one else modelled for one in is_measured]


def basis_of(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> Basis:
    """Return what the seconds of one call (one row) rest on."""
    return bases_of(op, method, fabric, group, size_bytes)[0]


def _modelled(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> tuple[Terms, list[_Call]]:
    """Return the parts of the time by the model alone, and the library's calls."""
    seen = calls_of(fabric, op, method.path)
    parts = phases(op, method, fabric.library, group, size_bytes, fabric.host_levels)
    calls = [
        _cheapest_line(list(call), seen, fabric, method.path)
        for _, call in groupby(parts, key=lambda phase: phase.call)
    ]
    fixed = sum((call.launch_s for call in calls), np.zeros(len(size_bytes)))
    latencies = [latency for call in calls for latency in call.latencies]
    transfers = [transfer for call in calls for transfer in call.transfers]
    latency_s, transfer_s = _in_line(parts, latencies, transfers, _share_links(parts, seen.levels))
    several = group.degree > 1
    terms = Terms(
        np.where(several, fixed, 0.0),
        np.where(several, latency_s, 0.0),
        np.where(several, transfer_s, 0.0),
    )
    return terms, calls


def _cheapest_line(call: list[Phase], seen: CallLevels, fabric: Fabric, path: CallPath) -> _Call:
    """Return one call by its best protocol."""
    lines = lines_of(fabric, path, call[0].family)
    own_share = _own_share(fabric, call[0].family)
    ratios = [
        tuple(
            line.network_hop_ratio if level.kind in NETWORK_KINDS else line.hop_ratio
            for line in lines
        )
        for level in seen.levels
    ]
    slowness = [tuple(1 / _share(fabric, line, level) for line in lines) for level in seen.levels]
    alike = {id(phase): phase for phase in call}  # the passes of a ring are one object
    priced = {
        number: (
            _latency_s(phase, seen, ratios),
            _transfer_s(phase, _ways(phase, seen.levels, own_share), slowness),
        )
        for number, phase in alike.items()
    }
    latencies, transfers = zip(*(priced[id(phase)] for phase in call), strict=True)
    launches = np.array([line.launch_s for line in lines])
    if len(lines) == 1:
        best = np.zeros(len(call[0].group.degree), dtype=int)
    else:
        best = np.argmin(launches[:, None] + sum(latencies) + sum(transfers), axis=0)
    at = best, np.arange(len(best))
    return _Call(
        call, lines, best, launches[best], [s[at] for s in latencies], [s[at] for s in transfers]
    )


def _in_line(
    parts: Sequence[Phase],
    latencies: Sequence[Column],
    transfers: Sequence[Column],
    share_links: Column,
) -> tuple[Column, Column]:
    """Return latency and transfer of all parts: those that cross and others work side by side.

    Of both sides the longer one counts, and one of the pieces of the other; transfers that share
    links add up.
    """
    nothing, pieces = np.zeros(len(parts[0].group.degree)), parts[0].pieces

    def of_side(seconds: Sequence[Column], crosses: bool) -> Column:
        return sum(
            (s for p, s in zip(parts, seconds, strict=True) if p.crosses is crosses), nothing
        )

    across, inside = (
        (of_side(latencies, crosses), of_side(transfers, crosses)) for crosses in (True, False)
    )
    is_across = across[0] + across[1] >= inside[0] + inside[1]
    longer, shorter = (
        [np.where(is_across == first, a, b) for a, b in zip(across, inside, strict=True)]
        for first in (True, False)
    )
    at_a_time = np.where(share_links, 1.0, pieces)
    return longer[0] + shorter[0] / pieces, longer[1] + shorter[1] / at_a_time


def _share_links(parts: Sequence[Phase], levels: tuple[Level, ...]) -> Column:
    """Return whether parts that cross do so inside a host, by links of those that do not."""
    shared = np.zeros(len(parts[0].group.degree), dtype=bool)
    for phase in parts:
        spans = zip(levels, members_below(phase.group), phase.group.members, strict=True)
        for level, below, inside in spans if phase.crosses else ():
            if level.kind not in NETWORK_KINDS:
                shared |= inside > below
    return shared


def _on_lines(
    by_level: Sequence[Column], factors: Sequence[tuple[float, ...]], gather: np.ufunc
) -> Column:
    """Return ``by_level`` times the factor of each line there, gathered, shape [lines, rows].

    Levels that have the same factors are gathered first.
    """
    alike: dict[tuple[float, ...], Column] = {}
    for column, factor in zip(by_level, factors, strict=True):
        alike[factor] = gather(alike[factor], column) if factor in alike else column
    return reduce(gather, (np.multiply.outer(factor, one) for factor, one in alike.items()))


def _latency_s(phase: Phase, seen: CallLevels, ratios: Sequence[tuple[float, ...]]) -> Column:
    """Return the seconds of hops and of posting, shape [lines, rows]."""
    hops = [steps * level.alpha_s for steps, level in zip(phase.hops, seen.levels, strict=True)]
    once = _on_lines(hops, ratios, np.maximum if phase.at_once else np.add)
    return (once + phase.issued * seen.issue_s) * phase.pieces


def _ways(phase: Phase, levels: tuple[Level, ...], own_share: float) -> list[tuple[Column, Column]]:
    """Return, per level in use, seconds out of a unit and until the exits are busy."""
    nothing = np.zeros(len(phase.group.degree))
    fill = phase.fill or [nothing] * len(levels)
    found = []
    for depth, (level, below, inside, out, first) in enumerate(
        zip(levels, members_below(phase.group), phase.group.members, phase.out, fill, strict=True)
    ):
        is_used = inside > below
        if not is_used.any():
            found.append((nothing, nothing))
            continue
        members, senders = (np.minimum(inside, 2), 1) if phase.is_pair else (inside, below)
        if phase.is_rooted and level.kind in NETWORK_KINDS and level.path != "peer":
            senders = 1  # a GPU's own NIC; processes of a host share one
        capacity = senders * rate_of(level, phase.group, members, direct=phase.is_direct)
        moved = out if depth else out + own_share * phase.own
        filling = nothing if phase.fill is None else first / capacity
        found.append((np.where(is_used, moved / capacity, 0.0), filling))
    return found


def _transfer_s(
    phase: Phase,
    ways: Sequence[tuple[Column, Column]],
    slowness: Sequence[tuple[float, ...]],
) -> Column:
    """Return the largest over the levels of bytes out of a unit over what it sends, [lines, rows].

    ``slowness`` is 1 over the share of a level's rate that each line reaches.
    """
    seconds = _on_lines([out_s for out_s, _ in ways], slowness, np.maximum) / phase.efficiency
    if phase.fill is None:
        return seconds
    return seconds + _on_lines([fill_s for _, fill_s in ways], slowness, np.add)


def _own_share(fabric: Fabric, family: Family) -> float:
    return 0.0 if fabric.protocols is None else fabric.protocols.own_share[family]


def _share(fabric: Fabric, line: Protocol, level: Level) -> float:
    """Return the part of what a level reaches that a protocol reaches there.

    What was measured of a level is what the protocol that reaches most reached.
    """
    is_network, lines = level.kind in NETWORK_KINDS, fabric.protocols
    share = line.network_share if is_network else line.share
    if not level.measured or lines is None:
        return share
    return share / (lines.largest_network_share if is_network else lines.largest_share)


def choose(
    op: Collective,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    methods: tuple[Method, ...],
) -> Choice:
    """Return the cheapest of the legal ``methods`` and its runner-up for every row."""
    told = _told_by_curves(op, fabric, group, size_bytes)
    seconds = np.stack(
        [
            np.where(
                is_possible(op, method, group),
                _terms(op, method, fabric, group, size_bytes, told).total_s(),
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

    Sizes are four to an octave from 1 KiB; between two that differ the breaks are found by
    bisection, to one byte. The last threshold is open.
    """

    def best(*sizes: float) -> Column:
        wide = group.repeat(len(sizes))
        return choose(op, fabric, wide, np.array(sizes, dtype=float), methods).index

    def threshold(up_to_bytes: int | None, index: int) -> SizeThreshold:
        algorithm, path = methods[index]
        return SizeThreshold(up_to_bytes=up_to_bytes, algorithm=algorithm, path=path)

    octaves = np.arange(10, largest_bytes.bit_length() - 0.9, 1 / _SIZES_AN_OCTAVE)
    sizes = [round(float(size)) for size in 2.0**octaves]
    chosen = best(*sizes).tolist()
    closed: list[SizeThreshold] = []
    for at in np.flatnonzero(np.diff(chosen)):
        low, current = sizes[at], chosen[at]
        while current != chosen[at + 1]:  # a third method may be the best in between
            high = sizes[at + 1]
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if best(middle)[0] == current else (low, middle)
            closed.append(threshold(low, current))
            low, current = high, int(best(high)[0])
    return (*closed, threshold(None, chosen[-1]))
