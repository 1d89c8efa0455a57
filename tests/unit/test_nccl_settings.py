"""NCCL, told a plan, chooses what the plan chose; what it cannot be told is named."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # public without its type

from executor.checks import unsupported_fields
from executor.errors import PlanMismatchError, UnsupportedPlanError
from executor.nccl import GroupSettings, NcclSettings, group_options, nccl_settings
from planner.methods import library_rules
from planner.plan import (
    AXES,
    Algorithm,
    Axis,
    Collective,
    CollectiveChoice,
    Method,
    Plan,
    SizeThreshold,
)
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve

NAMES: dict[Collective, str] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
}
# plugin.c, parseAlgorithm: any other word is a ring to it.
PLUGIN_WORDS = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"}
KIB = 1 << 10


def dgx_plan(**constraints: Any) -> Plan:
    """Return the planner's own for 32 H100 in four nodes."""
    request = {
        "topology": "dgx-h100",
        "nodes": 4,
        "model": "llama3-8b",
        "training": {"global_batch_size": 256, "seq_len": 8192},
        "constraints": {"pp": 1, "order": "tp-cp-ep-dp-pp", **constraints},
    }
    return make_plan(resolve(PlanRequest.model_validate(request)))


@pytest.fixture(scope="module")
def with_trees() -> Plan:
    """Return a plan whose small gradient all_reduce takes a tree."""
    plan = dgx_plan(tp=4, zero_stage=0)
    unknown = {"library_default": None}
    return choosing(plan, *(found.model_copy(update=unknown) for found in plan.collectives))


@pytest.fixture(scope="module")
def all_rings(with_trees: Plan) -> Plan:
    ring = {"algorithm": "ring", "path": "library", "thresholds": ()}
    choices = (c.model_copy(update=ring) if c.op in NAMES else c for c in with_trees.collectives)
    return choosing(dgx_like(with_trees, tp=8), *choices)


def choice(axis: Axis, op: Collective, method: Method, *steps: tuple[int, Method]) -> Any:
    """Return a choice: up to so many bytes each step's method, ``method`` above."""
    thresholds = [
        SizeThreshold(up_to_bytes=size, algorithm=step.algorithm, path=step.path)
        for size, step in [*steps, (None, method)]
    ]
    return CollectiveChoice(
        axis=axis,
        op=op,
        group_size=2,
        size_bytes=KIB,
        algorithm=method.algorithm,
        path=method.path,
        predicted_s=0,
        runner_up=None,
        runner_up_s=None,
        thresholds=tuple(thresholds),
    )


def choosing(plan: Plan, *choices: CollectiveChoice) -> Plan:
    return plan.model_copy(update={"collectives": choices})


def chosen(
    text: str, op: Collective, size: int, nodes: int, ranks: int, off: Collection[str] = ()
) -> str | None:
    """Return what the example plugin picks: the first line that matches and is not off (plugin.c).

    ``off`` is what NCCL's table marks as not to be taken for the call.
    """
    for line in text.splitlines():
        name, low, high, algorithm, _, _, num_nodes, num_ranks = line.split(",")
        if (
            name == NAMES[op]
            and int(low) <= size <= int(high)
            and int(num_nodes) in (-1, nodes)
            and int(num_ranks) in (-1, ranks)
            and algorithm not in off
        ):
            return algorithm
    return None


def hosts_of(ranks: tuple[int, ...]) -> int:
    return len({rank // 8 for rank in ranks})


def test_the_file_chooses_what_the_plan_does_for_every_group_and_size(with_trees: Plan) -> None:
    text = nccl_settings(with_trees).tuner_text()
    ends = {
        step.up_to_bytes
        for found in with_trees.collectives
        for step in found.thresholds
        if step.up_to_bytes is not None
    }
    sizes = {0, 1, 5 << 30, *(2**power for power in range(36)), *ends, *(e + 1 for e in ends)}
    seen = set()
    for found in with_trees.collectives:
        for ranks in with_trees.groups(found.axis):
            for size in sizes:
                planned = with_trees.method(found.axis, found.op, size).algorithm
                got = chosen(text, found.op, size, hosts_of(ranks), len(ranks))
                assert got == planned, (found.axis, found.op, size)
                seen.add(planned)
    assert {"ring", "tree"} < seen


def test_lines_are_what_the_plugin_reads(with_trees: Plan) -> None:
    lines = nccl_settings(with_trees).tuner_text().splitlines()
    assert lines
    assert all(len(line) < 256 and len(line.split(",")) == 8 for line in lines)
    # LL128 may corrupt data; channels -1 would mean one channel
    assert {tuple(line.split(",")[4:6]) for line in lines} == {("simple", "0")}
    assert {line.split(",")[3] for line in lines} <= PLUGIN_WORDS


def test_rings_alone_need_no_file(all_rings: Plan) -> None:
    settings = nccl_settings(all_rings)
    planned = {NAMES[found.op] for found in all_rings.collectives if found.op in NAMES}
    assert settings.tuner_rules == ()
    assert set(settings.environment) == {"NCCL_ALGO"}
    functions = [part.split(":") for part in settings.environment["NCCL_ALGO"].split(";")]
    assert dict(functions) == dict.fromkeys(planned, "ring")


def by_itself(plan: Plan, *choices: CollectiveChoice, sizes: Collection[int] = (KIB,)) -> Plan:
    """Return a plan of these choices and sizes, whose library takes nvls at a KiB."""
    taken = [c.model_copy(update={"library_default": "nvls"}) for c in choices]
    (some, *_) = (op for op in plan.ops if op.axis is not None)
    sent = [
        some.model_copy(update={"axis": c.axis, "op": c.op, "size_bytes": size})
        for c in choices
        for size in sizes
    ]
    return choosing(plan, *taken).model_copy(update={"ops": tuple(sent)})


def test_what_nccl_takes_by_itself_is_not_forced_and_nothing_else_may_be(all_rings: Plan) -> None:
    nvls = choice("tp", "all_reduce", Method("ring"), (KIB, Method("nvls")))
    settings = nccl_settings(by_itself(all_rings, nvls))
    assert (settings.environment, settings.tuner_rules) == ({}, ())
    environment = {"PATH": "/bin", "NCCL_NVLS_ENABLE": "1"}
    settings.apply(environment)
    assert environment == {"PATH": "/bin", "NCCL_NVLS_ENABLE": "1"}
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN"):
        with pytest.raises(PlanMismatchError, match=f"{name}='nvls', the plan needs it unset"):
            settings.apply({name: "nvls"})
    with pytest.raises(PlanMismatchError, match="NCCL_NVLS_ENABLE='0'"):
        settings.apply({"NCCL_NVLS_ENABLE": "0"})


def test_what_nccl_is_not_known_to_take_is_forced(all_rings: Plan) -> None:
    nvls = choice("tp", "all_reduce", Method("nvls"))
    assert nccl_settings(by_itself(all_rings, nvls)).tuner_rules == ()
    other_size = by_itself(all_rings, nvls, sizes=(KIB, 2 * KIB))
    another = by_itself(all_rings, choice("tp", "all_reduce", Method("tree")))
    one_of_two = by_itself(all_rings, nvls, choice("dp", "all_reduce", Method("tree")))
    older = choosing(all_rings, nvls)
    for plan in (other_size, another, one_of_two, older):
        assert nccl_settings(plan).tuner_rules


def test_a_plan_that_leaves_all_to_nccl_sets_nothing(all_rings: Plan) -> None:
    settings = nccl_settings(choosing(all_rings, choice("dp", "all_to_all", Method("direct"))))
    assert settings.environment == {}
    assert settings.tuner_rules == ()


@pytest.mark.parametrize(
    "method",
    [
        Method("halving_doubling", "executor"),
        Method("ring", "executor"),
        Method("hierarchical", "shm"),
        Method("copy_engine", "shm"),
        Method("halving_doubling"),
    ],
    ids=str,
)
def test_methods_that_nccl_cannot_have_are_named(all_rings: Plan, method: Method) -> None:
    plan = choosing(
        all_rings,
        choice("tp", "all_gather", Method("ring")),
        choice("dp_cp", "all_reduce", Method("ring"), (KIB, method)),
    )
    with pytest.raises(UnsupportedPlanError) as found:
        nccl_settings(plan)
    assert found.value.fields == (f"all_reduce on dp_cp by {method}",)
    assert f"plan {plan.id} is for gloo: {found.value.fields[0]}; NCCL has no" in str(found.value)


def test_of_many_such_methods_three_are_shown(all_rings: Plan) -> None:
    method = Method("ring", "executor")
    axes: tuple[Axis, ...] = ("dp", "tp", "cp", "ep", "edp")
    with pytest.raises(UnsupportedPlanError, match=r"on dp .* on tp .* on cp .* and 2 more;"):
        nccl_settings(choosing(all_rings, *(choice(axis, "all_reduce", method) for axis in axes)))


def test_a_hierarchy_is_rings_in_its_parts_and_no_line_of_its_own(all_rings: Plan) -> None:
    hierarchy = Method("hierarchical")
    plan = choosing(
        dgx_like(all_rings, tp=1),
        choice("dp_cp", "all_reduce", hierarchy, (64 * KIB, Method("tree"))),
    )
    text = nccl_settings(plan).tuner_text()
    assert chosen(text, "all_reduce", 64 * KIB, 4, 32) == "tree"
    assert chosen(text, "all_reduce", 64 * KIB + 1, 4, 32) is None
    assert chosen(text, "reduce_scatter", 1 << 30, 1, 8) == "ring"
    assert chosen(text, "all_gather", 1 << 30, 1, 8) == "ring"
    assert chosen(text, "all_reduce", 1 << 27, 4, 4) == "ring"


def dgx_like(plan: Plan, *, tp: int) -> Plan:
    layout = plan.layout.model_copy(update={"tp": tp, "dp_shard": 32 // tp, "dp_replicate": 1})
    return plan.model_copy(update={"layout": layout})


def test_three_levels_have_rings_in_the_middle_too(all_rings: Plan) -> None:
    units = tuple(tuple(range(16 * half, 16 * half + 16)) for half in range(2))
    plan = dgx_like(all_rings, tp=1)
    plan = choosing(
        plan.model_copy(update={"ranks": plan.ranks.model_copy(update={"outer_units": units})}),
        choice("dp", "all_reduce", Method("three_level"), (KIB, Method("tree"))),
    )
    text = nccl_settings(plan).tuner_text()
    assert chosen(text, "reduce_scatter", 1 << 20, 1, 8) == "ring"
    assert chosen(text, "reduce_scatter", 1 << 20, 2, 2) == "ring"
    assert chosen(text, "all_reduce", 1 << 20, 2, 2) == "ring"


def test_an_nvlink_domain_of_several_hosts_is_one_node(all_rings: Plan) -> None:
    plan = dgx_like(all_rings, tp=8)
    ranks = plan.ranks.model_copy(update={"ranks_per_node": 4, "ranks_per_unit": 8})
    plan = choosing(
        plan.model_copy(update={"ranks": ranks}),
        choice("tp", "all_reduce", Method("ring"), (KIB, Method("tree"))),
    )
    assert {rule.num_nodes for rule in nccl_settings(plan).tuner_rules} == {1}


def test_axes_that_nccl_cannot_tell_apart_are_a_conflict(all_rings: Plan) -> None:
    plan = dgx_like(all_rings, tp=8)
    plan = choosing(
        plan,
        choice("dp", "all_reduce", Method("ring"), (KIB, Method("tree"))),
        choice("edp", "all_reduce", Method("tree")),
    )
    layout = plan.layout.model_copy(update={"ep": 8})  # edp is dp: four ranks on four nodes
    with pytest.raises(UnsupportedPlanError, match="4 ranks on 4 nodes") as found:
        nccl_settings(plan.model_copy(update={"layout": layout}))
    assert len(found.value.fields) == 1
    assert "dp.all_reduce takes ring" in found.value.fields[0]
    assert "edp.all_reduce tree" in found.value.fields[0]


# tp is one node of eight ranks, dp four nodes of one rank each; with tp1 dp is all of it.
PLACES: list[tuple[Algorithm, Collective, Axis, int, str]] = [
    ("nvls", "all_reduce", "tp", 8, "nvls"),
    ("nvls", "all_gather", "tp", 8, "nvls"),
    ("nvls", "reduce_scatter", "tp", 8, "nvls"),
    ("nvls_tree", "all_reduce", "dp", 1, "nvls_tree"),
    ("collnet", "all_reduce", "dp", 1, "collnet_direct"),
    ("collnet", "all_gather", "dp", 1, "collnet_direct"),
    ("collnet", "reduce_scatter", "dp", 1, "collnet_direct"),
    ("pat", "all_gather", "dp", 8, "pat"),
    ("pat", "reduce_scatter", "dp", 8, "pat"),
    ("tree", "all_reduce", "dp", 8, "tree"),
    ("ring", "broadcast", "dp", 8, "ring"),
]
BEYOND_RINGS = [place for place in PLACES if place[0] not in ("ring", "tree")]


def above_a_kib(plan: Plan, place: tuple[Algorithm, Collective, Axis, int, str]) -> Plan:
    algorithm, op, axis, tp, _ = place
    steps = ((KIB, Method("tree" if op == "all_reduce" else "ring")),)
    return choosing(dgx_like(plan, tp=tp), choice(axis, op, Method(algorithm), *steps))


def test_all_that_the_planner_may_choose_of_nccl_has_a_place_here() -> None:
    planned = {(rule.algorithm, op) for op in NAMES for rule in library_rules("nccl", op)}
    assert planned <= {*((place[0], place[1]) for place in PLACES), *(("ring", op) for op in NAMES)}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_plugin_reads_each_algorithm_in_its_range(
    all_rings: Plan, place: tuple[Algorithm, Collective, Axis, int, str]
) -> None:
    _, op, axis, _, word = place
    assert word in PLUGIN_WORDS
    plan = above_a_kib(all_rings, place)
    (ranks, *_) = plan.groups(axis)
    group = (hosts_of(ranks), len(ranks))
    settings = nccl_settings(plan)
    if settings.tuner_rules:
        text = settings.tuner_text()
        below = "tree" if op == "all_reduce" else "ring"
        assert [chosen(text, op, size, *group) for size in (0, KIB)] == [below, below]
        assert [chosen(text, op, size, *group) for size in (KIB + 1, 5 << 30)] == [word, word]
    else:
        assert (settings.environment, word) == ({"NCCL_ALGO": f"{NAMES[op]}:ring"}, "ring")


@pytest.mark.parametrize("place", BEYOND_RINGS, ids=str)
def test_what_nccl_lacks_for_a_call_is_replaced_and_has_all_its_channels(
    all_rings: Plan, place: tuple[Algorithm, Collective, Axis, int, str]
) -> None:
    _, op, axis, _, word = place
    plan = above_a_kib(all_rings, place)
    (ranks, *_) = plan.groups(axis)
    text = nccl_settings(plan).tuner_text()

    def without(*off: str) -> str | None:
        return chosen(text, op, KIB + 1, hosts_of(ranks), len(ranks), off)

    assert without(word) == ("collnet_chain" if word == "collnet_direct" else "ring")
    assert without(word, "collnet_chain") == "ring"  # a call without a line gets one channel


@pytest.mark.parametrize(
    ("algorithm", "op", "axis", "tp", "words"),
    [
        ("nvls", "all_reduce", "dp", 8, "needs one node, got 4 ranks on 4 nodes"),
        ("nvls_tree", "all_reduce", "tp", 8, "several nodes of several ranks, got 8 ranks on 1 no"),
        ("nvls_tree", "all_reduce", "dp", 8, "several nodes of several ranks, got 4 ranks on 4"),
        ("collnet", "all_reduce", "tp", 8, "several nodes of at most 8 ranks, got 8 ranks on 1 no"),
        ("pat", "all_gather", "dp", 1, "several nodes of one rank, got 32 ranks on 4 nodes"),
        ("pat", "reduce_scatter", "tp", 8, "several nodes of one rank, got 8 ranks on 1 node;"),
        ("pat", "all_reduce", "dp", 8, "dp.all_reduce: NCCL has no pat for all_reduce"),
        ("nvls_tree", "all_gather", "dp", 1, "NCCL has no nvls_tree for all_gather"),
        ("nvls", "broadcast", "tp", 8, "NCCL has no nvls for broadcast"),
        ("tree", "reduce_scatter", "dp", 8, "NCCL has no tree for reduce_scatter"),
    ],
)
def test_groups_and_operations_that_cannot_have_it_are_named(
    all_rings: Plan, algorithm: Algorithm, op: Collective, axis: Axis, tp: int, words: str
) -> None:
    plan = choosing(dgx_like(all_rings, tp=tp), choice(axis, op, Method(algorithm)))
    with pytest.raises(UnsupportedPlanError) as found:
        nccl_settings(plan)
    assert words in str(found.value)
    assert [field.split(":")[0] for field in found.value.fields] == [f"{axis}.{op}"]


@pytest.mark.parametrize(("op", "fits"), [("all_reduce", True), ("all_gather", False)])
def test_nvls_gathers_of_more_than_32_ranks_are_refused(
    all_rings: Plan, op: Collective, fits: bool
) -> None:
    layout = all_rings.layout.model_copy(update={"tp": 64, "dp_shard": 1})
    ranks = all_rings.ranks.model_copy(update={"ranks_per_node": 4, "ranks_per_unit": 64})
    plan = all_rings.model_copy(update={"layout": layout, "ranks": ranks})
    plan = choosing(plan, choice("tp", op, Method("nvls")))
    if fits:
        assert chosen(nccl_settings(plan).tuner_text(), op, KIB, 1, 64) == "nvls"
        return
    with pytest.raises(UnsupportedPlanError, match="one node of at most 32 ranks, got 64 ranks"):
        nccl_settings(plan)


@pytest.mark.parametrize(
    ("place", "variable", "wrong", "right"),
    [
        (PLACES[0], "NCCL_NVLS_ENABLE", "0", "2"),
        (PLACES[3], "NCCL_NVLS_ENABLE", "0", "1"),
        (PLACES[4], "NCCL_COLLNET_ENABLE", "0", "1"),
        (PLACES[4], "NCCL_COLLNET_NODE_THRESHOLD", "8", "2"),
        (PLACES[7], "NCCL_PAT_ENABLE", "0", "2"),
        (PLACES[7], "NCCL_ALGO", "PAT", None),
    ],
    ids=str,
)
def test_variables_that_turn_an_algorithm_off_contradict_the_plans_that_have_it(
    all_rings: Plan,
    tmp_path: Path,
    place: tuple[Algorithm, Collective, Axis, int, str],
    variable: str,
    wrong: str,
    right: str | None,
) -> None:
    settings = nccl_settings(above_a_kib(all_rings, place))
    with pytest.raises(PlanMismatchError, match=f"{variable}='{wrong}', the plan (needs|sets)"):
        settings.apply({variable: wrong}, tmp_path / "tuner.csv")
    settings.apply({variable: right} if right else {}, tmp_path / "tuner.csv")
    of_trees = nccl_settings(above_a_kib(all_rings, PLACES[9]))
    assert variable == "NCCL_ALGO" or variable not in {**of_trees.environment, **of_trees.accepted}


def test_collnet_alone_is_turned_on(all_rings: Plan, tmp_path: Path) -> None:
    for place in PLACES:
        environment: dict[str, str] = {}
        nccl_settings(above_a_kib(all_rings, place)).apply(environment, tmp_path / "tuner.csv")
        assert (environment.get("NCCL_COLLNET_ENABLE") == "1") == (place[0] == "collnet")


def torch_with(*version: int, cuda: str | None = "12.8") -> Any:
    nccl = SimpleNamespace(version=lambda: version)
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(nccl=nccl))


def test_an_nccl_that_is_too_old_is_told_what_for(all_rings: Plan, tmp_path: Path) -> None:
    file = tmp_path / "tuner.csv"
    settings = nccl_settings(above_a_kib(all_rings, BEYOND_RINGS[-1]))
    with pytest.raises(PlanMismatchError, match=r"NCCL is 2\.22\.3 here, .* needs 2\.23 for pat;"):
        settings.apply({}, file, runtime=torch_with(2, 22, 3))
    assert not file.exists()
    settings.apply({}, file, runtime=torch_with(2, 23, 4))
    settings.apply({}, file, runtime=torch_with(2, 22, 3, cuda=None))  # RCCL, or none
    with pytest.raises(PlanMismatchError, match=r"needs 2\.24 for NCCL_ALGO by function"):
        nccl_settings(all_rings).apply({}, runtime=torch_with(2, 23, 4))


@pytest.mark.parametrize("place", BEYOND_RINGS, ids=str)
def test_gloo_has_none_of_them(
    all_rings: Plan, place: tuple[Algorithm, Collective, Axis, int, str]
) -> None:
    algorithm, op, axis, _, _ = place
    assert f"collectives: {algorithm} for {op} on {axis}" in set(
        unsupported_fields(above_a_kib(all_rings, place))
    )


def test_a_tree_that_nccl_does_not_have_is_refused(all_rings: Plan) -> None:
    plan = choosing(all_rings, choice("dp", "all_gather", Method("tree")))
    with pytest.raises(UnsupportedPlanError, match="no tree for all_gather"):
        nccl_settings(plan)


def test_copy_engines_give_their_group_the_policy(all_rings: Plan) -> None:
    method = Method("copy_engine", "nccl_zero_cta")
    plan = choosing(
        dgx_like(all_rings, tp=8), choice("dp_shard_cp", "all_gather", method, (1, Method("ring")))
    )
    settings = nccl_settings(plan)
    of_same_ranks = {axis for axis in AXES if plan.groups(axis) == plan.groups("dp")}
    assert {axis for axis in AXES if settings.groups[axis].zero_cta} == of_same_ranks
    assert settings.accepted["NCCL_CTA_POLICY"] == ("2", "ZERO")
    settings.apply({"NCCL_CTA_POLICY": "zero"})
    with pytest.raises(PlanMismatchError, match=r"NCCL_CTA_POLICY='0', the plan needs '2' or"):
        settings.apply({"NCCL_CTA_POLICY": "0"})


def test_the_environment_gets_the_variables_and_the_file(with_trees: Plan, tmp_path: Path) -> None:
    settings = nccl_settings(with_trees)
    environment = {"PATH": "/bin"}
    settings.apply(environment, tmp_path / "tuner.csv")
    assert environment == {
        "PATH": "/bin",
        "NCCL_TUNER_PLUGIN": "libnccl-tuner-example.so",
        "NCCL_TUNER_CONFIG_FILE": str(tmp_path / "tuner.csv"),
    }
    assert (tmp_path / "tuner.csv").read_text() == settings.tuner_text()
    settings.apply(environment, tmp_path / "tuner.csv")  # equal values pass
    assert [path.name for path in tmp_path.iterdir()] == ["tuner.csv"]


def test_every_variable_that_contradicts_is_named_and_none_is_set(
    with_trees: Plan, tmp_path: Path
) -> None:
    before = {"NCCL_ALGO": "Ring", "NCCL_TUNER_PLUGIN": "ofi", "NCCL_MAX_CTAS": "8"}
    environment = dict(before)
    with pytest.raises(PlanMismatchError) as found:
        nccl_settings(with_trees, max_ctas=16).apply(environment, tmp_path / "tuner.csv")
    for words in (
        "NCCL_ALGO='Ring', the plan needs it unset",
        "NCCL_TUNER_PLUGIN='ofi', the plan sets 'libnccl-tuner-example.so'",
        "NCCL_MAX_CTAS='8', the plan needs '16'",
    ):
        assert words in str(found.value)
    assert environment == before
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        "Simple",
        "ll,SIMPLE",
        "^LL128",
        "LL;allreduce:simple",
        "simple;broadcast:LL",
        "allgather:LL",
        "",
    ],
)
def test_protocols_with_simple_pass(with_trees: Plan, tmp_path: Path, value: str) -> None:
    rules = [rule for rule in nccl_settings(with_trees).tuner_rules if rule.op == "all_reduce"]
    settings = NcclSettings({}, {}, tuple(rules), {})
    environment = {"NCCL_PROTO": value}
    settings.apply(environment, tmp_path / "tuner.csv")
    assert environment["NCCL_PROTO"] == value


@pytest.mark.parametrize(
    "value", ["LL", "ll,LL128", "^simple", "^LL,Simple", "simple;allreduce:LL"]
)
def test_protocols_without_simple_contradict_the_lines(
    with_trees: Plan, tmp_path: Path, value: str
) -> None:
    with pytest.raises(
        PlanMismatchError, match=r"NCCL_PROTO='.*', the plan needs Simple for .*allreduce"
    ):
        nccl_settings(with_trees).apply({"NCCL_PROTO": value}, tmp_path / "tuner.csv")
    assert not any(tmp_path.iterdir())


def test_protocols_are_free_where_no_line_names_one(all_rings: Plan) -> None:
    nccl_settings(all_rings).apply({"NCCL_PROTO": "LL"})


@pytest.mark.parametrize(
    "value",
    [
        "Ring",
        "RING",
        "allreduce:Ring;allgather:ring;reducescatter:RING",
        "tree;allreduce:ring;allgather:ring;reducescatter:ring",
        "ring;broadcast:tree",
    ],
)
def test_another_word_for_rings_alone_is_left_as_it_is(all_rings: Plan, value: str) -> None:
    environment = {"NCCL_ALGO": value}
    nccl_settings(all_rings).apply(environment)
    assert environment == {"NCCL_ALGO": value}


@pytest.mark.parametrize(
    "value", ["Tree", "ring,tree", "^ring", "^tree", "allreduce:ring", "ring;allgather:pat", ""]
)
def test_what_is_not_rings_alone_contradicts_them(all_rings: Plan, value: str) -> None:
    with pytest.raises(PlanMismatchError, match=r"NCCL_ALGO='.*', the plan sets '.*allreduce:ring"):
        nccl_settings(all_rings).apply({"NCCL_ALGO": value})


def test_a_file_without_a_place_is_refused(with_trees: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="give tuner_file"):
        nccl_settings(with_trees).apply({})


def test_settings_come_too_late_once_groups_exist(all_rings: Plan) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PlanMismatchError, match="before init_process_group"):
            nccl_settings(all_rings).apply({})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "numbers",
    [
        {"min_ctas": 0},
        {"max_ctas": 65},
        {"min_ctas": 9, "max_ctas": 8},
        {"cga_cluster_size": 9},
        {"cga_cluster_size": -1},
    ],
)
def test_numbers_out_of_nccls_range_are_refused(all_rings: Plan, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="NCCL takes"):
        nccl_settings(all_rings, **numbers)  # type: ignore[arg-type]  # numbers are all ints


# ------------------------------------------------------------------------------ group options


class FakeNccl:
    """ProcessGroupNCCL as a CUDA build has it."""

    NCCL_CTA_POLICY_ZERO = 2
    config: ClassVar = {"min_ctas": -1, "max_ctas": -1, "cga_cluster_size": -1, "cta_policy": -1}

    @classmethod
    def Options(cls, is_high_priority_stream: bool) -> Any:  # noqa: N802  # torch's name
        return SimpleNamespace(
            is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(**cls.config)
        )


def of_tp(wanted: GroupSettings) -> NcclSettings:
    return NcclSettings({}, {}, (), {"tp": wanted, "dp": GroupSettings()})


def test_options_are_those_of_the_axis() -> None:
    settings = of_tp(GroupSettings(2, 16, 4, zero_cta=True, is_high_priority=True))
    options = group_options(settings, "tp", calls=SimpleNamespace(ProcessGroupNCCL=FakeNccl))
    assert options.is_high_priority_stream is True
    assert vars(options.config) == {
        "min_ctas": 2,
        "max_ctas": 16,
        "cga_cluster_size": 4,
        "cta_policy": 2,
    }


def test_what_is_not_asked_for_stays_nccls_own() -> None:
    settings = of_tp(GroupSettings(is_high_priority=True))
    options = group_options(settings, "tp", calls=SimpleNamespace(ProcessGroupNCCL=FakeNccl))
    assert vars(options.config) == FakeNccl.config
    assert group_options(settings, "dp") is None


def test_an_axis_that_is_none_is_told_the_axes() -> None:
    axis: Any = "dpp"
    with pytest.raises(ValueError, match=r"no axis 'dpp'; theirs are tp, dp$"):
        group_options(of_tp(GroupSettings()), axis)


def test_what_is_left_to_nccl_is_not_printed(all_rings: Plan) -> None:
    assert repr(GroupSettings()) == "GroupSettings()"
    settings = of_tp(GroupSettings(cga_cluster_size=0, zero_cta=True))
    shown = "{'tp': GroupSettings(cga_cluster_size=0, zero_cta=True)}"
    assert repr(settings) == (
        f"NcclSettings(environment={{}}, accepted={{}}, tuner_rules=(), groups={shown})"
    )
    assert repr(nccl_settings(all_rings)).endswith(
        ":ring'}, accepted={}, tuner_rules=(), groups={})"
    )


def test_a_torch_without_nccl_says_so() -> None:
    settings = of_tp(GroupSettings(min_ctas=2))
    with pytest.raises(UnsupportedPlanError, match="built without it"):
        group_options(settings, "tp", calls=SimpleNamespace())


def test_an_option_that_torch_does_not_pass_on_is_named() -> None:
    class Old(FakeNccl):
        config: ClassVar = {"min_ctas": -1}

    settings = of_tp(GroupSettings(zero_cta=True))
    with pytest.raises(UnsupportedPlanError, match="cta_policy=2") as found:
        group_options(settings, "tp", calls=SimpleNamespace(ProcessGroupNCCL=Old))
    assert found.value.fields == ("cta_policy",)


def test_priority_is_asked_for_by_axis(all_rings: Plan) -> None:
    asked: tuple[Axis, ...] = ("tp",)
    groups = nccl_settings(all_rings, high_priority=asked, min_ctas=4).groups
    assert [axis for axis in AXES if groups[axis].is_high_priority] == ["tp"]
    assert {groups[axis].min_ctas for axis in AXES} == {4}
