"""How messages leave a node: which GPU by which NIC, and what is in the way.

A NIC reads GPU memory itself (GPUDirect) when only PCIe switches, or an NVLink-C2C, lie between.
Otherwise a message is staged: GPU to host memory, then host memory to NIC. Staged traffic
crosses a link twice when GPU and NIC hang below it, so each way gets half.

Rings and trees enter and leave a node by the GPUs next to NICs, so any GPU's share may leave by
any NIC; the library splits evenly over the NICs it finds, so the one that gets least decides for
all. When every GPU sends for itself (all-to-all), NVLink carries a message to the GPU next to a
NIC (PXN); without NVLink it is staged from where it is.

A message climbs (NVLink, then towards the CPU), may cross to another CPU once it is in host
memory, and descends to a NIC. Each link is one edge, up or down, so that what NICs read and what
is staged share it.
"""

from __future__ import annotations  # nx.DiGraph[str] is for the type checker only

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import networkx as nx

__all__ = ["Exit", "nic_exit"]

# Vertices that are no part of a node.
_SOURCE: Final = ">source"
_SINK: Final = ">sink"
# A CPU once the message is in host memory, a part on the way down to a NIC, a NIC's port.
_STAGED: Final = ">staged "
_DOWN: Final = ">down "
_PORT: Final = ">port "
_CLOSE: Final = 1e-9

Path = Literal["gpudirect", "staged", "mixed", "peer"]


@dataclass(frozen=True, slots=True)
class Exit:
    """The way out of one node.

    Attributes:
        bytes_per_s: Per GPU, all sending, rings and trees; even over the NICs that are up.
        direct_bytes_per_s: The same when every GPU sends for itself.
        alpha_s: From the GPU that has the longest way to its nearest NIC.
        path: Whether NICs read GPU memory; "peer" where ranks are processes.
    """

    bytes_per_s: float
    direct_bytes_per_s: float
    alpha_s: float
    path: Path


def nic_exit(
    graph: nx.Graph[str], workers: Sequence[str], gpudirect: Literal["off", "pxb", "phb"]
) -> Exit:
    """Return the way out of a node; rates are 0 when no NIC is up.

    Args:
        graph: Of the node; NICs have the attribute ``bytes_per_s``.
        workers: GPUs or processes.
        gpudirect: How far from its GPU a NIC may be to read its memory.
    """
    up = {name: part["bytes_per_s"] for name, part in graph.nodes.items() if _is_up(part)}
    flows = _flow_graph(graph, workers, tuple(up), gpudirect)
    reached = nx.descendants(flows, _SOURCE)
    nics = [name for name in up if _PORT + name in reached]
    if not nics:
        return Exit(0.0, 0.0, 0.0, "peer")
    # The library knows nothing of a weak NIC.
    ports = [(_PORT + name, _SINK) for name in nics]
    nic_bytes_per_s = _even_rate(flows, ports, min(up[name] for name in nics))
    bytes_per_s = nic_bytes_per_s * len(nics) / len(workers)
    distances = nx.multi_source_dijkstra_path_length(graph, set(nics), weight="latency_s")
    return Exit(
        bytes_per_s=bytes_per_s,
        direct_bytes_per_s=_even_rate(flows, [(_SOURCE, w) for w in workers], bytes_per_s),
        alpha_s=max(distances.get(worker, 0.0) for worker in workers),
        path=_path(graph, flows, workers, nics),
    )


def _is_up(part: dict[str, Any]) -> bool:
    return bool(part.get("bytes_per_s", 0.0) > 0)


def _flow_graph(
    graph: nx.Graph[str],
    workers: Sequence[str],
    nics: Sequence[str],
    gpudirect: Literal["off", "pxb", "phb"],
) -> nx.DiGraph[str]:
    """Return who can send to whom: up from the workers, between CPUs, down to the NICs."""
    flows: nx.DiGraph[str] = nx.DiGraph()
    flows.add_nodes_from((_SOURCE, _SINK))
    flows.add_edges_from((_SOURCE, worker) for worker in workers)
    depth = _depths(graph)
    shared = _both_ways(graph, depth)
    for a, b, link in graph.edges(data=True):
        capacity = link["bandwidth_bytes_per_s"]
        if frozenset((a, b)) in shared:
            capacity /= 2
        for start, end in ((a, b), (b, a)):
            if edge := _step(graph, depth, start, end, link["kind"]):
                flows.add_edge(*edge, capacity=capacity)
    for name, part in graph.nodes.items():
        if part["kind"] == "cpu":
            flows.add_edge(name, _STAGED + name)
            flows.add_edge(_STAGED + name, _DOWN + name)
        if _turns(graph, name, gpudirect):
            flows.add_edge(name, _DOWN + name)
    for nic in nics:
        flows.add_edge(_DOWN + nic, _PORT + nic)
        flows.add_edge(_PORT + nic, _SINK)
    return flows


def _step(
    graph: nx.Graph[str], depth: dict[str, int], start: str, end: str, kind: str
) -> tuple[str, str] | None:
    """Return the edge of the flow graph that a message takes from ``start`` to ``end``, if any."""
    start_kind, end_kind = graph.nodes[start]["kind"], graph.nodes[end]["kind"]
    if kind == "nvlink":
        return start, end
    if kind == "xgmi" or start_kind == "nic":
        return None
    if start_kind == end_kind == "cpu":
        return _STAGED + start, _STAGED + end
    downward = depth.get(end, 0) > depth.get(start, 0)
    if downward and kind in ("pcie", "c2c"):
        return _DOWN + start, _DOWN + end
    return None if downward or end_kind in ("gpu", "process") else (start, end)


def _turns(graph: nx.Graph[str], name: str, gpudirect: Literal["off", "pxb", "phb"]) -> bool:
    """Whether a message in GPU memory may turn down to a NIC at a part of the node."""
    if gpudirect == "off":
        return False
    if graph.nodes[name]["kind"] == "cpu":
        return gpudirect == "phb" or any(e["kind"] == "c2c" for e in graph[name].values())
    return graph.nodes[name]["kind"] != "process"


def _depths(graph: nx.Graph[str]) -> dict[str, int]:
    """Return how many PCIe and C2C links lie between each part and the nearest CPU."""
    host = graph.edge_subgraph(
        (a, b) for a, b, link in graph.edges(data=True) if link["kind"] in ("pcie", "c2c")
    )
    cpus = [name for name in host if graph.nodes[name]["kind"] == "cpu"]
    return {name: depth for depth, layer in enumerate(nx.bfs_layers(host, cpus)) for name in layer}


def _both_ways(graph: nx.Graph[str], depth: dict[str, int]) -> set[frozenset[str]]:
    """Return the links below which, seen from the CPUs, both a GPU and a NIC hang."""
    below: dict[str, set[str]] = {}
    shared: set[frozenset[str]] = set()
    for child in sorted(depth, key=depth.__getitem__, reverse=True):
        kinds = below.setdefault(child, set()) | {graph.nodes[child]["kind"]}
        for parent, link in graph[child].items():
            if link["kind"] in ("pcie", "c2c") and depth.get(parent) == depth[child] - 1:
                below.setdefault(parent, set()).update(kinds)
                if {"gpu", "nic"} <= kinds:
                    shared.add(frozenset((parent, child)))
    return shared


def _even_rate(
    flows: nx.DiGraph[str], edges: Sequence[tuple[str, str]], most_bytes_per_s: float
) -> float:
    """Return the rate that all of ``edges`` can carry at once: the worst cut over those behind it.

    Newton's method on the ratio: a cut that the rate overloads gives the next, lower rate. Leaves
    the edges with that capacity.
    """
    rate = most_bytes_per_s
    while True:
        for edge in edges:
            flows.edges[edge]["capacity"] = rate
        sent, (behind, _) = nx.minimum_cut(flows, _SOURCE, _SINK)
        num_cut = sum(start in behind and end not in behind for start, end in edges)
        if sent >= rate * len(edges) * (1 - _CLOSE) or num_cut == len(edges):
            return float(rate)
        others = sent - rate * num_cut
        rate = others / (len(edges) - num_cut) if others > _CLOSE * sent else 0.0


def _path(
    graph: nx.Graph[str], flows: nx.DiGraph[str], workers: Sequence[str], nics: Sequence[str]
) -> Path:
    if graph.nodes[workers[0]]["kind"] == "process":
        return "peer"
    read = flows.subgraph(n for n in flows if not n.startswith(_STAGED) and n != _SINK)
    reached = nx.descendants(read, _SOURCE)
    near = [_PORT + nic in reached for nic in nics]
    if all(near):
        return "gpudirect"
    return "mixed" if any(near) else "staged"
