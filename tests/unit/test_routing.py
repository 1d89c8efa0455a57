"""Capacities against published rows, against the frameworks' own floats, and as laws."""

from fractions import Fraction
from math import ceil
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.plan import ExpertCapacity
from planner.routing import CapacityConvention, expert_capacity

CONVENTIONS: tuple[CapacityConvention, ...] = get_args(CapacityConvention)

# What a user can write: decimals with a few digits.
factors = st.integers(1, 400).map(lambda hundredths: hundredths / 100)
shapes = st.tuples(st.integers(0, 8192), st.integers(1, 256)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(1, min(8, shape[1])))
)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "expected"),
    [
        # deepspeed, megatron, tutel, floor. Computed with the frameworks' own expressions; floor by
        # hand.
        (4096, 60, 4, 1.25, (342, 342, 344, 341)),
        (3, 8, 2, 1.0, (1, 1, 2, 0)),
        (1000, 10, 2, 1.1, (220, 221, 220, 220)),
        (0, 8, 2, 1.5, (0, 0, 0, 0)),
    ],
)
def test_published_rows(
    tokens: int, experts: int, top_k: int, factor: float, expected: tuple[int, ...]
) -> None:
    found = tuple(expert_capacity(tokens, experts, top_k, factor, c) for c in CONVENTIONS)
    assert found == expected


@given(shapes, factors)
def test_each_convention_is_its_frameworks_own_expression(
    shape: tuple[int, int, int], factor: float
) -> None:
    tokens, experts, top_k = shape
    # DeepSpeed multiplies a Python number with a tensor that holds factor * top_k in fp32.
    product = tokens / experts * torch.tensor(factor * top_k)
    assert product.dtype == torch.float32
    expected = {
        "deepspeed": int(torch.ceil(product)),
        "megatron": ceil(tokens * top_k / experts * factor),
        "tutel": top_k * int(factor * ((tokens + experts - 1) // experts)),
        "floor": int(Fraction(tokens * top_k, experts) * Fraction(str(factor))),
    }
    found = {c: expert_capacity(tokens, experts, top_k, factor, c) for c in CONVENTIONS}
    assert found == expected


def test_conventions_are_those_of_the_contract() -> None:
    in_plan = get_args(ExpertCapacity.model_fields["convention"].annotation)
    assert in_plan == CONVENTIONS


@given(shapes, factors, factors, st.sampled_from(CONVENTIONS))
def test_more_factor_never_keeps_less(
    shape: tuple[int, int, int], one: float, other: float, convention: CapacityConvention
) -> None:
    low, high = sorted((one, other))
    assert expert_capacity(*shape, low, convention) <= expert_capacity(*shape, high, convention)


@given(
    shapes, factors, st.sampled_from(CONVENTIONS), st.integers(0, 10_000), st.integers(1, 1 << 10)
)
def test_minimum_comes_before_alignment(
    shape: tuple[int, int, int],
    factor: float,
    convention: CapacityConvention,
    min_capacity: int,
    alignment: int,
) -> None:
    plain = expert_capacity(*shape, factor, convention)
    rows = expert_capacity(*shape, factor, convention, min_capacity, alignment)
    needed = max(plain, min_capacity)
    assert rows % alignment == 0
    assert needed <= rows < needed + alignment


@given(shapes, st.integers(1, 8))
def test_balanced_routing_loses_nothing_unless_floored(
    shape: tuple[int, int, int], factor: int
) -> None:
    tokens, experts, top_k = shape
    for convention in ("deepspeed", "megatron", "tutel"):
        assert expert_capacity(*shape, factor, convention) * experts >= tokens * top_k
    assert expert_capacity(*shape, 1, "floor") * experts <= tokens * top_k


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1, 8, 2, 1.0, "floor"), "num_tokens=-1"),
        ((10, 8, 9, 1.0, "floor"), "top_k=9"),
        ((10, 8, 2, 0.0, "floor"), "factor=0.0"),
        ((10, 8, 2, float("inf"), "floor"), "factor=inf"),
        ((10, 8, 2, 1.0, "floor", -1), "min_capacity=-1"),
        ((10, 8, 2, 1.0, "floor", 0, 0), "alignment=0"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        expert_capacity(*arguments)
