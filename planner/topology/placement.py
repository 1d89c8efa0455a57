"""Which nodes of a cluster a job may run on: as given, without the weak ones, or on others.

No prices here: ``planner.planning`` prices every option and takes the cheapest.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from planner.errors import InvalidInputError
from planner.topology.compile import first_nodes, live_nodes
from planner.topology.document import NvlinkDomain, Tier, TopologyDocument
from planner.topology.impair import trouble
from planner.topology.units import switches, unit_of

__all__ = ["Placement", "allocated_nodes", "packed_nodes", "placements"]

# Leaving nodes out may leave a number that no layout divides; rounder ones below are tried too.
_ROUND_NUMBERS: Final[tuple[int, ...]] = (1, 2, 4, 8, 64, 512)
_COMMON_ODD_PART: Final = 3
# Every option is a search of its own; beyond this many kinds of trouble all weak nodes go together.
_MOST_KINDS: Final = 3
# Units that hold all nodes, of which the one with fewest switches below is looked for.
_MOST_UNITS: Final = 64


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

    Names that the topology does not know are taken for its first nodes that are up, in the order
    given, where it names no nodes of its own.

    Raises:
        InvalidInputError: A host is named twice, not in the topology, down, or one too many.
    """
    (most_named, times), *_ = Counter(hosts).most_common(1)
    if times > 1:
        raise InvalidInputError(f"allocation names {most_named!r} twice", where="allocation")
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
        numbers = dict(zip(hosts, first_nodes(document, len(hosts)), strict=True))
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
    """Return the options for a job on ``nodes``, as asked for first.

    A healthy, uniform cluster has one, unless few layouts divide that many nodes.

    Args:
        document: Which cluster.
        nodes: Those asked for, live, ascending.
        spares: Live nodes that may be taken in place of weak ones.
    """
    weak = _weak_nodes(document)
    healthy = [node for node in spares if node not in weak]
    found = {tuple(nodes): Placement("keep", tuple(nodes))}
    parts = [(part, _ROUND_NUMBERS) for part in _strong_parts(document, nodes, weak)]
    parts += [(part, (1,)) for part in _but_one_kind(nodes, weak)]
    if not parts and _is_awkward(len(nodes)):
        parts.append((list(nodes), _ROUND_NUMBERS))
    for kept, multiples in parts:
        dropped = _dropped(document, nodes, kept, multiples)
        for option in (*dropped, *_moved(document, nodes, kept, healthy)):
            found.setdefault(option.nodes, option)
    return tuple(found.values())


def _is_awkward(num_nodes: int) -> bool:
    """Return whether the number has an odd part that batches and layers rarely have: 31, 28, 10."""
    return num_nodes // (num_nodes & -num_nodes) > _COMMON_ODD_PART


def packed_nodes(document: TopologyDocument, nodes: Sequence[int]) -> tuple[int, ...] | None:
    """Return as many healthy nodes of the same types under as few switches as there are.

    None without any, and where ``nodes`` are healthy and under no more switches.

    The fewest units of the outermost level count first, then those of the next one inside. They
    are found where one unit holds all; several are taken fullest first.
    """
    weak, kinds = _weak_nodes(document), {document.type_number(node) for node in nodes}
    live = [n for n in live_nodes(document) if n not in weak and document.type_number(n) in kinds]
    if document.network is None or len(live) < len(nodes):
        return None
    levels = _levels(document)
    chosen = _packed(levels, np.array(live), len(nodes))
    are_weak = any(node in weak for node in nodes)
    return chosen if are_weak or _spread(levels, chosen) < _spread(levels, nodes) else None


def _packed(
    levels: Sequence[NvlinkDomain | Tier], nodes: npt.NDArray[np.int64], count: int
) -> tuple[int, ...]:
    """Return ``count`` of ``nodes`` under few units of ``levels``, innermost first."""
    if not levels:
        return tuple(nodes[:count].tolist())
    *inner, level = levels
    of_unit = np.unique(unit_of(level, nodes.tolist()), return_inverse=True)[1]
    counts = np.bincount(of_unit)
    fullest = np.argsort(-counts, kind="stable")
    holding = fullest[counts[fullest] >= count][:_MOST_UNITS]
    if len(holding) == 0:
        enough = int(np.searchsorted(np.cumsum(counts[fullest]), count)) + 1
        return _packed(inner, nodes[np.isin(of_unit, fullest[:enough])], count)
    tried = [_packed(inner, nodes[of_unit == unit], count) for unit in holding]
    return min(tried, key=lambda chosen: _spread(inner, chosen))


def _spread(levels: Sequence[NvlinkDomain | Tier], nodes: Sequence[int]) -> list[int]:
    """Return how many units of every level hold ``nodes``, outermost first."""
    return [len(np.unique(unit_of(level, nodes))) for level in reversed(levels)]


def _levels(document: TopologyDocument) -> list[NvlinkDomain | Tier]:
    """Return what nodes are joined by, innermost first."""
    tiers = document.network.tiers if document.network else ()
    return [level for level in (document.nvlink_domain, *tiers) if level is not None]


def _weak_nodes(document: TopologyDocument) -> dict[int, list[Hashable]]:
    """Return what is wrong with the nodes with a weak part, or under a weak link upward."""
    found, trunks = trouble(document)
    weak: dict[int, list[Hashable]] = {node: [what] for node, what in found.items()}
    network, known = document.network, switches(document) if trunks else {}
    for impairment in trunks:
        for end in impairment.link or (str(impairment.part),):
            switch = known.get(end)
            if network is None or switch is None:
                continue
            if impairment.link is None or switch.parent in impairment.link:
                units = unit_of(network.tiers[switch.tier], range(document.max_nodes))
                for node in np.flatnonzero(units == switch.unit).tolist():
                    weak.setdefault(node, []).append(str(impairment))
    return weak


def _strong_parts(
    document: TopologyDocument, nodes: Sequence[int], weak: dict[int, list[Hashable]]
) -> Iterator[list[int]]:
    """Yield what may be kept of ``nodes``: the strong, and every type alone."""
    strong = [node for node in nodes if node not in weak]
    if len(strong) < len(nodes):
        yield strong
    kinds = dict.fromkeys(document.type_number(node) for node in nodes)
    for kind in kinds if len(kinds) > 1 else ():
        yield [node for node in strong if document.type_number(node) == kind]
        yield [node for node in nodes if document.type_number(node) == kind]


def _but_one_kind(nodes: Sequence[int], weak: dict[int, list[Hashable]]) -> Iterator[list[int]]:
    """Yield all but the nodes with the same trouble, for each of a few troubles."""
    troubles = list({tuple(weak[node]): None for node in nodes if node in weak})
    for what in troubles if 1 < len(troubles) <= _MOST_KINDS else ():
        yield [node for node in nodes if tuple(weak.get(node, ())) != what]


def _dropped(
    document: TopologyDocument,
    nodes: Sequence[int],
    kept: Sequence[int],
    multiples: Sequence[int],
) -> Iterator[Placement]:
    """Yield ``kept`` alone, and fewer where that is a rounder number."""
    for size in dict.fromkeys(len(kept) // multiple * multiple for multiple in multiples):
        if size:
            fewer = _packed(_levels(document), np.array(kept), size)
            yield Placement("drop", fewer, _without(nodes, fewer))


def _moved(
    document: TopologyDocument, nodes: Sequence[int], kept: Sequence[int], spares: Sequence[int]
) -> Iterator[Placement]:
    """Yield ``kept`` with spares of its type in place of the others, if there are enough."""
    own = document.type_number((kept or nodes)[0])
    alike = [node for node in spares if document.type_number(node) == own]
    added = _nearest(document, kept or nodes, alike, len(nodes) - len(kept))
    if added and len(added) + len(kept) == len(nodes):
        moved = tuple(sorted((*kept, *added)))
        yield Placement("move", moved, _without(nodes, moved), tuple(sorted(added)))


def _nearest(
    document: TopologyDocument, to: Sequence[int], spares: Sequence[int], count: int
) -> list[int]:
    """Return spares under the same switches as ``to`` first, then by number."""
    distance = np.zeros(len(spares), dtype=int)
    for level in _levels(document):
        distance += ~np.isin(unit_of(level, spares), unit_of(level, to))
    order = np.argsort(distance, kind="stable")[:count]
    return [spares[i] for i in order]


def _without(nodes: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(nodes) - set(kept)))
