"""The pieces of a drawing as SVG text: boxes, lines, labels, the scale of bandwidths.

Nothing is fetched or run: no script, no font, no address. Colours are those of viridis, which
people who are colour-blind tell apart and which keep their order in grey; on dark ground they run
the other way, so that more bandwidth always stands out more.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from planner.topology.drawing.placing import Box, text_width
from planner.units import format_rate

__all__ = [
    "NUM_COLOURS",
    "Scale",
    "box",
    "cut",
    "label",
    "line",
    "mark",
    "safe",
    "scale_of",
    "svg",
]

_LIGHT: Final = ("#7ad151", "#3fb873", "#22a884", "#2a788e", "#355f8d", "#433e85", "#440154")
_DARK: Final = ("#4a70b5", "#31829b", "#21a685", "#3fbc73", "#7ad151", "#bddf26", "#fde725")
NUM_COLOURS: Final = len(_LIGHT)
_WIDTHS: Final = (1.1, 3.4)
_BUNDLE: Final = 5.5

# What XML 1.0 cannot hold at all.
_NO_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_RULES: Final = """\
text { font: 11px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2937; }
text.title { font-size: 16px; font-weight: 600; }
text.quiet { fill: #4b5563; }
text.bad { fill: #b91c1c; font-weight: 600; }
rect { stroke: #6b7280; fill: #ffffff; }
rect.ground { stroke: none; }
rect.chip { stroke: none; fill: #f9fafb; }
rect.frame { fill: #f9fafb; stroke: #9ca3af; }
rect.rest { fill: none; stroke: #9ca3af; stroke-dasharray: 1 3; }
rect.gpu, rect.process { fill: #d1fae5; } rect.cpu { fill: #dbeafe; }
rect.nic { fill: #ffedd5; } rect.nvswitch { fill: #ede9fe; }
rect.pcie_switch, rect.switch { fill: #e5e7eb; }
rect.weak, rect.down { stroke: #b91c1c; stroke-width: 1.6; } rect.down { stroke-dasharray: 4 3; }
path { fill: none; } path.down { stroke: #b91c1c; stroke-dasharray: 4 3; }
"""
_DARK_RULES: Final = """\
text { fill: #e5e7eb; } text.quiet { fill: #b6bcc6; } text.bad { fill: #fca5a5; }
rect { stroke: #8b949e; fill: #0d1117; }
rect.frame { fill: #151b23; stroke: #4b5563; } rect.chip { fill: #151b23; }
rect.gpu, rect.process { fill: #134e3a; } rect.cpu { fill: #1e3a6e; }
rect.nic { fill: #6b3410; } rect.nvswitch { fill: #46307e; }
rect.pcie_switch, rect.switch { fill: #374151; }
rect.weak, rect.down { stroke: #fca5a5; } path.down { stroke: #fca5a5; }
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """Bandwidths from ``low`` to ``high``, bytes/s, on a logarithmic scale."""

    low: float
    high: float

    def position(self, bytes_per_s: float) -> float:
        """Return 0 for the lowest to 1 for the highest."""
        if self.high <= self.low:
            return 1.0
        part = math.log(bytes_per_s / self.low) / math.log(self.high / self.low)
        return min(1.0, max(0.0, part))

    def colour(self, bytes_per_s: float) -> int:
        """Return the number of the colour, ``NUM_COLOURS - 1`` for the highest."""
        return min(NUM_COLOURS - 1, int(NUM_COLOURS * self.position(bytes_per_s)))

    def width(self, bytes_per_s: float) -> float:
        """Return the width of a line."""
        low, high = _WIDTHS
        return low + (high - low) * self.position(bytes_per_s)

    def borders(self) -> list[str]:
        """Return the bandwidth at each border of two colours, the ends included."""
        steps = range(NUM_COLOURS + 1)
        ratio = self.high / self.low
        return [format_rate(self.low * ratio ** (i / NUM_COLOURS), "B/s") for i in steps]


def scale_of(rates: Iterable[float]) -> Scale:
    """Return the scale on which all ``rates`` lie; those of 0 have no place on it."""
    positive = [rate for rate in rates if rate > 0] or [1.0]
    return Scale(min(positive), max(positive))


def safe(text: str) -> str:
    """Return text as XML can hold it."""
    return escape(_NO_XML.sub("\ufffd", text))


def cut(text: str, width: float, size: float = 11.0) -> str:
    """Return as much of a text as fits."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "...", size) > width:
        text = text[:-1]
    return text + "..."


def label(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    """Return a line of text; ``y`` is where its letters stand."""
    kind = f' class="{style}"' if style else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{where}>{safe(text)}</text>'


def box(
    place: Box,
    style: str,
    lines: Sequence[str] = (),
    *,
    title: str = "",
    part: str = "",
    factor: float = 1.0,
) -> str:
    """Return a box with lines of text in its middle, dashed when down, marked when weak.

    Args:
        place: Where.
        style: Class of the rectangle.
        lines: Cut to the width.
        title: What a pointer over it shows.
        part: Name that programs find it by.
        factor: What is left of its figure.
    """
    mark = "" if factor == 1 else " down" if factor == 0 else " weak"
    named = f" data-part={quoteattr(_NO_XML.sub(chr(0xFFFD), part))}" if part else ""
    told = f"<title>{safe(title)}</title>" if title else ""
    texts = [(text, "") for text in lines]
    if factor != 1:
        texts = [*texts[: max(1, int(place.height // 13) - 1)], (_factor_text(factor), "bad")]
    step = min(13.0, place.height / max(1, len(texts)))
    y = place.y + place.height / 2 - step * (len(texts) - 1) / 2 + 4
    words = "".join(
        label(place.centre, y + step * i, cut(text, place.width - 4), style_of, "middle")
        for i, (text, style_of) in enumerate(texts)
    )
    return (
        f'<g{named}>{told}<rect class="{style}{mark}" x="{place.x:.1f}" y="{place.y:.1f}" '
        f'width="{place.width:.1f}" height="{place.height:.1f}" rx="4"/>{words}</g>'
    )


def _factor_text(factor: float) -> str:
    """Return what is left, for people."""
    return "down" if factor == 0 else f"x {factor:g}"


def line(
    path: str,
    scale: Scale,
    bytes_per_s: float,
    *,
    title: str,
    factor: float = 1.0,
    is_bundle: bool = False,
) -> str:
    """Return a link along ``path``, coloured by what is left of it, broken ones dashed.

    Args:
        path: As SVG writes it.
        scale: Of bandwidths.
        bytes_per_s: When healthy, of one link of a bundle.
        title: What a pointer over it shows.
        factor: What is left.
        is_bundle: Whether it stands for many links.
    """
    told = f"<title>{safe(title)}</title>"
    if factor == 0:
        return f'<path class="down" d="{path}">{told}</path>'
    left = bytes_per_s * factor
    width = _BUNDLE if is_bundle else scale.width(left)
    kind = f"b{scale.colour(left)}"
    return f'<path class="{kind}" stroke-width="{width:.1f}" d="{path}">{told}</path>'


def mark(x: float, y: float, factor: float) -> str:
    """Return what is left of a link, to be written on it."""
    text = _factor_text(factor)
    width = text_width(text)
    return box(Box(x - width / 2, y - 7, width, 14), "chip") + label(
        x, y + 4, text, "bad", "middle"
    )


def svg(body: str, width: float, height: float, about: str) -> str:
    """Return the whole document.

    Args:
        body: Elements.
        width: Of the view.
        height: Of the view.
        about: What is read to people who do not see it.
    """
    style = _RULES + _colours(_LIGHT)
    style += f"@media (prefers-color-scheme: dark) {{\n{_DARK_RULES}{_colours(_DARK)}"
    style += "rect.ground { fill: #0d1117; }\n}\n"
    size = f"{math.ceil(width)}"
    tall = f"{math.ceil(height)}"
    told = quoteattr(_NO_XML.sub("\ufffd", about))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {tall}" width="{size}" '
        f'height="{tall}" role="img" aria-label={told}>\n<style>\n{style}</style>\n'
        f'<rect class="ground" width="{size}" height="{tall}"/>\n{body}\n</svg>\n'
    )


def _colours(colours: Sequence[str]) -> str:
    return "".join(
        f"path.b{i} {{ stroke: {colour}; }} rect.b{i} {{ fill: {colour}; stroke: none; }}\n"
        for i, colour in enumerate(colours)
    )
