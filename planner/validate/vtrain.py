"""Rows of vTrain's tables of measured iterations, as rows of a table of training runs.

The tables (VIA-Research/vTrain, MIT; arXiv 2312.12391) print shape, layout and time. Machine and
software are the same in all: nodes of eight A100-80GB with 800 Gb/s, read as four NICs of 200;
Megatron-DeepSpeed in fp16, 1F1B, every layer recomputed, gradients reduced after the backward.
They become cells like those that other sources print, and nothing else knows of vTrain.
"""

from typing import Final

from planner.units import parse_number
from planner.validate.rows import Row, refuse

__all__ = ["VTRAIN_COLUMNS", "training_row"]

# ``params_b`` and ``iteration_time_ms`` may stand beside them.
VTRAIN_COLUMNS: Final = (
    *("id", "n_gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len"),
    *("tp", "dp", "pp"),
)
_MACHINE: Final = {
    "gpu": "A100-80GB-SXM",
    "gpus_per_node": "8",
    "nics_per_node": "4",
    "nic_gbps": "200",
    "precision": "fp16",
    "zero_or_fsdp": "0",
    "sequence_parallel": "false",
    "recompute": "full",
    "framework": "Megatron-DeepSpeed (2021)",
    "schedule": "1f1b",
    "vocab": "51200",  # GPT-2's, padded as Megatron does; not printed
    "notes": "no overlap of gradient all-reduce with backward",
}
_GPUS_PER_NODE: Final = 8
_MS_PER_S: Final = 1000
_MEASURED_MS: Final = (1e-3, 1e12)
_MOST_READ: Final = 1e18


def training_row(row: Row) -> Row:
    """Return the row in columns of a table of training runs.

    Cells that are copied are not checked: who reads the row refuses them by the same name. ``dp``
    is not taken over: it follows from the GPUs and the other degrees.

    >>> found = training_row(Row("t.csv", 2, {"id": "a", "n_gpus": "512", "hidden": "8192",
    ...                                       "iteration_time_ms": "21890.4"}))
    >>> [found.cells[name] for name in ("ffn_hidden", "source_id", "measured_step_time_s")]
    ['32768', 'vtrain_multi', '21.8904']

    Raises:
        InvalidInputError: The time cannot be, with its line and column.
    """
    cells = row.cells
    shape = {name: cells.get(name, "") for name in VTRAIN_COLUMNS if name != "dp"}
    hidden, num_gpus = (_number(cells.get(name, "")) for name in ("hidden", "n_gpus"))
    is_multi = num_gpus is not None and num_gpus > _GPUS_PER_NODE
    derived = {
        "ffn_hidden": "" if hidden is None else f"{4 * hidden:.0f}",
        "kv_heads": shape["heads"],
        "source_id": "vtrain_multi" if is_multi else "vtrain_single",
        "measured_step_time_s": _step_time(row),
    }
    return Row(row.source, row.line, {**shape, **_MACHINE, **derived})


def _number(text: str) -> float | None:
    """Return the number in a cell; None where there is none, or an absurd one."""
    try:
        value = parse_number(text)
    except ValueError:
        return None
    return value if abs(value) < _MOST_READ else None


def _step_time(row: Row) -> str:
    """Return the seconds of an iteration as a cell, empty where none is printed."""
    text = row.cells.get("iteration_time_ms", "")
    if not text:
        return ""
    value, (low, high) = _number(text), _MEASURED_MS
    if value is None or not low <= value <= high:
        refuse(row, "iteration_time_ms", f"must be a number from {low:g} to {high:g}")
    return f"{value / _MS_PER_S:.12g}"
