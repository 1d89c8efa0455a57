"""What the GPUs of one node reach: each other, level by level, and the network by its NICs.

Nothing is typed in: a level's rate is the least capacity between two units of the level below,
over the links that one communicator can use (NVLink or PCIe or the NICs, never their sum: two
H100 have 450 GB/s between them, not 450 + 63). Between two units of a ring every cut is crossed
once in each direction, so the minimum cut is what all GPUs can send at once.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

import networkx as nx
from networkx.algorithms.flow import build_residual_network, preflow_push

from planner.constants import LOOPBACK_SENDER_CORES
from planner.errors import InvalidInputError
from planner.topology.cuts import contracted
from planner.topology.document import NodeType
from planner.topology.exits import Exit, nic_exit
from planner.topology.fabric import LevelKind

__all__ = ["Inside", "NodeReach", "Rates", "flat_rates", "node_reach", "worst_rates"]

_HOST: Final = ("pcie", "smp", "c2c")
_PEER: Final = ("nvlink", "xgmi")
# A second node of an NVLink domain, as the first sees it: one worker on the same switches.
_OTHER_NODE: Final = "other node"


@dataclass(frozen=True, slots=True)
class Inside:
    """One level inside a node (or an NVLink domain of nodes).

    Attributes:
        name: "nvlink" or "xgmi", "pcie" (behind one PCIe switch), "cpu" (on one CPU), "smp"
            (across CPUs), "loopback".
        kind: Of its links.
        units: Its units, as workers in rank order.
        bytes_per_s: As ``Level.bytes_per_s``.
        alpha_s: Latency between the two workers of a unit that are farthest apart.
        ring: Bytes/s of each of m members s apart, ``[s - 1][m - 1]``; None behind switches.
        direct: The same when each sends to each other over the link between them.
        multicast: Whether its switches copy and reduce.
    """

    name: str
    kind: LevelKind
    units: tuple[tuple[str, ...], ...]
    bytes_per_s: float
    alpha_s: float
    ring: tuple[tuple[float, ...], ...] | None = None
    direct: tuple[tuple[float, ...], ...] | None = None
    multicast: bool = False


@dataclass(frozen=True, slots=True)
class NodeReach:
    """The levels inside a node, innermost first, and its way out; ``exit`` is None without NICs."""

    inside: tuple[Inside, ...]
    exit: Exit | None


def node_reach(
    node: NodeType,
    graph: nx.Graph[str],
    *,
    gpudirect: Literal["off", "pxb", "phb"],
    in_domain: bool,
) -> NodeReach:
    """Return what the workers of one node reach.

    Args:
        node: The workers, in rank order, and their cores.
        graph: Of the node, as ``planner.topology.graph.node_graph`` makes it.
        gpudirect: How far from its GPU a NIC may be to read its memory.
        in_domain: Whether NVSwitches outside the node join it to other nodes.

    Raises:
        InvalidInputError: Two workers have no link, or those that have are not listed in a row.
    """
    way_out = nic_exit(graph, node.workers(), gpudirect) if node.count("nic") else None
    # A NIC on the PCIe of two GPUs joins neither to the other.
    graph = graph.subgraph(name for name, part in graph.nodes.items() if part["kind"] != "nic")
    if node.count("process"):
        return NodeReach((_loopback(node, graph),), way_out)
    if in_domain:
        return NodeReach((_domain(node, graph),), way_out)
    return NodeReach(tuple(_levels(node, graph)), way_out)


def _loopback(node: NodeType, graph: nx.Graph[str]) -> Inside:
    """Processes copy with the cores they share: too few cores, less for each when all send."""
    workers = node.workers()
    assert node.cores is not None, "a node of processes has cores: TopologyDocument checks it"
    share = min(1.0, node.cores / (LOOPBACK_SENDER_CORES.value * len(workers)))
    rate = share * _exit_rate(graph, _singles(workers), ("loopback",))
    alpha_s = _farthest(graph, workers, ("loopback",))
    return Inside("loopback", "loopback", (workers,), rate, alpha_s)


def _domain(node: NodeType, graph: nx.Graph[str]) -> Inside:
    """NVSwitches outside the node: every GPU of the domain, seen from one node and one more GPU."""
    workers = node.workers()
    wide = graph.copy()
    wide.add_edges_from(
        (_OTHER_NODE, name, attributes)
        for name, attributes in graph[workers[0]].items()
        if graph.nodes[name]["kind"] == "nvswitch"
    )
    everyone = (*workers, _OTHER_NODE)
    rate = _exit_rate(wide, _singles(everyone), ("nvlink",))
    alpha_s = _farthest(wide, everyone, ("nvlink",))
    return Inside(
        "nvlink", "nvlink", (workers,), rate, alpha_s, multicast=_has_multicast(graph, workers)
    )


def _levels(node: NodeType, graph: nx.Graph[str]) -> Iterator[Inside]:
    """NVLink where there is NVLink; then what is behind one PCIe switch, one CPU, and the rest."""
    workers = node.workers()
    below = _singles(workers)
    for name, kind, joined, over in _stages(graph):
        units = _units(graph, workers, [*below, *joined], name)
        if len(units) == len(below):
            continue
        parts = [[unit for unit in below if unit[0] in members] for members in units]
        rate = min(_exit_rate(graph, inner, over) for inner in parts if len(inner) > 1)
        alpha_s = max(_farthest(graph, unit, over) for unit in units)
        if name in _PEER:
            yield Inside(name, kind, units, rate, alpha_s, *_meshes(graph, units, kind))
        else:
            yield Inside(name, kind, units, rate, alpha_s)
        below = units
    if len(workers) == 1:
        alone = _exit_rate(graph, below, (*_PEER, *_HOST))
        if alone == 0:
            raise InvalidInputError(
                f"topology {graph.graph['topology']!r}: {workers[0]} has no link that is up; add "
                "one, for example to the cpu over PCIe",
                where="node.links",
            )
        yield Inside("pcie", "pcie", below, alone, 0.0)
    elif len(below) > 1:
        raise InvalidInputError(
            f"topology {graph.graph['topology']!r}: no {' or '.join(_HOST)} link leads from "
            f"{below[0][0]} to {below[1][0]}; add one",
            where="node.links",
        )


Stage = tuple[str, LevelKind, list[set[str]], tuple[str, ...]]


def _stages(graph: nx.Graph[str]) -> Iterator[Stage]:
    """Yield (name, kind, sets of parts it joins, kinds of links) from the fastest to the last."""
    for peer in _PEER:
        yield peer, "nvlink" if peer == "nvlink" else "xgmi", _joined(graph, (peer,)), (peer,)
    no_cpu = graph.subgraph(n for n, part in graph.nodes.items() if part["kind"] != "cpu")
    yield "pcie", "pcie", _joined(no_cpu, ("pcie",)), _HOST
    yield "cpu", "pcie", _joined(graph, ("pcie", "c2c")), _HOST
    yield "smp", "pcie", _joined(graph, _HOST), _HOST


def _joined(graph: nx.Graph[str], kinds: Iterable[str]) -> list[set[str]]:
    return list(nx.connected_components(_links_of(graph, kinds)))


def _units(
    graph: nx.Graph[str],
    workers: Sequence[str],
    joined: Iterable[Iterable[str]],
    name: str,
) -> tuple[tuple[str, ...], ...]:
    """Return the workers in the groups that ``joined`` makes together, in rank order.

    Raises:
        InvalidInputError: The workers of a group are not listed one after the other.
    """
    union: nx.Graph[str] = nx.Graph()
    union.add_nodes_from(workers)
    for parts in joined:
        members = [part for part in parts if part in union or part in graph]
        nx.add_path(union, members)
    position = {worker: i for i, worker in enumerate(workers)}
    units = sorted(
        (
            tuple(sorted((part for part in group if part in position), key=position.__getitem__))
            for group in nx.connected_components(union)
            if any(part in position for part in group)
        ),
        key=lambda unit: position[unit[0]],
    )
    if [worker for unit in units for worker in unit] != list(workers):
        raise InvalidInputError(
            f"topology {graph.graph['topology']!r}: {name} joins the GPUs of a node as "
            f"{' | '.join(' '.join(unit) for unit in units)}; groups must be "
            "consecutive: list the GPUs in that order, or leave the odd links out",
            where="node.links",
        )
    return tuple(units)


def _singles(workers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((worker,) for worker in workers)


# -------------------------------------------------------------------------- links without switches

Rates = tuple[tuple[float, ...], ...]


def _meshes(
    graph: nx.Graph[str], units: Sequence[Sequence[str]], kind: LevelKind
) -> tuple[Rates | None, Rates | None, bool]:
    """Return ``ring``, ``direct`` and ``multicast`` of ``Inside``; the worst unit decides."""
    several = [unit for unit in units if len(unit) > 1]
    switched = [_has_switch(graph, unit) for unit in several]
    if all(switched) or max(map(len, several)) < 3:
        return None, None, all(_has_multicast(graph, unit) for unit in units)
    tables = [
        (flat_rates(len(unit), _exit_rate(graph, _singles(unit), (kind,))),) * 2
        if behind_switch
        else _mesh(graph, unit, kind)
        for unit, behind_switch in zip(several, switched, strict=True)
    ]
    ring, direct = (worst_rates([table[which] for table in tables]) for which in (0, 1))
    return ring, direct, False


def flat_rates(size: int, bytes_per_s: float) -> Rates:
    """Return rates of a unit in which every group has the same."""
    return ((bytes_per_s,) * size,) * size


def worst_rates(tables: Sequence[Rates]) -> Rates:
    """Return the least rate of every group, over the units that have such a group."""
    return tuple(
        tuple(min(cell) for cell in zip_longest(*rows, fillvalue=math.inf))
        for rows in zip_longest(*tables, fillvalue=())
    )


def _has_switch(graph: nx.Graph[str], unit: Sequence[str]) -> bool:
    return any(graph.nodes[n]["kind"] == "nvswitch" for n in graph[unit[0]])


def _has_multicast(graph: nx.Graph[str], unit: Sequence[str]) -> bool:
    switches = [n for n in graph[unit[0]] if graph.nodes[n]["kind"] == "nvswitch"]
    return bool(switches) and all(graph.nodes[n].get("multicast", False) for n in switches)


def _mesh(graph: nx.Graph[str], unit: Sequence[str], kind: LevelKind) -> tuple[Rates, Rates]:
    """Return the rates of members of one unit, by stride and number.

    Groups of an axis that fit a unit are aligned blocks, so ``members * stride`` divides the
    unit; other entries hold the least of all, which is that of some pair.
    """
    size = len(unit)
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for stride in range(1, size):
        for members in range(2, size // stride + 1):
            if size % (members * stride) == 0:
                groups = [
                    unit[start + first : start + members * stride : stride]
                    for start in range(0, size, members * stride)
                    for first in range(stride)
                ]
                ring = min(_ring_rate(graph, group, kind) for group in groups)
                direct = min(_direct_rate(graph, group, kind) for group in groups)
                found[stride, members] = ring, direct
    least = tuple(min(rates[which] for rates in found.values()) for which in (0, 1))
    ring_rates, direct_rates = (
        tuple(
            tuple(
                found.get((stride, members), least)[which] if members > 1 else found[1, size][which]
                for members in range(1, size + 1)
            )
            for stride in range(1, size + 1)
        )
        for which in (0, 1)
    )
    return ring_rates, direct_rates


def _ring_rate(graph: nx.Graph[str], group: Sequence[str], kind: LevelKind) -> float:
    """Return bytes/s of each member over links between members; over PCIe if those do not join."""
    own = graph.subgraph(group)
    if nx.is_connected(_links_of(own, (kind,))):
        return _exit_rate(own, _singles(group), (kind,))
    return _exit_rate(graph, _singles(group), _HOST)


def _direct_rate(graph: nx.Graph[str], group: Sequence[str], kind: LevelKind) -> float:
    """Return bytes/s of each member that sends equal parts to all others, each over its link.

    Pairs without a link share the PCIe of the member that has most of them.
    """
    links = _links_of(graph.subgraph(group), (kind,))
    capacities = [link["capacity"] for _, _, link in links.edges(data=True)]
    strangers = max(len(group) - 1 - degree for _, degree in links.degree)
    if strangers:
        capacities.append(_exit_rate(graph, _singles(group), _HOST) / strangers)
    return float(min(capacities)) * (len(group) - 1)


# --------------------------------------------------------------------------------------- flows


def _exit_rate(graph: nx.Graph[str], units: Sequence[Sequence[str]], kinds: Sequence[str]) -> float:
    """Return the least bytes/s per member between two of ``units`` over links of ``kinds``.

    Each unit is one vertex of the quotient graph. Between equal units the least cut lies between
    the first and another, because capacities are the same in both directions; of unequal ones
    each has its own. A lone unit has the capacity of its own links.
    """
    first = {member: unit[0] for unit in units for member in unit}
    quotient = contracted(_links_of(graph, kinds), first)
    names = [unit[0] for unit in units]
    if len(names) == 1:
        own = quotient.edges(names[0], data="capacity", default=0.0)
        return float(sum(capacity for _, _, capacity in own)) / len(units[0])
    residual = build_residual_network(quotient, "capacity")
    equal = len({len(unit) for unit in units}) == 1
    rates: dict[tuple[str, str], float] = {}
    for unit in units[:1] if equal else units:
        for other in names:
            if other != unit[0]:
                flow = preflow_push(quotient, unit[0], other, residual=residual, value_only=True)
                rates[unit[0], other] = float(flow.graph["flow_value"]) / len(unit)
    worst = min(rates, key=lambda pair: rates[pair])
    if rates[worst] == 0:
        raise InvalidInputError(
            f"topology {graph.graph['topology']!r}: no {' or '.join(kinds)} link leads from "
            f"{worst[0]} to {worst[1]}; add one",
            where="node.links",
        )
    return rates[worst]


def _farthest(graph: nx.Graph[str], workers: Sequence[str], kinds: Iterable[str]) -> float:
    """Return the latency between the two workers that are farthest apart."""
    links = _links_of(graph, kinds)
    return max(
        (
            distances[other]
            for worker in workers
            for distances in [
                nx.single_source_dijkstra_path_length(links, worker, weight="latency_s")
            ]
            for other in workers
            if other in distances
        ),
        default=0.0,
    )


def _links_of(graph: nx.Graph[str], kinds: Iterable[str]) -> nx.Graph[str]:
    """Return the links of ``kinds``, their ``capacity`` and ``latency_s``, and every vertex."""
    wanted = set(kinds)
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(graph)
    links.add_edges_from(
        (a, b, {"capacity": link["bandwidth_bytes_per_s"], "latency_s": link["latency_s"]})
        for a, b, link in graph.edges(data=True)
        if link["kind"] in wanted
    )
    return links
