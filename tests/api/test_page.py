"""The form and the plan page: without a browser, and in a real one."""

import html
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Client, plan_request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FORM = {
    "topology": "local-gloo",
    "nodes": "1",
    "model": "example-gpt",
    "global_batch_size": "16",
    "seq_len": "128",
    "precision": "fp32",
    "framework": "executor",
}


class Page(HTMLParser):
    """What a form would send as it stands, and which tags are on the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._select = ""
        self._is_selected = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [found[key] or "" for key in ("href", "src", "action") if key in found]
        if tag == "input":
            self.fields[found["name"] or ""] = found.get("value") or ""
        self._select = (found["name"] or "") if tag == "select" else self._select
        self._is_selected = tag == "option" and "selected" in found

    def handle_data(self, data: str) -> None:
        if self._is_selected and data.strip():
            self.fields[self._select] = data.strip()
            self._is_selected = False


def test_the_form_is_filled_in_with_an_example_that_is_planned(client: Client) -> None:
    page = Page(client.get("/").text)
    chosen = {key: page.fields[key] for key in ("topology", "nodes", "model", "seq_len")}
    assert chosen == {
        "topology": "dgx-h100",
        "nodes": "16",
        "model": "llama3-70b",
        "seq_len": "8192",
    }
    answer = client.post("/", data=page.fields)
    assert answer.status_code == 303, answer.text
    assert client.get(answer.headers["Location"]).status_code == 200


def test_the_form_plans_and_leads_to_the_same_plan_as_the_api(client: Client) -> None:
    answer = client.post("/", data=FORM)
    assert answer.status_code == 303, answer.text
    plan = client.post("/plan", json=plan_request(nodes=1)).json()
    assert answer.headers["Location"] == f"/plans/{plan['id']}/page"


def test_the_plan_page_shows_every_part_of_the_plan(client: Client) -> None:
    plan = client.post("/plan", json=plan_request()).json()
    page = html.unescape(client.get(f"/plans/{plan['id']}/page").text)
    for part in ("compute", "optimizer", *(choice["algorithm"] for choice in plan["collectives"])):
        assert part in page
    for item in (*plan["rejected"], *plan["runners_up"]):
        assert (item.get("reason") or item["why"]) in page
    assert plan["assumptions"][0] in page
    assert "torchrun --standalone --nproc-per-node 4" in page
    assert f"http://commplan.test/plans/{plan['id']}" in page
    assert f'"id": "{plan["id"]}"' in page
    assert "ZeRO-" in page
    shares = [float(width) for width in re.findall(r"width: ([0-9.]+)%", page)]
    assert all(0 <= share <= 100 for share in shares)
    assert len(shares) > 4


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"global_batch_size": "many"}, 422, "must be an integer, got 'many'"),
        ({"global_batch_size": ""}, 422, "global_batch_size is missing"),
        ({"nodes": "0"}, 422, "got '0'"),
        ({"model": "lama"}, 404, "nearest"),
        ({"tp": "3"}, 422, "tp"),
        ({"seq_len": "1" * 5000}, 422, "seq_len"),
    ],
)
def test_an_error_is_shown_on_the_form_and_what_was_typed_is_kept(
    client: Client, changes: dict[str, str], status: int, said: str
) -> None:
    typed = FORM | {"seq_len": "64"} | changes
    answer = client.post("/", data=typed)
    assert answer.status_code == status
    assert said in html.unescape(answer.text)
    kept = Page(answer.text).fields
    for name in ("nodes", "global_batch_size", "precision"):
        assert kept[name] == typed[name]


def test_an_infeasible_form_shows_what_would_fit(client: Client) -> None:
    typed = FORM | {"topology": "dgx-h100", "model": "llama3-405b", "precision": "bf16"}
    typed |= {"framework": "megatron", "global_batch_size": "64", "seq_len": "8192"}
    answer = client.post("/", data=typed)
    assert answer.status_code == 422
    assert "This would fit" in answer.text
    counts = [int(n.replace(",", "")) for n in re.findall(r"<li>([\d,]+) layouts: ", answer.text)]
    assert len(counts) > 2
    assert counts == sorted(counts, reverse=True)


def test_the_form_says_which_precisions_each_cluster_has(client: Client) -> None:
    page = " ".join(client.get("/").text.split())
    assert "fp32, fp64 on local-gloo;" in page
    assert "bf16, fp16, fp8 on all others." in page
    assert "dgx-a100," in page.partition("bf16, fp16 on ")[2].partition(";")[0]


def test_everything_typed_is_escaped(client: Client) -> None:
    attack = "\"><script>alert('1')</script>{{ 7 * 7 }}"
    answer = client.post("/", data=dict.fromkeys(FORM, attack))
    assert answer.status_code == 422
    assert "script" not in Page(answer.text).tags
    assert "{{ 7 * 7 }}" in html.unescape(answer.text)


def test_what_a_document_says_is_escaped_on_the_plan_page(client: Client) -> None:
    spec = client.get("/models/example-gpt").json()["spec"]
    spec |= {"name": "<script>alert(1)</script>", "assumptions": ["<img src=x>"]}
    plan = client.post("/plan", json=plan_request(model=spec))
    assert plan.status_code == 200, plan.text
    page = client.get(f"/plans/{plan.json()['id']}/page").text
    assert not {"script", "img"} & set(Page(page).tags)
    assert "alert(1)" in page


@pytest.mark.parametrize("path", ["/", "/docs", "/login"])
def test_pages_need_no_script_and_nothing_from_elsewhere(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    page = Page(answer.text)
    assert not {"script", "img", "iframe"} & set(page.tags)
    assert all(address.startswith(("/", "#", "data:")) for address in page.addresses)
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_reference_lists_every_route_and_resolves_every_link(client: Client) -> None:
    page = html.unescape(client.get("/docs").text)
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page
    targets = set(re.findall(r'href="#(\w+)"', page))
    assert targets
    assert targets <= set(re.findall(r'id="(\w+)"', page))


def test_an_unknown_plan_has_no_page(client: Client) -> None:
    assert client.get("/plans/0123/page").status_code == 404


@pytest.mark.parametrize(
    "options",
    [
        {"files": {"model": ("a.txt", b"x")}},
        {"content": b"--x", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
        {"content": b"%ff%fe=%00&model=%ed%a0%80"},
        {"content": b"&".join(b"a%d=1" % i for i in range(5000))},
        {"content": b"{}", "headers": {"Content-Type": "application/json"}},
    ],
)
def test_a_malformed_form_is_never_a_500(client: Client, options: dict[str, Any]) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    options = options if "files" in options else {"headers": form, **options}
    for path in ("/", "/login"):
        assert client.post(path, **options).status_code < 500


# ----------------------------------------------------------------------------- a real browser


BROWSER_S = 60.0


@contextmanager
def browser(address: str, profile: Path) -> Iterator[None]:
    """Let Chromium load ``address`` in the real time of a busy machine; end it afterwards."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options = [f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def wait_for(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BROWSER_S
    while not found():
        assert time.monotonic() < deadline, f"{what} within {BROWSER_S:g} s"
        time.sleep(0.1)


def page_in_browser(address: str, profile: Path) -> str:
    """Return the page Chromium has after loading ``address``.

    A page without scripts is whole once it is loaded; on a busy machine Chromium now and then
    gives up before and prints an empty one, so it is asked again.
    """
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options = ["--dump-dom", "--timeout=30000", address]
    for attempt in range(3):
        done = subprocess.run(
            [*command, f"--user-data-dir={profile / str(attempt)}", *options],
            capture_output=True,
            text=True,
            timeout=BROWSER_S,
        )
        assert done.returncode == 0, done.stderr
        if "<h1>" in done.stdout:
            break
    return done.stdout


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@needs_browser
def test_a_browser_sends_the_form_and_is_shown_the_plan(
    service: httpx.Client, tmp_path: Path
) -> None:
    typed = {**FORM, "global_batch_size": "48"}  # no other test plans this
    form = service.get("/").text.replace("<option selected>", "<option>")
    for name, value in typed.items():
        form = form.replace(f"<option>{value}</option>", f"<option selected>{value}</option>")
        form = re.sub(rf'(name="{name}" value=")[^"]*', rf"\g<1>{value}", form)
    # The page itself runs no script, so a copy of it is given the click.
    form = form.replace('action="/"', f'action="{service.base_url}/"')
    click = "addEventListener('load', () => document.querySelector('form button').click())"
    copy = tmp_path / "form.html"
    copy.write_text(f"{form}<script>{click}</script>")

    def pages_shown() -> float:
        shown = (
            r'commplan_requests_total\{method="GET",route="/plans/{plan_id}/page",status="200"\}'
        )
        [count] = re.findall(rf"{shown} (\S+)", service.get("/metrics").text) or ["0"]
        return float(count)

    before = pages_shown()
    with browser(copy.as_uri(), tmp_path / "profile"):
        wait_for(lambda: pages_shown() > before, "the browser was sent to the plan's page")


@needs_browser
def test_a_browser_draws_the_bars(service: httpx.Client, tmp_path: Path) -> None:
    plan = service.post("/plan", json=plan_request()).json()
    page = html.unescape(page_in_browser(f"{service.base_url}/plans/{plan['id']}/page", tmp_path))
    assert page.count('class="bar"') == 1 + len(plan["memory"])
    assert "example-gpt on 4 ranks of local-gloo" in page
    assert "</html>" in page
