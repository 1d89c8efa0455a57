"""Lossy all_reduces: published byte counts, when they lose, and what is said of it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.collectives import choose, legal_methods
from planner.cost.compression import (
    BASIS,
    NEEDS,
    Compared,
    Scheme,
    calls_of_scheme,
    compare,
    default_schemes,
    parse_scheme,
    ranks_group,
    why_not,
)
from planner.cost.traffic import bytes_per_level
from planner.errors import InvalidInputError, PlannerError
from planner.hardware.devices import device
from planner.layout.groups import inner_group, lay_group, outer_group
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric, Level
from tests.unit.conftest import Run
from tests.unit.problems import NVLINK, fabric

H100 = device("h100-sxm-80gb")
ELEMENTS = 4096.0 * 4096
LARGE = np.array([1e9])
ALL_SIZES = np.array([4096.0, 1e6, 1e9])
# One port of 25 Gb/s for the 8 GPUs of a node.
SLOW = Level("ethernet", "ethernet", 1 << 20, 25e9 / 8 / 8, 20e-6, "test")
SCALES = 1 + 4 / 256


def one_level(num_gpus: int) -> Fabric:
    return fabric(num_gpus, levels=(replace(NVLINK, unit_size=num_gpus),))


def slow_network(num_gpus: int) -> Fabric:
    return fabric(num_gpus, levels=(NVLINK, SLOW))


def switched() -> Fabric:
    """Eight GPUs whose switches reduce."""
    return fabric(8, levels=(replace(NVLINK, multicast=True),))


def per_element(scheme: Scheme, num_ranks: int) -> float:
    """Return bytes that a rank receives for each element of an fp32 buffer, by rings."""
    on = one_level(num_ranks)
    group = ranks_group(on, num_ranks)
    calls = calls_of_scheme(scheme, group.degree, np.array([ELEMENTS]), 4)
    sent = 0.0
    for op, size in calls:
        how = Method("direct" if op == "all_to_all" else "ring")
        sent += float(bytes_per_level(op, how, on, group, size)[0][0])
    return sent / ELEMENTS


def found(
    on: Fabric,
    kind: str,
    form: str = "flat",
    sizes: np.ndarray = LARGE,
    precision: str = "fp32",
) -> Compared:
    """Return one scheme on all ranks."""
    listed = compared(on, sizes, precision=precision)
    (one,) = [one for one in listed if (one.scheme.kind, one.form) == (kind, form)]
    return one


def compared(
    on: Fabric, sizes: np.ndarray = LARGE, stride: int = 1, precision: str = "fp32"
) -> tuple[Compared, ...]:
    group = ranks_group(on, on.num_gpus // stride, stride)
    return compare(on, H100, group, sizes, precision=precision)


# --------------------------------------------------------- bytes, against published counts


@pytest.mark.parametrize("w", [2, 3, 8, 64, 256])
def test_bytes_per_element_are_those_of_the_papers(w: int) -> None:
    """Rings move 2 S (W-1)/W (Thakur et al. 2005); qgZ an all_to_all and a gather (ZeRO++)."""
    around = (w - 1) / w
    assert per_element(Scheme("exact"), w) == pytest.approx(8 * around)
    assert per_element(Scheme("bf16"), w) == pytest.approx(4 * around)
    for kind in ("fp8", "int8"):
        assert per_element(parse_scheme(kind), w) == pytest.approx(2 * around * SCALES)
    assert per_element(Scheme("int8_gather"), w) == pytest.approx((w - 1) * SCALES)
    assert per_element(Scheme("top_k", density=0.25), w) == pytest.approx(6 * 0.25 * (w - 1))


@pytest.mark.parametrize("w", [2, 3, 5, 8, 64, 256])
def test_int8_is_half_of_bf16_at_any_number_of_ranks_and_its_gather_only_below_four(
    w: int,
) -> None:
    halved = per_element(Scheme("bf16"), w)
    assert per_element(Scheme("int8"), w) / SCALES == pytest.approx(halved / 2)
    assert (per_element(Scheme("int8_gather"), w) > halved) == (w > 4)


@pytest.mark.parametrize(("w", "percent"), [(8, 8.3), (64, 1.0), (256, 0.26)])
def test_top_k_sends_less_than_bf16_only_below_four_over_six_w(w: int, percent: float) -> None:
    density = 4 / (6 * w)
    assert 100 * density == pytest.approx(percent, rel=0.05)
    for factor in (0.99, 1.01):
        own = per_element(Scheme("top_k", density=factor * density), w)
        assert (own < per_element(Scheme("bf16"), w)) == (factor < 1)


@pytest.mark.parametrize("rank", [1, 4])
def test_power_sgd_reduces_r_rows_and_r_columns_of_a_matrix(rank: int) -> None:
    """r (m + n) elements (arXiv 1905.13727)."""
    calls = calls_of_scheme(Scheme("power_sgd", rank=rank), np.array([8]), np.array([ELEMENTS]), 4)
    assert [op for op, _ in calls] == ["all_reduce", "all_reduce"]
    assert sum(float(size[0]) for _, size in calls) == 4 * rank * (4096 + 4096)


def test_the_hierarchical_form_sends_all_bytes_inside_and_the_scheme_s_of_a_shard_across() -> None:
    inside, across = found(slow_network(64), "int8", "hierarchical").sent_bytes
    assert inside == pytest.approx(2 * 1e9 * 7 / 8)
    assert across == pytest.approx(2 * (1e9 / 4 / 8) * SCALES * 7 / 8, rel=1e-6)


# ---------------------------------------------------------------------------- seconds, laws


def test_the_exact_one_comes_first_without_kernels_and_gains_nothing() -> None:
    exact, *lossy = compared(slow_network(16), ALL_SIZES)
    assert exact.scheme.kind == "exact"
    assert (exact.kernel_s == 0).all()
    assert (exact.gain == 1).all()
    for one in lossy:
        assert (one.kernel_s > 0).all()
        assert one.gain == pytest.approx(exact.seconds / one.seconds)


def test_sizes_together_are_sizes_one_by_one() -> None:
    on = slow_network(16)
    together = compared(on, ALL_SIZES)
    for at, size in enumerate(ALL_SIZES):
        for one, alone in zip(together, compared(on, np.array([size])), strict=True):
            assert one.seconds[at] == pytest.approx(alone.seconds[0])
            assert [sent[at] for sent in one.sent_bytes] == pytest.approx(
                [sent[0] for sent in alone.sent_bytes]
            )


def test_only_kernels_know_the_device_s_memory() -> None:
    on = slow_network(16)
    group = ranks_group(on, 16)
    plain = replace(H100, figures=replace(H100.figures, fixed_s=0.0))
    faster = replace(plain, memory_bytes_per_s=2 * plain.memory_bytes_per_s)
    pairs = zip(compare(on, plain, group, LARGE), compare(on, faster, group, LARGE), strict=True)
    for one, other in pairs:
        assert other.kernel_s == pytest.approx(one.kernel_s / 2)
        assert one.seconds - other.seconds == pytest.approx(one.kernel_s / 2)


def test_a_slow_gpu_has_slow_kernels() -> None:
    weak = replace(switched(), slowest_share=0.5)
    healthy = found(switched(), "int8").kernel_s
    assert found(weak, "int8").kernel_s == pytest.approx(2 * healthy)


@pytest.mark.parametrize(
    ("kind", "bytes_per_element", "num_kernels"),
    [
        ("bf16", 2 * (4 + 2), 2),
        ("int8", 4 + SCALES + SCALES * (1 + 1 / 8) + SCALES + 4, 3),
        ("int8_gather", 4 + SCALES + 8 * SCALES + 4, 2),
        ("top_k", (3 + 4 + 1) * 4 + 0.01 * (6 + 4 + 8 * (6 + 2 * 4)), 8),
        ("power_sgd", 11 * 4, 6 + 4),
    ],
)
def test_kernels_read_and_write_what_each_step_needs(
    kind: str, bytes_per_element: float, num_kernels: int
) -> None:
    rate = H100.figures.memory_fraction * H100.memory_bytes_per_s
    expected = num_kernels * H100.figures.fixed_s + bytes_per_element * LARGE / 4 / rate
    assert found(switched(), kind).kernel_s == pytest.approx(expected, rel=1e-6)


def test_seconds_are_kernels_and_each_collective_s_cheapest_method() -> None:
    on = slow_network(64)
    group = ranks_group(on, 64)
    inner, outer = inner_group(group), outer_group(group)
    shard = calls_of_scheme(Scheme("int8"), outer.degree, LARGE / 4 / 8, 4)
    inside: list[tuple[Collective, np.ndarray]] = [("reduce_scatter", LARGE), ("all_gather", LARGE)]
    calls = [(inner, *call) for call in inside] + [(outer, *call) for call in shard]
    sending_s = sum(
        choose(op, on, who, size, legal_methods(on, "executor", op)).seconds
        for who, op, size in calls
    )
    one = found(on, "int8", "hierarchical")
    assert one.num_calls == len(calls)
    assert one.seconds == pytest.approx(one.kernel_s + sending_s)


def test_bytes_are_those_of_the_method_that_is_cheapest() -> None:
    """Switches that reduce are sent S once, where a ring sends 2 S (n-1)/n."""
    assert found(switched(), "bf16").sent_bytes[0] == pytest.approx(LARGE / 2)
    assert found(one_level(8), "bf16").sent_bytes[0] == pytest.approx(LARGE * 7 / 8)


# ------------------------------------------------------------------------- when it loses


def test_the_faster_the_link_the_less_it_gains() -> None:
    links = [replace(NVLINK, bytes_per_s=rate) for rate in (5e9, 50e9, 450e9, 4500e9)]
    gains = [found(fabric(8, levels=(link,)), "int8").gain[0] for link in links]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 3 > 1 > gains[-1]


@pytest.mark.parametrize("scheme", default_schemes("bf16"), ids=str)
def test_on_nvlink_whose_switches_reduce_a_bf16_buffer_never_gains(scheme: Scheme) -> None:
    assert (found(switched(), scheme.kind, sizes=ALL_SIZES, precision="bf16").gain < 1).all()


@pytest.mark.parametrize("on", [switched(), slow_network(64)], ids=["nvlink", "slow"])
@pytest.mark.parametrize("kind", ["bf16", "power_sgd"])
def test_small_buckets_lose_where_a_scheme_has_as_many_rounds(on: Fabric, kind: str) -> None:
    assert found(on, kind, sizes=np.array([4096.0])).gain < 1


def test_on_a_slow_network_the_hierarchical_form_wins_and_the_flat_one_does_not() -> None:
    on = slow_network(64)
    flat, hierarchical = found(on, "int8"), found(on, "int8", "hierarchical")
    assert hierarchical.gain > 3
    assert hierarchical.gain > 2 * flat.gain
    assert "units do not add up" in why_not(compared(on), flat)


def test_top_k_across_loses_beyond_its_break_even_even_on_a_slow_network() -> None:
    """1 % of fp32 sends more than exact from 8/(6 W) on: W = 133 nodes."""
    gains = {w: found(slow_network(8 * w), "top_k", "hierarchical") for w in (8, 256)}
    assert gains[8].gain > 1 > gains[256].gain
    said = why_not(compared(slow_network(8 * 256)), gains[256])
    assert f"less only below a density of {8 / 6 / 256:.2g}" in said


def test_there_is_no_hierarchical_form_without_equal_units() -> None:
    forms = {one.form for one in compared(switched())}
    assert forms == {"flat"}
    assert {one.form for one in compared(fabric(64), stride=8)} == {"flat"}
    on = slow_network(48)
    group = lay_group(on, np.array([16, 12]), np.array([1, 1]))
    listed = compare(on, H100, group, np.array([1e9, 1e9]), [Scheme("int8")])
    hierarchical = listed[-1]
    assert hierarchical.form == "hierarchical"
    assert np.isfinite(hierarchical.seconds).tolist() == [True, False]
    assert hierarchical.gain[1] == 0
    assert "no equal units" in why_not(listed, hierarchical, row=1)


# --------------------------------------------------------------------- what is said of it


def test_reasons_are_the_terms_that_cost_most() -> None:
    nvlink = compared(switched(), precision="bf16")
    reasons = {one.scheme.kind: why_not(nvlink, one) for one in nvlink}
    assert reasons["exact"] == ""
    assert "its kernels take" in reasons["power_sgd"]
    uneven = ranks_group(slow_network(16), 12)  # 8 and 4: the shared unit's sums are never made
    apart = compare(slow_network(16), H100, uneven, LARGE, [Scheme("int8_gather")])
    assert [one.form for one in apart] == ["flat", "flat"]
    assert "units do not add up" in why_not(apart, apart[1])
    assert "grows with the ranks" in reasons["int8_gather"]
    small = compared(switched(), np.array([4096.0]))
    assert "its 2 calls take" in why_not(small, found(switched(), "int8", sizes=ALL_SIZES[:1]))


def test_a_scheme_that_wins_has_no_reason_but_a_faster_bf16() -> None:
    on = slow_network(64)
    listed = compared(on, np.array([1e8]))
    for one in listed[1:]:
        reason = why_not(listed, one)
        halved = min(other.seconds for other in listed if other.scheme.kind == "bf16")
        if one.gain < 1:
            assert reason
        elif one.scheme.kind != "bf16" and one.seconds > halved:
            assert "but bf16 takes" in reason
        else:
            assert reason == ""
    said = [why_not(listed, one) for one in listed]
    assert "" in said
    assert any(said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("top_k=0", "top_k=0: need"),
        ("top_k=1.5", "above 0 and at most 1"),
        ("top_k=nan", "top_k=nan"),
        ("top_k=some", "'some' is not a number"),
        ("power_sgd=0", "rank from 1 to 4096"),
        ("power_sgd=4097", "rank from 1 to 4096"),
        ("power_sgd=" + "9" * 400, "at most 18"),
        ("power_sgd=1.5", "'1.5' is not a whole number"),
        ("power_sgd=1_0", "'1_0' is not a whole number"),
        ("top_k=0.0_1", "'0.0_1' is not a number"),
        ("int8=4", "int8 takes no figure"),
        ("int9", "nearest: int8"),
        ("exact", "no scheme is called 'exact'"),
    ],
)
def test_a_wrong_scheme_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_scheme(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": np.array([1e6, 0.5])}, "size=0.5"),
        ({"sizes": np.array([np.nan])}, "size=nan"),
        ({"sizes": np.array([1e6, 1e16])}, "size=1e+16"),
        ({"precision": "int3"}, "precision 'int3'"),
        ({"stride": 64}, "ranks=1, stride=64"),
    ],
)
def test_a_wrong_question_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlannerError) as caught:
        compared(fabric(64), **changes)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_buffer_of_bf16_has_no_bf16_scheme() -> None:
    assert "bf16" not in [scheme.kind for scheme in default_schemes("bf16")]
    group = ranks_group(switched(), 8)
    with pytest.raises(InvalidInputError, match="bf16 already"):
        compare(switched(), H100, group, LARGE, [Scheme("bf16")], precision="bf16")


def test_names_are_read_as_they_are_written_and_each_says_what_it_needs() -> None:
    for scheme in (*default_schemes(), Scheme("top_k", density=0.5), Scheme("power_sgd", rank=32)):
        assert parse_scheme(str(scheme)) == scheme
        assert NEEDS[scheme.kind]


def test_the_command_shows_what_compare_finds_and_that_nobody_measured_it(run: Run) -> None:
    asked = ["compress", "dgx-h100", "--size", "100000000", "--ranks", "16", "--scheme", "int8"]
    code, out, _ = run(*asked, "--json")
    document = json.loads(out)
    assert (code, document["basis"]) == (0, BASIS)
    rows = document["schemes"]
    assert [(row["scheme"], row["form"]) for row in rows] == [
        ("exact", "flat"),
        ("int8", "flat"),
        ("int8", "hierarchical"),
    ]
    assert rows[2]["gain"] == pytest.approx(rows[0]["seconds"] / rows[2]["seconds"])
    assert list(rows[0]["sent_bytes"]) == ["nvlink", "rail"]
    _, out, _ = run(*asked)
    assert BASIS in out
    assert run(*(word.replace("100000000", "100MB") for word in asked))[1] == out
    assert "no plan holds one" in out
    assert "zero_quantized_gradients" in out
    code, _, err = run(*asked[:-1], "top_k=2")
    assert code == 2
    assert "top_k=2" in err
