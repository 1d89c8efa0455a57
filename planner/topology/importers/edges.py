"""Links of a node as they are found, one pair each, written as short as a document allows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.topology.checks import MAX_SOURCE_CHARS
from planner.topology.document import Component, Link, LinkKind
from planner.topology.expand import expand, parts_by_end

__all__ = ["Edge", "shortest"]


@dataclass(frozen=True, slots=True)
class Edge:
    """``count`` parallel links between two parts, by their names in the document."""

    a: str
    b: str
    kind: LinkKind
    bytes_per_s: float
    latency_s: float
    source: str
    count: int = 1


def shortest(edges: Iterable[Edge], components: Sequence[Component]) -> tuple[Link, ...]:
    """Return links that stand for ``edges``: one for all equal ones where a pattern fits.

    Args:
        edges: Each pair of parts and kind once.
        components: Of the node; they hold every part that an edge names.
    """
    parts = parts_by_end(components)
    owner = {name: component.id for component in components for name in component.names()}
    groups: dict[tuple[object, ...], list[Edge]] = {}
    for edge in edges:
        figures = (edge.kind, edge.count, edge.bytes_per_s, edge.latency_s, edge.source)
        groups.setdefault((owner[edge.a], owner[edge.b], *figures), []).append(edge)
    links: list[Link] = []
    for group in groups.values():
        links += _patterned(group, owner, parts)
    return tuple(links)


def _patterned(
    group: Sequence[Edge], owner: dict[str, str], parts: dict[str, tuple[str, ...]]
) -> list[Link]:
    """Return one link for equal edges between two components, or one for each."""
    first = group[0]
    one_by_one = [_link(edge, edge.a, edge.b) for edge in group]
    if len(group) == 1 and len(parts[owner[first.a]]) == len(parts[owner[first.b]]) == 1:
        return one_by_one
    wanted = {frozenset((edge.a, edge.b)) for edge in group}
    whole = _link(first, owner[first.a], owner[first.b])
    for link in (whole, whole.model_copy(update={"pattern": "all"})):
        try:
            pairs = [frozenset((single.a, single.b)) for single in expand(parts, link)]
        except ValueError:  # blocks that do not come out even
            continue
        if len(pairs) == len(wanted) and set(pairs) == wanted:
            return [link]
    return one_by_one


def _link(edge: Edge, a: str, b: str) -> Link:
    return Link(
        between=(a, b),
        kind=edge.kind,
        count=edge.count,
        bandwidth_bytes_per_s=edge.bytes_per_s,
        latency_s=edge.latency_s,
        source=edge.source[:MAX_SOURCE_CHARS],
    )
