"""A measured run with its plan, and whether figures belong where they are used."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cost.collectives import legal_algorithms
from planner.cost.problem import Problem
from planner.errors import InvalidInputError
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates
from planner.plan import (
    Calibration,
    CalibrationRun,
    CollectiveTiming,
    Plan,
    RankTimings,
    document_hash,
)
from planner.topology.fabric import Fabric

__all__ = ["Measured", "check_calibration", "check_run", "plan_candidate"]

# Below a clock tick or beyond eleven days nothing was measured.
_SECONDS_RANGE: Final = (1e-9, 1e6)
_PER_STEP: Final = ("step_s", "forward_backward_s", "optimizer_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, the plan it ran, and the uncalibrated problem of that plan's request."""

    problem: Problem
    plan: Plan
    run: CalibrationRun


def check_calibration(calibration: Calibration, topology: str) -> None:
    """Return if ``calibration`` was measured on the topology of this name.

    Raises:
        InvalidInputError: It was measured elsewhere.
    """
    if calibration.topology != topology:
        raise InvalidInputError(
            f"calibration {calibration.id} was measured on {calibration.topology!r}, the request "
            f"is for {topology!r}; use one of that topology, or none",
            where="calibration",
        )


def check_run(measured: Measured) -> None:
    """Return if plan and problem are of one model, the run of this very plan, its figures sane.

    Raises:
        InvalidInputError: ``where`` is the path in the run.
    """
    plan, run = measured.plan, measured.run
    if (fingerprint := document_hash(measured.problem.model)) != plan.model.fingerprint:
        raise InvalidInputError(
            f"plan {plan.id} is for {plan.model.name!r} with fingerprint {plan.model.fingerprint}, "
            f"got {measured.problem.model.name!r} with {fingerprint}; give the model that was "
            "planned",
            where="model",
        )
    plan_candidate(measured.problem, plan)
    needed = {
        "plan_hash": (run.plan_hash, document_hash(plan)),
        "topology": (run.topology, plan.topology),
        "ranks": (len(run.ranks), plan.layout.world_size),
    }
    for field, (got, wanted) in needed.items():
        if got != wanted:
            shown = repr(got)[:80]
            raise InvalidInputError(
                f"{field} is {shown} but plan {plan.id} has {wanted!r}; time the plan as it is "
                "stored, and send the timings of every rank",
                where=field,
            )
    for timings in run.ranks:
        path = f"ranks[{timings.rank}]"
        for problem, field in _problems(timings, measured):
            raise InvalidInputError(f"{path}.{field} {problem}", where=f"{path}.{field}")


def _problems(timings: RankTimings, measured: Measured) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, field of the rank)."""
    num_steps = len(timings.step_s)
    for field in _PER_STEP:
        seconds = getattr(timings, field)
        if len(seconds) != num_steps:
            yield f"has {len(seconds)} entries; need one per step, {num_steps}", field
        yield from _out_of_range(seconds, field)
    for number, timing in enumerate(timings.collectives):
        field = f"collectives[{number}]"
        yield from _timing_problems(timing, measured, field)


def _timing_problems(
    timing: CollectiveTiming, measured: Measured, field: str
) -> Iterator[tuple[str, str]]:
    degree = measured.plan.layout.degree(timing.axis)
    if timing.group_size != degree:
        yield (
            f"is {timing.group_size}; {timing.axis} has {degree} in the plan",
            f"{field}.group_size",
        )
    if timing.size_bytes < 1:
        yield "is 0; need the size of the message", f"{field}.size_bytes"
    yield from _algorithm_problem(timing, measured.problem.fabric, f"{field}.algorithm")
    yield from _out_of_range(timing.seconds, f"{field}.seconds")


def _algorithm_problem(
    timing: CollectiveTiming, fabric: Fabric, field: str
) -> Iterator[tuple[str, str]]:
    legal = legal_algorithms(fabric, timing.op)
    if timing.algorithm not in legal:
        yield f"is {timing.algorithm!r}; {timing.op} has {', '.join(legal)}", field


def _out_of_range(seconds: tuple[float, ...], field: str) -> Iterator[tuple[str, str]]:
    low, high = _SECONDS_RANGE
    for number, value in enumerate(seconds):
        if not low <= value <= high:
            yield f"is {value:g} s; need {low:g} to {high:g}", f"{field}[{number}]"


def plan_candidate(problem: Problem, plan: Plan) -> Candidates:
    """Return a plan as the one candidate row it came from.

    Raises:
        InvalidInputError: The plan's stages are no split of this problem.
    """
    layout = plan.layout
    stages = tuple(stage.num_layers for stage in plan.pipeline.stages)
    rows = [
        int(row)
        for row in problem.splits.rows(layout.pp, layout.virtual_stages)
        if problem.splits.layers[int(row)] == stages
    ]
    if not rows:
        raise InvalidInputError(
            f"plan {plan.id}: its stages {stages} are no split of {plan.model.num_layers} layers "
            f"over pp={layout.pp}, virtual_stages={layout.virtual_stages}",
            where="plan.pipeline.stages",
        )
    values = {
        **{name: getattr(layout, name) for name in type(layout).model_fields},
        "schedule": SCHEDULES.index(plan.pipeline.schedule),
        "split": rows[0],
        "micro_batch_size": plan.batch.micro_batch_size,
        "num_micro_batches": plan.batch.num_micro_batches,
        "recompute": RECOMPUTE_MODES.index(plan.recompute),
        "zero_stage": plan.sharding.zero_stage,
        "sequence_parallel": plan.sharding.sequence_parallel,
    }
    return Candidates(**{name: np.array([value]) for name, value in values.items()})
