"""What uneven routing sends where, how long that takes at least, and when other ways pay.

A rank's way in carries what all others send to it, so an exchange is priced as the even all_to_all
whose every rank receives what the busiest one does (``even_size_bytes``): there is no second
formula. That takes the link of a rank as its own; where GPUs share NICs an all_to_all of few hot
ranks is faster than that. ``exits`` tells what each unit of each level carries.

Symbols: ``T`` tokens of a rank, ``k`` experts per token of ``E``, ``e`` ranks, ``h`` hidden, ``f``
the experts' hidden size, ``β`` bytes per element, ``B`` bytes/s into a rank, ``F`` flop/s.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cost.algorithms import members_below
from planner.cost.collectives import collective_terms
from planner.cost.expert_load import dropped_share, expert_shares
from planner.cost.problem import Problem
from planner.cost.rates import calls_of, rate_of
from planner.cost.work import expert_skews, routed_rows, sharded_tokens
from planner.layout.candidates import Candidates, Column
from planner.layout.groups import Group, inner_group, outer_group
from planner.plan import ExpertLoad, Method
from planner.topology.fabric import NETWORK_KINDS, Fabric

__all__ = [
    "Exits",
    "compute_break_even_rows",
    "copies_per_token",
    "deduplicated_s",
    "dispatch_bytes",
    "even_size_bytes",
    "exits",
    "load_assumptions",
    "matrix_bound_s",
    "move_break_even_steps",
    "replica_break_even_rows",
]

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
    shares = expert_shares(moe, len(problem.model.moe_layers), load)
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
