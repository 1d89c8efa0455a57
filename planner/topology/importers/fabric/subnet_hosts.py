"""Which adapters of a subnet belong to which host.

An adapter is called by its host and device, ``a08-nd-04-c01 mlx5_5`` or ``node1 HCA-2``, once
the host has told it. Until then it answers with its product name, and several machines may still
be called ``localhost``; such adapters are put together by what the text does tell (see
``named_hosts``), and what is guessed is said.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.topology.importers.dump import Remarks
from planner.topology.importers.fabric.nesting import switch_list
from planner.units import format_rate

__all__ = ["End", "HostPort", "Subnet", "UsualHost", "modal_host", "named_hosts"]

End = tuple[str, int]  # node ("S-..." or "H-...") and port

_AGGREGATION = re.compile(r"aggregation node|sharp", re.IGNORECASE)
_PRODUCT = re.compile(
    r"^MT\d{4,}|Mellanox Technologies|NVIDIA Corporation|ConnectX|InfiniHost|BlueField|^HCA\b|"
    r"^mlx\d_\d+$|^$",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Subnet:
    """Switches and adapters ("S-" and "H-" + GUID; "R-" a router) and the links between them.

    Attributes:
        names: What each node is called, as far as it is.
        lines: Where each record begins.
        systems: System image GUID of the nodes that say one.
        peers: Other end of each linked port.
        rates: Bytes/s of each link, one direction, by its ends in order; None if not said.
    """

    names: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    systems: dict[str, str] = field(default_factory=dict)
    peers: dict[End, End] = field(default_factory=dict)
    rates: dict[tuple[End, End], float | None] = field(default_factory=dict)


class UsualHost(NamedTuple):
    """What most hosts have."""

    num_nics: int
    nic_bytes_per_s: float | None


class HostPort(NamedTuple):
    """A linked port of an adapter: where it hangs, and how fast."""

    switch: str
    switch_port: int
    bytes_per_s: float | None


def named_hosts(
    subnet: Subnet, remarks: Remarks
) -> tuple[dict[str, tuple[HostPort, ...]], tuple[str, ...]]:
    """Return each host's linked ports, and what was guessed.

    An adapter without a host's name belongs to the host whose named adapter has the same system
    image GUID. The others of one group of rails (leaf switches that named hosts have one port
    each on) are taken as hosts wired like the named ones: the first of every leaf, by port, are
    one host, the second another. Where nothing tells, each is a host.
    """
    ports = _ports_of(subnet, remarks)
    unclear = _ambiguous(subnet, ports, remarks)
    hosts: dict[str, list[HostPort]] = {}
    host_of_system: dict[str, str] = {}
    unnamed: list[str] = []
    for adapter, found in ports.items():
        host = _host_name(subnet.names[adapter])
        if host is None or host in unclear:
            unnamed.append(adapter)
            continue
        hosts.setdefault(host, []).extend(found)
        if system := subnet.systems.get(adapter):
            host_of_system[system] = host
    rest = []
    for adapter in unnamed:
        known = host_of_system.get(subnet.systems.get(adapter, ""))
        if known is None:
            rest.append(adapter)
        else:
            hosts[known].extend(ports[adapter])
    num_named = len(hosts)
    rails = _rails_of(hosts)
    hosts |= dict(_unnamed_hosts(rest, ports, rails))
    assumptions: tuple[str, ...] = ()
    if rest:
        assumptions = (
            f"{len(rest)} adapters answer with a product name instead of their host's (or with a "
            f"name that several share); they are counted as {len(hosts) - num_named} hosts wired "
            "like the named ones on the same leaf switches",
        )
    return {host: tuple(found) for host, found in hosts.items()}, assumptions


def modal_host(hosts: Mapping[str, Sequence[HostPort]], remarks: Remarks) -> UsualHost:
    """Return what most hosts have; remark on those that differ."""
    shapes = {
        host: (len(ports), tuple(sorted((port.bytes_per_s or 0.0) for port in ports)))
        for host, ports in hosts.items()
    }
    counts = Counter(num for num, _ in shapes.values())
    num_nics = max(counts, key=lambda num: (counts[num], num))
    rates = Counter(
        port.bytes_per_s
        for ports in hosts.values()
        for port in ports
        if port.bytes_per_s is not None
    )
    rate = max(rates, key=lambda rate: (rates[rate], rate)) if rates else None
    for num, count in sorted(counts.items()):
        if num != num_nics:
            odd = switch_list(host for host, shape in shapes.items() if shape[0] == num)
            remarks.add(
                f"{count} of {len(hosts)} hosts have {num} linked ports, most have {num_nics}: "
                f"{odd}"
            )
    for other, count in sorted(rates.items()):
        if rate is not None and other != rate:
            remarks.add(
                f"{count} ports of hosts run at {format_rate(other, 'B/s')}, most at "
                f"{format_rate(rate, 'B/s')}"
            )
    return UsualHost(num_nics, rate)


def _ports_of(subnet: Subnet, remarks: Remarks) -> dict[str, list[HostPort]]:
    """Return the ports on switches of every adapter that may be in a host."""
    ports: dict[str, list[HostPort]] = {}
    left_out: Counter[str] = Counter()
    aggregation: set[str] = set()
    for (one, other), rate in subnet.rates.items():
        for here, there in ((one, other), (other, one)):
            if here[0].startswith("R-"):
                left_out["a router: other subnets are not in the text"] += 1
            elif here[0].startswith("H-"):
                if _AGGREGATION.search(subnet.names[here[0]]):
                    aggregation.add(here[0])
                elif there[0].startswith("S-"):
                    ports.setdefault(here[0], []).append(HostPort(*there, rate))
                else:
                    left_out["an adapter linked to no switch"] += 1
    if aggregation:
        remarks.add(
            f"{len(aggregation)} aggregation nodes are no hosts: the switches can reduce (SHARP)"
        )
    for what, count in left_out.items():
        remarks.add(f"{count} port(s) of {what}: left out")
    unlinked = [node for node in subnet.lines if node.startswith("H-") and node not in ports]
    unlinked = [node for node in unlinked if node not in aggregation]
    if unlinked:
        remarks.add(
            f"{len(unlinked)} adapter(s) with no link to a switch: left out, first "
            f"{subnet.names[unlinked[0]]!r}",
            subnet.lines[unlinked[0]],
        )
    return ports


def _host_name(description: str) -> str | None:
    """Return the host of ``host mlx5_0``, ``'host HCA-1'`` or ``host``; None for a product.

    >>> _host_name("a08-nd-04-c01 mlx5_5"), _host_name("MT4129 ConnectX7   Mellanox Technologies")
    ('a08-nd-04-c01', None)
    """
    text = description.strip().strip("'").strip()
    return None if _PRODUCT.search(text) else text.split()[0]


def _ambiguous(
    subnet: Subnet, ports: Mapping[str, Sequence[HostPort]], remarks: Remarks
) -> frozenset[str]:
    """Return names that several hosts must share: two adapters of one device name."""
    labels = Counter(subnet.names[adapter].strip("' ") for adapter in ports)
    shared = {
        host
        for label, count in labels.items()
        if count > 1 and len(label.split()) > 1 and (host := _host_name(label)) is not None
    }
    for host in sorted(shared):
        remarks.add(f"several adapters answer as one device of {host!r}: the name tells nothing")
    return frozenset(shared)


def _rails_of(hosts: Mapping[str, Sequence[HostPort]]) -> dict[str, tuple[str, ...]]:
    """Return leaf to the leaves that most hosts on it hang on, where each has one port a leaf."""
    sets: dict[str, Counter[tuple[str, ...]]] = {}
    for ports in hosts.values():
        leaves = tuple(sorted({port.switch for port in ports}))
        if len(leaves) == len(ports):
            for leaf in leaves:
                sets.setdefault(leaf, Counter())[leaves] += 1
    return {
        leaf: max(found, key=lambda leaves: (found[leaves], leaves)) for leaf, found in sets.items()
    }


def _unnamed_hosts(
    adapters: Sequence[str],
    ports: Mapping[str, Sequence[HostPort]],
    rails: Mapping[str, tuple[str, ...]],
) -> Iterator[tuple[str, list[HostPort]]]:
    """Yield a name (the first adapter's GUID) and the ports of every host without a name."""
    waiting: dict[tuple[str, ...], dict[str, list[tuple[int, str]]]] = {}
    for adapter in adapters:
        first = ports[adapter][0]
        if len(ports[adapter]) > 1 or first.switch not in rails:
            yield adapter, list(ports[adapter])
            continue
        by_leaf = waiting.setdefault(rails[first.switch], {})
        by_leaf.setdefault(first.switch, []).append((first.switch_port, adapter))
    for by_leaf in waiting.values():
        columns = [sorted(found) for found in by_leaf.values()]
        for row in range(max(map(len, columns))):
            wired = [column[row][1] for column in columns if row < len(column)]
            yield min(wired), [port for adapter in wired for port in ports[adapter]]
