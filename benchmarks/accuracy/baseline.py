"""Flop alone, fitted so that vTrain's tables do not decide what it says of other sources.

They have more rows than all published runs together, most of them of small models on one GPU kind;
a median over rows would be theirs. Published runs are compared with what published runs say, as by
``commplan validate runs``; each of vTrain's tables with what published runs say, or its own rows.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from planner.validate.flop_only import in_sample_s, unseen_s
from planner.validate.run_outcomes import ScoredRun

__all__ = ["apart_in_sample_s", "apart_unseen_s", "is_vtrain"]

TimeT = TypeVar("TimeT")


def is_vtrain(source: str) -> bool:
    """Return whether a source is one of vTrain's tables."""
    return source.startswith("vtrain")


def apart_unseen_s(runs: Sequence[ScoredRun]) -> list[float | None]:
    """Return predicted step times, fitted on other sources that are published runs."""
    return _apart(runs, unseen_s, with_published=True)


def apart_in_sample_s(runs: Sequence[ScoredRun]) -> list[float]:
    """Return predicted step times, fitted on the rows of the table itself."""
    return _apart(runs, in_sample_s, with_published=False)


def _apart(
    runs: Sequence[ScoredRun],
    predict: Callable[[Sequence[ScoredRun]], list[TimeT]],
    *,
    with_published: bool,
) -> list[TimeT]:
    published = [one for one in runs if not is_vtrain(one.source)]
    found = dict(zip((one.run.id for one in published), predict(published), strict=True))
    for source in sorted({one.source for one in runs if is_vtrain(one.source)}):
        own = [one for one in runs if one.source == source]
        others = published if with_published else []
        times_s = predict([*own, *others])[: len(own)]
        found |= dict(zip((one.run.id for one in own), times_s, strict=True))
    return [found[one.run.id] for one in runs]
