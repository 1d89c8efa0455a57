"""Attention over a split sequence is that of one process, and calls what the cost model prices."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner.plan import CollectiveTiming, Plan
from tests.dist.jobs import run
from tests.dist.plans import make_plan

pytestmark = pytest.mark.dist

MICRO_BATCHES = 2
ELEMENT_BYTES = {"float64": 8, "bfloat16": 2}
# Relative to the largest element. bf16 has 8 bits: its own rounding of an output is 2**-9, and
# gradients of keys are rounded once more in each of the ring's hops.
TOLERANCE = {"float64": 1e-12, "bfloat16": 4 * 2**-9}


def case(name: str, plan: Plan, **changes: Any) -> dict[str, Any]:
    """Return a case of grouped queries, four to two, unless ``changes`` say otherwise."""
    return {
        "name": name,
        "plan": plan.model_dump(mode="json"),
        "micro_batches": MICRO_BATCHES,
        "num_heads": 4,
        "num_kv_heads": 2,
        "key_width": 6,
        "value_width": 6,
        "dtype": "float64",
        "gradient": "transposed",
        "checkpoint": False,
        **changes,
    }


def cases_of(exchange: Any) -> list[dict[str, Any]]:
    cp4 = make_plan(cp=4, context_exchange=exchange, micro_batch_size=2)
    cp2 = make_plan(cp=2, dp=2, context_exchange=exchange)
    return [
        case(f"{exchange} cp4", cp4),
        case(f"{exchange} cp4 mha", cp4, num_kv_heads=4),
        case(f"{exchange} cp4 wide keys", cp4, key_width=10),
        case(f"{exchange} cp4 checkpoint", cp4, checkpoint=True),
        case(f"{exchange} cp4 expanded", cp4, gradient="expanded"),
        case(f"{exchange} cp4 bf16", cp4, dtype="bfloat16"),
        case(f"{exchange} cp2", cp2),
        case(f"{exchange} cp2 mha checkpoint", cp2, num_kv_heads=4, checkpoint=True),
    ]


CASES = {
    c["name"]: c
    for c in (*cases_of("ring"), *cases_of("all_gather"), case("alone", make_plan(dp=4)))
}


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one job of four ranks."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "cases.json").write_text(json.dumps(list(CASES.values())))
    worker = str(Path(__file__).with_name("run_context.py"))
    arguments = [worker, str(folder / "cases.json"), str(folder / "out.json")]
    for rank, end in enumerate(run([arguments] * 4, within_s=120)):
        assert end.code == 0, f"rank {rank}: {end.stderr[-2000:]}"
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_one_process(name: str, attended: dict[str, Any]) -> None:
    assert len(attended[name]) == 4
    for rank in attended[name]:
        assert rank["errors"].keys() == {"out", "dq", "dk", "dv"}
        assert max(rank["errors"].values()) < TOLERANCE[CASES[name]["dtype"]], rank["errors"]


def expected_calls(c: dict[str, Any]) -> Counter[tuple[str, str, int, int]]:
    """Return (axis, op, bytes, group size) -> calls, by the formulas of planner/cost/work.py."""
    plan = Plan.model_validate(c["plan"])
    cp, exchange = plan.layout.cp, plan.sharding.context_exchange
    if cp == 1:
        return Counter()
    tokens = plan.batch.micro_batch_size * plan.training.seq_len // cp
    width = c["num_kv_heads"] * (c["key_width"] + c["value_width"])
    size = tokens * width * ELEMENT_BYTES[c["dtype"]]
    forwards = 2 if c["checkpoint"] else 1
    if exchange == "ring":
        sends = (forwards + 2) * (cp - 1)
        return Counter({("cp", "send_recv", size, 2): MICRO_BATCHES * sends})
    return Counter(
        {
            ("cp", "all_gather", cp * size, cp): MICRO_BATCHES * (forwards + 1),
            ("cp", "reduce_scatter", cp * size, cp): MICRO_BATCHES,
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_recorded_calls_are_those_the_exchange_implies(name: str, attended: dict[str, Any]) -> None:
    for rank in attended[name]:
        calls: Counter[tuple[str, str, int, int]] = Counter()
        for timing in map(CollectiveTiming.model_validate, rank["calls"]):
            key = (timing.axis, timing.op, timing.size_bytes, timing.group_size)
            calls[key] += len(timing.seconds)
        assert calls == expected_calls(CASES[name])
