"""A topology document says what is wrong with it: which topology, which part, which value."""

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import parse_topology
from planner.topology.units import first_switch


def two_gpus(**changes: Any) -> dict[str, Any]:
    """Return two nodes of two GPUs on one NVSwitch, one NIC each."""
    link = {"bandwidth_bytes_per_s": 50e9, "latency_s": 1e-6, "source": "made up"}
    document: dict[str, Any] = {
        "name": "pair",
        "library": "nccl",
        "device": "h100-sxm-80gb",
        "default_nodes": 2,
        "max_nodes": 4,
        "node": {
            "components": [
                {"id": "gpu", "kind": "gpu", "count": 2},
                {"id": "switch", "kind": "nvswitch"},
                {"id": "pcie", "kind": "pcie_switch"},
                {"id": "nic", "kind": "nic"},
            ],
            "links": [
                {**link, "between": ["gpu", "switch"], "kind": "nvlink", "count": 4},
                {**link, "between": ["gpu", "pcie"], "kind": "pcie"},
                {**link, "between": ["nic", "pcie"], "kind": "pcie"},
            ],
            "source": "made up",
        },
        "network": {
            "kind": "infiniband",
            "layout": "tree",
            "nic_bandwidth_bytes_per_s": 25e9,
            "nic_latency_s": 2e-6,
            "source": "made up",
            "tiers": [{"name": "leaf", "latency_s": 1e-7, "source": "made up"}],
        },
    }
    return {**document, **changes}


def with_link(index: int, **changes: Any) -> dict[str, Any]:
    document = two_gpus()
    document["node"]["links"][index].update(changes)
    return document


def with_node(**changes: Any) -> dict[str, Any]:
    document = two_gpus()
    document["node"].update(changes)
    return document


def with_network(**changes: Any) -> dict[str, Any]:
    document = two_gpus()
    document["network"].update(changes)
    return document


def tier(**changes: Any) -> dict[str, Any]:
    return {"name": "leaf", "latency_s": 1e-7, "source": "made up", **changes}


@pytest.mark.parametrize("field", ["hosts", "impairments"])
def test_of_many_wrong_items_the_first_is_told(field: str) -> None:
    # a million complaints take the service ten seconds, in which it answers nobody
    with pytest.raises(InvalidInputError) as caught:
        parse_topology(two_gpus(**{field: [7] * 1000}))
    assert f"{field}[0]" in str(caught.value)
    assert f"{field}[1]" not in str(caught.value)


def test_a_small_cluster_is_accepted_and_survives_a_round_trip() -> None:
    document = parse_topology(two_gpus())
    assert parse_topology(json.loads(document.model_dump_json())) == document
    assert document.node.workers() == ("gpu0", "gpu1")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e30, 1])
@pytest.mark.parametrize("field", ["bandwidth_bytes_per_s"])
def test_a_bandwidth_that_cannot_be_is_refused_by_name_and_value(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_topology(with_link(1, **{field: value}))
    assert f"topology 'pair': link gpu->pcie has {field}={value:g}; must be > 0" in str(error.value)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), 10])
def test_a_latency_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(InvalidInputError, match=r"link gpu->pcie has latency_s=.*; must be from"):
        parse_topology(with_link(1, latency_s=value))


def components(*extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [*two_gpus()["node"]["components"], *extra]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (with_link(0, between=["gpu", "hub"]), "'hub', which is no component; there are gpu, gpu0"),
        (with_link(0, between=["gpu0", "gpu0"]), "joins nothing"),
        (with_link(0, between=["gpu", "gpu0"], pattern="all"), "joins gpu0 to itself"),
        (with_link(1, between=["gpu", "switch"]), "joined by nvlink and by pcie"),
        (with_link(2, between=["nic", "nic"]), "joins nothing"),
        (with_node(components=components({"id": "nic", "kind": "nic"})), "'nic' occurs twice"),
        (with_node(components=components({"id": "gpu1", "kind": "gpu"})), "'gpu1' occurs twice"),
        (
            with_node(components=components({"id": "gpux", "kind": "gpu"})),
            "gpux is not connected to gpu0",
        ),
        (with_node(components=components({"id": "nic9", "kind": "nic"})), "nic9 is not connected"),
        (
            with_node(components=components({"id": "rank", "kind": "process"})),
            "2 gpus, 1 processes",
        ),
        (with_node(components=components()[:1]), "'switch', which is no component"),
        (with_node(components=components()[1:]), "got 0 gpus, 0 processes"),
        (
            with_node(components=[{"id": "cpu", "kind": "cpu"}]),
            "got 0 gpus, 0 processes",
        ),
        (with_node(cores=8), "cores=8 with 0 processes"),
        (with_node(links=two_gpus()["node"]["links"][:1] * 2), "nic is not connected"),
        (two_gpus(network=None), "max_nodes=4 but nothing joins more than 1 nodes"),
        (two_gpus(default_nodes=5), "default_nodes=5 exceeds max_nodes=4"),
        (two_gpus(default_nodes=1, max_nodes=1_000_000), "GPUs; at most 1048576"),
        (with_network(nic_bandwidth_bytes_per_s=0), "network has nic_bandwidth_bytes_per_s=0"),
        (with_network(nic_latency_s=-1), "network has nic_latency_s=-1"),
        (with_network(tiers=[tier(oversubscription=0.5)]), "tier leaf has oversubscription=0.5"),
        (with_network(tiers=[tier(num_nodes=2)]), "joins 2 nodes but max_nodes=4"),
        (with_network(tiers=[tier(), tier(name="top")]), "leaf has num_nodes=null; only the last"),
        (with_network(tiers=[tier(num_nodes=2), tier()]), "need distinct names"),
        (with_network(tiers=[tier(name="nvlink")]), "need distinct names"),
        (
            with_network(tiers=[tier(num_nodes=2), tier(name="top", num_nodes=5)]),
            "tier top has num_nodes=5; must be more than, and a multiple of, the 2 nodes",
        ),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_topology(document)
    assert str(error.value).startswith("topology 'pair': ")
    assert message in str(error.value)


def test_a_network_without_a_nic_is_refused() -> None:
    document = with_node(
        components=[c for c in components() if c["kind"] != "nic"],
        links=two_gpus()["node"]["links"][:2],
    )
    with pytest.raises(InvalidInputError, match="the node has none; add a component of kind nic"):
        parse_topology(document)


def test_uneven_shares_are_refused() -> None:
    parts = components({"id": "hub", "kind": "pcie_switch", "count": 3})
    with pytest.raises(InvalidInputError, match="shares 3 ends among 2"):
        parse_topology(
            with_node(
                components=parts,
                links=[
                    *two_gpus()["node"]["links"],
                    {**two_gpus()["node"]["links"][1], "between": ["gpu", "hub"]},
                ],
            )
        )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"node": {}}, "node.components"),
        ({"colour": "red"}, "colour"),
        ({"library": "ucc"}, "library"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"name": "x" * 200}, "name"),
        ({"assumptions": ["a"] * 100}, "assumptions"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_topology(two_gpus(**changes))
    assert error.value.where == where
    assert where in str(error.value)


@pytest.mark.parametrize(
    ("component", "links"),
    [
        ({"id": "gpu", "kind": "gpu", "count": 65}, 1),
        ({"id": "gpu", "kind": "gpu", "count": 2}, 5000),
    ],
)
def test_a_node_beyond_any_host_is_refused(component: dict[str, Any], links: int) -> None:
    link = {**two_gpus()["node"]["links"][0], "between": ["gpu", "gpu"], "pattern": "all"}
    with pytest.raises(InvalidInputError, match="at most"):
        parse_topology(
            two_gpus(
                default_nodes=1,
                max_nodes=1,
                network=None,
                node={"components": [component], "links": [link] * links, "source": "made up"},
            )
        )


@pytest.mark.parametrize("data", [None, [], "dgx", 3, {}, {"name": ["x"]}])
def test_what_is_no_document_is_refused(data: object) -> None:
    with pytest.raises(InvalidInputError):
        parse_topology(data)


def test_an_inline_device_is_checked_too() -> None:
    figures = {
        "name": "mine",
        "memory_bytes": 80e9,
        "memory_bytes_per_s": 3e12,
        "peak_flop_per_s": {"bf16": 1e15},
        "source": "data sheet",
    }
    assert parse_topology(two_gpus(device=figures)).device_name == "mine"
    with pytest.raises(InvalidInputError, match=r"device has peak_flop_per_s\[bf16\]=1e\+30"):
        parse_topology(two_gpus(device={**figures, "peak_flop_per_s": {"bf16": 1e30}}))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in leaves(child, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, child in enumerate(value) for leaf in leaves(child, (*path, key))]
    return [path]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 1 << 70),
    st.floats(),
    st.sampled_from(["", "gpu", "gpu0", "nic", "pcie", "all", "nvlink", "tree", "rail", "é", "0"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(leaves(two_gpus())), JUNK), min_size=1, max_size=3))
@example([(("node", "components", 2, "kind"), "gpu")])  # islands of two GPUs and of one
@example([(("network", "tiers", 0, "name"), "gpu")])  # a switch gpu0 beside the GPU
def test_junk_is_refused_cleanly_or_compiles(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = copy.deepcopy(two_gpus())
    for path, value in changes:
        parent: Any = document
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
    try:
        fabric = compile_fabric(parse_topology(document))
    except InvalidInputError:
        return  # any other exception fails the test
    assert fabric.levels[-1].unit_size >= fabric.num_gpus
    assert all(level.bytes_per_s > 0 for level in fabric.levels)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "b"), "tier tier0 has 2 unit_names for 4 units"),
        (("a", "b", "c", "a"), "calls a switch 'a', as something else"),
        (("a", "b", "c", "tier10"), "calls a switch 'tier10', as something else"),
        (("a", "b", "c", "n7"), "calls a switch 'n7', as something else"),
        (("a", "b", "c", "domain1"), "calls a switch 'domain1', as something else"),
    ],
)
def test_names_of_switches_are_complete_and_their_own(names: tuple[str, ...], said: str) -> None:
    data = json.loads(load_topology("dgx-h100").model_dump_json())
    data |= {"max_nodes": 8, "default_nodes": 8}
    data["network"]["tiers"] = [
        {"name": "tier0", "num_nodes": 2, "unit_names": names, "latency_s": 0, "source": "test"},
        {"name": "tier1", "latency_s": 0, "source": "test"},
    ]
    with pytest.raises(InvalidInputError, match=said):
        parse_topology(data)
    data["network"]["tiers"][0]["unit_names"] = ("tier00", "tier01", "x", "y")
    network = parse_topology(data).network
    assert network is not None
    assert first_switch(network, 7, 3) == "y/rail3"
