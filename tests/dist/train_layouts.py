"""Worker of the tests: train the tiny model under several plans, one after another, in one job.

``train_layouts.py PLANS OUT``: PLANS is a JSON list of {"name", "steps", "plan"}; rank 0 writes to
OUT {name: {"losses", "run", "orders"}}, where orders are what torch's pipeline ran on each rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import executor
from planner.plan import Plan
from tests.dist.jobs import EXAMPLE, TINY_CONFIG

sys.path.insert(0, str(EXAMPLE.parent))
import train_gpt  # an example, not a package: its folder has to be on the path first


def main() -> None:
    torch.set_num_interop_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    with executor.join(os.environ, timeout_s=60.0) as job:
        for case in cases:
            plan = Plan.model_validate(case["plan"])
            found[case["name"]] = train(job, plan, case["steps"])
        if job.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))


def train(job: executor.Job, plan: Plan, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = train_gpt.GPT(train_gpt.GPTConfig.from_file(TINY_CONFIG))
    trainer = executor.apply_plan(job, plan, model, learning_rate=1e-3)
    book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
    probes = executor.run_probes(trainer)
    losses, results = [], []
    order: list[str] = []
    with noted("forward_one_chunk", "F", order), noted("backward_one_chunk", "B", order):
        for step in range(steps):
            if step == 1:  # in the first step torch's pipeline also agrees on shapes
                trainer.recorder.clear()
            inputs, targets = (rows[trainer.my_rows()] for rows in book.batch(step))
            results.append(executor.timed_step(trainer, inputs, targets))
            losses.append(trainer.global_loss(results[-1]))
    run = executor.calibration_run(job, trainer, results[1:], num_warmup_steps=1, probes=probes)
    orders: list[list[str]] = [[]] * job.world_size
    dist.all_gather_object(orders, order[: len(order) // steps])
    return {
        "losses": losses,
        "run": run.model_dump(mode="json") if run else None,
        "orders": orders,
    }


def noted(method: str, letter: str, order: list[str]) -> Any:
    """Note which micro-batch ``PipelineStage.method`` works on, in the order of the calls."""
    original = getattr(PipelineStage, method)

    def noting(self: PipelineStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        order.append(f"{letter}{micro_batch}")
        return original(self, micro_batch, *args, **kwargs)

    return patch.object(PipelineStage, method, noting)


if __name__ == "__main__":
    main()
