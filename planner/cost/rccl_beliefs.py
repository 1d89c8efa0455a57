"""What RCCL believes: NCCL's formulas on AMD's own latencies, shares and corrections by size.

Tables 0, 4, 5 and 6 of rocm-systems (projects/rccl/src/graph/tuning.cc, 2026): any machine that is
not recognised, MI250X, MI300X, MI350X. On two nodes and more RCCL takes the algorithm that its
model says and then the protocol by ranges of bytes (src/misc/rccl_wrap).

Approximated: a ring over every link where RCCL has node models written by hand; no two channels
alike, as on a mesh; table 4 for MI250X without NICs too; AMD hosts; channels are those of rings,
where RCCL sets them by size. Left out: its direct all_gather, MSCCL, what gfx1200 does by itself.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cost.nccl_beliefs import (
    ByProtocol,
    Pair,
    num_steps,
    ring_latency_s,
    tree_latency_s,
)
from planner.cost.nccl_graphs import Reach
from planner.layout.candidates import Column
from planner.plan import Algorithm, Collective

__all__ = ["rccl_pairs", "rccl_protocol"]

_BASE_US: Final[ByProtocol] = (12.0, 12.0, 17.0)
_MAX_RINGS: Final = 32
_LL, _LL128, _SIMPLE = range(3)


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """One algorithm in a table; tuples by protocol.

    Attributes:
        link_us: A hop inside a node.
        network_us: A hop across nodes.
        shares: Of the graph's rate, up to two nodes and beyond.
        corrections: Of that, by floor(log2(size / 64)), 64 B to 4 GiB.
    """

    link_us: ByProtocol
    network_us: ByProtocol
    shares: tuple[ByProtocol, ByProtocol]
    corrections: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class _Table:
    """A tuning table.

    Attributes:
        tree: All_reduce only.
        ring: All operations.
        ranges_bytes: On two nodes and more, by operation: up to which LL goes, and from and up to
            which LL128 goes before it; beyond is Simple. Of a rank's share but for all_reduce. An
            operation that is missing keeps the model's protocol.
        ll_in_node_bytes: Of a rank's share, below which one node takes LL.
    """

    tree: _Algorithm
    ring: _Algorithm
    ranges_bytes: dict[str, tuple[float, float, float]]
    ll_in_node_bytes: dict[str, float]


_TENTH: Final = 0.1
# MI300X and MI350X share these.
_TREE_SMALL: Final = (
    *[_TENTH] * 6, 1, 1, 1, 1, 1, 0.6, 1, 0.9, 1, 1
)  # fmt: skip
_RING_SMALL: Final = (*[_TENTH] * 11, 1, 0.2, 1, 0.4, 0.4, 0.1, 0.2)
_CDNA_SHARES: Final = (((0.06, 0.06, 0.11), (0.06, 0.06, 0.59)), ((0.08, 0.08, 1),) * 2)

_TABLE_0: Final = _Table(
    tree=_Algorithm(
        (0.8, 1.4, 2.5),
        (11.8, 18.2, 20.8),
        ((0.04, 0.22, 0.91), (0.04, 0.22, 0.95)),
        (
            (
                *(0.1, 0.2, 0.1, 0.1, 0.9, 0.3, 0.4, 0.1, 0.2, 0.4, 0.2, 0.1, 0.3, 0.3),
                *(0.2, 0.2, 0.2, *[0.1] * 10),
            ),
            (
                *(0.1, 0.3, 1, 0.1, 0.5, 1, 0.9, 1, 1, 1, 0.3, 0.1, 0.4, 0.5, 0.5, 0.4, 0.4),
                *(0.3, 0.3, *[0.2] * 8),
            ),
            (
                *(0.2, 1, 0.1, 0.1, 0.7, 0.2, 0.4, 0.1, 0.1, 0.3, 0.4, 0.3, 0.6, 0.8),
                *(1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.9, 0.9, 0.9),
            ),
        ),
    ),
    ring=_Algorithm(
        (0.8, 2.2, 3.6),
        (9.5, 19.8, 15.1),
        ((0.04, 0.34, 1), (0.04, 0.34, 1)),
        (
            (
                *(*[0.1] * 5, 0.2, 0.4, 0.2, 0.3, 0.5, 0.3, 0.1, 0.5, 0.5, 0.3, 0.2, 0.2),
                *[0.1] * 10,
            ),
            (*[0.1] * 9, 0.3, *[1] * 6, 0.8, 0.7, 0.5, 0.4, 0.4, *[0.3] * 6),
            (
                *(1, 0.8, 0.2, 1, 1, 0.3, 1, 0.1, 0.1, 0.2, 0.2, 0.1, 0.5, 1, 0.8, 0.8),
                *(1, 0.9, *[1] * 9),
            ),
        ),
    ),
    ranges_bytes={},
    ll_in_node_bytes={},
)
_MI250X: Final = _Table(
    tree=_Algorithm(
        (0.8, 1.4, 2.5),
        (32.2, 34.4, 47.6),
        ((0.16, 1.09, 1.61), (0.16, 1.09, 1.08)),
        (
            (*[0.1] * 8, 1, 0.1, 0.1, 0.2, 0.4, 0.6, 0.5, *[0.1] * 12),
            (*[0.1] * 9, 0.2, 0.1, 0.1, 0.2, 1, 0.5, *[0.2] * 12),
            (
                *(*[1] * 8, 0.8, 0.4, 0.3, 0.3, 0.1, 0.1, 1, 1, 0.7, 0.5, 0.6, 0.5, 0.6, 0.6),
                *(0.5, 0.6, 0.6, 0.6, 0.7),
            ),
        ),
    ),
    ring=_Algorithm(
        (0.8, 2.2, 3.6),
        (35.4, 87.8, 209.2),
        ((0.15, 0.41, 1), (0.15, 0.41, 1)),
        (
            (*[0.1] * 11, 0.2, 0.2, 0.1, 0.3, 0.1, 0.1, 0.1, 0.2, *[0.1] * 8),
            (
                *(0.4, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.1, 0.3, 1, 1, 0.7, 0.8, 0.5),
                *(1, 1, 1, 1, 1, 0.9, 0.8, 0.5, 0.4, 0.3, 0.3),
            ),
            (
                *(*[0.1] * 9, 1, 1, 0.8, 0.5, 0.1, 0.7, 0.2, 0.4, 0.4, 0.6, 0.7, 0.9),
                *[1] * 6,
            ),
        ),
    ),
    ranges_bytes={},
    ll_in_node_bytes={},
)
_MI300X: Final = _Table(
    tree=_Algorithm(
        (0.9, 0.9, 2.3),
        (10.5, 10.5, 25.0),
        _CDNA_SHARES[0],
        (
            (*_TREE_SMALL, *[0.1] * 11),
            (*_TREE_SMALL, *[0.1] * 11),
            (*[0.1] * 15, 0.7, 1, 1, 1, 1, 1, 0.7, 0.7, 0.5, 0.6, 0.6, 0.6),
        ),
    ),
    ring=_Algorithm(
        (0.8, 0.8, 2.1),
        (9.5, 9.5, 320.0),
        _CDNA_SHARES[1],
        (
            (*_RING_SMALL, 0.2, *[0.1] * 8),
            (*_RING_SMALL, 0.2, *[0.1] * 8),
            (*[0.1] * 22, 0.7, 0.2, 1, 1, 1),
        ),
    ),
    ranges_bytes={
        "reduce_scatter": (655_360, 131_072, 3_211_264),
        "all_gather": (98_304, 98_304, 5_046_272),
        "all_reduce": (524_288, 524_288, 4_415_057),
        "reduce": (4_096, 4_096, 16_777_216),
        "broadcast": (8_192, 8_192, 33_554_432),
    },
    ll_in_node_bytes={"reduce_scatter": 352_128},
)
_MI350X: Final = _Table(
    tree=_Algorithm(
        (0.9, 0.9, 2.3),
        (10.5, 10.5, 25.0),
        _CDNA_SHARES[0],
        (
            (*_TREE_SMALL, *[0.1] * 11),
            (*_TREE_SMALL, 1, 1, 1, 2, 2, 1, 0.1, 0.9, 0.9, 0.1, 0.1),
            (*[0.1] * 15, 0.7, 1, *[0.1] * 5, 0.7, 0.15, 0.6, 0.7, 0.6),
        ),
    ),
    ring=_Algorithm(
        (0.8, 0.8, 2.1),
        (9.5, 9.5, 320.0),
        _CDNA_SHARES[1],
        (
            (*_RING_SMALL, 0.2, *[0.1] * 8),
            (*_RING_SMALL, *[0.1] * 4, 5.5, 0.1, 0.1, 1, 1),
            (*[0.1] * 20, 0.9, 0.1, 1, 0.1, 0.6, 1, 1),
        ),
    ),
    ranges_bytes={
        "reduce_scatter": (65_536, 65_536, 8_388_608),
        "all_gather": (65_536, 65_536, 8_388_608),
        "all_reduce": (262_144, 262_144, 70_640_910),
        "reduce": (16_383, 16_383, 16_777_216),
        "broadcast": (2_048, 2_048, 16_777_216),
    },
    ll_in_node_bytes={"reduce_scatter": 1_048_576, "all_gather": 88_448},
)
_TABLES: Final = {"cdna2": _MI250X, "cdna3": _MI300X, "cdna4": _MI350X}
_PCIE_US: Final[ByProtocol] = (2.2, 2.2, 5.7)
# Of a step between nodes, on AMD's CPUs; three times that by Simple.
_OVERHEAD_S: Final = 2e-6
# Beyond two nodes LL128 reaches this much further in an all_reduce.
_LL128_FACTOR: Final = 3.8


def rccl_pairs(
    op: Collective, degree: Column, reach: Reach, *, architecture: str, gpudirect: bool
) -> list[Pair]:
    """Return every pair in RCCL's order."""
    table = _TABLES.get(architecture, _TABLE_0)
    across = reach.nics * reach.nic_bytes_per_s
    total = np.where(reach.nodes == 1, reach.bytes_per_s, np.minimum(reach.bytes_per_s, across))
    alone = reach.gpus == 1
    links = np.where(alone, 1.0, reach.bytes_per_s) / np.where(alone, 1.0, reach.pair_bytes_per_s)
    rings = np.clip(np.floor(links + 1e-9), 1, _MAX_RINGS)
    ll128 = reach.is_direct & ((reach.nodes == 1) | gpudirect) & (architecture in _TABLES)
    in_node = (reach.nodes == 1) & (architecture in ("cdna3", "cdna4"))
    pairs = []
    names: tuple[Algorithm, ...] = ("tree", "ring") if op == "all_reduce" else ("ring",)
    for name in names:
        own = table.tree if name == "tree" else table.ring
        for protocol in (_LL, _LL128, _SIMPLE):
            shares = [by_nodes[protocol] for by_nodes in own.shares]
            rate = total * np.where(reach.nodes <= 2, *shares)
            rate = rate * (0.5 if name == "tree" else degree / num_steps(op, degree))
            if protocol == _LL and op in ("broadcast", "reduce"):
                rate = np.where(in_node, 1.65 * rate, rate)
            if protocol == _LL128:
                rate = np.where(ll128, rate, 0.0)
            if name == "tree" and protocol == _SIMPLE:
                rate = np.where(in_node, 0.0, rate)
            factors = own.corrections[protocol]
            pairs += [
                Pair(
                    name,
                    protocol,
                    _latency_s(op, degree, reach, table, name, protocol),
                    np.where(where, rate, 0.0),
                    2 * rings,
                    correction=correction,
                    edges=(correction[0], correction[-1]) if correction else (1.0, 1.0),
                )
                for where, correction in _corrected(name, reach, factors)
            ]
    return pairs


def _corrected(
    name: Algorithm, reach: Reach, factors: tuple[float, ...]
) -> list[tuple[Column, tuple[float, ...]]]:
    """Return the corrections, and where they apply: to trees, and to rings across nodes."""
    everywhere = np.ones(len(reach.nodes), dtype=bool)
    if name == "tree":
        return [(everywhere, factors)]
    return [(reach.nodes > 1, factors), (reach.nodes == 1, ())]


def _latency_s(
    op: Collective, degree: Column, reach: Reach, table: _Table, name: Algorithm, protocol: int
) -> Column:
    own = table.tree if name == "tree" else table.ring
    linked = reach.is_direct & (reach.gpus > 1)
    intra_s = np.where(linked, own.link_us[protocol], _PCIE_US[protocol]) * 1e-6
    alone = reach.gpus == 1
    inter_s = np.where(alone, table.tree.network_us[protocol], own.network_us[protocol]) * 1e-6
    if name == "tree":
        hops_s = tree_latency_s(reach, intra_s, inter_s)
    elif op in ("broadcast", "reduce"):
        by = table.tree if protocol == _SIMPLE else own
        link_us = np.where(linked, by.link_us[protocol], _PCIE_US[protocol])
        hop_us = np.where(reach.nodes == 1, link_us, by.network_us[protocol])
        hops_s = num_steps(op, degree) * hop_us * 1e-6
    else:
        overhead_s = _OVERHEAD_S * (3 if protocol == _SIMPLE else 1)
        hops_s = ring_latency_s(
            op, reach, degree, intra_s=intra_s, inter_s=inter_s, overhead_s=overhead_s
        )
    return _BASE_US[protocol] * 1e-6 + hops_s


def rccl_protocol(
    op: Collective,
    protocol: Column,
    *,
    degree: Column,
    nodes: Column,
    size_bytes: Column,
    architecture: str,
    ll128: Column,
) -> Column:
    """Return the protocol that RCCL runs, its ranges of bytes set over the model's, shape [rows].

    Args:
        op: Operation.
        protocol: That the model says.
        degree: Ranks.
        nodes: Nodes.
        size_bytes: Of the call.
        architecture: Of the GPUs.
        ll128: Whether LL128 is on.
    """
    table = _TABLES.get(architecture, _TABLE_0)
    share = size_bytes if op == "all_reduce" else size_bytes // degree
    in_node = table.ll_in_node_bytes.get(op, -1.0)
    protocol = np.where((nodes == 1) & (share <= in_node), _LL, protocol)
    if op not in table.ranges_bytes:
        return protocol
    ll_most, ll128_least, ll128_most = table.ranges_bytes[op]
    beyond = _LL128_FACTOR if op == "all_reduce" else 1.0
    by_ll128 = (
        ll128 & (share > ll128_least) & (share <= ll128_most * np.where(nodes > 2, beyond, 1))
    )
    ranged = np.where(by_ll128, _LL128, np.where(share <= ll_most, _LL, _SIMPLE))
    return np.where(nodes > 1, ranged, protocol)
