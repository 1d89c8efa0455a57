"""The smallest change of a request that makes it fit."""

from collections.abc import Callable
from typing import Final

from planner.cost.problem import Problem
from planner.errors import PlannerError
from planner.plan import TrainingSpec
from planner.request import Constraints, PlanRequest
from planner.search.nearby import training_changes
from planner.search.rank import peak_memory_bytes
from planner.search.space import enumerate_candidates

__all__ = ["smallest_change"]

_TRY_ALL: Final = 16
_SHORTEST_SEQUENCE: Final = 128


def smallest_change(
    request: PlanRequest, build: Callable[[PlanRequest], Problem]
) -> dict[str, object] | None:
    """Return fields of a request that fits, or None.

    Tried from small to large: one constraint dropped, all dropped, one way of keeping states or
    logits in less memory, the fewest more nodes, a shorter sequence. Every change returned was
    found to fit.

    Args:
        request: The request that does not fit.
        build: Makes the problem of a changed request; raises PlannerError where it cannot.
    """
    held = request.constraints.model_dump(exclude_none=True)
    for name in held:
        change: dict[str, object] = {"constraints": {k: v for k, v in held.items() if k != name}}
        if _fits(request, change, build):
            return change
    if len(held) > 1 and _fits(request, {"constraints": {}}, build):
        return {"constraints": {}}
    for _, fields in training_changes(request.training, exact=True):
        change = {"training": {**request.training.model_dump(mode="json"), **fields}}
        if _fits(request, change, build):
            return change
    nodes = _fewest_nodes(request, build)
    if nodes is not None:
        # those of an allocation are not enough, whichever they are
        return {"nodes": nodes} | ({"allocation": None} if request.allocation else {})
    length, packing = request.training.seq_len, request.training.packing
    shortest = max(packing.lengths) * 2 if packing else 0  # documents must fit in the sequence
    while length % 2 == 0 and length > _SHORTEST_SEQUENCE and length >= shortest:
        length //= 2
        change = {"training": {**request.training.model_dump(), "seq_len": length}}
        if _fits(request, change, build):
            return change
    return None


def _fewest_nodes(request: PlanRequest, build: Callable[[PlanRequest], Problem]) -> int | None:
    """Return the fewest nodes found to fit: doubled until one does, then the gap halved.

    Between two powers of two not every number has a layout, so a smaller one may be missed where
    the gap is wide; gaps of up to ``_TRY_ALL`` are tried one by one.
    """
    fabric = build(request).fabric
    low = fabric.num_gpus // fabric.gpus_per_node
    high = next(
        (n for n in (low << k for k in range(1, 11)) if _fits(request, {"nodes": n}, build)), None
    )
    if high is None:
        return None
    low = high // 2
    while high - low > _TRY_ALL:
        middle = (low + high) // 2
        if _fits(request, {"nodes": middle}, build):
            high = middle
        else:
            low = middle
    return next(n for n in range(low + 1, high + 1) if _fits(request, {"nodes": n}, build))


def _fits(
    request: PlanRequest, change: dict[str, object], build: Callable[[PlanRequest], Problem]
) -> bool:
    changed = request.model_copy(update=_fields(request, change))
    try:
        problem = build(changed)
        space = enumerate_candidates(problem, changed.constraints)
    except PlannerError:
        return False
    if len(space.candidates) == 0:
        return False
    peak = peak_memory_bytes(problem, space.candidates)
    return bool((peak <= problem.capacity_bytes).any())


def _fields(request: PlanRequest, change: dict[str, object]) -> dict[str, object]:
    """Return the change as values of the request's own types."""
    typed = dict(change)
    if "nodes" in change:
        typed["allocation"] = None
    if "constraints" in change:
        typed["constraints"] = Constraints.model_validate(change["constraints"])
    if "training" in change:
        typed["training"] = TrainingSpec.model_validate(change["training"])
    return typed
