"""Recompute as few layers as fit: what lies between keeping everything and recomputing all.

Activations fall by the same bytes with every layer of a stage that is recomputed (Megatron-LM's
``--recompute-method block``), so the fewest that fit follow from two calls of the memory model, and
the space of candidates does not grow by a factor.
"""

import numpy as np

from planner.constants import FRAGMENTATION
from planner.cost.memory import Memory, memory
from planner.cost.problem import Problem
from planner.cost.shares import recomputed_share
from planner.layout.candidates import Candidates, Column, replaced
from planner.model.blocks import layer_kinds

__all__ = ["fewest_recomputed"]


def fewest_recomputed(problem: Problem, c: Candidates) -> Candidates:
    """Return the rows of ``c`` that fit with a part of their layers recomputed, with the fewest.

    Rows that need every layer, or do not fit with that, are left out, and so is every row of a
    model whose layers are not alike: which of them are recomputed would matter.

    Args:
        problem: What stays fixed.
        c: Rows; their own recompute mode does not matter.
    """
    if len(set(layer_kinds(problem.model))) > 1:
        return c.take(slice(0, 0))
    every = c.with_recompute("full")
    with_every = memory(problem, every)
    every = every.take(fits := _fits(problem, with_every))
    one = replaced(every, recompute_layers=np.ones_like(every.recompute_layers))
    activations = with_every.activations_bytes[fits]
    fewest = 1 + _beyond_one(problem, one, activations)
    tried = replaced(one, recompute_layers=fewest)
    part = recomputed_share(tried, problem.splits.counts[tried.split]).min(axis=1) < 1
    tried = tried.take(part)
    return tried.take(_fits(problem, memory(problem, tried)))


def _fits(problem: Problem, held: Memory) -> Column:
    """Return a mask of the rows whose fullest rank has what it holds, [rows]."""
    return np.asarray(held.total_bytes().max(axis=1) <= problem.capacity_bytes)


def _beyond_one(problem: Problem, one: Candidates, with_every: Column) -> Column:
    """Return layers that must be recomputed beside the first, of rows that fit with all, [rows].

    Where the optimizer's step is the peak, recompute changes nothing, and such rows fit as they
    are; else the peak falls as the activations do.

    Args:
        problem: What stays fixed.
        one: Rows that recompute one layer.
        with_every: Their activations if all layers are recomputed, [rows, profiles].
    """
    held = memory(problem, one)
    excess = held.total_bytes() - problem.capacity_bytes
    share = recomputed_share(one, problem.splits.counts[one.split])
    rest = (held.activations_bytes - with_every) * (1 + FRAGMENTATION.value)
    # rest is what 1 - share of a rank's layers spare, and one layer of every chunk is share of them
    falls = rest > 0
    layers = np.divide(excess * (1 - share), rest * share, out=np.zeros_like(rest), where=falls)
    return np.ceil(layers).max(axis=1, initial=0).astype(np.int64)
