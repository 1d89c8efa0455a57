"""What uneven routing costs one layer with experts, and what could be done about it.

A rank's way in carries what all others send to it, so an exchange is priced as the even all_to_all
whose every rank receives what the busiest one does (``even_size_bytes``): there is no second
formula. That takes the link of a rank as its own; where GPUs share NICs an all_to_all of few hot
ranks is faster than that. ``exits`` tells what each unit of each level carries.

Symbols: ``T`` tokens of a rank, ``k`` experts per token of ``E``, ``e`` ranks, ``h`` hidden, ``f``
the experts' hidden size, ``β`` bytes per element, ``B`` bytes/s into a rank, ``F`` flop/s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

import numpy as np

from planner.cost.algorithms import members_below
from planner.cost.collectives import calls_of, collective_terms, rate_of
from planner.cost.expert_load import (
    dropped_share,
    expert_shares,
    rank_loads,
    replicated,
)
from planner.cost.problem import Problem, gradient_bytes, weight_bytes
from planner.cost.seconds import seconds
from planner.cost.shares import block_share
from planner.cost.work import (
    Communication,
    Gemm,
    Op,
    block_work,
    expert_skews,
    routed_rows,
    sharded_tokens,
)
from planner.errors import InvalidInputError
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import Group, axis_group, inner_group, outer_group
from planner.model.blocks import layer_kinds
from planner.model.spec import MixtureOfExperts
from planner.plan import Collective, ExpertCapacity, ExpertLoad, Method
from planner.topology.fabric import NETWORK_KINDS, Fabric

__all__ = [
    "BreakEven",
    "Exits",
    "Strategy",
    "break_even",
    "compare_strategies",
    "compute_break_even_rows",
    "copies_per_token",
    "deduplicated_s",
    "dispatch_bytes",
    "dispatch_exits",
    "even_size_bytes",
    "exits",
    "expert_row",
    "load_assumptions",
    "matrix_bound_s",
    "move_break_even_steps",
    "replica_break_even_rows",
]

_MODELLED: Final = "modelled, not validated"
# benchmarks/deepep.py: medians 1 to 21 % off for large exchanges on 1 to 4 nodes of H100, up to 60 %
# too fast on 8, and on one node of Blackwell.
_NEAR_DEEPEP: Final = "near DeepEP on 1 to 4 nodes of H100"
_BESIDE_DEEPEP: Final = "up to 60 % faster than DeepEP there"
_MEASURED_NODES: Final = 4
_DIRECT: Final = Method("direct")


# ---------------------------------------------------------------------------- traffic matrices


@dataclass(frozen=True, slots=True)
class Exits:
    """What an exchange sends over one level.

    Attributes:
        level: Name.
        out_bytes: Out of every unit of the level below (of level 0: every rank), shape [units].
        into_bytes: Into it, shape [units].
        seconds: Of the busiest way, in or out, at achieved rates.
    """

    level: str
    out_bytes: Column
    into_bytes: Column
    seconds: float


def dispatch_bytes(loads: Column, row_bytes: float) -> Column:
    """Return bytes from every rank to every rank, shape [ep, ep], its own rows included.

    Args:
        loads: What ranks receive over the mean, shape [ep].
        row_bytes: Of all the rows that one rank routes.
    """
    return np.tile(loads * row_bytes / len(loads), (len(loads), 1))


def even_size_bytes(matrix: Column) -> float:
    """Return S of the even all_to_all that loads every link as this loads the busiest.

    >>> even_size_bytes(np.array([[5.0, 1.0], [3.0, 9.0]]))
    6.0
    """
    n = len(matrix)
    if n == 1:
        return 0.0
    others = matrix * ~np.eye(n, dtype=bool)
    return float(max(others.sum(axis=0).max(), others.sum(axis=1).max())) * n / (n - 1)


def exits(fabric: Fabric, group: Group, matrix: Column) -> tuple[Exits, ...]:
    """Return what an exchange sends over each level, innermost first.

    Members fill units in order. A GPU has its own link inside the host and its own NIC; what is
    above, and the NIC of a host of CPU ranks, its unit shares.

    Args:
        fabric: Levels with bandwidth.
        group: One row: the group's lie on them.
        matrix: Bytes from member to member, shape [n, n]; the diagonal stays where it is.
    """
    n, ranks = len(matrix), np.arange(len(matrix))
    assert n == group.degree[0], "a row and a column for every member"
    found, reached_network = [], False
    levels = calls_of(fabric, "all_to_all", "library").levels
    spans = zip(levels, members_below(group), group.members, strict=True)
    for depth, (level, below, inside) in enumerate(spans):
        unit = ranks // int(below[0])
        crossing = matrix * (unit[:, None] != unit[None, :])
        out, into = (np.bincount(unit, crossing.sum(axis=axis)) for axis in (1, 0))
        is_network = level.kind in NETWORK_KINDS
        own = depth == 0 or (is_network and not reached_network and fabric.cores_per_node is None)
        reached_network |= is_network
        ways = [crossing.sum(axis=0), crossing.sum(axis=1)] if own else [out, into]
        sharers = 1 if own else int(below[0])
        rate = np.asarray(rate_of(level, group, inside, direct=True)).flat[0]
        busiest = float(np.max(ways)) if inside[0] > below[0] else 0.0
        found.append(Exits(level.name, out, into, busiest / (sharers * float(rate))))
    return tuple(found)


def matrix_bound_s(fabric: Fabric, group: Group, matrix: Column) -> float:
    """Return the seconds of the busiest way in or out of any unit; arguments as of ``exits``."""
    return max(level.seconds for level in exits(fabric, group, matrix))


# ------------------------------------------------------------------------------ deduplication


def copies_per_token(
    num_experts: int, top_k: int, parts: int, *, share: float | None = None
) -> float:
    """Return how many of ``parts`` a token is sent to, one copy each (DeepEP, HybridEP).

    D = parts (1 - C(E - E/parts, k) / C(E, k)) if all sets of k experts are alike. A part with
    another share of the rows counts as that share of the experts.

    Args:
        num_experts: E; with node-limited routing those on the nodes a token may go to.
        top_k: Experts per token.
        parts: Ranks or nodes that hold them, in equal parts.
        share: Of the rows, that every part is taken to receive; None = 1/parts.

    >>> round(copies_per_token(256, 8, 8), 3), round(copies_per_token(256, 8, 64), 2)
    (5.295, 7.68)

    DeepSeek-V3 goes to 4 of 8 nodes, where 128 experts are:

    >>> round(copies_per_token(128, 8, 4), 2)
    3.63
    """
    held = num_experts * (1 / parts if share is None else share)
    missed = 1.0
    for drawn in range(top_k):
        missed *= max(0.0, num_experts - held - drawn) / (num_experts - drawn)
    return parts * (1 - missed)


def deduplicated_s(fabric: Fabric, group: Group, rank_bytes: Column, unit_bytes: Column) -> Column:
    """Return seconds of an exchange that sends a token once to a node, and on to its ranks.

    Both at a time: to the member at the same place of every other unit, and from there over the
    links inside. Each is an all_to_all, without its launch; latencies add up.

    Args:
        fabric: Levels with bandwidth and latency.
        group: The group's lie on the levels, shape [rows].
        rank_bytes: Into a rank from all ranks, its own included, shape [rows].
        unit_bytes: Into the units' members at its place, likewise.
    """
    inside, across = (
        collective_terms("all_to_all", _DIRECT, fabric, part, size)
        for part, size in ((inner_group(group), rank_bytes), (outer_group(group), unit_bytes))
    )
    fixed = np.maximum(inside.fixed_s, across.fixed_s)
    moved = np.maximum(inside.transfer_s, across.transfer_s)
    return fixed + inside.latency_s + across.latency_s + moved


# -------------------------------------------------------------------------------- break-evens


def replica_break_even_rows(
    expert_hidden_size: int, *, matrices: int = 3, weight_bytes: float, gradient_bytes: float
) -> float:
    """Return rows from others beyond which a copy of the expert moves fewer bytes than they do.

    A copy takes its weights forward and its gradients backward, a row four legs of h β.

    >>> replica_break_even_rows(2048, weight_bytes=2, gradient_bytes=2)  # DeepSeek-V3
    3072.0
    """
    return matrices * expert_hidden_size * (weight_bytes + gradient_bytes) / (4 * weight_bytes)


def compute_break_even_rows(
    flop_per_s: float, bytes_per_s: float, *, weight_bytes: float, gradient_bytes: float
) -> float:
    """Return rows beyond which computing them on one rank takes longer than sending the expert.

    Every element of it is multiplied with every row in three passes, 2 flop each; for β = 2 and
    gradients alike that is β F / (3 B), whatever h and f.

    >>> round(compute_break_even_rows(400e12, 400e9, weight_bytes=2, gradient_bytes=2))
    667
    """
    return (weight_bytes + gradient_bytes) * flop_per_s / (6 * bytes_per_s)


def move_break_even_steps(
    num_parameters: float,
    bytes_per_s: float,
    saving_s: float,
    *,
    weight_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
) -> float:
    """Return steps for which an expert must stay hot before moving it for good has paid.

    Args:
        num_parameters: Of the expert.
        bytes_per_s: Between both ranks.
        saving_s: Per step, against leaving it there.
        weight_bytes: Per parameter, as the other two.
        gradient_bytes: Of the accumulated gradient.
        optimizer_bytes: Moments and master copy; 12 for AdamW in 16 bits.
    """
    state = weight_bytes + gradient_bytes + optimizer_bytes
    return np.inf if saving_s <= 0 else state * num_parameters / bytes_per_s / saving_s


# --------------------------------------------------------------------------------- strategies

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
    training = problem.training.model_copy(update={"expert_capacity": None, "expert_load": None})
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

    F is what the hottest rank's experts reach, B what the busiest way in does.
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
    if moe.num_experts % ep or ep > problem.fabric.num_gpus:
        raise InvalidInputError(
            f"ep={ep}: need a divisor of the {moe.num_experts} experts of {problem.model.name}, at "
            f"most the {problem.fabric.num_gpus:,} ranks of {problem.fabric.topology}",
            where="ep",
        )
    columns = {field.name: np.ones(1, dtype=int) for field in fields(Candidates)}
    words = ("schedule", "context_exchange", "order", "split", "zero_stage")
    columns |= {name: np.zeros(1, dtype=int) for name in words}
    columns |= {"ep": np.array([ep]), "dp_shard": np.array([ep])}
    columns["sequence_parallel"] = np.zeros(1, dtype=bool)
    return Candidates(**columns).with_recompute("none")


def _worst_shares(problem: Problem, moe: MixtureOfExperts, ep: int) -> Column:
    """Return the shares of the layer whose hottest rank is the hottest, shape [experts]."""
    layers = layer_kinds(problem.model).count("moe")
    shares = expert_shares(moe, layers, problem.training.expert_load)
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
    one = deduplicated_s(problem.fabric, group, rank_bytes, unit_bytes)
    is_near = problem.fabric.architecture == "hopper" and len(units) <= _MEASURED_NODES
    return replace(
        plain,
        name="deduplicated",
        basis=_NEAR_DEEPEP if is_near else _BESIDE_DEEPEP,
        exchange_s=plain.exchange_s + times * float(one[0]),
        exchange_bytes=plain.exchange_bytes + times * float(rank_bytes[0]) * (ep - 1) / ep,
    )


# -------------------------------------------------------------------------------- of a plan


def load_assumptions(problem: Problem, c: Candidates) -> Iterator[str]:
    """Yield what a plan of the one row ``c`` takes for granted about its experts' load."""
    moe, training = problem.model.experts, problem.training
    if moe is None:
        return
    load, capacity = training.expert_load, training.expert_capacity
    if load is None:
        yield "experts are loaded evenly"
    elif capacity is None:
        mean, worst = (f"{float(skew[0]):.3g}" for skew in expert_skews(problem, c))
        most = "" if mean == worst else f" (in the most uneven layer {worst} times, for memory)"
        yield (
            f"experts are loaded {_said(load)}: all wait for the hottest of {int(c.ep[0])} expert "
            f"ranks, which receives {mean} times the mean{most}"
        )
    if capacity is None:
        return
    shares = expert_shares(moe, layer_kinds(problem.model).count("moe"), load)
    tokens, rows = sharded_tokens(problem, c), routed_rows(problem, c)
    dropped = dropped_share(shares, moe.top_k, float(tokens[0]), float(rows[0]) / moe.num_experts)
    blow_up = moe.num_experts * float(shares.max(axis=1).mean())
    yield (
        f"experts loaded {_said(load)}, {dropped:.2%} of the routed rows exceed the capacity and "
        "skip their expert; padding each expert to the fullest instead would send "
        f"{blow_up:.3g} times the rows of dropless routing"
    )


def _said(load: ExpertLoad | None) -> str:
    if load is None:
        return "evenly"
    return "as counted" if load.counts is not None else f"by Zipf({load.zipf:g})"
