"""Attention that stores its scores: flop and bytes by hand, times against Korthikanti et al."""

from dataclasses import dataclass
from typing import Any

import pytest

from planner.cost.problem import Problem
from planner.cost.step import timed_ops
from planner.cost.step_constants import PLAIN, StepConstants
from planner.cost.work import AttentionCore, Gemm, MemoryBound, Op, block_work
from planner.model.spec import Attention, FeedForward, ModelSpec
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from tests.unit.problems import problem, row

PRODUCTS = ("attention_scores", "attention_context")
KERNELS = ("attention_softmax", "attention_dropout")
SOFTMAX = ("attention_softmax", "forward")
HEADS, WIDTH, LAYERS = 64, 96, 48


def gpt_22b() -> ModelSpec:
    """Return the 22B model of Korthikanti et al. (2205.05198, table 3)."""
    return ModelSpec(
        name="gpt-22b",
        source="arXiv 2205.05198, table 3",
        num_layers=LAYERS,
        hidden_size=HEADS * WIDTH,
        vocab_size=51_200,
        attention=Attention(num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH),
        feed_forward=FeedForward(hidden_size=4 * HEADS * WIDTH, gated=False),
        norm="layer",
        learned_positions=2048,
        tied_embeddings=True,
    )


def stored(constants: StepConstants | None = PLAIN, **training: Any) -> Problem:
    fields = {"seq_len": 2048, "precision": "fp16", "dropout": True, "fused_attention": False}
    on = compile_fabric(load_topology("dgx-a100"), 1)
    return problem(gpt_22b(), on=on, constants=constants, **{**fields, **training})


def core(base: Problem, **degrees: Any) -> list[Op]:
    ops = block_work(base, row(**degrees), "dense")
    return [op for op in ops if op.name in (*PRODUCTS, *KERNELS, "attention_core")]


def flop(ops: list[Op], *phases: str) -> float:
    return sum(
        float(op.flop[0] * op.repeats[0])
        for op in ops
        if isinstance(op, Gemm | AttentionCore) and op.phase in phases
    )


def moved(ops: list[Op], name: str, phase: str) -> float:
    found = (op for op in ops if isinstance(op, MemoryBound) and op.name == name)
    return sum(float(op.num_bytes[0] * op.repeats[0]) for op in found if op.phase == phase)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (8, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("batch", [1, 4])
def test_products_are_of_every_pair_of_tokens_masked_or_not(tp: int, cp: int, batch: int) -> None:
    """4 b a s^2 d forward, twice that backward; a causal kernel does half of the forward."""
    degrees = {"tp": tp, "cp": cp, "micro_batch_size": batch, "context_exchange": "all_gather"}
    whole = 4 * batch * HEADS * 2048**2 * WIDTH / (tp * cp)
    ops = core(stored(), **degrees)
    assert flop(ops, "forward") == pytest.approx(whole)
    assert flop(ops, "backward", "weight_gradient") == pytest.approx(2 * whole)
    fused = core(stored(fused_attention=True), **degrees)
    assert flop(fused, "forward") == pytest.approx(whole / 2)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (8, 1), (2, 2)])
def test_kernels_move_the_score_matrix_and_a_byte_of_mask(tp: int, cp: int) -> None:
    """2 bytes in and out of the softmax; dropout has a mask of 1 more, as in 2205.05198, 4.1."""
    ops = core(stored(), tp=tp, cp=cp, micro_batch_size=4)
    scores = 4 * HEADS * 2048**2 / (tp * cp)
    assert moved(ops, "attention_softmax", "forward") == pytest.approx((2 + 2) * scores)
    assert moved(ops, "attention_softmax", "backward") == pytest.approx((2 + 2 + 2) * scores)
    for phase in ("forward", "backward"):
        assert moved(ops, "attention_dropout", phase) == pytest.approx((2 + 2 + 1) * scores)
    without = core(stored(dropout=False), tp=tp, cp=cp, micro_batch_size=4)
    assert moved(without, "attention_dropout", "forward") == 0
    assert moved(without, "attention_softmax", "forward") == pytest.approx((2 + 2) * scores)


def test_attention_is_fused_or_stored_and_never_both() -> None:
    names = [{op.name for op in core(stored(fused_attention=fused))} for fused in (True, False)]
    assert names == [{"attention_core"}, {*PRODUCTS, *KERNELS}]


def test_documents_store_the_scores_of_their_own_tokens() -> None:
    """Four of a quarter have a quarter of the pairs."""
    packed = stored(packing={"lengths": [512], "counts": [4]})
    for found in (flop(core(packed), "forward"), moved(core(packed), *SOFTMAX)):
        assert found > 0
    assert flop(core(packed), "forward") == pytest.approx(flop(core(stored()), "forward") / 4)
    assert moved(core(packed), *SOFTMAX) == pytest.approx(moved(core(stored()), *SOFTMAX) / 4)


def test_selective_recompute_redoes_the_core_alone() -> None:
    """--recompute-modules core_attn: with the softmax, dropout and both products."""
    ops = block_work(stored(), row(tp=8, recompute="selective"), "dense")
    again = {op.name for op in ops if op.phase == "recompute" and op.repeats[0] > 0}
    assert again - {"launch"} == {*PRODUCTS, *KERNELS}
    redone = [op for op in ops if op.name in PRODUCTS]
    assert flop(redone, "recompute") == flop(redone, "forward")


# ------------------------------------------------------------------- 2205.05198, table 4


@dataclass(frozen=True)
class Published:
    """Milliseconds of one layer, forward and backward: b 4, s 2048, tp 8 of A100, fp16."""

    recompute: str
    sequence_parallel: bool
    forward_ms: float
    backward_ms: float


TABLE = [
    Published("none", False, 7.7, 11.9),
    Published("none", True, 7.2, 11.8),
    Published("full", False, 7.7, 19.5),
    Published("selective", False, 7.7, 13.2),
    Published("selective", True, 7.2, 13.1),
]


def layer_ms(recompute: str, sequence_parallel: bool, **fields: Any) -> tuple[float, float]:
    """Return forward and backward of one layer, what it waits for included."""
    one = row(
        tp=8,
        micro_batch_size=4,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    passes = [0.0, 0.0]
    for exposed in timed_ops(stored(**fields), one):
        if exposed.block == "dense":
            backward = exposed.timed.op.phase != "forward"
            passes[backward] += 1e3 * float(exposed.exposed_s[0]) / LAYERS
    return passes[0], passes[1]


@pytest.mark.parametrize(
    ("constants", "tolerance"), [(PLAIN, 0.10), (None, 0.15)], ids=["tables", "fitted"]
)
@pytest.mark.parametrize("published", TABLE, ids=str)
def test_a_layer_takes_what_was_published(
    published: Published, constants: StepConstants | None, tolerance: float
) -> None:
    """Within 10 % by kernel tables alone: fast by 1 to 8 %, for no clock falls; fitted within 15 %.

    Off beyond that: sequence parallelism makes their backward 0.1 ms shorter and ours longer, by
    what two halves of an all_reduce take more than one.
    """
    found = layer_ms(published.recompute, published.sequence_parallel, constants=constants)
    expected = (published.forward_ms, published.backward_ms)
    assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_recompute_costs_what_was_published(sequence_parallel: bool) -> None:
    """1.3 ms: no collective and no layer's width in it, but both products and both kernels."""
    backward = [layer_ms(mode, sequence_parallel)[1] for mode in ("none", "selective")]
    assert backward[1] - backward[0] == pytest.approx(1.3, rel=0.15)


def test_full_recompute_costs_a_forward() -> None:
    """7.6 ms of theirs, 7.7 forward."""
    forward, backward = layer_ms("none", False)
    assert layer_ms("full", False)[1] - backward == pytest.approx(forward, rel=1e-6)


def test_the_forward_is_shorter_with_sequence_parallelism() -> None:
    """By 0.5 ms of theirs, a third less of ours: norms and dropout of an eighth of the tokens."""
    whole, sharded = (layer_ms("none", shards)[0] for shards in (False, True))
    assert 0.25 < whole - sharded < 0.5
