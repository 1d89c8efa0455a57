"""Observe a training script that knows nothing of commplan: FSDP2 on a toy model.

    torchrun --nproc-per-node 4 examples/observe_fsdp.py --plan plan.json --report run.json

The lines marked with (1) and (2) are all that observing adds. The plan may be any for as many ranks
with data parallelism alone; it gives the names of the axes.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from executor.client import load_plan, save_run
from executor.observer import observe

WIDTH = 256


def main() -> None:
    """Train; rank 0 writes what was observed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s")
    dist.init_process_group("gloo")
    train(options)  # the model is gone when the groups it uses are
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train a toy model under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())

    with observe(load_plan(options.plan)) as observer:  # (1)
        for _ in range(options.steps):
            with observer.step():  # (2)
                batch = torch.randn(32, WIDTH)
                loss = nn.functional.mse_loss(model(batch), batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    if observer.run is not None:
        save_run(options.report, observer.run)
        for timing in observer.run.ranks[0].collectives:
            mean_ms = 1e3 * sum(timing.seconds) / len(timing.seconds)
            print(
                f"{timing.axis:12} {timing.op:15} {timing.size_bytes:>10,} B "
                f"{len(timing.seconds):>4} calls {mean_ms:8.2f} ms"
            )


if __name__ == "__main__":
    main()
