"""Data-parallel training steps on emulated clusters: how well gradients hide beside backward.

    python -m benchmarks.gradient_sync measure [--shapes lab-2x2 ...] [--models 25 100] [-o FILE]
    python -m benchmarks.gradient_sync report [FILE]

``measure`` trains in the lab (root, iproute2) with every way to synchronise gradients and writes a
line of JSON for each way and compute time; ``report`` prints the tables of docs/lab.md.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.lab import Lab, World, exit_unless_possible, lab_topology
from benchmarks.lab.calls import plan_on
from benchmarks.lab.cluster import cluster_of
from benchmarks.lab.gradients import (
    DDP_DEFAULT,
    FORCED,
    Steps,
    Way,
    measure,
    planned_method,
)
from planner.plan import Method, Plan
from planner.units import format_bytes, format_seconds

SHAPES: Final = ("lab-2x2", "lab-2x4")
MODELS_MB: Final = (25, 100)
RATIOS: Final = {0.5: "1:2", 1.0: "1:1", 2.0: "2:1"}  # compute : communication
NETWORK_BOUND: Final = 0.5
SHARED: Final = Method("hierarchical", "shm")
RESULTS: Final = Path(__file__).parent / "results" / "gradient_sync.jsonl"


def main() -> None:
    """Run the chosen command."""
    options = parse_arguments()
    if options.command == "report":
        report(read(options.file))
        return
    exit_unless_possible()
    options.output.parent.mkdir(exist_ok=True)
    with options.output.open("w") as file:
        for steps in measure_shapes(options):
            file.write(json.dumps(asdict(steps)) + "\n")
            file.flush()
            print(line_of(steps), flush=True)


# ------------------------------------------------------------------------------ measuring


def measure_shapes(options: argparse.Namespace) -> Iterable[Steps]:
    """Yield the steps of every shape and model."""
    for shape in options.shapes:
        document = lab_topology(shape)
        with Lab(document) as lab:
            plan = plan_on(document, lab.cluster, {"all_reduce": FORCED})
            world = World.draw(options.seed, lab.cluster.world_size)
            for model_mb in options.models:
                yield from measure(
                    lab,
                    plan,
                    world,
                    model_bytes=model_mb * 10**6,
                    ratios_of=programme(plan, model_mb, options.ratios),
                    num_steps=options.steps,
                )


def programme(plan: Plan, model_mb: int, ratios: Sequence[float]) -> dict[Way, Sequence[float]]:
    """Return the ways to measure, and at which ratios.

    The large model takes four times as long: there, most ways run only where the network is the
    limit, which is where they differ.
    """
    whole = plan.sharding.gradient_bucket_bytes
    quarter, sixteenth = whole // 4, whole // 16
    others = [module(planned_method(plan, size), size) for size in (whole, quarter)]
    others += [module(method, quarter) for method in FORCED]
    others += [module(SHARED, whole), module(SHARED, sixteenth)]
    others += [Way("ddp", "ring", "library", quarter), Way("ddp hook", *SHARED, quarter)]
    always = [module(SHARED, sixteenth, num_threads=2), DDP_DEFAULT]
    some = ratios if model_mb == min(MODELS_MB) else [r for r in ratios if r == NETWORK_BOUND]
    return dict.fromkeys(others, some) | dict.fromkeys(always, ratios)


def module(method: Method, bucket_bytes: int, *, num_threads: int = 1) -> Way:
    """Return a plain module with overlapped gradients."""
    return Way("module", *method, bucket_bytes, num_threads)


# ------------------------------------------------------------------------------ reporting


def read(file: Path) -> list[Steps]:
    """Return the steps of a file."""
    found = []
    for line in file.read_text().splitlines():
        fields: dict[str, Any] = json.loads(line)
        fields["way"] = Way(**fields["way"])
        fields["seconds"] = tuple(fields["seconds"])
        found.append(Steps(**fields))
    return found


def communication_bound_s(steps: Steps) -> float:
    """Return the seconds of the bytes that must leave a host, 2 (H - 1) / H S, at its NIC's rate.

    Every host has to send half of what all others need of it and get the other half (Patarasuk and
    Yuan 2009, doi:10.1016/j.jpdc.2008.09.002, with hosts as the nodes).
    """
    cluster = cluster_of(lab_topology(steps.shape), "natural")
    num_hosts = len(cluster.hosts)
    rate = min(link.bytes_per_s for link in cluster.links if link.host is not None)
    return 2 * (num_hosts - 1) / num_hosts * steps.model_bytes / rate


def bound_s(steps: Steps) -> float:
    """Return the least seconds of a step: the slowest rank's compute or the bytes, all hidden."""
    return max(steps.compute_s, communication_bound_s(steps))


def report(found: Sequence[Steps]) -> None:
    """Print the worlds, the best way of every problem, and all ways."""
    print_worlds(found)
    print(
        "\n| shape | model | compute : communication | compute | bytes / rate | bound "
        "| DDP's default | best of ours | how | share of the bound | speed-up |"
    )
    print("|---" * 11 + "|")
    for problem in problems(found):
        print_best(problem)
    for shape in dict.fromkeys(steps.shape for steps in found):
        for size in dict.fromkeys(steps.model_bytes for steps in found):
            print_ways([s for s in found if (s.shape, s.model_bytes) == (shape, size)])


def print_worlds(found: Sequence[Steps]) -> None:
    """Print what the devices did, and what DDP's default takes without them."""
    for steps in found:
        if steps.ratio == 0:
            world = World(**steps.world)
            print(
                f"- {steps.shape}, {format_bytes(steps.model_bytes)}: seed {world.seed}, rank "
                f"{world.slow_rank} is {world.slow_factor} times as slow, jitter "
                f"{world.jitter:.0%}; DDP's default without compute takes {timed(steps)}."
            )


def problems(found: Sequence[Steps]) -> list[list[Steps]]:
    """Return the steps that were given the same to do, DDP's default first."""
    groups: dict[tuple[str, int, float], list[Steps]] = {}
    for steps in found:
        if steps.ratio:
            groups.setdefault((steps.shape, steps.model_bytes, steps.ratio), []).append(steps)
    return list(groups.values())


def print_best(problem: Sequence[Steps]) -> None:
    """Print the row of one problem."""
    default, *others = problem
    assert default.way == DDP_DEFAULT, "it is measured first"
    best = min((s for s in others if s.way.wrapper != "ddp"), key=lambda steps: steps.median_s)
    print(
        f"| {best.shape} | {format_bytes(best.model_bytes)} | {RATIOS[best.ratio]} "
        f"| {format_seconds(best.compute_s)} | {format_seconds(communication_bound_s(best))} "
        f"| {format_seconds(bound_s(best))} | {timed(default)} | {timed(best)} "
        f"| {named(best.way)} | {bound_s(best) / best.median_s:.0%} "
        f"| {default.median_s / best.median_s:.2f} |"
    )


def print_ways(found: Sequence[Steps]) -> None:
    """Print every way of one model on one shape."""
    alone, *rest = found
    print(f"\n{alone.shape}, {format_bytes(alone.model_bytes)} of gradients:\n")
    print("| way |", " | ".join(f"{name}, share" for name in RATIOS.values()), "| MB per step |")
    print("|---" * (len(RATIOS) + 2) + "|")
    for way in dict.fromkeys(steps.way for steps in rest):
        at = {steps.ratio: steps for steps in rest if steps.way == way}
        first = next(iter(at.values()))
        times = [
            f"{timed(at[ratio])}, {bound_s(at[ratio]) / at[ratio].median_s:.0%}"
            if ratio in at
            else "-"
            for ratio in RATIOS
        ]
        planned = " (the plan's)" if first.is_planned and way.wrapper == "module" else ""
        print(f"| {named(way)}{planned} |", " | ".join(times), f"| {first.link_bytes / 1e6:.1f} |")
    worst = max(steps.max_difference for steps in found)
    print(f"\nParameters differ from those of DDP's default by {worst:.1g} at most.")


def named(way: Way) -> str:
    """Return a way in words."""
    if way == DDP_DEFAULT:
        return "DDP's default"
    who = {"ddp": "DDP", "ddp hook": "DDP with hook", "module": "module"}[way.wrapper]
    threads = f", {way.num_threads} threads" if way.num_threads > 1 else ""
    return f"{who}, {way.method}, buckets of {(way.bucket_bytes or 0) / 1e6:.1f} MB{threads}"


def timed(steps: Steps) -> str:
    """Return median and spread.

    >>> from dataclasses import replace
    >>> timed(Steps("", 1, DDP_DEFAULT, False, 1, (0.9, 1.0, 1.1), 0, 0, 0, {}))
    '1 s ± 10%'
    """
    return f"{format_seconds(steps.median_s)} ± {steps.spread / 2:.0%}"


def line_of(steps: Steps) -> str:
    """Return what the console shows while measuring."""
    return (
        f"{steps.shape} {format_bytes(steps.model_bytes)} {RATIOS.get(steps.ratio, 'alone'):5} "
        f"{named(steps.way):62} {timed(steps):>16}, {bound_s(steps) / steps.median_s:.0%} of bound"
    )


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser(
        "measure", help="both shapes and models; about half an hour on a quiet machine"
    )
    steps.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    steps.add_argument("--models", nargs="+", default=MODELS_MB, type=int, help="MB of gradients")
    steps.add_argument("--ratios", nargs="+", default=list(RATIOS), type=float, choices=RATIOS)
    steps.add_argument("--steps", default=3, type=int, help="timed, after one that is not")
    steps.add_argument("--seed", default=2, type=int, help="of the hidden world")
    steps.add_argument("-o", "--output", type=Path, default=RESULTS)
    shown = commands.add_parser("report", help="tables of a file")
    shown.add_argument("file", type=Path, nargs="?", default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
