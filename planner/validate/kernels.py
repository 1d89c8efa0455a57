"""Predictions of measured kernels, by the functions that price a plan's, and how far they are off.

A table has the columns of ``planner.hardware.kernel_tables`` and ``gpu``, a device by any name.
Shapes that the bundled tables of that device hold themselves are scored apart: there a small error
only says that the table was read.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.errors import InvalidInputError, PlannerError, UnknownNameError
from planner.hardware.devices import Device, device, device_names, device_of
from planner.hardware.expert_layers import (
    ExpertLayers,
    expert_layer_s,
    is_gated,
    is_measured_layer,
)
from planner.hardware.gpus import gpu_model
from planner.hardware.kernel_tables import (
    KIND_COLUMNS,
    SIZE_COLUMNS,
    Columns,
    KernelOp,
    attention_surfaces,
    gemm_surface,
    read_table,
)
from planner.hardware.kernels import attention_s, gemm_s
from planner.hardware.roofline import DERIVED, TABLE_PRECISION
from planner.plan import Precision
from planner.units import parse_number
from planner.validate.rows import Row, table_rows

__all__ = [
    "DTYPES",
    "KernelPrediction",
    "KernelScore",
    "KernelTable",
    "kernel_predictions_csv",
    "predict_kernels",
    "read_kernels",
    "score_kernels",
]

Array = NDArray[np.float64]

_MAX_BYTES: Final = 1 << 28
# As sizes of a model (``planner.model.spec``); and the longest time, about a year, in microseconds.
_MAX_SIZE: Final = 1 << 24
_MAX_EXPERTS: Final = 1 << 16
_MAX_TIME_US: Final = 3e13
_TIME: Final = "time_us"
# From here on a product is one of training: what bars are set for.
_MIN_ROWS: Final = 1024

DTYPES: Final[dict[str, Precision]] = {
    "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "fp8": "fp8",
    "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A table of one kind of kernel.

    Attributes:
        op: Kind.
        columns: Of the file, in order.
        rows: Its lines.
        sizes: By column, shape [rows].
        time_s: Measured, NaN where the cell is empty, shape [rows].
    """

    op: KernelOp
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    sizes: dict[str, Array]
    time_s: Array

    def column(self, name: str) -> tuple[str, ...]:
        """Return the cells of a column."""
        return tuple(row.cells[name] for row in self.rows)


@dataclass(frozen=True, slots=True)
class KernelPrediction:
    """What is said of one row.

    Attributes:
        time_s: None where it cannot be predicted.
        basis: "measured" on the device, "borrowed" from another, "roofline", or "derived" from
            another precision; empty without a prediction.
        is_known: The device's own table holds the shape.
        skipped_reason: Why there is none.
    """

    time_s: float | None
    basis: str
    is_known: bool
    skipped_reason: str = ""


@dataclass(frozen=True, slots=True)
class KernelScore:
    """Errors |predicted - measured| / measured of one set of rows.

    Attributes:
        device: As bundled; "all" of all.
        kind: Data type or routing; "all" of all.
        is_known: Of shapes that the bundled tables hold, or of the others.
        num_rows: With both times; of products those of 1,024 rows and more.
        median_error: Over them.
        ninetieth_error: 90th percentile over them.
        bias: Median of predicted over measured, less 1.
    """

    device: str
    kind: str
    is_known: bool
    num_rows: int
    median_error: float
    ninetieth_error: float
    bias: float


# ------------------------------------------------------------------------------------- reading


def read_kernels(content: bytes, *, op: KernelOp, source: str) -> KernelTable:
    """Return the rows of a CSV, plain or gzipped; columns may stand in any order, others beside.

    Raises:
        InvalidInputError: It is no such table; or a cell cannot be, with its line and column.
    """
    text = _unpacked(content, source)
    if not text.strip():
        raise InvalidInputError(
            f"{source}: is empty; --op {op} needs a table with a header", where=source
        )
    needed = ("gpu", *KIND_COLUMNS[op], *SIZE_COLUMNS[op])
    rows = table_rows(text, source=source, required=needed)
    columns = tuple(rows[0].cells)
    read = {
        name: _numbers(rows, name)
        for name in (*SIZE_COLUMNS[op], *([_TIME] if _TIME in columns else []))
    }
    times = read.pop(_TIME, np.full(len(rows), np.nan)) * 1e-6
    return KernelTable(op, columns, rows, read, times)


def _unpacked(content: bytes, source: str) -> bytes:
    try:
        if content[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise InvalidInputError(
            f"{source}: is no whole gzip file: {exc}; compress it again", where=source
        ) from exc
    if len(content) > _MAX_BYTES:
        raise InvalidInputError(
            f"{source}: unpacks to more than {_MAX_BYTES} bytes; split it", where=source
        )
    return content


def _numbers(rows: Sequence[Row], column: str) -> Array:
    """Return a column as numbers: whole ones of at least 1, but for the time; NaN if left empty."""
    is_time = column == _TIME
    found = np.empty(len(rows))
    for place, row in enumerate(rows):
        text = row.cells[column]
        try:
            value = np.nan if is_time and not text else parse_number(text)
        except ValueError:
            value = -1.0
        most = _MAX_TIME_US if is_time else _MAX_SIZE
        bad = not 0 < value <= most or (not is_time and value != int(value))
        if bad and not np.isnan(value):
            need = (
                "a positive number of microseconds, or nothing"
                if is_time
                else (f"a whole number from 1 to {_MAX_SIZE:,}")
            )
            raise InvalidInputError(
                f"{row.source}, line {row.line}: {column}={text[:80]!r}; need {need}",
                where=f"line {row.line}, {column}",
            )
        found[place] = value
    return found


# ---------------------------------------------------------------------------------- predicting


def predict_kernels(table: KernelTable) -> tuple[KernelPrediction, ...]:
    """Return what the planner says of every row, in order; measured times are not looked at."""
    found: list[KernelPrediction | None] = [None] * len(table.rows)
    for (gpu, *words), places in _groups(table).items():
        refusals = _impossible(table, places)
        for place, reason in refusals.items():
            found[place] = KernelPrediction(None, "", False, reason)
        places = [place for place in places if place not in refusals]
        try:
            on = _device(gpu)
            times = _PREDICT[table.op](on, words, {k: v[places] for k, v in table.sizes.items()})
        except PlannerError as refused:
            for place in places:
                found[place] = KernelPrediction(None, "", False, str(refused))
            continue
        known, basis = _known(table.op, on, words), _basis(table.op, on, words)
        shapes = zip(*(table.sizes[name][places] for name in SIZE_COLUMNS[table.op]), strict=True)
        for place, time_s, shape in zip(places, times, shapes, strict=True):
            found[place] = KernelPrediction(float(time_s), basis, shape in known)
    return tuple(one for one in found if one is not None)


def _groups(table: KernelTable) -> dict[tuple[str, ...], list[int]]:
    """Return the rows of each device and kind."""
    groups: dict[tuple[str, ...], list[int]] = {}
    words = zip(*(table.column(name) for name in ("gpu", *KIND_COLUMNS[table.op])), strict=True)
    for place, key in enumerate(words):
        groups.setdefault(key, []).append(place)
    return groups


def _device(gpu: str) -> Device:
    if gpu in device_names():
        return device(gpu)
    try:
        return device_of(gpu_model(gpu))
    except UnknownNameError as exc:
        raise InvalidInputError(
            f"gpu={gpu[:60]!r} is not known; 'commplan device list' has those that were measured, "
            "planner/hardware/gpus.json all others",
            where="gpu",
        ) from exc


def _precision(word: str) -> Precision:
    if word not in DTYPES:
        raise InvalidInputError(
            f"dtype {word!r} is not known; need one of {', '.join(DTYPES)}", where="dtype"
        )
    return DTYPES[word]


def _impossible(table: KernelTable, places: Sequence[int]) -> dict[int, str]:
    """Return why rows cannot be, by place: sizes that contradict each other."""
    refused: dict[int, str] = {}
    for bad, left, right, need in _CONTRADICTIONS[table.op]:
        left_values, right_values = table.sizes[left], table.sizes[right]
        for place in places:
            a, b = int(left_values[place]), int(right_values[place])
            if bad(a, b):
                refused.setdefault(
                    place, f"{left}={a} with {right}={b}; {need.format(left=left, right=right)}"
                )
    return refused


def _basis(op: KernelOp, on: Device, words: Sequence[str]) -> str:
    if on.tables is None:
        return "roofline"
    if op == "gemm":
        is_measured = gemm_surface(on.tables, _precision(words[0])) is not None
    elif op == "attention":
        is_measured = bool(attention_surfaces(on.tables)[1])
    else:
        is_measured = is_measured_layer(on, words[1])
    if not is_measured:
        return "roofline"
    return "derived" if {*words} & {*DERIVED} else on.basis


def _predict_gemm(on: Device, words: Sequence[str], sizes: dict[str, Array]) -> Array:
    return gemm_s(on, _precision(words[0]), sizes["m"], sizes["n"], sizes["k"])


def _predict_attention(on: Device, words: Sequence[str], sizes: dict[str, Array]) -> Array:
    batch, seq_len, heads = (sizes[name] for name in ("batch_size", "seq_len", "num_heads"))
    precision: Precision = "bf16" if "bf16" in on.peak_flop_per_s else "fp16"
    return attention_s(
        on,
        precision,
        2.0 * batch * heads * seq_len**2 * sizes["head_dim"],
        seq_len=seq_len,
        batch=batch,
        num_heads=heads,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
    )


def _predict_layer(on: Device, words: Sequence[str], sizes: dict[str, Array]) -> Array:
    dtype, routing = words
    layers = ExpertLayers(
        tokens=sizes["num_tokens"],
        hidden_size=sizes["hidden_size"],
        width=sizes["inter_size"] / sizes["moe_tp_size"],
        top_k=sizes["topk"],
        num_experts=sizes["num_experts"],
        ep=sizes["moe_ep_size"],
        gated=is_gated(sizes["hidden_size"], sizes["inter_size"]),
    )
    return expert_layer_s(on, _precision(dtype), layers, routing)


def _does_not_divide(whole: int, part: int) -> bool:
    return whole % part != 0


def _exceeds(value: int, most: int) -> bool:
    return value > most


_DIVIDES: Final = "{right} must divide {left}"
_AT_MOST: Final = "{left} must be at most {right}"
# (what is wrong, of which column, with which, what is needed)
_CONTRADICTIONS: Final[
    dict[KernelOp, tuple[tuple[Callable[[int, int], bool], str, str, str], ...]]
] = {
    "gemm": (),
    "attention": ((_does_not_divide, "num_heads", "num_key_value_heads", _DIVIDES),),
    "moe_layer": (
        (_exceeds, "topk", "num_experts", _AT_MOST),
        (_does_not_divide, "num_experts", "moe_ep_size", _DIVIDES),
        (_does_not_divide, "inter_size", "moe_tp_size", _DIVIDES),
        (
            lambda experts, _: experts > _MAX_EXPERTS,
            "num_experts",
            "topk",
            f"at most {_MAX_EXPERTS:,} experts are known of",
        ),
    ),
}
_PREDICT: Final[dict[KernelOp, Callable[[Device, Sequence[str], dict[str, Array]], Array]]] = {
    "gemm": _predict_gemm,
    "attention": _predict_attention,
    "moe_layer": _predict_layer,
}


def _known(op: KernelOp, on: Device, words: Sequence[str]) -> set[tuple[float, ...]]:
    """Return the shapes that the device's own table holds."""
    columns: Columns = read_table(on.tables, op) if on.tables else {}
    if not columns:
        return set()
    mine = np.ones(len(columns[_TIME]), dtype=bool)
    for name, word in zip(KIND_COLUMNS[op], words, strict=True):
        mine &= columns[name] == (TABLE_PRECISION[DTYPES[word]] if word in DTYPES else word)
    return set(zip(*(columns[name][mine].astype(float) for name in SIZE_COLUMNS[op]), strict=True))


# ------------------------------------------------------------------------------------- scoring


def score_kernels(
    table: KernelTable, predictions: Sequence[KernelPrediction]
) -> tuple[KernelScore, ...]:
    """Return errors by device and kind, and of all: unknown shapes first, known ones after."""
    predicted = np.array([np.nan if p.time_s is None else p.time_s for p in predictions])
    ratio = predicted / table.time_s
    counts = np.isfinite(ratio)
    if table.op == "gemm":
        counts &= table.sizes["m"] >= _MIN_ROWS
    known = np.array([p.is_known for p in predictions], dtype=bool)
    scores: list[KernelScore] = []
    for is_known in (False, True):
        of_kind = counts & (known == is_known)
        for (gpu, *words), places in _groups(table).items():
            rows = [place for place in places if of_kind[place]]
            kind = " ".join(word for word in words if word not in DTYPES or table.op == "gemm")
            scores += _score(_device(gpu).name if rows else gpu, kind, is_known, ratio[rows])
        scores += _score("all", "all", is_known, ratio[of_kind])
    return tuple(scores)


def _score(name: str, kind: str, is_known: bool, ratio: Array) -> Iterator[KernelScore]:
    if not len(ratio):
        return
    error = np.abs(ratio - 1.0)
    yield KernelScore(
        device=name,
        kind=kind,
        is_known=is_known,
        num_rows=len(ratio),
        median_error=float(np.median(error)),
        ninetieth_error=float(np.percentile(error, 90)),
        bias=float(np.median(ratio) - 1.0),
    )


def kernel_predictions_csv(table: KernelTable, predictions: Sequence[KernelPrediction]) -> str:
    """Return the table with columns for the prediction, its basis and why there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    added = ("predicted_time_us", "basis", "skipped_reason")
    kept = [name for name in table.columns if name not in added]
    writer.writerow([*kept, *added])
    for row, one in zip(table.rows, predictions, strict=True):
        time_us = "" if one.time_s is None else f"{one.time_s * 1e6:.6g}"
        cells = [row.cells[name] for name in kept]
        writer.writerow([*cells, time_us, one.basis, one.skipped_reason])
    return text.getvalue()
