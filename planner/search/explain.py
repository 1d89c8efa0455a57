"""Why one layout beats another: two rows subtracted, part by part."""

from typing import Final

from planner.cost.step import Priced
from planner.units import format_seconds

__all__ = ["PART_LABELS", "why_slower"]

PART_LABELS: Final = {
    "compute_s": "compute",
    "tp_exposed_s": "tensor-parallel communication",
    "cp_exposed_s": "context-parallel communication",
    "ep_exposed_s": "expert communication",
    "dp_exposed_s": "data-parallel communication",
    "pp_exposed_s": "stage sends",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "launch_s": "kernel launches",
    "straggler_s": "wait for the slowest rank",
    "host_s": "host",
}


def why_slower(priced: Priced, row: int, best: int = 0) -> str:
    """Return the two largest differences of ``row`` against ``best``, in words."""
    differences = {
        name: float(getattr(priced, part)[row] - getattr(priced, part)[best])
        for part, name in PART_LABELS.items()
    }
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))[:2]
    said = [
        f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))} {name}"
        for name, seconds in largest
        if abs(seconds) > 1e-9
    ]
    return ", ".join(said) or "equal in every part"
