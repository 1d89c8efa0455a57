"""Fit the latency of an NVLink hop to published nccl-tests times.

::

    python benchmarks/fit_link_latency.py nccl_single_node.csv.gz

The CSV joins the ``nccl_perf`` tables of ai-dynamo/aiconfigurator (Apache-2.0) over devices: gpu,
lib, op, num_gpus, size_bytes, time_us. The model is the ring's, base + steps · alpha + steps · S
/ n / bandwidth, on messages of 64 KiB on; it prints base, alpha and bandwidth per GPU and
operation, and the mean alpha that ``topologies/*.json`` use (half of it per link, GPU to switch).
"""

import argparse
import csv
import gzip
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array = NDArray[np.float64]

_GPUS: Final = ("a100_sxm", "h100_sxm", "gb200")
_PASSES: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_MIN_BYTES: Final = 65536


def main() -> None:
    """Fit every GPU and operation and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    path = parser.parse_args().csv
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["size_bytes"]) >= _MIN_BYTES]
    for gpu in _GPUS:
        alphas = [fit(gpu, op, [r for r in rows if r["gpu"] == gpu]) for op in _PASSES]
        print(f"{gpu}: mean alpha {np.mean(alphas) * 1e6:.2f} us")


def fit(gpu: str, op: str, rows: list[dict[str, str]]) -> float:
    """Return alpha in seconds of one operation on one GPU type; print the whole fit."""
    rows = [row for row in rows if row["op"] == op]
    num_gpus, size_bytes, time_us = (
        np.array([float(row[name]) for row in rows])
        for name in ("num_gpus", "size_bytes", "time_us")
    )
    steps = _PASSES[op] * (num_gpus - 1)

    def error(log_parameters: Array) -> Array:
        base, alpha, bandwidth = np.exp(log_parameters)
        seconds = base + steps * (alpha + size_bytes / num_gpus / bandwidth)
        return np.asarray(np.log(seconds / (time_us * 1e-6)))

    solution = least_squares(error, np.log([1e-5, 1e-6, 3e11]), loss="soft_l1", f_scale=0.1)
    base, alpha, bandwidth = np.exp(solution.x)
    print(
        f"    {gpu} {op}: base {base * 1e6:.1f} us, alpha {alpha * 1e6:.2f} us, "
        f"{bandwidth / 1e9:.0f} GB/s; median error {np.median(np.abs(error(solution.x))):.3f}"
    )
    return float(alpha)


if __name__ == "__main__":
    main()
