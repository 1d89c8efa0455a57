"""What runs where, and the reason of what does not: one answer, on the page too."""

from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest

from benchmarks.collective_thresholds import END, START, lines_of
from planner.cost.algorithms import NEEDED_OF_GROUP, is_possible
from planner.cost.collectives import legal_methods
from planner.cost.defaults import known_methods, library_default, library_methods, why_not
from planner.layout.groups import lay_group
from planner.methods import OTHER_METHODS
from planner.plan import Algorithm, Collective, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from tests.unit.collectives_page import DOCS, with_tables

FABRICS = {
    name: compile_fabric(load_topology(name), nodes)
    for name, nodes in (
        *(("dgx-h100", 2), ("dgx-a100", 1), ("mi300x-8x400-roce", 2)),
        *(("rtx-pro-6000-x8", 1), ("local-gloo", 1)),
    )
}
FABRICS["dgx-h100 with SHARP"] = replace(FABRICS["dgx-h100"], sharp=True)


def others(fabric: Fabric, op: Collective) -> set[Method]:
    return {method for method, _ in OTHER_METHODS.get(fabric.library, {}).get(op, ())}


GROUPS = [(16, 1), (8, 1), (4, 2), (4, 1), (3, 1), (2, 8)]


@pytest.mark.parametrize("fabric", FABRICS.values(), ids=FABRICS)
def test_what_has_no_reason_is_what_can_be_priced(fabric: Fabric) -> None:
    fitting = [(n, stride) for n, stride in GROUPS if n * stride <= fabric.num_gpus]
    for (ranks, stride), op in product(fitting, get_args(Collective)):
        group = lay_group(fabric, np.array([ranks]), np.array([stride]))
        known = known_methods(fabric, op)
        running = {method for method in known if not why_not(fabric, op, method, group)}
        priced = set(legal_methods(fabric, "executor", op)) | others(fabric, op)
        assert priced <= set(known)
        assert running == {method for method in priced if is_possible(op, method, group)[0]}


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("dgx-a100", Method("nvls"), "needs switches at the innermost level that reduce"),
        ("dgx-a100", Method("hierarchical"), "needs equally many ranks, two or more"),
        ("dgx-h100", Method("nvls"), "needs all ranks in one unit of the innermost level"),
        ("dgx-h100", Method("collnet"), "needs a plugin by which switches of the network"),
        ("dgx-h100", Method("nvls_tree"), ""),
        ("dgx-h100 with SHARP", Method("collnet"), ""),
        ("dgx-h100", Method("ring", "executor"), "nccl does not have it"),
        ("mi300x-8x400-roce", Method("nvls"), "rccl does not have it"),
        ("local-gloo", Method("nvls"), "gloo does not have it"),
        ("local-gloo", Method("ring", "executor"), ""),
    ],
    ids=str,
)
def test_reasons(name: str, method: Method, reason: str) -> None:
    fabric = FABRICS[name]
    group = lay_group(fabric, np.array([fabric.num_gpus]), np.array([1]))
    found = why_not(fabric, "all_reduce", method, group)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


def test_pat_is_for_one_rank_on_each_node() -> None:
    fabric = FABRICS["dgx-h100"]
    for stride, reason in ((8, ""), (1, "needs one rank in each of several innermost units")):
        group = lay_group(fabric, np.array([2]), np.array([stride]))
        assert why_not(fabric, "all_gather", Method("pat"), group) == reason


def test_every_algorithm_that_some_group_cannot_run_says_what_it_needs() -> None:
    fabric = compile_fabric(load_topology("dgx-h100"), 64)
    groups = lay_group(fabric, np.array([3, 8, 16, 512]), np.array([1, 8, 1, 1]))
    refused = {
        algorithm
        for algorithm in get_args(Algorithm)
        if not is_possible("all_reduce", Method(algorithm), groups).all()
    }
    assert refused == set(NEEDED_OF_GROUP)


@pytest.mark.parametrize("fabric", FABRICS.values(), ids=FABRICS)
def test_the_library_takes_what_it_has(fabric: Fabric) -> None:
    group = lay_group(fabric, np.array([2, fabric.num_gpus]), np.array([1, 1]))
    for op in get_args(Collective):
        if methods := library_methods(fabric, op):
            taken = library_default(op, fabric, group, np.array([1e3, 1e9]))
            assert all(not why_not(fabric, op, methods[number]) for number in taken)


# --------------------------------------------------------------------------------- the page


def test_tables_on_the_page_follow_from_the_code() -> None:
    page = DOCS.read_text("utf-8")
    assert with_tables(page) == page, "run python -m tests.unit.collectives_page"


def test_thresholds_on_the_page_are_todays() -> None:
    table = DOCS.read_text("utf-8").partition(START)[2].partition(END)[0].splitlines()
    name = "rtx-pro-6000-x8"
    shown = [line for line in table if line.startswith(f"| {name} ")]
    remedy = "run python -m benchmarks.collective_thresholds --write docs/collectives.md"
    assert shown == list(lines_of(name)), remedy
