"""Whole plans for small requests, kept so that a change in any figure is seen in review.

After a change that should move predictions: ``python tests/test_golden.py`` writes them anew; the
difference belongs in the commit that explains it.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve

GOLDEN: Final = Path(__file__).parent / "golden"

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "dense": {
        "topology": "dgx-h100",
        "nodes": 2,
        "model": "llama3-8b",
        "training": {"global_batch_size": 128, "seq_len": 8192},
    },
    "experts": {
        "topology": "dgx-a100",
        "nodes": 4,
        "model": "mixtral-8x7b",
        "training": {"global_batch_size": 256, "seq_len": 4096},
    },
    "pipeline": {
        "topology": "dgx-a100",
        "nodes": 8,
        "model": "gpt3-175b",
        "training": {"global_batch_size": 64, "seq_len": 2048},
        "constraints": {"tp": 8, "pp": 8},
    },
    "local": {
        "topology": "local-gloo",
        "model": "example-gpt",
        "framework": "executor",
        "training": {"global_batch_size": 16, "seq_len": 256, "precision": "fp32"},
        "constraints": {"tp": 2, "dp": 2},
    },
}


def found(name: str) -> dict[str, Any]:
    plan = make_plan(resolve(PlanRequest.model_validate(REQUESTS[name])))
    return plan.model_dump(mode="json")


def approx(value: Any) -> Any:
    """Return the same value with floats compared to nine digits: libm differs by platform."""
    if isinstance(value, dict):
        return {key: approx(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [approx(inner) for inner in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_has_not_moved(name: str) -> None:
    kept = json.loads((GOLDEN / f"{name}.json").read_text())
    assert found(name) == approx(kept)


def main() -> None:
    for name in REQUESTS:
        (GOLDEN / f"{name}.json").write_text(json.dumps(found(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
