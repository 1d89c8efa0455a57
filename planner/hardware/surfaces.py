"""Measured over modelled seconds of a kernel, as a smooth function of its shape.

A table of measured kernels is a set of shapes; a plan asks about others. What is interpolated is
not the time but its logarithm over that of a model (``planner.hardware.kernels``), which varies
little: the *utilisation*. Between shapes it is the mean of a Gaussian process (kriging) with
squared-exponential covariance; beyond the range of a coordinate the utilisation of its end is held,
and the model alone scales the time.

One coordinate, the *position* (rows of a product, queries of a sequence, tokens of a layer), has
been measured at the same few values for every shape. Each value is a *slice* with its own process,
and between slices the logarithm is linear: where all shapes have all slices that is what the
process over both would say (autokrigeability), at a thousandth of the work.

All coordinates and the position are base-2 logarithms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Smoothness", "Surface", "fit_surface", "weights_between"]

Array = NDArray[np.float64]

# Of so many measurements at most one is taken for a failure.
_MOST_FAILED: Final = 4


@dataclass(frozen=True, slots=True)
class Smoothness:
    """How a table varies: figures shared by all devices.

    Attributes:
        terms: Of the covariance, each a variance (of natural logarithms) and a length for every
            coordinate, in octaves.
        noise: Variance of a measurement.
        failed_at: A measurement slower than its neighbours say by this natural logarithm is a
            failure (an autotuner that took a bad kernel) and left out.
    """

    terms: tuple[tuple[float, ...], ...]
    noise: float
    failed_at: float = np.inf

    def covariance(self, left: Array, right: Array) -> Array:
        """Return the covariance of shapes [a, d] and [b, d], shape [a, b]."""
        total = np.zeros((len(left), len(right)))
        for variance, *lengths in self.terms:
            a, b = left / np.array(lengths), right / np.array(lengths)
            squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
            total += variance * np.exp(-0.5 * np.maximum(squared, 0.0))
        return total


@dataclass(frozen=True, slots=True)
class _Slice:
    points: Array
    weights: Array
    mean: float


@dataclass(frozen=True, slots=True)
class Surface:
    """Natural logarithm of measured over modelled seconds.

    Attributes:
        smoothness: Covariance.
        positions: Of the slices, ascending, shape [slices].
        slices: One process each.
        low: Least coordinate measured, shape [d].
        high: Largest.
    """

    smoothness: Smoothness
    positions: Array
    slices: tuple[_Slice, ...]
    low: Array
    high: Array

    def __call__(self, position: Array, coordinates: Array) -> Array:
        """Return the logarithm at ``position`` [rows] and ``coordinates`` [rows, d]; [rows].

        Every distinct row of coordinates is looked up once.
        """
        inside = np.clip(coordinates, self.low, self.high)
        first, rows = _distinct(inside)
        at_slices = self._at_slices(inside[first])[rows]
        weights = np.stack(weights_between(self.positions, position), axis=1)
        return np.asarray((at_slices * weights).sum(axis=1))

    def tabulated(self, axes: tuple[Array, ...]) -> Callable[[Array, Array], Array]:
        """Return the same as a table over ``axes``, linear between them: for many questions.

        Args:
            axes: Ascending values of the two coordinates.
        """
        first, second = np.meshgrid(*axes, indexing="ij")
        points = np.stack([first.ravel(), second.ravel()], axis=1)
        table = self._at_slices(points).reshape(*first.shape, -1)

        def look_up(position: Array, coordinates: Array) -> Array:
            at = np.clip(coordinates, [axis[0] for axis in axes], [axis[-1] for axis in axes])
            cells = [_cell(axis, values) for axis, values in zip(axes, at.T, strict=True)]
            slice_cell = _cell(self.positions, np.clip(position, *self.positions[[0, -1]]))
            total = np.zeros(len(position))
            for corner in np.ndindex(2, 2, 2):
                part = np.ones(len(position))
                index = []
                for (below, share), side in zip((*cells, slice_cell), corner, strict=True):
                    part = part * (share if side else 1.0 - share)
                    index.append(below + side)
                total += part * table[tuple(index)]
            return total

        return look_up

    def _at_slices(self, points: Array) -> Array:
        """Return the logarithm of every slice at ``points`` [n, d], shape [n, slices]."""
        found = np.empty((len(points), len(self.slices)))
        covariance, known = np.zeros((0, 0)), None
        for number, one in enumerate(self.slices):
            if known is not one.points:  # slices of the same shapes share them
                covariance, known = self.smoothness.covariance(points, one.points), one.points
            found[:, number] = covariance @ one.weights + one.mean
        return found


def fit_surface(
    position: Array, coordinates: Array, log_ratio: Array, smoothness: Smoothness
) -> Surface:
    """Return the surface through measurements; failed ones are left out.

    Args:
        position: Shape [n], few distinct values.
        coordinates: Shape [n, d].
        log_ratio: Natural logarithm of measured over modelled seconds, shape [n].
        smoothness: Covariance of the table.
    """
    positions = np.unique(position)
    inverses: dict[bytes, tuple[Array, Array]] = {}
    slices = []
    for value in positions:
        at = position == value
        points, ratios = coordinates[at], log_ratio[at]
        order = np.lexsort(points.T)
        slices.append(_solved(points[order], ratios[order], smoothness, inverses))
    return Surface(
        smoothness, positions, tuple(slices), coordinates.min(axis=0), coordinates.max(axis=0)
    )


def _solved(
    points: Array, ratios: Array, smoothness: Smoothness, inverses: dict[bytes, tuple[Array, Array]]
) -> _Slice:
    key = points.tobytes()
    if key not in inverses:
        covariance = smoothness.covariance(points, points)
        covariance[np.diag_indices_from(covariance)] += smoothness.noise
        inverses[key] = points, np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    points, inverse = inverses[key]
    for _ in range(len(points) // _MOST_FAILED):
        mean = float(np.median(ratios))
        # A measurement less what all others say of it (Rasmussen and Williams 2006, eq. 5.12).
        left_out = inverse @ (ratios - mean) / np.diag(inverse)
        worst = int(np.argmax(left_out))
        if left_out[worst] <= smoothness.failed_at:
            break
        points, ratios = np.delete(points, worst, axis=0), np.delete(ratios, worst)
        inverse = _inverse_without(inverse, worst)
    mean = float(np.median(ratios))
    return _Slice(points, inverse @ (ratios - mean), mean)


def _inverse_without(inverse: Array, row: int) -> Array:
    """Return the inverse of a matrix without one row and column, from its own inverse."""
    kept = np.delete(inverse, row, axis=0)
    across = kept[:, row]
    reduced: Array = np.delete(kept, row, axis=1) - np.outer(across, across) / inverse[row, row]
    return reduced


def weights_between(positions: Array, position: Array) -> list[Array]:
    """Return how much each of ascending ``positions`` counts at ``position`` [rows].

    Linear between two, the end beyond both ends; they add up to 1.
    """
    below, share = _cell(positions, np.clip(position, positions[0], positions[-1]))
    return [
        np.where(below == number, 1.0 - share, np.where(below + 1 == number, share, 0.0))
        for number in range(len(positions))
    ]


def _distinct(rows: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the first place of every distinct row, and which of these each row is."""
    key = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        values, codes = np.unique(column, return_inverse=True)
        key = np.unique(key * len(values) + codes.reshape(-1), return_inverse=True)[1].reshape(-1)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return first, number.reshape(-1)


def _cell(axis: Array, values: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the index of the axis value at or below, and how far on to the next, 0 to 1."""
    below = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, max(0, len(axis) - 2))
    if len(axis) == 1:
        return below, np.zeros(len(values))
    return below, (values - axis[below]) / (axis[below + 1] - axis[below])
