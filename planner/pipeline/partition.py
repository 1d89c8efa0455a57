"""Which layers sit on which pipeline stage, as rows of one integer table.

A *split* cuts the layer sequence into ``pp * virtual_stages`` consecutive stages; stage ``s`` runs
on pipeline rank ``s mod pp`` as its chunk ``s // pp``. Ranks with equal content are one *profile*,
of which the earliest decides memory because it has most micro-batches in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from planner.model.blocks import BLOCK_KINDS, BlockKind

__all__ = ["SplitTable", "balanced_layers", "split_table", "splits_of"]


# Halvings of the interval that the cheapest limit lies in: to the last bit of a double.
_BISECTIONS: Final = 60


@dataclass(frozen=True, slots=True)
class SplitTable:
    """Splits as arrays. A profile that a split does not use has ``multiplicity`` 0.

    Attributes:
        pp: Pipeline ranks, shape [splits].
        virtual_stages: Chunks per rank, shape [splits].
        layers: Layers per stage in model order, one tuple per split.
        counts: Blocks of each kind on a rank, shape [splits, profiles, kinds]; kinds in the
            order of ``BLOCK_KINDS``.
        multiplicity: Ranks with that content, shape [splits, profiles].
        first_rank: Earliest such rank, shape [splits, profiles].
    """

    pp: npt.NDArray[np.int64]
    virtual_stages: npt.NDArray[np.int64]
    layers: tuple[tuple[int, ...], ...]
    counts: npt.NDArray[np.float64]
    multiplicity: npt.NDArray[np.int64]
    first_rank: npt.NDArray[np.int64]

    def rows(self, pp: int, virtual_stages: int) -> npt.NDArray[np.int64]:
        """Return the indices of the splits for a pipeline of that shape."""
        return np.flatnonzero((self.pp == pp) & (self.virtual_stages == virtual_stages))


def balanced_layers(
    layer_costs: Sequence[float], num_stages: int, *, first_extra: float = 0, last_extra: float = 0
) -> tuple[int, ...]:
    """Return layers per stage so that the most expensive stage is as cheap as can be.

    Every stage gets at least one layer. Among the best cuts, extra layers go to the middle
    stages: the first has most activations in flight, the last has the head.

    Args:
        layer_costs: Cost of each layer, in any one unit, shape [layers].
        num_stages: Stages; at most ``len(layer_costs)``.
        first_extra: Cost of the first stage besides its layers (embedding).
        last_extra: Cost of the last stage besides its layers (head, loss, multi-token prediction).

    >>> balanced_layers([1.0] * 10, 4)
    (2, 3, 3, 2)
    >>> balanced_layers([1.0] * 8, 4, last_extra=2.0)
    (2, 2, 3, 1)
    """
    prefix = np.concatenate([[0.0], np.cumsum(layer_costs)])
    extra = np.zeros(num_stages)
    extra[0] += first_extra
    extra[-1] += last_extra
    low, high = 0.0, float(prefix[-1] + extra.sum()) * (1 + 1e-9)
    for _ in range(_BISECTIONS):
        limit = (low + high) / 2
        low, high = (low, limit) if _cut(prefix, extra, limit) else (limit, high)
    sizes = _cut(prefix, extra, high)
    assert sizes is not None, "everything fits under the sum of all costs"
    return sizes


@lru_cache(maxsize=8192)
def _balanced(
    layer_costs: tuple[float, ...], num_stages: int, first_extra: float, last_extra: float
) -> tuple[int, ...]:
    """Return ``balanced_layers``; a model on other nodes has most of its pipelines again."""
    return balanced_layers(layer_costs, num_stages, first_extra=first_extra, last_extra=last_extra)


def _cut(
    prefix: npt.NDArray[np.float64], extra: npt.NDArray[np.float64], limit: float
) -> tuple[int, ...] | None:
    """Return layers per stage, none over ``limit``, or None if there is no such cut.

    From the back, every stage takes its even share of what is left, or as near to it as the limit
    allows and the stages before it can hold.
    """
    num_stages, num_layers = len(extra), len(prefix) - 1
    # furthest[s]: most layers that the first s stages hold under the limit, one each at least
    furthest = [0]
    for stage in range(num_stages):
        end = int(np.searchsorted(prefix, prefix[furthest[-1]] + limit - extra[stage], "right")) - 1
        if end <= furthest[-1] and furthest[-1] < num_layers:
            return None
        furthest.append(min(end, num_layers))
    if furthest[-1] < num_layers:
        return None
    sizes: list[int] = []
    end = num_layers
    for stage in range(num_stages - 1, -1, -1):
        first = int(np.searchsorted(prefix, prefix[end] + extra[stage] - limit, "left"))
        earliest = max(first, stage)  # a layer is left for each stage before
        latest = min(furthest[stage], end - 1)
        if earliest > latest:
            return None
        # the last stage rounds down and the others up, so that a remainder lies in the middle
        is_last = stage == num_stages - 1 and num_stages > 1
        share = end // (stage + 1) if is_last else -(-end // (stage + 1))
        start = min(max(end - share, earliest), latest)
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def split_table(
    layer_kinds: Sequence[BlockKind],
    pipelines: Sequence[tuple[int, int]],
    kind_costs: Mapping[BlockKind, float],
    num_mtp_modules: int = 0,
) -> SplitTable:
    """Return the splits for every (pp, virtual_stages): even, and balanced by cost if that differs.

    Args:
        layer_kinds: Kind of each layer.
        pipelines: Pairs of pipeline ranks and chunks per rank, each with
            ``pp * virtual_stages <= len(layer_kinds)``.
        kind_costs: Relative cost of one block of each kind.
        num_mtp_modules: Modules for multi-token prediction; they sit beside the head, as
            Megatron-LM's --mtp-num-layers puts them.
    """
    costs = tuple(kind_costs[kind] for kind in layer_kinds)
    alike = (1.0,) * len(costs)
    behind = num_mtp_modules * kind_costs["mtp"] if num_mtp_modules else 0
    ends = kind_costs["embedding"], kind_costs["head"] + behind
    shapes: list[tuple[int, int]] = []
    layers: list[tuple[int, ...]] = []
    for pp, chunks in pipelines:
        stages = pp * chunks
        even, by_cost = _balanced(alike, stages, 0, 0), _balanced(costs, stages, *ends)
        for split in dict.fromkeys([even, by_cost]):
            shapes.append((pp, chunks))
            layers.append(split)
    return splits_of(layer_kinds, shapes, layers, num_mtp_modules)


def splits_of(
    layer_kinds: Sequence[BlockKind],
    pipelines: Sequence[tuple[int, int]],
    layers: Sequence[tuple[int, ...]],
    num_mtp_modules: int = 0,
) -> SplitTable:
    """Return the table of given splits; a stage may be empty.

    Args:
        layer_kinds: Kind of each layer.
        pipelines: Pipeline ranks and chunks per rank of each split.
        layers: Layers per stage of each split, in model order.
        num_mtp_modules: Of multi-token prediction, beside the head.
    """
    profiles = [
        _profiles(layer_kinds, num_mtp_modules, split, pp)
        for split, (pp, _) in zip(layers, pipelines, strict=True)
    ]
    width = max((len(p) for p in profiles), default=1)
    counts = np.zeros((len(layers), width, len(BLOCK_KINDS)))
    multiplicity = np.zeros((len(layers), width), dtype=np.int64)
    first_rank = np.zeros((len(layers), width), dtype=np.int64)
    for row, found in enumerate(profiles):
        for column, (content, ranks) in enumerate(found.items()):
            counts[row, column] = content
            multiplicity[row, column] = len(ranks)
            first_rank[row, column] = ranks[0]
    pp_column, v_column = np.array(pipelines, dtype=np.int64).reshape(-1, 2).T
    return SplitTable(pp_column, v_column, tuple(layers), counts, multiplicity, first_rank)


def _profiles(
    layer_kinds: Sequence[BlockKind], num_mtp_modules: int, layers: tuple[int, ...], pp: int
) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks of each distinct content, counts in the order of ``BLOCK_KINDS``."""
    content = np.zeros((pp, len(BLOCK_KINDS)), dtype=np.int64)
    content[0, BLOCK_KINDS.index("embedding")] += 1
    content[pp - 1, BLOCK_KINDS.index("head")] += 1
    content[pp - 1, BLOCK_KINDS.index("mtp")] += num_mtp_modules
    start = 0
    for stage, size in enumerate(layers):
        for kind in layer_kinds[start : start + size]:
            content[stage % pp, BLOCK_KINDS.index(kind)] += 1
        start += size
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(pp):
        found.setdefault(tuple(int(x) for x in content[rank]), []).append(rank)
    return found
