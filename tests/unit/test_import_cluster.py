"""Topologies from real outputs of tools, alone and joined; every guess is said, none is silent."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InvalidInputError
from planner.hardware.devices import custom_device, device_names
from planner.hardware.gpus import gpu_model
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument, parse_topology
from planner.topology.graph import build_graph
from planner.topology.impair import degraded, parse_impairments
from planner.topology.importers.cluster import Imported, ImportOptions, import_topology
from planner.topology.importers.detect import detect
from planner.topology.importers.dump import TopologyTextError
from tests.unit.imported_samples import (
    DOCS,
    SAMPLES,
    Row,
    compiled_levels,
    imported,
    rows,
    with_table,
)

H200 = "nvidia-smi-topo/h200-x8-8nic.txt"
GB200 = "nvidia-smi-topo/gb200-tray-x4-8nic.txt"
MATRIX = """\
\tGPU0\tGPU1\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\tPIX\tSYS\t0-15\t0
GPU1\tPHB\t X \tPHB\tSYS\t0-15\t0
mlx5_0\tPIX\tPHB\t X \tSYS
mlx5_1\tSYS\tSYS\tSYS\t X
"""


def read(node: str, gpu: str | None, fabric: str | None = None, **options: Any) -> Imported:
    """Import samples."""
    return import_topology(
        (SAMPLES / node).read_bytes(),
        node_source=Path(node).name,
        gpu=gpu,
        fabric_text=(SAMPLES / fabric).read_bytes() if fabric else None,
        fabric_source=Path(fabric).name if fabric else "",
        options=ImportOptions(**options),
    )


def said(found: Imported) -> str:
    return "\n".join(found.document.assumptions)


def tiers(found: Imported) -> list[tuple[str, float]]:
    network = found.document.network
    assert network is not None
    return [(tier.name, tier.oversubscription) for tier in network.tiers]


# ------------------------------------------------------------------------------- real samples


@pytest.mark.parametrize("row", rows(), ids=lambda row: Path(row["file"]).name)
def test_every_sample_has_the_levels_of_its_specification(row: Row) -> None:
    if row["levels"] == "refused":
        with pytest.raises(TopologyTextError, match=Path(row["file"]).name):
            imported(row)
        return
    found = imported(row)
    expected = [level.replace(" x ", " ").split() for level in row["levels"].split("; ")]
    levels = compiled_levels(found)
    assert [(name, size) for name, size, _ in levels] == [(n, int(s)) for n, s, _ in expected]
    assert [rate for *_, rate in levels] == pytest.approx(
        [float(rate) for *_, rate in expected], rel=2e-3
    )
    again = json.loads(found.document.model_dump_json())
    assert parse_topology(again) == found.document


def test_every_sample_is_in_the_table() -> None:
    files = {
        path.relative_to(SAMPLES).as_posix()
        for path in SAMPLES.glob("*/*")
        if path.name != "README.md"
    }
    assert files == {row["file"] for row in rows()}


def test_the_page_shows_what_becomes_of_the_samples() -> None:
    page = DOCS.read_text("utf-8")
    assert page == with_table(page), "run python -m tests.unit.imported_samples"


@pytest.mark.parametrize(
    ("file", "gpu", "bundled"),
    [
        (H200, "H200", "hgx-h200-8x400"),
        ("nvidia-smi-topo/h100-x8-hgx.txt", "H100", "dgx-h100"),
        ("nvidia-smi-topo/dgx1v-v100-x8-4nic.txt", "V100", "dgx1-v100"),
        ("nvidia-smi-topo/p3.8xlarge-v100-x4.txt", "V100", "aws-p3-8xlarge"),
        ("nvidia-smi-topo/a100-x4-polaris-shifted-header.txt", "A100", "a100-sxm-x4-4x200"),
        ("nccl-topo-xml/amd-topo_8p_942.xml", None, "mi300x-8x400-ib"),
        ("nccl-topo-xml/h800-x8.xml", None, "hgx-h800-8x400"),
        ("lstopo-xml/nvidia-dgx2.xml", None, "dgx2"),
    ],
)
def test_a_machine_is_imported_as_it_is_bundled(file: str, gpu: str | None, bundled: str) -> None:
    ours = compile_fabric(read(file, gpu).document, 1).levels[0]
    theirs = compile_fabric(load_topology(bundled), 1).levels[0]
    assert (ours.name, ours.unit_size, ours.kind) == (theirs.name, theirs.unit_size, theirs.kind)
    assert ours.bytes_per_s == pytest.approx(theirs.bytes_per_s, rel=1e-6)
    assert ours.multicast == theirs.multicast
    assert (ours.mesh is None) == (theirs.mesh is None)
    assert ours.alpha_s == pytest.approx(theirs.alpha_s, rel=0.15)


# ------------------------------------------------------------------------------ what joins nodes


def test_options_join_nodes_where_no_text_does() -> None:
    found = read(
        H200, "H200", nodes=64, nic_gbps=400, layout="rail", leaf_nodes=32, oversubscription=2
    )
    assert tiers(found) == [("rail", 1), ("spine", 2)]
    levels = compiled_levels(found)
    assert levels == [("nvlink", 8, 450), ("rail", 256, 50), ("spine", 512, 25)]
    assert (found.document.default_nodes, found.document.max_nodes) == (64, 64)


def test_four_nodes_of_a_fabric_are_planned_for_unless_asked() -> None:
    fabric = "slurm/tree-leaves-only.conf"
    document = read(H200, "H200", fabric, nic_gbps=400).document
    assert (document.default_nodes, document.max_nodes) == (4, 79)
    document = read(H200, "H200", fabric, nic_gbps=400, nodes=2).document
    assert (document.default_nodes, document.max_nodes) == (2, 79)


def test_one_node_without_a_fabric_has_no_network() -> None:
    document = read(H200, "H200").document
    assert (document.max_nodes, document.network, document.nvlink_domain) == (1, None, None)


def test_what_an_infiniband_subnet_says_is_used() -> None:
    found = read(H200, "H200", "ibnetdiscover/fattree-hdr-superbench.txt")
    document, network = found.document, found.document.network
    assert network is not None
    assert (network.kind, network.nic_bandwidth_bytes_per_s) == ("infiniband", 25e9)
    assert tiers(found) == [("leaf", 1), ("spine", 2), ("core", 2.5)]
    assert document.hosts[0] == "RMD701091901003"
    assert len(document.hosts) == document.max_nodes == 10
    assert "the node has 8 NICs, the hosts of fattree-hdr-superbench.txt have 1" in said(found)


def test_slurm_blocks_are_the_nvlink_domains_of_racks() -> None:
    nics = ("NIC0", "NIC1", "NIC4", "NIC5")
    found = read(GB200, "GB200", "slurm/block-topograph-nvl.conf", nic_gbps=400, nics=nics)
    domain = found.document.nvlink_domain
    assert domain is not None
    assert (domain.num_nodes, domain.num_switches, domain.multicast) == (8, 18, True)
    assert compiled_levels(found)[:2] == [("nvlink", 32, 900), ("blocks2", 64, 50)]
    assert found.document.node.count("nvswitch") == 0


def test_slurm_blocks_are_switches_where_gpus_have_no_nvlink_between_nodes() -> None:
    found = read(H200, "H200", "slurm/block.conf", nic_gbps=400)
    assert found.document.nvlink_domain is None
    assert tiers(found)[0] == ("block", 1)
    assert "no NVLink between nodes" in said(found)


def test_racks_are_runs_of_hosts_under_one_leaf() -> None:
    found = read(GB200, "GB200", "ibnetdiscover/gb200-pod-ndr.out", domain_nodes=18)
    domain = found.document.nvlink_domain
    assert domain is not None
    assert domain.units is not None
    assert max(domain.units) == domain.num_nodes == 18
    assert sum(domain.units) == 141
    assert "runs of 18 hosts" in said(found)


def test_a_rack_alone_needs_no_network() -> None:
    document = read(GB200, "GB200", domain_nodes=18).document
    assert (document.max_nodes, document.default_nodes, document.network) == (18, 18, None)
    assert compile_fabric(document).levels[0].unit_size == 72


def test_a_tray_of_a_rack_is_planned_alone_until_the_rack_is_named() -> None:
    found = read(GB200, "GB200")
    assert compiled_levels(found) == [("nvlink", 4, 900)]
    assert "--domain-nodes 18" in said(found)


def test_a_leaf_with_room_for_all_nodes_is_the_one_stage() -> None:
    for leaf_nodes in (4, 5):
        found = read(H200, "H200", nodes=4, nic_gbps=400, leaf_nodes=leaf_nodes)
        assert tiers(found) == [("fabric", 1)]
    found = read(H200, "H200", nodes=4, nic_gbps=400, leaf_nodes=3)
    assert tiers(found) == [("rail", 1), ("spine", 1)]


def test_leaves_that_nothing_joins_get_a_stage_and_the_assumption_says_so() -> None:
    found = read(H200, "H200", "slurm/tree-leaves-only.conf", nic_gbps=400, oversubscription=4)
    assert tiers(found) == [("leaf", 1), ("top", 4)]
    assert "joins s0, s1 and 3 more: one more stage" in said(found)
    assert "as much goes up" not in said(found)
    full = read(H200, "H200", "slurm/tree-leaves-only.conf", nic_gbps=400)
    assert "as much goes up from leaf" in said(full)


def test_blocks_are_domains_or_switches_and_never_said_to_be_both() -> None:
    blocks = "slurm/block-topograph-nvl.conf"
    rack = read(GB200, "GB200", blocks, nic_gbps=400)
    assert "is taken as one NVLink domain" in said(rack)
    assert "not as NVLink domains" not in said(rack)
    assert "the text shows no NVLinks" not in said(rack)
    board = read(H200, "H200", blocks, nic_gbps=400)
    assert "is taken as one NVLink domain" not in said(board)
    assert "not as NVLink domains" in said(board)


def test_boards_of_nvswitches_are_joined_or_left_apart_and_never_said_to_be_both() -> None:
    dgx2 = read("lstopo-xml/nvidia-dgx2.xml", None)
    assert "as in a DGX-2" in said(dgx2)
    assert "no links between them are planned" not in said(dgx2)


def test_tiers_called_like_hosts_get_another_name() -> None:
    text = "SwitchName=a Nodes=leaf[1-4]\nSwitchName=b Nodes=leaf[5-8]\nSwitchName=t Switches=a,b"
    node = (SAMPLES / H200).read_text()
    found = import_topology(
        node,
        node_source="n",
        gpu="H200",
        fabric_text=text,
        options=ImportOptions(nic_gbps=400),
    )
    assert [name for name, _ in tiers(found)] == ["leaf-switch", "spine"]


def test_hosts_with_every_name_of_a_tier_are_refused() -> None:
    names = ["leaf", "leaf-switch", *(f"leaf-switch{'-x' * i}" for i in range(1, 16))]
    text = f"SwitchName=a Nodes={','.join(f'{name}1' for name in names)}"
    with pytest.raises(InvalidInputError, match="rename them"):
        import_topology(
            (SAMPLES / H200).read_text(),
            node_source="n",
            gpu="H200",
            fabric_text=text,
            options=ImportOptions(nic_gbps=400),
        )


def test_the_nodes_rate_is_used_where_it_is_written_and_the_users_wins_aloud() -> None:
    written = read("nccl-topo-xml/h800-x8.xml", None, nodes=4)
    stated = read("nccl-topo-xml/h800-x8.xml", None, nodes=4, nic_gbps=200)
    networks = [found.document.network for found in (written, stated)]
    assert [n.nic_bandwidth_bytes_per_s for n in networks if n] == [50e9, 25e9]
    assert "the texts also have 400" in said(stated)
    assert "200 Gbit/s; " not in said(written)


def test_tcp_is_staged_and_slow_to_answer() -> None:
    rdma, tcp = (
        compile_fabric(
            read(H200, "H200", nodes=2, nic_gbps=400, kind="ethernet", gpudirect=how).document
        )
        for how in ("pxb", "off")
    )
    assert (rdma.levels[-1].path, tcp.levels[-1].path) == ("gpudirect", "staged")
    assert tcp.levels[-1].alpha_s > 2 * rdma.levels[-1].alpha_s


@pytest.mark.parametrize(
    ("node", "gpu", "fabric", "options", "where", "told"),
    [
        (H200, "H200", None, {"nodes": 8}, "nic_gbps", "--nic-gbps 400"),
        (H200, None, None, {}, "gpu", "--gpu H100"),
        (H200, "H300", None, {}, "GPU model", "H200"),
        (H200, "H200", None, {"nic_gbps": 400}, "nic_gbps", "how many"),
        (H200, "H200", None, {"layout": "rail", "nodes": 1}, "layout", "how many"),
        (H200, "H200", None, {"nodes": 4, "domain_nodes": 2}, "domain_nodes", "no NVLink between"),
        (H200, "H200", None, {"nodes": 8, "nic_gbps": 1, "oversubscription": 2}, "oversub", "leaf"),
        (H200, "H200", None, {"nics": ("eth0",)}, "nics", "mlx5_0"),
        (H200, "H200", None, {"nodes": 1_000_000, "nic_gbps": 400}, "", "1048576"),
        (GB200, "GB200", None, {"domain_nodes": 18, "nodes": 8, "kind": "ethernet"}, "kind", "one"),
        (GB200, "GB200", "slurm/block.conf", {"domain_nodes": 18}, "domain_nodes", "have 4"),
        (
            GB200,
            "GB200",
            None,
            {"domain_nodes": 18, "nodes": 72, "nic_gbps": 400, "leaf_nodes": 32},
            "",
            "whole units",
        ),
        (H200, "H200", "slurm/block.conf", {"nodes": 33, "nic_gbps": 400}, "nodes", "32"),
        (H200, "H200", "slurm/block.conf", {"leaf_nodes": 4, "nic_gbps": 1}, "leaf_nodes", "leaf"),
        (
            H200,
            "H200",
            "ibnetdiscover/fattree-hdr-superbench.txt",
            {"kind": "ethernet"},
            "kind",
            "infiniband",
        ),
        ("nvidia-smi-topo/h100-x8-hgx.txt", "H100", "slurm/block.conf", {}, "node", "no NIC"),
    ],
)
def test_what_is_missing_or_contradicts_a_text_is_refused(
    node: str, gpu: str | None, fabric: str | None, options: dict[str, Any], where: str, told: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read(node, gpu, fabric, **options)
    assert caught.value.where.startswith(where)
    assert told in str(caught.value)


def test_texts_given_in_each_others_place_are_told_apart() -> None:
    with pytest.raises(TopologyTextError, match="give it with --fabric"):
        read("slurm/block.conf", "H100")
    with pytest.raises(TopologyTextError, match="give it with --node"):
        read(H200, "H200", H200)


def test_remarks_name_their_text_and_line() -> None:
    found = read("nvidia-smi-topo/pcie-x8-all-sys-no-nic.txt", "RTX 4090")
    assert found.remarks[0].startswith("pcie-x8-all-sys-no-nic.txt, line 2: GPU0 and GPU1")


def test_a_hundred_assumptions_fit_in_a_document() -> None:
    """One for each of 90 slow NICs is more than a document holds."""
    nets = "".join(
        f'<pci busid="0000:{i:02x}:00.0" class="0x020700" link_speed="16.0 GT/s" link_width="16">'
        f'<nic><net name="mlx5_{i}" dev="{i}" speed="{400000 if i == 1 else 100000}" port="1" '
        'gdr="1"/></nic></pci>'
        for i in range(1, 91)
    )
    gpu = '<pci busid="0000:f0:00.0" class="0x030200"><gpu dev="0" sm="90" rank="0"/></pci>'
    text = f'<system version="1"><cpu numaid="0">{gpu}{nets}</cpu></system>'
    document = import_topology(text, node_source="x", gpu="H100").document
    assert document.node.count("nic") == 1
    assert len(document.assumptions) == 64
    assert document.assumptions[-1].startswith("and ")


# ------------------------------------------------------------------------------- telling formats


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<graphs version='1'><graph id='0'/></graphs>", "graph file"),
        ("<algo name='x'></algo>", "MSCCL"),
        ("<nvidia_smi_log></nvidia_smi_log>", "nvidia-smi -q"),
        ("<plist></plist>", "XML of <plist>"),
        (" \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n", "topo -p2p"),
        ("ClusterName=c\nNodeName=n[1-4] CPUs=8\n", "topology.conf"),
        ('{"model_type": "llama", "hidden_size": 8}', "--model"),
        ('{"zero_optimization": {}}', "DeepSpeed"),
        ("# nThread 1 nGpus 8\n#  size  out-of-place\n", "nccl-tests"),
        ("| NVIDIA-SMI 550.54   Driver Version: 550.54 |", "without 'topo -m'"),
        ("node:1:2 [0] NCCL INFO Bootstrap\n", "NCCL_TOPO_DUMP_FILE"),
        ("hello", "no known format"),
        ("[]", "no known format"),
        ("", "empty"),
        ("a\0b", "binary"),
    ],
)
def test_what_is_close_but_other_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(TopologyTextError) as caught:
        detect(text, "x.txt")
    assert told in str(caught.value)
    assert str(caught.value).startswith("x.txt: ")


def test_our_own_documents_need_no_import() -> None:
    text = load_topology("dgx-h100").model_dump_json()
    with pytest.raises(TopologyTextError, match="already a topology document"):
        detect(text, "x")


def test_the_text_decides_not_its_name_and_prose_around_it_does_no_harm() -> None:
    for row in rows():
        folder = row["file"].split("/")[0]
        wanted = {
            "nvidia-smi-topo": "nvidia-smi",
            "rocm-smi-showtopo": "rocm-smi",
            "amd-smi-topology": "amd-smi",
            "nccl-topo-xml": "nccl-xml",
            "lstopo-xml": "lstopo",
            "ibnetdiscover": "ibnetdiscover",
            "slurm": "slurm-yaml" if row["file"].endswith("yaml") else "slurm-conf",
        }.get(folder)
        if wanted is None:
            continue
        text = (SAMPLES / row["file"]).read_text("utf-8", errors="replace")
        assert detect(text, "stdin") == wanted
        if wanted not in ("nccl-xml", "lstopo"):
            assert detect(f"$ command\nas root:\n\n{text}\n$ exit\n", "stdin") == wanted


def test_one_gpu_prints_a_matrix_without_codes() -> None:
    assert detect("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n", "x") == "nvidia-smi"


def test_a_hostile_text_is_told_apart_in_a_moment() -> None:
    for line in ("GPU0 X " * 20, "a" * 79 + " ", "[" * 79, "-" * 300 + "GPU1\tX" + "\t" * 100):
        with pytest.raises(TopologyTextError):
            detect((line.replace("GPU0 X", "GPU X") + "\n") * (2_000_000 // len(line)), "x")


# ------------------------------------------------------------------------------------- devices


def test_gpus_without_bundled_kernels_bring_their_data_sheet() -> None:
    document: TopologyDocument = read(H200, "H200 NVL").document
    assert not isinstance(document.device, str)
    assert document.device.memory_bytes == gpu_model("H200 NVL").memory_bytes
    assert read("nvidia-smi-topo/h100-x8-hgx.txt", "H100").document.device == "h100-sxm-80gb"


@pytest.mark.parametrize("row", rows(), ids=lambda row: Path(row["file"]).name)
def test_something_can_be_planned_on_every_imported_device(row: Row) -> None:
    if row["levels"] == "refused":
        return
    figures = imported(row).document.device
    if isinstance(figures, str):
        assert figures in device_names()
    else:
        assert custom_device(**figures.model_dump()).peak_flop_per_s


def test_a_gpu_named_otherwise_than_the_text_does_wins_aloud() -> None:
    found = read("nccl-topo-xml/h800-x8.xml", "H100")
    assert found.document.device == "h100-sxm-80gb"
    assert "planned as H100 SXM; h800-x8.xml calls them NVIDIA H800" in said(found)


def test_nics_far_from_gpus_stay_and_a_lone_matrix_compiles() -> None:
    found = import_topology(
        MATRIX,
        node_source="m",
        gpu="L40S",
        options=ImportOptions(nodes=2, nic_gbps=100),
    )
    assert found.document.node.count("nic") == 2
    assert compiled_levels(found)[-1][:2] == ("fabric", 4)


def test_switches_keep_the_names_that_slurm_has_for_them() -> None:
    text = (SAMPLES / "slurm" / "tree-topograph-oci.conf").read_text("utf-8")
    node = (SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt").read_text("utf-8")
    found = import_topology(
        node,
        node_source="node",
        gpu="H200",
        fabric_text=text,
        options=ImportOptions(nic_gbps=400),
    ).document
    weak = degraded(found, parse_impairments(["leaf-1-1/rail0:spine-1=0.5"], []))
    names = {level.name: level.bytes_per_s for level in compile_fabric(weak, 96).levels}
    assert (names["leaf"], names["spine"], names["core"]) == (50e9, 25e9, 25e9)
    graph = build_graph(found, 96)
    assert {"leaf-1-1/rail0", "spine-1", "core"} <= set(graph)
    assert "leaf0/rail0" not in graph


def test_switches_that_are_called_like_others_are_numbered() -> None:
    """A host cannot be told from a switch of its name."""
    text = "SwitchName=a Nodes=n1\nSwitchName=n3 Nodes=n2,n3\nSwitchName=top Switches=a,n3\n"
    node = (SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt").read_text("utf-8")
    found = import_topology(
        node, node_source="node", gpu="H200", fabric_text=text, options=ImportOptions(nic_gbps=400)
    ).document
    assert found.network is not None
    assert [tier.unit_names for tier in found.network.tiers] == [None, None]
