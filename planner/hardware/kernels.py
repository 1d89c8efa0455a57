"""Seconds of one kernel on one device: a roofline, corrected by what was measured there.

::

    seconds = roofline of the data sheet · exp(log of measured over modelled at this shape)

The rooflines are in ``planner.hardware.roofline``, the correction in
``planner.hardware.kernel_tables``; a device without tables has the roofline alone, and its plans
say so (``Device.basis``). Every argument after the device and the precision is a numpy array or a
number; they broadcast. Work of zero size takes no time, for an op that does not occur is a row
with zeros. The clocks are those of the measurements: one kernel in a loop. A training step draws
more power and runs slower; that belongs to ``planner.constants``.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.hardware.devices import Device
from planner.hardware.kernel_tables import attention_surfaces, gemm_surface
from planner.hardware.roofline import attention_model_s, gemm_model_s, memory_bound_s
from planner.hardware.surfaces import weights_between
from planner.plan import Precision

__all__ = ["attention_s", "gemm_s", "grouped_gemm_s", "memory_bound_s"]

Array = NDArray[np.float64]


def gemm_s(
    device: Device,
    precision: Precision,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    with_cast: bool = True,
) -> Array:
    """Return the seconds of a product (m x k) · (k x n).

    Tables below 16 bits hold the cast of the left operand; ``with_cast=False`` leaves it out.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    modelled = gemm_model_s(device, precision, m, n, k, with_cast=with_cast)
    return modelled * _gemm_factor(device, precision, m, n, k)


def grouped_gemm_s(
    device: Device,
    precision: Precision,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    groups: ArrayLike,
    *,
    uneven: ArrayLike = False,
    with_cast: bool = True,
) -> Array:
    """Return the seconds of ``groups`` products (m x k) · (k x n) in one kernel: local experts.

    Corrected as one product of all rows: what a kernel makes of its tiles does not depend on whose
    rows they are. Whole measured layers of experts with such products agree with it, see
    ``planner.hardware.expert_layers``.

    Args:
        device: Whose.
        precision: Of the operands.
        m: Rows of an expert, on the average.
        n: Columns.
        k: Depth.
        groups: Local experts.
        uneven: Experts differ in rows, where true.
        with_cast: As of ``gemm_s``.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    modelled = gemm_model_s(device, precision, m, n, k, groups, uneven=uneven, with_cast=with_cast)
    return modelled * _gemm_factor(device, precision, np.multiply(m, groups), n, k)


def attention_s(
    device: Device,
    precision: Precision,
    flop: ArrayLike,
    *,
    seq_len: ArrayLike,
    batch: ArrayLike,
    num_heads: ArrayLike,
    num_kv_heads: ArrayLike,
    head_dim: ArrayLike,
    backward: bool = False,
) -> Array:
    """Return the seconds of one fused attention kernel that does ``flop``.

    Measured head dimensions on both sides of ``head_dim`` are weighed by its logarithm.

    Args:
        device: Whose.
        precision: Of the job; below 16 bits attention stays in 16.
        flop: Counted as the caller means it: for a causal forward pass over b sequences with a
            heads that is 2 · b · a · seq_len² · head_dim; for its backward 2.5 times as much
            (FlashAttention-2, arXiv 2307.08691, section 4.1).
        seq_len: Queries per sequence in this kernel.
        batch: Sequences.
        num_heads: Query heads of one sequence on this device.
        num_kv_heads: Key/value heads of one sequence on this device.
        head_dim: Of queries and keys.
        backward: Scales the rate by ``KernelFigures.backward_ratio``.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    flop, seq_len, batch, num_heads, num_kv_heads, head_dim = np.broadcast_arrays(
        *(
            np.asarray(value, dtype=np.float64)
            for value in (flop, seq_len, batch, num_heads, num_kv_heads, head_dim)
        )
    )
    seconds = attention_model_s(
        device, precision, flop, seq_len=seq_len, num_heads=batch * num_heads
    )
    if backward:
        seconds = seconds / device.figures.backward_ratio
    if device.tables is None or precision in ("fp32", "fp64"):
        return seconds
    head_dims, surfaces = attention_surfaces(device.tables)
    if not surfaces:
        return seconds
    shape = np.stack([_logarithm(x).ravel() for x in (batch, num_heads, num_kv_heads)], axis=1)
    position = _logarithm(seq_len).ravel()
    logarithm = np.zeros(len(position))
    for surface, weight in zip(
        surfaces, weights_between(np.log2(head_dims), _logarithm(head_dim).ravel()), strict=True
    ):
        rows = weight > 0
        if rows.any():
            logarithm[rows] += weight[rows] * surface(position[rows], shape[rows])
    return seconds * np.exp(logarithm).reshape(seconds.shape)


def _gemm_factor(
    device: Device, precision: Precision, m: ArrayLike, n: ArrayLike, k: ArrayLike
) -> Array | float:
    """Return measured over modelled seconds of products; 1 where none were measured."""
    surface = gemm_surface(device.tables, precision) if device.tables else None
    if surface is None:
        return 1.0
    m, n, k = np.broadcast_arrays(*map(_logarithm, (m, n, k)))
    factor: Array = np.exp(surface(m.ravel(), np.stack([n.ravel(), k.ravel()], axis=1)))
    return factor.reshape(m.shape)


def _logarithm(value: ArrayLike) -> Array:
    """Return log2; of what does not occur, size 0, any number will do."""
    return np.log2(np.maximum(np.asarray(value, dtype=np.float64), 1e-3))
