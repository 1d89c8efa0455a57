"""Memory first, then time, then rank: the search over one request's space."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from planner.cost.memory import memory
from planner.cost.problem import Problem
from planner.cost.step import Priced, price
from planner.errors import InfeasiblePlanError
from planner.layout.candidates import RECOMPUTE_MODES, Candidates, concatenate
from planner.request import Constraints
from planner.search.layers import fewest_recomputed
from planner.search.space import Space, enumerate_candidates, legal_rows
from planner.units import format_bytes

__all__ = ["Ranking", "peak_memory_bytes", "rank"]

_CHUNK_ROWS: Final = 8192
_NONE: Final = RECOMPUTE_MODES.index("none")


@dataclass(frozen=True, slots=True)
class Ranking:
    """What fits, fastest first.

    Attributes:
        candidates: Rows in rank order.
        priced: Their step times, same order.
        peak_bytes: Their memory on the fullest pipeline rank, same order.
        rejected: Candidates that fell to each reason.
        num_candidates: All that were looked at.
    """

    candidates: Candidates
    priced: Priced
    peak_bytes: npt.NDArray[np.float64]
    rejected: dict[str, int]
    num_candidates: int


def peak_memory_bytes(problem: Problem, candidates: Candidates) -> npt.NDArray[np.float64]:
    """Return the memory of the fullest pipeline rank, shape [rows]."""
    return np.concatenate(
        [
            memory(problem, candidates.take(slice(start, start + _CHUNK_ROWS)))
            .total_bytes()
            .max(axis=1)
            for start in range(0, len(candidates), _CHUNK_ROWS)
        ]
    )


def rank(problem: Problem, constraints: Constraints) -> Ranking:
    """Return every candidate that is legal and fits, by step time.

    Ties go to the smaller memory, then to the usual order of the axes, then to the order of
    enumeration, so that equal requests have equal answers.

    Raises:
        InvalidInputError: Nothing can be enumerated.
        InfeasiblePlanError: Everything breaks a rule or the memory.
    """
    space = enumerate_candidates(problem, constraints)
    if len(space.candidates) == 0:
        raise InfeasiblePlanError(_nothing_legal(space), rejected=dict(space.rejected))
    space, peak = _with_partial_recompute(problem, constraints, space)
    rejected = dict(space.rejected)
    capacity = problem.capacity_bytes
    fits = peak <= capacity
    if not fits.any():
        rejected["memory"] = len(fits)
        raise InfeasiblePlanError(_nothing_fits(problem, space, peak), rejected=rejected)
    if not fits.all():
        rejected[f"memory: does not fit in {format_bytes(capacity)}"] = int((~fits).sum())
    candidates, peak = space.candidates.take(fits), peak[fits]
    priced = price(problem, candidates)
    order = np.lexsort((np.arange(len(peak)), candidates.order, peak, priced.step_time_s()))
    return Ranking(
        candidates.take(order),
        priced.take(order),
        peak[order],
        rejected,
        space.num_candidates,
    )


def _with_partial_recompute(
    problem: Problem, constraints: Constraints, space: Space
) -> tuple[Space, npt.NDArray[np.float64]]:
    """Return the space and its peaks, with rows that recompute some layers in place of none.

    Only where keeping everything does not fit: fewer layers recomputed are always faster.
    """
    found, peak = space.candidates, peak_memory_bytes(problem, space.candidates)
    if constraints.recompute is not None or constraints.recompute_layers is not None:
        return space, peak
    over = (found.recompute == _NONE) & (peak > problem.capacity_bytes)
    part = [
        fewest_recomputed(problem, found.take(rows))
        for rows in np.array_split(np.flatnonzero(over), -(-int(over.sum()) // _CHUNK_ROWS) or 1)
    ]
    rejected = dict(space.rejected)
    added = legal_rows(problem, concatenate(part), rejected)
    if len(added) == 0:
        return space, peak
    peak = np.concatenate([peak, peak_memory_bytes(problem, added)])
    together = concatenate([found, added])
    return Space(together, rejected, space.num_candidates + len(added)), peak


def _nothing_legal(space: Space) -> str:
    name, count = max(space.rejected.items(), key=lambda item: item[1])
    return (
        f"all {space.num_candidates} candidates break a rule; the most frequent ({count}) is {name}"
    )


def _nothing_fits(problem: Problem, space: Space, peak: npt.NDArray[np.float64]) -> str:
    """Say how far the smallest candidate is from fitting, and what fills it."""
    row = int(np.argmin(peak))
    one = space.candidates.take(np.array([row]))
    parts = memory(problem, one)
    fullest = int(np.argmax(parts.total_bytes()[0]))
    sizes = {
        name: float(getattr(parts, name)[0, fullest])
        for name in ("weights_bytes", "optimizer_bytes", "activations_bytes")
    }
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"no layout fits in {format_bytes(problem.capacity_bytes)} per GPU: the smallest is "
        f"{one.layout(0)} micro_batch_size={int(one.micro_batch_size[0])} at "
        f"{format_bytes(float(peak[row]))} ({largest.removesuffix('_bytes')} "
        f"{format_bytes(sizes[largest])})"
    )
