"""Read the ``config.json`` of a Hugging Face repository as a ``ModelSpec``.

The name of a quantity differs per family: ``KEYS`` lists them, ``planner.model.families`` holds
what the config leaves unsaid. Whatever is taken without being in the config, and whatever is in it
but not planned for, is a sentence in ``ModelSpec.assumptions``; the rest is refused by name. The
config says how a checkpoint is stored (``torch_dtype``, ``quantization_config``); how it is
trained is asked elsewhere, so those keys are not read. Modules for multi-token prediction exist for
training alone, so they are part of it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from planner.model.families import FAMILIES, Family, refused_architecture, refused_type
from planner.model.reader import KEYS, MAX_COUNT, ConfigReader, is_integer, is_set, shown
from planner.model.spec import (
    Attention,
    FeedForward,
    Indexer,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    Window,
)

__all__ = ["model_from_config"]

_MAX_LAYERS: Final = 10_000
_QWEN_WINDOW_LAYERS: Final = 28

_INDEXER: Final = "a sparse-attention indexer"
# A set key of these means layers that do something else than attend to earlier tokens.
_OTHER_ATTENTION: Final[tuple[tuple[str, str], ...]] = (
    (r"index_(topk|n_heads|head_dim)", _INDEXER),
    (
        r"mamba_.*|ssm_.*|rwkv_.*|linear_(attn|conv|key|num|value)_.*|full_attention_interval"
        r"|hybrid_override_pattern|attn_layer_(period|offset)|attn_type_list|layers_block_type"
        r"|conv_kernel",
        "layers of a state-space or linear-attention hybrid",
    ),
    (r"block_configs", "layers that differ from each other"),
    (r"cross_attention_.*|add_cross_attention", "cross attention"),
    (r"encoder(_layers)?|decoder(_layers)?|num_encoder_layers|is_encoder_decoder", "an encoder"),
    (r"patch_size|num_channels|num_mel_bins|conv_dim", "the input of a vision or audio model"),
)

# In a config of an unknown type, a key that looks like structure and is not known to be harmless
# is refused: its layers may be anything.
_STRUCTURAL: Final = re.compile(
    r"attn|attention|qk_|lora|latent|window|chunk|conv|hybrid|recurr|kernel|expert|moe|router|ffn"
    r"|mlp|layer_types|parallel|sparse|dense|share|cross|multi_query|bias"
)
_KNOWN: Final = frozenset(key for keys in KEYS.values() for key in keys)
_HARMLESS: Final = re.compile(
    r".*(dropout|pdrop|_act|_coef|_eps|epsilon|init.*|_multiplier|_implementation)"
    r"|output_router_logits|attention_bias|mlp_bias|max_window_layers|use_sliding_window"
    r"|first_k_dense_replace|moe_layer_freq|decoder_sparse_step|mlp_only_layers"
    r"|interleave_moe_layer_step|expert_layer_(period|offset)|layer_types|attn_config|ffn_config"
)


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return the model that a ``config.json`` describes.

    Of a multimodal config the language model is read, and said so.

    Args:
        config: The parsed file.
        name: How the model is called in plans.

    Raises:
        InvalidInputError: It is no decoder-only transformer with attention over earlier tokens in
            every layer, or a value is missing or impossible; ``where`` is the path of the key.
    """
    whole = ConfigReader(config, name)
    model_type, family = _family(whole)
    reader = whole.language_model()
    _refuse_other_attention(reader, family)
    _refuse_shortened(reader, family)
    try:
        return _spec(reader, family, f"config.json of model_type {model_type}")
    except ValidationError as exc:
        reasons = "; ".join(error["msg"] for error in exc.errors(include_url=False)[:3])
        raise reader.refusal("", f"gives an impossible model: {reasons}") from exc


def _spec(reader: ConfigReader, family: Family, source: str) -> ModelSpec:
    """Return the spec; raises pydantic's errors where values do not fit together."""
    hidden_size = reader.count("hidden_size")
    _refuse_other_embedding(reader, hidden_size)
    num_layers = reader.count("num_layers", at_most=_MAX_LAYERS)
    experts = _experts(reader, family)
    spec = ModelSpec(
        name=reader.name,
        source=source,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=reader.count("vocab_size"),
        attention=_attention(reader, family, hidden_size),
        feed_forward=_feed_forward(reader, family, hidden_size),
        experts=experts,
        moe_layers=_moe_layers(reader, num_layers) if experts else (),
        norm=family.norm,
        learned_positions=_learned_positions(reader, family),
        tied_embeddings=reader.flag("tie_word_embeddings", family.tied),
        window=_window(reader, family, num_layers),
        layer_norms=family.layer_norms,
        parallel_attention=_bias(reader, family.parallel_key, family.parallel),
        head_bias=family.head_bias or reader.get("lm_head_bias") is True,
        num_mtp_modules=_num_mtp_modules(reader),
    )
    return spec.model_copy(update={"assumptions": (*reader.assumptions, *family.notes)})


# ------------------------------------------------------------------------------ which family


def _family(whole: ConfigReader) -> tuple[str, Family]:
    """Return (model_type, family) of the language model in a config, refusing other kinds."""
    architectures = whole.strings("architectures")
    for name in architectures:
        _refuse_kind(whole, "architectures", name, refused_architecture(name))
    model_type = None
    for reader in (whole, whole.language_model()):
        own_type = reader.string("model_type")
        if own_type is not None:
            _refuse_kind(reader, "model_type", own_type, refused_type(own_type))
        model_type = own_type or model_type
    if model_type in FAMILIES:
        return model_type, FAMILIES[model_type]
    return shown(model_type), _unknown_family(whole, model_type, architectures)


def _refuse_kind(reader: ConfigReader, key: str, name: str, kind: str | None) -> None:
    if kind is not None:
        raise reader.refusal(
            key,
            f"says {shown(name)}, which is {kind}; only decoder-only language models with "
            "attention in every layer are planned; give one of llama, mixtral, "
            "qwen3_moe, deepseek_v3, gpt2 and their like, or an inline model spec",
        )


def _unknown_family(
    whole: ConfigReader, model_type: str | None, architectures: tuple[str, ...]
) -> Family:
    """Return Llama for a config in which every structural key is understood, else refuse it.

    An RMS norm and the activation silu are the marks of a gated feed-forward without biases.
    """
    if architectures and not any(a.endswith(("CausalLM", "LMHeadModel")) for a in architectures):
        raise whole.refusal(
            "architectures",
            f"says {shown(architectures[0])}, which is not known as a decoder-only language "
            "model; need a ...ForCausalLM class; give an inline model spec instead",
        )
    reader = whole.language_model()
    _refuse_other_attention(reader, FAMILIES["llama"])
    for key in reader.set_keys():
        if key not in _KNOWN and _STRUCTURAL.search(key) and not _HARMLESS.fullmatch(key):
            raise reader.refusal(
                key[:60],
                f"is not understood, and model_type {shown(model_type)} is not known; an unknown "
                "attention or feed-forward is not guessed; give an inline model spec",
            )
    if not is_set(reader.get("rms_norm_eps")) or reader.get("hidden_act") != "silu":
        raise reader.refusal(
            "model_type",
            f"is {shown(model_type)}, which is not known, and without rms_norm_eps and "
            'hidden_act "silu" it is not read as Llama; give an inline model spec',
        )
    assumption = (
        f"model_type {shown(model_type)} is not known: read as Llama, with experts only as far as "
        "its keys say"
    )
    llama = FAMILIES["llama"]
    return replace(llama, notes=(assumption,), required=("tie_word_embeddings",))


def _refuse_other_attention(reader: ConfigReader, family: Family) -> None:
    """Refuse layers that ``ModelSpec`` cannot hold, by the key that gives them away."""
    for key in reader.set_keys():
        for pattern, meaning in _OTHER_ATTENTION:
            if re.fullmatch(pattern, key) and not (family.indexer and meaning == _INDEXER):
                raise reader.refusal(
                    key[:60],
                    f"is {shown(reader.get(key))}: {meaning}, which is not planned for; need "
                    "attention over earlier tokens in every layer; try another model",
                )
    known = ["full_attention", "sliding_attention", "chunked_attention"]
    known += ["indexed_attention"] * family.indexer
    for layer, kind in enumerate(reader.strings("layer_types")):
        if kind not in known:
            raise reader.refusal(
                "layer_types",
                f"holds {kind[:60]!r} at layer {layer}; need {', '.join(known)}; hybrids with "
                "linear attention or state-space layers are not planned for",
            )


def _refuse_shortened(reader: ConfigReader, family: Family) -> None:
    for key in family.required:
        if key not in reader.data:
            raise reader.refusal(
                key,
                "is missing; this model_type needs it, since its default is not the same "
                "everywhere; give the model's own config.json, not a shortened copy",
            )


def _refuse_other_embedding(reader: ConfigReader, hidden_size: int) -> None:
    projected = reader.integer("word_embed_proj_dim", at_least=1, at_most=MAX_COUNT)
    if projected not in (None, hidden_size):
        raise reader.refusal(
            "word_embed_proj_dim",
            f"is {projected}: an embedding that is projected to the hidden size {hidden_size} is "
            "not planned for; need both equal",
        )


# --------------------------------------------------------------------------------- its parts


def _attention(
    reader: ConfigReader, family: Family, hidden_size: int
) -> Attention | LatentAttention:
    num_heads = reader.count("num_heads")
    if family.latent:
        return LatentAttention(
            num_heads=num_heads,
            q_lora_rank=reader.optional("q_lora_rank"),
            kv_lora_rank=reader.count("kv_lora_rank"),
            qk_nope_head_dim=reader.count("qk_nope_head_dim"),
            qk_rope_head_dim=reader.count("qk_rope_head_dim"),
            v_head_dim=reader.count("v_head_dim"),
            bias=reader.get("attention_bias") is True,
            indexer=_indexer(reader) if family.indexer else None,
        )
    if is_set(reader.get("kv_lora_rank")):
        raise reader.refusal(
            "kv_lora_rank",
            "means multi-head latent attention, which this model_type does not have; give the "
            "right model_type, for example deepseek_v3",
        )
    return Attention(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(reader, family, num_heads),
        head_dim=_head_dim(reader, family, hidden_size, num_heads),
        bias=_bias(reader, family.attention_bias_key, family.attention_bias),
        output_bias=family.output_bias,
        qk_norm="none" if reader.get("use_qk_norm") is False else family.qk_norm,
        sinks=family.sinks,
    )


def _indexer(reader: ConfigReader) -> Indexer:
    """Return the indexer that every layer has; one that layers share is refused.

    ``index_topk_freq`` and ``index_topk_pattern`` as in transformers' configuration_glm_moe_dsa.py.
    """
    shared = {
        "indexer_types": "shared" in reader.strings("indexer_types"),
        "index_topk_pattern": "S" in (reader.string("index_topk_pattern") or ""),
        "index_topk_freq": _rule(reader, "index_topk_freq", 1) > 1,
    }
    for key, is_shared in shared.items():
        if is_shared:
            raise reader.refusal(
                key,
                f"is {shown(reader.get(key))}: layers that use the indexer of another layer are "
                "not planned for; need one in every layer; try an inline model spec",
            )
    return Indexer(
        num_heads=reader.count("index_heads"),
        head_dim=reader.count("index_head_dim"),
        top_k=reader.count("index_top_k"),
    )


def _num_kv_heads(reader: ConfigReader, family: Family, num_heads: int) -> int:
    if family.multi_query and reader.flag("multi_query", True):
        return 1
    kv_heads = reader.optional("num_kv_heads")
    if kv_heads is None:
        reader.assume(f"num_key_value_heads is not given: as many as heads, {num_heads}")
        return num_heads
    if num_heads % kv_heads:
        raise reader.refusal(
            reader.key_of("num_kv_heads"),
            f"is {kv_heads}; need a divisor of the {num_heads} heads; copy both from the model's "
            "own config.json",
        )
    return kv_heads


def _head_dim(reader: ConfigReader, family: Family, hidden_size: int, num_heads: int) -> int:
    head_dim = reader.optional("head_dim")
    if head_dim is not None:
        return head_dim
    if family.head_dim is not None:
        reader.assume(f"head_dim is not given: {family.head_dim}, the family's default")
        return family.head_dim
    if hidden_size % num_heads:
        raise reader.refusal(
            reader.key_of("num_heads"),
            f"is {num_heads}; need a divisor of the hidden size {hidden_size}, or head_dim beside "
            "it; add head_dim",
        )
    reader.assume(f"head_dim is not given: hidden size / heads = {hidden_size // num_heads}")
    return hidden_size // num_heads


def _bias(reader: ConfigReader, key: str | None, default: bool) -> bool:
    return default if key is None else reader.flag(key, default)


def _feed_forward(reader: ConfigReader, family: Family, hidden_size: int) -> FeedForward:
    """Return the feed-forward of a layer without experts (also where every layer has them)."""
    size = reader.optional("dense_ffn_size") or reader.optional("ffn_size")
    if size is None and family.ffn_multiple is not None:
        size = family.ffn_multiple * hidden_size
        reader.assume(f"the feed-forward size is not given: {family.ffn_multiple} x hidden size")
    return FeedForward(
        hidden_size=size or reader.count("ffn_size"),
        gated=_gated(reader, family),
        bias=_bias(reader, family.ffn_bias_key, family.ffn_bias),
    )


def _gated(reader: ConfigReader, family: Family) -> bool:
    """Return whether the feed-forward has three matrices.

    A file of llm-analysis says so itself and folds three matrices into two wide ones where it
    does not (its Llama-2-7B: 2 x 16384 for 3 x 11008).
    """
    if reader.get("ffn_embed_dim") is None or not family.gated:
        return family.gated
    gated = reader.get("mlp_gated_linear_units")
    if gated is True:
        return True
    reader.assume(
        "ffn_embed_dim without mlp_gated_linear_units: two matrices, as llm-analysis counts them, "
        "although this model_type has three"
    )
    return False


def _learned_positions(reader: ConfigReader, family: Family) -> int:
    if family.position_offset is None:
        return 0
    return reader.count("positions") + family.position_offset


def _experts(reader: ConfigReader, family: Family) -> MixtureOfExperts | None:
    num_experts = reader.optional("num_experts", at_least=0, at_most=1 << 16)
    if num_experts is None and family.moe:
        num_experts = reader.count("num_experts")
    if not num_experts:
        return None
    if num_experts == 1:
        raise reader.refusal(
            reader.key_of("num_experts"),
            "is 1; need 2 or more; leave it out for a model without experts",
        )
    top_k = reader.count("top_k")
    if top_k > num_experts:
        raise reader.refusal(
            reader.key_of("top_k"),
            f"is {top_k}; need at most the {num_experts} experts there are",
        )
    size = reader.count(family.expert_size)
    shared = reader.optional("shared_size", at_least=0)
    if shared is None:
        number = reader.optional("num_shared_experts", at_least=0, at_most=1 << 10)
        shared = size * (family.num_shared_experts if number is None else number)
    residual = family.residual and reader.flag("parallel_attn_mlp_res", False)
    if residual:
        shared = reader.count("hidden_size")
    return MixtureOfExperts(
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden_size=size,
        shared_hidden_size=shared,
        gated=family.gated,
        bias=family.expert_bias,
        router_bias=family.expert_bias,
        shared_mix=family.shared_mix if shared else "sum",
        shared_norm=residual,
    )


def _moe_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers with experts: those that every rule in the config leaves.

    Rules as in transformers' modeling files: ``first_k_dense_replace`` and ``moe_layer_freq``
    (DeepSeek), ``decoder_sparse_step`` and ``mlp_only_layers`` (Qwen),
    ``mlp_layer_types`` (GLM), ``interleave_moe_layer_step`` (Llama 4), ``moe_layer_frequency``
    (Arctic), ``expert_layer_period`` and ``_offset`` (Jamba).
    """
    first = _rule(reader, "first_k_dense_replace", 0)
    dense = set(reader.integers("mlp_only_layers") or ())
    mask = None if is_integer(reader.get("moe_layer_freq")) else reader.integers("moe_layer_freq")
    if mask is not None and len(mask) != num_layers:
        raise reader.refusal(
            "moe_layer_freq", f"has {len(mask)} entries; need one for each of {num_layers} layers"
        )
    sparse = reader.strings("mlp_layer_types")
    if sparse:
        _check_one_each(reader, "mlp_layer_types", len(sparse), num_layers)
    every = 1 if mask is not None else _rule(reader, "moe_layer_freq", 1, at_least=1)
    step = _rule(reader, "decoder_sparse_step", 1, at_least=1)
    interleave = _rule(reader, "interleave_moe_layer_step", 1, at_least=1)
    frequency = _rule(reader, "moe_layer_frequency", 1, at_least=1)
    period = _rule(reader, "expert_layer_period", 1, at_least=1)
    offset = _rule(reader, "expert_layer_offset", 0)
    layers = tuple(
        i
        for i in range(num_layers)
        if i >= first
        and i not in dense
        and (mask is None or mask[i])
        and (not sparse or sparse[i] == "sparse")
        and i % every == 0
        and (i + 1) % step == 0
        and (i + 1) % interleave == 0
        and (i + 1) % frequency == 0
        and i % period == offset % period
    )
    if not layers:
        raise reader.refusal(
            reader.key_of("num_experts"),
            "is set, but first_k_dense_replace, moe_layer_freq, decoder_sparse_step and their like "
            f"leave no layer of {num_layers} with experts; correct them or remove the experts",
        )
    return layers


def _rule(reader: ConfigReader, key: str, default: int, *, at_least: int = 0) -> int:
    value = reader.integer(key, at_least=at_least, at_most=_MAX_LAYERS)
    return default if value is None else value


def _num_mtp_modules(reader: ConfigReader) -> int:
    """Return the modules for multi-token prediction, each with one layer."""
    number = reader.optional("num_mtp_modules", at_least=0, at_most=64) or 0
    if reader.get("use_mtp") is False:
        return 0
    if number and (layers := _rule(reader, "mtp_transformer_layers", 1)) != 1:
        raise reader.refusal(
            "mtp_transformer_layers",
            f"is {layers}; need 1: modules for multi-token prediction with several layers are not "
            f"planned for; leave out {reader.key_of('num_mtp_modules')} to train without",
        )
    if number:
        key = reader.key_of("num_mtp_modules")
        reader.assume(f"{key} is {number}: trained too; set it to 0 to train without")
    return number


# -------------------------------------------------------------------------------- windows


def _window(reader: ConfigReader, family: Family, num_layers: int) -> Window | None:
    """Return the window and the layers that have it; None if none has."""
    size = reader.optional("window")
    is_given = any(key in reader.data for key in KEYS["window"])
    layers = tuple(i for i, yes in enumerate(_windowed(reader, family, num_layers)) if yes)
    by_types = bool(reader.strings("layer_types"))
    if not layers or reader.get("use_sliding_window") is False:
        return None
    if size is None and family.window is not None and not is_given:
        size = family.window
        reader.assume(f"{KEYS['window'][0]} is not given: {size}, the family's default")
    if size is None:
        # null turns windows off; where layer_types asks for them a size must be there
        return Window(size=reader.count("window"), layers=layers) if by_types else None
    chunked = reader.get("attention_chunk_size") is not None or (
        "chunked_attention" in reader.strings("layer_types")
    )
    return Window(size=size, kind="chunked" if chunked else "sliding", layers=layers)


def _windowed(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return of every layer whether it has a window, if there is one at all.

    Rules as in transformers' configuration files: ``layer_types`` (all newer ones),
    ``max_window_layers`` (Qwen), ``sliding_window_pattern`` (Gemma 3), ``no_rope_layers`` and
    ``no_rope_layer_interval`` (Llama 4), ``attention_types`` and ``attention_layers`` (GPT-Neo);
    else the family's pattern.
    """
    if types := reader.strings("layer_types"):
        _check_one_each(reader, "layer_types", len(types), num_layers)
        return [kind in ("sliding_attention", "chunked_attention") for kind in types]
    if family.window_flag:
        return _flagged(reader, family, num_layers)
    if (rope := reader.integers("no_rope_layers")) is not None and rope:
        _check_one_each(reader, "no_rope_layers", len(rope), num_layers)
        return [bool(has) for has in rope]
    if layers := _local_layers(reader):
        _check_one_each(reader, "attention_types", len(layers), num_layers)
        return layers
    for key in ("sliding_window_pattern", "no_rope_layer_interval"):
        if every := _rule(reader, key, 0):
            return [(i + 1) % every != 0 for i in range(num_layers)]
    pattern = family.window_pattern
    if len(pattern) > 1:
        reader.assume("layer_types is not given: which layers have a window is the family's")
    return [pattern[i % len(pattern)] for i in range(num_layers)]


def _flagged(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return Qwen's layers with a window, which ``use_sliding_window`` turns on."""
    if reader.get("use_sliding_window") is not True:
        return [False] * num_layers
    if family.window_flag == "all":
        return [True] * num_layers
    border = reader.integer("max_window_layers", at_least=0, at_most=_MAX_LAYERS)
    if border is None:
        border = _QWEN_WINDOW_LAYERS
        reader.assume(f"max_window_layers is not given: {border}, the family's default")
    if family.window_flag == "from":
        return [i >= border for i in range(num_layers)]
    return [i < border and i % 2 == 0 for i in range(num_layers)]


def _local_layers(reader: ConfigReader) -> list[bool]:
    """Return GPT-Neo's layers, true where they are local: [[["global", "local"], 12]]."""
    value = reader.get("attention_types")
    if value is None:
        return [kind == "local" for kind in reader.strings("attention_layers")]
    found: list[bool] = []
    for entry in value if isinstance(value, list | tuple) else [None]:
        match entry:
            case [[*kinds], int(times)] if (
                all(kind in ("global", "local") for kind in kinds) and 0 <= times <= _MAX_LAYERS
            ):
                found += [kind == "local" for kind in kinds] * times
            case _:
                raise reader.refusal(
                    "attention_types",
                    f"is {shown(value)}; need pairs of a list of global and local and how often it "
                    'is repeated, for example [[["global", "local"], 12]]',
                )
    return found


def _check_one_each(reader: ConfigReader, key: str, entries: int, num_layers: int) -> None:
    if entries != num_layers:
        raise reader.refusal(
            key, f"has {entries} entries; need one for each of {num_layers} layers"
        )
