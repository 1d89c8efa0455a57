"""What a run took, and its prediction beside it: the first place that sees both.

Some sources print no time but a rate: tokens/s, flop/s or MFU of a GPU. A rate is turned into the
time of the batch that was predicted, so that where no batch is printed throughput is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from planner.validate.published import Run, RunOutcome, run_of, run_outcome
from planner.validate.rows import Row
from planner.validate.runs import RunPrediction, StepFlop

__all__ = ["DERIVED_FROM", "ScoredRun", "measured_step", "scored_runs"]

# What is no time, and no tokens/s: it depends on how the source counts flop.
DERIVED_FROM: Final = ("TFLOP/s", "MFU")


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A run with a predicted and a measured step time.

    Attributes:
        run: What was known of it.
        source: As the table calls it.
        predicted_s: Of a step.
        measured_s: Of a step.
        measured_from: "step time", "tokens/s", or one of ``DERIVED_FROM``.
        flop: Of the step.
        layout: As of the prediction.
        assumptions: Of the prediction.
    """

    run: Run
    source: str
    predicted_s: float
    measured_s: float
    measured_from: str
    flop: StepFlop
    layout: dict[str, int | str]
    assumptions: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s

    @property
    def is_derived(self) -> bool:
        """Whether the measured time rests on how the source counts flop."""
        return self.measured_from in DERIVED_FROM


def scored_runs(rows: Sequence[Row], predictions: Sequence[RunPrediction]) -> list[ScoredRun]:
    """Return those of ``rows`` that were both predicted and measured, in their order."""
    found = []
    for row, one in zip(rows, predictions, strict=True):
        if one.step_time_s is None or one.flop is None or one.layout is None:
            continue
        run, outcome = run_of(row), run_outcome(row)
        if (measured := measured_step(run, outcome, one.flop)) is not None:
            figures = one.step_time_s, *measured
            found.append(
                ScoredRun(run, outcome.source, *figures, one.flop, one.layout, one.assumptions)
            )
    return found


def measured_step(run: Run, outcome: RunOutcome, flop: StepFlop) -> tuple[float, str] | None:
    """Return the seconds of a step, and what they are from; None where nothing is printed.

    A printed time is that of the printed batch: without one, or of one too small for its ranks, it
    says nothing. Printed flop have all
    of the attention's unless the notes say otherwise; MFU is of the dense peak in the precision of
    the run.
    """
    is_whole = (run.global_batch or 0) * (run.seq_len or 0) == flop.num_tokens
    if is_whole and outcome.step_time_s is not None:
        return outcome.step_time_s, "step time"
    if outcome.tokens_per_s is not None:
        return flop.num_tokens / (flop.num_gpus * outcome.tokens_per_s), "tokens/s"
    counted = flop.counted(causal=outcome.counts_causal, recomputed=outcome.counts_recomputed)
    if outcome.flop_per_s is not None:
        return counted / (flop.num_gpus * outcome.flop_per_s), "TFLOP/s"
    if outcome.mfu is not None:
        return counted / (flop.num_gpus * outcome.mfu * flop.peak_flop_per_s), "MFU"
    return None
