"""The page's sections on single rows, and on sources with large errors."""

from collections.abc import Sequence
from typing import Final

from benchmarks.accuracy.causes import cause_of
from benchmarks.accuracy.stored import Accuracy
from benchmarks.accuracy.targets import LARGE_ERROR, MANY_ROWS, large_errors
from benchmarks.accuracy.text import NONE, percent, signed, table
from planner.validate.run_outcomes import ScoredRun

__all__ = ["laid_out", "large", "worst"]

_NOT_PRINTED: Final = " is not printed"


def worst(a: Accuracy) -> str:
    """Return the section on the rows with the largest errors."""
    runs = {one.run.id: one for one in a.runs}
    lines = [
        (
            *(one.id, signed(one.error), _model_of(runs[one.id])),
            f"{runs[one.id].flop.num_gpus:,} {runs[one.id].flop.gpu}",
            *(laid_out(runs[one.id]), ", ".join(_not_printed(one.assumptions)) or NONE),
            *(one.measured_from, cause_of(one.source).text),
        )
        for one in a.scores.worst
    ]
    header = (
        *("row", "error", "model", "GPUs", "layout", "not printed", "measured"),
        "cause, as far as known",
    )
    return "## The worst rows\n\n" + table(header, lines)


def laid_out(one: ScoredRun) -> str:
    """Return a layout in a few words; degrees of 1 are left out."""
    found = dict(one.layout)
    found["dp"] = int(found["dp_shard"]) * int(found["dp_replicate"])
    degrees = [
        f"{name}{found[name]}" for name in ("tp", "cp", "pp", "dp", "ep") if found[name] != 1
    ]
    zero = [f"ZeRO-{found['zero_stage']}"] if found["zero_stage"] else []
    again = [] if found["recompute"] == "none" else [f"{found['recompute']} recompute"]
    batch = f"micro-batch {found['micro_batch_size']} x {found['num_micro_batches']}"
    return ", ".join((" ".join(degrees) or "one GPU", *zero, *again, batch, one.flop.precision))


def _model_of(one: ScoredRun) -> str:
    return one.run.model or f"{one.run.layers} layers of {one.run.hidden:,}"


def _not_printed(assumptions: Sequence[str]) -> list[str]:
    return [one.partition(_NOT_PRINTED)[0] for one in assumptions if _NOT_PRINTED in one]


def large(a: Accuracy) -> str:
    """Return the section on sources with large errors."""
    found = large_errors(a.scores.sources)
    above = f"{100 * LARGE_ERROR:.0f} %"
    title = f"## Sources above {above}\n\n"
    if not found:
        return f"{title}No source of {MANY_ROWS} rows or more has a median error above {above}.\n"
    lines = [
        (
            *(one.name, f"{one.num}", percent(one.planner.median_error), signed(one.planner.bias)),
            cause_of(one.name).text,
        )
        for one in found
    ]
    return title + table(("source", "rows", "median", "bias", "cause"), lines)
