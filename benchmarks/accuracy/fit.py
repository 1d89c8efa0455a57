"""The page's sections on the constants: what they are, and what they rest on."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from benchmarks.accuracy.text import NONE, percent, table
from benchmarks.prose import wrapped
from planner.cost.step_constants import StepConstants
from planner.cost.stragglers import expected_maximum

__all__ = ["constants", "meanings", "stragglers"]

_RANKS: Final = (64, 256, 1024, 4096, 16384)
_FEWEST_SOURCES: Final = 2
_FIT: Final = (
    "One set for all sources, frameworks and models. *From, to*: 5th and 95th percentile of fits "
    "to as many sources drawn anew, with replacement. *Identified by*: the sources whose errors "
    "move most with it, the first most. *Without*: the median over sources, all in the fit, with "
    "the constant where it has no effect and the others refitted. *Changes most without*: the "
    "source whose leaving out moves it farthest, and where to. With all constants the median is"
)
_WAITS: Final = (
    "The part of a step's compute that ranks wait for the slowest of them: jitter times the "
    "expected maximum of as many normal draws (`planner/cost/stragglers.py`); *at least* and *at "
    "most* with the interval of the jitter."
)


def meanings() -> dict[str, str]:
    """Return what every constant is, from the docstring that says so.

    >>> meanings()["network_time"]
    'The same between nodes.'
    """
    said = inspect.getdoc(StepConstants) or ""
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", said.partition("Attributes:")[2], re.M)
    return {name: " ".join(text.split()) for name, text in found}


def constants(results: Mapping[str, Any]) -> str:
    """Return the section on the constants."""
    whole = results["scores"]["all"]["median_over_sources"]
    return "\n".join(
        (
            "## The constants\n",
            f"{wrapped(f'{_FIT} {percent(whole)}.')}\n",
            table(
                (
                    *("constant", "value", "from, to", "unit", "without"),
                    *("identified by", "changes most without"),
                ),
                _fitted(results),
            ),
            _flagged(results["constants"]),
            table(("constant", "what it is", "without the data, and why"), _meant(results)),
        )
    )


def _fitted(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, one in results["constants"].items():
        yield (
            *(f"`{name}`", _figure(one["value"]), f"{_figure(one['low'])}, {_figure(one['high'])}"),
            *(one["unit"], percent(results["ablations"][name]["median_over_sources"])),
            *(", ".join(one["identified_by"]) or NONE, _leans_on(results, name)),
        )


def _leans_on(results: Mapping[str, Any], name: str) -> str:
    """Return the source without which a constant is another most, and what it is then."""
    value = results["constants"][name]["value"]
    found = {source: one[name] for source, one in results["without_source"].items()}
    most = max(sorted(found), key=lambda source: abs(math.log(found[source] / value)), default="")
    return f"{most}: {_figure(found[most])}" if most else NONE


def _meant(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    said = meanings()
    for name, one in results["constants"].items():
        yield f"`{name}`", said[name], f"{_figure(one['start'])}: {one['start_source']}"


def _flagged(found: Mapping[str, Any]) -> str:
    few = [
        f"`{name}`" for name, one in found.items() if len(one["identified_by"]) < _FEWEST_SOURCES
    ]
    if not few:
        return f"Each is identified by {_FEWEST_SOURCES} sources or more.\n"
    return (
        f"**Identified by fewer than {_FEWEST_SOURCES} sources: {', '.join(few)}.** "
        "What it is rests on one source, or on where it started.\n"
    )


def stragglers(jitter: Mapping[str, Any]) -> str:
    """Return the section on what a step waits for its slowest rank."""
    waits = expected_maximum(np.array(_RANKS))
    lines = [
        (
            f"{ranks:,}",
            f"{wait:.2f}",
            *(percent(jitter[at] * wait) for at in ("value", "low", "high")),
        )
        for ranks, wait in zip(_RANKS, waits, strict=True)
    ]
    return f"## Waiting for the slowest\n\n{wrapped(_WAITS)}\n\n" + table(
        ("ranks", "expected maximum", "wait", "at least", "at most"), lines
    )


def _figure(value: float) -> str:
    return f"{value:.3g}"
