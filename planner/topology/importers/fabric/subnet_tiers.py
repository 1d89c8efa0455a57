"""Stages of switches in a subnet, and how much of what comes up to them goes on.

Leaves are the switches with hosts; the others stand as many stages above as they are links away
from the nearest leaf. A director switch is many small switches in the text and gets the same
treatment: its line cards are one stage, its spine cards another.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from planner.topology.importers.dump import FoundTier, Remarks
from planner.topology.importers.fabric.nesting import Nest, Switch, nest, switch_list
from planner.topology.importers.fabric.subnet_hosts import HostPort, Subnet
from planner.topology.importers.hostlist import natural_key

__all__ = ["subnet_tiers"]

_MODEL = re.compile(r":[^:/]*(/[^:]*)?$")  # of "MF0;name:MQM9701/U1"


_MAX_RANK: Final = 15  # real fabrics have two or three stages above the leaves


class _Link(NamedTuple):
    """A link between two switches."""

    one: str
    other: str
    bytes_per_s: float | None


def subnet_tiers(
    subnet: Subnet, hosts: Mapping[str, Sequence[HostPort]], remarks: Remarks
) -> tuple[Nest, tuple[FoundTier, ...]]:
    """Return how hosts nest under the switches, and the tiers with their oversubscription.

    A switch with far fewer hosts than the leaves have, and more links to leaves, is no leaf: a
    server of the fabric's manager hangs on a spine. Such hosts are left out with a remark.
    """
    links = [
        _Link(one[0], other[0], rate)
        for (one, other), rate in subnet.rates.items()
        if one[0][0] == other[0][0] == "S" and one[0] != other[0]
    ]
    leaves = _leaves(links, hosts)
    leaves_of = {
        host: [port.switch for port in hosts[host] if port.switch in leaves]
        for host in sorted(hosts, key=_by_name)
    }
    above = [host for host, found in leaves_of.items() if not found]
    if above:
        remarks.add(
            f"{len(above)} host(s) hang on switches above the leaves, as servers of the fabric "
            f"do: left out: {switch_list(above)}"
        )
    leaves_of = {host: found for host, found in leaves_of.items() if found}
    ranks = _ranks(links, leaves)
    shown = _shown_names(subnet)
    nested = nest(leaves_of, shown, _stages(links, ranks, shown), remarks)
    _say_what_is_odd(subnet, links, ranks, leaves_of, remarks)
    sends = {
        host: [port.bytes_per_s for port in hosts[host] if port.switch in leaves]
        for host in leaves_of
    }
    return nested, _with_oversubscription(nested, links, ranks, sends)


def _by_name(host: str) -> tuple[bool, tuple[tuple[str | int, ...], str]]:
    """Return a sorting key: named hosts first, capitals as small letters."""
    return host.startswith("H-"), natural_key(host.lower())


def _leaves(links: Iterable[_Link], hosts: Mapping[str, Sequence[HostPort]]) -> set[str]:
    """Return the switches that hosts hang on, without spines that have a server or two."""
    num_ports = Counter(port.switch for ports in hosts.values() for port in ports)
    if not num_ports:
        return set()
    neighbours: dict[str, list[str]] = defaultdict(list)
    for link in links:
        neighbours[link.one].append(link.other)
        neighbours[link.other].append(link.one)
    usual = median(num_ports.values())
    leaves = set(num_ports)
    for switch, count in sorted(num_ports.items(), key=lambda item: (item[1], item[0])):
        to_leaves = sum(peer in leaves for peer in neighbours[switch])
        if 4 * count < usual and to_leaves > count:
            leaves.remove(switch)
    return leaves


def _ranks(links: Iterable[_Link], leaves: Iterable[str]) -> dict[str, int]:
    """Return how many links each switch is away from the nearest leaf."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for link in links:
        neighbours[link.one].add(link.other)
        neighbours[link.other].add(link.one)
    ranks = dict.fromkeys(sorted(leaves), 0)
    todo = list(ranks)
    for switch in todo:
        for peer in sorted(neighbours[switch]):
            if peer not in ranks and ranks[switch] < _MAX_RANK:
                ranks[peer] = ranks[switch] + 1
                todo.append(peer)
    return ranks


def _stages(
    links: Iterable[_Link], ranks: Mapping[str, int], shown: Mapping[str, str]
) -> list[list[Switch]]:
    """Return the switches of each rank with what they join of the same or a lower one.

    Leaves that are linked directly are joined in the first stage above them.
    """
    below: dict[str, dict[str, None]] = defaultdict(dict)
    for link in links:
        for switch, peer in ((link.one, link.other), (link.other, link.one)):
            if ranks.get(peer, _MAX_RANK + 1) <= ranks.get(switch, -1):
                # A switch of the same rank may come first and have no unit yet: then the peer's
                # own entry makes the join.
                below[switch].setdefault(peer)
    stages: dict[int, list[Switch]] = defaultdict(list)
    for switch in sorted(below, key=lambda id_: natural_key(shown[id_])):
        own = (switch,) if ranks[switch] == 0 else ()
        lower_first = sorted(below[switch], key=lambda peer: ranks[peer])
        joins = Switch(switch, shown[switch], (*own, *lower_first))
        stages[max(1, ranks[switch])].append(joins)
    return [stages[rank] for rank in sorted(stages)]


def _shown_names(subnet: Subnet) -> dict[str, str]:
    """Return what to call each switch: its own name if it has one that no other has.

    "MF0;name:MQM9701/U1" is name; further chips of one housing are name/U2, name/L01.
    """
    names = {
        switch: _short_name(description) or switch
        for switch, description in subnet.names.items()
        if switch.startswith("S-")
    }
    counts = Counter(names.values())
    return {
        switch: name if counts[name] == 1 else f"{name}/{switch}" for switch, name in names.items()
    }


def _short_name(description: str) -> str:
    """Return the name of a switch without its housing's model; empty for a product name.

    >>> _short_name("MF0;spine-02:MQM9701/U1"), _short_name("MF0;big:MCS8500/L01/U1")
    ('spine-02', 'big/L01')
    """
    if "Mellanox Technologies" in description:
        return ""
    name = description.split(";", 1)[-1]
    match = _MODEL.search(name)
    if match is None:
        return name.strip()
    chip = (match[1] or "").removesuffix("/U1")
    return name[: match.start()] + chip


def _say_what_is_odd(
    subnet: Subnet,
    links: Iterable[_Link],
    ranks: Mapping[str, int],
    leaves_of: Mapping[str, Sequence[str]],
    remarks: Remarks,
) -> None:
    """Remark on rails, links between leaves, and switches that lead to no host."""
    num_rails = sum(len(set(leaves)) > 1 for leaves in leaves_of.values())
    if num_rails:
        remarks.add(
            f"{num_rails:,} of {len(leaves_of):,} hosts hang on several leaf switches, as with "
            "rails: switches with the same hosts are one unit"
        )
    between = [link for link in links if ranks.get(link.one) == ranks.get(link.other) == 0]
    if between:
        remarks.add(
            f"{len(between)} links join leaf switches directly: counted as a stage above them"
        )
    for switch, line in subnet.lines.items():
        if switch.startswith("S-") and switch not in ranks:
            remarks.add(
                f"switch {subnet.names[switch]!r} leads to no host in {_MAX_RANK} links: left out",
                line,
            )


def _with_oversubscription(
    nested: Nest,
    links: Iterable[_Link],
    ranks: Mapping[str, int],
    sends: Mapping[str, Sequence[float | None]],
) -> tuple[FoundTier, ...]:
    """Return the tiers with what comes up over what can go on, all units of a tier together.

    What comes up is no more than the hosts send and the tiers below let through, so idle ports
    do not count; a tier without anything above has no figure. None too where a rate is missing.
    """
    up_rates: list[dict[int, float]] = [defaultdict(float) for _ in nested.tiers]
    is_known = [True] * len(up_rates)
    for link in links:
        if link.one not in ranks or link.other not in ranks:
            continue
        rank = min(ranks[link.one], ranks[link.other])
        ends = [end for end in (link.one, link.other) if ranks[end] == rank]
        if rank + 1 >= len(up_rates) or (len(ends) == 2 and rank > 0):
            continue
        for end in ends:
            label = nested.labels[rank][nested.unit_of_switch[end]]
            if link.bytes_per_s is None:
                is_known[rank] = False
            else:
                up_rates[rank][label] += link.bytes_per_s
    return tuple(_rated_tiers(nested, up_rates, is_known, sends))


def _rated_tiers(
    nested: Nest,
    up_rates: Sequence[Mapping[int, float]],
    is_known: Sequence[bool],
    sends: Mapping[str, Sequence[float | None]],
) -> list[FoundTier]:
    tiers = list(nested.tiers)
    known = [rate for rates in sends.values() for rate in rates if rate is not None]
    if len(known) < sum(map(len, sends.values())):
        return tiers
    flows: dict[int, float] = defaultdict(float)  # first-tier unit to what comes up from it
    for host, rates in sends.items():
        flows[nested.unit_of_host[host]] += sum(rate for rate in rates if rate is not None)
    for rank, _ in enumerate(pairwise(tiers)):
        if not is_known[rank]:
            break
        labels = nested.labels[rank]
        comes: dict[int, float] = defaultdict(float)
        for unit, flow in flows.items():
            comes[labels[unit]] += flow
        goes = {label: min(flow, up_rates[rank].get(label, 0.0)) for label, flow in comes.items()}
        through = sum(goes.values())
        if through > 0:
            joined = sum(flow for label, flow in comes.items() if goes[label] > 0)
            tiers[rank] = replace(tiers[rank], oversubscription=joined / through)
        flows = goes
    return tiers
