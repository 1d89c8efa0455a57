"""A cluster as a drawing: one node in full, what surrounds it as boxes, switches above.

Of every tier one unit is opened, the one that holds the node; of the others a few are shown, those
with something wrong first, and the rest is counted. NVSwitches of an NVLink domain stand below
its nodes, so that the links to them cross no cable. The size of the drawing depends on the parts
of one node, never on how many nodes there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from planner.topology.document import NvlinkDomain, Tier, TopologyDocument
from planner.topology.drawing.legend import foot
from planner.topology.drawing.node import OpenedNode, link_title, node_boxes, node_lines
from planner.topology.drawing.placing import Box, text_width
from planner.topology.drawing.surroundings import Surrounding, share_bytes_per_s, surroundings
from planner.topology.drawing.svg import Scale, box, cut, label, line, mark, scale_of, svg
from planner.topology.drawing.wires import Health
from planner.topology.units import switch_name
from planner.units import counted, format_rate

__all__ = ["draw_svg"]

_MARGIN: Final = 24.0
_TITLE: Final = 62.0
_BAR: Final = 38.0
_RAIL_BAR: Final = 54.0
_GAP: Final = 46.0
_CELL: Final = 26.0
_CARD: Final = 92.0
_SPACE: Final = 14.0
_PAD: Final = 16.0
_STRIP: Final = 22.0
_MAX_CARDS: Final = 3
_MAX_RAILS: Final = 64
_MAX_ABOUT: Final = 240
_MAX_SWITCHES: Final = 24
_SWITCH: Final = 34.0
_MIN_WIDTH: Final = 700.0


@dataclass(slots=True)
class _Sheet:
    """What is drawn: lines lie on frames, boxes on lines.

    Attributes:
        opened: The node in full.
        parts: Its boxes.
        frame: Around it.
        scale: Of bandwidths.
        right: Where the drawing ends so far.
        frames: Elements at the back.
        lines: Elements in the middle.
        boxes: Elements in front.
    """

    opened: OpenedNode
    parts: dict[str, Box]
    frame: Box
    scale: Scale
    right: float
    frames: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Card:
    """A unit that is not opened, or a node.

    Attributes:
        place: Where it is drawn.
        name: Of it.
        num_nics: What leads up from it; of a unit as if all its nodes were of the common type.
    """

    place: Box
    name: str
    num_nics: int


def draw_svg(document: TopologyDocument, nodes: int | Sequence[int] | None = None) -> str:
    """Return a drawing of some nodes of a cluster as SVG, without scripts or references.

    Args:
        document: Which cluster.
        nodes: How many, the first ones, those that are down included; or their numbers; None
            means all.

    Raises:
        InvalidInputError: ``nodes`` is not a whole number from 1 to ``max_nodes``.
    """
    if nodes is None:
        nodes = document.max_nodes
    if isinstance(nodes, int):
        nodes = range(document.checked_num_nodes(nodes))
    health = Health.of(document)
    opened = OpenedNode.of(document, _opened(document, nodes, health), health)
    around = surroundings(document, nodes, opened.number)
    sheet = _sheet(opened, around)
    _draw_opened(sheet)
    bottom = _draw_around(sheet, around)
    width = max(sheet.right + _MARGIN, _MIN_WIDTH)
    about = _about(document, nodes)
    body = [
        label(_MARGIN, 30, cut(document.name, width - 2 * _MARGIN, 17), "title"),
        label(_MARGIN, 48, cut(about, width - 2 * _MARGIN), "quiet"),
        *sheet.frames,
        *sheet.lines,
        *sheet.boxes,
    ]
    legend, height = foot(opened, sheet.scale, Box(_MARGIN, bottom + 30, width - 2 * _MARGIN))
    return svg("\n".join([*body, *legend]), width, height, f"{document.name}: {about}")


def _about(document: TopologyDocument, nodes: Sequence[int]) -> str:
    ranks = "ranks" if document.node.count("process") else "GPUs"
    total = len(nodes) * document.gpus_per_node
    devices = dict.fromkeys([document.device_name, *(i.device_name for i in document.islands)])
    size = f"{counted(len(nodes), 'node')} of {document.gpus_per_node} x {', '.join(devices)}"
    return f"{size}: {total:,} {ranks}"


def _opened(document: TopologyDocument, nodes: Sequence[int], health: Health) -> int:
    """Return the node to draw in full: the first with something wrong inside, or the first."""
    named = [name for name in health.parts if "/" in name]
    named += [end for pair in health.links for end in pair]
    hosts = {name.partition("/")[0] for name in named}
    if hosts:
        return next((node for node in nodes if document.host(node) in hosts), nodes[0])
    return nodes[0]


def _sheet(opened: OpenedNode, around: Sequence[Surrounding]) -> _Sheet:
    rates = [wire.bytes_per_s * opened.left_of(wire) for wire in opened.wires]
    top = _TITLE
    for ring in around:
        if isinstance(ring.level, Tier):
            rates.append(share_bytes_per_s(opened.document, ring.tier))
            top += _GAP + _bar_height(opened.document, ring)
        else:
            rates.append(ring.level.bandwidth_bytes_per_s)
    width = opened.placed.width + 2 * _PAD
    frame = Box(_MARGIN, top, width, opened.placed.height + 2 * _PAD + _STRIP)
    parts = opened.at(_MARGIN + _PAD, top + _PAD)
    return _Sheet(opened, parts, frame, scale_of(rates), _MARGIN + width)


def _draw_opened(sheet: _Sheet) -> None:
    opened, frame = sheet.opened, sheet.frame
    host, factor = opened.host, opened.health.parts.get(opened.host, 1.0)
    sheet.frames.append(
        box(frame, "frame", part=host, title=f"{host}: {opened.node.source[:_MAX_ABOUT]}")
    )
    for drawn, marked in node_lines(opened, sheet.parts, sheet.scale):
        sheet.lines.append(drawn)
        sheet.boxes += [marked] if marked else []
    sheet.boxes += node_boxes(opened, sheet.parts)
    island = opened.document.island_of(opened.number)
    device = island.device_name if island else opened.document.device_name
    text = f"{host}: {opened.document.gpus_per_node} x {device}"
    if factor != 1:
        text += ", down" if factor == 0 else f", computes at {factor:g}"
    words = cut(text, frame.width - 16)
    style = "bad" if factor != 1 else ""
    chip = Box(frame.x + 4, frame.bottom - 20, text_width(words) * 0.9 + 8, 17)
    sheet.boxes.append(box(chip, "chip"))
    sheet.boxes.append(label(frame.x + 8, frame.bottom - 8, words, style))


def _draw_around(sheet: _Sheet, around: Sequence[Surrounding]) -> float:
    """Draw what surrounds the node, level by level; return where it ends below."""
    frame, bottom = sheet.frame, sheet.frame.bottom
    like, joined = Box(0, frame.y, _CARD, frame.height), list[_Card]()
    ends = [
        (f"{sheet.opened.host}/{nic}", sheet.parts[nic].centre, sheet.parts[nic].y)
        for nic in sheet.opened.node.names("nic")
    ]
    y = frame.y
    for ring in around:
        joined += _draw_cards(sheet, ring, like)
        if isinstance(ring.level, NvlinkDomain):
            bottom = _draw_domain(sheet, ring.level, ring.unit, joined)
        else:
            height = _bar_height(sheet.opened.document, ring)
            y -= height + _GAP
            bar = Box(frame.x, y, sheet.right - frame.x, height)
            ends = _draw_tier(sheet, ring, ring.level, bar, ends, joined)
            like, joined = Box(0, y, _CARD, height), []
    return bottom


def _is_by_rail(document: TopologyDocument, ring: Surrounding) -> bool:
    return document.network is not None and document.network.layout == "rail" and ring.tier == 0


def _bar_height(document: TopologyDocument, ring: Surrounding) -> float:
    return _RAIL_BAR if _is_by_rail(document, ring) else _BAR


def _draw_cards(sheet: _Sheet, ring: Surrounding, like: Box) -> list[_Card]:
    """Draw a few of the other units below, and how many there are."""
    document, health = sheet.opened.document, sheet.opened.health
    shown, num_more = ring.others(document, health, _MAX_CARDS)
    style = "switch" if isinstance(ring.below, Tier) else "frame"
    cards: list[_Card] = []
    for number, num_nodes in shown:
        place = _next_card(sheet, like)
        words = ring.card(document, number, num_nodes)
        name = words[0]
        factor = health.parts.get(name, 1.0)
        if factor == 1 and name in health.hosts:
            words.append("(impaired)")
        title = ", ".join(words)
        (sheet.boxes if style == "switch" else sheet.frames).append(
            box(place, style, words, title=title, part=name, factor=factor)
        )
        kind = document.node if ring.below else document.node_type(number)
        cards.append(_Card(place, name, num_nodes * kind.count("nic")))
    if num_more:
        words = ring.rest(num_more)
        sheet.frames.append(box(_next_card(sheet, like), "rest", words, title=" ".join(words)))
    return cards


def _next_card(sheet: _Sheet, like: Box) -> Box:
    place = Box(sheet.right + _SPACE, like.y, like.width, like.height)
    sheet.right = place.x + place.width
    return place


def _draw_domain(sheet: _Sheet, domain: NvlinkDomain, unit: int, cards: Sequence[_Card]) -> float:
    """Draw the NVSwitches below the nodes of a domain; return where they end."""
    opened, frame = sheet.opened, sheet.frame
    space = Box(frame.x, frame.bottom + 90, sheet.right - frame.x, 62)
    sheet.frames.append(box(space, "frame", title=f"domain{unit}: {domain.source[:_MAX_ABOUT]}"))
    text = f"domain{unit}: {domain.num_switches} NVSwitches, every GPU on each"
    sheet.boxes.append(label(space.x + 8, space.bottom - 8, cut(text, space.width - 16)))
    count = domain.num_switches if domain.num_switches > _MAX_SWITCHES else 1
    names = [f"nvswitch{i}" for i in range(domain.num_switches // count)]
    pitch = _SWITCH if count == 1 else 120.0
    for i, name in enumerate(names):
        place = Box(space.x + 8 + pitch * i, space.y + 10, pitch - 6)
        full = f"domain{unit}/{name}"
        words = str(i) if count == 1 else f"{count:,} NVSwitches"
        factor = opened.health.parts.get(full, 1.0) if count == 1 else 1.0
        sheet.boxes.append(box(place, "nvswitch", [words], title=full, factor=factor))
        for worker in opened.node.workers():
            start = sheet.parts[worker]
            x = start.x + 4 + (start.width - 8) * (i + 0.5) / len(names)
            ends = (f"{opened.host}/{worker}", full)
            _draw_line(sheet, (x, start.bottom), (place.centre, place.y), ends, domain, count)
    for card in cards:
        x, foot_y = card.place.centre, card.place.bottom
        num_links = domain.num_switches * opened.document.gpus_per_node
        _draw_line(
            sheet, (x, foot_y), (x, space.y), (card.name, f"domain{unit}"), domain, num_links
        )
    return space.bottom


def _draw_tier(
    sheet: _Sheet,
    ring: Surrounding,
    tier: Tier,
    bar: Box,
    ends: Sequence[tuple[str, float, float]],
    cards: Sequence[_Card],
) -> list[tuple[str, float, float]]:
    """Draw the switches of a unit and what goes up to them; return where links upwards start.

    Args:
        sheet: Where to.
        ring: The unit.
        tier: Its tier.
        bar: Its place.
        ends: (name, x, y) of what is joined in the opened unit below.
        cards: The other units below.
    """
    document, health = sheet.opened.document, sheet.opened.health
    network = document.network
    assert network is not None
    own = switch_name(network, ring.tier, ring.unit, 0).partition("/")[0]
    by_rail = _is_by_rail(document, ring)
    has_cells = by_rail and len(ends) <= _MAX_RAILS
    factor = 1.0 if by_rail else health.parts.get(own, 1.0)
    about = f"{own}: {tier.source[:_MAX_ABOUT]}"
    sheet.frames.append(box(bar, "switch", title=about, part=own, factor=factor))
    text = cut(ring.text(own, num_rails=len(ends) if by_rail else 0), bar.width - 16)
    y = bar.y + (16 if has_cells else bar.height / 2 + 4)
    sheet.boxes.append(label(bar.x + 8, y, text, "bad" if factor != 1 else ""))
    # In the first tier a line is the cable of one NIC, above it all links of a unit or of its rail.
    num_links = 1
    if ring.tier > 0:
        num_links = ring.num_own * (document.node.count("nic") if len(ends) == 1 else 1)
    above: list[tuple[str, float, float]] = []
    for i, (name, x, top) in enumerate(ends):
        switch = switch_name(network, ring.tier, ring.unit, i)
        if has_cells:
            _draw_rail(sheet, bar, x, i, switch)
            above.append((switch, x, bar.y))
        end = (x, bar.bottom - 4 if has_cells else bar.bottom)
        _draw_line(sheet, (x, top), end, (name, switch), tier, num_links)
    for card in cards:
        x, pair = card.place.centre, (card.name, own)
        _draw_line(sheet, (x, card.place.y), (x, bar.bottom), pair, tier, card.num_nics)
    # A line for each of very many rails would say no more than one for all.
    return above or [(own, sheet.frame.x + sheet.frame.width / 2, bar.y)]


def _draw_rail(sheet: _Sheet, bar: Box, x: float, rail: int, switch: str) -> None:
    """Draw the switch of one rail in the bar of its unit, above its NIC."""
    width = sheet.parts[sheet.opened.node.names("nic")[rail]].width
    cell = Box(x - width / 2, bar.bottom - _CELL - 4, width, _CELL)
    factor = sheet.opened.health.parts.get(switch, 1.0)
    drawn = box(cell, "switch", [f"rail{rail}"], title=switch, part=switch, factor=factor)
    sheet.boxes.append(drawn)


def _draw_line(
    sheet: _Sheet,
    start: tuple[float, float],
    end: tuple[float, float],
    ends: tuple[str, str],
    level: NvlinkDomain | Tier,
    num_links: int,
) -> None:
    """Draw one link outside the node, or many as a bundle."""
    opened, network = sheet.opened, sheet.opened.document.network
    kind, rate = "nvlink", 0.0
    if isinstance(level, NvlinkDomain):
        rate = level.bandwidth_bytes_per_s
    elif network is not None:
        kind = network.kind
        rate = share_bytes_per_s(opened.document, network.tiers.index(level))
    factor = opened.health.link(*ends, but=opened.workers) if opened.health.hosts else 1.0
    if frozenset(ends) in opened.health.links:
        sheet.boxes.append(mark((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, factor))
    source = opened.cut_source(level.source)
    title = link_title(" - ".join(ends), kind, rate * num_links, factor, source)
    if num_links > 1:
        title += f"\n{num_links:,} x {format_rate(rate, 'B/s')}"
    sheet.lines.append(
        line(
            f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}",
            sheet.scale,
            rate,
            title=title,
            factor=factor,
            is_bundle=num_links > 1,
        )
    )
