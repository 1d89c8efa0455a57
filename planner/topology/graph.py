"""The cluster as a networkx graph: every GPU, switch, CPU and NIC, every link.

Node attributes: ``kind`` (a ``ComponentKind``, or "switch"); for parts of a host ``node`` (its
number); for NVSwitches ``multicast``. Edge attributes: ``kind``, ``bandwidth_bytes_per_s`` in
each direction, and ``latency_s``. Weak links have what is left of them, broken ones are gone.

The parallel switches of one unit of a tier (of one rail of it, in the first tier of a rail-
optimised network) are one vertex, with the capacity of all of them.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx

from planner.topology.document import Impairment, Network, NodeType, TopologyDocument
from planner.topology.impair import NodeTrouble, impair
from planner.topology.units import domain_switches, first_switch, switch_name, unit_of

__all__ = ["build_graph", "node_graph"]

Edge = tuple[str, str, dict[str, Any]]


def node_graph(
    document: TopologyDocument, node: int = 0, found: NodeTrouble | None = None
) -> nx.Graph[str]:
    """Return the graph of one node, its GPUs on the switches of the NVLink domain if any.

    NICs have the attribute ``bytes_per_s``: their rate into the network, 0 when cut off.

    Args:
        document: Which cluster.
        node: Number of the node; parts are named without it.
        found: What is wrong with it.

    Raises:
        InvalidInputError: What is wrong is not with a part of this node.
    """
    graph: nx.Graph[str] = nx.Graph(topology=document.name, num_nodes=1)
    _add_nodes(graph, document, {node: ""})
    network, cables = document.network, {}
    if network is not None:
        cables = {nic: first_switch(network, node, rail) for nic, _, rail in _nics(graph)}
        edge = _edge(network.kind, network.nic_bandwidth_bytes_per_s, network.nic_latency_s)
        graph.add_edges_from((nic, switch, edge.copy()) for nic, switch in cables.items())
    impair(graph, found.links if found is not None else ())
    for nic, switch in cables.items():
        left = graph.get_edge_data(nic, switch, default={"bandwidth_bytes_per_s": 0.0})
        graph.nodes[nic]["bytes_per_s"] = left["bandwidth_bytes_per_s"]
    graph.remove_nodes_from(set(cables.values()))
    return graph


def build_graph(
    document: TopologyDocument, nodes: int | Sequence[int] | None = None
) -> nx.Graph[str]:
    """Return the graph of the first ``nodes`` nodes, or of those; n3's parts are "n3/gpu0".

    Linear in the size of the cluster: 4,096 DGX H100 are 107,000 vertices.

    What is wrong with nodes and switches that are not asked for is left out. GPUs that compute
    slower have the attribute ``compute_share``.

    Raises:
        InvalidInputError: ``nodes`` is not a whole number from 1 to ``max_nodes``.
    """
    if nodes is None or isinstance(nodes, int):
        nodes = range(document.checked_num_nodes(nodes))
    graph: nx.Graph[str] = nx.Graph(topology=document.name, num_nodes=len(nodes))
    _add_nodes(graph, document, {node: f"{document.host(node)}/" for node in nodes})
    if document.network is not None and len(nodes) > 1:
        _add_network(graph, document.network, nodes)
    _impair_what_is_there(graph, document, nodes)
    return graph


def _impair_what_is_there(
    graph: nx.Graph[str], document: TopologyDocument, nodes: Sequence[int]
) -> None:
    numbers = {document.host(node): node for node in nodes} if document.impairments else {}
    links: list[Impairment] = []
    for impairment in document.impairments:
        part = impairment.part or ""
        if part in numbers:
            workers = [f"{part}/{worker}" for worker in document.node_type(numbers[part]).workers()]
        else:
            kind = graph.nodes.get(part, {}).get("kind")
            workers = [part] if kind in ("gpu", "process") else []
        for worker in workers:
            share = graph.nodes[worker].get("compute_share", 1.0)
            graph.nodes[worker]["compute_share"] = min(share, impairment.factor)
        if not workers and all(end in graph for end in impairment.link or (part,)):
            links.append(impairment)
    impair(graph, links)


def _add_nodes(graph: nx.Graph[str], document: TopologyDocument, prefixes: dict[int, str]) -> None:
    """Add nodes by number, their parts named with the prefix."""
    shapes: dict[int, tuple[list[tuple[str, dict[str, Any]]], list[Edge]]] = {}
    for node, prefix in prefixes.items():
        kind = document.node_type(node)
        if id(kind) not in shapes:
            shapes[id(kind)] = _shape(kind)
        parts, links = shapes[id(kind)]
        graph.add_nodes_from((prefix + name, {**part, "node": node}) for name, part in parts)
        graph.add_edges_from((prefix + a, prefix + b, link) for a, b, link in links)
    _add_domains(graph, document, prefixes)


def _shape(kind: NodeType) -> tuple[list[tuple[str, dict[str, Any]]], list[Edge]]:
    """Return the parts and links of a type of node."""
    parts: list[tuple[str, dict[str, Any]]] = []
    for component in kind.components:
        more = {"multicast": component.multicast} if component.kind == "nvswitch" else {}
        parts += [(name, {"kind": component.kind, **more}) for name in component.names()]
    links = [
        (link.a, link.b, _edge(link.kind, link.bandwidth_bytes_per_s, link.latency_s))
        for link in kind.single_links()
    ]
    return parts, links


def _add_domains(
    graph: nx.Graph[str], document: TopologyDocument, prefixes: dict[int, str]
) -> None:
    domain = document.nvlink_domain
    if domain is None:
        return
    edge = _edge("nvlink", domain.bandwidth_bytes_per_s, domain.latency_s)
    for (node, prefix), unit in zip(prefixes.items(), unit_of(domain, [*prefixes]), strict=True):
        switches = domain_switches(domain, int(unit))
        graph.add_nodes_from(switches, kind="nvswitch", multicast=domain.multicast)
        graph.add_edges_from(
            (prefix + worker, switch, edge)
            for switch in switches
            for worker in document.node_type(node).workers()
        )


def _nics(graph: nx.Graph[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, node, position in the node) of every NIC."""
    rails: dict[int, int] = {}
    for name, part in graph.nodes.items():
        if part["kind"] == "nic":
            rail = rails.get(part["node"], 0)
            rails[part["node"]] = rail + 1
            yield name, part["node"], rail


def _add_network(graph: nx.Graph[str], network: Network, nodes: Sequence[int]) -> None:
    """Join the NICs: one vertex per switch unit, trunks with the capacity of what is below."""
    below = list(_nics(graph))
    bandwidths = dict.fromkeys((name for name, _, _ in below), network.nic_bandwidth_bytes_per_s)
    latency_s = network.nic_latency_s
    for position, tier in enumerate(network.tiers):
        units = dict(zip(nodes, unit_of(tier, nodes).tolist(), strict=True))
        above: dict[str, tuple[int, float]] = {}
        for name, node, rail in below:
            switch = switch_name(network, position, units[node], rail)
            bandwidth = bandwidths[name] / tier.oversubscription
            edge = _edge(network.kind, bandwidth, latency_s + tier.latency_s / 2)
            graph.add_edge(name, switch, **edge)
            first_node, total = above.get(switch, (node, 0.0))
            above[switch] = (first_node, total + bandwidth)
        graph.add_nodes_from(above, kind="switch", tier=tier.name)
        below = [(switch, node, 0) for switch, (node, _) in above.items()]
        bandwidths = {switch: total for switch, (_, total) in above.items()}
        latency_s = 0.0


def _edge(kind: str, bandwidth_bytes_per_s: float, latency_s: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "latency_s": latency_s,
    }
