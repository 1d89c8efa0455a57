"""Published times of one node belong to the boards they were measured on, and to no other."""

import csv
import gzip
import tomllib
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from planner.calibrate.measured import broken_laws
from planner.cost.curves import matching, measured_s
from planner.hardware.known_curves import known_curves
from planner.layout.groups import lay_group
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.impair import degraded, parse_impairments

REPO = Path(__file__).parent.parent.parent
TABLE = "nccl_single_node.csv.gz"
# Topology -> the board in the table, and the newest library that it was measured with.
BOARDS = {
    "dgx-a100": ("a100_sxm", "nccl/2.27.3"),
    "dgx-h100": ("h100_sxm", "nccl/2.29.2"),
    "dgx-b200": ("b200_sxm", "nccl/2.29.2"),
    "gb200-nvl72": ("gb200", "nccl/2.29.2"),
    "gb300-nvl72": ("gb300", "nccl/2.29.2"),
    "rtx-pro-6000-x8": ("rtx_pro_6000_server", "nccl/2.29.2"),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    packed = resources.files("planner.hardware").joinpath(TABLE).read_bytes()
    return list(csv.DictReader(gzip.decompress(packed).decode().splitlines()))


@pytest.mark.parametrize("name", BOARDS)
def test_a_node_takes_what_the_table_says_on_such_boards(
    name: str, rows: list[dict[str, str]]
) -> None:
    """Every row of the newest library is found again through the fabric."""
    fabric = compile_fabric(load_topology(name), 1)
    board, library = BOARDS[name]
    wanted = [row for row in rows if (row["gpu"], row["lib"]) == (board, library)]
    seen = 0
    for one in fabric.curves:
        group = lay_group(fabric, np.array([one.group_size]), np.array([1]))
        assert one in [found for found, _ in matching(fabric, one.op, group)]
        mine = [r for r in wanted if (r["op"], int(r["num_gpus"])) == (one.op, one.group_size)]
        sizes = np.array([float(row["size_bytes"]) for row in mine])
        expected = [float(row["time_us"]) * 1e-6 for row in mine]
        assert measured_s(one, sizes).tolist() == expected
        seen += len(mine)
    assert seen == len(wanted) > 0
    assert all(f"{board}, {library}" in one.source for one in fabric.curves)


@pytest.mark.parametrize("name", [name for name in BOARDS if name != "rtx-pro-6000-x8"])
def test_no_board_is_faster_than_its_links(name: str) -> None:
    """Of the machine on PCIe the link between its CPUs is assumed, not known."""
    document = load_topology(name)
    said = [s for one in compile_fabric(document, 1).curves for s in broken_laws(one, document)]
    assert [sentence for sentence in said if "faster" in sentence] == []


OTHERS = """
dgx-a100-40gb hgx-h200-8x400 hgx-h800-8x400 l40s-x8 mi300x-8x400-ib hgx-h100-half-4x400-roce
a100-sxm-x4-4x200 local-gloo
"""


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_gpus_and_other_counts_have_none(name: str) -> None:
    assert compile_fabric(load_topology(name), 1).curves == ()


def test_a_node_with_fewer_links_or_none_has_none() -> None:
    document = load_topology("dgx-h100")
    weak = degraded(document, parse_impairments(("n3/gpu0:n3/nvswitch-outer0=0.5",), ()))
    assert compile_fabric(document, 2).curves
    assert compile_fabric(weak, 2).curves == compile_fabric(document, 2).curves
    assert compile_fabric(weak, 4).curves == ()
    node = document.node
    slower = tuple(
        link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s / 2})
        if link.kind == "nvlink"
        else link
        for link in node.links
    )
    without = tuple(link for link in node.links if link.kind != "nvlink")
    for links in (slower, without):
        changed = document.model_copy(update={"node": node.model_copy(update={"links": links})})
        assert compile_fabric(changed, 1).curves == ()


def test_sets_of_l40s_and_unknown_devices_are_left_out() -> None:
    assert known_curves("L40S", 8) == known_curves("a device of mine", 8) == ()
    assert known_curves("NVIDIA H100 80GB HBM3", 8) == known_curves("h100-sxm-80gb", 8) != ()
    assert known_curves("h100-sxm-80gb", 4) == ()


def test_the_table_is_packaged() -> None:
    setup = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert any(fnmatch(TABLE, pattern) for pattern in setup["package-data"]["*"])
