"""Errors of kernel times on shapes that were left out of the measured tables.

    python -m benchmarks.kernel_errors [--op OP] [--folds 8] [--device NAME] [--write]

Every bundled table is cut into folds by shape: pairs of (n, k); combinations of batch, heads and
key/value heads; of model, experts and ep. Each fold is predicted from the others, with all rows of
its shapes left out, by the planner's own fit. Prints |predicted - measured| / measured by device
and kind: median, 90th percentile and bias; of products those of 1,024 rows and more.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.hardware.devices import Device, device, device_names
from planner.hardware.expert_layers import layer_points
from planner.hardware.kernel_tables import (
    SMOOTHNESS,
    Columns,
    KernelOp,
    Points,
    attention_points,
    gemm_points,
    read_table,
)
from planner.hardware.surfaces import fit_surface

Array = NDArray[np.float64]

# What is left out together, and what a table is cut into first.
SHAPES: Final[dict[KernelOp, tuple[str, ...]]] = {
    "gemm": ("n", "k"),
    "attention": ("batch_size", "num_heads", "num_key_value_heads"),
    "moe_layer": ("hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size"),
}
KINDS: Final[dict[KernelOp, str]] = {
    "gemm": "dtype",
    "attention": "head_dim",
    "moe_layer": "distribution",
}
POINTS: Final[dict[KernelOp, Callable[[Device, Columns], Points]]] = {
    "gemm": gemm_points,
    "attention": attention_points,
    "moe_layer": layer_points,
}
MIN_ROWS: Final = 1024
SEED: Final = 0
FOLDS: Final = 8


PAGE: Final = Path(__file__).parent.parent / "docs" / "devices.md"
BEGIN: Final = "<!-- kernel errors: begin -->\n"
END: Final = "<!-- kernel errors: end -->"


def main() -> None:
    """Print the tables; with --write put them into docs/devices.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", choices=SHAPES, action="append")
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--device", choices=device_names())
    parser.add_argument(
        "--write", action="store_true", help="the whole table, into docs/devices.md"
    )
    arguments = parser.parse_args()
    lines = []
    for op in arguments.op or SHAPES:
        if arguments.device and not read_table(arguments.device, op):
            print(f"{arguments.device} has no table of {op}: its times are rooflines")
            continue
        for line in table(op, arguments.folds, arguments.device):
            lines.append(line)
            print(line, flush=True)
    if arguments.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, "utf-8")


def table(op: KernelOp, folds: int, only: str | None = None) -> Iterator[str]:
    """Yield a Markdown table of one kind of kernel, line by line."""
    yield ""
    yield f"| {op} | kind | rows | median | 90th percentile | bias |"
    yield "|---|---|---|---|---|---|"
    everything = []
    for name, kind, ratio in left_out(op, folds, only):
        yield f"| {name} | {kind} | {summary(ratio)} |"
        everything.append(ratio)
    yield f"| **all** | | {summary(np.concatenate(everything))} |"


def left_out(op: KernelOp, folds: int, only: str | None = None) -> Iterator[tuple[str, str, Array]]:
    """Yield (device, kind, predicted over measured) of every table."""
    for name in device_names():
        on = device(name)
        columns = read_table(name, op) if on.basis == "measured" else {}
        if not columns or only not in (None, name):
            continue
        kinds = columns[KINDS[op]]
        for kind in np.unique(kinds):
            chosen = {key: values[kinds == kind] for key, values in columns.items()}
            ratio = predicted_over_measured(op, on, chosen, folds)
            if op == "gemm":
                ratio = ratio[chosen["m"].astype(int) >= MIN_ROWS]
            yield name, str(kind), ratio


def predicted_over_measured(op: KernelOp, on: Device, columns: Columns, folds: int) -> Array:
    """Return the ratio of every row, each predicted from the other folds, shape [rows]."""
    shapes = list(zip(*(columns[name] for name in SHAPES[op]), strict=True))
    distinct = sorted(set(shapes))
    numbers = np.random.default_rng(SEED).permutation(len(distinct)) % folds
    fold_of = dict(zip(distinct, numbers, strict=True))
    fold = np.array([fold_of[shape] for shape in shapes])
    ratio = np.empty(len(shapes))
    for number in range(folds):
        held = fold == number
        rest = {name: values[~held] for name, values in columns.items()}
        surface = fit_surface(*POINTS[op](on, rest), SMOOTHNESS[op])
        asked = POINTS[op](on, {name: values[held] for name, values in columns.items()})
        said = surface(asked.position, asked.coordinates)
        ratio[held] = np.exp(said - asked.log_ratio)
    return ratio


def summary(ratio: Array) -> str:
    """Return count, median and 90th percentile error, and bias, as cells."""
    error = np.abs(ratio - 1)
    shown = [np.median(error), np.percentile(error, 90), np.median(ratio) - 1]
    return " | ".join([f"{len(ratio):,}", *(f"{100 * value:.1f} %" for value in shown)])


if __name__ == "__main__":
    main()
