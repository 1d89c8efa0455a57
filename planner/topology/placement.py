"""Which nodes of a cluster a job may run on: as given, without the weak ones, or on others.

No prices here: ``planner.planning`` prices every option and takes the cheapest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from planner.errors import InvalidInputError
from planner.topology.compile import live_nodes
from planner.topology.document import TopologyDocument
from planner.topology.impair import trouble
from planner.topology.units import switches, unit_of

__all__ = ["Placement", "allocated_nodes", "packed_nodes", "placements"]

# Leaving nodes out may leave a number that no layout divides; rounder ones below are tried too.
_ROUND_NUMBERS: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes to run on.

    Attributes:
        choice: keep = as asked; drop = without the weak ones; move = on others in their place.
        nodes: Their numbers, ascending: units of the network stay together.
        left_out: Of those asked for, the ones not used.
        added: Used in their place.
    """

    choice: Literal["keep", "drop", "move"]
    nodes: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


def allocated_nodes(
    document: TopologyDocument, hosts: Sequence[str]
) -> tuple[tuple[int, ...], dict[int, str], str | None]:
    """Return the nodes of an allocation, ascending, their names, and what had to be assumed.

    Names that the topology does not know are taken for its first nodes, in the order given,
    where it names no nodes of its own.

    Raises:
        InvalidInputError: A host is named twice, not in the topology, down, or one too many.
    """
    if len(set(hosts)) != len(hosts):
        twice = next(host for host in hosts if list(hosts).count(host) > 1)
        raise InvalidInputError(f"allocation names {twice!r} twice", where="allocation")
    if len(hosts) > document.max_nodes:
        raise InvalidInputError(
            f"allocation has {len(hosts)} nodes but topology {document.name!r} has "
            f"{document.max_nodes}",
            where="allocation",
        )
    numbers = {document.host(node): node for node in range(document.max_nodes)}
    unknown = [host for host in hosts if host not in numbers]
    assumed = None
    if unknown and (document.hosts or len(unknown) < len(hosts)):
        raise InvalidInputError(
            f"allocation names {unknown[0]!r}, which topology {document.name!r} does not have; "
            f"its nodes are {document.host(0)} to {document.host(document.max_nodes - 1)}",
            where="allocation",
        )
    if unknown:
        numbers = {host: node for node, host in enumerate(hosts)}
        assumed = (
            f"topology {document.name!r} names no hosts: the {len(hosts)} of the allocation are "
            "taken for its first nodes, in the order given; import it with a Slurm topology or "
            "ibnetdiscover file to place them"
        )
    of_hosts = {numbers[host]: host for host in hosts}
    nodes = tuple(sorted(of_hosts))
    live = set(live_nodes(document)) if document.impairments else set(nodes)
    for node in nodes:
        if node not in live:
            raise InvalidInputError(
                f"allocation has {of_hosts[node]!r}, which is down; leave it out",
                where="allocation",
            )
    return nodes, of_hosts, assumed


def placements(
    document: TopologyDocument, nodes: Sequence[int], spares: Iterable[int]
) -> tuple[Placement, ...]:
    """Return the options for a job on ``nodes``; a healthy, uniform cluster has one.

    Args:
        document: Which cluster.
        nodes: Those asked for, live, ascending.
        spares: Live nodes that may be taken in place of weak ones.
    """
    weak = _weak_nodes(document)
    mine = [node for node in nodes if node in weak]
    found = [Placement("keep", tuple(nodes))]
    found += _one_type_each(document, nodes)
    if not mine:
        return tuple(found)
    strong = [node for node in nodes if node not in weak]
    for multiple in _ROUND_NUMBERS:
        kept = strong[: len(strong) // multiple * multiple]
        if kept and all(len(kept) != len(other.nodes) for other in found):
            found.append(Placement("drop", tuple(kept), _without(nodes, kept)))
    own = document.island_of(strong[0] if strong else mine[0])
    healthy = [n for n in spares if n not in weak and document.island_of(n) == own]
    added = _nearest(document, strong or mine, healthy, len(mine))
    if len(added) == len(mine):
        moved = tuple(sorted((*strong, *added)))
        found.append(Placement("move", moved, tuple(mine), tuple(sorted(added))))
    return tuple(found)


def packed_nodes(document: TopologyDocument, num_nodes: int) -> tuple[int, ...] | None:
    """Return live, healthy nodes under as few switches as possible; None where there are too few.

    The innermost tier with a unit that holds them decides; there the fewest units below.
    """
    weak = _weak_nodes(document)
    live = np.array([node for node in live_nodes(document) if node not in weak])
    if document.network is None or len(live) < num_nodes:
        return None
    chosen = live
    for level in reversed([document.nvlink_domain, *document.network.tiers]):
        if level is None:
            continue
        of_unit = np.unique(unit_of(level, chosen.tolist()), return_inverse=True)[1]
        counts = np.bincount(of_unit)
        if counts.max() >= num_nodes:
            fullest_first = [int(np.argmax(counts))]
        else:
            fullest_first = _fewest(counts, num_nodes)
        chosen = chosen[np.isin(of_unit, fullest_first)]
    return tuple(chosen[:num_nodes].tolist())


def _fewest(counts: np.ndarray[tuple[int], np.dtype[np.int64]], num_nodes: int) -> list[int]:
    """Return the fullest units that together hold ``num_nodes``."""
    order = np.argsort(-counts, kind="stable")
    enough = int(np.searchsorted(np.cumsum(counts[order]), num_nodes)) + 1
    return order[:enough].tolist()


def _weak_nodes(document: TopologyDocument) -> set[int]:
    """Return the nodes with a weak part, or under a switch with a weak link upward."""
    found, trunks = trouble(document)
    weak = set(found)
    network, known = document.network, switches(document) if trunks else {}
    for impairment in trunks:
        for end in impairment.link or (str(impairment.part),):
            switch = known.get(end)
            if network is None or switch is None:
                continue
            if impairment.link is None or switch.parent in impairment.link:
                units = unit_of(network.tiers[switch.tier], range(document.max_nodes))
                weak |= set(np.flatnonzero(units == switch.unit).tolist())
    return weak


def _one_type_each(document: TopologyDocument, nodes: Sequence[int]) -> list[Placement]:
    """Return the nodes of each type alone, where they are of several."""
    kinds: dict[int, list[int]] = {}
    for node in nodes if document.islands else ():
        island = document.island_of(node)
        kinds.setdefault(-1 if island is None else island.first_node, []).append(node)
    if len(kinds) < 2:
        return []
    return [Placement("drop", tuple(of), _without(nodes, of)) for of in kinds.values()]


def _nearest(
    document: TopologyDocument, to: Sequence[int], spares: Sequence[int], count: int
) -> list[int]:
    """Return spares under the same switches as ``to`` first, then by number."""
    tiers = [document.nvlink_domain, *(document.network.tiers if document.network else ())]
    distance = np.zeros(len(spares), dtype=int)
    for tier in tiers:
        if tier is not None and len(spares):
            distance += ~np.isin(unit_of(tier, spares), unit_of(tier, to))
    order = np.argsort(distance, kind="stable")[:count]
    return [spares[i] for i in order]


def _without(nodes: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(nodes) - set(kept)))
