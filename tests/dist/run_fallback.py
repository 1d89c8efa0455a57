"""Worker of the tests: communicators of ranks of which one cannot share memory.

``run_fallback.py CASES OUT``: CASES is a JSON object of the plan and its cases (see
``test_fallback.py``); rank 0 writes to OUT {name of a case: one entry per rank of what ``tried``
returns}.
"""

import json
import os
import sys
from contextlib import ExitStack
from datetime import timedelta
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import executor
from executor.collectives import methods
from executor.collectives.communicator import communicators
from executor.mesh import Mesh, build_mesh
from executor.timing import Recorder
from planner.plan import Collective, Method, Plan

OPS: tuple[Collective, ...] = ("all_reduce", "broadcast", "all_gather")


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    plan = Plan.model_validate(given["plan"])
    found: dict[str, list[Any]] = {}
    with executor.join(os.environ, timeout_s=30.0) as job:
        mesh = build_mesh(plan, rank=job.rank, timeout=timedelta(seconds=30))
        for name, case in given["cases"].items():
            found[name] = [None] * job.world_size
            dist.all_gather_object(found[name], tried(plan, mesh, case))
        if job.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))


def tried(plan: Plan, mesh: Mesh, case: dict[str, Any]) -> dict[str, Any]:
    """Return which methods run, their results, what was recorded and the warnings."""
    recorder, warnings = Recorder(mesh, backend="gloo"), BufferingHandler(capacity=100)
    methods.logger.addHandler(warnings)
    with ExitStack() as broken:
        if mesh.rank == case["rank"]:
            refusal = OSError("refused by the test")
            broken.enter_context(patch(case["function"], side_effect=refusal))
        group = communicators(plan, mesh, recorder, timeout_s=30)["dp_cp"]
    methods.logger.removeHandler(warnings)
    root = group.size - 1
    sent = torch.full((1000,), float(mesh.rank))
    group.runner("broadcast", sent.nbytes).collectives.broadcast(sent, root)
    summed = group.all_reduce(torch.full((1000,), float(mesh.rank)))
    gathered = group.all_gather(torch.full((10,), mesh.rank))
    group.runners.close()
    return {
        "methods": {op: str(group.runner(op, sent.nbytes).method) for op in OPS},
        "recorded": {t.op: str(Method(t.algorithm, t.path)) for t in recorder.timings()},
        "results": {
            "all_reduce": summed.tolist(),
            "broadcast": sent.tolist(),
            "all_gather": gathered.tolist(),
        },
        "warnings": [record.getMessage() for record in warnings.buffer],
    }


if __name__ == "__main__":
    main()
