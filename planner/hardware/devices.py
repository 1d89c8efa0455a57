"""What one device can do: peaks of the data sheet, and how near its kernels come to them.

The figures are in ``devices.json`` beside this file, each group with its source. How the
kernel figures become seconds is in ``planner.hardware.kernels``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from planner.errors import InvalidInputError, UnknownNameError

__all__ = [
    "AttentionFigures",
    "Device",
    "GemmFigures",
    "MemoryFigures",
    "Precision",
    "custom_device",
    "device",
    "device_names",
]

Precision = Literal["bf16", "fp16", "fp8", "fp32", "fp64"]


@dataclass(frozen=True, slots=True)
class GemmFigures:
    """How matrix products approach the peak; see ``kernels.gemm_s``.

    Attributes:
        peak_fraction: Of the peak, for large products.
        half_k: Depth k that the start and end of a tile cost.
        half_waves: Waves of tiles lost to the unfilled last one.
        memory_fraction: Of the memory peak, where operands are the limit.
        fixed_s: One kernel, however small.
        quantise_bytes: Memory traffic per element of the left operand for casting it; fp8 only.
    """

    peak_fraction: float
    half_k: float
    half_waves: float
    memory_fraction: float
    fixed_s: float
    quantise_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionFigures:
    """How fused attention approaches the 16-bit peak; see ``kernels.attention_s``.

    Attributes:
        peak_fraction: Of the peak, for long sequences and wide heads.
        half_seq_len: Sequence length at which half of that is left.
        half_head_dim: Head dimension at which half of that is left.
        half_waves: Waves of query tiles lost to the unfilled last one.
        fixed_s: One kernel, however small.
        backward_ratio: Rate of the backward kernel over that of the forward one.
    """

    peak_fraction: float
    half_seq_len: float
    half_head_dim: float
    half_waves: float
    fixed_s: float
    backward_ratio: float


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """How element-wise kernels approach the memory peak; see ``kernels.memory_bound_s``."""

    fraction: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a CPU.

    Attributes:
        name: As topologies refer to it.
        memory_bytes: What one rank can allocate at most.
        memory_bytes_per_s: Peak of the data sheet.
        peak_flop_per_s: Dense matmul peak by precision; a missing precision cannot be trained in.
        num_processors: Streaming multiprocessors; 1 for a CPU core.
        tile: Side of the square of results one processor works on at a time.
        gemm: By precision; the same keys as ``peak_flop_per_s``.
        attention: Of the fused kernels.
        memory: Of element-wise kernels.
        source: Of the peaks.
        kernel_source: Of ``gemm``, ``attention`` and ``memory``.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Precision, float]
    source: str
    num_processors: int
    tile: int
    gemm: dict[Precision, GemmFigures]
    attention: AttentionFigures
    memory: MemoryFigures
    kernel_source: str


def device_names() -> tuple[str, ...]:
    """Return the names of the bundled devices, sorted."""
    return tuple(sorted(_figures()))


def device(name: str) -> Device:
    """Return the bundled device called ``name``.

    Raises:
        UnknownNameError: There is none.
    """
    figures = _figures()
    if name not in figures:
        remedy = (
            f"known: {', '.join(device_names())}; or give its figures in place of the name: name, "
            "memory_bytes, memory_bytes_per_s, peak_flop_per_s, source"
        )
        raise UnknownNameError("device", name, figures, remedy=remedy)
    return _read(name, figures[name])


def custom_device(
    *,
    name: str,
    memory_bytes: float,
    memory_bytes_per_s: float,
    peak_flop_per_s: Mapping[Precision, float],
    source: str,
    kernels_like: str = "h100-sxm-80gb",
) -> Device:
    """Return a device known by its data sheet only, whose kernels do as well as another's.

    Raises:
        InvalidInputError: A precision has a peak, but ``kernels_like`` has no kernels for it.
        UnknownNameError: There is no bundled device called ``kernels_like``.
    """
    like = device(kernels_like)
    missing = set(peak_flop_per_s) - set(like.gemm)
    if missing:
        raise InvalidInputError(
            f"device {name!r} has a peak for {', '.join(sorted(missing))}; kernels are known for "
            f"{', '.join(sorted(like.gemm))} only; leave the others out",
            where="device.peak_flop_per_s",
        )
    return replace(
        like,
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flop_per_s=dict(peak_flop_per_s),
        gemm={precision: like.gemm[precision] for precision in peak_flop_per_s},
        source=source,
        kernel_source=f"assumed to do as well as {like.name}: {like.kernel_source}",
    )


@cache
def _figures() -> dict[str, Any]:
    text = resources.files("planner.hardware").joinpath("devices.json").read_text("utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


def _read(name: str, figures: dict[str, Any]) -> Device:
    gemm = {precision: GemmFigures(**values) for precision, values in figures["gemm"].items()}
    if "bf16" in gemm:
        gemm["fp16"] = gemm["bf16"]
    return Device(
        name=name,
        memory_bytes=figures["memory_bytes"],
        memory_bytes_per_s=figures["memory_bytes_per_s"],
        peak_flop_per_s=dict(figures["peak_flop_per_s"]),
        source=figures["source"],
        num_processors=figures["num_processors"],
        tile=figures["tile"],
        gemm=gemm,
        attention=AttentionFigures(**figures["attention"]),
        memory=MemoryFigures(**figures["memory"]),
        kernel_source=figures["kernel_source"],
    )
