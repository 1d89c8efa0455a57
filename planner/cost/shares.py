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

__all__ = [
    "block_share",
    "exchanges_embedding",
    "fullest_profile",
    "largest_matrix",
    "own_share",
    "rank_parameters",
    "recomputed_share",
    "shards",
]


def block_share(problem: Problem, c: Candidates, kind: BlockKind) -> tuple[Column, Column]:
    """Return (dense, expert) parameters of one block on one rank before dp sharding, [rows].

    With several stages the last one holds a copy of the embedding where its head is tied to it, or
    looks tokens up for multi-token prediction.
    """
    model, (dense, experts) = problem.model, own_share(problem, c, kind)
    if kind == "head" and exchanges_embedding(model):
        copied = block_parameters(model, "embedding").vocabulary / c.tp
        dense = dense + np.where(c.pp > 1, copied, 0)
    return dense, experts


def own_share(problem: Problem, c: Candidates, kind: BlockKind) -> tuple[Column, Column]:
    """Return the same without copies: what does not depend on the number of stages."""
    block = block_parameters(problem.model, kind)
    split = (block.attention + block.feed_forward + block.projection + block.vocabulary) / c.tp
    return split + block.whole + block.replicated, block.experts / (c.etp * c.ep)


def exchanges_embedding(model: ModelSpec) -> bool:
    """Return whether first and last stage share the embedding and add up its gradients."""
    return model.tied_embeddings or model.num_mtp_modules > 0


def largest_matrix(problem: Problem, c: Candidates, kind: BlockKind) -> tuple[Column, Column]:
    """Return (dense, expert) parameters of the largest matrix of a block on one rank, [rows].

    The feed-forward's matrices are alike, and so are the experts'; a gated one's first two lie in
    one, as the projections of queries, keys and values do.
    """
    dense, experts = block_share(problem, c, kind)
    if kind in ("embedding", "head"):
        return dense, experts
    block, moe = block_parameters(problem.model, kind), problem.model.experts
    if has_experts(problem.model, kind) and moe is not None:
        return 0 * dense, experts / moe.num_experts * c.ep * (2 / 3 if moe.gated else 1 / 2)
    gated = problem.model.feed_forward.gated
    widest = max(block.feed_forward * (2 / 3 if gated else 1 / 2), block.attention * 3 / 4)
    return widest / c.tp, 0 * experts


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


def recomputed_share(c: Candidates, counts: Column) -> Column:
    """Return the part of a rank's layers that is recomputed, where the mode recomputes any.

    Args:
        c: Candidates.
        counts: Blocks of each kind on the rank, [rows, ..., kinds].

    Returns:
        Shape [rows, ...].
    """
    ends = [BLOCK_KINDS.index("embedding"), BLOCK_KINDS.index("head")]
    layers = np.maximum(1, counts.sum(axis=-1) - counts[..., ends].sum(axis=-1))
    asked = (c.recompute_layers * c.virtual_stages).reshape(-1, *[1] * (layers.ndim - 1))
    return np.where(asked > 0, np.minimum(1.0, asked / layers), 1.0)


def shards(c: Candidates) -> Column:
    """Return ranks that share out dense states under ZeRO, [rows]; experts have all of edp."""
    return c.dp_shard * c.cp
