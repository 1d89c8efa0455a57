"""Scores of step times: by hand, and by brute force."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from scipy.stats import spearmanr

from planner.errors import InvalidInputError
from planner.validate.flop_only import executed_flop, in_sample_s, unseen_s
from planner.validate.published import run_of, run_outcome
from planner.validate.rows import Row
from planner.validate.run_outcomes import ScoredRun, measured_step, scored_runs
from planner.validate.run_scores import RunScores, score_runs
from planner.validate.runs import RunPrediction, predict_runs
from planner.validate.sweeps import Sweep, score_sweeps, sweeps_of
from tests.unit.published_rows import row_of

A100_PEAK = 312e12
H100 = {"gpu": "H100-80GB-SXM"}
MOE = {"moe_experts": "8", "moe_topk": "2", "moe_ffn_hidden": "2048"}
UNTIMED = {"measured_step_time_s": "", "memory_gb_per_gpu": ""}


def predicted(rows: Sequence[Row], times_s: Sequence[float] = ()) -> list[RunPrediction]:
    """Return predictions of the rows, as if the model said ``times_s``."""
    found = predict_runs(map(run_of, rows))
    if not times_s:
        return found
    return [replace(p, step_time_s=time_s) for p, time_s in zip(found, times_s, strict=True)]


def runs_of(*cells: dict[str, str], times_s: Sequence[float] = ()) -> list[ScoredRun]:
    rows = [row_of(**{"id": str(n), **one}) for n, one in enumerate(cells)]
    return scored_runs(rows, predicted(rows, times_s))


def timed(source: str, time_s: float, **cells: str) -> dict[str, str]:
    return {"source_id": source, "measured_step_time_s": repr(time_s), **cells}


# ------------------------------------------------------------------------------ errors


def scores_of_five() -> RunScores:
    cells = [timed("A", 10), timed("A", 20), timed("A", 10), timed("B", 4), timed("B", 8)]
    cells[1]["sequence_parallel"] = cells[3]["recompute"] = ""
    rows = [row_of(id=str(n), **one) for n, one in enumerate(cells)]
    return score_runs(rows, predicted(rows, [11, 15, 10, 5, 16]))


def test_errors_are_those_of_a_hand_computed_table() -> None:
    scores = scores_of_five()
    a, b = scores.sources
    # A: +10 %, -25 %, 0; B: +25 %, +100 %
    assert (a.name, a.num, b.name, b.num) == ("A", 3, "B", 2)
    assert a.planner.median_error == pytest.approx(0.10)
    assert a.planner.p90_error == pytest.approx(0.22)
    assert a.planner.mean_error == pytest.approx(0.35 / 3)
    assert a.planner.bias == pytest.approx(0)
    assert b.planner.median_error == pytest.approx(0.625)
    assert b.planner.bias == pytest.approx(0.625)
    every, times, told, over, over_times = scores.totals
    assert (every.name, every.num) == ("all rows", 5)
    assert every.planner.median_error == pytest.approx(0.25)
    assert every.planner.mean_error == pytest.approx(1.6 / 5)
    assert times.planner == every.planner
    assert (told.name, told.num) == ("recompute and SP printed", 3)
    assert told.planner.median_error == pytest.approx(0.10)
    assert (over.name, over.num) == ("median over sources", 2)
    assert over.planner.median_error == pytest.approx((0.10 + 0.625) / 2)
    assert over.planner.bias == pytest.approx(0.625 / 2)
    assert over_times.planner == over.planner


def test_the_worst_rows_come_first_with_what_was_assumed() -> None:
    worst = scores_of_five().worst
    assert [row.id for row in worst] == ["4", "1", "3", "0", "2"]
    assert [row.error for row in worst] == pytest.approx([1, -0.25, 0.25, 0.1, 0])
    assert "sequence_parallel is not printed: off" in worst[1].assumptions
    assert len(score_runs(*[[]] * 2).worst) == 0


def test_rows_without_a_prediction_or_a_time_are_counted_and_not_scored() -> None:
    rows = [row_of(id="a"), row_of(id="b", layers=""), row_of(id="c", **UNTIMED)]
    scores = score_runs(rows, predicted(rows))
    counts = scores.num_rows, scores.num_predicted, scores.num_scored
    assert counts == (3, 2, 1)
    assert scores.skipped == {"layers not given": 1}


# ---------------------------------------------------------------------------- flop alone


def brute_force(runs: Sequence[ScoredRun]) -> list[float]:
    """Times of flop alone where every group has rows in other sources."""
    found = []
    for one in runs:
        rates = [
            executed_flop(other) / other.flop.num_gpus / other.measured_s
            for other in runs
            if other.source != one.source
            and other.run.gpu == one.run.gpu
            and other.run.precision == one.run.precision
            and bool(other.run.moe_experts) == bool(one.run.moe_experts)
        ]
        found.append(executed_flop(one) / one.flop.num_gpus / median(rates))
    return found


def test_flop_alone_is_fitted_on_other_sources() -> None:
    cells = [
        timed(source, 1.0 + 0.7 * number, n_gpus=str(8 << number % 2), **kind)
        for number, (source, kind) in enumerate(
            [("A", {}), ("B", {}), ("C", {}), ("A", H100), ("B", H100), ("A", MOE), ("C", MOE)]
        )
    ]
    cells.append(timed("B", 3.0, recompute="full"))
    runs = runs_of(*cells)
    assert unseen_s(runs) == pytest.approx(brute_force(runs))


def test_flop_alone_in_sample_has_the_median_of_the_group() -> None:
    runs = runs_of(timed("A", 1), timed("A", 3), timed("B", 4), timed("A", 7, **H100))
    assert in_sample_s(runs) == pytest.approx([3, 3, 3, 7])


@pytest.mark.parametrize(
    ("others", "nearest"),
    [
        ([{"precision": "fp16"}, MOE, H100], 0),  # the GPU, dense, another precision
        ([MOE, H100], 0),  # the GPU, before other GPUs
        ([{**H100, **MOE}, H100], 1),  # dense, before any
        ([{**H100, **MOE}], 0),
    ],
)
def test_a_group_without_rows_elsewhere_takes_the_nearest(
    others: list[dict[str, str]], nearest: int
) -> None:
    far = [timed("B", 1.0 + number, **cells) for number, cells in enumerate(others)]
    one, *elsewhere = runs_of(timed("A", 1), *far)
    chosen = elsewhere[nearest]
    part = executed_flop(chosen) / chosen.measured_s / 8 / chosen.flop.peak_flop_per_s
    assert unseen_s([one, *elsewhere])[0] == pytest.approx(
        executed_flop(one) / 8 / A100_PEAK / part
    )


def test_one_source_alone_has_no_unseen_fit() -> None:
    rows = [row_of(id="a"), row_of(id="b", tp="4")]
    assert unseen_s(scored_runs(rows, predicted(rows))) == [None, None]
    scores = score_runs(rows, predicted(rows))
    assert {group.unseen for group in (*scores.sources, *scores.totals)} == {None}


# ------------------------------------------------------------------------- rates to times


def measured(**cells: str) -> tuple[float, str]:
    row = row_of(**{**UNTIMED, **cells})
    (found,) = predicted([row])
    assert found.flop is not None
    step = measured_step(run_of(row), run_outcome(row), found.flop)
    assert step is not None
    return step


# Of the row: 6 N and 12 l h s flop a token, 16 sequences of 4,096 tokens, 8 GPUs.
BLOCKS, HEAD = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 4096 * 32000
CORE, TOKENS = 32 * 4096 * 4096, 16 * 4096


@pytest.mark.parametrize(
    ("cells", "flop_per_token", "rate", "said"),
    [
        ({"tflops_per_gpu": "150"}, 6 * (BLOCKS + HEAD) + 12 * CORE, 150e12, "TFLOP/s"),
        ({"mfu_pct": "50"}, 6 * (BLOCKS + HEAD) + 12 * CORE, 156e12, "MFU"),
        (
            {"mfu_pct": "50", "notes": "printed TFLOPs count CAUSAL (half) attention"},
            6 * (BLOCKS + HEAD) + 6 * CORE,
            156e12,
            "MFU",
        ),
        (
            {"mfu_pct": "50", "notes": "full attention counted (no causal halving)"},
            6 * (BLOCKS + HEAD) + 12 * CORE,
            156e12,
            "MFU",
        ),
        (
            {"tflops_per_gpu": "150", "flops_convention": "hardware", "recompute": "full"},
            8 * BLOCKS + 6 * HEAD + 16 * CORE,
            150e12,
            "TFLOP/s",
        ),
        (
            {"tflops_per_gpu": "150", "flops_convention": "model", "recompute": "full"},
            6 * (BLOCKS + HEAD) + 12 * CORE,
            150e12,
            "TFLOP/s",
        ),
        ({"mfu_pct": "40", **H100}, 6 * (BLOCKS + HEAD) + 12 * CORE, 0.4 * 989.5e12, "MFU"),
        (
            {"mfu_pct": "40", **H100, "precision": "fp8"},
            6 * (BLOCKS + HEAD) + 12 * CORE,
            0.4 * 1979e12,
            "MFU",
        ),
        ({"tokens_per_s_per_gpu": "500", "mfu_pct": "9"}, 500, 500, "tokens/s"),
    ],
)
def test_a_rate_becomes_a_time_by_the_flop_that_the_source_counts(
    cells: dict[str, str], flop_per_token: float, rate: float, said: str
) -> None:
    time_s, measured_from = measured(**cells)
    per_token = 1 if said == "tokens/s" else flop_per_token
    assert time_s == pytest.approx(per_token * TOKENS / 8 / rate)
    assert measured_from == said


def test_a_time_comes_before_rates_where_the_batch_is_printed() -> None:
    assert measured(measured_step_time_s="3", mfu_pct="50") == (3.0, "step time")
    with pytest.raises(InvalidInputError, match="flops_convention"):
        run_outcome(row_of(flops_convention="ours"))


def test_without_a_batch_throughput_is_compared_and_a_time_says_nothing() -> None:
    unknown = {"global_batch": "", "tflops_per_gpu": "150", "measured_step_time_s": "3"}
    (assumed,) = runs_of({**UNTIMED, **unknown})
    (printed,) = runs_of({**UNTIMED, **unknown, "global_batch": "16", "measured_step_time_s": ""})
    assert assumed.measured_from == "TFLOP/s"
    assert assumed.flop.num_tokens == 16 * 4096  # four micro-batches for each of two stages
    assert assumed.ratio == pytest.approx(printed.ratio)
    assert runs_of({**UNTIMED, "global_batch": "", "measured_step_time_s": "3"}) == []


def test_derived_times_are_marked_by_source() -> None:
    rows = [
        row_of(id="a", **timed("A", 2)),
        row_of(id="b", **UNTIMED, source_id="A", mfu_pct="40"),
        row_of(id="c", **UNTIMED, source_id="A", tflops_per_gpu="100"),
        row_of(id="d", **UNTIMED, source_id="B", tokens_per_s_per_gpu="500"),
    ]
    a, b = (scores := score_runs(rows, predicted(rows))).sources
    assert a.derived == {"TFLOP/s": 1, "MFU": 1}
    assert b.derived == {}
    assert [total.num for total in scores.totals] == [4, 2, 4, 2, 2]


# ------------------------------------------------------------------------------- sweeps


def sweep_cells(**cells: str) -> list[dict[str, str]]:
    layouts = [{"tp": "1", "sequence_parallel": "false"}, {"tp": "2"}, {"tp": "4"}]
    times = (10.0, 12.0, 20.0)
    return [timed("A", t, **one, **cells) for t, one in zip(times, layouts, strict=True)]


def test_regret_is_that_of_a_hand_made_sweep() -> None:
    (one, every) = score_sweeps(runs_of(*sweep_cells(), times_s=[3, 2, 9]))
    assert (one.source, every.source) == ("A", "all")
    assert (one.num_sweeps, one.num_layouts) == (1, 3)
    assert one.mean_regret == one.p95_regret == pytest.approx(0.2)  # the second, 12 s for 10
    assert one.random_mean_regret == pytest.approx(0.4)  # 14 s for 10
    assert one.flop_only_mean_regret == pytest.approx(0.4)  # all tie
    assert one.rank_correlation == pytest.approx(0.5)


def test_regret_of_flop_alone_is_expected_over_those_with_the_fewest() -> None:
    cells = [*sweep_cells(), timed("A", 8.0, tp="2", recompute="full")]
    (one, _) = score_sweeps(runs_of(*cells, times_s=[3, 2, 9, 1]))
    assert one.mean_regret == 0
    assert one.flop_only_mean_regret == pytest.approx(14 / 8 - 1)
    assert one.random_mean_regret == pytest.approx(12.5 / 8 - 1)


def test_repeats_of_a_layout_are_averaged_first() -> None:
    """A cell that is not printed, and takes as its default what others print, is a repeat too."""
    again = timed("A", 14.0, tp="2", zero_or_fsdp="", framework="Megatron-LM v2")
    (sweep,) = sweeps_of(runs_of(*sweep_cells(), again, times_s=[3, 2, 9, 3]))
    assert sweep.measured_s == (10, 13, 20)
    assert sweep.predicted_s == (3, 2.5, 9)
    assert sweep.regret(sweep.predicted_s) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": "32"},
        {"global_batch": "", "tokens_per_s_per_gpu": "100"},
        {"n_gpus": "16"},
        {"seq_len": "2048"},
        {"precision": "fp16"},
        {"gpu": "A100-40GB-SXM"},
        {"layers": "40"},
        {"source_id": "B"},
        {"notes": "capacity factor 1"},
    ],
)
def test_another_job_is_of_another_sweep(change: dict[str, str]) -> None:
    first, second, third = sweep_cells()
    assert sweeps_of(runs_of(first, second, {**third, **change})) == []
    assert len(sweeps_of(runs_of(*({**one, **change} for one in (first, second, third))))) == (
        "global_batch" not in change or change["global_batch"] != ""
    )


def test_a_sweep_has_three_layouts_and_times_that_differ_by_a_tenth() -> None:
    first, second, third = sweep_cells()
    assert sweeps_of(runs_of(first, second, {**second, "framework": "Megatron-LM v2"})) == []
    near = [timed("A", t, tp=tp) for t, tp in ((10, "1"), (10.5, "2"), (10.99, "4"))]
    assert sweeps_of(runs_of(*near)) == []
    assert len(sweeps_of(runs_of(near[0], near[1], third))) == 1


def test_ranks_correlate_as_scipy_says_and_ties_alone_are_nought() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        said, found = (tuple(rng.integers(1, 6, 8).astype(float)) for _ in range(2))
        sweep = Sweep("A", said, found, (1.0,) * 8)
        assert sweep.rank_correlation() == pytest.approx(spearmanr(said, found).statistic)
    assert Sweep("A", (1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (1.0,) * 3).rank_correlation() == 0


def test_scores_of_sweeps_are_means_and_percentiles_over_them() -> None:
    cells = [*sweep_cells(), *sweep_cells(seq_len="2048")]
    (one, _) = score_sweeps(runs_of(*cells, times_s=[3, 2, 9, 1, 2, 9]))
    assert one.num_sweeps == 2
    assert one.mean_regret == pytest.approx(0.1)
    assert one.p95_regret == pytest.approx(0.19)  # 0 and 0.2, between them
    assert one.rank_correlation == pytest.approx(0.75)
