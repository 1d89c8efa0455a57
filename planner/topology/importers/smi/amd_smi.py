"""Reader of ``amd-smi topology``, tables or ``--json``: what the figures mean is in ``xgmi``.

GPUs are called by their PCI bus ids, as the tables do. JSON has two forms: since ROCm 6.1.1 a list
of GPUs with a list of links each, before that a GPU with one object per table.
"""

import json
import re
from collections.abc import Mapping
from typing import Final

from planner.topology.importers.dump import NodeDump, Remarks, TopologyTextError
from planner.topology.importers.smi.matrix import check_number_of_devices
from planner.topology.importers.smi.rows import bounded_text, clean_lines
from planner.topology.importers.smi.xgmi import XgmiNode, node_dump
from planner.topology.importers.smi.xgmi_tables import read_tables

__all__ = ["read_amd_smi"]

_TITLES: Final = {
    "access": re.compile(r"\bACCESS TABLE"),
    "weight": re.compile(r"\bWEIGHT TABLE"),
    "hops": re.compile(r"\bHOPS TABLE"),
    "type": re.compile(r"\bLINK TYPE TABLE"),
    "bandwidth": re.compile(r"\bNUMA BW TABLE"),
}
_TRAILING_COMMA: Final = re.compile(r",(\s*[}\]])")


def read_amd_smi(text: str, source: str) -> NodeDump:
    """Return the node that ``amd-smi topology`` printed.

    Args:
        text: Output of the command, as tables or JSON, with whatever stands around it.
        source: What to call the text in messages.

    Raises:
        TopologyTextError: It has neither weights nor link types, or they say of most pairs nothing.
    """
    remarks = Remarks()
    text = bounded_text(text, source=source)
    if any(title.search(text) for title in _TITLES.values()):
        lines = clean_lines(text, source=source, remarks=remarks)
        node = read_tables(lines, _TITLES, remarks=remarks)
    else:
        node = _from_json(text, source=source, remarks=remarks)
    return node_dump(node, format_="amd-smi", text=text, source=source, remarks=remarks)


def _from_json(text: str, *, source: str, remarks: Remarks) -> XgmiNode:
    entries = _entries(text, source=source, remarks=remarks)
    check_number_of_devices(len(entries), 0, source=source)
    names: dict[str, str] = {}
    for position, entry in enumerate(entries):
        number = str(entry.get("gpu", position))
        bus_id = entry.get("bdf")
        names[number] = bus_id if isinstance(bus_id, str) and bus_id else f"GPU{number}"
    if len(set(names.values())) != len(entries):
        raise TopologyTextError(
            "lists one GPU twice; paste the output for one node, once", source=source
        )
    node = XgmiNode(gpus=dict.fromkeys(names.values()))
    for name, entry in zip(names.values(), entries, strict=True):
        links = entry.get("links")
        if isinstance(links, list):
            _add_links(node, name, links, names)
        else:
            _add_objects(node, name, entry, names)
    return node


def _entries(text: str, *, source: str, remarks: Remarks) -> list[dict[str, object]]:
    """Return the GPUs of the first JSON value in the text."""
    start = re.search(r"^\s*([\[{])", text, re.MULTILINE)
    if start is None:
        raise TopologyTextError(
            "has no table of amd-smi topology ('LINK TYPE TABLE', 'WEIGHT TABLE') and no JSON; "
            "paste the whole output of the command",
            source=source,
        )
    line = text.count("\n", 0, start.start(1)) + 1
    value = _decoded(text[start.start(1) :], line, source=source, remarks=remarks)
    while isinstance(value, dict) and "links" not in value and "link_type" not in value:
        lists = [item for item in value.values() if isinstance(item, list)]
        if len(lists) != 1:
            break
        value = lists[0]
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TopologyTextError(
            "is JSON, but no list of GPUs with their links", source=source, line=line
        )
    if not any({"links", "link_type", "weight"} & set(entry) for entry in entries):
        raise TopologyTextError(
            "is JSON without 'links', as of another command; run amd-smi topology --json",
            source=source,
            line=line,
        )
    return entries


def _decoded(text: str, first_line: int, *, source: str, remarks: Remarks) -> object:
    """Return the first JSON value; drop commas before closing brackets, as the manual has them."""
    decoder = json.JSONDecoder()
    try:
        return decoder.raw_decode(text)[0]
    except (ValueError, RecursionError):
        repaired = _TRAILING_COMMA.sub(r"\1", text)
    try:
        value = decoder.raw_decode(repaired)[0]
    except json.JSONDecodeError as error:
        raise TopologyTextError(
            f"is no whole JSON ({error.msg}); paste the whole output of amd-smi topology --json",
            source=source,
            line=first_line + error.lineno - 1,
        ) from error
    except (ValueError, RecursionError) as error:
        raise TopologyTextError(
            "is no JSON of amd-smi topology: nested too deep, or a number too long",
            source=source,
            line=first_line,
        ) from error
    remarks.add("commas before closing brackets are left out", first_line)
    return value


def _add_links(node: XgmiNode, name: str, links: list[object], names: Mapping[str, str]) -> None:
    """Add the links of one GPU, form since ROCm 6.1.1."""
    for link in links:
        if not isinstance(link, dict):
            continue
        bus_id = link.get("bdf")
        other = bus_id if bus_id in node.gpus else names.get(str(link.get("gpu")))
        if isinstance(other, str) and other != name:
            _add(node, (name, other), link, "bandwidth")


def _add_objects(
    node: XgmiNode, name: str, entry: Mapping[str, object], names: Mapping[str, str]
) -> None:
    """Add the tables of one GPU, form before ROCm 6.1.1."""
    for number, other in names.items():
        if other == name:
            continue
        cells = {
            table: values.get(f"gpu_{number}")
            for table in ("weight", "link_type", "numa_bandwidth")
            if isinstance(values := entry.get(table), dict)
        }
        _add(node, (name, other), cells, "numa_bandwidth")


def _add(
    node: XgmiNode, pair: tuple[str, str], cells: Mapping[str, object], bandwidth: str
) -> None:
    tables = ((node.weights, "weight"), (node.types, "link_type"), (node.bandwidths, bandwidth))
    for table, key in tables:
        value = cells.get(key)
        is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**6
        if isinstance(value, str) or is_number:
            table.setdefault(pair, str(value))
