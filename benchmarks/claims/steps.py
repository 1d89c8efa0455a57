"""Claims about a step as a whole: speed-ups, pipeline bubbles, what a layout multiplies to."""

from collections.abc import Iterator

import numpy as np

from benchmarks.claims.claim import Claim, Verdict, as_share, as_times, row
from planner.cost.overlap import exposed_s
from planner.layout.candidates import SCHEDULES
from planner.pipeline.laws import HostShare, StageSeconds, in_flight, step_s
from planner.plan import Layout, ScheduleName
from planner.units import format_seconds

__all__ = ["bubble_share", "claims", "speed_up"]


def claims() -> Iterator[Claim]:
    """Yield the claims of this file."""
    yield cap_of_communication()
    yield less_communication()
    yield bubbles()
    yield sixty_four()


def speed_up(num_ranks: int, compute_s: float, communication_s: float) -> float:
    """Return how much faster ranks that share out the compute are than one, which only computes."""
    return num_ranks * compute_s / (compute_s + communication_s)


def cap_of_communication() -> Claim:
    """Gone, communication gives what is said; hidden, it still takes its own time."""
    compute_s, communication_s = 0.1, 0.3
    step = compute_s + communication_s
    left_s = float(exposed_s(row(communication_s), row(compute_s))[0])
    gone, hidden = step / compute_s, step / (compute_s + left_s)
    of_eight = speed_up(8, compute_s, communication_s)
    return Claim(
        1,
        "100 ms of compute and 300 ms of communication cap the speed-up at 4x",
        f"{as_times(gone)} over this step with no communication left; {as_times(hidden)} with all "
        f"of it hidden that can be; eight GPUs that run so are {as_times(of_eight)} one.",
        "only if" if hidden < gone else "holds",
        "It caps what is gained by sending nothing. Overlap cannot gain that: of "
        f"{format_seconds(communication_s)} at least {format_seconds(left_s)} have no compute to "
        "hide under. And it is no speed-up over one GPU.",
    )


def less_communication() -> Claim:
    """Three of eight: five eighths of a step are communication."""
    num_ranks, before, claimed, less = 8, 3.0, 6.0, 0.6
    compute = before / num_ranks
    after = speed_up(num_ranks, compute, (1 - compute) * (1 - less))
    needed = 1 - (num_ranks * compute / claimed - compute) / (1 - compute)
    return Claim(
        2,
        "60 % less communication turns a speed-up of 3x on 8 GPUs into 6x",
        f"{as_times(after)}; {as_times(claimed)} needs {as_share(needed)} less.",
        "holds" if after >= claimed else "wrong",
        f"At {as_times(before)} of {num_ranks} GPUs {as_share(1 - compute)} of a step is "
        f"communication; {as_share(1 - less)} of that is left, and the compute stays.",
    )


def bubble_share(
    schedule: ScheduleName, pp: int, num_micro_batches: int, virtual_stages: int = 1
) -> float:
    """Return the idle part of a step with equal stages and free sends."""
    one, nothing = row(1.0), row(0.0)
    stages = StageSeconds(one, nothing, pp * one, nothing, nothing)
    whole = step_s(
        stages,
        HostShare(1.0, one),
        row(SCHEDULES.index(schedule)),
        row(pp),
        row(num_micro_batches),
        row(virtual_stages),
    )
    return float(1 - num_micro_batches / whole[0])


def _held(schedule: ScheduleName, pp: int, num_micro_batches: int, virtual_stages: int) -> float:
    """Return micro-batches in flight on the first rank."""
    name, p, m, v = map(row, (SCHEDULES.index(schedule), pp, num_micro_batches, virtual_stages))
    return float(in_flight(name, p, m, v, row(0))[0])


def bubbles() -> Claim:
    """GPipe and 1F1B wait equally long; they differ in what they hold."""
    pp, m, chunks = 8, 16, 4
    shapes: tuple[tuple[ScheduleName, int], ...]
    shapes = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", chunks))
    idle = [bubble_share(name, pp, m, v) for name, v in shapes]
    held = [_held(name, pp, m, v) for name, v in shapes]
    enough = next(n for n in range(1, 1000) if bubble_share("1f1b", pp, n) <= 0.15)
    verdict: Verdict = "wrong" if np.isclose(idle[0], idle[1], rtol=0.1) else "holds"
    return Claim(
        6,
        "GPipe bubbles 30 %, 1F1B 15 %, interleaved 5 %",
        f"{as_share(idle[0])}, {as_share(idle[1])} and {as_share(idle[2])} of a step on {pp} equal "
        f"stages with {m} micro-batches, interleaved in {chunks} chunks a rank.",
        verdict,
        "GPipe and 1F1B fill and drain alike, (p-1)/(m+p-1) of the step; 1F1B saves memory: "
        f"{held[1]:.3g} micro-batches in flight instead of {held[0]:.3g} (interleaved "
        f"{held[2]:.3g}). For 15 % either of them needs {enough} micro-batches.",
    )


def sixty_four() -> Claim:
    """Degrees multiply."""
    layout = Layout(tp=8, pp=8, dp_replicate=8)
    of_64 = Layout(tp=8, pp=8)
    return Claim(
        7,
        "64 GPUs: DP 8, PP 8, TP 8",
        f"{layout} has {layout.world_size} ranks; {of_64} has {of_64.world_size}, and no data "
        "parallelism left.",
        "holds" if layout.world_size == 64 else "wrong",
        "Degrees multiply, they do not add up or share ranks: a layout's ranks are tp x cp x dp x "
        "pp.",
    )
