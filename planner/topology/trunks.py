"""What weak and broken cables between switches leave of each tier."""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.errors import InvalidInputError
from planner.topology.document import Impairment, TopologyDocument
from planner.topology.units import Switch, num_rails, switches, unit_of

__all__ = ["trunk_shares"]


def trunk_shares(
    document: TopologyDocument, nodes: Sequence[int], trunks: Sequence[Impairment]
) -> tuple[float, ...]:
    """Return, per tier, the part of its rate that the weakest way up to it leaves.

    A weak cable of one rail slows the whole level: the library splits evenly over rails. A broken
    one is known to it, and the other rails carry what they can.

    Args:
        document: Which cluster.
        nodes: Those in use; what is wrong elsewhere costs nothing.
        trunks: Impairments between switches.

    Raises:
        InvalidInputError: One of them names no link between switches, or cuts ``nodes`` apart.
    """
    network = document.network
    num_tiers = len(network.tiers) if network else 0
    if not trunks or network is None:
        if trunks:
            raise _unknown(document, trunks[0], {})
        return (1.0,) * num_tiers
    known = switches(document)
    weakest = [1.0] * num_tiers
    broken: dict[str, set[int]] = {}
    units = [set(np.unique(unit_of(tier, nodes)).tolist()) for tier in network.tiers]
    for impairment, name in _cables(document, trunks, known):
        lower = known[name]
        crossed = len(units[lower.tier]) > 1 and lower.unit in units[lower.tier]
        if not crossed:
            continue
        if impairment.factor > 0:
            weakest[lower.tier + 1] = min(weakest[lower.tier + 1], impairment.factor)
            continue
        unit = name.partition("/")[0]
        broken.setdefault(unit, set()).add(lower.rail)
        left = 1 - len(broken[unit]) / (num_rails(document) if lower.tier == 0 else 1)
        if left <= 0:
            raise InvalidInputError(
                f"topology {document.name!r}: {impairment} leaves {unit} no way to the others; "
                "mark its nodes down, or ask for the nodes of one unit",
                where="impairments",
            )
        weakest[lower.tier + 1] = min(weakest[lower.tier + 1], left)
    return tuple(weakest)


def _cables(
    document: TopologyDocument, trunks: Sequence[Impairment], known: dict[str, Switch]
) -> Iterator[tuple[Impairment, str]]:
    """Yield every impairment with the switch below its link; a whole switch means all its links.

    Raises:
        InvalidInputError: It names no link between switches.
    """
    for impairment in trunks:
        if impairment.link is not None:
            a, b = impairment.link
            ends = [x for x, y in ((a, b), (b, a)) if x in known and known[x].parent == y]
        else:
            ends = [x for x, s in known.items() if s.parent and impairment.part in (x, s.parent)]
        if not ends:
            raise _unknown(document, impairment, known)
        yield from ((impairment, end) for end in ends)


def _unknown(
    document: TopologyDocument, impairment: Impairment, known: dict[str, Switch]
) -> InvalidInputError:
    ends = impairment.link or (str(impairment.part),)
    hints = [
        f"{end} is below {known[end].parent}" if known[end].parent else f"{end} is at the top"
        for end in ends
        if end in known
    ]
    parts = next(iter(document.node.components)).names()
    hints = hints or [
        f"nodes are called {document.host(0)} to {document.host(document.max_nodes - 1)}, their "
        f"parts as {document.host(0)}/{parts[0]}"
        + (f", switches as {', '.join(list(known)[:2])}" if known else "")
    ]
    return InvalidInputError(
        f"topology {document.name!r}: nothing is called {':'.join(ends)}; {'; '.join(hints)}",
        where="impairments",
    )
