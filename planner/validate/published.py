"""Rows of a table of published training runs, and what a prediction may know of them.

A row says what was trained on which machine and how, and what came out. Whoever predicts gets a
``Run`` and nothing else; ``run_of`` is the only function that makes one, and ``without_outcomes``
takes the outcomes away before it looks at a cell. Of the notes it keeps whether they state one of
``FACTS``: what the other columns have no place for.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from planner.errors import InvalidInputError
from planner.units import parse_number
from planner.validate.rows import Row, header_of, refuse, table_rows
from planner.validate.vtrain import VTRAIN_COLUMNS, training_row

__all__ = [
    "FACTS",
    "LIMITS",
    "OUTCOME_COLUMNS",
    "Run",
    "RunOutcome",
    "read_runs",
    "run_of",
    "run_outcome",
    "without_outcomes",
]

# What came out, texts that may hold it, and names by which a run could be known.
OUTCOME_COLUMNS: Final = (
    *("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "flops_convention", "mfu_pct"),
    *("memory_gb_per_gpu", "measured_step_time_s", "measured_from", "iteration_time_ms"),
    *("source", "source_id", "url_or_repo_path", "verified", "n_params_B"),
)
# Statements of the notes about how a run was configured, by what stands there.
FACTS: Final[Mapping[str, str]] = {
    "ends_hold_one_layer_less": r"first and last stages? (have|hold)s? one layer (fewer|less)",
    "ends_count_as_layers": r"transformer\|embedding",
    "optimizer_on_cpu": r"\bon CPU\b|CPU optimizer|optimizer offload",
    "fp32_accumulation": r"fp32 grad(ient)?s? accumulation",
    "fused_attention": r"flash.?att|\bflash\b|\bFA[2-4]\b",
    "flash_attention_2": r"flash.?attention.?2|\bFA2\b",
    "newest_attention": r"\bFA[34]\b|flash.?attention.?[34]|cudnn attention",
    "tensor_parallel_hidden": r"overlap of [\w/]*\bTP\b|tp.comm.overlap",
    "experts_whole": r"\bETP=1\b",
    "latent_attention": r"\bMLA\b",
    "three_dense_layers": r"first 3 layers dense",
    "capacity_factor_1": r"capacity factor 1\b",
    "even_routing": r"force-balanced|balanced by construction",
    "memory_only": r"memory-only",
    "blocking_launches": r"CUDA_LAUNCH_BLOCKING=1",
    "gradients_not_overlapped": r"no overlap of gradient all-reduce",
    "of_allocated": r"max_(memory_)?allocated|memory_allocated|\(peak\)|peak (memory )?allocated",
    "of_reserved": r"max_(memory_)?reserved|memory_reserved|reserved memory|peak reserved",
}

_OFFLOADED_LAYERS: Final = r"activation offload(?:ing)? of (\d{1,4}) layers"

_REQUIRED: Final = (
    *("id", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "tp", "pp", "micro_batch"),
    *("global_batch", "precision", "zero_or_fsdp", "recompute", "framework"),
)
# Least and most that can be planned for, as of ``ModelSpec`` and ``TrainingSpec`` where they have
# the field. A cell below, or that is no whole number, is a slip of the pen: the table is refused.
# One above is read, and whoever predicts passes over that row alone.
LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "layers": (1, 4096),
    "hidden": (1, 1 << 24),
    "ffn_hidden": (1, 1 << 24),
    "heads": (1, 1 << 24),
    "kv_heads": (1, 1 << 24),
    "vocab": (1, 1 << 24),
    "seq_len": (1, 16_777_216),
    "moe_experts": (0, 1 << 16),
    "moe_topk": (0, 1 << 16),
    "moe_ffn_hidden": (0, 1 << 24),
    "moe_shared_experts": (0, 1 << 10),
    "n_gpus": (1, 1 << 20),
    "gpus_per_node": (1, 1024),
    "tp": (1, 1 << 16),
    "pp": (1, 1 << 16),
    "cp": (1, 1 << 16),
    "ep": (1, 1 << 16),
    "vpp": (1, 4096),
    "micro_batch": (1, 1 << 20),
    "global_batch": (1, 1_000_000),
    "nics_per_node": (0, 256),
}
_MEASURED: Final = {
    "memory_gb_per_gpu": (1e-3, 1e5),
    "measured_step_time_s": (1e-6, 1e9),
    "step_time_s": (1e-6, 1e9),
    "tokens_per_s_per_gpu": (1e-6, 1e12),
    "tflops_per_gpu": (1e-6, 1e6),
    "mfu_pct": (1e-3, 100.0),
}
_CONVENTIONS: Final = ("", "model", "hardware")
# How notes say that printed flop have half of the attention's, as a causal kernel does.
_CAUSAL: Final = r"causal \(?half\)?"
_TERA: Final = 1e12
_GBIT_BYTES: Final = 1e9 / 8
_MOST_READ: Final = 1e18  # a whole number of 64 bits, whatever the column


@dataclass(frozen=True, slots=True)
class Run:
    """A training run without what is known of its outcome; None and "" where a cell is empty.

    Attributes as the columns of the table, and ``nic_bytes_per_s`` of one NIC in one direction,
    ``facts``, the names of ``FACTS`` that the notes state, ``offloaded_layers``, whose activations
    the notes say go to the CPU.
    """

    id: str
    model: str
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    moe_experts: int | None
    moe_topk: int | None
    moe_ffn_hidden: int | None
    moe_shared_experts: int | None
    gpu: str
    n_gpus: int | None
    gpus_per_node: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    vpp: int | None
    micro_batch: int | None
    global_batch: int | None
    precision: str
    zero_or_fsdp: str
    sequence_parallel: str
    recompute: str
    framework: str
    schedule: str
    nics_per_node: int | None
    nic_bytes_per_s: float | None
    offloaded_layers: int | None
    facts: frozenset[str]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What was measured.

    Attributes:
        source: Of the row, as the table calls it.
        memory_gib: Of one GPU. The column says GB, as torch, nvidia-smi and most papers do who
            count 2**30 bytes.
        step_time_s: Of one step.
        tokens_per_s: Of one GPU.
        flop_per_s: Of one GPU, as the source counts them.
        mfu: Of the GPU's dense peak, 0..1.
        counts_recomputed: Whether ``flop_per_s`` and ``mfu`` have what is recomputed in them.
        counts_causal: Whether they have half of the attention's flop, not all.
    """

    source: str
    memory_gib: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    flop_per_s: float | None
    mfu: float | None
    counts_recomputed: bool
    counts_causal: bool


def read_runs(text: str | bytes, *, source: str) -> tuple[Row, ...]:
    """Return the rows of a CSV, in order; columns may stand in any order, and others beside them.

    A table with the columns of vTrain's is told by its header, and its rows are those that
    ``training_row`` makes of them.

    Raises:
        InvalidInputError: It is neither table; or a cell cannot be, with its line and column.
    """
    columns, seen = header_of(text, source=source), dict[str, int]()
    missing = [column for column in _REQUIRED if column not in columns]
    if "gpu" in missing and all(column in columns for column in VTRAIN_COLUMNS):
        found = table_rows(text, source=source, required=VTRAIN_COLUMNS)
        rows = tuple(map(training_row, found))
    elif missing:
        raise InvalidInputError(
            f"{source}: has no column {', '.join(map(repr, missing))}; needed: "
            f"{', '.join(_REQUIRED)}, as benchmarks/data/training_runs.csv; or "
            f"{', '.join(VTRAIN_COLUMNS)}, as benchmarks/data/vtrain_multi_node.csv",
            where=missing[0],
        )
    else:
        rows = table_rows(text, source=source, required=_REQUIRED)
    for row in rows:
        name = run_of(row).id
        run_outcome(row)
        if name in seen:
            refuse(row, "id", f"is that of line {seen[name]}; give each row its own")
        seen[name] = row.line
    return rows


def without_outcomes(row: Row) -> Row:
    """Return the row without ``OUTCOME_COLUMNS``; nothing that predicts reads any other."""
    known = {name: text for name, text in row.cells.items() if name not in OUTCOME_COLUMNS}
    return Row(row.source, row.line, known)


def run_of(row: Row) -> Run:
    """Return what may be known of a row before it is run: nothing of ``OUTCOME_COLUMNS``.

    Raises:
        InvalidInputError: A cell cannot be, with its line and column.
    """
    asked = without_outcomes(row)
    notes = asked.cells.get("notes", "")
    if not asked.cells["id"]:
        refuse(asked, "id", "must not be empty")
    rate = _number(asked, "nic_gbps", (1e-3, 1e5))
    offloaded = re.search(_OFFLOADED_LAYERS, notes, re.I)
    derived = {
        "offloaded_layers": int(offloaded[1]) if offloaded else None,
        "nic_bytes_per_s": None if rate is None else rate * _GBIT_BYTES,
        "facts": frozenset(name for name, said in FACTS.items() if re.search(said, notes, re.I)),
    }
    plain = [field.name for field in fields(Run) if field.name not in derived]
    cells = {
        name: _whole(asked, name) if name in LIMITS else asked.cells.get(name, "") for name in plain
    }
    return Run(**cells, **derived)  # type: ignore[arg-type]  # of the fields' own types


def run_outcome(row: Row) -> RunOutcome:
    """Return what was measured.

    Raises:
        InvalidInputError: A cell cannot be, with its line and column.
    """
    memory, step, printed, tokens, tflops, mfu = (
        _number(row, name, limits) for name, limits in _MEASURED.items()
    )
    convention = row.cells.get("flops_convention", "").lower()
    if convention not in _CONVENTIONS:
        refuse(row, "flops_convention", "must be model or hardware, or empty")
    return RunOutcome(
        source=row.cells.get("source_id", ""),
        memory_gib=memory,
        step_time_s=printed if step is None else step,
        tokens_per_s=tokens,
        flop_per_s=None if tflops is None else tflops * _TERA,
        mfu=None if mfu is None else mfu / 100,
        counts_recomputed=convention == "hardware",
        counts_causal=re.search(_CAUSAL, row.cells.get("notes", ""), re.I) is not None,
    )


def _number(row: Row, column: str, limits: tuple[float, float]) -> float | None:
    """Return the number in a cell, None for an empty one."""
    text = row.cells.get(column, "")
    if not text:
        return None
    try:
        value = parse_number(text)
    except ValueError:
        value = math.nan
    low, high = limits
    if not low <= value <= high:
        refuse(row, column, f"must be a number from {low:g} to {high:g}")
    return value


def _whole(row: Row, column: str) -> int | None:
    value = _number(row, column, (LIMITS[column][0], _MOST_READ))
    if value is None:
        return None
    if value != int(value):
        refuse(row, column, "must be a whole number")
    return int(value)
