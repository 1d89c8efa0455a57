"""POST /plan and GET /plans/{id}."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

import api.jobs
from planner.plan import Plan, document_hash
from planner.planning import make_plan
from tests.api.conftest import Client, in_process, plan_request, running_service
from tests.timed import made_up_run


def searches_of(metrics: str) -> int:
    """Return how many searches a service has done."""
    [line] = [x for x in metrics.splitlines() if x.startswith("commplan_plan_seconds_count")]
    return int(float(line.split()[-1]))


def test_a_plan_is_answered_stored_and_read_back_byte_for_byte(client: Client) -> None:
    answer = client.post("/plan", json=plan_request())
    assert answer.status_code == 200, answer.text
    plan = Plan.model_validate_json(answer.content)
    assert plan.model.name == "example-gpt"
    assert float(answer.headers["X-Commplan-Search-Seconds"]) >= 0
    assert answer.headers["Content-Location"] == f"/plans/{plan.id}"
    stored = client.get(f"/plans/{plan.id}")
    assert (stored.status_code, stored.content) == (200, answer.content)


def test_a_browser_is_sent_to_the_page_and_programs_get_the_document(client: Client) -> None:
    plan = client.post("/plan", json=plan_request())
    path = plan.headers["Content-Location"]
    browser = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
    answer = client.get(path, headers=browser)
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{path}/page")
    assert f'href="{path}?format=json"' in client.get(f"{path}/page", headers=browser).text
    for options in ({}, {"headers": {"Accept": "application/json"}}):
        assert client.get(path, **options).content == plan.content
    assert client.get(f"{path}?format=json", headers=browser).content == plan.content
    assert client.get(f"{path}?format=xml").status_code == 422


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "huggingface"),
        ({"_name_or_path": "someone/tiny-llama.v2"}, "tiny-llama.v2"),
        ({"_name_or_path": "/models/tiny"}, "tiny"),
        ({"_name_or_path": "<script>"}, "huggingface"),
        ({"_name_or_path": "x" * 121}, "huggingface"),
        ({"_name_or_path": 3.5}, "huggingface"),
        ({"_name_or_path": None, "architectures": ["LlamaForCausalLM"]}, "huggingface"),
    ],
)
def test_a_config_json_is_a_model_as_it_is(
    client: Client, given: dict[str, Any], name: str
) -> None:
    config = CONFIG | given
    bare = client.post("/plan", json=plan_request(model=config))
    assert bare.status_code == 200, bare.text
    assert bare.json()["model"]["name"] == name
    wrapped = client.post("/plan", json=plan_request(model={"huggingface": config, "name": name}))
    assert wrapped.content == bare.content


def test_the_same_request_gives_the_same_bytes_without_a_second_search(client: Client) -> None:
    first, second = (client.post("/plan", json=plan_request()) for _ in range(2))
    assert first.content == second.content
    assert first.headers["X-Commplan-Search-Seconds"] == second.headers["X-Commplan-Search-Seconds"]
    assert searches_of(client.get("/metrics").text) == 1


def test_a_fresh_database_gives_the_same_bytes(
    make_client: Callable[..., Client], tmp_path: Path
) -> None:
    clients = [make_client(data_dir=tmp_path / name) for name in ("a", "b")]
    answers = [client.post("/plan", json=plan_request()) for client in clients]
    assert answers[0].status_code == 200
    assert answers[0].content == answers[1].content


def test_what_the_caller_leaves_out_and_what_it_spells_out_are_one_request(client: Client) -> None:
    short = client.post("/plan", json=plan_request())
    long = client.post("/plan", json=plan_request(top_k=5, constraints={}, calibration="none"))
    assert short.content == long.content
    other = client.post("/plan", json=plan_request(top_k=0))
    assert other.json()["id"] != short.json()["id"]


def test_two_identical_requests_at_once_are_one_search(service: httpx.Client) -> None:
    before = searches_of(service.get("/metrics").text)
    body = plan_request(top_k=7)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: service.post("/plan", json=body), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert searches_of(service.get("/metrics").text) == before + 1


def test_plans_outlive_the_process(tmp_path: Path) -> None:
    with running_service(tmp_path) as first:
        answer = first.post("/plan", json=plan_request())
    assert answer.status_code == 200, answer.text
    with running_service(tmp_path) as second:
        stored = second.get(answer.headers["Content-Location"])
        again = second.post("/plan", json=plan_request())
        assert searches_of(second.get("/metrics").text) == 0
    assert stored.content == again.content == answer.content


def test_an_unknown_plan_is_404(client: Client) -> None:
    for plan_id in ("0123456789abcdef", "%00", "a" * 5000, "..%2f..%2fetc"):
        assert client.get(f"/plans/{plan_id}").status_code == 404


# ------------------------------------------------------------------------------ while it searches


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every search until the event is set."""
    opened = threading.Event()

    def held(*arguments: Any) -> Plan:
        assert opened.wait(timeout=30)
        return make_plan(*arguments)

    monkeypatch.setattr(api.jobs, "make_plan", held)
    yield opened
    opened.set()


def test_health_is_answered_while_searches_run(client: Client, gate: threading.Event) -> None:
    async def scenario() -> tuple[httpx.Response, bool, list[httpx.Response]]:
        async with in_process(client.app) as http:
            bodies = [plan_request(top_k=k) for k in range(4)]
            plans = [asyncio.create_task(http.post("/plan", json=body)) for body in bodies]
            await asyncio.sleep(0.1)
            health = await http.get("/healthz")
            waiting = not any(plan.done() for plan in plans)
            gate.set()
            return health, waiting, list(await asyncio.gather(*plans))

    health, waiting, plans = asyncio.run(scenario())
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert waiting
    assert [plan.status_code for plan in plans] == [200] * 4


def test_a_search_beyond_the_time_limit_goes_on_and_is_found_later(
    make_client: Callable[..., Client], gate: threading.Event
) -> None:
    client = make_client(plan_time_limit_s=0.05)

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        async with in_process(client.app) as http:
            late = await http.post("/plan", json=plan_request())
            gate.set()
            for _ in range(300):
                found = await http.post("/plan", json=plan_request())
                if found.status_code == 200:
                    break
            return late, found

    late, found = asyncio.run(scenario())
    assert late.status_code == 503
    assert int(late.headers["Retry-After"]) > 0
    assert late.json()["error"]["type"] == "BusyError"
    assert found.status_code == 200
    assert searches_of(client.get("/metrics").text) == 1


def test_more_searches_than_may_wait_are_turned_away(
    make_client: Callable[..., Client], gate: threading.Event
) -> None:
    client = make_client(max_concurrent_plans=1, max_waiting_plans=1)

    async def scenario() -> list[int]:
        async with in_process(client.app) as http:
            tasks = [
                asyncio.create_task(http.post("/plan", json=plan_request(top_k=k)))
                for k in range(3)
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            return sorted(answer.status_code for answer in await asyncio.gather(*tasks))

    assert asyncio.run(scenario()) == [200, 200, 503]


def test_another_build_of_the_same_version_plans_anew(
    make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_client().post("/plan", json=plan_request())
    monkeypatch.setattr(api.jobs, "build_fingerprint", lambda: "another build")
    changed = make_client()
    again = changed.post("/plan", json=plan_request())
    assert searches_of(changed.get("/metrics").text) == 1
    assert again.content == first.content
    assert document_hash(again.json()) == document_hash(first.json())


def test_documents_of_a_version_with_other_fields_are_left_out_not_a_500(client: Client) -> None:
    plan = client.post("/plan", json=plan_request(constraints={"tp": 1, "pp": 1})).json()
    run = made_up_run(Plan.model_validate(plan)).model_dump(mode="json")
    assert client.post("/calibrations", json=run).status_code == 200
    with client.app.state.store._engine.begin() as writing:
        writing.execute(text('update plans set document = \'{"id": "of old"}\''))
        writing.execute(text("update calibrations set document = '{\"step_spread\": 1}'"))
    page = client.get(f"/plans/{plan['id']}/page")
    assert page.status_code == 422
    assert "another version" in page.json()["error"]["message"]
    assert client.post("/calibrations", json=run).status_code == 422
    assert client.get("/calibrations").json() == []
    again = client.post("/plan", json=plan_request(top_k=1))
    assert again.status_code == 200
    assert again.json()["provenance"]["calibration_id"] is None
