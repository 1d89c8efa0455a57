"""Every collective method on emulated clusters, and what the planner would have chosen.

    python -m benchmarks.collective_choice measure [--shapes lab-2x2 ...] [-o FILE]
    python -m benchmarks.collective_choice rates [-o FILE]
    python -m benchmarks.collective_choice report [FILE]

``measure`` times all operations, methods and sizes in the lab (root, iproute2) and writes a line of
JSON for each; ``rates`` does so for small sizes at four link rates; ``report`` fits alpha and
bandwidth to what was measured and prints the tables of docs/lab.md.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from benchmarks.lab import Lab, Order, exit_unless_possible, lab_topology, with_nic_rate
from benchmarks.lab.calls import Call, measure, problem_of
from benchmarks.lab.choices import cells, crossovers, fitted
from planner.cost.traffic import busiest_exits
from planner.topology.document import TopologyDocument
from planner.units import format_bytes, format_seconds

SHAPES: Final = ("lab-2x2", "lab-2x4", "lab-4x2", "loopback")
ORDERS: Final[tuple[Order, ...]] = ("natural", "interleaved")
KIB, MIB = 2**10, 2**20
SIZES_BYTES: Final = [KIB * 4**step for step in range(9)]  # 1 KiB to 64 MiB
RATE_SIZES_BYTES: Final = [KIB * 4**step for step in range(7)]  # to 4 MiB
MBIT_PER_S: Final = (50, 100, 200, 400)
REPEATS: Final = 5
RESULTS: Final = Path(__file__).parent / "results"


def main() -> None:
    """Run the chosen command."""
    options = parse_arguments()
    if options.command == "report":
        report(read(options.file))
        return
    exit_unless_possible()
    options.output.parent.mkdir(exist_ok=True)
    with options.output.open("w") as file:
        if options.command == "rates":
            measure_rates(file, options.repeats)
        else:
            measure_shapes(file, options.shapes, options.orders, options.largest, options.repeats)


# ------------------------------------------------------------------------------ measuring


def measure_shapes(
    file: TextIO, shapes: Sequence[str], orders: Sequence[Order], largest_bytes: int, repeats: int
) -> None:
    """Write a line for every shape, order, operation, method and size."""
    sizes = [size for size in SIZES_BYTES if size <= largest_bytes]
    for shape in shapes:
        document = lab_topology(shape)
        for order in orders if document.network else ORDERS[:1]:
            with Lab(document, order=order) as lab:
                write(file, measure(lab, document, sizes, repeats=repeats))


def measure_rates(file: TextIO, repeats: int) -> None:
    """Write the small sizes of two hosts at four link rates."""
    for mbit_per_s in MBIT_PER_S:
        document = with_nic_rate(lab_topology("lab-2x2"), mbit_per_s * 1e6 / 8)
        document = document.model_copy(update={"name": f"lab-2x2 at {mbit_per_s} Mbit/s"})
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
    """Return the calls of a file."""
    calls = []
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        for name in ("seconds", "link_bytes"):
            fields[name] = tuple(fields[name])
        calls.append(Call(**fields))
    return calls


# ------------------------------------------------------------------------------ reporting


def document_of(shape: str) -> TopologyDocument:
    """Return the topology of a name that the commands above write."""
    name, _, rate = shape.partition(" at ")
    document = lab_topology(name)
    return with_nic_rate(document, float(rate.split()[0]) * 1e6 / 8) if rate else document


def report(calls: Sequence[Call]) -> None:
    """Print, shape by shape, bytes, fits, choices and crossovers."""
    for shape in dict.fromkeys(call.shape for call in calls):
        of_shape = [call for call in calls if call.shape == shape]
        print(f"\n## {shape}\n")
        report_bytes(shape, of_shape)
        report_choices(shape, [call for call in of_shape if call.order == "natural"])


def report_bytes(shape: str, calls: Sequence[Call]) -> None:
    """Print bytes on the busiest links against the formula, for sizes of 1 MiB and more."""
    problem = problem_of(document_of(shape))
    off: dict[tuple[str, ...], list[float]] = {}
    for call in calls:
        if call.size_bytes < MIB or not call.link_bytes:
            continue
        size = np.array([float(call.size_bytes)])
        expected = busiest_exits(call.op, call.method, problem.fabric, problem.group, size)[1:]
        for where, counted, formula in zip(
            ("host", "trunk"), call.link_bytes, expected, strict=False
        ):
            key = (call.order, call.op, str(call.method), where)
            off.setdefault(key, []).append(counted / float(formula[0]) - 1)
    for row, errors in off.items():
        print("bytes", *row, f"{max(errors, key=abs):+.1%}")


def report_choices(shape: str, calls: Sequence[Call]) -> None:
    """Print the fits, what they choose and what that costs."""
    problem, fits = fitted(problem_of(document_of(shape)), calls)
    for fit in fits:
        print(
            f"{fit.op} by {fit.path}:",
            ", ".join(
                f"{level.level} {level.alpha_s * 1e6:.0f} us {level.bytes_per_s / 1e6:.2f} MB/s"
                for level in fit.levels
            ),
            f"off by {fit.levels[0].residual:.0%}",
        )
    found = list(cells(problem, calls))
    for cell in found:
        print(
            f"{cell.op:14} {format_bytes(cell.size_bytes):>9} "
            f"{cell.chosen.method!s:26} {format_seconds(cell.chosen.median_s):>9} "
            f"best {cell.best.method!s:26} {format_seconds(cell.best.median_s):>9} "
            f"default {format_seconds(cell.default.median_s):>9} "
            f"predicted {format_seconds(cell.predicted_s):>9} "
            f"regret {cell.regret:.0%} noise {cell.noise:.0%}"
        )
    regrets = np.array([cell.regret_beyond_noise for cell in found])
    print(
        f"regret beyond noise: median {np.median(regrets):.1%}, 90th percentile "
        f"{np.percentile(regrets, 90):.1%}, worst {regrets.max():.1%} of {len(regrets)} cells"
    )
    for crossing in crossovers(problem, calls):
        predicted = crossing.predicted_bytes
        print(
            f"{crossing.op}: {crossing.smaller} to {crossing.larger} at "
            f"{format_bytes(crossing.measured_bytes)}, predicted "
            f"{format_bytes(predicted) if predicted else 'never'}"
        )


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shapes = commands.add_parser("measure", help="all shapes; about an hour and a half")
    shapes.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    shapes.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS)
    shapes.add_argument("--largest", type=int, default=SIZES_BYTES[-1], help="bytes")
    rates = commands.add_parser("rates", help="two hosts at four link rates")
    for command, name in ((shapes, "collective_choice"), (rates, "collective_rates")):
        command.add_argument("-o", "--output", type=Path, default=RESULTS / f"{name}.jsonl")
        command.add_argument("--repeats", type=int, default=REPEATS)
    shown = commands.add_parser("report", help="tables of a file")
    shown.add_argument("file", type=Path, nargs="?", default=RESULTS / "collective_choice.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
