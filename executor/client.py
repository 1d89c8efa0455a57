"""Fetch a plan and hand back a calibration run; needs no torch, so it runs on a laptop."""

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from executor.errors import PlanSourceError
from planner.plan import CalibrationRun, Plan

__all__ = ["is_url", "load_plan", "post_run", "save_run", "service_of"]

_TIMEOUT_S: Final = 30.0  # a plan is some 100 kB; a service that takes longer is not answering


def is_url(source: str) -> bool:
    """Return whether ``source`` is an http(s) address rather than a file.

    >>> is_url("http://head:8000/plans/1a2b"), is_url("plan.json")
    (True, False)
    """
    return urlsplit(source).scheme in ("http", "https")


def service_of(plan_url: str) -> str:
    """Return the address of the service that serves ``plan_url``.

    >>> service_of("http://head:8000/planner/plans/1a2b")
    'http://head:8000/planner'
    """
    return plan_url.rsplit("/plans/", 1)[0]


def load_plan(source: str, *, token: str | None = None) -> Plan:
    """Return the plan in a file or at a URL.

    Args:
        source: Path of a JSON file, or ``http(s)://.../plans/{id}``.
        token: Bearer token of the service, if it asks for one.

    Raises:
        PlanSourceError: It cannot be read, or is not a plan.
    """
    text = _get(source, token) if is_url(source) else _read(Path(source))
    try:
        return Plan.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise PlanSourceError(
            f"plan {source}: {exc.error_count()} errors, the first at {where}: {first['msg']}; "
            "needed: a plan as POST /plan answers it"
        ) from exc


def post_run(service: str, run: CalibrationRun, *, token: str | None = None) -> None:
    """Post ``run`` to ``{service}/calibrations``.

    Raises:
        PlanSourceError: The service does not answer, or refuses it.
    """
    url = f"{service.rstrip('/')}/calibrations"
    try:
        response = httpx.post(
            url,
            content=run.model_dump_json(),
            headers={"Content-Type": "application/json", **_authorization(token)},
            timeout=_TIMEOUT_S,
        )
    except httpx.HTTPError as exc:
        raise PlanSourceError(f"posting the run to {url} failed: {exc}") from exc
    _check_status(response, f"posting the run to {url}")


def save_run(path: Path, run: CalibrationRun) -> None:
    """Write ``run`` as JSON.

    Raises:
        PlanSourceError: The file cannot be written.
    """
    try:
        path.write_text(run.model_dump_json(indent=1) + "\n")
    except OSError as exc:
        raise PlanSourceError(f"report {path} cannot be written: {exc}") from exc


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise PlanSourceError(
            f"plan {path} cannot be read: {exc}; give a JSON file or the URL of a plan"
        ) from exc


def _get(url: str, token: str | None) -> str:
    try:
        response = httpx.get(url, headers=_authorization(token), timeout=_TIMEOUT_S)
    except httpx.HTTPError as exc:
        raise PlanSourceError(f"plan {url} cannot be fetched: {exc}; is the service up?") from exc
    _check_status(response, f"fetching the plan {url}")
    return response.text


def _authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _check_status(response: httpx.Response, doing: str) -> None:
    if response.is_success:
        return
    hint = "; set COMMPLAN_TOKEN to the service's token" if response.status_code == 401 else ""
    raise PlanSourceError(f"{doing}: HTTP {response.status_code}: {response.text[:300]}{hint}")
