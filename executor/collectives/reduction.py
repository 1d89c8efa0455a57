"""The reductions that gloo knows, done here on two tensors at a time."""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.protocol import Op

__all__ = ["REDUCIBLE", "accumulate", "average", "require_reducible"]

_REALS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_COMPLEX: Final = (torch.complex64, torch.complex128)

# What gloo of torch 2.13 takes; a test compares.
REDUCIBLE: Final[dict[Op, tuple[torch.dtype, ...]]] = {
    dist.ReduceOp.SUM: (*_REALS, *_INTEGERS, *_COMPLEX),
    dist.ReduceOp.AVG: (*_REALS, *_COMPLEX),
    dist.ReduceOp.PRODUCT: (*_REALS, *_INTEGERS),
    dist.ReduceOp.MIN: (*_REALS, *_INTEGERS),
    dist.ReduceOp.MAX: (*_REALS, *_INTEGERS),
    dist.ReduceOp.BAND: _INTEGERS,
    dist.ReduceOp.BOR: _INTEGERS,
    dist.ReduceOp.BXOR: _INTEGERS,
}

_IN_PLACE: Final[dict[Op, Callable[[torch.Tensor, torch.Tensor], object]]] = {
    dist.ReduceOp.SUM: lambda into, more: into.add_(more),
    dist.ReduceOp.AVG: lambda into, more: into.add_(more),
    dist.ReduceOp.PRODUCT: lambda into, more: into.mul_(more),
    dist.ReduceOp.MIN: lambda into, more: torch.minimum(into, more, out=into),
    dist.ReduceOp.MAX: lambda into, more: torch.maximum(into, more, out=into),
    dist.ReduceOp.BAND: lambda into, more: into.bitwise_and_(more),
    dist.ReduceOp.BOR: lambda into, more: into.bitwise_or_(more),
    dist.ReduceOp.BXOR: lambda into, more: into.bitwise_xor_(more),
}


def require_reducible(tensor: torch.Tensor, op: Op) -> None:
    """Refuse what gloo refuses, before a message is sent.

    Raises:
        RuntimeError: As gloo's: there is no such reduction of this dtype.
    """
    if tensor.dtype in REDUCIBLE.get(op, ()):
        return
    taken = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE.get(op, ()))
    raise RuntimeError(
        f"cannot reduce a tensor of {tensor.dtype} by {op.name}: "
        + (f"it takes {taken}; convert the tensor first" if taken else "gloo has no such reduction")
    )


def accumulate(into: torch.Tensor, more: torch.Tensor, op: Op) -> None:
    """Reduce ``more`` into ``into``, of the same shape; an average is a sum until ``average``."""
    _IN_PLACE[op](into, more)


def average(tensor: torch.Tensor, op: Op, size: int) -> None:
    """Divide what was accumulated over ``size`` members, if ``op`` is an average."""
    if op == dist.ReduceOp.AVG:
        tensor.div_(size)
