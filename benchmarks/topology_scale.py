"""Time and peak memory of a large cluster: its graph built, its fabric compiled.

    python benchmarks/topology_scale.py [--topology dgx-h100] [--nodes 4096] [--runs 3]

Every run is a process of its own, so that its peak is its own; the peak includes the interpreter
and what it imports, which the last column gives by itself.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from typing import Final

from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.graph import build_graph

# What getrusage counts in: bytes on macOS, KiB elsewhere.
PEAK_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Print a line per run."""
    options = parse_arguments()
    nodes = options.nodes or load_topology(options.topology).max_nodes
    processes = multiprocessing.get_context("spawn")
    print(f"{options.topology}, {nodes:,} nodes")
    print("   GPUs  vertices     links  build s  compile s  peak MiB  of it imports")
    for _ in range(options.runs):
        with processes.Pool(1) as pool:
            print(pool.apply(one_run, (options.topology, nodes)))


def one_run(topology: str, nodes: int) -> str:
    """Return the figures of one run, which should be the first thing its process does."""
    imports = peak_bytes()
    document = load_topology(topology)
    start = time.perf_counter()
    graph = build_graph(document, nodes)
    built = time.perf_counter()
    fabric = compile_fabric(document, nodes)
    build_s, compile_s = built - start, time.perf_counter() - built
    return (
        f"{fabric.num_gpus:7,} {graph.number_of_nodes():9,} {graph.number_of_edges():9,}"
        f" {build_s:8.2f} {compile_s:10.3f} {peak_bytes() / 2**20:9.0f} {imports / 2**20:14.0f}"
    )


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT_BYTES


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", default="dgx-h100")
    parser.add_argument("--nodes", type=int, help="most of the topology if not given")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
