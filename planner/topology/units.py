"""Which unit of a tier, or which NVLink domain, a node lies in, and what its switches are called.

The parallel switches of one unit are one vertex of the graph, "leaf3" unless the tier names it; in
the first tier of a rail-optimised network there is one for each rail, "rail3/rail0".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.topology.document import Network, NvlinkDomain, Tier, TopologyDocument

__all__ = [
    "Switch",
    "domain_switches",
    "first_switch",
    "narrowing",
    "nodes_of_unit",
    "num_rails",
    "switch_name",
    "switches",
    "unit_of",
]


@dataclass(frozen=True, slots=True)
class Switch:
    """Where a switch of the network stands.

    Attributes:
        tier: Position of its tier, 0 for the first.
        unit: Number of its unit in the tier.
        rail: Number of its rail; 0 where rails share the switch.
        parent: Name of the switch above; empty in the last tier.
    """

    tier: int
    unit: int
    rail: int
    parent: str


def unit_of(level: Tier | NvlinkDomain, nodes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the number of the unit that holds each of ``nodes``, shape [nodes]."""
    numbers = np.asarray(nodes, dtype=np.int64)
    if level.units is not None:
        return np.searchsorted(np.cumsum(level.units), numbers, side="right").astype(np.int64)
    return np.zeros_like(numbers) if level.num_nodes is None else numbers // level.num_nodes


def nodes_of_unit(level: Tier | NvlinkDomain, unit: int, max_nodes: int) -> range:
    """Return the nodes of a unit, of a cluster of ``max_nodes``; none if there is no such unit."""
    if level.units is not None:
        first = sum(level.units[:unit])
        return range(first, first + sum(level.units[unit : unit + 1]))
    size = level.num_nodes or max_nodes
    return range(unit * size, min((unit + 1) * size, max_nodes))


def switch_name(network: Network, tier: int, unit: int, rail: int) -> str:
    """Return the name of a switch in the graph."""
    by_rail, named = network.layout == "rail" and tier == 0, network.tiers[tier]
    name = named.unit_names[unit] if named.unit_names else f"{named.name}{unit}"
    return name + (f"/rail{rail}" if by_rail else "")


def domain_switches(domain: NvlinkDomain, unit: int) -> list[str]:
    """Return the names of the NVSwitches of one NVLink domain in the graph."""
    return [f"domain{unit}/nvswitch{i}" for i in range(domain.num_switches)]


def first_switch(network: Network, node: int, rail: int) -> str:
    """Return the name of the switch that a NIC of a node is on."""
    return switch_name(network, 0, int(unit_of(network.tiers[0], [node])[0]), rail)


def narrowing(network: Network, tier: int) -> float:
    """Return senders over what goes up, of a tier and those below together."""
    return math.prod(below.oversubscription for below in network.tiers[: tier + 1])


def num_rails(document: TopologyDocument) -> int:
    """Return how many switches stand side by side in a unit of the first tier."""
    network = document.network
    return document.node.count("nic") if network and network.layout == "rail" else 1


def switches(document: TopologyDocument) -> dict[str, Switch]:
    """Return every switch of the network by its name; empty without a network."""
    network = document.network
    if network is None:
        return {}
    nodes = range(document.max_nodes)
    units = [unit_of(tier, nodes) for tier in network.tiers]
    found: dict[str, Switch] = {}
    for tier in range(len(units)):
        _, first_nodes = np.unique(units[tier], return_index=True)
        for node in first_nodes.tolist():
            for rail in range(num_rails(document) if tier == 0 else 1):
                last = tier + 1 == len(units)
                parent = (
                    "" if last else switch_name(network, tier + 1, int(units[tier + 1][node]), 0)
                )
                unit = int(units[tier][node])
                found[switch_name(network, tier, unit, rail)] = Switch(tier, unit, rail, parent)
    return found
