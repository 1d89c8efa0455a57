"""A lost peer is told from other errors, and named with the communication it broke."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from executor import job
from executor.collectives import communicator
from executor.collectives.communicator import communicators
from executor.errors import LostPeerError
from executor.mesh import build_mesh
from executor.peers import lost_peer, naming_lost_peers
from executor.timing import CallKey, Recorder
from planner.plan import Axis
from tests.dist.plans import make_plan

# As gloo wrote them here when a peer was killed or stopped (torch 2.13), paths shortened.
KILLED = RuntimeError(
    "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:37783: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs"
)
STOPPED = RuntimeError(
    "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv "
    "operation to complete"
)
CLOSED = RuntimeError(
    "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"
)
ABSENT = dist.DistStoreError("wait for clients")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KILLED, "Read error [127.0.0.1]:37783: Connection reset by peer"),
        (STOPPED, "Timed out waiting 5000ms for recv operation to complete"),
        (CLOSED, "Connection closed by peer [127.0.0.1]:2"),
        (ABSENT, "wait for clients"),
    ],
)
def test_the_sentence_names_ranks_operation_and_reason(error: RuntimeError, reason: str) -> None:
    lost = lost_peer(error, "all_reduce on dp_cp", rank=1, others=(2, 1, 0))
    assert str(lost) == (
        f"rank 1 lost one of ranks [0, 2] during all_reduce on dp_cp: {reason}; see how that rank "
        "or its host ended, then start the job again"
    )


def test_the_ranks_of_a_large_job_are_not_all_listed() -> None:
    lost = str(lost_peer(CLOSED, "barrier", rank=0, others=range(4096)))
    assert "one of ranks [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ...] d" in lost


OURS_TO_MEND = RuntimeError("op.preamble.length <= op.nbytes. 8 vs 4")


def test_an_error_that_is_no_lost_peer_is_left_as_it_was() -> None:
    assert lost_peer(OURS_TO_MEND, "barrier", rank=0, others=(1,)) is None
    with (
        pytest.raises(RuntimeError, match=r"op\.preamble"),
        naming_lost_peers("barrier", rank=0, world_size=2),
    ):
        raise OURS_TO_MEND


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return the recorder of rank 0 of tp2 pp2; nothing is connected."""
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    plan = make_plan(tp=2, pp=2)
    return Recorder(build_mesh(plan, rank=0, timeout=timedelta(seconds=1)), backend="gloo")


@pytest.mark.parametrize(("axis", "peer"), [("tp", 1), ("pp", 2)])
def test_a_timed_call_names_its_axis_and_the_ranks_on_it(
    axis: Axis, peer: int, recorder: Recorder
) -> None:
    key = CallKey(axis, "all_reduce", "ring", 8, 2)
    with (
        pytest.raises(LostPeerError, match=rf"0 lost rank {peer} during all_reduce on {axis}:"),
        recorder.call(key),
    ):
        raise KILLED
    with pytest.raises(RuntimeError, match=r"op\.preamble"), recorder.call(key):
        raise OURS_TO_MEND
    assert recorder.timings() == (), "a call that failed has no time"


class Broken:
    """Stands for torch's handle of a message whose peer is gone."""

    def wait(self) -> bool:
        raise STOPPED


def broken_at_once(*_: Any, **__: Any) -> Broken:
    raise CLOSED


@pytest.mark.parametrize("isend", [broken_at_once, lambda *_, **__: Broken()])
def test_a_message_names_its_peer_whether_it_breaks_at_once_or_in_the_wait(
    isend: Callable[..., Broken], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "isend", isend)

    def send() -> None:
        work = dist.isend(torch.zeros(8), group_dst=1)
        assert work is not None
        work.wait()

    with (
        recorder.watching(),
        pytest.raises(LostPeerError, match="rank 0 lost rank 2 during send_recv on pp:"),
    ):
        send()


class Sent:
    """Stands for torch's handle of a message that has arrived."""

    def wait(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("isend", "irecv", "lost"),
    [
        (Broken, Sent, 1),
        (Sent, Broken, 2),
    ],
    ids=["send", "receive"],
)
def test_a_ring_pass_names_the_rank_whose_message_broke(
    isend: type, irecv: type, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of cp3 sends to rank 1 and receives from rank 2."""
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: Mock(spec=dist.ProcessGroup))
    plan = make_plan(cp=3, seq_len=12)
    mesh = build_mesh(plan, rank=0, timeout=timedelta(seconds=1))
    cp = communicators(plan, mesh, Recorder(mesh, backend="gloo"), timeout_s=1)["cp"]
    monkeypatch.setattr(communicator, "_ISEND", lambda *_, **__: isend())
    monkeypatch.setattr(communicator, "_IRECV", lambda *_, **__: irecv())
    with pytest.raises(LostPeerError, match=f"rank 0 lost rank {lost} during send_recv on cp:"):
        cp.start_ring_pass(torch.zeros(2)).wait()


def test_torchs_wrapping_does_not_hide_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """torch's pipelining raises a RuntimeError of its own from what a stage's forward raised."""
    monkeypatch.setattr(job, "_init_process_group", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    report = tmp_path / "error.json"
    with pytest.raises(SystemExit) as end, job.join({"TORCHELASTIC_ERROR_FILE": str(report)}):
        raise RuntimeError("failed to run forward") from LostPeerError("rank 0 lost rank 1")
    assert end.value.code == job.EXIT_LOST_PEER
    assert capsys.readouterr().err == "stopped: rank 0 lost rank 1\n"
    assert '"message": "rank 0 lost rank 1"' in report.read_text()


def test_an_error_of_the_script_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_init_process_group", lambda *_: None)
    with pytest.raises(KeyError, match="theirs"), job.join({}):
        raise KeyError("theirs")
