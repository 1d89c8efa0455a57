"""The command line: one rank's view, exit codes, words, and signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.lab.conftest import Traces

pytestmark = pytest.mark.lab

LAB = (sys.executable, "-m", "benchmarks.lab")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*LAB, *arguments), capture_output=True, text=True, env={**os.environ, **environment}
    )


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


def test_where_it_cannot_run_it_says_why_and_exits_77() -> None:
    done = run("run", "loopback", "--", "true", PATH="/nowhere")
    assert done.stdout == "SKIPPED: the lab needs ip, tc of iproute2\n"
    assert done.returncode == 77


def test_a_topology_that_cannot_be_emulated_is_refused_in_words() -> None:
    done = run("run", "dgx-a100", "--", "true")
    assert done.returncode == 2
    assert done.stderr == (
        "lab: topology 'dgx-a100': host n0 has 8 GPUs; the lab needs workers of kind 'process'\n"
    )


def test_show_prints_hosts_and_links() -> None:
    done = run("show", "lab-4x2")
    assert "host n3: ranks 6, 7\n" in done.stdout
    assert "leaf1 - spine0: 100 Mbit/s each way\n" in done.stdout
