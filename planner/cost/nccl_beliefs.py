"""What NCCL believes of every algorithm and protocol: a latency and a rate by graph and group.

NCCL 2.30.7, src/graph/tuning.cc (tables, rates, latencies, what is enabled) and src/enqueue.cc
(channels). Of its two CollNet algorithms both stand here, under one name. With p GPUs in a node, n
in all, ``nsteps`` is 2 (n - 1) of an all_reduce, n - 1 of all_gather and reduce_scatter, n else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from planner.cost.nccl_graphs import AT_LEAST_HOPPER, Graph, Graphs, Reach
from planner.layout.candidates import Column
from planner.plan import Algorithm, Collective

__all__ = [
    "Cpu",
    "Pair",
    "log2_floor",
    "nccl_pairs",
    "num_steps",
    "ring_latency_s",
    "tree_latency_s",
]

Cpu = Literal["intel", "amd", "arm"]
# LL, LL128, Simple.
ByProtocol: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """One algorithm by one protocol, for every distinct group; shape [groups] but for tables.

    Attributes:
        algorithm: Which.
        protocol: Index into LL, LL128, Simple.
        latency_s: Before the first byte.
        bytes_per_s: Of the call's size; where it is not above zero the pair is off.
        channels: The most it takes.
        bytes_per_channel: Below which it takes fewer; zero: it never does.
        correction: Factors of the rate by floor(log2(size / 64)), from zero on.
        edges: Factors below and above ``correction``.
        plateau_bytes: Size from which ``plateau`` multiplies the latency.
        plateau: That factor.
    """

    algorithm: Algorithm
    protocol: int
    latency_s: Column
    bytes_per_s: Column
    channels: Column
    bytes_per_channel: Column | float = 0.0
    correction: Sequence[float] = ()
    edges: tuple[float, float] = (1.0, 1.0)
    plateau_bytes: Column | None = None
    plateau: float = 1.0


_OFF: Final = (0.0, 0.0, 0.0)
# Microseconds: before anything; of a hop over NVLink, over PCIe, over the network.
_BASE_US: Final[dict[str, ByProtocol]] = {
    "tree": (6.8, 14.0, 8.4),
    "ring": (6.6, 14.0, 8.4),
    "collnet_direct": _OFF,
    "collnet_chain": _OFF,
    "nvls": _OFF,
    "nvls_tree": _OFF,
    "pat": (8.0, 8.0, 8.0),
}
_NVLINK_US: Final[dict[str, ByProtocol]] = {
    "tree": (0.6, 1.25, 4.0),
    "ring": (0.6, 1.9, 3.4),
    "collnet_direct": (0, 0, 3.7),
    "collnet_chain": (0, 0, 2.8),
    "nvls": (0, 0, 25.0),
    "nvls_tree": (0, 0, 25.0),
    "pat": (0, 0, 4.0),
}
_PCIE_US: Final[dict[str, ByProtocol]] = {
    "tree": (1.0, 1.9, 4.0),
    "ring": (1.0, 2.5, 5.7),
    "collnet_direct": (0, 0, 3.7),
    "collnet_chain": (0, 0, 2.8),
    "nvls": _OFF,
    "nvls_tree": _OFF,
    "pat": (0, 0, 4.0),
}
_NETWORK_US: Final[dict[str, ByProtocol]] = {
    "tree": (5.0, 8.5, 14.0),
    "ring": (2.7, 4.0, 14.0),
    "collnet_direct": (0, 0, 31.0),
    "collnet_chain": (0, 0, 30.0),
    "nvls": (0, 0, 18.0),
    "nvls_tree": (0, 0, 20.9),
    "pat": (0, 0, 14.0),
}
# GB/s on one, two, more nodes; rows: Volta, Ampere, Hopper, Blackwell. Of LL the row is the CPU's
# beyond one node: Intel and Arm take Volta's, AMD Ampere's.
_LL_MOST: Final = np.array(
    [[39.0, 39.0, 20.4], [87.7, 22.5, 19.0], [141.0, 45.0, 35.0], [282.0, 90.0, 70.0]]
)
_RING_LL128: Final = np.array([[20.0] * 3, [20.0] * 3, [36.7] * 3, [40.0] * 3])
_TREE_LL128: Final = np.array([[20.0] * 3, [20.0] * 3, [36.7, 36.7, 29.0], [55.6, 31.67, 20.0]])
_TREE: Final = np.array(
    [[26.5, 18.5, 10.0], [24.0, 23.6, 17.8], [38.7, 41.4, 36.0], [70.0, 42.8, 24.0]]
)
_NVLS_TREE: Final = np.array(
    [[26.5, 18.5, 10.0], [24.0, 23.6, 17.8], [0.0, 57.7, 45.5], [0.0, 96.0, 80.0]]
)
_NVLS_EFFICIENCY: Final = (0.0, 0.0, 0.85, 0.74)
# By floor(log2(size / 64)); the tree's ends one short of the table.
_TREE_CORRECTION: Final[tuple[tuple[float, ...], ...]] = (
    (1, 1, 1, 1, 0.9, 0.8, *[0.7] * 4, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, *[1.0] * 5),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *[0.6] * 6, 0.8, *[0.9] * 4, 1, 1, 1),
    (*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, *[0.5] * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
)
_THREADS: Final[ByProtocol] = (512, 640, 512)
_BYTES_PER_THREAD: Final[ByProtocol] = (8, 8, 64)
_COLLNET_BYTES_PER_THREAD: Final = 512
_SLOW_RING_BYTES_PER_S: Final = 12e9
_MAX_CHANNELS: Final = 64
_NO_LL128: Final = ("kepler", "pascal")
_LL, _LL128, _SIMPLE = range(3)


def log2_floor(values: Column) -> Column:
    """Return floor(log2(values)), -1 for 0.

    >>> log2_floor(np.array([0, 1, 3, 4])).tolist()
    [-1, 0, 1, 2]
    """
    return np.frexp(values)[1] - 1


def num_steps(op: Collective, degree: Column) -> Column:
    """Return NCCL's ``nsteps``, at least 1: a group of one takes none and makes no call."""
    between = np.maximum(degree - 1, 1)
    steps = {"all_reduce": 2 * between, "all_gather": between, "reduce_scatter": between}
    return np.asarray(steps.get(op, degree))


def ring_latency_s(
    op: Collective,
    reach: Reach,
    degree: Column,
    *,
    intra_s: Column,
    inter_s: Column,
    overhead_s: float,
) -> Column:
    """Return seconds of a ring's steps: all of all_reduce, all_gather and reduce_scatter."""
    passes = 2 if op == "all_reduce" else 1
    crossing = passes * (reach.nodes - 1)
    inside_s = np.maximum(intra_s, np.where(reach.nodes > 1, overhead_s, 0.0))
    return (num_steps(op, degree) - crossing) * inside_s + crossing * inter_s


def tree_latency_s(reach: Reach, intra_s: Column, inter_s: Column) -> Column:
    """Return seconds of a tree's steps up and down: chains in nodes, a double tree across."""
    return 2 * ((reach.gpus - 1) * intra_s + log2_floor(reach.nodes) * inter_s)


@dataclass(frozen=True, slots=True)
class _Setting:
    """All that the pairs of one call share."""

    op: Collective
    degree: Column
    reach: Reach
    graphs: Graphs
    row: int
    at_least_hopper: bool
    is_x86: bool
    cpu: Cpu
    net_latency_s: float
    size_column: Column
    channels: Column

    def capped(self, table: Column, graph: Graph) -> Column:
        """Return bytes/s of all channels at the most that one of them carries."""
        return graph.channels * 1e9 * table[self.row, self.size_column]

    def to_call_rate(self, algorithm: str, bus_bytes_per_s: Column) -> Column:
        """Return bytes of the call per second."""
        if algorithm != "ring" and self.op in ("all_gather", "reduce_scatter"):
            return bus_bytes_per_s
        if algorithm in ("ring", "nvls", "nvls_tree"):
            return bus_bytes_per_s * self.degree / num_steps(self.op, self.degree)
        return bus_bytes_per_s * 0.5

    def hop_s(self, algorithm: str, protocol: int) -> tuple[Column, Column]:
        """Return seconds of a hop inside a node and across, the flush of Simple included."""
        over_nvlink = self.reach.is_direct & (self.reach.gpus > 1)
        intra = np.where(
            over_nvlink, _NVLINK_US[algorithm][protocol], _PCIE_US[algorithm][protocol]
        )
        alone = self.reach.gpus == 1
        inter = np.where(alone, _NETWORK_US["tree"][protocol], _NETWORK_US[algorithm][protocol])
        flushes = 2 if protocol == _SIMPLE else 1
        return intra * 1e-6, inter * 1e-6 + flushes * self.net_latency_s


def nccl_pairs(
    op: Collective,
    degree: Column,
    reach: Reach,
    graphs: Graphs,
    *,
    architecture: str,
    gpudirect: bool,
    cpu: Cpu,
    net_latency_s: float,
    sharp: bool,
    nvls: bool,
) -> list[Pair]:
    """Return every pair in NCCL's order, which decides between equals.

    Args:
        op: One of the five that NCCL chooses for.
        degree: Ranks of every group, shape [groups]; likewise what follows.
        reach: What it finds in a node.
        graphs: Of the search.
        architecture: Of the GPUs; one that is not known counts as Ampere.
        gpudirect: Whether NICs read GPU memory. Taken for near enough for LL128 across nodes, which
            wants a NIC behind the GPU's PCIe switch, or from Hopper on one that an NVLink reaches.
        cpu: Of the hosts.
        net_latency_s: That the network plugin reports.
        sharp: Whether the network's switches reduce.
        nvls: Whether NVLS is on.
    """
    at_least_hopper = architecture in AT_LEAST_HOPPER
    setting = _Setting(
        op=op,
        degree=degree,
        reach=reach,
        graphs=graphs,
        row=_row(architecture),
        at_least_hopper=at_least_hopper,
        is_x86=cpu != "arm",
        cpu=cpu,
        net_latency_s=net_latency_s,
        size_column=np.minimum(reach.nodes, 3) - 1,
        channels=_channels(graphs, reach, at_least_hopper, sharp),
    )
    may_ll128 = reach.is_direct & ((reach.nodes == 1) | gpudirect) & (architecture not in _NO_LL128)
    several = reach.nodes > 1
    kinds = (_tree, _ring) if op == "all_reduce" else (_ring,)
    pairs = [kind(setting, protocol) for kind in kinds for protocol in (_LL, _LL128, _SIMPLE)]
    pairs = [_only_where(p, may_ll128) if p.protocol == _LL128 else p for p in pairs]
    if op in ("broadcast", "reduce"):
        return pairs
    if sharp:
        pairs.append(_only_where(_collnet_direct(setting), several & reach.is_switched))
        if op == "all_reduce":
            pairs.append(_only_where(_collnet_chain(setting), several))
    if nvls:
        # Sums across nodes need the network's switches; so do its gathers, a head for each GPU.
        enough = (op == "all_reduce") | (
            (reach.gpus <= 32) & (~several | (graphs.nvls.channels >= reach.gpus))
        )
        pairs.append(_only_where(_nvls(setting), (~several | sharp) & enough))
        if op == "all_reduce":
            pairs.append(_only_where(_nvls_tree(setting), several))
    if op != "all_reduce":
        pairs.append(_only_where(_pat(setting), several & (reach.gpus == 1)))
    return pairs


def _row(architecture: str) -> int:
    rows = {"kepler": 0, "pascal": 0, "volta": 0, "turing": 0, "hopper": 2, "blackwell": 3}
    return rows.get(architecture, 1)


def _only_where(pair: Pair, enabled: Column) -> Pair:
    return replace(pair, bytes_per_s=np.where(enabled, pair.bytes_per_s, 0.0))


def _channels(graphs: Graphs, reach: Reach, at_least_hopper: bool, sharp: bool) -> Column:
    """Return channels of the communicator: twice the rings, and more where those are few."""
    several = reach.nodes > 1
    channels = np.minimum(_MAX_CHANNELS, 2 * graphs.ring.channels)
    tree = graphs.tree
    more = several & (reach.gpus > 1) & (tree.intra_bytes_per_s > tree.inter_bytes_per_s)
    if sharp:
        channels = np.where(more, np.minimum(_MAX_CHANNELS, channels + channels // 2), channels)
    few = at_least_hopper & several & (graphs.ring.intra_bytes_per_s > 45e9) & (channels < 16)
    return np.where(few, 2 * channels, channels)


def _graph_bytes_per_s(setting: _Setting, graph: Graph) -> Column:
    """Return bytes/s of all channels; up to two nodes the speed inside them counts."""
    bw = np.where(setting.reach.nodes <= 2, graph.intra_bytes_per_s, graph.inter_bytes_per_s)
    return graph.channels * bw


def _ll_most(setting: _Setting) -> Column:
    row = np.where(setting.reach.nodes == 1, setting.row, 1 if setting.cpu == "amd" else 0)
    return 1e9 * _LL_MOST[row, setting.size_column]


def _ring(setting: _Setting, protocol: int) -> Pair:
    graph, reach, op = setting.graphs.ring, setting.reach, setting.op
    bus = _graph_bytes_per_s(setting, graph)
    threads = np.full(len(bus), _THREADS[protocol])
    bytes_per_thread = np.full(len(bus), _BYTES_PER_THREAD[protocol])
    if protocol == _LL:
        bus = np.minimum(_ll_most(setting), 0.5 * bus)
        bytes_per_thread = bytes_per_thread * setting.degree
    elif protocol == _LL128:
        bus = np.minimum(0.92 * bus, setting.capped(_RING_LL128, graph))
    else:
        slow = graph.channels * graph.intra_bytes_per_s <= _SLOW_RING_BYTES_PER_S
        threads = np.where(slow, 256, threads)
    intra_s, inter_s = setting.hop_s("ring", protocol)
    if op in ("broadcast", "reduce"):
        latency_s = _chain_latency_s(setting, protocol)
    else:
        overhead_s = {"intel": 1e-6, "amd": 2e-6, "arm": 1e-6}[setting.cpu]
        overhead_s *= 3 if protocol == _SIMPLE else 1
        latency_s = ring_latency_s(
            op, reach, setting.degree, intra_s=intra_s, inter_s=inter_s, overhead_s=overhead_s
        )
    flattens = op == "all_reduce" and protocol == _SIMPLE
    plateau_bytes = 64.0 * setting.channels * setting.degree
    return Pair(
        "ring",
        protocol,
        _BASE_US["ring"][protocol] * 1e-6 + latency_s,
        setting.to_call_rate("ring", bus),
        setting.channels,
        threads * bytes_per_thread,
        plateau_bytes=np.where(reach.nodes > 1, plateau_bytes, np.inf) if flattens else None,
        plateau=1.9 if setting.row == 0 else 1.4,
    )


def _chain_latency_s(setting: _Setting, protocol: int) -> Column:
    """Return seconds of a broadcast's or reduce's steps: one hop where all channels are alike."""
    reach = setting.reach

    def hop(algorithm: str) -> Column:
        inside = np.where(
            reach.is_direct & (reach.gpus > 1),
            _NVLINK_US[algorithm][protocol],
            _PCIE_US[algorithm][protocol],
        )
        return np.where(reach.nodes == 1, inside, _NETWORK_US[algorithm][protocol]) * 1e-6

    alike = np.where(reach.nodes == 1, ~reach.is_direct | reach.is_switched, reach.gpus == 1)
    each = hop("tree" if protocol == _SIMPLE else "ring")
    return np.where(alike, hop("ring"), num_steps(setting.op, setting.degree) * each)


def _tree(setting: _Setting, protocol: int) -> Pair:
    graph, reach = setting.graphs.tree, setting.reach
    bus = 0.92 * _graph_bytes_per_s(setting, graph)
    bus = np.minimum(bus, setting.capped(_TREE, graph))
    if protocol == _LL:
        bus = np.minimum(bus / 3.8, _ll_most(setting))
    elif protocol == _LL128:
        share = np.where(reach.nodes == 1, 7 / 9, 120 / 128)
        bus = np.minimum(share * bus, setting.capped(_TREE_LL128, graph))
    bus = np.where(reach.gpus == 1, 0.85 * bus, bus)
    intra_s, inter_s = setting.hop_s("tree", protocol)
    return Pair(
        "tree",
        protocol,
        _BASE_US["tree"][protocol] * 1e-6 + tree_latency_s(reach, intra_s, inter_s),
        setting.to_call_rate("tree", bus),
        setting.channels,
        _THREADS[protocol] * _BYTES_PER_THREAD[protocol],
        _TREE_CORRECTION[protocol][:23],
    )


def _nvls_bus_bytes_per_s(setting: _Setting, out: Column, most: Column | float) -> Column:
    """Return bytes/s of all heads; an all_reduce both gathers and sums at once."""
    graph, gpus = setting.graphs.nvls, setting.reach.gpus
    heads = np.maximum(graph.channels, 1)
    inside = graph.intra_bytes_per_s * _NVLS_EFFICIENCY[setting.row] * (heads - 1) / heads
    inside = inside * (2 if setting.op == "all_reduce" else (gpus - 1) / gpus)
    each = np.minimum(np.minimum(inside, out), most)
    return np.where(graph.channels >= 2, graph.channels * each, 0.0)


def _nvls_channels(setting: _Setting) -> Column:
    """Return channels of NVLS: 16 on Hopper; on Blackwell by nodes and NIC (transport/nvls.cc)."""
    nodes, nic = setting.reach.nodes, setting.reach.nic_bytes_per_s
    if setting.row < 3:
        return np.full(len(nodes), 16)
    if nic >= 96e9:
        beyond = np.where(setting.reach.gpus <= 8, 24, 32)
    else:
        beyond = np.full(len(nodes), 24 if nic >= 48e9 else 32)
    pair = (nodes == 2) & (nic >= 48e9)
    return np.where(nodes == 1, 24, np.where(pair, 32, beyond))


def _nvls(setting: _Setting) -> Pair:
    intra_s, inter_s = setting.hop_s("nvls", _SIMPLE)
    several = setting.reach.nodes > 1
    bus = _nvls_bus_bytes_per_s(setting, setting.graphs.nvls.inter_bytes_per_s, np.inf)
    channels = _nvls_channels(setting)
    return Pair(
        "nvls",
        _SIMPLE,
        intra_s + np.where(several, inter_s, 0.0),
        setting.to_call_rate("nvls", bus),
        np.where(several, np.minimum(channels, setting.channels), channels),
    )


def _nvls_tree(setting: _Setting) -> Pair:
    intra_s, inter_s = setting.hop_s("nvls_tree", _SIMPLE)
    nodes = setting.reach.nodes
    out = setting.graphs.nvls.inter_bytes_per_s * np.where(nodes <= 2, 2, 1)
    most = 1e9 * _NVLS_TREE[setting.row, setting.size_column]
    corrected = setting.row == 3 and setting.is_x86
    return Pair(
        "nvls_tree",
        _SIMPLE,
        intra_s + 2 * log2_floor(nodes) * inter_s,
        setting.to_call_rate("nvls_tree", _nvls_bus_bytes_per_s(setting, out, most)),
        _nvls_channels(setting),
        correction=_TREE_CORRECTION[_SIMPLE] if corrected else (),
    )


def _collnet_direct(setting: _Setting) -> Pair:
    graph, gpus = setting.graphs.collnet, setting.reach.gpus
    if setting.op == "all_reduce":
        excess = gpus / graph.channels
        bus = graph.channels * graph.intra_bytes_per_s / (excess - (excess - 1) / 2)
        bus = bus * (0.85 if setting.at_least_hopper else 1.0)
    else:
        bus = gpus * np.minimum(graph.intra_bytes_per_s, 0.9 * graph.inter_bytes_per_s)
        bus = np.where(gpus <= graph.channels, bus, 0.0)
    intra_s, inter_s = setting.hop_s("collnet_direct", _SIMPLE)
    latency_s = 2 * (np.minimum(1, gpus - 1) * intra_s + (gpus - 1) * 0.4e-6) + inter_s
    return Pair(
        "collnet",
        _SIMPLE,
        latency_s,
        np.where(gpus <= 8, setting.to_call_rate("collnet", bus), 0.0),
        setting.channels,
        640 * _COLLNET_BYTES_PER_THREAD * graph.channels,
    )


def _collnet_chain(setting: _Setting) -> Pair:
    graph, gpus = setting.graphs.tree, setting.reach.gpus
    intra_s, inter_s = setting.hop_s("collnet_chain", _SIMPLE)
    bus = np.where(gpus <= 8, graph.channels * graph.intra_bytes_per_s, 0.0)
    return Pair(
        "collnet",
        _SIMPLE,
        2 * (gpus - 1) * intra_s + inter_s,
        setting.to_call_rate("collnet", bus),
        setting.channels,
        640 * _COLLNET_BYTES_PER_THREAD,
    )


def _pat(setting: _Setting) -> Pair:
    _, inter_s = setting.hop_s("pat", _SIMPLE)
    steps_s = log2_floor(setting.reach.nodes) * inter_s / 3.5 + 2.8e-6 * setting.degree
    return Pair(
        "pat",
        _SIMPLE,
        _BASE_US["pat"][_SIMPLE] * 1e-6 + steps_s,
        setting.to_call_rate("pat", 0.75 * _graph_bytes_per_s(setting, setting.graphs.tree)),
        setting.channels,
    )
