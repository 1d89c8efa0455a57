"""Orders are complete and free of deadlock; in-flight counts and bubbles match the literature."""

import numpy as np
import pytest

from planner.errors import InvalidInputError
from planner.layout.candidates import SCHEDULES
from planner.pipeline import laws
from planner.pipeline.schedules import Action, ScheduleOrder, schedule_order
from planner.plan import ScheduleName

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("none", 1, 5, 1),
    ("gpipe", 4, 8, 1),
    ("gpipe", 3, 2, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 2, 1),
    ("1f1b", 1, 3, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("interleaved_1f1b", 8, 16, 4),
    ("interleaved_1f1b", 4, 10, 3),  # the last group holds 2 micro-batches
    ("interleaved_1f1b", 4, 3, 2),  # fewer micro-batches than ranks
    ("interleaved_1f1b", 2, 2, 1),
]


def order_of(schedule: ScheduleName, p: int, m: int, v: int) -> ScheduleOrder:
    return schedule_order(schedule, num_stages=p, num_micro_batches=m, virtual_stages=v)


def in_flight(schedule: ScheduleName, p: int, m: int, v: int, rank: int) -> float:
    columns = (SCHEDULES.index(schedule), p, m, v, rank)
    return float(laws.in_flight(*(np.array([c]) for c in columns))[0])


def prerequisite(action: Action, rank: int, p: int, v: int) -> tuple[int, Action] | None:
    """Return the (rank, action) whose result ``action`` needs, None for the very first forward."""
    stage = action.chunk * p + rank
    if action.kind == "F":
        if stage == 0:
            return None
        return (stage - 1) % p, Action("F", (stage - 1) // p, action.micro_batch)
    if stage == p * v - 1:
        return rank, Action("F", action.chunk, action.micro_batch)
    return (stage + 1) % p, Action("B", (stage + 1) // p, action.micro_batch)


def makespan(order: ScheduleOrder, v: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the end of the last action by list scheduling; one rank's layers take ``forward``."""
    p = len(order)
    ends: dict[tuple[int, Action], float] = {}
    clock, position = [0.0] * p, [0] * p
    while any(position[r] < len(order[r]) for r in range(p)):
        before = sum(position)
        for rank in range(p):
            while position[rank] < len(order[rank]):
                action = order[rank][position[rank]]
                need = prerequisite(action, rank, p, v)
                if need is not None and need not in ends:
                    break
                start = max(clock[rank], ends[need] if need else 0.0)
                clock[rank] = start + (forward if action.kind == "F" else backward) / v
                ends[rank, action] = clock[rank]
                position[rank] += 1
        assert sum(position) > before, f"deadlock at {position}"
    return max(clock)


@pytest.mark.parametrize(("schedule", "p", "m", "v"), SHAPES)
def test_every_rank_runs_each_forward_and_backward_once(
    schedule: ScheduleName, p: int, m: int, v: int
) -> None:
    everything = {Action(k, c, i) for k in ("F", "B") for c in range(v) for i in range(m)}
    for actions in order_of(schedule, p, m, v):
        assert len(actions) == len(everything)
        assert set(actions) == everything


@pytest.mark.parametrize(("schedule", "p", "m", "v"), SHAPES)
def test_dependencies_are_acyclic(schedule: ScheduleName, p: int, m: int, v: int) -> None:
    assert makespan(order_of(schedule, p, m, v), v) >= 3.0 * m


@pytest.mark.parametrize(("schedule", "p", "m", "v"), SHAPES)
def test_in_flight_is_the_peak_of_the_played_order(
    schedule: ScheduleName, p: int, m: int, v: int
) -> None:
    for rank, actions in enumerate(order_of(schedule, p, m, v)):
        live = peak = 0
        for action in actions:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        found = in_flight(schedule, p, m, v, rank)
        assert found == peak / v


# Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3: rank 0 of the interleaved schedule
# holds p + (p - 1) / v; each later rank 2 / v less.
@pytest.mark.parametrize(
    ("p", "v", "m", "expected"),
    [
        (4, 2, 8, [5.5, 4.5, 3.5, 2.5]),
        (8, 4, 32, [9.75, 9.25, 8.75, 8.25, 7.75, 7.25, 6.75, 6.25]),
    ],
)
def test_interleaved_in_flight(p: int, v: int, m: int, expected: list[float]) -> None:
    found = [in_flight("interleaved_1f1b", p, m, v, rank) for rank in range(p)]
    assert found == expected


# (p - 1) / (v m) of the ideal time: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [
        ("gpipe", 4, 8, 1),
        ("1f1b", 4, 8, 1),
        ("1f1b", 8, 64, 1),
        ("interleaved_1f1b", 4, 8, 2),
        ("interleaved_1f1b", 8, 16, 4),
    ],
)
def test_bubble_fraction(schedule: ScheduleName, p: int, m: int, v: int) -> None:
    ideal = 3.0 * m
    bubble = makespan(order_of(schedule, p, m, v), v) / ideal - 1
    assert bubble == pytest.approx((p - 1) / (v * m), rel=1e-9)


def test_short_last_group_costs_idle_time_but_less_than_a_full_one() -> None:
    p, v = 4, 2
    short, full = (makespan(order_of("interleaved_1f1b", p, m, v), v) for m in (10, 12))
    without_idle = 3.0 * 10 + 3.0 * (p - 1) / v
    assert without_idle < short < full


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "where"),
    [
        ("1f1b", 0, 8, 1, "num_stages"),
        ("1f1b", 2, 0, 1, "num_micro_batches"),
        ("none", 2, 8, 1, "num_stages"),
        ("gpipe", 2, 8, 2, "virtual_stages"),
    ],
)
def test_impossible_counts_are_refused(
    schedule: ScheduleName, p: int, m: int, v: int, where: str
) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        order_of(schedule, p, m, v)
    assert refusal.value.where == where


def played_zero_bubble(p: int, m: int, limit: int) -> list[int]:
    """Return the most micro-batches that each rank holds, of a greedy zero-bubble order.

    Forward, backward and weight gradient take one unit each. A rank that may do several does the
    backward, else a forward while it holds fewer than ``limit``, else a weight gradient; what it
    holds is free after the weight gradient.
    """
    forward, backward, weights = ([[0] * (m + 1) for _ in range(p)] for _ in range(3))
    done = [[0, 0, 0] for _ in range(p)]  # forwards, backwards, weight gradients
    peak, now = [0] * p, 0
    while any(count[2] < m for count in done):
        now += 1
        for rank, (f, b, w) in enumerate([tuple(count) for count in done]):
            gradient_came = b < f and (
                rank == p - 1 or (done[rank + 1][1] > b and backward[rank + 1][b] < now)
            )
            input_came = f < m and (
                rank == 0 or (done[rank - 1][0] > f and forward[rank - 1][f] < now)
            )
            if gradient_came and backward[rank][b] == 0:
                backward[rank][b], done[rank][1] = now, b + 1
            elif input_came and f - w < limit:
                forward[rank][f], done[rank][0] = now, f + 1
            elif w < b:
                weights[rank][w], done[rank][2] = now, w + 1
            peak[rank] = max(peak[rank], done[rank][0] - done[rank][2])
    return peak


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24), (8, 64), (4, 2)])
@pytest.mark.parametrize(("schedule", "rounds"), [("zb_1p", 1), ("zb_2p", 2)])
def test_zero_bubble_schedules_fill_what_they_may_hold(
    schedule: ScheduleName, rounds: int, p: int, m: int
) -> None:
    """2401.10241: memory of p, or 2 p, micro-batches; every rank comes to hold as many."""
    played = played_zero_bubble(p, m, rounds * p)
    law = [in_flight(schedule, p, m, 1, rank) for rank in range(p)]
    assert max(played) == max(law)
    assert all(found <= bound for found, bound in zip(played, law, strict=True))
