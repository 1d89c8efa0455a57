"""Reader of ``rocm-smi --showtopo``: what the figures mean is in ``xgmi``."""

import re
from typing import Final

from planner.topology.importers.dump import NodeDump, Remarks, TopologyTextError
from planner.topology.importers.smi.rows import clean_lines
from planner.topology.importers.smi.xgmi import node_dump
from planner.topology.importers.smi.xgmi_tables import read_tables

__all__ = ["read_rocm_smi"]

_TITLES: Final = {
    "weight": re.compile(r"\bWeight between two GPUs", re.IGNORECASE),
    "hops": re.compile(r"\bHops between two GPUs", re.IGNORECASE),
    "type": re.compile(r"\bLink Type between two GPUs", re.IGNORECASE),
    "access": re.compile(r"\bLink accessibility between two GPUs", re.IGNORECASE),
    "bandwidth": re.compile(r"=\s*Bandwidth(?: between two GPUs)?\s*=", re.IGNORECASE),
}


def read_rocm_smi(text: str, source: str) -> NodeDump:
    """Return the node that ``rocm-smi --showtopo`` printed.

    Args:
        text: Output of the command, with whatever stands around it.
        source: What to call the text in messages.

    Raises:
        TopologyTextError: It has neither weights nor link types, or they say of most pairs nothing.
    """
    remarks = Remarks()
    lines = clean_lines(text, source=source, remarks=remarks)
    node = read_tables(lines, _TITLES, remarks=remarks)
    if not node.gpus:
        raise TopologyTextError(
            "has no table of rocm-smi --showtopo ('Weight between two GPUs', 'Link Type between "
            "two GPUs'); paste the whole output of the command",
            source=source,
        )
    node.gpus = dict(sorted(node.gpus.items(), key=lambda item: _number(item[0])))
    return node_dump(node, format_="rocm-smi", text=text, source=source, remarks=remarks)


def _number(name: str) -> tuple[int, str]:
    digits = name.removeprefix("GPU").lstrip("_")
    return (int(digits) if digits.isdecimal() else 0), name
