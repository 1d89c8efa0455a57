"""Why rows of a source are predicted badly, as far as that is known. By source, never by row."""

from dataclasses import dataclass
from typing import Final

__all__ = ["CAUSES", "Cause", "cause_of"]


@dataclass(frozen=True, slots=True)
class Cause:
    """What is known of the errors of a source.

    Attributes:
        text: It.
        is_known: Whether it explains most of them; a remark does not.
    """

    text: str
    is_known: bool = True


_UNKNOWN: Final = Cause("not known", is_known=False)
CAUSES: Final[dict[str, Cause]] = {
    "BLOOM": Cause(
        "one snapshot each, of the second iteration, most with CUDA_LAUNCH_BLOCKING=1",
    ),
    "FOLD": Cause("times derived from MFU; micro-batch and recomputation are not printed"),
    "MBR": Cause(
        "releases of the software change the time of one configuration by up to 1.8x; what is "
        "recomputed is often not printed"
    ),
    "PAX": Cause(
        "what XLA recomputes is not printed; one configuration takes 1.8x as long in the older of "
        "two tables"
    ),
    "SC21T2": Cause(
        "gathers of ZeRO-3 by DeepSpeed in 2021 take as long as over one NIC of eight; the rows of "
        "Megatron's layouts beside them are near"
    ),
    # Rows of 65,536 tokens and more, where attention is most of a step, are predicted too slow.
    "STAS": Cause(
        "8,192 tokens: an optimizer on the CPU is most of a step. Longer ones, nearly all "
        "attention, by FlashAttention-3 and 4, are predicted too slow: not known why",
        is_known=False,
    ),
    "vtrain_single": Cause(
        "small models wait for the host to issue kernels, and without these rows the rest hardly "
        "says how long that takes (`launch_s`)"
    ),
}


def cause_of(source: str) -> Cause:
    """Return what is known of the errors of a source."""
    return CAUSES.get(source, _UNKNOWN)
