"""A model as a sequence of few block kinds: embedding, layers, multi-token prediction, head.

Parameter counts and flop per token as Megatron-LM's training code counts them. Costs per block are
priced once per kind, never per layer; a model has a pattern of layers: dense or with experts, each
with attention over all earlier tokens or over a window.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from planner.model.sequence import attended
from planner.model.spec import LatentAttention, ModelSpec, Window
from planner.plan import Packing

__all__ = [
    "BLOCK_KINDS",
    "BlockKind",
    "ParameterCount",
    "attention_flop_per_token",
    "block_flop_per_token",
    "block_kinds",
    "block_parameters",
    "decoder_layer",
    "has_experts",
    "layer_kinds",
    "model_flop_per_token",
    "mtp_parameter_count",
    "num_blocks",
    "parameter_count",
    "sequence_parallel_parameters",
    "window_of",
]

# ``mtp`` is one module for multi-token prediction: a projection, a decoder layer, and once more the
# embedding's lookup, head and loss. In the order of the forward.
BlockKind = Literal["embedding", "dense", "dense_window", "moe", "moe_window", "mtp", "head"]
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = get_args(BlockKind)

_LAYERS: Final[dict[tuple[bool, bool], BlockKind]] = {  # (with experts, windowed)
    (False, False): "dense",
    (False, True): "dense_window",
    (True, False): "moe",
    (True, True): "moe_window",
}


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one block.

    ``attention``, ``feed_forward`` (dense, shared experts) and ``projection`` (of multi-token
    prediction) are matmul weights that tensor parallelism splits; ``experts`` are split by etp and
    ep; ``whole`` are matmul weights that every tensor-parallel rank has (router, the narrow
    products of latent attention, an indexer's); ``replicated`` (norms, biases, learned positions)
    sits there too; ``vocabulary`` is split by tp. Biases behind a split output are in truth split
    too; they are below 0.1 % of a layer and stay replicated here, an expert's are with the expert.
    """

    attention: int = 0
    feed_forward: int = 0
    experts: int = 0
    whole: int = 0
    replicated: int = 0
    vocabulary: int = 0
    projection: int = 0

    def total(self) -> int:
        """Return all parameters."""
        return (
            self.attention
            + self.feed_forward
            + self.experts
            + self.whole
            + self.replicated
            + self.vocabulary
            + self.projection
        )


# ------------------------------------------------------------------------------- the pattern


def layer_kinds(model: ModelSpec) -> tuple[BlockKind, ...]:
    """Return the kind of every decoder layer, in order."""
    moe = set(model.moe_layers)
    windowed = set(model.window.layers) if model.window else set()
    return tuple(_LAYERS[i in moe, i in windowed] for i in range(model.num_layers))


def num_blocks(model: ModelSpec) -> dict[BlockKind, int]:
    """Return how many blocks of each kind the model has, those it has, in forward order."""
    layers = layer_kinds(model)
    found: dict[BlockKind, int] = {kind: layers.count(kind) for kind in BLOCK_KINDS}
    found |= {"embedding": 1, "mtp": model.num_mtp_modules, "head": 1}
    return {kind: number for kind, number in found.items() if number}


def block_kinds(model: ModelSpec) -> tuple[BlockKind, ...]:
    """Return the kinds of block that the model has, in the order of ``BLOCK_KINDS``."""
    return tuple(num_blocks(model))


def decoder_layer(model: ModelSpec, kind: BlockKind) -> BlockKind:
    """Return the decoder layer in a block: of a module for multi-token prediction the last."""
    return layer_kinds(model)[-1] if kind == "mtp" else kind


def has_experts(model: ModelSpec, kind: BlockKind) -> bool:
    """Return whether a block of ``kind`` has routed experts."""
    return decoder_layer(model, kind) in ("moe", "moe_window") and model.experts is not None


def window_of(model: ModelSpec, kind: BlockKind) -> Window | None:
    """Return the window of a block's attention; None = it sees all earlier tokens."""
    return model.window if decoder_layer(model, kind) in ("dense_window", "moe_window") else None


# -------------------------------------------------------------------------------- parameters


def block_parameters(model: ModelSpec, kind: BlockKind) -> ParameterCount:
    """Return the parameters of one block of ``kind``.

    The head of a model with tied embeddings owns no vocabulary matrix; the norm before it
    belongs to it. A module for multi-token prediction has two norms before its projection and one
    before the shared head (DeepSeek-V3's checkpoint: enorm, hnorm, shared_head.norm).
    """
    h = model.hidden_size
    norm = h if model.norm == "rms" else 2 * h
    if kind == "embedding":
        return ParameterCount(
            vocabulary=h * model.vocab_size, replicated=h * model.learned_positions
        )
    if kind == "head":
        vocabulary = 0 if model.tied_embeddings else h * model.vocab_size
        bias = model.vocab_size * model.head_bias
        return ParameterCount(vocabulary=vocabulary + bias, replicated=norm)
    is_mtp = kind == "mtp"
    attention, attention_whole, attention_vectors = _attention_parameters(model)
    vectors = (model.layer_norms + 3 * is_mtp) * norm + attention_vectors
    projection = 2 * h * h * is_mtp
    if not has_experts(model, kind):
        ffn = model.feed_forward
        return ParameterCount(
            attention=attention,
            feed_forward=_ffn(h, ffn.hidden_size, ffn.gated),
            whole=attention_whole,
            replicated=vectors + _ffn_biases(h, ffn.hidden_size, ffn.gated) * ffn.bias,
            projection=projection,
        )
    moe = model.experts
    assert moe is not None, "a model with a moe layer has experts: ModelSpec checks it"
    one = _ffn(h, moe.expert_hidden_size, moe.gated)
    one += _ffn_biases(h, moe.expert_hidden_size, moe.gated) * moe.bias
    mixed = {"sum": 0, "gate": 1, "coefficients": 2}[moe.shared_mix]
    return ParameterCount(
        attention=attention,
        feed_forward=_ffn(h, moe.shared_hidden_size, moe.gated),
        experts=moe.num_experts * one,
        whole=attention_whole + h * (moe.num_experts + mixed),
        replicated=vectors
        + moe.num_experts * moe.router_bias
        + 2 * (moe.shared_mix == "coefficients")
        + norm * moe.shared_norm,
        projection=projection,
    )


def sequence_parallel_parameters(model: ModelSpec, kind: BlockKind) -> int:
    """Return parameters of a block whose gradients are partial sums over tp.

    With sequence parallelism every tensor-parallel rank has them whole and sees its own tokens
    alone: norms, router, biases behind a row-split product, the narrow products of latent
    attention and an indexer's. Norms of single heads see the rank's heads.
    """
    h, a = model.hidden_size, model.attention
    norm = h if model.norm == "rms" else 2 * h
    if kind == "embedding":
        return 0
    if kind == "head":
        return norm
    block = block_parameters(model, kind)
    norms = (model.layer_norms + 3 * (kind == "mtp")) * norm
    if isinstance(a, LatentAttention):
        attention = _attention_parameters(model)[2]
    else:
        has_output_bias = a.bias if a.output_bias is None else a.output_bias
        attention = h * has_output_bias + 2 * a.head_dim * (a.qk_norm == "head")
    if has_experts(model, kind):
        assert model.experts is not None, "has_experts says so"
        shared = norm * model.experts.shared_norm
        return block.whole + norms + attention + shared
    return block.whole + norms + attention + h * model.feed_forward.bias


def parameter_count(model: ModelSpec, *, active: bool = False) -> int:
    """Return the parameters of the model; with ``active``, those one token passes.

    Without modules for multi-token prediction, as figures are published: they serve training and
    are dropped after it. ``mtp_parameter_count`` counts them.
    """
    total = 0
    for kind, number in num_blocks(model).items():
        if kind == "mtp":
            continue
        block = block_parameters(model, kind)
        unused = 0
        if active and model.experts is not None:
            moe = model.experts
            unused = block.experts // moe.num_experts * (moe.num_experts - moe.top_k)
        total += number * (block.total() - unused)
    return total


def mtp_parameter_count(model: ModelSpec) -> int:
    """Return the parameters of the modules for multi-token prediction; embedding, head shared."""
    return model.num_mtp_modules and model.num_mtp_modules * block_parameters(model, "mtp").total()


# -------------------------------------------------------------------------------------- flop


def attention_flop_per_token(
    model: ModelSpec, kind: BlockKind, seq_len: int, packing: Packing | None = None
) -> float:
    """Return forward flop of the attention core of one layer per token.

    2 · a · (d_qk + d_v) for every key that a query sees; without window and packing s / 2 of them.
    """
    a = model.attention
    if isinstance(a, LatentAttention):
        d_qk, d_v = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
    else:
        d_qk = d_v = a.head_dim
    keys = attended(seq_len, packing, window_of(model, kind)).keys_per_query
    return 2.0 * a.num_heads * (d_qk + d_v) * keys


def block_flop_per_token(
    model: ModelSpec, kind: BlockKind, seq_len: int, packing: Packing | None = None
) -> float:
    """Return forward flop per token of one block: 2 per active matmul weight, attention causal.

    The embedding lookup has none; norms and activation functions are left out.
    """
    head = 2.0 * model.hidden_size * model.vocab_size
    if kind in ("embedding", "head"):
        return head * (kind == "head")
    block, moe = block_parameters(model, kind), model.experts
    weights = float(block.attention + block.feed_forward + block.whole + block.projection)
    if has_experts(model, kind):
        assert moe is not None, "has_experts says so"
        weights += moe.top_k * _ffn(model.hidden_size, moe.expert_hidden_size, moe.gated)
    cores = attention_flop_per_token(model, kind, seq_len, packing)
    return 2.0 * weights + cores + head * (kind == "mtp")


def model_flop_per_token(model: ModelSpec, seq_len: int, packing: Packing | None = None) -> float:
    """Return training flop per token: three times the forward's.

    Modules for multi-token prediction are trained, so they count; recomputation never does (that
    is HFU).
    """
    return 3.0 * sum(
        number * block_flop_per_token(model, kind, seq_len, packing)
        for kind, number in num_blocks(model).items()
    )


def _ffn(hidden_size: int, inner: int, gated: bool) -> int:
    return (3 if gated else 2) * hidden_size * inner


def _ffn_biases(hidden_size: int, inner: int, gated: bool) -> int:
    return (2 if gated else 1) * inner + hidden_size


def _attention_parameters(model: ModelSpec) -> tuple[int, int, int]:
    """Return matmul weights split over tp, those every rank has, and vectors every rank has."""
    h, a = model.hidden_size, model.attention
    if isinstance(a, LatentAttention):
        qk = a.qk_nope_head_dim + a.qk_rope_head_dim
        q = (h if a.q_lora_rank is None else a.q_lora_rank) * a.num_heads * qk
        kv = a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
        narrow = (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_rope_head_dim
        norms = (a.q_lora_rank or 0) + a.kv_lora_rank
        whole, vectors = h * narrow, norms + (narrow + h) * a.bias
        if a.indexer is not None:
            i = a.indexer
            assert a.q_lora_rank is not None, "LatentAttention checks it"
            whole += a.q_lora_rank * i.num_heads * i.head_dim + h * (i.head_dim + i.num_heads)
            vectors += 2 * i.head_dim
        return q + kv + a.num_heads * a.v_head_dim * h, whole, vectors
    width = a.num_heads * a.head_dim
    kv_width = a.num_kv_heads * a.head_dim
    qk_norm = {"none": 0, "head": 2 * a.head_dim, "full": width + kv_width}[a.qk_norm]
    biases = width + 2 * kv_width if a.bias else 0
    output_bias = h if (a.bias if a.output_bias is None else a.output_bias) else 0
    sinks = a.num_heads * a.sinks
    return 2 * h * width + 2 * h * kv_width, 0, biases + output_bias + qk_norm + sinks
