"""Worker of the tests: attention over a split sequence, beside one process's whole attention.

``run_context.py CASES OUT``: CASES is a JSON list of cases (see ``test_context.py``); rank 0 writes
to OUT {name: one entry per rank of {"errors": {tensor: relative error}, "calls": timings}}.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import executor
from executor.collectives.communicator import communicators
from executor.mesh import build_mesh
from executor.parallel.context import ContextAttention, local_positions
from executor.timing import Recorder
from planner.plan import Plan


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, list[Any]] = {}
    with executor.join(os.environ, timeout_s=60.0) as job:
        for case in cases:
            found[case["name"]] = [None] * job.world_size
            dist.all_gather_object(found[case["name"]], attend(job.rank, case))
        if job.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))


def attend(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Run all micro-batches forward, then all backward: each keeps its own state."""
    plan = Plan.model_validate(case["plan"])
    mesh = build_mesh(plan, rank=rank, timeout=timedelta(seconds=60))
    recorder = Recorder(mesh, backend="gloo")
    group = communicators(plan, mesh, recorder, timeout_s=60)["cp"]
    attention = ContextAttention(group, plan.sharding.context_exchange)
    positions = local_positions(plan.training.seq_len, cp=group.size, index=group.index)

    flights = []
    for seed in range(case["micro_batches"]):
        whole = inputs(plan, case, seed)
        mine = [t[:, :, positions].detach().requires_grad_() for t in whole[:3]]
        out = (
            checkpoint(attention, *mine, use_reentrant=False)
            if case["checkpoint"]
            else attention(*mine)
        )
        flights.append((whole, mine, out))
    errors: dict[str, float] = {}
    for whole, mine, out in flights:
        loss(out, whole[3][:, positions], case["gradient"]).backward()  # type: ignore[no-untyped-call]
        expected = one_process(whole, case["gradient"])
        got = (out, *(t.grad for t in mine))
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            assert ours is not None
            assert ours.dtype == mine[0].dtype
            difference = (ours.double() - theirs[:, :, positions]).abs().max()
            error = float(difference / theirs.abs().max())
            errors[name] = max(error, errors.get(name, 0.0))
    return {
        "errors": errors,
        "calls": [timing.model_dump(mode="json") for timing in recorder.timings()],
    }


def inputs(plan: Plan, case: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Return q, k, v [B, heads, S, width] and weights of the loss [B, S, Nq, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq_len = plan.batch.micro_batch_size, plan.training.seq_len
    shapes = (
        (batch, case["num_heads"], seq_len, case["key_width"]),
        (batch, case["num_kv_heads"], seq_len, case["key_width"]),
        (batch, case["num_kv_heads"], seq_len, case["value_width"]),
        (batch, seq_len, case["num_heads"], case["value_width"]),
    )
    dtype = getattr(torch, case["dtype"])
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


def loss(out: torch.Tensor, weights: torch.Tensor, gradient: str) -> torch.Tensor:
    """Return a sum whose gradient arrives transposed, or as one number expanded over ``out``."""
    return out.sum() if gradient == "expanded" else (out.transpose(1, 2) * weights).sum()


def one_process(whole: list[torch.Tensor], gradient: str) -> list[torch.Tensor]:
    """Return output and gradients of torch's own attention in fp64."""
    q, k, v, weights = (t.double().requires_grad_() for t in whole)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(loss(out, weights, gradient), (q, k, v))]


if __name__ == "__main__":
    main()
