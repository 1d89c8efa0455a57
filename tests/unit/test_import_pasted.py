"""Listings as people paste them: with the GPUs named above, in reports, issues and logs."""

import time
from pathlib import Path

import pytest

from planner.errors import InvalidInputError
from planner.topology.importers.cluster import Imported, ImportOptions, import_topology
from planner.topology.importers.detect import detect
from planner.topology.importers.dump import TopologyTextError
from planner.topology.importers.fabric.slurm import read_slurm_conf, read_slurm_yaml
from planner.topology.importers.smi.printed_models import printed_models

SAMPLES = Path(__file__).parents[1] / "samples" / "topology"
MATRIX = (SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt").read_text("utf-8")
XGMI = (SAMPLES / "rocm-smi-showtopo" / "mi308x-x8.txt").read_text("utf-8")
NCCL = (SAMPLES / "nccl-topo-xml" / "oci-h100.xml").read_text("utf-8")
H100 = "NVIDIA H100 80GB HBM3"


def imported(text: str | bytes, gpu: str | None = "H200") -> Imported:
    return import_topology(text, node_source="pasted", gpu=gpu)


def device(text: str) -> str:
    """Return the GPU that a text is planned with when the user names none."""
    found = imported(text, gpu=None).document.device
    return found if isinstance(found, str) else found.name


@pytest.mark.parametrize(
    "before",
    [
        "$ nvidia-smi -L\n" + "".join(f"GPU {i}: {H100} (UUID: GPU-ad53-{i})\n" for i in range(8)),
        f"CUDA available: True\nGPU 0,1,2,3,4,5,6,7: {H100}\n"
        "GPU 0,1,2,3,4,5,6,7 Compute Capability: 9.0\nNVIDIA Topology:\n",
        f"GPU models and configuration : \nGPU 0: {H100}\nGPU 1: {H100}\n\nGPU Topology:\n",
        f"GPU models and configuration: GPU 0: {H100}\n",
        f"|   0  {H100}          On  |   00000000:18:00.0 Off |                    0 |\n",
        f"index, name, memory.total [MiB]\n0, {H100}, 81559 MiB\n",
        f"{H100}, 81559 MiB\n",
        f"| 4 | {H100} | 81559 MiB | 9.0 |\n",
        f"    Product Name                          : {H100}\n",
        f"CPU: AMD EPYC 9654\nGPU: 8 * {H100}\n",
        f"0: GPU 0: {H100} (UUID: GPU-ad53)\n",
    ],
)
def test_a_gpu_that_the_paste_names_need_not_be_named(before: str) -> None:
    assert device(before + MATRIX) == "h100-sxm-80gb"


@pytest.mark.parametrize(
    "before",
    [
        "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X\n",
        "GPU[0]\t\t: Device Name: \t\tAMD Instinct MI300X\n",
        "GPU models and configuration: AMD Instinct MI300X (gfx942:sramecc+:xnack-)\n",
        "        MARKET_NAME: AMD Instinct MI300X\n",
    ],
)
def test_an_amd_gpu_that_the_paste_names_need_not_be_named(before: str) -> None:
    assert device(before + XGMI) == "mi300x"


@pytest.mark.parametrize(
    "line",
    [
        "GPU 0: 80 MiB of memory used",
        "|   0  Tesla V100-SXM2...  On   | 00000000:1B:00.0 Off |",  # cut off by the driver
        "GPU0\t X \tNV18\t0-47\t0",
        "NVIDIA Topology:",
        "| NVIDIA-SMI 570.211.01    Driver Version: 570.211.01     CUDA Version: 12.8 |",
        "NVIDIA Nsight runs on a machine with 8 GPUs",
    ],
)
def test_what_names_no_gpu_is_no_name(line: str) -> None:
    assert printed_models([line]) == {}


def test_gpus_of_two_models_in_the_paste_are_a_question() -> None:
    names = "GPU 0: NVIDIA H100 80GB HBM3\nGPU 1: NVIDIA H200\n"
    with pytest.raises(InvalidInputError, match="several models"):
        imported(names + MATRIX, gpu=None)


def test_a_gpu_that_the_user_names_wins_over_the_paste() -> None:
    found = imported(f"GPU 0: {H100}\n" + MATRIX)
    assert any("H200 SXM; pasted calls them NVIDIA H100" in a for a in found.document.assumptions)


@pytest.mark.parametrize(
    "wrap",
    [
        "<details><summary>GPU topology</summary>\n\n```\n{}```\n\n</details>\n",
        "root@pod-7f9c:/# nvidia-smi topo -m\nDefaulted container 'a' out of: a, b (init)\n{}",
        "Failed to get peer-to-peer status: Not Supported\n{}",
        "node01 | CHANGED | rc=0 >>\n{}",
    ],
)
def test_what_stands_around_a_matrix_changes_nothing(wrap: str) -> None:
    assert imported(wrap.format(MATRIX)).document == imported(MATRIX).document


@pytest.mark.parametrize("prefix", ["0: ", "> ", "2026-01-05T10:11:12.123Z ", "[1,0]<stdout>:"])
def test_what_stands_before_each_line_changes_nothing(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in MATRIX.splitlines())
    assert imported(text).document == imported(MATRIX).document


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_text_that_windows_wrote_is_read(encoding: str) -> None:
    windows = MATRIX.replace("\n", "\r\n").encode(encoding)
    assert imported(windows).document == imported(MATRIX).document


def test_two_tasks_that_print_the_same_are_one_remark() -> None:
    text = "".join(f"{rank}: {line}\n" for line in MATRIX.splitlines() for rank in (0, 1))
    found = imported(text)
    assert found.document == imported(MATRIX).document
    assert [remark.split(": ", 1)[1] for remark in found.remarks] == [
        "left out: GPU0 and 15 other rows, printed before (line 3)"
    ]


def test_a_matrix_that_hides_nvlinks_says_so() -> None:
    text = "$ nvidia-smi topo -mp\n\tGPU0\tGPU1\nGPU0\tX\tNODE\nGPU1\tNODE\tX\n"
    hidden = "the text is of topo -mp, which shows no NVLinks: run nvidia-smi topo -m"
    assert hidden in imported(text).document.assumptions
    assert hidden not in imported(text.replace("-mp", "-m")).document.assumptions


def test_a_column_of_cpus_is_no_nic() -> None:
    text = "\tGPU0\tGPU1\tCPU\nGPU0\tX\tNV4\tPHB\nGPU1\tNV4\tX\tPHB\nCPU\tPHB\tPHB\tX\n"
    found = imported(text, gpu="RTX 3090")
    assert found.document.node.count("nic") == 0
    assert "column of CPUs" in found.remarks[0]


@pytest.mark.parametrize(
    "wrap", ["```xml\n{}\n```\n", "$ cat topo.xml\n{}\n$ exit\n", "<details>\n\n```\n{}```\n"]
)
def test_what_stands_around_xml_changes_nothing(wrap: str) -> None:
    assert detect(wrap.format(NCCL), "pasted") == "nccl-xml"
    found, alone = imported(wrap.format(NCCL), gpu=None), imported(NCCL, gpu=None)
    assert found.document == alone.document


def test_a_markdown_table_with_bold_names_is_read() -> None:
    def table(title: str, cell: str) -> str:
        head = f"**{title} Between Two GPUs**\n\n|   | GPU0 | GPU1 |\n| :--- | :--: | :--: |\n"
        return f"{head}| **GPU0** | 0 | {cell} |\n| **GPU1** | {cell} | 0 |\n\n"

    found = imported(table("Weight", "15") + table("Link Type", "XGMI"), gpu="MI210")
    assert [link.kind for link in found.document.node.links] == ["xgmi", "pcie"]


PRINTED_TREE = (
    "$ scontrol show topology\n"
    "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-3]\n"
    "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[4-7]\n"
    "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=tux[0-7] Switches=s[0-1]\n"
)
PRINTED_BLOCKS = (
    "BlockName=rack0 BlockIndex=0 Nodes=w0-[0-17] BlockSize=16\n"
    "BlockName=rack1 BlockIndex=1 Nodes=w1-[0-17] BlockSize=16\n"
    "AggregatedBlock=rack[0-1] BlockIndex=2 Nodes=w0-[0-17],w1-[0-17] BlockSize=32\n"
)


def test_what_scontrol_prints_is_the_topology_that_slurm_read() -> None:
    tree = read_slurm_conf(PRINTED_TREE, "pasted")
    assert [(tier.units, tier.unit_names) for tier in tree.tiers] == [
        ((4, 4), ("s0", "s1")),
        ((8,), ("s2",)),
    ]
    assert [str(remark) for remark in tree.remarks] == [
        "line 1: left out: '$ scontrol show topology', no entries of topology.conf"
    ]
    blocks = read_slurm_conf(PRINTED_BLOCKS, "pasted")
    assert blocks.domains is not None
    assert blocks.domains.units == (18, 18)
    assert [tier.units for tier in blocks.tiers] == [(36,)]
    assert blocks.remarks == ()


CONF = "SwitchName=leaf1 Nodes=gpu[1-16]\nSwitchName=leaf2 Nodes=gpu[17-32]\n"
YAML = (
    "- topology: fabric\n  cluster_default: true\n  tree:\n    switches:\n"
    "      - switch: leaf1\n        nodes: gpu[1-16]\n"
    "      - switch: leaf2\n        nodes: gpu[17-32]\n"
)


@pytest.mark.parametrize(
    "wrap",
    [
        "```\n{}```\n",
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  topology.conf: |\n{}",
        "slurm.conf:\n  TopologyPlugin=topology/tree\n\ntopology.conf:\n{}",
    ],
)
def test_what_stands_around_switches_changes_nothing(wrap: str) -> None:
    alone = read_slurm_conf(CONF, "pasted")
    text = wrap.format("".join(f"    {line}\n" for line in CONF.splitlines()))
    assert detect(text, "pasted") == "slurm-conf"
    found = read_slurm_conf(text.replace("16]", "16]   \N{LEFTWARDS ARROW} one leaf"), "pasted")
    assert (found.hosts, found.tiers) == (alone.hosts, alone.tiers)
    assert any("left out" in remark.text for remark in found.remarks)


@pytest.mark.parametrize("wrap", ["```yaml\n{}```\n", "$ cat topology.yaml\n{}$ exit\n"])
def test_what_stands_around_a_list_of_topologies_changes_nothing(wrap: str) -> None:
    found = read_slurm_yaml(wrap.format(YAML), "pasted")
    assert found.tiers == read_slurm_yaml(YAML, "pasted").tiers
    assert [remark.text for remark in found.remarks] == [
        "left out: what stands around the list of topologies"
    ]


def test_a_config_map_with_a_topology_is_read_and_lines_are_its_own() -> None:
    inner = "".join(f"    {line}\n" for line in YAML.splitlines())
    text = f"configFiles:\n  topology.yaml: |\n    ---\n{inner}other: 1\n"
    assert read_slurm_yaml(text, "pasted").tiers == read_slurm_yaml(YAML, "pasted").tiers
    with pytest.raises(TopologyTextError) as caught:
        read_slurm_yaml(text.replace("gpu[17-32]", "gpu[17-"), "pasted")
    assert caught.value.line == 10


def test_comments_around_a_list_of_topologies_are_no_remark() -> None:
    assert read_slurm_yaml(f"# ours\n---\n{YAML}", "pasted").remarks == ()


def test_a_switch_whose_nodes_register_later_is_left_out() -> None:
    found = read_slurm_yaml(YAML + "      - switch: leaf3\n", "pasted")
    assert found.tiers == read_slurm_yaml(YAML, "pasted").tiers
    assert "line 9: switch 'leaf3' has no nodes below it: left out" in map(str, found.remarks)


@pytest.mark.parametrize(
    "line", ["| 0 NVIDIA " + " " * 380 + "|", "GPU 0," * 60, "NVIDIA " * 55, "8 x NVIDIA " * 35]
)
def test_a_log_of_three_megabytes_around_a_matrix_takes_under_two_seconds(line: str) -> None:
    text = f"{line}\n" * (3_000_000 // len(line)) + MATRIX
    start = time.process_time()
    assert imported(text).document.node.count("gpu") == 8
    assert time.process_time() - start < 2


def joined(fabric: str, **options: int) -> Imported:
    """Return nodes of 8 H200 on a fabric."""
    return import_topology(
        MATRIX,
        node_source="node",
        gpu="H200",
        fabric_text=fabric,
        fabric_source="fabric",
        options=ImportOptions(nic_gbps=400, **options),
    )


def test_switches_above_one_that_joins_all_are_left_out_and_that_is_said() -> None:
    above = "SwitchName=core Switches=spine\nSwitchName=spine Switches=leaf[1-2]\n"
    document = joined(above + CONF).document
    assert document.network is not None
    assert [tier.name for tier in document.network.tiers] == ["leaf", "spine"]
    assert (
        "one spine joins all hosts, what is above it (core) joins nothing more: left out"
        in " ".join(document.assumptions)
    )


def test_a_flat_topology_needs_the_number_of_nodes_and_no_more() -> None:
    flat = "- topology: all\n  cluster_default: true\n  flat: true\n"
    with pytest.raises(InvalidInputError, match="fabric names no nodes; say how many"):
        joined(flat)
    document = joined(flat, nodes=4).document
    assert document.max_nodes == 4
    assert document.network is not None
    assert [tier.num_nodes for tier in document.network.tiers] == [None]
