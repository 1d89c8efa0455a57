"""A measured run with its plan, and whether figures belong where they are used."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cost.collectives import PRICED_PATHS, legal_methods
from planner.cost.problem import Problem
from planner.errors import InvalidInputError
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
)
from planner.layout.groups import regular
from planner.model.blocks import model_flop_per_token
from planner.plan import (
    Calibration,
    CalibrationRun,
    CollectiveTiming,
    Method,
    Plan,
    RankTimings,
    document_hash,
)

__all__ = ["NOT_TRANSFERS", "Measured", "check_calibration", "check_run", "plan_candidate"]

# Below a clock tick or beyond eleven days nothing was measured.
_SECONDS_RANGE: Final = (1e-9, 1e6)
# Nothing is fitted to these: a send waits for the pipeline and not for the wire, and the others
# happen when all tokens of all ranks want the experts of one.
NOT_TRANSFERS: Final = ("send_recv", "gather", "scatter")
_PER_STEP: Final = ("step_s", "forward_backward_s", "optimizer_s")
# Clocks of one rank read in turn may overlap by this much.
_CLOCK_SLACK: Final = 1.01
# Share of a step that compute, optimizer and collectives make up at least.
_LEAST_EXPLAINED: Final = 0.05
_LARGEST_MESSAGE_BYTES: Final = 1 << 36
# A core may be faster than the one whose figures are bundled.
_FASTER_CORE: Final = 4.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, the plan it ran, and the uncalibrated problem of that plan's request."""

    problem: Problem
    plan: Plan
    run: CalibrationRun


def check_calibration(calibration: Calibration, topology: str) -> None:
    """Return if ``calibration`` was measured on the topology of this name, by known paths.

    Raises:
        InvalidInputError: It was measured elsewhere, or by others.
    """
    if calibration.topology != topology:
        raise InvalidInputError(
            f"calibration {calibration.id} was measured on {calibration.topology!r}, the request "
            f"is for {topology!r}; use one of that topology, or none",
            where="calibration",
        )
    for call in calibration.calls:
        if call.path not in PRICED_PATHS:
            raise InvalidInputError(
                f"calibration {calibration.id} has {call.op} by {call.path}, which has no price "
                f"here; leave it out: priced are {', '.join(PRICED_PATHS)}",
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
    if run.plan_hash != (own_hash := document_hash(plan)):
        raise InvalidInputError(
            f"plan_hash is {run.plan_hash!r}, of plan {run.plan_id}, but plan {plan.id} has "
            f"{own_hash!r}; give the plan that was run, as it is stored",
            where="plan_hash",
        )
    needed = {
        "topology": (run.topology, plan.topology),
        "ranks": (len(run.ranks), plan.layout.world_size),
    }
    for field, (got, wanted) in needed.items():
        if got != wanted:
            shown = repr(got)[:80]
            raise InvalidInputError(
                f"{field} is {shown} but plan {plan.id} has {wanted!r}; send the timings of every "
                "rank of a run of this plan",
                where=field,
            )
    for timings in run.ranks:
        path = f"ranks[{timings.rank}]"
        for problem, field in _problems(timings, measured):
            raise InvalidInputError(f"{path}.{field} {problem}", where=f"{path}.{field}")
    _check_collectives(measured)
    _check_speed(measured)


def _check_collectives(measured: Measured) -> None:
    """Refuse a run that saw nothing of its collectives: their time would count as compute."""
    plan = measured.plan
    planned = sorted({op.axis for op in plan.ops if op.axis and op.group_size > 1 and op.repeats})
    seen = any(
        any(timings.communication_s) or any(not timing.is_probe for timing in timings.collectives)
        for timings in measured.run.ranks
    )
    if planned and not seen:
        raise InvalidInputError(
            f"ranks[].communication_s: 0 s in all steps, but plan {plan.id} has collectives on "
            f"{', '.join(planned)}, whose time would count as compute; time a run whose calls are "
            "made in Python (those of DistributedDataParallel are not)",
            where="ranks.communication_s",
        )


def _check_speed(measured: Measured) -> None:
    """Refuse compute that needs more flop/s than the devices have."""
    problem, plan = measured.problem, measured.plan
    training = plan.training
    num_tokens = training.global_batch_size * training.seq_len
    flop = num_tokens * model_flop_per_token(problem.model, training.seq_len, training.packing)
    peak = problem.device.peak_flop_per_s[training.precision] * plan.layout.world_size
    if problem.fabric.cores_per_node:
        peak *= _FASTER_CORE
    per_step = np.array([timings.forward_backward_s for timings in measured.run.ranks])
    fastest = float(per_step.mean(axis=0).min())
    if flop / fastest > peak:
        raise InvalidInputError(
            f"ranks[].forward_backward_s: {fastest:g} s a step would be {flop / fastest:.3g} "
            f"flop/s, but {plan.layout.world_size} x {problem.device.name} have {peak:.3g}; check "
            "that the run trained the whole batch of its plan, and that times are in seconds",
            where="ranks.forward_backward_s",
        )


def _problems(timings: RankTimings, measured: Measured) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, field of the rank)."""
    num_steps = len(timings.step_s)
    for field in _PER_STEP:
        seconds = getattr(timings, field)
        if len(seconds) != num_steps:
            yield f"has {len(seconds)} entries; need one per step, {num_steps}", field
        yield from _out_of_range(seconds, field)
    if len(timings.communication_s) != num_steps:
        got = len(timings.communication_s)
        yield f"has {got} entries; need one per step, {num_steps}", "communication_s"
    else:
        yield from _parts_of_steps(timings)
    for number, timing in enumerate(timings.collectives):
        field = f"collectives[{number}]"
        yield from _timing_problems(timing, measured, field)


def _parts_of_steps(timings: RankTimings) -> Iterator[tuple[str, str]]:
    """Yield steps that are shorter than their parts, or hardly explained by them."""
    parts = zip(
        timings.forward_backward_s, timings.optimizer_s, timings.communication_s, strict=True
    )
    for number, (seconds, step_s) in enumerate(zip(parts, timings.step_s, strict=True)):
        said = "{:g} s of forward and backward, {:g} s of optimizer, {:g} s blocked in collectives"
        if sum(seconds) > step_s * _CLOCK_SLACK:
            yield (
                f"is {step_s:g} s, less than its parts: {said.format(*seconds)}",
                f"step_s[{number}]",
            )
        elif sum(seconds) < step_s * _LEAST_EXPLAINED:
            yield (
                f"is {step_s:g} s, and all but nothing of it is in its parts: "
                f"{said.format(*seconds)}; time the training step alone",
                f"step_s[{number}]",
            )


def _timing_problems(
    timing: CollectiveTiming, measured: Measured, field: str
) -> Iterator[tuple[str, str]]:
    is_message = timing.op == "send_recv"  # it has two ends, however many ranks the axis has
    degree = 2 if is_message else measured.plan.layout.degree(timing.axis)
    if timing.group_size != degree:
        group = "a message" if is_message else timing.axis
        yield f"is {timing.group_size}; {group} has {degree} in the plan", f"{field}.group_size"
    if not 1 <= timing.size_bytes <= _LARGEST_MESSAGE_BYTES:
        yield (
            f"is {timing.size_bytes}; need 1 to {_LARGEST_MESSAGE_BYTES}",
            f"{field}.size_bytes",
        )
    yield from _algorithm_problem(timing, measured.problem, f"{field}.algorithm")
    yield from _out_of_range(timing.seconds, f"{field}.seconds")


def _algorithm_problem(
    timing: CollectiveTiming, problem: Problem, field: str
) -> Iterator[tuple[str, str]]:
    if timing.op == "send_recv":
        return
    legal = legal_methods(problem.fabric, problem.framework, timing.op)
    method = Method(timing.algorithm, timing.path)
    if method not in legal:
        known = ", ".join(map(str, legal)) or "none here"
        yield f"is {str(method)!r}; {timing.op} has {known}", field


def _out_of_range(seconds: tuple[float, ...], field: str) -> Iterator[tuple[str, str]]:
    low, high = _SECONDS_RANGE
    for number, value in enumerate(seconds):
        if not low <= value <= high:
            yield f"is {value:g} s; need {low:g} to {high:g}", f"{field}[{number}]"


def plan_candidate(problem: Problem, plan: Plan) -> Candidates:
    """Return a plan as the one candidate row it came from.

    Raises:
        InvalidInputError: The plan's stages are no split of this problem, or its order of the
            axes leaves groups that are not priced.
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
        "recompute_layers": plan.recompute_layers or 0,
        "zero_stage": plan.sharding.zero_stage,
        "sequence_parallel": plan.sharding.sequence_parallel,
        "context_exchange": CONTEXT_EXCHANGES.index(plan.sharding.context_exchange),
        "order": RANK_ORDERS.index(plan.ranks.order),
    }
    row = Candidates(**{name: np.array([value]) for name, value in values.items()})
    if not regular(row, has_experts=problem.model.experts is not None).all():
        raise InvalidInputError(
            f"plan {plan.id}: ranks.order={plan.ranks.order!r} with {layout} cannot be priced: its "
            "groups are not evenly spaced; need cp=1 and, with experts, etp * ep = tp, or run it "
            f"as {RANK_ORDERS[0]}",
            where="plan.ranks.order",
        )
    return row
