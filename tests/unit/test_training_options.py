"""What a training may be told about launches, overlap, dispatch, casts and kernels: laws."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.constants import OLDER_ATTENTION
from planner.cost.problem import Problem
from planner.cost.seconds import Timed, seconds
from planner.cost.step import Priced, price, timed_ops
from planner.cost.step_constants import PLAIN
from planner.cost.work import (
    KEPT_IN_16_BITS,
    AttentionCore,
    Communication,
    Gemm,
    Launches,
    MemoryBound,
    Op,
    block_work,
    rank_work,
)
from planner.hardware.roofline import CAST_PRECISIONS, OPERAND_BYTES
from planner.layout.candidates import Candidates
from planner.model.blocks import BlockKind, block_kinds, layer_kinds
from planner.model.bundled import load_model
from planner.model.spec import ModelSpec
from planner.pipeline.partition import splits_of
from planner.topology.fabric import Fabric, Level
from tests.unit.problems import fabric, problem, row

LAUNCH_S = 10e-6
ISSUED = replace(PLAIN, launch_s=LAUNCH_S)
NODE = {"tp": 8, "sequence_parallel": True}


def step_s(base: Problem, one: Candidates) -> float:
    return float(price(base, one).step_time_s()[0])


def all_ops(base: Problem, one: Candidates) -> list[Op]:
    """Return the ops of one block of every kind, and those of a rank."""
    found = [op for kind in block_kinds(base.model) for op in block_work(base, one, kind)]
    return [*found, *rank_work(base, one)]


# --------------------------------------------------------------------------------- launches


def passes(base: Problem, one: Candidates) -> tuple[list[float], list[float]]:
    """Return what the device does and what the host issues, forward and backward, of one rank."""
    run, issued = [0.0, 0.0], [0.0, 0.0]
    for exposed in timed_ops(replace(base, constants=PLAIN), one):
        if exposed.block and not isinstance(exposed.timed.op, Launches):
            run[exposed.timed.op.phase != "forward"] += float(exposed.exposed_s[0])
    for kind in block_kinds(base.model):
        times = {"dense": base.model.num_layers}.get(kind, 1)
        for op in block_work(base, one, kind):
            if isinstance(op, Launches):
                issued[op.phase != "forward"] += LAUNCH_S * times * float(op.num_kernels[0])
    return run, issued


@pytest.mark.parametrize("seq_len", [64, 256, 512, 4096])
@pytest.mark.parametrize("degrees", [{}, {"tp": 4, "sequence_parallel": True}], ids=str)
def test_a_host_that_runs_ahead_hides_under_the_device_and_one_that_waits_adds(
    seq_len: int, degrees: dict[str, Any]
) -> None:
    """Of each pass the longer of both counts, or their sum (CUDA_LAUNCH_BLOCKING=1)."""
    fields: dict[str, Any] = {"seq_len": seq_len, "global_batch_size": 1, "constants": ISSUED}
    eager, blocking = (
        problem("example-gpt", launch=launch, **fields) for launch in ("eager", "blocking")
    )
    one = row(**degrees)
    run, issued = passes(eager, one)
    longer = [max(0.0, there - here) for here, there in zip(run, issued, strict=True)]
    assert price(eager, one).launch_s[0] == pytest.approx(sum(longer))
    assert price(blocking, one).launch_s[0] == pytest.approx(sum(issued))
    rest = {name: float(getattr(price(eager, one), name)[0]) for name in ("compute_s", "host_s")}
    for name, value in rest.items():
        assert getattr(price(blocking, one), name)[0] == pytest.approx(value), name


@pytest.mark.parametrize(
    "degrees", [{}, NODE, {"pp": 4, "schedule": "1f1b", "num_micro_batches": 8}], ids=str
)
@pytest.mark.parametrize("seq_len", [128, 8192])
def test_graphs_are_never_slower_than_launches_nor_these_than_waiting_for_each(
    degrees: dict[str, Any], seq_len: int
) -> None:
    pipelines = ((degrees.get("pp", 1), 1),)
    graphs, eager, blocking = (
        step_s(
            problem(pipelines=pipelines, seq_len=seq_len, launch=launch, constants=ISSUED),
            row(**degrees),
        )
        for launch in ("cuda_graph", "eager", "blocking")
    )
    assert graphs <= eager < blocking


def test_the_slowest_stage_is_the_one_that_computes_and_issues_most() -> None:
    """Seven layers compute for 1 ms and are issued in 1.8; one and a wide head take 2.3 and 0.3."""
    model = load_model("example-gpt").model_copy(update={"vocab_size": 200_000})
    split = splits_of(layer_kinds(model), [(2, 1)], [(7, 1)])
    found = {}
    for launch in ("eager", "blocking"):
        base = problem(model, seq_len=1024, global_batch_size=1, constants=ISSUED, launch=launch)
        ops = timed_ops(replace(base, splits=split), row(pp=2, schedule="1f1b"))
        found[launch] = {int(op.pp_rank[0]) for op in ops if op.block and op.repeats[0] > 0}
    assert found == {"eager": {1}, "blocking": {0}}


def test_calls_of_a_group_are_issued_and_those_of_one_rank_alone_are_not() -> None:
    """Megatron's backward gathers and scatters twice, and gathers both inputs once more."""
    alone, eight = (
        {
            op.phase: float(op.num_kernels[0])
            for op in block_work(problem(), one, "dense")
            if isinstance(op, Launches)
        }
        for one in (row(), row(**NODE))
    )
    assert {phase: eight[phase] - alone[phase] for phase in eight} == {
        "forward": 4,
        "backward": 4 + 2,
        "recompute": 0,
    }


# ---------------------------------------------------------------------------------- overlap

DENSE = load_model("llama3-8b")
EXPERTS = load_model("mixtral-8x7b")
LAYOUTS: list[tuple[ModelSpec, dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {**NODE, "dp_shard": 4, "zero_stage": 1}),
    (DENSE, {"tp": 8, "dp_replicate": 8}),
    (DENSE, {"tp": 16, "sequence_parallel": True, "recompute": "full"}),
    (DENSE, {"dp_shard": 64, "zero_stage": 3}),
    (DENSE, {"cp": 16, "tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    (DENSE, {**NODE, "pp": 4, "schedule": "1f1b", "num_micro_batches": 8}),
    (EXPERTS, {"ep": 8, "dp_shard": 32, "zero_stage": 1}),
    (EXPERTS, {"tp": 4, "sequence_parallel": True, "ep": 8, "dp_shard": 16, "zero_stage": 1}),
    (EXPERTS, {**NODE, "etp": 8, "recompute": "full"}),
    (EXPERTS, {"ep": 8, "dp_shard": 64, "zero_stage": 3, "num_micro_batches": 2}),
]
OVERLAPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"overlap_products": True}),
    ({}, {"overlap_experts": True}),
    ({"no_overlap": ("data_parallel",)}, {}),
    ({"no_overlap": ("tensor_parallel",)}, {}),
    ({"no_overlap": ("data_parallel", "tensor_parallel")}, {"no_overlap": ("data_parallel",)}),
    ({"no_overlap": ("data_parallel", "tensor_parallel")}, {"no_overlap": ("tensor_parallel",)}),
]


def laid(model: ModelSpec, degrees: dict[str, Any], **training: Any) -> Priced:
    pipelines = ((degrees.get("pp", 1), 1),)
    return price(problem(model, pipelines=pipelines, **training), row(**degrees))


@pytest.mark.parametrize(("waits", "hides"), OVERLAPS, ids=str)
@pytest.mark.parametrize("constants", [PLAIN, None], ids=["plain", "fitted"])
def test_what_hides_never_costs_more_than_what_waits(
    waits: dict[str, Any], hides: dict[str, Any], constants: Any
) -> None:
    """Whatever a collective takes of compute's rate: it is over when the wait would be, or sooner.

    Compute, bubble and optimizer are the same; only what is exposed may fall.
    """
    gained = 0
    for model, degrees in LAYOUTS:
        waiting = laid(model, degrees, constants=constants, **waits)
        hiding = laid(model, degrees, constants=constants, **hides)
        before, after = (float(one.step_time_s()[0]) for one in (waiting, hiding))
        assert after <= before * (1 + 1e-12), degrees
        assert hiding.compute_s[0] == pytest.approx(waiting.compute_s[0], rel=1e-12)
        assert hiding.optimizer_s[0] == waiting.optimizer_s[0]
        gained += after < before * (1 - 1e-6)
    assert gained > 0


@pytest.mark.parametrize(
    ("training", "parts"),
    [
        ({"overlap_products": True}, {"tp_exposed_s"}),
        ({"overlap_experts": True}, {"ep_exposed_s"}),
        ({"no_overlap": ("tensor_parallel",)}, {"tp_exposed_s"}),
        ({"no_overlap": ("data_parallel",)}, {"dp_exposed_s"}),
    ],
    ids=str,
)
def test_an_option_moves_the_seconds_of_its_axis_alone(
    training: dict[str, Any], parts: set[str]
) -> None:
    degrees = {
        "tp": 4, "sequence_parallel": True, "ep": 8, "dp_shard": 16, "zero_stage": 1,
    }  # fmt: skip
    plain, told = (laid(EXPERTS, degrees, constants=PLAIN, **asked) for asked in ({}, training))
    names = ("compute_s", "optimizer_s", "tp_exposed_s", "ep_exposed_s", "dp_exposed_s")
    moved = {n for n in names if getattr(plain, n)[0] != pytest.approx(getattr(told, n)[0])}
    assert moved == parts


def test_sums_hidden_in_the_backward_are_those_that_waiting_exposes() -> None:
    """Alone on fast links, all of an input gradient's sum but what it takes of compute hides."""
    for degrees in (NODE, {"tp": 8}):
        waiting = laid(DENSE, degrees, constants=PLAIN, no_overlap=("tensor_parallel",))
        base, one = problem(DENSE, constants=PLAIN), row(**degrees)
        hidden = {
            (e.timed.op.name, e.timed.op.phase): e
            for e in timed_ops(base, one)
            if e.block and isinstance(e.timed.op, Communication) and e.timed.op.axis == "tp"
        }
        sums = [
            e
            for (name, phase), e in hidden.items()
            if phase == "backward"
            and e.repeats[0] > 0
            and (name.endswith(("_gather", "_reduce")) or name == "head_tp_scatter")
            and not name.startswith("embedding")
        ]
        assert len(sums) == 3
        all_s = sum(float((e.timed.seconds * e.repeats)[0]) for e in sums)
        left = sum(float(e.exposed_s[0]) for e in sums)
        saved = waiting.tp_exposed_s[0] - price(base, one).tp_exposed_s[0]
        assert saved == pytest.approx(all_s - left)
        assert 0 < left < all_s


# ------------------------------------------------------------------------------------ casts


def casts(base: Problem, one: Candidates, kind: BlockKind) -> list[MemoryBound]:
    ops = block_work(base, one, kind)
    return [op for op in ops if isinstance(op, MemoryBound) and op.name == "casts"]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_nothing_is_cast_at_16_bits_or_above(precision: str) -> None:
    for model in (DENSE, EXPERTS):
        base = problem(model, precision=precision)
        for kind in block_kinds(model):
            assert not casts(base, row(), kind)


@pytest.mark.parametrize("precision", CAST_PRECISIONS)
def test_what_a_product_reads_is_read_once_and_written_both_ways(precision: Any) -> None:
    """Llama-3-8B: qkv, out, gate and up read h, h, h and f; backward the gradients of theirs."""
    tokens, h, f, kv = 8192, 4096, 14336, 1024
    forward = tokens * (3 * h + f)
    backward = tokens * ((h + 2 * kv) + h + 2 * f + h)
    found = {op.phase: float((op.num_bytes * op.repeats)[0]) for op in casts(
        problem(DENSE, precision=precision), row(), "dense"
    )}  # fmt: skip
    each = 2 + 2 * OPERAND_BYTES[precision]
    assert found == {
        "forward": pytest.approx(each * forward),
        "backward": pytest.approx(each * backward),
        "recompute": 0,
    }
    assert not casts(problem(DENSE, precision=precision), row(), "embedding")


KINDS: tuple[BlockKind, ...] = ("moe", "head")


def test_heads_routers_and_attention_stay_in_16_bits() -> None:
    """Transformer Engine; the casts of the others are ops of their own and not in the product."""
    one, kinds = row(), KINDS
    wide, narrow = (
        {
            (kind, t.op.name, t.op.phase): float(t.seconds[0])
            for kind in kinds
            for t in seconds(base, one, block_work(base, one, kind))
            if isinstance(t.op, Gemm | AttentionCore) and t.op.repeats.any()
        }
        for base in (problem(EXPERTS), problem(EXPERTS, precision="fp8"))
    )
    for (kind, name, phase), took in narrow.items():
        if name in KEPT_IN_16_BITS:
            assert took == wide[kind, name, phase], name
        else:
            assert took < wide[kind, name, phase], name
    assert {name for _, name, _ in narrow} & {*KEPT_IN_16_BITS} == {
        "head", "router", "attention_core",
    }  # fmt: skip


# --------------------------------------------------------------------------------- dispatch

FLAT = Level("nic", "infiniband", 1 << 20, 50e9, 15e-6, "test")
SINGLES = fabric(64, gpus_per_node=1, levels=(FLAT,))
DEEPSEEK = load_model("deepseek-v3")


def of_top_k(model: ModelSpec, top_k: int) -> ModelSpec:
    assert model.experts is not None
    return model.model_copy(update={"experts": model.experts.model_copy(update={"top_k": top_k})})


def exchange_s(model: ModelSpec, on: Fabric, dispatcher: str, ep: int, **training: Any) -> float:
    """Return what one exchange of a layer's tokens takes."""
    made = problem(
        model, on=on, constants=PLAIN, dispatcher=dispatcher, **{"seq_len": 4096, **training}
    )
    one = row(ep=ep, dp_shard=ep)
    ops = [op for op in block_work(made, one, "moe") if op.name == "ep_dispatch"]
    return float(seconds(made, one, [op for op in ops if op.phase == "forward"])[0].total_s[0])


def both_s(model: ModelSpec, on: Fabric, ep: int) -> list[float]:
    return [exchange_s(model, on, way, ep) for way in ("all_to_all", "deduplicated")]


@pytest.mark.parametrize("model", [EXPERTS, DEEPSEEK], ids=lambda model: model.name)
def test_one_expert_rank_exchanges_nothing_either_way(model: ModelSpec) -> None:
    assert both_s(model, fabric(), 1) == [0, 0]


@pytest.mark.parametrize(
    ("model", "top_k", "ep"),
    [(EXPERTS, 1, 4), (EXPERTS, 2, 8), (DEEPSEEK, 1, 8), (DEEPSEEK, 1, 64)],
)
def test_what_has_no_double_among_single_ranks_is_the_plain_exchange(
    model: ModelSpec, top_k: int, ep: int
) -> None:
    """Nodes of one GPU, and either one expert a token or one expert a rank."""
    plain, deduplicated = both_s(of_top_k(model, top_k), SINGLES, ep)
    assert deduplicated == pytest.approx(plain)


@pytest.mark.parametrize("ep", [2, 8, 16, 32, 64])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("on", [fabric(), SINGLES], ids=["nodes of 8", "of 1"])
def test_sending_a_token_once_to_a_node_is_never_slower(top_k: int, ep: int, on: Fabric) -> None:
    plain, deduplicated = both_s(of_top_k(DEEPSEEK, top_k), on, ep)
    assert deduplicated <= plain * (1 + 1e-12)
    if top_k > 1:
        assert deduplicated < plain


def test_more_experts_a_token_save_more() -> None:
    saved = [
        1 - deduplicated / plain
        for plain, deduplicated in (
            both_s(of_top_k(DEEPSEEK, top_k), fabric(), 16) for top_k in (1, 2, 4, 8)
        )
    ]
    assert saved == sorted(saved)
    assert saved[-1] > 0.5, "8 copies to 2 nodes become at most 2"


def test_a_dispatcher_changes_the_exchange_alone() -> None:
    one = row(ep=4, tp=2, sequence_parallel=True, dp_shard=32, zero_stage=1)
    plain, told = (
        price(problem(EXPERTS, constants=PLAIN, dispatcher=way), one)
        for way in ("all_to_all", "deduplicated")
    )
    assert told.ep_exposed_s[0] < plain.ep_exposed_s[0]
    for name in ("compute_s", "tp_exposed_s", "dp_exposed_s", "optimizer_s"):
        assert getattr(told, name)[0] == getattr(plain, name)[0], name


# ------------------------------------------------------------------- kernels and gradients


def attention_times(device: str, kernel: str) -> float:
    made = problem(on=fabric(device=device), constants=PLAIN, attention_kernel=kernel)
    timed: list[Timed] = seconds(made, row(), block_work(made, row(), "dense"))
    return sum(float(t.seconds[0]) for t in timed if isinstance(t.op, AttentionCore))


@pytest.mark.parametrize(
    ("device", "generation"),
    [("a100-sxm-80gb", "ampere"), ("h100-sxm-80gb", "hopper"), ("b200-180gb", "blackwell")],
)
def test_older_attention_takes_what_its_papers_say(device: str, generation: str) -> None:
    """On Ampere the second generation is the fastest there is."""
    fastest = attention_times(device, "fastest")
    for kernel, known in OLDER_ATTENTION.items():
        ratio = known.get(generation) or known.get("")
        expected = ratio.value if ratio else 1.0
        assert attention_times(device, kernel) == pytest.approx(expected * fastest)
    assert fastest <= attention_times(device, "flash2") < attention_times(device, "flash1")


def moved(base: Problem, name: str, phase: str) -> float:
    ops = (op for op in block_work(base, row(), "dense") if isinstance(op, MemoryBound))
    return sum(
        float((op.num_bytes * op.repeats)[0]) for op in ops if (op.name, op.phase) == (name, phase)
    )


def test_kernels_one_by_one_move_more_than_fused_ones() -> None:
    for name in ("norms", "activation"):
        for phase in ("forward", "backward"):
            fused, plain = (
                moved(problem(fused_kernels=kernels), name, phase) for kernels in (True, False)
            )
            assert 0 < fused < plain, name
    assert moved(problem(), "residual", "forward") == moved(
        problem(fused_kernels=False), "residual", "forward"
    )


@pytest.mark.parametrize(
    ("training", "each"),
    [
        ({}, 0),  # fp32, added to by the product itself
        ({"main_grads": "same"}, 2 + 2 * 2),
        ({"fused_kernels": False}, 2 + 2 * 4),
        ({"fused_kernels": False, "precision": "fp32"}, 4 + 2 * 4),
    ],
    ids=str,
)
def test_gradients_are_read_and_sums_read_and_written(training: dict[str, Any], each: int) -> None:
    """Llama-3-8B: a layer of 218,112,000 parameters (4 h^2 for attention's, its norms, 3 h f)."""
    h, f, kv = 4096, 14336, 1024
    parameters = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert parameters == 218_112_000
    found = moved(problem(**training), "gradient_accumulation", "weight_gradient")
    assert found == each * parameters


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=lambda model: model.name)
def test_matrices_gathered_one_by_one_move_the_same_in_more_calls(model: ModelSpec) -> None:
    """Four a layer, one for each end; a call has a latency, so it is never faster."""
    one = row(dp_shard=64, zero_stage=3, num_micro_batches=2)
    layers, matrices = (problem(model, constants=PLAIN, gathers=g) for g in ("layer", "matrix"))
    sent = []
    for base in (layers, matrices):
        ops = [
            op
            for op in rank_work(base, one)
            if isinstance(op, Communication) and op.unit is not None
        ]
        sent.append(
            {
                (op.name, op.unit): (float((op.size_bytes * op.repeats)[0]), float(op.repeats[0]))
                for op in ops
            }
        )
    assert sent[0].keys() == sent[1].keys()
    for key, (size, repeats) in sent[0].items():
        times = 1 if key[1] in ("embedding", "head") else 4
        assert sent[1][key] == pytest.approx((size, times * repeats))
    assert step_s(matrices, one) >= step_s(layers, one)
    assert np.all(price(matrices, one).dp_exposed_s > price(layers, one).dp_exposed_s)
