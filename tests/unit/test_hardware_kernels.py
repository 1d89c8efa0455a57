"""Kernel times: laws every roofline obeys, and measurements that nobody of us made."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.hardware.devices import Device, device, device_names
from planner.hardware.expert_layers import ExpertLayers, expert_layer_s
from planner.hardware.kernels import (
    attention_s,
    gemm_s,
    grouped_gemm_s,
    memory_bound_s,
)
from planner.hardware.roofline import gemm_model_s
from planner.plan import Precision

CASES = [
    (device(name), precision)
    for name in device_names()
    for precision in device(name).peak_flop_per_s
]
LOW: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")
SIZES = st.integers(256, 65536)
H100 = device("h100-sxm-80gb")
BLACKWELL = ("b200-180gb", "b300-288gb", "gb200", "gb300", "rtx-pro-6000")


@pytest.mark.parametrize(("dev", "precision"), CASES)
def test_no_product_beats_peak_or_memory(dev: Device, precision: Precision) -> None:
    m, n, k = np.meshgrid(*[2 ** np.arange(0, 17, 2)] * 3)
    seconds = gemm_s(dev, precision, m, n, k)
    assert (2.0 * m * n * k / seconds <= dev.peak_flop_per_s[precision]).all()
    if precision not in LOW:  # whose operands may lie in a cache
        large = m * k + k * n > 1e9
        assert ((m * k + k * n)[large] / seconds[large] <= dev.memory_bytes_per_s).all()


@given(st.sampled_from(CASES), SIZES, SIZES, SIZES)
def test_a_product_four_times_as_large_takes_longer(
    case: tuple[Device, Precision], m: int, n: int, k: int
) -> None:
    """Measured utilisation may fall a little from one shape to the next, but never as much."""
    base = gemm_s(*case, m, n, k)
    assert gemm_s(*case, 4 * m, n, k) > 0.9 * base
    assert gemm_s(*case, m, 4 * n, k) > 0.9 * base
    assert gemm_s(*case, m, n, 4 * k) > 0.9 * base


@pytest.mark.parametrize(("dev", "precision"), CASES)
def test_work_that_does_not_occur_is_free(dev: Device, precision: Precision) -> None:
    zero = np.array([0.0, 1.0])
    assert gemm_s(dev, precision, zero, 64, 64)[0] == 0
    assert gemm_s(dev, precision, 64, zero, 64)[0] == 0
    assert gemm_s(dev, precision, 64, 64, zero)[0] == 0
    assert memory_bound_s(dev, zero)[0] == 0
    assert memory_bound_s(dev, zero)[1] > 0
    at = attention_s(
        dev, precision, zero, seq_len=zero, batch=1, num_heads=zero, num_kv_heads=1, head_dim=zero
    )
    assert at[0] == 0
    assert np.isfinite(at).all()


@pytest.mark.parametrize(("dev", "precision"), CASES)
def test_columns_are_priced_as_their_rows(dev: Device, precision: Precision) -> None:
    m, n, k = np.array([128, 4096, 8192]), np.array([512, 1024, 8192]), 2048
    rows = [float(gemm_s(dev, precision, mi, ni, k)) for mi, ni in zip(m, n, strict=True)]
    assert gemm_s(dev, precision, m, n, k) == pytest.approx(rows)


def experts(groups: int, rows: float, *, uneven: bool = False) -> float:
    """Return seconds of one grouped product of Mixtral's size."""
    return float(grouped_gemm_s(H100, "bf16", rows, 14336, 4096, groups, uneven=uneven))


def test_one_grouped_kernel_beats_many_small_ones() -> None:
    assert experts(8, 512) < 8 * float(gemm_s(H100, "bf16", 512, 14336, 4096))
    assert experts(8, 512) > experts(4, 512) > experts(2, 512)


def test_uneven_experts_waste_part_of_a_tile_each() -> None:
    assert experts(8, 1024, uneven=True) > experts(8, 1024)


# ai-dynamo/aiconfigurator (Apache-2.0), gemm_perf of trtllm 1.3.0rc10 (H100, GB200) and sglang
# 0.5.10 (A100); microseconds. Kriging smooths a measurement by a few per cent.
@pytest.mark.parametrize(
    ("name", "precision", "m", "n", "k", "time_us"),
    [
        ("a100-sxm-80gb", "bf16", 4096, 8192, 8192, 2194.34),
        ("a100-sxm-80gb", "bf16", 8192, 8192, 1024, 562.644),
        ("a100-sxm-80gb", "bf16", 2048, 1024, 4096, 92.684),
        ("h100-sxm-80gb", "bf16", 4096, 8192, 8192, 670.869),
        ("h100-sxm-80gb", "bf16", 8192, 8192, 1024, 192.608),
        ("h100-sxm-80gb", "bf16", 2048, 1024, 4096, 23.939),
        ("h100-sxm-80gb", "fp8", 4096, 8192, 8192, 448.565),
        ("h100-sxm-80gb", "fp8", 16384, 4096, 4096, 561.941),
        ("gb200", "bf16", 4096, 8192, 8192, 336.176),
        ("gb200", "bf16", 8192, 8192, 1024, 86.42),
        ("gb200", "fp8", 4096, 8192, 8192, 243.765),
        ("gb200", "fp8", 16384, 4096, 4096, 269.265),
    ],
)
def test_products_take_what_was_measured(
    name: str, precision: Precision, m: int, n: int, k: int, time_us: float
) -> None:
    predicted = float(gemm_s(device(name), precision, m, n, k))
    assert predicted == pytest.approx(time_us * 1e-6, rel=0.06)


def causal_s(dev: Device, precision: Precision = "bf16", *, head_dim: float = 128) -> float:
    """Return seconds of causal attention over 2 sequences of 4,096 with 8 heads."""
    flop = 2 * 2 * 8 * 4096**2 * head_dim
    return float(
        attention_s(
            dev,
            precision,
            flop,
            seq_len=4096,
            batch=2,
            num_heads=8,
            num_kv_heads=8,
            head_dim=head_dim,
        )
    )


# Same source, context_attention_perf.
@pytest.mark.parametrize(
    ("name", "time_us"),
    [("a100-sxm-80gb", 553.216), ("h100-sxm-80gb", 213.664), ("gb200", 125.493)],
)
def test_attention_takes_what_was_measured(name: str, time_us: float) -> None:
    assert causal_s(device(name)) == pytest.approx(time_us * 1e-6, rel=0.1)


def test_attention_between_two_measured_head_dimensions_lies_between_their_rates() -> None:
    rates = [h / causal_s(H100, head_dim=h) for h in (64.0, 96.0, 128.0)]
    assert rates == sorted(rates)


def test_attention_in_a_long_sequence_runs_nearer_to_the_peak() -> None:
    seq_len = np.array([1024, 4096, 16384, 65536])
    flop = 2.0 * 8 * seq_len**2 * 128
    rate = flop / attention_s(
        H100, "bf16", flop, seq_len=seq_len, batch=1, num_heads=8, num_kv_heads=8, head_dim=128
    )
    assert (np.diff(rate) > 0).all()
    assert rate[-1] < H100.peak_flop_per_s["bf16"]


def test_the_backward_kernel_is_slower_per_flop() -> None:
    forward, backward = (
        attention_s(
            H100,
            "bf16",
            1e12,
            seq_len=4096,
            batch=1,
            num_heads=8,
            num_kv_heads=8,
            head_dim=128,
            backward=b,
        )
        for b in (False, True)
    )
    assert forward / backward == pytest.approx(H100.figures.backward_ratio)


def test_jobs_below_16_bits_keep_attention_in_16() -> None:
    b200 = device("b200-180gb")
    assert {causal_s(b200, precision) for precision in LOW} == {causal_s(b200)}


# Same source, moe_perf: DeepSeek-V3's experts on 8 ranks, 8,192 tokens on trtllm 1.3.0rc10.
@pytest.mark.parametrize(
    ("routing", "time_us"), [("balanced", 1536.933), ("power_law_1.2", 2908.55)]
)
def test_a_layer_of_experts_takes_what_was_measured(routing: str, time_us: float) -> None:
    layers = ExpertLayers(tokens=8192, hidden_size=7168, width=2048, top_k=8, num_experts=256, ep=8)
    predicted = expert_layer_s(H100, "bf16", layers, routing)
    assert float(predicted) == pytest.approx(time_us * 1e-6, rel=0.1)


def test_memory_bound_kernels_approach_the_achieved_bandwidth() -> None:
    figures = H100.figures
    achieved = figures.memory_fraction * H100.memory_bytes_per_s
    assert 1e12 / memory_bound_s(H100, 1e12) == pytest.approx(achieved, rel=1e-4)
    half = figures.fixed_s * achieved
    assert half / memory_bound_s(H100, half) == pytest.approx(achieved / 2)
    assert memory_bound_s(H100, 1e6, num_kernels=3) > memory_bound_s(H100, 1e6)


@pytest.mark.parametrize(("name", "precision"), [("a100-sxm-80gb", "fp8"), ("cpu-core", "bf16")])
def test_a_precision_the_device_lacks_is_refused(name: str, precision: Precision) -> None:
    with pytest.raises(InvalidInputError, match=f"device '{name}' has no {precision} peak"):
        gemm_s(device(name), precision, 1, 1, 1)


@pytest.mark.parametrize("name", BLACKWELL)
def test_precisions_that_were_not_measured_use_as_much_of_their_peak_as_fp8(name: str) -> None:
    dev = device(name)
    fp8, mxfp8, nvfp4 = (float(gemm_s(dev, p, 16384, 16384, 16384)) for p in LOW)
    assert mxfp8 == pytest.approx(fp8, rel=0.02)
    assert nvfp4 < fp8
    used = [
        float(gemm_s(dev, p, 16384, 4096, 768) / gemm_model_s(dev, p, 16384, 4096, 768))
        for p in LOW
    ]
    assert used == pytest.approx([used[0]] * 3)
    flop, peak = 2 * 16384**3, dev.peak_flop_per_s
    assert flop / nvfp4 / peak["nvfp4"] < flop / fp8 / peak["fp8"]  # the cast does not shrink


def test_the_same_chip_under_another_name_has_the_same_kernels() -> None:
    for name, of in (("a800-sxm-80gb", "a100-sxm-80gb"), ("h800-sxm-80gb", "h100-sxm-80gb")):
        assert device(name).basis == "borrowed"
        assert float(gemm_s(device(name), "bf16", 8192, 8192, 8192)) == pytest.approx(
            float(gemm_s(device(of), "bf16", 8192, 8192, 8192))
        )


def test_tables_correct_the_roofline() -> None:
    bare = replace(H100, tables=None)
    measured, modelled = (float(gemm_s(d, "bf16", 8192, 8192, 1024)) for d in (H100, bare))
    assert abs(measured / 192.608e-6 - 1) < abs(modelled / 192.608e-6 - 1)
