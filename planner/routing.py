"""How many rows an expert takes of one rank's micro-batch, in exact rational arithmetic.

S tokens on a rank, E experts, k experts per token, capacity factor f. Each convention rounds where
its framework rounds:

========== ========================== ==========================================================
deepspeed  ceil(S / E · f · k)        DeepSpeed, moe/sharded_moe.py ``_capacity``
megatron   ceil(S · k / E · f)        Megatron-LM, transformer/moe/moe_utils.py ``get_capacity``
tutel      k · floor(f · ceil(S / E)) Tutel, impls/fast_dispatch.py ``extract_critical``
floor      floor(S · k · f / E)       no source: for f = 1, never more rows in all than routes
========== ========================== ==========================================================

After that rounding the result is raised to ``min_capacity``, and then rounded up to a multiple of
``alignment``: DeepSpeed's min_capacity and its rounding to the tensor-parallel degree, in its
order.

The factor is the decimal that was written: 1.1 is 11/10. The frameworks compute in floats, where it
is not, and so may keep one row more or less: Megatron's own expression for S=1000, E=10, k=2, f=1.1
is 1000 * 2 / 10 * 1.1 = 220.00000000000003, of which the ceiling is 221; here it is 220, as in
DeepSpeed and Tutel. In exact arithmetic the first two conventions are one formula.
"""

from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Literal

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
    rows = _rounded(num_tokens, num_experts, top_k, Fraction(str(factor)), convention)
    return ceil(Fraction(max(rows, min_capacity), alignment)) * alignment


def _rounded(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    factor: Fraction,
    convention: CapacityConvention,
) -> int:
    if convention == "tutel":
        return top_k * floor(factor * ceil(Fraction(num_tokens, num_experts)))
    share = Fraction(num_tokens * top_k, num_experts) * factor
    return floor(share) if convention == "floor" else ceil(share)
