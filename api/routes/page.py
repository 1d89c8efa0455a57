"""``/``: a form and its answer for people, without JavaScript; ``/docs`` without a CDN."""

from functools import cache
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form, Request
from starlette.responses import RedirectResponse, Response

from api.deps import JobsDep, PagesDep, SettingsDep, StoreDep
from api.errors import BusyError, NotStoredError, describe
from api.middleware import SESSION_COOKIE, session_value, token_matches
from api.pages import Pages
from planner.documents import validated
from planner.errors import PlannerError
from planner.hardware.devices import device
from planner.model.bundled import model_names
from planner.request import PlanRequest
from planner.summary import (
    basis,
    closeness,
    headline,
    launch_command,
    launch_notes,
    layout_rows,
    memory_parts,
    ordered,
    some_of,
    time_parts,
    traffic,
    waiting,
)
from planner.topology.bundled import load_topology, topology_names

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

_DEFAULTS: Final = {
    "topology": "dgx-h100",
    "nodes": "16",
    "model": "llama3-70b",
    "global_batch_size": "1024",
    "seq_len": "8192",
    "precision": "bf16",
    "optimizer": "adamw",
    "framework": "megatron",
    "tp": "",
    "pp": "",
    "cp": "",
    "ep": "",
    "micro_batch_size": "",
}
_TRAINING: Final = ("global_batch_size", "seq_len", "precision", "optimizer")
_CONSTRAINTS: Final = ("tp", "pp", "cp", "ep", "micro_batch_size")
_MAX_FIELD_LENGTH: Final = 200


@router.get("/")
def show_form(pages: PagesDep) -> Response:
    """Show the form, filled in with an example that fits."""
    return _form(pages, _DEFAULTS)


@router.post("/")
async def submit_form(request: Request, jobs: JobsDep, pages: PagesDep) -> Response:
    """Plan what the form says and go to the plan; on an error show the form again."""
    form = await request.form(max_files=0, max_fields=50)
    typed = {
        name: str(form.get(name, default))[:_MAX_FIELD_LENGTH].strip()
        for name, default in _DEFAULTS.items()
    }
    try:
        stored = await jobs.plan(validated(PlanRequest, _request_fields(typed)))
    except PlannerError as exc:
        status, error = describe(exc)
        return _form(pages, typed, status=status, error=error.model_dump())
    except BusyError as exc:
        error_fields = {"message": str(exc), "suggestion": None, "rejected": None}
        return _form(pages, typed, status=HTTPStatus.SERVICE_UNAVAILABLE, error=error_fields)
    return RedirectResponse(f"/plans/{stored.id}/page", HTTPStatus.SEE_OTHER)


@router.get("/plans/{plan_id}/page")
def show_plan(plan_id: str, request: Request, store: StoreDep, pages: PagesDep) -> Response:
    """Show a stored plan."""
    stored = store.plan(plan_id)
    if stored is None:
        raise NotStoredError("plan", plan_id, "make one at /")
    plan = stored.read()
    url = str(request.url_for("read_plan", plan_id=plan_id))
    return pages.response(
        "plan.html",
        plan=plan,
        headline=headline(plan),
        basis=basis(plan),
        layout_rows=layout_rows(plan),
        closeness=closeness,
        ordered=ordered,
        traffic=traffic(plan),
        some_of=some_of,
        waiting=waiting(plan.waiting) if plan.waiting else "",
        time_parts=time_parts(plan),
        stages=[(stage, memory_parts(stage)) for stage in plan.memory],
        document=plan.model_dump_json(indent=2),
        plan_url=url,
        launch=launch_command(plan, url),
        launch_notes=launch_notes(plan),
        search_s=stored.search_s,
    )


@router.get("/docs")
def show_reference(request: Request, pages: PagesDep) -> Response:
    """List every route and document of the API."""
    return pages.response("docs.html", spec=request.app.openapi(), base_url=request.base_url)


@router.get("/login")
def show_login(pages: PagesDep) -> Response:
    """Show the login form."""
    return pages.response("login.html", message="", next="/")


@router.post("/login")
def log_in(
    request: Request,
    settings: SettingsDep,
    pages: PagesDep,
    token: Annotated[str, Form(max_length=1000)] = "",
    next: Annotated[str, Form(max_length=1000)] = "/",
) -> Response:
    """Give a browser that knows the token a session cookie."""
    # Only a path of this service: "//host" and "/\\host" would lead elsewhere.
    target = next if next.startswith("/") and next[1:2] not in ("/", "\\") else "/"
    if settings.token is None:
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)
    secret = settings.token.get_secret_value()
    if not token_matches(token.strip().encode(errors="replace"), secret):
        message = (
            "That is not the token; its value is COMMPLAN_TOKEN where the service was started."
        )
        return pages.response(
            "login.html", status=HTTPStatus.UNAUTHORIZED, message=message, next=target
        )
    response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
    response.set_cookie(
        SESSION_COOKIE,
        session_value(secret),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


def _form(
    pages: Pages,
    typed: dict[str, str],
    *,
    status: int = HTTPStatus.OK,
    error: dict[str, Any] | None = None,
) -> Response:
    return pages.response(
        "form.html",
        status=status,
        typed=typed,
        error=error,
        topologies=topology_names(),
        precisions=_topologies_by_precision(),
        models=model_names(),
        constraints=_CONSTRAINTS,
        is_constrained=any(typed[name] for name in _CONSTRAINTS),
    )


@cache
def _topologies_by_precision() -> dict[str, list[str]]:
    """Return the bundled topologies by what they can train in, the most frequent last.

    Of GPUs with 16 bits or fewer, fp32 and fp64 go without saying.
    """
    found: dict[str, list[str]] = {}
    for name in topology_names():
        given = load_topology(name).device
        peaks = device(given).peak_flop_per_s if isinstance(given, str) else given.peak_flop_per_s
        low = [precision for precision in peaks if precision not in ("fp32", "fp64")]
        found.setdefault(", ".join(low or peaks), []).append(name)
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def _request_fields(typed: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a PlanRequest; what was left empty is left out."""
    fields: dict[str, Any] = {
        name: typed[name] for name in ("topology", "nodes", "model", "framework") if typed[name]
    }
    fields["training"] = {name: typed[name] for name in _TRAINING if typed[name]}
    fields["constraints"] = {name: typed[name] for name in _CONSTRAINTS if typed[name]}
    return fields
