"""What a collective sends over each level, and the time that no algorithm can beat.

Symbols as in ``planner.cost.collectives``: ``n`` ranks, ``m[i]`` of them inside one unit of level
``i``, ``B[i]`` bytes/s per GPU out of a unit of the level below.
"""

from typing import Final

import numpy as np

from planner.cost.collectives import (
    RING_PASSES,
    inside_parts,
    members_below,
    rate_of,
    runs_as,
)
from planner.layout.candidates import Column
from planner.layout.groups import Group, inner_group, outer_group
from planner.plan import Algorithm, Collective
from planner.topology.fabric import Fabric

__all__ = ["bytes_per_level", "lower_bound_s"]

_NETWORK: Final = ("infiniband", "ethernet")


def lower_bound_s(
    op: Collective, fabric: Fabric, group: Group, size_bytes: Column
) -> Column | None:
    """Return seconds that no algorithm can beat at the levels' rates, shape [rows].

    The bounds of ``planner.topology.bounds`` on the levels' own cuts: the ``m`` members of a unit
    against the ``n - m`` others. ``B`` is here what all links of a unit carry: a GPU whose group
    reaches beyond its node has NVLink and its NIC. None for operations without a bound here.

    Of direct links ``B`` is the best that rings or direct exchanges reach. In a full mesh that is
    all links; where pairs are not alike, trees that no library here runs may have more: an
    all_gather on the 8 dies of Frontier 17 % more by ``bounds``.

    ==========================  =====================================================
    all_gather, reduce_scatter  max_i S (n - m[i-1]) / (n m[i-1] B[i])
    all_reduce                  twice that; S / B[0] inside switches that reduce
    all_to_all                  max_i S (n - m[i-1]) / (n B[i])
    send_recv                   S / B of the highest level between neighbours
    ==========================  =====================================================
    """
    if op not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
        return None
    n, bound = group.degree, np.zeros(len(group.degree))
    way_out = next((lv.bytes_per_s for lv in fabric.levels if lv.kind in _NETWORK), 0.0)
    for level, below, inside in zip(
        fabric.levels, members_below(group), group.members, strict=True
    ):
        members = np.minimum(inside, 2) if op == "send_recv" else inside
        along, each = (
            rate_of(level, group, members, direct=way, nominal=True) for way in (False, True)
        )
        rate = np.maximum(along, each)
        if level.kind not in _NETWORK and op != "send_recv":
            rate = rate + np.where(n > inside, way_out, 0.0)
        crossing = (n - below) / n
        if op == "send_recv":
            seconds = size_bytes / rate
        elif op == "all_to_all":
            seconds = size_bytes * crossing / rate
        elif op == "all_reduce" and level.multicast:
            seconds = size_bytes / rate
        else:
            seconds = RING_PASSES[op] * size_bytes * crossing / (below * rate)
        bound = np.maximum(bound, np.where(inside > below, seconds, 0.0))
    return bound


def bytes_per_level(
    op: Collective,
    algorithm: Algorithm,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    *,
    closed: bool = False,
) -> list[Column]:
    """Return the bytes that a rank sends over each level, mean over the group, per call.

    A ring or tree crosses a level by its edges there; a ring closes on the highest level it uses.
    Levels add up to what the algorithm sends: twice ``S (n-1)/n`` for a ring all_reduce.

    Args:
        op: Operation.
        algorithm: How it is done.
        fabric: Levels, and the library, which may do another operation in its place.
        group: The group's lie on the levels, shape [rows].
        size_bytes: S, shape [rows].
        closed: Whether a send_recv goes from the last to the first too, as keys and values do.
    """
    op = runs_as(fabric, op)
    if algorithm == "hierarchical":
        return _hierarchical(op, fabric, group, size_bytes)
    n, below = group.degree, members_below(group)
    if op == "all_to_all":
        return [
            size_bytes * (inside - m) / n for m, inside in zip(below, group.members, strict=True)
        ]
    if op == "send_recv":
        hops = _ring_edges(group) if closed else _chain_edges(group)
        return [size_bytes * edges for edges in hops]
    sent = RING_PASSES[op] * size_bytes * (n - 1) / n
    edges_on = _chain_edges if algorithm == "tree" else _ring_edges  # a tree of trees, n - 1 edges
    return [sent * edges for edges in edges_on(group)]


def _ring_edges(group: Group) -> list[Column]:
    """Return the part of a ring's edges that lies on each level."""
    n = group.degree
    shares = []
    for below, inside in zip(members_below(group), group.members, strict=True):
        units, parents = n / below, n / inside
        shares.append(np.where(inside == below, 0.0, units - np.where(inside == n, 0, parents)) / n)
    return shares


def _chain_edges(group: Group) -> list[Column]:
    """Return the part of the hops between neighbours, first to last, that lies on each level."""
    n = group.degree
    hops = np.maximum(n - 1, 1)
    return [
        (n / below - n / inside) / hops
        for below, inside in zip(members_below(group), group.members, strict=True)
    ]


def _hierarchical(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> list[Column]:
    """Inside the unit all of S, once or twice; across units the shard that each member holds."""
    inner, outer = inner_group(group), outer_group(group)
    rings = [bytes_per_level(part, "ring", fabric, inner, size_bytes) for part in inside_parts(op)]
    rings.append(bytes_per_level(op, "ring", fabric, outer, size_bytes / inner.degree))
    return [sum(sizes, np.zeros(len(size_bytes))) for sizes in zip(*rings, strict=True)]
