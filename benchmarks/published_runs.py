"""Step times of published training runs against the uncalibrated cost model.

    python benchmarks/published_runs.py training_runs.csv

Reads rows with a printed layout (columns as in the table of public runs that the project is judged
on: model shape, gpu, tp, pp, cp, micro_batch, global_batch, ..., measured_step_time_s) and keeps
dense models in 16 bits on A100 and H100. Prints, per source and GPU, how many rows, the median of
predicted over measured, and the median absolute error. Two constants were set by hand on the
medians of FLAG, FMS, KORT and MPT (``SUSTAINED_CLOCK``); the other sources had no part in it.

Cells that a source left empty are taken as: ZeRO-1, sequence parallel with tp, no recompute, one
chunk per stage. Nothing else is guessed, and nothing fits here.
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from planner.cost.problem import Problem
from planner.cost.step import price
from planner.errors import PlannerError
from planner.hardware.devices import device
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates
from planner.model.blocks import block_flop_per_token, block_kinds, layer_kinds
from planner.model.spec import Attention, FeedForward, ModelSpec
from planner.pipeline.partition import split_table
from planner.plan import TrainingSpec
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric

CLUSTERS: Final = {"A100": "dgx-a100", "H100": "dgx-h100"}
FITTED_ON: Final = ("FLAG", "FMS", "KORT", "MPT")
NEEDED: Final = (
    "measured_step_time_s", "tp", "pp", "micro_batch", "global_batch", "n_gpus",
    "layers", "hidden", "heads", "vocab", "seq_len",
)  # fmt: skip
ZERO: Final = {"": 1, "0": 0, "1": 1, "2": 2, "3": 3, "hsdp": 3}

Row = dict[str, str]


def main() -> None:
    """Print the table."""
    path = parse_arguments().csv
    with path.open(newline="") as file:
        ratios = by_source(csv.DictReader(file))
    print(f"{'source':8} {'gpu':5} {'rows':>5} {'median ratio':>13} {'median error':>13}")
    for (source, gpu), found in sorted(ratios.items()):
        error = statistics.median(abs(ratio - 1) for ratio in found)
        mark = "  (fitted on)" if source in FITTED_ON else ""
        ratio = statistics.median(found)
        print(f"{source:8} {gpu:5} {len(found):5} {ratio:13.3f} {error:13.1%}{mark}")


def by_source(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured step times by (source, GPU)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        gpu = next((name for name in CLUSTERS if name in row["gpu"]), None)
        dense = row["moe_experts"] in ("", "0")
        if gpu is None or not dense or row["precision"] not in ("bf16", "fp16"):
            continue
        if all(row[name] for name in NEEDED):
            try:
                predicted = predicted_s(row, gpu)
            except (PlannerError, ValueError):
                continue  # the row's degrees or batch do not multiply out
            found[row["source_id"], gpu].append(predicted / float(row["measured_step_time_s"]))
    return found


def predicted_s(row: Row, gpu: str) -> float:
    """Return the step time of a row's own configuration."""
    tp, pp, cp = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    n_gpus, micro_batch = int(row["n_gpus"]), int(float(row["micro_batch"]))
    dp, chunks = n_gpus // (tp * pp * cp), int(row["vpp"] or 1)
    batch = int(float(row["global_batch"]))
    if tp * pp * cp * dp != n_gpus or batch % (dp * micro_batch):
        raise ValueError("degrees or batch do not multiply out")
    if int(row["layers"]) % (pp * chunks):
        chunks = 1
    zero = ZERO[row["zero_or_fsdp"]]
    model = model_of(row)
    training = TrainingSpec(global_batch_size=batch, seq_len=int(row["seq_len"]))
    fabric = fabric_of(row, gpu, n_gpus)
    kinds = block_kinds(model)
    costs = {kind: block_flop_per_token(model, kind, training.seq_len) for kind in kinds}
    problem = Problem(
        model=model,
        training=training,
        fabric=fabric,
        device=device(fabric.device),
        splits=split_table(layer_kinds(model), [(pp, chunks)], costs),
        framework="megatron",
    )
    schedule = "none" if pp == 1 else ("interleaved_1f1b" if chunks > 1 else "1f1b")
    recompute = "full" if row["recompute"] == "full" else "none"
    values = {
        "tp": tp, "cp": cp, "pp": pp, "ep": 1, "etp": 1,
        "dp_shard": dp if zero else 1, "dp_replicate": 1 if zero else dp,
        "virtual_stages": chunks, "schedule": SCHEDULES.index(schedule), "split": 0,
        "micro_batch_size": micro_batch, "num_micro_batches": batch // (dp * micro_batch),
        "recompute": RECOMPUTE_MODES.index(recompute), "zero_stage": zero,
        "sequence_parallel": tp > 1 and row["sequence_parallel"] != "false",
        "context_exchange": 0, "order": 0,
    }  # fmt: skip
    candidate = Candidates(**{name: np.array([value]) for name, value in values.items()})
    return float(price(problem, candidate).step_time_s()[0])


def model_of(row: Row) -> ModelSpec:
    """Return the shape; a width other than four hidden sizes is taken as gated (Llama)."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    width = int(row["ffn_hidden"] or 4 * hidden)
    return ModelSpec(
        name=row["model"] or "row",
        source=row["source_id"],
        num_layers=int(row["layers"]),
        hidden_size=hidden,
        vocab_size=int(row["vocab"]),
        attention=Attention(
            num_heads=heads, num_kv_heads=int(row["kv_heads"] or heads), head_dim=hidden // heads
        ),
        feed_forward=FeedForward(hidden_size=width, gated=width != 4 * hidden),
    )


def fabric_of(row: Row, gpu: str, n_gpus: int) -> Fabric:
    """Return the bundled cluster with the row's NICs."""
    nodes = max(1, n_gpus // 8)
    fabric = compile_fabric(load_topology(CLUSTERS[gpu]), nodes)
    if row["nics_per_node"] and row["nic_gbps"]:
        rate = float(row["nics_per_node"]) * float(row["nic_gbps"]) / 8 * 1e9 / 8
        levels = (
            fabric.levels[0],
            *(replace(level, bytes_per_s=rate) for level in fabric.levels[1:]),
        )
        fabric = replace(fabric, levels=levels)
    return replace(fabric, num_gpus=n_gpus)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path, help="table of published runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
