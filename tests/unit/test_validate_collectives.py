"""Predictions of measured collectives: of the cost model, in order, or a reason why not."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.collectives import collective_terms
from planner.layout.groups import lay_group
from planner.plan import Method
from planner.topology.compile import compile_fabric
from planner.validate.collectives import is_forced, predict, predictions_csv
from planner.validate.machines import machine_document, machine_of
from tests.unit.measured_rows import question


def test_a_forced_ring_costs_what_the_cost_model_says() -> None:
    asked = question(algorithm="ring (env shown)", size_bytes="67108864")
    (said,) = predict([asked])
    fabric = compile_fabric(machine_document(machine_of(asked)))
    group = lay_group(fabric, np.array([16]), np.array([1]))
    size = np.array([67108864.0])
    terms = collective_terms("all_reduce", Method("ring"), fabric, group, size)
    assert said.time_s == terms.total_s()[0]
    assert said.method == Method("ring")


def test_what_the_library_chooses_is_no_slower_than_what_it_is_made_to_do() -> None:
    names = ("auto", "nvls(claimed)", "nccl baseline", "ring", "tree")
    found = predict([question(algorithm=name) for name in names])
    auto, claimed, baseline, ring, tree = (said.time_s or math.nan for said in found)
    assert auto == claimed == baseline <= min(ring, tree)


def test_each_prediction_is_that_of_its_question_alone_whatever_stands_beside_it() -> None:
    asked = [
        question(op=op, size_bytes=str(size), n_nodes=str(nodes), n_ranks=str(ranks))
        for size in (4096, 1 << 28)
        for op in ("all_gather", "broadcast", "all_to_all", "send_recv")
        for nodes, ranks in ((1, 2), (1, 8), (2, 2), (2, 16))
    ]
    together = predict(asked)
    assert together == [predict([one])[0] for one in asked]


def test_the_name_of_a_row_moves_nothing() -> None:
    asked = question()
    one, other = predict([asked, replace(asked, id="cw-h100-001")])
    assert one.time_s == other.time_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size_bytes": ""}, "size_bytes is not given"),
        ({"n_nodes": "1", "n_ranks": "1"}, "one rank makes no call"),
        ({"op": "all_to_all", "algorithm": "deepep v2 dispatch"}, "that of tokens"),
        ({"algorithm": "optcast-plugin"}, "no method is known for 'optcast-plugin'"),
        ({"algorithm": "p2p"}, "'p2p' is not priced for all_reduce"),
        ({"gpu": "A40", "nic_gbps": ""}, "no standard is known for A40"),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_the_reason_and_the_rest_is_not(
    change: dict[str, str], reason: str
) -> None:
    skipped, said = predict([question(**change), question()])
    assert skipped.time_s is None
    assert reason in skipped.skipped_reason
    assert said.time_s is not None
    assert said.skipped_reason == ""


@pytest.mark.parametrize(
    ("algorithm", "forced"),
    [
        *((name, False) for name in ("", "-", "auto", "auto(SHARP job)", "nvls(claimed)", "hccl")),
        *((name, False) for name in ("rccl default", "nccl baseline")),
        *((name, True) for name in ("ring", "tree (forced, NCCL_NVLS_ENABLE=0)", "nvlstree")),
        *((name, True) for name in ("ring (default, NCCL_NVLS_ENABLE=0)", "vllm custom/graph")),
    ],
)
def test_forced_is_what_the_library_did_not_choose(algorithm: str, forced: bool) -> None:
    assert is_forced(question(algorithm=algorithm)) is forced


def test_the_table_has_a_line_for_each_question() -> None:
    said = predict([question(id='a "b", c'), question(id="d", size_bytes="")])
    lines = list(csv.DictReader(io.StringIO(predictions_csv(said))))
    assert list(lines[0]) == ["id", "predicted_time_s", "assumptions", "skipped_reason"]
    assert [line["id"] for line in lines] == ['a "b", c', "d"]
    assert float(lines[0]["predicted_time_s"]) == pytest.approx(said[0].time_s, rel=1e-8)
    assert "InfiniBand" in lines[0]["assumptions"]
    assert (lines[1]["predicted_time_s"], lines[1]["skipped_reason"] != "") == ("", True)
