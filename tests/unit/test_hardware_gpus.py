"""GPU models: found by whatever name a tool prints, with the link totals that vendors publish."""

import pytest

from planner.errors import UnknownNameError
from planner.hardware.devices import device
from planner.hardware.gpus import GpuModel, gpu_model, gpu_models

every_model = pytest.mark.parametrize("model", gpu_models(), ids=lambda model: model.name)


@every_model
def test_every_name_and_alias_finds_its_model_however_it_is_written(model: GpuModel) -> None:
    for name in (model.name, *model.aliases):
        words = name.replace("-", " ")
        for spelling in (name, name.lower(), name.upper(), words.replace(" ", "-"), f" {words} "):
            assert gpu_model(spelling) is model, spelling


# GB/s both ways, as each vendor's data sheet prints the total of one GPU.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("P100", 160),
        ("V100 SXM", 300),
        ("RTX 2080 Ti", 100),
        ("RTX 3090", 112.5),
        ("RTX A6000", 112.5),
        ("A30", 200),
        ("A100 SXM 80GB", 600),
        ("A100 PCIe 40GB", 600),
        ("A800", 400),
        ("H100 SXM", 900),
        ("H100 PCIe", 600),
        ("H200 NVL", 900),
        ("H800", 400),
        ("B200", 1800),
        ("GB300", 1800),
        ("MI100", 276),
        ("MI210", 300),
        ("MI300X", 896),
        ("MI355X", 1075.2),
        ("T4", 0),
        ("L40S", 0),
    ],
)
def test_links_add_up_to_the_published_total(name: str, total: float) -> None:
    model = gpu_model(name)
    assert 2 * model.num_links * model.link_bytes_per_s == pytest.approx(total * 1e9)


@every_model
def test_figures_hold_together(model: GpuModel) -> None:
    assert len(model.source) > 60
    assert (model.link_kind is None) == (model.num_links == 0) == (model.link_bytes_per_s == 0)
    assert model.is_switched or not model.has_multicast
    assert model.is_switched <= (model.link_kind == "nvlink")
    assert 16e9 <= model.memory_bytes * 2 <= 1e12
    peaks = model.peak_flop_per_s
    assert peaks
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if model.library == "rccl":
        assert model.link_kind == "xgmi"


@every_model
def test_a_model_with_known_kernels_has_the_figures_of_that_device(model: GpuModel) -> None:
    if model.device is None:
        return
    known = device(model.device)
    assert gpu_model(model.device) is model
    assert model.memory_bytes == known.memory_bytes
    assert model.memory_bytes_per_s == known.memory_bytes_per_s
    for precision, peak in known.peak_flop_per_s.items():
        assert model.peak_flop_per_s[precision] == peak


@pytest.mark.parametrize(
    ("short", "meant"),
    [
        ("A100", "A100 SXM 80GB"),
        ("V100", "V100 SXM 32GB"),
        ("H100", "H100 SXM"),
        ("h100-sxm-80gb", "H100 SXM"),
        ("H100-80GB-SXM", "H100 SXM"),
        ("A100 80GB SXM4", "A100 SXM 80GB"),
        ("RTX4090", "RTX 4090"),
        ("MI250X GCD", "MI250X"),
    ],
)
def test_a_short_or_shuffled_name_means_the_documented_model(short: str, meant: str) -> None:
    assert gpu_model(short).name == meant


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("mi301x", "MI300X"), ("NVIDIA H10 SXM", "H100 SXM"), ("rtx 4091", "RTX 4090"), ("", "A10")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match="no GPU model is called") as caught:
        gpu_model(name)
    assert nearest in caught.value.nearest
    assert "MI355X" in str(caught.value)


@pytest.mark.parametrize("name", ["gfx942", "gfx90a", "gfx950"])
def test_an_architecture_of_several_models_is_not_guessed(name: str) -> None:
    with pytest.raises(UnknownNameError):
        gpu_model(name)


def test_only_switches_from_the_third_generation_on_multicast() -> None:
    assert {m.name for m in gpu_models() if m.is_switched and not m.has_multicast} == {
        "V100 SXM3 32GB",
        "A100 SXM 80GB",
        "A100 SXM 40GB",
        "A800 SXM 80GB",
    }
