"""The files that ship with the package."""

import pytest

from planner.errors import UnknownNameError
from planner.hardware.devices import device
from planner.topology.bundled import load_topology, topology_names


def test_the_promised_clusters_are_there_under_their_own_names() -> None:
    assert {"dgx-a100", "dgx-h100", "gb200-nvl72", "local-gloo"} <= set(topology_names())
    for name in topology_names():
        assert load_topology(name).name == name


def test_every_device_is_known_and_every_figure_has_a_source() -> None:
    for name in topology_names():
        document = load_topology(name)
        assert device(document.device_name).name == document.device_name
        sources = [document.node.source, *(link.source for link in document.node.links)]
        if document.nvlink_domain is not None:
            sources.append(document.nvlink_domain.source)
        if document.network is not None:
            sources += [document.network.source, *(t.source for t in document.network.tiers)]
        assert all(len(source) > 20 for source in sources)


def test_dgx_h100_goes_to_4096_nodes() -> None:
    document = load_topology("dgx-h100")
    assert (document.max_nodes, document.gpus_per_node) == (4096, 8)


@pytest.mark.parametrize("name", ["dgx-h10", "../secrets", "", "dgx-h100.json"])
def test_an_unknown_name_lists_the_nearest(name: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        load_topology(name)
    assert error.value.nearest
    assert error.value.kind == "topology"


def test_a_slip_finds_what_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="dgx-h100"):
        load_topology("dgx_h100")
