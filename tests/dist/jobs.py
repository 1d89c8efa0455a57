"""Start the ranks of a job as plain processes, without torchrun, to see each one's end."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
TINY_CONFIG = Path(__file__).with_name("tiny-gpt.json")


@dataclass(frozen=True)
class Ended:
    """How one rank ended, and how long after the start of the job."""

    code: int
    stdout: str
    stderr: str
    after_s: float


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set, and the checkout on the path."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def started(arguments: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one Python process per entry of ``arguments``; none outlives the block."""
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *own],
            env=environment(rank, len(arguments), port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(arguments)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def run(arguments: Sequence[Sequence[str]], *, within_s: float) -> list[Ended]:
    """Run a job to its end; a rank that is still there ``within_s`` later is a failure."""
    start = time.monotonic()
    with started(arguments) as processes:
        return [ended(process, start, within_s) for process in processes]


def ended(process: subprocess.Popen[str], start: float, within_s: float) -> Ended:
    """Wait for ``process`` until ``within_s`` after ``start``."""
    left_s = max(0.1, start + within_s - time.monotonic())
    stdout, stderr = process.communicate(timeout=left_s)
    return Ended(process.returncode, stdout, stderr, time.monotonic() - start)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
