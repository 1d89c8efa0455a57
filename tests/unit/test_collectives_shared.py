"""Collectives in shared memory: right results, in rounds too, and words when a member is missing.

Most ranks here are threads, which map the same memory as processes do; the last test has processes.
"""

import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore  # public without their types

from executor.collectives import host
from executor.collectives.hierarchical import Hierarchical
from executor.collectives.host import HostSegment
from executor.collectives.reduction import REDUCIBLE
from executor.collectives.ring import Ring
from executor.collectives.shared import SharedMemory
from executor.errors import LostPeerError, UnsupportedPlanError
from executor.mesh import RankGroup
from tests.unit.collective_checks import check_op
from tests.unit.gloo_ranks import on_ranks, split_by_units

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
REDUCTIONS = [(op, dtype) for op, dtypes in REDUCIBLE.items() for dtype in dtypes]
OPENED = ExitStack()
SMALLEST, LARGE = 1, 2**18  # bytes; the smallest is rounded up to a few elements of each member


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    OPENED.close()


def shared(group: RankGroup, capacity_bytes: int = LARGE, *, timeout_s: float = 20) -> SharedMemory:
    """Return memory that is closed after the tests of this file."""
    memory = SharedMemory.open(group, capacity_bytes=capacity_bytes, timeout_s=timeout_s)
    OPENED.callback(memory.close)
    return memory


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 5),
    call=st.sampled_from(["all_reduce", "reduce_scatter", "reduce"]),
    numel=st.integers(0, 500),
    reduction=st.sampled_from(REDUCTIONS),
    capacity_bytes=st.sampled_from([SMALLEST, LARGE]),
    data=st.data(),
)
def test_reductions_equal_gloos(
    size: int, call: str, numel: int, reduction: Any, capacity_bytes: int, data: Any
) -> None:
    root = data.draw(st.integers(0, size - 1))
    op, dtype = reduction
    check_op(partial(shared, capacity_bytes=capacity_bytes), call, size, numel, dtype, op, (), root)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.complex64], ids=str)
@pytest.mark.parametrize("call", ["all_gather", "broadcast"])
def test_every_dtype_is_moved(call: str, dtype: torch.dtype) -> None:
    for capacity_bytes, numel in ((SMALLEST, 1000), (LARGE, 1000), (LARGE, 0)):
        check_op(partial(shared, capacity_bytes=capacity_bytes), call, 3, numel, dtype, SUM, (), 2)


def test_members_get_the_same_bits_whatever_the_size_of_the_memory() -> None:
    """In large memory every member reduces the whole tensor, in the smallest each its part."""

    def reduced(group: RankGroup) -> list[torch.Tensor]:
        mine = torch.randn(999, generator=torch.Generator().manual_seed(group.index))
        results = []
        for capacity_bytes in (SMALLEST, LARGE):
            results.append(mine.clone())
            shared(group, capacity_bytes).all_reduce(results[-1], AVG)
        return results

    first, *others = [result for results in on_ranks(3, reduced) for result in results]
    for other in others:
        assert torch.equal(other, first)


def test_a_member_that_reads_late_still_reads_what_was_written_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meet = HostSegment.barrier

    def late_barrier(segment: HostSegment) -> None:
        meet(segment)
        time.sleep(0.002 * segment.index)

    monkeypatch.setattr(HostSegment, "barrier", late_barrier)

    def gathered(group: RankGroup) -> list[list[int]]:
        memory, found = shared(group), []
        for call in range(20):
            whole = torch.empty(group.size, dtype=torch.int64)
            memory.all_gather(whole, torch.tensor([100 * call + group.index]))
            found.append(whole.tolist())
        return found

    expected = [[100 * call + member for member in range(3)] for call in range(20)]
    assert on_ranks(3, gathered) == [expected] * 3


@pytest.mark.parametrize("units", [[[0, 2], [1, 3]], [[0, 1, 3], [2]]], ids=["even", "uneven"])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_it_is_the_inside_of_a_hierarchy(call: str, units: list[list[int]]) -> None:
    store = HashStore()

    def make(whole: RankGroup) -> Hierarchical:
        split = split_by_units(whole, units, store)
        return Hierarchical(shared(split.inside), Ring(split.across), split, whole)

    check_op(make, call, 4, 7, torch.float32, AVG, units, root=3)


@pytest.mark.parametrize("leaver", [0, 2])
def test_all_others_name_the_member_that_left_and_stay_refused(leaver: int) -> None:
    def member(group: RankGroup) -> tuple[str, str]:
        memory = shared(group)
        if group.index == leaver:
            memory.close()
            return "", ""
        with pytest.raises(LostPeerError) as first:
            memory.all_reduce(torch.ones(3), SUM)
        with pytest.raises(LostPeerError) as second:
            memory.all_reduce(torch.ones(3), SUM)
        return str(first.value), str(second.value)

    told = on_ranks(3, member)
    for rank in {0, 1, 2} - {leaver}:
        first, second = told[rank]
        assert first.startswith(f"rank {rank} lost rank {leaver} during a collective in shared")
        assert "is closed since" in second


def test_a_member_that_does_not_come_is_lost_after_the_timeout() -> None:
    have_raised = threading.Barrier(3, timeout=10)

    def member(group: RankGroup) -> str:
        memory = shared(group, timeout_s=0.3)
        if group.index == 1:
            have_raised.wait()
            return ""
        with pytest.raises(LostPeerError) as lost:
            memory.broadcast(torch.ones(3), 0)
        have_raised.wait()
        return str(lost.value)

    first, _, last = on_ranks(3, member)
    assert "rank 0 lost rank 1 " in first
    assert "did not come within 0.3 s" in first
    assert "rank 2 lost rank 1 " in last


@pytest.fixture
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the members connect in order, which is that in which member 0 hears them."""
    connected = host._connected

    def in_turn(name: str, index: int, timeout_s: float) -> Any:
        time.sleep(0.05 * index)
        return connected(name, index, timeout_s)

    monkeypatch.setattr(host, "_connected", in_turn)


@pytest.mark.usefixtures("_in_order")
def test_members_that_come_one_after_the_other_share_one_timeout() -> None:
    """Each of them alone would be in time after the one before it."""
    timeout_s, has_raised = 1.0, threading.Event()
    all_are_ready = threading.Barrier(3, timeout=10)

    def member(group: RankGroup) -> tuple[str, float]:
        memory = shared(group, timeout_s=timeout_s)
        all_are_ready.wait()
        if group.index == 2:
            assert has_raised.wait(10)
            return "", 0.0
        time.sleep(0.7 * timeout_s * group.index)
        start_s = time.monotonic()
        with pytest.raises(LostPeerError) as lost:
            memory.broadcast(torch.ones(3), 0)
        if group.index == 0:
            has_raised.set()
        return str(lost.value), time.monotonic() - start_s

    (words, waited_s), (told, _), _ = on_ranks(3, member)
    assert "rank 0 lost rank 2 " in words
    assert "rank 1 lost rank 2 " in told
    assert timeout_s <= waited_s < 1.4 * timeout_s


@pytest.mark.usefixtures("_in_order")
def test_a_late_member_leaves_the_next_barrier_its_whole_timeout() -> None:
    timeout_s, all_are_ready = 1.0, threading.Barrier(3, timeout=10)

    def member(group: RankGroup) -> float:
        memory, tensor = shared(group, timeout_s=timeout_s), torch.ones(3)
        all_are_ready.wait()
        for late, seconds in ((1, 0.6 * timeout_s), (2, 0.7 * timeout_s)):
            time.sleep(seconds if group.index == late else 0)
            memory.all_reduce(tensor, SUM)
        return float(tensor[0])

    assert on_ranks(3, member) == [3.0 * 3.0] * 3


def refusals(size: int) -> set[str]:
    def member(group: RankGroup) -> str:
        with pytest.raises(UnsupportedPlanError) as refusal:
            shared(group)
        return str(refusal.value)

    return set(on_ranks(size, member))


def test_a_full_host_is_refused_on_all_members_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (words,) = refusals(3)
    assert "rank 0 on host" in words
    assert "bytes of memory to share: [Errno 28] No space left on device" in words


def test_a_member_elsewhere_is_refused_on_all_members_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another network namespace does not know the name of the socket."""
    connected = host._connected

    def elsewhere(name: str, index: int, timeout_s: float) -> Any:
        return connected(name + "-" * (index == 2), index, timeout_s)

    monkeypatch.setattr(host, "_connected", elsewhere)
    (words,) = refusals(3)
    assert "ranks [0, 1, 2] cannot share memory: rank 2 on host" in words
    assert (
        "cannot reach rank 0 on a socket inside one host: [Errno 111] Connection refused" in words
    )


@pytest.mark.parametrize("greeting", [None, b"", b"hello", b"0", b"7"])
def test_strangers_at_the_door_are_shut_out(
    greeting: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come before the members, say nothing, leave, or say what no member would."""
    listening, strangers = host._listening, ExitStack()

    def listening_to_a_stranger(name: str, size: int, timeout_s: float) -> socket.socket:
        door = listening(name, size, timeout_s)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        strangers.enter_context(stranger).connect(name)
        if greeting == b"":
            stranger.close()
        elif greeting is not None:
            stranger.send(greeting)
        return door

    monkeypatch.setattr(host, "_listening", listening_to_a_stranger)

    def summed(group: RankGroup) -> float:
        tensor = torch.ones(3)
        shared(group).all_reduce(tensor, SUM)
        return float(tensor[0])

    with strangers:
        start_s = time.monotonic()
        assert on_ranks(3, summed) == [3.0] * 3
        assert time.monotonic() - start_s < 5  # not the timeout of 20


def test_a_defect_is_raised_where_it_came_up_and_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def defective(file: Any, num_bytes: int) -> torch.Tensor:
        if threading.current_thread() is broken[0]:
            raise ValueError("a defect")
        return mapped(file, num_bytes)

    mapped, broken = host._mapped, [threading.current_thread()]
    monkeypatch.setattr(host, "_mapped", defective)

    def member(group: RankGroup) -> str:
        if group.index == 1:
            broken[0] = threading.current_thread()
        with pytest.raises(ValueError if group.index == 1 else UnsupportedPlanError) as refusal:
            shared(group)
        return str(refusal.value)

    first, second, third = on_ranks(3, member)
    assert second == "a defect"
    assert first == third
    assert "rank 1 on host" in first
    assert "cannot map the memory to share: ValueError('a defect')" in first


def work_until_one_is_killed(path: str, index: int, told: Connection) -> None:
    """Reduce in a process of its own; member 2 is killed, and the others tell how they learn it."""
    group_of_three = dist.ProcessGroupGloo(FileStore(path, 3), index, 3, timedelta(seconds=60))
    group: Any = RankGroup((4, 5, 6), index, group_of_three)  # type: ignore[arg-type]
    memory = SharedMemory.open(group, capacity_bytes=2**16, timeout_s=60)
    tensor = torch.full((100_000,), float(index))
    memory.all_reduce(tensor, SUM)
    told.send(bool((tensor == 0 + 1 + 2).all()))
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        memory.all_reduce(tensor, SUM)
    except LostPeerError as error:
        told.send((str(error), time.monotonic() - start))


def test_processes_share_memory_and_learn_at_once_that_one_is_killed(tmp_path: Path) -> None:
    before = os.listdir("/dev/shm")
    start = multiprocessing.get_context("forkserver")  # imports torch once
    start.set_forkserver_preload(["tests.unit.test_collectives_shared"])
    pipes = [start.Pipe(duplex=False) for _ in range(3)]
    members = [
        start.Process(target=work_until_one_is_killed, args=(str(tmp_path / "store"), index, end))
        for index, (_, end) in enumerate(pipes)
    ]
    for member in members:
        member.start()
    for _, end in pipes:
        end.close()
    assert [ear.recv() for ear, _ in pipes] == [True] * 3
    for index in (0, 1):
        words, waited_s = pipes[index][0].recv()
        assert words.startswith(f"rank {4 + index} lost rank 6 during")
        assert waited_s < 5  # not the timeout of 60
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0, 0, -signal.SIGKILL]
    assert os.listdir("/dev/shm") == before
