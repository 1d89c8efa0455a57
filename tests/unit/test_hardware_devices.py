"""Figures of the devices: complete, sourced, and refused by name where missing."""

import pytest

from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.devices import custom_device, device, device_names


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
def test_every_precision_has_kernels_and_every_figure_a_source(name: str) -> None:
    dev = device(name)
    assert set(dev.gemm) == set(dev.peak_flop_per_s)
    assert len(dev.source) > 40
    assert len(dev.kernel_source) > 40
    for figures in dev.gemm.values():
        assert 0 < figures.peak_fraction <= 1
        assert 0 < figures.memory_fraction <= 1
    assert 0 < dev.memory.fraction <= 1


def test_an_unknown_device_lists_every_device_and_how_to_give_another() -> None:
    with pytest.raises(UnknownNameError, match="h100-sxm-80gb") as caught:
        device("h100")
    for name in device_names():
        assert name in str(caught.value)
    assert "peak_flop_per_s" in str(caught.value)


def test_a_device_by_its_data_sheet_borrows_kernels() -> None:
    mine = custom_device(
        name="h800",
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        peak_flop_per_s={"bf16": 989.5e12},
        source="data sheet",
    )
    assert mine.name == "h800"
    assert mine.gemm == {"bf16": device("h100-sxm-80gb").gemm["bf16"]}
    assert mine.kernel_source.startswith("assumed to do as well as h100-sxm-80gb")


def test_a_precision_without_kernels_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has a peak for fp64; kernels are known for"):
        custom_device(
            name="odd",
            memory_bytes=1e9,
            memory_bytes_per_s=1e12,
            peak_flop_per_s={"fp64": 1e12},
            source="data sheet",
        )
