"""How far predicted step times are from measured ones: by source, over rows and over sources.

The error of a row is |predicted / measured - 1|. Beside the planner's stand those of a predictor
that counts flop alone (``planner.validate.flop_only``), fitted on other sources, and on the rows
themselves. Over sources each has one vote, whatever its number of rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Final

import numpy as np

from planner.validate.flop_only import in_sample_s, unseen_s
from planner.validate.memory import MemoryPrediction, SourceScore, score_memory
from planner.validate.rows import Row
from planner.validate.run_outcomes import DERIVED_FROM, ScoredRun, scored_runs
from planner.validate.runs import RunPrediction
from planner.validate.sweeps import SweepScore, score_sweeps

__all__ = ["Errors", "GroupScore", "RunScores", "WorstRun", "errors_of", "score_runs"]

_SHOWN_WORST: Final = 10


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one predictor on one group of rows; over sources, medians of the sources' figures.

    Attributes:
        median_error: Of |predicted / measured - 1|.
        p90_error: Of the same.
        mean_error: Of the same.
        bias: Median of predicted over measured, less 1: below 0 is too fast.
    """

    median_error: float
    p90_error: float
    mean_error: float
    bias: float


@dataclass(frozen=True, slots=True)
class GroupScore:
    """A group of rows.

    Attributes:
        name: Of the source, or of the group.
        num: Rows; of the group of sources, sources.
        derived: How many measured times are derived from which rate that depends on how the source
            counts flop, as {"MFU": 1}.
        planner: Errors of the cost model.
        unseen: Of flop alone, fitted on other sources; None where there are none.
        in_sample: Of flop alone, fitted on the rows themselves.
    """

    name: str
    num: int
    derived: dict[str, int]
    planner: Errors
    unseen: Errors | None
    in_sample: Errors


@dataclass(frozen=True, slots=True)
class WorstRun:
    """A row with a large error, signed."""

    id: str
    source: str
    predicted_s: float
    measured_s: float
    measured_from: str
    error: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunScores:
    """All of it.

    Attributes:
        sources: By name.
        totals: Over rows and over sources; empty where no row was scored.
        sweeps: Of each source that has any, and of all last.
        worst: Rows with the largest errors.
        memory: Of all rows that print memory; None where none does.
        num_rows: Of the table.
        num_predicted: With a step time.
        num_scored: With a measured one beside it.
        skipped: Reason -> rows without a step time, most frequent first.
    """

    sources: tuple[GroupScore, ...]
    totals: tuple[GroupScore, ...]
    sweeps: tuple[SweepScore, ...]
    worst: tuple[WorstRun, ...]
    memory: SourceScore | None
    num_rows: int
    num_predicted: int
    num_scored: int
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A run, and what the predictors that count flop alone say of it."""

    one: ScoredRun
    unseen_s: float | None
    in_sample_s: float


def score_runs(
    rows: Sequence[Row],
    predictions: Sequence[RunPrediction],
    *,
    unseen: Callable[[Sequence[ScoredRun]], list[float | None]] = unseen_s,
    in_sample: Callable[[Sequence[ScoredRun]], list[float]] = in_sample_s,
) -> RunScores:
    """Return the scores of ``predictions``, which are of the same rows in the same order.

    Args:
        rows: Of tables.
        predictions: Of them.
        unseen: What flop alone says of runs, fitted on other sources.
        in_sample: The same, fitted on the rows themselves.
    """
    runs = scored_runs(rows, predictions)
    compared = [_Compared(*each) for each in zip(runs, unseen(runs), in_sample(runs), strict=True)]
    sources = _by_source(compared)
    return RunScores(
        sources=sources,
        totals=_totals(compared, sources),
        sweeps=score_sweeps(runs),
        worst=_worst(runs),
        memory=_memory(rows, predictions),
        num_rows=len(rows),
        num_predicted=sum(p.step_time_s is not None for p in predictions),
        num_scored=len(runs),
        skipped=dict(
            Counter(p.skipped_reason for p in predictions if p.step_time_s is None).most_common()
        ),
    )


def _by_source(compared: Sequence[_Compared]) -> tuple[GroupScore, ...]:
    names = sorted({each.one.source for each in compared})
    return tuple(_group(name, [c for c in compared if c.one.source == name]) for name in names)


def _totals(compared: Sequence[_Compared], sources: Sequence[GroupScore]) -> tuple[GroupScore, ...]:
    """Return all rows, parts of them, and both over sources."""
    timed = [each for each in compared if not each.one.is_derived]
    told = [each for each in compared if each.one.run.recompute and each.one.run.sequence_parallel]
    groups = [
        _group(name, rows)
        for name, rows in (
            ("all rows", compared),
            ("measured times", timed),
            ("recompute and SP printed", told),
        )
        if rows
    ]
    of_sources = [
        _over_sources(name, found)
        for name, found in (
            ("median over sources", sources),
            ("the same, measured times", _by_source(timed)),
        )
        if found
    ]
    return (*groups, *of_sources)


def _group(name: str, rows: Sequence[_Compared]) -> GroupScore:
    derived = Counter(each.one.measured_from for each in rows)
    unseen = [(each.unseen_s, each.one.measured_s) for each in rows if each.unseen_s is not None]
    return GroupScore(
        name=name,
        num=len(rows),
        derived={rate: derived[rate] for rate in DERIVED_FROM if derived[rate]},
        planner=errors_of([each.one.ratio for each in rows]),
        unseen=errors_of([said / found for said, found in unseen]) if unseen else None,
        in_sample=errors_of([each.in_sample_s / each.one.measured_s for each in rows]),
    )


def errors_of(ratios: Sequence[float]) -> Errors:
    """Return the errors of rows, of their predicted over measured times."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return Errors(
        median(errors), float(np.quantile(errors, 0.9)), fmean(errors), median(ratios) - 1
    )


def _over_sources(name: str, sources: Sequence[GroupScore]) -> GroupScore:
    """Return the median of every figure over sources, those alone that have it."""

    def over(of: Callable[[GroupScore], Errors | None]) -> Errors | None:
        found = [errors for source in sources if (errors := of(source)) is not None]
        if not found:
            return None
        return Errors(
            *(median(getattr(errors, f.name) for errors in found) for f in fields(Errors))
        )

    planner, in_sample = over(lambda s: s.planner), over(lambda s: s.in_sample)
    assert planner is not None, "every source has both"
    assert in_sample is not None, "every source has both"
    return GroupScore(name, len(sources), {}, planner, over(lambda s: s.unseen), in_sample)


def _worst(runs: Sequence[ScoredRun]) -> tuple[WorstRun, ...]:
    worst = sorted(runs, key=lambda one: (-abs(one.ratio - 1), one.run.id))[:_SHOWN_WORST]
    return tuple(
        WorstRun(
            *(one.run.id, one.source, one.predicted_s, one.measured_s, one.measured_from),
            one.ratio - 1,
            one.assumptions,
        )
        for one in worst
    )


def _memory(rows: Sequence[Row], predictions: Sequence[RunPrediction]) -> SourceScore | None:
    found = [p.memory or MemoryPrediction(p.id, None) for p in predictions]
    sources = score_memory(rows, found).sources
    return sources[-1] if sources else None
