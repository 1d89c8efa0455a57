"""How families of frameworks train where a published run does not say: facts about software.

They are data, by what stands in the framework column and what the notes state
(``published.FACTS``), and hold for no row, source or model by name.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from planner.hardware.gpus import GpuModel
from planner.model.spec import ModelSpec
from planner.validate.published import Run

__all__ = ["UNKNOWN_FRAMEWORK", "Habit", "attention_of", "habits_of", "waits_of"]

UNKNOWN_FRAMEWORK: Final = (
    "framework is not known: fp32 gradients, fused kernels, no collective hidden but gradients"
)
_TRITON_ATTENTION: Final = "llm-foundry|composer"
# Those whose attention is Transformer Engine's: cuDNN's, or the newest FlashAttention.
_CUDNN_ATTENTION: Final = "nemo|megatron|transformer engine|maxtext"
_XLA: Final = "jax|xla|paxml|maxtext|levanter"
_TENSOR_OVERLAP_SINCE: Final = 2022
_NO_OVERLAP_UNTIL: Final = 2022
_OLD_GPUS: Final = ("pascal", "volta", "ampere")


class Habit(NamedTuple):
    """How a family of frameworks trains where a row does not say.

    Attributes:
        named: In the framework column.
        training: Fields of ``TrainingSpec``.
        sequence_parallel: Whether tensor parallelism is sequence parallel.
        why: Said among the assumptions.
    """

    named: str
    training: Mapping[str, Any]
    sequence_parallel: bool
    why: str


# All that match add their fields, the first of them last.
_HABITS: Final = (
    Habit(
        # scripts/performance/configs of Megatron-Bridge: grad_reduce_in_fp32 = False,
        # cross_entropy_fusion_impl; NeMo's scripts/performance before it
        r"nemo|megatron-bridge",
        {"main_grads": "same", "fused_loss": "cross_entropy", "overlap_products": True},
        True,
        "NVIDIA's performance recipes: gradients as computed, fused loss, sequence parallel with "
        "tp and overlapped by --tp-comm-overlap",
    ),
    Habit(
        # scripts/performance/configs: moe_flex_dispatcher_backend deepep or hybridep
        r"megatron-bridge",
        {"dispatcher": "deduplicated"},
        True,
        "Megatron-Bridge: tokens dispatched by DeepEP or HybridEP",
    ),
    Habit(
        r"megatron-core",
        {},
        True,
        "Megatron-Core: fp32 main gradients, sequence parallel with tp",
    ),
    Habit(
        r"liger",
        {"fused_loss": "linear", "fused_kernels": True},
        False,
        "Liger: fused norms and activations, logits never whole",
    ),
    Habit(
        r"llm-foundry|composer",
        {"fused_loss": "cross_entropy"},
        False,
        "LLM Foundry's default loss is fused: gradients in place of 16-bit logits",
    ),
    Habit(
        r"megatron.?deepspeed|deepspeed.*megatron",
        {"fused_kernels": True},
        False,
        "Megatron-DeepSpeed: Megatron's kernels",
    ),
    Habit(
        r"deepspeed|gpt-neox",
        {
            "main_grads": "same",
            "buffer_bytes": 2 * 2 * 500_000_000,  # reduce_bucket_size, allgather_bucket_size
            "gathers": "matrix",
            "fused_kernels": False,
        },
        False,
        "DeepSpeed: gradients as computed, two buckets of 5e8, gathered by module",
    ),
    Habit(
        r"internevo|internlm|colossal",
        {"main_grads": "same", "foreach_optimizer": True},
        False,
        "ColossalAI and its kin: gradients as computed, torch's AdamW over lists",
    ),
    Habit(
        r"paddle",
        {"main_grads": "same", "fused_kernels": False},
        False,
        "Paddle O2: gradients as computed, fp32 master weights, norms operation by operation",
    ),
    Habit(
        r"transformers|hugging ?face|llama-factory|axolotl",
        {"fused_kernels": False},
        False,
        "Transformers: norms and activations operation by operation",
    ),
    Habit(r"fms-?fsdp", {"main_grads": "same"}, False, "fms-fsdp: gradients reduced in bf16"),
    Habit(
        r"fsdp|torchtitan|torchtune|jax|maxtext|paxml",
        {"master_weights": "only", "recompute_stops_early": True},
        True,
        "weights rest in fp32 shards, gathered in 16 bits; torch's checkpoints",
    ),
    Habit(
        r"nanotron",
        {"main_grads": "both"},
        True,
        "nanotron: gradients summed in fp32 beside those computed, sequence parallel with tp",
    ),
    Habit(r"megatron|flagscale", {}, False, "Megatron-LM: fp32 main gradients; every option off"),
)


def habits_of(framework: str) -> list[Habit]:
    """Return the habits of a framework, the first of them the most particular."""
    return [habit for habit in _HABITS if re.search(habit.named, framework.lower())]


def attention_of(run: Run, model: ModelSpec, gpu: GpuModel, said: list[str]) -> dict[str, Any]:
    """Return fields of the training: which attention kernel, and whether dropout masks are kept.

    Megatron's fused attention came with Transformer Engine, on Hopper; before, a GPT stored its
    scores and had dropout of 0.1, its default.
    """
    framework = run.framework.lower()
    is_gpt = not model.feed_forward.gated and model.experts is None
    is_old = gpu.architecture in _OLD_GPUS
    dropout = is_gpt and is_old and ("megatron" in framework or "paddle" in framework)
    stored = is_gpt and is_old and "megatron" in framework
    if stored and "fused_attention" not in run.facts:
        said.append("attention is not fused, with dropout: a GPT by Megatron before Hopper")
        return {"fused_attention": False, "dropout": True}
    found: dict[str, Any] = {"dropout": True} if dropout else {}
    if "newest_attention" in run.facts:
        return found
    if re.search(_XLA, framework) and not re.search(_CUDNN_ATTENTION, framework):
        said.append("attention is not fused: XLA's own")
        return found | {"fused_attention": False, "launch": "cuda_graph"}
    if re.search(_TRITON_ATTENTION, framework):
        said.append("attention is FlashAttention in Triton, the framework's of 2023")
        return found | {"attention_kernel": "triton"}
    if "flash_attention_2" in run.facts or not re.search(_CUDNN_ATTENTION, framework):
        said.append("attention is FlashAttention-2")
        return found | {"attention_kernel": "flash2"}
    return found


def waits_of(run: Run, said: list[str]) -> dict[str, Any]:
    """Return fields of the training: what is waited for, kernels or collectives, and what is not.

    Megatron-LM has summed input gradients beside weight gradients since the release of Korthikanti
    et al. (2205.05198, May 2022), and gradients beside the backward since 2023, if asked to.
    """
    found: dict[str, Any] = {}
    if "tensor_parallel_hidden" in run.facts:
        found["overlap_products"] = True
    if "blocking_launches" in run.facts:
        found["launch"] = "blocking"
    year = re.search(r"\b(20[12]\d)\b", run.framework)
    is_megatron = "megatron" in run.framework.lower()
    if is_megatron and year and int(year[1]) <= _NO_OVERLAP_UNTIL:
        waits = ["data_parallel"]
        if int(year[1]) < _TENSOR_OVERLAP_SINCE or "deepspeed" in run.framework.lower():
            waits.append("tensor_parallel")
        said.append(f"Megatron-LM of {year[1]} hides no collectives of {' and '.join(waits)}")
        found["no_overlap"] = tuple(waits)
    elif "gradients_not_overlapped" in run.facts:
        found["no_overlap"] = ("data_parallel",)
    return found
