"""What the lab's tests run on its ranks."""

import os
import platform
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab import RankContext

_PORT = 5000


def place(context: RankContext) -> tuple[RankContext, int, int]:
    """Return the context, and rank and size of the process group."""
    return context, dist.get_rank(), dist.get_world_size()


def summed(context: RankContext, *, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of rank times ``tensor``."""
    mine = tensor * context.rank
    dist.all_reduce(mine)
    return mine


def host_and_shared_memory(context: RankContext) -> tuple[str, list[str]]:
    """Return the host's name and the shared memory seen after every rank has made some."""
    shared = Path("/dev/shm")
    (shared / f"of-rank-{context.rank}").touch()
    dist.barrier()
    seen = sorted(path.name for path in shared.iterdir())
    dist.barrier()
    (shared / f"of-rank-{context.rank}").unlink()
    return platform.node(), seen


def priorities(context: RankContext) -> dict[str, set[int]]:
    """Return the priorities of this process's threads by their names."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        found.setdefault(name, set()).add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def send(context: RankContext, *, pairs: dict[int, int], num_bytes: int) -> float | None:
    """Send bytes over plain sockets; return the seconds until the receiver had all, if sender.

    Args:
        context: This rank's place.
        pairs: Rank of each sender, and of its receiver.
        num_bytes: From each sender.
    """
    with socket.create_server(("", _PORT + context.rank)) as server:
        dist.barrier()
        for sender, receiver in pairs.items():
            if context.rank == receiver:
                connection, _ = server.accept()
                with connection:
                    left = num_bytes
                    while left:
                        left -= len(connection.recv(1 << 20))
                    connection.sendall(b"!")
            if context.rank == sender:
                host = next(i for i, ranks in enumerate(context.units) if receiver in ranks)
                start = time.perf_counter()
                with socket.create_connection((f"n{host}", _PORT + receiver)) as connection:
                    connection.sendall(bytes(num_bytes))
                    assert connection.recv(1) == b"!"
                return time.perf_counter() - start
    return None


def refuse(context: RankContext) -> None:
    """Fail on every rank, after all have come here."""
    dist.barrier()
    raise ValueError(f"nothing for {context.rank}")


def die(context: RankContext, *, rank: int) -> None:
    """Kill one rank while the others wait for it."""
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail(context: RankContext, *, rank: int) -> None:
    """Fail on one rank while the others wait for it."""
    if context.rank == rank:
        raise ValueError("no")
    dist.barrier()


def hang(context: RankContext, *, rank: int) -> Any:
    """Never return on one rank."""
    while context.rank == rank:
        time.sleep(60)
