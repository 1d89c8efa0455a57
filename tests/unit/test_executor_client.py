"""Plans are read and runs are written without torch, and failures say what to do."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from executor import client
from executor.errors import PlanSourceError
from planner.plan import CalibrationRun, RankTimings
from tests.dist.plans import make_plan

RUN = CalibrationRun(
    plan_id="p",
    plan_hash="h",
    topology="local-gloo",
    backend="gloo",
    executor_version="test",
    torch_version="test",
    num_warmup_steps=0,
    ranks=(
        RankTimings(
            rank=0,
            host="here",
            step_s=(1.0,),
            forward_backward_s=(1.0,),
            optimizer_s=(0.0,),
            communication_s=(0.0,),
        ),
    ),
)


def answer(monkeypatch: pytest.MonkeyPatch, status: int, text: str) -> list[httpx.Request]:
    """Let every request be answered alike; return the requests."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, text=text)

    fake = httpx.Client(transport=httpx.MockTransport(handle))
    monkeypatch.setattr(httpx, "get", fake.get)
    monkeypatch.setattr(httpx, "post", fake.post)
    return seen


def test_the_client_and_the_checks_need_no_torch() -> None:
    code = (
        "import sys, executor, executor.client; "
        "executor.load_plan, executor.check_plan, executor.DecoderNames, executor.PlanSourceError; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_had() -> None:
    import executor

    assert all(getattr(executor, name) is not None for name in executor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = executor.nonsense


def test_a_plan_survives_the_file(tmp_path: Path) -> None:
    plan = make_plan(tp=2, dp=2)
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    assert client.load_plan(str(path)) == plan


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "needed: a plan as POST /plan answers it"),
        ("{}", "Field required"),
        ("[1", "Invalid JSON"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanSourceError, match=what):
        client.load_plan(str(path))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanSourceError, match="cannot be read"):
        client.load_plan(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanSourceError, match="cannot be read"):
        client.load_plan(str(path))


def test_a_plan_is_fetched_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    seen = answer(monkeypatch, 200, plan.model_dump_json())
    assert client.load_plan("http://head/plans/p", token="secret") == plan
    assert seen[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(("status", "hint"), [(401, "COMMPLAN_TOKEN"), (404, "HTTP 404")])
def test_a_service_that_refuses_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, hint: str
) -> None:
    answer(monkeypatch, status, "no")
    with pytest.raises(PlanSourceError, match=hint):
        client.load_plan("http://head/plans/p")
    with pytest.raises(PlanSourceError, match=hint):
        client.post_run("http://head", RUN)


def test_a_run_is_posted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answer(monkeypatch, 201, "{}")
    client.post_run("http://head/planner/", RUN)
    assert str(seen[0].url) == "http://head/planner/calibrations"
    assert "Authorization" not in seen[0].headers
    assert CalibrationRun.model_validate_json(seen[0].content) == RUN


def test_a_service_that_is_down_is_reported() -> None:
    with pytest.raises(PlanSourceError, match="is the service up"):
        client.load_plan("http://127.0.0.1:9/plans/p")  # port 9, discard: nobody listens


def test_a_run_survives_the_file_and_a_bad_folder_is_refused(tmp_path: Path) -> None:
    client.save_run(tmp_path / "run.json", RUN)
    assert CalibrationRun.model_validate_json((tmp_path / "run.json").read_text()) == RUN
    with pytest.raises(PlanSourceError, match="cannot be written"):
        client.save_run(tmp_path / "no" / "run.json", RUN)
