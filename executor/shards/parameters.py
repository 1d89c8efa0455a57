"""What this rank holds of every parameter, and who else holds what."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from executor.decoder import Decoder, DecoderFamily

__all__ = ["LocalParameter", "local_parameters"]


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as it lies on this rank.

    Attributes:
        name: In the whole model; of tied embeddings, the embedding's.
        parameter: This rank's part.
        split: The axis over which ranks hold different parts; None: all hold the whole.
        dim: The dimension cut by ``split``.
        is_expert: Its gradients are summed over edp instead of dp and cp.
        is_partial: Its gradients are those of this rank's tokens alone: summed over tp.
        tied_stage: Of tied embeddings on two pipeline ranks, the one that has the other copy.
    """

    name: str
    parameter: nn.Parameter
    split: Literal["tp", "ep"] | None
    dim: int
    is_expert: bool = False
    is_partial: bool = False
    tied_stage: int | None = None

    @property
    def is_tied_copy(self) -> bool:
        """Whether the first pipeline rank has the original."""
        return self.tied_stage == 0


def local_parameters(
    chunks: Iterable[Decoder], *, tp: int, pp: int, is_tied: bool
) -> tuple[LocalParameter, ...]:
    """Return the parameters of a rank's model chunks, in model order.

    Args:
        chunks: Already cut by tp and ep.
        tp: Tensor-parallel degree.
        pp: Pipeline-parallel degree.
        is_tied: Whether head and embedding of the whole model are one parameter.
    """
    last = pp - 1 if is_tied and pp > 1 else None
    return tuple(
        _local(chunk.family, name, parameter, tp, last)
        for chunk in chunks
        for name, parameter in chunk.named_in_model()
    )


def _local(
    family: DecoderFamily, name: str, parameter: nn.Parameter, tp: int, last_stage: int | None
) -> LocalParameter:
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    if name == embedding:
        return LocalParameter(name, parameter, "tp", 0, tied_stage=last_stage)
    if name == head:
        is_copy = last_stage is not None
        return LocalParameter(
            embedding if is_copy else head, parameter, "tp", 0, tied_stage=0 if is_copy else None
        )
    module = name.removeprefix(f"{family.layers}.").partition(".")[2].rpartition(".")[0]
    if module == f"{family.feed_forward}.experts":
        return LocalParameter(name, parameter, "ep", 0, is_expert=True)
    if module in family.columns:
        return LocalParameter(name, parameter, "tp", 0)
    if module in family.rows:
        return LocalParameter(name, parameter, "tp", 1)
    return LocalParameter(name, parameter, None, 0, is_partial=tp > 1)
