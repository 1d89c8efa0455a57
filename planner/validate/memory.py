"""Predicted memory of published training runs, by the planner's own cost model, and its errors.

Nothing is fitted here and no outcome is seen: a ``Run`` goes in. What is predicted is what the
source prints: memory in use on the device, with what the allocator keeps for reuse, unless the
notes say that it is what torch reserved or allocated. Figures are in GiB, as those tools count.
Whether a run fits is judged by what it needs, which is less: cached blocks are given back.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from planner.constants import CACHED, CONTEXT_BYTES
from planner.cost.memory import memory
from planner.errors import InvalidInputError
from planner.validate.configurations import Configuration, configuration
from planner.validate.published import Run, run_outcome
from planner.validate.rows import Row

__all__ = [
    "FIT_BAR",
    "MEDIAN_BAR",
    "P90_BAR",
    "MemoryPrediction",
    "MemoryScores",
    "SourceScore",
    "WorstRow",
    "memory_csv",
    "memory_of",
    "predict_memory",
    "score_memory",
]

MEDIAN_BAR: Final = 0.08
P90_BAR: Final = 0.20
# By how much a run that ran may be predicted not to fit.
FIT_BAR: Final = 0.05
_GIB: Final = 2.0**30
_SHOWN_WORST: Final = 15


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """What is said of one run: memory, or why there is none.

    Attributes:
        id: Of the run.
        memory_gib: As the source prints it, of the fullest rank; None where the run was skipped.
        needed_gib: Without which it does not run.
        capacity_gib: Of its GPU.
        parts_gib: What fills the fullest rank.
        pp_rank: That it is.
        assumptions: What the columns leave open, in sentences.
        skipped_reason: Empty where there is a figure.
    """

    id: str
    memory_gib: float | None
    needed_gib: float | None = None
    capacity_gib: float | None = None
    parts_gib: dict[str, float] | None = None
    pp_rank: int | None = None
    assumptions: tuple[str, ...] = ()
    skipped_reason: str = ""

    def excess(self) -> float | None:
        """Return by how much what is needed exceeds the GPU, as a fraction; below 0 it fits."""
        if self.needed_gib is None or self.capacity_gib is None:
            return None
        return self.needed_gib / self.capacity_gib - 1


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Errors |predicted - printed| / printed of one source, or of all.

    Attributes:
        source: As the table calls it; "all" of all rows.
        num_rows: That have a prediction and a printed figure.
        median_error: Of them.
        p90_error: Of them.
        bias: Median of predicted over printed, less 1: below 0 is too little.
    """

    source: str
    num_rows: int
    median_error: float
    p90_error: float
    bias: float


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row with its error, or with what it needs beyond its GPU."""

    id: str
    source: str
    predicted_gib: float
    printed_gib: float
    error: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryScores:
    """How far predictions are from what was printed, and which runs that ran would not fit.

    Attributes:
        sources: By name, those of all rows last; empty if no row prints memory.
        is_kept: Whether both bars on errors hold; None without such rows.
        worst: Rows with the largest errors.
        num_ran: Rows with a prediction that have a step time or a memory figure.
        not_fitting: Rows that ran and need more than their GPU has, as ``WorstRow`` with needed
            and capacity, the worst first.
        num_beyond: Of those, by more than ``FIT_BAR``.
        num_chosen: Rows that ran of which recompute is not printed, and was chosen to fit.
        skipped: How many rows were skipped for which reason.
    """

    sources: tuple[SourceScore, ...]
    is_kept: bool | None
    worst: tuple[WorstRow, ...]
    num_ran: int
    not_fitting: tuple[WorstRow, ...]
    num_beyond: int
    num_chosen: int
    skipped: dict[str, int]


def predict_memory(runs: Iterable[Run]) -> list[MemoryPrediction]:
    """Return a prediction for each run, in their order."""
    return [_predicted(run) for run in runs]


def _predicted(run: Run) -> MemoryPrediction:
    try:
        found = configuration(run)
    except InvalidInputError as exc:
        return MemoryPrediction(run.id, None, skipped_reason=str(exc))
    return memory_of(run, found)


def memory_of(run: Run, found: Configuration) -> MemoryPrediction:
    """Return the prediction for a run of which ``found`` is the configuration."""
    problem = found.problem
    parts = memory(problem, found.candidate)
    needed, shown = parts.total_bytes()[0], _shown_bytes(found, run)
    fullest = int(np.argmax(shown))
    return MemoryPrediction(
        id=run.id,
        memory_gib=float(shown[fullest]) / _GIB,
        needed_gib=float(needed.max()) / _GIB,
        capacity_gib=problem.capacity_bytes / _GIB,
        parts_gib={
            name.removesuffix("_bytes"): float(part[0, fullest]) / _GIB
            for name, part in parts.by_name().items()
        },
        pp_rank=int(problem.splits.first_rank[0, fullest]),
        assumptions=found.assumptions,
    )


def _shown_bytes(
    found: Configuration, run: Run
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return what the source's tool shows of each rank, [profiles]."""
    problem, parts = found.problem, memory(found.problem, found.candidate)
    total, outside = parts.total_bytes()[0], parts.communicators_bytes[0]
    held = total - outside - parts.reserve_bytes[0]
    if "of_allocated" in run.facts:
        return np.asarray(held)
    cached = np.minimum(CACHED.value * held, np.maximum(0.0, problem.capacity_bytes - total))
    if "of_reserved" in run.facts:
        context = CONTEXT_BYTES[problem.fabric.library].value
        return np.asarray(total - outside - context * (held > 0) + cached)
    return np.asarray(total + cached)


def score_memory(rows: Sequence[Row], predictions: Sequence[MemoryPrediction]) -> MemoryScores:
    """Return the errors of ``predictions``, which are of the same rows in the same order."""
    errors = defaultdict[str, list[WorstRow]](list)
    ran: list[tuple[str, MemoryPrediction]] = []
    for row, found in zip(rows, predictions, strict=True):
        outcome = run_outcome(row)
        if found.memory_gib is None:
            continue
        if outcome.memory_gib or outcome.step_time_s:
            ran.append((outcome.source, found))
        if outcome.memory_gib:
            error = found.memory_gib / outcome.memory_gib - 1
            errors[outcome.source].append(
                WorstRow(
                    *(found.id, outcome.source, found.memory_gib, outcome.memory_gib, error),
                    found.assumptions,
                )
            )
    every = [row for source in sorted(errors) for row in errors[source]]
    sources = [_scored(source, errors[source]) for source in sorted(errors)]
    sources += [_scored("all", every)] if every else []
    beyond = sorted(
        (_beyond(source, found) for source, found in ran if (found.excess() or 0) > 0),
        key=lambda row: (-row.error, row.id),
    )
    return MemoryScores(
        sources=tuple(sources),
        is_kept=sources[-1].median_error <= MEDIAN_BAR and sources[-1].p90_error <= P90_BAR
        if sources
        else None,
        worst=tuple(sorted(every, key=lambda row: (-abs(row.error), row.id))[:_SHOWN_WORST]),
        num_ran=len(ran),
        not_fitting=tuple(beyond),
        num_beyond=sum(row.error > FIT_BAR for row in beyond),
        num_chosen=sum(
            any(said.endswith("the least that fits") for said in found.assumptions)
            for _, found in ran
        ),
        skipped=dict(Counter(p.skipped_reason for p in predictions if p.skipped_reason)),
    )


def _scored(source: str, rows: Sequence[WorstRow]) -> SourceScore:
    errors = [abs(row.error) for row in rows]
    return SourceScore(
        source,
        len(rows),
        median(errors),
        float(np.quantile(errors, 0.9)),
        median(row.error for row in rows),
    )


def _beyond(source: str, found: MemoryPrediction) -> WorstRow:
    excess = found.excess()
    assert excess is not None, "of rows with a prediction"
    assert found.needed_gib is not None, "of rows with a prediction"
    assert found.capacity_gib is not None, "of rows with a prediction"
    return WorstRow(
        found.id, source, found.needed_gib, found.capacity_gib, excess, found.assumptions
    )


def memory_csv(predictions: Iterable[MemoryPrediction]) -> str:
    """Return the predictions as a table, one line each; memory in GiB, as the column it is for."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("id", "predicted_memory_gb", "assumptions", "skipped_reason"))
    for p in predictions:
        shown = "" if p.memory_gib is None else f"{p.memory_gib:.6g}"
        lines.writerow((p.id, shown, "; ".join(p.assumptions), p.skipped_reason))
    return text.getvalue()
