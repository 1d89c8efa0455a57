"""Scores join predictions with outcomes: medians over machines, regret of forced methods."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from planner.cli import app
from planner.errors import InvalidInputError
from planner.plan import Method
from planner.tables import show_scores
from planner.validate.collectives import Prediction
from planner.validate.rows import Row
from planner.validate.scores import Scores, score
from tests.unit.measured_rows import rows, table

SMALL, LARGE = {"size_bytes": "4096"}, {"size_bytes": str(1 << 20)}


def said(time_us: float | None, method: str = "ring", reason: str = "") -> Prediction:
    time_s = None if time_us is None else time_us * 1e-6
    return Prediction("x", time_s, Method(method), (), reason)  # type: ignore[arg-type]  # a test's


def scores(measured: tuple[Row, ...], *predicted: Prediction) -> Scores:
    return score(measured, predicted)


def test_errors_are_relative_to_what_was_measured_and_medians_are_over_machines() -> None:
    """Machine A is off by 10, 50 and 90 %, machine B by 20 %: A 50 %, B 20 %, both 35 %."""
    a, b = {"machine": "A", "time_us": "100", **LARGE}, {"machine": "B", "time_us": "10", **LARGE}
    found = scores(rows(a, a, a, b), said(90), said(150), said(190), said(12))
    first, second = found.machines
    assert (first.machine, first.num_rows, first.nodes) == ("A", 3, "two nodes")
    assert first.median_error == pytest.approx(0.5)
    assert first.mean_error == pytest.approx(0.5)
    assert first.median_ratio == pytest.approx(1.5)
    assert second.median_error == pytest.approx(0.2)
    (group,) = found.classes
    assert (group.num_machines, group.num_rows, group.bar) == (2, 4, 0.15)
    assert group.median_error == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("nodes", "size", "kind"),
    [
        (1, (1 << 20) - 1, ("single node", "< 1 MiB", 0.15)),
        (1, 1 << 20, ("single node", ">= 1 MiB", 0.08)),
        (2, 8, ("two nodes", "< 1 MiB", 0.30)),
        (3, 1 << 30, ("three and more", ">= 1 MiB", None)),
        (64, 8, ("three and more", "< 1 MiB", None)),
    ],
)
def test_a_class_is_nodes_and_size(
    nodes: int, size: int, kind: tuple[str, str, float | None]
) -> None:
    row = {"n_nodes": str(nodes), "n_ranks": str(8 * nodes), "size_bytes": str(size)}
    (group,) = scores(rows(row), said(1)).classes
    assert (group.nodes, group.size, group.bar) == kind


def test_what_is_excluded_unmeasured_or_skipped_is_counted_and_left_out() -> None:
    found = scores(
        rows({}, {"notes": "EXCLUDE: cold"}, {"time_us": "", "algbw_GBps": ""}, {}),
        *(said(1), said(2), said(3), said(None, reason="no price")),
    )
    assert (found.num_rows, found.num_predicted, found.num_scored) == (4, 3, 1)
    assert (found.num_excluded, found.num_unmeasured) == (1, 1)
    assert found.skipped == {"no price": 1}


def test_regret_is_what_the_pick_takes_longer_than_the_faster() -> None:
    """At one size the model takes the ring, 30 us behind the tree; at the other it is right."""
    ring, tree = {"algorithm": "ring"}, {"algorithm": "tree (forced)"}
    measured = rows(
        {**ring, **LARGE, "time_us": "130"},
        {**tree, **LARGE, "time_us": "100"},
        {**ring, **SMALL, "time_us": "40"},
        {**tree, **SMALL, "time_us": "20"},
        {**LARGE, "time_us": "90"},  # the library chose: no side of a pair
        {**tree, **LARGE, "time_us": "99", "machine": "another"},
        {**tree, **LARGE, "time_us": "99", "op": "all_gather"},
    )
    found = scores(
        measured,
        *(said(80), said(90, "tree"), said(30), said(25, "tree")),
        *(said(1), said(90, "tree"), said(90, "tree")),
    ).ranking
    assert (found.num_pairs, found.num_right) == (2, 1)
    assert found.lost_s == pytest.approx(30e-6)
    assert found.best_s == pytest.approx(120e-6)
    assert found.median_loss == pytest.approx(0.3)
    assert found.worst_loss == pytest.approx(0.3)


def test_losses_are_shares_of_the_faster_where_the_pick_is_slower() -> None:
    """At three sizes the ring is picked, 20, 50 and 100 % behind; at a fourth it is right."""
    times = [(120, 100), (1500, 1000), (20, 10), (10, 20)]
    found = scores(
        rows(
            *(
                {"algorithm": how, "size_bytes": str(1024 << at), "time_us": str(us)}
                for at, pair in enumerate(times)
                for how, us in zip(("ring", "tree"), pair, strict=True)
            )
        ),
        *([said(1), said(2, "tree")] * len(times)),
    )
    assert (found.ranking.num_pairs, found.ranking.num_right) == (4, 1)
    assert found.ranking.median_loss == pytest.approx(0.5)
    assert found.ranking.worst_loss == pytest.approx(1.0)
    text = shown(found)
    assert "in 1; the others take 50.0 % longer than the faster (median; 100.0 % at worst)" in text
    assert ", 530 us" in text


@pytest.mark.parametrize(("error", "is_kept"), [(0.14, True), (0.16, False)])
def test_bars_are_for_three_machines_and_more(error: float, is_kept: bool) -> None:
    found = [
        scores(
            rows(*({"machine": f"m{n}", "time_us": "100", **LARGE} for n in range(machines))),
            *[said(100 * (1 + error))] * machines,
        )
        for machines in (2, 3)
    ]
    assert [group.is_kept for one in found for group in one.classes] == [None, is_kept]
    assert "too few machines to judge" in shown(found[0])
    assert ("kept" if is_kept else "missed") in shown(found[1])


def test_where_nothing_was_skipped_nothing_is_said_of_it() -> None:
    assert "no prediction" not in shown(scores(rows({}), said(100)))


def shown(found: Scores) -> str:
    out = io.StringIO()
    show_scores(Console(file=out, width=140), found)
    return out.getvalue()


def test_the_table_says_what_the_scores_say() -> None:
    found = scores(
        rows({"machine": "[bold]A[/bold]", "time_us": "100"}, {}), said(150), said(None, reason="r")
    )
    text = shown(found)
    for word in ("[bold]A[/bold]", "50.0 %", "15.0 %", "1.50", "no prediction for 1 row\n"):
        assert word in text


# ------------------------------------------------------------------------------ command line


def test_the_command_scores_a_file_and_writes_a_line_for_each_row(tmp_path: Path) -> None:
    file, out = tmp_path / "t.csv", tmp_path / "out.csv"
    file.write_text(table({}, {"size_bytes": ""}, {"algorithm": "ring"}))
    done = CliRunner().invoke(
        app, ["validate", "collectives", str(file), "--json", "--predictions", str(out)]
    )
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [p["id"] for p in document["predictions"]] == ["a-1", "a-2", "a-3"]
    assert document["num_scored"] == 2
    lines = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [line["id"] for line in lines] == ["a-1", "a-2", "a-3"]
    times = [p["time_s"] for p in document["predictions"]]
    assert [float(line["predicted_time_s"] or "nan") for line in lines] == pytest.approx(
        [times[0], float("nan"), times[2]], nan_ok=True
    )


def test_the_command_refuses_a_malformed_row_by_line(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(table({}, {"n_ranks": "17"}))
    done = CliRunner().invoke(app, ["validate", "collectives", str(file)])
    assert isinstance(done.exception, InvalidInputError)
    assert "line 3: n_ranks='17'" in str(done.exception)
