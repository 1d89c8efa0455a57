"""Scores of predicted step times as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from planner.tables import new_table, percent, show_skipped, show_table
from planner.units import counted, format_seconds
from planner.validate.run_scores import Errors, GroupScore, RunScores, WorstRun
from planner.validate.sweeps import FEWEST_LAYOUTS, LEAST_SPREAD, SweepScore

__all__ = ["show_run_scores"]

# Below this width the flop-only predictor shows medians alone.
_WIDE: Final = 130


def show_run_scores(out: Console, scores: RunScores) -> None:
    """Print errors by source and over all, regret in sweeps, and the worst rows."""
    if scores.sources:
        _show_groups(out, "step time: errors by source", "source", scores.sources)
        _show_groups(out, "step time: over rows and sources", "over", scores.totals)
        out.print(
            "unseen, in sample: flop of the step alone, over one achieved part of the peak for "
            "each GPU, precision, and dense or with experts; fitted on other sources, on all rows",
            markup=False,
        )
        derived = [f"{one.name} {_derived(one.derived)}" for one in scores.sources if one.derived]
        if derived:
            out.print(f"* measured times derived from rates: {'; '.join(derived)}", markup=False)
    if scores.sweeps:
        _show_sweeps(out, scores.sweeps)
    if scores.worst:
        _show_worst(out, scores.worst)
    if (memory := scores.memory) is not None:
        out.print(
            f"\nmemory of {counted(memory.num_rows, 'row')} that print it: median error "
            f"{percent(memory.median_error)}, 90th percentile {percent(memory.p90_error)}, bias "
            f"{_signed(memory.bias)}; more by commplan validate memory",
            markup=False,
        )
    show_skipped(out, scores.skipped)
    out.print(
        f"\n{counted(scores.num_rows, 'row')}: {scores.num_predicted:,} with a predicted step "
        f"time, {scores.num_scored:,} of them with a measured one",
        markup=False,
    )


def _show_groups(out: Console, title: str, what: str, groups: Sequence[GroupScore]) -> None:
    is_wide = out.width >= _WIDE
    more = ("p90>", "mean>", "bias>")
    others = ("unseen>", "in sample>")
    table = new_table(
        *(f"{what}|", "rows>" if what == "source" else "count>", "median>", *more),
        *(column for other in others for column in (other, *(more if is_wide else ()))),
        is_wide=False,
    )
    for one in groups:
        cells = [
            figure
            for errors in (one.unseen, one.in_sample)
            for figure in _figures(errors)[: None if is_wide else 1]
        ]
        mark = " *" if one.derived else ""
        table.add_row(escape(one.name) + mark, f"{one.num:,}", *_figures(one.planner), *cells)
    show_table(out, title, table)


def _figures(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["none", "", "", ""]
    sizes = (errors.median_error, errors.p90_error, errors.mean_error)
    return [*map(percent, sizes), _signed(errors.bias)]


def _derived(rates: Mapping[str, int]) -> str:
    """Return how many times are from which rate.

    >>> _derived({"TFLOP/s": 4, "MFU": 85})
    '4 from TFLOP/s, 85 from MFU'
    """
    return ", ".join(f"{count:,} from {rate}" for rate, count in rates.items())


def _show_sweeps(out: Console, sweeps: Sequence[SweepScore]) -> None:
    table = new_table(
        *("source|", "sweeps>", "layouts>", "Spearman>", "mean regret>", "p95>"),
        *("random>", "p95>", "flop only>", "p95>"),
    )
    for one in sweeps:
        regrets = (
            *(one.mean_regret, one.p95_regret, one.random_mean_regret, one.random_p95_regret),
            *(one.flop_only_mean_regret, one.flop_only_p95_regret),
        )
        counts = f"{one.num_sweeps:,}", f"{one.num_layouts:,}"
        table.add_row(
            escape(one.source), *counts, f"{one.rank_correlation:.2f}", *map(percent, regrets)
        )
    title = (
        f"the layout ranked first against the fastest, in sweeps of {FEWEST_LAYOUTS} layouts and "
        f"more whose times differ by {100 * LEAST_SPREAD:.0f} % and more"
    )
    show_table(out, title, table)


def _show_worst(out: Console, worst: Sequence[WorstRun]) -> None:
    table = new_table("row|", "source|", "predicted>", "measured>", "from|", "error>", "assumed")
    for row in worst:
        table.add_row(
            *(escape(row.id), escape(row.source)),
            *(format_seconds(row.predicted_s), format_seconds(row.measured_s)),
            *(row.measured_from, _signed(row.error), escape("; ".join(row.assumptions))),
        )
    show_table(out, "the worst rows", table)


def _signed(part: float) -> str:
    return f"{100 * part:+.1f} %"
