"""What the model families build that their ``config.json`` does not say.

One row per ``model_type`` of the transformers library (huggingface/transformers,
``src/transformers/models/<model_type>/configuration_*.py`` for the defaults, ``modeling_*.py`` for
the biases and norms). A config of a type that is not listed is read as Llama with a listed
assumption, and only if every structural key in it is understood.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

__all__ = ["FAMILIES", "Family", "refused_architecture", "refused_type"]


@dataclass(frozen=True, slots=True)
class Family:
    """The facts and defaults of one ``model_type``.

    Attributes:
        gated: The feed-forward has three matrices.
        norm: Root-mean-square norm, or layer norm with a bias.
        attention_bias: Query, key and value projections have biases; the default if
            ``attention_bias_key`` is set.
        attention_bias_key: The key that decides it.
        output_bias: Bias of the output projection; None = as the others.
        ffn_bias: The feed-forward has biases; the default if ``ffn_bias_key`` is set.
        ffn_bias_key: The key that decides it.
        qk_norm: Norm of queries and keys, as in ``Attention``.
        latent: Attention is multi-head latent.
        multi_query: Default of ``multi_query``: one key/value head for all.
        tied: Default of ``tie_word_embeddings``.
        head_dim: Default of ``head_dim``; None = hidden size / heads.
        ffn_multiple: Default of the feed-forward size in hidden sizes; None = must be given.
        position_offset: Learned positions beyond the longest sequence; None = none are learned.
        moe: The number of experts must be given.
        required: Keys that must be there, because their default differs between versions.
        expert_size: The quantity that holds an expert's size.
        num_shared_experts: Shared experts of the routed size that no key mentions.
        shared_mix: How what every token passes is added, as in ``MixtureOfExperts``.
        residual: ``parallel_attn_mlp_res`` puts a dense feed-forward of the hidden size, with a
            norm of its own, beside the experts.
        expert_bias: Router and experts have biases.
        sinks: Attention has a learned score per head.
        indexer: Latent attention is sparse; an indexer chooses its keys.
        window: Default of ``sliding_window`` in tokens; None = attention sees all.
        window_flag: Where ``sliding_window`` counts only if ``use_sliding_window`` is true: the
            layers it is of, from ``max_window_layers`` on, every other one below it, or all.
        window_pattern: Which layers have it where the config does not say, repeated.
        layer_norms: Norms of a layer, as in ``ModelSpec``.
        parallel: Attention and feed-forward run side by side; the default if ``parallel_key`` is
            set.
        parallel_key: The key that decides it.
        head_bias: The output head has a bias; a ``lm_head_bias`` that is true says so too.
        notes: What the model has and ``ModelSpec`` leaves out, for its assumptions.
    """

    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    attention_bias: bool = False
    attention_bias_key: str | None = None
    output_bias: bool | None = None
    ffn_bias: bool = False
    ffn_bias_key: str | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    latent: bool = False
    multi_query: bool = False
    tied: bool = False
    head_dim: int | None = None
    ffn_multiple: int | None = None
    position_offset: int | None = None
    moe: bool = False
    required: tuple[str, ...] = ()
    expert_size: Literal["expert_size", "ffn_size"] = "expert_size"
    num_shared_experts: int = 0
    shared_mix: Literal["sum", "gate", "coefficients"] = "sum"
    residual: bool = False
    expert_bias: bool = False
    sinks: bool = False
    indexer: bool = False
    window: int | None = None
    window_flag: Literal["from", "below", "all"] | None = None
    window_pattern: tuple[bool, ...] = (True,)
    layer_norms: Literal[1, 2, 4] = 2
    parallel: bool = False
    parallel_key: str | None = None
    head_bias: bool = False
    notes: tuple[str, ...] = ()


_LLAMA: Final = Family(attention_bias_key="attention_bias", ffn_bias_key="mlp_bias")
_PLAIN: Final = Family()
_MOE_IN_FFN_SIZE: Final = Family(moe=True, expert_size="ffn_size")
_QWEN2: Final = Family(attention_bias=True, output_bias=False, window_flag="from")
_QWEN3: Final = Family(
    attention_bias_key="attention_bias", qk_norm="head", head_dim=128, window_flag="from"
)
_DEEPSEEK: Final = Family(
    latent=True, moe=True, required=("q_lora_rank", "first_k_dense_replace", "n_shared_experts")
)
_SPARSE: Final = replace(
    _DEEPSEEK,
    indexer=True,
    required=(*_DEEPSEEK.required, "index_n_heads", "index_head_dim", "index_topk"),
    notes=(
        "sparse attention is counted as full causal attention; of its indexer the parameters and "
        "their products are counted, the scores that choose the keys are left out",
    ),
)
_GEMMA: Final = Family(attention_bias_key="attention_bias", tied=True, head_dim=256)
_ALTERNATE: Final = (True, False)
_GPT2: Final = Family(
    gated=False,
    norm="layer",
    attention_bias=True,
    ffn_bias=True,
    tied=True,
    ffn_multiple=4,
    position_offset=0,
)

FAMILIES: Final[dict[str, Family]] = {
    "llama": _LLAMA,
    "llama4_text": Family(
        attention_bias_key="attention_bias",
        moe=True,
        required=("interleave_moe_layer_step",),
        expert_size="ffn_size",
        num_shared_experts=1,
        window=8192,
        window_pattern=(True, True, True, False),
    ),
    "mistral": Family(window=4096),
    "mixtral": _MOE_IN_FFN_SIZE,
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        moe=True,
        required=("decoder_sparse_step", "shared_expert_intermediate_size"),
        shared_mix="gate",
        window_flag="below",
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, head_dim=None, moe=True, required=("decoder_sparse_step",), window_flag="all"
    ),
    "mimo": Family(
        attention_bias=True,
        attention_bias_key="attention_bias",
        output_bias=False,
        window_flag="from",
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "arctic": replace(_MOE_IN_FFN_SIZE, attention_bias_key="attention_bias", residual=True),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, window=4096, window_pattern=_ALTERNATE, layer_norms=4),
    "gemma3_text": replace(
        _GEMMA, qk_norm="head", window=4096, window_pattern=(*(True,) * 5, False), layer_norms=4
    ),
    "phi3": _PLAIN,
    "phimoe": replace(_MOE_IN_FFN_SIZE, norm="layer", attention_bias_key="attention_bias"),
    "olmoe": replace(_MOE_IN_FFN_SIZE, attention_bias_key="attention_bias", qk_norm="full"),
    "granite": _LLAMA,
    "granitemoe": replace(_MOE_IN_FFN_SIZE, attention_bias_key="attention_bias"),
    "minimax_m2": replace(_MOE_IN_FFN_SIZE, qk_norm="full"),
    "gpt_oss": replace(
        _MOE_IN_FFN_SIZE,
        attention_bias=True,
        attention_bias_key="attention_bias",
        head_dim=64,
        window=128,
        window_pattern=_ALTERNATE,
        sinks=True,
        expert_bias=True,
    ),
    "dbrx": replace(_MOE_IN_FFN_SIZE, norm="layer"),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, multi_query=True),
    "opt": replace(_GPT2, ffn_multiple=None, position_offset=2),
    "bloom": replace(
        _GPT2, position_offset=None, notes=("the norm after the embedding is left out",)
    ),
    "gpt_neo": replace(
        _GPT2, attention_bias=False, output_bias=True, window=256, window_pattern=(False, True)
    ),
    "gptj": replace(
        _GPT2,
        attention_bias=False,
        tied=False,
        position_offset=None,
        parallel=True,
        layer_norms=1,
        head_bias=True,
    ),
    "gpt_neox": replace(
        _GPT2,
        attention_bias_key="attention_bias",
        tied=False,
        ffn_multiple=None,
        position_offset=None,
        parallel=True,
        parallel_key="use_parallel_residual",
    ),
    "phi": replace(
        _GPT2,
        tied=False,
        ffn_multiple=None,
        position_offset=None,
        parallel=True,
        layer_norms=1,
        head_bias=True,
    ),
}

# Where a config of these types is refused, and what it is called in the message.
_REFUSED: Final[dict[str, tuple[str, ...]]] = {
    "an encoder": (
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
        "eurobert", "longformer", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta",
    ),
    "an encoder-decoder model": (
        "bart", "blenderbot", "fsmt", "led", "longt5", "m2m_100", "marian", "mbart", "mt5",
        "pegasus", "t5", "t5gemma", "umt5",
    ),
    "a vision model": (
        "beit", "clip", "clip_text_model", "clip_vision_model", "convnext", "convnextv2", "deit",
        "detr", "dinov2", "mobilenet_v2", "resnet", "segformer", "siglip", "swin", "vit",
        "vit_mae", "yolos",
    ),
    "an audio model": ("hubert", "speech_to_text", "wav2vec2", "wav2vec2-bert", "wavlm", "whisper"),
    "a state-space model without attention": ("falcon_mamba", "mamba", "mamba2", "rwkv"),
    "a hybrid with Mamba (state-space) layers": (
        "bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2",
    ),
    "a hybrid with gated delta net (linear-attention) layers": (
        "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_next",
    ),
    "a hybrid with lightning (linear) attention": ("bailing_hybrid", "minimax"),
    "a hybrid with recurrent or convolutional layers": ("lfm2", "lfm2_moe", "recurrent_gemma"),
}  # fmt: skip

# Class names in "architectures" end in what the model is trained for.
_REFUSED_SUFFIXES: Final[dict[str, tuple[str, ...]]] = {
    "an encoder": ("ForMaskedLM", "BertModel", "BertForPreTraining"),
    "a classifier": (
        "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
        "ForMultipleChoice", "ForRewardModel",
    ),
    "a vision model": ("ForImageClassification", "ForObjectDetection", "ForDepthEstimation"),
    "an audio model": ("ForCTC", "ForAudioClassification", "ForSpeechSeq2Seq"),
}  # fmt: skip


def refused_type(model_type: str) -> str | None:
    """Return what kind of model a type is if it is one that is not planned for, else None.

    >>> refused_type("bert"), refused_type("llama")
    ('an encoder', None)
    """
    return next((kind for kind, types in _REFUSED.items() if model_type in types), None)


def refused_architecture(name: str) -> str | None:
    """Return what a class is for if it is not language modelling, else None.

    >>> refused_architecture("LlamaForSequenceClassification")
    'a classifier'
    """
    return next((k for k, ends in _REFUSED_SUFFIXES.items() if name.endswith(ends)), None)
