"""Both orders of the axes over ranks: where they are tried, how they lie, which one wins."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from planner.calibrate.runs import plan_candidate
from planner.cost.problem import Problem
from planner.cost.rates import achieved_bytes_per_s
from planner.cost.step import price
from planner.cost.step_constants import PLAIN
from planner.errors import InvalidInputError
from planner.layout.candidates import DP_OUTERMOST, RANK_ORDERS, distinct
from planner.layout.groups import axis_group
from planner.model.bundled import load_model
from planner.plan import AXES, Framework, Plan, RankOrder, groups
from planner.request import Constraints
from planner.search.answer import answer
from planner.search.rank import rank
from planner.search.space import enumerate_candidates, pipelines
from planner.summary import ordered
from planner.topology.fabric import Fabric, Level, Mesh
from tests.dist.plans import TINY, make_plan
from tests.unit.problems import NVLINK, SPINE, fabric, problem

USUAL: RankOrder = "tp-cp-ep-dp-pp"
OTHER: RankOrder = "tp-cp-ep-pp-dp"
EXPERT_AXES = ("etp", "ep", "edp")
TOP = replace(SPINE, unit_size=1 << 20)


def on(where: Fabric, model: str = "llama3-8b", **changes: Any) -> Problem:
    spec = load_model(model)
    own = {"global_batch_size": 32, "seq_len": 4096, **changes}
    tried = tuple(pipelines(spec, where.num_gpus, Constraints()))
    return replace(problem(model, on=where, pipelines=tried, **own), constants=PLAIN)


# --------------------------------------------------------------------------- where they are tried


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("framework", get_args(Framework))
def test_every_layout_is_tried_in_the_orders_that_differ_and_are_legal(
    model: str, framework: Framework
) -> None:
    c = enumerate_candidates(on(fabric(16), model, framework=framework), Constraints()).candidates
    other = c.order == DP_OUTERMOST
    same_dp = (c.etp * c.ep == c.tp) if model == "mixtral-8x7b" else True
    # two runs of tp ranks in one of the units of 8; the 16 are of one unit of the rail
    legal = (c.pp > 1) & (c.dp > 1) & (c.cp == 1) & (2 * c.tp <= 8) & same_dp
    assert other.any()
    assert not (other & ~legal).any()
    degrees = [c.tp, c.cp, c.pp, c.ep, c.etp, c.virtual_stages, c.dp]
    variants = [c.split, c.schedule, c.micro_batch_size, c.recompute, c.zero_stage]
    whole = (c.dp_shard == 1) | (c.dp_replicate == 1)  # shards in a unit are of other sizes
    rows = np.stack([*degrees, *variants, c.dp_shard, c.sequence_parallel], axis=1)

    def chosen(mask: Any) -> set[tuple[int, ...]]:
        return set(map(tuple, rows[mask & whole & legal].tolist()))

    assert chosen(other) == chosen(~other)


def test_shards_in_a_unit_are_as_many_as_the_order_leaves_there() -> None:
    held = Constraints(tp=2, pp=2, cp=1, zero_stage=1, virtual_stages=1)
    c = enumerate_candidates(on(fabric(32)), held).candidates
    found = {order: set(c.dp_shard[c.order == i]) for i, order in enumerate(RANK_ORDERS)}
    assert found == {USUAL: {8, 4}, OTHER: {8, 2}}  # of 8 GPUs 8 / tp, and 8 / (tp * pp)


@pytest.mark.parametrize(
    ("levels", "is_tried"),
    [
        ((replace(NVLINK, unit_size=16),), False),
        ((replace(NVLINK, unit_size=16, mesh=Mesh(((1.0,),), ((1.0,),))),), True),
        ((replace(NVLINK, unit_size=2), TOP), False),  # tp 2 fills a node
        ((replace(NVLINK, unit_size=4), TOP), True),
    ],
)
def test_only_where_a_unit_has_room_for_two_the_other_order_is_tried(
    levels: tuple[Level, ...], is_tried: bool
) -> None:
    wide = fabric(16, levels=levels)
    c = enumerate_candidates(on(wide), Constraints(tp=2, pp=2)).candidates
    assert bool((c.order == DP_OUTERMOST).any()) is is_tried
    held = enumerate_candidates(on(wide), Constraints(tp=2, pp=2, order=OTHER)).candidates
    assert (held.order == DP_OUTERMOST).all(), "what is asked for needs no reason"


def test_where_it_is_not_tried_the_price_is_the_same() -> None:
    """So nothing is missed by leaving it out: nodes of 8 that tp fills, before a flat network."""
    base = on(fabric(64, levels=(NVLINK, TOP)))
    assert not enumerate_candidates(base, Constraints(tp=8)).candidates.order.any()
    rows = enumerate_candidates(base, Constraints(tp=8, order=OTHER)).candidates
    assert len(rows) > 0
    usual = replace(rows, order=np.zeros_like(rows.order))
    assert (price(base, rows).step_time_s() == price(base, usual).step_time_s()).all()


def test_an_order_is_held_and_refused_where_it_means_nothing() -> None:
    base = on(fabric(16))
    for order in RANK_ORDERS:
        c = enumerate_candidates(base, Constraints(order=order)).candidates
        assert {RANK_ORDERS[index] for index in set(c.order)} == {order}
    for held in ({"pp": 1}, {"dp": 1}, {"cp": 2}):
        with pytest.raises(InvalidInputError, match=r"dropping .*order helps"):
            enumerate_candidates(base, Constraints.model_validate({"order": OTHER, **held}))
    with pytest.raises(InvalidInputError, match="dp outermost needs dp and pp of at least 2"):
        enumerate_candidates(on(fabric(2)), Constraints(order=OTHER))


# --------------------------------------------------------------------------------- how they lie


@pytest.mark.parametrize(
    ("model", "framework", "gpus"),
    [
        ("llama3-8b", "megatron", 32),
        ("mixtral-8x7b", "megatron", 32),
        ("mixtral-8x7b", "executor", 24),
        ("llama3-8b", "megatron", 24),
    ],
)
def test_groups_of_every_row_are_progressions_and_those_of_the_plan(
    model: str, framework: Framework, gpus: int
) -> None:
    base = on(fabric(gpus), model, framework=framework, global_batch_size=gpus)
    c = enumerate_candidates(base, Constraints()).candidates
    rows, _ = distinct(c, ("tp", "cp", "pp", "ep", "etp", "dp_shard", "dp_replicate", "order"))
    axes = [axis for axis in AXES if base.model.experts or axis not in EXPERT_AXES]
    laid = {axis: axis_group(base.fabric, rows, axis) for axis in axes}
    assert (rows.order == DP_OUTERMOST).sum() > 10
    for row in range(len(rows)):
        layout, order = rows.layout(row), RANK_ORDERS[int(rows.order[row])]
        for axis, group in laid.items():
            degree, stride = int(group.degree[row]), int(group.stride[row])
            found = groups(layout, axis, order)
            expected = {tuple(range(g[0], g[0] + degree * stride, stride)) for g in found}
            assert set(found) == expected, (layout, order, axis)


# -------------------------------------------------------------------------------- which one wins

# Two nodes of four GPUs, four stages, two replicas. In the usual order a node has two stages of two
# replicas, and sends cross the network; dp outermost has a replica in each node, and gradients do.
NETWORK_BYTES_PER_S = 1e9
HELD = {"tp": 1, "pp": 4, "dp": 2, "virtual_stages": 1, "micro_batch_size": 1, "schedule": "1f1b"}


def two_nodes_of_four(seq_len: int) -> Problem:
    node = replace(NVLINK, unit_size=4, alpha_s=0.0)
    net = replace(TOP, alpha_s=0.0, bytes_per_s=NETWORK_BYTES_PER_S)
    where = fabric(8, gpus_per_node=4, levels=(node, net))
    return on(where, "example-gpt", seq_len=seq_len, framework="executor")


def exposed_s(base: Problem, order: RankOrder) -> tuple[float, float, float]:
    """Return (sends between stages, gradients, whole step)."""
    held = Constraints.model_validate({**HELD, "zero_stage": 0, "order": order})
    priced = rank(base, held).priced
    parts = (priced.pp_exposed_s, priced.dp_exposed_s, priced.step_time_s())
    sends, gradients, step = (float(seconds[0]) for seconds in parts)
    return sends, gradients, step


@pytest.mark.parametrize(("seq_len", "winner"), [(8192, OTHER), (256, USUAL)])
def test_the_order_that_keeps_the_larger_traffic_in_the_node_wins(
    seq_len: int, winner: RankOrder
) -> None:
    """Executor, no overlap: a step waits for 2 (p - 1) sends and for 2 (n - 1) / n of gradients."""
    base = two_nodes_of_four(seq_len)
    rate = achieved_bytes_per_s(base.fabric.levels[1])
    one_send_s = 2 * seq_len * base.model.hidden_size / rate  # bf16
    parameters = 2 * 737_792 + 256 * (256 + 1)  # the last stage has the head
    sends_s, gradients_s = 2 * (4 - 1) * one_send_s, 4 * parameters / rate  # summed in fp32
    usual, other = exposed_s(base, USUAL), exposed_s(base, OTHER)
    assert usual[0] == pytest.approx(sends_s, rel=0.1)
    assert other[1] == pytest.approx(gradients_s, rel=0.05)
    assert usual[1] < 0.1 * gradients_s
    assert other[0] < 0.1 * sends_s
    assert (OTHER if sends_s > gradients_s else USUAL) == winner
    best = rank(base, Constraints.model_validate({**HELD, "zero_stage": 0}))
    assert RANK_ORDERS[int(best.candidates.order[0])] == winner
    assert best.priced.step_time_s()[0] == min(usual[2], other[2])


def test_equal_orders_leave_the_usual_one_first() -> None:
    """A network as fast as the links inside a node: every price is the same in both orders."""
    level = replace(NVLINK, unit_size=4)
    even = fabric(8, gpus_per_node=4, levels=(level, replace(level, name="net", unit_size=8)))
    held = Constraints.model_validate({**HELD, "zero_stage": 0, "recompute": "none"})
    ranking = rank(on(even, "example-gpt", framework="executor"), held)
    first, second = ranking.priced.step_time_s()
    assert first == second
    assert ranking.candidates.order.tolist() == [RANK_ORDERS.index(USUAL), DP_OUTERMOST]


def test_a_run_in_an_order_that_is_not_priced_is_refused() -> None:
    base = problem("llama3-8b", pipelines=((2, 1),), on=fabric(16))
    model = TINY.model_copy(update={"num_layers": base.model.num_layers})
    plan = make_plan(cp=2, pp=2, dp=4, model=model, order=OTHER)
    with pytest.raises(InvalidInputError, match="with cp2 pp2 dp4 cannot be priced") as refused:
        plan_candidate(base, plan)
    assert refused.value.where == "plan.ranks.order"
    usual = plan.model_copy(update={"ranks": plan.ranks.model_copy(update={"order": USUAL})})
    assert len(plan_candidate(base, usual)) == 1


def test_a_plan_written_before_there_were_orders_lies_in_the_usual_one() -> None:
    new = make_plan(tp=2, pp=2, dp=2, order=OTHER)
    assert new.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert (new.coordinates(2)["pp"], new.coordinates(2)["dp"]) == (1, 0)
    document = new.model_dump(mode="json")
    del document["ranks"]["order"]
    old = Plan.model_validate(document)
    assert old.ranks.order == USUAL
    assert old.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


# ------------------------------------------------------------------------- what a plan says of it


def test_a_plan_has_the_order_and_what_the_other_would_cost() -> None:
    """Two nodes of four on a slow network, as above, from a request to the document."""
    base = two_nodes_of_four(8192)
    held = Constraints.model_validate({**HELD, "zero_stage": 0, "recompute": "none"})
    fields = answer(base, rank(base, held), top_k=1, interval=(0.1, "test"))
    assert fields["ranks"].order == OTHER
    [other] = fields["runners_up"]
    assert (other.layout, other.order) == (fields["layout"], USUAL)
    assert "stage sends" in other.why
    assert ordered(other.layout, other.order) == "pp4 dp2"
    assert ordered(fields["layout"], OTHER) == "pp4 dp2, dp outermost"
    crossed = {(crossing.axis, crossing.level) for crossing in fields["crossings"]}
    network = base.fabric.levels[1].name
    assert {axis for axis, level in crossed if level == network} == {"dp_cp"}
