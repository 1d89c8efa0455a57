"""What each collective algorithm does to the levels of a fabric: hops and bytes, phase by phase.

No seconds here: ``planner.cost.collectives`` prices phases, ``planner.cost.traffic`` counts their
bytes. Symbols: a group of ``n`` ranks has ``m[i]`` members inside one unit of level ``i``, ``b`` of
them inside one of the level below (``b = m[i-1]``, 1 at the bottom; ``m[-1] = n``). ``S`` is
nccl-tests' size: the buffer on one rank for all_reduce, all_to_all, broadcast and send_recv, the
whole tensor of all_gather, reduce_scatter, gather and scatter.

==================  ===============================  ===========================================
algorithm           hops on level i                  bytes out of a unit of b members
==================  ===============================  ===========================================
ring, one pass      n/b - n/m                        S (n-1)/n
ring, broadcast     n/b - n/m                        S, after the pieces that fill the chain
halving_doubling    log2(m/b) a pass                 S (1 - b/n) a pass
tree (all_reduce)   2 (m-1) inside, 2 log2(m/b)      2 S
direct              1, n-1 messages at once          S b (n-b)/n of all_to_all, of others S (n-b)/n
pairwise            m - b                            S b (n-b)/n
copy_engine         one barrier a pass               S (n-1)/n a pass, in memory
hierarchical        of its parts                     inside S, across S/m[0] by every member
point_to_point      1                                S b
==================  ===============================  ===========================================

An all_reduce is two passes. gloo emulates reduce_scatter by all_reduce (pytorch#149869), and its
broadcast is a binomial tree that crosses to the farthest ranks last, from every rank that has the
data (gloo/broadcast.cc). Ring and tree latencies follow NCCL's own model (src/graph/tuning.cc).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.constants import CHAIN_PIECE_BYTES, TREE_EFFICIENCY
from planner.layout.candidates import Column
from planner.layout.groups import Group, inner_group, outer_group
from planner.plan import CallPath, Collective, Method
from planner.topology.document import Library

__all__ = ["PASSES", "Phase", "is_possible", "members_below", "phases", "runs_as"]

# Passes of S (n-1)/n, in a ring and in memory.
PASSES: Final[dict[Collective, int]] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a collective in which all members work at once.

    Attributes:
        group: The members, whose columns have shape [rows].
        hops: Per level, messages over it that wait for each other, shape [rows]; those of
            different levels too, unless they are ``at_once``.
        sent: Per level, bytes that a member sends to others in the same unit of it but no lower
            one; mean over the group, shape [rows].
        out: Per level, bytes through the exit of the busiest unit of the level below.
        issued: Messages that a member posts at once, beside the hops.
        fill: Per level, bytes that pass before the exits are busy.
        at_once: All messages are posted together; the slowest decides.
        is_direct: Every member sends for itself, rather than along rings or trees.
        is_pair: Only two members talk.
    """

    group: Group
    hops: Sequence[Column]
    sent: Sequence[Column]
    out: Sequence[Column]
    issued: Column | float = 0.0
    fill: Sequence[Column] | None = None
    at_once: bool = False
    is_direct: bool = False
    is_pair: bool = False


def phases(
    op: Collective, method: Method, library: Library, group: Group, size_bytes: Column
) -> list[Phase]:
    """Return the parts of one call, which follow each other.

    Args:
        op: Operation.
        method: How it is done; ``is_possible`` for the rows that count.
        library: Which may do another operation in its place.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S, shape [rows].
    """
    done = runs_as(library, op, method.path)
    if method.algorithm == "hierarchical":
        return _hierarchical(done, method.path, library, group, size_bytes, depth=0)
    if method.algorithm == "three_level":
        return _hierarchical(done, method.path, library, group, size_bytes, depth=1)
    if method.algorithm == "tree" and method.path == "executor":
        return _double_tree(done, group, size_bytes)
    if (done, method) == ("broadcast", Method("tree")):
        return _binomial(group, size_bytes)
    return _FLAT[method.algorithm](done, group, size_bytes)


def runs_as(library: Library, op: Collective, path: CallPath = "library") -> Collective:
    """Return what is done where ``op`` is asked for."""
    emulated = library == "gloo" and path == "library" and op == "reduce_scatter"
    return "all_reduce" if emulated else op


def is_possible(op: Collective, method: Method, group: Group) -> Column:
    """Return whether the group can do it this way at all, shape [rows]."""
    if method.algorithm == "hierarchical":
        return group.has_hierarchy()
    if method.algorithm == "three_level":
        return group.has_hierarchy() & group.has_hierarchy(1)
    if method.algorithm == "copy_engine":
        return group.members[0] == group.degree
    if method.algorithm == "halving_doubling":  # others fold onto a power of two, at twice the cost
        return np.log2(group.degree) % 1 == 0
    return np.ones(len(group.degree), dtype=bool)


def members_below(group: Group) -> list[Column]:
    """Return members inside one unit of the level below, per level: ``m[i-1]``."""
    return [np.ones_like(group.degree), *group.members[:-1]]


# ------------------------------------------------------------------------ flat algorithms


def _spans(group: Group) -> list[tuple[Column, Column]]:
    """Return (members in a unit of the level below, in one of the level) per level."""
    return list(zip(members_below(group), group.members, strict=True))


def _evenly(group: Group, hops: Sequence[Column], sent: Sequence[Column]) -> Phase:
    """Return a phase in which all units send alike: what leaves is what their members sent."""
    beyond = np.cumsum(np.stack(sent)[::-1], axis=0)[::-1]
    out = [b * above for b, above in zip(members_below(group), beyond, strict=True)]
    return Phase(group, hops, sent, out)


def _steps(group: Group) -> list[Column]:
    """Return the edges of a ring or chain that cross a level, its closing one left out."""
    n = group.degree
    return [n / b - n / m for b, m in _spans(group)]


def _ring_edges(group: Group) -> list[Column]:
    """Return the part of a ring's edges that lies on each level; it closes on the highest."""
    n = group.degree
    return [np.where(m == b, 0.0, n / b - np.where(m == n, 0, n / m)) / n for b, m in _spans(group)]


def _ring(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    if op == "broadcast":
        return _chain(group, size_bytes)
    over_each_edge = size_bytes * (group.degree - 1) / group.degree
    one_pass = _evenly(group, _steps(group), [over_each_edge * part for part in _ring_edges(group)])
    return [one_pass] * PASSES[op]


def _chain(group: Group, size_bytes: Column) -> list[Phase]:
    """From the root to the last member, in pieces that are passed on as they come."""
    piece = np.minimum(size_bytes, CHAIN_PIECE_BYTES.value)
    steps = _steps(group)
    return [
        Phase(
            group,
            steps,
            sent=[size_bytes * edges / group.degree for edges in steps],
            out=[np.where(m > b, size_bytes, 0.0) for b, m in _spans(group)],
            fill=[piece * np.maximum(edges - 1, 0) for edges in steps],
        )
    ]


def _halving_doubling(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Largest pieces to the nearest partner: of b members to m, S/b - S/m each."""
    hops = [np.log2(m / b) for b, m in _spans(group)]
    sent = [size_bytes / b - size_bytes / m for b, m in _spans(group)]
    return [_evenly(group, hops, sent)] * PASSES[op]


def _tree(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """An all_reduce by NCCL: chains inside units, double binary trees across; up, then down."""
    inside, *above = _spans(group)
    hops = [2 * (inside[1] - 1.0), *(2 * np.log2(m / b) for b, m in above)]
    out = [2 * size_bytes / TREE_EFFICIENCY.value * (m > b) for b, m in _spans(group)]
    return [Phase(group, hops, _over_tree_edges(group, 2 * size_bytes), out)]


def _double_tree(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """By our executor: as NCCL, but a tree inside the only unit, and pieces fill it first.

    A unit has up to two children and a parent in one tree and is a leaf of the other: 2 S leave it,
    S where there are two units.
    """
    (_, inside), *above = _spans(group)
    depth = [np.where(inside < group.degree, inside - 1.0, np.log2(inside))]
    depth += [np.log2(m / b) for b, m in above]
    ways = 2 if op == "all_reduce" else 1
    two = [group.degree / b <= 2 for b in members_below(group)]
    out = [size_bytes * np.where(few, 1, 2) for few in two]
    return [
        Phase(
            group,
            hops=[ways * steps for steps in depth],
            sent=_over_tree_edges(group, ways * size_bytes),
            out=[
                np.where(m > b, sent, 0.0) for sent, (b, m) in zip(out, _spans(group), strict=True)
            ],
        )
    ]


def _over_tree_edges(group: Group, carried_bytes: Column) -> list[Column]:
    """Return what members send over each level, mean, where each of n-1 edges carries that."""
    return [carried_bytes * steps / group.degree for steps in _steps(group)]


def _binomial(group: Group, size_bytes: Column) -> list[Phase]:
    """Of gloo: in every step each rank that has the data sends all of it, nearest ranks first."""
    return [
        Phase(
            group,
            hops=[np.log2(m / b) for b, m in _spans(group)],
            sent=[size_bytes * (m - b) / group.degree for b, m in _spans(group)],
            out=[size_bytes * b * np.log2(group.degree / b) for b, _ in _spans(group)],
        )
    ]


def _one_hop(group: Group) -> list[Column]:
    """Return one hop on every level in use."""
    return [np.where(m > b, 1.0, 0.0) for b, m in _spans(group)]


def _direct(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Every member talks to every other at once, or the root to all."""
    n, hops = group.degree, _one_hop(group)
    if op in ("gather", "scatter", "broadcast"):
        each = size_bytes / n if op != "broadcast" else size_bytes
        root = Phase(
            group,
            hops,
            sent=[each * (m - b) / n for b, m in _spans(group)],
            out=[each * (n - b) for b in members_below(group)],
            issued=n - 1,
            at_once=True,
            is_direct=True,
        )
        return [root]
    sent = [size_bytes * (m - b) / n for b, m in _spans(group)]
    even = _evenly(group, hops, sent)
    once = Phase(group, hops, sent, even.out, issued=n - 1, at_once=True, is_direct=True)
    return [once] * PASSES.get(op, 1)


def _pairwise(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    hops = [m - b for b, m in _spans(group)]
    sent = [size_bytes * (m - b) / group.degree for b, m in _spans(group)]
    return [Phase(group, hops, sent, _evenly(group, hops, sent).out, is_direct=True)]


def _point_to_point(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Between neighbours, all at once; the pair that sits farthest apart decides."""
    edges = np.maximum(group.degree - 1, 1)
    return [
        Phase(
            group,
            _one_hop(group),
            sent=[size_bytes * steps / edges for steps in _steps(group)],
            out=[size_bytes * b for b in members_below(group)],
            at_once=True,
            is_direct=True,
            is_pair=True,
        )
    ]


def _copy_engine(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Copies inside the innermost unit: every pass ends in one barrier."""
    none = np.zeros(len(group.degree))
    moved = size_bytes * (group.degree - 1) / group.degree
    outer = [none] * (len(group.members) - 1)
    copies = Phase(group, [none + 1.0, *outer], [moved, *outer], [moved, *outer])
    return [copies] * PASSES.get(op, 1)


_FLAT: Final[dict[str, Callable[[Collective, Group, Column], list[Phase]]]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "direct": _direct,
    "pairwise": _pairwise,
    "copy_engine": _copy_engine,
    "point_to_point": _point_to_point,
}


# ---------------------------------------------------------------------------- hierarchies

# What runs inside units, by path; rings run across them.
_INSIDE: Final[dict[CallPath, Method]] = {
    "library": Method("ring"),
    "executor": Method("ring", "executor"),
    "shm": Method("copy_engine", "shm"),
}
# What a hierarchy runs inside units; the operation itself runs across them.
_PARTS: Final[dict[Collective, tuple[Collective, ...]]] = {
    "all_reduce": ("reduce_scatter", "all_gather")
}


def _hierarchical(
    op: Collective,
    path: CallPath,
    library: Library,
    group: Group,
    size_bytes: Column,
    depth: int,
) -> list[Phase]:
    """Inside the innermost units all of S, across them the shard of each member.

    With ``depth`` 1 what goes across is a hierarchy on the next level again.
    """
    if op == "all_to_all":
        return _two_level_exchange(group, size_bytes)
    inner, outer = inner_group(group), outer_group(group)
    found = [
        phase
        for part in _PARTS.get(op, (op,))
        for phase in phases(part, _INSIDE[path], library, inner, size_bytes)
    ]
    ring = Method("ring", "library" if path == "library" else "executor")
    shard = size_bytes / inner.degree
    if not depth:
        return found + phases(op, ring, library, outer, shard)
    middle, top = inner_group(outer, 1), outer_group(outer, 1)
    for part in _PARTS.get(op, (op,)):
        found += phases(part, ring, library, middle, shard)
    return found + phases(op, ring, library, top, shard / middle.degree)


def _two_level_exchange(group: Group, size_bytes: Column) -> list[Phase]:
    """Rows go to the member of the own unit at the receiver's place, then straight to it."""
    n, unit = group.degree, group.members[0]
    none = np.zeros(len(n))
    inside = size_bytes * (unit - 1) / unit
    levels = len(group.members)
    near = Phase(
        group,
        [np.where(unit > 1, 1.0, 0.0), *[none] * (levels - 1)],
        [inside, *[none] * (levels - 1)],
        [inside, *[none] * (levels - 1)],
        issued=unit - 1,
        at_once=True,
        is_direct=True,
    )
    sent = [none, *(size_bytes * (m - b) / n for b, m in _spans(group)[1:])]
    far = Phase(
        group,
        hops := [none, *_one_hop(group)[1:]],
        sent,
        _evenly(group, hops, sent).out,
        issued=n / unit - 1,
        at_once=True,
        is_direct=True,
    )
    return [near, far]
