"""Labs from Python: ranks that stay, failures that are told, nothing left behind."""

import signal
import subprocess
import sys

import pytest
import torch

from benchmarks.lab import Lab, LabError, lab_topology, with_nic_rate
from tests.lab.conftest import Traces

pytestmark = pytest.mark.lab

DRIVER = """
import time
from benchmarks.lab import Lab, lab_topology
with Lab(lab_topology("lab-2x2")):
    print("up", flush=True)
    time.sleep(600)
"""


def test_ranks_know_their_place_and_results_come_in_their_order(lab: Lab) -> None:
    for rank, (context, group_rank, group_size) in enumerate(lab.run("tests.lab.jobs:place")):
        assert (context.rank, group_rank) == (rank, rank)
        assert (context.world_size, group_size, context.local_world_size) == (8, 8, 2)
        assert context.units == lab.units
        assert lab.units[int(context.host[1:])][context.local_rank] == rank
        assert rank in lab.ranks_of_host[context.host]


def test_tensors_go_in_and_come_back(lab: Lab) -> None:
    for result in lab.run("tests.lab.jobs:summed", {"tensor": torch.arange(3)}):
        assert result.tolist() == [0, 28, 56]


def test_a_host_has_its_own_name_and_shared_memory(lab: Lab) -> None:
    for rank, (node, seen) in enumerate(lab.run("tests.lab.jobs:host_and_shared_memory")):
        assert node == f"n{rank % 4}"
        assert seen == [f"of-rank-{other}" for other in lab.ranks_of_host[node]]


def test_what_spins_leaves_the_cores_to_the_ranks(lab: Lab) -> None:
    for found in lab.run("tests.lab.jobs:priorities"):
        assert found.pop("gloo_tcp_loop") == {19}
        assert set.union(*found.values()) == {0}


def test_what_every_rank_raises_is_told_and_the_lab_goes_on(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"rank \d on host n\d failed in .*: ValueError: nothing"):
        lab.run("tests.lab.jobs:refuse")
    with pytest.raises(LabError, match="no attribute 'nothing_here'"):
        lab.run("tests.lab.jobs:nothing_here")
    assert len(lab.run("tests.lab.jobs:place")) == 8


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("die", "rank 2 on host n0 died in tests.lab.jobs:die"),
        pytest.param(
            "fail",
            "rank 2 on host n0 failed in tests.lab.jobs:fail: ValueError: no",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "hang",
            "ranks 2 have not answered within 1 s of tests.lab.jobs:hang",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_others_wait_for_ends_the_lab_by_name(
    traces: Traces, job: str, message: str
) -> None:
    with Lab(lab_topology("loopback")) as lab:
        with pytest.raises(LabError, match=message):
            lab.run(f"tests.lab.jobs:{job}", {"rank": 2}, timeout_s=1.0 if job == "hang" else 60.0)
        assert traces.processes() == []
        with pytest.raises(LabError, match=f"not running: {message}"):
            lab.run("tests.lab.jobs:place")


def leave_by_an_error(traces: Traces) -> None:
    with Lab(with_nic_rate(lab_topology("lab-2x2"), 1e6)) as lab:
        assert len(traces.processes()) > lab.cluster.world_size
        raise RuntimeError("of the driver")


@pytest.mark.long
def test_a_lab_that_was_left_has_left_nothing(traces: Traces) -> None:
    with pytest.raises(RuntimeError, match="of the driver"):
        leave_by_an_error(traces)
    assert traces.processes() == []
    assert traces.outside_is_untouched()


@pytest.mark.long
def test_a_killed_driver_takes_the_lab_along(traces: Traces) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"up\n"
        assert len(traces.processes()) > 4
        driver.send_signal(signal.SIGKILL)
    assert traces.wait_until_gone(at_most_s=5.0) == []
    assert traces.outside_is_untouched()
