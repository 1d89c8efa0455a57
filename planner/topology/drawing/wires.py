"""Links one by one with their sources, and what is left of each, for drawings."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from planner.topology.document import Impairment, LinkKind, NodeType, TopologyDocument
from planner.topology.expand import expand, parts_by_end

__all__ = ["Health", "Wire", "node_wires"]


@dataclass(frozen=True, slots=True)
class Wire:
    """All parallel links between two parts of a node.

    Attributes:
        a: One end.
        b: The other.
        kind: Of the links.
        num_links: How many there are.
        bytes_per_s: In one direction of all of them, when healthy.
        source: Where the figures come from.
    """

    a: str
    b: str
    kind: LinkKind
    num_links: int
    bytes_per_s: float
    source: str


def node_wires(node: NodeType) -> list[Wire]:
    """Return the links of a node, those of a pair together, in the order of the document."""
    parts = parts_by_end(node.components)
    wires: dict[tuple[str, str], Wire] = {}
    for link in node.links:
        for single in expand(parts, link):
            pair = (single.a, single.b) if single.a < single.b else (single.b, single.a)
            before = wires.get(pair)
            count, rate, source = link.count, single.bandwidth_bytes_per_s, link.source
            if before is not None:
                count, rate = count + before.num_links, rate + before.bytes_per_s
                if source not in before.source:
                    source = f"{before.source}; {source}"
            wires[pair] = Wire(*pair, single.kind, count, rate, source)
    return list(wires.values())


@dataclass(frozen=True, slots=True)
class Health:
    """What is left of links and parts, by their names in the graph of the cluster.

    Attributes:
        links: By both ends.
        parts: Of parts; of hosts, whose GPUs compute slower.
        hosts: First words of all those names: hosts, and units of switches.
    """

    links: Mapping[frozenset[str], float]
    parts: Mapping[str, float]
    hosts: frozenset[str]

    @classmethod
    def of(cls, document: TopologyDocument) -> Self:
        """Return the health of a cluster."""
        links: dict[frozenset[str], float] = {}
        parts: dict[str, float] = {}
        for impairment in document.impairments:
            if impairment.link is not None:
                pair = frozenset(impairment.link)
                links[pair] = links.get(pair, 1.0) * impairment.factor
            else:
                part = str(impairment.part)
                parts[part] = parts.get(part, 1.0) * impairment.factor
        names = (name for i in document.impairments for name in _ends_of(i))
        return cls(links, parts, frozenset(name.partition("/")[0] for name in names))

    def link(self, a: str, b: str, *, but: Collection[str] = ()) -> float:
        """Return what is left of the link of two parts; parts in ``but`` only compute slower."""
        left = self.links.get(frozenset((a, b)), 1.0)
        for end in (a, b):
            if end not in but:
                left *= self.parts.get(end, 1.0)
        return left


def _ends_of(impairment: Impairment) -> tuple[str, ...]:
    """Return the names that an impairment carries."""
    return impairment.link or (str(impairment.part),)
