"""Who holds how many parameters: shares per rank, read by memory, gradients and optimizer."""

import numpy as np

from planner.cost.problem import Problem
from planner.layout.candidates import Candidates, Column
from planner.model.blocks import (
    BLOCK_KINDS,
    BlockKind,
    block_kinds,
    block_parameters,
    has_experts,
)
from planner.model.spec import ModelSpec

__all__ = ["block_share", "exchanges_embedding", "fullest_profile", "rank_parameters", "shards"]


def block_share(problem: Problem, c: Candidates, kind: BlockKind) -> tuple[Column, Column]:
    """Return (dense, expert) parameters of one block on one rank before dp sharding, [rows].

    With several stages the last one holds a copy of the embedding where its head is tied to it, or
    looks tokens up for multi-token prediction.
    """
    model, block = problem.model, block_parameters(problem.model, kind)
    split = (block.attention + block.feed_forward + block.projection + block.vocabulary) / c.tp
    if kind == "head" and exchanges_embedding(model):
        split = split + np.where(
            c.pp > 1, block_parameters(model, "embedding").vocabulary / c.tp, 0
        )
    return split + block.whole + block.replicated, block.experts / (c.etp * c.ep)


def exchanges_embedding(model: ModelSpec) -> bool:
    """Return whether first and last stage share the embedding and add up its gradients."""
    return model.tied_embeddings or model.num_mtp_modules > 0


def rank_parameters(problem: Problem, c: Candidates) -> tuple[Column, Column]:
    """Return (dense, expert) parameters per rank of every profile, shape [rows, profiles]."""
    shape = len(c), problem.splits.counts.shape[1]
    dense, experts = np.zeros(shape), np.zeros(shape)
    for kind in block_kinds(problem.model):
        number = problem.splits.counts[:, :, BLOCK_KINDS.index(kind)][c.split]
        dense_share, expert_share = block_share(problem, c, kind)
        dense += number * dense_share[:, None]
        if has_experts(problem.model, kind):
            experts += number * expert_share[:, None]
    return dense, experts


def fullest_profile(dense: Column, experts: Column) -> Column:
    """Return the profile with most of the parameters that ``rank_parameters`` gave, [rows]."""
    return np.argmax(dense + experts, axis=1)


def shards(c: Candidates) -> Column:
    """Return ranks that share out dense states under ZeRO, [rows]; experts have all of edp."""
    return c.dp_shard * c.cp
