"""The few figures of a training step that no data sheet and no kernel table has.

A kernel table is made by one kernel in a loop, a table of collectives by nothing else on the
machine; a training step draws more power, waits for its slowest rank, and issues kernels from
Python. These are fitted to published runs (``benchmarks.fit_steps``), one set for all sources,
frameworks and models. ``step_constants.json`` holds value and interval of each; what they are is
said here.
"""

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from planner.hardware.gpus import Architecture

__all__ = ["PLAIN", "StepConstants", "step_constants", "stored_constants"]

# Whose clock a GPU keeps: the nearest architecture that many runs were published on.
_CLOCK_OF: Final[dict[Architecture, str]] = {
    **dict.fromkeys(("pascal", "volta", "turing", "ampere", "ada"), "ampere"),
    "hopper": "hopper",
    "blackwell": "blackwell",
}


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Figures of a training step; ``PLAIN`` where kernels and calls run as in their tables.

    Attributes:
        clock_ampere: Rate of products while a job holds all GPUs at their power limit, over that
            of the kernel tables. Of Ampere, what is older, and Ada.
        clock_hopper: The same of Hopper, and of what nobody published runs on.
        clock_blackwell: The same of Blackwell.
        memory_rate: Achieved by kernels that move bytes, over ``KernelFigures.memory_fraction``.
        attention_time: Of attention kernels over their tables'; they draw less power.
        grouped_time: Of experts' products over what one product of all rows takes.
        collective_time: Of a collective over its time in nccl-tests, inside a node.
        network_time: The same between nodes.
        launch_s: The host needs to issue one kernel of the list of ops, with the small ones around
            it that the list leaves out (views, casts, rotations).
        jitter: Standard deviation of a rank's step over ranks; a step waits for the slowest.
        host_s: Per step on the host: data, schedule, logging.
    """

    clock_ampere: float
    clock_hopper: float
    clock_blackwell: float
    memory_rate: float
    attention_time: float
    grouped_time: float
    collective_time: float
    network_time: float
    launch_s: float
    jitter: float
    host_s: float

    def clock(self, architecture: Architecture) -> float:
        """Return the clock that GPUs of an architecture keep, over that of their tables."""
        return float(getattr(self, f"clock_{_CLOCK_OF.get(architecture, 'hopper')}"))


PLAIN: Final = StepConstants(
    clock_ampere=1.0,
    clock_hopper=1.0,
    clock_blackwell=1.0,
    memory_rate=1.0,
    attention_time=1.0,
    grouped_time=1.0,
    collective_time=1.0,
    network_time=1.0,
    launch_s=0.0,
    jitter=0.0,
    host_s=0.0,
)


@cache
def stored_constants() -> dict[str, dict[str, Any]]:
    """Return what ``benchmarks.fit_steps`` wrote: value, interval, unit and source by name."""
    text = resources.files("planner.cost").joinpath("step_constants.json").read_text("utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@cache
def step_constants() -> StepConstants:
    """Return the fitted figures."""
    stored = stored_constants()
    return replace(PLAIN, **{f.name: float(stored[f.name]["value"]) for f in fields(PLAIN)})
