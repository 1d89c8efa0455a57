"""Plans are read and runs are written without torch, and failures say what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from executor import client
from executor.errors import PlanSourceError
from executor.version import own_version
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
        "executor.load_plan, executor.check_plan, executor.PlanSourceError; "
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


def refusal(path: Path, text: str) -> str:
    """Return the message that refuses ``text`` as a plan, without its first words."""
    path.write_text(text)
    with pytest.raises(PlanSourceError) as refused:
        client.load_plan(str(path))
    message = str(refused.value)
    assert message.startswith(f"plan {path}")
    return message.removeprefix(f"plan {path}")


NEEDED = "needed: a plan as POST /plan answers it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f" is not JSON: Expecting value: line 1 column 1 (char 0); it is empty; {NEEDED}"),
        (
            "<!doctype html><title>commplan</title> and so on",
            " is not JSON: Expecting value: line 1 column 1 (char 0); "
            f"got '<!doctype html><title>commplan</title> a'; {NEEDED}",
        ),
        ("[" * 100_000, f" is not JSON: nested too deep; got '{'[' * 40}'; {NEEDED}"),
        ("{}", f" is JSON, but no plan: got '{{}}'; {NEEDED}"),
        ("[1]", f" is JSON, but no plan: got '[1]'; {NEEDED}"),
    ],
    ids=["empty", "page", "deep", "object", "list"],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path / "plan.json", text) == message


def edited(*path: str, **fields: Any) -> str:
    """Return a plan as JSON with ``fields`` put into the part at ``path``; None takes one out."""
    document = make_plan(dp=2).model_dump(mode="json")
    document["provenance"]["commplan_version"] = "9.8.7"
    part = document
    for name in path:
        part = part[name]
    for name, value in fields.items():
        part[name] = value
        if value is None:
            del part[name]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (edited(schema_version=2, plan_b={}), "schema_version is 2"),
        (edited("pipeline", depth=3), "unknown field pipeline.depth"),
        (edited(a=1, b=1, c=1, d=1, e=1), "unknown fields a, b, c, d and 1 more"),
        (edited("ranks", ranks_per_unit=None), "missing field ranks.ranks_per_unit"),
    ],
    ids=["schema", "unknown", "many unknown", "missing"],
)
def test_a_plan_of_another_version_is_refused_with_both_versions(
    tmp_path: Path, text: str, what: str
) -> None:
    assert refusal(tmp_path / "plan.json", text) == (
        f": {what}, written by commplan 9.8.7; this executor is commplan {own_version()} and "
        "reads schema_version 1; run planner and executor from one version of commplan, and plan "
        "again if this plan is older"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            edited("layout", tp=0),
            ": layout.tp: Input should be greater than or equal to 1, got 0; plan again rather "
            "than editing the file",
        ),
        (
            edited(recompute="some", framework="other"),
            ": framework: Input should be 'executor' or 'megatron', got 'other' (the first of 2 "
            "errors); plan again rather than editing the file",
        ),
    ],
    ids=["range", "two words"],
)
def test_a_wrong_value_in_a_plan_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path / "plan.json", text) == message


def test_parts_that_disagree_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path / "plan.json", edited("batch", micro_batch_size=7))
    assert message.startswith(": the whole plan: Value error, batch: micro_batch_size(7)")


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for source in (path, tmp_path):
        with pytest.raises(PlanSourceError, match=r"cannot be read: .*give a JSON file or the URL"):
            client.load_plan(str(source))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanSourceError, match="cannot be read"):
        client.load_plan(str(path))


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://no such host/plans/p"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(PlanSourceError, match="cannot be fetched"):
        client.load_plan(url)
    with pytest.raises(PlanSourceError, match="posting the run"):
        client.post_run(url, RUN)


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


def test_a_token_may_have_any_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def get(url: str, *, headers: dict[bytes, bytes], timeout: object) -> httpx.Response:
        sent.append(httpx.Headers(headers).raw[0][1])
        return httpx.Response(404, text="none", request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    with pytest.raises(PlanSourceError, match="404"):
        client.load_plan("http://127.0.0.1:1/plans/x", token="schlüssel")
    assert sent == ["Bearer schlüssel".encode()]
