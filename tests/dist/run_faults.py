"""Starts jobs in which something goes wrong, and says how each of their ranks ended.

``run_faults.py FOLDER`` imports torch once and then forks the ranks of every job, real processes
with their own end. A line on stdin is a JSON list of ``Job`` as dicts; they run at the same time,
and the answer is a line with a list of lists of ``End``, one per rank that was started. A rank that
is still there ``within_s`` after the start is killed and has no code.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import executor
import executor.measure  # with it all that a rank needs: nothing is left to import after a fork
from planner.plan import Plan
from tests.dist.cases import MODELS, train_gpt

PATIENCE_S = 5.0


@dataclass(frozen=True)
class Job:
    """One job; every rank of ``plan`` is started, unless ``fault`` says otherwise."""

    layout: str
    plan: dict[str, Any]
    model: str
    fault: str
    victim: int
    within_s: float


@dataclass(frozen=True)
class End:
    """How a rank ended, and how long after the fault (of a refusal: after its start)."""

    rank: int
    code: int | None
    after_s: float
    stderr: str


# ------------------------------------------------------------------------------ what goes wrong


def run_rank(job: Job, rank: int, came: Path) -> None:
    """Train two steps; in the second, or before, the fault comes over the victim."""
    is_victim = rank == job.victim
    plan, fault = Plan.model_validate(job.plan), job.fault if is_victim else "none"
    if fault == "plans differ":
        plan = plan.model_copy(update={"id": "another"})
    torch.manual_seed(1 if fault == "weights differ" else 0)
    width = {"intermediate_size": 64} if fault == "model of another width" else {}
    model = train_gpt.GPT(train_gpt.GPTConfig(**(MODELS[job.model] | width)))
    with executor.join(os.environ, timeout_s=PATIENCE_S) as place:
        plan = executor.agree_on_plan(place, lambda: plan)
        learning_rate = 0.5 if fault == "options differ" else 1e-3
        killing = patch(
            "executor.trainer.build_mesh", lambda *_, **__: strike(signal.SIGKILL, came)
        )
        with killing if fault == "killed while building groups" else nullcontext():
            trainer = executor.apply(plan, model, job=place, learning_rate=learning_rate)
        book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
        for step in range(2):
            inputs, targets = (rows[trainer.my_rows()] for rows in book.batch(step))
            if step == 1 and fault != "none":
                inputs = struck(fault, trainer, inputs, came)
                if fault == "leaves early":
                    break
            result = executor.timed_step(trainer, inputs, targets)
            trainer.global_loss(result)


def struck(fault: str, trainer: executor.Trainer, inputs: torch.Tensor, came: Path) -> torch.Tensor:
    """Do to this rank what the name of the fault says, or arrange it; return its inputs."""
    if fault == "killed in the forward":
        layer(trainer).register_forward_hook(lambda *_: strike(signal.SIGKILL, came))
    elif fault == "killed in the backward":
        layer(trainer).register_full_backward_hook(lambda *_: strike(signal.SIGKILL, came))
    elif fault == "killed between steps":
        strike(signal.SIGKILL, came)
    elif fault == "frozen in the forward":
        layer(trainer).register_forward_hook(lambda *_: strike(signal.SIGSTOP, came))
    elif fault == "user code raises":
        came.touch()
        raise ValueError("the data loader of this rank is broken")
    elif fault == "leaves early":
        came.touch()
    elif fault == "inputs of another shape":
        came.touch()
        return inputs[:, 1:]
    return inputs


def layer(trainer: executor.Trainer) -> nn.Module:
    found: nn.Module = trainer.chunks[0].layers[-1]
    return found


def strike(blow: signal.Signals, came: Path) -> None:
    came.touch()
    os.kill(os.getpid(), blow)


# ------------------------------------------------------------------------------------ the jobs


class Running:
    """The processes of one job."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._came = folder / "came"
        world_size = Plan.model_validate(job.plan).layout.world_size
        started = world_size - 1 if job.fault == "wrong world size" else world_size
        absent = job.victim if job.fault == "never starts" else None
        port = free_port()
        self._start_s = time.time()
        self._pids = {
            rank: self._fork(rank, started, port) for rank in range(started) if rank != absent
        }
        self._ends: dict[int, End] = {}

    def _fork(self, rank: int, world_size: int, port: int) -> int:
        if pid := os.fork():
            return pid
        for number in (1, 2):
            own = os.open(self._folder / f"{rank}.{number}", os.O_CREAT | os.O_WRONLY)
            os.dup2(own, number)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        run_rank(self._job, rank, self._came)
        sys.exit(0)

    def is_over(self) -> bool:
        """Look who has ended; when only a frozen victim is left, or time is up, end it."""
        for rank, pid in self._pids.items():
            if rank not in self._ends and (code := code_of(pid, os.WNOHANG)) is not None:
                self._note(rank, code)
        left = self._pids.keys() - self._ends.keys()
        is_only_the_victim = left == {self._job.victim} and self._job.fault.startswith("frozen")
        if is_only_the_victim or time.time() > self._start_s + self._job.within_s:
            for rank in left:
                os.kill(self._pids[rank], signal.SIGKILL)
                code_of(self._pids[rank], 0)
                self._note(rank, None)
        return len(self._ends) == len(self._pids)

    def _note(self, rank: int, code: int | None) -> None:
        fault_s = self._came.stat().st_mtime if self._came.exists() else self._start_s
        stderr = (self._folder / f"{rank}.2").read_text()
        self._ends[rank] = End(rank, code, time.time() - fault_s, stderr)

    def ends(self) -> list[End]:
        return [self._ends[rank] for rank in sorted(self._ends)]


def code_of(pid: int, options: int) -> int | None:
    found, status = os.waitpid(pid, options)
    return os.waitstatus_to_exitcode(status) if found else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = Path(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        running = []
        for job in (Job(**fields) for fields in json.loads(line)):
            own = folder / f"{number} {job.layout}"
            own.mkdir()
            running.append(Running(job, own))
        while left := [job for job in running if not job.is_over()]:
            time.sleep(0.02 * len(left))
        sys.stdout.write(json.dumps([[asdict(end) for end in job.ends()] for job in running]))
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
