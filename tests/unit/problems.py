"""Problems and candidate rows that tests price."""

from typing import Any

import numpy as np

from planner.cost.problem import Problem
from planner.cost.step_constants import StepConstants
from planner.hardware.devices import device
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
)
from planner.model.blocks import BLOCK_KINDS, layer_kinds
from planner.model.bundled import load_model
from planner.model.spec import ModelSpec
from planner.pipeline.partition import SplitTable, split_table
from planner.plan import Framework, TrainingSpec
from planner.topology.fabric import Fabric, Level

NVLINK = Level("nvlink", "nvlink", 8, 450e9, 3e-6, "test")
RAIL = Level("rail", "infiniband", 256, 50e9, 15e-6, "test")
SPINE = Level("spine", "infiniband", 1 << 20, 25e9, 20e-6, "test")


def fabric(num_gpus: int = 64, **changes: Any) -> Fabric:
    """Return three levels: 8 GPUs, 32 nodes, the rest behind a 2:1 spine."""
    fields: dict[str, Any] = {
        "topology": "test",
        "library": "nccl",
        "device": "h100-sxm-80gb",
        "num_gpus": num_gpus,
        "gpus_per_node": 8,
        "cores_per_node": None,
        "levels": (NVLINK, RAIL, SPINE),
    }
    return Fabric(**{**fields, **changes})


def splits(model: ModelSpec, *pipelines: tuple[int, int]) -> SplitTable:
    """Return the split table with every kind of layer equally costly."""
    costs = {kind: float(kind not in ("embedding", "head")) for kind in BLOCK_KINDS}
    return split_table(layer_kinds(model), pipelines, costs, model.num_mtp_modules)


def problem(
    model: str | ModelSpec = "llama3-8b",
    *,
    pipelines: tuple[tuple[int, int], ...] = ((1, 1),),
    on: Fabric | None = None,
    framework: Framework = "megatron",
    constants: StepConstants | None = None,
    **training: Any,
) -> Problem:
    """Return a problem; ``training`` overrides batch 64, sequence 8192, bf16.

    ``constants=PLAIN`` where a test reckons with kernels and calls as in their tables.
    """
    spec = load_model(model) if isinstance(model, str) else model
    where = on or fabric()
    return Problem(
        model=spec,
        training=TrainingSpec(**{"global_batch_size": 64, "seq_len": 8192, **training}),
        fabric=where,
        device=device(where.device),
        splits=splits(spec, *pipelines),
        framework=framework,
        constants=constants,
    )


def row(**fields: Any) -> Candidates:
    """Return one candidate; unnamed degrees are 1, words are given as words."""
    values: dict[str, Any] = {
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "ep": 1,
        "etp": 1,
        "dp_shard": 1,
        "dp_replicate": 1,
        "virtual_stages": 1,
        "schedule": "none",
        "split": 0,
        "micro_batch_size": 1,
        "num_micro_batches": 1,
        "recompute": "none",
        "recompute_layers": 0,
        "zero_stage": 0,
        "sequence_parallel": False,
        "context_exchange": "ring",
        "order": "tp-cp-ep-dp-pp",
        **fields,
    }
    values["schedule"] = SCHEDULES.index(values["schedule"])
    values["context_exchange"] = CONTEXT_EXCHANGES.index(values["context_exchange"])
    values["order"] = RANK_ORDERS.index(values["order"])
    values["recompute"] = RECOMPUTE_MODES.index(values["recompute"])
    return Candidates(**{name: np.array([value]) for name, value in values.items()})
