"""The cluster as a networkx graph: every GPU, switch, CPU and NIC, every link.

Node attributes: ``kind`` (a ``ComponentKind``, or "switch"), and for parts of a host ``node``
(its number). Edge attributes: ``kind``, ``bandwidth_bytes_per_s`` in each direction, and
``latency_s``.

The parallel switches of one unit of a tier (of one rail of it, in the first tier of a rail-
optimised network) are one vertex, with the capacity of all of them.
"""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from collections.abc import Iterator
from typing import Any

import networkx as nx

from planner.topology.document import Network, TopologyDocument

__all__ = ["build_graph", "node_graph"]

Edge = tuple[str, str, dict[str, Any]]


def node_graph(document: TopologyDocument) -> nx.Graph[str]:
    """Return the graph of one node, its GPUs on the switches of the NVLink domain if any."""
    graph: nx.Graph[str] = nx.Graph(topology=document.name, num_nodes=1)
    _add_nodes(graph, document, [""])
    return graph


def build_graph(document: TopologyDocument, num_nodes: int | None = None) -> nx.Graph[str]:
    """Return the graph of ``num_nodes`` nodes; the parts of node 3 are called "n3/gpu0".

    Linear in the size of the cluster: 4,096 DGX H100 are 107,000 vertices.

    Raises:
        InvalidInputError: ``num_nodes`` is not a whole number from 1 to ``max_nodes``.
    """
    num_nodes = document.checked_num_nodes(num_nodes)
    graph: nx.Graph[str] = nx.Graph(topology=document.name, num_nodes=num_nodes)
    _add_nodes(graph, document, [f"n{i}/" for i in range(num_nodes)])
    if document.network is not None and num_nodes > 1:
        _add_network(graph, document, document.network, num_nodes)
    return graph


def _add_nodes(graph: nx.Graph[str], document: TopologyDocument, prefixes: list[str]) -> None:
    parts = [(name, c.kind) for c in document.node.components for name in c.names()]
    links = document.node_links()
    for index, prefix in enumerate(prefixes):
        graph.add_nodes_from((prefix + name, {"kind": kind, "node": index}) for name, kind in parts)
        graph.add_edges_from(
            (
                prefix + link.a,
                prefix + link.b,
                _edge(link.kind, link.bandwidth_bytes_per_s, link.latency_s),
            )
            for link in links
        )
        graph.add_edges_from(_domain_edges(document, index, prefix))
    for name, attributes in graph.nodes.items():
        if not attributes:
            graph.add_node(name, kind="nvswitch")


def _domain_edges(document: TopologyDocument, index: int, prefix: str) -> Iterator[Edge]:
    domain = document.nvlink_domain
    if domain is None:
        return
    for i in range(domain.num_switches):
        switch = f"domain{index // domain.num_nodes}/nvswitch{i}"
        for worker in document.node.workers():
            link = _edge("nvlink", domain.bandwidth_bytes_per_s, domain.latency_s)
            yield prefix + worker, switch, link


def _add_network(
    graph: nx.Graph[str], document: TopologyDocument, network: Network, num_nodes: int
) -> None:
    """Join the NICs: one vertex per switch unit, trunks with the capacity of what is below."""
    nics = [name for c in document.node.components if c.kind == "nic" for name in c.names()]
    below = [
        (f"n{node}/{nic}", node, rail) for node in range(num_nodes) for rail, nic in enumerate(nics)
    ]
    bandwidths = dict.fromkeys((name for name, _, _ in below), network.nic_bandwidth_bytes_per_s)
    latency_s = network.nic_latency_s
    for position, tier in enumerate(network.tiers):
        by_rail = network.layout == "rail" and position == 0
        above: dict[str, tuple[int, float]] = {}
        for name, node, rail in below:
            unit = 0 if tier.num_nodes is None else node // tier.num_nodes
            switch = f"{tier.name}{unit}" + (f"/rail{rail}" if by_rail else "")
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
