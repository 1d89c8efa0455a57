"""The links of a node one by one: counts and patterns written out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from planner.topology.document import Component, Link, LinkKind, NodeType

__all__ = ["SingleLink", "ends", "expand", "merged_links", "parts_by_end"]


class SingleLink(NamedTuple):
    """One expanded link of a node; ``bandwidth_bytes_per_s`` counts the parallel ones."""

    a: str
    b: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float


def parts_by_end(components: Sequence[Component]) -> dict[str, tuple[str, ...]]:
    """Return what every possible end of a link stands for: a component, or one of its parts."""
    parts = {name: (name,) for component in components for name in component.names()}
    return parts | {component.id: component.names() for component in components}


def ends(parts: dict[str, tuple[str, ...]], link: Link) -> tuple[tuple[str, ...], ...]:
    """Return the parts at both ends of a link.

    Raises:
        ValueError: No component has that id, no part that name.
    """
    for end in link.between:
        if end not in parts:
            raise ValueError(
                f"link {link.label()} ends at {end!r}, which is no component; there are "
                f"{', '.join(sorted(parts)[:12])}"
            )
    return tuple(parts[end] for end in link.between)


def expand(parts: dict[str, tuple[str, ...]], link: Link) -> Iterator[SingleLink]:
    """Yield the links between single parts that ``link`` stands for."""
    left, right = ends(parts, link)
    if left == right:
        pairs = list(combinations(left, 2)) if link.pattern == "all" else []
    elif link.pattern == "all":
        pairs = list(product(left, right))
    else:
        pairs = _blocks(left, right, link)
    for a, b in pairs:
        yield SingleLink(a, b, link.kind, link.count * link.bandwidth_bytes_per_s, link.latency_s)


def merged_links(node: NodeType) -> dict[frozenset[str], SingleLink]:
    """Return one link per joined pair.

    Raises:
        ValueError: A link joins a part to itself, or two kinds of link join one pair.
    """
    merged: dict[frozenset[str], SingleLink] = {}
    parts = parts_by_end(node.components)
    for link in node.links:
        for single in expand(parts, link):
            pair = frozenset((single.a, single.b))
            if len(pair) == 1:
                raise ValueError(f"link {link.label()} joins {single.a} to itself")
            before = merged.get(pair)
            if before is not None:
                if before.kind != single.kind:
                    raise ValueError(
                        f"{single.a} and {single.b} are joined by {before.kind} and by "
                        f"{single.kind}; let one of them pass through a switch or cpu"
                    )
                single = before._replace(
                    bandwidth_bytes_per_s=before.bandwidth_bytes_per_s
                    + single.bandwidth_bytes_per_s,
                    latency_s=max(before.latency_s, single.latency_s),
                )
            merged[pair] = single
    return merged


def _blocks(left: tuple[str, ...], right: tuple[str, ...], link: Link) -> list[tuple[str, str]]:
    more, fewer = max(len(left), len(right)), min(len(left), len(right))
    if more % fewer:
        raise ValueError(
            f"link {link.label()} shares {more} ends among {fewer}, which does not come out even; "
            'use pattern "all" or name the parts one by one'
        )
    return [(left[i * len(left) // more], right[i * len(right) // more]) for i in range(more)]
