"""Bounds against cuts of graphs and against what methods take; what a plan says of its bytes."""

from dataclasses import replace
from functools import cache
from typing import get_args

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.calibrate.apply import fitted_fabric
from planner.cost.algorithms import is_possible
from planner.cost.collectives import collective_terms, legal_methods
from planner.cost.traffic import lower_bound_s
from planner.layout.groups import Group, lay_group
from planner.plan import Collective, LevelFit, Method
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve
from planner.topology.bounds import (
    Bound,
    all_gather_bound,
    all_reduce_bound,
    all_to_all_bound,
    broadcast_bound,
    links_of_kinds,
    reduce_scatter_bound,
)
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.topology.fabric import Fabric
from planner.topology.graph import build_graph
from tests.unit.placed import cluster

SIZE = 6720.0
SIZES = np.array([SIZE])
OPS: tuple[Collective, ...] = get_args(Collective)


def one(degree: int, stride: int, on: Fabric) -> Group:
    return lay_group(on, np.array([degree]), np.array([stride]))


# -------------------------------------------------------------- bounds: nothing comes below


@cache
def bundled(name: str) -> TopologyDocument:
    return load_topology(name)


@cache
def compiled(name: str, nodes: int) -> Fabric:
    return compile_fabric(bundled(name), nodes)


@st.composite
def groups_on_fabrics(draw: st.DrawFn) -> tuple[Fabric, Group]:
    name = draw(st.sampled_from(topology_names()))
    most = bundled(name).max_nodes
    nodes = draw(st.sampled_from([n for n in (1, 2, 3, 7, 20, 70) if n <= most]))
    on = compiled(name, nodes)
    degree = draw(st.integers(1, on.num_gpus))
    stride = draw(st.integers(1, on.num_gpus // degree))
    return on, one(degree, stride, on)


def at_nominal(on: Fabric) -> Fabric:
    return replace(on, levels=tuple(replace(level, measured=True) for level in on.levels))


@settings(max_examples=200, deadline=None)
@given(groups_on_fabrics(), st.sampled_from(OPS), st.floats(1, 1e10))
def test_no_algorithm_is_faster_than_the_bound(
    lie: tuple[Fabric, Group], op: Collective, size: float
) -> None:
    on, group = lie
    sizes = np.array([size])
    bound = lower_bound_s(op, on, group, sizes)
    assert (bound[0] > 0) == (group.degree[0] > 1)
    for method in legal_methods(on, "executor", op):
        if is_possible(op, method, group)[0]:
            terms = collective_terms(op, method, at_nominal(on), group, sizes)
            assert bound[0] <= terms.transfer_s[0] * (1 + 1e-12), method


def test_a_hierarchy_inside_a_host_has_its_links_once() -> None:
    """What crosses between pairs of GPUs leaves by the slots that the pairs use."""
    on = compiled("rtx-pro-6000-x8", 1)
    group, sizes = one(4, 1, on), np.array([2.0**30])
    bound = lower_bound_s("all_reduce", on, group, sizes)
    terms = collective_terms("all_reduce", Method("hierarchical"), at_nominal(on), group, sizes)
    assert bound[0] <= terms.transfer_s[0]


@settings(max_examples=100, deadline=None)
@given(groups_on_fabrics(), st.sampled_from(OPS), st.data())
def test_nor_where_levels_are_measured(
    lie: tuple[Fabric, Group], op: Collective, data: st.DataObject
) -> None:
    on, group = lie
    fits = [
        LevelFit(
            level=level.name,
            alpha_s=0,
            bytes_per_s=level.bytes_per_s * data.draw(st.floats(0.01, 2)),
            num_points=1,
            residual=0,
        )
        for level in on.levels
    ]
    on = replace(fitted_fabric(on, fits, source="test"), curves=())  # those are of other links
    bound = lower_bound_s(op, on, group, np.array([1e6]))
    for method in legal_methods(on, "megatron", op):
        if not is_possible(op, method, group)[0]:
            continue
        terms = collective_terms(op, method, on, group, np.array([1e6]))
        assert bound[0] <= terms.total_s()[0]


@settings(max_examples=60, deadline=None)
@given(groups_on_fabrics(), st.sampled_from(OPS))
def test_twice_the_links_are_half_the_bound(lie: tuple[Fabric, Group], op: Collective) -> None:
    on, group = lie
    fast = replace(
        on, levels=tuple(replace(lv, bytes_per_s=2 * lv.bytes_per_s) for lv in on.levels)
    )
    slow, quick = (lower_bound_s(op, f, group, np.array([1e6])) for f in (on, fast))
    assert quick[0] == pytest.approx(slow[0] / 2)


# --------------------------------------------------------------------- the graph's own bounds


def gpu_graph(document: TopologyDocument, nodes: int) -> tuple["nx.Graph[str]", list[str]]:
    """Return the links that one communicator uses together, every GPU with its own NIC's rate."""
    graph = build_graph(document, nodes)
    parts = graph.nodes.items()
    gpus = [name for name, part in parts if part["kind"] == "gpu"]
    nics = [name for name, part in parts if part["kind"] == "nic"]
    links = links_of_kinds(graph, ("nvlink", "xgmi", "infiniband"))
    links = nx.Graph(links)
    if nodes == 1:
        links.remove_nodes_from(nics)
        return links, gpus
    return nx.relabel_nodes(links, dict(zip(nics, gpus, strict=True))), gpus


def spine_2_to_1() -> TopologyDocument:
    """Two nodes of two GPUs to a leaf, half of what leaves it up to the spine."""
    data = cluster(4, oversubscription=2.0).model_dump(mode="json")
    for link in data["node"]["links"]:
        link["bandwidth_bytes_per_s"] = 450e9 if link["kind"] == "nvlink" else 64e9
    return TopologyDocument.model_validate(data)


DOCUMENTS = {
    "dgx-h100": load_topology("dgx-h100"),
    "mi300x": load_topology("mi300x-8x400-ib"),
    "v100": load_topology("dgx1-v100"),
    "2:1 spine": spine_2_to_1(),
}


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("dgx-h100", 1),
        ("dgx-h100", 2),
        ("dgx-h100", 3),
        ("mi300x", 1),
        ("mi300x", 2),
        ("v100", 1),
        ("2:1 spine", 1),
        ("2:1 spine", 2),
        ("2:1 spine", 4),
    ],
)
def test_bounds_on_levels_are_those_of_the_graph(name: str, nodes: int) -> None:
    document = DOCUMENTS[name]
    on = compile_fabric(document, nodes)
    graph, gpus = gpu_graph(document, nodes)
    group = one(len(gpus), 1, on)
    sizes = [level.unit_size for level in on.levels[:-1]]
    units = [gpus[i : i + size] for size in sizes for i in range(0, len(gpus), size)]
    of_graph: dict[Collective, Bound] = {
        "all_gather": all_gather_bound(graph, gpus),
        "reduce_scatter": reduce_scatter_bound(graph, gpus),
        "all_reduce": all_reduce_bound(graph, gpus),
        "all_to_all": all_to_all_bound(graph, gpus, units),
        "broadcast": broadcast_bound(graph, gpus),
        "reduce": broadcast_bound(graph, gpus),
    }
    for op, bound in of_graph.items():
        found = lower_bound_s(op, on, group, np.array([1e9]))
        assert found[0] == pytest.approx(1e9 * bound.seconds_per_byte), op
    for op in ("gather", "scatter"):
        seconds = lower_bound_s(op, on, group, np.array([1e9]))[0]
        assert gathered(graph, gpus, 1e9, seconds) == pytest.approx(1e9)
        assert gathered(graph, gpus, 1e9, 0.99 * seconds) < 0.999e9


def gathered(graph: "nx.Graph[str]", gpus: list[str], size: float, seconds: float) -> float:
    """Return the bytes of S that the first GPU can have in that time: its own, and a flow."""
    links: nx.DiGraph[str] = nx.DiGraph()
    for a, b, link in graph.edges(data=True):
        links.add_edge(a, b, capacity=link["bandwidth_bytes_per_s"] * seconds)
        links.add_edge(b, a, capacity=link["bandwidth_bytes_per_s"] * seconds)
    part = size / len(gpus)
    links.add_edges_from((("all", gpu) for gpu in gpus[1:]), capacity=part)
    return part + float(nx.maximum_flow_value(links, "all", gpus[0]))


@pytest.mark.parametrize("op", OPS)
def test_a_group_inside_a_node_is_bound_by_its_own_links(op: Collective) -> None:
    """NICs help only those who reach beyond the node."""
    bounds = [
        lower_bound_s(
            op, compiled("dgx-h100", nodes), one(8, 1, compiled("dgx-h100", nodes)), SIZES
        )
        for nodes in (1, 2)
    ]
    assert bounds[0] == bounds[1]


def test_a_message_has_the_link_between_its_two_ends() -> None:
    """Of 448 GB/s of an MI300X one link of seven leads to the neighbour."""
    on = compiled("mi300x-8x400-ib", 1)
    bound = lower_bound_s("send_recv", on, one(8, 1, on), SIZES)
    assert bound[0] == pytest.approx(SIZE / (448e9 / 7))


# ------------------------------------------------------------------------------ what plans say


def test_a_plan_says_which_axis_crosses_which_level() -> None:
    held = {"tp": 8, "pp": 2, "cp": 1, "virtual_stages": 1}
    request = {
        "topology": "dgx-h100",
        "nodes": 16,
        "model": "llama3-70b",
        "training": {"global_batch_size": 256, "seq_len": 4096},
        "constraints": held,
    }
    plan = make_plan(resolve(PlanRequest.model_validate(request)))
    levels: dict[str, set[str]] = {}
    for crossing in plan.crossings:
        levels.setdefault(crossing.axis, set()).add(crossing.level)
    assert levels["tp"] == {"nvlink"}
    assert levels["pp"] == {"rail"}
    assert all(names == {"rail"} for axis, names in levels.items() if axis.startswith("dp"))
    [sent] = [c.bytes_per_step for c in plan.crossings if c.axis == "pp"]
    ops = [op for op in plan.ops if op.axis == "pp"]
    assert sent == pytest.approx(sum(op.size_bytes * op.repeats for op in ops), rel=1e-6)
    sizes = [crossing.bytes_per_step for crossing in plan.crossings]
    assert sizes == sorted(sizes, reverse=True)
    for choice in plan.collectives:
        assert choice.bound_s is not None
        assert 0 < choice.bound_s < choice.predicted_s


def test_the_ring_of_keys_and_values_crosses_nodes_twice() -> None:
    """Of 16 hops over two nodes 2 leave one: from the 8th to the 9th and back to the first."""
    request = {
        "topology": "dgx-h100",
        "nodes": 2,
        "model": "llama3-8b",
        "training": {"global_batch_size": 8, "seq_len": 65536},
        "constraints": {"cp": 16, "context_exchange": "ring"},
    }
    plan = make_plan(resolve(PlanRequest.model_validate(request)))
    sent = {c.level: c.bytes_per_step for c in plan.crossings if c.axis == "cp"}
    assert sent["nvlink"] / sent["rail"] == pytest.approx(14 / 2)
