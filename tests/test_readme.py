"""What README shows is what happens."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.plan import Calibration, Plan
from tests.timed import made_up_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commplan(
    arguments: list[str], *, cwd: Path = ROOT, typed: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def block(word: str) -> str:
    """Return the one block that holds ``word``."""
    (found,) = [text for text in BLOCKS if word in text]
    return found


def commands(word: str) -> list[list[str]]:
    """Return the arguments of every commplan command in the block that holds ``word``."""
    lines = block(word).replace("\\\n", " ").splitlines()
    prefix = ".venv/bin/commplan "
    return [
        shlex.split(line.removeprefix(prefix), comments=True)
        for line in lines
        if line.startswith(prefix)
    ]


def body_of(curl: str) -> str:
    found = re.search(r"-d '(.*?)'", curl, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_plan_shown_is_the_plan_made() -> None:
    (shown,) = [text for text in BLOCKS if text.startswith("$ commplan plan")]
    command, _, expected = shown.partition("\n")
    found = commplan(shlex.split(command.removeprefix("$ commplan ")))
    assert found.returncode == 0, found.stderr
    assert [line.rstrip() for line in found.stdout.splitlines()] == [
        line.rstrip() for line in expected.splitlines()
    ]


def test_the_request_shown_plans_the_same() -> None:
    (curl,) = [text for text in BLOCKS if text.startswith("curl ")]
    asked = commplan(["plan", "--request", "-", "--json"], typed=body_of(curl))
    typed = commplan(shlex.split("plan -t dgx-h100 -n 16 -m llama3-70b -b 1024 -s 8192 --json"))
    assert asked.returncode == typed.returncode == 0, asked.stderr
    assert asked.stdout == typed.stdout


def test_an_own_model_is_planned_the_same_as_a_file_and_in_a_request(tmp_path: Path) -> None:
    request = json.loads(block('"model_type"'))
    file = tmp_path / "my-model" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(request["model"]))
    (arguments,) = commands("my-model/config.json")
    as_file = commplan([*arguments, "--json"], cwd=tmp_path)
    in_request = commplan(["plan", "-r", "-", "--json"], typed=json.dumps(request))
    assert as_file.returncode == in_request.returncode == 0, as_file.stderr + in_request.stderr
    plans = [Plan.model_validate_json(answer.stdout) for answer in (as_file, in_request)]
    assert plans[0].model.name == "my-model"
    assert plans[0].prediction == plans[1].prediction


def test_an_own_cluster_with_an_own_device_is_shown_and_planned(tmp_path: Path) -> None:
    (tmp_path / "my-cluster.json").write_text(block('"my-cluster"'))
    show, plan = commands("topology show my-cluster.json")
    shown = commplan(show, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "2 nodes, 8 ranks on l40s" in shown.stdout
    planned = commplan([*plan, "--json"], cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert Plan.model_validate_json(planned.stdout).memory[0].capacity_bytes == 48e9


def test_collectives_alone_are_looked_at_as_shown(tmp_path: Path) -> None:
    log = ROOT / "tests" / "samples" / "nccl-tests" / "h100-x16-2node-allreduce.log"
    shutil.copy(log, tmp_path / "all_reduce.log")
    for arguments in commands("--nccl-tests all_reduce.log"):
        found = commplan(arguments, cwd=tmp_path)
        assert found.returncode == 0, (arguments, found.stderr)


def test_the_loop_s_plan_can_be_calibrated_on_and_planned_with(tmp_path: Path) -> None:
    made = commplan(["plan", "-r", "-", "--json"], typed=body_of(block("-o plan.json")))
    assert made.returncode == 0, made.stderr
    plan = Plan.model_validate_json(made.stdout)
    assert (plan.framework, plan.layout.world_size) == ("executor", 4)
    (tmp_path / "plan.json").write_text(made.stdout)
    (tmp_path / "run.json").write_text(made_up_run(plan).model_dump_json())
    calibrate, again = commands("calibrate --plan plan.json")
    fitted = commplan(calibrate, cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    after = commplan([*again, "--json"], cwd=tmp_path)
    assert after.returncode == 0, after.stderr
    calibration = Calibration.model_validate_json((tmp_path / "cal.json").read_text())
    assert Plan.model_validate_json(after.stdout).provenance.calibration_id == calibration.id


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
