"""Seconds to find the bounds of collectives on A100 boxes, beside ForestColl's in one run.

    git clone https://github.com/liangyuRain/ForestColl /tmp/ForestColl
    python benchmarks/collective_bounds.py --forestcoll /tmp/ForestColl

Both see the same graph, ForestColl's ``a100_topology``, and must find the same all-gather bound.
CPU seconds, the median of the repeats.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx

from planner.topology.bounds import (
    all_gather_bound,
    all_reduce_bound,
    all_to_all_bound,
    broadcast_bound,
)

BOUNDS = (all_gather_bound, all_reduce_bound, broadcast_bound, all_to_all_bound)


def main() -> None:
    """Print a line for each number of boxes; refuse bounds that differ."""
    options = parse_arguments()
    # First on the path: a package of ours is called topologies, too.
    sys.path.insert(0, str(options.forestcoll))
    algorithm = importlib.import_module("pipeline_allgather").OptimalBranchingsAlgo
    topology = importlib.import_module("topologies").a100_topology
    names = ["ForestColl", *(find.__name__.removesuffix("_bound") for find in BOUNDS)]
    print("GPUs   GB/s" + "".join(f"{name:>12}" for name in names))
    for num_boxes in (1, 2, 4):
        graph, gpus = topology(num_boxes)
        links, workers = as_ours(graph, gpus)
        theirs = partial(forestcoll_bound, algorithm, graph, gpus)
        calls: list[Callable[[], object]] = [
            theirs,
            *(partial(find, links, workers) for find in BOUNDS),
        ]
        seconds = "".join(f"{timed(call, options.repeats):12.3f}" for call in calls)
        bound = all_gather_bound(links, workers).seconds_per_byte * 1e9
        if abs(bound / theirs() - 1) > 1e-9:
            raise SystemExit(f"{len(gpus)} GPUs: ours is {bound} s/GB, ForestColl's {theirs()}")
        print(f"{len(gpus):4}{1 / bound:7.1f}{seconds}")


def forestcoll_bound(algorithm: Any, graph: Any, gpus: Any) -> float:
    """Return ForestColl's seconds per GB."""
    search = algorithm(graph, capacitated=True, compute_nodes=gpus)
    return float(search.convertToRuntime(*search.binary_search()))


def as_ours(graph: Any, gpus: Any) -> tuple["nx.Graph[str]", list[str]]:
    """Return their directed graph, the same both ways, with our names and bytes/s."""
    links: nx.Graph[str] = nx.Graph()
    links.add_edges_from(
        (str(a), str(b), {"bandwidth_bytes_per_s": capacity * 1e9})
        for a, b, capacity in graph.edges(data="capacity")
    )
    return links, [str(gpu) for gpu in gpus]


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the median CPU seconds of ``call``."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forestcoll", type=Path, required=True, help="a clone of ForestColl")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
