"""What ``benchmarks.fit_steps`` stores of every run, and the runs read back with other times.

A run's flop, layout and assumptions are stored beside its predicted times, so that what is made of
them needs no second pricing. What was published is read from the tables again.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy.baseline import apart_in_sample_s, apart_unseen_s, is_vtrain
from planner.layout.candidates import Candidates
from planner.validate.published import read_runs
from planner.validate.rows import Row
from planner.validate.run_outcomes import ScoredRun, scored_runs
from planner.validate.run_scores import RunScores, score_runs
from planner.validate.runs import RunPrediction, StepFlop

_VTRAIN: Final = "VIA-Research/vTrain, measured iterations (2312.12391)"
__all__ = ["DATA", "RESULTS", "Accuracy", "accuracy", "dumped", "read_results", "stored_run"]

ROOT: Final = Path(__file__).parent.parent.parent
DATA: Final = ROOT / "benchmarks" / "data"
RESULTS: Final = ROOT / "benchmarks" / "results" / "step_fit.json"
# A measured time that the table says and the stored one; what lies between is rounding.
_SAME: Final = 1e-6
# What the table calls a step time that was made of printed flop/s.
_OF_FLOP: Final = "hardware_tflops"
_LAYOUT: Final = tuple(field.name for field in fields(Candidates))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """All that the page is made of.

    Attributes:
        results: As ``benchmarks.fit_steps`` wrote them.
        runs: Of all tables, each predicted with constants fitted on other sources.
        scores: Of ``runs``.
        published: Of those of ``runs`` that are not of vTrain's tables.
        derived: Source -> its rows whose step time in the table is made of printed flop/s.
        titles: Source -> what its first row is from.
    """

    results: Mapping[str, Any]
    runs: tuple[ScoredRun, ...]
    scores: RunScores
    published: RunScores
    derived: Mapping[str, int]
    titles: Mapping[str, str]


def stored_run(one: ScoredRun) -> dict[str, Any]:
    """Return what is stored of a run beside its times."""
    return {
        "flop": asdict(one.flop),
        "layout": [one.layout[column] for column in _LAYOUT],
        "assumptions": list(one.assumptions),
    }


def dumped(results: Mapping[str, Any]) -> str:
    """Return the results as JSON, a line for each row."""
    head = json.dumps({**results, "rows": []}, indent=1)
    assert head.endswith('"rows": []\n}'), "rows come last"
    lines = (json.dumps(row, separators=(",", ":")) for row in results["rows"])
    return head.removesuffix("]\n}") + "\n" + ",\n".join(lines) + "\n]}\n"


@cache
def read_results() -> dict[str, Any]:
    """Return what ``benchmarks.fit_steps`` wrote."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return found


def accuracy(results: Mapping[str, Any], rows: Sequence[Row] | None = None) -> Accuracy:
    """Return the runs of ``results`` as predicted without their own source, and their scores.

    Args:
        results: Of ``benchmarks.fit_steps``.
        rows: Of the published tables, among others those of ``results``; by default the tables'.
    """
    stored = {row["id"]: row for row in results["rows"]}
    found = [row for row in rows or _published(results) if row.cells["id"] in stored]
    predictions = [_left_out(stored[row.cells["id"]]) for row in found]
    runs = tuple(scored_runs(found, predictions))
    assert len(runs) == len(stored), "each was predicted and measured"
    for one in runs:
        said = stored[one.run.id]["measured_s"]
        assert abs(one.measured_s / said - 1) < _SAME, f"{one.run.id}: fit again, the table says so"
    scores = score_runs(found, predictions, unseen=apart_unseen_s, in_sample=apart_in_sample_s)
    published = [
        each
        for each in zip(found, predictions, strict=True)
        if not is_vtrain(stored[each[1].id]["source"])
    ]
    alone = score_runs([row for row, _ in published], [said for _, said in published])
    derived = Counter(
        row.cells.get("source_id", "")
        for row in found
        if row.cells.get("measured_from") == _OF_FLOP
    )
    titles = {
        row.cells.get("source_id", ""): row.cells.get("source") or _VTRAIN
        for row in reversed(found)
    }
    return Accuracy(results, runs, scores, alone, derived, titles)


def _published(results: Mapping[str, Any]) -> tuple[Row, ...]:
    tables = [DATA / f"{name}.csv" for name in dict.fromkeys(r["table"] for r in results["rows"])]
    return tuple(row for path in tables for row in read_runs(path.read_bytes(), source=path.name))


def _left_out(stored: Mapping[str, Any]) -> RunPrediction:
    """Return the prediction of a run with constants fitted on other sources."""
    return RunPrediction(
        id=stored["id"],
        step_time_s=stored["left_out_s"],
        flop=StepFlop(**stored["flop"]),
        layout=dict(zip(_LAYOUT, stored["layout"], strict=True)),
        assumptions=tuple(stored["assumptions"]),
    )
