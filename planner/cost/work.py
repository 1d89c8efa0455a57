"""What a training step does: a fixed vocabulary of ops, no hardware in it.

Every op says how often it happens (``repeats``), in which phase, and its size: matrix shapes,
flop, bytes, or the message of a collective. *Block ops* happen per block and micro-batch on one
rank; *rank ops* per step. Published volumes and flop counts are the exact oracles of this file.

Symbols: ``T`` = micro_batch_size * seq_len / cp tokens of a micro-batch on one rank, ``t`` = tp,
``h`` hidden, ``β`` bytes per element. Tensor parallelism is Megatron's (1909.08053): per attention
and per feed-forward one column-split and one row-split product. With sequence parallelism
(2205.05198) an all_gather precedes, a reduce_scatter follows, and the backward gathers the stored
shards once more; without it one all_reduce follows in each direction. Context parallelism is
the ring over keys and values. Experts: tokens sharded over tp go to their experts by all_to_all,
routing balanced. Attention is fused (no score matrix is stored or moved).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from planner.constants import ATTENTION_BACKWARD_FLOP_RATIO, GRADIENT_BUCKET_BYTES
from planner.cost.problem import Problem, gradient_bytes, weight_bytes
from planner.cost.shares import rank_parameters, shards
from planner.layout.candidates import RECOMPUTE_MODES, Candidates, Column
from planner.model.blocks import BlockKind, attention_flop_per_token
from planner.model.spec import LatentAttention
from planner.plan import Axis, Collective, Phase

__all__ = [
    "BLOCK_COLUMNS",
    "DTENSOR_MODULES_PER_LAYER",
    "RANK_COLUMNS",
    "AttentionCore",
    "Communication",
    "Gemm",
    "HostWork",
    "MemoryBound",
    "Op",
    "block_work",
    "rank_work",
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
)

# The only columns that rank_work reads.
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
)

# What the executor's tensor parallelism wraps in a layer: 7 products and the input of 2 blocks.
DTENSOR_MODULES_PER_LAYER: Final = 9

_FULL: Final = RECOMPUTE_MODES.index("full")
_SELECTIVE: Final = RECOMPUTE_MODES.index("selective")
# Cheap to redo, large to keep: Megatron's --recompute-modules layernorm moe_act. It has no module
# that redoes the activation function of a dense feed-forward alone.
_SELECTIVE_OPS: Final = ("norms", "expert_activation")


@dataclass(frozen=True, slots=True)
class Gemm:
    """Products [m, k] x [k, n], ``groups`` of them in one kernel."""

    name: str
    phase: Phase
    repeats: Column
    m: Column
    n: Column
    k: Column
    groups: Column

    @property
    def flop(self) -> Column:
        """Flop of one kernel."""
        return 2.0 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Softmax(QK)V, fused; ``flop`` of one causal pass.

    ``num_heads`` counts the heads of all sequences of the micro-batch, ``seq_len`` the queries
    of one sequence on this rank.
    """

    name: str
    phase: Phase
    repeats: Column
    flop: Column
    seq_len: Column
    num_heads: Column
    head_dim: int


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Element-wise work: ``num_bytes`` read and written."""

    name: str
    phase: Phase
    repeats: Column
    num_bytes: Column


@dataclass(frozen=True, slots=True)
class HostWork:
    """Work of the framework itself, on the CPU: ``num_calls`` module passes."""

    name: str
    phase: Phase
    repeats: Column
    num_calls: int


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective on an axis; ``size_bytes`` is nccl-tests' S.

    A rank op is done in ``passes`` per step, each beside one forward or backward.
    """

    name: str
    phase: Phase
    repeats: Column
    axis: Axis
    op: Collective
    size_bytes: Column
    passes: Column | float = 1.0


Op: TypeAlias = Gemm | AttentionCore | MemoryBound | HostWork | Communication


def block_work(problem: Problem, c: Candidates, kind: BlockKind) -> list[Op]:
    """Return the ops of one block of ``kind`` for one micro-batch on one rank."""
    once = np.ones(len(c))
    if kind == "embedding":
        return _embedding(problem, c, once)
    if kind == "head":
        return _head(problem, c, once)
    forward = [*_attention_forward(problem, c, once)]
    if kind == "dense":
        forward += _dense_forward(problem, c, once)
    else:
        forward += _moe_forward(problem, c, once)
    forward += _element_wise(problem, c, once, kind)
    if problem.framework == "executor":
        split = once * (c.tp > 1)
        forward.append(HostWork("dtensor_dispatch", "forward", split, DTENSOR_MODULES_PER_LAYER))
    return [*forward, *_backward(forward, c), *_recompute(forward, c)]


def tokens(problem: Problem, c: Candidates) -> Column:
    """Return T: tokens of a micro-batch on one rank, [rows]."""
    return c.micro_batch_size * problem.training.seq_len / c.cp


def sharded_tokens(problem: Problem, c: Candidates) -> Column:
    """Return tokens outside the tensor-parallel regions: T / t with sequence parallelism."""
    return tokens(problem, c) / np.where(c.sequence_parallel, c.tp, 1)


def stage_send(problem: Problem, c: Candidates) -> Communication:
    """Return the send of one micro-batch's activations to the next stage.

    Happens forward and backward at every boundary: twice per micro-batch and chunk.
    """
    size = sharded_tokens(problem, c) * problem.model.hidden_size * weight_bytes(problem.training)
    repeats = np.where(c.pp > 1, 2 * c.num_micro_batches * c.virtual_stages, 0)
    return Communication("pp_send", "step", repeats, "pp", "send_recv", size)


def rank_work(problem: Problem, c: Candidates) -> list[Op]:
    """Return the ops that a rank does per step: gradients, parameters, optimizer.

    Sizes are those of the pipeline rank with most parameters. Gradients are reduced in buckets;
    with ZeRO-2 and 3 in every micro-batch, else once.
    """
    of_dense, of_experts = rank_parameters(problem, c)
    fullest = np.argmax(of_dense + of_experts, axis=1)
    rows = np.arange(len(c))
    dense, experts = of_dense[rows, fullest], of_experts[rows, fullest]
    ops = _data_parallel(problem, c, dense, prefix="", whole="dp_cp", shard="dp_shard_cp")
    ops.append(_replicas(problem, c, dense))
    if problem.model.experts is not None:
        ops += _data_parallel(problem, c, experts, prefix="expert_", whole="edp", shard="edp")
    if problem.model.tied_embeddings:
        vocabulary = problem.model.hidden_size * problem.model.vocab_size / c.tp
        # two ranks exchanging S both ways move what one send of S moves
        size = vocabulary * gradient_bytes(problem.training)
        tied = np.where(c.pp > 1, 1, 0)
        ops.append(Communication("tied_embedding", "step", tied, "pp", "send_recv", size))
    ops.append(_optimizer(problem, c, dense, experts))
    return ops


# --------------------------------------------------------------------------- attention


def _attention_forward(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    model, beta = problem.model, weight_bytes(problem.training)
    h, a, t, tok = model.hidden_size, model.attention, c.tp, tokens(problem, c)
    ops: list[Op] = []
    gathered = h  # elements per token that the tensor-parallel ranks exchange
    if isinstance(a, LatentAttention):
        # The narrow products have whole weights on every rank and run on its own tokens; what is
        # gathered is the latent (Megatron-LM, multi_latent_attention).
        own = sharded_tokens(problem, c)
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        q_in = h if a.q_lora_rank is None else a.q_lora_rank
        kv_latent = a.kv_lora_rank + a.qk_rope_head_dim
        gathered = q_in + kv_latent
        if a.q_lora_rank is not None:
            ops.append(_gemm("attention_q_down", once, own, a.q_lora_rank, h))
        ops += [
            _gemm("attention_q", once, tok, a.num_heads * qk / t, q_in),
            _gemm("attention_kv_down", once, own, kv_latent, h),
            _gemm(
                "attention_kv",
                once,
                tok,
                a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) / t,
                a.kv_lora_rank,
            ),
        ]
        head_dim = qk
        out_width = a.num_heads * a.v_head_dim / t
        kv_width = a.num_heads * (qk + a.v_head_dim) / t
    else:
        head_dim = a.head_dim
        kv_heads = np.maximum(a.num_kv_heads / t, 1)
        out_width = a.num_heads * a.head_dim / t
        kv_width = 2 * kv_heads * a.head_dim
        ops.append(_gemm("attention_qkv", once, tok, out_width + kv_width, h))
    flop = tok * attention_flop_per_token(model, problem.training.seq_len) / t
    hops = (c.cp - 1) * once
    queries = problem.training.seq_len / c.cp
    heads = c.micro_batch_size * a.num_heads / t
    return [
        *ops,
        Communication("cp_ring", "forward", hops, "cp", "send_recv", tok * kv_width * beta),
        AttentionCore("attention_core", "forward", once, flop, queries, heads, head_dim),
        _gemm("attention_out", once, tok, h, out_width),
        *_tensor_parallel_pair("attention", problem, c, once, gathered),
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


def _moe_forward(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    model, beta = problem.model, weight_bytes(problem.training)
    moe = model.experts
    assert moe is not None, "a moe block exists only in a model with experts"
    h, tok = model.hidden_size, sharded_tokens(problem, c)
    sent = tok * moe.top_k * h * beta
    num_local = moe.num_experts / c.ep
    rows = tok * moe.top_k * c.etp / num_local  # per local expert, routing balanced
    up = (2 if moe.gated else 1) * moe.expert_hidden_size / c.etp
    several_etp = once * (c.etp > 1)
    ops: list[Op] = [
        _gemm("router", once, tok, moe.num_experts, h),
        Communication("ep_dispatch", "forward", once, "ep", "all_to_all", sent),
        Communication("etp_gather", "forward", several_etp, "etp", "all_gather", sent * c.etp),
        _gemm("experts_up", once, rows, up, h, groups=num_local),
        _gemm("experts_down", once, rows, h, moe.expert_hidden_size / c.etp, groups=num_local),
        Communication("etp_scatter", "forward", several_etp, "etp", "reduce_scatter", sent * c.etp),
        Communication("ep_combine", "forward", once, "ep", "all_to_all", sent),
        # tokens are copied into expert order, and back weighted by their gate
        MemoryBound("permute", "forward", once, 4 * sent),
    ]
    if moe.shared_hidden_size:
        shared_up = (2 if moe.gated else 1) * moe.shared_hidden_size / c.tp
        whole = tokens(problem, c)
        ops += [
            _gemm("shared_expert_up", once, whole, shared_up, h),
            _gemm("shared_expert_down", once, whole, h, moe.shared_hidden_size / c.tp),
            *_tensor_parallel_pair("shared_expert", problem, c, once),
        ]
    return ops


def _element_wise(problem: Problem, c: Candidates, once: Column, kind: BlockKind) -> list[Op]:
    """Return norms, residual additions and the activation function: elements read and written."""
    model, beta = problem.model, weight_bytes(problem.training)
    outside = sharded_tokens(problem, c) * beta
    inside = tokens(problem, c) * beta / c.tp
    h = model.hidden_size
    if kind == "moe" and model.experts is not None:
        moe = model.experts
        width, gated = moe.shared_hidden_size, moe.gated
        routed = outside * moe.top_k * moe.expert_hidden_size
    else:
        width, gated, routed = model.feed_forward.hidden_size, model.feed_forward.gated, 0.0 * once
    per_element = 3 if gated else 2
    return [
        MemoryBound("norms", "forward", once, 2 * 2 * h * outside),
        MemoryBound("residual", "forward", once, 2 * 3 * h * outside),
        MemoryBound("activation", "forward", once, per_element * width * inside),
        MemoryBound("expert_activation", "forward", once, per_element * routed),
    ]


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


def _head(problem: Problem, c: Candidates, once: Column) -> list[Op]:
    """Return final norm, vocabulary product and loss; logits stay split over tp."""
    model, beta = problem.model, weight_bytes(problem.training)
    h, tok = model.hidden_size, tokens(problem, c)
    size = tok * h * beta
    logits = tok * model.vocab_size / c.tp
    sharded = once * c.sequence_parallel
    whole = once * ((c.tp > 1) & ~c.sequence_parallel)
    split = once * (c.tp > 1)
    norm = 2 * h * sharded_tokens(problem, c) * beta
    product = _gemm("head", once, tok, model.vocab_size / c.tp, h)
    return [
        MemoryBound("final_norm", "forward", once, norm),
        Communication("head_tp_gather", "forward", sharded, "tp", "all_gather", size),
        product,
        # logits in, fp32 copy out and in again for max, exponential and sum
        MemoryBound("loss", "forward", once, logits * (beta + 3 * 4)),
        Communication("loss_tp_reduce", "forward", 3 * split, "tp", "all_reduce", 4 * tok),
        MemoryBound("loss", "backward", once, logits * (4 + beta)),
        *_gemm_backward(product),
        Communication("head_tp_regather", "weight_gradient", sharded, "tp", "all_gather", size),
        Communication("head_tp_scatter", "backward", sharded, "tp", "reduce_scatter", size),
        Communication("head_tp_reduce", "backward", whole, "tp", "all_reduce", size),
        MemoryBound("final_norm", "backward", once, 1.5 * norm),
    ]


# ------------------------------------------------------------------ backward, recompute

# Elements that the backward of element-wise ops reads and writes, over those of the forward:
# a norm reads input and output gradient and writes one (3 : 2); a residual addition sums two
# gradients (3 : 3); a gated activation reads 3 and writes 2 (5 : 3); permutation is its own
# transpose.
_BACKWARD_BYTES: Final = {
    "norms": 1.5,
    "residual": 1.0,
    "activation": 5 / 3,
    "expert_activation": 5 / 3,
    "permute": 1.0,
}


def _backward(forward: Iterable[Op], c: Candidates) -> list[Op]:
    """Return the transposed ops of a decoder layer."""
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
        elif isinstance(op, HostWork) or op.axis == "cp":
            # a module's backward makes two calls; keys and values travel again, with gradients
            ops.append(replace(op, phase="backward", repeats=2 * op.repeats))
        else:
            ops.append(replace(op, phase="backward"))
            if op.axis == "tp" and op.op == "all_gather":
                # the stored shard of the input, once more for the weight gradient
                name = op.name.replace("gather", "regather")
                ops.append(replace(op, name=name, phase="weight_gradient"))
    return ops


def _recompute(forward: Iterable[Op], c: Candidates) -> list[Op]:
    """Return the forward ops that are done again before the backward."""
    full = c.recompute == _FULL
    ops: list[Op] = []
    for op in forward:
        again = full | ((c.recompute == _SELECTIVE) & (op.name in _SELECTIVE_OPS))
        ops.append(replace(op, phase="recompute", repeats=op.repeats * again))
    return ops


def _gemm(
    name: str,
    repeats: Column,
    m: Column,
    n: Column | float,
    k: Column | float,
    groups: Column | float = 1.0,
) -> Gemm:
    rows = np.ones(len(repeats))
    return Gemm(name, "forward", repeats, m * rows, n * rows, k * rows, groups * rows)


def _gemm_backward(op: Gemm) -> list[Op]:
    return [
        replace(op, phase="backward", n=op.k, k=op.n),
        replace(op, phase="weight_gradient", m=op.k, k=op.m),
    ]


# -------------------------------------------------------------------------------- per step


def _data_parallel(
    problem: Problem, c: Candidates, params: Column, *, prefix: str, whole: Axis, shard: Axis
) -> list[Op]:
    """Return gradient reduction and parameter gathering by ZeRO stage.

    ZeRO-0 reduces over ``whole``; from ZeRO-1 gradients are scattered and parameters gathered over
    ``shard``: once, but ZeRO-2 and 3 scatter and ZeRO-3 gathers for every micro-batch, the latter
    once more in the backward.
    """
    gradients, weights = gradient_bytes(problem.training), weight_bytes(problem.training)
    zero, m = c.zero_stage, c.num_micro_batches
    once = np.ones_like(m)
    scatters = np.where(zero >= 2, m, once) * (zero > 0)
    gathers = np.where(zero == 3, m, once) * (zero > 0)
    bucketed = partial(_bucketed, problem, params)
    return [
        bucketed(f"{prefix}gradient_reduce", whole, "all_reduce", gradients, zero == 0),
        bucketed(f"{prefix}gradient_scatter", shard, "reduce_scatter", gradients, scatters),
        bucketed(f"{prefix}parameter_gather", shard, "all_gather", weights, gathers),
        bucketed(f"{prefix}parameter_regather", shard, "all_gather", weights, m * (zero == 3)),
    ]


def _replicas(problem: Problem, c: Candidates, params: Column) -> Op:
    """Return the reduction of a shard's gradients over its replicas (hybrid sharding)."""
    of_shard = gradient_bytes(problem.training) / shards(c)
    several = (c.zero_stage > 0) & (c.dp_replicate > 1)
    name = "gradient_replica_reduce"
    return _bucketed(problem, params, name, "dp_replicate", "all_reduce", of_shard, several)


def _bucketed(
    problem: Problem,
    params: Column,
    name: str,
    axis: Axis,
    op: Collective,
    element_bytes: Column | float,
    passes: Column,
) -> Communication:
    """Return one call per bucket and pass; a bucket holds parameters, whatever is sent of them."""
    bucket_params = GRADIENT_BUCKET_BYTES[problem.framework].value / gradient_bytes(
        problem.training
    )
    calls = np.maximum(1, np.ceil(params / bucket_params))
    size = params / calls * element_bytes
    return Communication(name, "step", calls * passes, axis, op, size, passes)


def _optimizer(problem: Problem, c: Candidates, dense: Column, experts: Column) -> MemoryBound:
    """Return the update: every state read and written once, on this rank's share."""
    training = problem.training
    wide = max(4, weight_bytes(training))
    reads = gradient_bytes(training) + wide
    writes = wide
    if training.optimizer == "adamw":
        reads += 2 * wide
        writes += 2 * wide
    if weight_bytes(training) < 4:
        writes += weight_bytes(training)
    sharded = c.zero_stage > 0
    params = dense / np.where(sharded, shards(c), 1) + experts / np.where(sharded, c.edp, 1)
    return MemoryBound("optimizer", "step", np.ones(len(c)), params * (reads + writes))
