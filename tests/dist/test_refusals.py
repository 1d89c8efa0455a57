"""A job that cannot go on ends on all ranks, soon, and says why once."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from executor.job import EXIT_LOST_PEER, EXIT_REFUSED
from planner.plan import Plan
from tests.dist.jobs import EXAMPLE, ROOT, TINY_CONFIG, Ended, ended, run, started
from tests.dist.plans import make_plan

pytestmark = pytest.mark.dist

WITHIN_S = 45.0  # mostly importing torch, several times on few cores
PATIENCE_S = 5.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def saved(folder: Path, name: str, plan: Plan) -> str:
    path = folder / f"{name}.json"
    path.write_text(plan.model_dump_json())
    return str(path)


def arguments(plan: str, *more: str) -> list[str]:
    return [str(EXAMPLE), "--plan", plan, "--config", str(TINY_CONFIG), "--steps", "1", *more]


def the_one_message(ends: list[Ended]) -> str:
    """Check that every rank was refused and rank 0 alone said something; return what."""
    assert [end.code for end in ends] == [EXIT_REFUSED] * len(ends), [e.stderr for e in ends]
    spoken = [[line for line in end.stderr.splitlines() if "refused" in line] for end in ends]
    assert [len(lines) for lines in spoken] == [1] + [0] * (len(ends) - 1)
    assert not any("Traceback" in end.stderr for end in ends)
    return spoken[0][0]


@pytest.fixture
def missing_plan() -> Iterator[str]:
    """Yield the address of a plan on a service that has none."""

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name http.server calls
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/plans/p"
        server.shutdown()
        thread.join()


def test_a_plan_that_no_rank_can_read_is_refused_once(missing_plan: str) -> None:
    """What else is no plan: tests/unit/test_executor_client.py."""
    message = the_one_message(run([arguments(missing_plan)] * 2, within_s=WITHIN_S))
    assert missing_plan in message
    assert "HTTP 404" in message


def test_torchruns_report_ends_with_the_refusal(tmp_path: Path) -> None:
    plan = saved(tmp_path, "dp4", make_plan(dp=4))
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", *arguments(plan)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1, "torchrun's own, whatever its ranks return"
    report = done.stderr.splitlines()
    assert "is for 4 ranks (dp4), this job has 2; start 4" in report[-2], done.stderr
    assert set(report[-1]) == {"="}, "the frame around torchrun's report"
    assert sum(line.startswith("refused: ") for line in report) == 1
    codes = [line.split()[2] for line in report if line.strip().startswith("exitcode")]
    assert set(codes) == {str(EXIT_REFUSED)}


def test_a_plan_that_one_rank_cannot_read_is_refused(tmp_path: Path) -> None:
    plan = saved(tmp_path, "dp2", make_plan(dp=2))
    missing = str(tmp_path / "missing.json")
    message = the_one_message(run([arguments(plan), arguments(missing)], within_s=WITHIN_S))
    assert "rank 1" in message
    assert "missing.json cannot be read" in message


def test_fields_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path) -> None:
    plan = make_plan(dp=2, recompute="selective")
    sharding = plan.sharding.model_copy(update={"zero_stage": 2})
    plan = plan.model_copy(update={"sharding": sharding})
    path = saved(tmp_path, "zero", plan)
    message = the_one_message(run([arguments(path)] * 2, within_s=WITHIN_S))
    assert "sharding.zero_stage=2; recompute='selective'" in message


LAYOUTS = {
    "pp": (make_plan(pp=2), r"(send_recv on pp|barrier on all ranks|all_reduce of the loss)"),
    "tp": (make_plan(tp=2), r"(\w+ on tp|barrier on all ranks|all_reduce of the loss)"),
}


@pytest.mark.parametrize(("layout", "blow"), [("pp", signal.SIGSTOP), ("tp", signal.SIGKILL)])
def test_a_peer_lost_at_any_moment_ends_the_other_with_one_sentence_within_the_timeout(
    layout: str, blow: signal.Signals, tmp_path: Path
) -> None:
    """At chosen moments, and in every layout: test_faults."""
    plan, operation = LAYOUTS[layout]
    path = saved(tmp_path, layout, plan)
    own = arguments(path, "--steps", "1000000", "--timeout-s", str(PATIENCE_S))
    with started([own] * 2) as processes:
        survivor = processes[0]
        assert survivor.stdout is not None
        while not survivor.stdout.readline().startswith("step"):
            assert survivor.poll() is None
        processes[1].send_signal(blow)
        lost = time.monotonic()
        end = ended(survivor, lost, within_s=PATIENCE_S + 10)
    assert end.code == EXIT_LOST_PEER, end.stderr
    assert end.after_s < PATIENCE_S + 10
    assert "Traceback" not in end.stderr
    last = end.stderr.splitlines()[-1]
    assert re.match(rf"stopped: rank 0 lost rank 1 during {operation}", last), end.stderr
