"""The matrices of ``nvidia-smi topo -m`` in a text: header, rows, and what column is what.

A text may hold prompts, legends, several matrices and the wrong one (``topo -p2p``). Rows are told
by their form, a name and cells behind it; blank and other lines between them do not matter. A
terminal that wraps a row leaves its rest in the next line, and may glue two cells.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.importers.dump import Remarks, TopologyTextError
from planner.topology.importers.smi.matrix import MAX_NICS, check_number_of_devices
from planner.topology.importers.smi.rows import without_prefix

__all__ = [
    "DISTANCES",
    "PEER_STATUS",
    "Listing",
    "Row",
    "chosen_listing",
    "columns_of",
    "is_affinity",
    "is_gpu",
]

# Cells of topo -m but for NVLinks and X; SOC is the old SYS.
DISTANCES: Final = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
# Cells of topo -p2p.
PEER_STATUS: Final = ("OK", "CNS", "GNS", "TNS", "NS", "DR")

_CELL: Final = re.compile(rf"NV\d{{1,2}}|{'|'.join(DISTANCES)}|X")
# A row that a terminal wrapped loses blanks between cells: "NODENODE".
_CELLS: Final = re.compile(rf"(?:{_CELL.pattern})+")
_PLAIN_CELLS: Final = frozenset({"X", *DISTANCES})
_GPU: Final = re.compile(r"GPU\d{1,4}")
_NAME: Final = re.compile(r"[A-Za-z][\w.\-]{0,63}")
_DEVICE: Final = re.compile(r"[A-Za-z][A-Za-z.\-]{0,40}[_\d][\w.\-]{0,40}")  # has a number
# Column names that a terminal glued as it wrapped the header: "NIC8NIC9", "mlx5_8mlx5_9".
_GLUED: Final = re.compile(r"(?:(?:GPU|NIC|mlx\d_)\d{1,3}){2,8}")
_GLUED_PART: Final = re.compile(r"(?:GPU|NIC|mlx\d_)\d{1,3}(?=GPU|NIC|mlx|$)")
_TAIL_COLUMNS: Final = (
    ("cpu", re.compile(r"\bCPU\s*Affinity|\bCPU\s*Aff")),
    ("numa", re.compile(r"\bNUMA\s*Affinity|\bNUMA\s*Aff")),
    ("gpu_numa", re.compile(r"\bGPU\s*NUMA(?:\s*ID)?")),
)
_NUMBERS: Final = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\s?\d{1,5}(?:-\d{1,5})?)*,?")
# Six nodes with the most devices; more is a log of something else.
_MAX_ROWS: Final = 2000
_MAX_TOKENS: Final = MAX_GPUS_PER_NODE + MAX_NICS + 16


@dataclass(slots=True)
class Row:
    """One device: its cells, and what stands in the affinity columns behind them."""

    name: str
    line: int
    cells: list[str]
    tail: list[str]


@dataclass(slots=True)
class Listing:
    """One matrix in the text; ``columns`` are the devices of its header, None if it has none."""

    line: int
    columns: list[str] | None = None
    tail_columns: tuple[str, ...] = ("cpu", "numa", "gpu_numa")
    rows: dict[str, Row] = field(default_factory=dict)
    last: Row | None = None
    repeats: list[Row] = field(default_factory=list)

    def num_complete(self) -> int:
        """Count the GPUs with a whole row."""
        width = len(self.columns) if self.columns is not None else len(self.rows)
        return sum(len(row.cells) >= width for name, row in self.rows.items() if is_gpu(name))

    def is_complete(self) -> bool:
        """Tell whether every GPU of the header has a whole row."""
        names = self.columns if self.columns is not None else list(self.rows)
        num_gpus = sum(is_gpu(name) for name in names)
        return 0 < num_gpus <= self.num_complete()


def is_gpu(name: str) -> bool:
    """Tell whether a device is a GPU, by its name."""
    return _GPU.fullmatch(name) is not None


def _is_cells(token: str) -> bool:
    return token in _PLAIN_CELLS or _CELLS.fullmatch(token) is not None


def is_affinity(token: str) -> bool:
    """Tell whether a token is a list of CPUs or NUMA nodes, such as "0-31,64-95"."""
    return _NUMBERS.fullmatch(token) is not None


def _all_listings(lines: Sequence[str], *, remarks: Remarks) -> tuple[list[Listing], int | None]:
    """Return the matrices in the text, and the line of the first peer-to-peer status, if any."""
    found: list[Listing] = []
    peer_status_line: int | None = None
    num_rows = 0
    for number, line in enumerate(lines, start=1):
        stripped = without_prefix(line)
        tokens = stripped.split()
        if not tokens or "=" in tokens[:2]:  # "X    = Self"
            continue
        if len(tokens) > _MAX_TOKENS:
            remarks.add(f"left out: {len(tokens)} words are no row of a matrix", number)
            continue
        current = found[-1] if found else None
        if _is_header(tokens):
            _add_header(found, stripped, number)
        elif _is_row(tokens, current):
            if any(token in PEER_STATUS for token in tokens[1:]) and not _has_distance(tokens[1:]):
                peer_status_line = peer_status_line or number
                continue
            num_rows += 1
            if num_rows > _MAX_ROWS:
                remarks.add("left out: everything from here on", number)
                break
            _add_row(found, tokens, number, remarks=remarks)
        elif current is not None and _continues(current, tokens, number):
            _extend(current, tokens, stripped)
    for listing in found:
        for row in listing.repeats[:1]:
            others = len(listing.repeats) - 1
            more = f" and {others} other rows" if others else ""
            first = listing.rows[row.name].line
            remarks.add(f"left out: {row.name}{more}, printed before (line {first})", row.line)
    return [listing for listing in found if listing.rows], peer_status_line


def _is_header(tokens: Sequence[str]) -> bool:
    """Tell whether a line names columns: GPU0 first, then devices, and no cell in it."""
    if not is_gpu(tokens[0]) or any(_is_cells(token) for token in tokens):
        return False
    return len(tokens) == 1 or "Affinity" in tokens or _DEVICE.fullmatch(tokens[1]) is not None


def _is_row(tokens: Sequence[str], current: Listing | None) -> bool:
    """Tell whether a line is a device's name with cells (of either matrix) behind it."""
    name, cells = tokens[0], tokens[1:]
    if not cells or not _NAME.fullmatch(name) or _CELLS.fullmatch(name):
        return False
    is_cell = [_is_cells(token) or token in PEER_STATUS for token in cells]
    if is_gpu(name) or (current and current.columns and name in current.columns):
        return any(is_cell)
    return is_cell[0] and sum(is_cell) >= len(cells) / 2


def _has_distance(tokens: Sequence[str]) -> bool:
    return any(_is_cells(token) and token != "X" for token in tokens)


def _add_header(found: list[Listing], line: str, number: int) -> None:
    names, tail = _header(line)
    current = found[-1] if found else None
    if current and current.columns is None and current.rows and set(current.rows) <= set(names):
        current.columns, current.tail_columns = names, tail  # its rows came first
    elif current and _wants_columns(current) and names[0] not in (current.columns or ()):
        current.columns = [*(current.columns or ()), *names]  # a header of two lines
        current.tail_columns = tail
    else:
        found.append(Listing(number, names, tail))


def _header(line: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the devices that a header names, glued names apart, and the columns behind them.

    >>> _header("GPU0 NIC8NIC9 mlx5_10 CPU Affinity")
    (['GPU0', 'NIC8', 'NIC9', 'mlx5_10'], ('cpu',))
    """
    starts = {name: m.start() for name, column in _TAIL_COLUMNS if (m := column.search(line))}
    names: list[str] = []
    for token in line[: min(starts.values(), default=len(line))].split():
        names += _GLUED_PART.findall(token) if _GLUED.fullmatch(token) else [token]
    return [name for name in names if _NAME.fullmatch(name)], tuple(starts)


def _wants_columns(listing: Listing) -> bool:
    """Tell whether a second header line can go on with the columns of the first."""
    return not listing.rows and 0 < len(listing.columns or ()) <= MAX_GPUS_PER_NODE + MAX_NICS


def _add_row(found: list[Listing], tokens: list[str], number: int, *, remarks: Remarks) -> None:
    name = tokens[0]
    current = found[-1] if found else None
    row = Row(name, number, *_split(tokens[1:]))
    known = current.rows.get(name) if current else None
    if current and known and (known.cells, known.tail) == (row.cells, row.tail):
        current.repeats.append(row)
        return
    if current is None or (known and is_gpu(name) and current.is_complete()):
        current = Listing(number)
        found.append(current)
    if name in current.rows:
        line = current.rows[name].line
        remarks.add(f"left out: another row of {name}; that of line {line} is taken", number)
        return
    current.last = current.rows[name] = row


def _split(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a row behind its name into cells and the affinity columns behind them."""
    last = max((index for index, token in enumerate(tokens) if _is_cells(token)), default=-1)
    cells: list[str] = []
    for token in tokens[: last + 1]:
        cells += _CELL.findall(token) if _is_cells(token) else [token]
    return cells, list(tokens[last + 1 :])


def _continues(listing: Listing, tokens: Sequence[str], number: int) -> bool:
    """Tell whether a line is the rest of the header or of the row above it."""
    if not listing.rows:
        return number == listing.line + 1 and (
            "Affinity" in tokens or all(_DEVICE.fullmatch(token) for token in tokens)
        )
    row, width = listing.last, len(listing.columns or ())
    is_cut = row is not None and number <= row.line + 4 and len(row.cells) < width
    is_rest = _is_cells(tokens[0])
    is_tail = row is not None and number == row.line + 1 and not row.tail
    return (is_cut and is_rest) or (is_tail and is_affinity(tokens[0]))


def _extend(listing: Listing, tokens: Sequence[str], line: str) -> None:
    if listing.rows:
        assert listing.last is not None
        cells, tail = _split(tokens)
        listing.last.cells += cells
        listing.last.tail += tail
        return
    assert listing.columns is not None
    names, tail_columns = _header(line)
    listing.columns += names
    listing.tail_columns += tail_columns


def chosen_listing(lines: Sequence[str], *, source: str, remarks: Remarks) -> Listing:
    """Return the first whole matrix, or else that with the most whole rows.

    Raises:
        TopologyTextError: There is none.
    """
    listings, peer_status_line = _all_listings(lines, remarks=remarks)
    if not listings:
        if peer_status_line is not None:
            raise TopologyTextError(
                "this is the peer-to-peer status (topo -p2p), which says nothing of distances: "
                "run nvidia-smi topo -m",
                source=source,
                line=peer_status_line,
            )
        raise TopologyTextError(
            "holds no matrix of nvidia-smi topo -m (a row such as 'GPU0  X  NV18  PIX'); paste "
            "the whole output of the command",
            source=source,
        )
    if peer_status_line is not None:
        remarks.add("left out: the peer-to-peer status", peer_status_line)
    whole = [listing for listing in listings if listing.is_complete()]
    chosen = whole[0] if whole else max(listings, key=Listing.num_complete)
    for listing in listings:
        if listing is not chosen:
            remarks.add("left out: another matrix; one text is one node", listing.line)
    return chosen


def columns_of(listing: Listing, *, source: str, remarks: Remarks) -> list[str]:
    """Return the device of each column: as the header says, unless the diagonal says otherwise."""
    header = listing.columns
    own = {name: row.cells.index("X") for name, row in listing.rows.items() if "X" in row.cells}
    if header is not None and len(set(header)) == len(header):
        fits = [column < len(header) and header[column] == name for name, column in own.items()]
        if sum(fits) * 2 > len(fits) or not fits:
            return header
    width = max(len(row.cells) for row in listing.rows.values())
    names: dict[int, str] = {}
    for name, column in own.items():
        names.setdefault(column, name)
    gpus = [column for column, name in names.items() if is_gpu(name)]
    if not gpus:
        raise TopologyTextError(
            "the header is missing and no row has its own X: the columns cannot be named; paste "
            "the whole output of nvidia-smi topo -m",
            source=source,
            line=listing.line,
        )
    check_number_of_devices(len(gpus), width - len(gpus), source=source, line=listing.line)
    remarks.add(
        "the columns are named by the X of each row: the header "
        + ("is missing" if header is None else "does not fit the rows"),
        listing.line,
    )
    taken = set(names.values())
    for column in range(width):
        if column not in names:
            kind = "GPU" if column < max(gpus) else "NIC"
            number = column if kind == "GPU" else column - max(gpus) - 1
            while f"{kind}{number}" in taken:
                number += 1
            names[column] = f"{kind}{number}"
            taken.add(names[column])
    return [names[column] for column in range(width)]
