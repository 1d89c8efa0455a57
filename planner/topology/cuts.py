"""Worst cuts and partitions of a graph with whole-number capacities, exact, by maximum flows.

Every edge has ``capacity``, the same in both directions. ``B(X)`` is the capacity out of a set of
vertices. *Terminals* are the vertices that count; the others (switches) only forward, and stand
on whichever side makes a cut least. All terminals are joined.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import networkx as nx

__all__ = [
    "Cut",
    "Partition",
    "contracted",
    "least_cut",
    "least_exit",
    "worst_partition",
    "worst_ratio_cut",
]

# Names that no component can have.
_SOURCE: Final = ">source"
_SINK: Final = ">sink"


class Cut(NamedTuple):
    """Vertices of one side, and the capacity out of it."""

    side: set[str]
    capacity: int


class Partition(NamedTuple):
    """Terminals of every part, and the sum of the capacities out of them."""

    parts: list[set[str]]
    capacity: int


def least_exit(links: nx.Graph[str], side: Iterable[str], rest: Iterable[str]) -> int:
    """Return the least capacity of a cut between ``side`` and ``rest``."""
    flows = links.copy()
    flows.add_edges_from((_SOURCE, vertex) for vertex in side)
    flows.add_edges_from((vertex, _SINK) for vertex in rest)
    return int(nx.minimum_cut_value(flows, _SOURCE, _SINK))


def least_cut(links: nx.Graph[str], terminals: Sequence[str]) -> Cut:
    """Return the cut of least capacity between two terminals; the first is inside."""
    first, *others = terminals
    cuts = [nx.minimum_cut(links, first, other) for other in others]
    capacity, (side, _) = min(cuts, key=lambda cut: int(cut[0]))
    return Cut(side, int(capacity))


def worst_ratio_cut(links: nx.Graph[str], terminals: Sequence[str]) -> Cut:
    """Return the X with most terminals inside per B(X), at least one being outside.

    Newton's iteration on the ratio k/B (Dinkelbach, 1967, doi:10.1287/mnsc.13.7.492). With ``B``
    from a source into each of n terminals and ``k`` times every link, all n B reach a terminal
    exactly when no cut that leaves it out is worse than k/B; if they do not, the least cut is
    worse and takes its place. A terminal that has passed need not be tried again, because the
    ratio only grows.
    """
    worst = min((_all_but(links, terminal) for terminal in terminals), key=lambda c: c.capacity)
    for terminal in terminals:
        while True:
            count = sum(vertex in worst.side for vertex in terminals)
            flows = _scaled(links, count)
            flows.add_edges_from(((_SOURCE, t) for t in terminals), capacity=worst.capacity)
            value, (side, _) = nx.minimum_cut(flows, _SOURCE, terminal)
            if value == len(terminals) * worst.capacity:
                break
            side.remove(_SOURCE)
            worst = Cut(side, _exit(links, side))
    return worst


def worst_partition(links: nx.Graph[str], terminals: Sequence[str]) -> Partition:
    """Return the partition with the greatest (m-1) / sum of B over its m parts.

    Newton's iteration again: at the ratio p/q, no partition is worse exactly when
    sum_i (p B(Xi) - q) >= -q for all of them.
    """
    parts = [{terminal} for terminal in terminals]
    worst = Partition(parts, sum(_exit(links, part) for part in parts))
    while True:
        p, q = len(worst.parts) - 1, worst.capacity
        parts, cost = _cheapest_partition(links, terminals, factor=p, discount=q)
        if cost >= -q:
            return worst
        worst = Partition(parts, (cost + q * len(parts)) // p)


def _cheapest_partition(
    links: nx.Graph[str], terminals: Sequence[str], *, factor: int, discount: int
) -> tuple[list[set[str]], int]:
    """Return the partition with the least sum of ``factor`` B(Xi) - ``discount``, and the sum.

    Greedy, as that cost is submodular on parts that meet (Cunningham, "Optimal attack and
    reinforcement of a network", J. ACM 32, 1985): each terminal in turn gets the largest weight
    with which no set of terminals so far weighs more than its cost; sets where the two are equal
    grow together.
    """
    weights: dict[str, int] = {}
    parts: list[set[str]] = []
    for index, terminal in enumerate(terminals):
        flows = _scaled(links, factor)
        flows.add_edge(_SOURCE, terminal)
        flows.add_node(_SINK)
        flows.add_edges_from((later, _SINK) for later in terminals[index + 1 :])
        for earlier, weight in weights.items():
            flows.add_edge(earlier, _SOURCE if weight > 0 else _SINK, capacity=abs(weight))
        value, (side, _) = nx.minimum_cut(flows, _SOURCE, _SINK)
        gained = sum(weight for weight in weights.values() if weight > 0)
        weights[terminal] = int(value) - gained - discount
        met = [part for part in parts if part & side]
        parts = [part for part in parts if not part & side] + [{terminal}.union(*met)]
    return parts, sum(weights.values())


def _all_but(links: nx.Graph[str], vertex: str) -> Cut:
    return Cut(set(links) - {vertex}, _exit(links, {vertex}))


def _exit(links: nx.Graph[str], side: set[str]) -> int:
    return int(nx.cut_size(links, side, weight="capacity"))


def _scaled(links: nx.Graph[str], factor: int) -> nx.Graph[str]:
    scaled: nx.Graph[str] = nx.Graph()
    scaled.add_nodes_from(links)
    scaled.add_edges_from(
        (a, b, {"capacity": factor * link["capacity"]}) for a, b, link in links.edges(data=True)
    )
    return scaled


def contracted(links: nx.Graph[str], part_of: dict[str, str]) -> nx.Graph[str]:
    """Return ``links`` with every part contracted to one vertex, capacities added."""
    quotient: nx.Graph[str] = nx.Graph()
    quotient.add_nodes_from(part_of.get(vertex, vertex) for vertex in links)
    for a, b, link in links.edges(data=True):
        a, b = part_of.get(a, a), part_of.get(b, b)
        if a != b:
            before = quotient.get_edge_data(a, b, default={"capacity": 0})["capacity"]
            quotient.add_edge(a, b, capacity=before + link["capacity"])
    return quotient
