"""Text tables of ``rocm-smi --showtopo`` and ``amd-smi topology``: title, header, a row per GPU."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.importers.dump import Remarks
from planner.topology.importers.smi.rows import without_prefix
from planner.topology.importers.smi.xgmi import XgmiNode

__all__ = ["read_tables"]

_GPU: Final = re.compile(r"GPU_?\d{1,4}|(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d")
_NUMA: Final = re.compile(
    r"\bGPU\s?\[?(\d{1,4})\]?\s{0,40}:.{0,40}\bNuma (Node|Affinity):\s?(-?\d{1,4})"
)
_TITLE_ENDS: Final = ("===", "---", "TABLE:", "TABLE")
_LETTER: Final = re.compile(r"[A-Za-z]")


class _Tables:
    """Walks the lines; the state is the table, its header and its last row."""

    def __init__(self, titles: Mapping[str, re.Pattern[str]], remarks: Remarks) -> None:
        self.titles = titles
        self.remarks = remarks
        self.node = XgmiNode()
        self.cells = {
            "weight": self.node.weights,
            "type": self.node.types,
            "bandwidth": self.node.bandwidths,
        }
        self.done: set[str] = set()
        self.table: str | None = None
        self.is_repeated = False
        self.header: list[str] = []
        self.row: tuple[str, int, list[str]] | None = None

    def read(self, line: str, number: int) -> None:
        """Take in one line."""
        if self._is_title(line, number) or self._is_numa(line, number) or self.table is None:
            return
        tokens = without_prefix(line).split()
        names = [token for token in tokens if _GPU.fullmatch(token)]
        if not tokens:
            return
        if len(names) == len(tokens) and (self.row is None or len(names) > 1):
            self._end_row()
            self.header += names
        elif names and tokens[0] == names[0]:
            self._end_row()
            self.row = (names[0], number, tokens[1:])
        elif self.row and number == self.row[1] + 1 and len(self.row[2]) < len(self.header):
            self.row = (self.row[0], number, self.row[2] + tokens)  # a wrapped row

    def _is_title(self, line: str, number: int) -> bool:
        kind = next((kind for kind, title in self.titles.items() if title.search(line)), None)
        if kind is None and not (line.rstrip().endswith(_TITLE_ENDS) and _LETTER.search(line)):
            return False
        self.end_table()
        self.table = kind
        self.is_repeated = kind is not None and kind in self.done
        if self.is_repeated:
            self.remarks.add("left out: another listing; one text is one node", number)
            self.table = None
        return True

    def _is_numa(self, line: str, number: int) -> bool:
        found = _NUMA.search(line)
        if found is None:
            return False
        name, node = f"GPU{found[1]}", found[3]
        if found[2] == "Node" and int(node) >= 0:
            if self.node.numa.setdefault(name, node) != node:
                self.remarks.add(f"left out: a second NUMA node for {name}", number)
            elif not self._is_full():
                self.node.gpus.setdefault(name, number)
        return True

    def _is_full(self) -> bool:
        """Tell whether there are more GPUs than a node has: refused later, no use to read on."""
        return len(self.node.gpus) > MAX_GPUS_PER_NODE

    def _end_row(self) -> None:
        """Store the last row."""
        if self.row is None or self.table is None or self._is_full():
            return
        name, number, values = self.row
        self.row = None
        header = self.header or list(self.node.gpus)
        for gpu in (*header, name):
            self.node.gpus.setdefault(gpu, None)
        if self.node.gpus.get(name) is None:
            self.node.gpus[name] = number
        if len(values) != len(header):
            self.remarks.add(
                f"the row of {name} has {len(values)} of {len(header)} cells: read as far as it "
                "goes",
                number,
            )
        cells = self.cells.get(self.table, {})
        for other, value in zip(header, values, strict=False):
            if other != name:
                cells.setdefault((name, other), value)
        self.done.add(self.table)

    def end_table(self) -> None:
        """Store the last row and forget the header."""
        self._end_row()
        self.row, self.header, self.table = None, [], None


def read_tables(
    lines: Sequence[str], titles: Mapping[str, re.Pattern[str]], *, remarks: Remarks
) -> XgmiNode:
    """Return what the tables say.

    Args:
        lines: Cleaned, the first is line 1.
        titles: What stands above the tables "weight", "type" and "bandwidth"; tables with other
            titles are passed over.
        remarks: Repairs are added.
    """
    tables = _Tables(titles, remarks)
    for number, line in enumerate(lines, start=1):
        tables.read(line, number)
    tables.end_table()
    return tables.node
