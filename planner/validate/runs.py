"""Predicted step time and memory of published training runs, by the planner's own cost model.

Nothing is fitted here and no outcome is seen: a ``Run`` goes in. Beside a step's seconds stands the
flop of it by the planner's one count (``planner.model.blocks``): what a rate that a source prints
in place of a time is turned into a time by, and what a predictor that knows nothing else would go
by.
"""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from planner.cost.shares import recomputed_share
from planner.cost.step import Priced, price
from planner.errors import PlannerError
from planner.hardware.roofline import peak_of
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates
from planner.model.blocks import (
    BLOCK_KINDS,
    BlockKind,
    attention_flop_per_token,
    block_flop_per_token,
    model_flop_per_token,
    num_blocks,
)
from planner.validate.configurations import Configuration, configuration
from planner.validate.memory import MemoryPrediction, memory_of
from planner.validate.published import Run

__all__ = ["RUN_COLUMNS", "RunPrediction", "StepFlop", "predict_runs", "runs_csv", "step_flop"]

# Of the table that ``runs_csv`` returns.
RUN_COLUMNS: Final = (
    "id",
    "predicted_step_time_s",
    "predicted_memory_gb",
    "assumptions",
    "skipped_reason",
)
_ENDS: Final = ("embedding", "head")


@dataclass(frozen=True, slots=True)
class StepFlop:
    """Flop of one step over all GPUs, of which a causal kernel has half of the attention's.

    Attributes:
        model_flop: Forward and backward.
        recomputed_flop: The forward's that is done again.
        model_attention_flop: Of ``model_flop``, the attention's cores.
        recomputed_attention_flop: Of ``recomputed_flop``, the same.
        peak_flop_per_s: Dense, of one GPU in the precision of the run.
        num_gpus: Of the run.
        num_tokens: Of the batch: the printed one, or that of the assumptions.
        has_experts: Whether the model has.
        gpu: As devices are called.
        precision: Of the run.
    """

    model_flop: float
    recomputed_flop: float
    model_attention_flop: float
    recomputed_attention_flop: float
    peak_flop_per_s: float
    num_gpus: int
    num_tokens: int
    has_experts: bool
    gpu: str
    precision: str

    def counted(self, *, causal: bool, recomputed: bool) -> float:
        """Return the flop as a source counts them.

        Args:
            causal: Half of the attention's, as a causal kernel has; all of them otherwise.
            recomputed: What is recomputed with them.
        """
        found = self.model_flop + (0.0 if causal else self.model_attention_flop)
        if recomputed:
            found += self.recomputed_flop + (0.0 if causal else self.recomputed_attention_flop)
        return found


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """What is said of one run.

    Attributes:
        id: Of the run.
        step_time_s: None where it cannot be predicted; ``skipped_reason`` says why.
        memory: None where there is no configuration.
        parts_s: What fills the step, on the slowest pipeline rank.
        flop: Of a step; None where there is no configuration.
        layout: Columns of the candidate that was priced, what is not printed resolved.
        assumptions: What the columns leave open, in sentences.
        skipped_reason: Empty where there is a step time.
    """

    id: str
    step_time_s: float | None
    memory: MemoryPrediction | None = None
    parts_s: dict[str, float] | None = None
    flop: StepFlop | None = None
    layout: dict[str, int | str] | None = None
    assumptions: tuple[str, ...] = ()
    skipped_reason: str = ""

    @property
    def memory_gib(self) -> float | None:
        """Memory as the source prints it, of the fullest rank."""
        return self.memory.memory_gib if self.memory else None


def predict_runs(runs: Iterable[Run]) -> list[RunPrediction]:
    """Return a prediction for each run, in their order."""
    return [_predicted(run) for run in runs]


def _predicted(run: Run) -> RunPrediction:
    try:
        found = configuration(run)
        room, flop = memory_of(run, found), step_flop(found)
    except PlannerError as exc:
        return RunPrediction(run.id, None, skipped_reason=str(exc))
    try:
        priced, why_not = price(found.problem, found.candidate), ""
    except PlannerError as exc:
        priced, why_not = None, f"no step time: {exc}"
    time_s = None if priced is None else float(priced.step_time_s()[0])
    if time_s is not None and not (math.isfinite(time_s) and time_s > 0):
        time_s, priced, why_not = None, None, f"no step time: {time_s} s is none"
    return RunPrediction(
        id=run.id,
        step_time_s=time_s,
        memory=room,
        parts_s=None if priced is None else _parts(priced),
        flop=flop,
        layout=_layout(found.candidate),
        assumptions=found.assumptions,
        skipped_reason=why_not,
    )


def _parts(priced: Priced) -> dict[str, float]:
    return {
        field.name.removesuffix("_s"): float(getattr(priced, field.name)[0])
        for field in fields(Priced)
    }


def _layout(c: Candidates) -> dict[str, int | str]:
    """Return the columns of one row, in words where they number words."""
    columns: dict[str, int | str] = {f.name: int(getattr(c, f.name)[0]) for f in fields(Candidates)}
    words = {"recompute": RECOMPUTE_MODES, "schedule": SCHEDULES}
    return columns | {name: of[int(getattr(c, name)[0])] for name, of in words.items()}


def step_flop(found: Configuration) -> StepFlop:
    """Return the flop of a step of a configuration.

    As sources count: recomputation in full redoes the whole forward of layers, selective what is
    cheap and, where score matrices are stored, the attention's cores (Megatron-LM,
    --recompute-granularity). What kernels do in truth, a forward that stops early or scores that
    are masked, is in ``planner.cost.work``.
    """
    problem, c = found.problem, found.candidate
    model, training = problem.model, problem.training
    seq_len, packing = training.seq_len, training.packing
    blocks = num_blocks(model)
    cores: dict[BlockKind, float] = {
        kind: attention_flop_per_token(model, kind, seq_len, packing)
        for kind in blocks
        if kind not in _ENDS
    }
    mode = RECOMPUTE_MODES[int(c.recompute[0])]
    again = dict.fromkeys(cores, 0.0)
    again_cores = dict(again)
    if mode == "full":
        share = _recomputed_layers(found)
        again = {
            kind: share * block_flop_per_token(model, kind, seq_len, packing) for kind in cores
        }
        again_cores = {kind: share * core for kind, core in cores.items()}
    elif mode == "selective" and not training.fused_attention:
        again = again_cores = cores
    tokens = training.global_batch_size * seq_len

    def of_step(per_token: dict[BlockKind, float]) -> float:
        return tokens * sum(blocks[kind] * flop for kind, flop in per_token.items())

    return StepFlop(
        model_flop=tokens * model_flop_per_token(model, seq_len, packing),
        recomputed_flop=of_step(again),
        model_attention_flop=3 * of_step(cores),
        recomputed_attention_flop=of_step(again_cores),
        peak_flop_per_s=peak_of(problem.device, training.precision),
        num_gpus=problem.fabric.num_gpus,
        num_tokens=tokens,
        has_experts=model.experts is not None,
        gpu=problem.device.name,
        precision=training.precision,
    )


def _recomputed_layers(found: Configuration) -> float:
    """Return the part of all layers that full recomputation redoes."""
    splits, c = found.problem.splits, found.candidate
    counts, times = splits.counts[c.split][0], splits.multiplicity[c.split][0]
    layers = counts.sum(axis=1) - counts[:, [BLOCK_KINDS.index(end) for end in _ENDS]].sum(axis=1)
    share = recomputed_share(c, counts[None])[0]
    return float(np.sum(times * layers * share) / np.sum(times * layers))


def runs_csv(predictions: Iterable[RunPrediction]) -> str:
    """Return the predictions as a table of ``RUN_COLUMNS``, one line each.

    Memory is in GiB, as the column that it is for.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(RUN_COLUMNS)
    for p in predictions:
        time_s, memory_gb = (
            "" if figure is None else f"{figure:.6g}" for figure in (p.step_time_s, p.memory_gib)
        )
        lines.writerow((p.id, time_s, memory_gb, "; ".join(p.assumptions), p.skipped_reason))
    return text.getvalue()
