"""One layout for ``commplan memory``: what contradicts itself is refused by name."""

from typing import Any

import pytest

from planner.errors import InvalidInputError
from planner.layout.candidates import SCHEDULES, Candidates
from planner.reviewing import layout_problem
from tests.unit.conftest import Run


def reviewed(model: str = "llama3-8b", nodes: int | None = None, **layout: Any) -> Candidates:
    return layout_problem(
        model=model,
        layout=layout,
        topology=None if nodes is None else "dgx-h100",
        nodes=nodes,
        device="H100" if nodes is None else None,
        training={"seq_len": 4096},
        framework="megatron",
    )[1]


@pytest.mark.parametrize(
    ("layout", "named", "to_try"),
    [
        ({"dp": 8, "dp_shard": 3}, "dp(8) must be dp_shard(3) * dp_replicate", "leave one out"),
        (
            {"dp": 8, "dp_shard": 4, "dp_replicate": 4},
            "dp(8) must be dp_shard(4) * dp_replicate(4) = 16",
            "dp=16",
        ),
        ({"dp": 8, "dp_replicate": 3}, "dp(8) must be dp_shard * dp_replicate(3)", "leave one"),
        ({"zero_stage": 0, "dp_shard": 8}, "zero_stage=0", "dp_replicate=8"),
        ({"zero_stage": 0, "dp": 8, "dp_replicate": 2}, "zero_stage=0", "zero_stage=1"),
        ({"zero_stage": 3, "dp": 8, "dp_replicate": 8}, "zero_stage=3", "dp_shard=8"),
        ({"recompute": "none", "recompute_layers": 2}, "recompute=none", "recompute=full"),
        ({"recompute": "selective", "recompute_layers": 2}, "recompute=selective", "=full"),
        ({"recompute_layers": 33}, "recompute_layers=33", "at most 32"),
        ({"pp": 4, "recompute_layers": 9}, "recompute_layers=9", "at most 8"),
        ({"pp": 4, "schedule": "none"}, "schedule=none", "schedule=1f1b"),
        ({"schedule": "1f1b"}, "schedule=1f1b", "pp of at least 2"),
        ({"schedule": "zb_v"}, "schedule=zb_v", "pp of at least 2"),
        (
            {"pp": 4, "schedule": "interleaved_1f1b"},
            "schedule=interleaved_1f1b",
            "virtual_stages=2",
        ),
        (
            {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 1},
            "schedule=interleaved_1f1b",
            "virtual_stages=2",
        ),
        ({"pp": 4, "virtual_stages": 2, "schedule": "1f1b"}, "schedule=1f1b", "interleaved_1f1b"),
        ({"pp": 4, "virtual_stages": 2, "schedule": "gpipe"}, "schedule=gpipe", "interleaved"),
        ({"virtual_stages": 2}, "virtual_stages=2", "pp of at least 2"),
        ({"sequence_parallel": True}, "sequence_parallel=true", "tp of at least 2"),
        ({"context_exchange": "all_gather"}, "context_exchange=all_gather", "cp of at least 2"),
        ({"order": "tp-cp-ep-pp-dp", "dp": 2}, "order=tp-cp-ep-pp-dp", "pp of at least 2"),
        ({"dp": 8, "ep": 8}, "ep(8)", "no experts"),
    ],
)
def test_a_contradiction_is_refused_by_name_with_what_to_try(
    layout: dict[str, Any], named: str, to_try: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        reviewed(**layout)
    assert named in str(caught.value)
    assert to_try in str(caught.value)
    assert caught.value.where == "--layout"


@pytest.mark.parametrize(
    ("layout", "shard", "replicate", "zero"),
    [
        ({"dp": 8}, 8, 1, 1),
        ({"dp": 8, "dp_shard": 4}, 4, 2, 1),
        ({"dp": 8, "dp_replicate": 4}, 2, 4, 1),
        ({"dp": 8, "dp_shard": 4, "dp_replicate": 2, "zero_stage": 3}, 4, 2, 3),
        ({"dp_shard": 4, "dp_replicate": 2}, 4, 2, 1),
        ({"dp": 8, "dp_shard": 1}, 1, 8, 0),
        ({"dp_replicate": 8}, 1, 8, 0),
        ({"dp_replicate": 4, "cp": 2}, 1, 4, 1),
        ({"dp": 8, "zero_stage": 0}, 1, 8, 0),
        ({"nodes": 2, "tp": 2, "dp_replicate": 2}, 4, 2, 1),
        ({}, 1, 1, 0),
    ],
)
def test_data_parallel_ranks_are_what_shards_and_replicas_make(
    layout: dict[str, Any], shard: int, replicate: int, zero: int
) -> None:
    one = reviewed(**layout)
    found = int(one.dp_shard[0]), int(one.dp_replicate[0]), int(one.zero_stage[0])
    assert found == (shard, replicate, zero)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ({}, "none"),
        ({"schedule": "none"}, "none"),
        ({"pp": 4}, "1f1b"),
        ({"pp": 4, "schedule": "zb_2p"}, "zb_2p"),
        ({"pp": 4, "virtual_stages": 2}, "interleaved_1f1b"),
        ({"pp": 4, "virtual_stages": 2, "schedule": "zb_v"}, "zb_v"),
    ],
)
def test_a_schedule_that_the_pipeline_can_have_is_kept(
    layout: dict[str, Any], schedule: str
) -> None:
    assert SCHEDULES[int(reviewed(**layout).schedule[0])] == schedule


@pytest.mark.parametrize("layout", [{"pp": 7}, {"pp": 7, "tp": 2}, {"pp": 4, "virtual_stages": 7}])
def test_a_pipeline_that_cannot_be_cut_says_which_can(layout: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"does not cut the 32 layers.*; try ") as caught:
        reviewed(**layout)
    tried = str(caught.value).rpartition("; try ")[2].partition(" or ")[0]
    name, _, values = tried.partition("=")
    for value in values.split(", "):
        reviewed(**{**layout, name: int(value)})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-l", "tp=8,tp=4"), "--layout: tp is given twice, 8 and 4; keep one"),
        (("-T", "precision=fp8", "-T", "precision=bf16"), "--training: precision is given twice"),
        (("-b", "64", "-T", "global_batch_size=32"), "--training: global_batch_size is given"),
        (("-s", "2048", "-T", "seq_len=1024"), "--training: seq_len is given"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    status, _, message = run("memory", "llama3-8b", "--device", "H100", *arguments)
    assert status == 2
    assert said in " ".join(message.split())


def test_a_constraint_that_is_given_twice_is_refused(run: Run) -> None:
    status, _, message = run(
        *("plan", "-m", "llama3-8b", "-t", "dgx-h100", "-b", "64", "-c", "tp=8", "-c", "tp=4")
    )
    assert status == 2
    assert "tp is given twice, 8 and 4; keep one" in " ".join(message.split())
