"""XML that others wrote, as a bounded tree of elements with their lines.

``defusedxml`` refuses entities and external references; what is left to bound here is depth and
the number of elements (each costs some microseconds and some hundred bytes), and a document type
that brings declarations of its own, since attribute defaults multiply like entities.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser, ParseError

from planner.topology.importers.dump import TopologyTextError, checked_text

__all__ = ["Element", "check_root", "read_xml", "real_number", "whole_number"]

# lstopo of a two-socket node has 1,500 to 6,000 elements, a dump of 18 MNNVL hosts about 4,000.
MAX_ELEMENTS: Final = 20_000
MAX_DEPTH: Final = 100
MAX_ATTRIBUTES: Final = 64
MAX_ATTRIBUTE_CHARS: Final = 4_096
# One tag or one text; a tag of 10 MB with 800,000 attributes takes the parser over a second.
MAX_RUN_CHARS: Final = 1_000_000

# Of the formats that are read; a root stands at the start of its line, or it is quoted in prose.
_PASTED: Final = re.compile(r"^[ \t]{0,80}(<(?:system|topology)[ >])", re.MULTILINE)
_PASTED_END: Final = re.compile(r"</(?:system|topology)>")


@dataclass(slots=True)
class Element:
    """One element; ``line`` counts from 1."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    def get(self, name: str) -> str:
        """Return an attribute; empty if it is not there."""
        return self.attributes.get(name, "")

    def all(self, tag: str) -> list["Element"]:
        """Return the children of this tag."""
        return [child for child in self.children if child.tag == tag]

    def walk(self) -> Iterator["Element"]:
        """Yield the element and all below, parents first, in the order of the text."""
        stack = [self]
        while stack:
            element = stack.pop()
            yield element
            stack.extend(reversed(element.children))


class _TooMuchError(Exception):
    """More than is read; carries what there is too much of."""


class _Builder:
    """What the parser calls; ``parser`` is set once there is one."""

    def __init__(self) -> None:
        self.parser: DefusedXMLParser | None = None
        self.top = Element("", {}, 0)
        self.open = [self.top]
        self.texts: list[list[str]] = [[]]
        self.num_elements = 0

    def line(self) -> int:
        """Return the line that the parser is in."""
        assert self.parser is not None, "the builder is bound to its parser before it is fed"
        return self.parser.parser.CurrentLineNumber

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Open an element."""
        self.num_elements += 1
        if self.num_elements > MAX_ELEMENTS:
            raise _TooMuchError(f"has more than {MAX_ELEMENTS:,} elements")
        if len(self.open) > MAX_DEPTH:
            raise _TooMuchError(f"nests elements deeper than {MAX_DEPTH}")
        if len(attributes) > MAX_ATTRIBUTES:
            raise _TooMuchError(f"has an element of more than {MAX_ATTRIBUTES} attributes")
        for name, value in attributes.items():
            if len(value) > MAX_ATTRIBUTE_CHARS:
                raise _TooMuchError(
                    f"has an attribute {name[:40]!r} of more than {MAX_ATTRIBUTE_CHARS:,} letters"
                )
        element = Element(tag, attributes, self.line())
        self.open[-1].children.append(element)
        self.open.append(element)
        self.texts.append([])

    def end(self, tag: str) -> None:
        """Close the innermost element."""
        self.open.pop().text = "".join(self.texts.pop())

    def data(self, text: str) -> None:
        """Keep text that is not only space."""
        if not text.isspace():
            self.texts[-1].append(text)

    def close(self) -> Element:
        """Return the root."""
        return self.top.children[0]


def _refuse_declarations(
    name: str, system_id: str | None, public_id: str | None, has_declarations: bool
) -> None:
    if has_declarations:
        raise _TooMuchError("has a document type with declarations of its own")


def _pasted(text: str) -> tuple[str, int]:
    """Return the XML in a text, and how many lines stand before it."""
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped.startswith(("<?", "<!")) and (root := _PASTED.search(stripped)):
        stripped = stripped[root.start(1) :]
    num_skipped = text[: len(text) - len(stripped)].count("\n")
    ends = [end.end() for end in _PASTED_END.finditer(stripped)]
    return (stripped[: ends[-1]] if ends else stripped), num_skipped


def read_xml(text: str, *, source: str) -> Element:
    """Return the root element of an XML text.

    What pasting leaves around it (blank lines, a prompt, the fences of Markdown) is no error.

    Raises:
        TopologyTextError: It is malformed, declares entities, or is larger than is read.
    """
    stripped, num_skipped = _pasted(checked_text(text, source=source))
    if max(map(len, stripped.split(">"))) > MAX_RUN_CHARS:
        raise TopologyTextError(
            f"has a tag or text of more than {MAX_RUN_CHARS:,} letters; give the dump of one node",
            source=source,
        )
    builder = _Builder()
    parser = DefusedXMLParser(target=builder)
    parser.parser.StartDoctypeDeclHandler = _refuse_declarations
    builder.parser = parser
    try:
        # Lone surrogates are no characters: they become "?" instead of an error of the codec.
        parser.feed(stripped.encode("utf-8", errors="replace").decode())
        parser.close()
    except ParseError as exc:
        line = exc.position[0] + num_skipped
        raise TopologyTextError(
            f"is no well-formed XML ({str(exc).split(':')[0]}); give the file as it was written",
            source=source,
            line=line,
        ) from exc
    except DefusedXmlException as exc:
        raise TopologyTextError(
            "declares entities or refers to another file; no tool that writes topologies does",
            source=source,
            line=builder.line() + num_skipped,
        ) from exc
    except _TooMuchError as exc:
        raise TopologyTextError(
            f"{exc}; give the dump of one node", source=source, line=builder.line() + num_skipped
        ) from exc
    for element in builder.top.walk():
        element.line += num_skipped
    return builder.close()


def check_root(root: Element, tag: str, *, needed: str, source: str) -> None:
    """Check that the text is of the format it was taken for.

    Raises:
        TopologyTextError: The root is another.
    """
    if root.tag != tag:
        raise TopologyTextError(
            f"is XML of <{root.tag[:40]}>; give {needed}", source=source, line=root.line
        )


_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,18}")
_REAL: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def whole_number(text: str, low: int, high: int) -> int | None:
    """Return a whole number from ``low`` to ``high``; None for anything else.

    >>> whole_number(" 16 ", 1, 64), whole_number("-1", 1, 64), whole_number("1e3", 1, 64)
    (16, None, None)
    """
    match = _WHOLE.fullmatch(text.strip())
    value = int(match.group()) if match else None
    return value if value is not None and low <= value <= high else None


def real_number(text: str, low: float, high: float) -> float | None:
    """Return a decimal number from ``low`` to ``high``; None for anything else.

    >>> real_number("15.753846", 0, 1e4), real_number("1e999", 0, 1e4), real_number("", 0, 1e4)
    (15.753846, None, None)
    """
    match = _REAL.fullmatch(text.strip())
    value = float(match.group()) if match else None
    return value if value is not None and low <= value <= high else None
