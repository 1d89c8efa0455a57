"""Pipeline schedules: the order of work on every rank.

Ranks are the ``num_stages`` members of one pipeline group; with ``virtual_stages`` chunks each,
chunk ``c`` of rank ``r`` is stage ``c * num_stages + r`` of the model. torch 2.13 publishes an
order too (``Schedule1F1B.pipeline_order``), but on the last stage it starts at F1, so orders are
generated here.

Today these orders are a reference for tests, and nothing else reads them: the executor's tests
hold what torch really runs to them, and the tests of ``planner.pipeline.laws`` play them out
action by action and hold the closed forms, which price a plan, to the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from planner.errors import InvalidInputError
from planner.plan import ScheduleName

__all__ = ["Action", "ScheduleOrder", "schedule_order"]

# ------------------------------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (F) or backward (B) of one micro-batch through one chunk of a rank."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


ScheduleOrder = tuple[tuple[Action, ...], ...]


def schedule_order(
    schedule: ScheduleName, *, num_stages: int, num_micro_batches: int, virtual_stages: int = 1
) -> ScheduleOrder:
    """Return what each rank does, in order; entry ``r`` is pipeline rank ``r``.

    A rank runs some forwards ahead, then one backward after each forward, then the backwards
    that are left. Schedules differ in how many they run ahead:

    * ``none``: one rank, none ahead.
    * ``gpipe``: all of them (Huang et al. 2019, arXiv 1811.06965).
    * ``1f1b``: ``num_stages - r - 1`` (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473).
    * ``interleaved_1f1b``: ``2(num_stages - r - 1) + (virtual_stages - 1) num_stages``;
      micro-batches pass chunk after chunk in groups of ``num_stages``, of which the last may be
      smaller (same paper, section 2.2, as Megatron-LM's ``schedules.py`` runs it).

    Raises:
        InvalidInputError: A count is below 1, or the schedule does not take these counts.

    >>> [f"{a.kind}{a.micro_batch}" for a in schedule_order(
    ...     "1f1b", num_stages=2, num_micro_batches=3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    _check(schedule, num_stages, num_micro_batches, virtual_stages)
    forwards = _forwards(num_stages, num_micro_batches, virtual_stages)
    backwards = [
        Action("B", virtual_stages - 1 - action.chunk, action.micro_batch) for action in forwards
    ]
    return tuple(
        tuple(
            _interleave(
                forwards,
                backwards,
                _num_ahead(schedule, num_stages, rank, virtual_stages, len(forwards)),
            )
        )
        for rank in range(num_stages)
    )


def _forwards(num_stages: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    return [
        Action("F", chunk, micro_batch)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(virtual_stages)
        for micro_batch in range(first, min(first + num_stages, num_micro_batches))
    ]


def _num_ahead(
    schedule: ScheduleName, num_stages: int, rank: int, virtual_stages: int, num_forwards: int
) -> int:
    below = num_stages - 1 - rank
    ahead = {
        "none": 0,
        "gpipe": num_forwards,
        "1f1b": below,
        "interleaved_1f1b": 2 * below + (virtual_stages - 1) * num_stages,
    }[schedule]
    return min(ahead, num_forwards)


def _interleave(
    forwards: list[Action], backwards: list[Action], num_ahead: int
) -> Iterator[Action]:
    yield from forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - num_ahead :]


def _check(
    schedule: ScheduleName, num_stages: int, num_micro_batches: int, virtual_stages: int
) -> None:
    counts = {
        "num_stages": num_stages,
        "num_micro_batches": num_micro_batches,
        "virtual_stages": virtual_stages,
    }
    for name, count in counts.items():
        if count < 1:
            raise InvalidInputError(f"schedule {schedule}: {name}={count}; need >= 1", where=name)
    if schedule == "none" and num_stages > 1:
        raise InvalidInputError(
            f"schedule none: num_stages={num_stages}; need 1, or try 1f1b", where="num_stages"
        )
    if schedule != "interleaved_1f1b" and virtual_stages > 1:
        raise InvalidInputError(
            f"schedule {schedule}: virtual_stages={virtual_stages}; need 1, or try "
            "interleaved_1f1b",
            where="virtual_stages",
        )
