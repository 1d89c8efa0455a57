"""The files that ship with the package.

``samples/machines_expected.csv`` holds the distinct (file, machine, intra_GBps_per_gpu,
nics_per_node, nic_gbps) of the two tables of published measurements that predictions are judged
by (collectives of 63 machines, training runs of 18 sources), as those tables print them: link and
NIC figures there are the measurements' own sources' or, where these are silent, the vendor's.
"""

import csv
from pathlib import Path
from typing import Final

import pytest

from planner.errors import UnknownNameError
from planner.hardware.devices import custom_device, device
from planner.hardware.gpus import gpu_model
from planner.topology.bundled import load_topology, machine_topologies, topology_names
from planner.topology.compile import compile_fabric

every_topology = pytest.mark.parametrize("name", topology_names())

SAMPLES = Path(__file__).parent.parent / "samples"
EXPECTED = tuple(csv.DictReader((SAMPLES / "machines_expected.csv").read_text().splitlines()))

# Rows of the tables that say something else than the machine is, and why the machine is right.
NOT_THE_MACHINE: Final = {
    "2x H100 PCIe NVLink bridge": "12 links of 25 GB/s are 300, not the 450 of SXM",
    "H100/H800 (SM90) CX7": "one NIC per GPU is meant; NVLink of H800, which is not told apart",
    "B200-class (SM100)": "one NIC per GPU is meant",
    "MLM20/V100-32GB (DGX-2)": "the data sheet has 8 NICs; 16 was assumed",
}


def rows_with(*columns: str) -> list[dict[str, str]]:
    """Return the expected rows in which every column of ``columns`` is filled."""
    return [
        row
        for row in EXPECTED
        if all(row[column] for column in columns) and row["machine"] not in NOT_THE_MACHINE
    ]


def row_id(row: dict[str, str]) -> str:
    return row["machine"]


def test_the_promised_clusters_are_there_under_their_own_names() -> None:
    assert {"dgx-a100", "dgx-h100", "gb200-nvl72", "local-gloo"} <= set(topology_names())
    for name in topology_names():
        assert load_topology(name).name == name


@every_topology
def test_every_device_is_known_and_every_figure_has_a_source(name: str) -> None:
    document = load_topology(name)
    sources = [document.node.source, *(link.source for link in document.node.links)]
    if isinstance(document.device, str):
        assert device(document.device).name == document.device
    else:
        sources.append(document.device.source)
    if document.nvlink_domain is not None:
        sources.append(document.nvlink_domain.source)
    if document.network is not None:
        sources += [document.network.source, *(t.source for t in document.network.tiers)]
    assert all(len(source) > 20 for source in sources)


@every_topology
def test_a_device_given_by_figures_is_the_gpu_model_of_that_name(name: str) -> None:
    figures = load_topology(name).device
    if isinstance(figures, str):
        return
    model = gpu_model(figures.name)
    assert model.name == figures.name
    assert figures.memory_bytes == model.memory_bytes
    assert figures.memory_bytes_per_s == model.memory_bytes_per_s
    assert figures.source == model.source
    for precision, peak in figures.peak_flop_per_s.items():
        assert peak == model.peak_flop_per_s[precision]
    assert custom_device(**figures.model_dump()).name == figures.name


@every_topology
def test_every_topology_compiles_at_one_node_its_default_and_its_most(name: str) -> None:
    document = load_topology(name)
    for num_nodes in (1, document.default_nodes, document.max_nodes):
        fabric = compile_fabric(document, num_nodes)
        assert fabric.num_gpus == num_nodes * document.gpus_per_node
        assert fabric.levels[-1].unit_size >= fabric.num_gpus
        rates = [level.bytes_per_s for level in fabric.levels]
        assert all(rate > 0 for rate in rates)
        assert rates == sorted(rates, reverse=True)
        assert all(level.direct_share > 0 for level in fabric.levels)


@every_topology
def test_the_links_of_a_gpu_add_up_to_those_of_its_model(name: str) -> None:
    document = load_topology(name)
    model = gpu_model(document.device_name) if document.library in ("nccl", "rccl") else None
    if model is None or model.num_links == 0:
        return
    gpu = document.node.workers()[0]
    direct = sum(
        link.bandwidth_bytes_per_s
        for link in document.node.single_links()
        if link.kind == model.link_kind and gpu in (link.a, link.b)
    )
    if document.nvlink_domain is not None:
        domain = document.nvlink_domain
        direct += domain.num_switches * domain.bandwidth_bytes_per_s
    published = model.num_links * model.link_bytes_per_s
    assert direct == pytest.approx(published) or (name in USES_FEWER_LINKS and direct < published)


# Boards and racks that leave some of a GPU's links unused.
USES_FEWER_LINKS: Final = {
    "a40-x1-ib": "one GPU, no bridge",
    "aws-p3-8xlarge": "half of the hybrid cube mesh",
    "lassen": "three of six links go to the CPU",
}


def test_every_machine_with_measurements_has_a_topology() -> None:
    described = machine_topologies()
    assert set(described.values()) <= set(topology_names())
    assert {(row["file"], row["machine"]) for row in EXPECTED} <= set(described)
    assert sum(file == "collectives" for file, _ in described) == 63


@pytest.mark.parametrize("row", rows_with("intra_GBps_per_gpu"), ids=row_id)
def test_the_innermost_level_is_as_fast_as_the_measurements_say(row: dict[str, str]) -> None:
    document = load_topology(machine_topologies()[row["file"], row["machine"]])
    innermost = compile_fabric(document, 1).levels[0]
    stated = float(row["intra_GBps_per_gpu"]) * 1e9
    assert innermost.bytes_per_s == pytest.approx(stated, rel=0.01)


@pytest.mark.parametrize("row", rows_with("nics_per_node", "nic_gbps"), ids=row_id)
def test_the_nics_of_a_node_add_up_to_what_the_measurements_say(row: dict[str, str]) -> None:
    document = load_topology(machine_topologies()[row["file"], row["machine"]])
    assert document.network is not None
    ours = document.node.count("nic") * document.network.nic_bandwidth_bytes_per_s
    stated = float(row["nics_per_node"]) * float(row["nic_gbps"]) * 1e9 / 8
    assert ours == pytest.approx(stated)


def test_exceptions_are_rows_that_exist() -> None:
    assert set(NOT_THE_MACHINE) <= {row["machine"] for row in EXPECTED}
    assert set(USES_FEWER_LINKS) <= set(topology_names())


def test_pods_of_the_llama_3_cluster_share_a_seventh() -> None:
    levels = compile_fabric(load_topology("meta-24k-h100-roce"), 3072).levels
    assert [level.unit_size for level in levels] == [8, 16, 3072, 24576]
    assert levels[-1].bytes_per_s == pytest.approx(50e9 / 7)


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
