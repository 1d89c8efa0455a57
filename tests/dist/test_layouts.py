"""Every layout trains what one process trains, and calls what the cost model prices."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn import functional

from planner.pipeline.schedules import schedule_order
from planner.plan import CalibrationRun, Collective, Plan, Probe, document_hash
from tests.dist.jobs import EXAMPLE, TINY_CONFIG, run
from tests.dist.plans import TINY, make_plan

sys.path.insert(0, str(EXAMPLE.parent))
import train_gpt  # an example, not a package: its folder has to be on the path first

pytestmark = pytest.mark.dist

STEPS = 20
FP64 = 8
OPS = get_args(Collective)
PROBES = (
    Probe(axis="tp", op="all_reduce", sizes_bytes=(4096,)),  # one rank: nothing to measure
    *(Probe(axis="dp_cp", op=op, sizes_bytes=(4096, 1 << 16)) for op in OPS),
)
# 12,501 elements: the hierarchical reduction has to pad every full bucket.
ODD_BUCKET_BYTES = 12_501 * FP64

PLANS: dict[str, tuple[Plan, int]] = {
    "dp4": (make_plan(dp=4, probes=PROBES), STEPS),
    "dp4 hierarchical": (
        make_plan(
            dp=4,
            ranks_per_unit=2,
            gradient_algorithm="hierarchical",
            bucket_bytes=ODD_BUCKET_BYTES,
        ),
        STEPS,
    ),
    "dp4 recompute": (make_plan(dp=4, recompute="full"), STEPS),
    "tp2 dp2": (make_plan(tp=2, dp=2, micro_batch_size=2), STEPS),
    "tp2 dp2 recompute": (make_plan(tp=2, dp=2, micro_batch_size=4, recompute="full"), 2),
    "pp2 dp2 1f1b": (make_plan(pp=2, dp=2), STEPS),
    "pp2 dp2 gpipe": (make_plan(pp=2, dp=2, schedule="gpipe"), STEPS),
    "pp4 1f1b": (make_plan(pp=4), STEPS),
    "pp2 dp2 uneven": (make_plan(pp=2, dp=2, layers=(3, 1)), STEPS),
    "tp2 pp2": (make_plan(tp=2, pp=2, micro_batch_size=2), STEPS),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train all plans in one job of four ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    cases = [
        {"name": name, "steps": steps, "plan": plan.model_dump(mode="json")}
        for name, (plan, steps) in PLANS.items()
    ]
    (folder / "plans.json").write_text(json.dumps(cases))
    worker = str(Path(__file__).with_name("train_layouts.py"))
    arguments = [worker, str(folder / "plans.json"), str(folder / "out.json")]
    for rank, end in enumerate(run([arguments] * 4, within_s=240)):
        assert end.code == 0, f"rank {rank}: {end.stderr[-2000:]}"
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.fixture(scope="module")
def single_process_losses() -> list[float]:
    """Train with plain torch: no executor, the whole batch at once."""
    plan = make_plan(global_batch_size=8)
    torch.manual_seed(0)
    model = train_gpt.GPT(train_gpt.GPTConfig.from_file(TINY_CONFIG)).to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
    losses = []
    for step in range(STEPS):
        inputs, targets = book.batch(step)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3, "it learns"
    return losses


@pytest.mark.parametrize("name", PLANS)
def test_loss_curve_equals_one_process(
    name: str, trained: dict[str, Any], single_process_losses: list[float]
) -> None:
    losses = trained[name]["losses"]
    assert len(losses) == PLANS[name][1]
    assert losses == pytest.approx(single_process_losses[: len(losses)], rel=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_run_validates_and_times_every_rank(name: str, trained: dict[str, Any]) -> None:
    plan, steps = PLANS[name]
    timed = CalibrationRun.model_validate(trained[name]["run"])
    assert timed.plan_hash == document_hash(plan)
    assert timed.backend == "gloo"
    assert [timings.rank for timings in timed.ranks] == [0, 1, 2, 3]
    for timings in timed.ranks:
        assert len(timings.step_s) == steps - 1
        for step, compute, optimizer, comm in zip(
            timings.step_s,
            timings.forward_backward_s,
            timings.optimizer_s,
            timings.communication_s,
            strict=True,
        ):
            assert 0 < compute + optimizer + comm <= step


def calls_per_step(timed: CalibrationRun, rank: int) -> Counter[tuple[str, str, str, int, int]]:
    """Return how often a step calls what: (axis, op, algorithm, bytes, group) -> count."""
    counts: Counter[tuple[str, str, str, int, int]] = Counter()
    steps = len(timed.ranks[rank].step_s)
    for c in timed.ranks[rank].collectives:
        if not c.is_probe:
            key = (c.axis, c.op, c.algorithm, c.size_bytes, c.group_size)
            assert len(c.seconds) % steps == 0
            counts[key] += len(c.seconds) // steps
    return counts


def expected_calls(plan: Plan, rank: int) -> Counter[tuple[str, str, str, int, int]]:
    """Return the calls that a layout implies, from Megatron-LM's scheme and the bucket rule."""
    counts: Counter[tuple[str, str, str, int, int]] = Counter()
    layout, m = plan.layout, plan.batch.num_micro_batches
    stage = plan.pipeline.stages[plan.coordinates(rank)["pp"]]
    token_bytes = plan.batch.micro_batch_size * plan.training.seq_len * FP64
    activation_bytes = token_bytes * plan.model.hidden_size
    if layout.tp > 1:
        per_layer = 5 if plan.recompute == "full" else 4
        ends = stage.embedding + stage.head
        big = ("tp", "all_reduce", "ring", activation_bytes, layout.tp)
        counts[big] = m * (per_layer * stage.num_layers + ends)
        if stage.head:
            counts["tp", "all_reduce", "ring", token_bytes, layout.tp] = 3 * m
    if layout.pp > 1:
        boundaries = (not stage.embedding) + (not stage.head)
        counts["pp", "send_recv", "point_to_point", activation_bytes, 2] = 2 * m * boundaries
    if layout.dp > 1:
        bucket = plan.sharding.gradient_bucket_bytes
        algorithm = plan.algorithm("dp_cp", "all_reduce", bucket)
        full, rest = divmod(local_parameters(plan, rank) * FP64, bucket // FP64 * FP64)
        sizes = [bucket // FP64 * FP64] * full + ([rest] if rest else [])
        for size in sizes:
            counts["dp_cp", "all_reduce", algorithm, size, layout.dp] += 1
    return counts


def local_parameters(plan: Plan, rank: int) -> int:
    """Return the parameters of a rank of TINY: norms whole, everything else split by tp."""
    stage = plan.pipeline.stages[plan.coordinates(rank)["pp"]]
    h, tp = TINY.hidden_size, plan.layout.tp
    matrices = 2 * h * 32 + 2 * h * 16 + 3 * h * 48
    vocabulary = TINY.vocab_size * h * (stage.embedding + stage.head)
    norms = 2 * h * stage.num_layers + (h if stage.head else 0)
    return (stage.num_layers * matrices + vocabulary) // tp + norms


@pytest.mark.parametrize("name", PLANS)
def test_recorded_calls_are_those_the_layout_implies(name: str, trained: dict[str, Any]) -> None:
    plan, _ = PLANS[name]
    timed = CalibrationRun.model_validate(trained[name]["run"])
    for rank in range(4):
        assert calls_per_step(timed, rank) == expected_calls(plan, rank)


def test_probes_are_timed_on_every_rank(trained: dict[str, Any]) -> None:
    timed = CalibrationRun.model_validate(trained["dp4"]["run"])
    for timings in timed.ranks:
        probes = [c for c in timings.collectives if c.is_probe]
        assert [(c.axis, c.op, c.size_bytes, c.group_size) for c in probes] == [
            ("dp_cp", op, size_bytes, 2 if op == "send_recv" else 4)
            for op in OPS
            for size_bytes in (4096, 1 << 16)
        ]
        assert all(len(c.seconds) == 5 and min(c.seconds) > 0 for c in probes)


def test_send_and_receive_lists_pair_up(trained: dict[str, Any]) -> None:
    """Stage 0 lists forward then backward messages, and so does stage 1: same lengths, in order."""
    timed = CalibrationRun.model_validate(trained["pp2 dp2 1f1b"]["run"])
    first, last = (
        [c for c in timed.ranks[rank].collectives if c.op == "send_recv"] for rank in (0, 2)
    )
    assert len(first) == len(last) == 2
    assert {len(c.seconds) for c in (*first, *last)} == {4 * (STEPS - 1)}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("pp2 dp2 1f1b", "1f1b"), ("pp2 dp2 gpipe", "gpipe"), ("pp4 1f1b", "1f1b")],
)
def test_torch_runs_the_planners_order(name: str, schedule: Any, trained: dict[str, Any]) -> None:
    plan, _ = PLANS[name]
    planned = schedule_order(
        schedule,
        num_stages=plan.layout.pp,
        num_micro_batches=plan.batch.num_micro_batches,
    )
    for rank, order in enumerate(trained[name]["orders"]):
        actions = planned[plan.coordinates(rank)["pp"]]
        assert order == [f"{action.kind}{action.micro_batch}" for action in actions]
