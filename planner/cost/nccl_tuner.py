"""Which algorithm and protocol NCCL takes by itself: a model of a decision, not a price.

NCCL reckons a latency and a rate for every pair of algorithm and protocol and takes the least of ::

    believed seconds = latency + size / (rate * correction for the size)

What it *believes* is not what a call costs: its rates are those of the links it counts, its
constants were fitted on other machines, and small calls are believed too cheap. Costs stay with
``planner.cost.collectives``; the difference between the price of this choice and of the best is
what a plan can say that the default loses.

NCCL 2.30 is modelled, one call at a time; a tuner plugin (AWS ships one) or an environment variable
may overrule it. RCCL follows its own tables (``planner.cost.rccl_beliefs``). The other libraries'
tuners are not known: their first method is returned. Calls of pairs (all_to_all, sends, gather,
scatter) have no algorithm to choose: NCCL sends them by LL up to 16 KiB to a peer inside a node.
"""

from dataclasses import dataclass
from typing import Final, get_args

import numpy as np

from planner.cost.nccl_beliefs import Cpu, Pair, log2_floor, nccl_pairs
from planner.cost.nccl_graphs import Reach, graphs_of, reach_of
from planner.cost.rccl_beliefs import rccl_pairs, rccl_protocol
from planner.errors import InvalidInputError
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import LIBRARY_RULES, library_rules
from planner.plan import Algorithm, Collective
from planner.topology.fabric import NETWORK_KINDS, Fabric

__all__ = ["ALGORITHMS", "PROTOCOLS", "DefaultChoice", "default_choice"]

ALGORITHMS: Final[tuple[Algorithm, ...]] = (
    *("ring", "tree", "nvls", "nvls_tree", "collnet", "pat"),
    *("direct", "point_to_point"),
)
PROTOCOLS: Final = ("ll", "ll128", "simple")

_PAIRWISE: Final[dict[Collective, Algorithm]] = {
    "all_to_all": "direct",
    "gather": "direct",
    "scatter": "direct",
    "send_recv": "point_to_point",
}
_LL_MESSAGE_BYTES: Final = 16_384
_LL, _LL128, _SIMPLE = range(3)


@dataclass(frozen=True, slots=True)
class DefaultChoice:
    """What the library takes, shape [rows].

    Attributes:
        algorithm: Index into ``ALGORITHMS``; a group of one, which does nothing, is a ring.
        protocol: Index into ``PROTOCOLS``.
        channels: Blocks of the GPU that move it; 0 where that is not modelled.
        believed_s: What the library thinks it takes, by its model's own protocol where RCCL's
            ranges of bytes say another; NaN where it does not think.
    """

    algorithm: Column
    protocol: Column
    channels: Column
    believed_s: Column


def default_choice(
    op: Collective,
    fabric: Fabric,
    group: Group,
    size_bytes: Column,
    *,
    sharp: bool = False,
    nvls: bool = True,
    net_latency_s: float = 0.0,
    num_nics: int | None = None,
    cpu: Cpu = "intel",
) -> DefaultChoice:
    """Return what the fabric's library takes for every row.

    Args:
        op: Operation.
        fabric: Levels, architecture and library.
        group: The groups' lie on the levels, shape [rows].
        size_bytes: S as in nccl-tests, shape [rows].
        sharp: Whether a plugin lets the network's switches reduce (CollNet).
        nvls: False before NCCL 2.17, without CUDA 12.1, or with NCCL_NVLS_ENABLE=0.
        net_latency_s: What the network plugin reports: 0 of InfiniBand and sockets; aws-ofi-nccl
            75e-6 on p4d and p5, 35e-6 on p5en and p6.
        num_nics: Of a node; None as ``planner.cost.nccl_graphs`` assumes.
        cpu: Of the hosts, which bounds LL across nodes and adds to a ring's steps.

    All keywords are NCCL's but ``num_nics``: RCCL's tables leave no room for the others.

    Raises:
        InvalidInputError: The library does not run ``op``, or a figure makes no sense.
    """
    sizes = _checked(op, group, size_bytes, net_latency_s, num_nics, cpu)
    if fabric.library not in ("nccl", "rccl"):
        return _first_method(op, fabric, len(sizes))
    distinct, key = _distinct(group)
    reach = reach_of(fabric, distinct, num_nics)
    if op in _PAIRWISE:
        return _of_pairs(op, reach, distinct.degree, key, sizes)
    exits = [level for level in fabric.levels if level.kind in NETWORK_KINDS]
    gpudirect = bool(exits) and exits[0].path == "gpudirect"
    if fabric.library == "rccl":
        pairs = rccl_pairs(
            op, distinct.degree, reach, architecture=fabric.architecture, gpudirect=gpudirect
        )
    else:
        pairs = nccl_pairs(
            op,
            distinct.degree,
            reach,
            graphs_of(fabric.architecture, reach),
            architecture=fabric.architecture,
            gpudirect=gpudirect,
            cpu=cpu,
            net_latency_s=net_latency_s,
            sharp=sharp,
            nvls=nvls,
        )
    choice = _cheapest(pairs, key, sizes)
    if fabric.library == "rccl":
        choice = _ranged(op, choice, pairs, distinct, reach, key, sizes, fabric)
    several = distinct.degree[key] > 1
    return DefaultChoice(
        np.where(several, choice.algorithm, ALGORITHMS.index("ring")),
        np.where(several, choice.protocol, _SIMPLE),
        np.where(several, choice.channels, 0),
        np.where(several, choice.believed_s, 0.0),
    )


def _checked(
    op: Collective,
    group: Group,
    size_bytes: Column,
    net_latency_s: float,
    num_nics: int | None,
    cpu: Cpu,
) -> Column:
    """Return whole bytes as floats.

    Raises:
        InvalidInputError: A figure makes no sense.
    """
    sizes = np.floor(np.asarray(size_bytes, dtype=float))
    wrong = ""
    if sizes.shape != group.degree.shape:
        wrong = f"size_bytes has shape {sizes.shape}; need one per group, {group.degree.shape}"
    elif not (np.isfinite(sizes) & (sizes >= 0)).all():
        worst = sizes[~(np.isfinite(sizes) & (sizes >= 0))][0]
        wrong = f"size_bytes={worst:g}; need finite sizes from 0 on"
    elif not 0 <= net_latency_s < np.inf:
        wrong = f"net_latency_s={net_latency_s!r}; need seconds from 0 on, say 75e-6"
    elif num_nics is not None and num_nics < 1:
        wrong = f"num_nics={num_nics!r}; need 1 or more, or None to have it assumed"
    elif cpu not in get_args(Cpu):
        wrong = f"cpu={cpu!r}; need one of {', '.join(get_args(Cpu))}"
    if wrong:
        raise InvalidInputError(f"default of {op}: {wrong}", where=wrong.split("=")[0].split()[0])
    return sizes


def _first_method(op: Collective, fabric: Fabric, rows: int) -> DefaultChoice:
    rules = library_rules(fabric.library, op)
    if not rules:
        known = sorted({known for rule in LIBRARY_RULES[fabric.library] for known in rule.ops})
        raise InvalidInputError(
            f"default of {op}: {fabric.library} on topology {fabric.topology!r} does not run it; "
            f"try one of {', '.join(known)}",
            where="op",
        )
    return DefaultChoice(
        np.full(rows, ALGORITHMS.index(rules[0].algorithm)),
        np.full(rows, _SIMPLE),
        np.zeros(rows, dtype=np.int64),
        np.full(rows, np.nan),
    )


def _distinct(group: Group) -> tuple[Group, Column]:
    """Return each different group once, and the index of every row among them."""
    columns = (group.degree, group.stride, *group.members[:-1])
    key = np.zeros(len(group.degree), dtype=np.int64)
    for column in columns:
        span = int(column.max(initial=0)) + 1
        if key.max(initial=0) > (1 << 62) // span:
            _, key = np.unique(key, return_inverse=True)
        key = key * span + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    once = Group(
        group.degree[first],
        group.stride[first],
        tuple(members[first] for members in group.members),
        tuple(even[first] for even in group.even),
    )
    return once, inverse


def _of_pairs(
    op: Collective, reach: Reach, degree: Column, key: Column, sizes: Column
) -> DefaultChoice:
    message = sizes if op == "send_recv" else sizes / degree[key]
    by_ll = (reach.nodes[key] == 1) & (message <= _LL_MESSAGE_BYTES)
    rows = len(sizes)
    return DefaultChoice(
        np.full(rows, ALGORITHMS.index(_PAIRWISE[op])),
        np.where(by_ll, _LL, _SIMPLE),
        np.zeros(rows, dtype=np.int64),
        np.full(rows, np.nan),
    )


def _cheapest(pairs: list[Pair], key: Column, sizes: Column) -> DefaultChoice:
    """Return the pair with the least believed seconds of every row, the first of equals."""
    octave = log2_floor(sizes // 64)
    best = np.zeros(len(sizes), dtype=np.int64)
    least = np.full(len(sizes), np.inf)
    for number, pair in enumerate(pairs):
        if not (pair.bytes_per_s > 0).any():
            continue
        seconds = _believed_s(pair, key, sizes, octave)
        better = seconds < least
        best = np.where(better, number, best)
        least = np.where(better, seconds, least)
    return DefaultChoice(
        np.array([ALGORITHMS.index(pair.algorithm) for pair in pairs])[best],
        np.array([pair.protocol for pair in pairs])[best],
        _channels(pairs, best, key, sizes),
        least,
    )


def _believed_s(pair: Pair, key: Column, sizes: Column, octave: Column) -> Column:
    with np.errstate(divide="ignore"):
        per_byte = 1 / np.maximum(pair.bytes_per_s, 0.0)
    on = np.isfinite(per_byte)
    latency = np.where(on, pair.latency_s, np.inf)[key]
    transfer = sizes * np.where(on, per_byte, 0.0)[key]
    if pair.correction:
        below, above = pair.edges
        factors = np.array([below, *pair.correction, above])
        transfer = transfer / factors[np.clip(octave, -1, len(pair.correction)) + 1]
    if pair.plateau_bytes is not None:
        latency = latency * np.where(sizes >= pair.plateau_bytes[key], pair.plateau, 1.0)
    return np.asarray(latency + transfer)


def _channels(pairs: list[Pair], best: Column, key: Column, sizes: Column) -> Column:
    """Return as many channels as have enough to do, one at least."""
    groups = len(pairs[0].channels)
    most = np.stack([np.broadcast_to(pair.channels, groups) for pair in pairs])[best, key]
    each = np.stack([np.broadcast_to(pair.bytes_per_channel, groups) for pair in pairs])[best, key]
    busy = np.floor(sizes / np.maximum(each, 1.0))
    return np.where(each > 0, np.clip(busy, 1, np.maximum(most, 1)), most).astype(np.int64)


def _ranged(
    op: Collective,
    choice: DefaultChoice,
    pairs: list[Pair],
    distinct: Group,
    reach: Reach,
    key: Column,
    sizes: Column,
    fabric: Fabric,
) -> DefaultChoice:
    """Return RCCL's choice with the protocol that its ranges of bytes say."""
    ll128 = np.any([pair.bytes_per_s > 0 for pair in pairs if pair.protocol == _LL128], axis=0)
    protocol = rccl_protocol(
        op,
        choice.protocol,
        degree=distinct.degree[key],
        nodes=reach.nodes[key],
        size_bytes=sizes,
        architecture=fabric.architecture,
        ll128=ll128[key],
    )
    return DefaultChoice(choice.algorithm, protocol, choice.channels, choice.believed_s)
