"""Bytes per rank and part; the worst pipeline rank decides whether a layout fits.

Activations follow Korthikanti et al. (2205.05198, table 2), taken apart by tensor so that they
hold for grouped queries, gated feed-forwards and experts too. Of uneven routing every rank and
layer holds what the hottest rank of the most uneven layer receives. Attention is fused, and there
is no dropout, unless the request says otherwise.

Two moments are told apart: the backward, with all activations in flight and one block (or the
logits) in use, and the optimizer's step, when activations are gone and its own copies are there.
The peak is that of the larger; ``working_bytes`` is what it adds to the parts that stay.
"""

from dataclasses import dataclass, fields
from typing import Final, TypeAlias

import numpy as np

from planner.constants import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION
from planner.cost.problem import (
    Problem,
    gradient_bytes,
    held_gradient_bytes,
    held_weight_bytes,
    optimizer_bytes,
    product_input_bytes,
    weight_bytes,
)
from planner.cost.shares import (
    block_share,
    largest_matrix,
    rank_parameters,
    recomputed_share,
    shards,
)
from planner.cost.work import expert_skews, key_value_bytes, routed_rows, sharded_tokens, tokens
from planner.frameworks import keeps_expert_outputs, keeps_gathered_inputs
from planner.layout.candidates import CONTEXT_EXCHANGES, RECOMPUTE_MODES, Candidates, Column
from planner.model.blocks import BLOCK_KINDS, BlockKind, block_kinds, has_experts
from planner.model.spec import LatentAttention
from planner.pipeline.laws import in_flight
from planner.plan import TrainingSpec

__all__ = ["Memory", "activation_bytes", "memory", "offloaded_share"]

_FULL = RECOMPUTE_MODES.index("full")
_SELECTIVE = RECOMPUTE_MODES.index("selective")
_ALL_GATHER = CONTEXT_EXCHANGES.index("all_gather")
_LAYERS: Final = [BLOCK_KINDS.index(k) for k in BLOCK_KINDS if k not in ("embedding", "head")]
# What is free while the optimizer steps.
_OF_PASS: Final = ("gathered_bytes", "activations_bytes", "logits_bytes", "moe_buffers_bytes")


# What a block of each kind keeps without recompute, and with the row's mode.
_Blocks: TypeAlias = dict[BlockKind, tuple[Column, Column]]


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
    working_bytes: Column

    def by_name(self) -> dict[str, Column]:
        """Return the parts by the names of their fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def total_bytes(self) -> Column:
        """Return the sum of the parts, shape [rows, profiles]."""
        return np.sum(list(self.by_name().values()), axis=0)


def memory(problem: Problem, c: Candidates) -> Memory:
    """Return the memory of every profile of every candidate."""
    dense, experts = rank_parameters(problem, c)
    training = problem.training
    blocks: _Blocks = {k: _kept_bytes(problem, c, k) for k in block_kinds(problem.model)}
    states = {
        "weights": _sharded(c, dense, experts, 3) * held_weight_bytes(training),
        "gradients": _sharded(c, dense, experts, 2) * held_gradient_bytes(training),
        "optimizer": _sharded(c, dense, experts, 1) * optimizer_bytes(training),
    }
    parts = {
        **{f"{name}_bytes": (name not in training.offload) * held for name, held in states.items()},
        "gathered_bytes": _gathered(problem, c),
        "activations_bytes": _activations(problem, c, blocks),
        "logits_bytes": _logits(problem, c),
        "moe_buffers_bytes": _moe_buffers(problem, c),
        "communicators_bytes": _communicators(problem, c),
    }
    used = problem.splits.multiplicity[c.split] > 0
    parts = {
        name: (part if part.ndim == 2 else part[:, None]) * used for name, part in parts.items()
    }
    of_pass = sum(parts[name] for name in _OF_PASS)
    in_use = _in_use(problem, c, blocks)[:, None] * used
    in_backward = np.maximum(0, in_use - parts["logits_bytes"])  # after the loss they are free
    in_step = _sharded(c, dense, experts, 1) * _step_bytes(training) * used
    parts["working_bytes"] = np.maximum(in_backward, in_step - of_pass)
    held = np.sum(list(parts.values()), axis=0) - parts["communicators_bytes"]
    context = CONTEXT_BYTES[problem.fabric.library].value
    parts["reserve_bytes"] = (context + FRAGMENTATION.value * held) * used
    return Memory(**parts)


def activation_bytes(problem: Problem, c: Candidates, kind: BlockKind) -> Column:
    """Return what one block keeps of one micro-batch for its backward, shape [rows]."""
    return _kept_bytes(problem, c, kind)[1]


def _kept_bytes(problem: Problem, c: Candidates, kind: BlockKind) -> tuple[Column, Column]:
    """Return what one block keeps of one micro-batch: without recompute, and with the row's mode.

    Per token, outside the tensor-parallel regions: inputs and outputs of both norms (and the
    dropout masks); inside: q, k, v, attention output, its log-sum-exp, and the feed-forward's
    intermediate tensors. ``selective`` drops the outputs of norms and of the experts' activation
    function, and of an unfused attention its scores instead; ``full`` keeps the block's input
    alone. A framework that keeps gathered inputs has the outputs of norms whole where a
    tensor-parallel region reads them. An unfused attention keeps the scores after the softmax, per
    head and key, and with dropout a mask and what it leaves.
    """
    model, training, beta = problem.model, problem.training, weight_bytes(problem.training)
    h, of_input = model.hidden_size, product_input_bytes(training)
    outside, inside = sharded_tokens(problem, c), tokens(problem, c) / c.tp
    kept_whole = c.sequence_parallel & keeps_gathered_inputs(problem.framework)
    read = np.where(kept_whole, tokens(problem, c), outside)
    # one by one, a norm's operations keep its input in fp32 and the result before its weights
    cast = 0 if training.fused_kernels or model.norm != "rms" else 4 * h * outside
    if kind == "embedding":
        return np.zeros(len(c)), np.zeros(len(c))
    head = h * (beta * outside + of_input * read) + cast  # its norm's input and output
    if kind == "head":
        return head, head
    # Norms before a half read its input; those behind one, its output, and theirs is not kept. The
    # halves of a parallel layer have one input.
    before, behind = min(model.layer_norms, 2), max(model.layer_norms - 2, 0)
    inputs = 1 if model.parallel_attention else 2
    norm_out = before * h * of_input * read
    norm_in = (inputs + behind) * (h * beta * outside + cast)
    norm_in = norm_in + (2 * h * outside if training.dropout else 0)
    attention = _attention_bytes(problem, c, inside, outside)
    scores = np.zeros(len(c))
    if not training.fused_attention:
        attention = attention - 4 * model.attention.num_heads * inside
        per_score = 2 * beta + 1 if training.dropout else beta
        scores = per_score * model.attention.num_heads * training.seq_len * inside
    if has_experts(model, kind):
        moe = model.experts
        assert moe is not None, "has_experts says so"
        width, gated = moe.shared_hidden_size, moe.gated
        of_shared = np.where(kept_whole & (width > 0), read, 0)
        norm_out = h * of_input * (read + outside + of_shared)
        routed, routed_out = _routed_bytes(problem, c)
    else:
        width, gated = model.feed_forward.hidden_size, model.feed_forward.gated
        routed = routed_out = np.zeros(len(c))
    feed_forward = _feed_forward_bytes(training, gated) * width * inside + routed
    redone = norm_out + routed_out if training.fused_attention else scores
    kept = norm_in + norm_out + attention + scores + feed_forward
    of_mode = np.where(c.recompute == _SELECTIVE, kept - redone, kept)
    of_mode = np.where(c.recompute == _FULL, h * beta * outside, of_mode)
    if kind == "mtp":  # two norms' inputs, what they put together, and the head once more
        kept = kept + 4 * h * beta * outside + head
        of_mode = of_mode + np.where(c.recompute == _FULL, 2, 4) * h * beta * outside + head
    return kept, of_mode


def _feed_forward_bytes(training: TrainingSpec, gated: bool) -> float:
    """Return what is kept per element of a feed-forward's width: into and out of its activation.

    One by one, a gated activation keeps its gate after the function too.
    """
    into = 2 if gated else 1
    if gated and not training.fused_kernels:
        into = 3
    return into * weight_bytes(training) + product_input_bytes(training)


def _routed_bytes(problem: Problem, c: Candidates) -> tuple[Column, Column]:
    """Return what routed experts keep, and of that the output of their activation, [rows].

    Their input on all etp ranks' rows; and where gates weigh what they return, that, and the copy
    in expert order.
    """
    moe, training, h = problem.model.experts, problem.training, problem.model.hidden_size
    assert moe is not None, "has_experts says so"
    beta, of_input = weight_bytes(training), product_input_bytes(training)
    rows = routed_rows(problem, c)
    received = rows * expert_skews(problem, c)[1]
    per_row = _feed_forward_bytes(training, moe.gated) * moe.expert_hidden_size
    kept = received * (per_row + of_input * c.etp * h)
    if keeps_expert_outputs(problem.framework):
        kept = kept + beta * h * (received * c.etp + rows)
    return kept, received * of_input * moe.expert_hidden_size


def _attention_bytes(problem: Problem, c: Candidates, inside: Column, outside: Column) -> Column:
    """Return q, k, v and log-sum-exp, and the output that the next product reads, [rows]."""
    a, beta = problem.model.attention, weight_bytes(problem.training)
    of_input = product_input_bytes(problem.training)
    if isinstance(a, LatentAttention):
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        heads = a.num_heads * ((2 * qk + a.v_head_dim) * beta + a.v_head_dim * of_input)
        latent = (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_rope_head_dim
        kept = (heads + 4 * a.num_heads) * inside + latent * beta * outside
        return kept + _indexer_bytes(problem, c)
    kv = 2 * np.maximum(a.num_kv_heads, c.tp) * a.head_dim
    queries = a.num_heads * a.head_dim * (beta + of_input)
    return (queries + kv * beta + 4 * a.num_heads) * inside


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
    """Return whole units of sharded states, two of weights and one of gradients, and flat buffers.

    ZeRO-3 gathers the unit in use and the next; ZeRO-2 and 3 hold a unit's gradients whole until
    they are scattered. What is offloaded comes and goes in the same way. A unit is a block, or its
    largest matrix.
    """
    unit = block_share if problem.training.gathers == "layer" else largest_matrix
    units = [np.add(*unit(problem, c, kind)) for kind in block_kinds(problem.model)]
    largest = np.max(units, axis=0)
    sharded = (shards(c) > 1) | ((c.edp > 1) & (problem.model.experts is not None))
    offload = problem.training.offload
    comes = (sharded & (c.zero_stage == 3)) | ("weights" in offload)
    leaves = (sharded & (c.zero_stage >= 2)) | ("gradients" in offload)
    weights = np.where(comes, 2 * weight_bytes(problem.training), 0)
    gradients = np.where(leaves, gradient_bytes(problem.training), 0)
    return largest * (weights + gradients) + problem.training.buffer_bytes


def _activations(problem: Problem, c: Candidates, blocks: _Blocks) -> Column:
    """Return activations in flight, [rows, profiles]; ``blocks`` as ``_kept_bytes`` gives them."""
    splits = problem.splits
    counts, first = splits.counts[c.split], splits.first_rank[c.split]
    kept = np.zeros(counts.shape[:2])
    some = bool(c.recompute_layers.any())
    share = recomputed_share(c, counts) if some else 1.0
    for kind, (plain, of_mode) in blocks.items():
        of_block = of_mode[:, None]
        if some:
            of_block = share * of_block + (1 - share) * plain[:, None]
        kept += counts[:, :, BLOCK_KINDS.index(kind)] * of_block
    held = in_flight(
        c.schedule[:, None],
        c.pp[:, None],
        c.num_micro_batches[:, None],
        c.virtual_stages[:, None],
        first,
    )
    return kept * held * (1 - offloaded_share(problem, counts))


def offloaded_share(problem: Problem, counts: Column) -> Column:
    """Return the part of a rank's activations that rests on the host, [rows, profiles].

    Args:
        problem: What stays fixed.
        counts: Blocks of each kind, [rows, profiles, kinds].
    """
    training = problem.training
    layers = np.maximum(1, counts[:, :, _LAYERS].sum(axis=2))
    if "activations" not in training.offload:
        return 0.0 * layers
    return np.minimum(1.0, (training.offload_layers or layers) / layers)


def _in_use(problem: Problem, c: Candidates, blocks: _Blocks) -> Column:
    """Return what the backward of one block adds while it runs, of the largest block, [rows].

    Gradients of the input and output of its widest function, which is the feed-forward's
    activation, or the softmax of an unfused attention; all of its activations, where they are
    recomputed; those of the next block too, where they come back from the host; and all
    context-parallel ranks' keys and values with their gradients, where they are gathered.
    """
    largest = np.zeros(len(c))
    brought_back = "activations" in problem.training.offload
    for kind, (plain, of_mode) in blocks.items():
        if kind in ("embedding", "head"):
            continue
        back = 2 * of_mode if brought_back else 0.0
        largest = np.maximum(largest, plain - of_mode + back + _gradients_in_use(problem, c, kind))
    gathers = (c.cp > 1) & (c.context_exchange == _ALL_GATHER)
    return largest + np.where(gathers, 2 * c.cp * key_value_bytes(problem, c), 0.0)


def _gradients_in_use(problem: Problem, c: Candidates, kind: BlockKind) -> Column:
    """Return gradients of the input and output of a block's widest function, [rows]."""
    model, training = problem.model, problem.training
    beta, inside = weight_bytes(training), tokens(problem, c) / c.tp
    if has_experts(model, kind):
        moe = model.experts
        assert moe is not None, "has_experts says so"
        received = routed_rows(problem, c) * expert_skews(problem, c)[1]
        widest = (3 if moe.gated else 2) * moe.expert_hidden_size * received
    else:
        ffn = model.feed_forward
        widest = (3 if ffn.gated else 2) * ffn.hidden_size * inside
    if not training.fused_attention:
        scores = model.attention.num_heads * training.seq_len * inside
        widest = np.maximum(widest, 2 * scores)
    return beta * widest


def _step_bytes(training: TrainingSpec) -> int:
    """Return what the optimizer's step holds per parameter it updates, beside its states.

    Gradients in fp32, unless they are accumulated so; the square root of the second moments in a
    list of their own, unless the update is one fused kernel. An offloaded optimizer steps on the
    host.
    """
    if "optimizer" in training.offload:
        return 0
    is_cast = weight_bytes(training) < 4 and training.main_grads == "same"
    is_listed = training.foreach_optimizer and training.optimizer == "adamw"
    return (4 if is_cast else 0) + (4 if is_listed else 0)


def _logits(problem: Problem, c: Candidates) -> Column:
    """Return logits and what the loss adds, where the head is, [rows, profiles].

    Unfused, the copy in fp32 that the loss reads and the softmax, or then its gradient, are there
    beside the logits. A fused loss writes gradients over them; with the head in pieces there is
    nothing to hold. Every module for multi-token prediction has as many as the head.
    """
    training = problem.training
    beta = weight_bytes(training)
    per_logit = {"none": beta + 2 * max(4, beta), "cross_entropy": beta, "linear": 0}
    size = tokens(problem, c) * problem.model.vocab_size / c.tp * per_logit[training.fused_loss]
    ends = [BLOCK_KINDS.index("mtp"), BLOCK_KINDS.index("head")]
    heads = problem.splits.counts[:, :, ends].sum(axis=2)[c.split]
    return heads * size[:, None]


def _moe_buffers(problem: Problem, c: Candidates) -> Column:
    """Return the send and receive buffers of one dispatch."""
    moe = problem.model.experts
    if moe is None:
        return np.zeros(len(c))
    several = (c.ep > 1) | (c.etp > 1)
    rows = routed_rows(problem, c) * (1 + c.etp * expert_skews(problem, c)[1])
    return np.where(several, rows, 0) * problem.model.hidden_size * weight_bytes(problem.training)


def _communicators(problem: Problem, c: Candidates) -> Column:
    """Return the buffers of a rank's groups of two and more: the world's, and each axis'."""
    several = [c.tp > 1, c.cp > 1, c.dp * c.cp > 1, c.pp > 1, c.ep > 1, c.etp > 1]
    if problem.model.experts is not None:
        several.append(c.edp > 1)
    groups = np.sum(several, axis=0)
    return (groups + (groups > 0)) * COMMUNICATOR_BYTES[problem.fabric.library].value
