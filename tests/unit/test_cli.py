"""``commplan``: documents on stdout, messages on stderr, exit 0, 1 or 2, never a traceback."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planner import __version__
from planner.cli import _welcome
from planner.model.bundled import model_names
from planner.model.spec import ModelSpec
from planner.plan import Calibration, Plan
from planner.summary import launch_command, launch_notes
from planner.tables import show_plan
from planner.topology.bundled import topology_names
from planner.topology.document import TopologyDocument
from tests.timed import made_up_run
from tests.unit.conftest import Run

REPO = Path(__file__).parent.parent.parent

# fmt: off
PLAN = ["plan", "--topology", "local-gloo", "--model", "example-gpt", "--global-batch", "16",
        "--seq-len", "128", "--precision", "fp32", "--framework", "executor"]
MEGATRON = ["-t", "dgx-h100", "-n", "16", "-m", "mixtral-8x7b", "-b", "1024", "-s", "8192"]
TOO_BIG = ["plan", "-t", "dgx-h100", "-n", "1", "-m", "llama3-405b", "-b", "64", "-s", "8192"]
# fmt: on


def run_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        **{"cwd": REPO, "capture_output": True, "text": True, "timeout": 60, **options},
    )


# ------------------------------------------------------------------------------------- plan


def test_plan_as_a_process_gives_the_document_on_stdout_and_nothing_else() -> None:
    done = run_process(*PLAN, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert Plan.model_validate_json(done.stdout).model.name == "example-gpt"


def test_infeasible_and_bad_input_as_processes_exit_1_and_2() -> None:
    infeasible = run_process(*TOO_BIG, "--json")
    assert (infeasible.returncode, infeasible.stdout) == (1, "")
    assert "this would fit: {" in infeasible.stderr
    unknown = run_process("plan", "-t", "dgx-h10", "-m", "llama3-8b", "-b", "8", "-s", "128")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "dgx-h100" in unknown.stderr


def test_the_table_says_what_the_document_says(run: Run) -> None:
    status, table, err = run(*PLAN)
    assert (status, err) == (0, "")
    plan = Plan.model_validate_json(run(*PLAN, "--json")[1])
    assert str(plan.layout) in table
    assert plan.id in table
    for choice in plan.collectives:
        assert choice.op in table
    for item in plan.rejected:
        assert f"{item.count:,}" in table
    headings = ("layout", "one step", "memory", "collectives", "runners-up", "rejected", "run it")
    for heading in headings:
        assert f"\n{heading}" in table
    assert (
        "torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --plan plan.json" in table
    )


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_keeps_to_the_width_and_loses_nothing(run: Run, width: int) -> None:
    document = run("plan", *MEGATRON, "--json")[1]
    plan, out = Plan.model_validate_json(document), io.StringIO()
    show_plan(Console(file=out, width=width), plan, "plan.json")
    table, _, launch = out.getvalue().partition("\nrun it\n")
    assert max(map(len, table.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
    for other in plan.runners_up:
        assert str(other.layout) in table
        assert all(word in table for word in other.why.split())
    for choice in plan.collectives:
        words = (choice.axis, choice.op, str(choice.runner_up or ""))
        assert all(word in table for word in words)
    command = launch.split("\n#")[0].replace(" \\\n ", "")
    assert " ".join(command.split()) == launch_command(plan, "plan.json")
    assert all(f"\n# {note}\n" in launch for note in launch_notes(plan))


def test_reasons_are_listed_most_frequent_first_with_and_without_a_plan(run: Run) -> None:
    counts = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) layouts: ", run(*TOO_BIG)[2])]
    assert len(counts) > 2
    assert counts == sorted(counts, reverse=True)


def test_the_suggestion_fits(run: Run) -> None:
    status, _, err = run(*TOO_BIG)
    assert status == 1
    [suggestion] = re.findall(r"this would fit: (\{.*\})", err)
    nodes = json.loads(suggestion)["nodes"]
    assert run(*TOO_BIG, "--nodes", str(nodes))[0] == 0


def test_the_output_file_is_the_document_of_stdout(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    _, out, _ = run(*PLAN, "--json", "--output", str(file))
    assert file.read_text() == out


def test_constraints_hold(run: Run) -> None:
    _, out, _ = run(*PLAN, "--json", "-c", "tp=2", "--constraint", "schedule=none", "--top-k", "1")
    plan = Plan.model_validate_json(out)
    assert (plan.layout.tp, plan.pipeline.schedule) == (2, "none")
    assert len(plan.runners_up) <= 1


def test_a_request_file_is_read_and_options_override_it(run: Run, tmp_path: Path) -> None:
    request = {
        "topology": "local-gloo",
        "model": "example-gpt",
        "training": {"global_batch_size": 16, "seq_len": 128, "precision": "fp32"},
        "framework": "executor",
    }
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    as_file = Plan.model_validate_json(run("plan", "--request", str(file), "--json")[1])
    assert as_file == Plan.model_validate_json(run(*PLAN, "--json")[1])
    shorter = Plan.model_validate_json(run("plan", "-r", str(file), "-s", "64", "--json")[1])
    assert (shorter.training.seq_len, shorter.training.global_batch_size) == (64, 16)
    done = run_process("plan", "--request", "-", "--json", input=json.dumps(request))
    assert Plan.model_validate_json(done.stdout) == as_file


def test_topology_and_model_may_be_files(run: Run, tmp_path: Path) -> None:
    topology, model = tmp_path / "cluster.json", tmp_path / "model.json"
    topology.write_text(run("topology", "show", "local-gloo", "--json")[1])
    model.write_text(run("model", "show", "example-gpt", "--json")[1])
    files = ["--topology", str(topology), "--model", str(model)]
    assert run(*PLAN, *files, "--json")[1] == run(*PLAN, "--json")[1]


def test_a_request_file_may_hold_a_config_json(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    config |= {"_name_or_path": "someone/tiny"}
    file.write_text(json.dumps({"model": config}))
    arguments = [word for word in PLAN if word not in ("--model", "example-gpt")]
    status, out, err = run(*arguments, "-r", str(file), "--json")
    assert status == 0, err
    assert Plan.model_validate_json(out).model.name == "tiny"
    file.write_text(json.dumps({"model": {"hidden_size": 64}}))
    status, _, err = run(*arguments, "-r", str(file))
    assert status == 2
    assert "need a bundled name" in err
    assert err.count("missing") == 0


def test_a_hugging_face_config_is_named_after_its_folder(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "tiny-llama" / "config.json"
    config.parent.mkdir()
    fields = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    config.write_text(json.dumps(fields))
    status, out, err = run(*PLAN, "--model", str(config), "--json")
    assert status == 0, err
    assert Plan.model_validate_json(out).model.name == "tiny-llama"
    assert "tiny-llama" in run("model", "show", str(config))[1]


def test_packed_documents_are_planned_with_their_own_attention(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "packing.json"
    file.write_text(json.dumps({"lengths": [1024, 256], "counts": [1, 12]}))
    words = ["plan", "-t", "dgx-h100", "-n", "2", "-m", "llama3-8b", "-b", "64", "-s", "8192"]
    whole, packed = (
        Plan.model_validate_json(run(*words, *more, "--json")[1])
        for more in ([], ["--packing", str(file)])
    )
    assert packed.prediction.model_flop_per_step < whole.prediction.model_flop_per_step
    assert packed.prediction.step_time_s < whole.prediction.step_time_s
    # (1024**3 + 12 * 256**3) / (1024**2 + 12 * 256**2) tokens
    assert any("over 695 tokens" in line for line in packed.assumptions)
    assert not any("packed" in line for line in whole.assumptions)
    assert "packing documents" in "".join(launch_notes(packed))
    assert "packing documents" not in "".join(launch_notes(whole))
    assert "packing" not in json.loads(whole.model_dump_json())["training"]
    for wrong, said in (
        ({"lengths": [9000], "counts": [1]}, "9000 tokens, but a sequence holds seq_len=8192"),
        ({"lengths": [8]}, "training.packing.counts"),
        ([8], "training.packing"),
    ):
        file.write_text(json.dumps(wrong))
        status, _, err = run(*words, "--packing", str(file))
        assert status == 2
        assert said in err
        assert "Traceback" not in err
    file.write_text(json.dumps({"lengths": [8], "counts": [1]}))
    status, _, err = run(*PLAN, "--packing", str(file))
    assert status == 2
    assert "training.packing=given: the executor's attention does not" in err


def test_a_model_is_shown_with_its_blocks(run: Run) -> None:
    _, out, _ = run("model", "show", "deepseek-v3")
    assert "671 B parameters, 37.6 B active; 11.6 B more for multi-token prediction" in out
    for kind, number in (("dense", "3"), ("moe", "58"), ("mtp", "1")):
        assert any(line.split()[:2] == [kind, number] for line in out.splitlines())
    assert "3 dense, 58 moe, 1 mtp" in run("model", "list")[1]


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "is missing"),
        (["plna"], "No such command"),
        ([*PLAN, "--nodes", "two"], "--nodes"),
        ([*PLAN, "--nodes", "0"], "nodes"),
        ([*PLAN, "--precision", "bf61"], "'bf16'"),
        ([*PLAN, "-c", "tp"], "tp=8"),
        ([*PLAN, "-c", "pt=8"], "constraints.pt"),
        ([*PLAN, "--model", "lama"], "nearest"),
        ([*PLAN, "--model", "/nowhere/config.json"], "No such file"),
        ([*PLAN, "--topology", "/"], "directory"),
        ([*PLAN, "--topology", "x" * 5000], "topology must have at most 120 characters"),
        ([*PLAN, "--topology", "x" * 5000 + ".json"], "too long"),
        ([*PLAN, "--topology", "\udcff"], "topology"),
        (["plan", "--request", "/dev/zero"], "larger than"),
        ([*PLAN, "--calibration", "missing.json"], "missing.json"),
        ([*PLAN, "--calibration", "latest"], "latest"),
        ([*PLAN, "--calibration", ""], "a file name is empty"),
        ([*PLAN, "--output", "/nowhere/plan.json"], "cannot be written"),
        (["plan", "--request", "/dev/null"], "not valid JSON"),
        (["topology", "show", "dgx"], "nearest"),
        (["topology", "show", "dgx-h100", "--nodes", "5000"], "4096"),
        (["model", "show", "../secrets"], "No such file"),
        (["calibrate", "--plan", "missing.json", "run.json"], "missing.json"),
        (["serve", "--port", "0"], "port"),
    ],
)
def test_bad_input_is_exit_2_with_a_message_on_stderr(
    run: Run, arguments: list[str], said: str
) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"\xff\xfe\x00", b'{"a": NaN}', b"[" * 100_000, b"null"]
)
@pytest.mark.parametrize("option", ["--request", "--topology", "--model", "--calibration"])
def test_a_file_with_anything_in_it_is_exit_2(
    run: Run, tmp_path: Path, content: bytes, option: str
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    status, out, err = run(*PLAN, option, str(file))
    assert (status, out) == (2, "")
    assert err.startswith("commplan: ")
    assert len(err) < 1000


def test_a_file_nobody_may_read_is_exit_2(run: Run, tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert run(*PLAN, "--request", str(loop))[0] == 2


@pytest.mark.parametrize("arguments", [[*PLAN, "--json"], PLAN, ["model", "list"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_process(*arguments, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------- topologies, models, others


def test_topologies_are_listed_and_shown(run: Run) -> None:
    assert json.loads(run("topology", "list", "--json")[1]) == list(topology_names())
    table = run("topology", "list")[1]
    for name in topology_names():
        assert name in table
        document = run("topology", "show", name, "--json")[1]
        assert TopologyDocument.model_validate_json(document).name == name
    assert ": 1 node, 8 ranks" in run("topology", "show", "dgx-h100", "--nodes", "1")[1]
    assert "512 ranks" in run("topology", "show", "dgx-h100", "--nodes", "64")[1]


def test_models_are_listed_and_shown(run: Run) -> None:
    assert json.loads(run("model", "list", "--json")[1]) == list(model_names())
    table = run("model", "list")[1]
    for name in model_names():
        assert name in table
        ModelSpec.model_validate_json(run("model", "show", name, "--json")[1])
    assert "70.6 B parameters" in run("model", "show", "llama3-70b")[1]


def test_calibrate_fits_runs_and_plan_uses_the_result(run: Run, tmp_path: Path) -> None:
    plan_file, run_file, fitted = (tmp_path / name for name in ("plan", "run", "calibration"))
    constrained = [*PLAN, "-c", "tp=1", "-c", "pp=1"]
    run(*constrained, "--output", str(plan_file))
    plan = Plan.model_validate_json(plan_file.read_text())
    run_file.write_text(made_up_run(plan).model_dump_json())
    fit = ["calibrate", "--plan", str(plan_file), str(run_file)]
    status, out, err = run(*fit, "--output", str(fitted))
    assert (status, out) == (0, ""), err
    calibration = Calibration.model_validate_json(fitted.read_text())
    assert calibration.id in err
    assert run(*fit)[1] == fitted.read_text()
    after = run(*constrained, "--calibration", str(fitted), "--json")[1]
    assert Plan.model_validate_json(after).provenance.calibration_id == calibration.id


def test_a_calibration_of_another_cluster_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    fields = {"id": "x", "topology": "dgx-h100", "levels": (), "compute_scale": 1.0}
    fields |= {"optimizer_scale": 1.0, "host_overhead_s": 0, "residual": 0, "run_hashes": ()}
    file.write_text(Calibration.model_validate(fields).model_dump_json())
    status, out, err = run(*PLAN, "--calibration", str(file))
    assert (status, out) == (2, "")
    assert "'dgx-h100'" in err


def test_calibrate_refuses_another_model(run: Run, tmp_path: Path) -> None:
    plan_file, run_file = tmp_path / "plan", tmp_path / "run"
    run(*PLAN, "--output", str(plan_file))
    plan = Plan.model_validate_json(plan_file.read_text())
    run_file.write_text(made_up_run(plan).model_dump_json())
    fit = ["calibrate", "--plan", str(plan_file), str(run_file), "--model", "llama3-8b"]
    status, out, err = run(*fit)
    assert (status, out) == (2, "")
    assert "fingerprint" in err


def test_calibrate_refuses_a_run_of_another_plan(run: Run, tmp_path: Path) -> None:
    plan_file, run_file = tmp_path / "plan", tmp_path / "run"
    run(*PLAN, "--output", str(plan_file))
    plan = Plan.model_validate_json(plan_file.read_text())
    run_file.write_text(made_up_run(plan, plan_hash="0123").model_dump_json())
    status, out, err = run("calibrate", "--plan", str(plan_file), str(run_file))
    assert (status, out) == (2, "")
    assert "plan_hash" in err


def test_a_taken_port_is_exit_2_with_one_message_and_no_welcome(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_process("serve", "--port", str(port), "--data-dir", str(tmp_path))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"commplan: cannot listen on port {port} of 127.0.0.1: Address already")
    assert f"PORT={port + 1}" in line


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300])
def test_an_address_of_another_machine_is_exit_2(tmp_path: Path, host: str) -> None:
    # 192.0.2.0/24 is nobody's (RFC 5737).
    options = ["--host", host, "--insecure", "--data-dir", str(tmp_path), "--port", "45678"]
    done = run_process("serve", *options)
    assert done.returncode == 2
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_welcome_says_where_page_and_api_are_and_how_to_ask() -> None:
    text = _welcome("::1", 8000, has_token=True)
    for part in (
        "http://[::1]:8000/ ",
        "/docs",
        "curl -s http://[::1]:8000/plan",
        "$COMMPLAN_TOKEN",
    ):
        assert part in text


def test_the_version_is_the_package_s(run: Run) -> None:
    assert run("--version")[1] == f"commplan {__version__}\n"


def test_every_command_has_help(run: Run) -> None:
    for command in ([], ["plan"], ["topology"], ["model"], ["calibrate"], ["serve"]):
        status, out, _ = run(*command, "--help")
        assert status == 0
        assert "Usage" in out


SMALL = "plan -t dgx-h100 -n 1 -m llama3-8b -b 64 -s 4096"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_disk_is_one_line_and_no_verdict(options: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli", *SMALL.split(), *options.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "commplan: cannot write: No space left on device\n"


def test_a_closed_stdin_is_bad_input() -> None:
    command = f"exec {sys.executable} -m planner.cli plan -r - <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not valid JSON" in done.stderr
    assert "Traceback" not in done.stderr
