"""The recorder counts blocked time once and leaves torch as it found it."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from executor.mesh import build_mesh
from executor.timing import CallKey, Recorder
from planner.plan import Method, Plan
from tests.dist.plans import make_plan

KEY = CallKey("dp_cp", "all_reduce", "ring", 4096, 4)


def recorder_of(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    mesh = build_mesh(plan, rank=0, timeout=timedelta(seconds=1))
    return Recorder(mesh, backend="gloo")


class Clock:
    """Stands for the module ``time``: moves only when told, so that load changes nothing."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr("executor.timing.time", own)
    return own


class SlowWork:
    """Stands for torch's handle of a message: done 2 s after somebody waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self) -> bool:
        self._clock.sleep(2.0)
        return True

    def is_completed(self) -> bool:
        return False


def test_calls_are_listed_by_key_in_order(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    recorder = recorder_of(make_plan(dp=4), monkeypatch)
    for seconds in (1.0, 3.0, 2.0):
        with recorder.call(KEY):
            clock.sleep(seconds)
        clock.sleep(10.0)  # between calls: no call's time
    [timing] = recorder.timings()
    assert (timing.axis, timing.size_bytes, timing.seconds) == ("dp_cp", 4096, (1.0, 3.0, 2.0))
    assert recorder.blocked_s == 6.0
    recorder.clear()
    assert recorder.timings() == ()
    assert recorder.blocked_s == 0


def test_a_message_lasts_from_the_call_and_blocks_in_the_wait(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    recorder = recorder_of(make_plan(pp=2), monkeypatch)
    sent: list[Any] = []

    def isend(tensor: torch.Tensor, **kwargs: Any) -> SlowWork:
        sent.append(kwargs)
        clock.sleep(1.0)  # issuing it blocks too
        return SlowWork(clock)

    monkeypatch.setattr(dist, "isend", isend)
    with recorder.watching():
        work = dist.isend(torch.zeros(8), group_dst=1)
        assert work is not None
        assert not work.is_completed()
        clock.sleep(5.0)  # the rank computes while the message is on its way
        work.wait()
        work.wait()
    [timing] = recorder.timings()
    assert (timing.op, timing.size_bytes, timing.group_size) == ("send_recv", 32, 2)
    assert len(timing.seconds) == 1, "a second wait is no second message"
    assert timing.seconds == (8.0,), "1 s issued, 5 s computed beside it, 2 s waited"
    assert recorder.blocked_s == 3.0
    assert sent == [{"group_dst": 1}]


def test_torch_is_left_as_it_was_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(make_plan(dp=4), monkeypatch)
    before = (dist.isend, dist.irecv, c10d.isend, c10d.irecv)

    def fail_inside() -> None:
        with recorder.watching():
            assert dist.isend is not before[0]
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail_inside()
    assert (dist.isend, dist.irecv, c10d.isend, c10d.irecv) == before


def test_on_gloo_a_library_call_is_a_ring_whatever_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = recorder_of(make_plan(dp=4), monkeypatch)
    assert recorder.library_method("all_reduce", Method("tree")) == Method("ring")
