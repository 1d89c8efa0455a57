"""Worker of the tests: the same training with gradients of DDP, of its hook, and of a plain module.

``run_gradients.py OUT`` writes OUT.RANK: what each way was left with, and what an error looks like.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executor.errors import LostPeerError
from executor.gradients.overlap import OverlappedGradients, ddp_bucket_cap_mb, ddp_comm_hook

STEPS = 3
WIDTH = 64
BUCKET_BYTES = 20_000  # a layer has 16,640 or 16,896


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH // 2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH // 2), nn.Tanh()]
    model = nn.Sequential(*layers, *deepcopy(layers)).double()
    group = dist.new_group()  # what the background threads use, and DDP does not

    def reduce(tensor: torch.Tensor) -> None:
        sizes_bytes.append(tensor.nbytes)
        dist.all_reduce(tensor, group=group)

    def lose_peer(tensor: torch.Tensor) -> None:
        raise LostPeerError("rank 9 is gone")

    found: dict[str, Any] = {}
    sizes_bytes: list[int] = []
    for name in ("ddp", "hook", "plain"):
        replica = deepcopy(model)
        sizes_bytes.clear()
        found[name] = train(replica, *synchronised(name, replica, reduce))
        found[f"{name} sizes"] = list(sizes_bytes)
    found["errors"] = errors(with_hook(deepcopy(model), lose_peer))
    torch.save(found, f"{sys.argv[1]}.{dist.get_rank()}")
    dist.destroy_process_group()


def synchronised(
    name: str, replica: nn.Module, reduce: Callable[[torch.Tensor], None]
) -> tuple[nn.Module, Callable[[], Any], Callable[[], object]]:
    """Return what to call forward, its ``no_sync``, and what ends a step."""
    if name == "plain":
        gradients = OverlappedGradients(
            replica.named_parameters(), reduce, bucket_bytes=BUCKET_BYTES, divide_by=2
        )
        return replica, gradients.no_sync, gradients.wait
    ddp = with_hook(replica, reduce) if name == "hook" else DistributedDataParallel(replica)
    return ddp, ddp.no_sync, lambda: None


def with_hook(
    replica: nn.Module, reduce: Callable[[torch.Tensor], None]
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(replica, bucket_cap_mb=ddp_bucket_cap_mb(BUCKET_BYTES))
    ddp.register_comm_hook(None, ddp_comm_hook(reduce, divide_by=dist.get_world_size()))
    return ddp


def train(
    replica: nn.Module,
    forward: nn.Module,
    no_sync: Callable[[], Any],
    end_step: Callable[[], object],
) -> list[torch.Tensor]:
    """Return the parameters after training on micro-batches that differ by rank."""
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    inputs = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        first, last = torch.randn(2, 5, WIDTH // 2, generator=inputs, dtype=torch.float64)
        with no_sync():
            forward(first).square().sum().backward()
        forward(last).square().sum().backward()
        end_step()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in replica.parameters()]


def errors(ddp: nn.Module) -> list[str]:
    """Return what each of two steps raises."""
    raised = []
    for _ in range(2):
        try:
            ddp(torch.ones(1, WIDTH // 2, dtype=torch.float64)).sum().backward()
        except LostPeerError as error:
            raised.append(str(error))
    return raised


if __name__ == "__main__":
    main()
