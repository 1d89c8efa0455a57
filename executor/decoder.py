"""Which decoders the executor can cut up, and how it runs what is left of them on a rank.

A family says where the parts of a decoder are and how one of its layers is called; ``Decoder``
is the part of a model that one pipeline stage holds. Modules of no known family are refused.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from executor.errors import PlanMismatchError
from planner.plan import ModelSummary, Stage

__all__ = [
    "FAMILIES",
    "AttentionCore",
    "Decoder",
    "DecoderFamily",
    "Head",
    "check_model",
    "family_of",
    "has_experts",
    "is_tied",
    "mark_taken",
    "weights_checksum",
]

# (queries [B, N, S, D], keys [B, N_kv, S, D], values [B, N_kv, S, D]) -> [B, N, S, D], causal; the
# scores are multiplied with the keyword ``scale``, D**-0.5 if it is left out
AttentionCore = Callable[..., torch.Tensor]

_TAKEN: Final = "_commplan_has_taken_it_apart"

# What is taken over of a feed-forward with experts.
_WEIGHTS_OF_EXPERTS: Final = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
_SHARED: Final = "shared_expert."


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Names inside a decoder, and what its layers take.

    A layer is ``x + attention(norm(x))`` and then ``x + feed_forward(norm(x))``. The number of
    heads follows from the width of the projections, so that a layer also works on a shard of
    them. A feed-forward with experts has the parts of Hugging Face's ``MixtralSparseMoeBlock``:
    ``gate`` with ``weight`` and ``top_k``, ``experts`` with ``gate_up_proj`` and ``down_proj``.

    Attributes:
        embedding: ``nn.Embedding``.
        layers: ``nn.ModuleList`` of decoder layers.
        norm: Norm before the head.
        head: ``nn.Linear`` to the vocabulary.
        run_layer: ``(layer, hidden [B, S, h], positions [S], shared) -> hidden``.
        set_attention: ``(layer, core)``: make the layer compute attention with ``core``.
        share: ``(model) -> shared``: what all layers use together, such as the rotary embedding.
        differences: ``(model) -> reasons`` why the executor would not train what it computes.
        input_norms: In a layer: norms before attention and feed-forward.
        columns: In a layer: weights split over tp by output.
        rows: In a layer: weights split over tp by input.
        feed_forward: In a layer: the feed-forward, dense or with experts.
    """

    embedding: str
    layers: str
    norm: str
    head: str
    run_layer: Callable[[nn.Module, torch.Tensor, torch.Tensor, Any], torch.Tensor]
    set_attention: Callable[[nn.Module, AttentionCore], None]
    share: Callable[[nn.Module], Any] = lambda model: None
    differences: Callable[[nn.Module], list[str]] = lambda model: []
    input_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    columns: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    )
    rows: tuple[str, ...] = (
        "self_attn.o_proj",
        "mlp.down_proj",
        "mlp.shared_expert.down_proj",
    )
    feed_forward: str = "mlp"


# ------------------------------------------------------------------------ the known families

_ATTENTION_NAME: Final = "commplan"
_ROPE_BY_LENGTH: Final = ("dynamic", "longrope")
_UNKNOWN_TO_CORE: Final = ("dropout", "sliding_window", "softcap", "s_aux")


def _run_plain_layer(
    layer: nn.Module, hidden: torch.Tensor, positions: torch.Tensor, shared: Any
) -> torch.Tensor:
    return layer(hidden, positions)


def _set_plain_attention(layer: nn.Module, core: AttentionCore) -> None:
    layer.self_attn.core = core  # type: ignore[union-attr]  # a module, in this family


def _run_transformers_layer(
    layer: nn.Module, hidden: torch.Tensor, positions: torch.Tensor, shared: Any
) -> torch.Tensor:
    position_ids = positions.unsqueeze(0)
    return layer(
        hidden,
        attention_mask=None,
        position_ids=position_ids,
        position_embeddings=shared(hidden, position_ids=position_ids),
    )


def _set_transformers_attention(layer: nn.Module, core: AttentionCore) -> None:
    """Use transformers' registry of attention functions; the core is found on the module."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION_NAME, _transformers_attention)
    attention: Any = layer.self_attn
    attention.config = copy(attention.config)  # another model may have been made from it
    attention.config._attn_implementation = _ATTENTION_NAME
    attention.commplan_core = core


def _transformers_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    ignored = [name for name in _UNKNOWN_TO_CORE if others.get(name)]
    if ignored:
        raise PlanMismatchError(
            f"module {type(module).__name__} wants attention with {', '.join(ignored)}, which the "
            "executor's has not; take a module without"
        )
    return module.commplan_core(query, key, value, scale=scaling).transpose(1, 2), None


def _transformers_differences(model: Any) -> list[str]:
    """Return the settings of a Hugging Face config that this executor would leave out."""
    off: dict[str, Any] = {
        "attention_dropout": 0.0,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }
    found = [
        f"config.{name}={getattr(model.config, name)} (need {value})"
        for name, value in off.items()
        if getattr(model.config, name, value) not in (value, None)
    ]
    rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _ROPE_BY_LENGTH:
        found.append(
            f"config.rope_parameters.rope_type={rope!r}, which depends on the longest position a "
            "rank sees"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        found.append("gradient checkpointing is on (the plan's recompute decides)")
    return found


_TRANSFORMERS: Final = DecoderFamily(
    embedding="model.embed_tokens",
    layers="model.layers",
    norm="model.norm",
    head="lm_head",
    run_layer=_run_transformers_layer,
    set_attention=_set_transformers_attention,
    share=lambda model: model.get_submodule("model.rotary_emb"),
    differences=_transformers_differences,
)

# By the name of the module's class; GPT is examples/train_gpt.py.
FAMILIES: Final[Mapping[str, DecoderFamily]] = MappingProxyType(
    {
        "LlamaForCausalLM": _TRANSFORMERS,
        "MixtralForCausalLM": _TRANSFORMERS,
        "GPT": DecoderFamily(
            embedding="embed_tokens",
            layers="layers",
            norm="norm",
            head="lm_head",
            run_layer=_run_plain_layer,
            set_attention=_set_plain_attention,
        ),
    }
)


def family_of(model: nn.Module) -> DecoderFamily:
    """Return the family of ``model`` by the name of its class.

    Raises:
        PlanMismatchError: It is of none, or is set up in a way the executor does not follow.
    """
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        raise PlanMismatchError(
            f"module {name} is of no family this executor can cut up ({', '.join(FAMILIES)}); "
            "pass family=DecoderFamily(...) for a module built like one of these"
        )
    return family


# --------------------------------------------------------------------- one stage of a model


def mark_taken(model: nn.Module) -> None:
    """Have ``check_model`` refuse ``model`` from now on: its parts belong to a trainer."""
    setattr(model, _TAKEN, True)


class Head(nn.Module):
    """Final norm and the product with the vocabulary."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take [B, S, h], return logits [B, S, V]."""
        return self.projection(self.norm(hidden))


class Decoder(nn.Module):
    """The part of a model on one pipeline stage.

    Attributes:
        family: How its parts are called.
        first_layer: Number in the whole model of its first layer.
        embedding: None away from the first stage.
        layers: Consecutive layers.
        head: None away from the last stage.
        positions: Positions of this rank's tokens in the whole sequence, [S].
    """

    def __init__(
        self, model: nn.Module, family: DecoderFamily, stage: Stage, positions: torch.Tensor
    ) -> None:
        super().__init__()
        layers = list(model.get_submodule(family.layers).children())
        self.family = family
        self.first_layer = stage.first_layer
        self.embedding = model.get_submodule(family.embedding) if stage.embedding else None
        self.layers = nn.ModuleList(layers[stage.first_layer :][: stage.num_layers])
        self.head = (
            Head(model.get_submodule(family.norm), model.get_submodule(family.head))
            if stage.head
            else None
        )
        self.positions = positions
        self._shared = (family.share(model),)  # in a tuple: it is not a part of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage on tokens [B, S] or, without the embedding, hidden states [B, S, h]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = self.family.run_layer(layer, x, self.positions, self._shared[0])
        return x if self.head is None else self.head(x)

    def named_in_model(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, with its name in the whole model."""
        for name, parameter in self.named_parameters():
            yield self._name_in_model(name), parameter

    def _name_in_model(self, name: str) -> str:
        part, _, rest = name.partition(".")
        if part == "layers":
            number, _, rest = rest.partition(".")
            return f"{self.family.layers}.{self.first_layer + int(number)}.{rest}"
        if part == "embedding":
            return f"{self.family.embedding}.{rest}"
        inside, _, rest = rest.partition(".")
        whole = {"norm": self.family.norm, "projection": self.family.head}[inside]
        return f"{whole}.{rest}"


def has_experts(layer: nn.Module, family: DecoderFamily) -> bool:
    """Return whether the feed-forward of ``layer`` has experts."""
    return hasattr(layer.get_submodule(family.feed_forward), "experts")


# ------------------------------------------------------------------ is it the plan's model?


def check_model(
    summary: ModelSummary,
    model: nn.Module,
    *,
    tp: int = 1,
    ep: int = 1,
    family: DecoderFamily | None = None,
) -> None:
    """Check that the whole, uncut ``model`` is the one the plan is for, and that it can be cut.

    Raises:
        PlanMismatchError: Naming everything that differs, or cannot be cut, or would be left out.
    """
    name = type(model).__name__
    family = family or family_of(model)
    if getattr(model, _TAKEN, False):
        raise PlanMismatchError(
            f"module {name} was taken apart by executor.apply before; build it again"
        )
    try:
        _require_parts(model, family)
        differing = [
            f"{figure} is {number} in the module, {getattr(summary, figure)} in the plan"
            for figure, number in _figures(model, family).items()
            if number != getattr(summary, figure)
        ]
        uncuttable = _indivisible(model, family, tp, ep)
    except AttributeError as exc:
        raise PlanMismatchError(
            f"module {name} lacks a part that its family needs: {exc}; pass family= for this module"
        ) from exc
    left_out = [*_left_out(model, family), *family.differences(model)]
    for problem, found, hint in (
        (
            f"is not the plan's model {summary.name!r}",
            differing,
            "plan again with this module's config",
        ),
        ("cannot be cut as planned", uncuttable, "plan again with these degrees changed"),
        ("would train differently here", left_out, "change the module or its config"),
    ):
        if found:
            raise PlanMismatchError(f"module {name} {problem}: {'; '.join(found)}; {hint}")


def is_tied(model: nn.Module, family: DecoderFamily) -> bool:
    """Return whether embedding and head of a whole model are one parameter."""
    embedding, head = (model.get_submodule(name) for name in (family.embedding, family.head))
    return embedding.get_parameter("weight") is head.get_parameter("weight")


def weights_checksum(model: nn.Module) -> str:
    """Return 8 hex digits of names, shapes and values of all parameters and buffers."""
    checksum = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(f"{name} {list(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(values.numpy().data, checksum)
    return f"{checksum:08x}"


def _require_parts(model: nn.Module, family: DecoderFamily) -> None:
    """Raise an ``AttributeError`` for what the family names and the model lacks."""
    model.get_submodule(family.norm)
    for end in (family.embedding, family.head):
        model.get_submodule(end).get_parameter("weight")
    for layer in model.get_submodule(family.layers).children():
        for name in (*family.input_norms, "self_attn"):
            layer.get_submodule(name)
        if has_experts(layer, family):
            block = layer.get_submodule(family.feed_forward)
            for name in _WEIGHTS_OF_EXPERTS:
                block.get_parameter(name)
            _ = block.get_submodule("gate").top_k, block.get_submodule("experts").act_fn


def _figures(model: nn.Module, family: DecoderFamily) -> dict[str, int]:
    embedding = model.get_submodule(family.embedding).get_parameter("weight")
    return {
        "num_layers": len(list(model.get_submodule(family.layers).children())),
        "hidden_size": embedding.shape[1],
        "vocab_size": embedding.shape[0],
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
    }


def _indivisible(model: nn.Module, family: DecoderFamily, tp: int, ep: int) -> list[str]:
    """Return what the degrees would cut through: heads, rows, vocabulary, experts; and biases."""
    wrong = set()
    layers = list(model.get_submodule(family.layers).children())
    for layer in layers:
        parts = dict(layer.named_modules())
        for name in family.columns:
            if name in parts:
                unit = int(getattr(parts[name.rpartition(".")[0]], "head_dim", 1))
                width = parts[name].get_parameter("weight").shape[0]
                if width % (tp * unit):
                    wrong.add(
                        f"tp={tp} does not divide the {width // unit} heads or rows of {name}"
                    )
        for name in family.rows:
            if tp > 1 and name in parts and getattr(parts[name], "bias", None) is not None:
                wrong.add(f"tp={tp} would add the bias of {name} {tp} times (need tp=1)")
        if has_experts(layer, family):
            experts = parts[f"{family.feed_forward}.experts"].get_parameter("down_proj").shape[0]
            if experts % ep:
                wrong.add(f"ep={ep} does not divide {experts} experts")
    if ep > 1 and not any(has_experts(layer, family) for layer in layers):
        wrong.add(f"ep={ep} has no experts to share out")
    head = model.get_submodule(family.head)
    vocabulary = head.get_parameter("weight").shape[0]
    if vocabulary % tp:
        wrong.add(f"tp={tp} does not divide vocab_size {vocabulary}")
    if tp > 1 and getattr(head, "bias", None) is not None:
        wrong.add(f"tp={tp} does not split the bias of {family.head}")
    return sorted(wrong)


def _left_out(model: nn.Module, family: DecoderFamily) -> list[str]:
    """Return the parameters that no part of a cut model would hold, or that are not trained."""
    ends = (family.embedding, family.norm, family.head)
    kept = {id(p) for end in ends for p in model.get_submodule(end).parameters()}
    for layer in model.get_submodule(family.layers).children():
        kept |= {id(p) for p in layer.parameters()}
        if has_experts(layer, family):
            block = layer.get_submodule(family.feed_forward)
            kept -= {
                id(p)
                for name, p in block.named_parameters()
                if name not in _WEIGHTS_OF_EXPERTS and not name.startswith(_SHARED)
            }
    parameters = dict(model.named_parameters())
    lost = [f"parameter {name} has no place" for name, p in parameters.items() if id(p) not in kept]
    frozen = [
        f"parameter {name} is frozen" for name, p in parameters.items() if not p.requires_grad
    ]
    return lost + frozen + _shared_weights(model, family)


def _shared_weights(model: nn.Module, family: DecoderFamily) -> list[str]:
    """Return parameters with two names, of which stages would train two; tied ends are known."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {f"{family.embedding}.weight", f"{family.head}.weight"}
    return [
        f"{' and '.join(several)} are one parameter"
        for several in names.values()
        if len(several) > 1 and set(several) != tied
    ]
