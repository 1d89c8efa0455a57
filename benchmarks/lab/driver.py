"""The caller's side of the lab: workers that stay alive between experiments."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Any, Final, Self

from benchmarks.lab.cluster import Cluster, Order, cluster_of
from benchmarks.lab.errors import LabError
from benchmarks.lab.network import ISOLATED, Bytes, bytes_since, count_bytes, why_not
from planner.topology.document import TopologyDocument

__all__ = ["Lab"]

_START_TIMEOUT_S: Final = 120.0
# After one rank's failure the others may wait for it in a collective, forever.
_PATIENCE_S: Final = 2.0
_END_TIMEOUT_S: Final = 10.0


class Lab:
    """A running cluster whose ranks have joined one gloo process group.

    Use it in a ``with`` block, in a thread that lives as long as the lab. When the block ends,
    or this process does, nothing of the lab is left.

    Attributes:
        cluster: What is emulated.

    Raises:
        InvalidInputError: The lab cannot emulate the document.
    """

    def __init__(self, document: TopologyDocument, *, order: Order = "natural") -> None:
        self.cluster: Cluster = cluster_of(document, order)
        self._document = document
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks: list[Connection] = []
        # PID 1 of the lab ends when the other end does, or its driver.
        self._lifeline: IO[str]
        self._ended_because = "it was not entered; use it in a with block"

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every host, ascending: the units of a group of all ranks."""
        return self.cluster.units

    @property
    def ranks_of_host(self) -> dict[str, tuple[int, ...]]:
        """Ranks by the name of their host."""
        return dict(zip(self.cluster.hosts, self.cluster.units, strict=True))

    def __enter__(self) -> Self:
        """Build the cluster and wait until all ranks have joined.

        Raises:
            LabError: The lab cannot run here, or did not start.
        """
        if (reason := why_not()) is not None:
            raise LabError(reason)
        pairs = [Pipe() for _ in range(self.cluster.world_size)]
        self._ranks = [ours for ours, _ in pairs]
        sockets = [theirs.fileno() for _, theirs in pairs]
        hears, tells = os.pipe()
        self._lifeline = os.fdopen(tells, "w")
        self._process = subprocess.Popen(
            (
                *("setpriv", "--pdeathsig", "KILL", *ISOLATED),
                *(sys.executable, "-m", "benchmarks.lab.ranks", str(hears)),
            ),
            pass_fds=(hears, *sockets),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        os.close(hears)
        for _, theirs in pairs:
            theirs.close()
        wanted = {
            "topology": self._document.model_dump(mode="json"),
            "order": self.cluster.order,
            "sockets": sockets,
        }
        try:
            print(json.dumps(wanted), file=self._lifeline, flush=True)
            self._answers("starting the lab", _START_TIMEOUT_S)
        except BaseException:
            self.close("it did not start")
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the lab."""
        self.close("its with block was left")

    def run(
        self, function: str, kwargs: Mapping[str, Any] | None = None, *, timeout_s: float = 600.0
    ) -> list[Any]:
        """Call a function on every rank at once and return the results in rank order.

        Args:
            function: "module:function", importable here; called as function(RankContext, **kwargs).
            kwargs: Its other arguments; these and the results must be picklable.
            timeout_s: After this the lab is ended.

        Raises:
            LabError: A rank raised, died or did not answer; or the lab has ended. The lab goes on
                only if every rank answered.
        """
        self._running()
        request = pickle.dumps((function, dict(kwargs or {})))
        for rank, connection in enumerate(self._ranks):
            try:
                connection.send_bytes(request)
            except OSError as exc:
                raise self._fatal(f"{self._name(rank)} has died") from exc
        return self._answers(function, timeout_s)

    def bytes_on_links(self) -> Bytes:
        """Return the bytes that have crossed each link: (lower, upper) -> (up, down).

        Names are the vertices of ``build_graph``; NICs are lower than switches.

        Raises:
            LabError: The lab has ended.
        """
        process = self._running()
        return count_bytes(self.cluster, ("nsenter", f"--net=/proc/{process.pid}/ns/net"))

    @contextmanager
    def counting(self) -> Iterator[Bytes]:
        """Fill the yielded dict, when the block ends, with the bytes that crossed each link."""
        before = self.bytes_on_links()
        crossed: Bytes = {}
        yield crossed
        crossed.update(bytes_since(before, self.bytes_on_links()))

    def close(self, reason: str) -> None:
        """End all processes of the lab and wait until they are gone; ``reason`` is told later."""
        process, self._process = self._process, None
        if process is None:
            return
        self._ended_because = reason
        self._lifeline.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for connection in self._ranks:
            connection.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LabError(f"the lab of {self.cluster.name} is not running: {self._ended_because}")
        return self._process

    def _answers(self, what: str, timeout_s: float) -> list[Any]:
        """Return what every rank answers.

        Raises:
            LabError: As ``run`` says; a death is told before what it made other ranks raise.
        """
        waiting = {connection: rank for rank, connection in enumerate(self._ranks)}
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        end = time.monotonic() + timeout_s
        while waiting and (ready := wait([*waiting], max(0.0, end - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection), "nothing else is waited for"
                rank = waiting.pop(connection)
                try:
                    failure, results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError) as exc:
                    raise self._fatal(f"{self._name(rank)} died in {what}") from exc
                if failure is not None:
                    failures[rank] = failure
                    end = min(end, time.monotonic() + _PATIENCE_S)
        missing = ", ".join(str(rank) for rank in waiting.values())
        if failures:
            rank, (text, trace) = next(iter(failures.items()))
            message = f"{self._name(rank)} failed in {what}: {text}"
            error = self._fatal(message) if missing else LabError(message)
            error.add_note(f"On rank {rank}: {trace}")
            raise error
        if missing:
            raise self._fatal(f"ranks {missing} have not answered within {timeout_s:g} s of {what}")
        return [results[rank] for rank in sorted(results)]

    def _fatal(self, message: str) -> LabError:
        """Return the error of that message after ending the lab."""
        self.close(message)
        return LabError(message)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.cluster.hosts[self.cluster.host_of(rank)]}"
