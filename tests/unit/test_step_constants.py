"""The fitted figures of a step: what each of them scales, which way, and where none applies."""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from planner.constants import STEP_SPREAD
from planner.cost.collectives import choose, legal_methods
from planner.cost.problem import Problem
from planner.cost.seconds import Timed, seconds
from planner.cost.step import price
from planner.cost.step_constants import PLAIN, StepConstants, step_constants, stored_constants
from planner.cost.work import (
    EXPERT_PRODUCTS,
    AttentionCore,
    Communication,
    Gemm,
    MemoryBound,
    block_work,
    rank_work,
)
from planner.hardware.devices import device
from planner.hardware.gpus import Architecture
from planner.hardware.kernels import attention_s, gemm_s, grouped_gemm_s, memory_bound_s
from planner.layout.groups import axis_group
from tests.unit.problems import fabric, problem, row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "step_fit.json"
NAMES = [field.name for field in fields(StepConstants)]
DEVICES = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm-80gb", "blackwell": "b200-180gb"}
# tp and ep lie inside a node of 8, data parallelism reaches others, and kernels are short.
LAYOUT = {
    "tp": 2, "ep": 4, "dp_shard": 16, "zero_stage": 1, "sequence_parallel": True,
    "num_micro_batches": 2,
}  # fmt: skip


def base(constants: StepConstants = PLAIN, **fields_of: Any) -> Problem:
    return problem("mixtral-8x7b", constants=constants, **{"seq_len": 4096, **fields_of})


def on_gpu(name: str) -> dict[str, Any]:
    return {"on": fabric(device=name)}


def step_s(made: Problem, **degrees: Any) -> float:
    return float(price(made, row(**{**LAYOUT, **degrees})).step_time_s()[0])


# ---------------------------------------------------------------------------- which figures


def test_every_figure_is_stored_once_and_is_a_number() -> None:
    assert set(stored_constants()) == set(NAMES)
    for name in NAMES:
        value = getattr(step_constants(), name)
        assert value == stored_constants()[name]["value"]
        assert math.isfinite(value)
        assert value > 0 or (value == 0 and getattr(PLAIN, name) == 0), name


def test_gpus_take_the_fitted_figures_and_cores_none() -> None:
    assert problem().step_constants == step_constants()
    cores = fabric(8, library="gloo", device="cpu-core", cores_per_node=8)
    for_cores = problem("example-gpt", on=cores, framework="executor", precision="fp32")
    assert for_cores.step_constants == PLAIN
    assert step_constants() != PLAIN


@pytest.mark.parametrize("on", [fabric(8), fabric(8, cores_per_node=8)])
def test_given_figures_are_taken_everywhere(on: Any) -> None:
    given = replace(PLAIN, jitter=0.5)
    assert problem(on=on, constants=given).step_constants is given


def test_an_architecture_has_the_clock_of_the_nearest_that_was_fitted() -> None:
    clocks = replace(PLAIN, clock_ampere=0.5, clock_hopper=0.6, clock_blackwell=0.7)
    older = ("pascal", "volta", "turing", "ampere", "ada")
    for architecture in get_args(Architecture):
        expected = 0.5 if architecture in older else 0.6
        expected = 0.7 if architecture == "blackwell" else expected
        assert clocks.clock(architecture) == expected, architecture


# --------------------------------------------------------------------- as in their own tables


def kernel_s(made: Problem, timed: Timed) -> Any:
    """Return the seconds of one occurrence by the kernel tables."""
    op, gpu, precision = timed.op, made.device, made.training.precision
    if isinstance(op, MemoryBound):
        return memory_bound_s(gpu, op.num_bytes, op.num_kernels)
    if isinstance(op, AttentionCore):
        return attention_s(
            gpu,
            precision,
            op.flop,
            seq_len=op.seq_len,
            batch=op.batch,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            backward=op.phase == "backward",
        )
    assert isinstance(op, Gemm)
    if op.experts is None:
        return gemm_s(gpu, precision, op.m, op.n, op.k)
    own = op.experts
    return grouped_gemm_s(gpu, precision, op.m, op.n, op.k, own.num_local, uneven=own.uneven)


@pytest.mark.parametrize("name", DEVICES.values())
@pytest.mark.parametrize("fused", [True, False])
def test_plain_figures_leave_kernels_as_in_their_tables(name: str, fused: bool) -> None:
    made, one = base(**on_gpu(name), fused_attention=fused), row(**LAYOUT)
    compared = 0
    for timed in seconds(made, one, block_work(made, one, "moe")):
        if isinstance(timed.op, Gemm | AttentionCore | MemoryBound) and timed.op.repeats.any():
            assert timed.seconds == pytest.approx(kernel_s(made, timed)), timed.op.name
            compared += 1
    assert compared > 20


def test_plain_figures_leave_collectives_as_alone() -> None:
    made, one = base(), row(**LAYOUT)
    ops = [*block_work(made, one, "moe"), *rank_work(made, one)]
    for timed in seconds(made, one, ops):
        if isinstance(timed.op, Communication) and timed.op.repeats.any():
            legal = legal_methods(made.fabric, made.framework, timed.op.op)
            group = axis_group(made.fabric, one, timed.op.axis)
            choice = choose(timed.op.op, made.fabric, group, timed.op.size_bytes, legal)
            assert timed.seconds == pytest.approx(choice.seconds), timed.op.name


def test_plain_figures_add_no_wait_for_host_launches_or_stragglers() -> None:
    found = price(base(), row(**LAYOUT))
    assert found.launch_s[0] == found.straggler_s[0] == found.host_s[0] == 0


# ---------------------------------------------------------------------------- what they scale


def ratios(constants: StepConstants, **fields_of: Any) -> dict[tuple[str, str], float]:
    """Return every op's seconds over those with plain figures."""
    one = row(**LAYOUT)

    def timed(of: StepConstants) -> list[Timed]:
        made = base(of, **fields_of)
        return seconds(made, one, [*block_work(made, one, "moe"), *rank_work(made, one)])

    return {
        (type(a.op).__name__, a.op.name): float(b.seconds[0] / a.seconds[0])
        for a, b in zip(timed(PLAIN), timed(constants), strict=True)
        if a.seconds[0] > 0
    }


def scaled(found: dict[tuple[str, str], float]) -> set[tuple[str, str]]:
    return {op for op, ratio in found.items() if ratio != pytest.approx(1)}


def by_class(*names: str) -> Callable[[tuple[str, str]], bool]:
    return lambda op: op[0] in names


@pytest.mark.parametrize(
    ("name", "value", "concerns"),
    [
        ("clock_hopper", 0.5, by_class("Gemm")),
        ("attention_time", 2.0, by_class("AttentionCore")),
        ("grouped_time", 2.0, lambda op: op[1] in EXPERT_PRODUCTS),
        (
            "collective_time",
            2.0,
            lambda op: op[0] == "Communication" and ("_tp_" in op[1] or op[1].startswith("ep_")),
        ),
        (
            "network_time",
            2.0,
            lambda op: op[1].removeprefix("expert_").startswith(("gradient_", "parameter_")),
        ),
    ],
)
def test_a_figure_scales_what_it_is_of_and_nothing_else(
    name: str, value: float, concerns: Callable[[tuple[str, str]], bool]
) -> None:
    found = ratios(replace(PLAIN, **{name: value}))
    doubled = {op for op, ratio in found.items() if ratio == pytest.approx(2)}
    named = {op for op in found if concerns(op)}
    sharded = {("Communication", "sequence_parallel_gradient_reduce")}  # over tp
    assert named
    assert scaled(found) - sharded == doubled - sharded == named - sharded


def test_batched_products_of_scores_are_no_experts() -> None:
    """They are grouped as well; every matrix has the same rows."""
    for name, value, concerns in (
        ("grouped_time", 2.0, {*EXPERT_PRODUCTS}),
        ("attention_time", 2.0, set()),
    ):
        found = ratios(replace(PLAIN, **{name: value}), fused_attention=False)
        assert {op for _, op in scaled(found)} == concerns


def test_half_the_memory_rate_doubles_all_but_the_start_of_a_kernel() -> None:
    one, started = row(**LAYOUT), device("h100-sxm-80gb").figures.fixed_s
    whole, half = (
        {
            t.op.name: t
            for t in seconds(made, one, block_work(made, one, "moe"))
            if t.op.repeats.any()
        }
        for made in (base(), base(replace(PLAIN, memory_rate=0.5)))
    )
    for name in ("norms", "residual", "permute"):
        op = whole[name].op
        assert isinstance(op, MemoryBound)
        fixed = op.num_kernels * started
        assert half[name].seconds - fixed == pytest.approx(2 * (whole[name].seconds - fixed))
    assert scaled(ratios(replace(PLAIN, memory_rate=0.5))) == {
        ("MemoryBound", name) for kind, name in ratios(PLAIN) if kind == "MemoryBound"
    }


# ---------------------------------------------------------------------------- which way

SLOWER_WHEN_LARGER = {
    "clock_ampere": False,
    "clock_hopper": False,
    "clock_blackwell": False,
    "memory_rate": False,
    "attention_time": True,
    "grouped_time": True,
    "collective_time": True,
    "network_time": True,
    "launch_s": True,
    "jitter": True,
    "host_s": True,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("around", [PLAIN, None], ids=["plain", "fitted"])
def test_a_step_follows_every_figure_one_way(name: str, around: StepConstants | None) -> None:
    constants = around or step_constants()
    start = {"launch_s": 200e-6, "jitter": 0.01, "host_s": 0.01}.get(name, 0.8)
    generation = name.removeprefix("clock_")
    gpu = on_gpu(DEVICES.get(generation, DEVICES["hopper"]))
    found = [
        step_s(base(replace(constants, **{name: start * factor}), **gpu))
        for factor in (1.0, 1.1, 1.3, 2.0)
    ]
    signs = np.sign(np.diff(found))
    assert signs.tolist() == 3 * [1.0 if SLOWER_WHEN_LARGER[name] else -1.0]


@pytest.mark.parametrize("generation", DEVICES)
def test_a_clock_is_of_its_own_generation(generation: str) -> None:
    gpu, others = on_gpu(DEVICES[generation]), [one for one in DEVICES if one != generation]
    plain = step_s(base(**gpu))
    for other in others:
        assert step_s(base(replace(PLAIN, **{f"clock_{other}": 0.5}), **gpu)) == plain
    assert step_s(base(replace(PLAIN, **{f"clock_{generation}": 0.5}), **gpu)) > 1.1 * plain


# --------------------------------------------------------------------------------- how sure


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_four_of_five_published_runs_lie_in_the_interval_of_a_plan(kind: str) -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    errors = [
        abs(row["left_out_s"] / row["measured_s"] - 1)
        for row in rows
        if row["flop"]["has_experts"] == (kind == "experts")
    ]
    assert round(float(np.quantile(errors, 0.8)), 2) == STEP_SPREAD[kind].value
