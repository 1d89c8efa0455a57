"""Errors on left-out shapes: the bars of the tables, and the page that shows them."""

import numpy as np
import pytest

from benchmarks.kernel_errors import FOLDS, PAGE, left_out, table
from planner.hardware.kernel_tables import KernelOp


@pytest.mark.parametrize(("op", "device"), [("gemm", "a100-sxm-80gb"), ("gemm", "l40s")])
def test_the_page_shows_what_is_measured(op: KernelOp, device: str) -> None:
    page = PAGE.read_text("utf-8")
    rows = [line for line in table(op, FOLDS, device) if line.startswith(f"| {device} ")]
    assert rows
    assert all(row in page for row in rows), "run python -m benchmarks.kernel_errors --write"


# What is asked of shapes nobody gave us: median and 90th percentile over all devices.
@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "median", "tail"),
    [("gemm", 0.035, 0.12), ("attention", 0.04, 0.15), ("moe_layer", 0.10, 0.30)],
)
def test_shapes_that_were_left_out_are_met(op: KernelOp, median: float, tail: float) -> None:
    error = np.abs(np.concatenate([ratio for _, _, ratio in left_out(op, FOLDS)]) - 1)
    assert np.median(error) < median
    assert np.percentile(error, 90) < tail
