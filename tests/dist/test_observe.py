"""A foreign script trains the same observed, and the run holds every call that it made."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from executor.errors import ExecutorError
from executor.observer import observe
from planner.plan import CalibrationRun, RankTimings
from tests.dist.jobs import ROOT, run
from tests.dist.plans import make_plan

pytestmark = pytest.mark.dist

PLAN = make_plan(tp=2, dp=2, dp_shard=2, zero_stage=3)
NUM_TIMED = 3
FP32 = 4
WIDTH = 24

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all loops in one job of four ranks."""
    folder = tmp_path_factory.mktemp("observe")
    (folder / "plan.json").write_text(PLAN.model_dump_json())
    worker = str(Path(__file__).with_name("run_observe.py"))
    arguments = [worker, str(folder / "plan.json"), str(folder / "out.json")]
    for ended in run([arguments] * 4, within_s=180):
        assert ended.code == 0, ended.stderr
    return dict(json.loads((folder / "out.json").read_text()))


def ranks_of(found: Found, loop: str) -> tuple[RankTimings, ...]:
    return CalibrationRun.model_validate(found[loop]["run"]).ranks


def calls(timings: RankTimings) -> Counter[tuple[str, str, int]]:
    """Return how often each (axis, op, size) was called."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for timing in timings.collectives:
        assert timing.group_size == 2
        counted[timing.axis, timing.op, timing.size_bytes] += len(timing.seconds)
    return counted


# ---------------------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("loop", ["fsdp and tp", "ddp"])
def test_losses_and_parameters_are_bitwise_those_of_the_unobserved_script(
    found: Found, loop: str
) -> None:
    plain, observed = found[loop]["plain"], found[loop]["observed"]
    for field in ("losses", "parameters"):
        assert [rank[field] for rank in observed] == [rank[field] for rank in plain]
    assert plain[0]["losses"][-1] < plain[0]["losses"][0], "it trained"


@pytest.mark.parametrize("loop", ["fsdp and tp", "ddp"])
def test_no_collective_is_added(found: Found, loop: str) -> None:
    numbers = [rank["calls"] for rank in found[loop]["plain"]]
    assert [rank["calls"] for rank in found[loop]["observed"]] == numbers
    assert all(numbers)


def test_every_call_returns_what_it_returns_unobserved(found: Found) -> None:
    assert found["every call"]["observed"] == found["every call"]["plain"]


def test_asynchronous_calls_do_not_wait(found: Found) -> None:
    # That the job ended says it: a peer joins only once the caller has gone on.
    kinds = {kind for rank in found["asynchronous"]["observed"] for kind in rank["kinds"]}
    assert kinds == {"Work True AsyncCollectiveTensor"}
    assert found["asynchronous"]["observed"] == found["asynchronous"]["plain"]


def test_patches_are_undone_after_an_exception(found: Found) -> None:
    assert {"group.allreduce", "work.wait", "functional.wait_tensor"} <= set(
        found["patched"]["inside"]
    )
    assert found["patched"]["after"] == []
    assert found["patched"]["hooks"] == 0
    assert found["patched"]["run"] is None


# ---------------------------------------------------------------------------- what is seen


def test_every_call_is_in_the_run_with_axis_op_and_size(found: Found) -> None:
    expected = {
        # an axis that the plan has a choice for (dp_cp all_reduce) stands for dp and its like
        ("dp_cp", "all_reduce", 16): 1,
        ("dp_cp", "all_gather", 32): 2,  # one of them functional
        ("dp_cp", "reduce_scatter", 32): 1,
        ("dp_cp", "all_to_all", 32): 1,
        ("dp_cp", "gather", 32): 1,
        ("dp_cp", "send_recv", 12): 2,
        ("tp", "all_gather", 32): 1,
        ("tp", "reduce_scatter", 16): 1,
        ("tp", "reduce_scatter", 32): 1,  # functional
        ("tp", "all_reduce", 16): 1,  # functional
        ("tp", "broadcast", 32): 1,
        ("tp", "scatter", 32): 1,
    }
    received_last = ("dp_cp", "send_recv", 8)
    for timings in ranks_of(found, "every call"):
        once = {call: NUM_TIMED * number for call, number in expected.items()}
        assert calls(timings) == {**once, received_last: 1}


def test_what_the_run_cannot_hold_is_named(found: Found) -> None:
    left_out = {
        (tuple(ranks), op): number for ranks, op, _, number in found["every call"]["left_out"]
    }
    assert left_out == {
        **{(pair, op): NUM_TIMED for pair in ((0, 1), (2, 3)) for op in ("barrier", "reduce")},
        **{(pair, "all_reduce"): NUM_TIMED for pair in ((0, 3), (1, 2))},
        **{(pair, op): 1 for pair in ((0, 2), (1, 3)) for op in ("barrier", "send_recv")},
    }
    reasons = {op: reason for _, op, reason, _ in found["every call"]["left_out"]}
    assert reasons["all_reduce"] == "no group of the plan (tp2 dp2)"
    assert reasons["send_recv"] == "never waited for"


def test_an_asynchronous_call_is_recorded_once(found: Found) -> None:
    for timings in ranks_of(found, "asynchronous"):
        assert calls(timings) == {("dp_cp", "all_reduce", 24): 1, ("dp_cp", "all_reduce", 28): 1}
    assert found["asynchronous"]["left_out"] == []


def test_fsdp_and_tensor_parallelism_are_seen_whole(found: Found) -> None:
    half = (WIDTH * WIDTH // 2 + WIDTH // 2) + (WIDTH * WIDTH // 2 + WIDTH)  # Colwise, Rowwise
    size = half * FP32
    for timings in ranks_of(found, "fsdp and tp"):
        assert calls(timings) == {
            # each block is a root, whose parameters stay gathered from forward to backward
            ("dp_cp", "all_gather", size): 2 * NUM_TIMED,
            ("dp_cp", "reduce_scatter", size): 2 * NUM_TIMED,
            # two forward; one backward, since the first block's input needs no gradient
            ("tp", "all_reduce", 8 * WIDTH * FP32): 3 * NUM_TIMED,
        }
    assert found["fsdp and tp"]["left_out"] == []


def test_what_ddp_calls_from_c_plus_plus_is_counted(found: Found) -> None:
    assert all(timings.collectives == () for timings in ranks_of(found, "ddp"))
    [[ranks, op, reason, number]] = found["ddp"]["left_out"]
    assert (ranks, op, reason) == ([0, 1, 2, 3], "", "made below Python")
    assert number == found["ddp"]["plain"][0]["calls"]["(0, 1, 2, 3)"] - 3


def test_parts_of_a_step_add_up_to_it(found: Found) -> None:
    for timings in ranks_of(found, "fsdp and tp"):
        assert len(timings.step_s) == NUM_TIMED
        for whole, *parts in zip(
            timings.step_s,
            timings.forward_backward_s,
            timings.optimizer_s,
            timings.communication_s,
            strict=True,
        ):
            assert sum(parts) == pytest.approx(whole)
            assert min(parts) > 0


# -------------------------------------------------------------------------- alone, and refused


# In the long run: torch 2.13 sometimes aborts rank 0 as that process ends, after its report.
@pytest.mark.long
def test_the_example_reports_a_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(make_plan(dp=2).model_dump_json())
    example = str(ROOT / "examples" / "observe_fsdp.py")
    options = ["--plan", str(tmp_path / "plan.json"), "--report", str(tmp_path / "run.json")]
    ended = run([[example, *options, "--steps", "3"]] * 2, within_s=120)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    assert "all_gather" in ended[0].stdout
    reported = CalibrationRun.model_validate_json((tmp_path / "run.json").read_text())
    assert {timing.op for timing in reported.ranks[1].collectives} == {
        "all_gather",
        "reduce_scatter",
    }
    assert "not timed" not in ended[0].stderr


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_a_plan_for_another_world_is_warned_about(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    with observe(PLAN, num_warmup_steps=0) as observer, observer.step():
        dist.barrier()
    assert "is for 4 ranks (tp2 dp2), this job has 1" in caplog.text
    assert observer.run is not None
    assert observer.run.ranks[0].collectives == ()


def test_a_script_without_timed_steps_has_no_run(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    with observe(make_plan()) as observer, observer.step():
        pass
    assert observer.run is None
    assert "no run: 0 of 1 ranks timed steps" in caplog.text


def test_a_script_without_process_group_is_refused() -> None:
    with pytest.raises(ExecutorError, match="call init_process_group before it"), observe(PLAN):
        pass
