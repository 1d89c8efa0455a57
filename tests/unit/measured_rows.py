"""Tables of measured collectives for tests: one row, and what a test changes of it."""

import csv
import io
from collections.abc import Mapping

from planner.validate.rows import Question, Row, read_rows, without_outcomes

ROW: Mapping[str, str] = {
    "id": "a-1",
    "machine": "2x DGX H100",
    "gpu": "H100 SXM5",
    "n_nodes": "2",
    "gpus_per_node": "8",
    "n_ranks": "16",
    "library_version": "NCCL 2.20",
    "op": "all_reduce",
    "algorithm": "auto",
    "protocol": "auto",
    "size_bytes": "1048576",
    "time_us": "120.5",
    "algbw_GBps": "8.7",
    "busbw_GBps": "16.3",
    "notes": "",
    "verified": "read:repo-data",
    "source_url": "https://example.org/",
    "inter_link": "8x400Gb NDR IB",
    "intra_kind": "nvswitch",
    "intra_GBps_per_gpu": "450.0",
    "nics_per_node": "8",
    "nic_gbps": "400.0",
}


def table(*changes: Mapping[str, str], drop: tuple[str, ...] = ()) -> str:
    """Return the text of a CSV with a row for each of ``changes`` to ``ROW``."""
    text = io.StringIO()
    columns = [column for column in ROW if column not in drop]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**ROW, "id": f"a-{number}", **row} for number, row in enumerate(changes, 1))
    return text.getvalue()


def rows(*changes: Mapping[str, str]) -> tuple[Row, ...]:
    """Return those rows as they are read."""
    return read_rows(table(*changes), source="t.csv")


def question(**change: str) -> Question:
    """Return the question of one row."""
    (row,) = rows(change)
    return without_outcomes(row)
