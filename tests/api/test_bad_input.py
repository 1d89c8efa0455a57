"""Nothing a client sends gives a 500; every error has the one shape and says what to do."""

import json
import socket
import string
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Client, plan_request

JSON = {"Content-Type": "application/json"}
FIELDS = {"message", "where", "type", "nearest", "suggestion", "rejected"}


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error after checking its shape."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert {"message", "where", "type"} <= error.keys() <= FIELDS
    assert "Traceback" not in answer.text
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("changes", "status", "where", "said"),
    [
        ({"topology": "dgx-h10"}, 404, "topology", "dgx-h100"),
        ({"model": "lama3-70b"}, 404, "model", "llama3-70b"),
        ({"calibration": "0123456789abcdef"}, 404, "calibration", "latest"),
        ({"topology": 7}, 422, "topology", "got 7"),
        ({"topology": {"name": "mine"}}, 422, "topology.library", "missing"),
        ({"model": {"huggingface": {}}}, 422, "model.huggingface", ""),
        ({"model": {"hidden_size": 8}}, 422, "model", "need a bundled name"),
        ({"model": {}}, 422, "model", "config.json"),
        ({"model": {"model_type": 3}}, 422, "model.huggingface.model_type", "is 3"),
        ({"model": {"architectures": []}}, 422, "model.huggingface", ""),
        ({"nodes": 10**6}, 422, "nodes", "1000000"),
        ({"training": {"seq_len": 1}}, 422, "training.global_batch_size", "add it"),
        ({"training": {"global_batch_size": 0, "seq_len": 8}}, 422, "training.global", "got 0"),
        ({"training": {"global_batch_size": -5, "seq_len": 8}}, 422, "training.global", "got -5"),
        ({"training": {"global_batch_size": 10**29, "seq_len": 8}}, 422, "training.global", "try"),
        ({"training": {"global_batch_size": 1.5, "seq_len": 8}}, 422, "training.global", "1.5"),
        ({"constraints": {"tp": 0}}, 422, "constraints.tp", "got 0"),
        ({"frame work": 1}, 422, "frame work", "not a known field"),
    ],
)
def test_an_impossible_request_is_told_where_and_what(
    client: Client, changes: dict[str, Any], status: int, where: str, said: str
) -> None:
    error = check_error(client.post("/plan", json=plan_request(**changes)), status)
    assert error["where"].startswith(where)
    assert said in error["message"]
    assert len(error["message"]) < 400
    if status == 404:
        assert said in error["nearest"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b"\x00",
        b'{"topology": NaN}',
        b'{"topology": Infinity}',
        b'{"nodes": 1e999}',
        b'{"nodes": ' + b"9" * 10_000 + b"}",
        b'{"nodes": 1, "nodes": 2}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        json.dumps(plan_request(model={"huggingface": {"a": [[[[{}]]]]}})).encode(),
        json.dumps(plan_request(topology="x" * 100_000)).encode(),
    ],
)
@pytest.mark.parametrize("path", ["/plan", "/calibrations"])
def test_a_malformed_body_is_422(client: Client, path: str, body: bytes) -> None:
    check_error(client.post(path, content=body, headers=JSON), 422)


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "/"])
def test_a_body_that_is_not_said_to_be_json_is_415(client: Client, media_type: str) -> None:
    body = json.dumps(plan_request())
    error = check_error(
        client.post("/plan", content=body, headers={"Content-Type": media_type}), 415
    )
    assert "application/json" in error["message"]


def test_json_with_a_charset_is_json(client: Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    body = json.dumps(plan_request()).encode()
    assert client.post("/plan", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/plan", 405),
        ("DELETE", "/plans/x", 405),
        ("PUT", "/healthz", 405),
        ("GET", "/topologies/none", 404),
        ("GET", "/topologies/dgx-h100?nodes=0", 422),
        ("GET", "/topologies/dgx-h100?nodes=many", 422),
        ("GET", "/topologies/dgx-h100?nodes=99999999999999999999999", 422),
        ("GET", "/models/none", 404),
        ("GET", "/models/..%2f..%2fsources", 404),
        ("GET", "/models/sources", 404),
        ("GET", "/calibrations/none", 404),
        ("GET", "/calibrations?limit=-1", 422),
    ],
)
def test_every_other_mistake_has_its_status(
    client: Client, method: str, path: str, status: int
) -> None:
    check_error(client.request(method, path), status)


def test_the_openapi_document_knows_this_shape_and_no_other(client: Client) -> None:
    spec = client.get("/openapi.json").json()
    schemas = spec["components"]["schemas"]
    assert schemas["ErrorBody"]["properties"].keys() == FIELDS
    assert "HTTPValidationError" not in schemas
    for path, methods in spec["paths"].items():
        for operation in methods.values():
            shapes = str(operation["responses"]["4XX"])
            assert "ErrorAnswer" in shapes, path


def test_an_infeasible_request_says_why_and_its_suggestion_fits(client: Client) -> None:
    asked = {
        "topology": "dgx-h100",
        "nodes": 1,
        "model": "llama3-405b",
        "training": {"global_batch_size": 64, "seq_len": 8192},
    }
    error = check_error(client.post("/plan", json=asked), 422)
    assert error["type"] == "InfeasiblePlanError"
    assert sum(error["rejected"].values()) > 0
    suggestion = error["suggestion"]
    assert suggestion
    answer = client.post("/plan", json=merged(asked, suggestion))
    assert answer.status_code == 200, answer.text


def merged(request: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return ``request`` with the fields of ``change``, nested ones too."""
    result = dict(request)
    for name, value in change.items():
        inner = result.get(name)
        is_nested = isinstance(value, dict) and isinstance(inner, dict)
        result[name] = merged(inner, value) if is_nested and inner is not None else value
    return result


# -------------------------------------------------------------------------------------- size


def test_a_body_over_the_limit_is_413_when_announced(service: httpx.Client) -> None:
    answer = service.post("/plan", content=b" " * 200_000, headers=JSON)
    error = check_error(answer, 413)
    assert "100000 bytes" in error["message"]


def test_a_body_over_the_limit_is_413_when_sent_in_chunks(service: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    check_error(service.post("/plan", content=chunks(), headers=JSON), 413)


def test_a_client_that_reads_only_after_it_has_sent_all_gets_its_413(service: httpx.Client) -> None:
    body = b"x" * 8_000_000  # more than the buffers of both sockets hold
    head = f"POST /plan HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = (service.base_url.host, service.base_url.port or 80)
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(head + body)
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", ["9" * 5000, "99999999999", "-1", "x", "²"])
def test_an_absurd_announced_length_is_413(client: Client, length: str) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", length.encode("latin-1")),
    ]
    check_error(client.request("POST", "/plan", headers=headers), 413)


def test_a_chunked_body_below_the_limit_is_planned(service: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for character in json.dumps(plan_request()):
            yield character.encode()

    assert service.post("/plan", content=chunks(), headers=JSON).status_code == 200


def test_the_limit_holds_for_the_form_too(service: httpx.Client) -> None:
    check_error(service.post("/", data={"model": "x" * 200_000}), 413)


# ------------------------------------------------------------------------------ whatever comes

NASTY = (
    st.none()
    | st.booleans()
    | st.integers(-(10**29), 0)
    | st.integers(10**8, 10**29)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != int(x))
    | st.text(string.printable + "\x00\u2028é😀", max_size=30)
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(), max_size=3)
)
PATHS = [
    ("topology",),
    ("nodes",),
    ("model",),
    ("model", "huggingface"),
    ("model", "huggingface", "hidden_size"),
    ("training",),
    ("training", "global_batch_size"),
    ("training", "seq_len"),
    ("training", "precision"),
    ("constraints",),
    ("constraints", "tp"),
    ("constraints", "schedule"),
    ("framework",),
    ("top_k",),
    ("calibration",),
    ("unknown",),
]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from(PATHS), value=NASTY)
def test_no_value_anywhere_gives_a_500(client: Client, path: tuple[str, ...], value: Any) -> None:
    body: dict[str, Any] = plan_request()
    place = body
    for name in path[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[path[-1]] = value
    answer = client.post("/plan", json=body)
    assert answer.status_code in (200, 404, 422), answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code)
    form = {name: str(item) for name, item in body.items()}
    assert client.post("/", data=form).status_code in (303, 404, 422)
