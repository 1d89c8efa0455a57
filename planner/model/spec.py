"""What is trained: the shape of a decoder-only transformer, dense or mixture of experts.

Shapes only; costs are in ``planner.cost`` and follow from ``planner.model.blocks``.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from planner.plan import Document

__all__ = ["Attention", "FeedForward", "LatentAttention", "MixtureOfExperts", "ModelSpec"]

Size = Annotated[int, Field(ge=1, le=1 << 24)]

# The largest published models have a few 10**12 weights; above this a size is a typing error,
# and products of sizes would leave the 64-bit integers that the cost model counts in.
_MAX_WEIGHTS: Final = 10**15


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

    @model_validator(mode="after")
    def _heads_divide(self) -> "Attention":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads({self.num_heads}) must be a multiple of num_kv_heads"
                f"({self.num_kv_heads})"
            )
        return self


class LatentAttention(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kind: Literal["mla"] = "mla"
    num_heads: Size
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


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
    """Routed experts of ``expert_hidden_size`` and shared ones that every token passes."""

    num_experts: Annotated[int, Field(ge=2, le=1 << 16)]
    top_k: Size
    expert_hidden_size: Size
    shared_hidden_size: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    gated: bool = True

    @model_validator(mode="after")
    def _top_k_fits(self) -> "MixtureOfExperts":
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k({self.top_k}) exceeds num_experts({self.num_experts})")
        return self


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
