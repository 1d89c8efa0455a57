"""Fetch a plan and hand back a calibration run; needs no torch, so it runs on a laptop."""

import json
from pathlib import Path
from typing import Any, Final, get_args

import httpx
from pydantic import ValidationError

from executor.errors import PlanSourceError
from executor.version import own_version
from planner.plan import CalibrationRun, Plan

__all__ = ["is_url", "load_plan", "post_run", "save_run", "service_of"]

# A stored plan is some 100 kB and is there at once; a service that takes longer is not answering.
_GET_TIMEOUT: Final = httpx.Timeout(10.0, connect=5.0)
_POST_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)  # a run of many ranks is large, and stored
_SCHEMA_VERSION: Final[int] = get_args(Plan.model_fields["schema_version"].annotation)[0]
_SAME_VERSION: Final = (
    "run planner and executor from one version of commplan, and plan again if this plan is older"
)


def is_url(source: str) -> bool:
    """Return whether ``source`` is an http(s) address rather than a file.

    >>> is_url("http://head:8000/plans/1a2b"), is_url("plan.json")
    (True, False)
    """
    return source.lower().startswith(("http://", "https://"))


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
        PlanSourceError: It cannot be read, is not a plan, or is one of another schema.
    """
    text = _get(source, token) if is_url(source) else _read(Path(source))
    document = _parsed(source, text)
    try:
        return Plan.model_validate_json(text)
    except ValidationError as exc:
        raise PlanSourceError(f"plan {source}: {_what_is_wrong(document, exc)}") from exc


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
            headers={b"Content-Type": b"application/json", **_authorization(token)},
            timeout=_POST_TIMEOUT,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
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
        response = httpx.get(url, headers=_authorization(token), timeout=_GET_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise PlanSourceError(f"plan {url} cannot be fetched: {exc}; is the service up?") from exc
    _check_status(response, f"fetching the plan {url}")
    return response.text


def _parsed(source: str, text: str) -> dict[str, Any]:
    """Return the JSON object in ``text`` if it looks like a plan of any version."""
    got = f"got {text.strip()[:40]!r}" if text.strip() else "it is empty"
    needed = "needed: a plan as POST /plan answers it"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        reason = "nested too deep" if isinstance(exc, RecursionError) else exc
        raise PlanSourceError(f"plan {source} is not JSON: {reason}; {got}; {needed}") from exc
    if not isinstance(document, dict) or "layout" not in document:
        raise PlanSourceError(f"plan {source} is JSON, but no plan: {got}; {needed}")
    return document


def _what_is_wrong(document: dict[str, Any], exc: ValidationError) -> str:
    """Return what keeps ``document`` from being a plan: its schema, its fields, or a value."""
    needs = f"this executor is commplan {own_version()} and reads schema_version {_SCHEMA_VERSION}"
    got = document.get("schema_version", _SCHEMA_VERSION)
    if got != _SCHEMA_VERSION:
        return f"schema_version is {got!r}{_written_by(document)}; {needs}; {_SAME_VERSION}"
    errors = exc.errors(include_url=False)
    for kind, words in (("extra_forbidden", "unknown"), ("missing", "missing")):
        fields = [".".join(map(str, e["loc"])) for e in errors if e["type"] == kind]
        if fields:
            return f"{words} {_listed(fields)}{_written_by(document)}; {needs}; {_SAME_VERSION}"
    first = errors[0]
    where = ".".join(map(str, first["loc"])) or "the whole plan"
    value = "" if isinstance(first["input"], dict) else f", got {first['input']!r:.80}"
    more = f" (the first of {len(errors)} errors)" if len(errors) > 1 else ""
    return f"{where}: {first['msg']}{value}{more}; plan again rather than editing the file"


def _listed(fields: list[str]) -> str:
    """Return up to four field paths.

    >>> _listed(["id"]), _listed(["a", "b", "c", "d", "e"])
    ('field id', 'fields a, b, c, d and 1 more')
    """
    more = f" and {len(fields) - 4} more" if len(fields) > 4 else ""
    return f"field{'s' if len(fields) > 1 else ''} {', '.join(fields[:4])}{more}"


def _written_by(document: dict[str, Any]) -> str:
    """Return which version wrote ``document``, as far as it says so."""
    provenance = document.get("provenance")
    version = provenance.get("commplan_version") if isinstance(provenance, dict) else None
    return f", written by commplan {version}" if isinstance(version, str) else ""


def _authorization(token: str | None) -> dict[bytes, bytes]:
    """Return the header as UTF-8, which is how the service compares tokens."""
    return {b"Authorization": f"Bearer {token}".encode()} if token else {}


def _check_status(response: httpx.Response, doing: str) -> None:
    if response.is_success:
        return
    hint = "; set COMMPLAN_TOKEN to the service's token" if response.status_code == 401 else ""
    raise PlanSourceError(f"{doing}: HTTP {response.status_code}: {response.text[:300]}{hint}")
