"""Clusters that are not the same all over: closed forms, and laws that hold for any of them."""

import json
from typing import Any

import numpy as np
import pytest

from planner.cost.rates import rate_of
from planner.errors import InvalidInputError
from planner.layout.groups import lay_group
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.topology.fabric import Fabric
from planner.topology.graph import build_graph
from tests.unit.clusters import changed, cluster, link, network, part, shape, tier, weak


def among(
    fabric: Fabric, degree: int, stride: int = 1, *, direct: bool = False, level: int = 0
) -> float:
    """Return nominal bytes/s of each member of a group on one level."""
    group = lay_group(fabric, np.array([degree]), np.array([stride]))
    inside = group.members[level]
    found = rate_of(fabric.levels[level], group, inside, direct=direct, nominal=True)
    return float(np.broadcast_to(found, 1)[0])


# ------------------------------------------------------------------------ links without switches


def test_a_pair_of_a_full_mesh_has_one_link_of_seven() -> None:
    fabric = compile_fabric(load_topology("azure-nd-mi300x-v5"), 1)
    assert shape(fabric) == [("xgmi", 8, 448e9)]
    for degree, stride in ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
        for direct in (False, True):
            expected = (degree - 1) * 64e9
            assert among(fabric, degree, stride, direct=direct) == pytest.approx(expected)


def test_four_v100_of_p3_have_single_and_double_links() -> None:
    """0-1, 0-2, 1-3 single; 0-3, 1-2, 2-3 double, 25 GB/s each (nvidia-smi topo -m of p3.8xlarge).

    A GPU has four links to the others; in an all-to-all the single ones decide.
    """
    fabric = compile_fabric(load_topology("aws-p3-8xlarge"))
    assert shape(fabric) == [("nvlink", 4, 100e9)]
    assert among(fabric, 4) == pytest.approx(100e9)
    assert among(fabric, 4, direct=True) == pytest.approx(3 * 25e9)
    assert among(fabric, 2, 1) == pytest.approx(25e9)  # 0-1
    assert among(fabric, 2, 2) == pytest.approx(25e9)  # 0-2


def test_eight_v100_of_dgx1_send_over_pcie_where_the_cube_mesh_has_no_link() -> None:
    """Every GPU has six links to four others; what goes to the three strangers takes PCIe, where
    6 GB/s lead from socket to socket."""
    fabric = compile_fabric(load_topology("dgx1-v100"), 1)
    assert shape(fabric) == [("nvlink", 8, 150e9)]
    assert among(fabric, 8) == pytest.approx(150e9)
    assert among(fabric, 8, direct=True) == pytest.approx(7 * 6e9 / 3)
    assert among(fabric, 2, 4) == pytest.approx(25e9)  # 2-6 and 3-7 are single
    assert among(fabric, 4, 1) == pytest.approx(100e9)  # the quad of p3.8xlarge
    assert among(fabric, 4, 1, direct=True) == pytest.approx(3 * 25e9)


@pytest.mark.parametrize("weakest", [(0, 1), (2, 3)])
def test_the_worst_pair_of_a_mesh_decides_wherever_it_sits(weakest: tuple[int, int]) -> None:
    rates = {(a, b): 50e9 for a in range(4) for b in range(a + 1, 4)}
    rates[weakest] = 20e9
    links = [link(f"gpu{a}", f"gpu{b}", "nvlink", rate) for (a, b), rate in rates.items()]
    parts = [part("gpu", "gpu", 4), part("cpu", "cpu")]
    fabric = compile_fabric(cluster(parts, [*links, link("gpu", "cpu", "pcie", 10e9)]))
    for direct in (False, True):
        assert among(fabric, 2, 1, direct=direct) == pytest.approx(20e9)
        assert among(fabric, 2, 2, direct=direct) == pytest.approx(50e9)


def test_meshes_of_unlike_size_and_switches_beside_meshes_decide_together() -> None:
    """A quad of 50 GB/s links beside a pair of 20 GB/s, or beside two GPUs on a switch."""
    quad = [(a, b) for a in range(2, 6) for b in range(a + 1, 6)]
    links = [link(f"gpu{a}", f"gpu{b}", "nvlink", 50e9) for a, b in quad]
    host = link("gpu", "cpu", "pcie", 10e9)
    pair = [link("gpu0", "gpu1", "nvlink", 20e9)]
    parts = [part("gpu", "gpu", 6), part("cpu", "cpu")]
    assert among(compile_fabric(cluster(parts, [*pair, *links, host])), 2) == pytest.approx(20e9)
    for of_switch, expected in ((90e9, 50e9), (15e9, 15e9)):
        switch = [link(f"gpu{i}", "nvswitch", "nvlink", of_switch) for i in (0, 1)]
        both = cluster([*parts, part("nvswitch", "nvswitch")], [*switch, *links, host])
        assert among(compile_fabric(both), 2) == pytest.approx(expected)


def test_a_mesh_without_one_link_sends_over_pcie_between_those_two() -> None:
    parts = [part("gpu", "gpu", 4), part("cpu", "cpu")]
    links = [
        link("gpu", "gpu", "xgmi", 64e9, pattern="all"),
        link("gpu", "cpu", "pcie", 30e9),
    ]
    broken = weak(cluster(parts, links), 0, "n0/gpu0", "n0/gpu1")
    fabric = compile_fabric(broken)
    assert among(fabric, 2, 1) == pytest.approx(30e9)
    assert among(fabric, 2, 2) == pytest.approx(64e9)
    assert among(fabric, 4) == pytest.approx(2 * 64e9)
    assert among(fabric, 4, direct=True) == pytest.approx(3 * 30e9)


def test_dies_that_are_no_neighbours_go_through_the_cpu_and_not_through_a_nic() -> None:
    """Two of Frontier's dies: 36 GB/s to the CPU; the NIC both hang on joins nothing."""
    fabric = compile_fabric(load_topology("frontier"), 1)
    assert fabric.levels[0].mesh is not None
    assert among(fabric, 2, 4) == pytest.approx(36e9)  # 0-4, 1-5, 2-6, 3-7: 0-4 has no link
    assert among(fabric, 2, 1) == pytest.approx(200e9)


def test_two_gpus_on_one_nic_and_nothing_else_are_refused() -> None:
    parts = [part("gpu", "gpu", 2), part("nic", "nic")]
    document = cluster(parts, [link("gpu", "nic", "pcie", 30e9)], network=network(25e9))
    with pytest.raises(InvalidInputError, match="leads from gpu0 to gpu1"):
        compile_fabric(document)


def test_ranks_farther_apart_than_the_mesh_is_wide_are_no_error() -> None:
    fabric = compile_fabric(load_topology("azure-nd-mi300x-v5"), 4)
    assert among(fabric, 4, 8, level=1) == pytest.approx(50e9)


# ------------------------------------------------------------------------------ pairs and sockets


def test_pairs_of_nvlink_meet_on_pcie_and_over_the_sockets() -> None:
    fabric = compile_fabric(load_topology("a100-pcie-x4-pairs"), 1)
    assert shape(fabric) == [("nvlink", 2, 300e9), ("smp", 4, 8e9)]
    assert among(fabric, 2, 1) == pytest.approx(300e9)


def test_groups_of_unlike_size_leave_at_the_rate_of_the_worse() -> None:
    """A pair and a quad, each GPU with 10 GB/s of PCIe: 20 GB/s between them, 5 for one of four."""
    parts = [part("gpu", "gpu", 6), part("cpu", "cpu")]
    quad = [(a, b) for a in range(2, 6) for b in range(a + 1, 6)]
    links = [link(f"gpu{a}", f"gpu{b}", "nvlink", 50e9) for a, b in [(0, 1), *quad]]
    fabric = compile_fabric(cluster(parts, [*links, link("gpu", "cpu", "pcie", 10e9)]))
    assert fabric.levels[0].unit_sizes == (2, 4)
    assert shape(fabric) == [("nvlink", 4, 50e9), ("cpu", 6, 5e9)]


def test_of_two_pcie_switches_the_slower_decides() -> None:
    parts = [part("gpu", "gpu", 4), part("pcie", "pcie_switch", 2), part("cpu", "cpu")]
    slow = [link(f"gpu{i}", f"pcie{i // 2}", "pcie", 24e9 if i < 2 else 12e9) for i in range(4)]
    fabric = compile_fabric(cluster(parts, [*slow, link("pcie", "cpu", "pcie", 60e9)]))
    assert shape(fabric)[0] == ("pcie", 2, 12e9)


def test_two_h100_have_their_nvlinks_and_not_pcie_besides() -> None:
    parts = [part("gpu", "gpu", 2), part("nvswitch", "nvswitch"), part("cpu", "cpu")]
    links = [link("gpu", "nvswitch", "nvlink", 450e9), link("gpu", "cpu", "pcie", 64e9)]
    assert shape(compile_fabric(cluster(parts, links))) == [("nvlink", 2, 450e9)]


def test_a_spine_of_two_to_one_halves_what_leaves_a_leaf() -> None:
    parts = [part("gpu", "gpu", 2), part("nvswitch", "nvswitch"), part("nic", "nic", 2)]
    links = [link("gpu", "nvswitch", "nvlink", 300e9), link("nic", "gpu", "pcie", 60e9)]
    tiers = (tier("leaf", 4), tier("spine", oversubscription=2))
    document = cluster(parts, links, 16, network=network(50e9, *tiers))
    fabric = compile_fabric(document)
    assert shape(fabric) == [("nvlink", 2, 300e9), ("leaf", 8, 50e9), ("spine", 32, 25e9)]
    assert [level.oversubscription for level in fabric.levels] == [1, 1, 2]


# ---------------------------------------------------------------------------------- unequal units

NVL72 = load_topology("gb200-nvl72")


def test_a_rack_cut_in_two_by_the_scheduler_is_two_domains() -> None:
    domain = NVL72.model_dump(mode="json")["nvlink_domain"]
    halves = changed(NVL72, nvlink_domain={**domain, "num_nodes": 9})
    fabric = compile_fabric(halves, 18)
    assert shape(fabric) == [("nvlink", 36, 900e9), ("rail", 576, 50e9)]
    assert fabric.levels[0].unit_sizes is None
    # the same trays as an allocation of half of each of two racks
    spread = compile_fabric(NVL72, [*range(9), *range(18, 27)])
    assert shape(spread)[0] == ("nvlink", 36, 900e9)
    group = lay_group(spread, np.array([72]), np.array([1]))
    assert int(group.members[0][0]) == 36


def test_ten_trays_of_one_rack_and_eight_of_another_are_unequal_domains() -> None:
    fabric = compile_fabric(NVL72, [*range(10), *range(18, 26)])
    assert fabric.levels[0].unit_sizes == (40, 32)
    assert fabric.levels[0].unit_size == 40
    assert fabric.nodes == (*range(10), *range(18, 26))
    group = lay_group(fabric, np.array([72, 8, 12]), np.array([1, 1, 1]))
    # 72 ranks: 32 at least; 8 ranks fit both domains; 12 leave 4 behind after 36
    assert group.members[0].tolist() == [32, 8, 4]
    assert group.even[0].tolist() == [False, True, False]


def test_half_a_rack_alone_needs_no_network() -> None:
    assert shape(compile_fabric(NVL72, range(9, 18))) == [("nvlink", 36, 900e9)]


def test_listed_units_of_domains_and_tiers_are_those_of_an_allocation() -> None:
    parts = [part("gpu", "gpu", 4), part("pcie", "pcie_switch"), part("nic", "nic", 4)]
    links = [link("gpu", "pcie", "pcie", 60e9), link("nic", "pcie", "pcie", 60e9)]
    domain = {
        "num_nodes": 10,
        "units": [10, 8],
        "num_switches": 2,
        "bandwidth_bytes_per_s": 450e9,
        "latency_s": 1e-6,
        "source": "made up",
    }
    tiers = (tier("leaf", units=[10, 8]), tier("spine", oversubscription=2))
    document = cluster(parts, links, 18, network=network(50e9, *tiers), nvlink_domain=domain)
    levels = compile_fabric(document).levels
    assert [level.unit_sizes for level in levels] == [(40, 32), None]
    assert [level.name for level in levels] == ["nvlink", "spine"]
    assert levels[1].bytes_per_s == pytest.approx(25e9)
    alone = compile_fabric(document, range(10, 18))
    assert shape(alone) == [("nvlink", 32, 900e9)]


def test_an_allocation_fills_leaves_unequally() -> None:
    fabric = compile_fabric(load_topology("dgx-h100"), [0, 1, 2, 32, 33, 64])
    assert [level.unit_sizes for level in fabric.levels] == [None, (24, 16, 8), None]
    # a ring over all leaves at least one node behind a rail switch
    group = lay_group(fabric, np.array([48]), np.array([1]))
    assert [int(m[0]) for m in group.members] == [8, 8, 48]


@pytest.mark.parametrize(
    "nodes", [[], [-1, 0], [4095, 4096], [3, 3], [3, 1], list(range(20, 0, -1))], ids=str
)
def test_numbers_that_are_no_nodes_in_order_are_refused(nodes: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="must be numbers from 0 to 4095, ascending"):
        compile_fabric(load_topology("dgx-h100"), nodes)


# ---------------------------------------------------------------------------------------- islands

PCIE_PARTS = [
    part("gpu", "gpu", 4),
    part("pcie", "pcie_switch", 2),
    part("cpu", "cpu"),
    part("nic", "nic", 2),
]
PCIE_LINKS = [
    link("gpu", "pcie", "pcie", 30e9),
    link("nic", "pcie", "pcie", 30e9),
    link("pcie", "cpu", "pcie", 20e9),
]
SWITCHED = {
    "components": [*PCIE_PARTS, part("nvswitch", "nvswitch")],
    "links": [*PCIE_LINKS, link("gpu", "nvswitch", "nvlink", 300e9)],
    "source": "made up",
}
MESHED = {
    "components": PCIE_PARTS,
    "links": [*PCIE_LINKS, link("gpu", "gpu", "nvlink", 100e9, pattern="all")],
    "source": "made up",
}
PAIRED = {
    "components": PCIE_PARTS,
    "links": [*PCIE_LINKS, *(link(f"gpu{i}", f"gpu{i + 1}", "nvlink", 200e9) for i in (0, 2))],
    "source": "made up",
}
BARE = {"components": PCIE_PARTS, "links": PCIE_LINKS, "source": "made up"}


def mixed(common: dict[str, Any], island: dict[str, Any], nic: float = 20e9) -> TopologyDocument:
    """Return two nodes of a common type, then two of another."""
    other = {"first_node": 2, "num_nodes": 2, "device": "v100-sxm-32gb", "node": island}
    return cluster([], [], 4, node=common, islands=[other], network=network(nic))


def test_an_island_of_the_common_type_changes_nothing() -> None:
    for node in (SWITCHED, MESHED, PAIRED, BARE):
        same = compile_fabric(mixed(node, node))
        plain = compile_fabric(changed(mixed(node, node), islands=[]))
        assert same == plain


def test_where_only_an_island_has_nvlink_no_group_of_all_uses_it() -> None:
    for common, island, sizes in (
        (BARE, SWITCHED, (*[1] * 8, 4, 4)),
        (SWITCHED, BARE, (4, 4, *[1] * 8)),
        (BARE, PAIRED, (*[1] * 8, *[2] * 4)),
    ):
        fabric = compile_fabric(mixed(common, island))
        assert fabric.levels[0].name == "nvlink"
        assert fabric.levels[0].unit_sizes == sizes
        group = lay_group(fabric, np.array([2, 4, 16]), np.array([1, 1, 1]))
        assert group.members[0].tolist() == [1, 1, 1]
        pcie = next(level for level in fabric.levels if level.name == "pcie")
        assert pcie.bytes_per_s == 30e9
        # the island alone, and the others alone, are what they are
        alone = compile_fabric(mixed(common, island), [2, 3])
        assert alone.levels == compile_fabric(mixed(island, island), [2, 3]).levels
        assert compile_fabric(mixed(common, island), [0, 1]).levels[0].unit_sizes is None


def test_meshes_of_unlike_nodes_are_priced_at_the_worst() -> None:
    slower = json.loads(json.dumps(MESHED))
    slower["links"][-1]["bandwidth_bytes_per_s"] = 40e9
    fabric = compile_fabric(mixed(MESHED, slower))
    assert among(fabric, 4) == pytest.approx(3 * 40e9)
    assert among(fabric, 2) == pytest.approx(40e9)
    switched = compile_fabric(mixed(SWITCHED, MESHED))
    assert among(switched, 4) == pytest.approx(300e9)
    assert among(switched, 2) == pytest.approx(100e9)
    weak_switch = json.loads(json.dumps(SWITCHED))
    weak_switch["links"][-1]["bandwidth_bytes_per_s"] = 30e9
    for pair in ((weak_switch, MESHED), (MESHED, weak_switch)):
        assert among(compile_fabric(mixed(*pair)), 4) == pytest.approx(30e9)
        assert among(compile_fabric(mixed(*pair)), 2) == pytest.approx(30e9)
    small = compile_fabric(mixed(MESHED, PAIRED))
    assert small.levels[0].unit_sizes == (4, 4, 2, 2, 2, 2)
    assert among(small, 2) == pytest.approx(100e9)
    weak_pairs = json.loads(json.dumps(PAIRED))
    for one in weak_pairs["links"][-2:]:
        one["bandwidth_bytes_per_s"] = 70e9
    assert among(compile_fabric(mixed(MESHED, weak_pairs)), 2) == pytest.approx(70e9)


def test_hops_are_as_long_as_in_the_slowest_island() -> None:
    longer = json.loads(json.dumps(SWITCHED))
    longer["links"][-1]["latency_s"] = 4e-6  # gpu to nvswitch, and back
    longer["links"][1]["latency_s"] = 9e-6  # nic to switch
    healthy = compile_fabric(mixed(SWITCHED, SWITCHED)).levels
    for pair in ((SWITCHED, longer), (longer, SWITCHED)):
        levels = compile_fabric(mixed(*pair)).levels
        assert levels[0].alpha_s == pytest.approx(8e-6)
        assert levels[1].alpha_s == pytest.approx(healthy[1].alpha_s + 2 * 8e-6)


def test_an_island_with_a_way_out_of_its_own_is_the_exit_of_all() -> None:
    staged = json.loads(json.dumps(BARE))
    staged["links"][1] = link("nic", "cpu", "pcie", 30e9)
    fabric = compile_fabric(mixed(BARE, staged))
    assert fabric.levels[-1].path == "mixed"
    # each switch has 20 GB/s up for its two GPUs
    assert fabric.levels[-1].bytes_per_s == pytest.approx(10e9)
    assert compile_fabric(mixed(BARE, staged), [2, 3]).levels[-1].path == "staged"


# ----------------------------------------------------------- documents that contradict themselves


def test_links_of_one_pair_add_up_and_the_longest_sets_the_latency() -> None:
    parts = [part("gpu", "gpu", 2), part("cpu", "cpu")]
    host = link("gpu", "cpu", "pcie", 10e9)
    both = [link("gpu0", "gpu1", "nvlink", 50e9, count=2), link("gpu1", "gpu0", "nvlink", 20e9)]
    both[0]["latency_s"] = 3e-6
    for links in (both, both[::-1]):
        level = compile_fabric(cluster(parts, [*links, host])).levels[0]
        assert (level.bytes_per_s, level.alpha_s) == (120e9, 3e-6)


@pytest.mark.parametrize("between", [("gpu", "pcie"), ("pcie", "gpu")])
def test_blocks_are_consecutive_whichever_end_is_named_first(between: tuple[str, str]) -> None:
    links = [link(*between, "pcie", 30e9), *PCIE_LINKS[1:]]
    graph = build_graph(cluster(PCIE_PARTS, links, network=network(20e9)))
    joined = [next(iter(graph[f"n0/gpu{i}"])) for i in range(4)]
    assert joined == ["n0/pcie0", "n0/pcie0", "n0/pcie1", "n0/pcie1"]


DOMAIN = {
    "num_nodes": 4,
    "num_switches": 1,
    "bandwidth_bytes_per_s": 450e9,
    "latency_s": 1e-6,
    "source": "made up",
}
OTHER = {"first_node": 2, "num_nodes": 2, "device": "v100-sxm-32gb", "node": BARE}
TWO_GPUS = {
    "components": [part("gpu", "gpu", 2), part("pcie", "pcie_switch"), part("nic", "nic")],
    "links": [link("gpu", "pcie", "pcie", 30e9), link("nic", "pcie", "pcie", 30e9)],
    "source": "made up",
}
NO_NIC = {
    "components": PCIE_PARTS[:3],
    "links": [PCIE_LINKS[0], PCIE_LINKS[2]],
    "source": "made up",
}
FOUR_RANKS = {
    "components": [part("rank", "process", 4), part("cpu", "cpu"), part("nic", "nic")],
    "links": [link("rank", "cpu", "loopback", 1e9), link("cpu", "nic", "pcie", 1e9)],
    "source": "made up",
    "cores": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"islands": [{**OTHER, "num_nodes": 3}]}, "an island has nodes 2 to 4; islands must"),
        ({"islands": [OTHER, {**OTHER, "first_node": 3, "num_nodes": 1}]}, "without overlap"),
        ({"islands": [OTHER, {**OTHER, "first_node": 0}]}, "without overlap"),
        ({"islands": [{**OTHER, "node": TWO_GPUS}]}, "2 GPUs a node and the others 4"),
        ({"islands": [{**OTHER, "node": FOUR_RANKS}]}, "an island of GPUs among nodes of proc"),
        ({"islands": [{**OTHER, "node": NO_NIC}]}, "the node has none; add a component of kind"),
        ({"hosts": ["a", "b"]}, "hosts names 2 nodes but max_nodes=4"),
        ({"hosts": ["a", "b", "c", "a"]}, "hosts names 'a' twice"),
        ({"hosts": ["a", "b", "c", "leaf0"]}, "'leaf0' is also the name of a switch of tier leaf"),
        ({"network": network(20e9, tier("n"))}, "'n0' is also the name of a switch of tier n"),
        ({"network": network(20e9, tier("r", 2), tier("r1"))}, "tier r1 is called as a switch of"),
        ({"network": network(20e9, tier("domain"))}, "other than those of links and 'domain'"),
        (
            {"nvlink_domain": DOMAIN, "hosts": ["a", "b", "c", "domain0"]},
            "'domain0' is also the name of an NVLink domain",
        ),
        (
            {"impairments": [{"part": "n1", "factor": f} for f in (0.5, 0.25)]},
            "impairments say n1=0.5 and n1=0.25; give one of them",
        ),
        (
            {"impairments": [{"part": "n1", "factor": 1e-300}]},
            "what has less than 1e-06 left is down: give 0",
        ),
        (
            {"network": None, "nvlink_domain": {**DOMAIN, "units": [2, 2]}},
            "max_nodes=4 but nothing joins more than 2 nodes",
        ),
        (
            {"nvlink_domain": {**DOMAIN, "num_nodes": 2, "units": [1, 3]}},
            "units of 3 nodes but num_nodes=2",
        ),
        ({"nvlink_domain": {**DOMAIN, "units": [3, 2]}}, "5 nodes together but max_nodes=4"),
        (
            {"network": network(20e9, tier("leaf", 2, units=[2, 2]), tier("top"))},
            "tier leaf has num_nodes and units",
        ),
        ({"network": network(20e9, tier("leaf", units=[2, 2]))}, "2 units that nothing joins"),
        ({"network": network(20e9, tier("leaf", units=[2, 1]))}, "3 nodes together but max_nodes"),
        (
            {"network": network(20e9, tier("leaf", units=[1, 3]), tier("mid", 2), tier("top"))},
            "tier mid has a unit that ends after node 1, inside a unit below",
        ),
        (
            {"network": network(20e9, tier("leaf", 2), tier("mid", units=[3, 1]), tier("top"))},
            "tier mid has a unit that ends after node 2, inside a unit below",
        ),
        (
            {"node": {**BARE, "components": [{**PCIE_PARTS[0], "multicast": True}]}},
            "component 'gpu' is a gpu with multicast",
        ),
    ],
)
def test_an_uneven_document_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    base: dict[str, Any] = {"node": BARE, "network": network(20e9)}
    with pytest.raises(InvalidInputError) as error:
        cluster([], [], 4, **{**base, **changes})
    assert message in str(error.value)


def test_units_need_not_be_full_at_the_end() -> None:
    tiers = (tier("leaf", units=[2, 2, 1]), tier("mid", 4), tier("top"))
    document = cluster([], [], 5, node=BARE, network=network(20e9, *tiers))
    levels = compile_fabric(document).levels
    assert [level.unit_sizes for level in levels[-3:]] == [(8, 8, 4), None, None]
    assert levels[-2].unit_size == 16
