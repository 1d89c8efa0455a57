"""How uneven the tables of measured expert layers are: their collector's random loads."""

from functools import cache
from typing import Final

import numpy as np

__all__ = ["power_law_skew"]

_DRAWS: Final = 48
_SEED: Final = 0
# Largest load of an expert before all are scaled to what is routed, over the tokens.
_LARGEST: Final = 0.8


@cache
def power_law_skew(tokens: int, num_experts: int, ep: int, exponent: float) -> float:
    """Return the rows of the hottest of ``ep`` ranks over the mean of all, expected.

    Every expert's load is drawn alone, with density x**-exponent between one row and 0.8 of the
    tokens, then all are scaled together (ai-dynamo/aiconfigurator, collector/helper.py,
    ``power_law_logits_v3``). Which draw a table had is not recorded: this is the mean of 48.

    Args:
        tokens: Routed together.
        num_experts: Of all ranks.
        ep: Ranks, each with a block of experts.
        exponent: Of the density; not 1.

    >>> power_law_skew(1024, 128, 1, 1.2), power_law_skew(1024, 128, 8, 1.2) > 1.5
    (1.0, True)
    """
    uniform = np.random.default_rng(_SEED).random((_DRAWS, num_experts))
    power = 1.0 - exponent
    loads = (((_LARGEST * tokens) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
    of_ranks = loads.reshape(_DRAWS, ep, -1).sum(axis=2)
    return float((of_ranks.max(axis=1) * ep / of_ranks.sum(axis=1)).mean())
