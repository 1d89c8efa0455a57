"""How messages leave a node: which GPU by which NIC, and what is in the way.

A NIC reads GPU memory itself (GPUDirect) when only PCIe switches, or an NVLink-C2C, lie between.
Otherwise a message is staged: GPU to host memory, then host memory to NIC. Staged traffic
crosses a link twice when GPU and NIC hang below it, so each way gets half.

Rings and trees enter and leave a node by the GPUs next to NICs, so any GPU's share may leave by
any NIC. When every GPU sends for itself (all-to-all), NVLink carries a message to the GPU next to
a NIC (PXN); without NVLink it is staged from where it is.
"""

from __future__ import annotations  # nx.DiGraph[str] is for the type checker only

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import networkx as nx

__all__ = ["Exit", "nic_exit"]

# Vertices that are no part of a node.
_SOURCE: Final = ">source"
_SINK: Final = ">sink"
# A part of the node once the message is in host memory.
_STAGED: Final = ">staged "
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
    up = [name for name, part in graph.nodes.items() if part.get("bytes_per_s", 0.0) > 0]
    if not up:
        return Exit(0.0, 0.0, 0.0, "peer")
    # The library splits evenly over its NICs and knows nothing of a weak one: it decides for all.
    nic_bytes_per_s = min(graph.nodes[name]["bytes_per_s"] for name in up)
    flows = _flow_graph(graph, workers, up, nic_bytes_per_s, gpudirect)
    total, _ = nx.maximum_flow(flows, _SOURCE, _SINK)
    distances = nx.multi_source_dijkstra_path_length(graph, set(up), weight="latency_s")
    return Exit(
        bytes_per_s=float(total) / len(workers),
        direct_bytes_per_s=_even_rate(flows, workers, float(total)),
        alpha_s=max(distances.get(worker, 0.0) for worker in workers),
        path=_path(graph, flows, workers, up),
    )


def _flow_graph(
    graph: nx.Graph[str],
    workers: Sequence[str],
    nics: Sequence[str],
    nic_bytes_per_s: float,
    gpudirect: Literal["off", "pxb", "phb"],
) -> nx.DiGraph[str]:
    """Return who can send to whom: parts as they are, and once more for staged messages."""
    flows: nx.DiGraph[str] = nx.DiGraph()
    flows.add_edges_from((_SOURCE, worker) for worker in workers)
    shared = _both_ways(graph)
    for a, b, link in graph.edges(data=True):
        for start, end in ((a, b), (b, a)):
            capacity = link["bandwidth_bytes_per_s"]
            if frozenset((a, b)) in shared:
                capacity /= 2
            if _carries(graph, start, end, link["kind"], gpudirect):
                flows.add_edge(start, end, capacity=capacity)
            if _carries_staged(graph, start, end, link["kind"]):
                flows.add_edge(_STAGED + start, _STAGED + end, capacity=capacity)
    for name, part in graph.nodes.items():
        if part["kind"] == "cpu":
            flows.add_edge(name, _STAGED + name)
    for nic in nics:
        flows.add_edge(_STAGED + nic, f">{nic}")
        if gpudirect != "off":
            flows.add_edge(nic, f">{nic}")
        flows.add_edge(f">{nic}", _SINK, capacity=nic_bytes_per_s)
    flows.add_nodes_from((_SOURCE, _SINK))
    return flows


def _carries(
    graph: nx.Graph[str], start: str, end: str, kind: str, gpudirect: Literal["off", "pxb", "phb"]
) -> bool:
    """Whether a message in GPU memory may take this step."""
    start_kind, end_kind = graph.nodes[start]["kind"], graph.nodes[end]["kind"]
    if kind == "nvlink":
        return True
    if end_kind in ("gpu", "process") or start_kind == "nic" or kind in ("smp", "xgmi"):
        return False
    if start_kind == "cpu":
        coherent = any(link["kind"] == "c2c" for link in graph[start].values())
        return end_kind != "cpu" and (gpudirect == "phb" or coherent)
    return True


def _carries_staged(graph: nx.Graph[str], start: str, end: str, kind: str) -> bool:
    """Whether a message in host memory may take this step: between CPUs, and down to a NIC."""
    start_kind, end_kind = graph.nodes[start]["kind"], graph.nodes[end]["kind"]
    if kind not in ("pcie", "c2c", "smp"):
        return False
    if start_kind == "cpu":
        return True
    return start_kind in ("pcie_switch", "gpu") and end_kind in ("pcie_switch", "nic")


def _both_ways(graph: nx.Graph[str]) -> set[frozenset[str]]:
    """Return the PCIe links below which, seen from the CPUs, both a GPU and a NIC hang."""
    pcie: nx.Graph[str] = nx.Graph()
    pcie.add_edges_from((a, b) for a, b, link in graph.edges(data=True) if link["kind"] == "pcie")
    pcie.add_edges_from((_SOURCE, n) for n in list(pcie) if graph.nodes[n]["kind"] == "cpu")
    if _SOURCE not in pcie:
        return set()
    below: dict[str, set[str]] = {}
    shared: set[frozenset[str]] = set()
    for parent, child in reversed(list(nx.bfs_edges(pcie, _SOURCE))):
        kinds = below.setdefault(child, set()) | {graph.nodes[child]["kind"]}
        below.setdefault(parent, set()).update(kinds)
        if {"gpu", "nic"} <= kinds:
            shared.add(frozenset((parent, child)))
    return shared


def _even_rate(flows: nx.DiGraph[str], workers: Sequence[str], total: float) -> float:
    """Return the rate that every worker can send at once: the worst cut over its workers.

    Newton's method on the ratio: a cut that the rate overloads gives the next, lower rate.
    """
    rate = total / len(workers)
    while rate > 0:
        for worker in workers:
            flows[_SOURCE][worker]["capacity"] = rate
        sent, (behind, _) = nx.minimum_cut(flows, _SOURCE, _SINK)
        num_behind = sum(worker in behind for worker in workers)
        if sent >= rate * len(workers) * (1 - _CLOSE) or not num_behind:
            break
        rate = (sent - rate * (len(workers) - num_behind)) / num_behind
    return float(rate)


def _path(
    graph: nx.Graph[str], flows: nx.DiGraph[str], workers: Sequence[str], nics: Sequence[str]
) -> Path:
    if graph.nodes[workers[0]]["kind"] == "process":
        return "peer"
    direct = flows.subgraph(n for n in flows if not n.startswith((_STAGED, _SINK)))
    reached = nx.descendants(direct, _SOURCE)
    near = [f">{nic}" in reached for nic in nics]
    if all(near):
        return "gpudirect"
    return "mixed" if any(near) else "staged"
