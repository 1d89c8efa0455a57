"""Worker of the tests: train, save and resume small models under several plans in one job.

``run_checkpoint.py CASES FOLDER``: CASES is a JSON list of jobs, each the dict of a
``tests.dist.cases.Case`` with ``resume`` and ``save``, folders of checkpoints or null. Each trains
``steps`` steps from where it resumes, or from the start. Rank 0 writes FOLDER/losses.json, by name,
and what was logged goes to stderr. ``leaves_while`` names what rank 1 does not survive.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import executor
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner.plan import Plan
from tests.dist.cases import MODELS, build_model, train_gpt

# No dimension that four ranks share out evenly, and of three experts one rank gets none.
MODELS["gpt-odd"] = MODELS["gpt-dense"] | {
    "intermediate_size": 25,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


def main() -> None:
    torch.set_num_interop_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    losses = {}
    with executor.join(os.environ, timeout_s=60.0) as job:
        for case in cases:
            losses[case["name"]] = train(job, case)
            if job.rank == 0:
                (folder / "losses.json").write_text(json.dumps(losses))


def train(job: executor.Job, case: dict[str, Any]) -> list[float]:
    plan = Plan.model_validate(case["plan"])
    torch.manual_seed(1 if case["resume"] else 0)  # what is not loaded shows in the loss
    model = build_model(case["model"])
    trainer = executor.apply(plan, model, job=job, max_gradient_norm=case["max_gradient_norm"])
    book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
    with leaving(job, case.get("leaves_while")):
        first = load_checkpoint(trainer, case["resume"]) if case["resume"] else 0
        losses = []
        for step in range(first, first + case["steps"]):
            inputs, targets = (rows[trainer.my_rows()] for rows in book.batch(step))
            losses.append(trainer.global_loss(trainer.step(inputs, targets)))
        if case["save"]:
            save_checkpoint(trainer, case["save"], step=first + case["steps"])
    trainer.close()
    return losses


def leaving(job: executor.Job, doing: str | None) -> Any:
    """End rank 1 while it writes or reads its part, without a word."""
    target, method = {
        "saving": (FileSystemWriter, "write_data"),
        "loading": (FileSystemReader, "read_data"),
        None: (FileSystemReader, "read_data"),
    }[doing]

    def leave(*_: Any) -> NoReturn:
        os._exit(9)

    leaves = doing is not None and job.rank == 1
    return patch.object(target, method, leave if leaves else getattr(target, method))


if __name__ == "__main__":
    main()
