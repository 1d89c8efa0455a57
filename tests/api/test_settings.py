"""Settings: typed, from the environment, and closed to others by default."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from api.settings import Settings, load_settings
from api.store import Store
from planner.errors import InvalidInputError
from tests.api.conftest import REPO


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMMPLAN_") or name in ("HOST", "PORT"):
            monkeypatch.delenv(name)


def test_defaults_are_this_machine_only_and_a_file_in_data() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.token) == ("127.0.0.1", 8000, None)
    assert str(settings.resolved_database_url()) == "sqlite:///data/commplan.sqlite3"


def test_the_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "50% of what? #1 @home"
    Store(Settings(data_dir=folder).resolved_database_url()).close()
    assert [file.name for file in folder.iterdir()] == ["commplan.sqlite3"]


def test_the_environment_is_read_and_the_own_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "9000")
    assert load_settings().port == 9000
    monkeypatch.setenv("COMMPLAN_PORT", "9001")
    monkeypatch.setenv("COMMPLAN_MAX_BODY_BYTES", "5000")
    assert (load_settings().port, load_settings().max_body_bytes) == (9001, 5000)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "head-node"])
def test_an_open_address_needs_a_token_or_an_explicit_wish(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("COMMPLAN_HOST", host)
    with pytest.raises(InvalidInputError, match="COMMPLAN_TOKEN"):
        load_settings()
    monkeypatch.setenv("COMMPLAN_ALLOW_INSECURE", "1")
    assert load_settings().host == host
    monkeypatch.delenv("COMMPLAN_ALLOW_INSECURE")
    monkeypatch.setenv("COMMPLAN_TOKEN", "secret")
    assert load_settings().host == host


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMMPLAN_PORT", "many", "got 'many'"),
        ("COMMPLAN_PORT", "70000", "65535"),
        ("COMMPLAN_MAX_BODY_BYTES", "-1", "1000"),
        ("COMMPLAN_LOG_LEVEL", "loud", "'info'"),
        ("COMMPLAN_DATABASE_URL", "no url", "SQLAlchemy URL"),
        ("COMMPLAN_DATABASE_URL", "sqlite://", "in-memory"),
        ("COMMPLAN_DATABASE_URL", "sqlite:///:memory:", "in-memory"),
    ],
)
def test_a_malformed_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError) as caught:
        load_settings()
    assert str(caught.value).startswith(name)
    assert said in str(caught.value)


def test_a_token_is_not_printed() -> None:
    settings = Settings(token="very secret")
    assert "very secret" not in f"{settings!r} {settings}"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"COMMPLAN_HOST": "0.0.0.0"}, "COMMPLAN_TOKEN"),
        ({"COMMPLAN_DATABASE_URL": "postgres+none://u:hidden@h/d"}, "cannot be used"),
        ({"COMMPLAN_DATABASE_URL": "sqlite:////proc/nowhere/x.db"}, "cannot be"),
    ],
)
def test_serve_refuses_to_start_with_a_message_and_exit_2(
    env: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "serve", "--port", "1", "--data-dir", str(tmp_path)],
        cwd=REPO,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "hidden" not in done.stderr
    assert "the page is at" not in done.stderr
    assert "Traceback" not in done.stderr
