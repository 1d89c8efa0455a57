"""Fit the constants of a training step to published runs, and judge them on sources left out.

    python -m benchmarks.fit_steps            # prints; six minutes on two cores
    python -m benchmarks.fit_steps --write    # step_constants.json and results/step_fit.json too

The runs are those of ``commplan validate runs`` on the three tables in ``benchmarks/data``, with
measured times as there. ``planner/validate/step_fit.py`` says how. ``results/step_fit.json`` has,
for every row, the prediction with all sources and without its own, and its flop and layout;
``benchmarks.accuracy`` makes docs/accuracy.md of it.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.accuracy.stored import RESULTS, dumped, stored_run
from planner.cost.seconds import Known
from planner.cost.step_constants import StepConstants
from planner.errors import PlannerError
from planner.validate.configurations import configuration
from planner.validate.published import read_runs, run_of
from planner.validate.run_outcomes import ScoredRun, scored_runs
from planner.validate.runs import predict_runs
from planner.validate.step_fit import STARTS, Array, Case, Fit, fit_steps, logarithms

ROOT: Final = Path(__file__).parent.parent
TABLES: Final = ("training_runs", "vtrain_multi_node", "vtrain_single_node")
CONSTANTS: Final = ROOT / "planner" / "cost" / "step_constants.json"
NUM_PROCESSES: Final = 2
MOST_FITTED: Final = 250


@dataclass(frozen=True, slots=True)
class Scored:
    """A case, and what the tables say of it."""

    run: ScoredRun
    table: str
    case: Case


_cases: list[Case] = []  # of this process, which others are forked from


def main() -> None:
    """Fit, judge, print; write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="the constants and the results")
    write = parser.parse_args().write
    scored = list(read_cases())
    _cases.extend(one.case for one in scored)
    sources = [case.source for case in _cases]
    fitted = fitted_rows(sources)
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("fork")) as pool:

        def residuals(constants: StepConstants, rows: Sequence[int] = fitted) -> Array:
            parts = [rows[part::NUM_PROCESSES] for part in range(NUM_PROCESSES)]
            found = np.empty(len(rows))
            for part, logs in enumerate(pool.map(_logarithms, parts, repeat(constants))):
                found[part::NUM_PROCESSES] = logs
            return found

        every = range(len(_cases))
        fit = fit_steps([sources[row] for row in fitted], residuals)
        with_all = residuals(fit.constants, every)
        ablated = {name: residuals(found, every) for name, found in fit.without_constant.items()}
        left_out = np.empty(len(_cases))
        for source, constants in fit.without_source.items():
            rows = [row for row in every if sources[row] == source]
            left_out[rows] = residuals(constants, rows)
    results = {
        "constants": {name: described(name, fit) for name in STARTS},
        "without_source": {name: asdict(one) for name, one in fit.without_source.items()},
        "ablations": {name: scores(sources, logs) for name, logs in ablated.items()},
        "scores": {"all": scores(sources, with_all), "left_out": scores(sources, left_out)},
        "rows": [
            {
                "id": one.run.run.id,
                "table": one.table,
                "source": one.case.source,
                "measured_s": one.case.measured_s,
                "predicted_s": one.case.measured_s * float(np.exp(inside)),
                "left_out_s": one.case.measured_s * float(np.exp(outside)),
                **stored_run(one.run),
            }
            for one, inside, outside in zip(scored, with_all, left_out, strict=True)
        ],
    }
    show(results)
    if write:
        CONSTANTS.write_text(json.dumps(results["constants"], indent=2) + "\n", encoding="utf-8")
        RESULTS.write_text(dumped(results), encoding="utf-8")


def read_cases() -> Iterator[Scored]:
    """Yield the runs of the tables that have a predicted and a measured step time."""
    for table in TABLES:
        path = ROOT / "benchmarks" / "data" / f"{table}.csv"
        rows = read_runs(path.read_bytes(), source=path.name)
        runs = [run_of(row) for row in rows]
        for one in scored_runs(rows, predict_runs(runs)):
            try:
                found = configuration(one.run)
            except PlannerError as exc:
                raise AssertionError(f"{one.run.id} was predicted a moment ago") from exc
            known = Known(found.problem.fabric)
            case = Case(one.source, found.problem, found.candidate, one.measured_s, known)
            yield Scored(one, table, case)


def fitted_rows(sources: Sequence[str]) -> list[int]:
    """Return the rows that are fitted to: of each source up to ``MOST_FITTED``, evenly spaced.

    A source has one vote however many rows it has; all rows are judged.
    """
    found: list[int] = []
    for source in sorted(set(sources)):
        rows = [row for row, other in enumerate(sources) if other == source]
        found += rows[:: -(-len(rows) // MOST_FITTED)]
    return found


def _logarithms(rows: Sequence[int], constants: StepConstants) -> Array:
    return logarithms([_cases[row] for row in rows], constants)


def described(name: str, fit: Fit) -> dict[str, Any]:
    """Return the entry of a constant in ``step_constants.json``."""
    rounded = [float(f"{getattr(one, name):.4g}") for one in (fit.constants, fit.low, fit.high)]
    return {
        **dict(zip(("value", "low", "high"), rounded, strict=True)),
        "unit": STARTS[name].unit,
        "identified_by": list(fit.identified_by[name]),
        "start": STARTS[name].value,
        "start_source": STARTS[name].source,
    }


def scores(sources: Sequence[str], logs: Array) -> dict[str, Any]:
    """Return errors |predicted / measured - 1|: of each source, median over them, all rows."""
    errors = np.abs(np.expm1(logs))
    by_source = {
        source: errors[[other == source for other in sources]] for source in sorted(set(sources))
    }
    bias = {
        source: median(np.expm1(logs[[other == source for other in sources]]))
        for source in by_source
    }
    return {
        "sources": {
            source: {
                "num_rows": len(found),
                "median": median(found),
                "p90": float(np.quantile(found, 0.9)),
                "mean": float(np.mean(found)),
                "bias": bias[source],
            }
            for source, found in by_source.items()
        },
        "median_over_sources": median(median(found) for found in by_source.values()),
        "median": median(errors),
        "p90": float(np.quantile(errors, 0.9)),
    }


def show(results: dict[str, Any]) -> None:
    """Print constants, errors by source, ablations."""
    print(f"{'constant':16} {'value':>9} {'5 %':>9} {'95 %':>9} {'without':>8}  identified by")
    for name, one in results["constants"].items():
        worse = results["ablations"][name]["median_over_sources"]
        print(
            f"{name:16} {one['value']:9.4g} {one['low']:9.4g} {one['high']:9.4g} {worse:8.1%}  "
            f"{', '.join(one['identified_by'])}"
        )
    inside, outside = results["scores"]["all"], results["scores"]["left_out"]
    print(f"\n{'source':14} {'rows':>5} {'median':>7} {'left out':>9} {'p90':>7} {'bias':>7}")
    for source, one in outside["sources"].items():
        print(
            f"{source:14} {one['num_rows']:5} {inside['sources'][source]['median']:7.1%} "
            f"{one['median']:9.1%} {one['p90']:7.1%} {one['bias']:+7.1%}"
        )
    for name, one in (("all sources in the fit", inside), ("source left out", outside)):
        print(
            f"{name}: median over sources {one['median_over_sources']:.1%}, all rows median "
            f"{one['median']:.1%}, 90th percentile {one['p90']:.1%}"
        )
    assert set(results["constants"]) == {field.name for field in fields(StepConstants)}


if __name__ == "__main__":
    main()
