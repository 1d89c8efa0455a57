"""Figures of the page as SVG: the same runs give the same bytes, with one release of matplotlib.

matplotlib is a developer's dependency: it is imported here, where nothing but ``--write`` gets to.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.accuracy.groups import by, size_of
from planner.validate.run_outcomes import ScoredRun

__all__ = ["draw"]

_SALT: Final = "accuracy"  # ids of shapes are made of it
_WIDTH: Final = 8.0
# Of predicted / measured - 1; a figure that leaves rows out says so.
_SHOWN: Final = (-1.0, 1.5)


def draw(runs: Sequence[ScoredRun], folder: Path) -> None:
    """Write all figures of the page into ``folder``."""
    folder.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none", "font.size": 9}):
        _saved(_scattered(runs), folder / "predicted_measured.svg")
        groupings: tuple[tuple[str, Callable[[ScoredRun], str]], ...] = (
            ("by_source", lambda one: one.source),
            ("by_gpus", size_of),
            ("by_precision", lambda one: one.flop.precision),
        )
        for name, group_of in groupings:
            _saved(_boxes(runs, group_of), folder / f"{name}.svg")


def _saved(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")


def _scattered(runs: Sequence[ScoredRun]) -> Figure:
    """Return predicted against measured times, a colour and shape for each source."""
    figure = Figure(figsize=(_WIDTH, 6.5))
    axes = figure.add_subplot()
    by_source = defaultdict[str, list[ScoredRun]](list)
    for one in runs:
        by_source[one.source].append(one)
    colours = mpl.colormaps["tab20"]
    for number, name in enumerate(sorted(by_source)):
        found = by_source[name]
        axes.plot(
            [round(one.measured_s, 4) for one in found],
            [round(one.predicted_s, 4) for one in found],
            linestyle="none",
            marker="osv^D"[number % 5],
            markersize=3,
            markeredgewidth=0,
            color=colours(number % 20),
            label=name,
        )
    ends = _ends(runs)
    for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="black", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured, seconds per step")
    axes.set_ylabel("predicted, its source left out (dotted: 1.2 times longer, shorter)")
    axes.legend(loc="upper left", fontsize=7, ncols=2)
    return figure


def _ends(runs: Sequence[ScoredRun]) -> tuple[float, float]:
    times_s = [time_s for one in runs for time_s in (one.measured_s, one.predicted_s)]
    return 0.8 * min(times_s), 1.25 * max(times_s)


def _boxes(runs: Sequence[ScoredRun], group_of: Callable[[ScoredRun], str]) -> Figure:
    """Return predicted / measured - 1 of every group: quartiles, and 5th to 95th percentile."""
    groups = [group.name for group in by(runs, group_of)]
    found = {name: [one.ratio - 1 for one in runs if group_of(one) == name] for name in groups}
    figure = Figure(figsize=(_WIDTH, 1.0 + 0.28 * len(groups)))
    axes = figure.add_subplot()
    axes.boxplot(
        [found[name] for name in groups],
        orientation="horizontal",
        whis=(5, 95),
        widths=0.6,
        flierprops={"marker": ".", "markersize": 2},
        medianprops={"color": "tab:red"},
        tick_labels=[f"{name} ({len(found[name]):,})" for name in groups],
    )
    axes.invert_yaxis()
    axes.set_xlim(*_SHOWN)
    axes.axvline(0, color="black", linewidth=0.7)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", linewidth=0.3)
    low, high = _SHOWN
    beyond = sum(not low <= one.ratio - 1 <= high for one in runs)
    label = "predicted / measured - 1, its source left out; whiskers: 5th, 95th percentile"
    axes.set_xlabel(f"{label}; {beyond} rows beyond" if beyond else label)
    return figure
