"""Memory that the members of a group on one host share, and a barrier that does not spin.

The memory is a memfd: it has no name, so nothing is left of it however its processes end, and the
limit of a container's /dev/shm does not apply. Member 0 makes it and hands it over on Unix sockets
of the abstract namespace: who cannot connect to them is on another host or in a container with a
network of its own. The sockets then carry the barrier. Waiting sleeps in the kernel, which leaves
the core to those who are waited for; a process that ends closes its socket and is missed at once.
"""

import mmap
import os
import platform
import secrets
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, Final, NoReturn

import torch

from executor.collectives.messages import Messages, wait
from executor.errors import LostPeerError, UnsupportedPlanError
from executor.mesh import RankGroup
from executor.peers import lost_peer

__all__ = ["HostSegment", "open_segment"]

_GO: Final = b"go"  # any other message is the number of a member that is lost
_LONGEST_MESSAGE_BYTES: Final = 16
_NOTE_BYTES: Final = 512
_UNNOTICED_S: Final = 0.01


class HostSegment:
    """This member's end of the shared memory of a group.

    Attributes:
        ranks: Of the members, all on this host.
        index: Of this rank among them.
        memory: [bytes] of uint8, the same for all.
    """

    def __init__(
        self,
        group: RankGroup,
        memory: torch.Tensor,
        links: dict[int, socket.socket],
        *,
        timeout_s: float,
    ) -> None:
        self.ranks, self.index = group.ranks, group.index
        self.memory = memory
        self._links = links  # member 0 has one to every other, the others have one to member 0
        self._timeout_s = timeout_s
        self._is_closed = False

    def barrier(self) -> None:
        """Return once all members have called this; what they wrote before can then be read.

        A star around member 0: where members share cores, the number of messages counts for more
        than the number of steps. Entering the kernel on both sides orders the writes and reads.

        Raises:
            LostPeerError: A member died, or did not come in time; no barrier works from then on.
        """
        if self._is_closed:
            raise LostPeerError(
                f"rank {self.ranks[self.index]}: the shared memory of ranks {list(self.ranks)} is "
                "closed since one of them was lost; start the job again"
            )
        if self.index == 0:
            self._hear_all()
            for member in self._links:
                self._tell(member)
        else:
            self._tell(0)
            self._hear(0)

    def close(self) -> None:
        """Let go of the memory; members that wait for this one learn that it has left."""
        for link in self._links.values():
            link.close()
        self._is_closed = True
        self.memory = self.memory.new_empty(0)

    def _tell(self, member: int, message: bytes = _GO) -> None:
        with suppress(OSError):  # who has left is missed when it is next to be heard
            self._links[member].send(message)

    def _hear_all(self) -> None:
        """Hear every other member, all within one timeout.

        Setting limits would make every barrier a third slower, so those of the sockets do while
        nobody is late.
        """
        start_s = time.monotonic()
        for member, link in self._links.items():
            waited_s = time.monotonic() - start_s
            if waited_s < _UNNOTICED_S:
                self._hear(member)
            else:
                _limited(link, max(_UNNOTICED_S, self._timeout_s - waited_s))
                self._hear(member)
                _limited(link, self._timeout_s)

    def _hear(self, member: int) -> None:
        try:
            message = self._received(member)
        except BlockingIOError:
            self._lose(member, f"it did not come within {self._timeout_s:g} s")
        except OSError as error:
            self._lose(member, str(error))
        if not message:
            self._lose(member, "it closed its socket")
        if message != _GO:
            self._lose(int(message), f"rank {self.ranks[member]} lost it")

    def _received(self, member: int) -> bytes:
        link = self._links[member]
        try:
            return link.recv(_LONGEST_MESSAGE_BYTES)
        except ConnectionResetError:  # it left without hearing us: its last words come after this
            return link.recv(_LONGEST_MESSAGE_BYTES)

    def _lose(self, member: int, reason: str) -> NoReturn:
        if self.index == 0:
            for other in self._links.keys() - {member}:
                self._tell(other, str(member).encode())
        self.close()
        raise LostPeerError(
            f"rank {self.ranks[self.index]} lost rank {self.ranks[member]} during a collective in "
            f"shared memory: {reason}; see how that rank or its host ended, then start the job "
            "again"
        )


def open_segment(group: RankGroup, *, num_bytes: int, timeout_s: float) -> HostSegment:
    """Return the shared memory of a group; all members call this together.

    Args:
        group: The members.
        num_bytes: Of the memory. The host gives them now or not at all, but not at a first write.
        timeout_s: How long member 0 waits for another, here and in a barrier; the others wait
            twice as long for it.

    Raises:
        UnsupportedPlanError: A member cannot have it; then no member has it, and all raise this.
        LostPeerError: A member died meanwhile.
    """
    if group.process_group is None:
        alone = torch.zeros(num_bytes, dtype=torch.uint8)
        return HostSegment(group, alone, {}, timeout_s=timeout_s)
    links: dict[int, socket.socket] = {}
    patience_s = timeout_s * (1 if group.index == 0 else 2)  # member 0 says who is missing
    name = f"\0commplan-{_notes_of_all(group, secrets.token_hex(16))[0]}"
    with ExitStack() as passing, ExitStack() as lasting:
        with _all_or_none(group, f"make {num_bytes} bytes of memory to share"):
            if group.index == 0:
                file = passing.enter_context(_file(num_bytes))
                door = passing.enter_context(_listening(name, group.size, patience_s))
        with _all_or_none(group, f"reach rank {group.ranks[0]} on a socket inside one host"):
            if group.index > 0:
                links[0] = lasting.enter_context(_connected(name, group.index, patience_s))
        with _all_or_none(group, "map the memory to share"):
            if group.index == 0:
                awaited = {_greeting(member): member for member in range(1, group.size)}
                while awaited:
                    greeting, link = _accepted(door, awaited, patience_s)
                    links[awaited.pop(greeting)] = lasting.enter_context(link)
                    socket.send_fds(link, [_GO], [file.fileno()])
            else:
                file = passing.enter_context(_received_file(links[0]))
            memory = _mapped(file, num_bytes)
        lasting.pop_all()
    return HostSegment(group, memory, links, timeout_s=patience_s)


@contextmanager
def _all_or_none(group: RankGroup, doing: str) -> Iterator[None]:
    """Raise on all members what one of them could not do.

    Any other error than the system's is a defect, and is raised as it is where it came up.
    """
    me, problem = f"rank {group.ranks[group.index]} on host {platform.node()}", ""
    try:
        yield
    except OSError as error:
        problem = f"{me} cannot {doing}: {error}"
    except Exception as error:
        _notes_of_all(group, f"{me} cannot {doing}: {error!r}")  # they would wait for it
        raise
    problems = [note for note in _notes_of_all(group, problem) if note]
    if problems:
        raise UnsupportedPlanError(
            f"ranks {list(group.ranks)} cannot share memory: {problems[0]}; plan another path for "
            "them, or give them one host, one network namespace and enough memory"
        )


def _notes_of_all(group: RankGroup, note: str) -> list[str]:
    """Return every member's note, in member order; what is too long is cut."""
    notes = torch.zeros(group.size, _NOTE_BYTES, dtype=torch.uint8)
    mine = note.encode()[:_NOTE_BYTES]
    notes[group.index, : len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
    messages = Messages(group)
    others = [member for member in range(group.size) if member != group.index]
    try:
        works = [messages.receive(notes[member], member) for member in others]
        works += [messages.send(notes[group.index], member) for member in others]
        wait(*works)
    except RuntimeError as error:
        rank = group.ranks[group.index]
        lost = lost_peer(error, "opening shared memory", rank=rank, others=group.ranks)
        if lost is None:
            raise
        raise lost from error
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in notes]


def _file(num_bytes: int) -> BinaryIO:
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has neither memfd nor abstract sockets")
    file = os.fdopen(os.memfd_create("commplan"), "r+b")
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full host is a SIGBUS later
    except OSError:
        file.close()
        raise
    return file


def _listening(name: str, size: int, timeout_s: float) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.settimeout(timeout_s)
    door.bind(name)
    door.listen(size)
    return door


def _connected(name: str, index: int, timeout_s: float) -> socket.socket:
    link = _limited(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), timeout_s)
    try:
        link.connect(name)
        link.send(_greeting(index))
    except OSError:
        link.close()
        raise
    return link


def _greeting(member: int) -> bytes:
    return str(member).encode()


def _accepted(
    door: socket.socket, awaited: Collection[bytes], timeout_s: float
) -> tuple[bytes, socket.socket]:
    """Return the next member at the door, and its greeting, which it has sent already.

    The name is public, so others may knock too; who is another user or says nothing that is
    ``awaited`` is shut out.
    """
    while True:
        link = _limited(door.accept()[0], timeout_s)
        _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        greeting = b""
        with suppress(OSError):
            greeting = link.recv(_LONGEST_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        if user == os.getuid() and greeting in awaited:
            return greeting, link
        link.close()


def _limited(link: socket.socket, timeout_s: float) -> socket.socket:
    """Let the kernel limit every wait; ``settimeout`` would poll before each receive."""
    seconds = int(timeout_s)
    limit = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return link


def _received_file(link: socket.socket) -> BinaryIO:
    _, files, _, _ = socket.recv_fds(link, len(_GO), 1)
    if not files:
        raise ConnectionError("it closed its socket")
    return os.fdopen(files[0], "r+b")


def _mapped(file: BinaryIO, num_bytes: int) -> torch.Tensor:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes, flags=flags), dtype=torch.uint8)
