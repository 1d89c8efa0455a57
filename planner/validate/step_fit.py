"""Constants of a training step, fitted to published runs: few, shared by all, each source one vote.

The function that is fitted is the one that predicts (``planner.cost.step.price``). Residuals are
logarithms of predicted over measured seconds; beyond ``_ROBUST_ABOVE`` they count linearly, for a
run that is twice as slow as its like has a cause that no constant here knows. Each constant is held
near where it would be without these runs (``STARTS``), by as much as that is known.

Steps are Gauss-Newton's, with differences for slopes. What leaves something out (a source, a
constant, a draw of the bootstrap) starts at the fit to all and takes one step of the same problem,
linearised there.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.problem import Problem
from planner.cost.seconds import Known
from planner.cost.step import price
from planner.cost.step_constants import PLAIN, StepConstants
from planner.layout.candidates import Candidates

__all__ = ["STARTS", "Case", "Fit", "Start", "fit_steps", "logarithms"]

Array = NDArray[np.float64]
# Logarithms of predicted over measured seconds under some constants, one for each case.
Residuals = Callable[[StepConstants], Array]

_ROBUST_ABOVE: Final = 0.1
_DIFFERENCE: Final = 0.05
_NUM_STEPS: Final = 4
# A source says as much as this many independent runs, however many it has.
_VOTES: Final = 4.0
_NUM_DRAWS: Final = 500
_SEED: Final = 20261130
# Of what all runs say about a constant; a source that says less does not identify it.
_LEAST_SHARE: Final = 0.05


class Start(NamedTuple):
    """Where a constant would be without published runs.

    Attributes:
        value: In ``unit``.
        spread: Of its logarithm, one standard deviation.
        unit: "s", or "1" for a fraction.
        source: Why there.
    """

    value: float
    spread: float
    unit: str
    source: str


STARTS: Final[Mapping[str, Start]] = {
    # launch_s: benchmarks.host_launches, decoder layers of transformers with nothing to compute
    "clock_ampere": Start(0.92, 0.1, "1", "below that of the kernel tables: 400 W on A100"),
    "clock_hopper": Start(0.85, 0.1, "1", "products at 600 to 700 Tflop/s under load, 800 alone"),
    "clock_blackwell": Start(0.92, 0.1, "1", "as on A100, for want of a reason"),
    "memory_rate": Start(1.0, 0.15, "1", "the rooflines' own figure"),
    "attention_time": Start(1.0, 0.1, "1", "the tables' own figure"),
    "grouped_time": Start(
        1.0, 0.2, "1", "measured layers of experts: 0.86 to 1.04 on Hopper and Blackwell"
    ),
    "collective_time": Start(1.0, 0.15, "1", "nccl-tests' own figure"),
    "network_time": Start(1.0, 0.3, "1", "nccl-tests' own figure; networks are shared"),
    "launch_s": Start(
        44e-6, 0.4, "s", "35 us on a core of a virtual machine, 56 where layers are recomputed"
    ),
    "jitter": Start(0.01, 0.5, "1", "assumed: chips of one kind differ by a few per cent"),
    "host_s": Start(5e-3, 1.0, "s", "assumed: some milliseconds of Python for every step"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A published run that is fitted to; ``known`` keeps what does not depend on the constants."""

    source: str
    problem: Problem
    candidate: Candidates
    measured_s: float
    known: Known


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit found.

    Attributes:
        constants: The figures.
        low: Of each, the 5th percentile of fits to sources drawn anew.
        high: Of each, the 95th.
        identified_by: Of each, the sources that say most about it, the first most.
        without_source: Source -> the figures found without its runs.
        without_constant: Name -> the figures found with this one where it has no effect.
    """

    constants: StepConstants
    low: StepConstants
    high: StepConstants
    identified_by: dict[str, tuple[str, ...]]
    without_source: dict[str, StepConstants]
    without_constant: dict[str, StepConstants]


def logarithms(cases: Sequence[Case], constants: StepConstants) -> Array:
    """Return logarithms of predicted over measured seconds, one for each case."""
    return np.array([np.log(_predicted_s(case, constants) / case.measured_s) for case in cases])


def _predicted_s(case: Case, constants: StepConstants) -> float:
    problem = replace(case.problem, constants=constants)
    return float(price(problem, case.candidate, case.known).step_time_s()[0])


def fit_steps(sources: Sequence[str], residuals: Residuals) -> Fit:
    """Return the constants that agree best with all cases, and what they rest on.

    Args:
        sources: Of the cases.
        residuals: Of the cases.
    """
    at, votes = np.zeros(len(STARTS)), _votes(sources)
    slopes = _slopes(residuals, at, residuals(_constants(at)))
    for _ in range(_NUM_STEPS):  # slopes change little: those of the start, then of the end, do
        at = _Linearised(residuals(_constants(at)), slopes, at).least(votes)
    found = residuals(_constants(at))
    near = _Linearised(found, _slopes(residuals, at, found), at)
    at = near.least(votes)
    low, high = _bootstrapped(near, sources)
    return Fit(
        constants=_constants(at),
        low=_constants(low),
        high=_constants(high),
        identified_by=_identified_by(near, sources),
        without_source={
            left_out: _constants(near.least(votes * [source != left_out for source in sources]))
            for left_out in sorted(set(sources))
        },
        without_constant=_without_constant(near, votes),
    )


@dataclass(frozen=True, slots=True)
class _Linearised:
    """Residuals near a point: ``found`` [cases], ``slopes`` [cases, names], ``at`` [names]."""

    found: Array
    slopes: Array
    at: Array

    def least(self, votes: Array, fixed: Mapping[int, float] | None = None) -> Array:
        """Return the point with the least loss, [names], with ``fixed`` coordinates kept."""
        fixed = fixed or {}
        free = np.array([name not in fixed for name in range(len(self.at))])
        spreads = np.array([start.spread for start in STARTS.values()])
        target = self.at.copy()
        target[~free] = [fixed[int(name)] for name in np.flatnonzero(~free)]
        for _ in range(20):
            left = self.found + self.slopes @ (target - self.at)
            weights = votes * _robust(left) / _ROBUST_ABOVE**2
            weighted = self.slopes[:, free] * weights[:, None]
            normal = weighted.T @ self.slopes[:, free] + np.diag(spreads[free] ** -2.0)
            pull = weighted.T @ left + target[free] / spreads[free] ** 2
            target[free] -= np.linalg.solve(normal, pull)
        return target


def _slopes(residuals: Residuals, at: Array, found: Array) -> Array:
    """Return slopes of the residuals along the logarithms of the constants, [cases, names]."""
    moved = [residuals(_constants(at + _DIFFERENCE * axis)) for axis in np.eye(len(at))]
    return np.stack([(one - found) / _DIFFERENCE for one in moved], axis=1)


def _votes(sources: Sequence[str]) -> Array:
    """Return the weight of every case: all runs of a source together have the same."""
    count = Counter(sources)
    return np.array([min(1.0, _VOTES / count[source]) for source in sources])


def _robust(found: Array) -> Array:
    """Return weights that make large residuals count linearly (pseudo-Huber)."""
    return np.asarray((1 + (found / _ROBUST_ABOVE) ** 2) ** -0.5)


def _bootstrapped(near: _Linearised, sources: Sequence[str]) -> tuple[Array, Array]:
    """Return 5th and 95th percentiles of fits to as many sources, drawn with replacement."""
    votes, names = _votes(sources), sorted(set(sources))
    rows = np.array([names.index(source) for source in sources])
    random = np.random.default_rng(_SEED)
    drawn = [
        np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        for _ in range(_NUM_DRAWS)
    ]
    found = np.array([near.least(votes * times[rows]) for times in drawn])
    low, high = np.quantile(found, (0.05, 0.95), axis=0)
    return low, high


def _identified_by(near: _Linearised, sources: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which sources' errors move most with each constant."""
    weights = _votes(sources) * _robust(near.found)
    said: dict[str, tuple[str, ...]] = {}
    for column, name in enumerate(STARTS):
        by_source = dict.fromkeys(sources, 0.0)
        for source, one in zip(sources, weights * near.slopes[:, column] ** 2, strict=True):
            by_source[source] += float(one)
        least = _LEAST_SHARE * sum(by_source.values())
        ranked = sorted(by_source.items(), key=lambda item: -item[1])
        said[name] = tuple(source for source, part in ranked if part >= least)
    return said


def _without_constant(near: _Linearised, votes: Array) -> dict[str, StepConstants]:
    """Return fits with one constant each where it has no effect, the others adapted to that."""
    found = {}
    for column, name in enumerate(STARTS):
        neutral = getattr(PLAIN, name)
        # a logarithm has no 0: so little that nothing is left of it
        shift = np.log(max(neutral, 1e-9) / STARTS[name].value)
        at = near.least(votes, {column: float(np.clip(shift, -3.0, 3.0))})
        found[name] = replace(_constants(at), **{name: neutral})
    return found


def _constants(at: Array) -> StepConstants:
    shifted = zip(STARTS.items(), at, strict=True)
    values = {name: start.value * float(np.exp(shift)) for (name, start), shift in shifted}
    return StepConstants(**values)
