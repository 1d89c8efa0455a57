"""A cluster as nested lines of text, from the last tier of switches down to GPUs and NICs.

What is equal is written once with its count: "4 x pcie switch: 2 gpu, 2 nic". Parts that hang on
several others, as GPUs on all NVSwitches, are summed up in a line of their own.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from planner.topology.document import NodeType, TopologyDocument
from planner.topology.drawing.placing import hang
from planner.topology.drawing.surroundings import share_bytes_per_s
from planner.topology.drawing.wires import Wire, node_wires
from planner.topology.units import unit_of
from planner.units import counted, format_rate

__all__ = ["Line", "outline", "runs"]

_LEAVES: Final = ("gpu", "process", "nic")
_MAX_SIZES: Final = 4
_MAX_DEPTH: Final = 16
_MAX_IMPAIRMENTS: Final = 20


@dataclass(slots=True)
class Line:
    """A line and those below it."""

    text: str
    below: list["Line"] = field(default_factory=list)


def outline(document: TopologyDocument, nodes: int | None = None) -> Line:
    """Return a cluster as nested lines.

    Args:
        document: Which cluster.
        nodes: How many of its nodes, the first ones; None means all.

    Raises:
        InvalidInputError: ``nodes`` is not a whole number from 1 to ``max_nodes``.
    """
    num_nodes = document.max_nodes if nodes is None else document.checked_num_nodes(nodes)
    ranks = "rank" if document.node.count("process") else "GPU"
    total = num_nodes * document.gpus_per_node
    top = Line(f"{document.name}: {counted(num_nodes, 'node')}, {counted(total, ranks)}")
    above = top
    for text in _tiers(document, num_nodes):
        above.below.append(Line(text))
        above = above.below[-1]
    above.below += _node_types(document, num_nodes)
    if document.impairments:
        top.below.append(Line("impaired", _impairments(document)))
    return top


def _impairments(document: TopologyDocument) -> list[Line]:
    found = document.impairments
    listed = [Line(str(impairment)) for impairment in found[:_MAX_IMPAIRMENTS]]
    more = len(found) - len(listed)
    return [*listed, Line(f"... {more:,} more")] if more else listed


def _tiers(document: TopologyDocument, num_nodes: int) -> list[str]:
    """Return a line for each tier in use, the last first, then the NVLink domain."""
    network, domain = document.network, document.nvlink_domain
    numbers = range(num_nodes)
    found: list[str] = []
    if domain is not None:
        sizes = np.unique(unit_of(domain, numbers), return_counts=True)[1].tolist()
        rate = _rate(domain.num_switches * domain.bandwidth_bytes_per_s)
        found.append(
            f"{_sized(sizes, 'nvlink domain')}: {domain.num_switches} nvswitch, {rate} each gpu"
        )
        if len(sizes) == 1:
            return found
    for position, tier in enumerate(network.tiers if network else ()):
        if num_nodes == 1 or network is None:
            break
        sizes = np.unique(unit_of(tier, numbers), return_counts=True)[1].tolist()
        text = _sized(sizes, tier.name)
        if position == 0 and network.layout == "rail":
            text += f": a switch for each of {counted(document.node.count('nic'), 'rail')}"
        ratio = tier.oversubscription
        rate = _rate(share_bytes_per_s(document, position))
        text += f", {ratio:.3g}:1" + (f" oversubscribed, {rate} each nic" if ratio > 1 else "")
        found.append(text)
        if len(sizes) == 1:
            break
    return found[::-1]


def _sized(sizes: Sequence[int], what: str) -> str:
    """Return units with their nodes: "3 x leaf of 16 + 2 x 8 nodes"."""
    nodes = counted(sizes[0], "node") if len(set(sizes)) == 1 else f"{runs(sizes)} nodes"
    return f"{len(sizes):,} x {what} of {nodes}"


def runs(sizes: Sequence[int]) -> str:
    """Return sizes in a row, equal neighbours once, the rest of many left out.

    >>> runs((16, 8, 8, 8)), runs((4, 4))
    ('16 + 3 x 8', '2 x 4')
    """
    found = [(size, len(list(same))) for size, same in groupby(sizes)]
    words = [f"{count:,} x {size:,}" if count > 1 else f"{size:,}" for size, count in found]
    return " + ".join([*words[:_MAX_SIZES], *(["..."] if len(words) > _MAX_SIZES else [])])


def _node_types(document: TopologyDocument, num_nodes: int) -> list[Line]:
    """Return a line for the common type of node and for each island."""
    counts: dict[int, int] = {-1: num_nodes}
    for i, island in enumerate(document.islands):
        counts[i] = max(0, min(island.num_nodes, num_nodes - island.first_node))
        counts[-1] -= counts[i]
    lines: list[Line] = []
    for i, count in counts.items():
        node = document.node if i < 0 else document.islands[i].node
        device = document.device_name if i < 0 else document.islands[i].device_name
        where = f", from {document.host(document.islands[i].first_node)} on" if i >= 0 else ""
        if count:
            text = f"{count:,} x node of {len(node.workers())} x {device}{where}"
            lines.append(Line(text, _inside(document, node)))
    return lines


# --------------------------------------------------------------------------------- inside nodes


class _Part(NamedTuple):
    """What a part is and what hangs on it; equal parts are equal.

    Attributes:
        kind: Of the part.
        words: GPUs and NICs that hang on it.
        below: (number of the description, bytes/s) of the rest that hangs on it.
    """

    kind: str
    words: tuple[str, ...]
    below: tuple[tuple[int, float], ...]


def _inside(document: TopologyDocument, node: NodeType) -> list[Line]:
    wires = node_wires(node)
    kinds = {name: c.kind.replace("_", " ") for c in node.components for name in c.names()}
    children, order, _ = hang(node, [(wire.a, wire.b) for wire in wires])
    shared = _shared_nics(kinds, wires)
    children = {name: [c for c in found if c not in shared] for name, found in children.items()}
    order = [name for name in order if name not in shared]
    hung_on = {(name, child) for name, found in children.items() for child in found}
    rates = {frozenset((wire.a, wire.b)): wire.bytes_per_s for wire in wires}
    # Numbers stand for what hangs below, or equal chains of switches would be compared in depth.
    numbers: dict[_Part, int] = {}
    of_name: dict[str, int] = {}
    for name in reversed(order):
        hung = [
            (child, of_name[child], rates[frozenset((name, child))]) for child in children[name]
        ]
        alone = {numbers.get(_Part(kind, (), ())) for kind in _LEAVES}
        leaves = Counter((kinds[c], rate) for c, number, rate in hung if number in alone)
        words = tuple(f"{n} {kind} at {_rate(rate)}" for (kind, rate), n in leaves.items())
        below = tuple((number, rate) for _, number, rate in hung if number not in alone)
        of_name[name] = numbers.setdefault(_Part(kinds[name], words, below), len(numbers))
    hung_names = {child for _, child in hung_on}
    roots = [(of_name[name], 0.0) for name in order if name not in hung_names]
    lines = _merged(list(numbers), roots)
    rest = [w for w in wires if (w.a, w.b) not in hung_on and (w.b, w.a) not in hung_on]
    lines += _summed_up(kinds, rest, shared)
    if document.network is not None and node.count("nic"):
        rate = _rate(document.network.nic_bandwidth_bytes_per_s)
        lines.append(Line(f"{node.count('nic')} nic on {document.network.kind}, {rate} each"))
    return lines


def _merged(
    known: Sequence[_Part], parts: Sequence[tuple[int, float]], depth: int = 0
) -> list[Line]:
    """Return a line for each kind of equal parts, with their count."""
    if depth == _MAX_DEPTH and parts:
        return [Line("...")]
    lines: list[Line] = []
    for (number, bytes_per_s), count in Counter(parts).items():
        part = known[number]
        text = (f"{count} x " if count > 1 else "") + part.kind
        text += f" at {_rate(bytes_per_s)}" if bytes_per_s else ""
        text += f": {', '.join(part.words)}" if part.words else ""
        lines.append(Line(text, _merged(known, part.below, depth + 1)))
    return lines


def _shared_nics(kinds: Mapping[str, str], wires: Sequence[Wire]) -> set[str]:
    """Return the NICs that are joined to several workers, so that they hang on no single one."""
    joined = Counter(
        nic
        for wire in wires
        for nic, other in ((wire.a, wire.b), (wire.b, wire.a))
        if kinds[nic] == "nic" and kinds[other] in ("gpu", "process")
    )
    return {nic for nic, count in joined.items() if count > 1}


def _summed_up(
    kinds: Mapping[str, str], wires: Sequence[Wire], shared: Container[str]
) -> list[Line]:
    """Return a line for GPUs on NVSwitches, shared NICs, and direct links of GPUs or of CPUs."""
    found: dict[tuple[str, str, str], list[Wire]] = {}
    for wire in wires:
        a, b = sorted((kinds[wire.a], kinds[wire.b]))
        if wire.a in shared or wire.b in shared:
            a, b = b, a
        elif a != b and b != "nvswitch":
            continue
        found.setdefault((a, b, wire.kind), []).append(wire)
    return [Line(_joined(a, b, link, group, kinds)) for (a, b, link), group in found.items()]


def _joined(a: str, b: str, link: str, wires: Sequence[Wire], kinds: Mapping[str, str]) -> str:
    each: dict[str, float] = {}
    for wire in wires:
        for end in (wire.a, wire.b):
            each[end] = each.get(end, 0.0) + wire.bytes_per_s
    lower = [rate for name, rate in each.items() if kinds[name] == a]
    count = len(lower)
    if a != b:
        return f"{count} {a} on {len(each) - count} {b} by {link}, {_range(lower)} each"
    pairs = len(wires)
    text = f"{count} {a} joined by {link}, {_range([w.bytes_per_s for w in wires])} a pair"
    if pairs == count * (count - 1) // 2:
        return text if pairs == 1 else f"{text}, each with each: {_range(lower)} each"
    return f"{text}, {pairs} pairs: {_range(lower)} each"


def _range(rates: Sequence[float]) -> str:
    low, high = _rate(min(rates)), _rate(max(rates))
    return low if low == high else f"{low} to {high}"


def _rate(bytes_per_s: float) -> str:
    return format_rate(bytes_per_s, "B/s")
