"""Every failure as one JSON shape with a fitting status: the only place that maps them."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from api.schemas import ErrorAnswer, ErrorBody
from planner.documents import explain_errors
from planner.errors import InfeasiblePlanError, InvalidInputError, PlannerError, UnknownNameError

__all__ = [
    "BusyError",
    "NotStoredError",
    "describe",
    "error_response",
    "install_error_handlers",
]

logger = logging.getLogger(__name__)


class BusyError(Exception):
    """The answer is not ready in time; asking again after ``retry_after_s`` may find it."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotStoredError(UnknownNameError):
    """The database holds no such thing."""

    def __init__(self, kind: str, name: str, remedy: str) -> None:
        self.kind = kind
        self.name = name
        self.nearest = []
        message = f"no {kind} {name[:80]!r} is stored here; {remedy}"
        InvalidInputError.__init__(self, message, where=f"{kind}_id")


def describe(error: PlannerError) -> tuple[int, ErrorBody]:
    """Return status and body for an error the planner raised on purpose."""
    name, message = type(error).__name__, str(error)
    if isinstance(error, UnknownNameError):
        body = ErrorBody(
            message=message,
            where=error.where,
            type="UnknownNameError",
            nearest=tuple(error.nearest) or None,
        )
        return HTTPStatus.NOT_FOUND, body
    if isinstance(error, InfeasiblePlanError):
        body = ErrorBody(
            message=message,
            where="",
            type=name,
            suggestion=error.suggestion,
            rejected=dict(error.most_rejected()),
        )
        return HTTPStatus.UNPROCESSABLE_ENTITY, body
    where = error.where if isinstance(error, InvalidInputError) else ""
    return HTTPStatus.UNPROCESSABLE_ENTITY, ErrorBody(message=message, where=where, type=name)


def error_response(
    status: int, body: ErrorBody, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return ``body`` in the shape ``{"error": {...}}`` without its empty optional fields."""
    content = ErrorAnswer(error=body).model_dump(mode="json", exclude_none=True)
    return JSONResponse(content, status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give ``app`` a handler for each kind of failure."""
    app.add_exception_handler(PlannerError, _planner_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(BusyError, _busy)
    app.add_exception_handler(SQLAlchemyError, _storage_error)
    app.add_exception_handler(Exception, _bug)


async def _planner_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PlannerError), "registered for PlannerError"
    return error_response(*describe(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for RequestValidationError"
    problems = list(error.errors())
    if problems[0]["loc"] == ("body",) and problems[0]["type"] != "value_error":
        return _no_document(request)
    place, *_ = problems[0]["loc"]
    sent = {"query": dict(request.query_params), "path": request.path_params, "body": error.body}
    for problem in problems:
        problem["loc"] = problem["loc"][1:]
    return error_response(*describe(explain_errors(problems, sent[place])))


def _no_document(request: Request) -> Response:
    """Answer for a body that is no JSON object, or is not said to be JSON."""
    media_type = request.headers.get("content-type", "no content type")
    if "json" in media_type:
        status, message = HTTPStatus.UNPROCESSABLE_ENTITY, "body: need a JSON object; see /docs"
    else:
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        message = (
            f"body: got {media_type[:80]}; send the document with 'Content-Type: application/json'"
        )
    return error_response(
        status, ErrorBody(message=message, where="body", type="InvalidInputError")
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException"
    path = request.url.path[:200]
    messages = {
        HTTPStatus.NOT_FOUND: f"nothing is at {path}; /docs lists what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{path} does not take {request.method}; see /docs",
    }
    message = messages.get(HTTPStatus(error.status_code), str(error.detail))
    body = ErrorBody(message=message, where=path, type=HTTPStatus(error.status_code).phrase)
    return error_response(error.status_code, body, error.headers)


async def _busy(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BusyError), "registered for BusyError"
    body = ErrorBody(message=str(error), where="", type="BusyError")
    retry = {"Retry-After": str(error.retry_after_s)}
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, body, retry)


async def _storage_error(_request: Request, error: Exception) -> Response:
    logger.error("database failed: %s", error)
    message = "the database cannot be reached or written; the operator finds the reason in the log"
    body = ErrorBody(message=message, where="", type="StorageError")
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, body)


async def _bug(_request: Request, _error: Exception) -> Response:
    """Answer for a mistake of ours; the server logs the traceback after this handler."""
    message = "commplan failed on this request; that is a bug, the traceback is in the server's log"
    body = ErrorBody(message=message, where="", type="InternalError")
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, body)
