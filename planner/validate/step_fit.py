"""Constants of a training step, fitted to published runs: few, shared by all, each source one vote.

The function that is fitted is the one that predicts (``planner.cost.step.price``). Residuals are
logarithms of predicted over measured seconds; beyond ``_ROBUST_ABOVE`` they count linearly, for a
run that is twice as slow as its like has a cause that no constant here knows. Each constant is held
near where it would be without these runs (``STARTS``), by as much as that is known.

Steps are Gauss-Newton's with differences for derivatives. Leaving a source out starts at the fit to
all and takes one step without it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.problem import Problem
from planner.cost.step import price
from planner.cost.step_constants import StepConstants
from planner.layout.candidates import Candidates

__all__ = ["STARTS", "Case", "Fit", "Start", "fit_steps", "logarithms"]

Array = NDArray[np.float64]

_ROBUST_ABOVE: Final = 0.1
_DIFFERENCE: Final = 0.05
_NUM_STEPS: Final = 4
# A source says as much as this many independent runs, however many it has.
_VOTES: Final = 4.0


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
    "clock_ampere": Start(0.92, 0.1, "1", "below the kernel tables' under load; 400 W on A100"),
    "clock_hopper": Start(0.85, 0.1, "1", "products at 600 to 700 Tflop/s under load, 800 alone"),
    "clock_blackwell": Start(0.92, 0.1, "1", "as on A100, for want of a reason"),
    "memory_rate": Start(1.0, 0.15, "1", "the rooflines' own figure"),
    "attention_time": Start(1.0, 0.1, "1", "the tables' own figure"),
    "grouped_time": Start(1.1, 0.2, "1", "measured layers of experts: 0.86 to 1.04 on Hopper"),
    "collective_time": Start(1.0, 0.15, "1", "nccl-tests' own figure"),
    "network_time": Start(1.0, 0.3, "1", "nccl-tests' own figure; other jobs share networks"),
    "launch_s": Start(20e-6, 0.7, "s", "15 to 18 us a kernel on a core of a virtual machine"),
    "jitter": Start(0.01, 0.5, "1", "assumed: chips of one kind differ by a few per cent"),
    "host_s": Start(5e-3, 1.0, "s", "assumed: some milliseconds of Python for every step"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A published run that is fitted to."""

    source: str
    problem: Problem
    candidate: Candidates
    measured_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit found.

    Attributes:
        constants: The figures.
        covariance: Of their logarithms, in the order of ``STARTS``.
        without: Source -> the figures found without its runs.
    """

    constants: StepConstants
    covariance: Array
    without: dict[str, StepConstants]


# Logarithms of predicted over measured seconds under some constants, one for each case.
Residuals = Callable[[StepConstants], Array]


def logarithms(cases: Sequence[Case], constants: StepConstants) -> Array:
    """Return logarithms of predicted over measured seconds, one for each case."""
    return np.array(
        [
            np.log(price(replace(c.problem, constants=constants), c.candidate).step_time_s()[0])
            - np.log(c.measured_s)
            for c in cases
        ]
    )


def fit_steps(
    sources: Sequence[str], residuals: Residuals, names: Sequence[str] = tuple(STARTS)
) -> Fit:
    """Return the constants that agree best with all cases, and without each source.

    Args:
        sources: Of the cases.
        residuals: Of the cases.
        names: Of the constants that are fitted; the others stay where they start.
    """
    at = np.zeros(len(names))
    spreads = np.array([STARTS[name].spread for name in names])
    votes = _votes(sources)
    for _ in range(_NUM_STEPS):
        found, slopes = _linearised(residuals, names, at)
        at = _step(found, slopes, votes, at, spreads)
    found, slopes = _linearised(residuals, names, at)
    weights = votes * _robust(found)
    information = slopes.T @ (weights[:, None] * slopes) / _ROBUST_ABOVE**2
    covariance = np.linalg.inv(information + np.diag(spreads**-2))
    without = {}
    for left_out in sorted(set(sources)):
        kept = votes * np.array([source != left_out for source in sources])
        without[left_out] = _constants(names, _step(found, slopes, kept, at, spreads))
    return Fit(_constants(names, at), covariance, without)


def _votes(sources: Sequence[str]) -> Array:
    """Return the weight of every case: a source's runs have the same in all."""
    count = Counter(sources)
    return np.array([min(1.0, _VOTES / count[source]) for source in sources])


def _robust(found: Array) -> Array:
    """Return the weights that make large residuals count linearly (pseudo-Huber)."""
    return np.asarray((1 + (found / _ROBUST_ABOVE) ** 2) ** -0.5)


def _linearised(
    residuals: Residuals, names: Sequence[str], at: Array
) -> tuple[Array, Array]:
    """Return residuals at a point, and their slopes along the logarithms [cases, names]."""
    found = residuals(_constants(names, at))
    slopes = [
        (residuals(_constants(names, at + _DIFFERENCE * axis)) - found) / _DIFFERENCE
        for axis in np.eye(len(names))
    ]
    return found, np.array(slopes).T


def _step(found: Array, slopes: Array, votes: Array, at: Array, spreads: Array) -> Array:
    """Return where the linearised problem has its least, reweighted until it stays."""
    target = at
    for _ in range(20):
        left = found + slopes @ (target - at)
        weights = votes * _robust(left) / _ROBUST_ABOVE**2
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(spreads**-2)
        target = np.linalg.solve(normal, -slopes.T @ (weights * (found - slopes @ at)))
    return target


def _constants(names: Sequence[str], at: Array) -> StepConstants:
    values = {name: start.value for name, start in STARTS.items()}
    values |= {
        name: STARTS[name].value * float(np.exp(shift))
        for name, shift in zip(names, at, strict=True)
    }
    return StepConstants(**values)
