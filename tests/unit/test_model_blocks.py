"""Parameter and flop counts against published figures and formulas written out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.model.blocks import (
    BLOCK_KINDS,
    BlockKind,
    attention_flop_per_token,
    block_flop_per_token,
    block_kinds,
    block_parameters,
    has_experts,
    layer_kinds,
    model_flop_per_token,
    mtp_parameter_count,
    parameter_count,
    window_of,
)
from planner.model.bundled import load_model
from planner.model.spec import (
    Attention,
    FeedForward,
    Indexer,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
    Window,
)
from planner.plan import Packing, document_hash

# Written out from the shapes: attention, feed-forward, norms; embedding, head, last norm.
LLAMA3_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
LLAMA3_8B += 2 * 128256 * 4096 + 4096
LLAMA3_70B = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
LLAMA3_70B += 2 * 128256 * 8192 + 8192
LLAMA3_405B = 126 * (2 * 16384 * 16384 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384)
LLAMA3_405B += 2 * 128256 * 16384 + 16384


def mixtral_8x7b(experts: int) -> int:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 + 8 * 4096
    return 32 * (layer + experts * 3 * 4096 * 14336) + 2 * 32000 * 4096 + 4096


# q down, q up, kv down with the shared rope part, kv up, output; the two norms inside.
DEEPSEEK_MLA = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256
DEEPSEEK_MLA += 128 * 128 * 7168 + 1536 + 512


def deepseek_v3(experts: int) -> int:
    dense = 3 * (DEEPSEEK_MLA + 3 * 7168 * 18432 + 2 * 7168)
    moe = 58 * (DEEPSEEK_MLA + (experts + 1) * 3 * 7168 * 2048 + 256 * 7168 + 2 * 7168)
    return dense + moe + 2 * 129280 * 7168 + 7168


def qwen3_30b_a3b(experts: int) -> int:
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048 + 128 * 2048
    return 48 * (layer + experts * 3 * 2048 * 768) + 2 * 151936 * 2048 + 2048


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", LLAMA3_8B, LLAMA3_8B),
        ("llama3-70b", LLAMA3_70B, LLAMA3_70B),
        ("llama3-405b", LLAMA3_405B, LLAMA3_405B),
        ("mixtral-8x7b", mixtral_8x7b(8), mixtral_8x7b(2)),
        ("deepseek-v3", deepseek_v3(256), deepseek_v3(8)),
        ("qwen3-30b-a3b", qwen3_30b_a3b(128), qwen3_30b_a3b(8)),
    ],
)
def test_parameters_equal_the_sum_of_the_shapes(name, total, active):
    model = load_model(name)
    assert parameter_count(model) == total
    assert parameter_count(model, active=True) == active


# Figure, unit of its last digit. Sources: arXiv 2407.21783 (Llama 3), 2401.04088 (Mixtral: 47B and
# 13B), 2412.19437 (DeepSeek-V3: 671B and 37B), 2505.09388 (Qwen3: 30.5B and 3.3B), 2104.04473
# (GPT-3 in Megatron-LM: 174.6B).
@pytest.mark.parametrize(
    ("name", "total", "total_unit", "active", "active_unit"),
    [
        ("llama3-8b", 8.03e9, 1e7, 8.03e9, 1e7),
        ("llama3-70b", 70.6e9, 1e8, 70.6e9, 1e8),
        ("llama3-405b", 405e9, 1e9, 405e9, 1e9),
        ("mixtral-8x7b", 47e9, 1e9, 13e9, 1e9),
        ("deepseek-v3", 671e9, 1e9, 37e9, 2e9),
        ("qwen3-30b-a3b", 30.5e9, 1e8, 3.3e9, 2e8),
        ("gpt3-175b", 174.6e9, 1e8, 174.6e9, 1e8),
    ],
)
def test_parameters_are_as_published(name, total, total_unit, active, active_unit):
    model = load_model(name)
    assert abs(parameter_count(model) - total) <= max(total_unit / 2, 0.005 * total)
    # Some publishers leave one or both embeddings out of the active count: hence 2 units there.
    assert abs(parameter_count(model, active=True) - active) <= max(active_unit / 2, 0.005 * active)


def test_deepseek_v3_attention_has_187_million_parameters_per_layer():
    block = block_parameters(load_model("deepseek-v3"), "moe")
    router = 256 * 7168
    assert block.attention + block.whole - router == DEEPSEEK_MLA - 1536 - 512
    assert block.attention + block.whole - router == pytest.approx(187.1e6, rel=1e-3)
    assert block.whole - router == 7168 * (1536 + 512 + 64)


def test_gpt3_equals_the_formula_of_megatron_lm():
    # Narayanan et al. 2021, arXiv 2104.04473, equation 2, plus the final norm that it leaves out.
    h, layers, vocab, seq_len = 12288, 96, 51200, 2048
    published = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + seq_len) / (12 * layers * h))
    assert parameter_count(load_model("gpt3-175b")) == pytest.approx(published + 2 * h, rel=1e-12)


def test_gpt3_flop_per_token_equals_the_formula_of_megatron_lm():
    # Equation 3 there without recomputation (72 for 96), attention halved for the causal mask.
    h, layers, vocab, seq_len = 12288, 96, 51200, 2048
    published = 72 * layers * h**2 * (1 + seq_len / (12 * h) + vocab / (12 * layers * h))
    assert model_flop_per_token(load_model("gpt3-175b"), seq_len) == pytest.approx(
        published, rel=1e-12
    )


@pytest.mark.parametrize("seq_len", [1, 4096, 131072])
def test_llama_flop_per_token_is_six_per_weight_plus_attention(seq_len):
    weights = LLAMA3_8B - 128256 * 4096 - 65 * 4096  # without lookup and norms
    assert model_flop_per_token(load_model("llama3-8b"), seq_len) == (
        6 * weights + 32 * 6 * seq_len * 4096
    )


def test_deepseek_flop_per_token_is_six_per_active_weight_plus_attention():
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    weights = deepseek_v3(8) - 129280 * 7168 - norms
    cores = 61 * 3 * 4096 * 128 * (192 + 128)
    model = load_model("deepseek-v3")
    without = model.model_copy(update={"num_mtp_modules": 0})
    assert model_flop_per_token(without, 4096) == 6 * weights + cores
    # its module for multi-token prediction: a layer with experts, the projection and the head
    layer = DEEPSEEK_MLA - 1536 - 512 + 9 * 3 * 7168 * 2048 + 256 * 7168
    module = layer + 2 * 7168**2 + 129280 * 7168
    more = model_flop_per_token(model, 4096) - model_flop_per_token(without, 4096)
    assert more == 6 * module + cores / 61


def test_tied_head_owns_no_matrix_but_is_computed():
    tied = small(tied_embeddings=True)
    untied = small(tied_embeddings=False)
    assert parameter_count(untied) - parameter_count(tied) == 64 * 100
    assert model_flop_per_token(tied, 16) == model_flop_per_token(untied, 16)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"bias": True}, 64 + 2 * 32 + 64),
        ({"bias": True, "output_bias": False}, 64 + 2 * 32),
        ({"output_bias": True}, 64),
        ({"qk_norm": "head"}, 2 * 16),
        ({"qk_norm": "full"}, 64 + 32),
    ],
)
def test_biases_and_norms_of_attention_are_counted_per_layer(fields, more):
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16, **fields)
    grown = parameter_count(small(attention=attention)) - parameter_count(small())
    assert grown == 3 * more


def test_biases_of_the_feed_forward_follow_its_matrices():
    plain, gated = (
        block_parameters(
            small(feed_forward=FeedForward(hidden_size=96, gated=g, bias=True)), "dense"
        )
        for g in (False, True)
    )
    without = block_parameters(small(), "dense")
    assert plain.replicated - without.replicated == 96 + 64
    assert gated.replicated - without.replicated == 2 * 96 + 64


@given(
    layers=st.integers(1, 40),
    num_experts=st.integers(2, 64),
    data=st.data(),
    shared=st.integers(0, 200),
)
def test_parameters_grow_by_one_block_per_layer(layers, num_experts, data, shared):
    top_k = data.draw(st.integers(1, num_experts))
    moe_layers = data.draw(st.sets(st.integers(0, layers - 1), min_size=1))
    experts = MixtureOfExperts(
        num_experts=num_experts, top_k=top_k, expert_hidden_size=24, shared_hidden_size=shared
    )
    model = small(num_layers=layers, experts=experts, moe_layers=tuple(sorted(moe_layers)))
    longer = model.model_copy(update={"num_layers": layers + 1})
    assert layer_kinds(longer).count("moe") == len(moe_layers)
    assert parameter_count(longer) - parameter_count(model) == (
        block_parameters(model, "dense").total()
    )
    assert 0 < parameter_count(model, active=True) <= parameter_count(model)
    assert (parameter_count(model, active=True) == parameter_count(model)) == (top_k == num_experts)


def test_attention_flop_counts_half_the_square():
    # Two matmuls of 2 · s · d_head flop per head and token, half of it masked away.
    assert attention_flop_per_token(small(), "dense", 128) == 4 * (2 * 2 * 128 * 16) / 2


def test_every_kind_has_a_count():
    experts = MixtureOfExperts(num_experts=4, top_k=2, expert_hidden_size=24)
    model = small(
        num_layers=4,
        experts=experts,
        moe_layers=(1, 2),
        window=Window(size=8, layers=(2, 3)),
        num_mtp_modules=2,
    )
    assert layer_kinds(model) == ("dense", "moe", "moe_window", "dense_window")
    assert block_kinds(model) == BLOCK_KINDS
    per_kind = {kind: block_parameters(model, kind).total() for kind in BLOCK_KINDS}
    assert all(per_kind.values())
    assert parameter_count(model) == sum(n for kind, n in per_kind.items() if kind != "mtp")
    assert mtp_parameter_count(model) == 2 * per_kind["mtp"]


def test_a_module_for_multi_token_prediction_is_a_projection_and_a_layer_like_the_last():
    experts = MixtureOfExperts(num_experts=4, top_k=2, expert_hidden_size=24)
    cases: tuple[tuple[tuple[int, ...], BlockKind], ...] = (((2,), "moe"), ((1,), "dense"))
    for moe_layers, last in cases:
        model = small(experts=experts, moe_layers=moe_layers, num_mtp_modules=1)
        own = block_parameters(model, "mtp").total() - block_parameters(model, last).total()
        assert own == 2 * 64 * 64 + 3 * 64
        assert has_experts(model, "mtp") == (last == "moe")
        flop = block_flop_per_token(model, "mtp", 16) - block_flop_per_token(model, last, 16)
        assert flop == 2 * 2 * 64 * 64 + block_flop_per_token(model, "head", 16)


def test_windowed_layers_have_the_same_weights_and_less_attention():
    window = Window(size=16, layers=(0, 2))
    model, full = small(window=window), small()
    assert parameter_count(model) == parameter_count(full)
    saved = full_attention = 4 * 2 * 2 * 16 * 128 / 2
    saved -= 4 * 2 * 2 * 16 * (16 * 128 - 16**2 / 2) / 128
    assert attention_flop_per_token(full, "dense", 128) == full_attention
    less = model_flop_per_token(full, 128) - model_flop_per_token(model, 128)
    assert less == pytest.approx(3 * 2 * saved)
    assert model_flop_per_token(model, 16) == model_flop_per_token(full, 16)


def test_a_module_for_multi_token_prediction_has_the_window_of_the_last_layer():
    cases: tuple[tuple[tuple[int, ...], BlockKind], ...] = (
        ((0, 2), "dense_window"),
        ((0, 1), "dense"),
    )
    for layers, last in cases:
        window = Window(size=16, layers=layers)
        model = small(window=window, num_mtp_modules=1)
        assert window_of(model, "mtp") == window_of(model, last)
        assert window_of(model, "mtp") == (window if last == "dense_window" else None)
        cores = attention_flop_per_token(model, "mtp", 128)
        assert cores == attention_flop_per_token(model, last, 128)


def test_packed_documents_attend_within_their_own():
    packing = Packing(lengths=(64, 32), counts=(1, 2))
    model = small()
    cores = attention_flop_per_token(model, "dense", 128)
    packed = attention_flop_per_token(model, "dense", 128, packing)
    assert packed == pytest.approx(cores * (64**2 + 2 * 32**2) / 128 / 128)
    less = model_flop_per_token(model, 128) - model_flop_per_token(model, 128, packing)
    assert less == pytest.approx(3 * 3 * (cores - packed))
    whole = Packing(lengths=(128,), counts=(7,))
    assert model_flop_per_token(model, 128, whole) == model_flop_per_token(model, 128)


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"parallel_attention": True, "layer_norms": 1}, 3 * -64),
        ({"parallel_attention": True}, 0),
        ({"layer_norms": 4}, 3 * 2 * 64),
        ({"head_bias": True}, 100),
        (
            {"attention": Attention(num_heads=4, num_kv_heads=2, head_dim=16, sinks=True)},
            3 * 4,
        ),
    ],
)
def test_norms_sinks_and_the_head_bias_are_counted(fields, more):
    assert parameter_count(small(**fields)) - parameter_count(small()) == more


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"bias": True}, 8 * (2 * 24 + 64)),
        ({"router_bias": True}, 8),
        ({"shared_hidden_size": 40}, 3 * 64 * 40),
        ({"shared_hidden_size": 40, "shared_mix": "gate"}, 3 * 64 * 40 + 64),
        # DeepSpeed's residual mixture of experts: nn.Linear(hidden_size, 2)
        ({"shared_hidden_size": 40, "shared_mix": "coefficients"}, 3 * 64 * 40 + 2 * 64 + 2),
        ({"shared_hidden_size": 40, "shared_norm": True}, 3 * 64 * 40 + 64),
    ],
)
def test_what_stands_beside_the_experts_is_counted(fields, more):
    def model(**changes: object) -> ModelSpec:
        experts = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 24, **changes}
        return small(experts=experts, moe_layers=(0, 1, 2))

    assert parameter_count(model(**fields)) - parameter_count(model()) == 3 * more


def test_an_indexer_has_queries_from_the_latent_one_key_and_a_weight_per_head():
    latent = LatentAttention(
        num_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    sparse = latent.model_copy(update={"indexer": Indexer(num_heads=2, head_dim=8, top_k=4)})
    weights = 24 * 2 * 8 + 64 * 8 + 64 * 2
    models = [small(attention=a) for a in (latent, sparse)]
    plain, found = (block_parameters(model, "dense") for model in models)
    assert found.whole - plain.whole == weights
    assert found.replicated - plain.replicated == 2 * 8
    plain_flop, flop = (block_flop_per_token(model, "dense", 32) for model in models)
    assert flop - plain_flop == 2 * weights


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_layers": (0,)}, "experts is null"),
        (
            {
                "num_layers": 4096,
                "hidden_size": 1 << 24,
                "feed_forward": {"hidden_size": 1 << 24},
            },
            "about .* weights",
        ),
        ({"vocab_size": 0}, "vocab_size"),
        ({"window": {"size": 0, "layers": (0,)}}, "size"),
        ({"window": {"size": 8, "layers": (3,)}}, "window.layers must be distinct and in 0..2"),
        ({"window": {"size": 8, "layers": (1, 1)}}, "repeats"),
        ({"window": {"size": 8, "layers": ()}}, "at least 1 item"),
        ({"layer_norms": 1}, "only a layer with parallel_attention has"),
        ({"parallel_attention": True, "layer_norms": 4}, "got layer_norms=4, no experts"),
        ({"num_mtp_modules": -1}, "num_mtp_modules"),
        (
            {
                "experts": {
                    "num_experts": 2,
                    "top_k": 1,
                    "expert_hidden_size": 8,
                    "shared_mix": "gate",
                },
                "moe_layers": (0,),
            },
            "need a shared_hidden_size",
        ),
        (
            {"attention": {"kind": "gqa", "num_heads": 6, "num_kv_heads": 4, "head_dim": 8}},
            "multiple",
        ),
    ],
)
def test_impossible_spec_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate({**small().model_dump(exclude=set(fields)), **fields})


def test_what_a_spec_does_not_say_is_not_in_its_document():
    """Fields that are younger than a document change no hash of it."""
    # the hash before windows, norms, multi-token prediction, sinks, indexers existed
    assert document_hash(load_model("llama3-8b")) == "25fad7c31420e59c"
    assert document_hash(load_model("mixtral-8x7b")) == "08e26b6cc0e1d5f4"


@pytest.mark.parametrize("kind", [{}, {"kind": "gqa"}])
def test_attention_without_a_kind_is_the_usual_one(kind):
    spec = small(attention={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **kind})
    assert spec == small()
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("kind", ["linear", None, [], 3])
def test_unknown_kind_of_attention_is_refused(kind):
    with pytest.raises(ValidationError, match="kind must be 'gqa' or 'mla'"):
        small(attention={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kind": kind})


def small(**fields: object) -> ModelSpec:
    """Return a model of 3 layers with what is given changed."""
    base: dict[str, object] = {
        "name": "small",
        "source": "test",
        "num_layers": 3,
        "hidden_size": 64,
        "vocab_size": 100,
        "attention": Attention(num_heads=4, num_kv_heads=2, head_dim=16),
        "feed_forward": FeedForward(hidden_size=96),
    }
    return ModelSpec.model_validate({**base, **fields})
