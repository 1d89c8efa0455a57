"""What several tests of the command line share."""

import sys
from collections.abc import Callable

import pytest

from planner.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function from arguments to (exit status, stdout, stderr), in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["commplan", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(caught.value.code or 0), out, err

    return call
