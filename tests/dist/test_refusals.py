"""A job that cannot go on ends on all ranks, soon, and says why once."""

import json
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
from planner.plan import ModelSummary, Plan
from tests.dist.jobs import EXAMPLE, ROOT, TINY_CONFIG, Ended, ended, run, started
from tests.dist.plans import TINY, make_plan

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


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    plan = saved(tmp_path, "dp4", make_plan(dp=4))
    message = the_one_message(run([arguments(plan)] * 2, within_s=WITHIN_S))
    assert "is for 4 ranks" in message
    assert "this job has 2" in message
    assert "start 4 processes" in message


def test_plans_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    mine = saved(tmp_path, "a", make_plan(dp=2))
    other = saved(tmp_path, "b", make_plan(dp=2, bucket_bytes=7777))
    message = the_one_message(run([arguments(mine), arguments(other)], within_s=WITHIN_S))
    assert "plans differ between ranks" in message
    assert "on ranks [0]" in message
    assert "on ranks [1]" in message


@pytest.fixture
def bad_sources(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield what is given as a plan, and is none."""
    for name, text in (("text", "layout: tp4"), ("empty", "")):
        (tmp_path / f"{name}.json").write_text(text)
    newer = make_plan(dp=2).model_dump(mode="json") | {"schema_version": 2}
    (tmp_path / "newer.json").write_text(json.dumps(newer))

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name http.server calls
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {
            "text": str(tmp_path / "text.json"),
            "empty": str(tmp_path / "empty.json"),
            "newer": str(tmp_path / "newer.json"),
            "folder": str(tmp_path),
            "404": f"http://127.0.0.1:{server.server_address[1]}/plans/p",
            "down": "http://127.0.0.1:9/plans/p",  # port 9, discard: nobody listens
        }
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("text", "is not JSON"),
        ("empty", "it is empty"),
        ("newer", "schema_version is 2"),
        ("folder", "Is a directory"),
        ("404", "HTTP 404"),
        ("down", "is the service up?"),
    ],
)
def test_a_source_that_holds_no_plan_is_refused(
    source: str, why: str, bad_sources: dict[str, str]
) -> None:
    own = arguments(bad_sources[source])
    message = the_one_message(run([own] * 2, within_s=WITHIN_S))
    assert bad_sources[source] in message
    assert why in message


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
    assert "is for 4 ranks (dp_replicate4), this job has 2; start 4" in report[-2], done.stderr
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
    sharding = plan.sharding.model_copy(update={"zero_stage": 1})
    plan = plan.model_copy(update={"sharding": sharding})
    path = saved(tmp_path, "zero", plan)
    message = the_one_message(run([arguments(path)] * 2, within_s=WITHIN_S))
    assert "sharding.zero_stage=1; recompute='selective'" in message


def test_another_module_is_refused(tmp_path: Path) -> None:
    bigger = ModelSummary(**(TINY.model_dump() | {"name": "bigger", "num_params": 12_345}))
    path = saved(tmp_path, "bigger", make_plan(dp=2, model=bigger))
    message = the_one_message(run([arguments(path)] * 2, within_s=WITHIN_S))
    assert "12345 in the plan" in message
    assert "'bigger'" in message


LAYOUTS = {
    "pp": (make_plan(pp=2), r"(send_recv on pp|barrier on all ranks|all_reduce of the loss)"),
    "dp": (make_plan(dp=2), r"(all_reduce on dp_cp|barrier on all ranks|all_reduce of the loss)"),
    "tp": (make_plan(tp=2), r"(all_reduce on tp|barrier on all ranks|all_reduce of the loss)"),
}


@pytest.mark.parametrize(
    ("layout", "blow"),
    [
        ("pp", signal.SIGKILL),
        ("pp", signal.SIGSTOP),
        ("dp", signal.SIGKILL),
        ("tp", signal.SIGSTOP),
    ],
)
def test_a_lost_peer_ends_the_other_with_one_sentence_within_the_timeout(
    layout: str, blow: signal.Signals, tmp_path: Path
) -> None:
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
