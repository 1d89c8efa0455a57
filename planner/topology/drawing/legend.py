"""What stands below a drawing: the scale of bandwidths, the kinds of parts, what is wrong."""

from typing import Final

from planner.topology.drawing.node import OpenedNode
from planner.topology.drawing.placing import Box, text_width
from planner.topology.drawing.svg import NUM_COLOURS, Scale, box, cut, label
from planner.units import format_rate

__all__ = ["foot"]

_SWATCH: Final = 62.0
_LINE: Final = 17.0
_MAX_IMPAIRMENTS: Final = 8
_KINDS: Final = {
    "gpu": "GPU",
    "process": "process",
    "nvswitch": "NVSwitch",
    "pcie_switch": "PCIe switch",
    "cpu": "CPU",
    "nic": "NIC",
}


def foot(opened: OpenedNode, scale: Scale, space: Box) -> tuple[list[str], float]:
    """Return the legend, and where the drawing ends.

    Args:
        opened: The node that is drawn in full.
        scale: Of bandwidths.
        space: Where to; its height is not used.
    """
    about = "bandwidth in one direction; a thick line is many links, coloured as one of them"
    drawn = [label(space.x, space.y, about, "quiet")]
    y = space.y + 8
    if scale.low < scale.high:
        drawn += _swatches(scale, space.x + 22, y)
        y += 44
    else:
        drawn.append(box(Box(space.x, y, _SWATCH, 10), f"b{NUM_COLOURS - 1}"))
        drawn.append(label(space.x + _SWATCH + 6, y + 9, format_rate(scale.high, "B/s")))
        y += 30
    drawn += _kinds(opened, space.x, y)
    y += _LINE + 8
    for words in _rates(opened):
        drawn.append(label(space.x, y, cut(words, space.width), "quiet"))
        y += _LINE
    for words in _impairments(opened):
        drawn.append(label(space.x, y, cut(words, space.width), "bad"))
        y += _LINE
    return drawn, y + 6


def _swatches(scale: Scale, x: float, y: float) -> list[str]:
    drawn = [
        box(Box(x + _SWATCH * i, y + (10 - h) / 2, _SWATCH, h), f"b{i}")
        for i in range(NUM_COLOURS)
        for h in (3 + 7 * i / (NUM_COLOURS - 1),)
    ]
    for i, text in enumerate(scale.borders()):
        drawn.append(label(x + _SWATCH * i, y + 24, text, anchor="middle"))
    return drawn


def _kinds(opened: OpenedNode, x: float, y: float) -> list[str]:
    present = {component.kind for component in opened.node.components}
    if opened.document.nvlink_domain is not None:
        present.add("nvswitch")
    drawn: list[str] = []
    for kind, words in _KINDS.items():
        if kind in present:
            drawn.append(box(Box(x, y - 9, 14, 11), kind))
            drawn.append(label(x + 19, y, words))
            x += 19 + text_width(words) + 16
    return drawn


def _rates(opened: OpenedNode) -> list[str]:
    """Return the bandwidths of each kind of link inside the node."""
    rates: dict[str, list[float]] = {}
    for wire in opened.wires:
        rates.setdefault(wire.kind, []).append(wire.bytes_per_s)
    if (domain := opened.document.nvlink_domain) is not None:
        rates.setdefault("nvlink", []).append(domain.bandwidth_bytes_per_s)
    words = []
    for kind, found in rates.items():
        low, high = format_rate(min(found), "B/s"), format_rate(max(found), "B/s")
        words.append(f"{kind} {low}" if low == high else f"{kind} {low} to {high}")
    if (network := opened.document.network) is not None:
        words.append(f"{network.kind} {format_rate(network.nic_bandwidth_bytes_per_s, 'B/s')}")
    return ["lines: " + "; ".join(words)]


def _impairments(opened: OpenedNode) -> list[str]:
    found = opened.document.impairments
    words = [f"impaired: {impairment}" for impairment in found[:_MAX_IMPAIRMENTS]]
    more = len(found) - len(words)
    return [*words, f"... {more:,} more impaired"] if more > 0 else words
