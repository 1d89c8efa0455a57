"""What each collective algorithm does to the levels of a fabric: hops and bytes, phase by phase.

No seconds here: ``planner.cost.collectives`` prices phases, ``planner.cost.traffic`` counts their
bytes. Symbols: a group of ``n`` ranks has ``m[i]`` members inside one unit of level ``i``, ``b`` of
them inside one of the level below (``b = m[i-1]``, 1 at the bottom; ``m[-1] = n``), ``N = n/m[0]``
innermost units. ``S`` is nccl-tests' size: the buffer on one rank for all_reduce, all_to_all,
broadcast, reduce and send_recv, the whole tensor of all_gather, reduce_scatter, gather and scatter.

==================  ===============================  ============================================
algorithm           hops on level i                  bytes out of a unit of b members
==================  ===============================  ============================================
ring, one pass      n/b - n/m; one less below        S (n-1)/n
ring, broadcast     n/b - n/m; so is a reduce        S; executor: after pieces fill the chain
halving_doubling    log2(m/b) a pass                 S (1 - b/n) a pass
tree (all_reduce)   2 (m-1) inside, 2 log2(m/b)      ``_double_tree``: 2 S, of two units S
nvls                1                                S: every byte goes to the switch once
nvls_tree           1 inside, 2 log2(m/b)            inside S, of units as a tree
collnet             1 inside, 2 across               S
pat                 log2(m/b)                        S b (n-b)/n / b: as a ring's pass
one_shot, two_shot  1, 2                             S (n-1), 2 S (n-1)/n; S where switches reduce
tree, broadcast     log2(m/b); executor: as above    S b log2(n/b); executor: S to 2 S
direct              1, n-1 messages at once          S b (n-b)/n a pass; gather, scatter: S (n-b)/n
pairwise            m - b                            S b (n-b)/n
copy_engine         ``shared_barriers``              S (n-1)/n a pass, in memory
hierarchical        of its parts                     inside S, across S/m[0] by every member
point_to_point      1                                S
==================  ===============================  ============================================

An all_reduce is two passes. The root of a broadcast, gather or scatter is the first member. Across
a hierarchy a broadcast goes by one member of each unit, which has all of the exit to itself: as
S/m[0] by every member. gloo emulates reduce_scatter by all_reduce (pytorch#149869), and its
broadcast is a binomial tree that crosses to the farthest ranks last, from every rank that has the
data (gloo/broadcast.cc). Ring and tree latencies follow NCCL's own model (src/graph/tuning.cc).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from planner.constants import TREE_EFFICIENCY
from planner.hardware.protocols import Family
from planner.layout.candidates import Column
from planner.layout.groups import Group, inner_group, outer_group
from planner.methods import NVLS_MOST_SHARDS
from planner.plan import Algorithm, CallPath, Collective, Method
from planner.segments import chain_segments, hierarchy_pieces, shared_barriers, tree_segments
from planner.topology.document import Library

__all__ = [
    "NEEDED_OF_GROUP",
    "PASSES",
    "Phase",
    "is_possible",
    "members_below",
    "phases",
    "runs_as",
]

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
        out: Per level, bytes of one such group through the exit of the busiest unit of the level
            below.
        efficiency: Part of the levels' rates that it reaches.
        issued: Messages that a member posts at once, beside the hops.
        fill: Per level, bytes that pass before the exits are busy.
        crosses: It is the part of a hierarchy that leaves the innermost units.
        pieces: In which it goes, while phases that do not cross, or do, have other pieces.
        at_once: All messages are posted together; the slowest decides.
        family: Of the library's protocols; ``direct``: every member sends for itself, rather than
            along rings or trees.
        is_pair: Only two members talk, over what one member has of an exit.
        is_rooted: Only one member sends, or receives.
        own: Bytes that a member copies for itself.
        call: Which call of the library it is part of, counted from 0.
    """

    group: Group
    hops: Sequence[Column]
    sent: Sequence[Column]
    out: Sequence[Column]
    efficiency: float = 1.0
    issued: Column | float = 0.0
    fill: Sequence[Column] | None = None
    crosses: bool = False
    pieces: Column | float = 1.0
    at_once: bool = False
    family: Family = "ring"
    is_pair: bool = False
    is_rooted: bool = False
    own: Column | float = 0.0
    call: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether every member sends for itself."""
        return self.family == "direct"


def phases(
    op: Collective,
    method: Method,
    library: Library,
    group: Group,
    size_bytes: Column,
    host_levels: int = 1,
) -> list[Phase]:
    """Return the parts of one call, which follow each other.

    Args:
        op: Operation.
        method: How it is done; ``is_possible`` for the rows that count.
        library: Which may do another operation in its place.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S, shape [rows].
        host_levels: How many of the levels are inside a host: NCCL's trees see hosts alone.
    """
    if method == Method("tree") and op == "all_reduce":
        return _tree(op, group, size_bytes, host_levels)
    if method.algorithm == "hierarchical":
        return _hierarchical(op, method.path, library, group, size_bytes, depth=0)
    if method.algorithm == "three_level":
        return _hierarchical(op, method.path, library, group, size_bytes, depth=1)
    done = runs_as(library, op, method.path)
    if method.algorithm == "tree" and method.path == "executor":
        return _tree_of_pieces(done, group, size_bytes)
    if (done, method) == ("broadcast", Method("tree")):
        return _binomial(group, size_bytes)
    if (done, method) == ("broadcast", Method("ring", "executor")):
        return _chain_of_pieces(done, group, size_bytes)
    if method.algorithm == "copy_engine" and method.path != "shm":
        return [_by_engines(done, group, size_bytes)]
    return _FLAT[method.algorithm](done, group, size_bytes)


def runs_as(library: Library, op: Collective, path: CallPath = "library") -> Collective:
    """Return what is done where ``op`` is asked for."""
    emulated = library == "gloo" and path == "library" and op == "reduce_scatter"
    return "all_reduce" if emulated else op


# What ``is_possible`` asks of a group, in words.
_ONE_DOMAIN: Final = "all ranks in one unit of the innermost level"
_SEVERAL_UNITS: Final = "equally many ranks, two or more, in each of several innermost units"
NEEDED_OF_GROUP: Final[dict[Algorithm, str]] = {
    "hierarchical": _SEVERAL_UNITS,
    "three_level": f"{_SEVERAL_UNITS}, and equally many of these in each above",
    **dict.fromkeys(("copy_engine", "nvls", "one_shot", "two_shot"), _ONE_DOMAIN),
    **dict.fromkeys(("nvls_tree", "collnet"), _SEVERAL_UNITS),
    "pat": "one rank in each of several innermost units",
    "halving_doubling": "a power of two of ranks",
}


def is_possible(op: Collective, method: Method, group: Group) -> Column:
    """Return whether the group can do it this way at all, shape [rows]."""
    if method.algorithm == "hierarchical":
        return group.has_hierarchy()
    if method.algorithm == "three_level":
        return group.has_hierarchy() & group.has_hierarchy(1)
    if method.algorithm == "nvls" and op != "all_reduce":
        return (group.members[0] == group.degree) & (group.degree <= NVLS_MOST_SHARDS)
    if method.algorithm in ("copy_engine", "nvls", "one_shot", "two_shot"):
        return group.members[0] == group.degree
    if method.algorithm in ("nvls_tree", "collnet"):
        return group.has_hierarchy()
    if method.algorithm == "pat":
        return (group.members[0] == 1) & (group.degree > 1)
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
    beyond = list(accumulate(reversed(sent)))[::-1]
    out = [b * above for b, above in zip(members_below(group), beyond, strict=True)]
    return Phase(group, hops, sent, out)


def _steps(group: Group) -> list[Column]:
    """Return the edges of a ring or chain that cross a level, its closing one left out."""
    n = group.degree
    return [n / b - n / m for b, m in _spans(group)]


def _ring_hops(n: Column, edges: Sequence[Column]) -> list[Column]:
    """Return the edges that the last piece of a pass crosses: all but one of the shortest."""
    found = []
    left_out = np.zeros(len(n), dtype=bool)
    for part in edges:
        is_first = (part > 0) & ~left_out
        found.append(n * part - is_first)
        left_out |= is_first
    return found


def _ring_edges(group: Group) -> list[Column]:
    """Return the part of a ring's edges that lies on each level; it closes on the highest."""
    n = group.degree
    units = [n / m for m in (*members_below(group), n)]
    return [
        np.where(m == b, 0.0, below - np.where(m == n, 0.0, above)) / n
        for (b, m), (below, above) in zip(_spans(group), pairwise(units), strict=True)
    ]


def _ring(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    if op in ("broadcast", "reduce"):
        return [_chain(group, size_bytes)]
    over_each_edge = size_bytes * (group.degree - 1) / group.degree
    edges = _ring_edges(group)
    sent = [over_each_edge * part for part in edges]
    one_pass = _evenly(group, _ring_hops(group.degree, edges), sent)
    own = 0.0 if op == "all_reduce" else size_bytes / group.degree
    return [replace(one_pass, own=own)] * PASSES[op]


def _chain(group: Group, size_bytes: Column) -> Phase:
    """From the root to the last member, or back; slices are passed on as they come."""
    steps = _steps(group)
    sent = [size_bytes * edges / group.degree for edges in steps]
    return Phase(group, steps, sent, out=[size_bytes for _ in steps])


def _chain_of_pieces(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """By our executor: in pieces large enough for messages."""
    chain = _chain(group, size_bytes)
    piece = size_bytes / chain_segments(size_bytes, group.degree)
    fill = [piece * np.maximum(edges - 1, 0) for edges in chain.hops]
    return [replace(chain, fill=fill)]


def _halving_doubling(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Largest pieces to the nearest partner: of b members to m, S/b - S/m each."""
    hops = [np.log2(m / b) for b, m in _spans(group)]
    sent = [size_bytes / b - size_bytes / m for b, m in _spans(group)]
    return [_evenly(group, hops, sent)] * PASSES[op]


def _tree(op: Collective, group: Group, size_bytes: Column, host_levels: int) -> list[Phase]:
    """An all_reduce by NCCL: chains inside hosts, double binary trees across; up, then down.

    Every channel has another member of the host for its head, so that no member has both.
    """
    inside, above = range(host_levels), range(host_levels, len(group.members))
    chain, spans = group.members[host_levels - 1], _spans(group)
    whole = _double_tree(op, group, size_bytes, chain)
    along = [2 * (chain / spans[i][0] - chain / spans[i][1]) for i in inside]
    both_ways = [size_bytes * np.minimum(chain / spans[i][0] - 1, 2) for i in inside]
    alone = np.where(chain == 1, whole.out[0], both_ways[0])
    return [
        replace(
            whole,
            hops=[*along, *(whole.hops[i] for i in above)],
            out=[alone, *both_ways[1:], *(whole.out[i] for i in above)],
            efficiency=TREE_EFFICIENCY.value,
        )
    ]


def _tree_of_pieces(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """By our executor: in pieces, but a tree inside the only unit."""
    n, inside = group.degree, group.members[0]
    whole = _double_tree(op, group, size_bytes, np.where(inside < n, inside, 1))
    height = sum(whole.hops, np.zeros(len(n)))
    ways = 2 if op == "all_reduce" else 1
    piece = size_bytes / 2 / tree_segments(size_bytes / 2, height / ways)
    fill = [piece * np.maximum(steps - 1, 0) for steps in whole.hops]
    return [replace(whole, issued=height, fill=fill)]  # posted: messages of the other tree


def _double_tree(op: Collective, group: Group, size_bytes: Column, chain: Column) -> Phase:
    """Return double binary trees across units of ``chain`` members, behind their heads.

    No tree knows outer levels. Each edge carries S/2, of an all_reduce both ways. Of the L blocks
    of 2**k units that an outer level makes of the tree (k > 0), each hangs on by its highest unit
    and, in one of both trees, by the subtree before or after that: 3 L - 2 edges between them,
    where units have 2 L - 2.
    """
    n, below = group.degree, members_below(group)
    ways = 2 if op == "all_reduce" else 1
    height = [np.where(chain > 1, chain - 1.0, np.log2(group.members[0]))]
    height += [np.log2(m / b) for b, m in _spans(group)[1:]]
    edges = [2 * (n / b - 1) + np.where((chain < b) & (b < n), n / b, 0) for b in (*below, n)]
    return Phase(
        group,
        hops=[ways * steps for steps in height],
        sent=[ways * size_bytes / 2 * (inner - outer) / n for inner, outer in pairwise(edges)],
        out=[size_bytes / 2 * _tree_exit(ways, n, chain, b) for b in below],
    )


def _tree_exit(ways: int, n: Column, chain: Column, below: Column) -> Column:
    """Return the halves of S through the exit of the busiest ``below`` members of both trees.

    Inner units have two children and a parent in one tree and are a leaf of the other; of two units
    each has one edge in each tree, of three at most three in all. Inside a chain it is two in each.
    """
    if ways == 2:
        edges = np.minimum(n / np.maximum(below, chain), 4)
        of_member = np.maximum(edges + 1, 2 * np.minimum(chain - 1, 2))
        return np.where(below < chain, of_member, edges + 2 * (below > chain))
    units = n // chain
    last_is_inner = (units % 2 == 0) & (np.log2(units) % 1 != 0)  # the root's unit, in one tree
    return 2 + (below != chain) + (last_is_inner & (below >= chain))


def _nvls(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """In the switches of one domain: each member gives all it has once, and gets the result."""
    outer = [np.zeros(len(group.degree))] * (len(group.members) - 1)
    moved = size_bytes * np.ones(len(group.degree))
    hop = np.where(group.degree > 1, 1.0, 0.0)
    return [Phase(group, [hop, *outer], [moved, *outer], [moved, *outer], family="switch")]


def _nvls_tree(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Switches inside; across, every member its shard by double binary trees (NVLSTree)."""
    across = _double_tree(op, group, size_bytes, group.members[0])
    once = size_bytes * np.ones(len(group.degree))
    return [
        replace(
            across,
            hops=[np.where(group.members[0] > 1, 1.0, 0.0), *across.hops[1:]],
            sent=[once, *across.sent[1:]],
            out=[once, *across.out[1:]],
            family="switch",
        )
    ]


def _collnet(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """The network's switches reduce: every unit sends the sum of its members once (SHARP)."""
    inside, *above = _spans(group)
    hops = [np.where(inside[1] > 1, 2.0, 0.0), *(np.where(m > b, 2.0, 0.0) for b, m in above)]
    both = 2 * size_bytes * (inside[1] - 1) / inside[1]
    sent = [both, *(size_bytes / inside[1] * (m > b) for b, m in above)]
    out = [both, *(size_bytes * (m > b) for b, m in above)]
    return [Phase(group, hops, sent, out)]


def _pat(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Parallel aggregated trees, one member per unit: a ring's bytes in a tree's steps."""
    ring = _ring(op, group, size_bytes)[0]
    return [replace(ring, hops=[np.log2(m / b) for b, m in _spans(group)])]


def _shots(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Every member reads all that every other has."""
    moved = size_bytes * (group.degree - 1.0)
    hops = [*_one_hop(group)]
    return [_in_domain(group, hops, moved)]


def _two_shots(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Every member reads its shard of every other, reduces it, and reads the other results."""
    moved = 2 * size_bytes * (group.degree - 1.0) / group.degree
    return [_in_domain(group, [2 * hop for hop in _one_hop(group)], moved)]


def _in_domain(group: Group, hops: Sequence[Column], moved: Column) -> Phase:
    sizes = [moved, *[np.zeros(len(group.degree))] * (len(group.members) - 1)]
    return Phase(group, hops, sizes, sizes, family="copy")


def _binomial(group: Group, size_bytes: Column) -> list[Phase]:
    """Of gloo: in step 2**k each of the 2**k members that have the data sends it that much further.

    The root's unit sends most.
    """
    n = group.degree
    steps = 2.0 ** np.arange(int(n.max() - 1).bit_length())
    return [
        Phase(
            group,
            hops=[np.log2(m / b) for b, m in _spans(group)],
            sent=[size_bytes * (m - b) / n for b, m in _spans(group)],
            out=[
                size_bytes * sum(_sent_beyond(b, n, step) for step in steps)
                for b in members_below(group)
            ],
        )
    ]


def _sent_beyond(members: Column, n: Column, step: float) -> Column:
    """Return how many of the first ``members`` that have the data send it to others."""
    receivers = np.minimum(step + np.minimum(members, step), n)
    return np.maximum(receivers - np.maximum(members, step), 0)


def _one_hop(group: Group) -> list[Column]:
    """Return one hop on every level in use."""
    return [np.where(m > b, 1.0, 0.0) for b, m in _spans(group)]


def _direct(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Every member talks to every other at once, or the root to all."""
    n, hops = group.degree, _one_hop(group)
    if op in ("gather", "scatter", "broadcast", "reduce"):
        each = size_bytes / n if op in ("gather", "scatter") else size_bytes
        root = Phase(
            group,
            hops,
            sent=[each * (m - b) / n for b, m in _spans(group)],
            out=[each * (n - b) for b in members_below(group)],
            issued=n - 1,
            at_once=True,
            family="direct",
            is_rooted=True,
        )
        return [root]
    sent = [size_bytes * (m - b) / n for b, m in _spans(group)]
    even = _evenly(group, hops, sent)
    once = Phase(
        group,
        hops,
        sent,
        even.out,
        issued=n - 1,
        at_once=True,
        family="direct",
        own=size_bytes / n if op == "all_to_all" else 0.0,
    )
    return [once] * PASSES.get(op, 1)


def _pairwise(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    hops = [m - b for b, m in _spans(group)]
    sent = [size_bytes * (m - b) / group.degree for b, m in _spans(group)]
    return [Phase(group, hops, sent, _evenly(group, hops, sent).out, family="direct")]


def _point_to_point(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Between neighbours, all at once; the pair that sits farthest apart decides."""
    edges = np.maximum(group.degree - 1, 1)
    return [
        Phase(
            group,
            _one_hop(group),
            sent=[size_bytes * steps / edges for steps in _steps(group)],
            out=[size_bytes for _ in group.members],
            at_once=True,
            family="direct",
            is_pair=True,
        )
    ]


def _copy_engine(op: Collective, group: Group, size_bytes: Column) -> list[Phase]:
    """Copies inside the innermost unit, of which every round ends in a barrier."""
    outer = [np.zeros(len(group.degree))] * (len(group.members) - 1)
    barriers = shared_barriers(op, size_bytes, group.degree)
    moved = PASSES.get(op, 1) * size_bytes * (group.degree - 1) / group.degree
    sizes = [moved, *outer]
    return [Phase(group, [barriers, *outer], sizes, sizes, family="copy")]


def _by_engines(op: Collective, group: Group, size_bytes: Column) -> Phase:
    """Copies by DMA engines of GPUs: each member to every other."""
    moved = PASSES.get(op, 1) * size_bytes * (group.degree - 1.0) / group.degree
    return _in_domain(group, _one_hop(group), moved)


_FLAT: Final[dict[str, Callable[[Collective, Group, Column], list[Phase]]]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "nvls": _nvls,
    "nvls_tree": _nvls_tree,
    "collnet": _collnet,
    "pat": _pat,
    "one_shot": _shots,
    "two_shot": _two_shots,
    "direct": _direct,
    "pairwise": _pairwise,
    "copy_engine": _copy_engine,
    "point_to_point": _point_to_point,
}


# ---------------------------------------------------------------------------- hierarchies

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

    With ``depth`` 1 what goes across is a hierarchy on the next level again. A large all_reduce
    goes in pieces, of which one crosses while others are inside.
    """
    if op == "all_to_all":
        return _two_level_exchange(group, size_bytes)
    inner, outer = inner_group(group), outer_group(group)
    across = _in_hierarchies(op, library, path)
    inside = Method("copy_engine", "shm") if path == "shm" else across
    parts = _PARTS.get(op, (op,))
    shard = size_bytes / inner.degree
    calls = [(part, inside, inner, size_bytes) for part in parts]
    if depth:
        middle, top = inner_group(outer, 1), outer_group(outer, 1)
        calls += [(part, across, middle, shard) for part in parts]
        calls.append((op, across, top, shard / middle.degree))
    else:
        calls.append((op, across, outer, shard))
    pieces = hierarchy_pieces(size_bytes) if op == "all_reduce" else 1.0
    return [
        replace(phase, pieces=pieces, crosses=number >= len(parts), call=number)
        for number, (part, how, members, size) in enumerate(calls)
        for phase in phases(part, how, library, members, size)
    ]


def _in_hierarchies(op: Collective, library: Library, path: CallPath) -> Method:
    """Return what runs on a level: what the library has, or a ring of our own."""
    if path != "library":
        return Method("ring", "executor")
    return Method("tree") if (library, op) == ("gloo", "broadcast") else Method("ring")


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
        family="direct",
    )
    sent = [none, *(size_bytes * (m - b) / n for b, m in _spans(group)[1:])]
    far = Phase(
        group,
        hops := [none, *_one_hop(group)[1:]],
        sent,
        _evenly(group, hops, sent).out,
        issued=n / unit - 1,
        at_once=True,
        family="direct",
        call=1,
    )
    return [near, far]
