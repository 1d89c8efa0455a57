"""Runs in groups: by size, precision, GPU and kind of model; pairs and repeats of one job."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from planner.validate.run_outcomes import ScoredRun
from planner.validate.run_scores import Errors, errors_of
from planner.validate.sweeps import jobs_of

__all__ = [
    "GROUPINGS",
    "KORT_TOLERANCE",
    "Group",
    "KortPair",
    "Repeats",
    "by",
    "kort_pairs",
    "repeats",
    "size_of",
]

KORT_TOLERANCE: Final = 0.03
# The most GPUs of each group.
_SIZES: Final = (8, 64, 512)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that have something in common, and the errors of their predictions."""

    name: str
    num_rows: int
    errors: Errors


@dataclass(frozen=True, slots=True)
class KortPair:
    """One job with everything recomputed, over selectively with sequence parallelism."""

    model: str
    num_gpus: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the predicted ratio, signed."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows of one source, job and layout: what differs is not printed, or the software's release.

    Attributes:
        num_layouts: That have more than one row.
        num_rows: Of them.
        median_error: Of |time / median of the layout's times - 1|.
        p90_error: Of the same.
        largest_ratio: Of the slowest over the fastest of a layout.
    """

    num_layouts: int
    num_rows: int
    median_error: float
    p90_error: float
    largest_ratio: float


def size_of(one: ScoredRun) -> str:
    """Return the group of a number of GPUs."""
    low = 1
    for most in _SIZES:
        if one.flop.num_gpus <= most:
            return f"{low} to {most} GPUs"
        low = most + 1
    return f"{low} GPUs and more"


def _kind_of(one: ScoredRun) -> str:
    return "with experts" if one.flop.has_experts else "dense"


GROUPINGS: Final[dict[str, Callable[[ScoredRun], str]]] = {
    "GPUs": size_of,
    "precision": lambda one: one.flop.precision,
    "model": _kind_of,
    "GPU and model": lambda one: f"{one.flop.gpu}, {_kind_of(one)}",
}


def by(runs: Sequence[ScoredRun], group_of: Callable[[ScoredRun], str]) -> list[Group]:
    """Return the groups of ``runs``, the fewest GPUs first, then by name."""
    found = defaultdict[str, list[ScoredRun]](list)
    for one in sorted(runs, key=lambda one: one.flop.num_gpus):
        found[group_of(one)].append(one)
    names = list(found) if group_of is size_of else sorted(found)
    return [
        Group(name, len(found[name]), errors_of([one.ratio for one in found[name]]))
        for name in names
    ]


def kort_pairs(runs: Sequence[ScoredRun]) -> list[KortPair]:
    """Return the pairs of KORT whose times are printed, in the order of their numbers of GPUs."""
    jobs = defaultdict[tuple[int, str], dict[str, ScoredRun]](dict)
    for one in runs:
        if one.source == "KORT" and one.measured_from == "step time":
            jobs[one.flop.num_gpus, one.run.model][one.run.recompute] = one
    return [
        KortPair(
            model,
            num_gpus,
            pair["full"].measured_s / pair["selective"].measured_s,
            pair["full"].predicted_s / pair["selective"].predicted_s,
        )
        for (num_gpus, model), pair in sorted(jobs.items())
        if {"full", "selective"} <= pair.keys()
    ]


def repeats(runs: Sequence[ScoredRun]) -> Repeats | None:
    """Return how far runs of one layout are from each other; None where there are none."""
    layouts = [
        [one.measured_s for one in found]
        for layouts in jobs_of(runs)
        for found in layouts
        if len(found) > 1
    ]
    if not layouts:
        return None
    errors = [abs(time_s / median(times) - 1) for times in layouts for time_s in times]
    return Repeats(
        len(layouts),
        len(errors),
        median(errors),
        float(np.quantile(errors, 0.9)),
        max(max(times) / min(times) for times in layouts),
    )
