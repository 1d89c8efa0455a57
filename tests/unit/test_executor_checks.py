"""What the executor cannot honour is named, field by field; what it can is let through."""

from typing import Any

import pytest

from executor.checks import check_plan, unsupported_fields
from executor.errors import ExecutorError, PlanMismatchError, UnsupportedPlanError
from planner.plan import (
    Algorithm,
    Axis,
    CallPath,
    Collective,
    ContextExchange,
    Layout,
    ModelSummary,
    Packing,
    Pipeline,
    Plan,
    Probe,
    RankRule,
    Sharding,
    SizeThreshold,
    TrainingSpec,
)
from tests.dist.plans import all_reduce_choice, make_plan, stages_of

EXCHANGES: tuple[ContextExchange, ...] = ("ring", "all_gather")
SUPPORTED = {
    "one rank": make_plan(),
    "dp4": make_plan(dp=4),
    "dp4 tree": make_plan(dp=4, gradient_algorithm="tree"),
    "dp4 hierarchical on two units": make_plan(
        dp=4, ranks_per_unit=2, gradient_algorithm="hierarchical"
    ),
    "dp4 hierarchical on uneven units": make_plan(
        dp=4, ranks_per_unit=3, gradient_algorithm="hierarchical"
    ),
    "dp4 hierarchical on scattered units": make_plan(
        dp=4, units=((0, 2, 3), (1,)), gradient_algorithm="hierarchical"
    ),
    "tp2 dp2 recompute": make_plan(tp=2, dp=2, recompute="full"),
    "pp2 gpipe": make_plan(pp=2, schedule="gpipe"),
    "pp2 uneven": make_plan(pp=2, layers=(3, 1)),
    "pp4 with fewer micro-batches": make_plan(pp=4, micro_batch_size=8),
    "pp2 v2": make_plan(pp=2, virtual_stages=2),
    **{f"cp4 {kind}": make_plan(cp=4, context_exchange=kind) for kind in EXCHANGES},
    "tp2 cp2": make_plan(tp=2, cp=2, dp=2),
    "ep4": make_plan(dp=4, ep=4),
    "ep over tp and cp": make_plan(tp=2, cp=2, ep=4),
    "ep2 zero 3": make_plan(dp=4, ep=2, dp_shard=4, zero_stage=3),
    "zero 1": make_plan(dp=4, dp_shard=4, zero_stage=1),
    "zero 1 over cp alone": make_plan(cp=2, zero_stage=1),
    "zero 1 with nobody": make_plan(zero_stage=1),
    "hybrid zero 1": make_plan(dp=4, dp_shard=2, zero_stage=1),
    "zero 3": make_plan(dp=4, dp_shard=4, zero_stage=3),
    "zero 3 over cp alone": make_plan(cp=2, zero_stage=3),
    "hybrid zero 3": make_plan(dp=4, dp_shard=2, zero_stage=3),
    "bf16 sgd": make_plan(precision="bf16", optimizer="sgd"),
    "fp32": make_plan(precision="fp32"),
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


def with_choice(
    axis: Axis, op: Collective, algorithm: Algorithm, path: CallPath = "library", **layout: Any
) -> Plan:
    """Return a plan whose only choice is this one."""
    plan = make_plan(**layout)
    choice = all_reduce_choice(plan.layout, axis, algorithm, path).model_copy(update={"op": op})
    return plan.model_copy(update={"collectives": (choice,)})


def with_sequence(seq_len: int, **layout: Any) -> Plan:
    return make_plan(seq_len=seq_len, **layout)


DP4 = make_plan(dp=4)
TP2 = make_plan(tp=2)
PP2 = make_plan(pp=2)
V2 = make_plan(pp=2, virtual_stages=2)
UNSUPPORTED: dict[str, tuple[Plan, str]] = {
    "megatron": (DP4.model_copy(update={"framework": "megatron"}), "framework='megatron'"),
    "etp": (with_layout(dp_replicate=4, etp=2), "layout.etp=2"),
    "dp_shard without zero": (
        with_layout(dp_shard=4),
        "layout.dp_shard=4 with sharding.zero_stage=0",
    ),
    "zero 2": (with_field(DP4, "sharding", zero_stage=2), "sharding.zero_stage=2"),
    "zero 3 alone": (
        with_field(DP4, "sharding", zero_stage=3),
        "sharding.zero_stage=3 with one rank to share with",
    ),
    "tp without sp": (
        with_field(TP2, "sharding", sequence_parallel=False),
        "layout.tp=2 with sharding.sequence_parallel=false",
    ),
    "sp without tp": (
        with_field(DP4, "sharding", sequence_parallel=True),
        "sharding.sequence_parallel=true with layout.tp=1",
    ),
    "reduce overlap": (
        with_field(DP4, "sharding", overlap_gradient_reduce=True),
        "sharding.overlap_gradient_reduce=true",
    ),
    "gather overlap": (
        with_field(DP4, "sharding", overlap_parameter_gather=True),
        "sharding.overlap_parameter_gather=true",
    ),
    "half a chunk": (with_sequence(10, cp=2), "training.seq_len=10 with cp=2 (need a multiple of"),
    "tokens over tp": (with_sequence(9, tp=2), "training.seq_len=9 with tp*cp=2 (need a multiple"),
    "chunks over tp": (with_sequence(12, tp=4, cp=2), "training.seq_len=12 with tp*cp=8"),
    "packed": (
        with_field(DP4, "training", packing=Packing(lengths=(4,), counts=(1,))),
        "training.packing (attention does not stop",
    ),
    "mtp": (with_field(DP4, "model", num_mtp_modules=1), "model.num_mtp_modules=1"),
    "selective": (make_plan(recompute="selective"), "recompute='selective'"),
    "fp8": (make_plan(precision="fp8"), "training.precision='fp8'"),
    "fp16": (make_plan(precision="fp16"), "training.precision='fp16'"),
    "permutation": (
        with_field(DP4, "ranks", node_permutation=(0,)),
        "ranks.node_permutation",
    ),
    "left out": (with_field(DP4, "ranks", left_out_gpus=(7,)), "ranks.left_out_gpus=[7]"),
    "interleaved without chunks": (
        with_field(PP2, "pipeline", schedule="interleaved_1f1b"),
        "pipeline.schedule='interleaved_1f1b' with pp=2, virtual_stages=1",
    ),
    "chunks without interleaving": (
        with_field(V2, "pipeline", schedule="1f1b"),
        "pipeline.schedule='1f1b' with pp=2, virtual_stages=2",
    ),
    "no schedule": (
        with_field(PP2, "pipeline", schedule="none"),
        "pipeline.schedule='none' with pp=2",
    ),
    "schedule without pp": (
        with_field(DP4, "pipeline", schedule="1f1b"),
        "pipeline.schedule='1f1b' with pp=1",
    ),
    "chunks without pp": (
        make_plan(virtual_stages=2, schedule="none"),
        "layout.virtual_stages=2 with layout.pp=1",
    ),
    "a stage too many": (
        DP4.model_copy(update={"pipeline": Pipeline(schedule="none", stages=stages_of(2, 4))}),
        "pipeline.stages (need 1",
    ),
    "stages out of turn": (
        with_field(
            V2,
            "pipeline",
            stages=tuple(
                stage.model_copy(update={"pp_rank": n // 2, "chunk": n % 2})
                for n, stage in enumerate(V2.pipeline.stages)
            ),
        ),
        "pipeline.stages (need 4, in turn on the pp ranks",
    ),
    "no head": (
        with_field(
            PP2,
            "pipeline",
            stages=tuple(s.model_copy(update={"head": False}) for s in PP2.pipeline.stages),
        ),
        "and the head on the last",
    ),
    "empty stage": (make_plan(pp=2, layers=(4, 0)), "pipeline.stages with no layer"),
    "direct": (
        make_plan(dp=4, gradient_algorithm="direct"),
        "collectives: direct for all_reduce on dp_cp",
    ),
    "three levels of two": (
        with_choice("dp_cp", "all_reduce", "three_level", path="shm", dp=4),
        "collectives: three_level (shm) for all_reduce on dp_cp without ranks.outer_units",
    ),
    "a probe of a tree that is none": (
        make_plan(
            dp=4,
            probes=(
                Probe(
                    axis="dp_cp",
                    op="all_gather",
                    sizes_bytes=(4096,),
                    algorithm="tree",
                    path="executor",
                ),
            ),
        ),
        "collectives: tree (executor) for all_gather on dp_cp",
    ),
    "some layers recomputed": (
        make_plan(dp=4, recompute="full").model_copy(update={"recompute_layers": 1}),
        "recompute_layers=1",
    ),
    "states on the host": (
        with_field(make_plan(dp=4), "training", offload=("optimizer",)),
        "training.offload=('optimizer',)",
    ),
    "stored scores": (
        with_field(make_plan(dp=4), "training", fused_attention=False),
        "training.fused_attention=False",
    ),
    "gradients waited for": (
        with_field(make_plan(dp=4), "training", no_overlap=("data_parallel",)),
        "training.no_overlap=('data_parallel',)",
    ),
    "products in chunks": (
        with_field(TP2, "training", overlap_products=True),
        "training.overlap_products=True",
    ),
    "tokens once to a node": (
        with_field(make_plan(dp=4, ep=4), "training", dispatcher="deduplicated"),
        "training.dispatcher='deduplicated'",
    ),
    "tokens beside compute": (
        with_field(make_plan(dp=4, ep=4), "training", overlap_experts=True),
        "training.overlap_experts=True",
    ),
    "another generation": (
        with_field(DP4, "training", attention_kernel="flash2"),
        "training.attention_kernel='flash2'",
    ),
    "one kernel at a time": (
        with_field(DP4, "training", launch="blocking"),
        "training.launch='blocking'",
    ),
    "gradients kept twice": (
        with_field(make_plan(dp=4), "training", main_grads="both"),
        "training.main_grads='both'",
    ),
    "a reduce": (
        with_choice("dp_cp", "reduce", "ring", dp=4),
        "collectives: reduce on dp_cp, which no training job calls",
    ),
    "a probe of a reduce": (
        make_plan(dp=4, probes=(Probe(axis="dp_cp", op="reduce", sizes_bytes=(4096,)),)),
        "probes: reduce on dp_cp, which no training job calls",
    ),
    "hierarchical gather": (
        with_choice("ep", "gather", "hierarchical", dp=4, ep=4),
        "collectives: hierarchical for gather on ep",
    ),
    "copy engine of NCCL": (
        with_choice("dp_cp", "all_gather", "copy_engine", path="nccl_zero_cta", dp=4),
        "collectives: copy_engine (nccl_zero_cta) for all_gather on dp_cp",
    ),
    "ring all_to_all": (
        with_choice("ep", "all_to_all", "ring", dp=4, ep=4),
        "collectives: ring for all_to_all on ep",
    ),
    "tree sends": (
        with_choice("pp", "send_recv", "tree", pp=4),
        "collectives: tree for send_recv on pp",
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


def test_what_is_chosen_by_size_is_looked_at_too() -> None:
    choice = all_reduce_choice(DP4.layout, "dp_cp", "ring")
    small = SizeThreshold(up_to_bytes=4096, algorithm="pairwise")
    choice = choice.model_copy(update={"thresholds": (small, *choice.thresholds)})
    plan = DP4.model_copy(update={"collectives": (choice,)})
    assert list(unsupported_fields(plan)) == ["collectives: pairwise for all_reduce on dp_cp"]


def test_a_choice_on_an_axis_of_one_rank_is_not_asked_for() -> None:
    check_plan(with_choice("tp", "all_reduce", "hierarchical"), world_size=1)


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
        "gradient_bucket_bytes", "context_exchange",
    }  # fmt: skip
    assert set(RankRule.model_fields) == {
        "order", "ranks_per_node", "ranks_per_unit", "node_permutation", "left_out_gpus", "units",
        "outer_units", "hosts",
    }  # fmt: skip
    assert set(TrainingSpec.model_fields) == {
        "global_batch_size", "seq_len", "precision", "optimizer", "main_grads", "expert_capacity",
        "expert_load", "packing", "master_weights", "moments", "foreach_optimizer",
        "fused_attention", "dropout", "fused_kernels", "fused_loss", "buffer_bytes", "gathers",
        "offload", "offload_layers", "offload_to", "launch", "no_overlap", "overlap_products",
        "dispatcher", "overlap_experts", "attention_kernel", "recompute_stops_early", "jitter",
    }  # fmt: skip
    assert set(ModelSummary.model_fields) == {
        "name", "num_layers", "hidden_size", "vocab_size", "num_params", "num_active_params",
        "num_mtp_modules", "fingerprint",
    }  # fmt: skip
