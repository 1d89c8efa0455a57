"""``ibnetdiscover``: every switch and adapter of an InfiniBand subnet, with every link.

A record begins with ``Switch``, ``Ca`` or ``Rt``, then one line a port says what is at its other
end; both ends of a link have a line. The format is described in the rdma-core manual page
ibnetdiscover(8), "TOPOLOGY FILE FORMAT"; output of the option -g (chassis headings, ``[ext 3]``)
is read too. Who of the adapters is a host, and which switches make a stage, is decided in
``subnet_hosts`` and ``subnet_tiers``.

Rates are data rates, lanes times the rate of one: SDR 2 Gbit/s, DDR 4, QDR 8 (8b/10b coding
taken off), FDR10 10, FDR 13.64, EDR 25, HDR 50, NDR 100, XDR 200 (InfiniBand Trade Association,
roadmap).
"""

import re
from typing import Final

from planner.topology.importers.dump import FabricDump, Remarks, TopologyTextError, checked_text
from planner.topology.importers.fabric.subnet_hosts import Subnet, modal_host, named_hosts
from planner.topology.importers.fabric.subnet_tiers import subnet_tiers

__all__ = ["read_ibnetdiscover"]

_MAX_LINE_CHARS: Final = 4096
_RECORD = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([SHR]-[0-9a-fA-F]{1,16})"\s*#\s*"([^"]*)')
_PORT = re.compile(
    r"\[(\d{1,4})\](?:\[ext \d+\])?\s*(?:\([0-9a-fA-F]*\))?\s*"
    r'"([SHR]-[0-9a-fA-F]{1,16})"\[(\d{1,4})\](?:\[ext \d+\])?(?:\([0-9a-fA-F]*\))?\s*#'
    r'[^"]*"([^"]*)"(?:.*?\s(\d{1,2})x([A-Z]{3}\d*)\b)?'
)
_SYSTEM = re.compile(r"sysimgguid=0x([0-9a-fA-F]{1,16})\s*$")
# What carries nothing that is used here: ids of the hardware, headings of the option -g.
_KNOWN = re.compile(
    r"(?:vendid|devid|switchguid|caguid|rtguid|sysimgguid)=|Chassis\b|Non-Chassis\b|Spine\b|Line\b"
)
_LANE_BIT_PER_S: Final = {
    "SDR": 2e9,
    "DDR": 4e9,
    "QDR": 8e9,
    "FDR10": 10e9,
    "FDR": 13.64e9,
    "EDR": 25e9,
    "HDR": 50e9,
    "NDR": 100e9,
    "XDR": 200e9,
}


def read_ibnetdiscover(text: str | bytes, source: str) -> FabricDump:
    """Return hosts, their adapters' rate and the stages of switches of one subnet.

    Raises:
        TopologyTextError: The text is no output of ibnetdiscover, or has no host on a switch.
    """
    remarks = Remarks()
    subnet = _subnet(checked_text(text, source=source), remarks)
    if not any(node.startswith("S-") for node in subnet.names):
        raise TopologyTextError(
            'has no record of a switch (Switch 65 "S-..." # ...); paste the output of '
            "ibnetdiscover without -l, -p or -S",
            source=source,
        )
    hosts, assumptions = named_hosts(subnet, remarks)
    nested, tiers = subnet_tiers(subnet, hosts, remarks)
    if not nested.hosts:
        raise TopologyTextError(
            "has no host on a switch; only switches, or their Ca records are cut off",
            source=source,
        )
    usual = modal_host({host: hosts[host] for host in nested.hosts}, remarks)
    return FabricDump(
        "ibnetdiscover",
        hosts=nested.hosts,
        tiers=tiers,
        kind="infiniband",
        nics_per_host=usual.num_nics,
        nic_bytes_per_s=usual.nic_bytes_per_s,
        remarks=remarks.all(),
        assumptions=assumptions,
    )


def _subnet(text: str, remarks: Remarks) -> Subnet:
    """Read the lines, once."""
    subnet = Subnet()
    node: str | None = None
    system = ""
    prose: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if len(line) > _MAX_LINE_CHARS:
            remarks.add(f"longer than {_MAX_LINE_CHARS:,} characters: left out", number)
        elif port := _PORT.match(line):
            if node is None:
                remarks.add("a port before any switch or adapter: left out", number)
            else:
                _add_link(subnet, node, port, number, remarks)
        elif record := _RECORD.match(line):
            node = record[2][0] + record[2][1:].lower()
            if node in subnet.lines:
                remarks.add(f"{node} has a second record: merged with the first", number)
            subnet.lines.setdefault(node, number)
            subnet.names[node] = record[3].strip()
            if system:
                subnet.systems[node] = system
            system = ""
        elif found := _SYSTEM.match(line):
            system = found[1].lower()
        elif not _KNOWN.match(line):
            # The ports below a cut record would be taken for those of the record before.
            node = None if line[:2] in ("Sw", "Ca", "Rt") else node
            if line.startswith(("Sw", "Ca", "Rt", "[")):
                remarks.add(f"cannot read {line[:60]!r}: left out", number)
            else:
                prose.append((number, line))
    for number, line in prose[:1]:
        what = f"{len(prose)} lines (first {line[:60]!r})" if len(prose) > 1 else repr(line[:60])
        remarks.add(f"cannot read {what}: left out", number)
    return subnet


def _add_link(
    subnet: Subnet, node: str, port: re.Match[str], number: int, remarks: Remarks
) -> None:
    """Note the link that one line of a port says; its other end will say it again."""
    peer = port[2][0] + port[2][1:].lower()
    here, there = (node, int(port[1])), (peer, int(port[3]))
    subnet.names.setdefault(peer, port[4].strip())
    rate = None
    if port[5] is not None:
        lane = _LANE_BIT_PER_S.get(port[6])
        if lane is None:
            remarks.add(f"the rate {port[5]}x{port[6]} is not known: not counted", number)
        else:
            rate = int(port[5]) * lane / 8
    for end, other in ((here, there), (there, here)):
        if subnet.peers.setdefault(end, other) != other:
            remarks.add(f"port {end[1]} of {end[0]} has a second link: the first is kept", number)
            return
    ends = (here, there) if here <= there else (there, here)
    known = subnet.rates.setdefault(ends, rate)
    if known is None:
        subnet.rates[ends] = rate
    elif rate is not None and rate != known:
        remarks.add("the ends of the link disagree about its rate: the lower counts", number)
        subnet.rates[ends] = min(rate, known)
