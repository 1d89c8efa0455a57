"""Which method is the cheapest by size on eight machines, beside what the library takes by itself.

    python -m benchmarks.collective_thresholds [--write docs/collectives.md]

On all GPUs of one node, two and eight where the machine has as many (a node of an NVL72 is a tray;
36 are two racks), as an uncalibrated plan for the executor would choose; Megatron-LM has the
library's methods alone. Of the library's own choice the loss is the largest over powers of two from
1 KiB to 8 GiB. ``--write`` puts the table between its marks on the page.
"""

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from planner.cost.comparison import AtSize, Comparison, compare_methods
from planner.cost.compression import ranks_group
from planner.plan import Collective, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.units import format_bytes

MACHINES = (
    *("dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72", "aws-p5", "gcp-a3-ultra"),
    *("mi300x-8x400-roce", "rtx-pro-6000-x8"),
)
NODES = (1, 2, 8)
RACKS = {"gb200-nvl72": (36,)}
OPS: tuple[Collective, ...] = ("all_reduce", "all_gather", "all_to_all")
SIZES = tuple(1 << power for power in range(10, 34))
START, END = "<!-- thresholds: start -->", "<!-- thresholds: end -->"
HEADS = ("Machine", "Nodes", "Operation", "Cheapest", "The library takes", "and loses at most")


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page with the marks of the table")
    page = parser.parse_args().write
    table = "\n".join(
        [
            f"| {' | '.join(HEADS)} |",
            "|" + "---|" * len(HEADS),
            *(line for name in MACHINES for line in lines_of(name)),
        ]
    )
    print(table)
    if page is not None:
        before, rest = page.read_text("utf-8").split(START)
        page.write_text(f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}", "utf-8")


def lines_of(name: str) -> Iterator[str]:
    """Yield the lines of one machine; an operation that has one method at all sizes is short."""
    document = load_topology(name)
    for num_nodes in (*NODES, *RACKS.get(name, ())):
        if num_nodes > document.max_nodes:
            continue
        fabric = compile_fabric(document, num_nodes)
        group = ranks_group(fabric, fabric.num_gpus)
        for op in OPS:
            found = compare_methods(op, fabric, group, SIZES)
            cells = (name, str(num_nodes), op, cheapest(found), default(found), loss(found))
            yield f"| {' | '.join(cells)} |"


def cheapest(found: Comparison) -> str:
    """Return the thresholds in words."""
    if all(at.margin is None for at in found.sizes):
        return f"{found.sizes[0].cheapest} (there is no other)"
    return ", ".join(
        f"{Method(step.algorithm, step.path)} {_until(step.up_to_bytes)}".rstrip()
        for step in found.thresholds
    )


def default(found: Comparison) -> str:
    """Return what the library takes by itself, by size; empty where it has no choice."""
    runs = [list(run) for _, run in groupby(found.sizes, key=lambda at: at.library_default)]
    ends = [*(run[-1].size_bytes for run in runs[:-1]), None]
    return ", ".join(
        f"{run[0].library_default} {_until(end)}".rstrip()
        for run, end in zip(runs, ends, strict=True)
        if run[0].library_default is not None
    )


def loss(found: Comparison) -> str:
    """Return the most that the library's own choice loses, and where; empty without a choice."""
    if found.sizes[0].default_loses is None:
        return ""
    worst = max(found.sizes, key=_lost)
    share = f"{100 * _lost(worst):.0f} %"
    return share if share == "0 %" else f"{share} at {format_bytes(worst.size_bytes)}"


def _lost(at: AtSize) -> float:
    return at.default_loses or 0.0


def _until(end_bytes: int | None) -> str:
    return "" if end_bytes is None else f"to {format_bytes(end_bytes)}"


if __name__ == "__main__":
    main()
