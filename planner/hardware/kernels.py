"""Seconds of one kernel on one device: rooflines whose height depends on the size.

Every argument after the device and the precision is a numpy array or a number; they broadcast.
Work of zero size takes no time, for an op that does not occur is a row with zeros. The clocks
are those of the measurements the figures were fitted on: one kernel in a loop. A training step
draws more power and runs slower; that belongs to ``planner.constants``.

Assumptions: products run in square tiles over all processors; the last wave of tiles is
partly empty; operands are read once and the result written once.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import InvalidInputError
from planner.hardware.devices import Device, GemmFigures, Precision

__all__ = ["attention_s", "gemm_s", "memory_bound_s"]

Array = NDArray[np.float64]

# Queries one processor works on at a time (FlashAttention-2, arXiv 2307.08691, section 3.3).
_QUERY_TILE: Final = 128.0
_ELEMENT_BYTES: Final[dict[Precision, int]] = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
_RESULT_BYTES: Final[dict[Precision, int]] = {**_ELEMENT_BYTES, "fp8": 2}


def gemm_s(
    device: Device,
    precision: Precision,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    groups: ArrayLike = 1,
) -> Array:
    """Return the seconds of ``groups`` products (m x k) · (k x n) in one kernel.

    ::

        waves   = groups · ceil(m / tile) · ceil(n / tile) / processors
        compute = 2 · tile² · processors · (k + half_k) / (peak_fraction · peak)
                  · (waves + half_waves)
        memory  = (m·k + k·n) · element_bytes + m·n · result_bytes over the achieved bandwidth
        seconds = fixed + max(compute, memory) + casting the left operand (fp8)

    The form is that of a tiled product (one k-loop per tile, tiles in waves); its five figures
    per device were fitted, see ``Device.kernel_source``.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    peak, figures = _gemm_figures(device, precision)
    m, n, k, groups = (np.asarray(size, dtype=np.float64) for size in (m, n, k, groups))
    tile = float(device.tile)
    waves = np.ceil(m / tile) * np.ceil(n / tile) * groups / device.num_processors
    wave_s = 2.0 * tile**2 * device.num_processors / (figures.peak_fraction * peak)
    compute_s = wave_s * (k + figures.half_k) * (waves + figures.half_waves)
    operands = (m + n) * (k * (groups * _ELEMENT_BYTES[precision]))
    num_bytes = operands + m * n * (groups * _RESULT_BYTES[precision])
    memory_s = num_bytes / (figures.memory_fraction * device.memory_bytes_per_s)
    seconds = np.maximum(compute_s, memory_s) + figures.fixed_s
    if figures.quantise_bytes:
        seconds = seconds + m * k * groups * (figures.quantise_bytes / device.memory_bytes_per_s)
    return np.where(m * n * k * groups > 0, seconds, 0.0)


def attention_s(
    device: Device,
    precision: Precision,
    flop: ArrayLike,
    *,
    seq_len: ArrayLike,
    num_heads: ArrayLike,
    head_dim: ArrayLike,
    backward: bool = False,
) -> Array:
    """Return the seconds of one fused attention kernel that does ``flop``.

    ::

        slowdown = (1 + half_seq_len / seq_len) · (1 + half_head_dim / head_dim)
                   · (1 + half_waves / waves),   waves = num_heads · seq_len / 128 / processors
        seconds  = fixed + flop / (peak_fraction · peak) · slowdown

    Args:
        device: Whose.
        precision: Of the job; fp8 jobs keep attention in 16 bits.
        flop: Counted as the caller means it: for a causal forward pass over b sequences with a
            heads that is 2 · b · a · seq_len² · head_dim; for its backward 2.5 times as much
            (FlashAttention-2, arXiv 2307.08691, section 4.1).
        seq_len: Queries per sequence in this kernel.
        num_heads: Heads of all sequences of the micro-batch on this device.
        head_dim: Of queries and keys.
        backward: Scales the rate by ``backward_ratio``.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    peak, _ = _gemm_figures(device, "bf16" if precision == "fp8" else precision)
    figures = device.attention
    flop, seq_len, num_heads, head_dim = (
        np.asarray(value, dtype=np.float64) for value in (flop, seq_len, num_heads, head_dim)
    )
    rate = figures.peak_fraction * peak * (figures.backward_ratio if backward else 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        waves = num_heads * seq_len / (_QUERY_TILE * device.num_processors)
        slowdown = (1.0 + figures.half_seq_len / seq_len) * (1.0 + figures.half_waves / waves)
        seconds = (
            figures.fixed_s + flop * slowdown * (1.0 + figures.half_head_dim / head_dim) / rate
        )
    return np.where(flop > 0, seconds, 0.0)


def memory_bound_s(device: Device, num_bytes: ArrayLike, num_kernels: ArrayLike = 1) -> Array:
    """Return the seconds of kernels that read and write ``num_bytes`` in all.

    seconds = num_kernels · fixed + num_bytes / (fraction · peak); so half the achieved bandwidth
    is reached where the transfer takes as long as the kernel's fixed time.
    """
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    rate = device.memory.fraction * device.memory_bytes_per_s
    seconds = np.asarray(num_kernels) * device.memory.fixed_s + num_bytes / rate
    return np.where(num_bytes > 0, seconds, 0.0)


def _gemm_figures(device: Device, precision: Precision) -> tuple[float, GemmFigures]:
    if precision not in device.peak_flop_per_s or precision not in device.gemm:
        raise InvalidInputError(
            f"device {device.name!r} has no {precision} peak; "
            f"it has {', '.join(device.peak_flop_per_s)}",
            where="training.precision",
        )
    return device.peak_flop_per_s[precision], device.gemm[precision]
