"""The database: shared by processes, and never two plans for one request."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL

from api.store import Store, StoredPlan
from planner.errors import InvalidInputError
from planner.plan import Plan, canonical_json
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve
from tests.api.conftest import plan_request


@pytest.fixture
def url(tmp_path: Path) -> URL:
    return URL.create("sqlite", database=str(tmp_path / "new" / "folder" / "store.sqlite3"))


@pytest.fixture
def store(url: URL) -> Iterator[Store]:
    opened = Store(url)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(resolve(PlanRequest.model_validate(plan_request())))


def add(store: Store, plan: Plan, key: str = "key") -> StoredPlan:
    return store.add_plan(key=key, request="{}", topology_hash="hash", plan=plan, search_s=1.5)


def test_what_is_stored_comes_back(store: Store, plan: Plan) -> None:
    stored = add(store, plan)
    assert stored == StoredPlan(plan.id, canonical_json(plan), 1.5)
    assert store.plan(plan.id) == store.plan_for_request("key") == stored
    assert store.plan("other") is None
    assert store.plan_for_request("other") is None


def test_another_process_with_the_same_request_gets_what_is_stored(
    url: URL, store: Store, plan: Plan
) -> None:
    other = Store(url)
    stores = [store, other] * 10
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: add(one, plan), stores))
    other.close()
    assert set(found) == {StoredPlan(plan.id, canonical_json(plan), 1.5)}


def test_two_requests_may_lead_to_one_plan(store: Store, plan: Plan) -> None:
    assert add(store, plan, "name") == add(store, plan, "inline")


def test_a_plan_of_another_build_replaces_its_namesake(store: Store, plan: Plan) -> None:
    add(store, plan, "old build")
    changed = plan.model_copy(update={"assumptions": ("another build",)})
    assert add(store, changed, "new build").document == canonical_json(changed)
    found = store.plan(plan.id)
    assert found is not None
    assert found.document == canonical_json(changed)


def test_replicas_may_start_at_the_same_time(url: URL) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(Store, [url] * 8))
    assert all(one.is_reachable() for one in stores)
    for one in stores:
        one.close()


def test_readers_are_not_blocked_by_a_writer(store: Store, plan: Plan) -> None:
    add(store, plan)
    with store._engine.begin() as writing:
        writing.execute(text("update plans set search_s = 2"))
        found = store.plan(plan.id)
    assert found is not None
    assert found.search_s == 1.5


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database " * 100)
    with pytest.raises(InvalidInputError, match="cannot be opened"):
        Store(URL.create("sqlite", database=str(file)))
