"""The lab's command line."""

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

from benchmarks.lab.cluster import Cluster, Order, cluster_of
from benchmarks.lab.documents import LAB_TOPOLOGIES, lab_topology
from benchmarks.lab.errors import LabError
from benchmarks.lab.launch import launch
from benchmarks.lab.network import ISOLATED, count_bytes, exit_unless_possible
from benchmarks.lab.world import World
from planner.errors import InvalidInputError

__all__: list[str] = []

_EXIT_BAD_INPUT = 2
# The highest rate at which the cores were seen to keep up on every link.
_MOST_BYTES_PER_S = 125e6
_USAGE = "python -m benchmarks.lab run [-h] [--order ORDER] [--bytes] topology -- command ..."
_RUN = """Run a command once per rank. Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT as torchrun sets them, GLOO_SOCKET_IFNAME, and OMP_NUM_THREADS=1."""


def main() -> int:
    """Do what the command line says and return the exit code."""
    options = _options()
    try:
        if options.verb == "world":
            world = World.draw(options.seed, options.ranks)
            options.output.write_text(world.model_dump_json(indent=2) + "\n")
            return 0
        cluster = cluster_of(lab_topology(options.topology), options.order)
        if options.verb == "show":
            _show(cluster)
            return 0
        return _run(cluster, options)
    except (InvalidInputError, LabError, OSError) as error:
        sys.stderr.write(f"lab: {error}\n")
        return _EXIT_BAD_INPUT if isinstance(error, InvalidInputError) else 1


def _run(cluster: Cluster, options: argparse.Namespace) -> int:
    if not options.inside:
        exit_unless_possible()
        _warn_of_the_cores(cluster)
        again = (sys.executable, "-m", "benchmarks.lab", "run", "--inside", *sys.argv[2:])
        os.execvp(ISOLATED[0], (*ISOLATED, *again))
    code = launch(cluster, options.command)
    if options.bytes:
        for (lower, upper), (up, down) in count_bytes(cluster).items():
            print(f"{lower} -> {upper}: {up:,} bytes, back: {down:,} bytes")
    return code


def _warn_of_the_cores(cluster: Cluster) -> None:
    most = max((link.bytes_per_s for link in cluster.links), default=0.0)
    if most > _MOST_BYTES_PER_S:
        sys.stderr.write(
            f"lab: links of {most * 8 / 1e6:g} Mbit/s, above {_MOST_BYTES_PER_S * 8 / 1e6:g}: "
            "the cores will be the limit, not the links\n"
        )


def _show(cluster: Cluster) -> None:
    _warn_of_the_cores(cluster)
    for host, ranks in zip(cluster.hosts, cluster.units, strict=True):
        print(f"host {host}: ranks {', '.join(map(str, ranks))}")
    for link in cluster.links:
        print(f"{link.lower} - {link.upper}: {link.bytes_per_s * 8 / 1e6:g} Mbit/s each way")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser(
        "run", help="run a command once per rank", usage=_USAGE, description=_RUN
    )
    show = verbs.add_parser("show", help="print hosts, ranks and links")
    for verb in (run, show):
        verb.add_argument("topology", help=f"a file or a name: {', '.join(LAB_TOPOLOGIES)}, ...")
        verb.add_argument("--order", choices=get_args(Order), default="natural")
    run.add_argument(
        "--bytes",
        action="store_true",
        help="print what crossed every link since the lab started, the ranks' rendezvous included",
    )
    run.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    run.add_argument("command", nargs="+", help="after --")
    world = verbs.add_parser("world", help="draw a hidden world: how long devices really compute")
    world.add_argument("--seed", type=int, required=True)
    world.add_argument("--ranks", type=int, required=True)
    world.add_argument("-o", "--output", type=Path, required=True)
    options, unknown = parser.parse_known_args()
    if options.verb == "run" and "--" not in sys.argv:
        run.error(f"put -- before the command: run {options.topology} -- {options.command[0]} ...")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
