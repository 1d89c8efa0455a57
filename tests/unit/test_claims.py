"""The page of claims is what the code says today; what can be reckoned by hand is."""

import pytest

from benchmarks.claims.claim import Claim, fabric_of, laid, ranks, row
from benchmarks.claims.collectives import node_exit_bytes, saved_share
from benchmarks.claims.experts import layer_bytes
from benchmarks.claims.page import PAGE, every_claim, page
from benchmarks.claims.sharding import num_gathers, zero_savings
from benchmarks.claims.steps import bubble_share, speed_up
from planner.cost.compression import Scheme, compare
from planner.hardware.devices import device
from planner.plan import Method


@pytest.fixture(scope="module")
def groups() -> dict[str, list[Claim]]:
    return every_claim()


@pytest.fixture(scope="module")
def claims(groups: dict[str, list[Claim]]) -> dict[int, Claim]:
    return {claim.number: claim for group in groups.values() for claim in group}


def test_the_page_is_what_the_code_says(groups: dict[str, list[Claim]]) -> None:
    assert PAGE.read_text("utf-8") == page(groups), "python -m benchmarks.claims --write"


def test_every_claim_is_there_once(groups: dict[str, list[Claim]]) -> None:
    numbers = [claim.number for group in groups.values() for claim in group]
    assert sorted(numbers) == list(range(1, 19))


@pytest.mark.parametrize("number", [2, 5, 6, 7, 12, 14])
def test_what_arithmetic_refutes_is_wrong(claims: dict[int, Claim], number: int) -> None:
    assert claims[number].verdict == "wrong"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, "4x over this step"),
        (1, "1.33x with all"),
        (1, "2x one"),
        (2, "4.8x; 6x needs 80 % less"),
        (5, "698 GB is the buffer"),
        (5, "a rank would send 1.22 TB"),
        (7, "tp8 pp8 dp8 has 512 ranks; tp8 pp8 has 64"),
        (12, "9.87 M each"),
        (12, "200 all_gathers of layers in every micro-batch"),
    ],
)
def test_figures_that_are_sure(claims: dict[int, Claim], number: int, said: str) -> None:
    assert said in claims[number].figure


def test_a_speed_up_of_three_on_eight_becomes_less_than_five() -> None:
    """compute 3, communication 5: 8 * 3 / (3 + 2)."""
    assert speed_up(8, 3, 5) == pytest.approx(3)
    assert speed_up(8, 3, 5 * 0.4) == pytest.approx(4.8)
    assert speed_up(8, 3, 5 * 0.2) == pytest.approx(6)


def test_gpipe_and_1f1b_have_one_bubble() -> None:
    assert bubble_share("gpipe", 8, 16) == pytest.approx(7 / 23)
    assert bubble_share("1f1b", 8, 16) == pytest.approx(7 / 23)
    assert bubble_share("interleaved_1f1b", 8, 16, 4) == pytest.approx(7 / 4 / (16 + 7 / 4))


def test_a_hierarchy_sends_an_eighth_of_direct_and_most_of_a_ring() -> None:
    """4 nodes of 8, two passes: all of S out of a node, out of its ring, from each of its GPUs."""
    fabric = fabric_of("dgx-a100", 4)
    group = ranks(fabric, 32)
    found = [
        node_exit_bytes("all_reduce", Method(way), fabric, group, 1e9)
        for way in ("hierarchical", "ring", "direct")
    ]
    assert found == pytest.approx([2e9 * 3 / 4, 2e9 * 31 / 32, 8 * 2e9 * 24 / 32])


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_int8_is_a_byte_and_a_scale_for_256_of_them(precision: str, width: int) -> None:
    fabric, gpu = fabric_of("dgx-a100", 4), device("a100-sxm-80gb")
    exact, lossy = compare(
        fabric, gpu, ranks(fabric, 4, 8), row(1e9), [Scheme("int8")], precision=precision
    )[:2]
    assert saved_share(exact, lossy) == pytest.approx(1 - (1 + 4 / 256) / width, rel=1e-6)
    assert saved_share(exact, lossy, 1) == pytest.approx(saved_share(exact, lossy))


def test_zero_shares_out_bytes_of_a_parameter() -> None:
    """Weights 2, gradients 2 or 4, moments and copy 12."""
    same = [16 / (4 + 12 / 64), 16 / (2 + 14 / 64), 64]
    fp32 = [18 / (6 + 12 / 64), 18 / (2 + 16 / 64), 64]
    assert zero_savings("same") == pytest.approx(same)
    assert zero_savings("fp32") == pytest.approx(fp32)
    assert all(
        of_all < of_states
        for of_all, of_states in zip(zero_savings("same", whole=True), same, strict=True)
    )


def test_zero_3_gathers_twice_in_every_micro_batch_and_zero_2_once_a_step() -> None:
    assert num_gathers(3)[:2] == (200, 2)  # tied ends on one rank are one unit
    assert num_gathers(3, num_micro_batches=3)[:2] == (600, 6)
    assert num_gathers(2, num_micro_batches=3)[:2] == (100, 1)


def test_exchanges_go_with_top_k() -> None:
    """4 exchanges of k rows; 4 gathers, 4 scatters and 2 regathers of one, all (n-1)/n of h."""
    training = {"global_batch_size": 8, "seq_len": 4096}
    sent = layer_bytes(
        *laid("qwen3-30b-a3b", "dgx-h100", 1, {"ep": 8, "dp": 8}, **training), "moe", "ep"
    )
    dense = layer_bytes(
        *laid("llama3-8b", "dgx-h100", 1, {"tp": 8, "dp": 1}, **training), "dense", "tp"
    )
    per_width = (sent / 2048) / (dense / 4096)
    assert per_width == pytest.approx(4 * 8 / 10, rel=1e-4)


def test_a_gather_and_an_uneven_exchange_are_one_incast(claims: dict[int, Claim]) -> None:
    by_gather, uneven = claims[14].figure.split(": ")[1].split(" by an uneven")[0].split(", ")
    assert by_gather.removesuffix(" by a gather") == uneven
