"""The slowest of n: published order statistics, draws, and what of it is in a step."""

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.step import price
from planner.cost.step_constants import PLAIN
from planner.cost.stragglers import expected_maximum
from tests.unit.problems import fabric, problem, row

# Expected largest of n standard normal draws, sigma: Tippett, On the extreme individuals and the
# range of samples, Biometrika 17 (1925); Harter, Expected values of normal order statistics (1961).
PUBLISHED = {
    1: 0.0,
    2: 0.56419,
    3: 0.84628,
    4: 1.02938,
    5: 1.16296,
    10: 1.53875,
    20: 1.86748,
    50: 2.24907,
    100: 2.50759,
    200: 2.74604,
    500: 3.03670,
    1000: 3.24144,
}


def maximum(num_draws: int) -> float:
    return float(expected_maximum(np.array([num_draws]))[0])


@pytest.mark.parametrize(("num_draws", "published"), PUBLISHED.items())
def test_the_largest_draw_is_what_was_published(num_draws: int, published: float) -> None:
    assert maximum(num_draws) == pytest.approx(published, abs=1e-4)


def test_two_and_three_draws_have_a_closed_form() -> None:
    assert maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-5)
    assert maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-5)


@pytest.mark.parametrize("num_draws", [8, 64, 1024])
def test_the_largest_draw_is_what_a_simulation_finds(num_draws: int) -> None:
    """Within four standard errors of 4,000 trials."""
    draws = np.random.default_rng(1).standard_normal((4000, num_draws)).max(axis=1)
    error = draws.std() / math.sqrt(len(draws))
    assert maximum(num_draws) == pytest.approx(float(draws.mean()), abs=4 * error)


def test_more_draws_have_a_larger_maximum_under_its_bound() -> None:
    """sqrt(2 ln n), of any normal draws, independent or not."""
    numbers = np.array([2**n for n in range(24)])
    found = expected_maximum(numbers)
    assert np.all(np.diff(found) > 0)
    assert np.all(found <= np.sqrt(2 * np.log(numbers)) + 1e-9)


def test_rows_are_answered_in_their_order() -> None:
    assert expected_maximum(np.array([8, 1, 8])).tolist() == [maximum(8), 0.0, maximum(8)]


# -------------------------------------------------------------------------------- in a step


def test_without_jitter_nobody_is_waited_for() -> None:
    base = problem("llama3-8b", constants=PLAIN)
    one = row(tp=8, dp_shard=8, zero_stage=1, num_micro_batches=8, sequence_parallel=True)
    plain, uneven = (
        price(replace(base, constants=replace(PLAIN, jitter=jitter)), one) for jitter in (0, 0.02)
    )
    assert plain.straggler_s[0] == 0
    waited = 0.02 * maximum(64) * plain.compute_s[0]
    assert uneven.straggler_s[0] == pytest.approx(waited)
    assert uneven.step_time_s()[0] == pytest.approx(plain.step_time_s()[0] + waited)


@pytest.mark.parametrize(
    "degrees",
    [{"tp": 4}, {"cp": 4}, {"dp_replicate": 4}, {"dp_shard": 4}, {"pp": 4, "schedule": "1f1b"}],
    ids=str,
)
def test_every_rank_of_the_job_is_a_draw(degrees: dict[str, int]) -> None:
    base = problem("llama3-8b", pipelines=((degrees.get("pp", 1), 1),))
    base = replace(base, constants=replace(PLAIN, jitter=0.02))
    found = price(base, row(num_micro_batches=4, **degrees))
    assert found.straggler_s[0] == pytest.approx(0.02 * maximum(4) * found.compute_s[0])


def test_one_gpu_waits_for_nobody() -> None:
    base = problem("llama3-8b", constants=replace(PLAIN, jitter=0.5))
    assert price(base, row()).straggler_s[0] == 0


def test_a_job_of_64_to_16384_gpus_waits_longer_the_larger_it_is() -> None:
    """As many tokens for each: compute stays, the slowest gets slower, at a falling pace."""
    base = problem("llama3-8b", on=fabric(16_384))
    base = replace(base, constants=replace(PLAIN, jitter=0.02))
    sizes = [64 * 2**n for n in range(9)]
    found = [
        price(base, row(tp=8, dp_shard=size // 8, zero_stage=1, sequence_parallel=True))
        for size in sizes
    ]
    waited = np.array([float(one.straggler_s[0] / one.compute_s[0]) for one in found])
    assert sizes[-1] == 16_384
    assert len({round(float(one.compute_s[0]), 12) for one in found}) == 1
    assert np.all(np.diff(waited) > 0)
    assert np.all(np.diff(waited, 2) < 0)
    assert waited[-1] < 2 * waited[0]
    assert np.all(np.diff([float(one.step_time_s()[0]) for one in found]) > 0)
