"""Measured kernels of a device, as surfaces over the rooflines of ``planner.hardware.roofline``.

``tables/DEVICE/`` holds what was measured there, one file for each kind of kernel, with these
columns (``src`` names library and version):

* ``gemm.csv.gz``: src, dtype, m, n, k, time_us;
* ``attention.csv.gz``: src, batch_size, seq_len, num_heads, num_key_value_heads, head_dim, time_us
  (causal, forward, bf16);
* ``moe_layer.csv.gz``: src, moe_dtype, num_tokens, hidden_size, inter_size, topk, num_experts,
  moe_tp_size, moe_ep_size, distribution, time_us (a fused layer of experts on its hottest rank).

The bundled ones are tables of ai-dynamo/aiconfigurator (Apache-2.0), unchanged but for their
columns. How smooth utilisation is was found once for all devices together (``python -m
benchmarks.fit_kernels smoothness``); ``python -m benchmarks.kernel_errors`` says what is left when
shapes are left out.
"""

import csv
import gzip
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.hardware.devices import Device, device_of_tables
from planner.hardware.roofline import (
    TABLE_PRECISION,
    attention_model_s,
    gemm_model_s,
)
from planner.hardware.surfaces import Smoothness, Surface, fit_surface
from planner.plan import Precision

__all__ = [
    "KIND_COLUMNS",
    "SIZE_COLUMNS",
    "SMOOTHNESS",
    "Columns",
    "KernelOp",
    "Points",
    "attention_points",
    "attention_surfaces",
    "gemm_points",
    "gemm_surface",
    "read_table",
    "rows_where",
]

Array = NDArray[np.float64]
Columns = Mapping[str, NDArray[np.str_]]
LookUp = Callable[[Array, Array], Array]
KernelOp = Literal["gemm", "attention", "moe_layer"]

# What a table has columns for beside src and time_us: sizes, and words that tell kinds apart.
SIZE_COLUMNS: Final[dict[KernelOp, tuple[str, ...]]] = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim"),
    "moe_layer": (
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        "moe_ep_size",
    ),
}  # fmt: skip
KIND_COLUMNS: Final[dict[KernelOp, tuple[str, ...]]] = {
    "gemm": ("dtype",),
    "attention": (),
    "moe_layer": ("moe_dtype", "distribution"),
}

SMOOTHNESS: Final[dict[KernelOp, Smoothness]] = {
    # Coordinates n and k, position m: one broad term; one for what a width n does at all depths
    # (tiles left over), one for what a depth does.
    "gemm": Smoothness(((0.12, 4.9, 3.0), (0.0014, 0.064, 2.6), (0.0028, 1.3, 0.81)), noise=0.0011),
    # Coordinates batch, heads, key/value heads, position seq_len.
    "attention": Smoothness(((1.0, 2.5, 3.3, 4.1), (0.033, 0.67, 0.30, 8.7)), noise=0.008),
    # Coordinates hidden size, width, local experts, rows of an expert, ep; position tokens.
    # Autotuners fail now and then, by a factor of two to ten.
    "moe_layer": Smoothness(((1.8, 1.9, 2.9, 4.3, 1.7, 4.6),), noise=0.086, failed_at=0.7),
}


class Points(NamedTuple):
    """Measured kernels as a surface takes them, see ``planner.hardware.surfaces``."""

    position: Array
    coordinates: Array
    log_ratio: Array


@cache
def gemm_surface(tables: str, precision: Precision) -> LookUp | None:
    """Return log(measured / modelled) of products by (log2 m, log2 [n, k]); None if unmeasured."""
    dtype = TABLE_PRECISION.get(precision)
    chosen = rows_where(read_table(tables, "gemm"), "dtype", dtype or "")
    if not chosen:
        return None
    n, k = (np.unique(np.log2(chosen[name].astype(float))) for name in ("n", "k"))
    points = gemm_points(device_of_tables(tables), chosen)
    return fit_surface(*points, SMOOTHNESS["gemm"]).tabulated((n, k))


@cache
def attention_surfaces(tables: str) -> tuple[Array, tuple[Surface, ...]]:
    """Return measured head dimensions, ascending, and the surface of each; none if unmeasured."""
    columns = read_table(tables, "attention")
    if not columns:
        return np.zeros(0), ()
    head_dims, on = sorted(set(columns["head_dim"].tolist()), key=float), device_of_tables(tables)
    points = [attention_points(on, rows_where(columns, "head_dim", one)) for one in head_dims]
    surfaces = tuple(fit_surface(*one, SMOOTHNESS["attention"]) for one in points)
    return np.array(head_dims, dtype=float), surfaces


def rows_where(columns: Columns, name: str, value: str) -> dict[str, NDArray[np.str_]]:
    """Return the rows of one kind; nothing at all if there are none."""
    if not columns or not (mine := columns[name] == value).any():
        return {}
    return {key: values[mine] for key, values in columns.items()}


def gemm_points(device: Device, columns: Columns) -> Points:
    """Return where measured products of one data type lie."""
    m, n, k, time_us = (columns[name].astype(float) for name in ("m", "n", "k", "time_us"))
    precision: Precision = "fp8" if columns["dtype"][0] == "fp8" else "bf16"
    ratio = np.log(time_us * 1e-6 / gemm_model_s(device, precision, m, n, k))
    return Points(np.log2(m), np.log2(np.stack([n, k], axis=1)), ratio)


def attention_points(device: Device, columns: Columns) -> Points:
    """Return where measured attention of one head dimension lies."""
    names = ("batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim", "time_us")
    batch, seq_len, heads, kv_heads, head_dim, time_us = (columns[n].astype(float) for n in names)
    flop = 2.0 * batch * heads * seq_len**2 * head_dim
    model = attention_model_s(device, "bf16", flop, seq_len=seq_len, num_heads=batch * heads)
    at = np.log2(np.stack([batch, heads, kv_heads], axis=1))
    return Points(np.log2(seq_len), at, np.log(time_us * 1e-6 / model))


@cache
def read_table(tables: str, op: KernelOp) -> dict[str, NDArray[np.str_]]:
    """Return the columns of one measured table; empty where there is none."""
    path = resources.files("planner.hardware") / "tables" / tables / f"{op}.csv.gz"
    if not path.is_file():
        return {}
    header, *rows = csv.reader(gzip.decompress(path.read_bytes()).decode("utf-8").splitlines())
    return dict(zip(header, np.array(rows).T, strict=True))
