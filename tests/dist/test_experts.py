"""Experts on several ranks compute what a dense loop in one process does, by the calls they say."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dist.jobs import run
from tests.dist.run_experts import (
    BATCH,
    CASES,
    HIDDEN,
    NUM_EXPERTS,
    NUM_RANKS,
    TOP_K,
    Case,
)

pytestmark = pytest.mark.dist

ELEMENT_BYTES = 8  # fp64, and int64 of the counts
GATHERED = {"collapse", "collapse, expanded gradient", "collapse ep2", "recompute, collapse"}

Calls = Counter[tuple[str, str, int]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one job of four ranks."""
    out = tmp_path_factory.mktemp("experts") / "out.json"
    worker = str(Path(__file__).with_name("run_experts.py"))
    ends = run([[worker, str(out)]] * NUM_RANKS, within_s=240)
    assert not any(end.code for end in ends), [end.stderr[-2000:] for end in ends]
    findings: dict[str, Any] = json.loads(out.read_text())
    return findings


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_dense_loop(name: str, found: dict[str, Any]) -> None:
    for rank, finding in enumerate(found[name]):
        for what, difference in finding["differences"].items():
            assert difference <= 1e-12, f"{what} of rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_recorded_calls_are_those_of_the_path(name: str, found: dict[str, Any]) -> None:
    """Counts are exchanged once per forward, never by a recompute; a group of one calls nothing."""
    for rank, finding in enumerate(found[name]):
        calls = Calls({tuple(call): count for *call, count in finding["calls"]})
        assert calls == expected_calls(CASES[name], rank, is_gathered=name in GATHERED), rank


def expected_calls(case: Case, rank: int, *, is_gathered: bool) -> Calls:
    """Return (axis, op, bytes) -> calls of one rank."""
    calls = Calls()
    ep, micro_batches = case.degrees.get("ep", 1), case.micro_batches
    if case.aux_loss_coefficient:
        for axis in ("tp", "cp"):
            if case.degrees.get(axis, 1) > 1:
                calls[axis, "all_reduce", 2 * BATCH * NUM_EXPERTS * ELEMENT_BYTES] = micro_batches
    if ep == 1:
        return calls
    if case.capacity is None:
        calls["ep", "all_to_all", (NUM_EXPERTS + ep) * ELEMENT_BYTES] = micro_batches
        rows = BATCH * case.seq_lens[rank] * TOP_K
    else:
        rows = NUM_EXPERTS * case.rows_of_expert(rank)
    size_bytes = rows * HIDDEN * ELEMENT_BYTES
    legs = micro_batches * (3 if case.recompute else 2)  # there and back in each
    if is_gathered:
        calls["ep", "gather", ep * size_bytes] += legs
        calls["ep", "scatter", ep * size_bytes] += legs
    else:
        calls["ep", "all_to_all", size_bytes] += 2 * legs
    return calls
