"""Starts a command once per rank, as torchrun would: ``Cluster.environment`` says with which
variables. Runs as PID 1 of the lab.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Final

from benchmarks.lab.cluster import Cluster
from benchmarks.lab.network import build, inside

__all__ = ["launch"]

# Something that left a rank's session may hold its output open.
_LAST_LINES_TIMEOUT_S: Final = 1.0


def launch(cluster: Cluster, command: Sequence[str]) -> int:
    """Build the cluster, run ``command`` on every rank, and return the exit code.

    That is the code of the first rank that failed, 128 + n if signal n ended it, or 0. The other
    ranks are ended then, with what they have started. Lines of the ranks' output are written with
    the rank before them.

    Raises:
        LabError: The cluster could not be built.
    """
    hosts = build(cluster)
    directory = os.getcwd()
    ranks = [
        subprocess.Popen(
            [*inside(hosts[cluster.host_of(rank)], directory=directory), *command],
            env={**os.environ, **cluster.environment(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for rank in range(cluster.world_size)
    ]
    relays = [Thread(target=_relay, args=item, daemon=True) for item in enumerate(ranks)]
    for relay in relays:
        relay.start()
    code = _first_failure(cluster, {process.pid: rank for rank, process in enumerate(ranks)})
    for process in ranks:
        with suppress(ProcessLookupError):  # it has ended, and has left nothing behind
            os.killpg(process.pid, signal.SIGKILL)
    for relay in relays:
        relay.join(_LAST_LINES_TIMEOUT_S)
    return code


def _relay(rank: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        sys.stdout.write(f"[{rank}] {line.rstrip()}\n")
        sys.stdout.flush()


def _first_failure(cluster: Cluster, rank_of: dict[int, int]) -> int:
    """Wait until a rank fails or all have ended; reap orphans too, as PID 1 must."""
    while rank_of:
        pid, status = os.wait()
        rank = rank_of.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is None or code == 0:
            continue
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        host = cluster.hosts[cluster.host_of(rank)]
        sys.stderr.write(f"rank {rank} on host {host} failed with {how}; the others are ended\n")
        return code if code > 0 else 128 - code
    return 0
