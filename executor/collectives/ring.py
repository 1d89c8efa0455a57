"""Collectives on a ring: every member sends to the next one only, so all links work at once.

The ring follows ``RankGroup.circle``: one member of a unit alone sends out of it, so a unit's link
carries what one member sends, however ranks are numbered. Of n members and S bytes (nccl-tests' S)
each sends 2(n-1)/n S in an all_reduce, and half of that in an all_gather or a reduce_scatter
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Final

import torch
import torch.distributed as dist

from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Op
from executor.collectives.reduction import accumulate, average, require_reducible
from executor.mesh import RankGroup
from planner.segments import chain_segments

__all__ = ["Ring"]

# Room for the pieces to be reduced, of which two have it always. While all have it, all receives
# are posted at once and no sender waits for one: of four processes on two cores, an all_reduce of
# 1 KiB took a third of the time.
_SCRATCH_BYTES: Final = 1 << 24


class Ring:
    """all_reduce, all_gather, reduce_scatter and broadcast of ``Collectives``.

    A piece is reduced on its way round: all members get the same bits. Pieces travel whole: an
    all_reduce in segments of 64 KiB to 2 MiB was no faster on loopback, where cores are the limit.
    """

    def __init__(self, group: RankGroup) -> None:
        self._messages = Messages(group)
        self._size, self._circle = group.size, group.circle
        self._position = self._circle.index(group.index)
        self._next = self._circle[(self._position + 1) % self._size]
        self._before = self._circle[self._position - 1]

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce ``tensor`` over the group, in place.

        Raises:
            RuntimeError: gloo has no such reduction of this dtype.
        """
        require_reducible(tensor, op)
        if self._size == 1:
            return
        chunks = self._backwards(torch.tensor_split(tensor.view(-1), self._size))
        slots, ahead = _slots(chunks[1:])
        pieces = [*slots, *chunks[:-1]]
        arrivals = self._arrivals(pieces, len(pieces) if ahead == len(slots) else ahead)
        sends = [self._messages.send(chunks[0], self._next)]
        for chunk, arrived in zip(chunks[1:], arrivals, strict=False):
            accumulate(chunk, arrived, op)
            if chunk is chunks[-1]:
                average(chunk, op, self._size)
            sends.append(self._messages.send(chunk, self._next))
        self._pass_on(arrivals, sends)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``whole`` with the members' shards."""
        parts = self._backwards(self._parts(whole))
        parts[0].copy_(shard.view(-1))
        if self._size == 1:
            return
        arrivals = self._arrivals(parts[1:], ahead=len(parts))
        self._pass_on(arrivals, [self._messages.send(parts[0], self._next)])

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
        """Fill ``shard`` with this member's part of the reduction of ``whole``, which stays.

        Raises:
            RuntimeError: gloo has no such reduction of this dtype.
        """
        require_reducible(whole, op)
        mine, *others = self._backwards(self._parts(whole))
        if self._size == 1:
            shard.view(-1).copy_(mine)
            return
        slots, ahead = _slots(others)
        arrivals = self._arrivals([*slots[1:], shard.view(-1)], ahead)
        sends = [self._messages.send(others[0], self._next)]
        for part, arrived in zip([*others[1:], mine], arrivals, strict=True):
            accumulate(arrived, part, op)
            if part is not mine:
                sends.append(self._messages.send(arrived, self._next))
                if ahead < len(others):  # what comes next into this slot must not overtake
                    wait(sends.pop())
        average(shard, op, self._size)
        wait(*sends)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` with that of ``root``: a chain along the circle, in segments.

        Every link carries S; see ``planner.segments``.
        """
        distance = (self._position - self._circle.index(root)) % self._size
        flat = tensor.view(-1)
        segments = flat.tensor_split(int(chain_segments(flat.nbytes, self._size)))
        receives = [self._messages.receive(s, self._before) for s in segments if distance]
        sends = []
        for i, segment in enumerate(segments):
            if distance:
                wait(receives[i])
            if distance < self._size - 1:
                sends.append(self._messages.send(segment, self._next))
        wait(*sends)

    def _parts(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the members' parts of ``whole``, in the order of the circle."""
        parts = whole.view(-1).tensor_split(self._size)
        return [parts[member] for member in self._circle]

    def _backwards(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this position's piece, then those of the ones before: the order of arrival."""
        return [pieces[self._position - i] for i in range(self._size)]

    def _arrivals(
        self, pieces: Sequence[torch.Tensor], ahead: int
    ) -> Generator[torch.Tensor, None, None]:
        """Receive pieces in turn; yield each once it is there, after which another is awaited."""
        receives = deque(self._messages.receive(piece, self._before) for piece in pieces[:ahead])

        def arriving() -> Generator[torch.Tensor, None, None]:
            for i, piece in enumerate(pieces):
                wait(receives.popleft())
                yield piece
                if i + ahead < len(pieces):
                    receives.append(self._messages.receive(pieces[i + ahead], self._before))

        return arriving()

    def _pass_on(self, arrivals: Iterator[torch.Tensor], sends: list[dist.Work | None]) -> None:
        """Send what arrives to the next member, but for the last piece, which that one has."""
        passing = islice(arrivals, self._size - 2)
        sends.extend(self._messages.send(piece, self._next) for piece in passing)
        next(arrivals)
        wait(*sends)


def _slots(pieces: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Return room for each piece, and for how many there is room at a time."""
    longest = max(piece.numel() for piece in pieces)
    num_fitting = _SCRATCH_BYTES // max(1, longest * pieces[0].element_size())
    num_rows = min(len(pieces), max(2, num_fitting))
    rows = pieces[0].new_empty(num_rows, longest).unbind()
    return [rows[i % num_rows][: piece.numel()] for i, piece in enumerate(pieces)], num_rows
