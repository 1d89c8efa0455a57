"""Which plans this executor can run: one list of what it cannot honour, each by name."""

from collections import Counter
from collections.abc import Iterator

from executor.errors import PlanMismatchError, UnsupportedPlanError
from planner.plan import Algorithm, CollectiveChoice, Plan

__all__ = ["check_plan", "unsupported_fields"]

_LIBRARY: frozenset[Algorithm] = frozenset({"singleton", "ring", "tree"})


def check_plan(plan: Plan, *, world_size: int) -> None:
    """Check that ``plan`` fits a job of ``world_size`` ranks and asks for nothing unknown here.

    Raises:
        PlanMismatchError: The world size differs.
        UnsupportedPlanError: Naming every field that cannot be honoured.
    """
    needed = plan.layout.world_size
    if world_size != needed:
        raise PlanMismatchError(
            f"plan {plan.id} is for {needed} ranks ({plan.layout}), this job has {world_size}; "
            f"start {needed} processes, or plan for {world_size} GPUs"
        )
    fields = tuple(unsupported_fields(plan))
    if fields:
        raise UnsupportedPlanError(
            f"plan {plan.id} asks for what this executor cannot do: {'; '.join(fields)}; "
            "plan again with framework='executor' and constraints that turn these off",
            fields,
        )


def unsupported_fields(plan: Plan) -> Iterator[str]:
    """Yield every field of ``plan`` that would have to be ignored, with its value."""
    layout, sharding = plan.layout, plan.sharding
    if plan.framework != "executor":
        yield f"framework={plan.framework!r}"
    for axis in ("cp", "ep", "etp", "dp_shard", "virtual_stages"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis}={getattr(layout, axis)}"
    if sharding.zero_stage:
        yield f"sharding.zero_stage={sharding.zero_stage}"
    for flag in ("sequence_parallel", "overlap_gradient_reduce", "overlap_parameter_gather"):
        if getattr(sharding, flag):
            yield f"sharding.{flag}=true"
    if plan.recompute == "selective":
        yield "recompute='selective'"
    if plan.training.precision in ("fp8", "fp16"):
        yield f"training.precision={plan.training.precision!r}"
    if plan.ranks.node_permutation is not None:
        yield "ranks.node_permutation (order the hosts in the launcher instead)"
    if plan.ranks.left_out_gpus:
        yield f"ranks.left_out_gpus={list(plan.ranks.left_out_gpus)}"
    yield from _unsupported_pipeline(plan)
    for choice in plan.collectives:
        yield from _unsupported_choice(plan, choice)


def _unsupported_pipeline(plan: Plan) -> Iterator[str]:
    pp, pipeline = plan.layout.pp, plan.pipeline
    expected = {"none"} if pp == 1 else {"gpipe", "1f1b"}
    if pipeline.schedule not in expected:
        yield f"pipeline.schedule={pipeline.schedule!r} with pp={pp}"
    stages = [(s.pp_rank, s.embedding, s.head) for s in pipeline.stages]
    if stages != [(rank, rank == 0, rank == pp - 1) for rank in range(pp)]:
        yield f"pipeline.stages (need {pp}, the embedding on the first and the head on the last)"
    if pp > 1 and any(stage.num_layers == 0 for stage in pipeline.stages):
        yield "pipeline.stages with no layer"
    if pipeline.schedule == "1f1b" and plan.batch.num_micro_batches < pp:
        # torch 2.13 Schedule1F1B raises on this.
        yield f"batch.num_micro_batches={plan.batch.num_micro_batches} below pp={pp} with 1f1b"


def _unsupported_choice(plan: Plan, choice: CollectiveChoice) -> Iterator[str]:
    """Yield the algorithms of a choice that nothing here implements on that axis."""
    if plan.layout.degree(choice.axis) == 1:
        return
    known = set(_LIBRARY)
    if (choice.axis, choice.op) == ("dp_cp", "all_reduce"):
        known.add("hierarchical")
    if choice.op == "send_recv":
        known = {"point_to_point"}
    asked = {choice.algorithm, *(threshold.algorithm for threshold in choice.thresholds)}
    for algorithm in sorted(asked - known):
        yield f"collectives: {algorithm} for {choice.op} on {choice.axis}"
    if "hierarchical" in asked & known:
        yield from _uneven_units(plan)


def _uneven_units(plan: Plan) -> Iterator[str]:
    """Yield the first dp_cp group whose members the units of the fabric share unevenly."""
    per_unit = plan.ranks.ranks_per_unit
    for ranks in plan.groups("dp_cp"):
        members = Counter(rank // per_unit for rank in ranks)
        if len(set(members.values())) > 1:
            yield (
                f"collectives: hierarchical for all_reduce on dp_cp with "
                f"ranks.ranks_per_unit={per_unit}, which puts {list(members.values())} ranks of "
                f"the group {_shown(ranks)} on its units (need equally many on each)"
            )
            return


def _shown(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{list(ranks[:8])}... of {len(ranks)}"
