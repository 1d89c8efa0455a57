"""Lines of a pasted listing, freed of what terminals, mails and web pages add to them."""

import re
from typing import Final

from planner.topology.importers.dump import Remarks, TopologyTextError, checked_text

__all__ = ["bounded_text", "clean_lines", "without_prefix"]

# 64 GPUs and 256 NICs print 320 rows of 3 kB each, 64 GPUs 53,000 lines of JSON; a log around them
# may be some times longer.
_MAX_TEXT_CHARACTERS: Final = 4_000_000
_MAX_LINES: Final = 100_000
_MAX_LINE_CHARACTERS: Final = 6_000

# Colours and underlines: the escape itself, or what is left when a mail drops or spells it out.
_ANSI: Final = re.compile(r"(?:\x1b|\^\[)\[[0-?]{0,30}[ -/]{0,4}[@-~]|\x1b\][^\x07\n]{0,200}\x07")
_ANSI_REMAINS: Final = re.compile(r"\[(?:\d{1,3}(?:;\d{1,3}){0,4})?m")
_ENTITIES: Final = (
    ("&nbsp;", " "),
    ("&#160;", " "),
    ("&#9;", "\t"),
    ("&Tab;", "\t"),
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&amp;", "&"),
    ("**", ""),  # bold, in Markdown
)
# Blanks of every width become a space, dashes a hyphen, marks of no width nothing; the bar of a
# Markdown table becomes a tab.
_LETTERS: Final = str.maketrans(
    dict.fromkeys(
        "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", " "
    )
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\x0b\x0c", "")
    | {"|": "\t", "\u2502": "\t"}
)
# What launchers, logs, quotes and prompts put in front: "[1,0]<stdout>:", "node01: ",
# "2026-01-05T10:11:12.123Z ", "> ", "# ".
_PREFIX: Final = re.compile(
    r"\s*(?:\[[\d,]{1,20}\]<\w{1,10}>:|\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-][\d:]{4,5})?(?=\s)"
    r"|[\w.\-]{1,64}:(?=\s)|[>#*$](?=\s))\s*"
)


def bounded_text(text: str, *, source: str) -> str:
    """Return ``text`` with line feeds for line ends.

    Raises:
        TopologyTextError: It is empty, binary or far longer than a listing of one node.
    """
    text = checked_text(text, source=source).replace("\r\n", "\n").replace("\r", "\n")
    num_lines = text.count("\n") + 1
    if len(text) > _MAX_TEXT_CHARACTERS or num_lines > _MAX_LINES:
        raise TopologyTextError(
            f"has {len(text):,} characters in {num_lines:,} lines; the listing of one node has "
            f"less than {_MAX_TEXT_CHARACTERS:,} in {_MAX_LINES:,}: paste the output of the "
            "command alone",
            source=source,
        )
    return text


def clean_lines(text: str, *, source: str, remarks: Remarks) -> list[str]:
    """Return the lines of ``text``, the first at index 0, without escapes, entities and odd blanks.

    Lines end at a line feed only, so that their numbers are those of an editor.

    Raises:
        TopologyTextError: The text is empty, binary or far longer than a listing of one node.
    """
    text = bounded_text(text, source=source)
    text = _ANSI_REMAINS.sub("", _ANSI.sub("", text))
    for entity, letter in _ENTITIES:
        text = text.replace(entity, letter)
    lines = text.translate(_LETTERS).split("\n")
    for index, line in enumerate(lines):
        if len(line) > _MAX_LINE_CHARACTERS:
            remarks.add(f"left out: {len(line):,} characters are no row of a listing", index + 1)
            lines[index] = ""
    return lines


def without_prefix(line: str) -> str:
    """Return a line without the blanks, quote mark, prompt or rank in front of it.

    >>> [without_prefix(line) for line in ("[1,0]<stdout>:  GPU0  X", "node01: GPU0", "> GPU0")]
    ['GPU0  X', 'GPU0', 'GPU0']
    """
    found = _PREFIX.match(line)
    return line[found.end() :].lstrip() if found else line.lstrip()
