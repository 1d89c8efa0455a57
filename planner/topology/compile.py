"""From the document to the levels collectives see, by flows on one node.

Nothing is typed in: a level's rate is the least capacity between two units of the level below,
over the links that one communicator can use (NVLink or PCIe or the NICs, never their sum: two
H100 have 450 GB/s between them, not 450 + 63). Between two units of a ring every cut is crossed
once in each direction, so the minimum cut is what all GPUs can send at once. Flows are computed
on one node and on the quotient of units, never on the whole cluster.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import networkx as nx
from networkx.algorithms.flow import build_residual_network, preflow_push

from planner.constants import LOOPBACK_SENDER_CORES
from planner.errors import InvalidInputError
from planner.topology.document import LinkKind, Network, TopologyDocument
from planner.topology.fabric import Fabric, Level
from planner.topology.graph import node_graph

__all__ = ["compile_fabric"]

_NVLINK: Final[tuple[LinkKind, ...]] = ("nvlink",)
_HOST: Final[tuple[LinkKind, ...]] = ("pcie", "smp", "c2c")

# Names that no component can have.
_SOURCE: Final = ">source"
_SINK: Final = ">sink"


def compile_fabric(document: TopologyDocument, num_nodes: int | None = None) -> Fabric:
    """Return the fabric of ``num_nodes`` nodes of ``document``; None means its default.

    Args:
        document: Which cluster.
        num_nodes: Hosts, 1 to ``max_nodes``. Units need not be full.

    Raises:
        InvalidInputError: ``num_nodes`` is out of range, or NVLink joins the GPUs of a node in
            groups that are not equal and consecutive.
    """
    num_nodes = document.checked_num_nodes(num_nodes)
    num_gpus = num_nodes * document.gpus_per_node
    levels: list[Level] = []
    for level in _levels(document, num_gpus):
        if level.unit_size > (levels[-1].unit_size if levels else 1):
            levels.append(level)
        if level.unit_size >= num_gpus:
            break
    return Fabric(
        topology=document.name,
        library=document.library,
        device=document.device_name,
        num_gpus=num_gpus,
        gpus_per_node=document.gpus_per_node,
        cores_per_node=document.node.cores,
        levels=tuple(levels) or (level,),
    )


def _levels(document: TopologyDocument, num_gpus: int) -> Iterator[Level]:
    """Yield levels innermost first, as many as the document has."""
    graph = node_graph(document)
    if document.node.count("process"):
        yield _loopback_level(document, graph)
    else:
        yield from _gpu_levels(document, graph)
    if document.network is not None:
        yield from _network_levels(document, document.network, graph, num_gpus)


def _loopback_level(document: TopologyDocument, graph: nx.Graph[str]) -> Level:
    """Processes copy with the cores they share: too few cores, less for each when all send."""
    workers, cores = document.node.workers(), document.node.cores
    assert cores is not None, "a node of processes has cores: TopologyDocument checks it"
    units = [(worker,) for worker in workers]
    share = min(1.0, cores / (LOOPBACK_SENDER_CORES.value * len(workers)))
    return Level(
        name="loopback",
        kind="loopback",
        unit_size=len(workers),
        bytes_per_s=share * _exit_rate(graph, units, ("loopback",)),
        alpha_s=_hop_latency(graph, workers, ("loopback",)),
        source=_sources(document, ("loopback",)),
    )


def _gpu_levels(document: TopologyDocument, graph: nx.Graph[str]) -> Iterator[Level]:
    """NVLink where there is NVLink; PCIe between GPUs that it does not join."""
    workers, domain = document.node.workers(), document.nvlink_domain
    units: list[tuple[str, ...]] = [(worker,) for worker in workers]
    if domain is not None:
        graph = graph.copy()
        # A second node of the domain, seen from the first: one worker on the same switches.
        graph.add_edges_from(
            ("", switch, attributes)
            for _, switch, attributes in graph.edges(workers[0], data=True)
            if graph.nodes[switch]["kind"] == "nvswitch"
        )
        units.append(("",))
        yield Level(
            name="nvlink",
            kind="nvlink",
            unit_size=domain.num_nodes * len(workers),
            bytes_per_s=_exit_rate(graph, units, _NVLINK),
            alpha_s=_hop_latency(graph, [*workers, ""], _NVLINK),
            source=_sources(document, _NVLINK),
        )
        return
    islands = _islands(document, graph)
    if len(islands[0]) > 1:
        yield Level(
            name="nvlink",
            kind="nvlink",
            unit_size=len(islands[0]),
            bytes_per_s=min(
                _exit_rate(graph, [(worker,) for worker in island], _NVLINK) for island in islands
            ),
            alpha_s=max(_hop_latency(graph, island, _NVLINK) for island in islands),
            source=_sources(document, _NVLINK),
        )
    if len(islands) > 1 or len(workers) == 1:
        kinds = _HOST if len(workers) > 1 else (*_NVLINK, *_HOST)
        yield Level(
            name="pcie",
            kind="pcie",
            unit_size=len(workers),
            bytes_per_s=_exit_rate(graph, islands, kinds),
            alpha_s=_hop_latency(graph, workers, kinds),
            source=_sources(document, kinds),
        )


def _network_levels(
    document: TopologyDocument, network: Network, graph: nx.Graph[str], num_gpus: int
) -> Iterator[Level]:
    """One level per tier: what leaves a node by its NICs, thinned by every oversubscription."""
    workers = document.node.workers()
    nics = [name for name, data in graph.nodes.items() if data["kind"] == "nic"]
    bytes_per_s = _nic_rate(graph, workers, nics, network.nic_bandwidth_bytes_per_s)
    alpha_s = 2 * (_distance_to_nic(graph, workers, nics) + network.nic_latency_s)
    below = len(workers) * (document.nvlink_domain.num_nodes if document.nvlink_domain else 1)
    for tier in network.tiers:
        bytes_per_s /= tier.oversubscription
        alpha_s += tier.latency_s
        whole = below * math.ceil(num_gpus / below)
        unit_size = whole if tier.num_nodes is None else tier.num_nodes * len(workers)
        yield Level(
            name=tier.name,
            kind=network.kind,
            unit_size=unit_size,
            bytes_per_s=bytes_per_s,
            alpha_s=alpha_s,
            source="; ".join(dict.fromkeys((network.source, tier.source))),
        )
        below = unit_size


# ------------------------------------------------------------------------- flows on a node


def _islands(document: TopologyDocument, graph: nx.Graph[str]) -> list[tuple[str, ...]]:
    """Return the GPUs of a node in the groups that NVLink joins, in rank order."""
    workers = document.node.workers()
    reached = _links_of(graph, _NVLINK)
    reached.add_nodes_from(workers)
    found = [
        tuple(worker for worker in workers if worker in part)
        for part in nx.connected_components(reached)
    ]
    islands = sorted((i for i in found if i), key=lambda island: workers.index(island[0]))
    size = len(islands[0])
    blocks = [tuple(workers[i : i + size]) for i in range(0, len(workers), size)]
    if len(workers) % size or islands != blocks:
        raise InvalidInputError(
            f"topology {document.name!r}: NVLink joins the GPUs of a node as "
            f"{' | '.join(' '.join(island) for island in islands)}; groups must be equal and "
            "consecutive: list the GPUs in that order, or leave the odd links out",
            where="node.links",
        )
    return islands


def _exit_rate(
    graph: nx.Graph[str], units: Sequence[Sequence[str]], kinds: Sequence[LinkKind]
) -> float:
    """Return the least bytes/s per member between two of ``units`` over links of ``kinds``.

    Each unit is one vertex of the quotient graph. The least cut between any two lies between
    the first and another, because capacities are the same in both directions. A lone GPU has
    the capacity of its own links.
    """
    quotient = _quotient(_links_of(graph, kinds), units)
    names = [unit[0] for unit in units]
    if len(names) == 1:
        own = quotient.edges(names[0], data="capacity", default=0.0)
        return float(sum(capacity for _, _, capacity in own)) / len(units[0])
    residual = build_residual_network(quotient, "capacity")
    rates = {
        other: preflow_push(quotient, names[0], other, residual=residual, value_only=True).graph[
            "flow_value"
        ]
        for other in names[1:]
    }
    worst = min(rates, key=lambda other: float(rates[other]))
    if rates[worst] == 0:
        raise InvalidInputError(
            f"topology {graph.graph['topology']!r}: no {' or '.join(kinds)} link leads from "
            f"{names[0]} to {worst}; add one",
            where="node.links",
        )
    return float(rates[worst]) / len(units[0])


def _quotient(links: nx.Graph[str], units: Sequence[Sequence[str]]) -> nx.Graph[str]:
    """Return ``links`` with each unit contracted to its first member, capacities added."""
    representative = {member: unit[0] for unit in units for member in unit}
    quotient: nx.Graph[str] = nx.Graph()
    quotient.add_nodes_from(unit[0] for unit in units)
    for a, b, link in links.edges(data=True):
        a, b = representative.get(a, a), representative.get(b, b)
        if a != b:
            before = quotient.get_edge_data(a, b, default={"capacity": 0.0})["capacity"]
            quotient.add_edge(a, b, capacity=before + link["capacity"])
    return quotient


def _nic_rate(
    graph: nx.Graph[str], workers: Sequence[str], nics: Sequence[str], nic_bytes_per_s: float
) -> float:
    """Return bytes/s per worker out of a node, all sending; NVLink may carry to a far NIC."""
    links = _links_of(graph, ("nvlink", "loopback", *_HOST))
    links.add_edges_from((_SOURCE, worker) for worker in workers)
    links.add_edges_from(((nic, _SINK) for nic in nics), capacity=nic_bytes_per_s)
    return float(nx.maximum_flow_value(links, _SOURCE, _SINK)) / len(workers)


def _hop_latency(graph: nx.Graph[str], workers: Sequence[str], kinds: Iterable[LinkKind]) -> float:
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


def _distance_to_nic(graph: nx.Graph[str], workers: Sequence[str], nics: Sequence[str]) -> float:
    """Return the latency from the worker that has the longest way to its nearest NIC."""
    distances = nx.multi_source_dijkstra_path_length(graph, set(nics), weight="latency_s")
    return max(distances[worker] for worker in workers)


def _links_of(graph: nx.Graph[str], kinds: Iterable[LinkKind]) -> nx.Graph[str]:
    wanted = set(kinds)
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(graph)
    links.add_edges_from(
        (a, b, {"capacity": link["bandwidth_bytes_per_s"], "latency_s": link["latency_s"]})
        for a, b, link in graph.edges(data=True)
        if link["kind"] in wanted
    )
    return links


def _sources(document: TopologyDocument, kinds: Iterable[LinkKind]) -> str:
    """Return the sources of the links of ``kinds``, each once."""
    wanted = set(kinds)
    sources = [link.source for link in document.node.links if link.kind in wanted]
    if document.nvlink_domain is not None and "nvlink" in wanted:
        sources.append(document.nvlink_domain.source)
    return "; ".join(dict.fromkeys(sources))
