"""What Megatron-LM (core 0.20) can run; rules read from its argument checks."""

from typing import Final

import numpy as np

from planner.frameworks.rules import Rule, schedule_is, tp_without_sequence_parallel
from planner.layout.candidates import Candidates, Column
from planner.model.spec import Attention, ModelSpec
from planner.plan import TrainingSpec

__all__ = [
    "KEEPS_EXPERT_OUTPUTS",
    "KEEPS_GATHERED_INPUTS",
    "OVERLAP_DATA_PARALLEL",
    "RULES",
    "STOPS_RECOMPUTE_EARLY",
    "refused_training",
]

# --overlap-grad-reduce and --overlap-param-gather are written into every plan.
OVERLAP_DATA_PARALLEL: Final = True

# core/tensor_parallel/layers.py saves the shard and gathers it again in the backward.
KEEPS_GATHERED_INPUTS: Final = False

# core/transformer/moe/experts.py weighs rows in the activation function (weighted_bias_swiglu),
# and core/transformer/moe/token_dispatcher.py adds what comes back without gates.
KEEPS_EXPERT_OUTPUTS: Final = False

# core/tensor_parallel/random.py runs the whole forward again.
STOPS_RECOMPUTE_EARLY: Final = False


def refused_training(training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) of what no layout can make run."""
    capacity = training.expert_capacity
    if capacity is None:
        return None
    for name, only in (("convention", "megatron"), ("min_capacity", 0), ("alignment", 1)):
        if (asked := getattr(capacity, name)) != only:
            return f"training.expert_capacity.{name}", (
                f"{asked!r}: Megatron-LM has one rule, ceil(top_k tokens / experts * factor); use "
                f"{only!r}, or framework='executor'"
            )
    return None


def _kv_heads_below_tp(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    heads = model.attention.num_kv_heads if isinstance(model.attention, Attention) else 0
    if not heads:
        return np.zeros(len(c), dtype=bool)
    return heads % c.tp != 0


def _gpipe(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return schedule_is(c, "gpipe")


def _fsdp_with_pipeline(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return (c.zero_stage >= 2) & (c.pp > 1)


def _experts_in_fsdp(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    return (c.zero_stage >= 2) & (c.etp > 1) & (model.experts is not None)


RULES: Final = (
    Rule(
        "megatron-kv-heads",
        "Megatron needs num_query_groups to be a multiple of tp",
        _kv_heads_below_tp,
    ),
    Rule(
        "megatron-sequence-parallel",
        "tensor parallelism without --sequence-parallel only costs memory and time",
        tp_without_sequence_parallel,
    ),
    Rule("megatron-no-gpipe", "Megatron schedules 1F1B, plain or interleaved", _gpipe),
    Rule(
        "megatron-fsdp-no-pipeline",
        "ZeRO-2 and 3 are Megatron FSDP, planned without pipeline stages",
        _fsdp_with_pipeline,
    ),
    Rule(
        "megatron-fsdp-no-etp",
        "Megatron FSDP is planned with expert tensor parallelism off",
        _experts_in_fsdp,
    ),
)
