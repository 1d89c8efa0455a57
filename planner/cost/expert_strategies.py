"""What could be done about uneven experts, priced side by side for one layer and micro-batch.

Every strategy is the ops of ``planner.cost.work`` at another skew, or with other exchanges, timed
like those of a plan. Nothing of it is hidden beside compute.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

import numpy as np

from planner.cost.expert_load import dropped_share, expert_shares, rank_loads, replicated
from planner.cost.expert_traffic import (
    Exits,
    compute_break_even_rows,
    copies_per_token,
    deduplicated_s,
    dispatch_bytes,
    even_size_bytes,
    exits,
    matrix_bound_s,
    replica_break_even_rows,
)
from planner.cost.problem import Problem, gradient_bytes, weight_bytes
from planner.cost.seconds import seconds, slowed
from planner.cost.shares import block_share
from planner.cost.work import Communication, Gemm, Op, block_work, routed_rows, sharded_tokens
from planner.errors import InvalidInputError
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import axis_group
from planner.model.spec import MixtureOfExperts
from planner.plan import Collective, ExpertCapacity

__all__ = [
    "BreakEven",
    "Strategy",
    "break_even",
    "compare_strategies",
    "dispatch_exits",
    "expert_row",
]

_MODELLED: Final = "modelled, not validated"
# benchmarks/deepep.py: medians 1 to 21 % off for large exchanges on 1 to 4 nodes of H100, up to
# 60 % too fast on 8, and on one node of Blackwell.
_NEAR_DEEPEP: Final = "near DeepEP on 1 to 4 nodes of H100"
_BESIDE_DEEPEP: Final = "up to 65 % faster than DeepEP there"
_MEASURED_NODES: Final = 4
# What of a layer depends on who receives how many rows.
_EXPERT_OPS: Final = ("experts_up", "experts_down", "expert_activation")
_EXCHANGES: Final = ("ep_dispatch", "ep_combine")
_ROUTED_OPS: Final = (*_EXPERT_OPS, *_EXCHANGES, "ep_counts", "etp_gather", "etp_scatter")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to live with a load: one layer and micro-batch, forward and backward.

    Attributes:
        name: What is done.
        exchange_s: Of all exchanges, the copies' weights and gradients included.
        compute_s: Of the hottest rank's experts.
        exchange_bytes: Through the hottest rank's link, the direction that carries more.
        skew: Rows of the hottest rank over the mean of dropless routing.
        dropped: Share of the routed rows that skip their expert: another mathematics.
        basis: What speaks for the figures.
    """

    name: str
    exchange_s: float
    compute_s: float
    exchange_bytes: float
    skew: float
    dropped: float = 0.0
    basis: str = _MODELLED

    @property
    def total_s(self) -> float:
        """Seconds of both; none of it is hidden."""
        return self.exchange_s + self.compute_s


def expert_row(problem: Problem, ep: int) -> Candidates:
    """Return the one candidate of ``ep`` ranks that share out nothing but experts and sequences.

    Raises:
        InvalidInputError: The model has no experts, ``ep`` does not divide them, or there are not
            as many ranks.
    """
    moe = problem.model.experts
    if moe is None:
        raise InvalidInputError(
            f"{problem.model.name} is dense; need a model with experts", where="model"
        )
    if moe.num_experts % ep:
        divisors = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        raise InvalidInputError(
            f"ep={ep}: does not divide the {moe.num_experts} experts of {problem.model.name}; need "
            f"one of {', '.join(map(str, divisors))}",
            where="ep",
        )
    if ep > problem.fabric.num_gpus:
        raise InvalidInputError(
            f"ep={ep}: {problem.fabric.topology} has {problem.fabric.num_gpus:,} ranks; need at "
            "most as many, or a topology with more",
            where="ep",
        )
    columns = {field.name: np.ones(1, dtype=int) for field in fields(Candidates)}
    words = ("recompute_layers", "schedule", "context_exchange", "order", "split", "zero_stage")
    columns |= {name: np.zeros(1, dtype=int) for name in words}
    columns |= {"ep": np.array([ep]), "dp_shard": np.array([ep])}
    columns["sequence_parallel"] = np.zeros(1, dtype=bool)
    return Candidates(**columns).with_recompute("none")


def compare_strategies(problem: Problem, c: Candidates) -> tuple[Strategy, ...]:
    """Return what each way to live with the load of ``problem.training`` costs.

    Of several layers the most uneven one counts. ``gather_to_one`` sends the hottest rank's rows by
    a gather and the others by an exchange; ``replicate`` copies as many experts as is fastest, of
    powers of two and what evens the load.

    Args:
        problem: A model with experts.
        c: One row.
    """
    moe = problem.model.experts
    assert moe is not None, "only experts have a load"
    shares = _worst_shares(problem, moe, int(c.ep[0]))
    plain = {"expert_capacity": None, "expert_load": None, "dispatcher": "all_to_all"}
    training = problem.training.model_copy(update=plain)
    capacity = problem.training.expert_capacity or ExpertCapacity(factor=1.0)
    dropless = replace(problem, training=training)
    dropping = replace(problem, training=training.model_copy(update={"expert_capacity": capacity}))
    loads = rank_loads(shares[None], int(c.ep[0]))[0]
    hottest = float(loads.max())
    of = partial(_routed_work, dropless, c)
    rows = float(routed_rows(dropping, c)[0])
    dropped = dropped_share(
        shares[None], moe.top_k, float(sharded_tokens(problem, c)[0]), rows / moe.num_experts
    )
    fullest = moe.num_experts * float(shares.max())
    return (
        _strategy("all_to_all", dropless, c, of(hottest), hottest),
        _deduplicated(dropless, c, moe, loads),
        _strategy("all_gather", dropless, c, _gathered(dropless, c, of(hottest)), hottest),
        _in_two(dropless, c, loads),
        *_replicated(dropless, c, shares),
        _strategy("drop to capacity", dropping, c, _routed_work(dropping, c, 1.0), 1.0, dropped),
        _strategy("pad, drop nothing", dropless, c, of(fullest), fullest),
    )


def _worst_shares(problem: Problem, moe: MixtureOfExperts, ep: int) -> Column:
    """Return the shares of the layer whose hottest rank is the hottest, shape [experts]."""
    shares = expert_shares(moe, len(problem.model.moe_layers), problem.training.expert_load)
    worst: Column = shares[rank_loads(shares, ep).max(axis=1).argmax()]
    return worst


def _routed_work(problem: Problem, c: Candidates, skew: float) -> list[Op]:
    """Return the ops that depend on the load, at the hottest rank."""
    return [op for op in block_work(problem, c, "moe", skew) if op.name in _ROUTED_OPS]


def _strategy(
    name: str, problem: Problem, c: Candidates, ops: list[Op], skew: float, dropped: float = 0.0
) -> Strategy:
    """Return the strategy that does ``ops``."""
    timed = seconds(problem, c, ops)
    exchanged = [one for one in timed if isinstance(one.op, Communication)]
    through_link = [_link_bytes(op, c) for op in ops if isinstance(op, Communication)]
    exchange_s = sum(float(one.total_s[0]) for one in exchanged)
    total_s = sum(float(one.total_s[0]) for one in timed)
    return Strategy(name, exchange_s, total_s - exchange_s, sum(through_link), skew, dropped)


def _link_bytes(op: Communication, c: Candidates) -> float:
    """Return what all calls of ``op`` send through a rank's link, one way."""
    n = int(c.etp[0] if op.axis == "etp" else c.ep[0])
    return float((op.size_bytes * op.repeats)[0]) * (n - 1) / n


def _gathered(problem: Problem, c: Candidates, ops: list[Op]) -> list[Op]:
    """Return ``ops`` with all tokens gathered everywhere, and what experts made of them reduced."""
    size = c.ep * sharded_tokens(problem, c) * problem.model.hidden_size
    size = size * weight_bytes(problem.training)
    found: list[Op] = []
    for op in ops:
        if isinstance(op, Communication) and op.name in _EXCHANGES:
            gathers = (op.name == "ep_dispatch") == (op.phase != "backward")
            kind: Collective = "all_gather" if gathers else "reduce_scatter"
            op = replace(op, op=kind, size_bytes=size)
        if op.name != "ep_counts":
            found.append(op)
    return found


def _in_two(problem: Problem, c: Candidates, loads: Column) -> Strategy:
    """Return the hottest rank's rows by themselves, then the others': its way in is as busy."""
    hottest, *others = sorted(loads.tolist(), reverse=True)
    ops = _routed_work(problem, c, hottest)
    first = _strategy("gather_to_one", problem, c, ops, hottest)
    rest = max(others, default=0.0)
    if rest == 0:
        return first
    second = [op for op in _routed_work(problem, c, rest) if op.name in _EXCHANGES]
    later_s = _strategy("", problem, c, second, rest).exchange_s
    return replace(first, exchange_s=first.exchange_s + later_s)


def _replicated(problem: Problem, c: Candidates, shares: Column) -> Iterator[Strategy]:
    """Yield the fastest number of copies, if any copy evens the load."""
    ep = int(c.ep[0])
    needed = len(replicated(shares, ep, len(shares) + ep)[1])
    tried = sorted({*(1 << power for power in range(needed.bit_length())), needed} - {0})
    found = [_with_replicas(problem, c, shares, number) for number in tried]
    if found:
        yield min(found, key=lambda one: one.total_s)


def _with_replicas(problem: Problem, c: Candidates, shares: Column, number: int) -> Strategy:
    ep = int(c.ep[0])
    loads, replicas = replicated(shares, ep, number)
    parameters = float(block_share(problem, c, "moe")[1][0]) * ep / len(shares)  # of an expert
    moved = np.zeros((ep, ep))
    for replica in replicas:
        moved[replica.home, replica.target] += parameters
    size, once = even_size_bytes(moved) * np.ones(1), np.ones(1)
    call = partial(Communication, repeats=once, axis="ep", op="all_to_all")
    weights, gradients = weight_bytes(problem.training), gradient_bytes(problem.training)
    copies = [
        call("replica_weights", "forward", size_bytes=size * weights),
        call("replica_gradients", "backward", size_bytes=size * gradients),
    ]
    hottest = float(loads.max())
    ops = [*_routed_work(problem, c, hottest), *copies]
    return _strategy(f"replicate {number}", problem, c, ops, hottest)


def _deduplicated(
    problem: Problem, c: Candidates, moe: MixtureOfExperts, loads: Column
) -> Strategy:
    """Return all_to_all with its four exchanges deduplicated."""
    hottest, ep = float(loads.max()), int(c.ep[0])
    ops = _routed_work(problem, c, hottest)
    group = axis_group(problem.fabric, c, "ep")
    inside = int(group.members[0][0])
    units = np.add.reduceat(loads, np.arange(0, ep, inside))
    copies = partial(copies_per_token, moe.num_experts, moe.top_k)
    token = sharded_tokens(problem, c) * problem.model.hidden_size * weight_bytes(problem.training)
    rank_bytes, unit_bytes = (
        token * copies(len(parts), share=float(parts.max()) / ep) for parts in (loads, units)
    )
    plain = _strategy("", problem, c, [op for op in ops if op.name not in _EXCHANGES], hottest)
    times = sum(
        float(op.repeats[0])
        for op in ops
        if isinstance(op, Communication) and op.name in _EXCHANGES
    )
    one = slowed(problem, group) * deduplicated_s(problem.fabric, group, rank_bytes, unit_bytes)
    is_near = problem.fabric.architecture == "hopper" and len(units) <= _MEASURED_NODES
    return replace(
        plain,
        name="deduplicated",
        basis=_NEAR_DEEPEP if is_near else _BESIDE_DEEPEP,
        exchange_s=plain.exchange_s + times * float(one[0]),
        exchange_bytes=plain.exchange_bytes + times * float(rank_bytes[0]) * (ep - 1) / ep,
    )


# ----------------------------------------------------------------- where it goes, when copies pay


def dispatch_exits(problem: Problem, c: Candidates) -> tuple[Exits, ...]:
    """Return what the dispatch of one micro-batch sends over each level, of the most uneven layer.

    Args:
        problem: A model with experts.
        c: One row.
    """
    group = axis_group(problem.fabric, c, "ep")
    return exits(problem.fabric, group, _dispatch(problem, c))


def _dispatch(problem: Problem, c: Candidates) -> Column:
    """Return bytes from rank to rank, dropless."""
    moe, ep = problem.model.experts, int(c.ep[0])
    assert moe is not None, "only experts are dispatched to"
    loads = rank_loads(_worst_shares(problem, moe, ep)[None], ep)[0]
    row_bytes = problem.model.hidden_size * weight_bytes(problem.training)
    return dispatch_bytes(loads, float(sharded_tokens(problem, c)[0]) * moe.top_k * row_bytes)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Rows that a rank receives from others, and from how many on a copy of an expert pays.

    Attributes:
        hottest_rows: Of one dispatch, on the hottest rank.
        bytes_rows: Beyond it a copy moves fewer bytes than they do.
        compute_rows: Beyond it they take longer to compute than a copy to travel.
    """

    hottest_rows: float
    bytes_rows: float
    compute_rows: float


def break_even(problem: Problem, c: Candidates) -> BreakEven | None:
    """Return the rows that decide about copies; None for one rank, which has no others.

    F is what experts reach under an even load, B what the busiest way in does.
    """
    moe, ep = problem.model.experts, int(c.ep[0])
    assert moe is not None, "only experts are copied"
    if ep == 1:
        return None
    matrix = _dispatch(problem, c)
    into_hottest = even_size_bytes(matrix) * (ep - 1) / ep
    bytes_per_s = into_hottest / matrix_bound_s(
        problem.fabric, axis_group(problem.fabric, c, "ep"), matrix
    )
    timed = [
        one
        for one in seconds(problem, c, _routed_work(problem, c, 1.0))
        if isinstance(one.op, Gemm)
    ]
    flop = sum(
        float((one.op.flop * one.op.repeats)[0]) for one in timed if isinstance(one.op, Gemm)
    )
    flop_per_s = flop / sum(float(one.total_s[0]) for one in timed)
    element = {
        "weight_bytes": weight_bytes(problem.training),
        "gradient_bytes": gradient_bytes(problem.training),
    }
    row_bytes = problem.model.hidden_size * weight_bytes(problem.training)
    matrices = 3 if moe.gated else 2
    return BreakEven(
        into_hottest / row_bytes,
        replica_break_even_rows(moe.expert_hidden_size, matrices=matrices, **element),
        compute_break_even_rows(flop_per_s, bytes_per_s, **element),
    )
