"""Fit what all GPUs share to the measured tables: figures of the rooflines, smoothness of surfaces.

    python -m benchmarks.fit_kernels rooflines      # per device, least squares; minutes
    python -m benchmarks.fit_kernels smoothness     # of all tables together; minutes
    python -m benchmarks.fit_kernels layers         # measured over modelled layers of experts

``planner/hardware/devices.json`` has the figures of "gpu", round numbers in the middle of what the
first prints; ``SMOOTHNESS`` in ``planner/hardware/kernel_tables.py`` what the second finds: the
greatest marginal likelihood (Rasmussen and Williams 2006, equation 5.8) of all devices' slices
together, each with a scale of its own.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize

from benchmarks.kernel_errors import KINDS, POINTS
from planner.hardware.devices import Device, device, device_names
from planner.hardware.expert_layers import layer_points
from planner.hardware.kernel_tables import SMOOTHNESS, Columns, KernelOp, Points, read_table
from planner.hardware.surfaces import Smoothness

Array = NDArray[np.float64]

# Figures that a kind of kernel tells; casts only where operands are below 16 bits.
FIGURES: Final[dict[KernelOp, tuple[str, ...]]] = {
    "gemm": ("gemm_fraction", "depth_lost", "waves_lost", "memory_fraction", "fixed_s"),
    "attention": (
        "attention_fraction", "attention_seq_lost", "attention_waves_lost", "attention_fixed_s",
    ),
    "moe_layer": (
        "memory_fraction", "layer_row_passes", "layer_token_passes", "layer_choice_bytes",
        "layer_fixed_s",
    ),
}  # fmt: skip
# Few slices are enough for the likelihood, and quick.
POSITIONS: Final[dict[KernelOp, tuple[int, ...]]] = {
    "gemm": (1024, 4096, 16384),
    "attention": (1024, 4096, 16384),
    "moe_layer": (1024, 8192),
}
STEPS: Final = 250


def main() -> None:
    """Fit one of the two and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("rooflines", "smoothness", "layers"))
    parser.add_argument("--op", choices=FIGURES, action="append")
    arguments = parser.parse_args()
    if arguments.what == "layers":
        print_layers()
        return
    for op in arguments.op or FIGURES:
        print_figures(op) if arguments.what == "rooflines" else print_smoothness(op)


def print_layers() -> None:
    """Print the median of measured over modelled layers, whose products are priced as plans do.

    Of layers as in training: from 256 rows an expert on, up to 16 ranks, experts from 512 wide on.
    """
    for on, kind, columns in tables("moe_layer"):
        tokens, inter, top_k, experts, tp, ep = (
            columns[name].astype(float)
            for name in (
                "num_tokens", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
            )
        )  # fmt: skip
        alike = (tokens * top_k / experts >= 256) & (ep <= 16) & (inter / tp >= 512)
        ratio = np.exp(layer_points(on, columns).log_ratio[alike])
        print(f"{on.name:16} {kind:16} {alike.sum():5} layers {np.median(ratio):6.2f}")


def tables(op: KernelOp) -> Iterator[tuple[Device, str, Columns]]:
    """Yield every measured table by kind."""
    for name in device_names():
        columns = read_table(name, op) if device(name).basis == "measured" else {}
        for kind in np.unique(columns[KINDS[op]]) if columns else ():
            mine = columns[KINDS[op]] == kind
            yield device(name), str(kind), {key: v[mine] for key, v in columns.items()}


def print_figures(op: KernelOp) -> None:
    """Print the figures of each device's own fit, and their median."""
    found = []
    for on, kind, columns in tables(op):
        names = (*FIGURES[op], *(["cast_bytes"] if kind == "fp8" else []))
        fitted = fit_figures(op, on, columns, names)
        print(f"{on.name:16} {kind:16}", *(f"{n}={v:.3g}" for n, v in fitted.items()), flush=True)
        found.append(fitted)
    medians = {n: float(np.median([one[n] for one in found if n in one])) for n in found[0]}
    print(f"{'median':16} {op:16}", *(f"{n}={v:.3g}" for n, v in medians.items()))


def fit_figures(
    op: KernelOp, on: Device, columns: Columns, names: tuple[str, ...]
) -> dict[str, float]:
    """Return the figures with the least logarithmic errors, large ones counted linearly."""

    def error(logarithms: Array) -> Array:
        figures = replace(on.figures, **dict(zip(names, np.exp(logarithms), strict=True)))
        return POINTS[op](replace(on, figures=figures), columns).log_ratio

    start = np.log([max(getattr(on.figures, name), 1e-9) for name in names])
    solution = least_squares(error, start, loss="soft_l1", f_scale=0.1, max_nfev=60)
    return dict(zip(names, np.exp(solution.x).tolist(), strict=True))


def print_smoothness(op: KernelOp) -> None:
    """Print what is used and what is found from there, each with its likelihood."""
    used = SMOOTHNESS[op]
    points = [POINTS[op](on, columns) for on, _, columns in tables(op)]
    start = np.log([*(value for term in used.terms for value in term), used.noise])
    widths = [len(term) for term in used.terms]

    def unlikely(logarithms: Array) -> float:
        return sum(negative_log_likelihood(op, one, smooth(logarithms, widths)) for one in points)

    found = minimize(
        unlikely, start, method="Nelder-Mead", options={"maxiter": STEPS, "adaptive": True}
    )
    for name, logarithms in (("used", start), ("found", found.x)):
        one = smooth(logarithms, widths)
        terms = ", ".join("(" + ", ".join(f"{v:.2g}" for v in term) + ")" for term in one.terms)
        print(f"{op:10} {name:6} {-unlikely(logarithms):10.0f}  {terms}, noise {one.noise:.2g}")


def smooth(logarithms: Array, widths: list[int]) -> Smoothness:
    """Return the covariance that the logarithms of all its figures stand for."""
    values, terms = np.exp(logarithms).tolist(), []
    for width in widths:
        terms.append(tuple(values[:width]))
        values = values[width:]
    return Smoothness(tuple(terms), values[0])


def negative_log_likelihood(op: KernelOp, points: Points, smoothness: Smoothness) -> float:
    """Return it for some slices of a table, whose variance is the one that fits it best."""
    total = 0.0
    for position in POSITIONS[op]:
        at = points.position == np.log2(position)
        if at.sum() < 50:
            continue
        covariance = smoothness.covariance(points.coordinates[at], points.coordinates[at])
        covariance[np.diag_indices_from(covariance)] += smoothness.noise
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return np.inf
        # failures are cut off: what is left of them would count as roughness
        ratio = np.clip(points.log_ratio[at] - np.median(points.log_ratio[at]), -2, 2)
        white = np.linalg.solve(factor, ratio)
        total += at.sum() / 2 * np.log((white**2).mean()) + np.log(np.diag(factor)).sum()
    return float(total)


if __name__ == "__main__":
    main()
