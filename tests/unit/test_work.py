"""What a step does, against published volumes and flop counts (bytes received per rank)."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest

from planner.cost.problem import Problem
from planner.cost.work import (
    BLOCK_COLUMNS,
    KEPT_IN_16_BITS,
    AttentionCore,
    Communication,
    Gemm,
    Launches,
    MemoryBound,
    Op,
    block_work,
    rank_work,
    routed_rows,
    stage_send,
)
from planner.layout.candidates import Candidates, concatenate
from planner.model.blocks import (
    BlockKind,
    block_kinds,
    block_parameters,
    model_flop_per_token,
    num_blocks,
    parameter_count,
)
from planner.model.bundled import load_model, model_names
from planner.model.spec import Attention, FeedForward, MixtureOfExperts, ModelSpec
from planner.plan import Axis, ExpertCapacity, Framework, Phase
from planner.routing import expert_capacity
from tests.unit.problems import problem, row


def received_bytes(ops: list[Op], candidate: Candidates, axis: Axis) -> float:
    """Return bytes that a rank receives on an axis: S (n-1)/n, twice for all_reduce."""
    n = candidate.layout(0).degree(axis)
    passes = {"all_reduce": 2 * (n - 1) / n, "send_recv": 1.0}
    return sum(
        float(op.size_bytes[0] * op.repeats[0]) * passes.get(op.op, (n - 1) / n)
        for op in ops
        if isinstance(op, Communication) and op.axis == axis
    )


FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


def dense(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "oracle",
        "source": "test",
        "num_layers": 2,
        "hidden_size": 4096,
        "vocab_size": 32000,
        "attention": Attention(num_heads=32, num_kv_heads=8, head_dim=128),
        "feed_forward": FeedForward(hidden_size=14336),
    }
    return ModelSpec(**{**fields, **changes})


def oracle(**training: Any) -> Problem:
    return problem(dense(), **training)


# Korthikanti et al. 2205.05198; arithmetic for tp 8, s 8192, h 4096, bf16.
@pytest.mark.parametrize(("sequence_parallel", "expected_mb"), [(False, 469.8), (True, 587.2)])
def test_tensor_parallel_volume_per_layer(sequence_parallel: bool, expected_mb: float) -> None:
    one = row(tp=8, sequence_parallel=sequence_parallel)
    received = received_bytes(block_work(oracle(), one, "dense"), one, "tp")
    assert received / 1e6 == pytest.approx(expected_mb, abs=0.05)


def test_full_recompute_adds_a_forward_of_tensor_parallel_volume() -> None:
    plain, redone = row(tp=8), row(tp=8, recompute="full")
    once, again = (
        received_bytes(block_work(oracle(), one, "dense"), one, "tp") for one in (plain, redone)
    )
    assert again == pytest.approx(1.5 * once)


def test_context_parallel_ring_volume() -> None:
    """CP 8, s 131072, 8 key/value heads of 128: forward 469.8 MB; forward and backward 3 times."""
    one = row(cp=8)
    work = block_work(oracle(seq_len=131072), one, "dense")
    forward = [op for op in work if op.phase == "forward"]
    assert received_bytes(forward, one, "cp") / 1e6 == pytest.approx(469.8, abs=0.05)
    assert received_bytes(work, one, "cp") / 1e6 == pytest.approx(3 * 469.8, abs=0.2)


@pytest.mark.parametrize("ep", [2, 8, 64])
def test_expert_parallel_volume_is_four_exchanges_of_top_k_copies(ep: int) -> None:
    moe = problem("deepseek-v3", seq_len=4096)
    one = row(ep=ep, dp_shard=ep)
    work = block_work(moe, one, "moe")
    counts = received_bytes([op for op in work if op.name == "ep_counts"], one, "ep")
    received = received_bytes(work, one, "ep") - counts
    assert received == pytest.approx(4 * 4096 * 8 * (ep - 1) / ep * 7168 * 2)
    assert counts == (256 + ep) * 8 * (ep - 1) / ep


@pytest.mark.parametrize("mode", ["none", "full"])
def test_rows_are_counted_once_in_the_forward_and_never_again(mode: str) -> None:
    """Experts and ranks in int64; backward and recompute replay the forward's plan."""
    sent = 8192 * 2 * 4096 * 2
    found = calls(
        block_work(problem("mixtral-8x7b"), row(ep=4, dp_shard=4, recompute=mode), "moe"), "ep"
    )
    exchanges = {
        f"{phase} {name}": ("all_to_all", 1, sent)
        for phase in ("forward", "backward", *(("recompute",) if mode == "full" else ()))
        for name in ("ep_dispatch", "ep_combine")
    }
    assert found == {"forward ep_counts": ("all_to_all", 1, (8 + 4) * 8), **exchanges}
    alone = block_work(problem("mixtral-8x7b"), row(), "moe")
    assert named(alone, "forward", "ep_counts").repeats[0] == 0


PADDED = ExpertCapacity(factor=1.25, convention="deepspeed", min_capacity=4, alignment=8)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 4, 1), (2, 8, 1), (4, 2, 4)])
def test_padded_experts_take_their_capacity_from_every_rank(tp: int, ep: int, etp: int) -> None:
    """4 E C (e-1)/e h bytes, sent even when empty; no counts (GShard, 2006.16668)."""
    base = problem("mixtral-8x7b", expert_capacity=PADDED)
    one = row(tp=tp, ep=ep, etp=etp, dp_shard=8, sequence_parallel=tp > 1)
    capacity = expert_capacity(8192 // tp, 8, 2, 1.25, "deepspeed", 4, 8)
    work = block_work(base, one, "moe")
    received = received_bytes(work, one, "ep")
    assert received == pytest.approx(4 * 8 * capacity * (ep - 1) / ep * 4096 * 2)
    assert named(work, "forward", "ep_counts").repeats[0] == 0
    up = named(work, "forward", "experts_up")
    assert up.experts is not None
    assert (up.m[0], up.experts.num_local[0]) == (ep * etp * capacity, 8 / ep)
    assert named(work, "forward", "permute").num_bytes[0] == 4 * 8 * capacity * 4096 * 2
    width = 14336  # gated: two read, one written
    assert named(work, "forward", "expert_activation").num_bytes[0] == (
        3 * 8 * capacity * width * 2
    )


def test_capacity_rows_are_of_each_candidates_own_tokens() -> None:
    """Columns of different micro-batches price what each costs alone."""
    base = problem("mixtral-8x7b", expert_capacity=PADDED)
    both = concatenate([row(micro_batch_size=2), row(), row(cp=4), row()])
    found = routed_rows(base, both)
    expected = [8 * expert_capacity(n, 8, 2, 1.25, "deepspeed", 4, 8) for n in (16384, 8192, 2048)]
    assert found.tolist() == [*expected, expected[1]]


def test_gathering_keys_and_values_moves_what_the_ring_moves() -> None:
    """CP 8, s 131072: one all_gather forward, another and a reduce_scatter backward (Llama 3)."""
    base = oracle(seq_len=131072)
    ring, gather = row(cp=8), row(cp=8, context_exchange="all_gather")
    whole = 131072 * 2 * 8 * 128 * 2
    work = block_work(base, gather, "dense")
    assert calls(work, "cp") == {
        "forward cp_gather": ("all_gather", 1, whole),
        "backward cp_gather": ("all_gather", 1, whole),
        "backward cp_scatter": ("reduce_scatter", 1, whole),
    }
    assert received_bytes(work, gather, "cp") == pytest.approx(
        received_bytes(block_work(base, ring, "dense"), ring, "cp")
    )
    redone = row(cp=8, context_exchange="all_gather", recompute="full")
    again = calls(block_work(base, redone, "dense"), "cp", "recompute")
    assert again == {"recompute cp_gather": ("all_gather", 1, whole)}


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_one_context_rank_exchanges_nothing(exchange: str) -> None:
    assert not calls(block_work(oracle(), row(context_exchange=exchange), "dense"), "cp")


def test_the_executor_keeps_gathered_inputs_and_never_gathers_them_again() -> None:
    """8(t-1)/t s b h bytes as without sequence parallelism, and no quarter more."""
    one = row(tp=8, sequence_parallel=True)
    base = replace(oracle(), framework="executor")
    received = received_bytes(block_work(base, one, "dense"), one, "tp")
    assert received == pytest.approx(8 * 7 / 8 * 8192 * 4096 * 2)
    kinds: tuple[BlockKind, ...] = ("dense", "head")
    for kind in kinds:
        found = calls(block_work(base, one, kind), "tp", "weight_gradient")
        assert not found


@pytest.mark.parametrize(
    ("model", "kind", "part"),
    [
        ("llama3-8b", "dense", "ffn"),
        ("deepseek-v3", "moe", "shared_expert"),
        ("mixtral-8x7b", "moe", None),
    ],
)
def test_the_executors_recompute_ends_before_the_last_product(
    model: str, kind: Any, part: str | None
) -> None:
    """torch.utils.checkpoint stops when the backward has all it needs; Megatron goes on.

    Routed rows are weighted after they are back, and that needs them.
    """
    one = row(tp=4, ep=4, sequence_parallel=True, recompute="full")
    redone = {
        framework: {
            op.name
            for op in block_work(problem(model, framework=framework), one, kind)
            if op.phase == "recompute" and op.repeats[0] > 0
        }
        for framework in FRAMEWORKS
    }
    last = {f"{part}_down", f"{part}_tp_scatter"} if part else set()
    assert redone["megatron"] - redone["executor"] == last
    assert redone["executor"] < redone["megatron"] or part is None


def test_pipeline_send_shrinks_with_sequence_parallelism() -> None:
    middle = np.zeros(1)
    one = row(tp=8, pp=4, num_micro_batches=4)
    whole = stage_send(oracle(), one, middle)
    shard = stage_send(oracle(), replace(one, sequence_parallel=np.array([True])), middle)
    assert whole.size_bytes[0] == 8192 * 4096 * 2
    assert shard.size_bytes[0] == whole.size_bytes[0] / 8
    assert whole.repeats[0] == 2 * 4


# Bytes received per optimizer step over the parameters of a rank, times (n-1)/n; bf16 weights
# (2 bytes), fp32 gradients (4): ZeRO paper (1910.02054), per micro-batch for stages 2 and 3.
@pytest.mark.parametrize(
    ("zero", "per_parameter"), [(0, 2 * 4), (1, 4 + 2), (2, 4 * 3 + 2), (3, 3 * (2 + 2 + 4))]
)
def test_data_parallel_volume(zero: int, per_parameter: float) -> None:
    n, m = 8, 3
    sharded = {"dp_shard": n} if zero else {"dp_replicate": n}
    one = row(num_micro_batches=m, zero_stage=zero, **sharded)
    base = oracle()
    axis: Axis = "dp_shard_cp" if zero else "dp_cp"
    received = received_bytes(rank_work(base, one), one, axis)
    expected = per_parameter * parameter_count(base.model) * (n - 1) / n
    padding = per_parameter * n * rank_calls(base, one, "gradient")
    assert received == pytest.approx(expected, rel=1e-12, abs=padding)


def rank_calls(base: Problem, candidate: Candidates, name: str) -> float:
    """Return how often a rank sends gradients in buckets."""
    return sum(
        float(op.repeats[0])
        for op in rank_work(base, candidate)
        if isinstance(op, Communication) and op.name.startswith(name) and op.unit is None
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_hybrid_sharding_reduces_shards_over_replicas_once(zero: int) -> None:
    one = row(dp_shard=4, dp_replicate=2, zero_stage=zero, num_micro_batches=3)
    base = oracle()
    received = received_bytes(rank_work(base, one), one, "dp_replicate")
    expected = 2 * 1 / 2 * 4 * parameter_count(base.model) / 4
    assert received == pytest.approx(expected, abs=4 * rank_calls(base, one, "gradient"))


# ------------------------------------------------------------------------------ units of FSDP

LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
EMBEDDING, HEAD = 4096 * 32000, 4096 * 32000 + 4096


def units(work: list[Op]) -> dict[str, tuple[str, str, float, float]]:
    """Return (axis, collective, repeats, S) of what is sent block by block."""
    return {
        f"{op.unit} {op.phase} {op.name}": (
            op.axis,
            op.op,
            float(op.repeats[0]),
            float(op.size_bytes[0]),
        )
        for op in work
        if isinstance(op, Communication) and op.unit is not None and op.repeats[0] > 0
    }


def test_zero_3_sends_every_unit_in_every_micro_batch() -> None:
    """A gather before forward and backward, a scatter after it: FSDP2 (2304.11277), bf16 + fp32."""
    one = row(tp=2, dp_shard=4, zero_stage=3, num_micro_batches=3, sequence_parallel=True)
    norms = 2 * 4096
    expected = {}
    for kind, count, params in (
        ("embedding", 1, EMBEDDING / 2),
        ("dense", 2, (LAYER - norms) / 2 + norms),
        ("head", 1, 4096 * 32000 / 2 + 4096),
    ):
        for call, op, size in (
            ("forward parameter_gather", "all_gather", 2 * params),
            ("backward parameter_regather", "all_gather", 2 * params),
            ("backward gradient_scatter", "reduce_scatter", 4 * params),
        ):
            expected[f"{kind} {call}"] = ("dp_shard_cp", op, 3 * count, size)
    work = rank_work(oracle(), one)
    assert units(work) == expected
    assert rank_calls(oracle(), one, "parameter") == 0


def test_zero_2_gathers_once_and_zero_1_has_no_units() -> None:
    two = units(rank_work(oracle(), row(dp_shard=4, zero_stage=2, num_micro_batches=3)))
    assert two["dense forward parameter_gather"][2] == 2
    assert two["dense backward gradient_scatter"][2] == 3 * 2
    assert not [name for name in two if "regather" in name]
    assert not units(rank_work(oracle(), row(dp_shard=4, zero_stage=1, num_micro_batches=3)))


def test_tied_ends_on_one_rank_are_one_unit() -> None:
    """torch.distributed.fsdp: modules that share parameters belong to one call of fully_shard."""
    base = problem(dense(tied_embeddings=True), pipelines=((1, 1), (2, 1)))
    found = units(rank_work(base, row(dp_shard=4, zero_stage=3)))
    assert {name.split()[0] for name in found} == {"embedding", "dense"}
    gather = ("dp_shard_cp", "all_gather", 1, 2 * HEAD)
    assert found["embedding forward parameter_gather"] == gather
    last = units(rank_work(base, row(pp=2, split=1, dp_shard=4, zero_stage=3)))
    assert last["head forward parameter_gather"] == gather


def test_experts_are_a_unit_of_their_own_ranks() -> None:
    one = row(ep=2, dp_shard=8, zero_stage=3, num_micro_batches=5)
    found = units(rank_work(problem("mixtral-8x7b"), one))
    experts = 8 / 2 * 3 * 4096 * 14336
    rest = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096
    calls = 5 * 32
    assert found["moe forward expert_parameter_gather"] == ("edp", "all_gather", calls, 2 * experts)
    assert found["moe backward expert_gradient_scatter"] == (
        ("edp", "reduce_scatter", calls, 4 * experts)
    )
    assert found["moe backward parameter_regather"] == (
        ("dp_shard_cp", "all_gather", calls, 2 * rest)
    )


def test_only_the_first_unit_of_a_pass_has_nothing_to_hide_under() -> None:
    """Forward the embedding first; backward the head first, the embedding's gradients last."""

    def exposed(base: Problem, pp: int) -> dict[str, set[str]]:
        one = row(pp=pp, dp_shard=2, zero_stage=3, num_micro_batches=8)
        found: dict[str, set[str]] = {}
        for op in rank_work(base, one):
            if isinstance(op, Communication) and op.unit and np.any(op.edges):
                found.setdefault(op.name, set()).add(op.unit)
        return found

    assert exposed(oracle(), 1) == {
        "parameter_gather": {"embedding"},
        "parameter_regather": {"head"},
        "gradient_scatter": {"embedding"},
    }
    last = problem(dense(), pipelines=((2, 1),))  # the fullest rank has one layer and the head
    assert exposed(last, 2) == {
        "parameter_gather": {"dense"},
        "parameter_regather": {"head"},
        "gradient_scatter": {"dense"},
    }


# --------------------------------------------------------------- gradients partial over tp


@pytest.mark.parametrize(
    ("model", "params"),
    [
        ("llama3-8b", 32 * 2 * 4096 + 4096),
        ("mixtral-8x7b", 32 * (2 * 4096 + 8 * 4096) + 4096),
        # norms of one head's queries and keys; router
        ("qwen3-30b-a3b", 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048),
        # down-projections with their norms; router in 58 of 61 layers
        # of which one layer more and three norms for multi-token prediction
        (
            "deepseek-v3",
            62 * (2 * 7168 + 1536 * 7169 + 512 * 7169 + 64 * 7168)
            + (58 + 1) * 256 * 7168
            + (1 + 3) * 7168,
        ),
        # norms with biases; biases behind attention and feed-forward
        ("gpt3-175b", 96 * (4 * 12288 + 2 * 12288) + 2 * 12288),
    ],
)
def test_what_sees_its_own_tokens_alone_is_summed_over_tp(model: str, params: int) -> None:
    base = problem(model, seq_len=2048)
    work = rank_work(base, row(tp=2, sequence_parallel=True, num_micro_batches=4))
    assert calls(work, "tp", "step") == {
        "step sequence_parallel_gradient_reduce": ("all_reduce", 1, 4 * params)
    }
    assert not calls(rank_work(base, row(tp=2)), "tp", "step")
    sharded = rank_work(base, row(tp=2, sequence_parallel=True, dp_shard=4, zero_stage=3))
    (call,) = calls(sharded, "tp", "step").values()
    assert call == ("all_reduce", 1, params)
    first = rank_work(base, row(tp=2, sequence_parallel=True, dp_shard=4, zero_stage=1))
    assert calls(first, "tp", "step") == calls(work, "tp", "step")


def matmul_flop(ops: list[Op]) -> float:
    return sum(
        float(op.flop[0] * op.repeats[0]) for op in ops if isinstance(op, Gemm | AttentionCore)
    )


def core_flop(ops: list[Op]) -> float:
    return sum(
        float(op.flop[0] * op.repeats[0])
        for op in ops
        if isinstance(op, AttentionCore) and op.phase == "forward"
    )


# One of each thing that a layer can have, at sizes that tell apart what is swapped.
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
NARROW: dict[str, Any] = {
    "name": "narrow",
    "source": "test",
    "num_layers": 4,
    "hidden_size": 96,
    "vocab_size": 1000,
    "attention": HEADS,
    "feed_forward": {"hidden_size": 320},
}
EXPERTS = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 48, "shared_hidden_size": 80}
WINDOW = {"size": 64, "layers": (0, 3)}
LATENT = {
    "kind": "mla", "num_heads": 8, "q_lora_rank": 40, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
SPARSE = {**LATENT, "indexer": {"num_heads": 4, "head_dim": 16, "top_k": 64}}
VARIANTS: dict[str, dict[str, Any]] = {
    "windowed": {"window": WINDOW},
    "chunked": {"window": {**WINDOW, "kind": "chunked"}},
    "windowed experts": {"experts": EXPERTS, "moe_layers": (1, 3), "window": WINDOW},
    "residual experts": {
        "experts": {**EXPERTS, "shared_mix": "coefficients"}, "moe_layers": (0, 1, 2, 3),
    },
    "parallel": {"parallel_attention": True, "layer_norms": 1},
    "predicting": {"num_mtp_modules": 2, "tied_embeddings": True},
    "sparse": {"attention": SPARSE, "num_mtp_modules": 1},
}  # fmt: skip


def narrow(variant: str, **training: Any) -> Problem:
    model = ModelSpec.model_validate({**NARROW, **VARIANTS[variant]})
    pipelines = ((1, 1), (2, 1))
    return problem(model, pipelines=pipelines, **{"seq_len": 1024, **training})


@pytest.mark.parametrize("packing", [None, {"lengths": [512, 100], "counts": [1, 5]}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_flop_of_a_step_is_the_models_whatever_its_layers_are(variant: str, packing: Any) -> None:
    base = narrow(variant, packing=packing)
    total = cores = 0.0
    for kind, number in num_blocks(base.model).items():
        ops = block_work(base, row(micro_batch_size=2), kind)
        total += number * matmul_flop(ops)
        cores += number * core_flop(ops)
    expected = 2 * 1024 * model_flop_per_token(base.model, 1024, base.training.packing)
    assert total - 0.5 * cores == pytest.approx(expected, rel=1e-9)


def core(base: Problem, kind: BlockKind, **degrees: Any) -> AttentionCore:
    op = named(block_work(base, row(**degrees), kind), "forward", "attention_core")
    assert isinstance(op, AttentionCore)
    return op


def test_a_windowed_kernel_runs_like_one_over_twice_the_window() -> None:
    """A query of a causal sequence sees half of it; with a window, the window."""
    base = narrow("windowed")
    full, windowed = core(base, "dense"), core(base, "dense_window")
    seen = 64 - 64**2 / 2 / 1024
    assert windowed.flop / full.flop == pytest.approx(seen / 512)
    assert windowed.seq_len == pytest.approx(2 * seen)
    for kernel in (full, windowed):  # all queries of all heads
        assert kernel.seq_len * kernel.batch * kernel.num_heads == pytest.approx(1024 * 8)
    halved = core(base, "dense_window", cp=2, tp=4)
    assert halved.flop == pytest.approx(windowed.flop / 8)
    assert halved.seq_len == pytest.approx(windowed.seq_len / 2)


def test_packed_documents_are_priced_at_the_flop_weighted_mean_length() -> None:
    base = narrow("windowed", packing={"lengths": [1024, 128], "counts": [1, 8]})
    whole = narrow("windowed")
    packed = core(base, "dense")
    squares = 1024**2 + 8 * 128**2
    assert packed.flop == pytest.approx(core(whole, "dense").flop * squares / 2048 / 1024)
    assert packed.seq_len == pytest.approx((1024**3 + 8 * 128**3) / squares)
    assert packed.seq_len * packed.batch * packed.num_heads == pytest.approx(1024 * 8)
    shorter, longer = core(base, "dense_window"), core(whole, "dense_window")
    assert shorter.flop < longer.flop


def test_layers_of_both_kinds_differ_in_attention_alone() -> None:
    base = narrow("windowed experts")
    for full, windowed in (("dense", "dense_window"), ("moe", "moe_window")):
        pair = [block_work(base, row(tp=2, sequence_parallel=True), k) for k in (full, windowed)]  # type: ignore[arg-type]
        for one, other in zip(*pair, strict=True):
            assert one.name == other.name
            if not isinstance(one, AttentionCore):
                assert one == other


def test_side_by_side_halves_share_their_collectives() -> None:
    """Attention and feed-forward of one input: one gather and one scatter in each direction."""
    one = row(tp=4, sequence_parallel=True)
    base = narrow("parallel")
    both = narrow("windowed")
    size = 1024 * 96 * 2
    work = block_work(base, one, "dense")
    assert calls(work, "tp") == {
        "forward attention_tp_gather": ("all_gather", 1, size),
        "forward ffn_tp_scatter": ("reduce_scatter", 1, size),
        "backward attention_tp_gather": ("all_gather", 1, size),
        "backward ffn_tp_scatter": ("reduce_scatter", 1, size),
        "weight_gradient attention_tp_regather": ("all_gather", 1, size),
    }
    apart = received_bytes(block_work(both, one, "dense"), one, "tp")
    assert received_bytes(work, one, "tp") == pytest.approx(apart / 2)
    whole = calls(block_work(base, row(tp=4), "dense"), "tp")
    assert set(whole) == {"forward ffn_tp_reduce", "backward ffn_tp_reduce"}
    # one norm reads and writes; the input and both halves are read and the sum written
    assert named(work, "forward", "norms").num_bytes[0] == 2 * size / 4
    assert named(work, "forward", "residual").num_bytes[0] == 4 * size / 4


def test_multi_token_prediction_is_a_projection_a_layer_and_the_ends_once_more() -> None:
    one = row(tp=2, sequence_parallel=True)
    base = narrow("predicting")
    module = block_work(base, one, "mtp")
    parts = [block_work(base, one, kind) for kind in ("embedding", "dense", "head")]
    own = [op for op in module if op.name.startswith("mtp_")]
    # 512 tokens on a rank, norms of 2 x 96 wide; 2h is gathered, h joined; then as a layer
    issued = [op for kind in (module, *parts) for op in kind if isinstance(op, Launches)]
    assert len(module) == len(own) + sum(map(len, parts)) - (len(issued) - 2 * 3)
    size = 1024 * 96 * 2
    assert calls(own, "tp") == {
        "forward mtp_tp_gather": ("all_gather", 1, 2 * size),
        "forward mtp_tp_join": ("all_gather", 1, size),
        "backward mtp_tp_gather": ("all_gather", 1, 2 * size),
        "backward mtp_tp_join": ("all_gather", 1, size),
        "weight_gradient mtp_tp_regather": ("all_gather", 1, 2 * size),
    }
    product = named(own, "forward", "mtp_projection")
    assert (product.m[0], product.n[0], product.k[0]) == (1024, 48, 192)
    assert named(module, "forward", "head").flop == named(parts[2], "forward", "head").flop


def test_the_last_stage_exchanges_the_embedding_of_multi_token_prediction() -> None:
    """As with tied embeddings: h * V, once per step, between first and last stage."""
    base = narrow("sparse")
    both = rank_work(base, row(pp=2, split=1, schedule="1f1b", num_micro_batches=2))
    alone = rank_work(base, row())
    assert named(both, "step", "tied_embedding").repeats[0] == 1
    assert named(both, "step", "tied_embedding").size_bytes[0] == 96 * 1000 * 4
    assert named(alone, "step", "tied_embedding").repeats[0] == 0


def test_an_indexer_runs_whole_on_every_tensor_parallel_rank() -> None:
    one = row(tp=2, sequence_parallel=True)
    work = block_work(narrow("sparse"), one, "dense")
    query, key = (named(work, "forward", f"indexer_{part}") for part in "qk")
    assert (query.m[0], query.n[0], query.k[0]) == (1024, 4 * 16, 40)
    assert (key.m[0], key.n[0], key.k[0]) == (1024, 16 + 4, 96)
    joined = calls([op for op in work if op.name.startswith("indexer")], "tp")
    assert joined == {
        f"{phase} indexer_tp_join": ("all_gather", 1, 1024 * (96 + 40) * 2)
        for phase in ("forward", "backward")
    }


def test_sharded_units_of_every_kind_have_one_first_and_one_last() -> None:
    """FSDP gathers before the first block and scatters after the last beside nothing, once each."""
    for variant in VARIANTS:
        work = rank_work(narrow(variant), row(dp_shard=4, zero_stage=3))
        for name in ("parameter_gather", "parameter_regather", "gradient_scatter"):
            for prefix in ("", "expert_"):
                found = [
                    op
                    for op in work
                    if isinstance(op, Communication)
                    and op.name == prefix + name
                    and op.phase != "step"  # buckets, of ZeRO-1
                ]
                edges = sum(float(np.max(op.edges)) for op in found)
                assert edges == (1 if found else 0), (variant, prefix + name)
                assert bool(found) == (prefix == "" or "experts" in variant)


@pytest.mark.parametrize("name", [n for n in model_names() if n != "example-gpt"])
def test_flop_of_a_step_is_the_models(name: str) -> None:
    """Forward and both gradients of all blocks: 6 per active weight, plus attention cores.

    The fused backward redoes the scores: 2.5 instead of 2 forward passes, and that half pass is
    no model flop.
    """
    base = problem(name, seq_len=2048)
    one = row()
    total = cores = 0.0
    for kind, number in num_blocks(base.model).items():
        ops = block_work(base, one, kind)
        total += number * matmul_flop(ops)
        cores += number * core_flop(ops)
    expected = 2048 * model_flop_per_token(base.model, 2048)
    assert total - 0.5 * cores == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (8, 1), (1, 4), (4, 2)])
def test_degrees_share_out_the_flop_of_a_layer(tp: int, cp: int) -> None:
    base = oracle()
    whole = matmul_flop(block_work(base, row(), "dense"))
    shared = matmul_flop(block_work(base, row(tp=tp, cp=cp), "dense"))
    assert shared * tp * cp == pytest.approx(whole)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (1, 8, 1), (4, 8, 1), (4, 2, 4)])
def test_experts_share_out_their_flop(tp: int, ep: int, etp: int) -> None:
    """A rank's routed tokens are as many wherever the experts live: ep moves work, tp cuts it."""
    base = problem("mixtral-8x7b", seq_len=4096)

    def routed(**degrees: Any) -> float:
        ops = block_work(base, row(**degrees), "moe")
        return matmul_flop([op for op in ops if op.name.startswith("experts")])

    whole = routed()
    shared = routed(tp=tp, ep=ep, etp=etp, sequence_parallel=tp > 1)
    assert shared * tp == pytest.approx(whole)


def test_full_recompute_is_one_more_forward() -> None:
    base = oracle()
    plain = matmul_flop(block_work(base, row(), "dense"))
    forward = matmul_flop([op for op in block_work(base, row(), "dense") if op.phase == "forward"])
    redone = matmul_flop(block_work(base, row(recompute="full"), "dense"))
    assert redone == pytest.approx(plain + forward)


def test_block_work_reads_only_the_columns_it_is_priced_on() -> None:
    class Watched:
        def __init__(self, columns: Candidates) -> None:
            self.columns, self.read = columns, set[str]()

        def __len__(self) -> int:
            return len(self.columns)

        def __getattr__(self, name: str) -> Any:
            self.read.add(name)
            return getattr(self.columns, name)

    trainings: tuple[dict[str, Any], ...] = (
        {},
        {"main_grads": "both", "fused_kernels": False},
        {"precision": "fp8", "fused_attention": False, "dropout": True},
    )
    for name, training in product(("llama3-8b", "example-gpt", "deepseek-v3"), trainings):
        base = problem(name, **training)
        base = replace(base, model=base.model.model_copy(update={"tied_embeddings": True}))
        for kind in block_kinds(base.model):
            watched = Watched(row(tp=2, sequence_parallel=True))
            block_work(base, watched, kind)  # type: ignore[arg-type]
            assert watched.read <= set(BLOCK_COLUMNS), kind


@pytest.mark.parametrize(
    ("precision", "main_grads", "fused", "num_bytes"),
    [
        ("bf16", "fp32", True, 0),  # in the product's own kernel
        ("bf16", "fp32", False, 2 + 2 * 4),
        ("bf16", "both", True, 2 + 2 * 4),
        ("bf16", "same", True, 2 + 2 * 2),
        ("fp16", "both", True, 2 + 2 * 2),  # copied to fp32 once a step
    ],
)
def test_gradients_are_read_and_their_sum_read_and_written_for_every_parameter(
    precision: str, main_grads: str, fused: bool, num_bytes: int
) -> None:
    base = problem("mixtral-8x7b", precision=precision, main_grads=main_grads, fused_kernels=fused)
    summed = [op for op in block_work(base, row(), "moe") if op.name == "gradient_accumulation"]
    params = block_parameters(base.model, "moe").total()
    assert sum(float(op.num_bytes[0]) for op in summed if isinstance(op, MemoryBound)) == (
        pytest.approx(num_bytes * params)
    )


def test_every_product_below_16_bits_casts_its_left_operand_in_a_kernel() -> None:
    ops = block_work(problem("mixtral-8x7b", precision="fp8"), row(), "moe")
    for phase in ("forward", "backward"):
        cast = [
            op
            for op in ops
            if isinstance(op, Gemm) and op.phase == phase and op.name not in KEPT_IN_16_BITS
        ]
        [casts] = [op for op in ops if op.name == "casts" and op.phase == phase]
        assert isinstance(casts, MemoryBound)
        assert casts.num_kernels == len(cast) == 4  # qkv, out, both of the experts
        elements = sum(
            float((op.m * op.k * (1 if op.experts is None else op.experts.num_local))[0])
            for op in cast
        )
        assert casts.num_bytes[0] == pytest.approx((2 + 2 * 1) * elements)


def test_each_local_expert_s_product_is_a_launch() -> None:
    def issued(ep: int) -> float:
        ops = block_work(problem("mixtral-8x7b"), row(ep=ep, dp_shard=8), "moe")
        [forward] = [op for op in ops if isinstance(op, Launches) and op.phase == "forward"]
        calls = 3 * (ep > 1)  # counts, there and back
        return float(forward.num_kernels[0]) - calls

    assert issued(1) - issued(8) == 2 * (8 - 1)


def test_an_op_that_does_not_occur_has_zero_repeats_and_never_a_missing_row() -> None:
    base = problem("mixtral-8x7b")
    both = row().take(np.array([0, 0]))
    for op in block_work(base, both, "moe"):
        assert np.broadcast_shapes(np.shape(op.repeats), (2,)) == (2,)
    names = {op.name for op in block_work(base, row(), "moe")}
    assert names == {op.name for op in block_work(base, row(tp=2, sequence_parallel=True), "moe")}


def test_experts_without_ep_need_no_exchange() -> None:
    model = dense(
        experts=MixtureOfExperts(num_experts=4, top_k=2, expert_hidden_size=512),
        moe_layers=(0, 1),
    )
    base = problem(model)
    one = row()
    assert received_bytes(block_work(base, one, "moe"), one, "ep") == 0.0


# ------------------------------------------------------------------ experts and their groups

# Mixtral 8x7B (2401.04088): 32 layers of 8 gated experts, h 4096, width 14336.
MIXTRAL_EXPERTS = 32 * 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("zero", "per_parameter"), [(0, 2 * 4), (1, 4 + 2), (2, 4 * 3 + 2), (3, 3 * (2 + 2 + 4))]
)
def test_experts_are_reduced_over_their_own_ranks(zero: int, per_parameter: float) -> None:
    """8 ranks, ep 4: a quarter of the experts each, two copies; ZeRO volumes as for the dense."""
    m = 3
    degrees = {"dp_shard": 8} if zero else {"dp_replicate": 8}
    one = row(ep=4, num_micro_batches=m, zero_stage=zero, **degrees)
    base = problem("mixtral-8x7b")
    work = rank_work(base, one)
    share = MIXTRAL_EXPERTS / 4
    assert received_bytes(work, one, "edp") == pytest.approx(per_parameter * share / 2, rel=1e-7)
    whole: Axis = "dp_shard_cp" if zero else "dp_cp"
    not_experts = parameter_count(base.model) - MIXTRAL_EXPERTS
    expected = per_parameter * not_experts * 7 / 8
    assert received_bytes(work, one, whole) == pytest.approx(expected, rel=1e-6)


def test_a_dense_model_reduces_nothing_over_expert_ranks() -> None:
    assert not [op for op in rank_work(oracle(), row(dp_replicate=8)) if op.name[:6] == "expert"]


def named(ops: list[Op], phase: Phase, name: str) -> Any:
    """Return the only op with this name in the phase."""
    (found,) = [op for op in ops if (op.name, op.phase) == (name, phase)]
    return found


def calls(ops: list[Op], axis: Axis, *phases: Phase) -> dict[str, tuple[str, float, float]]:
    """Return (collective, repeats, S) of what happens on an axis, by "phase name"."""
    return {
        f"{op.phase} {op.name}": (op.op, float(op.repeats[0]), float(op.size_bytes[0]))
        for op in ops
        if isinstance(op, Communication) and op.axis == axis and op.repeats[0] > 0
        if op.phase in (phases or ("forward", "backward", "weight_gradient", "recompute"))
    }


def test_expert_tensor_parallelism_gathers_and_scatters_what_its_ranks_received() -> None:
    """tp 4: a rank owns T/4 tokens, sends 2 copies of each; etp 2: the group's rows together."""
    one = row(tp=4, ep=2, etp=2, sequence_parallel=True)
    received = 8192 / 4 * 2 * 4096 * 2
    found = calls(block_work(problem("mixtral-8x7b"), one, "moe"), "etp")
    assert found == {
        "forward etp_gather": ("all_gather", 1, 2 * received),
        "forward etp_scatter": ("reduce_scatter", 1, 2 * received),
        "backward etp_gather": ("all_gather", 1, 2 * received),
        "backward etp_scatter": ("reduce_scatter", 1, 2 * received),
    }
    without = row(tp=4, ep=2, sequence_parallel=True)
    assert not calls(block_work(problem("mixtral-8x7b"), without, "moe"), "etp")


def test_shared_experts_are_tensor_parallel() -> None:
    """Korthikanti et al. (2205.05198): gather, scatter, and the stored shards once more."""
    work = block_work(problem("deepseek-v3"), row(tp=4, sequence_parallel=True), "moe")
    size = 8192 * 7168 * 2
    found = {k: v for k, v in calls(work, "tp").items() if "shared_expert" in k}
    assert found == {
        "forward shared_expert_tp_gather": ("all_gather", 1, size),
        "forward shared_expert_tp_scatter": ("reduce_scatter", 1, size),
        "backward shared_expert_tp_gather": ("all_gather", 1, size),
        "backward shared_expert_tp_scatter": ("reduce_scatter", 1, size),
        "weight_gradient shared_expert_tp_regather": ("all_gather", 1, size),
    }
    none = block_work(problem("mixtral-8x7b"), row(tp=4, sequence_parallel=True), "moe")
    assert not [name for name in calls(none, "tp") if "shared_expert" in name]


# ------------------------------------------------------------------------- latent attention


def test_latent_attention_gathers_its_latent_and_scatters_hidden_states() -> None:
    """DeepSeek-V3 (2412.19437): query latent 1536, key/value latent 512, rotary key 64."""
    work = block_work(problem("deepseek-v3"), row(tp=8, sequence_parallel=True), "moe")
    gather = named(work, "forward", "attention_tp_gather")
    assert gather.size_bytes[0] == 8192 * (1536 + 512 + 64) * 2
    assert (
        named(work, "weight_gradient", "attention_tp_regather").size_bytes[0]
        == (gather.size_bytes[0])
    )
    assert named(work, "forward", "attention_tp_scatter").size_bytes[0] == 8192 * 7168 * 2


def test_latent_attention_without_a_query_latent_gathers_the_hidden_state() -> None:
    model = load_model("deepseek-v3")
    plain = model.attention.model_copy(update={"q_lora_rank": None})
    base = problem(model.model_copy(update={"attention": plain}))
    work = block_work(base, row(tp=8, sequence_parallel=True), "moe")
    size = named(work, "forward", "attention_tp_gather").size_bytes[0]
    assert size == 8192 * (7168 + 512 + 64) * 2


def test_the_ring_of_latent_attention_carries_whole_heads() -> None:
    """Keys 128 + 64 wide and values 128 wide of 128 heads, a quarter of them with tp 4."""
    one = row(tp=4, cp=2, sequence_parallel=True)
    work = block_work(problem("deepseek-v3"), one, "moe")
    size = 8192 / 2 * 128 * (128 + 64 + 128) / 4 * 2
    assert calls(work, "cp") == {
        "forward cp_ring": ("send_recv", 1, size),
        "backward cp_ring": ("send_recv", 2, size),
    }


def test_narrow_latent_products_run_on_the_ranks_own_tokens() -> None:
    work = block_work(problem("deepseek-v3"), row(tp=8, sequence_parallel=True), "moe")
    sizes = {
        name: tuple(int(getattr(named(work, "forward", name), d)[0]) for d in "mnk")
        for name in ("attention_q_down", "attention_kv_down", "attention_q", "attention_kv")
    }
    assert sizes == {
        "attention_q_down": (1024, 1536, 7168),
        "attention_kv_down": (1024, 512 + 64, 7168),
        "attention_q": (8192, 128 * 192 // 8, 1536),
        "attention_kv": (8192, 128 * 256 // 8, 512),
    }


# ------------------------------------------------------------------------------- both ends

HIDDEN = 8192 * 4096 * 2  # bytes of one micro-batch's hidden states


def test_the_embedding_reduces_partial_rows() -> None:
    """Each rank looks up its part of the vocabulary (1909.08053); shards with 2205.05198."""
    whole, shard = row(tp=4), row(tp=4, sequence_parallel=True)
    assert calls(block_work(oracle(), whole, "embedding"), "tp") == {
        "forward embedding_tp_reduce": ("all_reduce", 1, HIDDEN)
    }
    assert calls(block_work(oracle(), shard, "embedding"), "tp") == {
        "forward embedding_tp_scatter": ("reduce_scatter", 1, HIDDEN),
        "backward embedding_tp_gather": ("all_gather", 1, HIDDEN),
    }


def test_the_head_never_gathers_logits() -> None:
    """Maximum, target logit and sum of exponentials: 3 numbers per token in fp32 (Megatron-LM)."""
    double = calls(block_work(oracle(precision="fp64"), row(tp=4), "head"), "tp", "forward")
    assert double == {"forward loss_tp_reduce": ("all_reduce", 3, 8192 * 8)}
    loss = ("all_reduce", 3, 8192 * 4)
    whole, shard = row(tp=4), row(tp=4, sequence_parallel=True)
    assert calls(block_work(oracle(), whole, "head"), "tp") == {
        "forward loss_tp_reduce": loss,
        "backward head_tp_reduce": ("all_reduce", 1, HIDDEN),
    }
    assert calls(block_work(oracle(), shard, "head"), "tp") == {
        "forward head_tp_gather": ("all_gather", 1, HIDDEN),
        "forward loss_tp_reduce": loss,
        "weight_gradient head_tp_regather": ("all_gather", 1, HIDDEN),
        "backward head_tp_scatter": ("reduce_scatter", 1, HIDDEN),
    }


@pytest.mark.parametrize("kind", ["embedding", "dense", "head"])
def test_one_rank_alone_communicates_with_nobody(kind: Any) -> None:
    for op in block_work(oracle(), row(), kind):
        assert not isinstance(op, Communication) or op.repeats[0] == 0, op.name


def test_tied_embeddings_are_exchanged_between_first_and_last_stage() -> None:
    """Once per step, the fp32 gradient of this rank's part of the matrix (Megatron-LM)."""
    base = problem(dense(tied_embeddings=True), pipelines=((2, 1),))
    work = rank_work(base, row(tp=4, pp=2, num_micro_batches=8))
    assert calls(work, "pp", "step") == {
        "step tied_embedding": ("send_recv", 1, 4096 * 32000 / 4 * 4)
    }
    assert not calls(rank_work(base, row(tp=4, num_micro_batches=8)), "pp", "step")
    sharded = row(tp=4, pp=2, dp_shard=8, zero_stage=3, num_micro_batches=8)
    assert calls(rank_work(base, sharded), "pp", "step") == {
        "step tied_embedding": ("send_recv", 1, 4096 * 32000 / 4 / 8 * 4)
    }
    untied = problem(dense(), pipelines=((2, 1),))
    assert not calls(rank_work(untied, row(tp=4, pp=2)), "pp", "step")


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 4), (3, 2)])
def test_ranks_send_over_every_boundary_both_ways(pp: int, chunks: int) -> None:
    """Counted stage by stage: forward to the next stage, gradients to the one before."""
    m = 6
    one = row(pp=pp, virtual_stages=chunks, num_micro_batches=m)
    for rank in range(pp):
        stages = range(rank, pp * chunks, pp)
        sends = sum((stage < pp * chunks - 1) + (stage > 0) for stage in stages)
        ends = np.array([(0 in stages) + (pp * chunks - 1 in stages)])
        assert stage_send(oracle(), one, ends).repeats[0] == m * sends


# --------------------------------------------------------------- recompute, host, optimizer


def test_selective_recompute_redoes_norms_and_the_experts_activation_only() -> None:
    """Megatron-LM: --recompute-modules layernorm moe_act."""

    def redone(model: str, kind: Any, mode: str) -> set[str]:
        work = block_work(problem(model), row(recompute=mode), kind)
        sizes = [op for op in work if op.phase == "recompute" and op.repeats[0] > 0]
        empty = {op.name for op in sizes if isinstance(op, MemoryBound) and op.num_bytes[0] == 0}
        return {op.name for op in sizes if not isinstance(op, Launches)} - empty

    assert redone("llama3-8b", "dense", "selective") == {"norms"}
    assert redone("mixtral-8x7b", "moe", "selective") == {"norms", "expert_activation"}
    assert redone("mixtral-8x7b", "moe", "none") == set()
    assert {"norms", "attention_core", "ffn_up"} <= redone("llama3-8b", "dense", "full")


# Bytes read and written per parameter: gradient, master copy, two moments; then master, moments
# and the 16-bit weight (AdamW, 1711.05101, in mixed precision, 1710.03740).
@pytest.mark.parametrize(
    ("training", "per_parameter"),
    [
        ({}, (4 + 4 + 4 + 4) + (4 + 4 + 4 + 2)),
        ({"main_grads": "same"}, (2 + 4 + 4 + 4) + (4 + 4 + 4 + 2)),
        ({"optimizer": "sgd"}, (4 + 4) + (4 + 2)),
        ({"precision": "fp32"}, (4 + 4 + 4 + 4) + (4 + 4 + 4)),
    ],
)
def test_the_optimizer_reads_and_writes_every_state_once(
    training: dict[str, Any], per_parameter: int
) -> None:
    base = oracle(**training)
    update = named(rank_work(base, row()), "step", "optimizer")
    assert update.num_bytes[0] == per_parameter * parameter_count(base.model)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_stage_shares_out_the_update(zero: int) -> None:
    """Over dp_shard x cp, not over replicas; experts over all of edp: 16 ranks over ep 4."""
    base = problem("mixtral-8x7b")
    one = row(cp=2, dp_shard=4, dp_replicate=2, ep=4, zero_stage=zero)
    update = named(rank_work(base, one), "step", "optimizer")
    dense_share, expert_share = (8, 4) if zero else (1, 1)
    not_experts = parameter_count(base.model) - MIXTRAL_EXPERTS
    expected = not_experts / dense_share + MIXTRAL_EXPERTS / 4 / expert_share
    assert update.num_bytes[0] == pytest.approx(30 * expected)


def test_the_fullest_pipeline_rank_sizes_the_reduction() -> None:
    """Two stages of one layer: the last has the head's norm besides its vocabulary."""
    base = problem(dense(), pipelines=((2, 1),))
    one = row(pp=2, dp_replicate=2)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    last = layer + 4096 * 32000 + 4096
    assert received_bytes(rank_work(base, one), one, "dp_cp") == pytest.approx(2 * 0.5 * 4 * last)


def test_gradients_travel_in_buckets() -> None:
    """Megatron-LM: 40 M parameters in fp32 make a bucket."""
    base = oracle()
    parameters = parameter_count(base.model)
    buckets = -(-parameters // 40_000_000)
    reduce = named(rank_work(base, row(dp_replicate=8)), "step", "gradient_reduce")
    assert (reduce.repeats[0], reduce.size_bytes[0]) == (buckets, 4 * -(-parameters // buckets))


def test_buckets_are_equal_and_padded_to_their_shards() -> None:
    base = oracle()
    parameters = parameter_count(base.model)
    buckets = -(-parameters // 40_000_000)
    work = rank_work(base, row(dp_shard=96, dp_replicate=2, zero_stage=1))
    elements = -(-parameters // (buckets * 96)) * 96
    assert parameters <= buckets * elements < parameters + buckets * 96
    sent = {
        op.name: (float(op.repeats[0]), float(op.size_bytes[0]))
        for op in work
        if isinstance(op, Communication) and op.repeats[0] > 0
    }
    assert sent == {
        "gradient_scatter": (buckets, 4 * elements),
        "parameter_gather": (buckets, 2 * elements),
        "gradient_replica_reduce": (buckets, 4 * elements / 96),
    }


def test_shards_have_buckets_of_their_own_size() -> None:
    """With ZeRO-3 only shards are left to reduce: 40 M of their elements make a bucket."""
    base = oracle()
    work = rank_work(base, row(dp_shard=4, dp_replicate=2, zero_stage=3))
    reduce = named(work, "step", "gradient_replica_reduce")
    own = parameter_count(base.model) / 4
    assert reduce.repeats[0] == -(-own // 40_000_000)
    assert reduce.size_bytes[0] == 4 * -(-own // reduce.repeats[0])


def test_a_rank_without_experts_reduces_none() -> None:
    """DeepSeek-V3 has 3 dense layers in front; here the fullest rank has no other."""
    spec = load_model("deepseek-v3").model_copy(update={"num_layers": 4, "moe_layers": (0,)})
    assert spec.experts is not None
    tiny = spec.experts.model_copy(update={"num_experts": 2, "expert_hidden_size": 1})
    base = problem(spec.model_copy(update={"experts": tiny}), pipelines=((2, 1),))
    work = rank_work(base, row(pp=2, dp_replicate=2))
    assert named(work, "step", "expert_gradient_reduce").repeats[0] == 0


# Elements read and written per token by the forward and by the backward: a norm reads one and
# writes one (backward 3), a residual addition 2 and 1 (3), a gated activation 2 and 1 (5); a
# layer has two norms and two additions. Tokens are copied to the experts and back (2 + 2).
# Logits are read in 16 bit, written in fp32 and read twice; their gradient is fp32 in, 16 bit out.
LLAMA, MIXTRAL = ("llama3-8b", "dense"), ("mixtral-8x7b", "moe")
ELEMENT_WISE = [
    (LLAMA, "norms", 2 * 2 * 4096 * 2, 2 * 3 * 4096 * 2),
    (LLAMA, "residual", 2 * 3 * 4096 * 2, 2 * 3 * 4096 * 2),
    (LLAMA, "activation", 3 * 14336 * 2, 5 * 14336 * 2),
    (MIXTRAL, "expert_activation", 2 * 3 * 14336 * 2, 2 * 5 * 14336 * 2),
    (MIXTRAL, "permute", 2 * 4 * 4096 * 2, 2 * 4 * 4096 * 2),
    (("llama3-8b", "head"), "final_norm", 2 * 4096 * 2, 3 * 4096 * 2),
    (("llama3-8b", "head"), "loss", 128256 * (2 + 3 * 4), 128256 * (4 + 2)),
]


@pytest.mark.parametrize(("block", "name", "forward", "backward"), ELEMENT_WISE)
def test_element_wise_work_is_what_is_read_and_written(
    block: tuple[str, Any], name: str, forward: int, backward: int
) -> None:
    model, kind = block
    for degrees, share in (({}, 1), ({"tp": 4, "sequence_parallel": True}, 4)):
        work = block_work(problem(model), row(**degrees), kind)
        assert named(work, "forward", name).num_bytes[0] == 8192 / share * forward
        assert named(work, "backward", name).num_bytes[0] == pytest.approx(8192 / share * backward)
