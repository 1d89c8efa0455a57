"""Modelled seconds of one kernel: the larger of arithmetic and memory traffic, tile by tile.

These rooflines know a device by its data sheet and one set of ``KernelFigures`` that all GPUs
share. Where a device has measured tables, ``planner.hardware.kernels`` multiplies them by what was
measured over what is said here; elsewhere they are all there is.

Every size is a numpy array or a number; they broadcast. Work of zero size takes no time.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import InvalidInputError
from planner.hardware.devices import Device
from planner.plan import Precision

__all__ = [
    "CAST_PRECISIONS",
    "DERIVED",
    "OPERAND_BYTES",
    "TABLE_PRECISION",
    "attention_model_s",
    "gemm_model_s",
    "memory_bound_s",
    "peak_of",
]

Array = NDArray[np.float64]

# Of an operand, with the scales of its blocks: 32 elements share a byte (OCP MX), 16 in nvfp4.
OPERAND_BYTES: Final[dict[Precision, float]] = {
    "nvfp4": 0.5 + 1 / 16,
    "mxfp8": 1 + 1 / 32,
    "fp8": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
}
_RESULT_BYTES: Final[dict[Precision, int]] = {
    "nvfp4": 2, "mxfp8": 2, "fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip
# Below 16 bits operands are cast for the product; attention stays in 16.
CAST_PRECISIONS: Final[tuple[Precision, ...]] = ("fp8", "mxfp8", "nvfp4")
# Nobody measured them: the peak of the data sheet, used as fp8 uses its own.
DERIVED: Final[tuple[Precision, ...]] = ("mxfp8", "nvfp4")
# Whose measured kernels stand for those of a precision: the same silicon, or the nearest measured.
TABLE_PRECISION: Final[dict[Precision, str]] = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp8",
}


def peak_of(device: Device, precision: Precision) -> float:
    """Return the dense peak in flop/s.

    Raises:
        InvalidInputError: The device has none in ``precision``.
    """
    if precision not in device.peak_flop_per_s:
        raise InvalidInputError(
            f"device {device.name!r} has no {precision} peak; "
            f"it has {', '.join(device.peak_flop_per_s)}",
            where="training.precision",
        )
    return device.peak_flop_per_s[precision]


def gemm_model_s(
    device: Device,
    precision: Precision,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    groups: ArrayLike = 1,
    *,
    uneven: ArrayLike = False,
    with_cast: bool = True,
) -> Array:
    """Return the seconds of ``groups`` products (m x k) · (k x n) in one kernel.

    ::

        tiles   = groups · ceil(m / tile) · ceil(n / tile)
        compute = 2 · tile² · (k + depth_lost) · (tiles + waves_lost · processors)
                  / (gemm_fraction · peak)
        memory  = (m·k + k·n) · operand_bytes + m·n · result_bytes over the achieved bandwidth
        seconds = max(compute, memory) + casting the left operand (fp8 and below)

    A product runs in square tiles over all processors; starting and ending a tile costs the time
    of ``depth_lost`` more of k, the last wave is partly empty. Operands are read once.

    Args:
        device: Whose.
        precision: Of the operands.
        m: Rows, of each group on the average.
        n: Columns.
        k: Depth.
        groups: Products in the kernel: experts.
        uneven: Groups differ in rows, so the last tile of each is half full on the average.
        with_cast: Whether the left operand is still to be cast, where the precision asks for it.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    figures, peak = device.figures, peak_of(device, precision)
    m, n, k, groups = (np.asarray(size, dtype=np.float64) for size in (m, n, k, groups))
    tile = figures.tile
    row_tiles = np.where(uneven, m / tile + 0.5, np.ceil(m / tile))
    tiles = groups * row_tiles * np.ceil(n / tile)
    waves_lost = figures.waves_lost * device.num_processors
    flop = 2.0 * tile**2 * (k + figures.depth_lost) * (tiles + waves_lost)
    operands = (m + n) * (k * (groups * OPERAND_BYTES[precision]))
    num_bytes = operands + m * n * (groups * _RESULT_BYTES[precision])
    rate = figures.memory_fraction * device.memory_bytes_per_s
    seconds = np.maximum(flop / (figures.gemm_fraction * peak), num_bytes / rate)
    seconds = seconds + figures.fixed_s
    if with_cast and precision in CAST_PRECISIONS:
        seconds = seconds + m * k * groups * (figures.cast_bytes / device.memory_bytes_per_s)
    return np.where(m * n * k * groups > 0, seconds, 0.0)


def attention_model_s(
    device: Device,
    precision: Precision,
    flop: ArrayLike,
    *,
    seq_len: ArrayLike,
    num_heads: ArrayLike,
) -> Array:
    """Return the seconds of one fused forward attention kernel that does ``flop``.

    ::

        slowdown = (1 + attention_seq_lost / seq_len) · (1 + attention_waves_lost / waves),
                   waves = num_heads · seq_len / tile / processors
        seconds  = attention_fixed + flop / (attention_fraction · peak) · slowdown

    Args:
        device: Whose.
        precision: Of the job; below 16 bits attention stays in 16.
        flop: Of all heads.
        seq_len: Queries per sequence in this kernel.
        num_heads: Heads of all sequences on this device.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    figures = device.figures
    peak = peak_of(device, "bf16" if precision in CAST_PRECISIONS else precision)
    flop, seq_len, num_heads = (
        np.asarray(value, dtype=np.float64) for value in (flop, seq_len, num_heads)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        waves = num_heads * seq_len / (figures.tile * device.num_processors)
        slowdown = 1.0 + figures.attention_seq_lost / seq_len
        slowdown = slowdown * (1.0 + figures.attention_waves_lost / waves)
        seconds = figures.attention_fixed_s + flop * slowdown / (figures.attention_fraction * peak)
    return np.where(flop > 0, seconds, 0.0)


def memory_bound_s(device: Device, num_bytes: ArrayLike, num_kernels: ArrayLike = 1) -> Array:
    """Return the seconds of kernels that read and write ``num_bytes`` in all.

    seconds = num_kernels · fixed + num_bytes / (memory_fraction · peak); so half the achieved
    bandwidth is reached where the transfer takes as long as the kernel's fixed time.
    """
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    rate = device.figures.memory_fraction * device.memory_bytes_per_s
    seconds = np.asarray(num_kernels) * device.figures.fixed_s + num_bytes / rate
    return np.where(num_bytes > 0, seconds, 0.0)
