"""The page: docs/accuracy.md, and its sections of errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.accuracy import fit, limits, rows
from benchmarks.accuracy.groups import GROUPINGS, KORT_TOLERANCE, by, kort_pairs
from benchmarks.accuracy.stored import ROOT, Accuracy
from benchmarks.accuracy.targets import Target, targets
from benchmarks.accuracy.text import NONE, cells_of, percent, signed, table
from benchmarks.prose import wrapped
from planner.constants import STEP_SPREAD
from planner.validate.run_outcomes import ScoredRun
from planner.validate.run_scores import GroupScore

__all__ = ["FIGURES", "PAGE", "page"]

PAGE: Final = ROOT / "docs" / "accuracy.md"
FIGURES: Final = PAGE.with_suffix("")
_HEAD: Final = (
    "Published training runs are predicted from their configurations alone, their outcomes removed "
    "first. Each source is predicted with constants fitted on the *other* sources only (*left "
    "out*; what that does not leave out is said [below](#what-these-data-cannot-show)). The error "
    "is |predicted / measured - 1|, the bias the median of predicted / measured - 1: below 0 is "
    "too fast."
)
_COMMANDS: Final = """\
    python -m benchmarks.fit_steps --write    # fits, predicts every row; six minutes on two cores
    python -m benchmarks.accuracy --write     # this page and its figures from that, in seconds
    commplan validate runs benchmarks/data/training_runs.csv    # with the shipped constants

The tables are those of [benchmarks/data](../benchmarks/data/README.md); how they are fitted to is
said in `planner/validate/step_fit.py`. The shipped constants are fitted on all sources.
"""
_FLOP_ONLY: Final = (
    "Sources left out, one at a time. *In the fit*: the median with constants fitted on all. *Flop "
    "only*: a predictor that counts the flop of a step and knows nothing else, over one achieved "
    "part of the peak for each GPU, precision, dense or with experts: fitted on the other sources "
    "(*unseen*), on the rows themselves (*in sample*); medians. vTrain's tables, half of all rows, "
    "are not among what it is fitted on for others."
)
_INTERVAL: Final = (
    "A plan without a calibration carries an interval that four of five published runs lie in: the "
    "80th percentile of the errors above, left out, rounded (`STEP_SPREAD` in "
    "`planner/constants.py`). Predicted over measured may be off by the error, so what is measured "
    "lies between the predicted time over 1 + error and over 1 - error."
)
_PAIRS: Final = (
    "The time of a step with everything recomputed over that with selective recomputation and "
    "sequence parallelism, of the same model on the same GPUs (KORT, arXiv 2205.05198)."
)
_REGRET: Final = (
    "Sweeps: one job on one machine in three layouts and more, whose times differ by a tenth and "
    "more. Regret: how much longer the layout takes that is predicted to be fastest than the one "
    "that is, by measured times. Rank correlation is Spearman's, the mean over sweeps "
    "(`planner/validate/sweeps.py`)."
)


def page(a: Accuracy) -> str:
    """Return the page, text and tables."""
    sections = (
        "# How near predicted step times come\n",
        f"{wrapped(_HEAD)}\n",
        _COMMANDS,
        _targets(a),
        _sources(a),
        _interval(a.runs),
        _pairs(a),
        _groups(a.runs),
        _sweeps(a),
        fit.constants(a.results),
        fit.stragglers(a.results["constants"]["jitter"]),
        rows.worst(a),
        rows.large(a),
        limits.limits(a.runs),
    )
    return "\n".join(sections).rstrip() + "\n"


def _figure(name: str, what: str) -> str:
    return f"![{what}]({FIGURES.name}/{name}.svg)\n"


# --------------------------------------------------------------------------------------- targets


def _targets(a: Accuracy) -> str:
    lines = (
        (one.what, _found(one), _limit(one), f"**{one.verdict}**", one.published or NONE)
        for one in targets(a)
    )
    return "## What was asked\n\n" + table(
        ("left out", "found", "at most (goal)", "verdict", "published for scale"), lines
    )


def _found(one: Target) -> str:
    is_number = one.is_count and one.found is not None
    return f"{one.found:.0f}" if is_number else percent(one.found)


def _limit(one: Target) -> str:
    if one.is_count:
        return f"{one.limit:.0f}"
    goal = "" if one.goal is None else f" ({100 * one.goal:.0f} %)"
    return f"{100 * one.limit:.0f} %{goal}"


# ------------------------------------------------------------------------------------- by source


def _sources(a: Accuracy) -> str:
    inside = a.results["scores"]["all"]["sources"]
    header = (
        *("source", "rows", "median", "90th", "mean", "bias", "in the fit"),
        *("flop only, unseen", "flop only, in sample"),
    )
    of_sources = [(*_cells(one), percent(inside[one.name]["median"])) for one in a.scores.sources]
    flop = [_flop_only(one) for one in a.scores.sources]
    lines = [(*left, *right) for left, right in zip(of_sources, flop, strict=True)]
    totals = [
        *_totals("without vTrain's", a.published.totals),
        *_totals("with vTrain's", a.scores.totals, a.results["scores"]["all"]),
    ]
    return "\n".join(
        (
            "## By source\n",
            f"{wrapped(_FLOP_ONLY)}\n",
            table(header, (*lines, *totals)),
            f"{wrapped(_derived(a))}\n",
            f"{wrapped(_titles(a))}\n",
            _figure("predicted_measured", "predicted against measured step times, by source"),
            _figure("by_source", "predicted over measured, by source"),
        )
    )


def _titles(a: Accuracy) -> str:
    named = "; ".join(f"{source}: {title}" for source, title in sorted(a.titles.items()))
    return f"What the first row of each source is from (addresses in the tables): {named}."


def _derived(a: Accuracy) -> str:
    """Return which measured times are no times."""
    here = [
        f"{source.name} {num} from {rate}"
        for source in a.scores.sources
        for rate, num in source.derived.items()
    ]
    table_s = [f"{source} {num}" for source, num in sorted(a.derived.items())]
    return (
        "Times derived from rates that depend on how a source counts flop, and left out of "
        f"*measured times*: {', '.join(here) or 'none'}. Derived so in the table already, and not "
        f"left out: {', '.join(table_s) or 'none'}. Others are printed, or made of tokens/s."
    )


def _totals(
    title: str, groups: Sequence[GroupScore], inside: Mapping[str, float] | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the lines of all rows, of parts of them, and over sources."""
    stored = {"all rows": "median", "median over sources": "median_over_sources"}
    yield f"**{title}**", *[""] * 8
    for one in groups:
        fitted = percent(inside[stored[one.name]]) if inside and one.name in stored else NONE
        yield *_cells(one), fitted, *_flop_only(one)


def _cells(one: GroupScore) -> tuple[str, ...]:
    return one.name, f"{one.num:,}", *cells_of(one.planner)


def _flop_only(one: GroupScore) -> tuple[str, str]:
    unseen = None if one.unseen is None else one.unseen.median_error
    return percent(unseen), percent(one.in_sample.median_error)


def _interval(runs: Sequence[ScoredRun]) -> str:
    """Return what a plan's interval holds of published runs."""
    lines = []
    for kind, spread in STEP_SPREAD.items():
        errors = [abs(one.ratio - 1) for one in runs if one.flop.has_experts == (kind == "experts")]
        inside = sum(error <= spread.value for error in errors)
        widths = f"{1 / (1 + spread.value):.2f} to {1 / (1 - spread.value):.2f}"
        share = inside / len(errors) if errors else None
        lines.append((kind, f"{len(errors):,}", percent(spread.value), widths, percent(share)))
    header = ("models", "rows", "error", "of the predicted time", "measured inside, left out")
    return f"## The interval of a plan\n\n{wrapped(_INTERVAL)}\n\n" + table(header, lines)


def _pairs(a: Accuracy) -> str:
    lines = [
        (
            *(pair.model, f"{pair.num_gpus:,}", f"{pair.measured:.2f}", f"{pair.predicted:.2f}"),
            signed(pair.error),
            "yes" if abs(pair.error) <= KORT_TOLERANCE else "no",
        )
        for pair in kort_pairs(a.runs)
    ]
    header = ("model", "GPUs", "measured", "predicted", "error", f"within {KORT_TOLERANCE:.0%}")
    return f"## Recomputation: controlled pairs\n\n{wrapped(_PAIRS)}\n\n" + table(
        (*header[:-1], header[-1].replace("%", " %")), lines
    )


# ------------------------------------------------------------------------------------ in groups


def _groups(runs: Sequence[ScoredRun]) -> str:
    return "\n".join(
        (
            "## By size, precision, GPU and kind of model\n",
            "Pooled over rows: sources with many weigh more here.\n",
            table(("", "rows", "median", "90th", "mean", "bias"), _grouped(runs)),
            _figure("by_gpus", "predicted over measured, by number of GPUs"),
            _figure("by_precision", "predicted over measured, by precision"),
        )
    )


def _grouped(runs: Sequence[ScoredRun]) -> Iterator[tuple[str, ...]]:
    for title, group_of in GROUPINGS.items():
        yield f"**{title}**", "", "", "", "", ""
        for one in by(runs, group_of):
            yield one.name, f"{one.num_rows:,}", *cells_of(one.errors)


def _sweeps(a: Accuracy) -> str:
    header = (
        *("source", "sweeps", "layouts", "rank correlation", "regret, mean", "95th"),
        *("at random", "95th", "flop only", "95th"),
    )
    lines = [
        (
            *(one.source, f"{one.num_sweeps}", f"{one.num_layouts}", f"{one.rank_correlation:.2f}"),
            *(percent(one.mean_regret), percent(one.p95_regret)),
            *(percent(one.random_mean_regret), percent(one.random_p95_regret)),
            *(percent(one.flop_only_mean_regret), percent(one.flop_only_p95_regret)),
        )
        for one in a.scores.sweeps
    ]
    return f"## Does it rank layouts?\n\n{wrapped(_REGRET)}\n\n" + table(header, lines)
