"""What wraps every request: metrics, the token, the limit on bodies. Plain ASGI."""

import hashlib
import hmac
import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from api.metrics import Metrics
from api.pages import Pages
from api.schemas import ErrorBody

__all__ = [
    "SESSION_COOKIE",
    "BodyLimit",
    "Metered",
    "TokenGuard",
    "session_value",
    "token_matches",
]

SESSION_COOKIE = "commplan_session"
_MAX_LENGTH_DIGITS = 19
# A client that is answered while it still sends may find its connection reset and never read the
# answer, so this much beyond the limit is read and dropped first.
_MAX_DROPPED_BYTES = 16_000_000
_OPEN_PATHS = frozenset({"/healthz", "/login"})


def token_matches(given: bytes, token: str) -> bool:
    """Return whether ``given`` is the token, in a time that says nothing about it."""
    return hmac.compare_digest(given, token.encode())


def session_value(token: str) -> str:
    """Return what a browser's cookie holds: proof of knowing the token, not the token."""
    return hmac.new(token.encode(), b"commplan browser session", hashlib.sha256).hexdigest()


class Metered:
    """Counts requests by method, route and status, and marks answers as not to be sniffed."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def count_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
            await send(message)

        started = time.perf_counter()
        try:
            await self.app(scope, receive, count_status)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self.metrics.observe_request(
                scope["method"], route, status, time.perf_counter() - started
            )


class TokenGuard:
    """Lets through who sends the bearer token, or a browser that has logged in with it."""

    def __init__(self, app: ASGIApp, token: str, pages: Pages) -> None:
        self.app = app
        self.token = token
        self.pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._knows_token(scope):
            await self.app(scope, receive, send)
            return
        await self._refusal(Request(scope))(scope, receive, send)

    def _knows_token(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1, which gives back the bytes that were sent.
        if kind.lower() == "bearer" and token_matches(given.strip().encode("latin-1"), self.token):
            return True
        session = Request(scope).cookies.get(SESSION_COOKIE, "")
        return token_matches(session.encode("latin-1"), session_value(self.token))

    def _refusal(self, request: Request) -> Response:
        """Return the login form to a browser, JSON to everyone else."""
        challenge = {"WWW-Authenticate": 'Bearer realm="commplan"'}
        if "text/html" in request.headers.get("accept", ""):
            page = self.pages.response(
                "login.html", status=HTTPStatus.UNAUTHORIZED, message="", next=request.url.path
            )
            page.headers.update(challenge)
            return page
        message = (
            "this service needs its token; send the header 'Authorization: Bearer <token>' "
            "with the value of COMMPLAN_TOKEN"
        )
        body = ErrorBody(message=message, where="Authorization", type="Unauthorized")
        return error_response(HTTPStatus.UNAUTHORIZED, body, challenge)


class BodyLimit:
    """Reads a body before the application does, and refuses it once it passes the limit.

    Works whether or not the client announced a length.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer 413."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = await self._read(Headers(scope=scope), receive)
        if body is None:
            message = (
                f"body is larger than {self.max_body_bytes} bytes; "
                "send less, or raise COMMPLAN_MAX_BODY_BYTES"
            )
            refusal = ErrorBody(message=message, where="body", type="BodyTooLarge")
            response = error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, refusal, {"Connection": "close"}
            )
            await response(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body, or None for one beyond the limit, read and dropped where it can be."""
        announced = headers.get("content-length", "0")
        has_sane_length = announced.isdecimal() and len(announced) < _MAX_LENGTH_DIGITS
        most = self.max_body_bytes + _MAX_DROPPED_BYTES
        if not has_sane_length or int(announced) > most:
            return None
        parts: list[bytes] = []
        size = 0
        while size <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            size += len(message.get("body", b""))
            if size <= self.max_body_bytes:
                parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts) if size <= self.max_body_bytes else None
        return None
