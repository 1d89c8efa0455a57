"""``/plan`` and ``/plans``: a request in, a plan out, the same bytes every time."""

from http import HTTPStatus
from typing import Final, Literal

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from api.deps import JobsDep, StoreDep
from api.errors import NotStoredError
from api.store import StoredPlan
from api.strict import StrictRoute
from planner.plan import Plan
from planner.request import PlanRequest

__all__ = ["router"]

router = APIRouter(tags=["plans"], route_class=StrictRoute)

SEARCH_SECONDS_HEADER: Final = "X-Commplan-Search-Seconds"
# Browsers and programs get different answers at one address.
_VARY: Final = {"Vary": "Accept"}


@router.post("/plan", response_model=Plan)
async def create_plan(request: PlanRequest, jobs: JobsDep) -> Response:
    """Plan the communication of a training job.

    The same request, calibration and version give the same bytes. How long the search took is
    in the header X-Commplan-Search-Seconds, not in the document.
    """
    return _response(await jobs.plan(request))


@router.get("/plans/{plan_id}", response_model=Plan)
def read_plan(
    plan_id: str, request: Request, store: StoreDep, format: Literal["json"] | None = None
) -> Response:
    """Return a stored plan, byte for byte as it was answered.

    A browser, which asks for text/html, is sent to the plan's page unless format=json.
    """
    stored = store.plan(plan_id)
    if stored is None:
        raise NotStoredError("plan", plan_id, "POST /plan makes one")
    if format is None and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"/plans/{stored.id}/page", HTTPStatus.SEE_OTHER, _VARY)
    return _response(stored)


def _response(stored: StoredPlan) -> Response:
    headers = {
        SEARCH_SECONDS_HEADER: f"{stored.search_s:.3f}",
        "Content-Location": f"/plans/{stored.id}",
        **_VARY,
    }
    return Response(stored.document, media_type="application/json", headers=headers)
