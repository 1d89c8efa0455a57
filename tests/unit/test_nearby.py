"""``commplan memory``: what fills a layout, what is left, and the smallest change that fits."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.memory import memory
from planner.cost.offload import host_work
from planner.cost.problem import Problem
from planner.cost.step import price
from planner.errors import InvalidInputError
from planner.frameworks import refused_training, rules_for
from planner.layout.candidates import Candidates
from planner.plan import Precision, TrainingSpec
from planner.reviewing import layout_problem
from planner.search import nearby
from planner.search.nearby import memory_report, nearby_changes, training_changes
from tests.unit.conftest import Run
from tests.unit.problems import problem, row

# Too large for 80 GB by a quarter: 8B without any sharing but of the optimizer.
TIGHT = {"dp_shard": 8, "zero_stage": 1, "num_micro_batches": 8}


def test_every_change_fits_by_the_same_cost_model_and_is_ordered_by_time() -> None:
    base = problem("llama3-8b", pipelines=((1, 1), (2, 1), (4, 1)))
    one = row(**TIGHT)
    peak = memory(base, one).total_bytes().max()
    assert peak > base.capacity_bytes
    changes = nearby_changes(base, one)
    assert len(changes) >= 3
    for change in changes:
        assert change.peak_bytes <= base.capacity_bytes
        assert change.saved_bytes == pytest.approx(peak - change.peak_bytes)
    slower = [change.slower_by for change in changes]
    assert slower == sorted(slower)  # type: ignore[type-var]  # all have a price


def test_a_change_is_what_it_says() -> None:
    """The one that recomputes a few layers: peak and time of that very candidate."""
    base = problem("llama3-8b", pipelines=((1, 1), (2, 1), (4, 1)))
    one = row(**TIGHT)
    change = next(c for c in nearby_changes(base, one) if c.fields.get("recompute_layers"))
    same = row(**TIGHT, recompute="full", recompute_layers=change.fields["recompute_layers"])
    assert change.peak_bytes == memory(base, same).total_bytes().max()
    ratio = price(base, same).step_time_s()[0] / price(base, one).step_time_s()[0]
    assert change.slower_by == pytest.approx(ratio - 1)


def test_no_change_breaks_a_rule_of_the_framework() -> None:
    base = problem("llama3-8b", pipelines=((1, 1), (2, 1), (4, 1)), framework="executor")
    for change in nearby_changes(base, row(**TIGHT)):
        assert change.fields.get("recompute") != "selective"
        assert "recompute_layers" not in change.fields or change.fields["recompute_layers"] == 0
        assert change.fields.get("zero_stage") != 2
        assert "offload" not in change.fields.get("training", {})


def a_little_short(base: Problem, one: Candidates, share: float = 0.99) -> Problem:
    """Return the problem on devices that have ``share`` of what the candidate needs."""
    capacity = share * float(memory(base, one).total_bytes().max())
    return replace(base, device=replace(base.device, capacity_bytes=capacity))


def test_no_change_of_training_is_one_that_the_framework_refuses() -> None:
    """The executor has no bf16 moments and no host states; Megatron-LM has, and no fused head."""
    one, asked = row(**TIGHT), {}
    for framework in ("megatron", "executor"):
        base = a_little_short(problem("llama3-8b", framework=framework), one)
        training = [
            c.fields["training"] for c in nearby_changes(base, one) if "training" in c.fields
        ]
        for fields in training:
            changed = TrainingSpec.model_validate({**base.training.model_dump(), **fields})
            assert refused_training(framework, changed) is None
        asked[framework] = training
    assert {"moments": "bf16"} in asked["megatron"]
    assert asked["executor"] == []


def test_tensor_parallelism_comes_with_sequence_parallelism() -> None:
    one = row(**TIGHT)
    base = a_little_short(problem("llama3-8b"), one)
    change = next(c for c in nearby_changes(base, one) if c.fields.get("tp") == 2)
    same = row(**{**TIGHT, "dp_shard": 4, "num_micro_batches": 16}, tp=2, sequence_parallel=True)
    assert change.peak_bytes == memory(base, same).total_bytes().max()


def test_all_layers_are_recomputed_where_some_are_not_enough() -> None:
    one = row(**TIGHT, recompute="full", recompute_layers=2)
    every = row(**TIGHT, recompute="full")
    base = a_little_short(problem("llama3-8b"), one)
    change = next(c for c in nearby_changes(base, one) if c.what == "recompute all layers")
    assert change.fields == {"recompute": "full", "recompute_layers": 0}
    assert change.peak_bytes == memory(base, every).total_bytes().max()


def test_replicas_that_do_not_divide_the_new_degree_are_given_up() -> None:
    """12 data-parallel ranks as 3 times 4 replicas; of 6 there are no 4 replicas, of 3 neither."""
    fields: dict[str, Any] = {"zero_stage": 1, "dp_shard": 3, "dp_replicate": 4}
    one = row(**fields, num_micro_batches=4)
    base = a_little_short(problem("llama3-8b", global_batch_size=48), one)
    found = {c.fields["tp"]: c.peak_bytes for c in nearby_changes(base, one) if "tp" in c.fields}
    assert sorted(found) == [2, 4]
    for tp, dp in ((2, 6), (4, 3)):
        same = row(zero_stage=1, dp_shard=dp, num_micro_batches=48 // dp, tp=tp,
                   sequence_parallel=True)  # fmt: skip
        assert found[tp] == memory(base, same).total_bytes().max()


def test_of_many_changes_those_that_change_memory_least_are_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = row(**TIGHT)
    base = a_little_short(problem("llama3-8b"), one)
    every = nearby_changes(base, one)
    monkeypatch.setattr(nearby, "_PRICED", 4)
    few = nearby_changes(base, one)
    assert len(few) == 4 < len(every)
    least = sorted((change.peak_bytes for change in every), reverse=True)[:4]
    assert sorted((change.peak_bytes for change in few), reverse=True) == least


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "mxfp8", "nvfp4"])
def test_gradients_can_be_narrower_wherever_weights_are(precision: Precision) -> None:
    asked = TrainingSpec(global_batch_size=8, seq_len=64, precision=precision)
    changes = [fields for _, fields in training_changes(asked)]
    assert {"main_grads": "same"} in changes
    assert {"main_grads": "same"} not in [f for _, f in training_changes(asked, exact=True)]
    same = asked.model_copy(update={"main_grads": "same"})
    assert {"main_grads": "same"} not in [f for _, f in training_changes(same)]
    wide = asked.model_copy(update={"precision": "fp32"})
    assert {"main_grads": "same"} not in [f for _, f in training_changes(wide)]


def test_two_changes_are_tried_where_one_is_not_enough() -> None:
    base = problem("llama3-70b", pipelines=((1, 1), (2, 1)))
    one = row(tp=4, pp=2, dp_shard=2, zero_stage=1, sequence_parallel=True, schedule="1f1b",
              num_micro_batches=32)  # fmt: skip
    changes = nearby_changes(base, one)
    assert changes
    assert all(" and " in change.what for change in changes)


def test_what_fits_needs_no_change() -> None:
    base = problem("llama3-8b")
    report = memory_report(base, row(dp_shard=8, zero_stage=3, recompute="full"))
    assert report.headroom_bytes > 0
    assert report.changes == ()
    (stage,) = report.stages
    assert stage.total_bytes == pytest.approx(base.capacity_bytes - report.headroom_bytes, abs=2)
    assert stage.total_bytes == stage.parts.total_bytes()


def test_rules_that_a_layout_breaks_are_noted_by_name() -> None:
    report = memory_report(problem("llama3-8b"), row(tp=2))
    assert any("megatron-sequence-parallel" in note for note in report.notes)
    names = {rule.name for rule in rules_for("megatron")}
    assert "megatron-sequence-parallel" in names


def test_an_offloaded_optimizer_says_which_link_hides_it() -> None:
    base = problem("llama3-8b", offload=("activations",))
    report = memory_report(base, row(dp_shard=8, zero_stage=3, num_micro_batches=8))
    host = report.host
    assert host is not None
    assert host.link_bytes_per_s == pytest.approx(0.8 * 63e9)  # PCIe 5.0 x16 of an H100
    slower = host.needed_bytes_per_s > host.link_bytes_per_s
    assert (host.exposed_s > 0) == slower


def test_the_hosts_own_update_is_no_traffic_on_its_link() -> None:
    base = problem("llama3-8b", offload=("optimizer",))
    one = row(dp_shard=8, zero_stage=3, num_micro_batches=8)
    host = memory_report(base, one).host
    assert host is not None
    moved = {op.name: float(op.num_bytes[0] * op.repeats[0]) for op in host_work(base, one)}
    assert moved["optimizer"] > 0
    assert host.bytes_per_step == moved["offload_update"]
    assert host.link_bytes_per_s == pytest.approx(0.8 * 63e9)


def test_the_command_shows_stages_and_the_smallest_change(run: Run) -> None:
    status, text, _ = run(
        *("memory", "llama3-8b", "--layout", "dp=8,pp=1", "-t", "dgx-h100", "-s", "8192")
    )
    assert status == 0
    assert "does not fit" in text
    assert "changes that make it fit" in text
    status, text, _ = run(
        *("memory", "gpt3-175b", "-l", "tp=8,pp=8,recompute=full", "--device", "A100 80GB"),
        *("-b", "64", "-s", "2048", "--json"),
    )
    found = json.loads(text)
    assert status == 0
    assert found["headroom_bytes"] > 0
    assert [stage["pp_rank"] for stage in found["stages"]] == [0, 1, 7]
    assert max(stage["total_bytes"] for stage in found["stages"]) == pytest.approx(
        found["capacity_bytes"] - found["headroom_bytes"], abs=2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-l", "tp=8"), "need one of --topology and --device"),
        (("-l", "tp=8,width=3", "--device", "H100"), "--layout 'width=3': need FIELD=VALUE"),
        (("-l", "tp=3", "--device", "H100", "-T", "fast=1"), "--training 'fast=1'"),
        (("-l", "pp=5", "--device", "H100"), "does not cut the 32 layers evenly"),
        (("-l", "dp=3", "--device", "H100", "-b", "16"), "must divide the 16 sequences"),
        (("-l", "tp=2", "--device", "Abacus"), "no GPU model is called 'Abacus'"),
        (("-l", "tp=16", "-t", "dgx-h100", "-n", "1"), "does not divide the 8 GPUs"),
        (("-l", "ep=2", "--device", "H100"), "must divide the 1 ranks of a stage"),
    ],
)
def test_a_layout_that_cannot_be_says_what_to_try(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    status, _, said = run("memory", "llama3-8b", *arguments)
    assert status == 2
    assert message in said.replace("\n", " ")


def test_a_layout_fills_the_nodes_it_is_given() -> None:
    found, one = layout_problem(
        model="llama3-8b",
        layout={"tp": 2},
        topology="dgx-h100",
        nodes=2,
        device=None,
        training={"seq_len": 4096},
        framework="megatron",
    )
    assert int(one.dp[0]) == 8
    assert found.fabric.num_gpus == 16
    assert np.all(one.sequence_parallel)
    with pytest.raises(InvalidInputError, match="need at most as many"):
        layout_problem(
            model="llama3-8b",
            layout={"tp": 4, "dp": 8},
            topology="dgx-h100",
            nodes=2,
            device=None,
            training={"seq_len": 4096},
            framework="megatron",
        )
    assert isinstance(found.training, TrainingSpec)


def test_what_a_change_sends_is_what_leaves_the_rank() -> None:
    """A group of one sends nothing; the host's own memory is no link; no change twice."""
    problem, one = layout_problem(
        model="llama3-70b",
        layout={"tp": 8},
        topology=None,
        nodes=None,
        device="H100",
        training={"seq_len": 8192},
        framework="megatron",
    )
    changes = memory_report(problem, one).changes
    assert changes
    said = [json.dumps(change.fields, sort_keys=True, default=str) for change in changes]
    assert len(said) == len(set(said))
    assert not any("ZeRO-2" in change.what or "ZeRO-3" in change.what for change in changes)
    link = 70.6e9 / 8 * (4 + 2)  # gradients to the host in fp32, weights back in bf16
    offloaded = [change for change in changes if "optimizer" in change.what]
    assert min(change.sent_bytes for change in offloaded) == pytest.approx(link, rel=0.02)
