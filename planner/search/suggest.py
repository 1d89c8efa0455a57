"""The smallest change of a request that makes it fit."""

from collections.abc import Callable, Iterator

from planner.cost.problem import Problem
from planner.errors import PlannerError
from planner.plan import TrainingSpec
from planner.request import Constraints, PlanRequest
from planner.search.rank import peak_memory_bytes
from planner.search.space import enumerate_candidates

__all__ = ["smallest_change"]


def smallest_change(
    request: PlanRequest, build: Callable[[PlanRequest], Problem]
) -> dict[str, object] | None:
    """Return fields of a request that fits, or None.

    Tried from small to large: one constraint dropped, all dropped, more nodes (doubled up to
    1024 times), a shorter sequence. Every change returned was found to fit.

    Args:
        request: The request that does not fit.
        build: Makes the problem of a changed request; raises PlannerError where it cannot.
    """
    for change in _changes(request, build):
        changed = request.model_copy(update=_fields(request, change))
        try:
            problem = build(changed)
            space = enumerate_candidates(problem, changed.constraints)
        except PlannerError:
            continue
        if len(space.candidates) == 0:
            continue
        peak = peak_memory_bytes(problem, space.candidates)
        if (peak <= problem.device.memory_bytes).any():
            return change
    return None


def _changes(
    request: PlanRequest, build: Callable[[PlanRequest], Problem]
) -> Iterator[dict[str, object]]:
    held = request.constraints.model_dump(exclude_none=True)
    for name in held:
        yield {"constraints": {k: v for k, v in held.items() if k != name}}
    if len(held) > 1:
        yield {"constraints": {}}
    fabric = build(request).fabric
    nodes = fabric.num_gpus // fabric.gpus_per_node
    for doubling in range(1, 11):
        yield {"nodes": nodes << doubling}
    length = request.training.seq_len
    while length % 2 == 0 and length > 128:
        length //= 2
        yield {"training": {**request.training.model_dump(), "seq_len": length}}


def _fields(request: PlanRequest, change: dict[str, object]) -> dict[str, object]:
    """Return the change as values of the request's own types."""
    typed = dict(change)
    if "constraints" in change:
        typed["constraints"] = Constraints.model_validate(change["constraints"])
    if "training" in change:
        typed["training"] = TrainingSpec.model_validate(change["training"])
    return typed
