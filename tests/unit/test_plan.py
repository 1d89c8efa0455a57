"""The contract: ranks and groups in Megatron order, and what a plan refuses."""

from itertools import combinations, product
from typing import Any

import pytest
from pydantic import ValidationError

from planner.plan import (
    AXES,
    Axis,
    CollectiveChoice,
    Layout,
    Method,
    Packing,
    Plan,
    TrainingSpec,
    canonical_json,
    coordinates,
    document_hash,
    groups,
)
from tests.dist.plans import choice_of, make_plan

LAYOUTS = [
    Layout(tp=t, cp=c, dp_shard=d, dp_replicate=r, pp=p, ep=e, etp=x)
    for t, c, d, r, p in product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2), (1, 2, 3))
    for e, x in product((1, 2, 4), {1, t})
    if (t * c * d * r) % (e * x) == 0
]
DENSE: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")


def test_groups_of_sixteen_ranks_are_megatrons() -> None:
    layout = Layout(tp=2, cp=2, dp_shard=2, pp=2, ep=4)
    assert groups(layout, "tp")[:2] == [(0, 1), (2, 3)]
    assert groups(layout, "cp")[:2] == [(0, 2), (1, 3)]
    assert groups(layout, "dp")[:5] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)]
    assert groups(layout, "pp")[:2] == [(0, 8), (1, 9)]
    assert groups(layout, "dp_cp")[0] == (0, 2, 4, 6)
    assert groups(layout, "ep")[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(layout, "edp")[:2] == [(0, 4), (1, 5)]


def test_groups_of_eight_ranks_are_megatrons() -> None:
    layout = Layout(tp=2, dp_shard=2, pp=2)
    assert groups(layout, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(layout, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(layout, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_partition_the_world(axis: Axis) -> None:
    for layout in LAYOUTS:
        ranks = [rank for group in groups(layout, axis) for rank in group]
        assert sorted(ranks) == list(range(layout.world_size)), layout
        assert {len(group) for group in groups(layout, axis)} == {layout.degree(axis)}


@pytest.mark.parametrize("generator", [DENSE, EXPERT])
def test_groups_of_two_axes_meet_in_one_rank_at_most(generator: tuple[Axis, ...]) -> None:
    for layout in LAYOUTS:
        for one, other in combinations(generator, 2):
            for group in groups(layout, one):
                for with_group in groups(layout, other):
                    assert len(set(group) & set(with_group)) <= 1, (layout, one, other)


def test_coordinates_are_positions_in_the_groups() -> None:
    for layout in LAYOUTS:
        for axis in AXES:
            for group in groups(layout, axis):
                for position, rank in enumerate(group):
                    assert coordinates(layout, rank)[axis] == position


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 8 is not in 0\.\.7"):
        coordinates(Layout(tp=8), 8)


def test_experts_must_fit_the_ranks_of_a_stage() -> None:
    with pytest.raises(ValidationError, match=r"ep\(3\) must divide the 8 ranks"):
        Layout(tp=2, dp_shard=4, ep=3)


def test_a_hash_depends_on_values_and_not_on_order() -> None:
    assert document_hash({"a": 1, "b": 2}) == document_hash({"b": 2, "a": 1})
    assert document_hash({"a": 1}) != document_hash({"a": 2})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


RING, TREE = Method("ring"), Method("tree", "executor")


@pytest.mark.parametrize("ends", [(4096, 1024, None), (None, 4096), (4096,), (4096, 4096, None)])
def test_thresholds_ascend_and_the_last_alone_is_open(ends: tuple[int | None, ...]) -> None:
    choice = choice_of(
        Layout(dp_shard=4), "dp_cp", "all_reduce", [(end, RING if end else TREE) for end in ends]
    )
    with pytest.raises(ValidationError, match="thresholds of all_reduce on dp_cp end at"):
        CollectiveChoice.model_validate(choice.model_dump())


def test_an_operation_on_an_axis_is_chosen_once() -> None:
    plan = make_plan(dp=4, methods={("dp_cp", "all_reduce"): ((4096, TREE), (None, RING))})
    assert plan.method("dp_cp", "all_reduce", 4096) == TREE
    assert plan.method("dp_cp", "all_reduce", 4097) == RING
    twice = plan.model_dump() | {"collectives": [plan.collectives[0].model_dump()] * 2}
    with pytest.raises(ValidationError, match="all_reduce on dp_cp twice"):
        Plan.model_validate(twice)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offload_layers": 4}, "offload_layers=4 counts layers whose activations"),
        ({"offload_layers": 4, "offload": ["optimizer"]}, "offload_layers=4"),
        ({"offload": ["optimizer", "weights", "optimizer"]}, "offload names optimizer twice"),
    ],
)
def test_an_offload_that_contradicts_itself_is_refused(fields: dict[str, Any], said: str) -> None:
    whole = {"global_batch_size": 8, "seq_len": 128, **fields}
    with pytest.raises(ValidationError, match=said):
        TrainingSpec.model_validate(whole)


def test_layers_are_offloaded_with_activations() -> None:
    fields = {"offload": ["activations", "optimizer"], "offload_layers": 4}
    found = TrainingSpec.model_validate({"global_batch_size": 8, "seq_len": 128, **fields})
    assert found.offload_layers == 4


@pytest.mark.parametrize(
    ("lengths", "counts", "field"),
    [(["1"], [1], "lengths"), ([1], [True], "counts"), ([1.0], [1], "lengths")],
)
def test_packing_takes_whole_numbers_and_nothing_like_them(
    lengths: list[Any], counts: list[Any], field: str
) -> None:
    with pytest.raises(ValidationError, match=field):
        Packing.model_validate({"lengths": lengths, "counts": counts})
    again = Packing.model_validate_json('{"lengths": [4, 2], "counts": [1, 3]}')
    assert again == Packing(lengths=(4, 2), counts=(1, 3))
