"""The lab's side of ``Lab``: PID 1, which builds the cluster and forks a process per rank.

torch is imported once, before the ranks are forked: importing it in each would take the cores of
a small machine seconds per rank.
"""

import ctypes
import json
import os
import pickle
import platform
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import IO, Any, Final, NoReturn

import torch
import torch.distributed as dist

from benchmarks.lab.cluster import Cluster, RankContext, cluster_of
from benchmarks.lab.errors import LabError
from benchmarks.lab.network import Host, build
from planner.topology.document import parse_topology

__all__: list[str] = []

_JOIN_TIMEOUT: Final = timedelta(seconds=60)
_TASKS: Final = "/proc/self/task"
_GLOO_THREAD: Final = "gloo_tcp_loop"
_LOWEST_PRIORITY: Final = 19


def main() -> None:
    """Build what the first line from the driver describes; run until its pipe ends, as it may."""
    lifeline = os.fdopen(int(sys.argv[1]))
    wanted = json.loads(lifeline.readline())
    cluster = cluster_of(parse_topology(wanted["topology"]), wanted["order"])
    try:
        hosts = build(cluster)
    except LabError as error:
        sys.exit(str(error))
    sockets = {}
    for rank, number in enumerate(wanted["sockets"]):
        if (process := os.fork()) == 0:
            _be_rank(rank, cluster, hosts[cluster.host_of(rank)], Connection(number))
        sockets[process] = socket(fileno=number)
    Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    while True:
        ended, _ = os.wait()
        if ended in sockets:  # the driver is to notice, though other processes have the socket too
            sockets[ended].shutdown(SHUT_RDWR)


def _end_with(lifeline: IO[str]) -> NoReturn:
    lifeline.read()
    os._exit(0)


def _be_rank(rank: int, cluster: Cluster, host: Host, driver: Connection) -> NoReturn:
    """Join the job, then do one experiment after the other until the driver hangs up."""
    _move_to(host)
    os.environ.update(cluster.environment(rank))
    torch.set_num_threads(1)
    answer = _answer(partial(dist.init_process_group, "gloo", timeout=_JOIN_TIMEOUT))
    place = cluster.context(rank)
    while True:
        driver.send_bytes(answer)
        try:
            function, kwargs = pickle.loads(driver.recv_bytes())
        except EOFError:
            os._exit(0)
        answer = _answer(partial(_call, function, place, kwargs))


def _move_to(host: Host) -> None:
    """Move this process, which must have one thread, to a host; it stays in its directory."""
    directory = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [
        os.open(f"/proc/{host.pid}/ns/{kind}", 0) for kind in ("net", "uts", "ipc", "mnt")
    ]
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    os.chdir(directory)
    platform._uname_cache = None  # type: ignore[attr-defined]  # PID 1's host name


def _let_gloo_yield() -> None:
    """Give the threads that gloo has made by now the lowest priority.

    They spin while a message waits for its receive. On a host with a core for each that harms
    nobody; here all hosts share the cores, and the rank that should receive would have to wait for
    the kernel's next tick: 4 ms.
    """
    for task in os.listdir(_TASKS):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if Path(_TASKS, task, "comm").read_text().startswith(_GLOO_THREAD):
                os.setpriority(os.PRIO_PROCESS, int(task), _LOWEST_PRIORITY)


def _call(name: str, place: RankContext, kwargs: dict[str, Any]) -> Any:
    _let_gloo_yield()
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(place, **kwargs)


def _answer(action: Callable[[], Any]) -> bytes:
    """Return (what went wrong, the traceback) or None, and the result, pickled.

    Not by ``Connection.send``: torch makes that pass tensors by shared memory.
    """
    try:
        return pickle.dumps((None, action()))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return pickle.dumps(((what, traceback.format_exc()), None))


if __name__ == "__main__":
    main()
