"""What alpha and bandwidth fitted to measured calls choose, against the best that was measured."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.lab.calls import Call, Problem
from planner.calibrate.apply import with_fits
from planner.calibrate.levels import Transfer, fit_transfers
from planner.cost.collectives import choose, collective_terms
from planner.plan import CallFit, Collective, Method

__all__ = ["Cell", "Crossover", "cells", "crossovers", "fitted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation at one size: what was chosen, and what was best.

    Attributes:
        op: Operation.
        size_bytes: S.
        default: The library's call.
        chosen: What the fitted planner chose.
        best: The fastest measured.
        predicted_s: Of the chosen.
    """

    op: Collective
    size_bytes: int
    default: Call
    chosen: Call
    best: Call
    predicted_s: float

    @property
    def regret(self) -> float:
        """Measured seconds of the chosen over those of the best, less one."""
        return self.chosen.median_s / self.best.median_s - 1

    @property
    def default_regret(self) -> float:
        """Measured seconds of the library's call over those of the best, less one."""
        return self.default.median_s / self.best.median_s - 1

    @property
    def noise(self) -> float:
        """Half the spread of both: medians of five that differ by less may be equal."""
        return 0.0 if self.chosen is self.best else (self.chosen.spread + self.best.spread) / 2

    @property
    def regret_beyond_noise(self) -> float:
        """What of the regret is not noise."""
        return max(0.0, self.regret - self.noise)


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where one method overtakes another with growing size.

    Attributes:
        op: Operation.
        smaller: The best measured below.
        larger: The best measured above.
        measured_bytes: Where the measured curves cross, interpolated in logarithms.
        predicted_bytes: Where the priced ones do; None if they do not.
    """

    op: Collective
    smaller: Method
    larger: Method
    measured_bytes: float
    predicted_bytes: float | None

    @property
    def factor(self) -> float:
        """How far apart the two are, at least 1."""
        if self.predicted_bytes is None:
            return float("inf")
        ratio = self.predicted_bytes / self.measured_bytes
        return max(ratio, 1 / ratio)


def fitted(problem: Problem, calls: Sequence[Call]) -> tuple[Problem, list[CallFit]]:
    """Return the problem on the fabric that the calls make of it, and the fits."""
    transfers = [
        Transfer(
            problem.fabric,
            call.op,
            call.method,
            problem.group,
            np.array([float(call.size_bytes)]),
            call.median_s,
        )
        for call in calls
    ]
    levels, fits = fit_transfers(transfers)
    return replace(problem, fabric=with_fits(problem.fabric, levels, fits, source="lab")), fits


def cells(problem: Problem, calls: Sequence[Call]) -> Iterator[Cell]:
    """Yield the choice of every operation and size at which all methods were measured.

    Args:
        problem: Fitted.
        calls: On that lab, of all methods.
    """
    together: dict[tuple[Collective, int], dict[Method, Call]] = defaultdict(dict)
    for call in calls:
        together[call.op, call.size_bytes][call.method] = call
    for (op, size_bytes), measured in together.items():
        methods = problem.methods(op)
        if not measured.keys() >= set(methods):
            continue
        size = np.array([float(size_bytes)])
        choice = choose(op, problem.fabric, problem.group, size, methods)
        yield Cell(
            op,
            size_bytes,
            default=measured[methods[0]],
            chosen=measured[methods[int(choice.index[0])]],
            best=min(measured.values(), key=lambda call: call.median_s),
            predicted_s=float(choice.seconds[0]),
        )


def crossovers(problem: Problem, calls: Sequence[Call]) -> Iterator[Crossover]:
    """Yield where the best measured method changes by more than the noise on both sides."""
    curves: dict[Collective, dict[Method, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        curves[call.op][call.method].append(call)
    for op, by_method in curves.items():
        best = [
            min(at_size, key=lambda call: call.median_s)
            for at_size in zip(*by_method.values(), strict=True)
        ]
        for below, above in pairwise(best):
            if below.method == above.method:
                continue
            rivals = [by_method[one.method] for one in (below, above)]
            first, second = (np.array([call.median_s for call in curve]) for curve in rivals)
            sizes = np.array([float(call.size_bytes) for call in rivals[0]])
            at = int(np.flatnonzero(sizes == below.size_bytes)[0])
            ends = [rivals[0][at], rivals[1][at], rivals[0][at + 1], rivals[1][at + 1]]
            gaps = np.log(first / second)[at : at + 2]
            noise = [(ends[i].spread + ends[i + 1].spread) / 2 for i in (0, 2)]
            if (np.abs(gaps) <= noise).any():
                continue
            log_size = np.interp(0.0, gaps, np.log(sizes[at : at + 2]))
            yield Crossover(
                op,
                below.method,
                above.method,
                float(np.exp(log_size)),
                _predicted_crossing(problem, op, below.method, above.method, sizes),
            )


def _predicted_crossing(
    problem: Problem, op: Collective, smaller: Method, larger: Method, measured: np.ndarray
) -> float | None:
    """Return the size above which ``larger`` is priced lower, within and around the measured."""
    sizes = np.geomspace(measured[0] / 64, measured[-1] * 64, 2000)
    group = problem.group.repeat(len(sizes))
    first, second = (
        collective_terms(op, method, problem.fabric, group, sizes).total_s()
        for method in (smaller, larger)
    )
    wins = first > second
    if wins.all() or not wins.any():
        return None
    changes = np.flatnonzero(np.diff(wins.astype(int)) > 0)
    return float(sizes[changes[-1] + 1]) if len(changes) else None
