"""Step times of published runs: nothing leaks, no row stops the command, bad tables are refused."""

import csv
import io
import json
from pathlib import Path

import pytest

from planner.validate.published import OUTCOME_COLUMNS, read_runs, run_of
from planner.validate.runs import RUN_COLUMNS, RunPrediction, predict_runs, runs_csv
from tests.unit.conftest import Run
from tests.unit.published_rows import CELLS, TABLE, row_of, table_of

# What each outcome column may hold, other than what a row does hold.
OTHER_OUTCOMES = {
    **dict.fromkeys(OUTCOME_COLUMNS, "another text"),
    "step_time_s": "77",
    "tokens_per_s_per_gpu": "1234.5",
    "tflops_per_gpu": "99",
    "flops_convention": "hardware",
    "mfu_pct": "12.3",
    "memory_gb_per_gpu": "7",
    "measured_step_time_s": "1e3",
    "iteration_time_ms": "4",
    "n_params_B": "3",
}


def predicted(**cells: str) -> RunPrediction:
    (found,) = predict_runs([run_of(row_of(**cells))])
    return found


def published_lines(every: int) -> tuple[list[str], list[dict[str, str]]]:
    with TABLE.open(newline="") as file:
        reader = csv.DictReader(file)
        lines = list(reader)[::every]
    return list(reader.fieldnames or ()), lines


def written(columns: list[str], lines: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def test_outcomes_change_nothing_of_what_is_predicted(run: Run, tmp_path: Path) -> None:
    """Byte for byte: as published, with every outcome another, and with none."""
    columns, lines = published_lines(every=101)
    kept = [column for column in columns if column not in OUTCOME_COLUMNS]
    tables = {
        "published": written(columns, lines),
        "others": written(columns, [{**line, **OTHER_OUTCOMES} for line in lines]),
        "without": written(kept, lines),
    }
    found = {}
    for name, text in tables.items():
        table, out = tmp_path / f"{name}.csv", tmp_path / f"{name}.out"
        table.write_text(text)
        status, _, message = run("validate", "runs", str(table), "--predictions", str(out))
        assert (status, message) == (0, "")
        found[name] = out.read_bytes()
    assert tables["published"] != tables["others"]
    assert found["published"] == found["others"] == found["without"]
    said = list(csv.DictReader(io.StringIO(found["published"].decode())))
    assert [line["id"] for line in said] == [line["id"] for line in lines]
    assert sum(line["predicted_step_time_s"] != "" for line in said) > len(lines) / 2


def test_the_table_of_predictions_has_a_line_for_every_row_and_a_reason_for_every_gap() -> None:
    zero_bubble = {"schedule": "zb-2p", "layers": "30", "notes": "first stage holds one layer less"}
    rows = [
        row_of(id="a", vocab=""),
        row_of(id="b", layers=""),
        row_of(id="c", tp="3"),
        row_of(id="d", **zero_bubble),
    ]
    text = runs_csv(predict_runs(map(run_of, rows)))
    assert text.splitlines()[0] == (
        "id,predicted_step_time_s,predicted_memory_gb,assumptions,skipped_reason"
    )
    whole, bare, contradictory, unpriced = csv.DictReader(io.StringIO(text))
    assert tuple(whole) == RUN_COLUMNS
    assert float(whole["predicted_step_time_s"]) > 0
    assert float(whole["predicted_memory_gb"]) > 10
    assert "vocab is not printed: 51,200" in whole["assumptions"]
    assert whole["skipped_reason"] == ""
    assert bare == {**dict.fromkeys(RUN_COLUMNS, ""), "id": "b"} | {
        "skipped_reason": "layers not given"
    }
    assert "does not divide n_gpus=8" in contradictory["skipped_reason"]
    assert contradictory["predicted_memory_gb"] == ""
    assert unpriced["predicted_step_time_s"] == ""
    assert float(unpriced["predicted_memory_gb"]) > 10
    assert unpriced["skipped_reason"].startswith("no step time: schedule 'zb_2p'")


def test_parts_add_up_to_the_step() -> None:
    found = predicted()
    assert found.parts_s is not None
    assert sum(found.parts_s.values()) == pytest.approx(found.step_time_s)


def test_flop_are_those_of_the_formulas_of_the_papers() -> None:
    """6 N + 12 l h s a token with all of attention, 6 N + 6 l h s causal (2104.04473, 2205.05198);
    recomputed in full 8 N, and 16 l h s, of layers; of stored scores selectively 4 l h s."""
    layers, hidden, tokens = 32, 4096, 16 * 4096
    block, head = layers * (4 * hidden**2 + 3 * hidden * 11008), hidden * 32000
    core = layers * hidden * 4096
    plain = predicted().flop
    assert plain is not None
    assert plain.num_tokens == tokens
    for causal, share in ((True, 1), (False, 2)):
        for recomputed in (False, True):  # nothing is
            counted = plain.counted(causal=causal, recomputed=recomputed)
            assert counted == pytest.approx(tokens * 6 * (block + head + share * core))
    full = predicted(recompute="full").flop
    assert full is not None
    assert full.counted(causal=False, recomputed=False) == plain.counted(
        causal=False, recomputed=False
    )
    assert full.counted(causal=False, recomputed=True) == pytest.approx(
        tokens * (8 * block + 6 * head + 16 * core)
    )
    stored = predicted(ffn_hidden="16384", recompute="selective").flop
    assert stored is not None
    assert stored.recomputed_attention_flop == pytest.approx(tokens * 2 * core)
    assert stored.recomputed_flop == stored.recomputed_attention_flop
    fused = predicted(recompute="selective").flop
    assert fused is not None
    assert fused.recomputed_flop == 0


def test_half_of_the_layers_recomputed_is_half_of_their_flop() -> None:
    torch = {"framework": "torchtitan (FSDP2)", "pp": "1", "tp": "1"}
    some, full = (predicted(**torch, recompute=mode).flop for mode in ("selective", "full"))
    assert some is not None
    assert full is not None
    assert some.recomputed_flop == pytest.approx(full.recomputed_flop / 2)
    assert some.recomputed_attention_flop == pytest.approx(full.recomputed_attention_flop / 2)


def test_the_command_prints_scores_and_everything_as_json(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    lines = [
        {"id": "a"},
        {"id": "b", "tp": "4", "measured_step_time_s": "9"},
        {"id": "c", "tp": "1", "measured_step_time_s": "12", "source_id": "[red]OTHER"},
        {"id": "d", "layers": ""},
    ]
    table.write_text(table_of(*lines))
    status, text, _ = run("validate", "runs", str(table))
    assert status == 0
    for said in ("SOURCE", "[red]OTHER", "all rows", "median over sources", "the worst rows"):
        assert said in text
    assert "layers not given" in text
    assert "4 rows: 3 with a predicted step time, 3 of them with a measured one" in text
    status, text, _ = run("validate", "runs", str(table), "--json")
    document = json.loads(text)
    assert [p["id"] for p in document["predictions"]] == ["a", "b", "c", "d"]
    assert document["num_scored"] == 3
    assert document["memory"]["num_rows"] == 3
    assert document["skipped"] == {"layers not given": 1}
    assert document["predictions"][0]["layout"]["tp"] == 2


def test_a_table_without_outcomes_is_predicted_and_not_scored(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(table_of({"measured_step_time_s": "", "memory_gb_per_gpu": ""}))
    status, text, _ = run("validate", "runs", str(table))
    assert status == 0
    assert "1 row: 1 with a predicted step time, 0 of them with a measured one" in text
    status, text, _ = run("validate", "runs", str(table), "--json")
    assert json.loads(text)["totals"] == []


@pytest.mark.parametrize(
    ("cells", "column"),
    [
        ({"layers": "nan"}, "layers"),
        ({"global_batch": "-8"}, "global_batch"),
        ({"nic_gbps": "fast"}, "nic_gbps"),
        ({"measured_step_time_s": "-1"}, "measured_step_time_s"),
        ({"measured_step_time_s": "NaN"}, "measured_step_time_s"),
        ({"measured_step_time_s": "a while"}, "measured_step_time_s"),
        ({"tokens_per_s_per_gpu": "0"}, "tokens_per_s_per_gpu"),
        ({"tflops_per_gpu": "inf"}, "tflops_per_gpu"),
        ({"mfu_pct": "140"}, "mfu_pct"),
        ({"flops_convention": "generous"}, "flops_convention"),
        ({"memory_gb_per_gpu": "lots"}, "memory_gb_per_gpu"),
        ({"id": "first"}, "id"),
    ],
)
def test_a_cell_that_cannot_be_is_named(
    run: Run, tmp_path: Path, cells: dict[str, str], column: str
) -> None:
    table = tmp_path / "runs.csv"
    columns = list(dict.fromkeys((*CELLS, "nic_gbps", *OTHER_OUTCOMES)))
    table.write_text(written(columns, [{**CELLS, "id": "first"}, {**CELLS, **cells}]))
    status, text, message = run("validate", "runs", str(table))
    assert (status, text) == (2, "")
    assert f"line 3: {column}=" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (table_of().encode(), "no rows"),
        (b"id,layers\na,1\n", "has no column 'hidden'"),
        (b'{"rows": [1, 2]}\n[3]\n', "has no column 'id'"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not UTF-8"),
        (b'id,layers\n"open,1\n', "is no CSV"),
        (table_of({}).replace("vocab", "layers").encode(), "occurs twice"),
    ],
)
def test_a_text_that_is_no_such_table_is_refused(
    run: Run, tmp_path: Path, text: bytes, said: str
) -> None:
    table = tmp_path / "runs.csv"
    table.write_bytes(text)
    status, _, message = run("validate", "runs", str(table))
    assert status == 2
    assert said in message
    if "has no column" in said:  # both headers are named
        assert "zero_or_fsdp, recompute, framework, as benchmarks/data/training_runs.csv" in message
        assert "tp, dp, pp, as benchmarks/data/vtrain_multi_node.csv" in message


def test_absurd_rows_are_passed_over_and_their_neighbours_predicted() -> None:
    absurd: list[dict[str, str]] = [
        {"layers": "4097"},
        {"n_gpus": "1000000000000"},
        {"hidden": "16777216", "layers": "4096"},
        {"seq_len": "1", "micro_batch": "1"},
        {"n_gpus": "1048576", "gpus_per_node": "1", "nics_per_node": "0"},
        {"heads": "1", "hidden": "1", "kv_heads": "1", "ffn_hidden": "1", "vocab": "1"},
        {"global_batch": "1", "n_gpus": "4096"},
        {"gpu": ""},
        {"precision": "fp64"},
        {"cp": "8", "n_gpus": "64", "seq_len": "7"},
        {"moe_experts": "7", "moe_topk": "3", "ep": "8", "n_gpus": "64"},
        {"vpp": "4096"},
        {"pp": "32", "n_gpus": "64", "schedule": "gpipe"},
        {"nic_gbps": "0.001", "n_gpus": "1024"},
    ]
    lines = [{**CELLS, "id": str(n), **cells} for n, cells in enumerate([{}, *absurd])]
    columns = [*CELLS, "nics_per_node", "nic_gbps"]
    rows = read_runs(written(columns, lines), source="table.csv")
    before, *found = predict_runs(map(run_of, rows))
    assert before.step_time_s is not None
    for cells, one in zip(absurd, found, strict=True):
        assert (one.step_time_s is None) == bool(one.skipped_reason), cells
