"""Kriging of measured over modelled: what any interpolation must do, and what this one is for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware.surfaces import Smoothness, fit_surface, weights_between

SMOOTH = Smoothness(((0.1, 2.0, 2.0),), noise=1e-6)
RNG = np.random.default_rng(7)


def grid(size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and coordinates of a full grid: 3 slices of ``size`` x ``size``."""
    position, first, second = np.meshgrid([8.0, 9.0, 11.0], *[np.arange(size) + 8.0] * 2)
    return position.ravel(), np.stack([first.ravel(), second.ravel()], axis=1)


def wavy(position: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return a smooth function of three coordinates."""
    return 0.1 * np.sin(at[:, 0] / 2) + 0.05 * np.cos(at[:, 1] / 3) + 0.02 * position


def test_what_was_measured_is_said_again() -> None:
    position, at = grid()
    surface = fit_surface(position, at, wavy(position, at), SMOOTH)
    assert surface(position, at) == pytest.approx(wavy(position, at), abs=1e-4)


def test_left_out_shapes_are_met_better_than_by_their_mean() -> None:
    position, at = grid()
    held = RNG.random(len(position)) < 0.3
    truth = wavy(position, at)
    surface = fit_surface(position[~held], at[~held], truth[~held], SMOOTH)
    error = np.abs(surface(position[held], at[held]) - truth[held])
    assert np.median(error) < 0.1 * np.std(truth[held])


def test_between_slices_the_logarithm_is_linear() -> None:
    position, at = grid()
    surface = fit_surface(position, at, wavy(position, at), SMOOTH)
    here = np.array([[10.0, 9.0]])
    nine, ten, eleven = (float(surface(np.array([p]), here)[0]) for p in (9.0, 10.0, 11.0))
    assert ten == pytest.approx((nine + eleven) / 2)


def test_beyond_the_range_the_end_is_held() -> None:
    position, at = grid()
    surface = fit_surface(position, at, wavy(position, at), SMOOTH)
    far, end = np.array([[99.0, -5.0]]), np.array([[13.0, 8.0]])
    assert surface(np.array([20.0]), far) == pytest.approx(surface(np.array([11.0]), end))


def test_a_failed_measurement_is_left_out_and_a_fast_one_is_not() -> None:
    position, at = grid()
    truth = wavy(position, at)
    careful = Smoothness(SMOOTH.terms, noise=1e-4, failed_at=0.7)
    for spike, tolerance in ((2.0, 0.02), (0.5, None)):
        spoilt = truth.copy()
        spoilt[20] += spike
        surface = fit_surface(position, at, spoilt, careful)
        error = abs(float(surface(position[20:21], at[20:21])[0]) - truth[20])
        assert error < 0.02 if tolerance else error > 0.2


def test_leaving_out_is_what_a_fit_without_them_says() -> None:
    position, at = grid()
    truth = wavy(position, at)
    spoilt = truth.copy()
    spoilt[[20, 41]] += 3.0
    kept = np.delete(np.arange(len(truth)), [20, 41])
    careful = Smoothness(SMOOTH.terms, noise=1e-4, failed_at=0.7)
    found = fit_surface(position, at, spoilt, careful)
    without = fit_surface(position[kept], at[kept], truth[kept], careful)
    assert found(position, at) == pytest.approx(without(position, at), abs=1e-6)


def test_a_table_of_it_agrees_at_its_own_nodes() -> None:
    position, at = grid()
    surface = fit_surface(position, at, wavy(position, at), SMOOTH)
    table = surface.tabulated((np.unique(at[:, 0]), np.unique(at[:, 1])))
    assert table(position, at) == pytest.approx(surface(position, at))
    inside = at + 0.5
    assert table(position, inside) == pytest.approx(surface(position, inside), abs=0.01)


@settings(max_examples=30)
@given(st.permutations(range(20)))
def test_the_order_of_measurements_does_not_matter(order: list[int]) -> None:
    position, at = (values[:20] for values in grid())
    truth = wavy(position, at)
    one = fit_surface(position, at, truth, SMOOTH)
    other = fit_surface(position[order], at[order], truth[order], SMOOTH)
    assert one(position, at) == pytest.approx(other(position, at), abs=1e-9)


def test_weights_are_linear_between_two_and_the_end_beyond_both() -> None:
    one = weights_between(np.array([5.0]), np.array([0.0, 9.0]))
    assert [weight.tolist() for weight in one] == [[1.0, 1.0]]
    three = np.stack(
        weights_between(np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.5, 4.0, 9.0]))
    )
    assert three.T.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0.75, 0.25], [0, 0, 1], [0, 0, 1]]
