"""Activations and logits of parallel, sandwiched, sparse and predicting layers, per token."""

from typing import Any

import pytest

from planner.cost.memory import activation_bytes, memory
from planner.cost.problem import Problem
from planner.cost.shares import block_share, rank_parameters
from planner.model.blocks import block_parameters, parameter_count
from planner.model.spec import ModelSpec
from tests.unit.problems import problem, row

# As test_memory's: two norms' inputs and outputs, heads of grouped queries, a gated feed-forward.
H, V, F = 96, 1000, 320
NORMS, HEADS = 8 * H, 4 * 8 * 16 + 4 * 4 * 16 + 4 * 8
LAYER = NORMS + HEADS + 6 * F
# Two norms' inputs, what they put together, and the norm before the head: input and output.
PREDICTING = 4 * H + 4 * H + 4 * H


def narrow(
    pipelines: tuple[tuple[int, int], ...] = ((1, 1),),
    training: dict[str, Any] | None = None,
    **fields: Any,
) -> Problem:
    document: dict[str, Any] = {
        "name": "narrow",
        "source": "test",
        "num_layers": 4,
        "hidden_size": H,
        "vocab_size": V,
        "attention": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
        "feed_forward": {"hidden_size": F},
    }
    model = ModelSpec.model_validate(document | fields)
    return problem(model, pipelines=pipelines, **{"seq_len": 1024, **(training or {})})


WINDOW = {"window": {"size": 8, "layers": (0,)}}


@pytest.mark.parametrize(
    ("fields", "kind", "recompute", "per_token"),
    [
        ({}, "dense", "none", LAYER),
        (WINDOW, "dense_window", "none", LAYER),
        # one input of both halves, and one norm's or two norms' outputs
        ({"parallel_attention": True}, "dense", "none", LAYER - 2 * H),
        ({"parallel_attention": True, "layer_norms": 1}, "dense", "none", LAYER - 4 * H),
        ({"parallel_attention": True, "layer_norms": 1}, "dense", "selective", LAYER - 6 * H),
        # a norm behind each half keeps its input alone
        ({"layer_norms": 4}, "dense", "none", LAYER + 4 * H),
        ({"layer_norms": 4}, "dense", "full", 2 * H),
        ({"num_mtp_modules": 1}, "mtp", "none", LAYER + PREDICTING),
        ({"num_mtp_modules": 1}, "mtp", "full", 2 * H + PREDICTING - 4 * H),
    ],
)
def test_activations_per_token(fields: Any, kind: Any, recompute: str, per_token: int) -> None:
    base = narrow(**fields)
    kept = activation_bytes(base, row(recompute=recompute), kind)[0]
    assert kept == 1024 * per_token
    shared = row(recompute=recompute, tp=4, cp=2, sequence_parallel=True, micro_batch_size=2)
    assert activation_bytes(base, shared, kind)[0] == pytest.approx(1024 * 2 / 8 * per_token)


def test_an_indexer_keeps_its_heads_and_what_they_read_whole() -> None:
    latent: dict[str, Any] = {
        "kind": "mla", "num_heads": 8, "q_lora_rank": 40, "kv_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    }  # fmt: skip
    indexer = {"num_heads": 4, "head_dim": 16, "top_k": 64}
    plain, sparse = narrow(attention=latent), narrow(attention={**latent, "indexer": indexer})

    def more(**degrees: Any) -> float:
        one = row(**degrees)
        both = (activation_bytes(base, one, "dense")[0] for base in (sparse, plain))
        return next(both) - next(both)

    heads = 2 * (4 * (16 + 1) + 16)
    assert more() == 1024 * heads
    # every rank of tp has all heads and, gathered, both inputs
    assert more(tp=4, sequence_parallel=True) == 1024 * (heads + 2 * (H + 40))
    indexed = block_parameters(sparse.model, "dense")
    share = block_share(sparse, row(tp=4), "dense")[0][0]
    split = indexed.attention + indexed.feed_forward
    assert share == split / 4 + indexed.whole + indexed.replicated


def test_every_module_for_multi_token_prediction_has_logits_beside_the_head() -> None:
    base = narrow(((2, 1),), num_mtp_modules=2)
    held = memory(base, row(pp=2, tp=2)).logits_bytes[0]
    assert sorted(held) == [0.0, 3 * 1024 * V * (2 + 2 * 4) / 2]


@pytest.mark.parametrize(("tied", "copies"), [(False, 1), (True, 1)])
def test_the_last_stage_has_one_copy_of_the_embedding(tied: bool, copies: int) -> None:
    """However many modules look tokens up in it; a tied head is that copy."""
    base = narrow(((1, 1), (2, 1)), num_mtp_modules=2, tied_embeddings=tied)
    module = 2 * block_parameters(base.model, "mtp").total()
    whole = parameter_count(base.model) + module
    assert rank_parameters(base, row())[0].sum() == whole
    held = rank_parameters(base, row(pp=2, split=1))[0].sum()
    assert held == whole + copies * H * V


def test_every_layer_must_hold_what_the_most_uneven_one_receives() -> None:
    """One hot layer of four takes as much as four hot ones; their mean would be less."""
    experts = {"num_experts": 4, "top_k": 1, "expert_hidden_size": 64}
    even, hot = (1, 1, 1, 1), (5, 1, 1, 1)

    def kept(*counts: tuple[int, ...]) -> float:
        training = {"expert_load": {"counts": counts}}
        base = narrow(training=training, experts=experts, moe_layers=(0, 1, 2, 3))
        return float(activation_bytes(base, row(ep=4, dp_shard=4), "moe")[0])

    worst = kept(hot, hot, hot, hot)
    assert kept(hot, even, even, even) == worst > kept(even, even, even, even)


def test_a_module_for_multi_token_prediction_is_one_more_layer_to_offload() -> None:
    training = {"offload": ("activations",), "offload_layers": 4}
    whole = memory(narrow(num_mtp_modules=1), row()).activations_bytes[0, 0]
    left = memory(narrow(training=training, num_mtp_modules=1), row()).activations_bytes[0, 0]
    assert left == pytest.approx(whole / 5)
