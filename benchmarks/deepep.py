"""DeepEP's dispatch and combine as measured, against the deduplicated exchange as modelled.

    python -m benchmarks.deepep [benchmarks/data/deepep_normal.csv]

The table is that of ai-dynamo/aiconfigurator 095f58a51c (Apache-2.0; DeepEP in normal mode under
SGLang 0.5.0 and 0.5.12, best over SM counts; tokens are those of one rank, routing is random).
Prints, per GPU, number of nodes and direction, how many rows, the median of predicted over
measured, and the median absolute error; small are exchanges of at most 1,024 tokens a rank.

Nothing is fitted here. The time compared is that of the transfer; the notice of counts that goes
before a dispatch between nodes, and the waiting it includes, is left out. Dispatch sends fp8 with
one fp32 scale for 128 elements, combine bf16: the table does not say so, but of one node both reach
the same bytes/s only if that is meant. Nodes beyond one: H100 alone, one shape (DeepSeek-V3's).
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from planner.cost.expert_traffic import copies_per_token, deduplicated_s
from planner.layout.groups import lay_group
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric

TABLE: Final = Path(__file__).parent / "data" / "deepep_normal.csv"
CLUSTERS: Final = {
    "h100_sxm": "dgx-h100",
    "b200_sxm": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
ELEMENT_BYTES: Final = {"dispatch": 1 + 4 / 128, "combine": 2.0}
SMALL_TOKENS: Final = 1024

Row = dict[str, str]
Key = tuple[str, int, str, str]


def main() -> None:
    """Print the table."""
    with parse_arguments().csv.open(newline="") as file:
        found = ratios(csv.DictReader(file))
    print(
        f"{'gpu':9} {'nodes':>5} {'direction':9} {'size':5} {'rows':>5} {'ratio':>6} {'error':>7}"
    )
    for (gpu, nodes, direction, size), of_key in sorted(found.items()):
        error = statistics.median(abs(ratio - 1) for ratio in of_key)
        median = statistics.median(of_key)
        print(
            f"{gpu:9} {nodes:5} {direction:9} {size:5} {len(of_key):5} {median:6.2f} {error:7.1%}"
        )


def ratios(rows: Iterable[Row]) -> dict[Key, list[float]]:
    """Return predicted over measured seconds by GPU, nodes, direction and size."""
    found: dict[Key, list[float]] = defaultdict(list)
    for row in rows:
        size = "small" if int(row["num_token"]) <= SMALL_TOKENS else "large"
        for direction in ELEMENT_BYTES:
            measured_s = float(row[f"{direction}_transmit_us"]) * 1e-6
            key = (row["gpu"], int(row["node_num"]), direction, size)
            found[key].append(predicted_s(row, direction) / measured_s)
    return found


def predicted_s(row: Row, direction: str) -> float:
    """Return the seconds of one row's exchange over all its GPUs."""
    on, nodes = fabric(CLUSTERS[row["gpu"]], int(row["node_num"])), int(row["node_num"])
    ranks = nodes * on.gpus_per_node
    group = lay_group(on, np.array([ranks]), np.array([1]))
    experts, top_k = int(row["num_experts"]), int(row["num_topk"])
    token_bytes = int(row["num_token"]) * int(row["hidden_size"]) * ELEMENT_BYTES[direction]
    rank_bytes, unit_bytes = (
        np.array([token_bytes * copies_per_token(experts, top_k, parts)])
        for parts in (ranks, nodes)
    )
    return float(deduplicated_s(on, group, rank_bytes, unit_bytes)[0])


@cache
def fabric(topology: str, nodes: int) -> Fabric:
    """Return some nodes of a bundled cluster."""
    return compile_fabric(load_topology(topology), nodes)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="DeepEP measured against modelled")
    parser.add_argument("csv", type=Path, nargs="?", default=TABLE)
    return parser.parse_args()


if __name__ == "__main__":
    main()
