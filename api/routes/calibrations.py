"""``/calibrations``: timings of a run in, refitted constants out."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import JobsDep, StoreDep
from api.errors import NotStoredError
from api.schemas import CalibrationSummary
from api.strict import StrictRoute
from planner.plan import Calibration, CalibrationRun

__all__ = ["router"]

router = APIRouter(prefix="/calibrations", tags=["calibrations"], route_class=StrictRoute)


@router.post("")
async def create_calibration(run: CalibrationRun, jobs: JobsDep) -> Calibration:
    """Store a timed run of a stored plan; refit from all runs on that topology.

    Later plans for the topology use the result unless they ask for another.
    """
    return await jobs.calibrate(run)


@router.get("")
def list_calibrations(
    store: StoreDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[CalibrationSummary]:
    """List calibrations, newest first."""
    return [
        CalibrationSummary(
            id=record.calibration.id,
            topology=record.calibration.topology,
            num_runs=len(record.calibration.run_hashes),
            created_at=record.created_at.isoformat(timespec="seconds") + "Z",
        )
        for record in store.calibrations(limit)
    ]


@router.get("/{calibration_id}")
def read_calibration(calibration_id: str, store: StoreDep) -> Calibration:
    """Return a calibration."""
    calibration = store.calibration(calibration_id)
    if calibration is None:
        raise NotStoredError("calibration", calibration_id, "GET /calibrations lists them")
    return calibration
