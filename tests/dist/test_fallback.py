"""Where one rank cannot share memory, all ranks of the group take the same other path."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from planner.plan import Method
from tests.dist.jobs import run
from tests.dist.plans import make_plan

pytestmark = pytest.mark.dist

WORLD_SIZE: Final = 4
COPY_ENGINE: Final = Method("copy_engine", "shm")
PLAN: Final = make_plan(
    dp=WORLD_SIZE,
    ranks_per_unit=2,
    methods={
        ("dp_cp", "all_reduce"): [(None, COPY_ENGINE)],
        ("dp_cp", "broadcast"): [(None, COPY_ENGINE)],
        ("dp_cp", "all_gather"): [(None, Method("hierarchical", "shm"))],
    },
)
AS_PLANNED: Final = {
    "all_reduce": "copy_engine (shm)",
    "broadcast": "copy_engine (shm)",
    "all_gather": "hierarchical (shm)",
}
WITHOUT_MEMORY: Final = {
    "all_reduce": "ring",
    "broadcast": "tree",
    "all_gather": "hierarchical (executor)",
}
# Which rank lacks what. The first of a unit makes its memory, rank 0 that of the whole group too.
CASES: Final = {
    "healthy": {"rank": None, "function": ""},
    "rank 0 makes none": {"rank": 0, "function": "os.memfd_create"},
    "rank 2 makes none": {"rank": 2, "function": "os.memfd_create"},
    "rank 3 maps none": {"rank": 3, "function": "executor.collectives.host._mapped"},
}
METHODS: Final = {
    "healthy": AS_PLANNED,
    "rank 0 makes none": WITHOUT_MEMORY,
    "rank 2 makes none": AS_PLANNED | {"all_gather": "hierarchical (executor)"},
    "rank 3 maps none": WITHOUT_MEMORY,
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Run all cases in one job; return what ``run_fallback.tried`` returns on each rank."""
    folder = tmp_path_factory.mktemp("fallback")
    given = {"plan": PLAN.model_dump(mode="json"), "cases": CASES}
    (folder / "cases.json").write_text(json.dumps(given))
    worker = str(Path(__file__).with_name("run_fallback.py"))
    arguments = [worker, str(folder / "cases.json"), str(folder / "out.json")]
    for rank, end in enumerate(run([arguments] * WORLD_SIZE, within_s=60)):
        assert end.code == 0, f"rank {rank}: {end.stderr[-2000:]}"
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_run_and_record_one_method(case: str, tried: dict[str, Any]) -> None:
    assert [rank["methods"] for rank in tried[case]] == [METHODS[case]] * WORLD_SIZE
    recorded = {op: METHODS[case][op] for op in ("all_reduce", "all_gather")}
    assert [rank["recorded"] for rank in tried[case]] == [recorded] * WORLD_SIZE


@pytest.mark.parametrize("case", CASES)
def test_results_are_right_on_every_path(case: str, tried: dict[str, Any]) -> None:
    right = {
        "all_reduce": [0.0 + 1 + 2 + 3] * 1000,
        "broadcast": [3.0] * 1000,
        "all_gather": [rank for rank in range(4) for _ in range(10)],
    }
    assert [rank["results"] for rank in tried[case]] == [right] * WORLD_SIZE


@pytest.mark.parametrize(
    ("case", "cause", "num_reasons"),
    [
        ("healthy", "", [0, 0, 0, 0]),
        ("rank 0 makes none", "rank 0 on host", [2, 0, 0, 0]),
        ("rank 2 makes none", "rank 2 on host", [0, 0, 1, 0]),
        ("rank 3 maps none", "rank 3 on host", [1, 0, 1, 0]),
    ],
)
def test_the_first_rank_of_those_that_failed_says_why(
    case: str, cause: str, num_reasons: list[int], tried: dict[str, Any]
) -> None:
    reasons = [
        [words for words in rank["warnings"] if "refused by the test" in words]
        for rank in tried[case]
    ]
    assert [len(of_rank) for of_rank in reasons] == num_reasons
    for words in (words for of_rank in reasons for words in of_rank):
        assert words.startswith("ranks [0, 1, 2, 3] do without shared memory")
        assert cause in words
