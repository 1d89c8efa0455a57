"""``/healthz`` for whoever restarts the service, ``/metrics`` for Prometheus."""

from http import HTTPStatus

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.deps import MetricsDep, StoreDep
from api.schemas import Health
from planner import __version__

__all__ = ["router"]

router = APIRouter(tags=["operation"])


@router.get("/healthz", responses={503: {"model": Health}})
def health(store: StoreDep, response: Response) -> Health:
    """Whether the service can do its work; needs no token."""
    if store.is_reachable():
        return Health(status="ok", version=__version__, database="ok")
    response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Health(status="failing", version=__version__, database="unreachable")


@router.get("/metrics", response_class=Response)
def metrics(metrics: MetricsDep) -> Response:
    """Requests and searches in Prometheus' text format."""
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
