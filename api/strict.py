"""Bodies read by ``planner.documents.parse_json``: no NaN, no repeated keys, no abyss.

FastAPI would read them with ``json.loads``, which lets all of that through.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from planner.documents import parse_json
from planner.errors import InvalidInputError

__all__ = ["StrictRoute"]


class _StrictRequest(Request):
    async def json(self) -> Any:
        """Return the body as JSON.

        Raises:
            HTTPException: 422, caused by the InvalidInputError. FastAPI turns any other error
                raised here into a bare 400.
        """
        try:
            return parse_json(await self.body(), source="body")
        except InvalidInputError as exc:
            raise HTTPException(422) from exc


class StrictRoute(APIRoute):
    """A route that reads its body strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler behind a strict request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except HTTPException as exc:
                if isinstance(exc.__cause__, InvalidInputError):
                    raise exc.__cause__ from None
                raise

        return handle_strictly
