"""Channels and speeds that NCCL's graph search gives a group: what its tuner starts from.

NCCL looks for rings, trees and NVLS heads over the links of one node by trying speeds from a fixed
list, fastest first, and keeps what carries most (NCCL 2.30.7, src/graph/search.cc). Inside a switch
the answer follows from how many channels of a speed fit on a GPU's links and on the NICs, which is
what is done here; a mesh without switches is taken for a switch of what its best rings carry.

NCCL counts links below their nominal rate (src/graph/topo.h). A *node* is what NVLink or PCIe
joins, an NVL72 rack too. Checked on logs: 8 H100 have 12 rings and trees of 30 GB/s and 8 heads of
40 (60 out), two A100 have 12 rings of 20 and trees of 40, 8 H800 with two NICs of 400 Gb/s have 4
rings of 24.

Assumed, since a ``Fabric`` does not say it: one NIC per GPU, or fewer where that would be slower
than 100 Gb/s; NICs near their GPUs; PCIe that is no slower than the NIC; trees balanced between two
GPUs of a node, except that a GPU alone has a plain one.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from planner.constants import ACHIEVED_FRACTION
from planner.cost.algorithms import members_below
from planner.cost.rates import rate_of
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.topology.fabric import NETWORK_KINDS, Fabric, Level

__all__ = ["AT_LEAST_HOPPER", "Graph", "Graphs", "Reach", "graphs_of", "reach_of"]

AT_LEAST_HOPPER: Final = ("hopper", "blackwell")

# What NCCL counts of a nominal rate: 20 of V100's 25 GB/s a link. RCCL 0cbce2a7 src/graph/topo.h
# for xGMI. PCIe 3.0 x16 is 12 of 15.75, and so on by generation.
_NVLINK_SEEN: Final = {"pascal": 18 / 20, "hopper": 20.6 / 25, "blackwell": 40.1 / 50}
_XGMI_SEEN: Final = {"gcn5": 24 / 46, "cdna1": 24 / 46, "cdna2": 36 / 50, "cdna4": 48 / 76.8}
_PCIE_SEEN: Final = 12 / 15.75
_SLOWEST_NIC: Final = 12.5e9

# Speeds tried inside a node and across nodes, GB/s.
_SPEEDS: Final[dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "": (
        (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
        (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    ),
    "hopper": (
        (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
        (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    ),
    "blackwell": (
        (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
        (
            *(96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3),
            *(2.4, 1.2, 0.24, 0.12),
        ),
    ),
}
# The search goes on while the next speed is more than this of the best one's.
_WORTH_TRYING: Final = 0.49
_MAX_RINGS: Final = 32
_MAX_HEADS: Final = 32
_MAX_DIRECT_HEADS: Final = 8
_SEARCHES_KEPT: Final = 256
# Where nothing fits, one channel in the order of the GPUs.
_FALLBACK_BYTES_PER_S: Final = 0.1e9


@dataclass(frozen=True, slots=True)
class Reach:
    """What a group finds in one node, shape [rows]; rates as NCCL counts them.

    Attributes:
        gpus: Members in one node.
        nodes: Nodes.
        bytes_per_s: Out of a GPU to others of the node; infinite for one alone.
        pair_bytes_per_s: Between two GPUs.
        nics: NICs of a node that the group uses.
        nic_bytes_per_s: One NIC; one for all rows.
        is_direct: Whether all its links inside are NVLink or xGMI.
        is_switched: Whether switches join them.
        has_multicast: Whether the switches copy and reduce.
    """

    gpus: Column
    nodes: Column
    bytes_per_s: Column
    pair_bytes_per_s: Column
    nics: Column
    nic_bytes_per_s: float
    is_direct: Column
    is_switched: Column
    has_multicast: Column


@dataclass(frozen=True, slots=True)
class Graph:
    """Channels of one pattern and the speed of one, shape [rows]."""

    channels: Column
    intra_bytes_per_s: Column
    inter_bytes_per_s: Column


@dataclass(frozen=True, slots=True)
class Graphs:
    """Of every pattern; without multicast, ``nvls`` has no channels."""

    ring: Graph
    tree: Graph
    nvls: Graph
    collnet: Graph


def reach_of(fabric: Fabric, group: Group, num_nics: int | None) -> Reach:
    """Return what NCCL sees of each group; ``num_nics`` of a node, None to assume them."""
    gpus = np.ones_like(group.degree)
    link = pair = np.full(len(gpus), np.inf)
    is_direct = is_switched = has_multicast = np.ones(len(gpus), dtype=bool)
    levels = zip(fabric.levels, members_below(group), group.members, strict=True)
    for level, below, inside in levels:
        if level.kind in NETWORK_KINDS:
            continue
        entered = inside > below
        seen = _seen(level, fabric)
        rates = [
            seen * rate_of(level, group, members, direct=direct, nominal=True)
            for members, direct in ((inside, False), (np.minimum(inside, 2), True))
        ]
        link = np.where(entered, np.minimum(link, below * rates[0]), link)
        pair = np.where(entered, np.minimum(pair, below * rates[level.mesh is not None]), pair)
        is_direct = is_direct & (~entered | (level.kind in ("nvlink", "xgmi")))
        is_switched = is_switched & (~entered | (level.kind == "nvlink" and level.mesh is None))
        has_multicast = has_multicast & (~entered | level.multicast)
        gpus = inside
    exits = [level for level in fabric.levels if level.kind in NETWORK_KINDS]
    node_bytes_per_s = _nominal(exits[0]) * fabric.gpus_per_node if exits else 0.0
    in_node = num_nics or max(
        1, min(fabric.gpus_per_node, int(node_bytes_per_s / _SLOWEST_NIC + 1e-9))
    )
    return Reach(
        gpus=gpus,
        nodes=-(-group.degree // gpus),
        bytes_per_s=link,
        pair_bytes_per_s=pair,
        nics=np.maximum(1, in_node * gpus // fabric.gpus_per_node),
        nic_bytes_per_s=node_bytes_per_s / in_node,
        is_direct=is_direct,
        is_switched=is_switched,
        has_multicast=has_multicast & (gpus > 1),
    )


def _nominal(level: Level) -> float:
    """Return the rate of the links themselves, before what a tier above lets through."""
    achieved = ACHIEVED_FRACTION[level.kind].value if level.measured else 1.0
    return level.bytes_per_s * level.oversubscription / achieved


def _seen(level: Level, fabric: Fabric) -> float:
    """Return what NCCL counts of a level inside a node, over its rate in the fabric."""
    achieved = ACHIEVED_FRACTION[level.kind].value if level.measured else 1.0
    shares = {
        "nvlink": _NVLINK_SEEN.get(fabric.architecture, 20 / 25),
        "xgmi": _XGMI_SEEN.get(fabric.architecture, 48 / 64),
        "pcie": _PCIE_SEEN,
    }
    return shares.get(level.kind, 1.0) / achieved


def graphs_of(architecture: str, reach: Reach) -> Graphs:
    """Return the graphs of NCCL's search for every row; the same question is searched once."""
    columns = (np.asarray(getattr(reach, name)).tolist() for name in Reach.__dataclass_fields__)
    asked = tuple(tuple(one) if isinstance(one, list) else one for one in columns)
    return _searched(architecture, asked)


@lru_cache(maxsize=_SEARCHES_KEPT)
def _searched(architecture: str, asked: tuple[Any, ...]) -> Graphs:
    columns: list[Any] = [np.array(one) if isinstance(one, tuple) else one for one in asked]
    reach = Reach(*columns)
    intra, inter = (np.array(list_) * 1e9 for list_ in _SPEEDS.get(architecture, _SPEEDS[""]))
    alone, across = (
        _search(architecture, speeds, reach, out) for speeds, out in ((intra, False), (inter, True))
    )
    one_node = reach.nodes == 1
    return Graphs(
        *(
            Graph(
                *(
                    np.where(one_node, getattr(a, name), getattr(b, name))
                    for name in Graph.__dataclass_fields__
                )
            )
            for a, b in zip(alone, across, strict=True)
        )
    )


def _search(
    architecture: str, speeds: Column, reach: Reach, out: bool
) -> tuple[Graph, Graph, Graph, Graph]:
    """Return ring, tree, NVLS and CollNet graphs, inside one node or out of it."""
    ring = _ring(architecture, speeds, reach, out)
    heads = _heads(speeds, reach, np.minimum(_MAX_HEADS, reach.gpus), out)
    nvls = _raised(heads, speeds, reach, out, inter=True)
    usable = reach.has_multicast & (architecture in AT_LEAST_HOPPER)
    return (
        ring,
        _tree(speeds, reach, ring.channels, out),
        replace(nvls, channels=np.where(usable, nvls.channels, 0)),
        _collnet(architecture, speeds, reach),
    )


def _per_nic(reach: Reach, speed: float) -> Column:
    """Return channels that the NICs of a node carry; NCCL books whole GB/s on a NIC."""
    booked = max(1e9, np.floor(speed / 1e9) * 1e9)
    each = np.floor(reach.nic_bytes_per_s / booked) if speed <= reach.nic_bytes_per_s else 0
    return reach.nics * each


def _ring(architecture: str, speeds: Column, reach: Reach, out: bool) -> Graph:
    channels = bw = np.zeros(len(reach.gpus))
    done = np.zeros(len(reach.gpus), dtype=bool)
    for speed, following in zip(speeds, (*speeds[1:], 0.0), strict=True):
        fits = np.minimum(_MAX_RINGS, np.floor(reach.bytes_per_s / speed + 1e-9))
        if out:
            fits = np.minimum(fits, _per_nic(reach, speed))
        fits = np.where(speed <= reach.pair_bytes_per_s, fits, 0)
        better = ~done & (fits * speed > channels * bw)
        channels, bw = np.where(better, fits, channels), np.where(better, speed, bw)
        done |= (channels == _MAX_RINGS) | (channels * bw >= reach.bytes_per_s)
        done |= (channels > 0) & (following <= _WORTH_TRYING * bw)
    none = channels == 0
    found = np.where(none, 1, channels)
    bw = np.where(none, _FALLBACK_BYTES_PER_S, bw)
    return _doubled(architecture, Graph(found, bw, bw))


def _doubled(architecture: str, graph: Graph) -> Graph:
    """Return the graph with twice the channels at half the speed, where they are few and fast."""
    channels, bw = graph.channels, graph.intra_bytes_per_s
    enough = (architecture in ("ada", *AT_LEAST_HOPPER)) & (bw < 50e9) & (channels > 4)
    twice = (bw >= 25e9) & ~enough & (2 * channels <= _MAX_RINGS)
    factor = np.where(twice, 2, 1)
    return Graph(channels * factor, bw / factor, graph.inter_bytes_per_s / factor)


def _tree(speeds: Column, reach: Reach, channels: Column, out: bool) -> Graph:
    """Return as many trees as rings; the last GPU of a chain sends to no other."""
    bw = np.full(len(channels), 0.0)
    links = _chain_links(reach)
    for speed in speeds:
        fits = (channels * speed <= links) & (speed <= reach.pair_bytes_per_s)
        if out:
            fits &= channels <= _per_nic(reach, speed)
        bw = np.where((bw == 0) & fits, speed, bw)
    bw = np.where(bw == 0, _FALLBACK_BYTES_PER_S, bw)
    return _raised(Graph(channels, bw, bw), speeds, reach, out, inter=False)


def _chain_links(reach: Reach) -> Column:
    return reach.bytes_per_s * reach.gpus / np.maximum(reach.gpus - 1, 1)


def _heads(speeds: Column, reach: Reach, most: Column, out: bool) -> Graph:
    """Return GPUs that pull from the switch, each once for every other and twice for itself."""
    channels = bw = np.zeros(len(reach.gpus))
    done = np.zeros(len(reach.gpus), dtype=bool)
    for speed, following in zip(speeds, (*speeds[1:], 0.0), strict=True):
        fits = np.minimum(most, np.floor(reach.bytes_per_s / speed + 1e-9) - 1)
        if out:
            fits = np.minimum(fits, reach.nics * (speed <= reach.nic_bytes_per_s))
        else:
            fits = np.where(fits == most, fits, 0)
        better = ~done & (fits > 0) & ((fits > channels) | (fits * speed > channels * bw))
        channels, bw = np.where(better, fits, channels), np.where(better, speed, bw)
        done |= (channels == most) | ((channels > 0) & (following <= _WORTH_TRYING * bw))
    return Graph(channels, bw, bw)


def _collnet(architecture: str, speeds: Column, reach: Reach) -> Graph:
    """Return heads of CollNetDirect: GPUs with a NIC, which sum what the others send them."""
    most = np.minimum(np.minimum(_MAX_DIRECT_HEADS, reach.gpus), reach.nics)
    bw = np.zeros(len(most))
    for speed in speeds:
        fits = (speed <= reach.nic_bytes_per_s) & (2 * speed <= reach.bytes_per_s)
        bw = np.where((bw == 0) & fits, speed, bw)
    heads = _doubled(architecture, Graph(most, bw, bw))
    intra, inter = heads.intra_bytes_per_s, heads.inter_bytes_per_s
    for speed in speeds[::-1]:
        grows = (speed > intra) & (intra < 2 * inter) & (2 * speed <= reach.bytes_per_s)
        intra = np.where(grows, speed, intra)
    return Graph(heads.channels, intra, inter)


def _raised(graph: Graph, speeds: Column, reach: Reach, out: bool, *, inter: bool) -> Graph:
    """Return the graph with one side sped up, to twice the other at most, as links allow."""
    low = graph.inter_bytes_per_s if inter else graph.intra_bytes_per_s
    other = graph.intra_bytes_per_s if inter else graph.inter_bytes_per_s
    for speed in speeds[::-1]:
        if inter:
            fits = np.asarray(not out or speed <= reach.nic_bytes_per_s)
        else:
            fits = (graph.channels * speed <= _chain_links(reach)) & (
                speed <= reach.pair_bytes_per_s
            )
        low = np.where((speed > low) & (low < 2 * other) & fits, speed, low)
    if inter:
        return replace(graph, inter_bytes_per_s=low)
    return replace(graph, intra_bytes_per_s=low)
