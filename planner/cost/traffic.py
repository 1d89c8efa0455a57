"""What a collective sends over each level, and the time that no algorithm can beat.

Symbols as in ``planner.cost.algorithms``: ``n`` ranks, ``m[i]`` of them inside one unit of level
``i``, ``B[i]`` bytes/s per GPU out of a unit of the level below.
"""

import numpy as np

from planner.cost.algorithms import PASSES, members_below, phases
from planner.cost.collectives import PRICED_PATHS
from planner.cost.rates import calls_of, rate_of
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.plan import Collective, Method
from planner.topology.fabric import NETWORK_KINDS, Fabric, Level

__all__ = ["busiest_exits", "bytes_per_level", "lower_bound_s"]


def lower_bound_s(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> Column:
    """Return seconds that no algorithm can beat at the levels' rates, shape [rows].

    The bounds of ``planner.topology.bounds`` on the levels' own cuts: the ``m`` members of a unit
    against the ``n - m`` others. ``B`` is here what all links of a unit carry: a GPU whose group
    reaches beyond its node has NVLink and its NIC. Of several paths the fastest counts: among CPUs
    of one host that is shared memory.

    A broadcast enters every unit but the root's whole, and a reduction leaves it whole; in memory,
    where idle members leave others their share, that is S to all but one of them. What a root
    gathers or scatters is what its own unit receives or sends in an all_gather or reduce_scatter:
    the same bound, of one unit in place of all.

    Of direct links ``B`` is the best that rings or direct exchanges reach. In a full mesh that is
    all links; where pairs are not alike, trees that no library here runs may have more: an
    all_gather on the 8 dies of Frontier 17 % more by ``bounds``.

    ==========================  =====================================================
    all_gather, reduce_scatter  max_i S (n - m[i-1]) / (n m[i-1] B[i])
    gather, scatter             the same
    all_reduce                  twice that; S / B[0] inside switches that reduce
    broadcast, reduce           max_i S / (m[i-1] B[i]); S (m[0] - 1) / (m[0] B[0]) in memory
    all_to_all                  max_i S (n - m[i-1]) / (n B[i])
    send_recv                   S / B of the highest level between neighbours
    ==========================  =====================================================
    """
    n, bound = group.degree, np.zeros(len(group.degree))
    levels = _fastest_levels(fabric, op)
    way_out = next((lv.bytes_per_s for lv in levels if lv.kind in NETWORK_KINDS), 0.0)
    for level, below, inside in zip(levels, members_below(group), group.members, strict=True):
        members = np.minimum(inside, 2) if op == "send_recv" else inside
        along, each = (
            rate_of(level, group, members, direct=way, nominal=True) for way in (False, True)
        )
        rate = np.maximum(along, each)
        if level.kind not in NETWORK_KINDS and op != "send_recv":
            rate = rate + np.where(n > inside, way_out, 0.0)
        crossing = (n - below) / n
        if op == "send_recv":
            seconds = size_bytes / rate
        elif op == "all_to_all":
            seconds = size_bytes * crossing / rate
        elif op == "all_reduce" and level.multicast:
            seconds = size_bytes / rate
        elif op in ("broadcast", "reduce"):
            part = (inside - below) / inside if level.kind == "loopback" else 1.0
            seconds = size_bytes * part / (below * rate)
        else:
            seconds = PASSES.get(op, 1) * size_bytes * crossing / (below * rate)
        bound = np.maximum(bound, np.where(inside > below, seconds, 0.0))
    return bound


def _fastest_levels(fabric: Fabric, op: Collective) -> list[Level]:
    """Return every level as the fastest path of ``op`` sees it."""
    by_path = (calls_of(fabric, op, path).levels for path in PRICED_PATHS)
    return [max(seen, key=lambda level: level.bytes_per_s) for seen in zip(*by_path, strict=True)]


def bytes_per_level(
    op: Collective,
    method: Method,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    *,
    closed: bool = False,
) -> list[Column]:
    """Return the bytes that a rank sends over each level, mean over the group, per call.

    Levels add up to what the algorithm sends: twice ``S (n-1)/n`` for a ring all_reduce.

    Args:
        op: Operation.
        method: How it is done.
        fabric: Levels, and the library, which may do another operation in its place.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S, shape [rows].
        closed: Whether a send_recv goes from the last to the first too, as keys and values do:
            a ring's edges, where a pass of one sends ``(n-1)/n`` of its size.
    """
    if closed:
        op, method = "all_gather", Method("ring")
        size_bytes = size_bytes * group.degree / np.maximum(group.degree - 1, 1)
    parts = [
        phase.sent
        for phase in phases(op, method, fabric.library, group, size_bytes, fabric.host_levels)
    ]
    return [sum(sizes, np.zeros(len(group.degree))) for sizes in zip(*parts, strict=True)]


def busiest_exits(
    op: Collective, method: Method, fabric: Fabric, group: Group, size_bytes: Column
) -> list[Column]:
    """Return the bytes per call through the exit of the busiest unit below each level.

    Of level 1 that is a host's NIC, of level 2 the trunk of a leaf, in the direction that carries
    more; 0 where all members lie below. Level 0 is what a member sends or receives itself, but for
    a broadcast across a hierarchy, where it is the mean of its unit.
    """
    found = [np.zeros(len(group.degree)) for _ in fabric.levels]
    for phase in phases(op, method, fabric.library, group, size_bytes, fabric.host_levels):
        spans = zip(members_below(group), members_below(phase.group), phase.out, strict=True)
        for depth, (members, below, out) in enumerate(spans):
            alike = members // below  # groups of the phase that share the exit
            found[depth] += np.where(below < phase.group.degree, alike * out, 0.0)
    return found
