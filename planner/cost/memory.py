"""Bytes per rank and part; the worst pipeline rank decides whether a layout fits.

Activations follow Korthikanti et al. (2205.05198, table 2), taken apart by tensor so that they
hold for grouped queries, gated feed-forwards and experts too. Of uneven routing every rank and
layer holds what the hottest rank of the most uneven layer receives.
Attention is fused unless ``fused_attention`` is false; there is no dropout unless asked for.
"""

from dataclasses import dataclass, fields

import numpy as np

from planner.constants import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION
from planner.cost.problem import Problem, gradient_bytes, weight_bytes
from planner.cost.shares import block_share, rank_parameters, shards
from planner.cost.work import expert_skews, key_value_bytes, routed_rows, sharded_tokens, tokens
from planner.frameworks import keeps_gathered_inputs
from planner.layout.candidates import CONTEXT_EXCHANGES, RECOMPUTE_MODES, Candidates, Column
from planner.model.blocks import BLOCK_KINDS, BlockKind, block_kinds, has_experts
from planner.model.spec import LatentAttention
from planner.pipeline.laws import in_flight

__all__ = ["Memory", "activation_bytes", "memory", "optimizer_bytes"]

_FULL = RECOMPUTE_MODES.index("full")
_SELECTIVE = RECOMPUTE_MODES.index("selective")
_ALL_GATHER = CONTEXT_EXCHANGES.index("all_gather")


@dataclass(frozen=True, slots=True)
class Memory:
    """Parts as in ``planner.plan.MemoryParts``, shape [rows, profiles]; unused profiles are 0."""

    weights_bytes: Column
    gradients_bytes: Column
    optimizer_bytes: Column
    gathered_bytes: Column
    activations_bytes: Column
    logits_bytes: Column
    moe_buffers_bytes: Column
    communicators_bytes: Column
    reserve_bytes: Column

    def total_bytes(self) -> Column:
        """Return the sum of the parts, shape [rows, profiles]."""
        return np.sum([getattr(self, f.name) for f in fields(self)], axis=0)


def memory(problem: Problem, c: Candidates) -> Memory:
    """Return the memory of every profile of every candidate."""
    dense, experts = rank_parameters(problem, c)
    training = problem.training
    parts = {
        "weights_bytes": _sharded(c, dense, experts, 3) * weight_bytes(training),
        "gradients_bytes": _sharded(c, dense, experts, 2) * gradient_bytes(training),
        "optimizer_bytes": _sharded(c, dense, experts, 1) * optimizer_bytes(problem),
        "gathered_bytes": _gathered(problem, c),
        "activations_bytes": _activations(problem, c),
        "logits_bytes": _logits(problem, c),
        "moe_buffers_bytes": _moe_buffers(problem, c),
        "communicators_bytes": _communicators(problem, c),
    }
    used = problem.splits.multiplicity[c.split] > 0
    shape = used.shape
    parts = {
        name: np.broadcast_to(part if part.ndim == 2 else part[:, None], shape) * used
        for name, part in parts.items()
    }
    held = np.sum(list(parts.values()), axis=0) - parts["communicators_bytes"]
    context = CONTEXT_BYTES[problem.fabric.library].value
    parts["reserve_bytes"] = (context + FRAGMENTATION.value * held) * used
    return Memory(**parts)


def optimizer_bytes(problem: Problem) -> int:
    """Return optimizer state per parameter: moments, and a master copy of 16-bit weights."""
    width = max(4, weight_bytes(problem.training))
    moments = 2 * width if problem.training.optimizer == "adamw" else 0
    return moments + (width if weight_bytes(problem.training) < 4 else 0)


def activation_bytes(
    problem: Problem,
    c: Candidates,
    kind: BlockKind,
    *,
    dropout: bool = False,
    fused_attention: bool = True,
) -> Column:
    """Return what one block keeps of one micro-batch for its backward, shape [rows].

    Per token, outside the tensor-parallel regions: inputs and outputs of both norms (and the
    dropout masks); inside: q, k, v, attention output, its log-sum-exp, and the feed-forward's
    intermediate tensors. ``selective`` drops the outputs of norms and of the experts' activation
    function; ``full`` keeps the block's input alone. A framework that keeps gathered inputs has
    the outputs of norms whole where a tensor-parallel region reads them. An unfused attention adds
    5 bytes per head and key.
    """
    model, beta = problem.model, weight_bytes(problem.training)
    h = model.hidden_size
    outside, inside = sharded_tokens(problem, c), tokens(problem, c) / c.tp
    kept_whole = c.sequence_parallel & keeps_gathered_inputs(problem.framework)
    read = np.where(kept_whole, tokens(problem, c), outside)
    if kind == "embedding":
        return np.zeros(len(c))
    head = h * beta * (outside + read)  # its norm's input and output
    if kind == "head":
        return head
    # Norms before a half read its input; those behind one, its output, and theirs is not kept. The
    # halves of a parallel layer have one input.
    before, behind = min(model.layer_norms, 2), max(model.layer_norms - 2, 0)
    inputs = 1 if model.parallel_attention else 2
    norm_out = before * h * beta * read
    norm_in = (inputs + behind) * h * beta * outside + (2 * h * outside if dropout else 0)
    attention = _attention_bytes(problem, c, inside, outside)
    if not fused_attention:
        attention = attention - 4 * model.attention.num_heads * inside
        attention = attention + 5 * model.attention.num_heads * problem.training.seq_len * inside
    if has_experts(model, kind):
        moe = model.experts
        assert moe is not None, "has_experts says so"
        width, gated = moe.shared_hidden_size, moe.gated
        of_shared = np.where(kept_whole & (width > 0), read, 0)
        norm_out = h * beta * (read + outside + of_shared)
        rows = routed_rows(problem, c)
        received = rows * expert_skews(problem, c)[1]
        # input and output of the experts on all etp ranks' rows, and the copy in expert order
        widths = (3 if gated else 2) * moe.expert_hidden_size + 2 * c.etp * h
        routed = beta * (received * widths + rows * h)
        routed_out = received * beta * moe.expert_hidden_size
    else:
        width, gated = model.feed_forward.hidden_size, model.feed_forward.gated
        routed = routed_out = np.zeros(len(c))
    feed_forward = (3 if gated else 2) * width * beta * inside + routed
    redone = norm_out + routed_out
    kept = norm_in + norm_out + attention + feed_forward
    kept = np.where(c.recompute == _SELECTIVE, kept - redone, kept)
    kept = np.where(c.recompute == _FULL, h * beta * outside, kept)
    if kind == "mtp":  # two norms' inputs, what they put together, and the head once more
        kept = kept + np.where(c.recompute == _FULL, 2, 4) * h * beta * outside + head
    return kept


def _attention_bytes(problem: Problem, c: Candidates, inside: Column, outside: Column) -> Column:
    a, beta = problem.model.attention, weight_bytes(problem.training)
    if isinstance(a, LatentAttention):
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        heads = a.num_heads * (2 * qk + 2 * a.v_head_dim)
        latent = (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_rope_head_dim
        kept = (heads * beta + 4 * a.num_heads) * inside + latent * beta * outside
        return kept + _indexer_bytes(problem, c)
    kv = 2 * np.maximum(a.num_kv_heads, c.tp) * a.head_dim
    return ((2 * a.num_heads * a.head_dim + kv) * beta + 4 * a.num_heads) * inside


def _indexer_bytes(problem: Problem, c: Candidates) -> Column:
    """Return what a sparse-attention indexer keeps: its heads and, gathered, what they read."""
    a = problem.model.attention
    if not isinstance(a, LatentAttention) or a.indexer is None:
        return np.zeros(len(c))
    heads = a.indexer.num_heads * (a.indexer.head_dim + 1) + a.indexer.head_dim
    read = problem.model.hidden_size + (a.q_lora_rank or 0)
    kept = heads + np.where(c.sequence_parallel, read, 0)
    return tokens(problem, c) * kept * weight_bytes(problem.training)


def _sharded(c: Candidates, dense: Column, experts: Column, from_zero_stage: int) -> Column:
    """Return parameters of which a rank keeps the state, [rows, profiles]."""
    shard = c.zero_stage >= from_zero_stage
    return (
        dense / np.where(shard, shards(c), 1)[:, None]
        + experts / np.where(shard, c.edp, 1)[:, None]
    )


def _gathered(problem: Problem, c: Candidates) -> Column:
    """Return whole units of sharded states: two of weights and one of gradients.

    ZeRO-3 gathers the unit in use and the next; ZeRO-2 and 3 hold a unit's gradients whole until
    they are scattered.
    """
    units = [np.add(*block_share(problem, c, kind)) for kind in block_kinds(problem.model)]
    largest = np.max(units, axis=0)
    several = (shards(c) > 1) | ((c.edp > 1) & (problem.model.experts is not None))
    weights = np.where(several & (c.zero_stage == 3), 2 * weight_bytes(problem.training), 0)
    gradients = np.where(several & (c.zero_stage >= 2), gradient_bytes(problem.training), 0)
    return largest * (weights + gradients)


def _activations(problem: Problem, c: Candidates) -> Column:
    """Return activations in flight, and what one block adds while it is in use.

    That is its full set while it is recomputed, and all context-parallel ranks' keys and values
    with their gradients where they are gathered.
    """
    splits = problem.splits
    first = splits.first_rank[c.split]
    kept = np.zeros(first.shape)
    transient = np.zeros(len(c))
    plain = c.with_recompute("none")
    for kind in block_kinds(problem.model):
        number = splits.counts[:, :, BLOCK_KINDS.index(kind)][c.split]
        kept += number * activation_bytes(problem, c, kind)[:, None]
        if kind not in ("embedding", "head"):
            transient = np.maximum(transient, activation_bytes(problem, plain, kind))
    held = in_flight(
        c.schedule[:, None],
        c.pp[:, None],
        c.num_micro_batches[:, None],
        c.virtual_stages[:, None],
        first,
    )
    in_use = np.where(c.recompute == _FULL, transient, 0.0)
    gathers = (c.cp > 1) & (c.context_exchange == _ALL_GATHER)
    in_use = in_use + np.where(gathers, 2 * c.cp * key_value_bytes(problem, c), 0.0)
    return kept * held + in_use[:, None]


def _logits(problem: Problem, c: Candidates) -> Column:
    """Return logits and their copy, fp32 at least, where the head is: [rows, profiles].

    Every module for multi-token prediction beside it has as many.
    """
    size = tokens(problem, c) * problem.model.vocab_size / c.tp
    ends = [BLOCK_KINDS.index("mtp"), BLOCK_KINDS.index("head")]
    head = problem.splits.counts[:, :, ends].sum(axis=2)[c.split]
    beta = weight_bytes(problem.training)
    return head * (size * (beta + max(4, beta)))[:, None]


def _moe_buffers(problem: Problem, c: Candidates) -> Column:
    """Return the send and receive buffers of one dispatch."""
    moe = problem.model.experts
    if moe is None:
        return np.zeros(len(c))
    several = (c.ep > 1) | (c.etp > 1)
    rows = routed_rows(problem, c) * (1 + c.etp * expert_skews(problem, c)[1])
    return np.where(several, rows, 0) * problem.model.hidden_size * weight_bytes(problem.training)


def _communicators(problem: Problem, c: Candidates) -> Column:
    several = [c.tp > 1, c.cp > 1, c.dp * c.cp > 1, c.pp > 1, c.ep > 1, c.etp > 1]
    if problem.model.experts is not None:
        several.append(c.edp > 1)
    return np.sum(several, axis=0) * COMMUNICATOR_BYTES[problem.fabric.library].value
