"""Rows of a table of published training runs, for tests."""

import csv
import io
from pathlib import Path

from planner.validate.rows import Row

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "training_runs.csv"

# A dense 7B model on one node of A100, every cell filled that may be.
CELLS = {
    "id": "row-1",
    "source_id": "SOURCE",
    "model": "a model",
    "layers": "32",
    "hidden": "4096",
    "ffn_hidden": "11008",
    "heads": "32",
    "kv_heads": "32",
    "vocab": "32000",
    "seq_len": "4096",
    "moe_experts": "",
    "moe_topk": "",
    "moe_ffn_hidden": "",
    "moe_shared_experts": "",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "2",
    "cp": "1",
    "ep": "",
    "vpp": "",
    "micro_batch": "1",
    "global_batch": "16",
    "precision": "bf16",
    "zero_or_fsdp": "1",
    "sequence_parallel": "true",
    "recompute": "none",
    "framework": "Megatron-LM",
    "schedule": "1f1b",
    "notes": "",
    "memory_gb_per_gpu": "40.5",
    "measured_step_time_s": "1.5",
}


def row_of(**cells: str) -> Row:
    return Row("table.csv", 2, {**CELLS, **cells})


def table_of(*rows: dict[str, str]) -> str:
    text = io.StringIO()
    lines = csv.DictWriter(text, list(CELLS), lineterminator="\n")
    lines.writeheader()
    lines.writerows({**CELLS, **cells} for cells in rows)
    return text.getvalue()
