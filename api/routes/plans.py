"""``/plan`` and ``/plans``: a request in, a plan out, the same bytes every time."""

from typing import Final

from fastapi import APIRouter, Response

from api.deps import JobsDep, StoreDep
from api.errors import NotStoredError
from api.store import StoredPlan
from api.strict import StrictRoute
from planner.plan import Plan
from planner.request import PlanRequest

__all__ = ["router"]

router = APIRouter(tags=["plans"], route_class=StrictRoute)

SEARCH_SECONDS_HEADER: Final = "X-Commplan-Search-Seconds"


@router.post("/plan", response_model=Plan)
async def create_plan(request: PlanRequest, jobs: JobsDep) -> Response:
    """Plan the communication of a training job.

    The same request, calibration and version give the same bytes. How long the search took is
    in the header X-Commplan-Search-Seconds, not in the document.
    """
    return _response(await jobs.plan(request))


@router.get("/plans/{plan_id}", response_model=Plan)
def read_plan(plan_id: str, store: StoreDep) -> Response:
    """Return a stored plan, byte for byte as it was answered."""
    stored = store.plan(plan_id)
    if stored is None:
        raise NotStoredError("plan", plan_id, "POST /plan makes one")
    return _response(stored)


def _response(stored: StoredPlan) -> Response:
    headers = {
        SEARCH_SECONDS_HEADER: f"{stored.search_s:.3f}",
        "Content-Location": f"/plans/{stored.id}",
    }
    return Response(stored.document, media_type="application/json", headers=headers)
