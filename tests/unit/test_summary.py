"""planner.summary: the answer in a sentence, shares that add up, a line that starts the job."""

from typing import Any

import pytest

from planner.plan import ExpertCapacity, Plan, Stage
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve
from planner.summary import (
    basis,
    headline,
    launch_command,
    launch_notes,
    layout_rows,
    memory_parts,
    peak_stage,
    time_parts,
)


def planned(**changes: Any) -> Plan:
    request = {
        "topology": "dgx-h100",
        "nodes": 16,
        "model": "llama3-70b",
        "training": {"global_batch_size": 1024, "seq_len": 8192},
        **changes,
    }
    return make_plan(resolve(PlanRequest.model_validate(request)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def local() -> Plan:
    return planned(
        topology="local-gloo",
        nodes=1,
        model="example-gpt",
        training={"global_batch_size": 16, "seq_len": 128, "precision": "fp32"},
        framework="executor",
    )


@pytest.fixture(scope="module")
def experts() -> Plan:
    return planned(model="mixtral-8x7b", constraints={"ep": 8, "tp": 2, "pp": 2})


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return ``plan`` with other fields, named as ``layout__tp``; its totals may not add up."""
    for path, value in changes.items():
        field, _, below = path.partition("__")
        part = getattr(plan, field).model_copy(update={below: value}) if below else value
        plan = plan.model_copy(update={field: part})
    return plan


def said(plan: Plan) -> str:
    return "\n".join([launch_command(plan, "unused"), *launch_notes(plan)])


def test_the_headline_has_layout_time_rate_and_memory(plan: Plan) -> None:
    text = headline(plan)
    for part in (
        "llama3-70b",
        "128 ranks",
        str(plan.layout),
        "a step",
        "tokens/s",
        "MFU",
        "84.8 GB",
    ):
        assert part in text
    assert f"ZeRO-{plan.sharding.zero_stage}" in text
    assert "recompute" in text


def test_without_a_peak_the_headline_has_no_mfu(local: Plan) -> None:
    assert local.prediction.mfu is None
    assert "MFU" not in headline(local)


def test_the_basis_is_one_sentence(plan: Plan) -> None:
    assert basis(plan).endswith(".")
    assert ".." not in basis(plan)
    assert plan.provenance.calibration in basis(plan)


def test_time_parts_are_all_of_the_step(plan: Plan) -> None:
    parts = time_parts(plan)
    assert sum(part.amount for part in parts) == pytest.approx(plan.prediction.step_time_s)
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert all(part.amount > 0 for part in parts)


def test_memory_parts_are_shares_of_the_capacity(plan: Plan) -> None:
    stage = peak_stage(plan)
    parts = memory_parts(stage)
    assert sum(part.amount for part in parts) == stage.total_bytes
    assert sum(part.share for part in parts) == pytest.approx(
        stage.total_bytes / stage.capacity_bytes
    )
    assert stage.total_bytes == max(other.total_bytes for other in plan.memory)


def test_a_part_has_the_same_number_in_every_plan(plan: Plan, local: Plan) -> None:
    numbers = [
        {part.label: part.number for part in (*time_parts(p), *memory_parts(peak_stage(p)))}
        for p in (plan, local)
    ]
    shared = numbers[0].keys() & numbers[1].keys()
    assert shared
    assert all(numbers[0][label] == numbers[1][label] for label in shared)


def test_the_executor_is_given_the_plan(local: Plan) -> None:
    line = launch_command(local, "http://host/plans/1")
    assert line == (
        "torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --plan http://host/plans/1"
    )


def test_megatron_is_given_every_layer_once_and_the_degrees(plan: Plan) -> None:
    line = launch_command(plan, "unused")
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 16 ")
    stages = line.split("--pipeline-model-parallel-layout '")[1].split("'")[0].split("|")
    assert len(stages) == plan.layout.pp * plan.layout.virtual_stages
    assert [stage.count("t") for stage in stages] == [s.num_layers for s in plan.pipeline.stages]
    assert (stages[0][0], stages[-1][-1]) == ("E", "L")
    assert f"--tensor-model-parallel-size {plan.layout.tp} " in line
    assert "--expert" not in line


# Every field of a plan that decides how it is run: a change, and what the line then says.
FSDP = {"sharding__zero_stage": 3}
DECISIONS: list[tuple[dict[str, Any], str]] = [
    ({"layout__tp": 2}, "--tensor-model-parallel-size 2 "),
    ({"layout__pp": 2}, "--pipeline-model-parallel-size 2 "),
    ({"layout__cp": 2}, "--context-parallel-size 2 --cp-comm-type p2p"),
    (
        {"layout__cp": 2, "sharding__context_exchange": "all_gather"},
        "--context-parallel-size 2 --cp-comm-type all_gather",
    ),
    (
        {"training__expert_capacity": ExpertCapacity(factor=1.5)},
        "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
        "--moe-token-drop-policy probs",
    ),
    (
        {"training__expert_capacity": ExpertCapacity(factor=1, drop="position")},
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity "
        "--moe-token-drop-policy position",
    ),
    ({"ranks__order": "tp-cp-ep-pp-dp"}, "--use-tp-pp-dp-mapping "),
    ({"layout__ep": 2}, "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "),
    ({"layout__etp": 2}, "--expert-tensor-parallel-size 2 "),
    ({"layout__dp_replicate": 2}, "--num-distributed-optimizer-instances 2"),
    ({"layout__dp_replicate": 2, **FSDP}, "instances 2 --outer-dp-sharding-strategy no_shard"),
    ({"layout__dp_replicate": 2, "sharding__zero_stage": 0}, "dp_replicate 2 is left out"),
    ({"batch__micro_batch_size": 7}, "--micro-batch-size 7 "),
    ({"training__global_batch_size": 77}, "--global-batch-size 77 "),
    ({"training__seq_len": 777}, "--seq-length 777 "),
    ({"training__precision": "fp16"}, "--fp16 --accumulate-allreduce-grads-in-fp32"),
    ({"training__precision": "fp8"}, "--bf16 --fp8-format hybrid"),
    ({"training__precision": "fp64"}, "precision fp64 is left out"),
    ({"training__optimizer": "sgd"}, "--optimizer sgd"),
    ({"training__main_grads": "same"}, "--bf16 --grad-reduce-in-bf16"),
    ({"sharding__zero_stage": 2}, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_g"),
    (FSDP, "optim_grads_params --ckpt-format fsdp_dtensor"),
    (FSDP, "gradient buckets of 160,000,000 bytes are left out"),
    ({"sharding__gradient_bucket_bytes": 400}, "--ddp-bucket-size 100 "),
    ({"training__overlap_products": True}, "--sequence-parallel --tp-comm-overlap "),
    (
        {"training__overlap_products": True, "sharding__sequence_parallel": False},
        "--tp-comm-overlap is left out: it needs sequence parallelism",
    ),
    ({"sharding__zero_stage": 0}, "--overlap-param-gather is left out"),
    ({"recompute": "full"}, "--recompute-granularity full --recompute-method uniform"),
    ({"recompute": "selective"}, "--recompute-granularity selective --recompute-modules layernorm"),
    ({"pipeline__schedule": "gpipe"}, "schedule gpipe is left out"),
    ({"ranks__ranks_per_node": 4}, "--nnodes 32 "),
    ({"ranks__node_permutation": (1, 0)}, "in this order: 1, 0"),
    ({"ranks__left_out_gpus": (3, 4)}, "GPUs 3, 4 stay unused"),
]


@pytest.mark.parametrize(("changes", "wanted"), DECISIONS, ids=lambda value: str(value)[:40])
def test_each_decision_is_in_megatron_s_line_or_said_to_be_left_out(
    plan: Plan, changes: dict[str, Any], wanted: str
) -> None:
    before = changed(plan, recompute="none")
    assert wanted not in said(before)
    assert wanted in said(changed(before, **changes))


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("sequence_parallel", "--sequence-parallel"),
        ("overlap_gradient_reduce", "--overlap-grad-reduce"),
        ("overlap_parameter_gather", "--overlap-param-gather"),
    ],
)
def test_a_flag_is_there_only_when_it_was_decided(plan: Plan, field: str, flag: str) -> None:
    words = [
        launch_command(changed(plan, **{f"sharding__{field}": on}), "unused").split()
        for on in (False, True)
    ]
    assert [flag in line for line in words] == [False, True]


def test_megatron_s_environment_is_what_its_checks_demand(plan: Plan) -> None:
    alone = changed(plan, layout__tp=1, layout__cp=1)
    assert launch_command(alone, "").startswith("torchrun")
    for axis in ("layout__tp", "layout__cp"):
        line = launch_command(changed(alone, **{axis: 2}), "")
        assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")
    line = launch_command(changed(alone, **FSDP), "")
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=32 torchrun")


def test_megatron_is_given_the_experts_degrees_and_dispatch(experts: Plan, plan: Plan) -> None:
    line = launch_command(experts, "unused")
    assert "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 " in line
    assert "--moe-token-dispatcher-type alltoall --moe-grouped-gemm" in line
    assert "layernorm moe_act" in launch_command(changed(experts, recompute="selective"), "")
    assert "moe" not in launch_command(changed(plan, recompute="selective"), "")
    # Megatron's own default would be tp.
    assert "--expert-tensor-parallel-size 1" in launch_command(changed(experts, layout__ep=1), "")


def test_megatron_is_given_deepep_in_place_of_the_exchange(experts: Plan) -> None:
    deduplicated = changed(experts, training__dispatcher="deduplicated")
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --moe-grouped"
    assert flex in launch_command(deduplicated, "")
    assert "alltoall" not in launch_command(deduplicated, "")
    alone = said(changed(deduplicated, layout__ep=1, layout__etp=1))
    assert "--moe-token-dispatcher-type alltoall " in alone
    assert "DeepEP is left out" in alone
    assert "DeepEP" not in said(experts)


def test_megatron_is_told_to_exchange_tokens_beside_compute(experts: Plan) -> None:
    flag, connections = "--overlap-moe-expert-parallel-comm", "CUDA_DEVICE_MAX_CONNECTIONS=32 "
    assert flag not in launch_command(experts, "")
    line = launch_command(changed(experts, training__overlap_experts=True), "")
    assert flag in line.split()
    assert line.startswith(connections)


def test_megatron_overlaps_no_gradients_where_the_training_says_so() -> None:
    training = {"global_batch_size": 64, "seq_len": 8192}
    waits = {**training, "no_overlap": ["data_parallel"]}
    lines = [
        launch_command(planned(model="llama3-8b", nodes=2, training=asked), "")
        for asked in (training, waits)
    ]
    for flag in ("--overlap-grad-reduce", "--overlap-param-gather"):
        assert [flag in line.split() for line in lines] == [True, False]


def test_megatron_is_given_the_modules_for_multi_token_prediction(plan: Plan) -> None:
    """m, beside the loss; its layout must have as many as --mtp-num-layers says."""
    stages = tuple(
        Stage(pp_rank=n, chunk=0, first_layer=2 * n, num_layers=2, embedding=not n, head=n == 1)
        for n in range(2)
    )
    predicting = changed(plan, model__num_mtp_modules=2, layout__pp=2, pipeline__stages=stages)
    line = launch_command(predicting, "")
    assert "--mtp-num-layers 2 --pipeline-model-parallel-layout 'Ett|ttmmL' " in line
    without = launch_command(changed(predicting, model__num_mtp_modules=0), "")
    assert "mtp" not in without
    assert "'Ett|ttL'" in without


def test_the_notes_name_the_megatron_and_that_it_did_not_run(plan: Plan, local: Plan) -> None:
    assert "core 0.20" in launch_notes(plan)[0]
    assert "no Megatron was at hand" in launch_notes(plan)[0]
    assert launch_notes(local) == []


def test_the_layout_has_every_decision_and_equal_stages_told_once(plan: Plan, local: Plan) -> None:
    rows = dict(layout_rows(plan))
    stages = plan.layout.pp * plan.layout.virtual_stages
    assert f"{plan.pipeline.schedule}, {stages} stages" in rows["pipeline"]
    assert f"x {plan.batch.num_micro_batches} micro-batches" in rows["batch"]
    assert f"ZeRO-{plan.sharding.zero_stage}, sequence parallel" in rows["sharding"]
    assert "keys" not in rows["sharding"]
    several = changed(plan, layout__cp=2)
    assert "keys and values in a ring" in dict(layout_rows(several))["sharding"]
    several = changed(several, sharding__context_exchange="all_gather")
    assert "keys and values gathered" in dict(layout_rows(several))["sharding"]
    padded = changed(plan, training__expert_capacity=ExpertCapacity(factor=1.25))
    assert "a capacity of 1.25 (megatron)" in dict(layout_rows(padded))["sharding"]
    uneven = [
        stage.model_copy(update={"num_layers": n})
        for stage, n in zip(plan.pipeline.stages, (1, 2, 2, 3), strict=False)
    ]
    assert (
        ": 1 of 1, 2 of 2, 1 of 3 layers"
        in dict(layout_rows(changed(plan, pipeline__stages=uneven)))["pipeline"]
    )
    same = [stage.model_copy(update={"num_layers": 2}) for stage in uneven]
    assert ": 2 layers each" in dict(layout_rows(changed(plan, pipeline__stages=same)))["pipeline"]
    assert "one stage" in dict(layout_rows(changed(plan, pipeline__stages=uneven[:1])))["pipeline"]
    assert str(local.layout) in dict(layout_rows(local))["ranks"]
