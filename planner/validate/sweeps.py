"""Does the cost model rank layouts? Within sweeps: one job on one machine, laid out differently.

A sweep is the rows of a source with the same model, GPU, number of GPUs, sequence length, precision
and batch. Rows with the same layout, what is not printed resolved by its default, count as one with
the mean of their times: releases of the software, mostly. It takes three layouts, and times that
differ by a tenth.

Regret is how much longer the layout takes that is ranked first than the fastest of the sweep, by
measured times. Whoever picks at random has the mean over the layouts; who counts flop alone cannot
tell most layouts apart, and has the mean over those that tie.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from planner.validate.flop_only import executed_flop
from planner.validate.run_outcomes import ScoredRun

__all__ = [
    "FEWEST_LAYOUTS",
    "LEAST_SPREAD",
    "Sweep",
    "SweepScore",
    "jobs_of",
    "score_sweeps",
    "sweeps_of",
]

FEWEST_LAYOUTS: Final = 3
# Of the slowest over the fastest, less 1; below it is noise.
LEAST_SPREAD: Final = 0.10
_TIE: Final = 1e-9
_JOB: Final = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "moe_experts", "moe_topk"),
    *("moe_ffn_hidden", "moe_shared_experts", "gpu", "n_gpus", "gpus_per_node", "seq_len"),
    *("precision", "global_batch"),
)
# Facts of the notes about what is trained; how memory was read is neither; others are of the layout
_JOB_FACTS: Final = frozenset(
    ("latent_attention", "three_dense_layers", "capacity_factor_1", "even_routing")
)
_READING_FACTS: Final = frozenset(("of_allocated", "of_reserved", "memory_only"))


@dataclass(frozen=True, slots=True)
class Sweep:
    """One job in several layouts; the columns have one entry for each layout."""

    source: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    flop: tuple[float, ...]

    def regret(self, by: Sequence[float]) -> float:
        """Return the regret of picking the least of ``by``, expected over those that tie."""
        least = min(by) * (1 + _TIE)
        picked = [time_s for time_s, rank in zip(self.measured_s, by, strict=True) if rank <= least]
        return fmean(picked) / min(self.measured_s) - 1

    def random_regret(self) -> float:
        """Return the expected regret of a pick that knows nothing."""
        return fmean(self.measured_s) / min(self.measured_s) - 1

    def rank_correlation(self) -> float:
        """Return Spearman's, of predicted with measured times; 0 where all predicted tie."""
        from scipy.stats import rankdata  # scipy doubles the start

        predicted, measured = rankdata(self.predicted_s), rankdata(self.measured_s)
        if np.ptp(predicted) == 0:
            return 0.0
        return float(np.corrcoef(predicted, measured)[0, 1])


@dataclass(frozen=True, slots=True)
class SweepScore:
    """The sweeps of one source, or of all.

    Attributes:
        source: As the table calls it; "all" of all.
        num_sweeps: Of it.
        num_layouts: In them.
        rank_correlation: Spearman's, mean over sweeps.
        mean_regret: Of the layout predicted to be fastest.
        p95_regret: Over sweeps.
        random_mean_regret: Of a random pick.
        random_p95_regret: Over sweeps, of its expected regret in each.
        flop_only_mean_regret: Of the layout with the fewest flop.
        flop_only_p95_regret: Over sweeps, of its expected regret in each.
    """

    source: str
    num_sweeps: int
    num_layouts: int
    rank_correlation: float
    mean_regret: float
    p95_regret: float
    random_mean_regret: float
    random_p95_regret: float
    flop_only_mean_regret: float
    flop_only_p95_regret: float


def sweeps_of(runs: Sequence[ScoredRun]) -> list[Sweep]:
    """Return the sweeps among ``runs``, in the order of their first rows."""
    found = [_sweep(layouts) for layouts in jobs_of(runs)]
    return [
        sweep
        for sweep in found
        if len(sweep.measured_s) >= FEWEST_LAYOUTS
        and max(sweep.measured_s) >= (1 + LEAST_SPREAD) * min(sweep.measured_s)
    ]


def jobs_of(runs: Sequence[ScoredRun]) -> list[list[list[ScoredRun]]]:
    """Return the rows of each layout of each job, in the order of their first rows."""
    jobs = defaultdict[Hashable, dict[Hashable, list[ScoredRun]]](dict)
    for one in runs:
        if one.run.global_batch is not None:
            jobs[_job(one)].setdefault(_layout(one), []).append(one)
    return [list(layouts.values()) for layouts in jobs.values()]


def _job(one: ScoredRun) -> Hashable:
    run = one.run
    return (one.source, *(getattr(run, name) for name in _JOB), run.facts & _JOB_FACTS)


def _layout(one: ScoredRun) -> Hashable:
    run = one.run
    facts = run.facts - _JOB_FACTS - _READING_FACTS
    return (*one.layout.items(), run.offloaded_layers, facts)


def _sweep(layouts: Sequence[Sequence[ScoredRun]]) -> Sweep:
    return Sweep(
        layouts[0][0].source,
        tuple(fmean(one.predicted_s for one in repeats) for repeats in layouts),
        tuple(fmean(one.measured_s for one in repeats) for repeats in layouts),
        tuple(fmean(executed_flop(one) for one in repeats) for repeats in layouts),
    )


def score_sweeps(runs: Sequence[ScoredRun]) -> tuple[SweepScore, ...]:
    """Return the scores of the sweeps of each source by name, and those of all last."""
    sweeps = sweeps_of(runs)
    sources = sorted({sweep.source for sweep in sweeps})
    scores = [_score(name, [s for s in sweeps if s.source == name]) for name in sources]
    return (*scores, _score("all", sweeps)) if sweeps else ()


def _score(source: str, sweeps: Sequence[Sweep]) -> SweepScore:
    by_pick = (
        [sweep.regret(sweep.predicted_s) for sweep in sweeps],
        [sweep.random_regret() for sweep in sweeps],
        [sweep.regret(sweep.flop) for sweep in sweeps],
    )
    figures = [(fmean(found), float(np.quantile(found, 0.95))) for found in by_pick]
    return SweepScore(
        source,
        len(sweeps),
        sum(len(sweep.measured_s) for sweep in sweeps),
        fmean(sweep.rank_correlation() for sweep in sweeps),
        *(figure for pair in figures for figure in pair),
    )
