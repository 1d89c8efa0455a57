"""Every collective method on emulated clusters, and what the planner would have chosen.

    python -m benchmarks.collective_choice measure [--shapes lab-2x2 ...] [-o FILE]
    python -m benchmarks.collective_choice rates [-o FILE]
    python -m benchmarks.collective_choice report [FILE]

``measure`` times all operations, methods and sizes in the lab (root, iproute2) and writes a line of
JSON for each; ``rates`` does so for a few sizes at four link rates; ``report`` fits alpha and
bandwidth to what was measured and prints the tables of docs/lab.md.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from benchmarks.lab import Lab, Order, exit_unless_possible, lab_topology, with_nic_rate
from benchmarks.lab.calls import Call, Problem, measure, problem_of
from benchmarks.lab.choices import Cell, Crossover, cells, crossovers, fitted
from planner.cost.traffic import busiest_exits
from planner.plan import CallFit
from planner.topology.document import TopologyDocument
from planner.units import format_bytes, format_rate, format_seconds

SHAPES: Final = ("lab-2x2", "lab-2x4", "lab-4x2", "loopback")
ORDERS: Final[tuple[Order, ...]] = ("natural", "interleaved")
KIB, MIB = 2**10, 2**20
SIZES_BYTES: Final = [KIB * 4**step for step in range(9)]  # 1 KiB to 64 MiB
# The first frame after a pause, 9 kB, passes a link at once: latency shows far below it, the rate
# far above.
RATE_SIZES_BYTES: Final = [64, 256 * KIB, MIB, 4 * MIB]
MBIT_PER_S: Final = (50, 100, 200, 400)
LINKS: Final = ("host", "trunk")
RATE_MARK: Final = " at "
REPEATS: Final = 5
RESULTS: Final = Path(__file__).parent / "results"


def main() -> None:
    """Run the chosen command."""
    options = parse_arguments()
    if options.command == "report":
        report(read(options.file))
        return
    exit_unless_possible()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file:
        if options.command == "rates":
            measure_rates(file, options.repeats)
        else:
            measure_shapes(file, options.shapes, options.orders, options.sizes, options.repeats)


# ------------------------------------------------------------------------------ measuring


def measure_shapes(
    file: TextIO,
    shapes: Sequence[str],
    orders: Sequence[Order],
    sizes_bytes: Sequence[int],
    repeats: int,
) -> None:
    """Write a line for every shape, order, operation, method and size."""
    for shape in shapes:
        document = lab_topology(shape)
        for order in orders if document.network else ORDERS[:1]:
            with Lab(document, order=order) as lab:
                write(file, measure(lab, document, sizes_bytes, repeats=repeats))


def measure_rates(file: TextIO, repeats: int) -> None:
    """Write two hosts at four link rates."""
    for mbit_per_s in MBIT_PER_S:
        document = with_nic_rate(lab_topology("lab-2x2"), mbit_per_s * 1e6 / 8)
        document = document.model_copy(update={"name": f"lab-2x2{RATE_MARK}{mbit_per_s} Mbit/s"})
        with Lab(document) as lab:
            write(file, measure(lab, document, RATE_SIZES_BYTES, repeats=repeats))


def write(file: TextIO, calls: Iterable[Call]) -> None:
    """Write and show each call as it is measured."""
    for call in calls:
        file.write(json.dumps(asdict(call)) + "\n")
        file.flush()
        print(
            f"{call.shape} {call.order:11} {call.op:14} {call.method!s:28} "
            f"{format_bytes(call.size_bytes):>9} {format_seconds(call.median_s):>9} "
            f"+- {call.spread / 2:.0%}",
            flush=True,
        )


def read(file: Path) -> list[Call]:
    """Return the calls of a file, or say what is wrong with it and exit."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        sys.exit(f"{file}: {error.strerror}; make it with `measure -o {file}`")
    calls = [call_of_line(f"{file}, line {at}", line) for at, line in enumerate(lines, 1)]
    return calls or sys.exit(f"{file} has no calls; make it with `measure -o {file}`")


def call_of_line(where: str, line: str) -> Call:
    """Return the call of a line that ``write`` wrote."""
    try:
        fields = json.loads(line)
        for name in ("seconds", "link_bytes"):
            fields[name] = tuple(fields[name])
        return Call(**fields)
    except (ValueError, TypeError, KeyError) as error:
        sys.exit(f"{where}: no call that `measure` wrote ({error}); measure again")


# ------------------------------------------------------------------------------ reporting


def document_of(shape: str) -> TopologyDocument:
    """Return the topology of a name that the commands above write."""
    name, _, rate = shape.partition(RATE_MARK)
    document = lab_topology(name)
    return with_nic_rate(document, float(rate.split()[0]) * 1e6 / 8) if rate else document


def report(calls: Sequence[Call]) -> None:
    """Print, shape by shape, times, bytes, fits, choices and crossovers, in Markdown."""
    print_rates(calls)
    for shape in dict.fromkeys(call.shape for call in calls):
        of_shape = [call for call in calls if call.shape == shape]
        natural = [call for call in of_shape if call.order == "natural"]
        problem, fits = fitted(problem_of(document_of(shape)), natural)
        print(f"\n## {shape}")
        print_bytes(problem, of_shape)
        print_fits(fits)
        print_choices(list(cells(problem, natural)))
        print_crossovers(list(crossovers(problem, natural)))
        for order in dict.fromkeys(call.order for call in of_shape):
            print_times([call for call in of_shape if call.order == order])


def print_rates(calls: Sequence[Call]) -> None:
    """Print what is fitted to one shape at several link rates, if that was measured."""
    rated = [call for call in calls if RATE_MARK in call.shape]
    shapes = list(dict.fromkeys(call.shape for call in rated))
    rows: dict[tuple[str, str], list[str]] = {}
    for shape in shapes:
        problem = problem_of(document_of(shape))
        network = problem.fabric.levels[-1]
        _, fits = fitted(problem, [call for call in rated if call.shape == shape])
        for fit in fits:
            level = next(level for level in fit.levels if level.level == network.name)
            rows.setdefault((fit.op, fit.path), []).append(
                f"{format_seconds(level.alpha_s)}, {level.bytes_per_s / network.bytes_per_s:.0%}"
            )
    if rows:
        print_table(
            "Alpha of the network, and its bytes/s over the rate that is set.",
            ("operation", "path", *shapes),
            ((*key, *row) for key, row in rows.items()),
        )


def print_table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n{heading}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def print_bytes(problem: Problem, calls: Sequence[Call]) -> None:
    """Print how far bytes on the busiest links are from the formula, from 1 MiB on."""
    off: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for call in calls:
        if call.size_bytes < MIB or not call.link_bytes:
            continue
        formula = formula_bytes(problem, call)
        for where, counted, expected in zip(LINKS, call.link_bytes, formula, strict=False):
            row = off.setdefault((call.op, str(call.method)), {})
            row.setdefault((call.order, where), []).append(counted / expected - 1)
    columns = list(dict.fromkeys(column for row in off.values() for column in row))
    if not columns:
        return
    print_table(
        "Bytes on the busiest link over those of the formula, less one: the farthest.",
        ("operation", "method", *(f"{order}, {where}" for order, where in columns)),
        (
            (*key, *(f"{max(row[c], key=abs):+.1%}" if c in row else "" for c in columns))
            for key, row in off.items()
        ),
    )


def formula_bytes(problem: Problem, call: Call) -> list[float]:
    """Return the bytes that should cross the busiest host link, and trunk, if there is a formula.

    Our own algorithms and hierarchies follow the hosts. The library's ring follows the ranks: if
    they are interleaved, every rank of a host sends out of it.
    """
    by_ranks = call.order == "interleaved" and call.path == "library"
    if by_ranks and call.algorithm == "tree":
        return []
    size = np.array([float(call.size_bytes)])
    exits = busiest_exits(call.op, call.method, problem.fabric, problem.group, size)[1:]
    factor = problem.fabric.gpus_per_node if by_ranks and call.algorithm == "ring" else 1
    return [factor * float(exit_bytes[0]) for exit_bytes in exits]


def print_fits(fits: Sequence[CallFit]) -> None:
    """Print alpha and bandwidth of every operation and path."""
    levels = list(dict.fromkeys(level.level for fit in fits for level in fit.levels))
    print_table(
        "Alpha and bytes/s of a rank when all send, as fitted; how far off the median call is.",
        ("operation", "path", *levels, "a message posted", "off by"),
        (
            (
                fit.op,
                fit.path,
                *(
                    f"{format_seconds(level.alpha_s)}, {format_rate(level.bytes_per_s, 'B/s')}"
                    for level in fit.levels
                ),
                "the prior" if fit.issue_s is None else format_seconds(fit.issue_s),
                f"{fit.levels[0].residual:.0%}",
            )
            for fit in fits
        ),
    )


def print_choices(found: Sequence[Cell]) -> None:
    """Print what was chosen and what it cost."""
    if not found:
        print("\nAt no size were all methods measured, of which the planner could choose.")
        return
    print_table(
        "What the planner chooses with these, and what that costs.",
        ("operation", "size", "default", "chosen", "takes", "best", "takes", "loss", "noise"),
        (
            (
                cell.op,
                format_bytes(cell.size_bytes),
                timed(cell.default),
                str(cell.chosen.method),
                timed(cell.chosen),
                str(cell.best.method),
                timed(cell.best),
                f"{cell.regret:.0%}",
                f"{cell.noise:.0%}",
            )
            for cell in found
        ),
    )
    for what, losses in (
        ("Loss against the best measured", [cell.regret for cell in found]),
        ("Beyond noise", [cell.regret_beyond_noise for cell in found]),
        ("The library's call instead", [cell.default_regret for cell in found]),
    ):
        median, high, worst = np.percentile(losses, [50, 90, 100])
        print(f"\n{what}: median {median:.1%}, 90th percentile {high:.1%}, worst {worst:.1%}.")


def print_crossovers(found: Sequence[Crossover]) -> None:
    """Print where one method overtakes another."""
    print_table(
        "Where the best measured method changes by more than noise.",
        ("operation", "from", "to", "measured at", "predicted at", "factor"),
        (
            (
                one.op,
                str(one.smaller),
                str(one.larger),
                format_bytes(one.measured_bytes),
                format_bytes(one.predicted_bytes) if one.predicted_bytes else "never",
                f"{one.factor:.1f}",
            )
            for one in found
        ),
    )


def print_times(calls: Sequence[Call]) -> None:
    """Print the medians of every operation, method and size."""
    sizes = sorted({call.size_bytes for call in calls})
    rows: dict[tuple[str, str], dict[int, Call]] = {}
    for call in calls:
        rows.setdefault((call.op, str(call.method)), {})[call.size_bytes] = call
    print_table(
        f"Medians of {len(calls[0].seconds)}, half the range; ranks {calls[0].order}.",
        ("operation", "method", *map(format_bytes, sizes)),
        (
            (*key, *(timed(row[size]) if size in row else "" for size in sizes))
            for key, row in rows.items()
        ),
    )


def timed(call: Call) -> str:
    """Return median and half the range."""
    return f"{format_seconds(call.median_s)} ± {call.spread / 2:.0%}"


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shapes = commands.add_parser("measure", help="all shapes; about three hours")
    shapes.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    shapes.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS)
    shapes.add_argument("--smallest", type=int, default=SIZES_BYTES[0], help="bytes")
    shapes.add_argument("--largest", type=int, default=SIZES_BYTES[-1], help="bytes")
    rates = commands.add_parser("rates", help="two hosts at four link rates")
    for command, name in ((shapes, "collective_choice"), (rates, "collective_rates")):
        command.add_argument("-o", "--output", type=Path, default=RESULTS / f"{name}.jsonl")
        command.add_argument("--repeats", type=int, default=REPEATS)
    shown = commands.add_parser("report", help="tables of a file")
    shown.add_argument("file", type=Path, nargs="?", default=RESULTS / "collective_choice.jsonl")
    options = parser.parse_args()
    if options.command == "measure":
        low, high = options.smallest, options.largest
        options.sizes = [size for size in SIZES_BYTES if low <= size <= high]
        if not options.sizes:
            parser.error(f"no size from --smallest {low} to --largest {high}: {SIZES_BYTES}")
    return options


if __name__ == "__main__":
    main()
