"""With a token set, every route but /healthz needs it."""

from collections.abc import Callable
from html.parser import HTMLParser

import httpx
import pytest
from starlette.routing import BaseRoute

from api.middleware import SESSION_COOKIE
from tests.api.conftest import Client, plan_request

TOKEN = "töken with ünicode"
GOOD = {"Authorization": f"Bearer {TOKEN}".encode()}


@pytest.fixture
def guarded(make_client: Callable[..., Client]) -> Client:
    return make_client(token=TOKEN)


def paths_of(routes: list[BaseRoute]) -> set[str]:
    """Return the path of every route, those of included routers too."""
    paths: set[str] = set()
    for route in routes:
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        paths |= paths_of(inner) if inner else {getattr(route, "path", "")}
    return paths


def test_every_route_but_health_and_login_needs_the_token(guarded: Client) -> None:
    paths = paths_of(guarded.app.routes)
    assert {"/plan", "/", "/docs", "/openapi.json", "/metrics"} <= paths
    for path in paths | {"/nothing", "/healthz/", "//healthz"}:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            if (method, path) != ("POST", "/login"):  # checks the token itself
                status = guarded.request(method, path).status_code
                assert (status != 401) == (path in ("/healthz", "/login")), (method, path)


def test_without_a_token_the_answer_says_how_to_send_it(guarded: Client) -> None:
    answer = guarded.get("/plans/x")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert "Authorization: Bearer" in answer.json()["error"]["message"]
    assert "ken with" not in answer.text


def test_the_right_token_is_let_through(guarded: Client) -> None:
    assert guarded.post("/plan", json=plan_request(), headers=GOOD).status_code == 200
    lower = {"Authorization": f"bearer  {TOKEN}".encode()}
    assert guarded.get("/models", headers=lower).status_code == 200


@pytest.mark.parametrize(
    "given",
    [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic dDo=", TOKEN.encode(), b"Bearer \xff"],
)
def test_anything_else_is_turned_away(guarded: Client, given: bytes) -> None:
    assert guarded.get("/models", headers={"Authorization": given}).status_code == 401


def test_a_body_is_not_read_for_who_may_not_send_it(make_client: Callable[..., Client]) -> None:
    client = make_client(token=TOKEN, max_body_bytes=1000)
    assert client.post("/plan", content=b"x" * 5000).status_code == 401
    assert client.post("/plan", content=b"x" * 5000, headers=GOOD).status_code == 413


def test_an_empty_token_means_none(make_client: Callable[..., Client]) -> None:
    assert make_client(token="").get("/models").status_code == 200


# ---------------------------------------------------------------------------------- browsers


class FormFields(HTMLParser):
    """Collects the names of a page's inputs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "input":
            self.names.append(str(dict(attrs).get("name")))


def log_in(client: Client, token: str, next_page: str = "/") -> httpx.Response:
    return client.post("/login", data={"token": token, "next": next_page})


def test_a_browser_is_shown_a_login_form(guarded: Client) -> None:
    answer = guarded.get("/plans/abc/page?x=<b>", headers={"Accept": "text/html"})
    assert answer.status_code == 401
    assert "WWW-Authenticate" in answer.headers
    assert set(FormFields(answer.text).names) == {"next", "token"}
    assert "<b>" not in answer.text


def test_logging_in_gives_a_cookie_that_opens_every_page(guarded: Client) -> None:
    answer = log_in(guarded, TOKEN, "/docs")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/docs")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "ken" not in cookie.split(";")[0].removeprefix(SESSION_COOKIE)
    session = {"Cookie": cookie.split(";")[0]}
    assert guarded.get("/docs", headers=session).status_code == 200
    forged = {"Cookie": f"{SESSION_COOKIE}=0123"}
    assert guarded.get("/docs", headers=forged).status_code == 401


def test_a_wrong_token_is_refused_at_the_login(guarded: Client) -> None:
    answer = log_in(guarded, "wrong")
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers
    assert "not the token" in answer.text


@pytest.mark.parametrize("target", ["https://evil.test", "//evil.test", "/\\evil.test", "evil"])
def test_the_login_leads_nowhere_else(guarded: Client, target: str) -> None:
    assert log_in(guarded, TOKEN, target).headers["Location"] == "/"


def test_without_a_token_the_login_leads_to_the_form(client: Client) -> None:
    answer = log_in(client, "anything")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert "Set-Cookie" not in answer.headers
