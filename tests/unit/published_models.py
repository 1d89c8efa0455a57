"""The sample configs, the published sizes of their models, and which of them are refused."""

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PUBLISHED", "REFUSED", "SAMPLES", "SOURCES", "Published"]

FOLDER = Path(__file__).parent.parent / "data" / "hf-config"
SAMPLES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted(FOLDER.glob("*.json"))
    if path.stem != "sources"
}
SOURCES: dict[str, str] = json.loads((FOLDER / "sources.json").read_text())


class Published(NamedTuple):
    """Total and active parameters, each with the unit of its last digit, and who says so."""

    total: float
    unit: float
    source: str
    active: float | None = None
    active_unit: float = 0.0
    lookup_counted: bool = True


PUBLISHED = {
    "EleutherAI_gpt-j-6b": Published(6_053_381_344, 1, "model card: n_parameters"),
    "EleutherAI_gpt-neo-2.7B": Published(2.7e9, 1e8, "model card"),
    "MiniMaxAI--MiniMax-M2.5": Published(
        230e9, 1e10, "MiniMax-M2 model card", 10e9, 1e9, lookup_counted=False
    ),
    # The file is llm-analysis' stand-in; the figure is of the model itself, 3 x 11008 wide.
    "NousResearch_Llama-2-7b-hf": Published(6_738_415_616, 1, "arXiv 2307.09288, by shapes"),
    "OLMoE-1B-7B-minimal": Published(6.92e9, 1e7, "arXiv 2409.02060", 1.28e9, 1e7),
    "Phi-mini-MoE-instruct": Published(7.6e9, 1e8, "arXiv 2506.18349", 2.4e9, 1e8),
    "Qwen--Qwen3-235B-A22B": Published(235e9, 1e9, "arXiv 2505.09388", 22e9, 1e9),
    "Qwen--Qwen3-30B-A3B": Published(30.5e9, 1e8, "model card", 3.3e9, 2e8),
    "Qwen--Qwen3-8B": Published(8.2e9, 1e8, "model card"),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": Published(480e9, 1e9, "model card", 35e9, 1e9),
    "Qwen2.5-VL-7B-Instruct": Published(7.61e9, 1e7, "Qwen2.5-7B model card: its language model"),
    "XiaomiMiMo--MiMo-7B-Base": Published(
        7_622_619_136, 1, "transformers: the paper says 7B alone"
    ),
    "deepseek-ai--DeepSeek-V3": Published(
        671e9, 1e9, "arXiv 2412.19437", 37e9, 1e9, lookup_counted=False
    ),
    # Trained on from V3.1, whose figures these are; the indexer adds 0.13 %.
    "deepseek-ai--DeepSeek-V3.2": Published(
        671e9, 1e9, "arXiv 2412.19437, of V3", 37e9, 1e9, lookup_counted=False
    ),
    "facebook_opt-6.7b": Published(6.7e9, 1e8, "arXiv 2205.01068"),
    "facebook_opt-66b": Published(66e9, 1e9, "arXiv 2205.01068"),
    "gpt2": Published(124e6, 1e6, "github.com/openai/gpt-2"),
    "gpt2-xl": Published(1558e6, 1e6, "github.com/openai/gpt-2"),
    "granite-3.1-1b-a400m-like": Published(1.3e9, 1e8, "model card", 400e6, 1e8),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": Published(
        400e9, 1e9, "model card", 17e9, 1e9
    ),
    "meta-llama--Meta-Llama-3.1-405B": Published(405e9, 1e9, "arXiv 2407.21783"),
    "meta-llama--Meta-Llama-3.1-70B": Published(70.6e9, 1e8, "model card"),
    "meta-llama--Meta-Llama-3.1-8B": Published(8.03e9, 1e7, "model card"),
    "microsoft_Phi-3-mini-4k-instruct": Published(3.8e9, 1e8, "arXiv 2404.14219"),
    "mistralai--Mixtral-8x22B-v0.1": Published(141e9, 1e9, "Mistral's announcement", 39e9, 1e9),
    "mistralai--Mixtral-8x7B-v0.1": Published(46.7e9, 1e8, "Mistral's announcement", 12.9e9, 1e8),
    "moonshotai--Kimi-K2-Instruct": Published(
        1e12, 1e11, "model card: 1T and 32B", 32e9, 1e9, lookup_counted=False
    ),
    # Table 1; "we count the unembedding but not the embedding" as active.
    "openai--gpt-oss-120b": Published(
        116.83e9, 1e7, "arXiv 2508.10925", 5.13e9, 1e7, lookup_counted=False
    ),
    "openai--gpt-oss-20b": Published(
        20.91e9, 1e7, "arXiv 2508.10925", 3.61e9, 1e7, lookup_counted=False
    ),
    "upstage_Llama-2-70b-instruct-v2": Published(69e9, 1e9, "Llama-2-70b model card"),
    "zai-org--GLM-5": Published(744e9, 1e9, "model card", 40e9, 2e9, lookup_counted=False),
}

# Name -> the key by which it is refused and the kind of layer that the message names.
REFUSED = {
    "Qwen--Qwen3.5-27B": ("model_type", "gated delta net"),
    "Qwen3-Next-80B-A3B": ("model_type", "gated delta net"),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("model_type", "Mamba"),
}
