"""What a training step does: a fixed vocabulary of ops, no hardware in it.

Every op says how often it happens (``repeats``), in which phase, and its size: matrix shapes,
flop, bytes, or the message of a collective. *Block ops* happen per block and micro-batch on one
rank; *rank ops* per step. Published volumes and flop counts are the exact oracles of this file.

Symbols: ``T`` = micro_batch_size * seq_len / cp tokens of a micro-batch on one rank, ``t`` = tp,
``h`` hidden, ``β`` bytes per element. Tensor parallelism is Megatron's (1909.08053): per attention
and per feed-forward one column-split and one row-split product. With sequence parallelism
(2205.05198) an all_gather precedes, a reduce_scatter follows, and the backward gathers the stored
shards once more unless the framework keeps them whole; without it one all_reduce follows in each
direction. Context parallelism passes keys and values around in a ring, or gathers them. Experts:
tokens sharded over tp go to their experts by all_to_all; dropless after an exchange of the counts,
sized for the hottest rank, for which all wait (``training.expert_load``), or every expert's
capacity. Attention is fused (no score matrix is stored or moved); in a window it does the window's
flop alone, in packed documents theirs. Attention and feed-forward side by side share one gather and
one scatter. A module for multi-token prediction is a projection, a layer of the last one's kind,
and the embedding's lookup, head and loss once more.

ZeRO-0 and 1 send a rank's gradients and parameters in buckets, once per step; ZeRO-2 and 3 are
FSDP and send them block by block, for every micro-batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import numpy as np

from planner.constants import ATTENTION_BACKWARD_FLOP_RATIO, GRADIENT_BUCKET_BYTES
from planner.cost.expert_load import expert_shares, skews
from planner.cost.problem import (
    Problem,
    gradient_bytes,
    held_gradient_bytes,
    held_weight_bytes,
    optimizer_bytes,
    weight_bytes,
)
from planner.cost.shares import (
    block_share,
    exchanges_embedding,
    fullest_profile,
    own_share,
    rank_parameters,
    shards,
)
from planner.frameworks import keeps_gathered_inputs, stops_recompute_early
from planner.hardware.roofline import CAST_PRECISIONS, OPERAND_BYTES
from planner.layout.candidates import CONTEXT_EXCHANGES, RECOMPUTE_MODES, Candidates, Column
from planner.model.blocks import (
    BLOCK_KINDS,
    BlockKind,
    attention_flop_per_token,
    block_kinds,
    has_experts,
    sequence_parallel_parameters,
    window_of,
)
from planner.model.sequence import attended
from planner.model.spec import LatentAttention
from planner.plan import Axis, Collective, Phase, TrainingSpec
from planner.routing import expert_capacity

__all__ = [
    "BLOCK_COLUMNS",
    "EXPERT_EXCHANGES",
    "EXPERT_PRODUCTS",
    "KEPT_IN_16_BITS",
    "RANK_COLUMNS",
    "AttentionCore",
    "Communication",
    "Experts",
    "Gemm",
    "HostCopy",
    "Launches",
    "MemoryBound",
    "Op",
    "block_work",
    "expert_skews",
    "key_value_bytes",
    "optimizer_moved_bytes",
    "rank_work",
    "routed_rows",
    "sharded_tokens",
    "stage_send",
    "tokens",
]

# The only columns that block_work reads.
BLOCK_COLUMNS: Final = (
    "tp",
    "cp",
    "ep",
    "etp",
    "micro_batch_size",
    "recompute",
    "sequence_parallel",
    "context_exchange",
)

# The only columns that rank_work, and the seconds of its ops, depend on.
RANK_COLUMNS: Final = (
    "tp",
    "cp",
    "pp",
    "ep",
    "etp",
    "dp_shard",
    "dp_replicate",
    "split",
    "zero_stage",
    "num_micro_batches",
    "sequence_parallel",
    "order",
)

_RING: Final = CONTEXT_EXCHANGES.index("ring")
_FULL: Final = RECOMPUTE_MODES.index("full")
_SELECTIVE: Final = RECOMPUTE_MODES.index("selective")
# Cheap to redo, large to keep: Megatron's --recompute-modules layernorm moe_act. It has no module
# that redoes the activation function of a dense feed-forward alone.
_SELECTIVE_OPS: Final = ("norms", "expert_activation")
# Where scores are stored they are what is large: --recompute-modules core_attn, Megatron's default.
_UNFUSED_SELECTIVE_OPS: Final = (
    *("attention_scores", "attention_softmax", "attention_dropout", "attention_context"),
)
# The end of a layer, its shared expert's where it has one: the backward needs what goes into it,
# and not what comes out.
_LAST_OPS: Final = (
    "ffn_down",
    "ffn_tp_scatter",
    "ffn_tp_reduce",
    "shared_expert_down",
    "shared_expert_tp_scatter",
    "shared_expert_tp_reduce",
)
# Side by side, attention and feed-forward read one gathered input and their sum is scattered once.
_BETWEEN_HALVES: Final = ("attention_tp_scatter", "attention_tp_reduce", "ffn_tp_gather")
# What the forward alone does: backward and recompute know from it which rows go where.
_FORWARD_ONLY: Final = "ep_counts"
_COUNT_BYTES: Final = 8  # int64
EXPERT_EXCHANGES: Final = ("ep_dispatch", "ep_combine")
EXPERT_PRODUCTS: Final = ("experts_up", "experts_down")
# Of a job below 16 bits (Transformer Engine, Megatron-LM core/extensions): the head, what decides
# where a token goes, and attention.
KEPT_IN_16_BITS: Final = (
    *("head", "router", "shared_gate", "indexer_q", "indexer_k"),
    *("attention_core", "attention_scores", "attention_context"),
)
# Row sums of the output's gradient, the products, and the sum of the query's gradient
# (FlashAttention-2, arXiv 2307.08691, algorithm 2).
_ATTENTION_BACKWARD_KERNELS: Final = 3


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one rank, shape [rows]; ``uneven`` where some have more rows than others."""

    num_local: Column
    uneven: Column


@dataclass(frozen=True, slots=True)
class Gemm:
    """Products [m, k] x [k, n]; of ``experts`` one for each of the rank's own."""

    name: str
    phase: Phase
    repeats: Column
    m: Column
    n: Column
    k: Column
    experts: Experts | None = None

    @property
    def flop(self) -> Column:
        """Flop of one kernel."""
        groups = 1.0 if self.experts is None else self.experts.num_local
        return 2.0 * groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Softmax(QK)V, fused; ``flop`` of one causal pass.

    ``seq_len`` is the queries of one sequence on this rank, or of one as attention in windows or
    packed documents makes of it (``planner.model.sequence``), ``batch`` as many of these as hold
    all queries; ``num_heads`` and ``num_kv_heads`` count those of one sequence on this rank.
    """

    name: str
    phase: Phase
    repeats: Column
    flop: Column
    seq_len: Column
    batch: Column
    num_heads: Column
    num_kv_heads: Column
    head_dim: int


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Element-wise work: ``num_bytes`` read and written, in one kernel or a few."""

    name: str
    phase: Phase
    repeats: Column
    num_bytes: Column
    num_kernels: int = 1


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective on an axis; ``size_bytes`` is nccl-tests' S.

    A rank op is done in ``passes`` per step, each beside one forward or backward, of which
    ``edges`` calls find nothing to hide under. ``unit`` is the block whose parameters are sent,
    where they are sent block by block.
    """

    name: str
    phase: Phase
    repeats: Column
    axis: Axis
    op: Collective
    size_bytes: Column
    passes: Column | float = 1.0
    edges: Column | float = 1.0
    unit: BlockKind | None = None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """``num_bytes`` between a GPU and its host, or read and written by the host itself.

    ``hides``: whether it may run beside the compute of the passes.
    """

    name: str
    repeats: Column
    num_bytes: Column
    over: Literal["link", "memory"]
    hides: bool
    phase: Phase = "step"


@dataclass(frozen=True, slots=True)
class Launches:
    """What the host issues for the kernels of one phase of a block, beside which they run."""

    name: str
    phase: Phase
    repeats: Column
    num_kernels: Column


Op: TypeAlias = Gemm | AttentionCore | MemoryBound | Communication | HostCopy | Launches


def block_work(
    problem: Problem, c: Candidates, kind: BlockKind, skew: Column | float | None = None
) -> list[Op]:
    """Return the ops of one block of ``kind`` for one micro-batch on one rank.

    Args:
        problem: What stays fixed.
        c: Candidates.
        kind: Of the block.
        skew: Rows of the hottest expert rank over the mean; None is what the request expects.
    """
    ops = _block_ops(problem, c, kind, skew)
    ops += _casts(problem, c, ops)
    ops += _gradient_accumulation(problem, c, kind)
    return [*ops, *_launches(c, ops)]


def _block_ops(
    problem: Problem, c: Candidates, kind: BlockKind, skew: Column | float | None
) -> list[Op]:
    once = np.ones(len(c))
    if kind == "embedding":
        return _embedding(problem, c, once)
    if kind == "head":
        return _head(problem, c, once)
    forward = _projection_forward(problem, c, once) if kind == "mtp" else []
    forward += _attention_forward(problem, c, once, kind)
    if has_experts(problem.model, kind):
        skew = expert_skews(problem, c)[0] if skew is None else skew
        forward += _moe_forward(problem, c, once, skew)
    else:
        skew = 1.0
        forward += _dense_forward(problem, c, once)
    forward += _element_wise(problem, c, once, kind, skew)
    if problem.model.parallel_attention:
        forward = [op for op in forward if op.name not in _BETWEEN_HALVES]
    layer = [*forward, *_backward(problem, forward), *_recompute(problem, forward, c)]
    if kind == "mtp":  # the next token's embedding, and the shared head
        return [*_embedding(problem, c, once), *layer, *_head(problem, c, once)]
    return layer


def _launches(c: Candidates, ops: Iterable[Op]) -> list[Op]:
    """Return what the host issues, for each phase that a pass runs through: kernels and calls."""
    counts: dict[Phase, Column] = {}
    for op in ops:
        phase = "backward" if op.phase == "weight_gradient" else op.phase
        counts[phase] = counts.get(phase, np.zeros(len(c))) + _issued(c, op)
    return [Launches("launch", phase, 1.0 * (n > 0), n) for phase, n in counts.items()]


def _issued(c: Candidates, op: Op) -> Column:
    """Return how many kernels or calls an op is; a call of one rank alone is none."""
    number: Column | int = 1
    if isinstance(op, Communication):
        number = 1 * (getattr(c, op.axis) > 1)
    elif isinstance(op, Gemm) and op.name in EXPERT_PRODUCTS and op.experts is not None:
        number = op.experts.num_local  # one product each, on a few streams
    elif isinstance(op, MemoryBound):
        number = op.num_kernels * (op.num_bytes > 0)
    elif isinstance(op, AttentionCore) and op.phase == "backward":
        number = _ATTENTION_BACKWARD_KERNELS
    return np.asarray(number * op.repeats)


def tokens(problem: Problem, c: Candidates) -> Column:
    """Return T: tokens of a micro-batch on one rank, [rows]."""
    return c.micro_batch_size * problem.training.seq_len / c.cp


def sharded_tokens(problem: Problem, c: Candidates) -> Column:
    """Return tokens outside the tensor-parallel regions: T / t with sequence parallelism."""
    return tokens(problem, c) / np.where(c.sequence_parallel, c.tp, 1)


def routed_rows(problem: Problem, c: Candidates) -> Column:
    """Return the rows that a rank sends to the experts of one layer, [rows].

    Dropless top_k for every token; with a capacity that many for every expert, used or not.
    """
    moe, asked = problem.model.experts, problem.training.expert_capacity
    assert moe is not None, "rows are routed only in a model with experts"
    own = sharded_tokens(problem, c)
    if asked is None:
        return own * moe.top_k
    sizes, inverse = np.unique(own, return_inverse=True)
    capacities = [
        expert_capacity(
            int(size),
            moe.num_experts,
            moe.top_k,
            asked.factor,
            asked.convention,
            asked.min_capacity,
            asked.alignment,
        )
        for size in sizes
    ]
    return moe.num_experts * np.array(capacities, dtype=float)[inverse]


def expert_skews(problem: Problem, c: Candidates) -> tuple[Column, Column]:
    """Return rows of the hottest expert rank over the mean, [rows]: over layers, and the worst.

    One with a capacity: every expert then has as many rows, and what is too much is dropped.
    """
    moe, training = problem.model.experts, problem.training
    if moe is None or training.expert_load is None or training.expert_capacity is not None:
        return np.ones(len(c)), np.ones(len(c))
    shares = expert_shares(moe, len(problem.model.moe_layers), training.expert_load)
    degrees, rows = np.unique(c.ep, return_inverse=True)
    mean, worst = zip(*(skews(shares, int(ep)) for ep in degrees), strict=True)
    return np.array(mean)[rows], np.array(worst)[rows]


def key_value_bytes(problem: Problem, c: Candidates) -> Column:
    """Return bytes of the keys and values of a micro-batch's own tokens on one rank, [rows]."""
    a = problem.model.attention
    if isinstance(a, LatentAttention):
        width = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim) / c.tp
    else:
        width = 2 * np.maximum(a.num_kv_heads / c.tp, 1) * a.head_dim
    return tokens(problem, c) * width * weight_bytes(problem.training)


def stage_send(problem: Problem, c: Candidates, ends: Column) -> Communication:
    """Return the send of one micro-batch's activations, or of their gradients, to the next stage.

    A rank sends both ways from every chunk, but for the model's ``ends`` on it (embedding and
    head, 0 to 2): nothing comes before the one or after the other.
    """
    size = sharded_tokens(problem, c) * problem.model.hidden_size * weight_bytes(problem.training)
    repeats = c.num_micro_batches * (2 * c.virtual_stages - ends)
    return Communication("pp_send", "step", repeats, "pp", "send_recv", size)


def rank_work(problem: Problem, c: Candidates) -> list[Op]:
    """Return the ops that a rank does per step: gradients, parameters, optimizer.

    Sizes are those of the pipeline rank with most parameters.
    """
    held = rank_parameters(problem, c)
    fullest, rows = fullest_profile(*held), np.arange(len(c))
    dense, experts = (params[rows, fullest] for params in held)
    blocks = problem.splits.counts[c.split, fullest]
    ops = [
        *_buckets(problem, c, dense, prefix="", whole="dp_cp", shard="dp_shard_cp"),
        *_units(problem, c, blocks),
        _replicas(problem, c, dense),
        _sequence_parallel_reduce(problem, c, blocks),
    ]
    if problem.model.experts is not None:
        ops += _buckets(problem, c, experts, prefix="expert_", whole="edp", shard="edp")
    if exchanges_embedding(problem.model):
        vocabulary = problem.model.hidden_size * problem.model.vocab_size / c.tp
        # two ranks exchanging S both ways move what one send of S moves
        size = vocabulary * gradient_bytes(problem.training) / _gradient_shards(c)
        tied = np.where(c.pp > 1, 1, 0)
        ops.append(Communication("tied_embedding", "step", tied, "pp", "send_recv", size))
    return [*ops, _optimizer(problem, c, dense, experts)]


# --------------------------------------------------------------------------- attention


def _attention_forward(problem: Problem, c: Candidates, once: Column, kind: BlockKind) -> list[Op]:
    model, training = problem.model, problem.training
    h, a, t, tok = model.hidden_size, model.attention, c.tp, tokens(problem, c)
    ops: list[Op] = []
    gathered = h  # elements per token that the tensor-parallel ranks exchange
    if isinstance(a, LatentAttention):
        # The narrow products have whole weights on every rank and run on its own tokens; what is
        # gathered is the latent (Megatron-LM, multi_latent_attention).
        local = sharded_tokens(problem, c)
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        q_in = h if a.q_lora_rank is None else a.q_lora_rank
        kv_latent = a.kv_lora_rank + a.qk_rope_head_dim
        gathered = q_in + kv_latent
        if a.q_lora_rank is not None:
            ops.append(_gemm("attention_q_down", once, local, a.q_lora_rank, h))
        ops += [
            _gemm("attention_q", once, tok, a.num_heads * qk / t, q_in),
            _gemm("attention_kv_down", once, local, kv_latent, h),
            _gemm(
                "attention_kv",
                once,
                tok,
                a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) / t,
                a.kv_lora_rank,
            ),
            *_indexer_forward(problem, c, once),
        ]
        head_dim, kv_heads = qk, a.num_heads / t
        out_width = a.num_heads * a.v_head_dim / t
    else:
        head_dim = a.head_dim
        kv_heads = np.maximum(a.num_kv_heads / t, 1)
        out_width = a.num_heads * a.head_dim / t
        kv_width = 2 * kv_heads * a.head_dim
        ops.append(_gemm("attention_qkv", once, tok, out_width + kv_width, h))
    flop = attention_flop_per_token(model, kind, training.seq_len, training.packing)
    length = attended(training.seq_len, training.packing, window_of(model, kind)).kernel_length
    own = key_value_bytes(problem, c)
    hops = (c.cp - 1) * once * (c.context_exchange == _RING)
    gathers = once * ((c.cp > 1) & (c.context_exchange != _RING))
    batch = c.micro_batch_size * (training.seq_len / length)
    core: list[Op] = [
        AttentionCore(
            "attention_core",
            "forward",
            once,
            tok * flop / t,
            length / c.cp,
            batch,
            a.num_heads / t,
            kv_heads,
            head_dim,
        )
    ]
    if not training.fused_attention:
        core = _unfused_core(problem, c, once, length, batch * a.num_heads / t, head_dim)
    return [
        *ops,
        Communication("cp_ring", "forward", hops, "cp", "send_recv", own),
        Communication("cp_gather", "forward", gathers, "cp", "all_gather", c.cp * own),
        *core,
        _gemm("attention_out", once, tok, h, out_width),
        *_tensor_parallel_pair("attention", problem, c, once, gathered),
    ]


def _unfused_core(
    problem: Problem,
    c: Candidates,
    once: Column,
    length: float,
    num_matrices: Column,
    head_dim: int,
) -> list[Op]:
    """Return attention as Megatron-LM ran it before FlashAttention: whole score matrices.

    Two batched products, what is masked included; scale, mask and softmax in one kernel; dropout of
    the scores in another, with a byte of mask.

    Args:
        problem: What stays fixed.
        c: Candidates.
        once: One for each candidate.
        length: Keys of a sequence; a rank has ``length / cp`` queries.
        num_matrices: Heads of all sequences on this rank.
        head_dim: Of queries and keys, and taken for values too.
    """
    beta, queries = weight_bytes(problem.training), length / c.cp
    scores = num_matrices * queries * length
    heads = Experts(num_matrices * once, once > 1)
    drops = once * problem.training.dropout
    return [
        _gemm("attention_scores", once, queries, length, head_dim, heads),
        MemoryBound("attention_softmax", "forward", once, 2 * beta * scores),
        MemoryBound("attention_dropout", "forward", drops, (2 * beta + 1) * scores * drops),
        _gemm("attention_context", once, queries, head_dim, length, heads),
    ]


def _indexer_forward(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    """Return the products of a sparse-attention indexer: whole on every tp rank, for all tokens.

    So Megatron-LM computes them (core/transformer/experimental_attention_variant/dsa.py,
    parallel_mode="duplicated"), of inputs gathered once more and kept: every rank's heads need the
    same choice of keys. The scores of that choice are left out, as the choice is
    (``planner.model.families``).
    """
    a, h, tok = problem.model.attention, problem.model.hidden_size, tokens(problem, c)
    if not isinstance(a, LatentAttention) or a.indexer is None:
        return []
    i, latent = a.indexer, a.q_lora_rank
    assert latent is not None, "LatentAttention checks it"
    joined = tok * (h + latent) * weight_bytes(problem.training)
    sharded = once * c.sequence_parallel
    return [
        Communication("indexer_tp_join", "forward", sharded, "tp", "all_gather", joined),
        _gemm("indexer_q", once, tok, i.num_heads * i.head_dim, latent),
        _gemm("indexer_k", once, tok, i.head_dim + i.num_heads, h),
    ]


def _tensor_parallel_pair(
    part: str, problem: Problem, c: Candidates, once: Column, gathered: int | None = None
) -> list[Op]:
    """Return the forward collectives around one column-split and one row-split product.

    ``gathered`` is the width of the input, where it is not the hidden size.
    """
    h = problem.model.hidden_size
    per_element = tokens(problem, c) * weight_bytes(problem.training)
    size = per_element * h
    sharded = once * c.sequence_parallel
    whole = once * ((c.tp > 1) & ~c.sequence_parallel)
    return [
        Communication(
            f"{part}_tp_gather",
            "forward",
            sharded,
            "tp",
            "all_gather",
            per_element * (gathered or h),
        ),
        Communication(f"{part}_tp_scatter", "forward", sharded, "tp", "reduce_scatter", size),
        Communication(f"{part}_tp_reduce", "forward", whole, "tp", "all_reduce", size),
    ]


# ------------------------------------------------------------------------ feed-forward


def _dense_forward(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    h, ffn, tok = problem.model.hidden_size, problem.model.feed_forward, tokens(problem, c)
    up = (2 if ffn.gated else 1) * ffn.hidden_size / c.tp
    return [
        _gemm("ffn_up", once, tok, up, h),
        _gemm("ffn_down", once, tok, h, ffn.hidden_size / c.tp),
        *_tensor_parallel_pair("ffn", problem, c, once),
    ]


def _moe_forward(problem: Problem, c: Candidates, once: Column, skew: Column | float) -> list[Op]:
    """Return router, exchanges and experts; a capacity is known to all, so no counts are sent.

    Exchanges and experts have the rows of the hottest rank, whose way in is the narrowest, as if
    its local experts were equally hot. Its own rows are no more than another's.
    """
    model, beta = problem.model, weight_bytes(problem.training)
    moe = model.experts
    assert moe is not None, "a moe block exists only in a model with experts"
    h, tok = model.hidden_size, sharded_tokens(problem, c)
    routed = routed_rows(problem, c)
    own = routed * h * beta
    sent = own * skew
    num_local = moe.num_experts / c.ep
    rows = routed * skew * c.etp / num_local  # per local expert
    counted = once * ((c.ep > 1) & (problem.training.expert_capacity is None))
    counts = _COUNT_BYTES * (moe.num_experts + c.ep)
    width = moe.expert_hidden_size / c.etp
    experts = Experts(num_local * once, once * skew > 1)
    up = (2 if moe.gated else 1) * width
    several_etp = once * (c.etp > 1)
    ops: list[Op] = [
        _gemm("router", once, tok, moe.num_experts, h),
        Communication("ep_counts", "forward", counted, "ep", "all_to_all", counts),
        Communication("ep_dispatch", "forward", once, "ep", "all_to_all", sent),
        Communication("etp_gather", "forward", several_etp, "etp", "all_gather", sent * c.etp),
        _gemm("experts_up", once, rows, up, h, experts),
        _gemm("experts_down", once, rows, h, width, experts),
        Communication("etp_scatter", "forward", several_etp, "etp", "reduce_scatter", sent * c.etp),
        Communication("ep_combine", "forward", once, "ep", "all_to_all", sent),
        # tokens are copied into expert order, and back weighted by their gate
        MemoryBound("permute", "forward", once, 4 * own, num_kernels=2),
    ]
    if moe.shared_mix != "sum":
        mixed = {"gate": 1, "coefficients": 2}[moe.shared_mix]
        ops.append(_gemm("shared_gate", once, tok, mixed, h))
    if moe.shared_hidden_size:
        shared_up = (2 if moe.gated else 1) * moe.shared_hidden_size / c.tp
        whole = tokens(problem, c)
        ops += [
            _gemm("shared_expert_up", once, whole, shared_up, h),
            _gemm("shared_expert_down", once, whole, h, moe.shared_hidden_size / c.tp),
            *_tensor_parallel_pair("shared_expert", problem, c, once),
        ]
    return ops


def _element_wise(
    problem: Problem, c: Candidates, once: Column, kind: BlockKind, skew: Column | float
) -> list[Op]:
    """Return norms, residual additions and the activation function: elements read and written."""
    model, beta = problem.model, weight_bytes(problem.training)
    outside = sharded_tokens(problem, c) * beta
    inside = tokens(problem, c) * beta / c.tp
    h = model.hidden_size
    if has_experts(model, kind):
        moe = model.experts
        assert moe is not None, "has_experts says so"
        width, gated = moe.shared_hidden_size, moe.gated
        routed = routed_rows(problem, c) * skew * beta * moe.expert_hidden_size
    else:
        width, gated, routed = model.feed_forward.hidden_size, model.feed_forward.gated, 0.0 * once
    fused = problem.training.fused_kernels
    per_element = (3 if gated else 2) if fused else _UNFUSED_ACTIVATION[gated]
    # one input and both halves in and the sum out, or twice an input and a half
    residual = 4 if model.parallel_attention else 2 * 3
    norms = model.layer_norms + (model.experts is not None and model.experts.shared_norm)
    passes, kernels = (2, 1) if fused else _UNFUSED_NORM
    return [
        MemoryBound("norms", "forward", once, norms * passes * h * outside, norms * kernels),
        MemoryBound("residual", "forward", once, residual * h * outside, num_kernels=2),
        MemoryBound("activation", "forward", once, per_element * width * inside),
        MemoryBound("expert_activation", "forward", once, per_element * routed),
    ]


def _casts(problem: Problem, c: Candidates, ops: Iterable[Op]) -> list[Op]:
    """Return what products below 16 bits cast: input, and output gradient.

    Each is read once and written twice, as it is and transposed or quantised along the other
    dimension, for two products read it (Transformer Engine). Weights are cast once a step.
    """
    precision = problem.training.precision
    if precision not in CAST_PRECISIONS:
        return []
    elements: dict[Phase, Column] = {}
    kernels: dict[Phase, int] = {}
    for op in ops:
        cast = isinstance(op, Gemm) and op.name not in KEPT_IN_16_BITS
        if isinstance(op, Gemm) and cast and op.phase != "weight_gradient":
            groups = 1.0 if op.experts is None else op.experts.num_local
            more = op.repeats * op.m * op.k * groups
            elements[op.phase] = elements.get(op.phase, np.zeros(len(c))) + more
            kernels[op.phase] = kernels.get(op.phase, 0) + 1
    moved = weight_bytes(problem.training) + 2 * OPERAND_BYTES[precision]
    return [
        MemoryBound("casts", phase, np.ones(len(c)), moved * number, kernels[phase])
        for phase, number in elements.items()
    ]


def _gradient_accumulation(problem: Problem, c: Candidates, kind: BlockKind) -> list[Op]:
    """Return what adds a micro-batch's weight gradients to those before it.

    Accumulated in fp32 and fused, a product's own output is read and written (Megatron-LM,
    ``--gradient-accumulation-fusion``): nothing beside it. Else a kernel reads the gradient and
    reads and writes the sum; gradients that are scattered at once are copied to be sent. Those in
    fp16 are summed as computed, an fp32 copy beside them is made once a step.
    """
    training = problem.training
    if training.main_grads == "fp32" and training.fused_kernels:
        return []
    computed = weight_bytes(training)
    is_same = training.main_grads == "same" or training.precision == "fp16"
    held = computed if is_same else max(4, computed)
    dense, experts = own_share(problem, c, kind)
    moved = (dense + experts) * (computed + 2 * held)
    return [MemoryBound("gradient_accumulation", "weight_gradient", np.ones(len(c)), moved)]


# ----------------------------------------------------------------------- first and last


def _embedding(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    model, beta = problem.model, weight_bytes(problem.training)
    size = tokens(problem, c) * model.hidden_size * beta
    looked_up = 2 * size
    sharded = once * c.sequence_parallel
    whole = once * ((c.tp > 1) & ~c.sequence_parallel)
    return [
        MemoryBound("embedding", "forward", once, looked_up),
        Communication("embedding_tp_scatter", "forward", sharded, "tp", "reduce_scatter", size),
        Communication("embedding_tp_reduce", "forward", whole, "tp", "all_reduce", size),
        MemoryBound("embedding", "weight_gradient", once, looked_up),
        Communication("embedding_tp_gather", "backward", sharded, "tp", "all_gather", size),
    ]


def _projection_forward(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    """Return what comes before the layer of a module for multi-token prediction.

    Hidden state and embedding are normed, put together and projected from 2h to h. The weight is
    split over tp by its output, which is gathered whole (Megatron-LM, multi_token_prediction.py).
    """
    model, tok = problem.model, tokens(problem, c)
    h, beta = model.hidden_size, weight_bytes(problem.training)
    return [
        MemoryBound("mtp_norms", "forward", once, 2 * 2 * h * beta * sharded_tokens(problem, c)),
        Communication(
            "mtp_tp_gather",
            "forward",
            once * c.sequence_parallel,
            "tp",
            "all_gather",
            2 * h * beta * tok,
        ),
        _gemm("mtp_projection", once, tok, h / c.tp, 2 * h),
        Communication(
            "mtp_tp_join", "forward", once * (c.tp > 1), "tp", "all_gather", h * beta * tok
        ),
    ]


def _head(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    """Return final norm, vocabulary product and loss; logits stay split over tp."""
    model, beta = problem.model, weight_bytes(problem.training)
    h, tok = model.hidden_size, tokens(problem, c)
    size = tok * h * beta
    logits = tok * model.vocab_size / c.tp
    sharded = once * c.sequence_parallel
    regathered = sharded * (not keeps_gathered_inputs(problem.framework))
    whole = once * ((c.tp > 1) & ~c.sequence_parallel)
    split = once * (c.tp > 1)
    wide = max(4, beta)  # bytes of the loss's numbers
    norm = 2 * h * sharded_tokens(problem, c) * beta
    product = _gemm("head", once, tok, model.vocab_size / c.tp, h)
    return [
        MemoryBound("final_norm", "forward", once, norm),
        Communication("head_tp_gather", "forward", sharded, "tp", "all_gather", size),
        product,
        # logits in, wide copy out and in again for max, exponential and sum
        MemoryBound("loss", "forward", once, logits * (beta + 3 * wide)),
        Communication("loss_tp_reduce", "forward", 3 * split, "tp", "all_reduce", wide * tok),
        MemoryBound("loss", "backward", once, logits * (wide + beta)),
        *_gemm_backward(product),
        Communication("head_tp_regather", "weight_gradient", regathered, "tp", "all_gather", size),
        Communication("head_tp_scatter", "backward", sharded, "tp", "reduce_scatter", size),
        Communication("head_tp_reduce", "backward", whole, "tp", "all_reduce", size),
        MemoryBound("final_norm", "backward", once, 1.5 * norm),
    ]


# ------------------------------------------------------------------ backward, recompute

# Elements that torch's operations read and write one by one: of a norm, cast to fp32, squared,
# averaged, scaled, cast back and weighted, counted in 16-bit elements, and its kernels; of an
# activation function, plain or gated.
_UNFUSED_NORM: Final = (16, 6)
_UNFUSED_ACTIVATION: Final = {False: 2, True: 5}
# Elements that the backward of element-wise ops reads and writes, over those of the forward:
# a norm reads input and output gradient and writes one (3 : 2); a residual addition sums two
# gradients (3 : 3); a gated activation reads 3 and writes 2 (5 : 3); permutation is its own
# transpose.
_BACKWARD_BYTES: Final = {
    "norms": 1.5,
    "mtp_norms": 1.5,
    "residual": 1.0,
    "activation": 5 / 3,
    "expert_activation": 5 / 3,
    "permute": 1.0,
    # output and its gradient in, the scores' gradient out; the mask and one gradient each way
    "attention_softmax": 1.5,
    "attention_dropout": 1.0,
}


def _backward(problem: Problem, forward: Iterable[Op]) -> list[Op]:
    """Return the transposed ops of a decoder layer."""
    regathers = not keeps_gathered_inputs(problem.framework)
    ops: list[Op] = []
    for op in forward:
        if isinstance(op, Gemm):
            ops += _gemm_backward(op)
        elif isinstance(op, AttentionCore):
            flop = op.flop * ATTENTION_BACKWARD_FLOP_RATIO.value
            ops.append(replace(op, phase="backward", flop=flop))
        elif isinstance(op, MemoryBound):
            ops.append(
                replace(op, phase="backward", num_bytes=op.num_bytes * _BACKWARD_BYTES[op.name])
            )
        elif isinstance(op, Communication):
            ops += _communication_backward(op, regathers)
    return ops


def _communication_backward(op: Communication, regathers: bool) -> list[Op]:
    again = replace(op, phase="backward")
    if op.name == _FORWARD_ONLY:
        return []
    if op.name == "cp_ring":  # keys and values travel again, with their gradients
        return [replace(again, repeats=2 * op.repeats)]
    if op.name == "cp_gather":
        return [again, replace(again, name="cp_scatter", op="reduce_scatter")]
    if op.name.endswith("_tp_gather"):
        # the stored shard of the input, once more for the weight gradient
        name = op.name.replace("gather", "regather")
        once_more = replace(op, name=name, phase="weight_gradient", repeats=op.repeats * regathers)
        return [again, once_more]
    return [again]


def _recompute(problem: Problem, forward: Iterable[Op], c: Candidates) -> list[Op]:
    """Return the forward ops that are done again before the backward."""
    early = stops_recompute_early(problem.framework) or problem.training.recompute_stops_early
    skipped = (_FORWARD_ONLY, *(_LAST_OPS if early else ()))
    full = c.recompute == _FULL
    cheap = _SELECTIVE_OPS if problem.training.fused_attention else _UNFUSED_SELECTIVE_OPS
    ops: list[Op] = []
    for op in forward:
        if op.name in skipped:
            continue
        again = full | ((c.recompute == _SELECTIVE) & (op.name in cheap))
        ops.append(replace(op, phase="recompute", repeats=op.repeats * again))
    return ops


def _gemm(
    name: str,
    repeats: Column,
    m: Column,
    n: Column | float,
    k: Column | float,
    experts: Experts | None = None,
) -> Gemm:
    rows = np.ones(len(repeats))
    return Gemm(name, "forward", repeats, m * rows, n * rows, k * rows, experts)


def _gemm_backward(op: Gemm) -> list[Op]:
    return [
        replace(op, phase="backward", n=op.k, k=op.n),
        replace(op, phase="weight_gradient", m=op.k, k=op.m),
    ]


# -------------------------------------------------------------------------------- per step


def _buckets(
    problem: Problem, c: Candidates, params: Column, *, prefix: str, whole: Axis, shard: Axis
) -> list[Communication]:
    """Return what ZeRO-0 and 1 send once per step, in buckets.

    ZeRO-0 reduces gradients over ``whole``; ZeRO-1 scatters them and gathers weights over
    ``shard``.
    """
    gradients, weights = gradient_bytes(problem.training), weight_bytes(problem.training)
    ranks = c.edp if shard == "edp" else shards(c)
    zero = c.zero_stage
    bucketed = partial(_bucketed, problem, params)
    return [
        bucketed(f"{prefix}gradient_reduce", whole, "all_reduce", gradients, zero == 0),
        bucketed(f"{prefix}gradient_scatter", shard, "reduce_scatter", gradients, zero == 1, ranks),
        bucketed(f"{prefix}parameter_gather", shard, "all_gather", weights, zero == 1, ranks),
    ]


def _units(problem: Problem, c: Candidates, blocks: Column) -> list[Communication]:
    """Return what ZeRO-2 and 3 send: block by block, experts apart from the rest of their layer.

    Gradients are scattered after every backward. Weights are gathered before every forward and
    backward, with ZeRO-2 once per step. The first unit of a pass is gathered and the last one is
    scattered beside nothing. Tied ends on one rank are one unit, as torch wants shared parameters.

    Args:
        problem: What stays fixed.
        c: Candidates.
        blocks: Blocks of each kind on the rank, [rows, kinds].
    """
    with_experts = np.array([has_experts(problem.model, kind) for kind in BLOCK_KINDS])
    joined = problem.model.tied_embeddings & (c.pp == 1)
    blocks = np.where(joined[:, None] & (np.array(BLOCK_KINDS) == "head"), 0, blocks)
    ops: list[Communication] = []
    for kind in block_kinds(problem.model):
        index = BLOCK_KINDS.index(kind)
        dense, experts = block_share(problem, c, kind)
        if kind == "embedding":
            dense = dense + np.where(joined, block_share(problem, c, "head")[0], 0)
        count = blocks[:, index]
        ops += _unit(problem, c, kind, "", "dp_shard_cp", dense, count, *_ends(blocks, index))
        if with_experts[index]:
            ends = _ends(blocks * with_experts, index)
            ops += _unit(problem, c, kind, "expert_", "edp", experts, count, *ends)
    return ops


def _ends(blocks: Column, index: int) -> tuple[Column, Column]:
    """Return where the kind at ``index`` is a rank's first one of the forward, and its last."""
    has = blocks[:, index] > 0
    first = has & (blocks[:, :index].sum(axis=1) == 0)
    return first, has & (blocks[:, index + 1 :].sum(axis=1) == 0)


# Of a layer, as Megatron-LM holds them: both projections of attention and of the feed-forward.
_NUM_MATRICES: Final[dict[BlockKind, int]] = {"embedding": 1, "head": 1}


def _unit(
    problem: Problem,
    c: Candidates,
    kind: BlockKind,
    prefix: str,
    axis: Axis,
    params: Column,
    count: Column,
    first: Column,
    last: Column,
) -> list[Communication]:
    """Return the calls for one kind's units; ``first`` and ``last`` are of the forward."""
    calls = 1 if problem.training.gathers == "layer" else _NUM_MATRICES.get(kind, 4)
    weights = params / calls * weight_bytes(problem.training)
    gradients = params / calls * gradient_bytes(problem.training)
    m, zero = c.num_micro_batches, c.zero_stage

    def call(
        name: str, phase: Phase, op: Collective, size: Column, passes: Column, edges: Column
    ) -> Communication:
        repeats = count * passes * calls
        return Communication(prefix + name, phase, repeats, axis, op, size, passes, edges, kind)

    gathers = np.where(zero == 3, m, zero == 2)
    regathers, scatters = m * (zero == 3), m * (zero >= 2)
    return [
        call("parameter_gather", "forward", "all_gather", weights, gathers, first),
        call("parameter_regather", "backward", "all_gather", weights, regathers, last),
        call("gradient_scatter", "backward", "reduce_scatter", gradients, scatters, first),
    ]


def _replicas(problem: Problem, c: Candidates, params: Column) -> Communication:
    """Return the reduction of a shard's gradients over its replicas (hybrid sharding).

    Once per step; of every bucket's shard, or in buckets of what is sharded already.
    """
    several = (c.zero_stage > 0) & (c.dp_replicate > 1)
    ranks = shards(c) / _gradient_shards(c)
    own, of_shard = params / _gradient_shards(c), gradient_bytes(problem.training) / ranks
    name = "gradient_replica_reduce"
    return _bucketed(problem, own, name, "dp_replicate", "all_reduce", of_shard, several, ranks)


def _bucketed(
    problem: Problem,
    params: Column,
    name: str,
    axis: Axis,
    op: Collective,
    element_bytes: Column | float,
    occurs: Column,
    num_shards: Column | int = 1,
) -> Communication:
    """Return one call per bucket; buckets are equal, the last one padded.

    A bucket holds parameters, whatever is sent of them, and as many for each of its ``num_shards``.
    """
    full = GRADIENT_BUCKET_BYTES[problem.framework].value / gradient_bytes(problem.training)
    calls = np.ceil(params / full)
    bucket = np.ceil(params / np.maximum(calls, 1) / num_shards) * num_shards
    return Communication(name, "step", calls * occurs, axis, op, bucket * element_bytes)


def _sequence_parallel_reduce(problem: Problem, c: Candidates, blocks: Column) -> Communication:
    """Return the sum over tp of gradients of which every rank has seen its own tokens alone.

    One flat buffer per step (Megatron-LM, finalize_model_grads.py), of shards where gradients are
    sharded.
    """
    present = block_kinds(problem.model)
    of_kind = [
        sequence_parallel_parameters(problem.model, kind) if kind in present else 0
        for kind in BLOCK_KINDS
    ]
    params = blocks @ np.array(of_kind)
    size = params / _gradient_shards(c) * gradient_bytes(problem.training)
    occurs = np.where(params > 0, c.sequence_parallel, 0)
    name = "sequence_parallel_gradient_reduce"
    return Communication(name, "step", occurs, "tp", "all_reduce", size)


def _gradient_shards(c: Candidates) -> Column:
    """Return ranks that share out the dense gradients, [rows]."""
    return np.where(c.zero_stage >= 2, shards(c), 1)


def optimizer_moved_bytes(training: TrainingSpec) -> float:
    """Return bytes read and written per parameter: gradients, and every state both ways.

    Where there is no master copy the weights themselves are read and written.
    """
    weights, states = weight_bytes(training), optimizer_bytes(training)
    is_copied = weights < 4 and training.master_weights == "copy"
    reads = max(gradient_bytes(training), held_gradient_bytes(training) - weights)
    return reads + 2 * states + (weights if is_copied else 2 * held_weight_bytes(training))


def _optimizer(problem: Problem, c: Candidates, dense: Column, experts: Column) -> MemoryBound:
    """Return the update on this rank's share, unless the host does it."""
    training, sharded = problem.training, c.zero_stage > 0
    params = dense / np.where(sharded, shards(c), 1) + experts / np.where(sharded, c.edp, 1)
    here = np.full(len(c), float("optimizer" not in training.offload))
    return MemoryBound("optimizer", "step", here, params * optimizer_moved_bytes(training))
