"""How many keys a query sees: causal, in a window, in packed documents.

A causal sequence of L tokens has L²/2 pairs of query and key, as Megatron-LM's training code and
the papers count (the exact L (L + 1) / 2 has half a pair more for every query). With a window of w
tokens the queries after the first w see w each, the others all that come before: w L - w²/2 pairs,
counted alike. In chunks of w tokens each chunk is a sequence. Documents packed into one sequence
attend each within its own, so that pairs add up over documents: Σ L_i²/2 in place of L²/2.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.model.spec import Window
from planner.plan import Packing

__all__ = ["Attended", "attended"]


@dataclass(frozen=True, slots=True)
class Attended:
    """What one kernel of attention works on.

    Attributes:
        keys_per_query: Mean over all queries.
        kernel_length: Tokens of a plain causal sequence whose kernel runs as efficiently: each
            document counts as the sequence in which a query sees as many keys (without a window
            itself), and the mean over documents is weighted with their flop.
    """

    keys_per_query: float
    kernel_length: float


def attended(
    seq_len: int, packing: Packing | None = None, window: Window | None = None
) -> Attended:
    """Return what the queries of one layer see.

    Args:
        seq_len: Tokens per sequence.
        packing: Documents in it; None = one.
        window: Of the layer; None = all earlier tokens.

    >>> attended(8192)
    Attended(keys_per_query=4096.0, kernel_length=8192.0)
    >>> attended(8192, window=Window(size=128, layers=(0,))).keys_per_query
    127.0
    >>> attended(8192, Packing(lengths=(4096, 1024), counts=(1, 4)))
    Attended(keys_per_query=1280.0, kernel_length=3481.6)
    """
    lengths = np.array(packing.lengths if packing else [seq_len], dtype=float)
    counts = np.array(packing.counts if packing else [1], dtype=float)
    pairs = _pairs(lengths, window)
    flop = counts * pairs
    return Attended(
        float(flop.sum() / (counts * lengths).sum()),
        float((flop * 2 * pairs / lengths).sum() / flop.sum()),
    )


def _pairs(lengths: npt.NDArray[np.float64], window: Window | None) -> npt.NDArray[np.float64]:
    """Return pairs of query and key in documents of these lengths, same shape."""
    if window is None:
        return lengths**2 / 2
    size = float(window.size)
    if window.kind == "sliding":
        seen = np.minimum(lengths, size)
        return seen * lengths - seen**2 / 2
    return (lengths // size * size**2 + (lengths % size) ** 2) / 2
