"""``commplan collectives``: the prices of the cost model, side by side, and nothing else."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from planner.calibrate.measured import with_curves
from planner.cost.collectives import collective_terms, explain_call, legal_methods
from planner.cost.comparison import SIZES_BYTES, compare_methods
from planner.cost.defaults import library_methods
from planner.cost.traffic import lower_bound_s
from planner.layout.groups import Group, lay_group
from planner.plan import CollectiveChoice, MeasuredCurve, Method, Plan
from planner.tables import show_plan
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from tests.unit.conftest import Run

GOLDEN = Path(__file__).parents[1] / "golden"
TWO_H100 = compile_fabric(load_topology("dgx-h100"), 2)
SIZES = np.array(SIZES_BYTES, dtype=float)


def everyone(fabric: Fabric, rows: int = 1) -> Group:
    return lay_group(fabric, np.full(rows, fabric.num_gpus), np.ones(rows, dtype=int))


# ----------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize("name", ["dgx-h100", "local-gloo", "mi300x-8x400-roce"])
def test_prices_are_the_cost_models_and_the_cheapest_is_the_least(name: str) -> None:
    fabric = compile_fabric(load_topology(name), 1)
    group = everyone(fabric, len(SIZES))
    found = compare_methods("all_reduce", fabric, everyone(fabric))
    legal = [str(method) for method in legal_methods(fabric, "executor", "all_reduce")]
    for number, at in enumerate(found.sizes):
        planned = sorted(price.seconds for price in at.prices if price.method in legal)
        assert at.cheapest_s == planned[0]
        assert at.margin == pytest.approx(planned[1] / planned[0] - 1)
        by_name = {price.method: price for price in at.prices}
        assert by_name[at.cheapest].seconds == at.cheapest_s
        if at.library_default is not None:
            default_s = by_name[at.library_default].seconds
            assert at.default_loses == pytest.approx(default_s / at.cheapest_s - 1)
        bound = lower_bound_s("all_reduce", fabric, group, SIZES)
        assert at.bound_s == bound[number]
        for price in at.prices:
            parts = price.launch_s + price.latency_s + price.transfer_s
            assert price.seconds == pytest.approx(parts)
        ring = by_name["ring"]
        assert sum(ring.sent_bytes.values()) == pytest.approx(
            2 * at.size_bytes * (fabric.num_gpus - 1) / fabric.num_gpus
        )


def test_what_others_run_is_priced_and_never_the_cheapest() -> None:
    fabric = compile_fabric(load_topology("dgx-h100"), 1)
    found = compare_methods("all_reduce", fabric, everyone(fabric))
    by_others = {way.method for way in found.ways if way.run_by == "others"}
    assert by_others == {"one_shot", "two_shot"}
    smallest = found.sizes[0]
    assert by_others <= {price.method for price in smallest.prices}
    assert min(p.seconds for p in smallest.prices) < smallest.cheapest_s  # one_shot, at 1 KiB
    assert by_others.isdisjoint(at.cheapest for at in found.sizes)
    assert by_others.isdisjoint(step.algorithm for step in found.thresholds)


def test_thresholds_are_those_of_the_sizes_between() -> None:
    found = compare_methods("all_reduce", TWO_H100, everyone(TWO_H100))
    for at in found.sizes:
        step = next(
            one
            for one in found.thresholds
            if one.up_to_bytes is None or at.size_bytes <= one.up_to_bytes
        )
        assert str(Method(step.algorithm, step.path)) == at.cheapest


# ----------------------------------------------------------------------------- explanations

METHODS = library_methods(TWO_H100, "all_reduce")


@pytest.mark.parametrize("algorithm", ["ring", "tree", "nvls_tree"])
def test_the_protocol_alone_takes_as_long_and_no_other_takes_less(algorithm: Any) -> None:
    group, method = everyone(TWO_H100, len(SIZES)), Method(algorithm)
    told = explain_call("all_reduce", method, TWO_H100, group, SIZES)
    assert TWO_H100.protocols is not None
    names = {line.name for lines in TWO_H100.protocols.lines.values() for line in lines}
    seconds = {}
    for name in names:
        lines = {
            family: tuple(line for line in lines if line.name == name)
            for family, lines in TWO_H100.protocols.lines.items()
        }
        if lines["switch" if algorithm == "nvls_tree" else "ring"]:
            alone = replace(TWO_H100, protocols=replace(TWO_H100.protocols, lines=lines))
            terms = collective_terms("all_reduce", method, alone, group, SIZES)
            seconds[name] = terms.total_s()
    (protocols,) = told.protocols
    best = np.min(list(seconds.values()), axis=0)
    assert told.terms.total_s() == pytest.approx(best)
    chosen = [seconds[name][row] for row, name in enumerate(protocols)]
    assert chosen == pytest.approx(best)
    assert len(set(protocols)) > 1


@pytest.mark.parametrize("algorithm", ["ring", "tree", "nvls_tree"])
def test_a_faster_bottleneck_helps_and_another_level_does_not(algorithm: Any) -> None:
    size, group = np.array([float(1 << 30)]), everyone(TWO_H100)
    told = explain_call("all_reduce", Method(algorithm), TWO_H100, group, size)
    bottleneck = int(told.bottleneck()[0])
    assert max(told.level_s) == pytest.approx(told.terms.transfer_s)
    for number, level in enumerate(TWO_H100.levels):
        levels = list(TWO_H100.levels)
        levels[number] = replace(level, bytes_per_s=1.01 * level.bytes_per_s)
        faster = replace(TWO_H100, levels=tuple(levels))
        transfer_s = collective_terms("all_reduce", Method(algorithm), faster, group, size)
        gain = told.terms.transfer_s / transfer_s.transfer_s
        assert gain == pytest.approx(1.01 if number == bottleneck else 1.0)


def test_calls_of_a_hierarchy_have_a_protocol_each() -> None:
    told = explain_call(
        "all_reduce", Method("hierarchical"), TWO_H100, everyone(TWO_H100), SIZES[:1]
    )
    assert len(told.protocols) == 3


# -------------------------------------------------------------------------------- the command


def test_the_table_says_what_the_document_says(run: Run) -> None:
    arguments = ["collectives", "dgx-h100", "-n", "2", "--op", "all_reduce", "--size", "1000000"]
    status, table, err = run(*arguments)
    assert (status, err) == (0, "")
    document = json.loads(run(*arguments, "--json")[1])
    assert (document["ranks"], document["num_nodes"]) == (16, 2)
    assert [(lv["name"], lv["path"]) for lv in document["levels"]] == [
        ("nvlink", "peer"),
        ("rail", "gpudirect"),
    ]
    (operation,) = document["operations"]
    (at,) = operation["sizes"]
    assert re.search(rf"^{at['cheapest']} .*\*", table, re.MULTILINE)
    assert table.count("*") == 2  # the cheapest, and what the star means
    assert re.search(rf"NCCL takes +{at['library_default']}\b", table)
    for way in operation["ways"]:
        if way["why_not"]:
            assert way["why_not"] in table


def test_all_operations_fit_on_a_line_of_140(run: Run) -> None:
    for arguments in (["dgx-h100", "-n", "1"], ["local-gloo"], ["rtx-pro-6000-x8"]):
        status, table, _ = run("collectives", *arguments, "--size", "65536")
        assert status == 0
        assert max(map(len, table.splitlines())) <= 140
        assert table.count("\nmethod ") == (8 if "gloo" in arguments[0] else 9)  # no reduce


def test_an_operation_that_nothing_runs_is_refused(run: Run) -> None:
    status, out, err = run("collectives", "local-gloo", "--op", "reduce")
    assert (status, out) == (2, "")
    assert "op=reduce: gloo on local-gloo has no way to run it" in err


def test_ranks_alone_say_how_many_nodes(run: Run) -> None:
    out = run("collectives", "dgx-h100", "--ranks", "4", "--stride", "8", "--json")[1]
    document = json.loads(out)
    assert (document["num_nodes"], document["ranks"], document["stride"]) == (4, 4, 8)
    assert [level["members"] for level in document["levels"]] == [1, 4]


def test_only_asked_for_algorithms_are_listed(run: Run) -> None:
    arguments = ["collectives", "dgx-h100", "-n", "2", "--op", "all_reduce", "--algorithm", "tree"]
    (operation,) = json.loads(run(*arguments, "--json")[1])["operations"]
    assert [way["method"] for way in operation["ways"]] == ["tree"]
    assert {p["method"] for at in operation["sizes"] for p in at["prices"]} == {"tree"}


def test_what_cannot_run_is_no_table_but_a_reason(run: Run) -> None:
    arguments = ["collectives", "dgx-h100", "-n", "2", "--algorithm", "collnet"]
    out = run(*arguments)[1]
    assert out.splitlines()[2:] == [
        "all_reduce",
        "not collnet: needs a plugin by which switches of the network reduce",
    ]
    assert out == run(*arguments, "--op", "all_reduce")[1]


def test_a_list_without_the_cheapest_names_it(run: Run) -> None:
    arguments = ["collectives", "dgx-h100", "-n", "1", "--op", "all_gather", "--size", "1G"]
    assert "\ncheapest: ring above\n" in run(*arguments, "--algorithm", "nvls")[1]
    assert "cheapest: " not in run(*arguments, "--algorithm", "ring")[1]


def test_plans_hold_the_librarys_calls_unless_the_executor_is_asked_for(run: Run) -> None:
    arguments = ["collectives", "dgx-h100", "-n", "2", "--op", "all_gather", "--size", "1M"]
    out = run(*arguments)[1]
    assert re.search(r"^ring .*us\*", out, re.MULTILINE)
    assert "not hierarchical: nccl does not have it, our executor has: --framework exec" in out
    assert "NCCL's own calls; --framework executor adds" in out
    out = run(*arguments, "--framework", "executor")[1]
    assert re.search(r"^hierarchical \[executor\] .*\*", out, re.MULTILINE)
    assert "NCCL's calls and those of our executor" in out
    gloo = json.loads(run("collectives", "local-gloo", "--op", "all_reduce", "--json")[1])
    assert gloo["operations"][0]["framework"] == "executor"


def test_kernels_of_others_are_said_to_be_theirs(run: Run) -> None:
    out = run("collectives", "gb200-nvl72", "-n", "18", "--op", "all_reduce")[1]
    assert re.search(r"^one_shot \[others\] ", out, re.MULTILINE)
    assert "one_shot, two_shot [others]: in no plan, and their own limits in size" in out


def test_sizes_are_read_as_nccl_tests_takes_them_and_told_apart(run: Run) -> None:
    sizes = ("1M", "1MiB", "1048576", "1MB", "1073741823", "1G")
    options = [word for size in sizes for word in ("--size", size)]
    arguments = ["collectives", "dgx-h100", "-n", "1", "--op", "broadcast", *options]
    (operation,) = json.loads(run(*arguments, "--json")[1])["operations"]
    found = [at["size_bytes"] for at in operation["sizes"]]
    assert found == [1 << 20] * 3 + [10**6, (1 << 30) - 1, 1 << 30]
    out = run(*arguments)[1]
    assert "1.00 MB" in out
    assert "1,073,741,823 B  1,073,741,824 B" in out


def test_a_calibrations_curve_is_what_is_shown(run: Run, tmp_path: Path) -> None:
    curve = MeasuredCurve(
        op="all_to_all",
        group_size=16,
        num_nodes=2,
        sizes_bytes=(1 << 20, 1 << 24),
        seconds=(123e-6, 456e-6),
        source="made up",
    )
    file = tmp_path / "cal.json"
    file.write_text(with_curves(None, "dgx-h100", [curve]).model_dump_json())
    sizes = ("--size", str(1 << 20), "--size", str(1 << 30))
    arguments = ("collectives", "dgx-h100", "-n", "2", "--op", "all_to_all", *sizes, "--json")
    (operation,) = json.loads(run(*arguments, "--calibration", str(file))[1])["operations"]
    small, large = (at["prices"][0] for at in operation["sizes"])
    assert (small["seconds"], small["basis"]) == (pytest.approx(123e-6), "measured")
    assert large["basis"] == "modelled"
    status, _, err = run("collectives", "dgx-a100", "--calibration", str(file))
    assert status == 2
    assert "dgx-h100" in err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--ranks", "1"], "ranks=1"),
        (["--ranks", "-8"], "ranks=-8"),
        (["--ranks", "999999"], "ranks=999999"),
        (["-n", "1", "--ranks", "8", "--stride", "2"], "stride=2"),
        (["--stride", "0"], "stride=0"),
        (["--size", "1.5"], "--size '1.5'"),
        (["--size", "-4"], "--size '-4': need whole bytes, for example 1048576, 1M"),
        (["--size", "1X"], "--size '1X'"),
        (["--size", "0"], "size=0"),
        (["--size", str(10**16)], "size=10,000"),
        (["--op", "allreduce"], "nearest: all_reduce"),
        (["--algorithm", "nvlstree"], "nearest: nvls_tree"),
        (
            ["--op", "all_gather", "--algorithm", "tree"],
            "for all_gather: copy_engine, halving_doub",
        ),
        (["--framework", "torch"], "nearest: executor"),
        (["-n", "0"], "nodes=0"),
        (["--calibration", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_by_name(run: Run, wrong: list[str], said: str) -> None:
    status, out, err = run("collectives", "dgx-h100", *wrong)
    assert (status, out) == (2, "")
    assert said in err


# ------------------------------------------------------------------------------- in a plan


def shown(width: int, **changes: Any) -> str:
    """Return the terminal's text of a golden plan whose first collective is changed."""
    plan = Plan.model_validate_json((GOLDEN / "dense.json").read_text())
    fields = {"algorithm": "tree", "predicted_s": 1e-3, "runner_up": None, "runner_up_s": None}
    first = CollectiveChoice.model_validate(
        {**plan.collectives[0].model_dump(), **fields, **changes}
    )
    out = StringIO()
    console = Console(file=out, width=width)
    show_plan(console, plan.model_copy(update={"collectives": (first,)}), "plan.json")
    return out.getvalue()


@pytest.mark.parametrize("width", [140, 100])
def test_a_plan_says_what_the_default_loses_and_what_its_time_rests_on(width: int) -> None:
    default = {"library_default": "ring", "library_default_s": 1.18e-3}
    text = shown(width, basis="not validated", **default)
    assert "library takes ring: +18 %, not validated" in text
    assert max(map(len, text.splitlines())) <= 140
    same = shown(width, library_default="tree", library_default_s=1e-3, basis="modelled")
    assert "library takes" not in same
    assert "modelled" not in same
    assert "measured" in shown(width, basis="measured")
