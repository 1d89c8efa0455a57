"""Which part of the routed rows each expert, and each expert-parallel rank, receives.

Shares have shape [layers, experts], or one row for all layers; a row adds up to 1. Experts lie in
blocks of ``num_experts / ep`` consecutive ones on a rank, as Megatron places them. Every rank
sends alike: what differs is where to. A token goes to ``k`` different experts, so no expert has
more than ``1/k`` of the rows.

A Zipf load has ``1/i**exponent`` for the ``i``-th popular expert. Which number that one has is
nobody's rule; here the popular ones are spread over the numbers as multiples of the golden ratio
fill an interval. The hottest of 8 ranks with 64 experts at exponent 1 then has 2.14 times the mean,
2.39 for numbers drawn at random, 4.58 if the most popular were neighbours. Counts know better.
"""

from dataclasses import dataclass
from math import erf, exp, pi, sqrt
from typing import Any, Final

import numpy as np

from planner.documents import parse_json
from planner.errors import InvalidInputError
from planner.layout.candidates import Column
from planner.model.spec import MixtureOfExperts
from planner.plan import ExpertLoad
from planner.units import parse_number

__all__ = [
    "Replica",
    "dropped_share",
    "expert_shares",
    "parse_counts",
    "rank_loads",
    "replicated",
    "skews",
]

_GOLDEN: Final = (sqrt(5) - 1) / 2
_WHERE: Final = "training.expert_load"
# Of a largest share against 1/k: counts are whole numbers, and may be averages.
_ROUNDING: Final = 1e-6
_NOTHING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy of ``expert`` of rank ``home`` on rank ``target``, for ``share`` of the rows."""

    expert: int
    home: int
    target: int
    share: float


def expert_shares(moe: MixtureOfExperts, num_moe_layers: int, load: ExpertLoad | None) -> Column:
    """Return the share of every expert, shape [layers or 1, experts].

    Args:
        moe: Experts, and how many a token goes to.
        num_moe_layers: Layers with experts.
        load: What is asked for; None is even.

    Raises:
        InvalidInputError: Counts that do not belong to such a model.

    >>> moe = MixtureOfExperts(num_experts=4, top_k=1, expert_hidden_size=8)
    >>> expert_shares(moe, 2, ExpertLoad(counts=((6, 2, 0, 0),))).tolist()
    [[0.75, 0.25, 0.0, 0.0]]
    """
    if load is None:
        return np.full((1, moe.num_experts), 1 / moe.num_experts)
    if load.counts is None:
        assert load.zipf is not None, "a load has an exponent or counts"
        return _zipf_shares(moe, load.zipf)[None, :]
    _check_counts(moe, num_moe_layers, load.counts)
    counts = np.array(load.counts, dtype=float)
    with np.errstate(over="ignore"):
        if not np.isfinite(counts.sum(axis=1)).all():
            counts /= counts.max(axis=1, keepdims=True)
    shares: Column = counts / counts.sum(axis=1, keepdims=True)
    layer, expert = np.unravel_index(int(shares.argmax()), shares.shape)
    if shares[layer, expert] > (1 + _ROUNDING) / moe.top_k:
        raise InvalidInputError(
            f"{_WHERE}.counts: expert {expert} of row {layer} has {shares[layer, expert]:.1%} of "
            f"its row, but a token goes to {moe.top_k} different experts: at most "
            f"{1 / moe.top_k:.1%}; give how many tokens each expert received",
            where=f"{_WHERE}.counts",
        )
    return shares


def _zipf_shares(moe: MixtureOfExperts, exponent: float) -> Column:
    weights = np.arange(1, moe.num_experts + 1) ** -exponent
    shares = weights / weights.sum()
    while (
        full := shares > 1 / moe.top_k
    ).any():  # every token goes there; the others take the rest
        full |= shares == 1 / moe.top_k
        rest = 1 - full.sum() / moe.top_k
        shares = np.where(full, 1 / moe.top_k, weights * rest / weights[~full].sum())
    numbers = np.argsort(np.argsort(np.arange(1, moe.num_experts + 1) * _GOLDEN % 1))
    spread = np.empty(moe.num_experts)
    spread[numbers] = shares
    return spread


def _check_counts(
    moe: MixtureOfExperts, num_moe_layers: int, counts: tuple[tuple[float, ...], ...]
) -> None:
    problem = ""
    lengths = {len(row) for row in counts}
    if lengths <= {0}:
        problem = "there are none"
    elif lengths != {moe.num_experts}:
        got = ", ".join(map(str, sorted(lengths)))
        problem = f"rows of {got} counts, the model has {moe.num_experts} experts a layer"
    elif len(counts) not in (1, num_moe_layers):
        problem = f"{len(counts)} rows, the model has {num_moe_layers} layers with experts"
    elif (empty := next((at for at, row in enumerate(counts) if not any(row)), None)) is not None:
        problem = f"row {empty} is all zero"
    if problem:
        raise InvalidInputError(
            f"{_WHERE}.counts: {problem}; need {moe.num_experts} counts, one for each expert, in "
            f"one row or in {num_moe_layers}, one for each layer with experts",
            where=f"{_WHERE}.counts",
        )


def rank_loads(shares: Column, ep: int) -> Column:
    """Return what each rank receives over the mean of all ranks, shape [layers, ep].

    >>> rank_loads(np.array([[0.5, 0.3, 0.1, 0.1]]), 2).round(3).tolist()
    [[1.6, 0.4]]
    """
    blocks = np.array_split(shares, ep, axis=1)
    return ep * np.stack([block.sum(axis=1) for block in blocks], axis=1)


def skews(shares: Column, ep: int) -> tuple[float, float]:
    """Return the hottest rank's rows over the mean: mean over the layers, and of the worst layer.

    Time adds up over layers, each of which waits for its own hottest rank; memory must hold.
    """
    hottest = rank_loads(shares, ep).max(axis=1)
    return float(hottest.mean()), float(hottest.max())


def dropped_share(shares: Column, top_k: int, num_tokens: float, capacity: float) -> float:
    """Return the expected share of routed rows beyond the capacity, mean over the layers.

    An expert's rows from one rank are taken as binomial, by its normal approximation: with even
    routing and a factor of 1 chance alone drops some.

    Args:
        shares: Of the experts, [layers, experts].
        top_k: Experts per token.
        num_tokens: Of a micro-batch on one rank.
        capacity: Rows that an expert takes of it.
    """
    return float(
        np.mean([_dropped(float(p), top_k, num_tokens, capacity) for p in shares.ravel()])
    ) * (shares.shape[1] / (top_k * num_tokens))


def _dropped(share: float, top_k: int, num_tokens: float, capacity: float) -> float:
    """Return E[max(0, X - capacity)] of a normal X."""
    chance = min(1.0, share * top_k)
    mean, deviation = num_tokens * chance, sqrt(num_tokens * chance * (1 - chance))
    if deviation == 0:
        return max(0.0, mean - capacity)
    z = (mean - capacity) / deviation
    return (
        deviation * exp(-z * z / 2) / sqrt(2 * pi) + (mean - capacity) * (1 + erf(z / sqrt(2))) / 2
    )


def replicated(shares: Column, ep: int, num_replicas: int) -> tuple[Column, tuple[Replica, ...]]:
    """Return the load of every rank, [ep], over the mean, after copies of hot experts; and those.

    One by one: the hottest rank gives rows of its hottest expert to the coldest rank, until either
    has the mean. The copy computes what the original would, so results do not change.

    Args:
        shares: Of one layer, shape [experts].
        ep: Ranks.
        num_replicas: Copies at most; fewer if the load is even before.
    """
    blocks = [block.copy() for block in np.array_split(shares * ep, ep)]
    starts = np.cumsum([0, *map(len, blocks)])
    loads = np.array([block.sum() for block in blocks])
    found: list[Replica] = []
    while len(found) < num_replicas and loads.max() > 1 + _NOTHING:
        hot, cold = int(loads.argmax()), int(loads.argmin())
        expert = int(blocks[hot].argmax())
        moved = min(blocks[hot][expert], loads[hot] - 1, 1 - loads[cold])
        if moved <= _NOTHING:
            break
        blocks[hot][expert] -= moved
        loads[hot] -= moved
        loads[cold] += moved
        found.append(Replica(int(starts[hot]) + expert, hot, cold, float(moved) / ep))
    return loads, tuple(found)


def parse_counts(text: bytes, *, source: str) -> list[Any]:
    """Return the counts in a file as a list of rows, the cells of JSON as they are.

    JSON is a list, a list of lists or ``{"counts": ...}``; CSV has one line for each layer, or one
    count a line.

    Raises:
        InvalidInputError: It is neither, or has no counts.

    >>> parse_counts(b"3,1\\n2,2\\n", source="counts.csv")
    [[3.0, 1.0], [2.0, 2.0]]
    """
    if text.lstrip()[:1] in (b"[", b"{"):
        value = parse_json(text, source=source)
        value = value.get("counts") if isinstance(value, dict) else value
        if not isinstance(value, list):
            raise InvalidInputError(
                f"{source}: need a list of counts, or an object with counts", where=source
            )
        rows = value if any(isinstance(row, list) for row in value) else [value]
    else:
        rows = _csv_counts(text, source)
        if all(len(row) == 1 for row in rows):  # one count a line
            rows = [[row[0] for row in rows]]
    if not any(rows):
        raise InvalidInputError(
            f"{source}: has no counts; need one for each expert, in one row or in one for each "
            "layer with experts",
            where=source,
        )
    return rows


def _csv_counts(text: bytes, source: str) -> list[list[float]]:
    """Return the counts of every line that is not blank."""
    try:
        lines = text.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"{source}: is not UTF-8; save it as UTF-8", where=source) from exc
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [[parse_number(cell) for cell in line.split(",")]] if line.strip() else []
        except ValueError as exc:
            raise InvalidInputError(
                f"{source}, line {number}: {exc}, with commas between them, and no header",
                where=source,
            ) from exc
    return rows
