"""Whatever goes wrong on one rank, every other ends soon and says what it lost, doing what.

``pytest -s tests/dist/test_faults.py`` prints the table: fault, layout, exit codes, seconds from
the fault to the end of the last other rank, and what the first of them said.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from executor.job import EXIT_LOST_PEER, EXIT_REFUSED
from planner.plan import Plan
from tests.dist.cases import summary_of
from tests.dist.jobs import ROOT
from tests.dist.plans import make_plan
from tests.dist.run_faults import PATIENCE_S, End, Job

pytestmark = pytest.mark.dist

DENSE: dict[str, Any] = {"model": summary_of("gpt-dense"), "global_batch_size": 4}
EXPERTS = DENSE | {"model": summary_of("gpt-experts")}
# Layout: plan, the rank that the fault comes over, and the axis it is noticed on.
LAYOUTS: dict[str, tuple[Plan, int, str]] = {
    "dp3": (make_plan(dp=3, **(DENSE | {"global_batch_size": 3})), 0, "dp_cp"),
    "tp2": (make_plan(tp=2, **DENSE), 1, "tp"),
    "pp3": (make_plan(pp=3, **DENSE), 1, "pp"),
    "cp2": (make_plan(cp=2, **DENSE), 0, "cp"),
    "ep2": (make_plan(dp=2, ep=2, **EXPERTS), 1, "ep"),
    "fsdp2": (make_plan(dp=2, dp_shard=2, zero_stage=3, **DENSE), 0, "dp_shard_cp"),
}
FEW = ("dp3", "ep2")  # where every layout waits in the same call, on all ranks
SLACK_S = 25.0  # many processes end at the same time on few cores
CLOSED = r".*(closed by peer|reset by peer|Broken pipe).*"  # at once
LATE = r".*(Timed out waiting|closed by peer|reset by peer|Broken pipe).*"  # or once it has ended

Ends = dict[str, list[End]]
Run = Callable[..., Ends]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield what runs a fault in all layouts at the same time, and prints its rows."""
    folder = tmp_path_factory.mktemp("faults")
    worker = str(Path(__file__).with_name("run_faults.py"))
    with subprocess.Popen(
        [sys.executable, worker, str(folder)],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run_fault(fault: str, layouts: Iterable[str] = LAYOUTS) -> Ends:
            jobs = [
                Job(layout, plan.model_dump(mode="json"), plan.model.name, fault, victim, 60.0)
                for layout, (plan, victim, _) in LAYOUTS.items()
                if layout in layouts
            ]
            stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            ends = {
                job.layout: [End(**end) for end in found]
                for job, found in zip(jobs, answer, strict=True)
            }
            show(fault, ends)
            return ends

        yield run_fault
        stdin.close()


def show(fault: str, ends: Ends) -> None:
    for layout, found in ends.items():
        victim = LAYOUTS[layout][1]
        others = [end for end in found if end.rank != victim] or found
        last_s = max(end.after_s for end in others)
        codes = " ".join(f"{end.rank}:{end.code}" for end in found)
        said = [line for end in others + found for line in sentences(end)]
        sys.stdout.write(
            f"| {fault} | {layout} | {codes} | {last_s:.1f} | {said[0] if said else '-'} |\n"
        )


def sentences(end: End) -> list[str]:
    """Return what the executor said at the end of a rank."""
    return [line for line in end.stderr.splitlines() if line.startswith(("stopped:", "refused:"))]


def survivors_say(ends: Ends, operation: str, reason: str, *, victims_code: int | None) -> None:
    """Check that each survivor has lost a rank in ``operation``, for this reason, and only so."""
    for layout, found in ends.items():
        plan, victim, axis = LAYOUTS[layout]
        assert len(found) == plan.layout.world_size
        assert found[victim].code == victims_code, found[victim].stderr
        if victims_code == EXIT_REFUSED:
            assert "Traceback" not in found[victim].stderr
            [said] = sentences(found[victim])
            assert said.startswith(f"refused: rank {victim}: inputs of this step have shape")
        for end in found[:victim] + found[victim + 1 :]:
            assert end.code == EXIT_LOST_PEER, f"{layout}, rank {end.rank}: {end.stderr}"
            assert end.after_s < PATIENCE_S + SLACK_S
            assert not re.search("Traceback|exception", end.stderr), end.stderr
            [said] = sentences(end)
            lost = rf"stopped: rank {end.rank} lost (rank \d|one of ranks \[.*\])"
            during = operation.format(axis=axis)
            assert re.fullmatch(f"{lost} during {during}: {reason}; see how .*", said), said


@pytest.mark.parametrize(
    ("fault", "victims_code", "reason"),
    [
        ("killed in the forward", -9, CLOSED),
        ("killed in the backward", -9, CLOSED),
        ("frozen in the forward", None, LATE),
        ("inputs of another shape", EXIT_REFUSED, LATE),
    ],
)
def test_a_rank_lost_in_a_step_is_noticed_on_its_axis(
    fault: str, victims_code: int | None, reason: str, run: Run
) -> None:
    survivors_say(run(fault), r"\w+ on {axis}", reason, victims_code=victims_code)


@pytest.mark.parametrize(
    ("fault", "victims_code", "operation", "reason"),
    [
        ("killed between steps", -9, "barrier on all ranks", CLOSED),
        ("killed while building groups", -9, "new_group on all ranks", ".*"),
        ("user code raises", 1, "barrier on all ranks", LATE),
        ("leaves early", 0, "barrier on all ranks", LATE),
    ],
)
def test_a_rank_lost_outside_a_step_is_noticed_by_all(
    fault: str, victims_code: int, operation: str, reason: str, run: Run
) -> None:
    survivors_say(run(fault, FEW), operation, reason, victims_code=victims_code)


def test_a_rank_that_never_starts_is_missed_by_name(run: Run) -> None:
    for layout, found in run("never starts", FEW).items():
        missing = LAYOUTS[layout][1]
        for end in found:
            assert end.code == EXIT_LOST_PEER, end.stderr
            assert end.after_s < PATIENCE_S + SLACK_S
            assert not re.search("Traceback|frame #", end.stderr), end.stderr
            [said] = sentences(end)
            lost = f"stopped: rank {end.rank} lost rank {missing} during the rendezvous: "
            assert said.startswith(lost), said


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wrong world size", r"is for (\d) ranks .*, this job has \d; start \1 processes"),
        ("plans differ", r"plans differ between ranks: .*another \(\w+\) on ranks \[\d\]"),
        ("options differ", r"options of apply differ between ranks: .*learning_rate=0.5"),
        ("weights differ", r"weights of the model differ between ranks: \w+ on ranks"),
        ("model of another width", r"rank \d: module GPT is not the plan's model .*num_params is"),
    ],
)
def test_what_does_not_fit_is_refused_by_all_ranks_alike(fault: str, why: str, run: Run) -> None:
    for found in run(fault, FEW).values():
        assert [end.code for end in found] == [EXIT_REFUSED] * len(found), found
        assert not any("Traceback" in end.stderr for end in found)
        assert max(end.after_s for end in found) < SLACK_S
        [said] = [line for end in found for line in sentences(end)]
        assert re.search(why, said), said
        assert sentences(found[0]) == [said], "rank 0 says it, for all"


def test_rank_0_says_what_takes_long(run: Run) -> None:
    for found in run("none", FEW).values():
        assert [end.code for end in found] == [0] * len(found), found
        log = found[0].stderr
        for step in ("building groups of", "cutting GPT", "ready: "):
            assert step in log
