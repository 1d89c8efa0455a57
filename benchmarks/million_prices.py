"""Seconds to price a million calls: one all_reduce by every method, on four levels of a cluster.

    python -m benchmarks.million_prices [--prices 1000000] [--topology NAME] [--profile]

A price is one row of one method, with the choice between them: groups of any power of two and any
stride that fit, sizes from 1 KiB to 8 GiB, all drawn from a fixed seed. Rows come in chunks, as
``planner.cost.step`` hands them over. "Curves" are measured ones, which go before the model for
groups inside one node. Seconds are the least of five.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.cost.collectives import choose, collective_terms, legal_methods
from planner.cost.step import CHUNK_ROWS
from planner.layout.groups import Group, lay_group
from planner.plan import Collective, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric

REPEATS = 5
OP: Collective = "all_reduce"


def main() -> None:
    """Print the seconds of each method, then of all with the choice between them."""
    options = parse_arguments()
    document = load_topology(options.topology)
    fabric = compile_fabric(document, document.max_nodes)
    modelled = replace(fabric, curves=())
    methods = legal_methods(fabric, "executor", OP)
    chunks = rows_of(fabric, options.prices // len(methods))
    num_rows = sum(len(sizes) for _, sizes in chunks)
    names = ", ".join(level.name for level in fabric.levels)
    print(f"{options.topology}, {fabric.num_gpus:,} GPUs on {names}; {num_rows:,} rows of {OP}")
    for method in methods:
        seconds = timed(price, modelled, method, chunks)
        print(f"{method!s:28}{seconds:7.3f} s{1e9 * seconds / num_rows:8.0f} ns a row")
    prices = num_rows * len(methods)
    for name, one in (("all, chosen", modelled), ("all, chosen, with curves", fabric)):
        seconds = timed(choose_all, one, methods, chunks)
        print(f"{name:28}{seconds:7.3f} s{1e9 * seconds / prices:8.0f} ns a price")
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(choose_all, fabric, methods, chunks)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def rows_of(fabric: Fabric, num_rows: int) -> list[tuple[Group, np.ndarray]]:
    """Return groups and sizes, in chunks."""
    random = np.random.default_rng(0)
    most = fabric.num_gpus.bit_length() - 1
    powers = random.integers(1, most + 1, num_rows)
    strides = 1 << random.integers(0, most - powers + 1)
    sizes = np.floor(2.0 ** random.uniform(10, 33, num_rows))
    group = lay_group(fabric, 1 << powers, strides)
    chunks = np.split(np.arange(num_rows), range(CHUNK_ROWS, num_rows, CHUNK_ROWS))
    return [(group.take(rows), sizes[rows]) for rows in chunks]


def price(fabric: Fabric, method: Method, chunks: list[tuple[Group, np.ndarray]]) -> None:
    """Price every row by one method."""
    for group, sizes in chunks:
        collective_terms(OP, method, fabric, group, sizes).total_s()


def choose_all(
    fabric: Fabric, methods: tuple[Method, ...], chunks: list[tuple[Group, np.ndarray]]
) -> None:
    """Price every row by every method, and take the cheapest."""
    for group, sizes in chunks:
        choose(OP, fabric, group, sizes, methods)


def timed(action: Callable[..., None], *arguments: object) -> float:
    """Return the least seconds of the repeats."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action(*arguments)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prices", type=int, default=1_000_000)
    parser.add_argument("--topology", default="meta-24k-h100-roce")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
