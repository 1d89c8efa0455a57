"""Step times of published training runs against the uncalibrated cost model.

    python benchmarks/published_runs.py benchmarks/data/training_runs.csv

Rows are read, and cells that a source left empty resolved, as by ``commplan validate memory``
(planner/validate): no outcome is seen. Kept are dense models in 16 bits on A100 and H100 that are
not offloaded. Prints, per source and GPU, how many rows, the median of predicted over measured,
and the median absolute error. Two constants were set by hand on the medians of FLAG, FMS, KORT and
MPT (``SUSTAINED_CLOCK``); the other sources had no part in it. Nothing fits here.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from planner.cost.step import price
from planner.errors import PlannerError
from planner.validate.configurations import configuration
from planner.validate.published import Run, read_runs, run_of, run_outcome
from planner.validate.rows import Row

GPUS: Final = ("A100", "H100")
FITTED_ON: Final = ("FLAG", "FMS", "KORT", "MPT")


def main() -> None:
    """Print the table."""
    path = parse_arguments().csv
    ratios = by_source(read_runs(path.read_bytes(), source=str(path)))
    print(f"{'source':8} {'gpu':5} {'rows':>5} {'median ratio':>13} {'median error':>13}")
    for (source, gpu), found in sorted(ratios.items()):
        error = statistics.median(abs(ratio - 1) for ratio in found)
        mark = "  (fitted on)" if source in FITTED_ON else ""
        ratio = statistics.median(found)
        print(f"{source:8} {gpu:5} {len(found):5} {ratio:13.3f} {error:13.1%}{mark}")


def by_source(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured step times by (source, GPU)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        outcome, run = run_outcome(row), run_of(row)
        gpu = next((name for name in GPUS if name in run.gpu), None)
        if gpu is None or outcome.step_time_s is None or not is_compared(run):
            continue
        try:
            predicted = predicted_s(run)
        except PlannerError:
            continue  # the columns do not multiply out, or the schedule has no price
        found[outcome.source, gpu].append(predicted / outcome.step_time_s)
    return found


def is_compared(run: Run) -> bool:
    """Return whether a run is dense, in 16 bits, and says its layout and batch."""
    needed = (run.tp, run.pp, run.micro_batch, run.global_batch, run.vocab, run.heads)
    is_dense = not run.moe_experts and run.precision in ("bf16", "fp16")
    return is_dense and None not in needed and "optimizer_on_cpu" not in run.facts


def predicted_s(run: Run) -> float:
    """Return the step time of a run's own configuration."""
    found = configuration(run)
    return float(price(found.problem, found.candidate).step_time_s()[0])


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path, help="table of published runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
