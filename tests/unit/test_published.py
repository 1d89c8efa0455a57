"""The reader of published training runs: no outcome gets through, and defaults are said."""

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest

from planner.errors import InvalidInputError
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES
from planner.model.blocks import parameter_count
from planner.validate.configurations import configuration
from planner.validate.published import (
    FACTS,
    OUTCOME_COLUMNS,
    Run,
    read_runs,
    run_of,
    run_outcome,
    without_outcomes,
)
from tests.unit.published_rows import TABLE, row_of, table_of


def made(**cells: str) -> Any:
    return configuration(run_of(row_of(**cells)))


def test_no_outcome_reaches_a_prediction() -> None:
    """Whatever stands in the outcome columns, and in the notes beside facts, changes nothing."""
    plain = run_of(row_of())
    for column in OUTCOME_COLUMNS:
        assert run_of(row_of(**{column: "12345"})) == plain
    told = run_of(row_of(notes="HFU printed 57.0%; 61.2 GB at peak; 1234 tokens/s"))
    assert told == plain
    assert not {field.name for field in fields(Run)} & {*OUTCOME_COLUMNS, "notes"}


def test_outcome_columns_are_gone_before_a_cell_is_read() -> None:
    whole = row_of(**dict.fromkeys(OUTCOME_COLUMNS, "12345"))
    known = without_outcomes(whole)
    assert not {*known.cells} & {*OUTCOME_COLUMNS}
    assert {*whole.cells} - {*known.cells} == {*OUTCOME_COLUMNS}
    assert run_of(known) == run_of(whole)
    for column in ("memory_gb_per_gpu", "measured_step_time_s", "tokens_per_s_per_gpu", "mfu_pct"):
        assert column in OUTCOME_COLUMNS


def test_outcomes_are_read_apart() -> None:
    outcome = run_outcome(row_of())
    assert (outcome.source, outcome.memory_gib, outcome.step_time_s) == ("SOURCE", 40.5, 1.5)
    empty = run_outcome(row_of(memory_gb_per_gpu="", measured_step_time_s=""))
    assert (empty.memory_gib, empty.step_time_s) == (None, None)


@pytest.mark.parametrize(
    ("notes", "facts"),
    [
        ("first and last stages have one layer fewer", "ends_hold_one_layer_less"),
        ("partition type:transformer|embedding", "ends_count_as_layers"),
        ("AdamW on CPU (optimizer offload)", "optimizer_on_cpu"),
        ("BF16 optimizer with fp32 grad accumulation", "fp32_accumulation"),
        ("flash attention", "fused_attention"),
        ("flash attention 2", "fused_attention flash_attention_2"),
        ("FA3 kernels", "fused_attention newest_attention"),
        ("cuDNN attention", "newest_attention"),
        ("run with CUDA_LAUNCH_BLOCKING=1", "blocking_launches"),
        ("no overlap of gradient all-reduce with compute", "gradients_not_overlapped"),
        ("ETP=1 (folded)", "experts_whole"),
        ("memory = max_memory_reserved GiB worst rank", "of_reserved"),
        ("memory GB as printed (peak)", "of_allocated"),
    ],
)
def test_notes_are_read_for_facts_alone(notes: str, facts: str) -> None:
    assert run_of(row_of(notes=notes)).facts == set(facts.split())
    assert run_of(row_of(notes="no offload, nothing special")).facts == frozenset()


@pytest.mark.parametrize(
    ("cells", "column"),
    [
        ({"layers": "many"}, "layers"),
        ({"layers": "0"}, "layers"),
        ({"tp": "2.5"}, "tp"),
        ({"seq_len": "-1"}, "seq_len"),
        ({"memory_gb_per_gpu": "nan"}, "memory_gb_per_gpu"),
        ({"id": ""}, "id"),
    ],
)
def test_a_cell_that_cannot_be_is_named_with_its_line(cells: dict[str, str], column: str) -> None:
    with pytest.raises(InvalidInputError, match=column) as caught:
        read_runs(table_of({"id": "first"}, cells), source="table.csv")
    assert caught.value.where == f"line 3, {column}"


def test_the_page_says_which_sources_state_a_fact() -> None:
    page = (TABLE.parents[2] / "docs" / "memory.md").read_text()
    stated: dict[str, Counter[str]] = {name: Counter() for name in (*FACTS, "offloaded layers")}
    for row in read_runs(TABLE.read_bytes(), source="training_runs.csv"):
        run, source = run_of(row), run_outcome(row).source
        for fact in (*run.facts, *(["offloaded layers"] if run.offloaded_layers else [])):
            stated[fact][source] += 1
    for fact, sources in stated.items():
        by = ", ".join(f"{source} {rows}" for source, rows in sources.most_common())
        where = f"{next(iter(sources))} alone" if len(sources) == 1 else by
        name = f"`{fact}`" if fact in FACTS else fact
        assert f"| {name} | {sources.total()} | {where} |" in page


def test_rows_have_ids_of_their_own_and_the_columns_that_are_needed() -> None:
    with pytest.raises(InvalidInputError, match="line 2"):
        read_runs(table_of({}, {}), source="table.csv")
    with pytest.raises(InvalidInputError, match="no column 'framework'"):
        read_runs(table_of({}).replace("framework", "program"), source="table.csv")


def test_a_full_row_becomes_what_it_says() -> None:
    found = made()
    one, problem = found.candidate, found.problem
    assert problem.model.num_layers == 32
    assert parameter_count(problem.model) == pytest.approx(6.74e9, rel=0.01)  # Llama-2-7B
    expected = {"tp": 2, "pp": 2, "cp": 1, "dp_shard": 2, "dp_replicate": 1, "zero_stage": 1}
    for name, value in {**expected, "micro_batch_size": 1, "num_micro_batches": 8}.items():
        assert getattr(one, name)[0] == value, name
    assert SCHEDULES[int(one.schedule[0])] == "1f1b"
    assert RECOMPUTE_MODES[int(one.recompute[0])] == "none"
    assert problem.fabric.num_gpus == 8
    assert problem.device.name == "a100-sxm-80gb"
    assert not any("not printed" in said for said in found.assumptions)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"vocab": ""}, "vocab is not printed"),
        ({"heads": "", "kv_heads": ""}, "heads are not printed: 32"),
        ({"precision": ""}, "precision is not printed: bf16"),
        ({"zero_or_fsdp": ""}, "zero_or_fsdp is not printed: 1"),
        ({"sequence_parallel": ""}, "sequence_parallel is not printed: off"),
        ({"micro_batch": ""}, "micro_batch is not printed: "),
        ({"global_batch": ""}, "global_batch is not printed: 16"),
        ({"recompute": ""}, "recompute is not printed: none, the least that fits"),
        ({"recompute": "", "seq_len": "32768"}, "recompute is not printed: "),
    ],
)
def test_an_empty_cell_is_resolved_by_a_default_that_is_said(
    cells: dict[str, str], said: str
) -> None:
    assert any(one.startswith(said) for one in made(**cells).assumptions)


@pytest.mark.parametrize(
    ("framework", "training"),
    [
        ("Megatron-LM", {"main_grads": "fp32", "fused_kernels": True}),
        ("Megatron-DeepSpeed (2022)", {"main_grads": "same", "buffer_bytes": 2 * 10**9}),
        ("DeepSpeed 0.19 + HF + Liger", {"fused_loss": "linear", "gathers": "matrix"}),
        ("InternEvo", {"main_grads": "same", "foreach_optimizer": True}),
        ("PyTorch FSDP", {"master_weights": "only"}),
    ],
)
def test_a_framework_trains_by_its_habits(framework: str, training: dict[str, Any]) -> None:
    found = made(framework=framework).problem.training
    assert {name: getattr(found, name) for name in training} == training


def test_scores_are_stored_by_a_gpt_before_hopper_alone() -> None:
    gpt = {"ffn_hidden": "16384"}
    assert not made(**gpt).problem.training.fused_attention
    assert made(**gpt, notes="flash attention 2").problem.training.fused_attention
    assert made(**gpt, gpu="H100-80GB-SXM").problem.training.fused_attention
    assert made().problem.training.fused_attention


@pytest.mark.parametrize(
    ("gpu", "name", "gib"),
    [
        ("A100-80GB-SXM", "a100-sxm-80gb", 79.0),
        ("A100-40GB-SXM", "A100 SXM 40GB", 39.5),
        ("V100-32GB (DGX-2)", "V100 SXM3 32GB", 31.6),
        ("V100-16GB", "V100 SXM 16GB", 15.8),
        ("A100-80GB-PCIe", "A100 PCIe 80GB", 79.0),
        ("H200-141GB-SXM", "h200-sxm-141gb", 139.2),
        ("MI300X", "mi300x", 189.5),
        ("L40S", "l40s", 44.7),
        ("L40S-48GB", "l40s", 44.7),
        ("MI250X-128GB", "mi250x", 63.2),
        ("H20-96GB-SXM", "h20-96gb", 94.8),
        ("RTX-4090-24GB", "RTX 4090", 22.4),
    ],
)
def test_a_gpu_is_known_by_the_names_that_sources_use(gpu: str, name: str, gib: float) -> None:
    found = made(gpu=gpu, precision="fp16" if "V100" in gpu else "bf16").problem
    assert found.device.name == name
    assert found.capacity_bytes / 2**30 == pytest.approx(gib, abs=0.1)
    assert found.fabric.num_gpus == 8


def test_selective_in_torch_is_every_second_layer_or_more() -> None:
    """torchtitan's default; within Megatron it is what is cheap to redo."""
    torch = {"framework": "torchtitan (FSDP2)", "recompute": "selective", "pp": "1", "tp": "1"}
    found = made(**torch)
    assert RECOMPUTE_MODES[int(found.candidate.recompute[0])] == "full"
    assert found.candidate.recompute_layers[0] == 16
    assert any("every second layer" in said for said in found.assumptions)
    longer = made(**torch, seq_len="16384")
    assert longer.candidate.recompute_layers[0] > 16
    megatron = made(recompute="selective").candidate
    assert RECOMPUTE_MODES[int(megatron.recompute[0])] == "selective"


def test_zero_bubble_rows_have_their_memory_and_no_time() -> None:
    found = made(schedule="zb-2p", notes="first and last stages have one layer fewer", layers="30")
    assert SCHEDULES[int(found.candidate.schedule[0])] == "zb_2p"
    assert found.problem.splits.layers == ((15, 15),)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"layers": ""}, "layers not given"),
        ({"tp": "3"}, "does not divide n_gpus=8"),
        ({"gpu": "Abacus 9000"}, "no GPU model is called"),
        ({"zero_or_fsdp": "7"}, "zero_or_fsdp='7'"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"schedule": "roundabout"}, "schedule 'roundabout'"),
        ({"vpp": "20"}, "do not fill"),
    ],
)
def test_what_cannot_be_configured_says_why(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        made(**cells)


def test_the_published_table_is_read_whole() -> None:
    rows = read_runs(TABLE.read_bytes(), source=str(TABLE))
    assert len(rows) == 1007
    assert sum(run_outcome(row).step_time_s is not None for row in rows) == 854


def test_a_precision_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no fp8 peak; it has bf16"):
        made(gpu="A100-80GB-SXM", precision="fp8")


def test_an_unprinted_micro_batch_divides_the_batch_and_fits() -> None:
    """Larger ones are faster; four sequences a rank divide by 4, six by 2."""
    of_four, of_six = (made(micro_batch="", global_batch=batch) for batch in ("8", "12"))
    assert of_four.candidate.dp[0] == of_six.candidate.dp[0] == 2
    assert of_four.candidate.micro_batch_size[0] in (1, 2, 4)
    assert of_six.candidate.micro_batch_size[0] in (1, 2)
    long = made(micro_batch="", global_batch="64", seq_len="65536", recompute="none")
    assert long.candidate.micro_batch_size[0] == 1
    sharded = made(micro_batch="", global_batch="64", zero_or_fsdp="3")
    assert sharded.candidate.micro_batch_size[0] == 1
