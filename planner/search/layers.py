"""Recompute as few layers as fit: what lies between keeping everything and recomputing all.

Memory falls by the same bytes with every layer of a stage that is recomputed (Megatron-LM's
``--recompute-method block``), so the fewest that fit follow from one row in closed form, and the
space of candidates does not grow by a factor.
"""

import numpy as np
import numpy.typing as npt

from planner.constants import FRAGMENTATION
from planner.cost.memory import activation_bytes, memory
from planner.cost.problem import Problem
from planner.layout.candidates import Candidates, replaced
from planner.model.blocks import BLOCK_KINDS, layer_kinds
from planner.pipeline.laws import in_flight

__all__ = ["fewest_recomputed"]


def fewest_recomputed(problem: Problem, c: Candidates) -> Candidates:
    """Return the rows of ``c`` that fit with a part of their layers recomputed, with the fewest.

    Rows that need every layer, or do not fit with that, are left out, and so is every row of a
    model whose layers are not alike: which of them are recomputed would matter.

    Args:
        problem: What stays fixed.
        c: Rows; their own recompute mode does not matter.
    """
    kinds = set(layer_kinds(problem.model))
    if len(kinds) > 1 or len(c) == 0:
        return c.take(slice(0, 0))
    one = replaced(c.with_recompute("full"), recompute_layers=np.ones(len(c), dtype=np.int64))
    fewest = 1 + np.ceil(_excess(problem, one) / _falls_by(problem, one)).max(axis=1)
    layers = problem.splits.counts[c.split][:, :, BLOCK_KINDS.index(kinds.pop())].max(axis=1)
    fewest = np.maximum(1, fewest)
    part = fewest * c.virtual_stages < layers
    tried = replaced(one, recompute_layers=fewest.astype(np.int64)).take(part)
    peak = memory(problem, tried).total_bytes().max(axis=1)
    return tried.take(peak <= problem.capacity_bytes)


def _excess(problem: Problem, c: Candidates) -> npt.NDArray[np.float64]:
    """Return bytes beyond what a rank has, [rows, profiles]; below 0 where it fits."""
    return np.asarray(memory(problem, c).total_bytes() - problem.capacity_bytes)


def _falls_by(problem: Problem, c: Candidates) -> npt.NDArray[np.float64]:
    """Return bytes that one more recomputed layer of every stage spares, [rows, profiles]."""
    (kind,) = set(layer_kinds(problem.model))
    of_layer = activation_bytes(problem, c.with_recompute("none"), kind)
    of_layer = of_layer - activation_bytes(problem, c, kind)
    held = in_flight(
        c.schedule[:, None],
        c.pp[:, None],
        c.num_micro_batches[:, None],
        c.virtual_stages[:, None],
        problem.splits.first_rank[c.split],
    )
    per_chunk = of_layer * c.virtual_stages * (1 + FRAGMENTATION.value)
    return np.asarray(per_chunk[:, None] * held)
