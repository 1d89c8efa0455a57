"""Rows of a table of published collective measurements, and what a prediction may know of them.

A row says on which machine which call was made, and what came out. Whoever predicts gets a
``Question`` and nothing else; ``without_outcomes`` is the only function that makes one.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn, get_args

from planner.errors import InvalidInputError
from planner.plan import Collective
from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.document import Library
from planner.units import parse_number

__all__ = [
    "OUTCOME_COLUMNS",
    "Outcome",
    "Plugin",
    "Question",
    "Row",
    "header_of",
    "outcome_of",
    "read_rows",
    "refuse",
    "table_rows",
    "without_outcomes",
]

# What carries the library's messages in place of its own transport.
Plugin = Literal["aws-ofi-nccl", "tcpx", "gib"]

_REQUIRED: Final = ("id", "gpu", "n_nodes", "n_ranks", "op", "size_bytes")
_OPTIONAL: Final = (
    *("gpus_per_node", "library_version", "algorithm", "protocol"),
    *("intra_kind", "intra_GBps_per_gpu", "nics_per_node", "nic_gbps"),
)
# What came out, texts that may hold it, and names by which a machine could be known.
OUTCOME_COLUMNS: Final = (
    *("time_us", "algbw_GBps", "busbw_GBps", "notes", "verified", "source_url"),
    *("machine", "inter_link"),
)

_GB: Final = 1e9
_GBIT_BYTES: Final = 1e9 / 8
# Least and most that a cell may say: wider than any machine, refused is a slip of the pen.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "n_nodes": (1, 1 << 17),
    "n_ranks": (1, 1 << 20),
    "gpus_per_node": (1, MAX_GPUS_PER_NODE),
    "size_bytes": (1, 1 << 50),
    "intra_GBps_per_gpu": (0.001, 1e5),
    "nics_per_node": (0, 256),
    "nic_gbps": (0.001, 1e5),
    "time_us": (1e-3, 1e12),
    "algbw_GBps": (0, 1e6),
}
_LIBRARIES: Final[tuple[Library, ...]] = ("rccl", "oneccl", "hccl", "nccl")  # "rccl" is no "nccl"
_PLUGINS: Final[tuple[Plugin, ...]] = get_args(Plugin)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``cells`` by column, of the file ``source``."""

    source: str
    line: int
    cells: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """A call on a machine, without what is known of its outcome.

    Attributes:
        id: Of the row; for print only.
        gpu: As the source calls it.
        num_nodes: That take part.
        gpus_per_node: That a node has, whether they take part or not.
        num_ranks: A multiple of ``num_nodes``.
        library: None where ``library_version`` names none.
        plugin: None where ``library_version`` names none.
        op: The call.
        algorithm: As the source calls it; empty = the library chose.
        protocol: As the source calls it.
        size_bytes: S of nccl-tests; None where the source prints none.
        intra_kind: What joins the GPUs of a node.
        intra_bytes_per_s: Of one GPU, one direction, nominal.
        nics_per_node: Of a node, whether its GPUs take part or not.
        nic_bytes_per_s: Of one, one direction.
    """

    id: str
    gpu: str
    num_nodes: int
    gpus_per_node: int
    num_ranks: int
    library: Library | None
    plugin: Plugin | None
    op: Collective
    algorithm: str
    protocol: str
    size_bytes: int | None
    intra_kind: str
    intra_bytes_per_s: float | None
    nics_per_node: int | None
    nic_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured.

    Attributes:
        machine: As the source calls it.
        time_s: None where neither a time nor a bandwidth is printed.
        excluded: The notes say that the row is no fair measure.
    """

    machine: str
    time_s: float | None
    excluded: bool


def read_rows(text: str | bytes, *, source: str) -> tuple[Row, ...]:
    """Return the rows of a CSV, in order; columns may stand in any order, and others beside them.

    Raises:
        InvalidInputError: It is no such table; or a cell cannot be, with its line and column.
    """
    rows, seen = [], dict[str, int]()
    for row in table_rows(text, source=source, required=_REQUIRED):
        name = without_outcomes(row).id
        outcome_of(row)
        if name in seen:
            refuse(row, "id", f"is that of line {seen[name]}; give each row its own")
        seen[name] = row.line
        rows.append(row)
    return tuple(rows)


def header_of(text: str | bytes, *, source: str) -> tuple[str, ...]:
    """Return the names of the columns of a CSV, as they stand there.

    Raises:
        InvalidInputError: It is no CSV, or is empty.
    """
    lines = _lines(text, source)
    if not lines:
        raise InvalidInputError(
            f"{source}: is empty; need a line with the names of columns, and rows below it",
            where=source,
        )
    return tuple(lines[0][1])


def table_rows(text: str | bytes, *, source: str, required: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows of a CSV, in order, whatever stands in their cells.

    Raises:
        InvalidInputError: It is no CSV, is empty, or lacks a column of ``required``.
    """
    header, *lines = _lines(text, source) or [(0, [])]
    columns = header[1]
    if missing := [column for column in required if column not in columns]:
        raise InvalidInputError(
            f"{source}: has no column {', '.join(map(repr, missing))}; needed: "
            f"{', '.join(required)}",
            where=missing[0],
        )
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise InvalidInputError(
            f"{source}: column {twice[0]!r} occurs twice; keep one", where=twice[0]
        )
    rows = []
    for line, cells in lines:
        if len(cells) != len(columns):
            raise InvalidInputError(
                f"{source}, line {line}: has {len(cells)} cells where the header has "
                f"{len(columns)}; quote cells that hold a comma",
                where=f"line {line}",
            )
        rows.append(Row(source, line, dict(zip(columns, map(str.strip, cells), strict=True))))
    if not rows:
        raise InvalidInputError(f"{source}: has a header and no rows", where=source)
    return tuple(rows)


def without_outcomes(row: Row) -> Question:
    """Return what may be known of a row before it is measured: nothing of ``OUTCOME_COLUMNS``.

    Raises:
        InvalidInputError: A cell cannot be, with its line and column.
    """
    known = {column: row.cells.get(column, "") for column in (*_REQUIRED, *_OPTIONAL)}
    asked = Row(row.source, row.line, known)
    nodes, ranks = _needed(asked, "n_nodes"), _needed(asked, "n_ranks")
    if ranks % nodes:
        refuse(
            asked, "n_ranks", f"must be a multiple of n_nodes={nodes}: as many ranks on each node"
        )
    gpus = _whole(asked, "gpus_per_node") or ranks // nodes
    if ranks > nodes * gpus:
        refuse(asked, "n_ranks", f"must be at most {nodes} nodes x {gpus} GPUs = {nodes * gpus}")
    if not known["id"]:
        refuse(asked, "id", "must not be empty")
    version = known["library_version"].lower()
    return Question(
        id=known["id"],
        gpu=known["gpu"],
        num_nodes=nodes,
        gpus_per_node=gpus,
        num_ranks=ranks,
        library=next((name for name in _LIBRARIES if name in version), None),
        plugin=next((name for name in _PLUGINS if re.search(rf"\b{name}\b", version)), None),
        op=_operation(asked),
        algorithm=known["algorithm"],
        protocol=known["protocol"],
        size_bytes=_whole(asked, "size_bytes"),
        intra_kind=known["intra_kind"],
        intra_bytes_per_s=_scaled(asked, "intra_GBps_per_gpu", _GB),
        nics_per_node=_whole(asked, "nics_per_node"),
        nic_bytes_per_s=_scaled(asked, "nic_gbps", _GBIT_BYTES),
    )


def outcome_of(row: Row) -> Outcome:
    """Return what was measured; where no time is printed, size over algorithm bandwidth.

    Raises:
        InvalidInputError: A cell cannot be, with its line and column.
    """
    time_s = _scaled(row, "time_us", 1e-6)
    size, rate = _whole(row, "size_bytes"), _scaled(row, "algbw_GBps", _GB)
    if time_s is None and size and rate:
        time_s = size / rate
    return Outcome(
        machine=row.cells.get("machine", ""),
        time_s=time_s,
        excluded="EXCLUDE" in row.cells.get("notes", ""),
    )


def refuse(row: Row, column: str, need: str) -> NoReturn:
    """Raise InvalidInputError about a cell, with its line, column and what it holds."""
    got = row.cells.get(column, "")[:80]
    raise InvalidInputError(
        f"{row.source}, line {row.line}: {column}={got!r} {need}",
        where=f"line {row.line}, {column}",
    )


# -------------------------------------------------------------------------------------- cells


def _lines(text: str | bytes, source: str) -> list[tuple[int, list[str]]]:
    """Return the cells of every line that is not empty, with its number."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        reader = csv.reader(io.StringIO(decoded, newline=""), strict=True)
        return [(reader.line_num, cells) for cells in reader if any(cells)]
    except UnicodeDecodeError as exc:
        raise InvalidInputError(
            f"{source}: is not UTF-8 at byte {exc.start}; save it as UTF-8", where=source
        ) from exc
    except csv.Error as exc:
        raise InvalidInputError(
            f"{source}, line {reader.line_num}: is no CSV: {exc}", where=source
        ) from exc


def _number(row: Row, column: str) -> float | None:
    """Return the number in a cell, None for an empty one."""
    text = row.cells.get(column, "")
    if not text:
        return None
    low, high = _RANGES[column]
    try:
        value = parse_number(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        refuse(row, column, f"must be a number from {low:g} to {high:g}")
    return value


def _whole(row: Row, column: str) -> int | None:
    value = _number(row, column)
    if value is None:
        return None
    if value != int(value):
        refuse(row, column, "must be a whole number")
    return int(value)


def _needed(row: Row, column: str) -> int:
    value = _whole(row, column)
    if value is None:
        refuse(row, column, "must not be empty")
    return value


def _scaled(row: Row, column: str, scale: float) -> float | None:
    value = _number(row, column)
    return None if value is None else value * scale


def _operation(row: Row) -> Collective:
    known: tuple[Collective, ...] = get_args(Collective)
    for op in known:
        if row.cells["op"] == op:
            return op
    refuse(row, "op", f"must be one of {', '.join(known)}")
