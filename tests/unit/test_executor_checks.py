"""What the executor cannot honour is named, field by field; what it can is let through."""

from typing import Any

import pytest

from executor.checks import check_plan, unsupported_fields
from executor.errors import ExecutorError, PlanMismatchError, UnsupportedPlanError
from planner.plan import Layout, Pipeline, Plan, RankRule, Sharding, TrainingSpec
from tests.dist.plans import all_reduce_choice, make_plan, stages_of

SUPPORTED = {
    "one rank": make_plan(),
    "dp4": make_plan(dp=4),
    "dp4 tree": make_plan(dp=4, gradient_algorithm="tree"),
    "dp4 hierarchical on two units": make_plan(
        dp=4, ranks_per_unit=2, gradient_algorithm="hierarchical"
    ),
    "dp4 hierarchical on two units of many hosts": make_plan(
        dp=4, ranks_per_node=3, ranks_per_unit=2, gradient_algorithm="hierarchical"
    ),
    "dp4 flat on uneven units": make_plan(dp=4, ranks_per_unit=3),
    "tp2 dp2 recompute": make_plan(tp=2, dp=2, recompute="full"),
    "pp2 gpipe": make_plan(pp=2, schedule="gpipe"),
    "pp2 uneven": make_plan(pp=2, layers=(3, 1)),
    "bf16 sgd": make_plan(precision="bf16", optimizer="sgd"),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_plans_pass(name: str) -> None:
    plan = SUPPORTED[name]
    check_plan(plan, world_size=plan.layout.world_size)


def with_layout(**degrees: int) -> Plan:
    """Return dp4 with another layout of four ranks, without the checks of a whole plan."""
    return make_plan(dp=4).model_copy(update={"layout": Layout(**degrees)})


def with_field(plan: Plan, field: str, **values: Any) -> Plan:
    return plan.model_copy(update={field: getattr(plan, field).model_copy(update=values)})


DP4 = make_plan(dp=4)
PP2 = make_plan(pp=2)
UNSUPPORTED: dict[str, tuple[Plan, str]] = {
    "megatron": (DP4.model_copy(update={"framework": "megatron"}), "framework='megatron'"),
    "cp": (with_layout(cp=4), "layout.cp=4"),
    "ep": (with_layout(dp_replicate=4, ep=2), "layout.ep=2"),
    "etp": (with_layout(dp_replicate=4, etp=2), "layout.etp=2"),
    "dp_shard": (with_layout(dp_shard=4), "layout.dp_shard=4"),
    "virtual stages": (with_layout(pp=2, virtual_stages=2), "layout.virtual_stages=2"),
    "zero": (with_field(DP4, "sharding", zero_stage=3), "sharding.zero_stage=3"),
    "sp": (
        with_field(DP4, "sharding", sequence_parallel=True),
        "sharding.sequence_parallel=true",
    ),
    "reduce overlap": (
        with_field(DP4, "sharding", overlap_gradient_reduce=True),
        "sharding.overlap_gradient_reduce=true",
    ),
    "gather overlap": (
        with_field(DP4, "sharding", overlap_parameter_gather=True),
        "sharding.overlap_parameter_gather=true",
    ),
    "selective": (make_plan(recompute="selective"), "recompute='selective'"),
    "fp8": (make_plan(precision="fp8"), "training.precision='fp8'"),
    "fp16": (make_plan(precision="fp16"), "training.precision='fp16'"),
    "permutation": (
        with_field(DP4, "ranks", node_permutation=(0,)),
        "ranks.node_permutation",
    ),
    "left out": (with_field(DP4, "ranks", left_out_gpus=(7,)), "ranks.left_out_gpus=[7]"),
    "interleaved": (
        with_field(PP2, "pipeline", schedule="interleaved_1f1b"),
        "pipeline.schedule='interleaved_1f1b' with pp=2",
    ),
    "schedule without pp": (
        with_field(DP4, "pipeline", schedule="1f1b"),
        "pipeline.schedule='1f1b' with pp=1",
    ),
    "a stage too many": (
        DP4.model_copy(update={"pipeline": Pipeline(schedule="none", stages=stages_of(2, 4))}),
        "pipeline.stages (need 1",
    ),
    "empty stage": (make_plan(pp=2, layers=(4, 0)), "pipeline.stages with no layer"),
    "few micro-batches": (
        make_plan(pp=2, micro_batch_size=8),
        "batch.num_micro_batches=1 below pp=2 with 1f1b",
    ),
    "direct": (
        make_plan(dp=4, gradient_algorithm="direct"),
        "collectives: direct for all_reduce on dp_cp",
    ),
    "hierarchical tp": (
        make_plan(
            tp=4,
            collectives=(
                all_reduce_choice(Layout(tp=4), "hierarchical").model_copy(
                    update={"axis": "tp", "group_size": 4}
                ),
            ),
        ),
        "collectives: hierarchical for all_reduce on tp",
    ),
    "uneven units": (
        make_plan(dp=4, ranks_per_node=4, ranks_per_unit=3, gradient_algorithm="hierarchical"),
        "collectives: hierarchical for all_reduce on dp_cp with ranks.ranks_per_unit=3, which "
        "puts [3, 1] ranks of the group [0, 1, 2, 3] on its units",
    ),
    "uneven units of a strided group": (
        make_plan(
            tp=2, dp=3, ranks_per_unit=4, global_batch_size=6, gradient_algorithm="hierarchical"
        ),
        "puts [2, 1] ranks of the group [0, 2, 4] on its units",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_cannot_be_honoured_is_named(name: str) -> None:
    plan, field = UNSUPPORTED[name]
    with pytest.raises(UnsupportedPlanError) as refusal:
        check_plan(plan, world_size=plan.layout.world_size)
    assert field in str(refusal.value)
    assert any(field in named for named in refusal.value.fields)
    assert isinstance(refusal.value, ExecutorError)


def test_all_fields_are_named_at_once() -> None:
    plan = with_field(make_plan(dp=4, recompute="selective"), "sharding", zero_stage=2)
    assert list(unsupported_fields(plan)) == ["sharding.zero_stage=2", "recompute='selective'"]


def test_a_choice_on_an_axis_of_one_rank_is_not_asked_for() -> None:
    choice = all_reduce_choice(Layout(), "hierarchical")
    check_plan(make_plan(collectives=(choice,)), world_size=1)


def test_world_size_comes_before_fields() -> None:
    plan = make_plan(dp=4, recompute="selective")
    with pytest.raises(PlanMismatchError, match=r"is for 4 ranks .* this job has 3"):
        check_plan(plan, world_size=3)


def test_every_field_of_the_plan_is_looked_at_or_known_to_be_free() -> None:
    """A new field must be either honoured here or refused."""
    assert set(Layout.model_fields) == {
        "tp", "pp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "virtual_stages",
    }  # fmt: skip
    assert set(Sharding.model_fields) == {
        "zero_stage", "sequence_parallel", "overlap_gradient_reduce", "overlap_parameter_gather",
        "gradient_bucket_bytes",
    }  # fmt: skip
    assert set(RankRule.model_fields) == {
        "order", "ranks_per_node", "ranks_per_unit", "node_permutation", "left_out_gpus",
    }  # fmt: skip
    assert set(TrainingSpec.model_fields) == {
        "global_batch_size", "seq_len", "precision", "optimizer", "main_grads",
    }  # fmt: skip
