"""``commplan plan --nodelist`` and ``commplan topology degrade``, as Slurm users type them."""

import json
from pathlib import Path

import pytest

from planner.plan import Calibration, Plan
from planner.topology.document import TopologyDocument
from tests.timed import made_up_run
from tests.unit.conftest import Run
from tests.unit.placed import cluster, impairments

# fmt: off
PLAN = ["plan", "-t", "dgx-h100", "-m", "example-gpt", "-b", "96", "-s", "1024", "-c", "pp=1",
        "-c", "recompute=none"]
# fmt: on


def plan_of(out: str) -> Plan:
    return Plan.model_validate_json(out)


# ----------------------------------------------------------------------------------- nodelist


def test_a_slurm_list_is_the_allocation(run: Run) -> None:
    status, out, err = run(*PLAN, "--nodelist", "n[40,3-4],n1000", "--json")
    assert (status, err) == (0, "")
    assert plan_of(out).ranks.hosts == ("n3", "n4", "n40", "n1000")


def test_the_table_says_where_to_start_and_what_waiting_gains(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster().model_dump_json())
    status, out, err = run(*PLAN, "-t", str(file), "--nodelist", "n[0,2]")
    assert (status, err) == (0, "")
    assert "--node-rank $NODE_RANK --master-addr n0" in out
    assert (
        "# start the line on every node; $NODE_RANK is its place, from 0, in n0, n2 (ranks" in out
    )
    assert "As many healthy nodes under the fewest switches, as n0, n1, would take" in out
    assert "% less." in out
    packed = run(*PLAN, "-t", str(file), "--nodelist", "n[0-1]")[1]
    assert "fewest switches" not in packed


def test_the_table_says_what_could_be_done_about_a_weak_node(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster(impairments=impairments("n1=0.5")).model_dump_json())
    status, out, _ = run(*PLAN, "-t", str(file), "-n", "3")
    assert status == 0
    rows = out.split("which nodes: keep those asked for, drop some, or move\n")[1].splitlines()[:4]
    assert [row.split()[:2] for row in rows[1:]] == [["keep", "3"], ["drop", "2"], ["move", "3"]]
    assert rows[3].split()[2:4] == ["n1", "n3"]
    assert [row.endswith("chosen") for row in rows[1:]] == [False, False, True]
    assert "sent by a rank in a step, over each level" in out
    document = run(*PLAN, "-t", str(file), "-n", "2", "-c", "dp=4", "-c", "tp=1", "--json")[1]
    assert [o.step_time_s is None for o in plan_of(document).placements] == [False, True, False]
    table = run(*PLAN, "-t", str(file), "-n", "2", "-c", "dp=4", "-c", "tp=1")[1]
    assert "no layout" in table


@pytest.mark.parametrize(
    ("nodelist", "says"),
    [
        ("", "--nodelist: '' is no list of hosts: it names no host"),
        ("n[1-", "brackets do not match"),
        ("n[1-99999999]", "99,999,999 hosts"),
        ("n[1-2],n1", "allocation names 'n1' twice"),
        ("n1,node7", "allocation names 'node7', which topology 'dgx-h100' does not have"),
        ("n[1-2],-x", "allocation"),
        ("a[1-5000]", "allocation has 5000 nodes but topology 'dgx-h100' has 4096"),
    ],
)
def test_a_list_that_is_none_exits_2_and_says_why(run: Run, nodelist: str, says: str) -> None:
    status, out, err = run(*PLAN, "--nodelist", nodelist)
    assert (status, out) == (2, "")
    assert says in err


def test_options_override_the_nodes_of_the_file_both_ways(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    arguments = ["plan", "-r", str(file), "--json"]
    body = {"topology": "dgx-h100", "model": "example-gpt", "constraints": {"pp": 1}}
    body |= {"training": {"global_batch_size": 96, "seq_len": 1024}}
    file.write_text(json.dumps({**body, "nodes": 4}))
    status, out, err = run(*arguments, "--nodelist", "n[5-6]")
    assert (status, err) == (0, "")
    assert plan_of(out).ranks.hosts == ("n5", "n6")
    assert run(*arguments, "--nodelist", "n[5-6]", "-n", "3")[0] == 2
    file.write_text(json.dumps({**body, "allocation": ["n7", "n8"]}))
    assert plan_of(run(*arguments)[1]).ranks.hosts == ("n7", "n8")
    other = plan_of(run(*arguments, "-n", "1")[1])
    assert (other.ranks.hosts, other.layout.world_size) == (None, 8)


def test_a_run_of_an_allocation_is_calibrated_on_its_nodes(run: Run, tmp_path: Path) -> None:
    topology, plan_file, timed = (tmp_path / name for name in ("t.json", "plan.json", "run.json"))
    topology.write_text(cluster().model_dump_json())
    held = ["-c", "dp=4", "-c", "tp=1", "-c", "zero_stage=0", "--framework", "executor"]
    options = ["-t", str(topology), "--nodelist", "n[0,2]", "-o", str(plan_file), "--json"]
    status, out, err = run(*PLAN, *held, *options)
    assert status == 0, err
    timed.write_text(made_up_run(plan_of(out)).model_dump_json())
    arguments = ["calibrate", str(timed), "-p", str(plan_file), "-t", str(topology)]
    status, out, err = run(*arguments)
    assert status == 0, err
    # what two nodes under two leaves use; under one leaf there would be no spine to measure
    assert "spine" in {fit.level for fit in Calibration.model_validate_json(out).levels}


# ------------------------------------------------------------------------------------ degrade


def test_degrade_shows_before_and_after_and_gives_a_document_that_plans(
    run: Run, tmp_path: Path
) -> None:
    status, out, err = run(
        *("topology", "degrade", "dgx-h100"),
        *("--link", "n7/nic0:rail0/rail0=0.5", "--node", "n9=0.8", "--node", "n11=down"),
    )
    assert status == 0
    document = TopologyDocument.model_validate_json(out)
    assert [str(i) for i in document.impairments] == [
        "n7/nic0:rail0/rail0=0.5",
        "n9=0.8",
        "n11=down",
    ]
    title, _, *rows = err.splitlines()
    assert title == ("dgx-h100: 32,768 GPUs, 32,760 of them up, the slowest at 80 % of its speed")
    shown = {row.split()[0]: row.split() for row in rows}
    assert shown["nvlink"][-2:] == ["100.0", "%"]
    assert shown["rail"][-2:] == ["50.0", "%"]
    assert "50.0 GB/s" in next(row for row in rows if row.startswith("rail"))
    assert "25.0 GB/s" in next(row for row in rows if row.startswith("rail"))
    file = tmp_path / "weak.json"
    file.write_text(out)
    status, out, _ = run(*PLAN, "-t", str(file), "-n", "10", "--json")
    assert status == 0
    plan = plan_of(out)
    assert {option.choice for option in plan.placements} == {"keep", "drop", "move"}
    assert any("2 weak" in said or "3 weak" in said for said in plan.assumptions)


def test_degrade_writes_a_file_and_adds_to_one(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    status, out, _ = run("topology", "degrade", "dgx-h100", "--node", "n1=0.5", "-o", str(first))
    assert (status, out) == (0, "")
    arguments = ["--node", "n2=0.7", "--node", "n1=0.9", "-o", str(second)]
    status, _, err = run("topology", "degrade", str(first), *arguments)
    assert status == 0
    document = TopologyDocument.model_validate_json(second.read_text())
    assert [str(i) for i in document.impairments] == ["n1=0.9", "n2=0.7"]
    assert "the slowest at 70 %" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name what is weak or broken"),
        (["--link", "n1=0.5"], "link 'n1=0.5': need A:B=FACTOR"),
        (["--link", "n1/nic0=0.5"], "a NIC, GPU or switch by itself is given as node"),
        (["--link", "a:b:c=0.5"], "need A:B=FACTOR"),
        (["--link", "n1/nic0:=0.5"], "need A:B=FACTOR"),
        (["--node", "n1"], "node 'n1': need NAME=FACTOR"),
        (["--node", "n1=1"], "'1' must be down, or a number from 0"),
        (["--node", "n1=-0.1"], "'-0.1' must be down"),
        (["--node", "n1=nan"], "'nan' must be down"),
        (["--node", "n1=half"], "'half' must be down"),
        (["--node", "n1=5e-324"], "what has less than 1e-06 left is down: give 0"),
        (["--node", "n9999=0.5"], "nothing is called n9999"),
        (["--node", "n1/gpu9=0.5"], "n1 has no 'n1/gpu9'"),
        (["--link", "n1/nic0:rail1/rail0=0.5"], "rail1/rail0"),
        (["--link", "n1/gpu0:n1/gpu1=0.5"], "no link"),
        (["--node", "n1/=0.5"], "n1 has no 'n1/'"),
        (["--node", f"{'n' * 121}=0.5"], "part must have at most 120 characters"),
        (["--link", f"n1/nic0:{'n' * 121}=0.5"], "link must have at most 120 characters"),
    ],
)
def test_what_cannot_be_weak_exits_2_and_says_why(
    run: Run, arguments: list[str], says: str
) -> None:
    status, out, err = run("topology", "degrade", "dgx-h100", *arguments)
    assert (status, out) == (2, "")
    assert says in err


def test_a_cluster_with_every_node_down_is_refused(run: Run) -> None:
    status, out, err = run("topology", "degrade", "local-gloo", "--node", "n0=down")
    assert (status, out) == (2, "")
    assert "every node would be down; leave one of them up" in err


def test_names_of_strangers_steer_no_terminal_and_become_no_markup(
    run: Run, tmp_path: Path
) -> None:
    document = json.loads(run("topology", "show", "dgx-h100", "--json")[1])
    steering = "[red]a[/red]:fire:\x1b[2J\x9b31m\u202e"
    document |= {"name": steering, "assumptions": [steering]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    shown = run("topology", "show", str(path))
    weak = run("topology", "degrade", str(path), "--node", "n7=0.5", "--output", str(path))
    refused = run("topology", "degrade", str(path), "--node", f"{steering}=0.5")
    assert [status for status, *_ in (shown, weak, refused)] == [0, 0, 2]
    for said in (shown[1], weak[2], refused[2]):
        assert "[red]a[/red]:fire:\\x1b[2J\\x9b31m\\u202e" in said
        assert not set(steering[-8:]) & set("\x1b\x9b\u202e") & set(said)
