"""What one device can do: peaks from the data sheet, achieved fractions with their source."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Device", "Precision", "device", "device_names"]

Precision = Literal["bf16", "fp16", "fp8", "fp32", "fp64"]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a CPU.

    Attributes:
        name: As topologies refer to it.
        memory_bytes: What one rank can allocate at most.
        memory_bytes_per_s: Peak of the data sheet.
        peak_flop_per_s: Dense matmul peak by precision; a missing precision cannot be trained in.
        source: Of the peaks.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Precision, float]
    source: str
