"""Allocations: the fabric is cut to the nodes that the scheduler gave, in the network's order."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from executor.checks import check_plan
from executor.errors import ExecutorError
from planner.calibrate.fit import fit_calibration
from planner.calibrate.runs import Measured, check_run
from planner.errors import InfeasiblePlanError, InvalidInputError
from planner.plan import Calibration, LevelFit, Plan
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import build_problem, planned_nodes, resolve
from planner.summary import launch_command, launch_notes
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.topology.placement import allocated_nodes
from tests.timed import made_up_run
from tests.unit.placed import cluster, cut, impairments, island, request

NAMES = ("login-a", "z9", "b2", "gpu07", "gpu7", "x.y_z-1")


def planned(document: TopologyDocument | str, **changes: Any) -> Plan:
    return make_plan(resolve(request(document, **changes)))


def level_figures(document: TopologyDocument, nodes: Sequence[int]) -> list[tuple[Any, ...]]:
    return [
        (lv.name, lv.kind, lv.unit_size, lv.unit_sizes, lv.bytes_per_s, lv.alpha_s, lv.path)
        for lv in compile_fabric(document, nodes).levels
    ]


# ------------------------------------------------------------------------------- names and order


def test_hosts_come_in_the_order_of_the_network_whatever_order_they_are_given_in() -> None:
    document = cluster(hosts=NAMES)
    for seed in range(5):
        given = list(NAMES)
        random.Random(seed).shuffle(given)
        plan = planned(document, allocation=given[:4])
        assert plan.ranks.hosts == tuple(sorted(given[:4], key=NAMES.index))


def test_the_same_nodes_in_another_order_are_the_same_plan_and_others_another() -> None:
    plans = [
        planned(cluster(), allocation=hosts)
        for hosts in (["n0", "n1"], ["n1", "n0"], ["n2", "n3"], ["n0", "n2"])
    ]
    assert plans[0] == plans[1]
    assert len({plan.id for plan in plans}) == 3
    assert planned(cluster(), nodes=2).id != plans[0].id
    assert plans[0].layout == plans[2].layout
    assert plans[0].prediction == plans[2].prediction
    assert plans[0].prediction.step_time_s < plans[3].prediction.step_time_s


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (("z9", "b2", "z9"), "names 'z9' twice"),
        (("z9", "n3"), "names 'n3', which topology 'small' does not have; its nodes are login-a"),
        (("gpu7", "gpu007"), "'gpu007'"),
        ((*NAMES, "more"), "has 7 nodes but topology 'small' has 6"),
        (("z9", "gpu7"), "has 'gpu7', which is down; leave it out"),
    ],
)
def test_an_allocation_that_cannot_be_is_refused(hosts: tuple[str, ...], says: str) -> None:
    document = cluster(hosts=NAMES, impairments=impairments("gpu7=down"))
    with pytest.raises(InvalidInputError, match=says) as caught:
        allocated_nodes(document, hosts)
    assert caught.value.where == "allocation"


def test_names_that_nobody_knows_are_the_first_nodes_that_are_up() -> None:
    document = cluster(impairments=impairments("n1=down"))
    nodes, hosts, assumed = allocated_nodes(document, ("b", "a", "c"))
    assert (nodes, hosts) == ((0, 2, 3), {0: "b", 2: "a", 3: "c"})
    assert assumed is not None
    assert "first nodes" in assumed
    plan = planned(document, allocation=("b", "a", "c"))
    assert plan.ranks.hosts == ("b", "a", "c")
    assert assumed in plan.assumptions
    assert plan.prediction == planned(document, nodes=3).prediction
    with pytest.raises(InvalidInputError, match="ask for 5 at most"):
        allocated_nodes(document, "abcdef")


def test_known_and_unknown_names_are_not_mixed() -> None:
    with pytest.raises(InvalidInputError, match="names 'b', which"):
        allocated_nodes(cluster(), ("n0", "b"))
    assert allocated_nodes(cluster(), ("n3", "n0"))[::2] == ((0, 3), None)


@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_nodes_and_allocation_must_agree(nodes: int) -> None:
    fields: dict[str, Any] = {
        "topology": "dgx-h100",
        "model": "example-gpt",
        "allocation": ["n0", "n1"],
        "training": {"global_batch_size": 8, "seq_len": 128},
    }
    with pytest.raises(ValueError, match=f"nodes={nodes} but allocation names 2; leave nodes out"):
        PlanRequest.model_validate({**fields, "nodes": nodes})
    assert PlanRequest.model_validate({**fields, "nodes": 2}).allocation == ("n0", "n1")
    for bad in ([], ["a b"], [""], ["-x"], [3]):
        with pytest.raises(ValueError, match="allocation"):
            PlanRequest.model_validate({**fields, "allocation": bad})


# --------------------------------------------------------------------------------- the fabric


@pytest.mark.parametrize("leaves", [(1, 3, 2), (2, 2, 2), (4, 2), (5, 1), (6,)])
@pytest.mark.parametrize(
    "nodes", [(0, 1), (1, 2), (0, 3, 5), (1, 2, 3, 4), (0, 2, 4, 5), (2, 3), (5,), (0, 1, 3, 4)]
)
def test_levels_are_those_of_a_document_of_these_nodes_alone(
    leaves: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"islands": [island(1, 2)]},
        {"impairments": impairments("n2/nic0=0.5", "n5/gpu1=0.7")},
    )
    for more in changes:
        document = cluster(leaves=leaves, **more)
        alone = cut(document, nodes)
        assert level_figures(document, nodes) == level_figures(alone, range(len(nodes)))
        kept, made = compile_fabric(document, nodes), compile_fabric(alone)
        assert kept.slowest_share == compile_fabric(alone, len(nodes)).slowest_share
        assert kept.num_gpus == 2 * len(nodes)
        assert made.gpus_per_node == kept.gpus_per_node


def test_an_allocation_of_trays_has_its_units_in_the_plan() -> None:
    """Two trays of one NVL72 and one of the next: 8 and 4 ranks."""
    plan = planned(
        "gb200-nvl72",
        allocation=["n3", "n19", "n7"],
        model="llama3-8b",
        training={"global_batch_size": 48, "seq_len": 4096},
    )
    assert plan.ranks.units == (tuple(range(8)), tuple(range(8, 12)))
    assert plan.ranks.hosts == ("n3", "n7", "n19")
    assert plan.waiting is not None
    assert plan.waiting.hosts == ("n0", "n1", "n2")
    even = planned(
        "gb200-nvl72",
        allocation=["n3", "n19"],
        model="llama3-8b",
        training={"global_batch_size": 48, "seq_len": 4096},
    )
    assert even.ranks.units is None
    assert even.ranks.ranks_per_unit == 4


def test_the_executor_takes_hosts_and_uneven_units() -> None:
    """Boards of one pair and one without NVLink: units of 2, 1 and 1 ranks."""
    single = island(1, 1)
    single["node"] = {**single["node"], "links": single["node"]["links"][1:]}
    document = cluster(2, islands=[single])
    data = document.model_dump(mode="json")
    data["library"] = "gloo"
    document = TopologyDocument.model_validate(data)
    training = {"global_batch_size": 8, "seq_len": 128, "precision": "bf16"}
    plan = planned(
        document,
        allocation=["n0", "n1"],
        framework="executor",
        training=training,
        constraints={"dp": 4, "zero_stage": 0},
    )
    assert plan.ranks.hosts == ("n0", "n1")
    placed = plan.ranks.units or ()
    assert sorted(rank for unit in placed for rank in unit) == list(range(4))
    try:
        check_plan(plan, world_size=4)
    except ExecutorError as error:
        pytest.fail(str(error))


# ------------------------------------------------------------------------------- how it is run


def test_the_launch_line_numbers_the_nodes() -> None:
    plan = planned(cluster(hosts=NAMES), allocation=["gpu7", "z9"], framework="executor")
    line = launch_command(plan, "plan.json")
    assert "--nnodes 2 --node-rank $NODE_RANK --master-addr z9 --nproc-per-node 2 " in line
    assert "rdzv" not in line
    [note] = launch_notes(plan)
    assert "$NODE_RANK is its place, from 0, in z9, gpu7 (ranks.hosts" in note


def test_without_names_any_order_will_do() -> None:
    plan = planned(cluster(), nodes=2, framework="executor")
    assert plan.ranks.hosts is None
    assert "--rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500" in launch_command(plan, "p")
    assert "$HEAD_NODE" in launch_notes(plan)[0]


def test_one_node_starts_alone() -> None:
    plan = planned(cluster(hosts=NAMES), allocation=["b2"], framework="executor")
    assert plan.ranks.hosts == ("b2",)
    assert "torchrun --standalone --nproc-per-node 2" in launch_command(plan, "p")
    assert launch_notes(plan) == []


def test_a_plan_names_its_nodes_wherever_it_matters_which_they_are() -> None:
    assert planned(cluster(impairments=impairments("n0=down")), nodes=2).ranks.hosts == ("n1", "n2")
    assert planned(cluster(islands=[island(4, 2)]), nodes=2).ranks.hosts == ("n0", "n1")
    assert planned(cluster(hosts=NAMES), nodes=2).ranks.hosts == NAMES[:2]


# ------------------------------------------------------------------- suggestions, calibration


def test_a_suggestion_for_an_allocation_can_be_sent_as_it_is() -> None:
    small: dict[str, Any] = {
        "topology": "dgx-h100",
        "allocation": ["n40"],
        "model": "llama3-405b",
        "training": {"global_batch_size": 64, "seq_len": 4096},
    }
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(resolve(PlanRequest.model_validate(small)))
    change = caught.value.suggestion
    assert change is not None
    assert change["allocation"] is None
    plan = make_plan(resolve(PlanRequest.model_validate({**small, **change})))
    assert plan.layout.world_size == 8 * int(str(change["nodes"]))


def test_a_constraint_is_dropped_before_the_allocation_is() -> None:
    fields = {
        "topology": "dgx-h100",
        "allocation": ["n0", "n40", "n41", "n42"],
        "model": "llama3-70b",
        "training": {"global_batch_size": 64, "seq_len": 8192},
        "constraints": {"tp": 1, "pp": 1, "zero_stage": 1},
    }
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(resolve(PlanRequest.model_validate(fields)))
    change = caught.value.suggestion
    assert change is not None
    assert "allocation" not in change
    plan = make_plan(resolve(PlanRequest.model_validate({**fields, **change})))
    assert plan.ranks.hosts == ("n0", "n40", "n41", "n42")


def test_a_calibration_replaces_the_levels_of_an_allocation() -> None:
    document = cluster()
    resolved = resolve(request(document, allocation=["n0", "n2"]))
    before = make_plan(resolved)
    fit = LevelFit(level="spine", alpha_s=1e-6, bytes_per_s=1e8, num_points=4, residual=0)
    calibration = Calibration(
        id="c",
        topology="small",
        levels=(fit,),
        compute_scale=1,
        optimizer_scale=1,
        host_overhead_s=0,
        residual=0,
        run_hashes=(),
    )
    after = make_plan(resolved, calibration)
    assert after.id != before.id
    assert after.waiting is not None
    assert before.waiting is not None
    assert after.prediction.step_time_s > before.prediction.step_time_s
    assert after.waiting.step_time_s == pytest.approx(before.waiting.step_time_s)
    packed = resolve(request(document, allocation=["n0", "n1"]))
    assert make_plan(packed, calibration).prediction.step_time_s == pytest.approx(
        before.waiting.step_time_s
    )


def test_a_run_of_a_cut_plan_calibrates_the_nodes_it_ran_on() -> None:
    """The weak node was left out: the run is of the others, and has their pipeline."""
    document = cluster(4, impairments=impairments("n1=0.5"))
    asked = request(
        document,
        allocation=["n0", "n1", "n2", "n3"],
        framework="executor",
        constraints={"dp": 6, "tp": 1, "pp": 1, "zero_stage": 0},
    )
    resolved = resolve(asked)
    plan = make_plan(resolved)
    assert plan.ranks.hosts == ("n0", "n2", "n3")
    assert planned_nodes(resolved, plan) == (0, 2, 3)
    problem = build_problem(resolved, nodes=planned_nodes(resolved, plan))
    assert problem.fabric.num_gpus == plan.layout.world_size == 6
    measured = Measured(problem, plan, made_up_run(plan))
    check_run(measured)
    assert {fit.level for fit in fit_calibration([measured]).levels} <= {"nvlink", "leaf", "spine"}


def test_a_plan_of_other_hosts_is_refused() -> None:
    plan = planned(cluster(hosts=NAMES), allocation=["z9"])
    with pytest.raises(InvalidInputError, match="runs on 'z9', which topology 'small' does not"):
        planned_nodes(resolve(request(cluster(), nodes=1)), plan)
    assert planned_nodes(resolve(request(cluster(), nodes=2)), planned(cluster(), nodes=2)) == (
        0,
        1,
    )


def test_half_of_a_large_cluster_is_planned_node_by_node() -> None:
    hosts = [f"n{node}" for node in range(1, 4096, 2)]
    document = load_topology("dgx-h100")
    nodes, names, assumed = allocated_nodes(document, hosts)
    assert nodes == tuple(range(1, 4096, 2))
    assert (len(names), assumed) == (2048, None)
    sizes = [(lv.name, lv.unit_size) for lv in compile_fabric(document, nodes).levels]
    assert sizes == [("nvlink", 8), ("rail", 128), ("spine", 1024), ("core", 16384)]
