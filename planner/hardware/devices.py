"""What one device can do: peaks of the data sheet, and where its kernels' times come from.

``devices.json`` beside this file says which GPU of ``gpus.json`` a device is, whose measured tables
hold for it, and which ``KernelFigures`` it has. How they become seconds is in
``planner.hardware.kernels``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Final, Literal

from planner.constants import USABLE_MEMORY
from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.gpus import Architecture, GpuModel, architecture_of, gpu_model
from planner.plan import Precision

__all__ = [
    "Device",
    "KernelBasis",
    "KernelFigures",
    "custom_device",
    "device",
    "device_names",
    "device_of",
    "device_of_tables",
    "usable_bytes",
]

KernelBasis = Literal["measured", "borrowed", "roofline"]

# Whose kernels a GPU has that is known by its data sheet only: a measured one of its architecture.
_LIKE: Final[dict[Architecture, str]] = {
    "ampere": "a100-sxm-80gb",
    "ada": "l40s",
    "hopper": "h100-sxm-80gb",
    "blackwell": "b200-180gb",
    "cdna2": "mi250x",
    "cdna3": "mi300x",
    "cdna4": "mi355x",
}


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """How near kernels come to the peaks; see ``planner.hardware.roofline``.

    Attributes:
        tile: Side of the square of results one processor works on at a time.
        depth_lost: Depth k that the start and end of a tile cost.
        waves_lost: Waves of tiles lost to the unfilled last one.
        gemm_fraction: Of the peak, for large products.
        memory_fraction: Of the memory peak.
        fixed_s: One kernel, however small.
        cast_bytes: Memory traffic of casting an element of the left operand below 16 bits.
        attention_fraction: Of the 16-bit peak, for long sequences.
        attention_seq_lost: Sequence length at which half of that is left.
        attention_waves_lost: Waves of query tiles lost to the unfilled last one.
        attention_fixed_s: One attention kernel, however small.
        backward_ratio: Rate of the backward attention kernel over that of the forward one.
        layer_row_passes: Times a layer of experts moves its routed rows besides the products.
        layer_token_passes: Times it moves all tokens.
        layer_choice_bytes: Memory traffic of routing one token to one expert.
        layer_fixed_s: One layer of experts, however small.
        source: Where they come from.
    """

    tile: float
    depth_lost: float
    waves_lost: float
    gemm_fraction: float
    memory_fraction: float
    fixed_s: float
    cast_bytes: float
    attention_fraction: float
    attention_seq_lost: float
    attention_waves_lost: float
    attention_fixed_s: float
    backward_ratio: float
    layer_row_passes: float
    layer_token_passes: float
    layer_choice_bytes: float
    layer_fixed_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a CPU.

    Attributes:
        name: As topologies refer to it.
        memory_bytes: Of the data sheet.
        capacity_bytes: What one rank can allocate at most.
        memory_bytes_per_s: Peak of the data sheet.
        peak_flop_per_s: Dense matmul peak by precision; a missing precision cannot be trained in.
        num_processors: Streaming multiprocessors or compute units; 1 for a CPU core.
        figures: Of its rooflines.
        tables: Folder of the measured kernels that hold for it, or None.
        basis: Whether they were measured on it, or borrowed from another device, or there are none.
        source: Of the peaks.
        kernel_source: Of the kernels.
    """

    name: str
    memory_bytes: float
    capacity_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Precision, float]
    num_processors: int
    figures: KernelFigures
    tables: str | None
    basis: KernelBasis
    source: str
    kernel_source: str


def device_names() -> tuple[str, ...]:
    """Return the names of the bundled devices, sorted."""
    return tuple(sorted(_document()["devices"]))


@cache
def device(name: str) -> Device:
    """Return the bundled device called ``name``.

    Raises:
        UnknownNameError: There is none.
        InvalidInputError: It refers to tables that are not there.
    """
    known = _document()["devices"]
    if name not in known:
        remedy = (
            f"known: {', '.join(device_names())}; or give its figures in place of the name: name, "
            "memory_bytes, memory_bytes_per_s, peak_flop_per_s, source"
        )
        raise UnknownNameError("device", name, known, remedy=remedy)
    entry = known[name]
    sheet = gpu_model(entry["gpu"]) if "gpu" in entry else None
    memory_bytes = sheet.memory_bytes if sheet else entry["memory_bytes"]
    capacity_bytes = usable_bytes(sheet) if sheet else memory_bytes
    tables = entry["tables"]
    if tables and not (resources.files("planner.hardware") / "tables" / tables).is_dir():
        raise InvalidInputError(
            f"device {name!r}: planner/hardware/tables has no folder {tables!r}; make one with "
            "python -m benchmarks.kernel_tables, or set tables to null and basis to roofline",
            where="devices.json",
        )
    processors = f"; {entry['num_processors']} processors: {entry['processors_source']}"
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        capacity_bytes=memory_bytes * entry.get("usable", capacity_bytes / memory_bytes),
        memory_bytes_per_s=sheet.memory_bytes_per_s if sheet else entry["memory_bytes_per_s"],
        peak_flop_per_s=dict(sheet.peak_flop_per_s if sheet else entry["peak_flop_per_s"]),
        num_processors=entry["num_processors"],
        figures=_figures(entry["figures"]),
        tables=tables,
        basis=entry["basis"],
        source=f"{sheet.source}{processors}" if sheet else entry["source"],
        kernel_source=entry["kernel_source"],
    )


def device_of_tables(tables: str) -> Device:
    """Return the device on which the kernels of a folder were measured."""
    found = [one for one in map(device, device_names()) if one.tables == tables]
    return next(one for one in found if one.basis == "measured")


def usable_bytes(gpu: GpuModel) -> float:
    """Return what a rank can allocate on a GPU of a data sheet; those with links have HBM."""
    return gpu.memory_bytes * USABLE_MEMORY["" if gpu.link_kind is None else "hbm"].value


def custom_device(
    *,
    name: str,
    memory_bytes: float,
    memory_bytes_per_s: float,
    peak_flop_per_s: Mapping[Precision, float],
    source: str,
    is_cpu: bool = False,
) -> Device:
    """Return a device known by its data sheet only.

    Its kernels use as much of its peaks as those of a bundled device of the same architecture do,
    or of none, where the name is no GPU of ``gpus.json`` or its architecture was not measured.

    Args:
        name: Of the device; of a GPU any name that a tool prints.
        memory_bytes: What one rank can allocate at most.
        memory_bytes_per_s: Peak of the data sheet.
        peak_flop_per_s: Dense, by precision.
        source: Of these.
        is_cpu: It is a core of a CPU.

    Raises:
        InvalidInputError: It has no peak at all.
    """
    if not peak_flop_per_s:
        raise InvalidInputError(
            f"device {name!r} has no peak_flop_per_s; give one for each precision that it trains "
            "in",
            where="device.peak_flop_per_s",
        )
    like = device("cpu-core" if is_cpu else _LIKE.get(architecture_of(name), "v100-sxm-32gb"))
    borrowed: KernelBasis = "roofline" if like.tables is None else "borrowed"
    said = f"assumed to use as much of its peaks as {like.name}: {like.kernel_source}"
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        capacity_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flop_per_s=dict(peak_flop_per_s),
        num_processors=like.num_processors,
        figures=like.figures,
        tables=like.tables,
        basis=borrowed,
        source=source,
        kernel_source=said,
    )


def device_of(gpu: GpuModel) -> Device:
    """Return the bundled device of a GPU, or else one of its data sheet."""
    if gpu.device is not None:
        return device(gpu.device)
    return custom_device(
        name=gpu.name,
        memory_bytes=usable_bytes(gpu),
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        peak_flop_per_s=gpu.peak_flop_per_s,
        source=gpu.source,
    )


@cache
def _document() -> dict[str, Any]:
    text = resources.files("planner.hardware").joinpath("devices.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@cache
def _figures(name: str) -> KernelFigures:
    values = _document()["figures"][name]
    return KernelFigures(**{f.name: values[f.name] for f in fields(KernelFigures)})
