"""A calibration finds the constants that made the measurements."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibrate.apply import calibrated_fabric, fitted_fabric
from planner.calibrate.fit import fit_calibration
from planner.calibrate.levels import Transfer, fit_transfers
from planner.calibrate.runs import Measured, check_run, plan_candidate
from planner.cost.collectives import collective_terms
from planner.cost.step import mean_compute_s, price
from planner.errors import InvalidInputError
from planner.layout.candidates import Candidates
from planner.layout.groups import axis_group
from planner.plan import (
    Axis,
    Calibration,
    CalibrationRun,
    CollectiveTiming,
    Method,
    Plan,
    RankTimings,
    document_hash,
)
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import build_problem, resolve
from tests.unit.problems import NVLINK, RAIL, fabric, problem, row

TRUE_ALPHA_S, TRUE_BYTES_PER_S = 120e-6, 0.7e9
COMPUTE_SCALE, OPTIMIZER_SCALE, HOST_S = 1.7, 0.6, 0.05
PULL = 0.01  # of the prior, on figures that a fit finds
SIZES = (4096, 65536, 1 << 20, 1 << 24)


def local(**changes: Any) -> PlanRequest:
    fields = {
        "topology": "local-gloo",
        "model": "example-gpt",
        "framework": "executor",
        "training": {"global_batch_size": 16, "seq_len": 256, "precision": "fp32"},
        "constraints": {"dp": 4},
    }
    return PlanRequest.model_validate({**fields, **changes})


def synthetic_run(plan: Plan, *, jitter: float = 0.0) -> CalibrationRun:
    """Return what a cluster with the true constants would report."""
    rng = np.random.default_rng(0)
    prior = build_problem(resolve(local()))
    level = replace(
        prior.fabric.levels[0], alpha_s=TRUE_ALPHA_S, bytes_per_s=TRUE_BYTES_PER_S, measured=True
    )
    cluster = replace(prior.fabric, levels=(level,))
    candidate = plan_candidate(prior, plan)
    group = axis_group(cluster, candidate, "dp_cp")
    true = replace(
        prior, fabric=cluster, compute_scale=COMPUTE_SCALE, optimizer_scale=OPTIMIZER_SCALE
    )
    compute = COMPUTE_SCALE * float(mean_compute_s(prior, candidate)[0])
    optimizer = OPTIMIZER_SCALE * float(price(prior, candidate).optimizer_s[0])

    def seconds(size: int) -> float:
        terms = collective_terms(
            "all_reduce", Method("ring"), cluster, group, np.array([float(size)])
        )
        return float(terms.total_s()[0])

    num_steps, gradient = 4, SIZES[-1]
    ranks = []
    for rank in range(4):
        waits = [seconds(gradient) * (1 + 0.5 * (rank != i % 4)) for i in range(num_steps)]
        timings = [
            CollectiveTiming(
                axis="dp_cp",
                op="all_reduce",
                algorithm="ring",
                size_bytes=gradient,
                group_size=plan.layout.degree("dp_cp"),
                seconds=tuple(waits),
            )
        ]
        timings += [
            CollectiveTiming(
                axis="dp_cp",
                op="all_reduce",
                algorithm="ring",
                size_bytes=size,
                group_size=plan.layout.degree("dp_cp"),
                seconds=tuple(seconds(size) * (1 + jitter * rng.random()) for _ in range(5)),
                is_probe=True,
            )
            for size in SIZES
        ]
        step = float(price(true, candidate).step_time_s()[0]) + HOST_S
        ranks.append(
            RankTimings(
                rank=rank,
                host="h",
                step_s=(step,) * num_steps,
                forward_backward_s=(compute,) * num_steps,
                optimizer_s=(optimizer,) * num_steps,
                communication_s=tuple(waits),
                collectives=tuple(timings),
            )
        )
    return CalibrationRun(
        plan_id=plan.id,
        plan_hash=document_hash(plan),
        topology=plan.topology,
        backend="gloo",
        executor_version="0",
        torch_version="2",
        num_warmup_steps=1,
        ranks=tuple(ranks),
    )


def calibrate(plan: Plan, run: CalibrationRun) -> Calibration:
    measured = Measured(build_problem(resolve(local())), plan, run)
    check_run(measured)
    return fit_calibration([measured])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(resolve(local()))


def test_the_true_constants_come_back(plan: Plan) -> None:
    """But for what the prior pulls, less than a percent."""
    found = calibrate(plan, synthetic_run(plan))
    (level,), (call,) = found.levels, found.calls
    for one in (level, *call.levels):
        assert one.alpha_s == pytest.approx(TRUE_ALPHA_S, rel=PULL)
        assert one.bytes_per_s == pytest.approx(TRUE_BYTES_PER_S, rel=PULL)
        assert one.residual < PULL
    assert found.compute_scale == pytest.approx(COMPUTE_SCALE)
    assert found.optimizer_scale == pytest.approx(OPTIMIZER_SCALE)
    assert found.host_overhead_s == pytest.approx(HOST_S, rel=PULL)
    assert found.residual < PULL


def test_a_pipeline_does_not_dilute_the_host(plan: Plan) -> None:
    piped = local(constraints={"pp": 2, "dp": 2, "schedule": "1f1b"})
    other = make_plan(resolve(piped))
    prior = build_problem(resolve(local()))
    flat = Measured(prior, plan, synthetic_run(plan))
    pipeline = Measured(prior, other, synthetic_run(other))
    together = fit_calibration([flat, pipeline, pipeline])
    assert together.host_overhead_s == pytest.approx(HOST_S, rel=0.1)


def test_a_pipeline_alone_reproduces_its_own_step(plan: Plan) -> None:
    other = make_plan(resolve(local(constraints={"pp": 2, "dp": 2, "schedule": "1f1b"})))
    run = synthetic_run(other)
    again = make_plan(
        resolve(local(constraints={"pp": 2, "dp": 2, "schedule": "1f1b"})), calibrate(other, run)
    )
    assert again.layout == other.layout
    assert again.prediction.step_time_s == pytest.approx(run.ranks[0].step_s[0], rel=0.02)


@pytest.mark.parametrize("field", ["alpha_s", "bytes_per_s"])
def test_every_measured_level_figure_reaches_the_plan(plan: Plan, field: str) -> None:
    calibration = calibrate(plan, synthetic_run(plan))
    worse = {"alpha_s": 100.0, "bytes_per_s": 0.01}[field]
    level = calibration.levels[0]
    changed = level.model_copy(update={field: getattr(level, field) * worse})
    pooled = calibration.model_copy(update={"calls": (), "id": "pooled"})
    slow = pooled.model_copy(update={"levels": (changed,), "id": "slow"})
    before, after = (make_plan(resolve(local()), c).prediction for c in (pooled, slow))
    assert after.breakdown.dp_exposed_s > 1.2 * before.breakdown.dp_exposed_s


def test_host_overhead_reaches_the_plan(plan: Plan) -> None:
    calibration = calibrate(plan, synthetic_run(plan))
    slow = calibration.model_copy(update={"host_overhead_s": 1.0, "id": "slow"})
    before, after = (make_plan(resolve(local()), c).prediction for c in (calibration, slow))
    assert after.step_time_s - before.step_time_s == pytest.approx(1.0 - HOST_S, rel=PULL)


def test_two_levels_are_fitted_together() -> None:
    rail = replace(RAIL, unit_size=16)
    true = (
        replace(NVLINK, alpha_s=5e-6, bytes_per_s=2e11, measured=True),
        replace(rail, alpha_s=4e-5, bytes_per_s=1e10, measured=True),
    )
    base = problem("llama3-8b", on=fabric(16, levels=(NVLINK, rail)))
    real = fabric(16, levels=true)
    axes: tuple[tuple[Candidates, Axis], ...] = (
        (row(tp=8, dp_shard=2), "tp"),
        (row(dp_shard=16), "dp"),
    )
    transfers = []
    for candidate, axis in axes:
        group = axis_group(real, candidate, axis)
        for size in SIZES:
            column = np.array([float(size)])
            terms = collective_terms("all_reduce", Method("ring"), real, group, column)
            seconds = float(terms.total_s()[0])
            transfers.append(
                Transfer(base.fabric, "all_reduce", Method("ring"), group, column, seconds)
            )
    found, _ = fit_transfers(transfers)
    fitted = fitted_fabric(base.fabric, found, source="test")
    assert [level.measured for level in fitted.levels] == [True, True]
    for level, one in zip(true, found, strict=True):
        assert one.alpha_s == pytest.approx(level.alpha_s, rel=PULL)
        assert one.bytes_per_s == pytest.approx(level.bytes_per_s, rel=PULL)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step_s": (1e-6,) * 4}, "less than its parts"),
        ({"step_s": (9.9e5,) * 4}, "all but nothing of it"),
        ({"communication_s": (1e3,) * 4}, "less than its parts"),
        ({"forward_backward_s": (1e-6,) * 4, "step_s": (0.06,) * 4}, "flop/s"),
        ({"optimizer_s": (1e-8,) * 4}, "optimizer at .* times its prior"),
        ({"communication_s": ()}, "one per step"),
    ],
)
def test_runs_that_break_physics_are_refused(
    plan: Plan, change: dict[str, Any], match: str
) -> None:
    run = synthetic_run(plan)
    bad = run.model_copy(update={"ranks": tuple(r.model_copy(update=change) for r in run.ranks)})
    with pytest.raises(InvalidInputError, match=match):
        calibrate(plan, bad)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seconds": 1e-8}, "follow no latency and bandwidth"),
        ({"seconds": 1e5}, "possible is"),
        ({"seconds": 1e6, "size_bytes": 1}, "possible is"),
        ({"size_bytes": 1 << 50}, "need 1 to"),
    ],
)
def test_timings_that_follow_no_law_are_refused(
    plan: Plan, change: dict[str, Any], match: str
) -> None:
    run = synthetic_run(plan)

    def absurd(timing: CollectiveTiming) -> CollectiveTiming:
        size = change.get("size_bytes", timing.size_bytes)
        seconds = (change.get("seconds", 1e-3),) * len(timing.seconds)
        return timing.model_copy(update={"seconds": seconds, "size_bytes": size})

    bad = run.model_copy(
        update={
            "ranks": tuple(
                r.model_copy(update={"collectives": tuple(map(absurd, r.collectives))})
                for r in run.ranks
            )
        }
    )
    with pytest.raises(InvalidInputError, match=match):
        calibrate(plan, bad)


def test_noise_moves_them_no_more_than_itself(plan: Plan) -> None:
    found = calibrate(plan, synthetic_run(plan, jitter=0.1))
    assert found.levels[0].bytes_per_s == pytest.approx(TRUE_BYTES_PER_S, rel=0.1)
    assert found.levels[0].alpha_s == pytest.approx(TRUE_ALPHA_S, rel=0.2)


def test_the_next_plan_uses_it_and_says_so(plan: Plan) -> None:
    run = synthetic_run(plan)
    calibration = calibrate(plan, run)
    again = make_plan(resolve(local()), calibration)
    assert again.prediction.step_time_s == pytest.approx(run.ranks[0].step_s[0], rel=0.05)
    assert again.provenance.calibration_id == calibration.id
    assert "measured here in 1 run" in again.provenance.calibration
    assert again.id != plan.id


def test_only_measured_levels_are_replaced(plan: Plan) -> None:
    calibration = calibrate(plan, synthetic_run(plan))
    other = build_problem(
        resolve(
            local(
                topology="dgx-h100",
                framework="megatron",
                constraints={},
                training={"global_batch_size": 16, "seq_len": 256},
            )
        )
    ).fabric
    assert calibrated_fabric(other, calibration) == other
    assert calibrated_fabric(other, None) is other


def test_the_id_depends_on_the_runs_alone(plan: Plan) -> None:
    one = synthetic_run(plan)
    first, second = (calibrate(plan, one) for _ in range(2))
    assert first == second
    noisy = calibrate(plan, synthetic_run(plan, jitter=0.1))
    assert noisy.id != first.id


def test_a_run_of_another_plan_is_refused(plan: Plan) -> None:
    other = make_plan(resolve(local(top_k=1)))
    with pytest.raises(InvalidInputError, match="plan_hash is"):
        calibrate(other, synthetic_run(plan))
    with pytest.raises(InvalidInputError, match="no run was given"):
        fit_calibration([])


def test_a_plan_is_the_row_it_came_from(plan: Plan) -> None:
    prior = build_problem(resolve(local()))
    priced = price(prior, plan_candidate(prior, plan))
    assert priced.step_time_s()[0] == pytest.approx(plan.prediction.step_time_s)


def with_timing(run: CalibrationRun, **fields: Any) -> CalibrationRun:
    """Return the run with one more list of calls on rank 0."""
    timing = CollectiveTiming(size_bytes=4096, seconds=(1e-3,), **fields)
    first = run.ranks[0]
    more = first.model_copy(update={"collectives": (*first.collectives, timing)})
    return run.model_copy(update={"ranks": (more, *run.ranks[1:])})


@pytest.mark.parametrize("op", ["send_recv", "gather", "scatter"])
def test_messages_and_collapsed_routing_are_no_transfers_to_fit(plan: Plan, op: Any) -> None:
    """A message has two ends on an axis of four; nothing is fitted to it."""
    size = 2 if op == "send_recv" else 4
    algorithm = "point_to_point" if op == "send_recv" else "direct"
    run = synthetic_run(plan)
    more = with_timing(run, axis="dp_cp", op=op, algorithm=algorithm, group_size=size)
    assert calibrate(plan, more).levels == calibrate(plan, run).levels


def test_a_message_of_four_ends_is_refused(plan: Plan) -> None:
    run = with_timing(
        synthetic_run(plan),
        axis="dp_cp",
        op="send_recv",
        algorithm="point_to_point",
        group_size=4,
    )
    with pytest.raises(InvalidInputError, match="is 4; a message has 2"):
        calibrate(plan, run)


def test_missing_phases_are_refused(plan: Plan) -> None:
    run = synthetic_run(plan)
    idle = run.model_copy(
        update={
            "ranks": tuple(
                r.model_copy(update={"forward_backward_s": (0.0,) * 4}) for r in run.ranks
            )
        }
    )
    with pytest.raises(InvalidInputError, match="forward_backward_s"):
        calibrate(plan, idle)
