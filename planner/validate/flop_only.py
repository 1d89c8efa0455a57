"""What a predictor says that knows the flop of a step and nothing of layouts: the bar to clear.

One number is fitted for each GPU, precision and kind of model (dense, with experts): the achieved
part of the peak, median over rows. A prediction is the flop of the step, what is recomputed with
them, over that.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from statistics import median

from planner.validate.run_outcomes import ScoredRun

__all__ = ["executed_flop", "in_sample_s", "unseen_s"]


def executed_flop(one: ScoredRun) -> float:
    """Return the flop of a step: attention causal, recomputation with them, as sources count."""
    return one.flop.counted(causal=True, recomputed=True)


def in_sample_s(runs: Sequence[ScoredRun]) -> list[float]:
    """Return predicted step times, fitted on the rows of the group, the predicted row with them."""
    groups = defaultdict[Hashable, list[float]](list)
    for one in runs:
        groups[_groups(one)[0]].append(_achieved(one))
    parts = {group: median(found) for group, found in groups.items()}
    return [_at_peak_s(one) / parts[_groups(one)[0]] for one in runs]


def unseen_s(runs: Sequence[ScoredRun]) -> list[float | None]:
    """Return predicted step times, fitted on other sources; None where there is no other source.

    A group without rows in other sources takes the nearest that has: of the same GPU in any
    precision, first dense or with experts as it is, then both, the peaks taking the difference;
    then of any GPU, likewise.
    """
    parts: dict[tuple[str, Hashable], float | None] = {}
    for one in runs:
        key = one.source, _groups(one)[0]
        if key not in parts:
            parts[key] = next(_fits(one, [r for r in runs if r.source != one.source]), None)
    found = (parts[one.source, _groups(one)[0]] for one in runs)
    return [
        None if part is None else _at_peak_s(one) / part
        for one, part in zip(runs, found, strict=True)
    ]


def _fits(one: ScoredRun, others: Sequence[ScoredRun]) -> Iterator[float]:
    """Yield the achieved part of the peak in the groups of ``others``, the nearest first."""
    for nearness, group in enumerate(_groups(one)):
        alike = [_achieved(other) for other in others if _groups(other)[nearness] == group]
        if alike:
            yield median(alike)


def _groups(one: ScoredRun) -> tuple[Hashable, ...]:
    """Return the groups that a run is of, from the narrowest to that of all."""
    gpu, precision, kind = one.flop.gpu, one.flop.precision, one.flop.has_experts
    return (gpu, precision, kind), (gpu, kind), gpu, kind, ()


def _at_peak_s(one: ScoredRun) -> float:
    return executed_flop(one) / (one.flop.num_gpus * one.flop.peak_flop_per_s)


def _achieved(one: ScoredRun) -> float:
    """Return the achieved part of the peak, 0..1."""
    return _at_peak_s(one) / one.measured_s
