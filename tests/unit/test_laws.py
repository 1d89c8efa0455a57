"""Pipeline laws against the orders, played out."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.layout.candidates import SCHEDULES
from planner.pipeline.laws import HostShare, StageSeconds, step_s
from planner.pipeline.schedules import schedule_order
from planner.plan import ScheduleName

ONE_DEVICE_EACH = HostShare(1.0, np.array([1]))


def play(
    schedule: ScheduleName,
    forward: list[float],
    backward: list[float],
    *,
    micro_batches: int,
    ranks: int,
    send: float = 0.0,
    cores: float | None = None,
) -> float:
    """Return when the last action ends.

    ``forward`` and ``backward`` are per stage in model order. With ``cores``, busy ranks share
    them equally (processor sharing), each using one at most.
    """
    chunks = len(forward) // ranks
    order = schedule_order(
        schedule, num_stages=ranks, num_micro_batches=micro_batches, virtual_stages=chunks
    )
    last = len(forward) - 1
    ready: dict[tuple[str, int, int], float] = {}  # (kind, stage, micro-batch) -> arrival
    for micro_batch in range(micro_batches):
        ready["F", 0, micro_batch] = 0.0
    position = [0] * ranks
    left: dict[int, float] = {}
    now = 0.0

    def action(rank: int) -> tuple[str, int, int]:
        a = order[rank][position[rank]]
        return a.kind, a.chunk * ranks + rank, a.micro_batch

    while any(position[r] < len(order[r]) for r in range(ranks)):
        for rank in range(ranks):
            if rank not in left and position[rank] < len(order[rank]):
                kind, stage, micro_batch = action(rank)
                if ready.get((kind, stage, micro_batch), np.inf) <= now + 1e-12:
                    left[rank] = (forward if kind == "F" else backward)[stage]
        rate = 1.0 if cores is None or not left else min(1.0, cores / len(left))
        done = min((work / rate for work in left.values()), default=np.inf)
        arrivals = [t - now for t in ready.values() if t > now + 1e-12]
        step = min([done, *arrivals])
        assert np.isfinite(step), "the order deadlocks"
        now += step
        for rank in list(left):
            left[rank] -= step * rate
            if left[rank] <= 1e-12:
                kind, stage, micro_batch = action(rank)
                del left[rank]
                position[rank] += 1
                if kind == "F":
                    following = ("F", stage + 1) if stage < last else ("B", stage)
                else:
                    following = ("B", stage - 1)
                cost = send if following[1] != stage else 0.0
                ready[(*following, micro_batch)] = now + cost
    return now


def law(
    schedule: ScheduleName,
    forward: list[float],
    backward: list[float],
    *,
    micro_batches: int,
    ranks: int,
    send: float = 0.0,
    host: HostShare = ONE_DEVICE_EACH,
) -> float:
    per_rank = (np.array(forward) + np.array(backward)).reshape(-1, ranks).sum(axis=0)
    stage = StageSeconds(
        slowest_compute=np.array([per_rank.max()]),
        slowest_waiting=np.array([0.0]),
        total_compute=np.array([per_rank.sum()]),
        total_waiting=np.array([0.0]),
        send=np.array([send]),
    )
    columns = (SCHEDULES.index(schedule), ranks, micro_batches, len(forward) // ranks)
    return float(step_s(stage, host, *(np.array([c]) for c in columns))[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("send", [0.0, 0.1])
def test_even_stages_within_one_percent(
    schedule: ScheduleName, ranks: int, micro_batches: int, send: float
) -> None:
    stages: dict[str, Any] = {"forward": [1.0] * ranks, "backward": [2.0] * ranks}
    counts: dict[str, Any] = {"micro_batches": micro_batches, "ranks": ranks, "send": send}
    played = play(schedule, **stages, **counts)
    tolerance = 0.01 if schedule == "1f1b" or send == 0 else 0.05
    assert law(schedule, **stages, **counts) == pytest.approx(played, rel=tolerance)


@pytest.mark.parametrize(("ranks", "micro_batches", "expected"), [(4, 8, 0.375), (8, 16, 7 / 16)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_published_bubbles(
    schedule: ScheduleName, ranks: int, micro_batches: int, expected: float
) -> None:
    ideal = micro_batches * 3.0
    total = law(schedule, [1.0] * ranks, [2.0] * ranks, micro_batches=micro_batches, ranks=ranks)
    assert total / ideal - 1 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"), list(product((2, 4, 8), (2, 4), (8, 16, 32)))
)
@pytest.mark.parametrize("send", [0.0, 0.02])
def test_interleaving_is_exact(ranks: int, chunks: int, micro_batches: int, send: float) -> None:
    stages = ranks * chunks
    forward, backward = [1.0 / chunks] * stages, [2.0 / chunks] * stages
    counts: dict[str, Any] = {"micro_batches": micro_batches, "ranks": ranks, "send": send}
    played = play("interleaved_1f1b", forward, backward, **counts)
    found = law("interleaved_1f1b", forward, backward, **counts)
    assert found == pytest.approx(played, rel=1e-9 if send == 0 else 0.02)


def test_uneven_stages_stay_within_a_few_percent() -> None:
    rng = np.random.default_rng(7)
    errors = []
    for _ in range(60):
        ranks, micro_batches = int(rng.integers(2, 7)), int(rng.integers(8, 24))
        forward = list(rng.uniform(0.8, 1.2, ranks))
        backward = [2 * f for f in forward]
        counts: dict[str, Any] = {"micro_batches": micro_batches, "ranks": ranks}
        played = play("1f1b", forward, backward, **counts)
        errors.append(law("1f1b", forward, backward, **counts) / played - 1)
    assert np.quantile(np.abs(errors), 0.95) < 0.05


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (4, 2), (4, 3), (2, 2)])
def test_ranks_that_share_cores(micro_batches: int, ranks: int, cores: int) -> None:
    """A rank that waits frees its core for another."""
    stages: dict[str, Any] = {"forward": [1.0] * ranks, "backward": [2.0] * ranks}
    played = play("1f1b", **stages, micro_batches=micro_batches, ranks=ranks, cores=cores)
    host = HostShare(ranks / cores, np.array([ranks]))
    found = law("1f1b", **stages, micro_batches=micro_batches, ranks=ranks, host=host)
    assert found == pytest.approx(played, rel=0.20)
    assert found >= 3.0 * micro_batches * ranks / cores * (1 - 1e-9)  # work over cores


def test_one_rank_is_micro_batches_times_forward_and_backward() -> None:
    assert law("none", [1.0], [2.0], micro_batches=5, ranks=1) == 15.0
