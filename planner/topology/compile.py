"""From the document to the levels collectives see.

Flows are computed on one node of each kind and condition (``reach``, ``exits``), never on the
whole cluster; the network's tiers thin what leaves a node. Where nodes differ, a level has the
figures of the worst: ranks wait for each other, so a group costs what its worst link costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Final, TypeAlias, cast

import numpy as np

from planner.errors import InvalidInputError
from planner.hardware.gpus import architecture_of, gpu_model
from planner.hardware.known_curves import known_curves
from planner.hardware.protocols import protocols_of
from planner.plan import MeasuredCurve
from planner.topology.document import NvlinkDomain, Tier, TopologyDocument
from planner.topology.exits import Exit
from planner.topology.fabric import Fabric, Level, LevelKind, Mesh
from planner.topology.graph import node_graph
from planner.topology.impair import NodeTrouble, trouble
from planner.topology.reach import Inside, NodeReach, flat_rates, node_reach, worst_rates
from planner.topology.trunks import trunk_shares
from planner.topology.units import narrowing, unit_of

__all__ = ["compile_fabric", "first_nodes", "live_nodes"]

# Number of the type of a node, and its impairments.
Condition: TypeAlias = tuple[int, tuple[str, ...]]

# Each costs some 20 ms of flows.
_MAX_CONDITIONS: Final = 128

_INSIDE_ORDER: Final = ("nvlink", "xgmi", "loopback", "pcie", "cpu", "smp")


def compile_fabric(document: TopologyDocument, nodes: int | Sequence[int] | None = None) -> Fabric:
    """Return the fabric of some nodes of ``document``.

    Args:
        document: Which cluster.
        nodes: How many, the first that are not down; or their numbers, ascending; None means the
            document's default. Units need not be full.

    Raises:
        InvalidInputError: ``nodes`` is out of range or names a node that is down, an impairment
            names nothing of this topology, the GPUs of a group are not listed in a row, or a GPU
            reaches no NIC where the network is needed.
    """
    found, trunks = trouble(document)
    used = _used_nodes(document, nodes, found)
    kinds = _conditions(document, used, found)
    reached = {key: _reach(document, node, found) for key, node in kinds.items()}
    num_gpus = len(used) * document.gpus_per_node
    levels: list[Level] = []
    shares = trunk_shares(document, used, trunks)
    for level in chain(
        _inside_levels(document, used, found, reached),
        _network_levels(document, used, shares, {kinds[key]: reached[key] for key in kinds}),
    ):
        if not levels or _is_wider(level, levels[-1], num_gpus):
            levels.append(level)
        if level.unit_size >= num_gpus:
            break
    if len(levels) > 1 and levels[0].unit_size == 1:
        del levels[0]
    architecture = architecture_of(document.device_name)
    return Fabric(
        topology=document.name,
        library=document.library,
        device=document.device_name,
        num_gpus=num_gpus,
        gpus_per_node=document.gpus_per_node,
        cores_per_node=document.node.cores,
        levels=tuple(levels),
        nodes=None if used[-1] == len(used) - 1 else tuple(used),
        slowest_share=min(found.get(node, NodeTrouble()).compute_share for node in used)
        if found
        else 1.0,
        architecture=architecture,
        sharp=document.network is not None and document.network.in_network_reduction,
        # lines are of the GPUs' own libraries: gloo and MPI on the same GPUs run otherwise
        protocols=None
        if document.library in ("gloo", "mpi")
        else protocols_of(architecture, levels[0].kind),
        curves=()
        if any(found[node].links for node in used if node in found)
        else _curves_of_board(document, levels[0]),
    )


def _curves_of_board(document: TopologyDocument, inside: Level) -> tuple[MeasuredCurve, ...]:
    """Return what was measured on such nodes, if these are all alike, and linked like them.

    Boards with NVLink were measured behind NVSwitches with every link, the others on PCIe.
    """
    curves = known_curves(document.device_name, document.gpus_per_node)
    if not curves or document.library != "nccl" or document.islands:
        return ()
    gpu = gpu_model(document.device_name)
    if gpu.link_kind is None:
        is_slot = math.isclose(inside.bytes_per_s, gpu.pcie_bytes_per_s, rel_tol=0.01)
        return curves if inside.kind == "pcie" and is_slot else ()
    rate = gpu.num_links * gpu.link_bytes_per_s
    is_switched = inside.mesh is None and inside.unit_size >= document.gpus_per_node
    is_board = inside.kind == gpu.link_kind and is_switched
    return curves if is_board and math.isclose(inside.bytes_per_s, rate, rel_tol=0.01) else ()


def live_nodes(document: TopologyDocument) -> list[int]:
    """Return the numbers of the nodes that are not down."""
    found, _ = trouble(document)
    down = {node for node, what in found.items() if what.compute_share == 0}
    return [node for node in range(document.max_nodes) if node not in down]


def first_nodes(document: TopologyDocument, num_nodes: int | None = None) -> tuple[int, ...]:
    """Return the first ``num_nodes`` nodes that are not down; None means the default.

    Raises:
        InvalidInputError: ``num_nodes`` is out of range, or so many are not up.
    """
    wanted = document.checked_num_nodes(num_nodes)
    live = live_nodes(document) if document.impairments else range(document.max_nodes)
    if wanted > len(live):
        raise InvalidInputError(
            f"topology {document.name!r}: nodes={wanted} but {document.max_nodes - len(live)} of "
            f"its {document.max_nodes} are down; ask for {len(live)} at most",
            where="nodes",
        )
    return tuple(live[:wanted])


def _used_nodes(
    document: TopologyDocument, nodes: int | Sequence[int] | None, found: dict[int, NodeTrouble]
) -> tuple[int, ...]:
    if not isinstance(nodes, (list, tuple, range)):
        return first_nodes(document, cast("int | None", nodes))
    if not nodes or nodes[0] < 0 or nodes[-1] >= document.max_nodes or not _ascend(nodes):
        raise InvalidInputError(
            f"topology {document.name!r}: nodes={_few(nodes)}; must be numbers from 0 to "
            f"{document.max_nodes - 1}, ascending, at least one",
            where="nodes",
        )
    down = [node for node in nodes if found.get(node, NodeTrouble()).compute_share == 0]
    if down:
        raise InvalidInputError(
            f"topology {document.name!r}: {document.host(down[0])} is down; leave it out",
            where="nodes",
        )
    return tuple(nodes)


def _ascend(nodes: Sequence[int]) -> bool:
    return all(below < above for below, above in pairwise(nodes))


def _few(nodes: Sequence[int]) -> str:
    return str([*nodes[:8]]) if len(nodes) <= 8 else f"[{', '.join(map(str, nodes[:8]))}, ...]"


# --------------------------------------------------------------------------------- inside nodes


def _key(document: TopologyDocument, node: int, found: dict[int, NodeTrouble]) -> Condition:
    """Return what nodes that reach the same have in common: their type, and what is wrong."""
    links = found[node].links if node in found else ()
    return document.type_number(node), tuple(map(str, links))


def _conditions(
    document: TopologyDocument, used: Sequence[int], found: dict[int, NodeTrouble]
) -> dict[Condition, int]:
    """Return one node of every type and condition."""
    if not document.islands and not found:
        return {(-1, ()): used[0]}
    kinds: dict[Condition, int] = {}
    for node in used:
        kinds.setdefault(_key(document, node, found), node)
    if len(kinds) > _MAX_CONDITIONS:
        raise InvalidInputError(
            f"topology {document.name!r}: nodes in use are weak in {len(kinds)} different ways; at "
            f"most {_MAX_CONDITIONS} can be told apart: mark the worst nodes down",
            where="impairments",
        )
    return kinds


def _reach(document: TopologyDocument, node: int, found: dict[int, NodeTrouble]) -> NodeReach:
    graph = node_graph(document, node, found.get(node))
    return node_reach(
        document.node_type(node),
        graph,
        gpudirect=document.network.gpudirect if document.network else "pxb",
        in_domain=document.nvlink_domain is not None,
    )


def _inside_levels(
    document: TopologyDocument,
    used: Sequence[int],
    found: dict[int, NodeTrouble],
    reached: dict[Condition, NodeReach],
) -> Iterator[Level]:
    """Merge the levels of all kinds of nodes: of each, the worst."""
    domain = document.nvlink_domain
    for name in _INSIDE_ORDER:
        have = [level for r in reached.values() for level in r.inside if level.name == name]
        if not have:
            continue
        rate = min(level.bytes_per_s for level in have)
        if domain is not None:
            sizes = _unit_sizes(document, used, domain, domain.num_nodes)
        else:
            sizes = _sizes_inside(document, used, found, reached, name)
        yield Level(
            name=name,
            kind=have[0].kind,
            unit_size=max(sizes),
            bytes_per_s=rate,
            alpha_s=max(level.alpha_s for level in have),
            source=_sources(document, have[0].kind, name),
            unit_sizes=_unequal(sizes),
            mesh=_mesh(have, rate),
            multicast=all(level.multicast for level in have),
        )


def _sizes_inside(
    document: TopologyDocument,
    used: Sequence[int],
    found: dict[int, NodeTrouble],
    reached: dict[Condition, NodeReach],
    name: str,
) -> tuple[int, ...]:
    """Return the sizes of the units of a level inside nodes, over all nodes in order."""
    of_kind = {key: _sizes_of(reach, name, document) for key, reach in reached.items()}
    if len(reached) == 1:
        (sizes,) = of_kind.values()
        return sizes if len(set(sizes)) == 1 else sizes * len(used)
    return tuple(size for node in used for size in of_kind[_key(document, node, found)])


def _sizes_of(reach: NodeReach, name: str, document: TopologyDocument) -> tuple[int, ...]:
    """Return the units of one node at a level; a node that lacks it has those of the one below."""
    position = _INSIDE_ORDER.index(name)
    below = [lv for lv in reach.inside if _INSIDE_ORDER.index(lv.name) <= position]
    if not below:
        return (1,) * document.gpus_per_node
    return tuple(len(unit) for unit in below[-1].units)


def _mesh(levels: Sequence[Inside], bytes_per_s: float) -> Mesh | None:
    """Return the worst of the meshes of all kinds of nodes, as parts of the level's rate."""
    if all(level.ring is None for level in levels):
        return None
    flat = [flat_rates(max(map(len, level.units)), level.bytes_per_s) for level in levels]
    ring, direct = (
        tuple(tuple(rate / bytes_per_s for rate in row) for row in worst_rates(tables))
        for tables in (
            [level.ring or even for level, even in zip(levels, flat, strict=True)],
            [level.direct or even for level, even in zip(levels, flat, strict=True)],
        )
    )
    return Mesh(ring, direct)


def _sources(document: TopologyDocument, kind: LevelKind, name: str) -> str:
    """Return the sources of the links that a level goes over, each once."""
    wanted = {kind} if name in ("nvlink", "xgmi", "loopback") else {"pcie", "smp", "c2c"}
    if len(document.node.workers()) == 1 and name == "pcie":
        wanted |= {"nvlink", "xgmi"}
    nodes = (document.node, *(island.node for island in document.islands))
    sources = [link.source for node in nodes for link in node.links if link.kind in wanted]
    if document.nvlink_domain is not None and kind == "nvlink":
        sources.append(document.nvlink_domain.source)
    return "; ".join(dict.fromkeys(sources))


# ------------------------------------------------------------------------------ between nodes


def _network_levels(
    document: TopologyDocument,
    used: Sequence[int],
    shares: Sequence[float],
    reached: dict[int, NodeReach],
) -> Iterator[Level]:
    """One level per tier: what leaves a node by its NICs, thinned by every oversubscription."""
    network = document.network
    exits = _exits(document, reached)
    if network is None or not exits:
        return
    bytes_per_s = min(way.bytes_per_s for way in exits)
    direct = min(way.direct_bytes_per_s for way in exits)
    alpha_s = 2 * (max(way.alpha_s for way in exits) + network.nic_latency_s)
    below = document.nvlink_domain.num_nodes if document.nvlink_domain else 1
    thinning = 1.0
    for position, (tier, left) in enumerate(zip(network.tiers, shares, strict=True)):
        thinning = max(thinning, narrowing(network, position) / left)
        alpha_s += tier.latency_s
        whole = below * math.ceil(len(used) / below)
        most = whole if tier.num_nodes is None else tier.num_nodes
        sizes = _unit_sizes(document, used, tier, most)
        paths = {way.path for way in exits}
        yield Level(
            name=tier.name,
            kind=network.kind,
            unit_size=max(sizes),
            bytes_per_s=bytes_per_s / thinning,
            alpha_s=alpha_s,
            source="; ".join(dict.fromkeys((network.source, tier.source))),
            unit_sizes=_unequal(sizes),
            direct_share=direct / bytes_per_s,
            path=paths.pop() if len(paths) == 1 else "mixed",
            oversubscription=thinning,
        )
        below = most


def _exits(document: TopologyDocument, reached: dict[int, NodeReach]) -> list[Exit]:
    """Return the ways out of every kind of node.

    Raises:
        InvalidInputError: From a node, or from one of its GPUs, there is none.
    """
    for node, way in ((node, reach.exit) for node, reach in reached.items() if reach.exit):
        host = document.host(node)
        if way.bytes_per_s == 0:
            raise InvalidInputError(
                f"topology {document.name!r}: {host} has no NIC that is up and that a GPU reaches; "
                "mark the node down",
                where="impairments",
            )
        if way.direct_bytes_per_s == 0:
            raise InvalidInputError(
                f"topology {document.name!r}: a GPU of {host} reaches no NIC that is up, neither "
                "over NVLink nor through the host; add its PCIe link, or mark the node down",
                where="node.links",
            )
    return [reach.exit for reach in reached.values() if reach.exit is not None]


def _unit_sizes(
    document: TopologyDocument,
    used: Sequence[int],
    level: Tier | NvlinkDomain,
    num_nodes: int,
) -> tuple[int, ...]:
    """Return the GPUs in use of every unit, in order; equal units of ``num_nodes`` once."""
    if level.units is None and used[-1] == len(used) - 1:
        return (num_nodes * document.gpus_per_node,)
    _, counts = np.unique(unit_of(level, used), return_counts=True)
    sizes = tuple((counts * document.gpus_per_node).tolist())
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def _unequal(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if len(set(sizes)) == 1 else sizes


def _is_wider(level: Level, below: Level, num_gpus: int) -> bool:
    """Whether a level joins units of the level below."""
    return _num_units(level, num_gpus) < _num_units(below, num_gpus)


def _num_units(level: Level, num_gpus: int) -> int:
    return len(level.unit_sizes) if level.unit_sizes else -(-num_gpus // level.unit_size)
