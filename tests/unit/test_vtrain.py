"""vTrain's tables become rows of training runs, machine and software filled in."""

import pytest

from planner.errors import InvalidInputError
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES
from planner.validate.configurations import configuration
from planner.validate.memory import predict_memory
from planner.validate.published import read_runs, run_of, run_outcome
from planner.validate.rows import Row
from planner.validate.runs import predict_runs
from planner.validate.vtrain import training_row
from tests.unit.published_rows import TABLE

SINGLE = TABLE.with_name("vtrain_single_node.csv")
MULTI = TABLE.with_name("vtrain_multi_node.csv")
HEADER = (
    "id,n_gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,iteration_time_ms\n"
)


def lines_of(text: str) -> tuple[Row, ...]:
    return read_runs(HEADER + text, source="vtrain.csv")


def test_a_row_says_what_the_table_leaves_to_its_source() -> None:
    (row,) = lines_of("a,512,1536,2,8192,64,48,2048,4,32,4,13875.5\n")
    assert row.cells == {
        "id": "a",
        "n_gpus": "512",
        "global_batch": "1536",
        "micro_batch": "2",
        "hidden": "8192",
        "ffn_hidden": "32768",
        "heads": "64",
        "kv_heads": "64",
        "vocab": "51200",
        "layers": "48",
        "seq_len": "2048",
        "tp": "4",
        "pp": "4",
        "gpu": "A100-80GB-SXM",
        "gpus_per_node": "8",
        "nics_per_node": "4",
        "nic_gbps": "200",
        "precision": "fp16",
        "zero_or_fsdp": "0",
        "sequence_parallel": "false",
        "recompute": "full",
        "framework": "Megatron-DeepSpeed (2021)",
        "schedule": "1f1b",
        "notes": "no overlap of gradient all-reduce with backward",
        "source_id": "vtrain_multi",
        "measured_step_time_s": "13.8755",
    }
    assert row.line == 2


def test_the_configuration_is_the_one_that_the_table_is_of() -> None:
    found = configuration(run_of(lines_of("a,512,1536,2,8192,64,48,2048,4,32,4,1\n")[0]))
    one = found.candidate
    expected = {"tp": 4, "pp": 4, "dp_replicate": 32, "zero_stage": 0, "sequence_parallel": 0}
    assert {name: getattr(one, name)[0] for name in expected} == expected
    assert RECOMPUTE_MODES[int(one.recompute[0])] == "full"
    assert SCHEDULES[int(one.schedule[0])] == "1f1b"
    assert found.problem.fabric.num_gpus == 512
    assert not any("not printed" in said for said in found.assumptions)


@pytest.mark.parametrize(
    ("num_gpus", "dp", "source"),
    [(2, 1, "vtrain_single"), (8, 4, "vtrain_single"), (16, 8, "vtrain_multi")],
)
def test_a_source_is_one_node_or_several(num_gpus: int, dp: int, source: str) -> None:
    (row,) = lines_of(f"a,{num_gpus},16,1,2048,16,24,1024,1,{dp},2,410.490577\n")
    outcome = run_outcome(row)
    assert outcome.source == source
    assert outcome.step_time_s == pytest.approx(0.410490577)
    assert configuration(run_of(row)).problem.fabric.num_gpus == num_gpus


def test_both_published_tables_are_read_whole() -> None:
    for path, count in ((SINGLE, 900), (MULTI, 68)):
        rows = read_runs(path.read_bytes(), source=path.name)
        assert len(rows) == count
        assert all(run_outcome(row).step_time_s for row in rows)
        assert {run_outcome(row).source for row in rows} == {path.stem.removesuffix("_node")}


def test_rows_predict_as_the_same_rows_in_columns_of_training_runs() -> None:
    rows = [
        *read_runs(SINGLE.read_bytes(), source="s")[:3],
        *read_runs(MULTI.read_bytes(), source="m")[:3],
    ]
    columns = list(rows[0].cells)
    text = "\n".join(",".join(cells) for cells in (columns, *(row.cells.values() for row in rows)))
    written = read_runs(text, source="training.csv")
    found = predict_runs(map(run_of, rows))
    assert found == predict_runs(map(run_of, written))
    assert all(p.step_time_s and p.memory_gib for p in found)
    # the command for memory reads them too
    assert [p.memory_gib for p in predict_memory(map(run_of, rows))] == [
        p.memory_gib for p in found
    ]


def test_the_time_is_an_outcome() -> None:
    """No time, another time, the size that the other table prints: the same run."""
    timed, other, untimed = (
        run_of(lines_of(f"a,8,8,2,2048,16,20,1024,4,1,2,{time}\n")[0]) for time in ("160", "9", "")
    )
    assert timed == other == untimed
    header = HEADER.replace(",iteration_time_ms", ",params_b")
    (row,) = read_runs(header + "a,8,8,2,2048,16,20,1024,4,1,2,39.1\n", source="vtrain.csv")
    assert run_outcome(row).step_time_s is None
    assert run_of(row) == timed


@pytest.mark.parametrize("time", ["-5", "nan", "soon", "1e30", "0"])
def test_a_time_that_cannot_be_is_named_by_its_column(time: str) -> None:
    with pytest.raises(InvalidInputError, match="iteration_time_ms") as caught:
        lines_of(f"a,8,8,2,2048,16,20,1024,4,1,2,{time}\n")
    assert caught.value.where == "line 2, iteration_time_ms"


def test_a_cell_that_is_no_number_is_left_to_the_reader_of_runs() -> None:
    assert (
        training_row(Row("t", 2, {"hidden": "wide", "n_gpus": "1e300"})).cells["hidden"] == "wide"
    )
    with pytest.raises(InvalidInputError, match="hidden='wide'"):
        lines_of("a,8,8,2,wide,16,20,1024,4,1,2,5\n")
