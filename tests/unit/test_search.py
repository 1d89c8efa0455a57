"""The space against an enumeration, and the search against pricing everything."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.cost.memory import memory
from planner.cost.problem import Problem
from planner.cost.step import mean_compute_s, price, timed_ops
from planner.cost.work import Launches
from planner.errors import InfeasiblePlanError, InvalidInputError
from planner.frameworks import rules_for
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    RECOMPUTE_MODES,
    SCHEDULES,
    concatenate,
    replaced,
)
from planner.model.bundled import load_model
from planner.request import Constraints
from planner.search.rank import rank
from planner.search.space import divisors, enumerate_candidates, pipelines
from tests.unit.problems import fabric, problem, row


def small(name: str = "llama3-8b", gpus: int = 16, **training: Any) -> Problem:
    return problem(
        name,
        on=fabric(gpus),
        pipelines=tuple(pipelines(load_model(name), gpus, Constraints())),
        **{"global_batch_size": 32, "seq_len": 4096, **training},
    )


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_every_factorization_is_there(name: str) -> None:
    base = small(name, 16)
    space = enumerate_candidates(base, Constraints())
    c = space.candidates
    assert (c.tp * c.cp * c.dp * c.pp == 16).all()
    assert (c.etp * c.ep * c.edp * c.pp == 16).all()
    assert (c.micro_batch_size * c.num_micro_batches * c.dp == 32).all()
    found = set(zip(c.tp, c.cp, c.dp, c.pp, c.ep, c.etp, strict=True))
    heads, kv, layers = 32, 8, 32
    expected = set()
    for tp, cp, pp in product(divisors(16), repeat=3):
        if 16 % (tp * cp * pp) or kv % tp or heads % tp or pp > layers:
            continue
        dp = 16 // (tp * cp * pp)
        experts = [(1, 1)]
        if name == "mixtral-8x7b":
            experts = [(e, x) for e in divisors(8) for x in {1, tp} if 16 // pp % (e * x) == 0]
        expected |= {(tp, cp, dp, pp, ep, etp) for ep, etp in experts}
    assert found == expected


def test_rejections_and_candidates_add_up() -> None:
    base = small()
    space = enumerate_candidates(base, Constraints())
    assert len(space.candidates) + sum(space.rejected.values()) == space.num_candidates
    for rule in rules_for("megatron"):
        broken = rule.breaks(space.candidates, base.model, base.training)
        assert not np.asarray(broken).any(), rule.name


def test_the_winner_is_the_fastest_that_fits_of_all() -> None:
    base = small("llama3-8b", 16)
    everything = enumerate_candidates(base, Constraints()).candidates
    peak = memory(base, everything).total_bytes().max(axis=1)
    times = price(base, everything).step_time_s()
    best = times[peak <= base.capacity_bytes].min()
    ranking = rank(base, Constraints())
    assert (np.diff(ranking.priced.step_time_s()) >= 0).all()
    assert (ranking.peak_bytes <= base.capacity_bytes).all()
    some = ranking.candidates.recompute_layers > 0
    assert ranking.priced.step_time_s()[~some][0] == best
    assert (~some).sum() == (peak <= base.capacity_bytes).sum()


def test_some_layers_are_recomputed_where_none_would_not_fit_and_no_fewer_do() -> None:
    """Brute force over every number of layers of a stage."""
    base = small("llama3-8b", 16)
    ranking = rank(base, Constraints())
    rows = np.flatnonzero(ranking.candidates.recompute_layers > 0)
    assert len(rows) > 10
    for index in rows[:: max(1, len(rows) // 25)]:
        one = ranking.candidates.take(np.array([index]))
        fewest = int(one.recompute_layers[0])
        for layers in range(fewest):
            fewer = replaced(one, recompute_layers=np.array([layers]))
            if layers == 0:
                fewer = one.with_recompute("none")
            assert memory(base, fewer).total_bytes().max() > base.capacity_bytes
            assert price(base, fewer).step_time_s()[0] < price(base, one).step_time_s()[0]
        every = one.with_recompute("full")
        assert price(base, every).step_time_s()[0] > price(base, one).step_time_s()[0]


def test_the_layers_asked_for_are_recomputed_and_no_others() -> None:
    base = small("llama3-8b", 16)
    held = rank(base, Constraints(recompute_layers=3)).candidates
    assert set(held.recompute_layers.tolist()) == {3}
    none = rank(base, Constraints(recompute="none")).candidates
    assert set(none.recompute_layers.tolist()) == {0}


@pytest.mark.parametrize(
    ("held", "named", "needed"),
    [
        ({"recompute": "none", "recompute_layers": 2}, "recompute=none", "recompute=full"),
        ({"recompute": "selective", "recompute_layers": 2}, "recompute=selective", "=full"),
        ({"recompute_layers": 33}, "recompute_layers=33", "at most 32"),
        ({"pp": 4, "recompute_layers": 9}, "recompute_layers=9", "at most 8"),
        ({"recompute": "full", "recompute_layers": 33}, "recompute_layers=33", "at most 32"),
    ],
)
def test_layers_that_cannot_be_recomputed_are_refused_with_what_is_needed(
    held: dict[str, Any], named: str, needed: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        enumerate_candidates(small("llama3-8b"), Constraints(**held))
    assert f"constraints.{named}" in str(caught.value) or named in str(caught.value)
    assert "recompute_layers" in str(caught.value)
    assert needed in str(caught.value)
    assert caught.value.where == "constraints"


def test_a_stage_has_the_layers_that_are_recomputed() -> None:
    base = small("llama3-8b")
    found = enumerate_candidates(base, Constraints(recompute_layers=9)).candidates
    assert len(found)
    assert all(max(base.splits.layers[split]) >= 9 for split in set(found.split.tolist()))


def test_one_row_costs_what_it_costs_among_many() -> None:
    for name in ("llama3-8b", "mixtral-8x7b"):
        base = small(name)
        many = enumerate_candidates(base, Constraints()).candidates
        together = price(base, many).step_time_s()
        for index in range(0, len(many), max(1, len(many) // 40)):
            alone = price(base, many.take(np.array([index]))).step_time_s()[0]
            assert alone == pytest.approx(together[index], rel=1e-12)


def test_timed_ops_add_up_to_the_breakdown() -> None:
    for name in ("llama3-8b", "mixtral-8x7b"):
        base = small(name)
        many = enumerate_candidates(base, Constraints()).candidates
        if name == "llama3-8b":  # some with a part of their layers recomputed
            some = many.take(many.recompute == RECOMPUTE_MODES.index("full"))
            some = replaced(some, recompute_layers=np.full(len(some), 3))
            many = concatenate([many, some])
        for index in range(0, len(many), max(1, len(many) // 25)):
            one = many.take(np.array([index]))
            priced = price(base, one)
            parts = dict.fromkeys(("compute", "tp", "cp", "ep", "dp", "pp", "launch"), 0.0)
            for op in timed_ops(base, one):
                axis = getattr(op.timed.op, "axis", None)
                part = {
                    None: "compute",
                    "tp": "tp",
                    "cp": "cp",
                    "pp": "pp",
                    "ep": "ep",
                    "etp": "ep",
                }
                is_launch = isinstance(op.timed.op, Launches)
                parts["launch" if is_launch else part.get(axis, "dp")] += float(op.exposed_s[0])
            assert parts["launch"] == pytest.approx(priced.launch_s[0], rel=1e-9, abs=1e-12)
            assert parts["compute"] == pytest.approx(
                priced.compute_s[0] + priced.optimizer_s[0], rel=1e-9
            )
            for axis in ("tp", "cp", "ep", "dp", "pp"):
                found = getattr(priced, f"{axis}_exposed_s")[0]
                assert parts[axis] == pytest.approx(found, rel=1e-9, abs=1e-12), axis


def test_a_slower_network_never_helps() -> None:
    base = small("mixtral-8x7b")
    many = enumerate_candidates(base, Constraints()).candidates
    levels = tuple(
        replace(v, bytes_per_s=v.bytes_per_s / 3, alpha_s=2 * v.alpha_s) for v in base.fabric.levels
    )
    slow = replace(base, fabric=replace(base.fabric, levels=levels))
    # a call over slower links has fewer channels, in whole numbers, which hold fewer processors
    assert (price(slow, many).step_time_s() >= 0.995 * price(base, many).step_time_s()).all()


def test_shared_cores_divide_compute() -> None:
    host = fabric(
        4,
        library="gloo",
        device="cpu-core",
        gpus_per_node=4,
        cores_per_node=2,
        levels=(fabric().levels[0],),
    )
    base = problem("example-gpt", on=host, seq_len=256, precision="fp32", framework="executor")
    one = row(dp_replicate=4, num_micro_batches=2)
    alone = problem(
        "example-gpt",
        on=fabric(
            4,
            library="gloo",
            device="cpu-core",
            gpus_per_node=4,
            cores_per_node=4,
            levels=(fabric().levels[0],),
        ),
        seq_len=256,
        precision="fp32",
        framework="executor",
    )
    assert mean_compute_s(base, one)[0] == pytest.approx(2 * mean_compute_s(alone, one)[0])


def test_constraints_hold_and_impossible_ones_are_refused() -> None:
    base = small()
    held = Constraints(tp=2, pp=2, micro_batch_size=1, zero_stage=1)
    c = enumerate_candidates(base, held).candidates
    assert set(c.tp) == {2}
    assert set(c.pp) == {2}
    assert set(c.micro_batch_size) == {1}
    with pytest.raises(InvalidInputError, match=r"constraints.tp=5: no layout of 16 ranks"):
        enumerate_candidates(base, Constraints(tp=5))
    with pytest.raises(InvalidInputError, match=r"try global_batch_size=32"):
        enumerate_candidates(small(global_batch_size=31), Constraints(dp=8))


def test_only_context_ranks_choose_an_exchange() -> None:
    base = small()
    c = enumerate_candidates(base, Constraints()).candidates
    ring = c.context_exchange == CONTEXT_EXCHANGES.index("ring")
    assert ring[c.cp == 1].all()
    several = c.take(c.cp > 1)
    assert 2 * ring[c.cp > 1].sum() == len(several)
    held = enumerate_candidates(base, Constraints(context_exchange="all_gather")).candidates
    assert len(held) == len(several) / 2
    assert (held.cp > 1).all()
    with pytest.raises(InvalidInputError, match="dropping cp or context_exchange helps"):
        enumerate_candidates(base, Constraints(context_exchange="all_gather", cp=1))


@pytest.mark.parametrize("zero", [1, 3])
def test_hybrid_sharding_fills_a_unit_or_is_as_large_as_asked(zero: int) -> None:
    base = small("llama3-8b", 32)
    c = enumerate_candidates(base, Constraints(tp=2, pp=1, cp=1, zero_stage=zero)).candidates
    assert set(zip(c.dp_shard, c.dp_replicate, strict=True)) == {(16, 1), (4, 4)}
    for held in (Constraints(dp_shard=8, dp=16), Constraints(dp_replicate=2, dp=16)):
        c = enumerate_candidates(base, held.model_copy(update={"zero_stage": zero})).candidates
        assert set(zip(c.dp_shard, c.dp_replicate, strict=True)) == {(8, 2)}


def test_an_all_gather_of_keys_is_waited_for_and_a_ring_is_not() -> None:
    """The same bytes; long sequences hide the ring (Megatron-LM: cp_comm_type)."""
    base = problem("llama3-8b", seq_len=131072)
    ring, gathered = (
        price(base, row(cp=8, context_exchange=exchange)).cp_exposed_s[0]
        for exchange in ("ring", "all_gather")
    )
    assert ring < 0.5 * gathered


def test_plans_name_the_pipeline_rank_that_each_op_is_counted_on() -> None:
    """Two stages of 16 layers: the head makes the last the slowest and the fullest."""
    base = problem("llama3-8b", pipelines=((2, 1),))
    one = row(pp=2, dp_replicate=2, schedule="1f1b", num_micro_batches=8)
    found = {op.timed.op.name: op for op in timed_ops(base, one)}
    assert {int(op.pp_rank[0]) for op in found.values()} == {1}
    assert found["pp_send"].repeats[0] == 8  # gradients alone: nobody comes after it


def test_what_cannot_fit_says_how_far_off_it_is() -> None:
    base = small("llama3-405b", 8)
    with pytest.raises(InfeasiblePlanError, match=r"the smallest is .* GB"):
        rank(base, Constraints())


@pytest.mark.parametrize("schedule", ["zb_1p", "zb_2p", "zb_v"])
def test_schedules_without_a_price_are_neither_offered_nor_priced(schedule: Any) -> None:
    base = small("llama3-8b", 16)
    offered = {
        SCHEDULES[int(s)] for s in enumerate_candidates(base, Constraints()).candidates.schedule
    }
    assert schedule not in offered
    with pytest.raises(InvalidInputError, match="only the memory is known"):
        enumerate_candidates(base, Constraints(schedule=schedule))
    paired = problem("llama3-8b", pipelines=((4, 1),))
    with pytest.raises(InvalidInputError, match="its memory is known and its time is not"):
        price(paired, row(pp=4, schedule=schedule, num_micro_batches=8))
