"""Timed runs made up for tests: what a cluster with known constants would have measured."""

from typing import Any

from planner.plan import CalibrationRun, CollectiveTiming, Plan, RankTimings, document_hash

ALPHA_S = 2e-4
BYTES_PER_S = 5e8


def made_up_run(plan: Plan, *, compute_s: float = 0.5, **changes: Any) -> CalibrationRun:
    """Return a run of a data-parallel ``plan`` whose all_reduce is alpha + size / bandwidth."""
    timings = tuple(
        CollectiveTiming(
            axis="dp_cp",
            op="all_reduce",
            algorithm="ring",
            size_bytes=size_bytes,
            group_size=plan.layout.dp,
            seconds=(ALPHA_S + size_bytes / BYTES_PER_S,) * 3,
            is_probe=True,
        )
        for size_bytes in (8_000, 80_000, 800_000, 8_000_000)
    )
    ranks = tuple(
        RankTimings(
            rank=rank,
            host="made-up",
            step_s=(compute_s + 0.1, compute_s + 0.11, compute_s + 0.1),
            forward_backward_s=(compute_s,) * 3,
            optimizer_s=(0.01,) * 3,
            communication_s=(0.05,) * 3,
            collectives=timings,
        )
        for rank in range(plan.layout.world_size)
    )
    fields = {
        "plan_id": plan.id,
        "plan_hash": document_hash(plan),
        "topology": plan.topology,
        "backend": "gloo",
        "executor_version": "test",
        "torch_version": "test",
        "num_warmup_steps": 1,
        "ranks": ranks,
    }
    return CalibrationRun.model_validate({**fields, **changes})
