"""What a topology document must keep to, beyond the types of its fields.

Every check raises ValueError in words that say which figure or part is wrong and what it needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

from planner.topology.expand import ends, expand, merged_links, parts_by_end

if TYPE_CHECKING:
    from planner.topology.document import (
        DeviceFigures,
        Impairment,
        Network,
        NodeType,
        Tier,
        TopologyDocument,
    )

__all__ = [
    "BANDWIDTH_RANGE_BYTES_PER_S",
    "LATENCY_RANGE_S",
    "MAX_ASSUMPTIONS",
    "MAX_ASSUMPTION_CHARS",
    "MAX_COMPONENTS_PER_NODE",
    "MAX_DESCRIPTION_CHARS",
    "MAX_GPUS_PER_NODE",
    "MAX_SOURCE_CHARS",
    "OVERSUBSCRIPTION_RANGE",
    "check_document",
    "is_switch_of",
]

# What a figure may be. Wider than any machine: refused is only what must be a slip of the pen
# (bits for bytes, GB/s for B/s, ms for s).
BANDWIDTH_RANGE_BYTES_PER_S: Final = (1e3, 1e14)
LATENCY_RANGE_S: Final = (0.0, 1.0)
OVERSUBSCRIPTION_RANGE: Final = (1.0, 1000.0)
_MEMORY_RANGE_BYTES: Final = (1e6, 1e14)
_FLOP_RANGE_PER_S: Final = (1e6, 1e18)

MAX_COMPONENTS_PER_NODE: Final = 1024
_MAX_LINKS_PER_NODE: Final = 4096
MAX_GPUS_PER_NODE: Final = 64
MAX_SOURCE_CHARS: Final = 1000
MAX_DESCRIPTION_CHARS: Final = 2000
MAX_ASSUMPTIONS: Final = 64
MAX_ASSUMPTION_CHARS: Final = 1000
# NVSwitches between nodes are called domain0/nvswitch0.
_DOMAIN: Final = "domain"
_MAX_WORKERS: Final = 1 << 20


def check_document(document: TopologyDocument) -> None:
    """Check figures, parts, sizes, and that everything is joined.

    Raises:
        ValueError: Saying what is wrong and what it needs.
    """
    _check_figures(document)
    for node in (document.node, *(island.node for island in document.islands)):
        _check_components(node)
        _check_connected(document, node)
    _check_size(document)
    _check_impairments(document)
    _check_islands(document)
    _check_network(document)
    _check_unit_names(document)


# ------------------------------------------------------------------------------------ figures


def _check_figures(document: TopologyDocument) -> None:
    for what, value, (low, high) in _figures(document):
        if not (math.isfinite(value) and low <= value <= high):
            positive = "> 0, " if low > 0 else ""
            raise ValueError(f"{what}={value:g}; must be {positive}from {low:g} to {high:g}")


def _figures(document: TopologyDocument) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Yield (what has which field, value, range) of every physical figure."""
    nodes = (document.node, *(island.node for island in document.islands))
    carriers: list[tuple[str, Any]] = [
        (f"link {link.label()}", link) for node in nodes for link in node.links
    ]
    if document.nvlink_domain is not None:
        carriers.append(("nvlink_domain", document.nvlink_domain))
    for carrier, value in carriers:
        bandwidth = value.bandwidth_bytes_per_s
        yield f"{carrier} has bandwidth_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
        yield f"{carrier} has latency_s", value.latency_s, LATENCY_RANGE_S
    if (net := document.network) is not None:
        bandwidth = net.nic_bandwidth_bytes_per_s
        yield "network has nic_bandwidth_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
        yield "network has nic_latency_s", net.nic_latency_s, LATENCY_RANGE_S
        for tier in net.tiers:
            yield f"tier {tier.name} has latency_s", tier.latency_s, LATENCY_RANGE_S
            what = f"tier {tier.name} has oversubscription"
            yield what, tier.oversubscription, OVERSUBSCRIPTION_RANGE
    for device in (document.device, *(island.device for island in document.islands)):
        if not isinstance(device, str):
            yield from _device_figures(device)


def _device_figures(device: DeviceFigures) -> Iterator[tuple[str, float, tuple[float, float]]]:
    yield "device has memory_bytes", device.memory_bytes, _MEMORY_RANGE_BYTES
    bandwidth = device.memory_bytes_per_s
    yield "device has memory_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
    for precision, peak in device.peak_flop_per_s.items():
        yield f"device has peak_flop_per_s[{precision}]", peak, _FLOP_RANGE_PER_S


# ----------------------------------------------------------------------------- parts of a node


def _check_components(node: NodeType) -> None:
    if sum(c.count for c in node.components) > MAX_COMPONENTS_PER_NODE:
        raise ValueError(f"a node may have {MAX_COMPONENTS_PER_NODE} components at most")
    seen: set[str] = set()
    for component in node.components:
        if component.multicast and component.kind != "nvswitch":
            raise ValueError(
                f"component {component.id!r} is a {component.kind} with multicast; only an "
                "nvswitch copies and reduces"
            )
        for name in {component.id, *component.names()}:
            if name in seen:
                raise ValueError(f"component {name!r} occurs twice; give each its own id")
            seen.add(name)
    gpus, processes = node.count("gpu"), node.count("process")
    if bool(gpus) == bool(processes):
        raise ValueError(
            f"a node needs gpus or processes, one kind; got {gpus} gpus, {processes} processes"
        )
    if bool(processes) != (node.cores is not None):
        raise ValueError(
            f"node.cores={node.cores} with {processes} processes; give the cores of a machine "
            "whose ranks are processes, and only of one"
        )
    if gpus > MAX_GPUS_PER_NODE:
        raise ValueError(f"a node has {gpus} gpus; at most {MAX_GPUS_PER_NODE}")
    _check_links(node)


def _check_links(node: NodeType) -> None:
    num_links = 0
    parts = parts_by_end(node.components)
    for link in node.links:
        left, right = (len(names) for names in ends(parts, link))
        num_links += left * right if link.pattern == "all" else max(left, right)
        if num_links > _MAX_LINKS_PER_NODE:
            raise ValueError(f"a node may have {_MAX_LINKS_PER_NODE} links at most")
        if not any(True for _ in expand(parts, link)):
            raise ValueError(
                f"link {link.label()} joins nothing; between parts of one component use pattern "
                '"all"'
            )


def _check_connected(document: TopologyDocument, node: NodeType) -> None:
    """Every worker has a link, workers reach each other, NICs are reached by a worker."""
    neighbours: dict[str, set[str]] = {name: set() for c in node.components for name in c.names()}
    for a, b in map(sorted, merged_links(node)):
        neighbours[a].add(b)
        neighbours[b].add(a)
    workers = node.workers()
    if document.nvlink_domain is None and not neighbours[workers[0]]:
        raise ValueError(f"{workers[0]} has no link; add one, for example to the cpu over PCIe")
    start = workers if document.nvlink_domain is not None else workers[:1]
    reached, frontier = set(start), list(start)
    while frontier:
        for name in neighbours[frontier.pop()] - reached:
            reached.add(name)
            frontier.append(name)
    for name in (*workers, *node.names("nic")):
        if name not in reached:
            raise ValueError(
                f"{name} is not connected to {workers[0]}; add a link, for example over PCIe"
            )


# ----------------------------------------------------------------------------- the whole cluster


def _check_size(document: TopologyDocument) -> None:
    if document.default_nodes > document.max_nodes:
        raise ValueError(
            f"default_nodes={document.default_nodes} exceeds max_nodes={document.max_nodes}"
        )
    workers = document.gpus_per_node * document.max_nodes
    if workers > _MAX_WORKERS:
        raise ValueError(
            f"max_nodes={document.max_nodes} with {document.gpus_per_node} GPUs each is {workers} "
            f"GPUs; at most {_MAX_WORKERS}"
        )
    if document.hosts and len(document.hosts) != document.max_nodes:
        raise ValueError(
            f"hosts names {len(document.hosts)} nodes but max_nodes={document.max_nodes}; name "
            "every node, or leave hosts out"
        )
    for host, times in Counter(document.hosts).most_common(1):
        if times > 1:
            raise ValueError(f"hosts names {host!r} twice")
    for tier in document.network.tiers if document.network else ():
        for host in document.hosts or (document.host(0),):
            if is_switch_of(tier.name, host):
                raise ValueError(
                    f"host {host!r} is also the name of a switch of tier {tier.name}; call the "
                    "tier something else"
                )
    for host in document.hosts if document.nvlink_domain else ():
        if is_switch_of(_DOMAIN, host):
            raise ValueError(
                f"host {host!r} is also the name of an NVLink domain; call the host something else"
            )


def _check_unit_names(document: TopologyDocument) -> None:
    """Every unit of a tier has a name, and no two things have the same."""
    tiers = document.network.tiers if document.network else ()
    taken = set(document.hosts)
    for tier in tiers:
        if tier.unit_names is None:
            continue
        size = tier.num_nodes or document.max_nodes
        num_units = len(tier.units) if tier.units else -(-document.max_nodes // size)
        if len(tier.unit_names) != num_units:
            raise ValueError(
                f"tier {tier.name} has {len(tier.unit_names)} unit_names for {num_units} units"
            )
        numbered = [_DOMAIN, *(other.name for other in tiers if other.unit_names is None)]
        if not document.hosts:
            numbered.append("n")
        for name in tier.unit_names:
            if name in taken or any(is_switch_of(other, name) for other in numbered):
                raise ValueError(
                    f"tier {tier.name} calls a switch {name!r}, as something else is or may be "
                    "called; leave unit_names out, or change it"
                )
            taken.add(name)


def _check_impairments(document: TopologyDocument) -> None:
    """Nothing has two factors: which of them is meant would be a guess."""
    seen: dict[frozenset[str], Impairment] = {}
    for impairment in document.impairments:
        other = seen.setdefault(impairment.names(), impairment)
        if other.factor != impairment.factor:
            raise ValueError(f"impairments say {other} and {impairment}; give one of them")


def is_switch_of(tier: str, name: str) -> bool:
    """Return whether ``name`` is one that switches of a tier have: "leaf3"."""
    return name.startswith(tier) and name[len(tier) :].isdecimal()


def _check_islands(document: TopologyDocument) -> None:
    """Islands lie one after the other, inside the cluster, with as many GPUs a node."""
    free = 0
    for island in document.islands:
        first, end = island.first_node, island.first_node + island.num_nodes
        if first < free or end > document.max_nodes:
            raise ValueError(
                f"an island has nodes {first} to {end - 1}; islands must follow each other "
                f"without overlap, within 0 to {document.max_nodes - 1}"
            )
        free = end
        workers = len(island.node.workers())
        if workers != document.gpus_per_node:
            raise ValueError(
                f"an island has {workers} GPUs a node and the others {document.gpus_per_node}; a "
                "job needs as many ranks on every node: make it a topology of its own"
            )
        if (island.node.cores is None) != (document.node.cores is None):
            raise ValueError("an island of GPUs among nodes of processes, or the reverse")


def _check_network(document: TopologyDocument) -> None:
    domain, network = document.nvlink_domain, document.network
    if domain is not None and document.node.count("gpu") == 0:
        raise ValueError("nvlink_domain joins GPUs, but the node has none")
    below: tuple[int, ...] | int = 1
    if domain is not None:
        below = domain.units or domain.num_nodes
        _check_units("nvlink_domain", domain.units, 1, document.max_nodes)
        if domain.units and max(domain.units) > domain.num_nodes:
            raise ValueError(
                f"nvlink_domain has units of {max(domain.units)} nodes but "
                f"num_nodes={domain.num_nodes}, the most a domain holds"
            )
    if network is None:
        reach = 1
        if domain is not None:
            reach = domain.units[0] if domain.units else domain.num_nodes
        if document.max_nodes > reach:
            raise ValueError(
                f"max_nodes={document.max_nodes} but nothing joins more than {reach} nodes; "
                "give network, or lower max_nodes"
            )
        return
    for island_node in (document.node, *(island.node for island in document.islands)):
        if island_node.count("nic") == 0:
            raise ValueError(
                "network joins NICs, but the node has none; add a component of kind nic"
            )
        _check_part_names(network, island_node)
    _check_tiers(network, below, document.max_nodes)


def _check_part_names(network: Network, node: NodeType) -> None:
    """No part of a node is called like a switch: both are vertices of the node's graph."""
    parts = [name for component in node.components for name in component.names()]
    for tier in network.tiers:
        for part in parts:
            if is_switch_of(tier.name, part) or part in (tier.unit_names or ()):
                raise ValueError(
                    f"tier {tier.name} has a switch called as the node's {part}; call one "
                    "something else"
                )


def _check_tiers(network: Network, below: tuple[int, ...] | int, max_nodes: int) -> None:
    names = [tier.name for tier in network.tiers]
    reserved = {"nvlink", "xgmi", "pcie", "cpu", "smp", "loopback", _DOMAIN}
    if len(set(names)) != len(names) or reserved & set(names):
        raise ValueError(
            f"tiers need distinct names other than those of links and {_DOMAIN!r}; got {names}"
        )
    for name, other in permutations(names, 2):
        if is_switch_of(name, other):
            raise ValueError(
                f"tier {other} is called as a switch of tier {name}; call one something else"
            )
    for tier in network.tiers:
        if tier.num_nodes is not None and tier.units is not None:
            raise ValueError(f"tier {tier.name} has num_nodes and units; give one of them")
    for tier in network.tiers[:-1]:
        if tier.num_nodes is None and tier.units is None:
            raise ValueError(f"tier {tier.name} has num_nodes=null; only the last tier may")
    for tier in network.tiers:
        below = _checked_tier(tier, below, max_nodes)
    last = network.tiers[-1]
    if last.num_nodes is not None and last.num_nodes < max_nodes:
        raise ValueError(
            f"tier {last.name}, the last, joins {last.num_nodes} nodes but "
            f"max_nodes={max_nodes}; its num_nodes may be null"
        )
    if last.units is not None and len(last.units) > 1:
        raise ValueError(
            f"tier {last.name}, the last, has {len(last.units)} units that nothing joins; add a "
            "tier above with num_nodes=null"
        )


def _checked_tier(
    tier: Tier, below: tuple[int, ...] | int, max_nodes: int
) -> tuple[int, ...] | int:
    """Return the units of ``tier`` after checking that they are made of whole units below."""
    if tier.units is not None:
        _check_units(f"tier {tier.name}", tier.units, below, max_nodes)
        return tier.units
    if tier.num_nodes is None:
        return (max_nodes,)
    if isinstance(below, int):
        if tier.num_nodes <= below or tier.num_nodes % below:
            raise ValueError(
                f"tier {tier.name} has num_nodes={tier.num_nodes}; must be more than, and a "
                f"multiple of, the {below} nodes of a unit below"
            )
        return tier.num_nodes
    full, rest = divmod(max_nodes, tier.num_nodes)
    units = (tier.num_nodes,) * full + ((rest,) if rest else ())
    _check_units(f"tier {tier.name}", units, below, max_nodes)
    return tier.num_nodes


def _check_units(
    what: str, units: tuple[int, ...] | None, below: tuple[int, ...] | int, max_nodes: int
) -> None:
    """Units add up to the cluster and end where units below end."""
    if units is None:
        return
    if sum(units) != max_nodes:
        raise ValueError(
            f"{what} has units of {sum(units)} nodes together but max_nodes={max_nodes}; they "
            "must be equal"
        )
    ends_below = None if isinstance(below, int) else set(_ends(below))
    for end in _ends(units):
        inside = end % below if isinstance(below, int) else end not in (ends_below or ())
        if inside and end != max_nodes:
            raise ValueError(
                f"{what} has a unit that ends after node {end - 1}, inside a unit below; units "
                "must be made of whole units"
            )


def _ends(units: Iterable[int]) -> Iterator[int]:
    end = 0
    for size in units:
        end += size
        yield end
