"""The fit of a step's constants: each source one vote, wild runs count little, what is left out."""

from dataclasses import asdict

import numpy as np
import pytest

from planner.cost.step_constants import StepConstants
from planner.validate.step_fit import STARTS, Array, Fit, fit_steps

START = STARTS["clock_ampere"].value


def fitted(asked: dict[str, list[float]]) -> Fit:
    """Return the fit to runs that ask for these logarithms of a clock over its start."""
    sources = [source for source, shifts in asked.items() for _ in shifts]
    targets = np.array([shift for shifts in asked.values() for shift in shifts])

    def residuals(constants: StepConstants) -> Array:
        return np.asarray(targets - np.log(constants.clock_ampere / START))

    return fit_steps(sources, residuals)


def shift(constants: StepConstants) -> float:
    return float(np.log(constants.clock_ampere / START))


def test_a_source_has_one_vote_however_many_runs_it_has() -> None:
    found = fitted({"many": [0.05] * 200, "few": [-0.05] * 4})
    assert shift(found.constants) == pytest.approx(0, abs=1e-3)
    assert shift(fitted({"many": [0.05] * 200, "few": [0.05] * 4}).constants) > 0.03


def test_a_wild_run_moves_little() -> None:
    plain = shift(fitted({"one": [0.05] * 9}).constants)
    wild = shift(fitted({"one": [0.05] * 8 + [3.0]}).constants)
    assert wild - plain < 0.03  # least squares would move it by a third


def test_without_a_source_its_runs_say_nothing() -> None:
    found = fitted({"up": [0.05] * 4, "down": [-0.05] * 4})
    assert shift(found.without_source["up"]) < -0.02
    assert shift(found.without_source["down"]) > 0.02
    assert found.low.clock_ampere < found.constants.clock_ampere < found.high.clock_ampere


def test_what_no_run_speaks_of_stays_where_it_starts_and_is_identified_by_none() -> None:
    found = fitted({"one": [0.05] * 4})
    assert found.identified_by["clock_ampere"] == ("one",)
    others = {
        name: value for name, value in asdict(found.constants).items() if name != "clock_ampere"
    }
    assert others == pytest.approx({name: STARTS[name].value for name in others})
    assert found.without_constant["clock_ampere"].clock_ampere == 1
