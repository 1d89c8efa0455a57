"""One node in full: a box for every part, a line for every pair that is joined."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Self

from planner.topology.document import ComponentKind, NodeType, TopologyDocument
from planner.topology.drawing.placing import Box, Placed, place_node
from planner.topology.drawing.svg import Scale, box, line, mark
from planner.topology.drawing.wires import Health, Wire, node_wires
from planner.units import format_rate

__all__ = ["OpenedNode", "link_title", "node_boxes", "node_lines"]

# Sources of all links together, in letters, and of one: what bounds the size of a drawing.
_MAX_SOURCES: Final = 60_000
_MAX_SOURCE: Final = 240
# Less of a source would say nothing.
_MIN_SOURCE: Final = 30
_EDGE: Final = 4.0
_PORT: Final = 9.0
_WORKERS: Final = ("gpu", "process")

Side = Literal["top", "bottom"]


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """The node that is drawn in full.

    Attributes:
        document: Of its cluster.
        number: Of the node.
        node: Its type.
        wires: Its links.
        placed: Where its parts stand, from (0, 0).
        health: Of the cluster.
    """

    document: TopologyDocument
    number: int
    node: NodeType
    wires: tuple[Wire, ...]
    placed: Placed
    health: Health

    @classmethod
    def of(cls, document: TopologyDocument, number: int, health: Health) -> Self:
        """Return a node with its parts in place."""
        node = document.node_type(number)
        wires = tuple(node_wires(node))
        placed = place_node(node, [(wire.a, wire.b) for wire in wires])
        return cls(document, number, node, wires, placed, health)

    @property
    def host(self) -> str:
        """Return what its parts' names begin with."""
        return self.document.host(self.number)

    def at(self, x: float, y: float) -> dict[str, Box]:
        """Return the boxes of its parts when its corner is at (x, y)."""
        return {
            name: Box(x + b.x, y + b.y, b.width, b.height) for name, b in self.placed.boxes.items()
        }

    def cut_source(self, source: str) -> str:
        """Return as much of the source of a link as there is room for."""
        num_lines = len(self.wires) + self.node.count("nic")
        length = min(_MAX_SOURCE, _MAX_SOURCES // num_lines)
        if length < _MIN_SOURCE:
            return ""
        return source if len(source) <= length else source[:length] + "..."

    def factor(self, part: str) -> float:
        """Return what is left of a part."""
        return self.health.parts.get(f"{self.host}/{part}", 1.0)

    def left_of(self, wire: Wire) -> float:
        """Return what is left of a link."""
        if not self.health.hosts:
            return 1.0
        return self.health.link(f"{self.host}/{wire.a}", f"{self.host}/{wire.b}", but=self.workers)

    def is_named(self, wire: Wire) -> bool:
        """Return whether the link itself is impaired, and not only a part that it ends at."""
        ends = frozenset((f"{self.host}/{wire.a}", f"{self.host}/{wire.b}"))
        return ends in self.health.links

    @property
    def workers(self) -> frozenset[str]:
        """Return the names of its workers in the cluster."""
        return frozenset(f"{self.host}/{name}" for name in self.node.workers())


def link_title(what: str, kind: str, bytes_per_s: float, factor: float, source: str) -> str:
    """Return what a pointer over a link shows."""
    left = "" if factor == 1 else ", down" if factor == 0 else f", {factor:g} of it left"
    about = f"\n{source}" if source else ""
    return f"{what}: {kind}, {format_rate(bytes_per_s, 'B/s')} per direction{left}{about}"


def node_boxes(opened: OpenedNode, boxes: dict[str, Box]) -> Iterator[str]:
    """Yield a box for every part."""
    island = opened.document.island_of(opened.number)
    device = island.device_name if island else opened.document.device_name
    for component in opened.node.components:
        what = component.kind.replace("_", " ")
        if component.kind in _WORKERS:
            what += f", {device}"
        if component.multicast:
            what += ", copies and reduces (multicast)"
        for name in component.names():
            yield box(
                boxes[name],
                component.kind,
                [name],
                title=f"{name}: {what}",
                part=name,
                factor=opened.factor(name),
            )


def node_lines(
    opened: OpenedNode, boxes: dict[str, Box], scale: Scale
) -> Iterator[tuple[str, str]]:
    """Yield a line for every joined pair, the slowest first, and the mark of an impaired one."""
    ports = _ports(opened, boxes)
    for i in sorted(range(len(opened.wires)), key=lambda i: opened.wires[i].bytes_per_s):
        wire = opened.wires[i]
        factor = opened.left_of(wire)
        links = "" if wire.num_links == 1 else f"{wire.num_links} x "
        source = opened.cut_source(wire.source)
        path, middle = _path(opened, boxes, wire, ports[i])
        drawn = line(
            path,
            scale,
            wire.bytes_per_s,
            title=link_title(
                f"{wire.a} - {wire.b}", links + wire.kind, wire.bytes_per_s, factor, source
            ),
            factor=factor,
        )
        yield drawn, mark(*middle, factor) if opened.is_named(wire) else ""


def _sides(
    opened: OpenedNode, kinds: dict[str, ComponentKind], wire: Wire
) -> tuple[Side, Side] | None:
    """Return the sides that a link leaves its ends from; None for a line straight across."""
    rows = opened.placed.rows
    if rows[wire.a] != rows[wire.b]:
        return ("bottom", "top") if rows[wire.a] < rows[wire.b] else ("top", "bottom")
    if (wire.a, wire.b) in opened.placed.across:
        return None
    is_below = kinds[wire.a] in (*_WORKERS, "nvswitch")
    return ("bottom", "bottom") if is_below else ("top", "top")


def _ports(
    opened: OpenedNode, boxes: dict[str, Box]
) -> list[tuple[tuple[float, float], tuple[float, float]] | None]:
    """Return where each link meets its two ends, ordered so that neighbours do not cross."""
    rows = opened.placed.rows
    kinds = {name: c.kind for c in opened.node.components for name in c.names()}
    sides = [_sides(opened, kinds, wire) for wire in opened.wires]
    meeting: dict[tuple[str, Side], list[tuple[tuple[int, float], int, int]]] = {}
    for i, (wire, side) in enumerate(zip(opened.wires, sides, strict=True)):
        if side is None:
            continue
        for end, (name, other) in enumerate(((wire.a, wire.b), (wire.b, wire.a))):
            there = boxes[other].centre - boxes[name].centre
            # Arcs to near neighbours lie within those to far ones.
            key = (1, there) if rows[name] != rows[other] else (0 if there < 0 else 2, -there)
            meeting.setdefault((name, side[end]), []).append((key, i, end))
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for (name, side_of), links in meeting.items():
        place = boxes[name]
        step = min(_PORT, (place.width - 2 * _EDGE) / len(links))
        for position, (_, i, end) in enumerate(sorted(links)):
            x = place.centre + step * (position - (len(links) - 1) / 2)
            found[i, end] = (x, place.y if side_of == "top" else place.bottom)
    return [None if side is None else (found[i, 0], found[i, 1]) for i, side in enumerate(sides)]


def _path(
    opened: OpenedNode,
    boxes: dict[str, Box],
    wire: Wire,
    ports: tuple[tuple[float, float], tuple[float, float]] | None,
) -> tuple[str, tuple[float, float]]:
    """Return the path of a link and its middle."""
    if ports is None:
        left, right = sorted((boxes[wire.a], boxes[wire.b]), key=lambda place: place.x)
        y = left.y + left.height / 2
        x1, x2 = left.x + left.width, right.x
        return f"M{x1:.1f} {y:.1f}H{x2:.1f}", ((x1 + x2) / 2, y - 4)
    (x1, y1), (x2, y2) = sorted(ports, key=lambda port: port[1])
    rows = opened.placed.rows
    if rows[wire.a] == rows[wire.b]:
        down = y1 == boxes[wire.a].bottom
        depth = opened.placed.arcs[wire.a, wire.b] * (1 if down else -1)
        y = y1 + depth * 4 / 3
        middle = ((x1 + x2) / 2, y1 + depth)
        return f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y:.1f} {x2:.1f} {y:.1f} {x2:.1f} {y1:.1f}", middle
    start = y1
    if abs(rows[wire.a] - rows[wire.b]) > 1:
        # Straight down past the rows between, then to the box.
        start = max(y1, y2 - 30)
    lane = f"V{start:.1f}" if start > y1 else ""
    return f"M{x1:.1f} {y1:.1f}{lane}L{x2:.1f} {y2:.1f}", ((x1 + x2) / 2, (start + y2) / 2)
