"""The fewest recomputed layers that fit, against trying every number of them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from planner.cost.memory import memory
from planner.cost.problem import Problem
from planner.layout.candidates import Candidates, concatenate
from planner.model.blocks import BLOCK_KINDS
from planner.model.bundled import load_model
from planner.search.layers import fewest_recomputed
from tests.unit.problems import problem, row


def with_capacity(base: Problem, capacity_bytes: float) -> Problem:
    return replace(base, device=replace(base.device, capacity_bytes=capacity_bytes))


def peak(base: Problem, one: Candidates) -> float:
    return float(memory(base, one).total_bytes().max())


def predicting(name: str, **fields: Any) -> Any:
    return load_model(name).model_copy(update={"num_mtp_modules": 1, **fields})


ONE: dict[str, Any] = {"dp_shard": 8, "zero_stage": 1, "num_micro_batches": 8}
PP4 = {**ONE, "pp": 4, "schedule": "1f1b"}
CHUNKS = {**PP4, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
# With many layers recomputed the optimizer's step holds more than the backward.
STEP_IS_PEAK = {
    "seq_len": 4096, "fused_loss": "linear", "main_grads": "same", "foreach_optimizer": True,
}  # fmt: skip
OFFLOADED: dict[str, Any] = {"offload": ("activations",)}


@pytest.mark.parametrize(
    ("model", "pipeline", "degrees", "training"),
    [
        ("llama3-8b", (1, 1), ONE, {}),
        ("llama3-8b", (4, 1), PP4, {}),
        ("llama3-8b", (4, 2), CHUNKS, {}),
        ("llama3-8b", (3, 1), {**PP4, "pp": 3}, {}),  # 11, 11 and 10 layers
        ("llama3-8b", (1, 1), ONE, {**OFFLOADED, "offload_layers": 16}),
        ("llama3-8b", (4, 1), PP4, {**OFFLOADED, "offload_layers": 3}),
        ("llama3-8b", (1, 1), ONE, STEP_IS_PEAK),
        (predicting("qwen3-30b-a3b"), (4, 1), {**PP4, "ep": 8}, {}),
        (predicting("qwen3-30b-a3b"), (4, 2), {**CHUNKS, "ep": 8}, {}),
        (predicting("llama3-8b"), (1, 1), ONE, {**OFFLOADED, "offload_layers": 9}),
    ],
)
def test_the_fewest_are_those_that_trying_every_number_finds(
    model: Any, pipeline: tuple[int, int], degrees: dict[str, Any], training: dict[str, Any]
) -> None:
    base = problem(model, pipelines=(pipeline,), **training)
    ends = [BLOCK_KINDS.index("embedding"), BLOCK_KINDS.index("head")]
    layers = int(np.delete(base.splits.counts[0], ends, axis=1).sum(axis=1).max())
    numbers = range(1, -(-layers // pipeline[1]))  # less than all of the longest stage
    peaks = [peak(base, row(**degrees, recompute="full", recompute_layers=n)) for n in numbers]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]
    every = peak(base, row(**degrees, recompute="full"))
    levels = [2 * peaks[0], *sorted({*peaks, every}, reverse=True), every / 2]
    for high, low in pairwise(levels):
        at = with_capacity(base, (low + high) / 2)
        fitting = [n for n, p in zip(numbers, peaks, strict=True) if p <= at.capacity_bytes]
        found = fewest_recomputed(at, row(**degrees)).recompute_layers.tolist()
        assert found == fitting[:1]


def test_rows_are_answered_as_each_alone() -> None:
    base = problem("llama3-8b", pipelines=((1, 1), (4, 1), (4, 2)))
    rows = [row(**ONE), row(**PP4, split=1), row(**CHUNKS, split=2), row(dp_shard=8)]
    together = fewest_recomputed(base, concatenate(rows))
    alone = [fewest_recomputed(base, one) for one in rows]
    assert together.recompute_layers.tolist() == concatenate(alone).recompute_layers.tolist()
    assert 0 < len(together) < len(rows)
    assert len(fewest_recomputed(base, rows[0].take(slice(0, 0)))) == 0


def test_one_layer_is_the_least_that_is_recomputed_where_all_could_be_kept() -> None:
    """0 in its column would be all of them."""
    base = with_capacity(problem("llama3-8b"), 1e15)
    assert fewest_recomputed(base, row(**ONE)).recompute_layers.tolist() == [1]


def test_offloaded_activations_leave_nothing_to_recompute_for() -> None:
    """All of them rest on the host: what one layer does not make fit, no other number does."""
    base = problem("llama3-8b", **OFFLOADED)
    one, every = (peak(base, row(**ONE, recompute="full", recompute_layers=n)) for n in (1, 0))
    assert one == every
    found = [fewest_recomputed(with_capacity(base, c), row(**ONE)) for c in (0.9 * one, 1.1 * one)]
    assert [len(some) for some in found] == [0, 1]


def test_which_of_several_kinds_of_layer_is_recomputed_is_not_decided() -> None:
    base = with_capacity(problem("deepseek-v3"), 1e15)
    assert len(fewest_recomputed(base, row(**ONE, ep=8))) == 0
