"""``commplan memory``: what fills a layout, what is left, and the smallest change that fits."""

import json

import numpy as np
import pytest

from planner.cost.memory import memory
from planner.cost.step import price
from planner.errors import InvalidInputError
from planner.frameworks import rules_for
from planner.plan import TrainingSpec
from planner.reviewing import layout_problem
from planner.search.nearby import memory_report, nearby_changes
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
