"""How many rows an expert takes of one rank's micro-batch, as each framework rounds it.

S tokens on a rank, E experts, k experts per token, capacity factor f:

========== ========================== ==========================================================
deepspeed  ceil(S / E · (f · k))      in fp32; DeepSpeed, moe/sharded_moe.py ``_capacity``
megatron   ceil(S · k / E · f)        in doubles; Megatron-LM, moe/moe_utils.py ``get_capacity``
tutel      k · floor(f · ceil(S / E)) in doubles; Tutel, impls/fast_dispatch.py
floor      floor(S · k · f / E)       exact, f the decimal that was written; no source: for f = 1,
                                      never more rows in all than routes
========== ========================== ==========================================================

Everything is rational arithmetic; where a framework stores a number, it is rounded to the nearest
that its type holds. So a capacity is the one that the framework itself arrives at: for S=1000,
E=10, k=2, f=1.1 that is 220 in DeepSpeed and Tutel, and 221 in Megatron, whose 1.1 is a little more
than 11/10.

After that rounding the result is raised to ``min_capacity``, and then rounded up to a multiple of
``alignment``: DeepSpeed's min_capacity and its rounding to the tensor-parallel degree, in its
order.
"""

from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Literal

import numpy as np

from planner.errors import InvalidInputError

__all__ = ["CapacityConvention", "expert_capacity"]

CapacityConvention = Literal["deepspeed", "megatron", "tutel", "floor"]


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    factor: float,
    convention: CapacityConvention,
    min_capacity: int = 0,
    alignment: int = 1,
) -> int:
    """Return the rows that each expert takes of one rank's micro-batch.

    It may exceed ``num_tokens``: then nothing is dropped, and the rows are sent all the same.

    Args:
        num_tokens: Tokens of the micro-batch on one rank (S), not of the job.
        num_experts: Experts of the layer on all ranks (E).
        top_k: Experts per token (k).
        factor: 1 holds exactly what balanced routing sends.
        convention: Where it is rounded; see the module.
        min_capacity: At least this many rows.
        alignment: Rounded up to a multiple of this.

    Raises:
        InvalidInputError: A number is out of its range.

    >>> expert_capacity(4096, 60, 4, 1.25, "megatron"), expert_capacity(4096, 60, 4, 1.25, "tutel")
    (342, 344)
    >>> expert_capacity(1000, 10, 2, 1.1, "deepspeed", alignment=8)
    224
    """
    if num_tokens < 0 or not 1 <= top_k <= num_experts or not isfinite(factor) or factor <= 0:
        raise InvalidInputError(
            "expert capacity needs num_tokens >= 0, 1 <= top_k <= num_experts and a finite "
            f"factor > 0; got num_tokens={num_tokens}, top_k={top_k}, num_experts={num_experts}, "
            f"factor={factor}",
            where="training.expert_capacity",
        )
    if min_capacity < 0 or alignment < 1:
        raise InvalidInputError(
            "expert capacity needs min_capacity >= 0 and alignment >= 1; "
            f"got min_capacity={min_capacity}, alignment={alignment}",
            where="training.expert_capacity",
        )
    rows = _rounded(num_tokens, num_experts, top_k, factor, convention)
    return ceil(Fraction(max(rows, min_capacity), alignment)) * alignment


def _rounded(
    num_tokens: int, num_experts: int, top_k: int, factor: float, convention: CapacityConvention
) -> int:
    if convention == "floor":
        return floor(Fraction(num_tokens * top_k, num_experts) * Fraction(str(factor)))
    exact_factor = Fraction(factor)
    if convention == "tutel":
        return top_k * floor(_double(exact_factor * ceil(Fraction(num_tokens, num_experts))))
    if convention == "megatron":
        share = _double(Fraction(num_tokens * top_k, num_experts))
        return ceil(_double(share * exact_factor))
    share = _single(_double(Fraction(num_tokens, num_experts)))
    return ceil(_single(share * _single(_double(exact_factor * top_k))))


def _double(value: Fraction) -> Fraction:
    return Fraction(float(value))


def _single(value: Fraction) -> Fraction:
    """Return the nearest fp32 number; ``value`` is a double, or a product of two fp32 numbers."""
    return Fraction(float(np.float32(float(value))))
