"""The service in this process (no port) and as a process of its own (a real socket)."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.settings import Settings

REPO = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 30.0


class Client:
    """Sends requests to an application without a port; never hides a failure behind a raise."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with in_process(self.app) as client:
            return await client.request(method, path, **options)


def in_process(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://commplan.test")


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Return a function that starts an application in this process, by its settings."""
    apps: list[FastAPI] = []

    def make(**settings: Any) -> Client:
        app = create_app(Settings(**{"data_dir": tmp_path, **settings}))
        apps.append(app)
        return Client(app)

    yield make
    for app in apps:
        app.state.jobs.close()
        app.state.store.close()


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@contextmanager
def running_service(data_dir: Path, **env: str) -> Iterator[httpx.Client]:
    """Start ``commplan serve`` on a free port; yield a client of it; end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "planner.cli", "serve", "--port", str(port)]
    log = data_dir / "service.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir)],
            cwd=REPO,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
            _wait_until_healthy(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def _wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"service did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One real service, with a small limit on bodies, for all tests that need a socket."""
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder, COMMPLAN_MAX_BODY_BYTES="100000") as client:
        yield client


def plan_request(**changes: Any) -> dict[str, Any]:
    """Return the body of a request that is planned in a moment."""
    return {
        "topology": "local-gloo",
        "model": "example-gpt",
        "training": {"global_batch_size": 16, "seq_len": 128, "precision": "fp32"},
        "framework": "executor",
        **changes,
    }
