"""What is trained: the shape of a decoder-only transformer, dense or mixture of experts.

Shapes only; costs are in ``planner.cost`` and follow from ``planner.model.blocks``.
"""

import operator
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from planner.plan import Document

__all__ = [
    "Attention",
    "FeedForward",
    "Indexer",
    "LatentAttention",
    "MixtureOfExperts",
    "ModelSpec",
    "Window",
]

Size = Annotated[int, Field(ge=1, le=1 << 24)]

# The largest published models have a few 10**12 weights; above this a size is a typing error,
# and products of sizes would leave the 64-bit integers that the cost model counts in.
_MAX_WEIGHTS: Final = 10**15


def _is_none(value: object) -> bool:
    return value is None


class Attention(Document):
    """Multi-head attention with ``num_kv_heads`` shared key/value heads (GQA; MHA if equal)."""

    kind: Literal["gqa"] = "gqa"
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    bias: bool = Field(default=False, description="of the query, key and value projections")
    output_bias: bool | None = Field(default=None, description="null = as bias")
    qk_norm: Literal["none", "head", "full"] = Field(
        default="none",
        description="norm of queries and keys: weights per head (Qwen3) or full width (OLMoE)",
    )
    # Here and below, fields that a document does not say are left out of it: hashes of documents
    # that are older than the field stay what they were.
    sinks: bool = Field(
        default=False, exclude_if=operator.not_, description="one learned score per head (gpt-oss)"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "Attention":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads({self.num_heads}) must be a multiple of num_kv_heads"
                f"({self.num_kv_heads})"
            )
        return self


class Indexer(Document):
    """What chooses the keys of sparse attention: small heads over the whole sequence.

    DeepSeek-V3.2 (arXiv 2512.02556), "lightning indexer": queries from the latent query, one key
    with a layer norm and one weight per head from the layer's input.
    """

    num_heads: Size
    head_dim: Size
    top_k: Size = Field(description="keys that a query attends to")


class LatentAttention(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kind: Literal["mla"] = "mla"
    num_heads: Size
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    bias: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="of the narrow products and the output projection",
    )
    indexer: Indexer | None = Field(
        default=None, exclude_if=_is_none, description="of sparse attention; null = dense"
    )

    @model_validator(mode="after")
    def _indexer_has_its_input(self) -> "LatentAttention":
        if self.indexer is not None and self.q_lora_rank is None:
            raise ValueError("indexer is given but q_lora_rank is null; its queries come from it")
        return self


def _attention_kind(value: object) -> str:
    """Return which attention is meant; without a kind it is the usual one."""
    kind = value.get("kind", "gqa") if isinstance(value, Mapping) else getattr(value, "kind", "")
    return kind if isinstance(kind, str) else ""


class FeedForward(Document):
    """Two matrices, or three when gated (SwiGLU)."""

    hidden_size: Size
    gated: bool = True
    bias: bool = False


class MixtureOfExperts(Document):
    """Routed experts of ``expert_hidden_size`` and a feed-forward beside them for every token.

    That feed-forward is the shared experts together (DeepSeek, Qwen2-MoE), or the dense one of a
    residual mixture of experts (DeepSpeed-MoE, arXiv 2201.05596, section 4.1; Snowflake Arctic).
    """

    num_experts: Annotated[int, Field(ge=2, le=1 << 16)]
    top_k: Size
    expert_hidden_size: Size
    shared_hidden_size: Annotated[int, Field(ge=0, le=1 << 24)] = Field(
        default=0, description="width of what every token passes beside the routed experts"
    )
    gated: bool = True
    bias: bool = Field(
        default=False, exclude_if=operator.not_, description="of the experts' products (gpt-oss)"
    )
    router_bias: bool = Field(default=False, exclude_if=operator.not_)
    shared_mix: Literal["sum", "gate", "coefficients"] = Field(
        default="sum",
        exclude_if=lambda mix: mix == "sum",
        description="how the shared part is added: as it is, times the sigmoid of one product "
        "(Qwen2-MoE), or both parts times a softmax of two (DeepSpeed's residual MoE)",
    )
    shared_norm: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="the shared part has a norm of its own (Arctic)",
    )

    @model_validator(mode="after")
    def _top_k_fits(self) -> "MixtureOfExperts":
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k({self.top_k}) exceeds num_experts({self.num_experts})")
        if not self.shared_hidden_size and (self.shared_mix != "sum" or self.shared_norm):
            raise ValueError("shared_mix and shared_norm need a shared_hidden_size above 0")
        return self


class Window(Document):
    """Which earlier tokens the queries of some layers see."""

    size: Size = Field(description="tokens, the query's own included")
    kind: Literal["sliding", "chunked"] = Field(
        default="sliding",
        description="the last tokens, or those of the query's own chunk (Llama 4)",
    )
    layers: tuple[int, ...] = Field(min_length=1, description="indices of the layers that have it")


class ModelSpec(Document):
    """A model as a sequence of decoder layers between an embedding and a head."""

    name: Annotated[str, Field(min_length=1, max_length=120)]
    source: str = Field(description="where the figures come from")
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    hidden_size: Size
    vocab_size: Size
    attention: Annotated[
        Annotated[Attention, Tag("gqa")] | Annotated[LatentAttention, Tag("mla")],
        Discriminator(
            _attention_kind,
            custom_error_type="attention_kind",
            custom_error_message="kind must be 'gqa' or 'mla'; leave it out for 'gqa'",
        ),
    ]
    feed_forward: FeedForward
    experts: MixtureOfExperts | None = None
    moe_layers: tuple[int, ...] = Field(
        default=(), description="indices of the layers whose feed-forward is a mixture of experts"
    )
    norm: Literal["rms", "layer"] = "rms"
    learned_positions: Annotated[int, Field(ge=0, le=1 << 25)] = 0
    tied_embeddings: bool = False
    window: Window | None = Field(
        default=None, exclude_if=_is_none, description="null = all layers attend to all earlier"
    )
    layer_norms: Literal[1, 2, 4] = Field(
        default=2,
        exclude_if=lambda norms: norms == 2,
        description="norms of a layer: one for both halves of a parallel layer (GPT-J), one before "
        "each half, or one before and one behind each (Gemma 2)",
    )
    parallel_attention: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="attention and feed-forward side by side from the same input (GPT-J, NeoX)",
    )
    head_bias: bool = Field(default=False, exclude_if=operator.not_)
    num_mtp_modules: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        exclude_if=operator.not_,
        description="multi-token prediction (DeepSeek-V3): each one more layer, head and loss",
    )
    assumptions: tuple[str, ...] = Field(
        default=(), description="what the reader of a config had to assume or leave out"
    )

    @model_validator(mode="after")
    def _size_is_real(self) -> "ModelSpec":
        a, moe = self.attention, self.experts
        heads = a.num_heads * (a.v_head_dim if isinstance(a, LatentAttention) else a.head_dim)
        experts = moe.num_experts * moe.expert_hidden_size + moe.shared_hidden_size if moe else 0
        layer = heads + 3 * max(self.feed_forward.hidden_size, experts)
        weights = self.hidden_size * (self.num_layers * layer + 2 * self.vocab_size)
        if weights > _MAX_WEIGHTS:
            raise ValueError(
                f"the sizes make about {weights:.1e} weights; at most {_MAX_WEIGHTS:.0e} are "
                "planned for: check num_layers, hidden_size, vocab_size and the expert sizes"
            )
        return self

    @model_validator(mode="after")
    def _moe_layers_exist(self) -> "ModelSpec":
        if self.moe_layers and self.experts is None:
            raise ValueError("moe_layers are listed but experts is null")
        if self.experts is not None and not self.moe_layers:
            raise ValueError("experts are given but no layer is in moe_layers")
        bad = [i for i in self.moe_layers if not 0 <= i < self.num_layers]
        if bad or len(set(self.moe_layers)) != len(self.moe_layers):
            raise ValueError(
                f"moe_layers must be distinct and in 0..{self.num_layers - 1}; "
                f"got {bad[:8] or 'repeats'}"
            )
        return self

    @model_validator(mode="after")
    def _windowed_layers_exist(self) -> "ModelSpec":
        if self.window is None:
            return self
        layers = self.window.layers
        bad = [i for i in layers if not 0 <= i < self.num_layers]
        if bad or len(set(layers)) != len(layers):
            raise ValueError(
                f"window.layers must be distinct and in 0..{self.num_layers - 1}; "
                f"got {bad[:8] or 'repeats'}"
            )
        if isinstance(self.attention, LatentAttention):
            raise ValueError("window is given, but latent attention sees all earlier tokens")
        return self

    @model_validator(mode="after")
    def _halves_lie_as_priced(self) -> "ModelSpec":
        if self.layer_norms == 1 and not self.parallel_attention:
            raise ValueError("layer_norms is 1, which only a layer with parallel_attention has")
        if not self.parallel_attention:
            return self
        if self.layer_norms == 4 or self.experts or isinstance(self.attention, LatentAttention):
            raise ValueError(
                "parallel_attention is priced with a dense feed-forward, usual attention and one "
                "or two norms; got "
                f"layer_norms={self.layer_norms}, {'some' if self.experts else 'no'} experts, "
                f"attention of kind {self.attention.kind!r}"
            )
        return self
