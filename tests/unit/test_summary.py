"""planner.summary: the answer in a sentence, shares that add up, a line that starts the job."""

from typing import Any

import pytest

from planner.plan import Plan
from planner.planning import make_plan, resolve
from planner.request import PlanRequest
from planner.summary import basis, headline, launch_command, memory_parts, peak_stage, time_parts


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


def test_the_headline_has_layout_time_rate_and_memory(plan: Plan) -> None:
    text = headline(plan)
    for part in ("llama3-70b", "128 ranks", str(plan.layout), "a step", "tokens/s", "MFU", "80.0"):
        assert part in text


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
    assert line.startswith("torchrun --nnodes 16 ")
    stages = line.split("--pipeline-model-parallel-layout '")[1].split("'")[0].split("|")
    assert len(stages) == plan.layout.pp * plan.layout.virtual_stages
    assert [stage.count("t") for stage in stages] == [s.num_layers for s in plan.pipeline.stages]
    assert (stages[0][0], stages[-1][-1]) == ("E", "L")
    assert f"--tensor-model-parallel-size {plan.layout.tp} " in line
    assert "--expert" not in line


@pytest.mark.parametrize(
    ("constraints", "wanted", "absent"),
    [
        ({"zero_stage": 3}, "--data-parallel-sharding-strategy optim_grads_params", "optimizer"),
        ({"recompute": "full"}, "--recompute-granularity full", "selective"),
        ({"pp": 1, "recompute": "full"}, "--micro-batch-size", "layout"),
    ],
)
def test_megatron_is_given_what_was_decided(
    constraints: dict[str, Any], wanted: str, absent: str
) -> None:
    line = launch_command(planned(constraints=constraints), "unused")
    assert wanted in line
    assert absent not in line


def test_megatron_is_given_the_experts_degrees() -> None:
    plan = planned(model="mixtral-8x7b", constraints={"ep": 8})
    assert "--expert-model-parallel-size 8" in launch_command(plan, "unused")
