"""Levels follow from the node and the tiers; closed forms of machines everybody knows."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument, parse_topology
from planner.topology.fabric import Level
from planner.topology.graph import build_graph


def shape(levels: tuple[Level, ...]) -> list[tuple[str, int, float]]:
    return [(level.name, level.unit_size, level.bytes_per_s) for level in levels]


@pytest.mark.parametrize(
    ("name", "num_nodes", "expected"),
    [
        ("dgx-h100", 1, [("nvlink", 8, 450e9)]),
        ("dgx-h100", 16, [("nvlink", 8, 450e9), ("rail", 256, 50e9)]),
        (
            "dgx-h100",
            2048,
            [
                ("nvlink", 8, 450e9),
                ("rail", 256, 50e9),
                ("spine", 2048, 50e9),
                ("core", 16384, 50e9),
            ],
        ),
        ("dgx-a100", 4, [("nvlink", 8, 300e9), ("rail", 160, 25e9)]),
        ("gb200-nvl72", 1, [("nvlink", 72, 900e9)]),
        ("gb200-nvl72", 18, [("nvlink", 72, 900e9)]),
        ("gb200-nvl72", 36, [("nvlink", 72, 900e9), ("rail", 576, 50e9)]),
        ("local-gloo", 1, [("loopback", 4, 1.3e9)]),
    ],
)
def test_bundled_clusters_have_the_rates_of_their_specifications(
    name: str, num_nodes: int, expected: list[tuple[str, int, float]]
) -> None:
    assert shape(compile_fabric(load_topology(name), num_nodes).levels) == expected


def test_latency_grows_with_every_level() -> None:
    for name in topology_names():
        document = load_topology(name)
        alphas = [level.alpha_s for level in compile_fabric(document, document.max_nodes).levels]
        assert alphas == sorted(set(alphas))
        assert alphas[0] > 0


def test_a_hop_between_dgx_h100_nodes_is_what_ndr_measurements_imply() -> None:
    rail = compile_fabric(load_topology("dgx-h100"), 2).levels[1]
    assert rail.alpha_s == pytest.approx(7.6e-6)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["dgx-a100", "dgx-h100", "gb200-nvl72"]), st.integers(1, 500))
def test_twice_the_nodes_are_twice_the_gpus_with_the_same_figures(name: str, nodes: int) -> None:
    one, two = (compile_fabric(load_topology(name), n) for n in (nodes, 2 * nodes))
    assert two.num_gpus == 2 * one.num_gpus
    assert (two.gpus_per_node, two.device) == (one.gpus_per_node, one.device)
    for small, large in zip(one.levels, two.levels, strict=False):
        assert (small.bytes_per_s, small.alpha_s) == (large.bytes_per_s, large.alpha_s)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(topology_names()), st.data())
def test_units_nest_and_the_last_holds_all(name: str, data: st.DataObject) -> None:
    document = load_topology(name)
    nodes = data.draw(st.integers(1, document.max_nodes))
    fabric = compile_fabric(document, nodes)
    sizes = [level.unit_size for level in fabric.levels]
    assert sizes[-1] >= fabric.num_gpus
    assert all(size < fabric.num_gpus for size in sizes[:-1])
    assert all(large % small == 0 for small, large in pairwise(sizes))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(topology_names()), st.randoms(use_true_random=False))
def test_renaming_components_changes_nothing(name: str, random: Any) -> None:
    document = load_topology(name)
    data = json.loads(document.model_dump_json())
    ids = [component["id"] for component in data["node"]["components"]]
    letters = [f"x{letter}x" for letter in "abcdefghij"[: len(ids)]]
    random.shuffle(letters)
    ids_renamed = dict(zip(ids, letters, strict=True))
    renamed = {
        name: ids_renamed[component.id] + name.removeprefix(component.id)
        for component in document.node.components
        for name in (component.id, *component.names())
    }
    for component in data["node"]["components"]:
        component["id"] = renamed[component["id"]]
    for link in data["node"]["links"]:
        link["between"] = [renamed[end] for end in link["between"]]
        random.shuffle(link["between"])
    random.shuffle(data["node"]["links"])
    random.shuffle(data["node"]["components"])
    before, after = (compile_fabric(d) for d in (document, parse_topology(data)))
    assert shape(after.levels) == shape(before.levels)
    assert [a.alpha_s for a in after.levels] == pytest.approx([b.alpha_s for b in before.levels])


@pytest.mark.parametrize("bad", [0, -1, 4097, 1.5, "4", True])
def test_a_number_of_nodes_that_cannot_be_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"nodes=.*must be a whole number from 1 to 4096"):
        compile_fabric(load_topology("dgx-h100"), bad)


# ------------------------------------------------------------- machines that are not bundled

SOURCE = "made up"


def link(a: str, b: str, kind: str, bandwidth: float, **more: Any) -> dict[str, Any]:
    figures = {"bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-6, "source": SOURCE}
    return {"between": [a, b], "kind": kind, **figures, **more}


def machine(
    components: list[dict[str, Any]], links: list[dict[str, Any]], **more: Any
) -> TopologyDocument:
    node = {"components": components, "links": links, "source": SOURCE}
    node.update(more.pop("node", {}))
    head = {"name": "machine", "library": "nccl", "device": "a100-sxm-80gb", "node": node}
    return parse_topology({**head, **more})


def network(nic_bandwidth: float, *oversubscriptions: float) -> dict[str, Any]:
    tiers = [
        {
            "name": f"tier{i}",
            "num_nodes": 2 ** (i + 1) if i + 1 < len(oversubscriptions) else None,
            "oversubscription": oversubscription,
            "latency_s": 1e-7,
            "source": SOURCE,
        }
        for i, oversubscription in enumerate(oversubscriptions)
    ]
    nic = {"nic_bandwidth_bytes_per_s": nic_bandwidth, "nic_latency_s": 1e-6, "source": SOURCE}
    return {"kind": "infiniband", "layout": "tree", "tiers": tiers, **nic}


def gpus(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"id": "gpu", "kind": "gpu", "count": count},
        {"id": "pcie", "kind": "pcie_switch", "count": 2},
        {"id": "cpu", "kind": "cpu", "count": 2},
        *([{"id": "nic", "kind": "nic", "count": more["nics"]}] if "nics" in more else []),
    ]


PCIE = [
    link("gpu", "pcie", "pcie", 24e9),
    link("pcie", "cpu", "pcie", 24e9),
    link("cpu", "cpu", "smp", 10e9, pattern="all"),
]


def test_nvlink_and_pcie_are_never_added() -> None:
    document = machine(gpus(2), [*PCIE, link("gpu", "gpu", "nvlink", 100e9, pattern="all")])
    assert shape(compile_fabric(document).levels) == [("nvlink", 2, 100e9)]


def test_pcie_without_nvlink_is_bound_by_the_link_between_the_sockets() -> None:
    document = machine(gpus(8), PCIE)
    assert shape(compile_fabric(document).levels) == [
        ("pcie", 4, 24e9),
        ("smp", 8, 10e9 / 4),
    ]


def test_pairs_of_nvlink_are_joined_by_pcie_and_share_its_trunk() -> None:
    bridges = [link(f"gpu{i}", f"gpu{i + 1}", "nvlink", 50e9, count=4) for i in (0, 2, 4, 6)]
    document = machine(gpus(8), [*PCIE, *bridges])
    expected = [("nvlink", 2, 200e9), ("pcie", 4, 24e9), ("smp", 8, 10e9 / 4)]
    assert shape(compile_fabric(document).levels) == expected


def test_a_cube_mesh_of_v100_has_six_links_per_gpu() -> None:
    # DGX-1V: double links 0-3, 0-4, 1-2, 1-5, 2-3, 4-7, 5-6, 6-7 and 16 single ones in all.
    double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    links = [link(f"gpu{a}", f"gpu{b}", "nvlink", 25e9, count=2) for a, b in double]
    links += [link(f"gpu{a}", f"gpu{b}", "nvlink", 25e9) for a, b in single]
    document = machine(gpus(8), [*PCIE, *links])
    assert shape(compile_fabric(document).levels) == [("nvlink", 8, 150e9)]


def test_a_weak_gpu_sets_the_rate_of_all() -> None:
    parts: list[dict[str, Any]] = [*gpus(3), {"id": "nvswitch", "kind": "nvswitch"}]
    links = [link(f"gpu{i}", "nvswitch", "nvlink", rate) for i, rate in enumerate((9e9, 9e9, 4e9))]
    hub = [link("gpu", "cpu0", "pcie", 1e9)]
    assert compile_fabric(machine(parts, [*links, *hub])).levels[0].bytes_per_s == 4e9


def test_groups_that_are_not_consecutive_are_refused() -> None:
    bridges = [link("gpu0", "gpu2", "nvlink", 50e9), link("gpu1", "gpu3", "nvlink", 50e9)]
    document = machine(gpus(4), [*PCIE, *bridges])
    with pytest.raises(
        InvalidInputError, match=r"as gpu0 gpu2 \| gpu1 gpu3; groups must be consecutive"
    ):
        compile_fabric(document)


def test_islands_without_a_path_over_the_host_are_refused() -> None:
    parts: list[dict[str, Any]] = [
        {"id": "gpu", "kind": "gpu", "count": 4},
        {"id": "cpu", "kind": "cpu"},
    ]
    links = [
        link("gpu0", "gpu1", "nvlink", 50e9),
        link("gpu2", "gpu3", "nvlink", 50e9),
        link("gpu", "cpu", "loopback", 50e9),
    ]
    with pytest.raises(
        InvalidInputError, match="no pcie or smp or c2c link leads from gpu0 to gpu2"
    ):
        compile_fabric(machine(parts, links))


@pytest.mark.parametrize(("nics", "rate"), [(8, 12.5e9), (4, 6.25e9), (2, 3.125e9)])
def test_fewer_nics_than_gpus_are_shared(nics: int, rate: float) -> None:
    parts = [*gpus(8, nics=nics), {"id": "nvswitch", "kind": "nvswitch"}]
    links = [*PCIE, link("gpu", "nvswitch", "nvlink", 300e9), link("nic", "pcie", "pcie", 24e9)]
    document = machine(parts, links, max_nodes=2, default_nodes=2, network=network(12.5e9, 1.0))
    assert compile_fabric(document).levels[1].bytes_per_s == rate


def test_nvlink_carries_to_nics_that_sit_on_one_socket() -> None:
    parts = [*gpus(8, nics=4), {"id": "nvswitch", "kind": "nvswitch"}]
    near = [link("nic", "pcie0", "pcie", 24e9)]
    links = [*PCIE, *near, link("gpu", "nvswitch", "nvlink", 300e9)]
    document = machine(parts, links, max_nodes=2, default_nodes=2, network=network(12e9, 1.0))
    # 4 NICs of 12 GB/s are reached by the 4 near GPUs' 24 GB/s links; the far GPUs go by NVLink.
    assert compile_fabric(document).levels[1].bytes_per_s == 4 * 12e9 / 8


def test_every_oversubscription_thins_what_is_above() -> None:
    parts = gpus(2, nics=2)
    links = [*PCIE, link("nic", "pcie", "pcie", 24e9)]
    document = machine(parts, links, max_nodes=8, default_nodes=8, network=network(10e9, 1, 2, 3))
    rates = [level.bytes_per_s for level in compile_fabric(document).levels]
    assert rates == [10e9, 10e9, 5e9, pytest.approx(5e9 / 3)]


def test_one_gpu_on_one_node_still_has_a_level() -> None:
    document = machine(gpus(1), [link("gpu", "pcie0", "pcie", 24e9), *PCIE[1:]])
    assert shape(compile_fabric(document).levels) == [("pcie", 1, 24e9)]


def test_one_gpu_per_node_talks_over_the_network_only() -> None:
    links = [
        link("gpu", "pcie0", "pcie", 24e9),
        link("nic", "pcie0", "pcie", 24e9),
        *PCIE[1:],
    ]
    parts = gpus(1, nics=1)
    document = machine(parts, links, max_nodes=4, default_nodes=4, network=network(10e9, 1.0))
    assert shape(compile_fabric(document).levels) == [("tier0", 4, 10e9)]


@pytest.mark.parametrize(
    ("ranks", "cores", "share"), [(4, 2, 1), (8, 2, 0.5), (8, 8, 1), (6, 1, 1 / 3)]
)
def test_ranks_that_outnumber_what_the_cores_can_drive_share(
    ranks: int, cores: int, share: float
) -> None:
    data = json.loads(load_topology("local-gloo").model_dump_json())
    data["node"]["components"][0]["count"] = ranks
    data["node"]["cores"] = cores
    fabric = compile_fabric(parse_topology(data))
    assert (fabric.num_gpus, fabric.cores_per_node) == (ranks, cores)
    assert fabric.levels[0].bytes_per_s == pytest.approx(share * 1.3e9)


# ------------------------------------------------------- the levels against the whole graph


@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-h100", 34), ("dgx-a100", 21), ("gb200-nvl72", 20)]
)
def test_alpha_is_the_latency_of_the_path_in_the_graph(name: str, nodes: int) -> None:
    document = load_topology(name)
    graph, fabric = build_graph(document, nodes), compile_fabric(document, nodes)
    per_node, workers = document.gpus_per_node, document.node.workers()
    nvlink = nx.Graph(
        (a, b, edge) for a, b, edge in graph.edges(data=True) if edge["kind"] == "nvlink"
    )
    units = [1, *(level.unit_size for level in fabric.levels)]
    for below, level in zip(units, fabric.levels, strict=False):
        node, local = divmod(below, per_node)
        links = nvlink if level.name == "nvlink" else graph
        path_s = nx.dijkstra_path_length(
            links, "n0/gpu0", f"n{node}/{workers[local]}", weight="latency_s"
        )
        assert path_s == pytest.approx(level.alpha_s)


@pytest.mark.parametrize(("name", "nodes"), [("dgx-h100", 3), ("dgx-a100", 2), ("gb200-nvl72", 19)])
def test_the_rate_out_of_a_unit_is_the_flow_in_the_graph(name: str, nodes: int) -> None:
    document = load_topology(name)
    graph, fabric = build_graph(document, nodes), compile_fabric(document, nodes)
    inner = fabric.levels[0].unit_size
    network_only = nx.Graph(
        (a, b, {"capacity": edge["bandwidth_bytes_per_s"]}) for a, b, edge in graph.edges(data=True)
    )
    ordered = [f"n{n}/{gpu}" for n in range(nodes) for gpu in document.node.workers()]
    last = ordered[inner * (len(ordered) // inner - (len(ordered) % inner == 0)) :]
    network_only.add_edges_from(("from", gpu) for gpu in last)
    network_only.add_edges_from((gpu, "to") for gpu in ordered if gpu not in last)
    flow = nx.maximum_flow_value(network_only, "from", "to")
    assert flow / len(last) == pytest.approx(fabric.levels[1].bytes_per_s)


# ------------------------------------------------------------------------ what the page shows

PAGE = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text("utf-8")
SPECIFIED = re.findall(r"^\| ([a-z0-9-]+) \| (\d+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "nodes", "levels"), SPECIFIED)
def test_levels_on_the_page_are_those_compiled(name: str, nodes: str, levels: str) -> None:
    compiled = compile_fabric(load_topology(name), int(nodes)).levels
    said = [f"{lv.name} {lv.unit_size} x {lv.bytes_per_s / 1e9:.4g}" for lv in compiled]
    assert ", ".join(said) == levels


def test_the_page_shows_ten_machines() -> None:
    assert len(SPECIFIED) == 10
