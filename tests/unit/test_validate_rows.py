"""Tables of measured collectives are read strictly, and questions know no outcome."""

import pytest

from planner.errors import InvalidInputError
from planner.validate.collectives import predict
from planner.validate.rows import OUTCOME_COLUMNS, outcome_of, read_rows, without_outcomes
from tests.unit.measured_rows import ROW, question, rows, table


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"size_bytes": "-4"}, "size_bytes"),
        ({"size_bytes": "0"}, "size_bytes"),
        ({"size_bytes": "1000.5"}, "size_bytes"),
        ({"size_bytes": "nan"}, "size_bytes"),
        ({"size_bytes": "1_000"}, "size_bytes"),
        ({"size_bytes": "\u0661\u0660\u0662\u0664"}, "size_bytes"),
        ({"n_nodes": "\uff12"}, "n_nodes"),
        ({"n_ranks": "15"}, "n_ranks"),
        ({"n_ranks": "32"}, "n_ranks"),
        ({"n_ranks": ""}, "n_ranks"),
        ({"n_nodes": "two"}, "n_nodes"),
        ({"gpus_per_node": "9999"}, "gpus_per_node"),
        ({"op": "allreduce"}, "op"),
        ({"op": ""}, "op"),
        ({"id": ""}, "id"),
        ({"id": "a-1"}, "id"),
        ({"time_us": "-3"}, "time_us"),
        ({"time_us": "inf"}, "time_us"),
        ({"nic_gbps": "0"}, "nic_gbps"),
        ({"intra_GBps_per_gpu": "1e400"}, "intra_GBps_per_gpu"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_by_line_and_column(
    change: dict[str, str], column: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"^t.csv, line 3: {column}=") as caught:
        rows({}, change)
    assert caught.value.where == f"line 3, {column}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column 'id', 'gpu', 'n_nodes', 'n_ranks', 'op', 'size_bytes'; needed: id"),
        (table({}, drop=("op",)), "no column 'op'; needed"),
        (table({}, drop=("op", "gpu")), "no column 'gpu', 'op'; needed"),
        (table(), "no rows"),
        (table({}) + "one,two\n", "line 3: has 2 cells where the header has 22"),
        (table({}).replace("verified", "gpu"), "column 'gpu' occurs twice"),
        (table({}) + '"open', "no CSV"),
        (table({}).encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_text_that_is_no_such_table_is_refused(text: str | bytes, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        read_rows(text, source="t.csv")


def test_order_of_columns_and_what_is_optional_do_not_matter() -> None:
    columns = ["size_bytes", "op", "n_ranks", "n_nodes", "gpu", "id", "more"]
    line = ",".join({**ROW, "more": "?"}[column] for column in columns)
    (row,) = read_rows(f"{','.join(columns)}\n\n{line}\n", source="t.csv")
    found = without_outcomes(row)
    assert (row.line, found.num_ranks, found.gpus_per_node) == (3, 16, 8)
    assert found.nics_per_node is None
    assert outcome_of(row).time_s is None


def test_predictions_do_not_see_outcomes() -> None:
    """Whatever a removed column says, and without it, question and prediction are the same."""
    (plain,) = rows({})
    asked = without_outcomes(plain)
    (said,) = predict([asked])
    assert said.time_s is not None
    for column in OUTCOME_COLUMNS:
        (other,) = rows({column: "7777"})
        assert without_outcomes(other) == asked
        assert predict([without_outcomes(other)]) == [said]
    (bare,) = read_rows(table({}, drop=OUTCOME_COLUMNS), source="t.csv")
    assert predict([without_outcomes(bare)]) == [said]


def test_an_outcome_is_the_time_or_else_size_over_bandwidth() -> None:
    timed, rated, neither, excluded = map(
        outcome_of,
        rows(
            {},
            {"time_us": "", "algbw_GBps": "2.0"},
            {"time_us": "", "algbw_GBps": ""},
            {"notes": "cold start, EXCLUDE"},
        ),
    )
    assert timed.time_s == pytest.approx(120.5e-6)
    assert rated.time_s == pytest.approx(1048576 / 2e9)
    assert neither.time_s is None
    assert (timed.excluded, excluded.excluded) == (False, True)


@pytest.mark.parametrize(
    ("version", "library", "plugin"),
    [
        ("NCCL 2.29.2", "nccl", None),
        ("PyTorch NCCL via Vidur profiler", "nccl", None),
        ("NCCL + aws-ofi-nccl", "nccl", "aws-ofi-nccl"),
        ("NCCL + TCPX plugin", "nccl", "tcpx"),
        ("NCCL gIB", "nccl", "gib"),
        ("RCCL (unstated)", "rccl", None),
        ("oneCCL 2021.17.2", "oneccl", None),
        ("HCCL", "hccl", None),
        ("UCCL-EP normal", None, None),
        ("", None, None),
    ],
)
def test_the_library_and_its_plugin_are_told_from_the_version(
    version: str, library: str | None, plugin: str | None
) -> None:
    asked = question(library_version=version)
    assert (asked.library, asked.plugin) == (library, plugin)
