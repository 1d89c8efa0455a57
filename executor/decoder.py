"""What the executor expects of a module it cuts up: where the parts of a decoder are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor.errors import PlanMismatchError
from planner.plan import ModelSummary

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DecoderNames", "check_model"]


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Names inside a decoder; the defaults are those of Hugging Face's Llama.

    The module's ``forward`` takes tokens [batch, sequence] and returns logits [batch, sequence,
    vocabulary]. A part that is None belongs to another pipeline rank: without the embedding it
    takes hidden states [batch, sequence, hidden], without norm and head it returns them. A block
    takes its input as the one positional argument and derives its number of heads from the width
    it finds, so that it also works on a tensor-parallel shard.

    Attributes:
        embedding: ``nn.Embedding``.
        layers: ``nn.ModuleList`` of decoder layers.
        norm: Norm before the head.
        head: ``nn.Linear`` to the vocabulary.
        blocks: In a layer: modules whose input all column-parallel weights share.
        columns: In a layer: weights split by output.
        rows: In a layer: weights split by input; each ends in one all_reduce.
    """

    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    blocks: tuple[str, ...] = ("self_attn", "mlp")
    columns: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")


def check_model(
    summary: ModelSummary, model: "nn.Module", *, tp: int = 1, names: DecoderNames | None = None
) -> None:
    """Check that the whole, uncut ``model`` is the one the plan is for, and that tp divides it.

    Raises:
        PlanMismatchError: Naming every figure that differs.
    """
    names = names or DecoderNames()
    try:
        found = _figures(model, names)
    except AttributeError as exc:
        raise PlanMismatchError(
            f"module {type(model).__name__} has no part that DecoderNames expects: {exc}; "
            "pass names= for this module"
        ) from exc
    wrong = [
        f"{name} is {number} in the module, {getattr(summary, name)} in the plan"
        for name, number in found.items()
        if number != getattr(summary, name)
    ]
    wrong += _indivisible(model, names, tp)
    if wrong:
        raise PlanMismatchError(
            f"module {type(model).__name__} is not the plan's model {summary.name!r}: "
            f"{'; '.join(wrong)}; plan again with this module's config"
        )


def _figures(model: "nn.Module", names: DecoderNames) -> dict[str, int]:
    layers = list(model.get_submodule(names.layers).children())
    for layer in layers[:1]:
        for name in (*names.blocks, *names.columns, *names.rows):
            layer.get_submodule(name)
    embedding = model.get_submodule(names.embedding).get_parameter("weight")
    return {
        "num_layers": len(layers),
        "hidden_size": embedding.shape[1],
        "vocab_size": embedding.shape[0],
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
    }


def _indivisible(model: "nn.Module", names: DecoderNames, tp: int) -> list[str]:
    """Return what tensor parallelism would cut through: whole heads, rows, vocabulary rows."""
    wrong = []
    for layer in list(model.get_submodule(names.layers).children())[:1]:
        for name in names.columns:
            block = layer.get_submodule(name.rpartition(".")[0])
            unit = getattr(block, "head_dim", 1)
            width = layer.get_submodule(name).get_parameter("weight").shape[0]
            if width % (tp * unit):
                wrong.append(f"tp={tp} does not divide the {width // unit} heads or rows of {name}")
    vocabulary = model.get_submodule(names.head).get_parameter("weight").shape[0]
    if vocabulary % tp:
        wrong.append(f"tp={tp} does not divide vocab_size {vocabulary}")
    return wrong
