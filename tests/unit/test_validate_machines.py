"""A few columns make the machine that the bundled topology of the same machine describes."""

import numpy as np
import pytest

from planner.cost.rates import rate_of
from planner.errors import InvalidInputError
from planner.layout.groups import lay_group
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.topology.fabric import Fabric
from planner.validate.machines import machine_document, machine_of
from tests.unit.measured_rows import question


def document(**change: str) -> TopologyDocument:
    return machine_document(machine_of(question(**change)))


def figures(fabric: Fabric) -> list[tuple[str, float, float, bool, float]]:
    """Return what the cost model reads of the levels; one stage of switches has no inner ones."""
    return [
        (level.kind, level.bytes_per_s, level.direct_share, level.multicast, level.oversubscription)
        for level in fabric.levels
    ]


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "gpus", "kind", "rate", "nics", "gbps", "library"),
    [
        ("dgx-h100", "H100 SXM5", 4, 8, "nvswitch", 450, 8, 400, "NCCL"),
        ("dgx-a100", "A100 80GB SXM4", 4, 8, "nvswitch", 300, 8, 200, "NCCL"),
        ("gb200-nvl72", "GB200", 36, 4, "nvl_domain", 900, 4, 400, "NCCL"),
        ("gb200-nvl72", "GB200", 2, 4, "nvl_domain", 900, None, None, "NCCL"),
        ("mi300x-8x400-ib", "MI300X", 4, 8, "xgmi", 448, 8, 400, "RCCL"),
        ("aws-p5", "H100 SXM5", 2, 8, "nvswitch", 450, 32, 100, "NCCL + aws-ofi-nccl"),
        ("aws-p4de", "A100 80GB SXM4", 2, 8, "nvswitch", 300, 4, 100, "aws-ofi-nccl"),
        ("gcp-a3-high", "H100 SXM5", 2, 8, "nvswitch", 450, 4, 200, "NCCL + TCPX"),
        ("a100-sxm-x4-4x200", "A100 SXM4", 2, 4, "nvlink", 300, 4, 200, "NCCL"),
        ("l40s-x8", "L40S", 1, 8, "pcie", 31.5, None, None, "NCCL"),
        ("arc-pro-b60-x4", "Arc Pro B60", 1, 4, "pcie", 31.5, None, None, "oneCCL"),
        ("rtx-2080ti-x2", "RTX 2080 Ti", 1, 2, "nvlink_pairs", 50, None, None, "NCCL"),
    ],
)
def test_columns_make_the_levels_of_the_bundled_topology(
    name: str,
    gpu: str,
    nodes: int,
    gpus: int,
    kind: str,
    rate: float,
    nics: int | None,
    gbps: float | None,
    library: str,
) -> None:
    made = compile_fabric(
        document(
            gpu=gpu,
            n_nodes=str(nodes),
            gpus_per_node=str(gpus),
            n_ranks=str(nodes * gpus),
            intra_kind=kind,
            intra_GBps_per_gpu=str(rate),
            nics_per_node=str(nics or ""),
            nic_gbps=str(gbps or ""),
            library_version=library,
        )
    )
    known = compile_fabric(load_topology(name), nodes)
    assert made.library == known.library
    assert made.architecture == known.architecture
    assert figures(made) == figures(known)
    latencies = zip(made.levels, known.levels, strict=True)
    assert all(
        ours.alpha_s == pytest.approx(theirs.alpha_s, abs=0.3e-6) for ours, theirs in latencies
    )


def test_gpus_that_take_part_bring_their_own_nics() -> None:
    """One GPU of eight has one NIC of eight, not all: its neighbours' are theirs."""
    alone = compile_fabric(document(n_ranks="2"))
    assert alone.num_gpus == 2
    assert alone.levels[-1].bytes_per_s == 50e9
    half = document(n_ranks="8")
    assert compile_fabric(half).levels[-1].bytes_per_s == 50e9
    assert any("4 of 8 GPUs" in said for said in half.assumptions)


@pytest.mark.parametrize("gpus_per_node", ["8", "2"])
def test_two_gpus_of_a_mesh_have_one_of_its_links_however_many_a_node_is_said_to_have(
    gpus_per_node: str,
) -> None:
    mesh = {"gpu": "MI300X", "intra_kind": "xgmi", "intra_GBps_per_gpu": "448"}
    node = compile_fabric(document(n_nodes="1", n_ranks="2", gpus_per_node=gpus_per_node, **mesh))
    pair = lay_group(node, np.array([2]), np.array([1]))
    rate = rate_of(node.levels[0], pair, pair.members[0], direct=False, nominal=True)
    assert rate == pytest.approx(64e9)


def test_a_node_that_is_alone_is_described_whole() -> None:
    """So that what was measured on such a board applies to any group of it."""
    fabric = compile_fabric(document(n_nodes="1", n_ranks="2"))
    assert fabric.num_gpus == 8
    assert {curve.group_size for curve in fabric.curves} == {2, 4, 8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nics_per_node": "", "nic_gbps": ""}, "8 NICs of 400 Gb/s as is standard for 8 x H100"),
        ({"intra_GBps_per_gpu": ""}, "450 GB/s by the data sheet of H100 SXM"),
        ({"intra_kind": ""}, "not given: NVSwitches between 8 x H100 SXM"),
        ({"gpu": "SM90"}, "GPU 'SM90' is not known"),
        ({}, "the network is InfiniBand"),
        ({"n_nodes": "32", "n_ranks": "128", "gpus_per_node": "4", "gpu": "GB200",
          "intra_kind": "nvl_domain"}, "spread evenly over 2 racks"),
    ],
)  # fmt: skip
def test_what_the_columns_leave_open_is_said(change: dict[str, str], said: str) -> None:
    found = document(**change)
    assert any(said in assumption for assumption in found.assumptions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "A40", "nics_per_node": "", "nic_gbps": ""}, "no standard is known for A40"),
        ({"gpu": "Gaudi", "intra_kind": ""}, "'Gaudi' is not known"),
        ({"gpu": "SM90", "intra_GBps_per_gpu": ""}, "links of 'SM90' are not known"),
        ({"intra_kind": "ualink"}, "intra_kind='ualink' is not known"),
        ({"nics_per_node": "0"}, "cannot join 2 nodes"),
    ],
)
def test_a_machine_that_the_columns_do_not_make_is_refused(
    change: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        document(**change)
