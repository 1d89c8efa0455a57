"""How op seconds become a step: who is slowest, and where each second is booked."""

from dataclasses import fields, replace
from typing import Any

import pytest

from planner.constants import COLLECTIVE_LAUNCH_S
from planner.cost.problem import Problem
from planner.cost.seconds import Known
from planner.cost.step import Priced, mean_compute_s, price, timed_ops
from planner.cost.step_constants import PLAIN
from planner.cost.work import Communication, Launches, block_work
from planner.hardware.devices import device
from planner.layout.candidates import Candidates, concatenate
from planner.model.blocks import layer_kinds
from planner.model.bundled import load_model
from planner.model.spec import ModelSpec, Window
from planner.pipeline.partition import split_table, splits_of
from planner.request import PlanRequest
from planner.resolving import build_problem, resolve
from tests.unit.problems import fabric, problem, row

HIDDEN_BYTES = 8192 * 4096 * 2  # of one micro-batch of Llama-3-8B or Mixtral
VOCABULARY = 4096 * 128256


def rail_send_s(num_bytes: float) -> float:
    """Return a send between two nodes of the test fabric: 15 us, 94 % of 50 GB/s."""
    return COLLECTIVE_LAUNCH_S["nccl"].value + 15e-6 + num_bytes / (50e9 * 0.94)


def part(base: Problem, candidate: Candidates, name: str) -> float:
    return float(getattr(price(base, candidate), name)[0])


# -------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize(
    ("pp", "chunks", "schedule", "sends"),
    [(2, 1, "1f1b", 2), (4, 1, "1f1b", 6), (4, 1, "gpipe", 6), (2, 2, "interleaved_1f1b", 6)],
)
def test_filling_and_draining_waits_for_every_boundary_both_ways(
    pp: int, chunks: int, schedule: str, sends: int
) -> None:
    base = problem("llama3-8b", pipelines=((pp, chunks),), constants=PLAIN)
    one = row(
        tp=8,
        pp=pp,
        virtual_stages=chunks,
        schedule=schedule,
        num_micro_batches=8,
        sequence_parallel=True,
    )
    expected = sends * rail_send_s(HIDDEN_BYTES / 8)
    assert part(base, one, "pp_exposed_s") == pytest.approx(expected)


def tied(model: str) -> ModelSpec:
    return load_model(model).model_copy(update={"tied_embeddings": True})


def test_the_tied_exchange_is_booked_to_the_pipeline() -> None:
    """fp32 gradients of an eighth of the vocabulary matrix, between two nodes."""
    one = row(tp=8, pp=2, schedule="1f1b", num_micro_batches=8, sequence_parallel=True)
    with_exchange, without = (
        part(problem(model, pipelines=((2, 1),), constants=PLAIN), one, "pp_exposed_s")
        for model in (tied("llama3-8b"), load_model("llama3-8b"))
    )
    expected = rail_send_s(VOCABULARY / 8 * 4)
    assert with_exchange - without == pytest.approx(expected)


def test_one_stage_exchanges_nothing() -> None:
    found = price(problem(tied("llama3-8b")), row(tp=8, num_micro_batches=8))
    assert found.pp_exposed_s[0] == 0
    assert found.bubble_s[0] == 0


def test_the_slowest_pipeline_rank_decides() -> None:
    """Two stages of 16 layers: the last also has a head worth two, the first a lookup."""
    base = problem("llama3-8b", pipelines=((2, 1),))
    one = row(pp=2, schedule="1f1b", num_micro_batches=8)
    blocks = {e.block for e in timed_ops(base, one) if e.block and e.repeats[0] > 0}
    assert blocks == {"dense", "head"}
    layers = [e for e in timed_ops(base, one) if e.timed.op.name == "attention_core"]
    assert [int(e.repeats[0]) for e in layers if e.timed.op.phase == "forward"] == [16 * 8]


def test_a_window_as_wide_as_the_sequence_costs_what_none_does() -> None:
    """Half the layers are another kind then, and every figure the same."""
    spec = load_model("llama3-8b")
    one = row(pp=2, tp=2, schedule="1f1b", num_micro_batches=8, sequence_parallel=True)
    found = []
    for size in (None, 8192, 1024):
        window = None if size is None else Window(size=size, layers=tuple(range(0, 32, 2)))
        model = spec.model_copy(update={"window": window})
        found.append(price(problem(model, pipelines=((2, 1),)), one))
    for field in fields(Priced):
        plain, wide, narrow = (float(getattr(priced, field.name)[0]) for priced in found)
        assert wide == pytest.approx(plain, rel=1e-12), field.name
        follows = field.name in ("compute_s", "bubble_s", "straggler_s")
        assert narrow == pytest.approx(plain, rel=1e-9) or follows
    assert found[2].compute_s[0] < found[0].compute_s[0]


def test_multi_token_prediction_is_in_the_step_of_the_last_stage() -> None:
    spec = load_model("llama3-8b").model_copy(update={"num_mtp_modules": 1})
    base = problem(spec, pipelines=((2, 1),))
    one = row(pp=2, schedule="1f1b", num_micro_batches=8)
    ops = [e for e in timed_ops(base, one) if e.block == "mtp"]
    assert {"mtp_projection", "attention_core", "head", "embedding"} <= {
        e.timed.op.name for e in ops
    }
    assert {int(e.pp_rank[0]) for e in ops} == {1}
    plain = price(problem("llama3-8b", pipelines=((2, 1),)), one)
    more = price(base, one).compute_s[0] - plain.compute_s[0]
    compute = [e for e in ops if not isinstance(e.timed.op, Communication)]
    assert more == pytest.approx(sum(float(e.exposed_s[0]) for e in compute), rel=0.01)


def test_compute_is_shared_out_over_pipeline_ranks() -> None:
    base = problem("llama3-8b", pipelines=((1, 1), (4, 1)))
    whole, split = (
        float(mean_compute_s(base, row(pp=pp, split=at, schedule=schedule, num_micro_batches=8))[0])
        for pp, at, schedule in ((1, 0, "none"), (4, 1, "1f1b"))
    )
    assert split == pytest.approx(whole / 4)


def test_an_expensive_head_takes_layers_from_its_stage() -> None:
    """10 units over 4 stages: 3 at most, so the last has its head of 2 and one layer."""
    costs = {"embedding": 0.0, "dense": 1.0, "moe": 1.0, "head": 2.0}
    layers = split_table(["dense"] * 8, [(4, 1)], costs).layers  # type: ignore[arg-type]
    assert [split[-1] for split in layers] == [2, 1]
    costs = {"embedding": 2.0, "dense": 1.0, "moe": 1.0, "head": 0.0}
    layers = split_table(["dense"] * 8, [(4, 1)], costs).layers  # type: ignore[arg-type]
    assert [split[0] for split in layers] == [2, 1]


def test_llamas_head_is_worth_two_layers() -> None:
    """Per token 2 h V = 1.05 Gflop against 0.44 + 0.07 of a layer: 9 + 9 + 8 + (6 + 2)."""
    asked = PlanRequest.model_validate(
        {
            "topology": "dgx-h100",
            "nodes": 4,
            "model": "llama3-8b",
            "training": {"global_batch_size": 64, "seq_len": 8192},
        }
    )
    splits = build_problem(resolve(asked)).splits
    assert [splits.layers[at][-1] for at in splits.rows(4, 1)] == [8, 6]


# ---------------------------------------------------------------------------------- booking


def booked(found: Priced) -> set[str]:
    return {f.name for f in fields(Priced) if getattr(found, f.name)[0] > 0}


@pytest.mark.parametrize(
    ("model", "degrees", "parts"),
    [
        ("llama3-8b", {}, set()),
        ("llama3-8b", {"tp": 8, "sequence_parallel": True}, {"tp_exposed_s"}),
        ("llama3-8b", {"dp_replicate": 8}, {"dp_exposed_s"}),
        ("llama3-8b", {"cp": 8}, {"cp_exposed_s", "dp_exposed_s"}),
        ("mixtral-8x7b", {"ep": 8, "dp_shard": 8}, {"ep_exposed_s", "dp_exposed_s"}),
        (
            "mixtral-8x7b",
            {"tp": 8, "etp": 8, "sequence_parallel": True},
            {"tp_exposed_s", "ep_exposed_s"},
        ),
    ],
)
def test_exposed_seconds_are_booked_to_their_axis(
    model: str, degrees: dict[str, Any], parts: set[str]
) -> None:
    found = price(problem(model, constants=PLAIN), row(num_micro_batches=2, **degrees))
    assert booked(found) == {"compute_s", "optimizer_s", *parts}


# --------------------------------------------------------------------------------- launches


LAUNCH_S = 10e-6
ISSUED = replace(PLAIN, launch_s=LAUNCH_S)


def launched(seq_len: int, **training: Any) -> Problem:
    """Return a problem of one sequence in which a launch takes ``LAUNCH_S``."""
    return problem(
        "example-gpt", seq_len=seq_len, global_batch_size=1, constants=ISSUED, **training
    )


def launch_s(seq_len: int, **training: Any) -> float:
    """Return what a step of one GPU waits for launches."""
    return part(launched(seq_len, **training), row(), "launch_s")


def test_layers_with_little_to_compute_wait_for_the_host() -> None:
    """As if nothing but launches took time: 8 layers, embedding and head."""
    assert launch_s(64) > 0.5 * LAUNCH_S * 8 * (10 + 16)
    assert launch_s(64) > launch_s(512) > launch_s(4096) == 0


def test_captured_graphs_take_the_launches_away() -> None:
    assert launch_s(64, launch="cuda_graph") == 0


def test_calls_hide_launches_as_kernels_do() -> None:
    """Eight ranks send more and compute less: the host has as much time as both take."""
    base = launched(512)
    one, eight = row(tp=4, sequence_parallel=True), replace(row(), tp=row(tp=4).tp)
    assert part(base, one, "launch_s") < part(base, eight, "launch_s")
    assert part(base, one, "tp_exposed_s") > 0 == part(base, eight, "cp_exposed_s")


def test_the_slowest_stage_is_the_one_with_most_to_issue_where_launches_decide() -> None:
    """Seven layers keep the device busy for less than one and a wide head, the host for more."""
    model = load_model("example-gpt").model_copy(update={"vocab_size": 700_000})
    base = problem(model, seq_len=64, global_batch_size=1, constants=ISSUED)
    base = replace(base, splits=splits_of(layer_kinds(model), [(2, 1)], [(7, 1)]))
    found = price(base, row(pp=2, schedule="1f1b"))
    waited = float(found.launch_s[0] + found.compute_s[0])
    assert waited >= LAUNCH_S * 7 * (10 + 16)


def test_launches_of_partly_recomputed_layers_add_up() -> None:
    base = launched(64)
    one = row(recompute="full", recompute_layers=3)
    issued = [op for op in timed_ops(base, one) if isinstance(op.timed.op, Launches)]
    total = sum(float(op.exposed_s[0]) for op in issued)
    assert total == pytest.approx(part(base, one, "launch_s"), rel=1e-9)
    again = sum(float(op.exposed_s[0]) for op in issued if op.timed.op.phase == "recompute")
    forward = sum(float(op.exposed_s[0]) for op in issued if op.timed.op.phase == "forward")
    assert 0 < again < forward


def test_a_dense_layer_issues_ten_kernels_forward_and_sixteen_backward() -> None:
    """What does not occur is not issued; each of them takes ``launch_s``."""
    counts = {
        op.phase: float(op.num_kernels[0])
        for op in block_work(problem("llama3-8b"), row(), "dense")
        if isinstance(op, Launches)
    }
    assert counts == {"forward": 10, "backward": 16, "recompute": 0}


def test_cores_run_what_they_issue() -> None:
    on = fabric(1, gpus_per_node=1, cores_per_node=1, library="gloo", device="cpu-core")
    base = problem("example-gpt", seq_len=64, global_batch_size=1, precision="fp32", on=on)
    base = replace(base, device=device("cpu-core"))
    issued = [op for op in timed_ops(base, row()) if isinstance(op.timed.op, Launches)]
    assert issued
    assert all(float(op.timed.total_s[0]) == 0 for op in issued)


def test_recomputed_layers_are_issued_again() -> None:
    base = launched(64)
    plain, again = (part(base, row(recompute=mode), "launch_s") for mode in ("none", "full"))
    assert plain < again < 1.6 * plain


# ----------------------------------------------------------------------------- host, scales


def test_the_optimizer_runs_at_memory_speed() -> None:
    """30 bytes per parameter (AdamW, bf16 with fp32 master), an eighth with ZeRO-1 over 8."""
    base = problem("llama3-8b", constants=PLAIN)
    figures = base.device.figures
    rate = figures.memory_fraction * base.device.memory_bytes_per_s
    one = row(dp_shard=8, zero_stage=1)
    expected = figures.fixed_s + 30 * 8_030_261_248 / 8 / rate  # the model card's 8.03 B
    assert part(base, one, "optimizer_s") == pytest.approx(expected)


def test_a_calibration_scales_its_own_part() -> None:
    base = problem("llama3-8b")
    before = price(base, row())
    slow_compute = price(replace(base, compute_scale=3.0), row())
    slow_update = price(replace(base, optimizer_scale=3.0), row())
    assert slow_compute.compute_s[0] == pytest.approx(3 * before.compute_s[0])
    assert slow_compute.optimizer_s[0] == before.optimizer_s[0]
    assert slow_update.optimizer_s[0] == pytest.approx(3 * before.optimizer_s[0])
    assert slow_update.compute_s[0] == before.compute_s[0]


def test_host_overhead_is_once_per_step() -> None:
    base = replace(problem("llama3-8b"), host_overhead_s=0.25)
    found = price(base, row(num_micro_batches=4))
    assert found.host_s[0] == pytest.approx(0.25 + base.step_constants.host_s)


def test_ranks_that_share_cores_compute_slower() -> None:
    """8 ranks on 4 cores take twice as long; the collectives do not."""
    crowded = problem("llama3-8b", on=fabric(8, cores_per_node=4), framework="executor")
    alone = problem("llama3-8b", on=fabric(8), framework="executor", constants=PLAIN)
    one = row(tp=8, num_micro_batches=2)
    before, after = price(alone, one), price(crowded, one)
    assert after.compute_s[0] == pytest.approx(2 * before.compute_s[0])
    assert after.optimizer_s[0] == pytest.approx(2 * before.optimizer_s[0])
    assert after.tp_exposed_s[0] == before.tp_exposed_s[0]


@pytest.mark.parametrize("main_grads", ["fp32", "same", "both"])
def test_a_row_s_price_is_its_own_whatever_stands_beside_it(main_grads: str) -> None:
    """Over stages, groups and sizes; what is known of one batch serves another."""
    base = problem(
        "example-gpt", pipelines=((1, 1), (2, 1), (4, 1)), on=fabric(16), main_grads=main_grads
    )
    base = replace(base, model=base.model.model_copy(update={"tied_embeddings": True}))
    rows = [
        row(pp=pp, split=split, tp=tp, sequence_parallel=tp > 1, dp_shard=16 // (pp * tp),
            schedule="1f1b" if pp > 1 else "none", zero_stage=1, num_micro_batches=8)
        for split, pp in enumerate((1, 2, 4))
        for tp in (1, 2, 4)
    ]  # fmt: skip
    known = Known(base.fabric)
    together = price(base, concatenate(rows), known).step_time_s()
    alone = [float(price(base, one, known).step_time_s()[0]) for one in rows]
    fresh = [float(price(base, one).step_time_s()[0]) for one in rows]
    assert together == pytest.approx(alone, rel=1e-12)
    assert alone == fresh
