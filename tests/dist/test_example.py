"""The example as a user starts it: torchrun and a service, and one process with a file."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from planner.plan import CalibrationRun, Plan, Probe, document_hash
from tests.dist.jobs import EXAMPLE, ROOT, TINY_CONFIG
from tests.dist.plans import make_plan

pytestmark = pytest.mark.dist

TOKEN = "a-token"


@contextmanager
def service(plan: Plan, posted: list[bytes]) -> Iterator[str]:
    """Serve ``plan`` and keep what is posted, to bearers of the token; yield the plan's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name http.server calls
            known = self.path == f"/plans/{plan.id}"
            self._answer(200 if known else 404, plan.model_dump_json().encode())

        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(201 if self.path == "/calibrations" else 404, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, body = 401, b"no token"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/plans/{plan.id}"
        server.shutdown()
        thread.join()


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--config", str(TINY_CONFIG), "--warmup", "1", "--repeats", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]


def test_torchrun_trains_a_plan_from_a_service_posts_its_timings_and_says_what_takes_long() -> None:
    probe = Probe(axis="dp_cp", op="all_reduce", sizes_bytes=(4096,))
    plan = make_plan(dp=2, precision="fp32", probes=(probe,))
    posted: list[bytes] = []
    with service(plan, posted) as url:
        done = start(
            [*torchrun(2), "--standalone", str(EXAMPLE), "--plan", url],
            COMMPLAN_TOKEN=TOKEN,
        )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert [line.split()[:3] for line in lines] == [["step", str(i), "loss"] for i in range(3)]
    for said in ("building groups of 2 ranks", "cutting GPT", "probe 1 of 1: all_reduce on dp_cp"):
        assert done.stderr.count(said) == 1, "rank 0 alone says it"
    [body] = posted
    timed = CalibrationRun.model_validate_json(body)
    assert timed.plan_hash == document_hash(plan)
    assert timed.num_warmup_steps == 1
    assert [len(timings.step_s) for timings in timed.ranks] == [2, 2]


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "run.json"
    plan.write_text(make_plan(precision="bf16", optimizer="sgd").model_dump_json())
    done = start([sys.executable, str(EXAMPLE), "--plan", str(plan), "--report", str(report)])
    assert done.returncode == 0, done.stderr
    timed = CalibrationRun.model_validate(json.loads(report.read_text()))
    [timings] = timed.ranks
    assert timings.collectives == ()
    assert timings.communication_s == (0.0, 0.0)


def test_a_wrong_token_is_refused_with_the_way_out() -> None:
    with service(make_plan(), []) as url:
        done = start([sys.executable, str(EXAMPLE), "--plan", url], COMMPLAN_TOKEN="wrong")
    assert done.returncode == 2
    assert "HTTP 401" in done.stderr
    assert "COMMPLAN_TOKEN" in done.stderr
