"""Published ``config.json`` files become models of the published size, or are refused by name."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.model.blocks import (
    BlockKind,
    block_parameters,
    mtp_parameter_count,
    num_blocks,
    parameter_count,
)
from planner.model.families import FAMILIES
from planner.model.huggingface import model_from_config
from planner.model.reader import KEYS
from planner.model.spec import ModelSpec, Window
from tests.unit.published_models import PUBLISHED, REFUSED, SAMPLES, SOURCES
from tests.unit.transformers_models import transformers_count

# Where the published figure is round, the shapes written out: (attention, feed-forward, norms and
# the rest) per layer, then embedding, head and last norm.
BY_SHAPES = {
    "EleutherAI_gpt-neo-2.7B": (
        32 * (4 * 2560**2 + 2560 + 2 * 2560 * 10240 + 10240 + 2560 + 4 * 2560)
        + (50257 + 2048 + 2) * 2560
    ),
    "MiniMaxAI--MiniMax-M2.5": (
        62 * (2 * 3072 * 6144 + 2 * 3072 * 1024 + 6144 + 1024 + 2 * 3072)
        + 62 * 256 * (3 * 3072 * 1536 + 3072)
        + (2 * 200064 + 1) * 3072
    ),
    "Phi-mini-MoE-instruct": (
        32 * (2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096 + 2 * 1024 + 4 * 4096)
        + 32 * 16 * (3 * 4096 * 960 + 4096)
        + (2 * 32064 + 2) * 4096
        + 32064
    ),
    "XiaomiMiMo--MiMo-7B-Base": (
        36 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 + 2 * 1024 + 3 * 4096 * 11008 + 2 * 4096)
        + (2 * 151680 + 1) * 4096
    ),
    "facebook_opt-66b": 64 * (12 * 9216**2 + 13 * 9216) + (50272 + 2050 + 2) * 9216,
    "granite-3.1-1b-a400m-like": (
        24 * (2 * 1024**2 + 2 * 1024 * 512 + 2 * 1024 + 32 * (3 * 1024 * 512 + 1024))
        + (49155 + 1) * 1024
    ),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (
        48 * (2 * 5120**2 + 2 * 5120 * 1024 + 2 * 5120)
        + 24 * 3 * 5120 * 16384
        + 24 * (129 * 3 * 5120 * 8192 + 128 * 5120)
        + (2 * 202048 + 1) * 5120
    ),
    "microsoft_Phi-3-mini-4k-instruct": (
        32 * (4 * 3072**2 + 3 * 3072 * 8192 + 2 * 3072) + (2 * 32064 + 1) * 3072
    ),
    "moonshotai--Kimi-K2-Instruct": (
        61 * (7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168)
        + 61 * (1536 + 512 + 2 * 7168)
        + 3 * 7168 * 18432
        + 60 * (385 * 3 * 7168 * 2048 + 384 * 7168)
        + (2 * 163840 + 1) * 7168
    ),
}


def test_every_sample_is_either_a_model_or_refused_and_names_its_origin():
    assert set(SAMPLES) == set(PUBLISHED) | set(REFUSED)
    assert {f.removesuffix(".json") for f in SOURCES} == set(SAMPLES)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sample_has_the_published_number_of_parameters(name):
    published = PUBLISHED[name]
    model = model_from_config(SAMPLES[name], name)
    total = parameter_count(model)
    assert abs(total - published.total) <= max(0.005 * published.total, published.unit / 2)
    active = parameter_count(model, active=True)
    if published.active is None:
        assert active == total
    else:
        active -= 0 if published.lookup_counted else model.vocab_size * model.hidden_size
        tolerance = max(0.005 * published.active, published.active_unit / 2)
        assert abs(active - published.active) <= tolerance


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sample_has_the_parameters_of_its_module_in_transformers(name):
    """Every one: attention, experts, norms, biases, sinks, indexers, positions."""
    model, module = model_from_config(SAMPLES[name], name), transformers_count(SAMPLES[name])
    # its file is llm-analysis' stand-in: two matrices of 16384 for three of 11008
    missing = 32 * 4096 * (3 * 11008 - 2 * 16384) if name == "NousResearch_Llama-2-7b-hf" else 0
    assert parameter_count(model) + missing == module.total
    assert parameter_count(model, active=True) + missing == module.active
    assert parameter_count(model) == pytest.approx(module.total, rel=0.005)


@pytest.mark.parametrize(
    ("name", "published", "rel"),
    [
        # README_WEIGHTS.md of DeepSeek-V3: 11.5B of its own, without the shared embedding and head
        ("deepseek-ai--DeepSeek-V3", 11.5e9, 0.01),
        # by shapes: attention with its biases, feed-forward; norms and projection
        (
            "XiaomiMiMo--MiMo-7B-Base",
            2 * 4096**2
            + 2 * 4096 * 1024
            + 4096
            + 2 * 1024
            + 3 * 4096 * 11008
            + 2 * 4096**2
            + 5 * 4096,
            1e-12,
        ),
    ],
)
def test_modules_for_multi_token_prediction_have_their_published_size(name, published, rel):
    model = model_from_config(SAMPLES[name], name)
    assert model.num_mtp_modules == 1
    assert mtp_parameter_count(model) == pytest.approx(published, rel=rel)
    layer: BlockKind = "moe" if model.experts else "dense"
    own = block_parameters(model, "mtp").total() - block_parameters(model, layer).total()
    assert own == 2 * model.hidden_size**2 + 3 * model.hidden_size


def test_multi_token_prediction_is_said_and_can_be_left_out():
    config = SAMPLES["MiniMaxAI--MiniMax-M2.5"]
    model = model_from_config(config, "m2")
    assert model.num_mtp_modules == 3
    assert model.assumptions == ("num_mtp_modules is 3: trained too; set it to 0 to train without",)
    for without in ({"num_mtp_modules": 0}, {"use_mtp": False}):
        assert model_from_config({**config, **without}, "m2").num_mtp_modules == 0
    with pytest.raises(InvalidInputError, match="mtp_transformer_layers is 2; need 1"):
        model_from_config({**config, "mtp_transformer_layers": 2}, "m2")


def test_an_indexer_that_layers_share_is_refused():
    config = SAMPLES["zai-org--GLM-5"]
    for changes, key in (
        ({"index_topk_freq": 4}, "index_topk_freq"),
        ({"index_topk_pattern": "FSSF"}, "index_topk_pattern"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types"),
    ):
        with pytest.raises(InvalidInputError, match="need one in every layer") as caught:
            model_from_config({**config, **changes}, "glm")
        assert caught.value.where == f"model.huggingface.{key}"
    assert any("scores" in line for line in model_from_config(config, "glm").assumptions)


@pytest.mark.parametrize("name", sorted(BY_SHAPES))
def test_sample_has_the_parameters_of_its_shapes(name):
    assert parameter_count(model_from_config(SAMPLES[name], name)) == BY_SHAPES[name]


# Shapes and totals of the model cards of BLOOM-176B, GPT-NeoX-20B, Mistral-7B-v0.1, Gemma-2B, DBRX,
# DeepSeek-V2-Lite, Qwen1.5-MoE-A2.7B, Phi-2 and Snowflake Arctic (480B; 479B by its safetensors);
# the shapes in the keys of the family.
OTHERS: dict[str, tuple[dict[str, Any], float]] = {
    "bloom": (
        {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880},
        176_247_271_424,
    ),
    "gpt_neox": (
        {
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
            "attention_bias": True,
        },
        20_554_567_680,
    ),
    "mistral": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "gemma": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 16384,
            "vocab_size": 256000,
        },
        2.51e9,
    ),
    "dbrx": (
        {
            "d_model": 6144,
            "n_layers": 40,
            "n_heads": 48,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        132e9,
    ),
    "deepseek_v2": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
        15.7e9,
    ),
    "qwen2_moe": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "vocab_size": 151936,
        },
        14.3e9,
    ),
    "phi": (
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 51200,
        },
        2_779_683_840,
    ),
    "arctic": (
        {
            "hidden_size": 7168,
            "num_hidden_layers": 35,
            "num_attention_heads": 56,
            "num_key_value_heads": 8,
            "intermediate_size": 4864,
            "num_local_experts": 128,
            "num_experts_per_tok": 2,
            "moe_layer_frequency": 1,
            "parallel_attn_mlp_res": True,
            "vocab_size": 32000,
        },
        479e9,
    ),
}


@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_other_families_have_their_published_size(model_type):
    shape, total = OTHERS[model_type]
    model = model_from_config({"model_type": model_type, **shape}, model_type)
    assert parameter_count(model) == pytest.approx(total, rel=0.005)


def test_arctic_has_a_dense_feed_forward_beside_the_experts_and_17_billion_active():
    model = model_from_config({"model_type": "arctic", **OTHERS["arctic"][0]}, "arctic")
    assert model.experts is not None
    assert (model.experts.shared_hidden_size, model.experts.shared_norm) == (7168, True)
    # model card: 480B total, 17B active
    assert parameter_count(model, active=True) == pytest.approx(17e9, abs=0.5e9)
    sparse = model_from_config(
        {"model_type": "arctic", **OTHERS["arctic"][0], "moe_layer_frequency": 5}, "arctic"
    )
    assert sparse.moe_layers == tuple(range(4, 35, 5))


@pytest.mark.parametrize(("value", "kv_heads"), [(True, 1), (None, 1), (False, 16)])
def test_one_key_value_head_serves_all_in_multi_query_attention(value, kv_heads):
    shape = {"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 8192, "vocab_size": 49280}
    spec = model_from_config({"model_type": "gpt_bigcode", "multi_query": value, **shape}, "coder")
    assert spec.attention.kind == "gqa"
    assert spec.attention.num_kv_heads == kv_heads


def test_embedding_of_another_width_is_refused():
    # OPT-350m has it.
    config = {**SAMPLES["facebook_opt-6.7b"], "word_embed_proj_dim": 512}
    with pytest.raises(InvalidInputError, match="projected") as caught:
        model_from_config(config, "opt-350m")
    assert caught.value.where == "model.huggingface.word_embed_proj_dim"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_sample_with_other_attention_is_refused_by_name(name):
    key, word = REFUSED[name]
    with pytest.raises(InvalidInputError, match=word) as caught:
        model_from_config(SAMPLES[name], name)
    assert caught.value.where == f"model.huggingface.{key}"
    assert SAMPLES[name]["model_type"] in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_hybrid_under_a_false_name_is_refused_by_its_keys(name):
    config = {**SAMPLES[name], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "model_type": "llama"}
    with pytest.raises(InvalidInputError, match=r"not planned for|latent attention") as caught:
        model_from_config(config, name)
    assert caught.value.where.startswith("model.huggingface.")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "bert", "hidden_size": 768}, "an encoder"),
        ({"architectures": ["RobertaForMaskedLM"]}, "an encoder"),
        ({"model_type": "t5", "d_model": 512}, "encoder-decoder"),
        ({"model_type": "whisper"}, "audio"),
        ({"model_type": "vit"}, "vision"),
        ({"model_type": "convnextv2"}, "vision"),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model"}}, "vision"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier"),
        ({"architectures": ["XForConditionalGeneration"]}, "not known as a decoder-only"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"index_topk": 2048}, "indexer"),
        ({"linear_num_key_heads": 16}, "hybrid"),
        ({"layer_types": ["full_attention", "mamba"]}, "'mamba' at layer 1"),
        ({"model_type": "newformer", "attn_gate_kind": "x"}, "attn_gate_kind is not understood"),
        ({"model_type": "newformer", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "newformer", "use_bias": True}, "use_bias is not understood"),
        ({"model_type": "newformer", "hidden_act": "gelu"}, "not read as Llama"),
        ({"model_type": "newformer", "rms_norm_eps": None}, "not read as Llama"),
    ],
)
def test_other_models_are_refused_by_name(config, word):
    with pytest.raises(InvalidInputError, match=word) as caught:
        model_from_config({**SMALL, **config}, "other")
    assert caught.value.where.startswith("model.huggingface")


SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1000,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MOE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_complete_config_needs_no_assumption():
    assert model_from_config(LLAMA, "small").assumptions == ()


@pytest.mark.parametrize(
    "key",
    ["num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"],
)
@pytest.mark.parametrize("absent", [True, False])
def test_every_default_is_listed(key, absent):
    config = {k: v for k, v in LLAMA.items() if k != key} if absent else {**LLAMA, key: None}
    assumptions = model_from_config(config, "small").assumptions
    assert len(assumptions) == 1
    assert assumptions[0].startswith(f"{key} is not given")


def test_unknown_type_with_known_keys_is_read_as_llama_and_says_so():
    model = model_from_config({**SMALL, "model_type": "newformer"}, "small")
    known = model_from_config(LLAMA, "small")
    assert model.model_copy(update={"source": "", "assumptions": ()}) == known.model_copy(
        update={"source": ""}
    )
    assert len(model.assumptions) == 1
    assert model.assumptions[0].startswith("model_type 'newformer' is not known: read as Llama")


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({"hidden_size": None}, "hidden_size", "is null; need a positive integer"),
        ({"hidden_size": "256"}, "hidden_size", "is '256'; need an integer"),
        ({"hidden_size": 256.0}, "hidden_size", "is 256.0; need an integer"),
        ({"hidden_size": True}, "hidden_size", "is true"),
        ({"hidden_size": 10**5000}, "hidden_size", "bits"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "is 0"),
        ({"num_hidden_layers": -4}, "num_hidden_layers", "is -4"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "to 10000"),
        ({"vocab_size": []}, "vocab_size", "a list"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divisor of the 8 heads"),
        ({"head_dim": None, "num_attention_heads": 12}, "num_attention_heads", "add head_dim"),
        ({"n_embd": 128}, "n_embd", "both mean the same"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ({"model_type": 7}, "model_type", "need a string"),
        ({"architectures": "Llama"}, "architectures", "list of strings"),
        ({"text_config": []}, "text_config", "need an object"),
        ({"layer_types": ["full_attention"]}, "layer_types", "has 1 entries"),
        ({"kv_lora_rank": 512}, "kv_lora_rank", "latent attention"),
    ],
)
def test_wrong_value_is_refused_with_its_path(changes, key, word):
    with pytest.raises(InvalidInputError, match=word) as caught:
        model_from_config({**LLAMA, **changes}, "small")
    assert caught.value.where == f"model.huggingface.{key}"


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({"num_experts": 1}, "num_experts", "need 2 or more"),
        ({"num_experts": None}, "num_local_experts", "is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "at most the 8 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size", "is null"),
        ({"mlp_only_layers": [0, 1]}, "num_experts", "leave no layer of 2"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers", "integers from 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step", "from 1"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq", "has 1 entries"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types", "has 1 entries"),
    ],
)
def test_wrong_experts_are_refused_with_their_path(changes, key, word):
    with pytest.raises(InvalidInputError, match=word) as caught:
        model_from_config({**MOE, **changes}, "small")
    assert caught.value.where == f"model.huggingface.{key}"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek-ai--DeepSeek-V3", "first_k_dense_replace"),
        ("deepseek-ai--DeepSeek-V3", "n_shared_experts"),
        ("deepseek-ai--DeepSeek-V3", "q_lora_rank"),
        ("Qwen--Qwen3-30B-A3B", "decoder_sparse_step"),
        ("mistralai--Mixtral-8x7B-v0.1", "num_local_experts"),
    ],
)
def test_key_without_which_the_family_is_ambiguous_is_required(name, key):
    config = {k: v for k, v in SAMPLES[name].items() if k != key}
    with pytest.raises(InvalidInputError, match="is missing") as caught:
        model_from_config(config, name)
    assert caught.value.where == f"model.huggingface.{key}"


def test_null_query_rank_means_no_low_rank_query():
    # DeepSeek-V2-Lite says so.
    spec = model_from_config({**SAMPLES["deepseek-ai--DeepSeek-V3"], "q_lora_rank": None}, "lite")
    assert spec.attention.kind == "mla"
    assert spec.attention.q_lora_rank is None


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_missing_size_is_refused(missing):
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(InvalidInputError, match="is missing") as caught:
        model_from_config(config, "small")
    assert caught.value.where == f"model.huggingface.{missing}"


def test_value_in_a_nested_config_is_refused_with_the_nested_path():
    config = {"model_type": "llava", "text_config": {**LLAMA, "vocab_size": 0}}
    with pytest.raises(InvalidInputError) as caught:
        model_from_config(config, "small")
    assert caught.value.where == "model.huggingface.text_config.vocab_size"


def test_sizes_that_are_each_possible_but_not_together_are_refused():
    config = {**LLAMA, "hidden_size": 1 << 24, "intermediate_size": 1 << 24, "num_hidden_layers": 9}
    with pytest.raises(InvalidInputError, match="weights"):
        model_from_config(config, "huge")


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        ({"first_k_dense_replace": 3}, (3, 4, 5, 6, 7)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4, 6)),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 0, 0, 1]}, (1, 2, 7)),
        ({"decoder_sparse_step": 2}, (1, 3, 5, 7)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5, 7)),
        ({"interleave_moe_layer_step": 4}, (3, 7)),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, (1, 5)),
        ({"moe_layer_frequency": 3}, (2, 5)),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 3}, (5, 6, 7)),
        ({}, tuple(range(8))),
    ],
)
def test_layers_with_experts_follow_each_family_s_rule(rules, layers):
    model = model_from_config({**MOE, "num_hidden_layers": 8, **rules}, "small")
    assert model.moe_layers == layers


@pytest.mark.parametrize(
    ("model_type", "changes", "size", "layers"),
    [
        ("mistral", {"sliding_window": 4096}, 4096, (0, 1)),
        ("mistral", {"sliding_window": None}, None, ()),
        ("mistral", {}, 4096, (0, 1)),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, None, ()),
        (
            "qwen2",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
            128,
            (1,),
        ),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, None, ()),  # from 28 on
        (
            "llama",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
            64,
            (0,),
        ),
        ("llama", {"layer_types": ["full_attention"] * 2}, None, ()),
        ("gpt_neo", {}, 256, (1,)),
        ("gpt_neo", {"attention_types": [[["local"], 2]], "window_size": 64}, 64, (0, 1)),
        ("gpt_neo", {"attention_layers": ["local", "global"]}, 256, (0,)),
        ("gemma3_text", {"sliding_window_pattern": 2}, 4096, (0,)),
        ("gemma2", {"sliding_window": 1024}, 1024, (0,)),
    ],
)
def test_windows_lie_where_the_family_has_them(model_type, changes, size, layers):
    config = {**SMALL, "model_type": model_type, "n_positions": 2048, **changes}
    window = model_from_config(config, "small").window
    assert window == (None if size is None else Window(size=size, layers=layers))


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"EleutherAI_gpt-neo-2.7B"}))
def test_windowed_layers_are_those_of_transformers(name):
    """Newer classes say of every layer what it attends to; GPT-Neo's rule is tested above."""
    from transformers import CONFIG_MAPPING

    config = SAMPLES[name]
    model_type = config["model_type"]
    types: list[str] = []
    if model_type in CONFIG_MAPPING:
        kept = {k: v for k, v in config.items() if v is not None and "quantization" not in k}
        read = CONFIG_MAPPING[model_type](**kept).get_text_config()
        types = getattr(read, "layer_types", None) or []
    windowed = tuple(i for i, kind in enumerate(types) if kind[:7] in ("sliding", "chunked"))
    window = model_from_config(config, name).window
    if types:
        assert (window.layers if window else ()) == windowed


def test_llama_4_attends_in_chunks_and_every_fourth_layer_to_all():
    name = "meta-llama--Llama-4-Maverick-17B-128E-Instruct"
    model = model_from_config(SAMPLES[name], name)
    assert model.window is not None
    assert (model.window.size, model.window.kind) == (8192, "chunked")
    assert num_blocks(model) == {
        "embedding": 1,
        "dense_window": 24,  # even layers are dense, every fourth, an odd one, sees all
        "moe": 12,
        "moe_window": 12,
        "head": 1,
    }


def test_a_window_without_a_size_is_refused():
    config = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(InvalidInputError, match="sliding_window is missing"):
        model_from_config(config, "small")


@pytest.mark.parametrize("value", [7, [["global", "local"]], [[["near"], 2]], [[["local"], -1]]])
def test_attention_types_that_are_none_are_refused(value):
    config = {**SMALL, "model_type": "gpt_neo", "n_positions": 64, "attention_types": value}
    with pytest.raises(InvalidInputError, match="need pairs"):
        model_from_config(config, "neo")


def test_nested_language_model_is_read_and_the_rest_listed():
    nested = model_from_config(
        {"model_type": "llava", "text_config": LLAMA, "vision_config": {"depth": 2}}, "small"
    )
    alone = model_from_config(LLAMA, "small")
    assert nested.model_copy(update={"assumptions": ()}) == alone
    assert nested.assumptions == (
        "only the language model is planned; image and audio parts are left out",
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_order_and_irrelevant_keys_change_nothing(name):
    config = {**SAMPLES[name], "use_cache": False, "torch_dtype": "float32", "my_note": {"a": [1]}}
    items = list(config.items())
    random.Random(0).shuffle(items)
    assert model_from_config(dict(items), name) == model_from_config(SAMPLES[name], name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda child: (
        st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=8), child, max_size=3)
    ),
    max_leaves=6,
)
ALL_KEYS = sorted(
    {key for keys in KEYS.values() for key in keys}
    | {key for config in SAMPLES.values() for key in config}
    | {"layer_types", "mlp_only_layers", "attn_config", "ffn_config", "multi_query"}
)
KEYS_AND_VALUES = st.dictionaries(
    st.sampled_from(ALL_KEYS) | st.text(max_size=8),
    JSON | st.integers(-2, 64) | st.sampled_from(sorted(FAMILIES)),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(config=KEYS_AND_VALUES)
def test_any_object_is_a_model_or_refused(config):
    refused_or_model(config)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    changes=KEYS_AND_VALUES,
    removed=st.sets(st.sampled_from(ALL_KEYS), max_size=3),
)
def test_any_change_to_a_real_config_is_a_model_or_refused(name, changes, removed):
    config = {key: value for key, value in SAMPLES[name].items() if key not in removed}
    refused_or_model({**config, **changes})


def test_deep_nesting_is_refused_without_descending():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    for key in ("hidden_size", "layer_types", "text_config", "quantization_config"):
        refused_or_model({**LLAMA, key: value})


def refused_or_model(config: dict[str, Any]) -> None:
    """Assert the one thing a reader of strangers' files owes: a model, or one clear error."""
    outcome = read(config)
    if isinstance(outcome, InvalidInputError):
        assert outcome.where.startswith("model.huggingface")
        assert str(outcome).startswith("model 'any': model.huggingface")
    else:
        assert 0 < parameter_count(outcome, active=True) <= parameter_count(outcome)


def read(config: dict[str, Any]) -> ModelSpec | InvalidInputError:
    try:
        return model_from_config(config, "any")
    except InvalidInputError as error:
        return error
