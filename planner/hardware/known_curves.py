"""Measured collectives of boards that many machines have, with the newest library of each.

``nccl_single_node.csv.gz`` beside this file holds nccl-tests' out-of-place times on 2, 4 and 8 GPUs
of one node, one process with a thread per GPU: a table of ai-dynamo/aiconfigurator (Apache-2.0;
systems/data/*/comm/nccl/*/nccl_perf), unchanged but for its columns. Left out is its L40S set,
taken where GPUs reach each other only through host memory.
"""

import csv
import gzip
from collections import defaultdict
from functools import cache
from importlib import resources
from typing import Final, cast

from planner.errors import UnknownNameError
from planner.hardware.gpus import gpu_model
from planner.plan import Collective, MeasuredCurve

__all__ = ["known_curves"]

# GPU model and GPUs of a node -> the board in the table.
_BOARDS: Final = {
    ("A100 SXM 80GB", 8): "a100_sxm",
    ("H100 SXM", 8): "h100_sxm",
    ("B200", 8): "b200_sxm",
    ("GB200", 4): "gb200",
    ("GB300", 4): "gb300",
    ("RTX PRO 6000", 8): "rtx_pro_6000_server",
}

_Times = dict[int, float]


def known_curves(device_name: str, gpus_per_node: int) -> tuple[MeasuredCurve, ...]:
    """Return what the library took on a node of so many such GPUs; none where nobody measured.

    Args:
        device_name: A device of ``devices.json``, or a GPU by any name.
        gpus_per_node: Of the whole node, of which 2, 4 or 8 were used.

    >>> {curve.group_size for curve in known_curves("gb200", 4)}, known_curves("H100 PCIe", 8)
    ({2, 4}, ())
    """
    try:
        board = _BOARDS.get((gpu_model(device_name).name, gpus_per_node))
    except UnknownNameError:
        return ()
    return () if board is None else _curves(board)


@cache
def _curves(board: str) -> tuple[MeasuredCurve, ...]:
    """Return the curves of the newest library, by operation and group size."""
    tables = _tables()[board]
    library = max(tables, key=_version)
    return tuple(
        MeasuredCurve(
            op=cast("Collective", op),
            group_size=group_size,
            num_nodes=1,
            sizes_bytes=tuple(sorted(times)),
            seconds=tuple(times[size] for size in sorted(times)),
            source=f"ai-dynamo/aiconfigurator, {board}, {library}",
        )
        for (op, group_size), times in sorted(tables[library].items())
    )


@cache
def _tables() -> dict[str, dict[str, dict[tuple[str, int], _Times]]]:
    """Return seconds by board, library, (operation, group size) and size."""
    packed = resources.files("planner.hardware").joinpath("nccl_single_node.csv.gz").read_bytes()
    found: dict[str, dict[str, dict[tuple[str, int], _Times]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for row in csv.DictReader(gzip.decompress(packed).decode().splitlines()):
        group = (row["op"], int(row["num_gpus"]))
        times = found[row["gpu"]][row["lib"]][group]
        times[int(row["size_bytes"])] = float(row["time_us"]) * 1e-6
    return found


def _version(library: str) -> tuple[int, ...]:
    """Return ``nccl/2.27.3`` as (2, 27, 3)."""
    return tuple(int(part) for part in library.rpartition("/")[2].split("."))
