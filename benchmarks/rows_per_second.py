"""Candidates priced per second, and what pricing on distinct columns gains over every row.

    python benchmarks/rows_per_second.py [--rows 1000000] [--model llama3-405b]

Both ways price the same rows with the same functions in one run and must agree; the ratio is what
pricing on distinct values is worth. Also timed: a whole request, from documents to the plan.
"""

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from planner.cost import step
from planner.cost.problem import Problem
from planner.layout.candidates import Candidates, Column
from planner.planning import make_plan
from planner.request import Constraints, PlanRequest
from planner.resolving import build_problem, resolve
from planner.search.rank import peak_memory_bytes
from planner.search.space import enumerate_candidates


def main() -> None:
    """Print the table."""
    options = parse_arguments()
    request = PlanRequest.model_validate(
        {
            "topology": "dgx-h100",
            "nodes": 256,
            "model": options.model,
            "training": {"global_batch_size": 2048, "seq_len": 8192},
        }
    )
    resolved = resolve(request)
    problem = build_problem(resolved)
    legal = enumerate_candidates(problem, Constraints()).candidates
    rows = legal.take(np.arange(options.rows) % len(legal))
    memory_s = timed(lambda: peak_memory_bytes(problem, rows))
    factored_s = timed(lambda: step.price(problem, rows))
    sample = rows.take(slice(0, min(options.rows, 4 * step.CHUNK_ROWS)))
    direct_s = price_every_row(problem, sample) * len(rows) / len(sample)
    plan_s = min(timed(lambda: make_plan(resolved)) for _ in range(3))
    print(f"{options.model} on 2,048 H100: {len(legal):,} legal candidates, {len(rows):,} priced")
    print(f"memory              {len(rows) / memory_s / 1e6:6.2f} M rows/s")
    print(f"time, distinct keys {len(rows) / factored_s / 1e6:6.2f} M rows/s")
    print(f"time, every row     {len(rows) / direct_s / 1e6:6.2f} M rows/s")
    print(f"distinct / every row: {direct_s / factored_s:.1f} x")
    print(f"make_plan           {plan_s:6.2f} s")


def price_every_row(problem: Problem, rows: Candidates) -> float:
    """Return seconds of pricing with block work on every row, after a check that it agrees."""

    def every(c: Candidates, _: object) -> tuple[Candidates, Column]:
        return c, np.arange(len(c))

    same = step.price(problem, rows).step_time_s()
    with patch.object(step, "distinct", every):
        every_row = step.price(problem, rows).step_time_s()
        seconds = timed(lambda: step.price(problem, rows))
    assert np.allclose(every_row, same, rtol=1e-12), "both ways must agree"
    return seconds


def timed(action: Callable[[], object]) -> float:
    """Return seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", default="llama3-405b")
    return parser.parse_args()


if __name__ == "__main__":
    main()
