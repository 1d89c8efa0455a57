"""The command line: one rank's view, exit codes, words, and signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.lab import lab_topology, with_nic_rate
from benchmarks.lab.__main__ import main
from benchmarks.lab.cluster import cluster_of
from tests.lab.conftest import Traces

pytestmark = pytest.mark.lab

LAB = (sys.executable, "-m", "benchmarks.lab")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*LAB, *arguments), capture_output=True, text=True)


class Said(NamedTuple):
    code: int | str | None
    stdout: str
    stderr: str


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return what runs a command line that starts no rank, in this process."""

    def no_exec(*arguments: object) -> None:
        raise AssertionError(f"this process would have become {arguments}")

    monkeypatch.setattr(os, "execvp", no_exec)

    def run_here(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["lab", *arguments])
        try:
            code: int | str | None = main()
        except SystemExit as end:
            code = end.code
        return Said(code, *capsys.readouterr())

    return run_here


def test_a_command_runs_on_every_rank_with_the_variables_of_torchrun(possible: None) -> None:
    words = "echo $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $(pwd)"
    done = run("run", "lab-2x2", "--order", "interleaved", "--bytes", "--", "sh", "-c", words)
    assert done.returncode == 0, done.stderr
    *ranks, first, second = done.stdout.splitlines()
    assert sorted(ranks) == [
        f"[{rank}] 4 {rank // 2} 2 10.0.0.1 eth0 {os.getcwd()}" for rank in range(4)
    ]
    assert first.startswith("n0/nic -> leaf0: ")
    assert second.startswith("n1/nic -> leaf0: ")


def test_the_first_failing_rank_ends_the_others_and_gives_the_exit_code(traces: Traces) -> None:
    done = run("run", "loopback", "--", "sh", "-c", "[ $RANK != 2 ] || exit 7; sleep 600")
    assert done.returncode == 7
    assert "rank 2 on host n0 failed with exit code 7" in done.stderr
    assert traces.processes() == []


@pytest.mark.long
def test_a_rank_ended_by_a_signal_gives_128_more(possible: None) -> None:
    assert run("run", "loopback", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_the_command_ends_all_of_the_lab(traces: Traces, how: signal.Signals) -> None:
    command = (*LAB, "run", "lab-2x2", "--", "sh", "-c", "echo up; sleep 600")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"up" in running.stdout.readline()
        assert len(traces.processes()) > 4
        running.send_signal(how)
        start = time.monotonic()
    assert traces.wait_until_gone(at_most_s=5.0) == []
    assert time.monotonic() - start < 5.0
    assert running.returncode == -how
    assert traces.outside_is_untouched()


def test_where_it_cannot_run_it_says_why_and_exits_77(
    say: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = say("run", "loopback", "--", "true")
    assert done == (77, "SKIPPED: the lab needs ip, tc of iproute2\n", "")


def test_root_without_the_capability_is_told_which(possible: None) -> None:
    without = ("setpriv", "--bounding-set=-sys_admin", *LAB, "run", "loopback", "--", "true")
    done = subprocess.run(without, capture_output=True, text=True)
    assert done.returncode == 77
    assert done.stdout.startswith("SKIPPED: the lab needs root (CAP_SYS_ADMIN), ")


def test_a_topology_that_cannot_be_emulated_is_refused_in_words(say: Callable[..., Said]) -> None:
    assert say("run", "dgx-a100", "--", "true") == (
        2,
        "",
        "lab: topology 'dgx-a100': host n0 has 8 GPUs; the lab needs workers of kind 'process'\n",
    )


@pytest.mark.parametrize("command", [("python", "-c", "1"), ("python", "x.py", "--bytes")])
def test_a_command_without_dashes_is_refused_with_what_to_put(
    say: Callable[..., Said], command: tuple[str, ...]
) -> None:
    done = say("run", "lab-2x2", *command)
    assert done.code == 2
    assert "put -- before the command: run lab-2x2 -- python ...\n" in done.stderr


def test_an_unknown_option_is_refused(say: Callable[..., Said]) -> None:
    done = say("run", "lab-2x2", "--byte-count", "--", "true")
    assert done.code == 2
    assert "unrecognized arguments: --byte-count\n" in done.stderr


def test_help_names_every_variable_that_a_rank_finds(say: Callable[..., Said]) -> None:
    told = say("run", "--help").stdout
    for variable in cluster_of(lab_topology("lab-2x2")).environment(0):
        assert variable in told


def test_show_prints_hosts_and_links(say: Callable[..., Said]) -> None:
    done = say("show", "lab-4x2")
    assert "host n3: ranks 6, 7\n" in done.stdout
    assert "leaf1 - spine0: 100 Mbit/s each way\n" in done.stdout
    assert done.stderr == ""


def test_links_faster_than_the_cores_are_warned_of(
    say: Callable[..., Said], tmp_path: Path
) -> None:
    for rate, is_warned in ((125e6, False), (250e6, True)):
        file = tmp_path / f"{rate:g}.json"
        file.write_text(with_nic_rate(lab_topology("lab-2x2"), rate).model_dump_json())
        done = say("show", str(file))
        assert done.code == 0
        assert ("the cores will be the limit, not the links\n" in done.stderr) == is_warned
