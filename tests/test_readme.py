"""What README shows is what happens."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", README, re.DOTALL)


def commplan(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_the_plan_shown_is_the_plan_made() -> None:
    (shown,) = [block for block in BLOCKS if block.startswith("$ commplan plan")]
    command, _, expected = shown.partition("\n")
    found = commplan(shlex.split(command.removeprefix("$ commplan ")))
    assert found.returncode == 0, found.stderr
    assert [line.rstrip() for line in found.stdout.splitlines()] == [
        line.rstrip() for line in expected.splitlines()
    ]


def test_the_request_shown_plans_the_same() -> None:
    (curl,) = [block for block in BLOCKS if block.startswith("curl ")]
    body = re.search(r"-d '(.*?)'", curl, re.DOTALL)
    assert body is not None
    asked = subprocess.run(
        [sys.executable, "-m", "planner.cli", "plan", "--request", "-", "--json"],
        input=body[1],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    typed = commplan(shlex.split("plan -t dgx-h100 -n 16 -m llama3-70b -b 1024 -s 8192 --json"))
    assert asked.returncode == typed.returncode == 0, asked.stderr
    assert asked.stdout == typed.stdout


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
