"""Time every collective of a step on this rank, whoever calls it.

Our own calls go through ``Recorder.call``. Those that torch's pipelining makes are caught at the
functions they pass, ``torch.distributed.isend`` and ``irecv``: ``Recorder.watching`` puts timed
ones in their place and takes them out again.

What is recorded, per call and in the order of calls:

* a collective: from the call until its result is there.
* a send or receive: from the call until ``wait`` returned. ``blocked_s`` counts only the time the
  rank stood still, since a send may complete while the rank computes.

Entries of ``send_recv`` are kept apart by peer and direction, so that the i-th call of the sender
and the i-th of the receiver are the same message.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from executor.mesh import Mesh
from executor.peers import lost_peer
from planner.methods import LIBRARY_RULES, library_rules
from planner.plan import (
    Algorithm,
    Axis,
    CallPath,
    Collective,
    CollectiveTiming,
    Method,
)

__all__ = ["CallKey", "Recorder", "tensor_bytes"]


@dataclass(frozen=True, slots=True)
class CallKey:
    """What calls must share to be one list; ``peer`` and ``is_send`` are for send_recv alone."""

    axis: Axis
    op: Collective
    algorithm: Algorithm
    size_bytes: int
    group_size: int
    is_probe: bool = False
    peer: int | None = None
    is_send: bool | None = None
    path: CallPath = "library"


class Recorder:
    """Keeps the seconds of every call; patches are process-wide, so use one at a time."""

    def __init__(self, mesh: Mesh, *, backend: str) -> None:
        self._mesh = mesh
        self._backend = backend
        self._seconds: dict[CallKey, list[float]] = {}
        self.blocked_s = 0.0

    def clear(self) -> None:
        """Forget all calls."""
        self._seconds.clear()
        self.blocked_s = 0.0

    def timings(self) -> tuple[CollectiveTiming, ...]:
        """Return what was recorded, lists in the order of their first call."""
        return tuple(
            CollectiveTiming(
                axis=key.axis,
                op=key.op,
                algorithm=key.algorithm,
                path=key.path,
                size_bytes=key.size_bytes,
                group_size=key.group_size,
                seconds=tuple(seconds),
                is_probe=key.is_probe,
                peer=key.peer,
                is_send=key.is_send,
            )
            for key, seconds in self._seconds.items()
        )

    def library_method(self, op: Collective, planned: Method) -> Method:
        """Return how a call is done that is left to the library, whatever was planned."""
        if self._backend not in LIBRARY_RULES:
            return planned
        own = library_rules(self._backend, op)
        return Method(own[0].algorithm) if own else planned

    @contextmanager
    def call(self, key: CallKey) -> Iterator[None]:
        """Time the enclosed synchronous collective.

        Raises:
            LostPeerError: A rank of the group is gone.
        """
        start = time.perf_counter()
        with self.naming_lost_peers(key):
            yield
        self.note(key, start, time.perf_counter() - start)

    @contextmanager
    def naming_lost_peers(self, key: CallKey) -> Iterator[None]:
        """Turn a peer lost inside into a ``LostPeerError`` that names the call."""
        try:
            yield
        except RuntimeError as error:
            ranks = self._mesh.groups[key.axis].ranks
            lost = lost_peer(
                error,
                f"{key.op} on {key.axis}",
                rank=self._mesh.rank,
                others=ranks if key.peer is None else (ranks[key.peer],),
            )
            if lost is None:
                raise
            raise lost from error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the messages that torch's pipelining sends and receives inside."""
        with ExitStack() as patches:
            for name in ("isend", "irecv"):
                p2p = self._timed_p2p(getattr(dist, name), is_send=name == "isend")
                # P2POp compares with c10d's own name, pipelining with torch.distributed's.
                patches.enter_context(patch.object(dist, name, p2p))
                patches.enter_context(patch.object(c10d, name, p2p))
            yield

    def note(self, key: CallKey, start: float, blocked_s: float) -> None:
        """Keep a call that began at ``start`` (``time.perf_counter``) and is now complete."""
        self._seconds.setdefault(key, []).append(time.perf_counter() - start)
        self.blocked_s += blocked_s

    def _timed_p2p(
        self, original: Callable[..., dist.Work], *, is_send: bool
    ) -> Callable[..., dist.Work]:
        def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
            peer = kwargs.get("group_dst" if is_send else "group_src")
            key = self.p2p_key("pp", tensor_bytes(tensor), peer, is_send=is_send)
            start = time.perf_counter()
            with self.naming_lost_peers(key):
                work = original(tensor, *args, **kwargs)
            return cast(dist.Work, _TimedWork(self, key, work, start))

        return timed

    def p2p_key(
        self,
        axis: Axis,
        size_bytes: int,
        peer: int | None,
        *,
        is_send: bool,
        is_probe: bool = False,
    ) -> CallKey:
        """Return the key of a message to or from the group member ``peer``."""
        return CallKey(
            axis,
            "send_recv",
            "point_to_point",
            size_bytes,
            2,
            is_probe=is_probe,
            peer=peer,
            is_send=is_send,
        )


class _TimedWork:
    """A ``Work`` just issued in a call begun at ``start``, noted when it is first waited for."""

    def __init__(self, recorder: Recorder, key: CallKey, work: dist.Work, start: float) -> None:
        self._recorder, self._key, self._work, self._start = recorder, key, work, start
        self._issued_s = time.perf_counter() - start
        self._noted = False

    def wait(self, *args: Any) -> bool:
        start = time.perf_counter()
        with self._recorder.naming_lost_peers(self._key):
            result = self._work.wait(*args)
        if not self._noted:
            waited_s = time.perf_counter() - start
            self._recorder.note(self._key, self._start, self._issued_s + waited_s)
            self._noted = True
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor's elements."""
    return tensor.numel() * tensor.element_size()
