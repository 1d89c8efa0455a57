"""What this project's own executor can run; it refuses the rest by name."""

from typing import Final

from planner.frameworks.rules import Rule, tp_without_sequence_parallel
from planner.layout.candidates import RECOMPUTE_MODES, Candidates, Column
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

# Gradients are reduced after the last backward.
OVERLAP_DATA_PARALLEL: Final = False
OVERLAP_TENSOR_PARALLEL: Final = False

KEEPS_GATHERED_INPUTS: Final = True

# Gates weigh what the experts return.
KEEPS_EXPERT_OUTPUTS: Final = True

# torch.utils.checkpoint without reentrant autograd.
STOPS_RECOMPUTE_EARLY: Final = True

# What it does in one way.
_FIXED: Final = (
    *("master_weights", "moments", "foreach_optimizer", "fused_attention", "dropout"),
    *("fused_kernels", "fused_loss", "buffer_bytes", "gathers"),
    *("offload", "offload_layers", "offload_to", "launch", "no_overlap"),
    *("overlap_products", "overlap_experts", "dispatcher", "attention_kernel"),
    "recompute_stops_early",
)
_PRECISIONS: Final = ("bf16", "fp32", "fp64")


def refused_training(training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) of what no layout can make run."""
    if training.precision not in _PRECISIONS:
        return "training.precision", (
            f"{training.precision!r} needs scaled gradients, which the executor has not; use "
            f"{', '.join(_PRECISIONS)}, or framework='megatron'"
        )
    for name in _FIXED:
        field = type(training).model_fields[name]
        if (asked := getattr(training, name)) != field.get_default():
            return f"training.{name}", (
                f"{asked!r}: the executor has only {field.get_default()!r}; leave it out, or use "
                "framework='megatron'"
            )
    if training.main_grads == "both":
        return "training.main_grads", (
            "'both' keeps gradients twice, the executor keeps fp32 alone; use 'fp32'"
        )
    if training.precision == "bf16" and training.main_grads == "same":
        return "training.main_grads", (
            "'same' would sum bf16 gradients in bf16, the executor sums them in fp32; use 'fp32'"
        )
    if training.packing is not None:
        return "training.packing", (
            "given: the executor's attention does not stop at the ends of documents; leave it "
            "out, or framework='megatron'"
        )
    return None


def refused_model(model: ModelSpec, training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) of what no layout can make run.

    A layer is x + attention(norm(x)) and then x + feed_forward(norm(x)), and attention has whole
    queries, keys and values (``executor.decoder``).
    """
    is_latent = not isinstance(model.attention, Attention)
    others = {
        "attention.kind": ("'mla': it cuts plain heads alone", is_latent),
        "attention.sinks": (
            "true: its attention has none",
            isinstance(model.attention, Attention) and model.attention.sinks,
        ),
        "window": ("given: its attention sees all earlier tokens", model.window is not None),
        "parallel_attention": ("true: its halves of a layer follow", model.parallel_attention),
        "layer_norms": (f"{model.layer_norms}: its layers have 2", model.layer_norms != 2),
        "num_mtp_modules": (f"{model.num_mtp_modules}: it trains none", model.num_mtp_modules > 0),
    }
    for field, (reason, is_refused) in others.items():
        if is_refused:
            return f"model.{field}", (
                f"{reason}; framework='executor' runs decoders like Llama and Mixtral; try one of "
                "those, or framework='megatron'"
            )
    return None


def _experts_split(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.etp > 1


def _gradients_sharded_alone(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.zero_stage == 2


def _kv_heads_below_tp(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    heads = model.attention.num_kv_heads if isinstance(model.attention, Attention) else 1
    return heads % c.tp != 0


def _some_layers_recomputed(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.recompute_layers > 0


def _selective_recompute(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.recompute == RECOMPUTE_MODES.index("selective")


RULES: Final = (
    Rule("executor-experts-whole", "the executor keeps an expert whole on a rank", _experts_split),
    Rule(
        "executor-zero",
        "the executor shares out optimizer states (1) or all states (3), not gradients alone",
        _gradients_sharded_alone,
    ),
    Rule(
        "executor-sequence-parallel",
        "the executor's tensor parallelism is sequence parallel",
        tp_without_sequence_parallel,
    ),
    Rule("executor-kv-heads", "tp must divide the key/value heads", _kv_heads_below_tp),
    Rule(
        "executor-recompute",
        "the executor recomputes whole layers or nothing",
        _selective_recompute,
    ),
    Rule(
        "executor-recompute-layers",
        "the executor recomputes every layer of a stage or none",
        _some_layers_recomputed,
    ),
)
