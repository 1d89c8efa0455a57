"""Layers on stages against an enumeration of every cut."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.blocks import BLOCK_KINDS, BlockKind, layer_kinds, num_blocks
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
    costs: dict[BlockKind, float] = dict.fromkeys(BLOCK_KINDS, 1.0) | {"moe": 3.0, "head": 2.0}
    table = split_table(layer_kinds(model), [shape], costs, model.num_mtp_modules)
    for split in range(len(table.layers)):
        assert sum(table.layers[split]) == model.num_layers
        assert table.multiplicity[split].sum() == shape[0]
        blocks = (table.counts[split] * table.multiplicity[split][:, None]).sum(axis=0)
        assert dict(zip(BLOCK_KINDS, blocks, strict=True)) == {
            kind: num_blocks(model).get(kind, 0) for kind in BLOCK_KINDS
        }
        last = int(np.argmax(table.first_rank[split] * (table.multiplicity[split] > 0)))
        for kind in ("mtp", "head"):
            at = BLOCK_KINDS.index(kind)
            assert table.counts[split][last][at] == num_blocks(model).get(kind, 0)
        used = table.multiplicity[split] > 0
        assert len(set(table.first_rank[split][used])) == used.sum()
        assert table.counts[split][0][BLOCK_KINDS.index("embedding")] == 1


def test_multi_token_prediction_beside_the_head_moves_layers_away_from_it() -> None:
    costs: dict[BlockKind, float] = dict.fromkeys(BLOCK_KINDS, 1.0) | {"embedding": 0.0}
    layers = {
        modules: split_table(["dense"] * 12, [(4, 1)], costs, modules).layers for modules in (0, 2)
    }
    assert layers[0] == ((3, 3, 3, 3),)  # 3 layers and the head cost no more than 4 layers
    assert layers[2] == ((3, 3, 3, 3), (3, 4, 4, 1))
