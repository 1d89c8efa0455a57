"""The pages: Jinja templates in ``api/web``, everything escaped, nothing fetched from elsewhere."""

from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from planner import units

__all__ = ["Pages"]

# Inline styles only (bar widths); no script, no foreign host, no framing. The icon is an empty
# data: link, which keeps browsers from asking for /favicon.ico.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Pages:
    """Renders the templates."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            seconds=units.format_seconds,
            bytes=units.format_bytes,
            count=units.format_count,
            rate=units.format_rate,
        )

    def render(self, template: str, **values: object) -> str:
        """Return the HTML of ``template``."""
        return self._environment.get_template(template).render(**values)

    def response(self, template: str, *, status: int = 200, **values: object) -> HTMLResponse:
        """Return ``template`` as an answer that no other site can frame or script."""
        headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "same-origin"}
        return HTMLResponse(self.render(template, **values), status, headers)
