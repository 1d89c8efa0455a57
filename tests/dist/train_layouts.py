"""Worker of the tests: train small models under several plans, one after another, in one job.

``train_layouts.py CASES FOLDER``: CASES is a JSON list of ``tests.dist.cases.Case`` as dicts. Every
rank writes to FOLDER, for each case, what it holds of every parameter after the last step; rank 0
writes losses, gradient norms, timings, and the order that torch's pipeline ran on each rank.
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
from torch.distributed.tensor import DTensor

import executor
from planner.plan import Axis, Plan
from tests.dist.cases import build_model, train_gpt


def main() -> None:
    torch.set_num_interop_threads(1)
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    with executor.join(os.environ, timeout_s=60.0) as job:
        for case in cases:
            found, parameters = train(job, case)
            name = case["name"].replace(" ", "_")
            torch.save(parameters, folder / f"{name}.{job.rank}.pt")
            if job.rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(found))


def train(job: executor.Job, case: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    plan = Plan.model_validate(case["plan"])
    torch.manual_seed(0)
    model = build_model(case["model"])
    trainer = executor.apply(
        plan,
        model,
        job=job,
        max_gradient_norm=case["max_gradient_norm"],
        aux_loss_coefficient=case["aux_loss_coefficient"],
    )
    book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
    probes = executor.run_probes(trainer)
    losses, results = [], []
    order: list[str] = []
    with noted("forward_one_chunk", "F", order), noted("backward_one_chunk", "B", order):
        for step in range(case["steps"]):
            if step == 1:  # in the first step torch's pipeline also opens its connections
                trainer.recorder.clear()
            inputs, targets = (rows[trainer.my_rows()] for rows in book.batch(step))
            results.append(executor.timed_step(trainer, inputs, targets))
            losses.append(trainer.global_loss(results[-1]))
    run = executor.calibration_run(job, trainer, results[1:], num_warmup_steps=1, probes=probes)
    orders: list[list[str]] = [[]] * job.world_size
    dist.all_gather_object(orders, order[: len(order) // case["steps"]])
    parameters = held(trainer)
    trainer.close()  # a job that builds many would run out of sockets
    return {
        "losses": losses,
        "norms": [result.gradient_norm for result in results],
        "run": run.model_dump(mode="json") if run else None,
        "orders": orders,
    }, parameters


def held(trainer: executor.Trainer) -> list[tuple[str, int, int, torch.Tensor]]:
    """Return (name, dimension cut, index of the part, part) of what this rank holds."""
    parts = []
    for states in trainer.states:
        for local in states.parameters:
            part = local.parameter.detach()
            if isinstance(part, DTensor):
                axis: Axis = "edp" if local.is_expert else "dp_shard_cp"
                part = joined(part.to_local(), trainer.mesh.groups[axis].process_group)
            index = trainer.mesh.coordinates[local.split] if local.split else 0
            parts.append((local.name, local.dim, index, part.clone()))
    return parts


def joined(shard: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the shards of all ranks, joined by rows; the last ones may be short or empty."""
    shards: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shards, shard, group=group)
    return torch.cat(shards)


def noted(method: str, letter: str, order: list[str]) -> Any:
    """Note which stage and micro-batch ``PipelineStage.method`` works on, in order of the calls."""
    original = getattr(PipelineStage, method)

    def noting(self: PipelineStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        order.append(f"{self.stage_index}{letter}{micro_batch}")
        return original(self, micro_batch, *args, **kwargs)

    return patch.object(PipelineStage, method, noting)


if __name__ == "__main__":
    main()
