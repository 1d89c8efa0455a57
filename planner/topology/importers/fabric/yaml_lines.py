"""YAML of strangers as plain values that know their lines.

PyYAML's own events are put together here rather than by ``safe_load``: a message can then name
the line, a key given twice is seen, and what a document of a topology never has (aliases, tags,
deep nesting) is refused before it can grow. Scalars stay text: the reader knows what it wants.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml

from planner.topology.importers.dump import TopologyTextError

__all__ = ["YamlValue", "read_yaml"]

# libyaml reads this in 0.12 s, PyYAML without it in 1.2; 10,000 nodes under 500 switches take
# 40 kB.
MAX_YAML_BYTES: Final = 1_000_000
_MAX_DEPTH: Final = 32
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is not in every PyYAML


@dataclass(frozen=True, slots=True)
class YamlValue:
    """A value and the line it begins in, from 1; a null is the empty text."""

    line: int
    value: "str | list[YamlValue] | dict[str, YamlValue]"

    @property
    def kind(self) -> str:
        """Return what the value is, for messages."""
        return {str: "text", list: "a list", dict: "a mapping"}[type(self.value)]


def read_yaml(text: str, *, source: str) -> YamlValue:
    """Return the one document of ``text``.

    Raises:
        TopologyTextError: It is no YAML, too large, too deep, or uses aliases or several
            documents.
    """
    if len(text) > MAX_YAML_BYTES:
        raise TopologyTextError(
            f"has more than {MAX_YAML_BYTES:,} bytes of YAML; write ranges, node[001-640], "
            "instead of names",
            source=source,
        )
    try:
        return _document(yaml.parse(text, Loader=_Loader), source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TopologyTextError(
            f"is no YAML: {problem}", source=source, line=None if mark is None else mark.line + 1
        ) from error


def _document(events: Iterator[yaml.Event], source: str) -> YamlValue:
    found: YamlValue | None = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if found is not None:
                raise TopologyTextError(
                    "has several YAML documents (a second '---'); give one",
                    source=source,
                    line=_line(event),
                )
            found = _value(next(events), events, source, 0)
    if found is None:
        raise TopologyTextError("has no YAML document, only comments", source=source)
    return found


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "events of a text have marks"
    return int(event.start_mark.line) + 1


def _value(event: yaml.Event, events: Iterator[yaml.Event], source: str, depth: int) -> YamlValue:
    """Return the value that begins with ``event``, taking its further events."""
    line = _line(event)
    if depth > _MAX_DEPTH:
        raise TopologyTextError(f"is nested more than {_MAX_DEPTH} deep", source=source, line=line)
    if isinstance(event, yaml.ScalarEvent):
        is_null = event.style is None and event.value in ("~", "null", "Null", "NULL")
        return YamlValue(line, "" if is_null else event.value)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_value(item, events, source, depth + 1))
        return YamlValue(line, items)
    if isinstance(event, yaml.MappingStartEvent):
        return YamlValue(line, _mapping(events, source, depth))
    raise TopologyTextError(
        "uses a YAML alias (*name); write the value out", source=source, line=line
    )


def _mapping(events: Iterator[yaml.Event], source: str, depth: int) -> dict[str, YamlValue]:
    mapping: dict[str, YamlValue] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _value(event, events, source, depth + 1)
        if not isinstance(key.value, str):
            raise TopologyTextError(
                f"has a key that is {key.kind}; a key is a word", source=source, line=key.line
            )
        value = _value(next(events), events, source, depth + 1)
        if key.value in mapping:
            raise TopologyTextError(
                f"gives the key {key.value!r} twice, first in line {mapping[key.value].line}",
                source=source,
                line=key.line,
            )
        mapping[key.value] = value
    return mapping
