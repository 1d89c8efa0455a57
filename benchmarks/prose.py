"""Paragraphs of generated pages."""

import textwrap
from typing import Final

__all__ = ["wrapped"]

_WIDTH: Final = 110


def wrapped(text: str, indent: str = "") -> str:
    """Return lines of at most ``_WIDTH``; a figure stays beside its percent sign.

    Args:
        text: One paragraph.
        indent: Of all lines but the first.
    """
    tied = text.replace(" %", "\0%")
    lines = textwrap.fill(
        tied, _WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )
    return lines.replace("\0", " ")
