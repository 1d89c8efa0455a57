"""What a step does, against published volumes and flop counts (bytes received per rank)."""

from typing import Any

import numpy as np
import pytest

from planner.cost.problem import Problem
from planner.cost.work import (
    BLOCK_COLUMNS,
    AttentionCore,
    Communication,
    Gemm,
    Op,
    block_work,
    rank_work,
    stage_send,
)
from planner.layout.candidates import Candidates
from planner.model.blocks import layer_kinds, model_flop_per_token, parameter_count
from planner.model.bundled import model_names
from planner.model.spec import Attention, FeedForward, MixtureOfExperts, ModelSpec
from planner.plan import Axis
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
    received = received_bytes(block_work(moe, one, "moe"), one, "ep")
    assert received == pytest.approx(4 * 4096 * 8 * (ep - 1) / ep * 7168 * 2)


def test_pipeline_send_shrinks_with_sequence_parallelism() -> None:
    whole = stage_send(oracle(), row(tp=8, pp=2, num_micro_batches=4))
    shard = stage_send(oracle(), row(tp=8, pp=2, num_micro_batches=4, sequence_parallel=True))
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
    assert received == pytest.approx(expected, rel=1e-9)


def test_hybrid_sharding_reduces_shards_over_replicas() -> None:
    one = row(dp_shard=4, dp_replicate=2, zero_stage=3)
    base = oracle()
    received = received_bytes(rank_work(base, one), one, "dp_replicate")
    assert received == pytest.approx(2 * 1 / 2 * 4 * parameter_count(base.model) / 4)


def matmul_flop(ops: list[Op]) -> float:
    return sum(
        float(op.flop[0] * op.repeats[0]) for op in ops if isinstance(op, Gemm | AttentionCore)
    )


@pytest.mark.parametrize("name", [n for n in model_names() if n != "example-gpt"])
def test_flop_of_a_step_is_the_models(name: str) -> None:
    """Forward and both gradients of all blocks: 6 per active weight, plus attention cores.

    The fused backward redoes the scores: 2.5 instead of 2 forward passes, and that half pass is
    no model flop.
    """
    base = problem(name, seq_len=2048)
    one = row()
    total = cores = 0.0
    for kind in (*layer_kinds(base.model), "head"):
        ops = block_work(base, one, kind)
        total += matmul_flop(ops)
        cores += sum(
            float(op.flop[0])
            for op in ops
            if isinstance(op, AttentionCore) and op.phase == "forward"
        )
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

    for name in ("llama3-8b", "deepseek-v3"):
        base = problem(name)
        for kind in ("embedding", "head", *set(layer_kinds(base.model))):
            watched = Watched(row(tp=2, sequence_parallel=True))
            block_work(base, watched, kind)  # type: ignore[arg-type]
            assert watched.read <= set(BLOCK_COLUMNS), kind


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
