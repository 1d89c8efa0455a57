"""Fits of protocol lines: what they find, and that a machine left out has no part in its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.hardware.protocols import Protocols, protocols_by_key
from planner.validate import fit
from planner.validate.collectives import Prediction, batches_of, predict
from planner.validate.fit import START, fit_protocols, leave_one_out, measured_calls
from planner.validate.rows import Row, outcome_of, read_rows, without_outcomes

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "collectives.csv"
TABLE_ROWS = read_rows(TABLE.read_bytes(), source="table")
LEFT_OUT = "Azure ND H100 v5"
MACHINES = (LEFT_OUT, "AWS p5.48xlarge", "GCP A3 Ultra")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Return some rows of three machines with Hopper: enough to fit, few enough to be quick."""
    found = [row for row in TABLE_ROWS if outcome_of(row).machine in MACHINES]
    return [row for row in found if outcome_of(row).time_s][::6]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_MAX_STEPS", 6)


def slower(rows: Sequence[Row], machine: str, factor: float) -> list[Row]:
    """Return the rows with the times of one machine multiplied, and no other figure of outcomes."""
    return [
        replace(
            row,
            cells={
                **row.cells,
                "time_us": str(float(row.cells["time_us"]) * factor),
                "algbw_GBps": "",
                "busbw_GBps": "",
            },
        )
        if outcome_of(row).machine == machine
        else row
        for row in rows
    ]


def times(predictions: Sequence[Prediction], rows: Sequence[Row], machine: str) -> list[float]:
    return [
        prediction.time_s or 0.0
        for prediction, row in zip(predictions, rows, strict=True)
        if outcome_of(row).machine == machine
    ]


def test_a_machine_left_out_has_no_part_in_its_prediction(rows: list[Row]) -> None:
    begin = {"hopper/nvlink": START}
    before = leave_one_out(rows, begin)
    # a start that does not come from the rows: what is fitted to them is all that may change
    after = leave_one_out(slower(rows, LEFT_OUT, 3.0), begin)
    assert times(after, rows, LEFT_OUT) == pytest.approx(times(before, rows, LEFT_OUT), rel=1e-12)
    others = "AWS p5.48xlarge"
    assert times(after, rows, others) != pytest.approx(times(before, rows, others), rel=1e-3)


def test_a_fit_is_nearer_to_its_rows_than_where_it_began(rows: list[Row]) -> None:
    measured = measured_calls(rows)
    fitted = fit_protocols(measured)

    def error(lines: Protocols) -> float:
        logs = [one.logs(lines) for one in measured if one.num_nodes == 1]
        return float(np.median(np.abs(np.concatenate(logs))))

    assert error(fitted["hopper/nvlink"]) < error(START)


def test_graphs_and_noise_are_no_calls_to_fit() -> None:
    counted = {one.machine for one in measured_calls(TABLE_ROWS)}
    assert "8x H100 node" not in counted  # a replayed graph, all of it
    noisy = [one for one in measured_calls(TABLE_ROWS) if one.machine == "H100 DGX class"]
    assert noisy
    assert min(one.batch.size_bytes.min() for one in noisy) >= 2**20


def test_lines_of_the_product_are_those_of_a_fit() -> None:
    """Within a tenth at the median: the file was written by a fit on the table that is here."""
    measured = measured_calls(TABLE_ROWS)
    for key, lines in protocols_by_key().items():
        logs = [one.logs(lines) for one in measured if one.num_nodes == 1 and one.key == key]
        assert np.median(np.abs(np.concatenate(logs))) < 0.15, key


def test_curves_of_known_boards_predict_only_where_they_are_asked_for() -> None:
    """Else the table would hold the very machines that they were measured on."""
    own = [row for row in TABLE_ROWS if outcome_of(row).machine == "H100 HGX"]
    questions = [without_outcomes(row) for row in own if row.cells["algorithm"] == "auto"]
    measured_s = [outcome_of(row).time_s for row in own if row.cells["algorithm"] == "auto"]
    batches, _ = batches_of(questions)
    assert all(batch.fabric.curves == () for batch in batches)
    plain, curved = (
        [prediction.time_s for prediction in predict(questions, with_curves=asked)]
        for asked in (False, True)
    )
    assert curved == pytest.approx(measured_s, rel=0.02)
    assert plain != pytest.approx(measured_s, rel=0.02)
