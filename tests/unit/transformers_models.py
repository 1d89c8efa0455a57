"""What the transformers library makes of a sample config: its own class, without memory."""

import re
from typing import Any, Final, NamedTuple

__all__ = ["Counted", "transformers_count"]

# Types that transformers does not know under that name, and the class with the same layers.
_SAME_LAYERS: Final = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "qwen2_5_vl": "qwen2"}
# The keys of llm-analysis' files, in transformers' names.
_LLM_ANALYSIS: Final = {
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "ffn_embed_dim": "intermediate_size",
}
# Its Llama-2-7B has two matrices of 16384; the model has three of this width.
_LLAMA_2_7B: Final = {"ffn_embed_dim": 11008}


class Counted(NamedTuple):
    """Parameters of a module on the meta device."""

    total: int
    active: int
    name: str


def transformers_count(config: dict[str, Any]) -> Counted:
    """Return what the module of a ``config.json`` has, and who says so.

    Of routed experts one token passes ``num_experts_per_tok``; everything else is active.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, values = _known_to_transformers(config)
    read = CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read)  # type: ignore[no-untyped-call]  # theirs
    total = sum(parameter.numel() for parameter in model.parameters())
    text = read.get_text_config()
    in_experts = [p for name, p in model.named_parameters() if re.search(r"\.experts\.", name)]
    idle = 0.0
    if in_experts:
        num_experts = in_experts[0].shape[0]
        assert {p.shape[0] for p in in_experts} == {num_experts}
        idle = 1 - text.num_experts_per_tok / num_experts
    unused = round(idle * sum(p.numel() for p in in_experts))
    return Counted(total, total - unused, type(model).__name__)


def _known_to_transformers(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (model_type, keys), with names and defaults that transformers understands."""
    left_out = ("model_type", "quantization_config", "auto_map", "architectures")
    values = {
        key: value
        for key, value in config.items()
        if key not in left_out and (value is not None or key == "q_lora_rank")
    }
    model_type = config["model_type"]
    if model_type == "qwen2_5_vl":  # positions in images have no parameters
        values.pop("rope_scaling")
    if "ffn_embed_dim" in values:
        if model_type == "llama" and "mlp_gated_linear_units" not in values:
            values |= _LLAMA_2_7B
        values = {_LLM_ANALYSIS.get(key, key): value for key, value in values.items()}
        if model_type == "opt":
            values |= {"ffn_dim": values["intermediate_size"]}
            values |= {"word_embed_proj_dim": values["hidden_size"]}
        if model_type == "gpt_neo":
            half = values["num_hidden_layers"] // 2
            values |= {"attention_types": [[["global", "local"], half]]}
    return _SAME_LAYERS.get(model_type, model_type), values
