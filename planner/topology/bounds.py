"""What no collective algorithm can beat on a graph of links: bounds from cuts.

A bound is seconds per byte of nccl-tests' S (one rank's buffer for all_reduce, all_to_all and
broadcast, the full output of all_gather, the full input of reduce_scatter). ``n`` GPUs take part;
``B(X)`` is what the links out of a set of vertices ``X`` carry, bytes/s in one direction. Links
carry that in both directions at once, so ``B(X)`` is also what comes in.

==============  =================================  ==============================================
op              seconds per byte, at least         over
==============  =================================  ==============================================
all_gather      k / (n B(X)), k of the GPUs in X   all cuts
reduce_scatter  the same, bytes going back         all cuts
broadcast       1 / B(X)                           all cuts
all_reduce      2 (m-1) / (B(X1) + ... + B(Xm))    all partitions into m parts
all_to_all      k (n-k) / (n B(X))                 single GPUs, the two cuts above and the units
                                                   that the caller names; the greatest over all
                                                   cuts is NP-hard to find
==============  =================================  ==============================================

all_gather: the shards of the k GPUs in X must leave it. Trees that reach the bound exist on every
graph (ForestColl, arXiv 2402.06787). Multicast in switches changes nothing: a cut counts each
shard once, however many copies are made behind it.

all_reduce: GPUs combine and copy, plain switches do not. Between m parts an element travels at
least m-1 times to be summed and m-1 times to be known everywhere (Patarasuk and Yuan, 2009,
doi:10.1016/j.jpdc.2008.09.002), each time out of a part. Without switches it is reached: it is
the number of spanning trees that fit (Nash-Williams and Tutte, 1961), up and down the same tree.
A reduce_scatter followed by an all_gather, equal shards, takes two all_gather bounds: the same on
regular machines, but more where one GPU is slower than the rest, so that is not a lower bound.

Vertices with ``multicast`` true are switches that copy and reduce (NVSwitch 3 and later, SHARP).
GPUs that reach one without passing another GPU are then never parted from each other in the
partitions; between them only the cuts remain: S out of each GPU and S in, for 2 (n-1)/n S.

The caller filters the graph to links that one communicator uses together (``links_of_kinds``).
Vertices that are not among ``workers`` only forward. Arithmetic is exact, in whole numbers.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import networkx as nx

from planner.errors import InvalidInputError
from planner.plan import Collective
from planner.topology.cuts import (
    contracted,
    least_cut,
    least_exit,
    worst_partition,
    worst_ratio_cut,
)
from planner.topology.document import TopologyDocument
from planner.topology.graph import node_graph

__all__ = [
    "Bound",
    "all_gather_bound",
    "all_reduce_bound",
    "all_to_all_bound",
    "broadcast_bound",
    "links_of_kinds",
    "node_bounds",
    "reduce_scatter_bound",
]


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound, and the bottleneck that it comes from.

    Attributes:
        seconds_per_byte: A call of S bytes takes at least S times this; 0 for a group of one.
        sides: The GPUs of each part that the bottleneck lies between; none for a group of one.
            Two, except for all_reduce. All_gather: the first has more to send than links for it.
        bytes_per_s: What leaves the first side; for all_reduce, what leaves all of them together.
    """

    seconds_per_byte: float
    sides: tuple[tuple[str, ...], ...]
    bytes_per_s: float


_NOTHING_TO_DO: Final = Bound(seconds_per_byte=0.0, sides=(), bytes_per_s=0.0)


@dataclass(frozen=True, slots=True)
class _Network:
    """Links with whole-number ``capacity``, in units of ``unit_bytes_per_s``; who takes part."""

    links: nx.Graph[str]
    gpus: tuple[str, ...]
    unit_bytes_per_s: Fraction

    def among(self, side: set[str]) -> tuple[str, ...]:
        """Return the GPUs of ``side``, in order."""
        return tuple(gpu for gpu in self.gpus if gpu in side)

    def bound(self, bytes_crossing: Fraction, capacity: int, *sides: tuple[str, ...]) -> Bound:
        """Return the bound of ``bytes_crossing``, per byte of S, over ``capacity``."""
        bytes_per_s = capacity * self.unit_bytes_per_s
        return Bound(float(bytes_crossing / bytes_per_s), sides, float(bytes_per_s))

    def split(self, side: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the GPUs inside and outside ``side``."""
        return self.among(side), self.among(set(self.gpus) - side)


def links_of_kinds(graph: nx.Graph[str], kinds: Iterable[str]) -> nx.Graph[str]:
    """Return a view of ``graph`` with all its vertices, and of its links those of ``kinds``."""
    wanted = frozenset(kinds)
    return nx.subgraph_view(graph, filter_edge=lambda a, b: graph.edges[a, b]["kind"] in wanted)


def node_bounds(document: TopologyDocument) -> dict[Collective, Bound]:
    """Return the bounds of all GPUs of the first node, over links that one communicator uses.

    NVLink or xGMI where they join all of them, else these and the ways through the host. Empty for
    a lone GPU and for ranks that are processes.
    """
    node, graph = document.node_type(0), node_graph(document)
    workers = node.workers()
    if len(workers) == 1 or node.count("process"):
        return {}
    for kinds in (("nvlink",), ("xgmi",), ("nvlink", "xgmi", "pcie", "c2c", "smp")):
        links = links_of_kinds(graph, kinds)
        if set(workers) <= nx.node_connected_component(links, workers[0]):
            return {
                "all_gather": all_gather_bound(links, workers),
                "all_reduce": all_reduce_bound(links, workers),
                "all_to_all": all_to_all_bound(links, workers),
            }
    return {}


def all_gather_bound(graph: nx.Graph[str], workers: Sequence[str]) -> Bound:
    """Return the least seconds per byte of the gathered output.

    Args:
        graph: Links with ``bandwidth_bytes_per_s`` in each direction, as of ``build_graph``.
        workers: The GPUs that take part.

    Raises:
        InvalidInputError: There is no worker, one is listed twice, is not in the graph or cannot
            be reached from the others, or a link has no bandwidth.

    A ring of four with links of 25 GB/s: 3/4 of the output enters a GPU by two links.

    >>> ring = nx.cycle_graph(["gpu0", "gpu1", "gpu2", "gpu3"])
    >>> nx.set_edge_attributes(ring, 25e9, "bandwidth_bytes_per_s")
    >>> round(1e9 * all_gather_bound(ring, list(ring)).seconds_per_byte, 4)
    0.015
    """
    network = _network(graph, workers)
    if len(workers) == 1:
        return _NOTHING_TO_DO
    cut = worst_ratio_cut(network.links, workers)
    inside, outside = network.split(cut.side)
    return network.bound(Fraction(len(inside), len(workers)), cut.capacity, inside, outside)


def reduce_scatter_bound(graph: nx.Graph[str], workers: Sequence[str]) -> Bound:
    """Return the least seconds per byte of the full input; here the first side must receive."""
    return all_gather_bound(graph, workers)


def broadcast_bound(graph: nx.Graph[str], workers: Sequence[str]) -> Bound:
    """Return the least seconds per byte, from whichever root: the least cut parts it from some."""
    network = _network(graph, workers)
    return _NOTHING_TO_DO if len(workers) == 1 else _least_cut_bound(network)


def all_reduce_bound(graph: nx.Graph[str], workers: Sequence[str]) -> Bound:
    """Return the least seconds per byte of the buffer; ``multicast`` switches reduce, too."""
    network = _network(graph, workers)
    if len(workers) == 1:
        return _NOTHING_TO_DO
    part_of = _parts_of_reducing_switches(graph, network)
    terminals = tuple(dict.fromkeys(part_of.get(gpu, gpu) for gpu in workers))
    bounds = [_least_cut_bound(network)] if part_of else []
    if len(terminals) > 1:
        parts, capacity = worst_partition(contracted(network.links, part_of), terminals)
        sides = [tuple(g for g in workers if part_of.get(g, g) in part) for part in parts]
        sides.sort(key=lambda side: workers.index(side[0]))
        bounds.append(network.bound(Fraction(2 * (len(parts) - 1)), capacity, *sides))
    return max(bounds, key=lambda bound: bound.seconds_per_byte)


def all_to_all_bound(
    graph: nx.Graph[str], workers: Sequence[str], units: Sequence[Sequence[str]] = ()
) -> Bound:
    """Return a lower bound on the seconds per byte of one rank's buffer.

    Args:
        graph: As for ``all_gather_bound``.
        workers: The GPUs that take part.
        units: More sides to try, of workers: those of a node, of a leaf. One with all of them
            has nothing to send.

    Raises:
        InvalidInputError: As for ``all_gather_bound``, or a unit has others than workers.
    """
    network = _network(graph, workers)
    _check_units(workers, units)
    if len(workers) == 1:
        return _NOTHING_TO_DO
    cuts = (worst_ratio_cut(network.links, workers), least_cut(network.links, workers))
    tried = [{gpu} for gpu in workers] + [cut.side for cut in cuts] + [set(unit) for unit in units]
    bounds = []
    for inside, outside in dict.fromkeys(network.split(side) for side in tried):
        if inside and outside:
            capacity = least_exit(network.links, inside, outside)
            crossing = Fraction(len(inside) * len(outside), len(workers))
            bounds.append(network.bound(crossing, capacity, inside, outside))
    return max(bounds, key=lambda bound: bound.seconds_per_byte)


def _least_cut_bound(network: _Network) -> Bound:
    cut = least_cut(network.links, network.gpus)
    return network.bound(Fraction(1), cut.capacity, *network.split(cut.side))


def _parts_of_reducing_switches(graph: nx.Graph[str], network: _Network) -> dict[str, str]:
    """Return the first GPU of its part for every switch that reduces and every GPU that joins it.

    In the argument for partitions everything that combines stands in some part. Whatever part
    such a switch is put in, the bound holds; with all GPUs around it, no choice is to be made.
    """
    gpus = set(network.gpus)
    joined: nx.Graph[str] = nx.Graph()
    for connected in nx.connected_components(graph.subgraph(set(graph) - gpus)):
        reducing = {vertex for vertex in connected if graph.nodes[vertex].get("multicast", False)}
        around = {gpu for vertex in connected for gpu in graph[vertex]} & gpus
        joined.add_edges_from((switch, gpu) for switch in reducing for gpu in around)
    return {
        member: network.among(part)[0]
        for part in nx.connected_components(joined)
        for member in part
    }


# ------------------------------------------------------------------------------- the input


def _network(graph: nx.Graph[str], workers: Sequence[str]) -> _Network:
    """Check the input and return it in whole numbers; a float is a fraction."""
    _check_workers(graph, workers)
    exact = {(a, b): _bandwidth(a, b, link) for a, b, link in graph.edges(data=True)}
    denominator = math.lcm(*(value.denominator for value in exact.values()))
    whole = {ends: int(value * denominator) for ends, value in exact.items()}
    divisor = math.gcd(*whole.values()) or 1
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(graph)
    links.add_edges_from((*ends, {"capacity": value // divisor}) for ends, value in whole.items())
    return _Network(links, tuple(workers), Fraction(divisor, denominator))


def _bandwidth(a: str, b: str, link: dict[str, Any]) -> Fraction:
    bandwidth = link.get("bandwidth_bytes_per_s", 0.0)
    if not 0 < bandwidth < math.inf:
        raise InvalidInputError(
            f"link {a}->{b}: bandwidth_bytes_per_s is {bandwidth}; must be finite and more than "
            "0; leave out a link that carries nothing",
            where="links",
        )
    return Fraction(bandwidth)


def _check_workers(graph: nx.Graph[str], workers: Sequence[str]) -> None:
    repeated = [worker for worker, count in Counter(workers).items() if count > 1]
    absent = [worker for worker in workers if worker not in graph]
    if not workers or repeated or absent:
        what = "is empty"
        if workers:
            what = (
                f"lists {repeated[0]} twice" if repeated else f"has {absent[0]}, not in the graph"
            )
        raise InvalidInputError(
            f"the group of {len(workers)} workers {what}; name GPUs of the graph, each once",
            where="workers",
        )
    reached = nx.node_connected_component(graph, workers[0])
    for worker in workers:
        if worker not in reached:
            raise InvalidInputError(
                f"no link of the graph leads from {workers[0]} to {worker}; add one, or keep "
                "links of more kinds",
                where="links",
            )


def _check_units(workers: Sequence[str], units: Sequence[Sequence[str]]) -> None:
    known = set(workers)
    for unit in units:
        for member in unit:
            if member not in known:
                raise InvalidInputError(
                    f"a unit of {len(unit)} has {member}, which is none of the {len(workers)} "
                    "workers; name workers only",
                    where="units",
                )
