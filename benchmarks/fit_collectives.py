"""Fits how NCCL and its like run on GPUs, and writes ``planner/hardware/protocols.json``.

    python -m benchmarks.fit_collectives [benchmarks/data/collectives.csv] [--write]

Prints every fitted figure, and the errors on the rows it was fitted to; how well a fit predicts
machines it has not seen is ``commplan validate collectives --refit``. Looks from where the file
is, and from there ends where the rows say, or at ``planner.validate.fit.START``.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

import planner.hardware
from planner.hardware.protocols import Protocols, protocols_by_key
from planner.validate.fit import Measured, fit_protocols, measured_calls
from planner.validate.rows import read_rows

FILE: Final = Path(planner.hardware.__file__).with_name("protocols.json")
# Architectures that nobody measured so run like the nearest that was.
LIKE: Final = {
    **{f"{name}/nvlink": "ampere/nvlink" for name in ("pascal", "volta", "turing", "ada")},
    **{
        f"{name}/pcie": "blackwell/pcie"
        for name in ("kepler", "pascal", "volta", "turing", "ampere", "ada", "hopper")
    },
    **{f"{name}/xgmi": "cdna3/xgmi" for name in ("gcn5", "cdna1", "cdna2")},
}
_DIGITS: Final = 4


def main() -> None:
    """Fit, print, and write where asked to."""
    asked = parse_arguments()
    rows = read_rows(asked.csv.read_bytes(), source=str(asked.csv))
    measured = measured_calls(rows)
    found = fit_protocols(measured, protocols_by_key())
    for key, lines in found.items():
        print(f"{key}: own {lines.own_share}")
        for family, of_family in lines.lines.items():
            for line in of_family:
                print(f"  {family:7} {asdict(line)}")
        print(f"  {residuals(measured, key, lines)}")
    if asked.write:
        FILE.write_text(json.dumps(document(found), indent=1) + "\n")
        print(f"wrote {FILE}")


def residuals(measured: list[Measured], key: str, lines: Protocols) -> str:
    """Return the median errors on the rows of a key, in words."""
    errors = [
        np.abs(np.exp(one.logs(lines)) - 1)
        for one in measured
        if one.key == key and one.num_nodes == 1
    ]
    all_of_them = np.concatenate(errors)
    return f"{len(all_of_them)} rows on one node, median error {np.median(all_of_them):.1%}"


def document(found: dict[str, Protocols]) -> dict[str, Any]:
    """Return the file's content, figures to four digits."""
    entries: dict[str, Any] = {}
    for key, lines in sorted(found.items()):
        entries[key] = {
            "lines": {
                family: [rounded(asdict(line)) for line in of_family]
                for family, of_family in lines.lines.items()
            },
            "own_share": rounded(dict(lines.own_share.items())),
            "source": lines.source,
        }
    entries |= {
        key: {"as": like, "source": f"assumed to run as {like}"} for key, like in LIKE.items()
    }
    return entries


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers to so many significant digits."""
    return {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def parse_arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("benchmarks/data/collectives.csv")
    parser.add_argument("csv", type=Path, nargs="?", default=default)
    parser.add_argument(
        "--write", action="store_true", help="write planner/hardware/protocols.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
