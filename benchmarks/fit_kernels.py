"""Fit the kernel figures of ``planner/hardware/devices.json`` to published kernel times.

::

    python benchmarks/fit_kernels.py gemm.csv.gz attention_forward.csv.gz

The CSVs are the ``gemm_perf`` and ``context_attention_perf`` tables of ai-dynamo/aiconfigurator
(Apache-2.0) joined over devices: gpu, dtype, m, n, k, time_us, and gpu, batch_size, seq_len,
num_heads, num_key_value_heads, head_dim, time_us. Shapes of training only: m (tokens) and
seq_len of 1,024 on. One (n, k) pair in five, and one (batch, heads, kv heads) triple in five,
is held out; errors are those of the held-out rows.
"""

import argparse
import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from planner.hardware.devices import AttentionFigures, Device, GemmFigures, Precision, device
from planner.hardware.kernels import attention_s, gemm_s

Array = NDArray[np.float64]
Figures = TypeVar("Figures", GemmFigures, AttentionFigures)

_DEVICES: Final = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb", "gb200": "gb200"}
_PRECISIONS: Final[dict[str, Precision]] = {"bfloat16": "bf16", "fp8": "fp8"}
_MIN_TOKENS: Final = 1024


def main() -> None:
    """Fit every device and print figures and held-out errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gemm", type=Path)
    parser.add_argument("attention", type=Path)
    arguments = parser.parse_args()
    gemm, attention = _read(arguments.gemm), _read(arguments.attention)
    for gpu, name in _DEVICES.items():
        for dtype, precision in _PRECISIONS.items():
            rows = [r for r in gemm if r["gpu"] == gpu and r["dtype"] == dtype]
            rows = [r for r in rows if int(r["m"]) >= _MIN_TOKENS]
            if rows:
                fit_gemm(device(name), precision, rows)
        rows = [r for r in attention if r["gpu"] == gpu and int(r["seq_len"]) >= _MIN_TOKENS]
        fit_attention(device(name), rows)


def fit_gemm(dev: Device, precision: Precision, rows: list[dict[str, str]]) -> GemmFigures:
    """Fit ``GemmFigures`` of one device and precision."""
    m, n, k, time_us = (_column(rows, name) for name in ("m", "n", "k", "time_us"))

    def seconds(parameters: Array) -> Array:
        figures = _gemm_figures(parameters)
        return gemm_s(replace(dev, gemm={precision: figures}), precision, m, n, k)

    # A cast of the input is part of an fp8 product in the measurements, not of a 16-bit one.
    start = [0.7, 100.0, 0.1, 0.8, 5e-6] + ([8.0] if precision == "fp8" else [])
    fitted = _fit(f"{dev.name} gemm {precision}", seconds, start, time_us, _held_out(n, k))
    return _report(_gemm_figures(fitted))


def fit_attention(dev: Device, rows: list[dict[str, str]]) -> AttentionFigures:
    """Fit ``AttentionFigures`` of one device; the backward ratio is kept."""
    names = ("batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim", "time_us")
    batch, seq_len, heads, kv_heads, head_dim, time_us = (_column(rows, name) for name in names)
    flop = 2 * batch * heads * seq_len**2 * head_dim
    several = len(np.unique(head_dim)) > 1

    def figures(p: Array) -> AttentionFigures:
        half_head_dim = float(p[4]) if several else 0.0
        ratio = dev.attention.backward_ratio
        return AttentionFigures(
            float(p[0]), float(p[1]), half_head_dim, float(p[2]), float(p[3]), ratio
        )

    def seconds(parameters: Array) -> Array:
        changed = replace(dev, attention=figures(parameters))
        return attention_s(
            changed, "bf16", flop, seq_len=seq_len, num_heads=batch * heads, head_dim=head_dim
        )

    start = [0.6, 500.0, 1.0, 5e-6] + ([20.0] if several else [])
    held = _held_out(batch * 1000 + kv_heads, heads)
    return _report(figures(_fit(f"{dev.name} attention", seconds, start, time_us, held)))


def _gemm_figures(p: Array) -> GemmFigures:
    quantise = float(p[5]) if len(p) > 5 else 0.0
    return GemmFigures(float(p[0]), float(p[1]), float(p[2]), float(p[3]), float(p[4]), quantise)


def _fit(
    what: str,
    seconds: Callable[[Array], Array],
    start: list[float],
    time_us: Array,
    held_out: NDArray[np.bool_],
) -> Array:
    """Minimise the logarithmic error of the rows not held out; print that of the others."""

    def error(log_parameters: Array) -> Array:
        return np.log(seconds(np.exp(log_parameters)) / (time_us * 1e-6))

    def training_error(log_parameters: Array) -> Array:
        return error(log_parameters)[~held_out]

    solution = least_squares(training_error, np.log(start), loss="soft_l1", f_scale=0.1)
    rest = error(solution.x)[held_out]
    print(
        f"{what}: {len(time_us)} rows, {held_out.sum()} held out: median error "
        f"{np.median(np.abs(rest)):.3f}, 90th percentile {np.percentile(np.abs(rest), 90):.3f}, "
        f"bias {np.median(rest):+.3f}"
    )
    return np.asarray(np.exp(solution.x), dtype=np.float64)


def _report(figures: Figures) -> Figures:
    print("   ", json.dumps({name: float(f"{v:.3g}") for name, v in asdict(figures).items()}))
    return figures


def _held_out(a: Array, b: Array) -> NDArray[np.bool_]:
    """Return a fixed fifth of the distinct pairs."""
    mixed = (a.astype(np.int64) * 2654435761) ^ (b.astype(np.int64) * 40503)
    return np.asarray((mixed // 64) % 5 == 0)


def _column(rows: list[dict[str, str]], name: str) -> Array:
    return np.array([float(row[name]) for row in rows])


def _read(path: Path) -> list[dict[str, str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
