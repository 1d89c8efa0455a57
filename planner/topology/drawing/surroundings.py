"""The units that a node lies in, one within the other, and the units beside them, counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.topology.document import NvlinkDomain, Tier, TopologyDocument
from planner.topology.drawing.wires import Health
from planner.topology.units import narrowing, unit_of
from planner.units import counted

__all__ = ["Surrounding", "share_bytes_per_s", "surroundings"]


@dataclass(frozen=True, slots=True)
class Surrounding:
    """A unit that holds the opened node, and the units of the level below that it joins.

    Attributes:
        level: NVLink domain or tier.
        tier: Position among the tiers, -1 for the domain.
        unit: Its number.
        num_nodes: Nodes of it.
        below: Level of what it joins; None for nodes.
        members: (number, nodes) of what it joins.
        own: Number of the member that holds the opened node.
    """

    level: NvlinkDomain | Tier
    tier: int
    unit: int
    num_nodes: int
    below: NvlinkDomain | Tier | None
    members: tuple[tuple[int, int], ...]
    own: int

    @property
    def num_own(self) -> int:
        """Return the nodes of the member that holds the opened node."""
        return dict(self.members)[self.own]

    def others(
        self, document: TopologyDocument, health: Health, most: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Return some other members, those with something wrong first, and how many are left."""
        others = [pair for pair in self.members if pair[0] != self.own]
        first: set[int] = set()
        if self.below is None:
            first |= {island.first_node for island in document.islands}
        if health.hosts:
            first |= {n for n, _ in others if self.name(document, n) in health.hosts}
        if first:
            others.sort(key=lambda pair: pair[0] not in first)
        return others[:most], len(others) - most if len(others) > most else 0

    def name(self, document: TopologyDocument, number: int) -> str:
        """Return what a member's parts are named by."""
        if self.below is None:
            return document.host(number)
        return f"{self.below.name if isinstance(self.below, Tier) else 'domain'}{number}"

    def card(self, document: TopologyDocument, number: int, num_nodes: int) -> list[str]:
        """Return a member in a few lines, its name first."""
        name = self.name(document, number)
        if self.below is not None:
            return [name, counted(num_nodes, "node")]
        ranks = "ranks" if document.node.count("process") else "GPUs"
        words = [name, f"{document.gpus_per_node} {ranks}"]
        island = document.island_of(number)
        return [*words, island.device_name] if island else words

    def rest(self, num_more: int) -> list[str]:
        """Return how many members are not drawn."""
        what = "nodes" if self.below is None else "units"
        if isinstance(self.below, NvlinkDomain):
            what = "domains"
        sizes = sorted({count for _, count in self.members})
        if self.below is not None and len(sizes) > 1:
            return [f"... {num_more:,} more", f"of {sizes[0]:,} to {sizes[-1]:,}", "nodes each"]
        return [f"... {num_more:,}", f"more {what}", f"of {len(self.members):,}"]

    def text(self, own: str, *, num_rails: int) -> str:
        """Return what stands on the switches of a tier: what they join, and how narrow they are."""
        assert isinstance(self.level, Tier)
        nodes = counted(self.num_nodes, "node")
        if num_rails:
            what = f"{num_rails} rails for {nodes}"
        elif self.below is None:
            what = nodes
        else:
            kind = self.below.name if isinstance(self.below, Tier) else "domain"
            what = f"{len(self.members):,} x {kind}, {nodes}"
        ratio = self.level.oversubscription
        return f"{own}: {what}, {ratio:.3g}:1" + (" oversubscribed" if ratio > 1 else "")


def surroundings(
    document: TopologyDocument, nodes: Sequence[int], opened: int
) -> list[Surrounding]:
    """Return the units around a node, innermost first, up to the one that holds all nodes."""
    levels: list[tuple[int, NvlinkDomain | Tier]] = []
    if document.nvlink_domain is not None:
        levels.append((-1, document.nvlink_domain))
    levels += enumerate(document.network.tiers if document.network else ())
    numbers = np.asarray(nodes, dtype=np.int64)
    below, own, below_level = numbers, opened, None
    found: list[Surrounding] = []
    for tier, level in levels:
        units = unit_of(level, nodes)
        unit = int(unit_of(level, [opened])[0])
        inside = units == unit
        names, counts = np.unique(below[inside], return_counts=True)
        members = tuple(zip(names.tolist(), counts.tolist(), strict=True))
        found.append(Surrounding(level, tier, unit, int(inside.sum()), below_level, members, own))
        if tier >= 0 and inside.all():
            break
        below, own, below_level = units, unit, level
    return found


def share_bytes_per_s(document: TopologyDocument, tier: int) -> float:
    """Return what every NIC has of the links up to a tier, as ``graph.build_graph`` thins them."""
    network = document.network
    if network is None:
        return 0.0
    return network.nic_bandwidth_bytes_per_s / narrowing(network, tier)
