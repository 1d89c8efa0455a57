"""Layers on stages against an enumeration of every cut."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.blocks import BLOCK_KINDS, layer_kinds
from planner.model.bundled import load_model
from planner.pipeline.partition import balanced_layers, split_table


def slowest(costs: list[float], sizes: tuple[int, ...], first: float, last: float) -> float:
    ends = np.cumsum(sizes)
    stages = [sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(
    costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    first=st.floats(0, 10),
    last=st.floats(0, 10),
)
def test_no_cut_is_better(costs: list[float], stages: int, first: float, last: float) -> None:
    stages = min(stages, len(costs))
    sizes = balanced_layers(costs, stages, first_extra=first, last_extra=last)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    best = min(
        slowest(costs, tuple(np.diff([0, *cut, len(costs)])), first, last)
        for cut in combinations(range(1, len(costs)), stages - 1)
    )
    assert slowest(costs, sizes, first, last) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 2), (7, 1), (16, 1)])
def test_profiles_hold_every_block_once(name: str, shape: tuple[int, int]) -> None:
    model = load_model(name)
    costs = {"embedding": 0.0, "dense": 1.0, "moe": 3.0, "head": 2.0}
    table = split_table(layer_kinds(model), [shape], costs)  # type: ignore[arg-type]
    for split in range(len(table.layers)):
        assert sum(table.layers[split]) == model.num_layers
        assert table.multiplicity[split].sum() == shape[0]
        blocks = (table.counts[split] * table.multiplicity[split][:, None]).sum(axis=0)
        expected = [1.0, *(layer_kinds(model).count(k) for k in ("dense", "moe")), 1.0]
        assert blocks.tolist() == expected
        used = table.multiplicity[split] > 0
        assert len(set(table.first_rank[split][used])) == used.sum()
        assert table.counts[split][0][BLOCK_KINDS.index("embedding")] == 1
