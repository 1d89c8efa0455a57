"""Figures of the devices: complete, sourced, and refused by name where missing."""

import pytest

from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.devices import (
    Device,
    custom_device,
    device,
    device_names,
    device_of_tables,
)
from planner.hardware.gpus import gpu_model
from planner.hardware.kernel_tables import KernelOp, read_table


@pytest.mark.parametrize(
    ("name", "precision", "peak", "memory_bytes", "memory_bytes_per_s"),
    [
        ("a100-sxm-80gb", "bf16", 312e12, 80e9, 2039e9),
        ("h100-sxm-80gb", "bf16", 989.5e12, 80e9, 3350e9),
        ("h100-sxm-80gb", "fp8", 1979e12, 80e9, 3350e9),
        ("gb200", "bf16", 2.5e15, 186e9, 8e12),
        ("gb200", "fp8", 5e15, 186e9, 8e12),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, precision: str, peak: float, memory_bytes: float, memory_bytes_per_s: float
) -> None:
    dev = device(name)
    assert dict(dev.peak_flop_per_s)[precision] == peak  # type: ignore[index]
    assert (dev.memory_bytes, dev.memory_bytes_per_s) == (memory_bytes, memory_bytes_per_s)


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source_and_can_be(name: str) -> None:
    dev = device(name)
    assert len(dev.source) > 40
    assert len(dev.kernel_source) > 30
    assert len(dev.figures.source) > 40
    for fraction in ("gemm_fraction", "memory_fraction", "attention_fraction", "backward_ratio"):
        assert 0 < getattr(dev.figures, fraction) <= 1
    assert dev.num_processors >= 1


@pytest.mark.parametrize("name", device_names())
def test_a_device_says_where_its_kernels_come_from(name: str) -> None:
    dev = device(name)
    assert (dev.tables is None) == (dev.basis == "roofline")
    if dev.tables:
        assert device_of_tables(dev.tables).basis == "measured"
        assert (dev.tables == name) == (dev.basis == "measured")
        ops: tuple[KernelOp, ...] = ("gemm", "attention", "moe_layer")
        assert all(len(read_table(dev.tables, op)["src"]) > 1000 for op in ops)


def test_the_devices_of_the_issue_are_bundled() -> None:
    measured = "a100-sxm-80gb h100-sxm-80gb h200-sxm-141gb b200-180gb b300-288gb gb200 gb300 l40s"
    known = "v100-sxm-32gb a800-sxm-80gb h800-sxm-80gb h20-96gb mi250x mi300x mi355x ascend-910b"
    assert all(device(n).basis == "measured" for n in (*measured.split(), "rtx-pro-6000"))
    assert all(device(n).basis != "measured" for n in known.split())


def test_a_device_is_a_gpu_by_its_own_name() -> None:
    gpus = {name: gpu_model(name) for name in device_names() if name != "cpu-core"}
    assert all(gpu.device == name for name, gpu in gpus.items())


def test_an_unknown_device_lists_every_device_and_how_to_give_another() -> None:
    with pytest.raises(UnknownNameError, match="h100-sxm-80gb") as caught:
        device("h100")
    for name in device_names():
        assert name in str(caught.value)
    assert "peak_flop_per_s" in str(caught.value)


def sheet(name: str, **peaks: float) -> Device:
    """Return a device known by a data sheet."""
    return custom_device(
        name=name,
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        peak_flop_per_s=peaks,  # type: ignore[arg-type]  # keyword names are plain strings
        source="data sheet",
    )


@pytest.mark.parametrize(
    ("name", "tables"),
    [("H100 PCIe", "h100-sxm-80gb"), ("A100 SXM 40GB", "a100-sxm-80gb"), ("L4", "l40s")],
)
def test_a_device_by_its_data_sheet_borrows_kernels_of_its_architecture(
    name: str, tables: str
) -> None:
    mine = sheet(name, bf16=500e12)
    assert (mine.name, mine.tables, mine.basis) == (name, tables, "borrowed")
    assert mine.kernel_source.startswith(f"assumed to use as much of its peaks as {tables}")


def test_a_device_of_no_known_architecture_has_the_roofline_alone() -> None:
    mine = sheet("mine", bf16=500e12, fp32=1e12)
    assert (mine.tables, mine.basis) == (None, "roofline")
    assert mine.figures == device("v100-sxm-32gb").figures


def test_a_device_without_a_peak_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no peak_flop_per_s; give one for each"):
        sheet("odd")
