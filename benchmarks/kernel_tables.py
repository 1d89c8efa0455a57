"""Put measured kernels of one device into its tables.

    python -m benchmarks.kernel_tables DEVICE --op gemm|attention|moe_layer FILE.csv[.gz]

Columns as docs/devices.md says, and ``src``, the library and its version. Rows of other GPUs in the
file are left out; what the table held before is replaced. The file is read by the same reader as
``commplan validate kernels`` reads it, so what cannot be is refused with its line and column.
"""

import argparse
import csv
import gzip
import io
import sys
from pathlib import Path

import planner.hardware
from planner.errors import PlannerError, UnknownNameError
from planner.hardware.devices import device
from planner.hardware.gpus import gpu_model
from planner.hardware.kernel_tables import KIND_COLUMNS, SIZE_COLUMNS, KernelOp
from planner.hardware.roofline import TABLE_PRECISION
from planner.validate.kernels import DTYPES, KernelTable, read_kernels


def main() -> None:
    """Write the table and say how many rows it has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("device", help="a name in planner/hardware/devices.json")
    parser.add_argument("file", type=Path)
    parser.add_argument("--op", choices=SIZE_COLUMNS, required=True)
    parser.add_argument("--src", help="library and version, where the file does not say it")
    arguments = parser.parse_args()
    try:
        name = device(arguments.device).name
        table = read_kernels(
            arguments.file.read_bytes(), op=arguments.op, source=str(arguments.file)
        )
        text = table_of(table, name, arguments.op, arguments.src)
    except (PlannerError, OSError) as exc:
        sys.exit(f"kernel_tables: {exc}")
    folder = Path(planner.hardware.__path__[0]) / "tables" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arguments.op}.csv.gz"
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode())
    print(f"{path}: {len(text.splitlines()) - 1:,} rows")


def table_of(table: KernelTable, name: str, op: KernelOp, src: str | None) -> str:
    """Return the device's rows as a table's text, those without a time left out."""
    columns = ["src", *KIND_COLUMNS[op], *SIZE_COLUMNS[op], "time_us"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    rows: list[list[str]] = []
    for row, time_s in zip(table.rows, table.time_s.tolist(), strict=True):
        cells = row.cells
        if time_s == time_s and is_device(cells["gpu"], name):
            source = cells.get("src") or src or sys.exit("kernel_tables: no column src; give --src")
            rows.append([source, *(word_of(cells[column], column) for column in columns[1:])])
    if not rows:
        sys.exit(f"kernel_tables: no timed row of {name}; its column gpu must name that device")
    rows.sort(key=sizes)
    writer.writerows(rows)
    return text.getvalue()


def word_of(cell: str, column: str) -> str:
    """Return a cell as tables have it: of data types the one word that surfaces look for."""
    if not column.endswith("dtype"):
        return cell.strip()
    word = TABLE_PRECISION.get(DTYPES.get(cell.strip(), "fp64"))
    return word or sys.exit(f"kernel_tables: {column}={cell!r}; need one of {', '.join(DTYPES)}")


def sizes(row: list[str]) -> list[str]:
    """Return what rows are sorted by: words, then numbers, the time left out."""
    return [cell if not cell.isdigit() else f"{int(cell):012}" for cell in row[:-1]]


def is_device(gpu: str, name: str) -> bool:
    """Return whether a cell means the device."""
    try:
        return gpu.strip() == name or gpu_model(gpu).device == name
    except UnknownNameError:
        return False


if __name__ == "__main__":
    main()
