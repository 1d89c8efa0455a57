"""The page's section on what the data cannot show; every count in it is counted."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.accuracy.groups import repeats
from benchmarks.accuracy.stored import DATA
from benchmarks.accuracy.text import percent, times
from benchmarks.prose import wrapped
from planner.validate.collectives import is_forced
from planner.validate.rows import read_rows, without_outcomes
from planner.validate.run_outcomes import ScoredRun

__all__ = ["limits"]

# What no count shows.
_KNOWN: Final = (
    "What *left out* does not leave out. The constants of a source's prediction never saw it; the "
    "model did: its formulas, where the constants start, what each framework does by default and "
    "which statements of the notes count were written down with these tables at hand "
    "(`planner/validate/habits.py`). Runs that none of us has seen may be further off.",
    "What a source does not print is resolved with the constants fitted on all sources: the "
    "fastest micro-batch and number of chunks that fit, the least recomputation.",
    "A fit without a source is one step of the problem linearised at the fit to all, not a fit "
    "from the start.",
    "Most rows are somebody's best configuration. Bad ones are in BLOOM, FLAG, FOLD and SC21T2, "
    "and sweeps rest on a few sources.",
)


def limits(runs: Sequence[ScoredRun]) -> str:
    """Return the section."""
    lines = (*_of_runs(runs), *_of_collectives(), *_KNOWN)
    return (
        "## What these data cannot show\n\n"
        + "\n".join(wrapped(f"- {line}", "  ") for line in lines)
        + "\n"
    )


def _of_runs(runs: Sequence[ScoredRun]) -> Iterator[str]:
    if found := repeats(runs):
        yield (
            f"How near anyone can come. {found.num_rows} rows are of {found.num_layouts} layouts "
            "that stand in their table more than once, as far as it prints: times differ from the "
            f"layout's median by {percent(found.median_error)} at the median, "
            f"{percent(found.p90_error)} at the 90th percentile, and the slowest takes up to "
            f"{times(found.largest_ratio)} as long as the fastest. Most differ in the release of "
            "the software."
        )
    most = max(one.flop.num_gpus for one in runs)
    yield f"Anything beyond {most:,} GPUs."
    gpus = sorted({one.flop.gpu for one in runs})
    yield f"Step times of other GPUs than {', '.join(gpus)}: AMD's, for one."
    large = [one for one in runs if one.flop.num_gpus > 512]
    experts = [one for one in large if one.flop.has_experts]
    yield (
        f"Much about experts at scale: {len(experts)} of the {len(large)} rows on more than 512 "
        "GPUs have experts."
    )
    split = sum(int(one.layout["cp"]) > 1 for one in runs)
    yield f"Much about context parallelism: {split} of {len(runs):,} rows."


def _of_collectives() -> Iterator[str]:
    """Yield what the collectives leave open that a step is priced by."""
    path = DATA / "collectives.csv"
    rows = [without_outcomes(row) for row in read_rows(path.read_bytes(), source=path.name)]
    several = [row for row in rows if row.num_nodes > 1]
    two = sum(row.num_nodes == 2 for row in several)
    more = [row for row in several if row.num_nodes > 2 and row.op == "all_reduce"]
    forced = [row.num_nodes for row in more if is_forced(row)]
    yield (
        f"Collectives at scale: {two} of the {len(several)} rows on more than one node are of two "
        f"nodes. Beyond, an algorithm was forced in {len(forced)} of {len(more)} rows of "
        f"all_reduce, on {max(forced)} nodes at most; of the others nobody knows which one ran."
    )
