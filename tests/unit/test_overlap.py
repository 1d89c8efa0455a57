"""What hides under what, in seconds small enough to add up by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.constants import MEMORY_PASSES
from planner.cost.overlap import BLOCK_OVERLAPS, RANK_OVERLAPS, block_overlap, exposed_s
from planner.cost.problem import Problem
from planner.cost.seconds import Timed, seconds
from planner.cost.sharing import needs_no_processor
from planner.cost.step import _exposed_in_block, _exposed_rank, _Folded
from planner.cost.work import Communication, Gemm, MemoryBound, block_work, rank_work
from planner.layout.candidates import concatenate
from planner.model.blocks import block_kinds
from planner.plan import Axis, Method, Phase
from tests.unit.problems import fabric, problem, row

ONE = np.ones(1)
FORWARD_4: tuple[Phase, float] = ("forward", 4.0)
BACKWARD_7: tuple[Phase, float] = ("backward", 7.0)


def compute(name: str, phase: Phase, seconds: float) -> Timed:
    op = Gemm(name, phase, ONE, ONE, ONE, ONE)
    return Timed(op, np.array([seconds]), np.array([seconds]))


def call(
    name: str, phase: Phase, seconds: float, *, repeats: int = 1, passes: float = 1, axis: Axis
) -> Timed:
    """Return a collective of ``seconds`` a call."""
    op = Communication(name, phase, repeats * ONE, axis, "all_gather", ONE, passes * ONE)
    return Timed(op, np.array([seconds]), np.array([seconds * repeats]))


@pytest.mark.parametrize(
    ("total_s", "budget_s", "always_s", "exposed_part_s"),
    [(10, 4, 0, 6), (10, 20, 0, 0), (10, 20, 3, 3), (10, 8, 3, 3), (10, 6, 3, 4), (2, 0, 5, 2)],
)
def test_exposed_is_what_exceeds_the_budget_or_cannot_hide(
    total_s: float, budget_s: float, always_s: float, exposed_part_s: float
) -> None:
    found = exposed_s(np.array([total_s]), np.array([budget_s]), always_s=always_s)
    assert found[0] == pytest.approx(exposed_part_s)


@pytest.mark.parametrize("lost_share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(("total_s", "budget_s"), [(4.0, 10.0), (9.0, 10.0), (15.0, 10.0)])
def test_compute_goes_on_at_what_is_left_of_its_rate(
    total_s: float, budget_s: float, lost_share: float
) -> None:
    """Played out: beside the collective at ``1 - lost_share``, then alone."""
    left = budget_s - total_s * (1 - lost_share)
    ends = total_s + max(0.0, left)
    found = exposed_s(np.array([total_s]), np.array([budget_s]), lost_share)
    assert found[0] == pytest.approx(ends - budget_s)
    assert found[0] <= total_s, "never dearer than waiting"


# ------------------------------------------------------------------------------ in a block


def in_block(timed: Timed, *others: Timed, tp: int = 1, **training: Any) -> float:
    """Return exposed seconds of one collective of a block, by Megatron-LM."""
    base = problem("mixtral-8x7b", **training)
    return float(_exposed_in_block(base, row(tp=tp), timed, [timed, *others])[0])


SUMS = ("ffn_tp_gather", "ffn_tp_reduce")


def test_a_regather_hides_under_the_input_gradient_of_the_same_product() -> None:
    """Korthikanti et al. (2205.05198), 4.2.2."""
    regather = call("ffn_tp_regather", "weight_gradient", 5, axis="tp")
    others = (
        compute("ffn_up", "forward", 16),
        compute("ffn_up", "backward", 2),
        compute("ffn_up", "weight_gradient", 32),
        compute("ffn_down", "backward", 64),
        compute("attention_qkv", "backward", 128),
    )
    assert in_block(regather, *others) == pytest.approx(3)


@pytest.mark.parametrize("name", SUMS)
def test_an_input_gradient_is_summed_beside_the_weight_gradient_of_its_product(name: str) -> None:
    """Korthikanti et al. (2205.05198), 4.2.2, with sequence parallelism and without."""
    summed = call(name, "backward", 5, axis="tp")
    others = (
        compute("ffn_up", "forward", 16),
        compute("ffn_up", "backward", 32),
        compute("ffn_up", "weight_gradient", 2),
        compute("ffn_down", "weight_gradient", 64),
    )
    assert in_block(summed, *others) == pytest.approx(3)
    assert in_block(summed, *others, no_overlap=("tensor_parallel",)) == 5
    assert in_block(summed, *others, no_overlap=("data_parallel",)) == pytest.approx(3)


def test_the_heads_input_gradient_is_summed_as_a_layers_is() -> None:
    ops = block_work(problem(), row(tp=2, sequence_parallel=True), "head")
    names = {op.name for op in ops if isinstance(op, Communication) and op.phase == "backward"}
    assert names == {"head_tp_scatter", "head_tp_reduce"}
    for name in names:
        summed = call(name, "backward", 5, axis="tp")
        others = (compute("head", "backward", 32), compute("head", "weight_gradient", 2))
        assert in_block(summed, *others, overlap_products=True) == pytest.approx(3)


@pytest.mark.parametrize("part", ["attention", "ffn", "shared_expert"])
@pytest.mark.parametrize(
    ("name", "phase", "product"),
    [
        ("gather", "forward", "up"),
        ("gather", "recompute", "up"),
        ("scatter", "forward", "down"),
        ("scatter", "recompute", "down"),
        ("scatter", "backward", "down"),
    ],
)
def test_products_hide_all_chunks_but_one_where_asked_to(
    part: str, name: str, phase: Phase, product: str
) -> None:
    """Of 8 s over 4 ranks a chunk of 2; beside 100 s it is what is left, beside 5 s it is 3."""
    of_attention = {"up": "attention_qkv", "down": "attention_out"}
    product = of_attention[product] if part == "attention" else f"{part}_{product}"
    travels = call(f"{part}_tp_{name}", phase, 8, axis="tp")

    def exposed(seconds: float, **training: Any) -> float:
        return in_block(travels, compute(product, phase, seconds), tp=4, **training)

    assert exposed(100) == 8
    assert exposed(100, overlap_products=True) == pytest.approx(2)
    assert exposed(5, overlap_products=True) == pytest.approx(3)


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_half_a_blocks_compute_hides_each_exchange_of_experts_where_asked_to(phase: Phase) -> None:
    others = [
        compute("attention_core", phase, 4),
        compute("experts_up", phase, 4),
        compute("experts_up", "weight_gradient", 64),
    ]
    for name in ("ep_dispatch", "ep_combine"):
        exchange = call(name, phase, 5, axis="ep")
        assert in_block(exchange, *others) == 5
        assert in_block(exchange, *others, overlap_experts=True) == pytest.approx(1)


@pytest.mark.parametrize(("phase", "exposed_part_s"), [("forward", 6), ("backward", 3)])
def test_the_ring_hides_under_the_attention_of_its_own_pass(
    phase: Phase, exposed_part_s: float
) -> None:
    """Ring Attention (2310.01889): keys travel while the present ones are used."""
    ring = call("cp_ring", phase, 5, repeats=2, axis="cp")
    others = (compute("attention_core", "forward", 4), compute("attention_core", "backward", 7))
    assert in_block(ring, *others) == pytest.approx(exposed_part_s)
    parts = ("attention_scores", "attention_softmax", "attention_context")
    unfused = [compute(name, p, s / 3) for name in parts for p, s in (FORWARD_4, BACKWARD_7)]
    assert in_block(ring, *unfused, fused_attention=False) == pytest.approx(exposed_part_s)


@pytest.mark.parametrize(
    "name", ["ffn_tp_gather", "ffn_tp_scatter", "ffn_tp_reduce", "ep_dispatch"]
)
def test_other_collectives_of_a_block_are_waited_for(name: str) -> None:
    others = [compute(n, "forward", 99) for n in ("ffn_up", "attention_core", "experts_up")]
    assert in_block(call(name, "forward", 5, axis="tp"), *others) == 5


def test_the_table_names_ops_that_exist() -> None:
    """A rule about an op of another name would hide nothing, silently."""
    one = row(tp=2, cp=2, sequence_parallel=True)
    problems = [
        problem(name, fused_attention=fused)
        for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3")
        for fused in (True, False)
    ]
    found = {
        (op.name, op.phase)
        for base in problems
        for kind in block_kinds(base.model)
        for op in block_work(base, one, kind)
    }
    for rule, beside in BLOCK_OVERLAPS.items():
        assert {rule, *((name, beside.phase) for name in beside.ops)} <= found
    ranks = rank_work(problem("mixtral-8x7b"), row(dp_shard=2, zero_stage=1))
    collectives = {op.name for op in ranks if isinstance(op, Communication)}
    assert set(RANK_OVERLAPS) == collectives - {"sequence_parallel_gradient_reduce"}


@pytest.mark.parametrize("part", ["attention", "ffn", "shared_expert", "head"])
def test_every_regather_hides_under_the_product_that_read_its_input(part: str) -> None:
    readers = {
        "attention": {"attention_q", "attention_kv", "attention_qkv"},
        "ffn": {"ffn_up"},
        "shared_expert": {"shared_expert_up"},
        "head": {"head"},
    }
    beside = BLOCK_OVERLAPS[f"{part}_tp_regather", "weight_gradient"]
    assert (set(beside.ops), beside.phase) == (readers[part], "backward")


@pytest.mark.parametrize("framework", ["megatron", "executor"])
def test_the_executor_waits_for_tensor_parallel_sums(framework: Any) -> None:
    base = problem("llama3-8b", framework=framework)
    for name in SUMS:
        summed = call(name, "backward", 5, axis="tp").op
        assert isinstance(summed, Communication)
        assert (block_overlap(base, summed) is None) == (framework == "executor")


# ------------------------------------------------------------------------------ in a step


def folded(forward: float, backward: float) -> _Folded:
    """Return a rank that computes and waits for launches so long, and other waiting to ignore."""
    slowest = np.full((1, 2, 5), 1000.0)
    slowest[0, :, 0] = forward - 1, backward - 1
    slowest[0, :, 4] = 1  # launches: messages travel meanwhile
    return _Folded(np.zeros(1, dtype=int), np.ones((1, 5)), slowest, np.ones((1, 5)), np.ones(1))


def per_op(rank: list[Timed], base: Problem | None = None, **compute_s: float) -> list[float]:
    """Return exposed seconds of each op beside 10 s forward and 20 s backward."""
    beside = folded(compute_s.get("forward", 10), compute_s.get("backward", 20))
    found = _exposed_rank(base or problem("mixtral-8x7b"), row(), beside, rank)
    return [float(column[0]) for column in found]


def rank_call(name: str, seconds: float, repeats: int, passes: float = 1) -> Timed:
    return call(name, "step", seconds, repeats=repeats, passes=passes, axis="dp_cp")


def on_levels(timed: Timed, shares: tuple[float, ...]) -> Timed:
    return replace(timed, level_shares=tuple(np.array([share]) for share in shares))


def test_gradients_use_up_the_backward_one_after_the_other() -> None:
    """20 s hide 15 but for the last call; of 29 in all they leave 9, 5 of which are counted."""
    found = per_op([rank_call("gradient_reduce", 5, 3), rank_call("gradient_scatter", 2, 7)])
    assert found == pytest.approx([5, 4])


def test_parameters_use_up_the_forward_and_not_the_backward() -> None:
    rank = [rank_call("parameter_gather", 2, 7), rank_call("gradient_reduce", 1, 18)]
    expected = [4, 1]
    assert per_op(rank) == pytest.approx(expected)
    assert per_op(rank[::-1]) == pytest.approx(expected[::-1])


def test_parameters_gathered_again_share_the_backward_with_gradients() -> None:
    rank = [rank_call("gradient_scatter", 1, 18), rank_call("parameter_regather", 1, 6)]
    assert per_op(rank) == pytest.approx([1, 3]), "24 beside 20"


def test_each_pass_hides_under_its_own_micro_batch() -> None:
    """2 passes of 3 calls beside 20 s each; then 5 s a pass are left for 2 calls of 4 s."""
    rank = [
        rank_call("gradient_scatter", 5, 6, passes=2),
        rank_call("parameter_regather", 4, 4, passes=2),
    ]
    assert per_op(rank) == pytest.approx([10, 8])


def test_a_budget_never_turns_negative() -> None:
    rank = [rank_call("gradient_reduce", 5, 8), rank_call("gradient_scatter", 2, 7)]
    assert per_op(rank) == pytest.approx([20, 14])


@pytest.mark.parametrize(
    ("dense", "experts", "exposed"),
    [
        ((1.0, 0.0), (1.0, 0.0), 28 + 14 - 20),  # both on one level: one after the other
        ((1.0, 0.0), (0.0, 1.0), 28 - 20),  # on different levels side by side
        ((1.0, 0.5), (0.0, 1.0), 14 + 14 - 20),  # half of the second level's time is taken
        ((0.5, 1.0), (0.0, 1.0), 28 + 14 - 20),
    ],
)
def test_gradients_of_experts_run_beside_the_others_and_share_levels(
    dense: tuple[float, ...], experts: tuple[float, ...], exposed: float
) -> None:
    first = on_levels(rank_call("gradient_scatter", 4, 7), dense)
    second = on_levels(call("expert_gradient_scatter", "step", 2, repeats=7, axis="edp"), experts)
    assert sum(per_op([first, second])) == pytest.approx(exposed)
    assert sum(per_op([second, first])) == pytest.approx(exposed)


def test_each_collective_slows_compute_by_its_own_share() -> None:
    """Nothing is exposed but the last calls, 1 + 2 s; 9 and 4 s more lose a third and a half."""
    rank = [
        replace(rank_call("gradient_scatter", 1, 10), lost_share=1 / 3),
        replace(rank_call("parameter_regather", 2, 3), lost_share=1 / 2),
    ]
    assert per_op(rank, backward=1e6) == pytest.approx([1 + 3, 2 + 2])
    assert per_op(rank, backward=15) == pytest.approx([1 + 3, 2 + 2])
    assert sum(per_op(rank, backward=5)) == pytest.approx(16 - 5)


@pytest.mark.parametrize("name", sorted(RANK_OVERLAPS))
def test_one_call_of_a_pass_is_always_exposed(name: str) -> None:
    rank = [rank_call(name, 3, 4, passes=2)]
    found = per_op(rank, forward=1e6, backward=1e6)
    assert found == pytest.approx([6])


def test_units_between_the_first_and_the_last_hide_wholly() -> None:
    """2 passes of 10 s hide 12 s of layers once an embedding of 3 s has hidden nothing."""
    ends, layers = (rank_call("parameter_gather", 3, repeats, passes=2) for repeats in (2, 4))
    assert isinstance(layers.op, Communication)
    inner = replace(layers, op=replace(layers.op, edges=np.zeros(1)))
    found = per_op([ends, inner])
    assert found == pytest.approx([6, 0])
    assert per_op([ends, layers])[1] == pytest.approx(6)


def test_which_pass_each_rank_op_runs_beside() -> None:
    for name, under in RANK_OVERLAPS.items():
        is_first_gather = "gather" in name and "regather" not in name
        assert under == ("forward" if is_first_gather else "backward"), name


def test_the_executor_reduces_after_the_last_backward() -> None:
    base = problem("llama3-8b", framework="executor")
    assert per_op([rank_call("gradient_reduce", 5, 3)], base) == [15]


def test_the_tied_exchange_is_waited_for() -> None:
    tied = call("tied_embedding", "step", 5, axis="pp")
    assert per_op([tied]) == [5]


@pytest.mark.parametrize(("cores", "load"), [(None, 1.0), (2, 4.0), (16, 0.5)])
def test_ranks_that_share_cores_share_the_optimizers(cores: Any, load: float) -> None:
    """8 ranks on a node; their collectives are not slower for it."""
    base = problem("llama3-8b", on=fabric(cores_per_node=cores), framework="executor")
    update = MemoryBound("optimizer", "step", ONE, ONE)
    rank = [Timed(update, np.array([6.0]), np.array([6.0])), rank_call("gradient_reduce", 5, 3)]
    assert per_op(rank, base) == pytest.approx([6 * load, 15])


# ------------------------------------------------------------------------- what ops share


@pytest.mark.parametrize("framework", ["megatron", "executor"])
def test_only_what_runs_beside_compute_takes_from_it(framework: Any) -> None:
    base = problem("mixtral-8x7b", framework=framework)
    one = row(tp=2, dp_shard=8, zero_stage=1, sequence_parallel=True)
    timed = seconds(base, one, rank_work(base, one))
    takes = {t.op.name for t in timed if np.any(t.lost_share)}
    shares = {t.op.name for t in timed if t.level_shares}
    dense, experts = ({f"{of}gradient_scatter", f"{of}parameter_gather"} for of in ("", "expert_"))
    assert takes == shares == (dense | experts if framework == "megatron" else set())


def test_engines_take_memory_traffic_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of one node by copy engines; the scatter stays NCCL's, with its channels."""
    base, one = problem(on=fabric(8, architecture="hopper")), row(dp_shard=8, zero_stage=1)
    engine = Method("copy_engine", "nccl_zero_cta")
    monkeypatch.setattr(
        "planner.cost.seconds.legal_methods",
        lambda _fabric, _framework, op: (engine if op == "all_gather" else Method("ring"),),
    )
    engines = seconds(base, one, rank_work(base, one))
    gather, scatter = (
        next(timed for timed in engines if timed.op.name == name and timed.total_s[0] > 0)
        for name in ("parameter_gather", "gradient_scatter")
    )
    assert isinstance(gather.op, Communication)
    moved = 7 / 8 * gather.op.size_bytes
    traffic = MEMORY_PASSES.value * moved / base.device.memory_bytes_per_s / gather.seconds
    assert gather.lost_share == pytest.approx(traffic)
    assert np.all(scatter.lost_share > 24 / 132)
    assert not needs_no_processor(Method("copy_engine", "shm")), "a CPU copies by itself"


def test_an_op_keeps_what_it_shares_when_rows_are_taken() -> None:
    base = problem("mixtral-8x7b")
    rows = concatenate([row(dp_shard=dp, ep=2, zero_stage=1) for dp in (2, 8, 16)])
    for timed in seconds(base, rows, rank_work(base, rows)):
        again = timed.take(np.array([2, 0]))
        for before, after in zip(timed.level_shares, again.level_shares, strict=True):
            assert after.tolist() == before[[2, 0]].tolist()
        if isinstance(timed.lost_share, np.ndarray):
            assert np.asarray(again.lost_share).tolist() == timed.lost_share[[2, 0]].tolist()
