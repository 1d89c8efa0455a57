"""Bytes per rank against published tables."""

from typing import Any

import numpy as np
import pytest

from planner.cost.memory import activation_bytes, memory
from planner.cost.problem import Problem
from planner.model.blocks import parameter_count
from tests.unit.problems import problem, row

# Korthikanti et al. 2205.05198, table 2, evaluated for GPT-3 175B (h 12288, a 96), s 2048, b 1,
# t 8; MB per layer.
GPT3 = [
    ({"tp": 1}, {"fused_attention": False}, 2868.9),
    ({"tp": 8}, {"fused_attention": False}, 578.8),
    ({"tp": 8, "sequence_parallel": True}, {"fused_attention": False}, 358.6),
    ({"tp": 8, "sequence_parallel": True}, {}, 107.0),
    ({"tp": 8, "recompute": "full"}, {}, 50.3),
    ({"tp": 8, "recompute": "full", "sequence_parallel": True}, {}, 6.3),
]


@pytest.mark.parametrize(("degrees", "options", "expected_mb"), GPT3)
def test_activations_of_gpt3(degrees: dict[str, Any], options: Any, expected_mb: float) -> None:
    base = problem("gpt3-175b", seq_len=2048)
    found = activation_bytes(base, row(**degrees), "dense", dropout=True, **options)[0]
    if options == {} and "recompute" not in degrees:  # ours also keeps 4 bytes per head: lse
        found -= 4 * 96 * 2048 / 8
    assert found / 1e6 == pytest.approx(expected_mb, abs=0.06)


def llama_style_bytes_per_token(h: int, a: int, g: int, d: int, f: int) -> int:
    return 8 * h + 4 * a * d + 4 * g * d + 4 * a + 6 * f


def test_activations_of_a_gated_layer_with_grouped_queries() -> None:
    base = problem("llama3-8b", seq_len=4096)
    expected = 4096 * llama_style_bytes_per_token(4096, 32, 8, 128, 14336)
    assert activation_bytes(base, row(), "dense")[0] == expected
    sharded = activation_bytes(base, row(tp=4, cp=2, sequence_parallel=True), "dense")[0]
    assert sharded == expected / 8


def state_bytes(base: Problem, **degrees: Any) -> float:
    parts = memory(base, row(**degrees))
    return float((parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes).max())


# ZeRO (1910.02054): 16 bytes per parameter; at 64 ranks 3.8x, 7.2x, 64x smaller. The paper's
# gradients are 16-bit.
@pytest.mark.parametrize(("zero", "times"), [(1, 3.8), (2, 7.2), (3, 64.0)])
def test_zero_shrinks_states_as_published(zero: int, times: float) -> None:
    base = problem("llama3-8b", main_grads="same")
    whole = state_bytes(base, dp_replicate=64)
    assert whole == 16 * parameter_count(base.model)
    assert whole / state_bytes(base, dp_shard=64, zero_stage=zero) == pytest.approx(times, abs=0.1)


def test_megatron_keeps_18_bytes_and_shares_12_of_them() -> None:
    base, n = problem("llama3-8b"), 8
    assert state_bytes(base) == 18 * parameter_count(base.model)
    expected = (6 + 12 / n) * parameter_count(base.model)
    assert state_bytes(base, dp_shard=n, zero_stage=1) == pytest.approx(expected)


def test_full_precision_needs_no_master_copy() -> None:
    base = problem("llama3-8b", precision="fp32")
    assert state_bytes(base) == (4 + 4 + 8) * parameter_count(base.model)


def test_175b_at_tp8_pp8_fits_64_a100_as_it_ran() -> None:
    """Korthikanti et al., table 5: 175B trained with tp 8, pp 8, full recompute, on 80 GB."""
    base = problem("gpt3-175b", pipelines=((8, 3),), seq_len=2048, global_batch_size=64)
    one = row(
        tp=8,
        pp=8,
        virtual_stages=3,
        schedule="interleaved_1f1b",
        num_micro_batches=64,
        recompute="full",
        sequence_parallel=True,
    )
    total = memory(base, one).total_bytes().max()
    assert 45e9 < total < 80e9


def test_the_first_rank_holds_most_micro_batches() -> None:
    base = problem("llama3-8b", pipelines=((4, 1),))
    one = row(pp=4, schedule="1f1b", num_micro_batches=8)
    kept = memory(base, one).activations_bytes[0]
    first = base.splits.first_rank[0]
    used = base.splits.multiplicity[0] > 0
    order = np.argsort(first[used])
    assert (np.diff(kept[used][order]) < 0).all()


def test_gpipe_holds_all_micro_batches_and_1f1b_at_most_the_stages() -> None:
    base = problem("llama3-8b", pipelines=((4, 1),))
    held = {
        schedule: memory(
            base, row(pp=4, schedule=schedule, num_micro_batches=16)
        ).activations_bytes[0, 0]
        for schedule in ("gpipe", "1f1b")
    }
    assert held["gpipe"] == pytest.approx(4 * held["1f1b"])


@pytest.mark.parametrize("change", [{"tp": 2}, {"cp": 2}, {"recompute": "selective"}])
def test_memory_falls_with_every_degree_that_shares_activations(change: dict[str, Any]) -> None:
    base = problem("llama3-8b")
    whole = memory(base, row()).activations_bytes.max()
    assert memory(base, row(**change)).activations_bytes.max() < whole


def test_recompute_never_needs_more_than_keeping_everything() -> None:
    base = problem("deepseek-v3", seq_len=4096)
    kept = [
        memory(base, row(recompute=mode, ep=8, dp_shard=8)).activations_bytes.max()
        for mode in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
