"""What Megatron-LM (core 0.20) can run; rules read from its argument checks."""

from typing import Final

import numpy as np

from planner.frameworks.rules import Rule, schedule_is, tp_without_sequence_parallel
from planner.layout.candidates import CONTEXT_EXCHANGES, RECOMPUTE_MODES, Candidates, Column
from planner.model.spec import Attention, ModelSpec
from planner.plan import TrainingSpec

__all__ = [
    "KEEPS_EXPERT_OUTPUTS",
    "KEEPS_GATHERED_INPUTS",
    "OVERLAP_DATA_PARALLEL",
    "OVERLAP_TENSOR_PARALLEL",
    "RULES",
    "STOPS_RECOMPUTE_EARLY",
    "refused_model",
    "refused_training",
]

# Values of a field that Megatron-LM can be told, of fields with others that it cannot.
_KNOWN: Final[dict[str, tuple[object, ...]]] = {
    "main_grads": ("fp32", "same"),
    "master_weights": ("copy",),
    "moments": ("fp32", "bf16"),
    "foreach_optimizer": (False,),
    "fused_kernels": (True,),
    "fused_loss": ("none", "cross_entropy"),
    "buffer_bytes": (0,),
    "gathers": ("layer",),
    "offload_to": ("cpu",),
    "launch": ("eager", "cuda_graph"),
    "recompute_stops_early": (False,),
    "no_overlap": ((), ("data_parallel",)),
    "attention_kernel": ("fastest",),
}

# --overlap-grad-reduce and --overlap-param-gather are written unless training.no_overlap says no.
OVERLAP_DATA_PARALLEL: Final = True

# core/tensor_parallel/layers.py: the sum is started before the weight gradient's product.
OVERLAP_TENSOR_PARALLEL: Final = True

# core/tensor_parallel/layers.py saves the shard and gathers it again in the backward.
KEEPS_GATHERED_INPUTS: Final = False

# core/transformer/moe/experts.py weighs rows in the activation function (weighted_bias_swiglu),
# and core/transformer/moe/token_dispatcher.py adds what comes back without gates.
KEEPS_EXPERT_OUTPUTS: Final = False

# core/tensor_parallel/random.py runs the whole forward again.
STOPS_RECOMPUTE_EARLY: Final = False


def refused_training(training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) of what no layout can make run."""
    for name, known in _KNOWN.items():
        asked = getattr(training, name)
        if asked not in known:
            words = " or ".join(map(_said, known))
            return f"training.{name}", (
                f"{_said(asked)}: Megatron-LM is planned with {words}; use one of them (the others "
                "are there to judge published runs: commplan validate runs)"
            )
    if beyond := set(training.offload) - {"optimizer", "activations"}:
        return "training.offload", (
            f"{min(beyond)!r}: Megatron-LM offloads optimizer states and activations; leave it out"
        )
    if training.overlap_experts and training.precision in ("fp32", "fp64"):
        return "training.overlap_experts", (
            f"true with {training.precision}: Megatron-LM overlaps in bf16 and fp16, and below "
            "them; leave it out, or use precision 'bf16'"
        )
    if training.dispatcher == "deduplicated" and training.expert_load is not None:
        return "training.dispatcher", (
            "'deduplicated' with an expert_load: priced for even experts alone; use 'all_to_all', "
            "and see commplan moe for both"
        )
    capacity = training.expert_capacity
    if capacity is None:
        return None
    if training.dispatcher != "all_to_all":
        return "training.dispatcher", (
            f"{training.dispatcher!r} with an expert_capacity: Megatron-LM pads experts with "
            "all_to_all alone; leave one of them out"
        )
    for name, only in (("convention", "megatron"), ("min_capacity", 0), ("alignment", 1)):
        if (asked := getattr(capacity, name)) != only:
            return f"training.expert_capacity.{name}", (
                f"{asked!r}: Megatron-LM has one rule, ceil(top_k tokens / experts * factor); use "
                f"{only!r}, or framework='executor'"
            )
    return None


def _said(value: object) -> str:
    """Return a value of a field for print; of several words all, of none ``none``."""
    return "+".join(value) or "none" if isinstance(value, tuple) else repr(value)


def refused_model(model: ModelSpec, training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) of what no layout can make run."""
    window, experts = model.window, model.experts
    if training.launch == "cuda_graph" and experts and training.expert_capacity is None:
        return "training.launch", (
            "'cuda_graph': dropless experts have other shapes in every step, which no captured "
            "graph can have; try training.expert_capacity, or 'eager'"
        )
    if training.overlap_experts and model.num_mtp_modules > 1:
        return "model.num_mtp_modules", (
            f"{model.num_mtp_modules} with training.overlap_experts: Megatron-LM overlaps with one "
            "module for multi-token prediction at most; try 1, or no overlap_experts"
        )
    if model.parallel_attention:
        return "model.parallel_attention", (
            "true: Megatron-LM's layer computes attention and then the feed-forward, never both "
            "from the same input; try a model whose halves of a layer follow each other"
        )
    if window is not None and window.kind == "chunked" and window.size < training.seq_len:
        return "model.window.kind", (
            f"'chunked' in chunks of {window.size} tokens: Megatron-LM has sliding windows "
            f"(--window-size) alone; try training.seq_len of {window.size} or less, where both are "
            f"full attention, got {training.seq_len}"
        )
    if experts is not None and experts.shared_mix == "coefficients":
        return "model.experts.shared_mix", (
            "'coefficients': Megatron-LM adds its shared expert as it is or gated; try 'sum' or "
            "'gate'"
        )
    if experts is not None and experts.shared_norm:
        return "model.experts.shared_norm", (
            "true: Megatron-LM's shared expert reads what the router reads; try false"
        )
    if model.num_mtp_modules and model.learned_positions:
        return "model.num_mtp_modules", (
            f"{model.num_mtp_modules} with learned_positions={model.learned_positions}: "
            "Megatron-LM trains multi-token prediction with rotary positions or none; try 0 modules"
        )
    return None


def _window_over_a_ring(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    ring = c.context_exchange == CONTEXT_EXCHANGES.index("ring")
    return (c.cp > 1) & ring & (model.window is not None)


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


def _offloads_beside(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return ("activations" in training.offload) & ((c.pp > 1) | (c.recompute > 0))


def _experts_not_overlapped(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    is_plain_pipeline = (c.pp > 1) & (c.virtual_stages == 1)
    is_full = c.recompute == RECOMPUTE_MODES.index("full")
    return training.overlap_experts & ((c.ep == 1) | is_plain_pipeline | is_full)


def _states_of_other_widths(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    precise = training.moments != "fp32" or "optimizer" in training.offload
    return precise & (c.zero_stage == 0)


RULES: Final = (
    Rule(
        "megatron-offload-alone",
        "activations are offloaded without pipeline stages and without recompute",
        _offloads_beside,
    ),
    Rule(
        "megatron-precision-aware-optimizer",
        "moments of other widths and on the host need the distributed optimizer (ZeRO-1)",
        _states_of_other_widths,
    ),
    # core/transformer/transformer_config.py, of overlap_moe_expert_parallel_comm
    Rule(
        "megatron-overlap-experts",
        "--overlap-moe-expert-parallel-comm needs ep above 1, virtual stages in a pipeline, and no "
        "full recompute",
        _experts_not_overlapped,
    ),
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
    # Transformer Engine, attention/dot_product_attention/context_parallel.py: with a window
    # cp_comm_type must be a2a or all_gather.
    Rule(
        "megatron-window-no-ring",
        "layers with a window need --cp-comm-type all_gather under context parallelism",
        _window_over_a_ring,
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
