"""A model as a sequence of few block kinds: embedding, dense, moe, head.

Parameter counts and flop per token as Megatron-LM's training code counts them. Costs per block are
priced once per kind, never per layer.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from planner.model.spec import LatentAttention, ModelSpec

__all__ = [
    "BLOCK_KINDS",
    "BlockKind",
    "ParameterCount",
    "attention_flop_per_token",
    "block_flop_per_token",
    "block_parameters",
    "layer_kinds",
    "model_flop_per_token",
    "parameter_count",
    "sequence_parallel_parameters",
]

BlockKind = Literal["embedding", "dense", "moe", "head"]
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = get_args(BlockKind)


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one block.

    ``attention`` and ``feed_forward`` (dense, shared experts) are matmul weights that tensor
    parallelism splits; ``experts`` are split by etp and ep; ``replicated`` (norms, router,
    biases, learned positions) sits on every rank; ``vocabulary`` is split by tp. Biases behind a
    split output are in truth split too; they are below 0.1 % of a layer and stay replicated here.
    """

    attention: int = 0
    feed_forward: int = 0
    experts: int = 0
    replicated: int = 0
    vocabulary: int = 0

    def total(self) -> int:
        """Return all parameters."""
        return self.attention + self.feed_forward + self.experts + self.replicated + self.vocabulary


def layer_kinds(model: ModelSpec) -> tuple[BlockKind, ...]:
    """Return the kind of every decoder layer, in order."""
    moe = set(model.moe_layers)
    return tuple("moe" if i in moe else "dense" for i in range(model.num_layers))


def block_parameters(model: ModelSpec, kind: BlockKind) -> ParameterCount:
    """Return the parameters of one block of ``kind``.

    The head of a model with tied embeddings owns no vocabulary matrix; the norm before it
    belongs to it.
    """
    h = model.hidden_size
    norm = h if model.norm == "rms" else 2 * h
    if kind == "embedding":
        return ParameterCount(
            vocabulary=h * model.vocab_size, replicated=h * model.learned_positions
        )
    if kind == "head":
        vocabulary = 0 if model.tied_embeddings else h * model.vocab_size
        return ParameterCount(vocabulary=vocabulary, replicated=norm)
    attention, attention_extra = _attention_parameters(model)
    replicated = 2 * norm + attention_extra
    if kind == "dense":
        ffn = model.feed_forward
        biases = (ffn.hidden_size * (2 if ffn.gated else 1) + h) if ffn.bias else 0
        return ParameterCount(
            attention=attention,
            feed_forward=_ffn(h, ffn.hidden_size, ffn.gated),
            replicated=replicated + biases,
        )
    moe = model.experts
    assert moe is not None, "a model with a moe layer has experts: ModelSpec checks it"
    return ParameterCount(
        attention=attention,
        feed_forward=_ffn(h, moe.shared_hidden_size, moe.gated),
        experts=moe.num_experts * _ffn(h, moe.expert_hidden_size, moe.gated),
        replicated=replicated + h * moe.num_experts,
    )


def sequence_parallel_parameters(model: ModelSpec, kind: BlockKind) -> int:
    """Return parameters of a block whose gradients are partial sums over tp.

    With sequence parallelism every tensor-parallel rank has them whole and sees its own tokens
    alone: norms, router, biases behind a row-split product, the narrow products of latent
    attention. Norms of single heads see the rank's heads.
    """
    h, a = model.hidden_size, model.attention
    norm = h if model.norm == "rms" else 2 * h
    if kind == "embedding":
        return 0
    if kind == "head":
        return norm
    if isinstance(a, LatentAttention):
        latent = a.kv_lora_rank * (h + 1) + h * a.qk_rope_head_dim
        attention = latent + (a.q_lora_rank or 0) * (h + 1)
    else:
        has_output_bias = a.bias if a.output_bias is None else a.output_bias
        attention = h * has_output_bias + 2 * a.head_dim * (a.qk_norm == "head")
    if kind == "dense":
        return 2 * norm + attention + h * model.feed_forward.bias
    assert model.experts is not None, "a model with a moe layer has experts: ModelSpec checks it"
    return 2 * norm + attention + h * model.experts.num_experts


def parameter_count(model: ModelSpec, *, active: bool = False) -> int:
    """Return the parameters of the model; with ``active``, those one token passes."""
    total = sum(block_parameters(model, kind).total() for kind in ("embedding", "head"))
    for kind in ("dense", "moe"):
        layers = layer_kinds(model).count(kind)
        if layers:
            block = block_parameters(model, kind)
            unused = 0
            if active and model.experts is not None:
                moe = model.experts
                unused = block.experts // moe.num_experts * (moe.num_experts - moe.top_k)
            total += layers * (block.total() - unused)
    return total


def attention_flop_per_token(model: ModelSpec, seq_len: int) -> float:
    """Return forward flop of causal attention cores per token and layer: s · a · (d_qk + d_v)."""
    a = model.attention
    if isinstance(a, LatentAttention):
        d_qk, d_v = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
    else:
        d_qk = d_v = a.head_dim
    return float(seq_len * a.num_heads * (d_qk + d_v))


def block_flop_per_token(model: ModelSpec, kind: BlockKind, seq_len: int) -> float:
    """Return forward flop per token of one block: 2 per active matmul weight, attention causal.

    The embedding lookup has none; norms and activation functions are left out.
    """
    if kind == "embedding":
        return 0.0
    if kind == "head":
        return 2.0 * model.hidden_size * model.vocab_size
    block, moe = block_parameters(model, kind), model.experts
    weights = float(block.attention + block.feed_forward)
    if kind == "moe" and moe is not None:
        weights += block.experts / moe.num_experts * moe.top_k
        weights += model.hidden_size * moe.num_experts
    return 2.0 * weights + attention_flop_per_token(model, seq_len)


def model_flop_per_token(model: ModelSpec, seq_len: int) -> float:
    """Return training flop per token: three times the forward's.

    Recomputation is never counted (that is HFU).
    """
    kinds = (*layer_kinds(model), "head")
    per_kind = {kind: block_flop_per_token(model, kind, seq_len) for kind in set(kinds)}
    return 3.0 * sum(per_kind[kind] for kind in kinds)


def _ffn(hidden_size: int, inner: int, gated: bool) -> int:
    return (3 if gated else 2) * hidden_size * inner


def _attention_parameters(model: ModelSpec) -> tuple[int, int]:
    """Return (matmul weights, what every tensor-parallel rank repeats)."""
    h, a = model.hidden_size, model.attention
    if isinstance(a, LatentAttention):
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        if a.q_lora_rank is None:
            q, q_norm = h * a.num_heads * qk, 0
        else:
            q, q_norm = a.q_lora_rank * (h + a.num_heads * qk), a.q_lora_rank
        kv = a.kv_lora_rank * (h + a.num_heads * (a.qk_nope_head_dim + a.v_head_dim))
        return (
            q + kv + h * a.qk_rope_head_dim + a.num_heads * a.v_head_dim * h,
            q_norm + a.kv_lora_rank,
        )
    width = a.num_heads * a.head_dim
    kv_width = a.num_kv_heads * a.head_dim
    qk_norm = {"none": 0, "head": 2 * a.head_dim, "full": width + kv_width}[a.qk_norm]
    biases = width + 2 * kv_width if a.bias else 0
    output_bias = h if (a.bias if a.output_bias is None else a.output_bias) else 0
    return 2 * h * width + 2 * h * kv_width, biases + output_bias + qk_norm
