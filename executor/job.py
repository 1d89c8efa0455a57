"""Join a job of many ranks, and keep its ranks unanimous: all go on, or all refuse alike."""

import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # public without their types
from torch.distributed import distributed_c10d as c10d

from executor.errors import ExecutorError, LostPeerError, PlanMismatchError
from executor.peers import list_of_ranks, naming_lost_peers
from planner.plan import Plan, document_hash

__all__ = [
    "EXIT_LOST_PEER",
    "EXIT_REFUSED",
    "Job",
    "agree_on_plan",
    "current_job",
    "join",
    "threads_per_rank",
    "together",
]

logger = logging.getLogger(__name__)

EXIT_REFUSED: Final = 2  # as the planner's command line: bad input
EXIT_LOST_PEER: Final = 3  # nothing to fix in the input: the same command may work next time

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_PATIENCE_OF_A_TRY_S: Final = 1.0

# Keys of the rendezvous in the store.
_HERE: Final = "commplan/rank {} is here"
_NUM_HERE: Final = "commplan/ranks here"

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job.

    Attributes:
        rank: Rank in the world.
        world_size: Ranks of the job.
        local_world_size: Ranks on this host.
        backend: Of the default group: gloo here.
        timeout: After which a rank stops waiting for the others.
    """

    rank: int
    world_size: int
    local_world_size: int
    backend: str
    timeout: timedelta


@contextmanager
def join(environment: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S) -> Iterator[Job]:
    """Enter the job that torchrun describes in ``environment``; without it, a job of one rank.

    Sets torch's threads to the cores this process may use divided by the ranks of this host (at
    least 1). An ``ExecutorError`` that all ranks agree on is printed by rank 0 alone, and every
    rank exits with ``EXIT_REFUSED``; one that a single rank raises is printed by that rank. After
    a lost peer each survivor prints its own sentence and exits with ``EXIT_LOST_PEER``. torchrun
    repeats the message at the end of its report.

    Args:
        environment: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun
            sets them, and TORCHELASTIC_ERROR_FILE, from which it reads why a rank failed.
        timeout_s: Of every collective; a peer that died ends the others after at most this long.
    """
    try:
        job = _described(environment, timeout_s)
    except PlanMismatchError as error:
        sys.stderr.write(f"refused: {error}\n")
        raise SystemExit(EXIT_REFUSED) from error
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads_per_rank(cores, job.local_world_size))
    if job.rank == 0:
        logger.info(
            "%d ranks here share %d cores: %d threads each",
            job.local_world_size,
            cores,
            torch.get_num_threads(),
        )
    try:
        with naming_lost_peers("the rendezvous", rank=job.rank, world_size=job.world_size):
            _init_process_group(job, environment)
        yield job
    except Exception as error:
        ours = _ours(error)
        if ours is None:
            raise
        _leave(job, ours, environment.get("TORCHELASTIC_ERROR_FILE"))
    dist.destroy_process_group()


def _described(environment: Mapping[str, str], timeout_s: float) -> Job:
    """Return the place that torchrun's variables describe.

    Raises:
        PlanMismatchError: They describe none.
    """
    if not 0 < timeout_s < math.inf:
        raise PlanMismatchError(f"timeout_s is {timeout_s:g}; need a number of seconds above 0")
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    if "RANK" in environment or "WORLD_SIZE" in environment:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not environment.get(name)]
        if missing:
            raise PlanMismatchError(
                f"{', '.join(missing)} not set, but others of {', '.join(needed)} are; start the "
                "script with torchrun, or with none of them for a job of one rank"
            )
        numbers["MASTER_PORT"] = 0
        numbers["LOCAL_WORLD_SIZE"] = 1
        for name, default in numbers.items():
            text = environment.get(name, str(default))
            if not text.isdecimal():
                raise PlanMismatchError(f"{name} is {text!r}; need a whole number, not below 0")
            numbers[name] = int(text)
    rank, world_size, local = (numbers[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not rank < world_size or not 1 <= local <= world_size:
        raise PlanMismatchError(
            f"RANK is {rank}, WORLD_SIZE {world_size}, LOCAL_WORLD_SIZE {local}; need "
            "RANK < WORLD_SIZE and 1 <= LOCAL_WORLD_SIZE <= WORLD_SIZE"
        )
    return Job(rank, world_size, local, "gloo", timedelta(seconds=timeout_s))


def current_job() -> Job:
    """Return this process's place in a job that the script itself has joined.

    Raises:
        PlanMismatchError: There is no default process group.
    """
    if not dist.is_initialized():
        raise PlanMismatchError(
            "this process is in no job: enter one with executor.join(os.environ), or call "
            "torch.distributed.init_process_group first"
        )
    return Job(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        backend=_backend_on_cpu(),
        timeout=timedelta(seconds=_TIMEOUT_S),
    )


def _backend_on_cpu() -> str:
    group = c10d._get_default_group()
    return str(group._get_backend(torch.device("cpu")).name())


def threads_per_rank(num_cores: int, num_local_ranks: int) -> int:
    """Return the compute threads of one rank.

    >>> threads_per_rank(16, 4), threads_per_rank(2, 4)
    (4, 1)
    """
    return max(1, num_cores // num_local_ranks)


def together(
    job: Job,
    action: Callable[[], ResultT],
    *,
    fingerprint: Callable[[ResultT], str] | None = None,
    what: str = "results",
) -> ResultT:
    """Run ``action`` on every rank and return its result, or raise the same error on all ranks.

    Args:
        job: This process's place.
        action: May raise an ``ExecutorError``; of several, that of the lowest rank is raised.
        fingerprint: Text that must be the same on all ranks, such as a hash of the result.
        what: What the texts are, in the plural, for the message.

    Raises:
        ExecutorError: Some rank's ``action`` raised it.
        PlanMismatchError: Fingerprints differ.
        LostPeerError: Another rank is gone.
    """
    result: ResultT | None = None
    error: ExecutorError | None = None
    text = ""
    try:
        result = action()
        text = fingerprint(result) if fingerprint is not None else ""
    except ExecutorError as exc:
        error = exc
    outcomes: list[tuple[ExecutorError | None, str]] = [(None, "")] * job.world_size
    with naming_lost_peers(
        "all_gather of refusals on all ranks", rank=job.rank, world_size=job.world_size
    ):
        dist.all_gather_object(outcomes, (error, text))
    for rank, (failure, _) in enumerate(outcomes):
        if failure is not None:
            failure.agreed = True
            failure.args = (f"rank {rank}: {failure}", *failure.args[1:])
            raise failure
    texts = [text for _, text in outcomes]
    if len(set(texts)) > 1:
        raise _differing(what, texts)
    return result  # type: ignore[return-value]  # None only where ResultT allows it


def agree_on_plan(job: Job, load: Callable[[], Plan]) -> Plan:
    """Load the plan on every rank and make sure it is the same one, before anything else.

    Raises:
        PlanSourceError: Some rank cannot load it.
        PlanMismatchError: Ranks hold different plans.
    """
    return together(
        job, load, fingerprint=lambda plan: f"{plan.id} ({document_hash(plan)})", what="plans"
    )


def _differing(what: str, texts: list[str]) -> PlanMismatchError:
    holders: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        holders.setdefault(text, []).append(rank)
    listed = "; ".join(f"{text} on ranks {ranks}" for text, ranks in holders.items())
    error = PlanMismatchError(f"{what} differ between ranks: {listed}; give every rank the same")
    error.agreed = True
    return error


def _init_process_group(job: Job, environment: Mapping[str, str]) -> None:
    store = _meet(job, environment) if "RANK" in environment else HashStore()
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=job.timeout,
    )


def _meet(job: Job, environment: Mapping[str, str]) -> Store:
    """Return the job's store once all ranks have come to it.

    As torch's ``env://``, which counts them and logs C++ frames if some are missing: here those
    are named, and nothing else is said.
    """
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_host = job.rank == 0 and not is_torchruns
    deadline = time.monotonic() + job.timeout.total_seconds()
    if not is_host:
        _wait_until_somebody_listens(job, address, deadline)
    store = TCPStore(
        *address, is_master=is_host, timeout=job.timeout, wait_for_workers=False, multi_tenant=True
    )
    store.set(_HERE.format(job.rank), "")
    store.add(_NUM_HERE, 1)
    while store.add(_NUM_HERE, 0) < job.world_size:
        if time.monotonic() > deadline:
            missing = [r for r in range(job.world_size) if not store.check([_HERE.format(r)])]
            raise _missed(job, missing, "not there")
        time.sleep(_POLL_S)
    return store


def _wait_until_somebody_listens(job: Job, address: tuple[str, int], deadline: float) -> None:
    while True:
        try:
            socket.create_connection(address, timeout=_PATIENCE_OF_A_TRY_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"nobody listens at {address[0]}:{address[1]} ({error})"
                raise _missed(job, [0], reason) from error
            time.sleep(_POLL_S)
        else:
            return


def _missed(job: Job, ranks: list[int], reason: str) -> LostPeerError:
    return LostPeerError(
        f"rank {job.rank} lost {list_of_ranks(ranks)} during the rendezvous: {reason} after "
        f"{job.timeout.total_seconds():g} s; see why, or wait longer (timeout_s)"
    )


def _ours(error: BaseException | None) -> ExecutorError | None:
    """Return the executor's error behind ``error``: torch's pipelining wraps what it meets."""
    while error is not None and not isinstance(error, ExecutorError):
        error = error.__cause__
    return error


def _leave(job: Job, error: ExecutorError, error_file: str | None) -> NoReturn:
    """Say why once, and end the process.

    torchrun sends SIGTERM to all ranks as soon as one has exited: the barrier keeps the others
    until rank 0 has printed, and from here on the signal changes no exit code.
    """
    with suppress(ValueError):  # not in the main thread: torchrun's signal ends it as ever
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lost = isinstance(error, LostPeerError)
    _tell_torchrun(error, error_file)
    if not error.agreed or job.rank == 0:
        sys.stderr.write(f"{'stopped' if lost else 'refused'}: {error}\n")
        sys.stderr.flush()
    if lost:  # groups are left as they are: closing them may wait for the lost rank
        raise SystemExit(EXIT_LOST_PEER)
    if error.agreed:
        with suppress(RuntimeError):  # a rank that has already gone is no longer waited for
            dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(EXIT_REFUSED)


def _tell_torchrun(error: ExecutorError, error_file: str | None) -> None:
    """Write the message where torchrun looks for it, so that its report ends with it.

    The form is that of torch/distributed/elastic/multiprocessing/errors/error_handler.py, without
    the traceback, in whose place the report then shows the message. torchrun takes the rank with
    the earliest timestamp as the cause; after a refusal any will do, as all say the same.
    """
    if error_file is None:
        return
    entry = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # the message is printed anyway
        Path(error_file).write_text(json.dumps({"message": entry}))
