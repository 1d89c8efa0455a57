"""The reductions that gloo knows, done here on two tensors at a time."""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.protocol import Op

__all__ = ["accumulate", "average"]

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


def accumulate(into: torch.Tensor, more: torch.Tensor, op: Op) -> None:
    """Reduce ``more`` into ``into``, of the same shape; an average is a sum until ``average``."""
    _IN_PLACE[op](into, more)


def average(tensor: torch.Tensor, op: Op, size: int) -> None:
    """Divide what was accumulated over ``size`` members, if ``op`` is an average."""
    if op == dist.ReduceOp.AVG:
        tensor.div_(size)
