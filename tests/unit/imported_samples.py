"""Every sample under tests/samples/topology, and what its machine's specification says.

``expected.csv`` there has, by file, what to say beside the text and the levels that follow from
data sheets: name, GPUs of a unit (of the largest, all hosts in use), GB/s of a GPU in one
direction. NVLink 1 to 5 have 20, 25, 25, 25, 50 GB/s a link, xGMI 46 to 76.8, PCIe 3.0 to 5.0 x16
15.75, 31.5, 63; over PCIe the slowest link that several share decides. A fabric joins nodes of
8 H200.

``python -m tests.unit.imported_samples`` writes the table of docs/topologies.md anew;
``test_import_cluster`` fails while the two differ.
"""

import csv
import re
from functools import cache
from pathlib import Path

from planner.errors import InvalidInputError
from planner.topology.compile import compile_fabric
from planner.topology.importers.cluster import Imported, ImportOptions, import_topology

__all__ = ["DOCS", "SAMPLES", "Row", "compiled_levels", "imported", "rows", "with_table"]

REPO = Path(__file__).parent.parent.parent
SAMPLES = REPO / "tests" / "samples" / "topology"
DOCS = REPO / "docs" / "topologies.md"
START, END = "<!-- table of samples: start -->", "<!-- table of samples: end -->"
_NODE_OF_FABRICS = "nvidia-smi-topo/h200-x8-8nic.txt"

Row = dict[str, str]


def rows() -> list[Row]:
    """Return the lines of expected.csv: file, gpu, nic_gbps, levels ("refused"), why."""
    return list(csv.DictReader((SAMPLES / "expected.csv").read_text("utf-8").splitlines()))


def imported(row: Row) -> Imported:
    """Return the topology of a sample."""
    return _imported(row["file"], row["gpu"] or None, row["nic_gbps"])


@cache
def _imported(file: str, gpu: str | None, nic_gbps: str) -> Imported:
    is_fabric = file.startswith(("slurm/", "ibnetdiscover/"))
    node = _NODE_OF_FABRICS if is_fabric else file
    return import_topology(
        (SAMPLES / node).read_bytes(),
        node_source=Path(node).name,
        gpu=gpu,
        fabric_text=(SAMPLES / file).read_bytes() if is_fabric else None,
        fabric_source=Path(file).name,
        options=ImportOptions(nic_gbps=float(nic_gbps) if nic_gbps else None),
    )


def compiled_levels(found: Imported) -> list[tuple[str, int, float]]:
    """Return (name, GPUs of a unit, GB/s of a GPU) of the levels of all nodes."""
    fabric = compile_fabric(found.document, found.document.max_nodes)
    return [(level.name, level.unit_size, level.bytes_per_s / 1e9) for level in fabric.levels]


def _line(row: Row) -> str:
    given = [f"`--{name.replace('_', '-')} {row[name]}`" for name in ("gpu", "nic_gbps")]
    said = ", ".join(text for text in given if not text.endswith(" `"))
    try:
        found = imported(row)
    except InvalidInputError as exc:
        name = Path(row["file"]).name
        why = re.sub(f"^{re.escape(name)}[:,] ", "", str(exc)).split(";")[0]
        return f"| {row['file']} | {said} | refused: {why} | | |"
    levels = ", ".join(f"{name} {size} x {rate:.4g}" for name, size, rate in compiled_levels(found))
    guessed, repaired = len(found.document.assumptions), len(found.remarks)
    return f"| {row['file']} | {said} | {levels} | {guessed} | {repaired} |"


def with_table(text: str) -> str:
    """Return the page with the table of today."""
    found = re.search(f"{re.escape(START)}.*{re.escape(END)}", text, re.DOTALL)
    assert found is not None, f"docs/topologies.md needs the lines {START} and {END}"
    lines = [
        "| Sample | Said | Levels: GPUs of a unit x GB/s of each | Assumptions | Remarks |",
        "|---|---|---|---|---|",
        *map(_line, rows()),
    ]
    table = "\n".join(lines)
    return f"{text[: found.start()]}{START}\n{table}\n{END}{text[found.end() :]}"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text("utf-8")), "utf-8")
