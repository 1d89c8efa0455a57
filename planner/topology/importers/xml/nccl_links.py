"""NVLink and xGMI of an NCCL dump: who is joined to whom by how many links.

A ``<nvlink>`` of a GPU names the bus id of what is at the other end and its PCI class. Two GPUs
name each other, so a pair of GPUs is counted once; NVSwitches and CPUs have no list of their own.
What NCCL assumes is assumed here: a far end that the driver hides is an NVSwitch (its
src/graph/xml.cc), and a far end of class 0x068001 is the NVLink port of the CPU (POWER).
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from planner.topology.importers.dump import FoundPart, PeerLink, Remarks
from planner.topology.importers.xml.pci import bus_key, pci_kind
from planner.topology.importers.xml.reading import Element, whole_number

__all__ = ["FoundGpu", "FoundLinks", "find_links", "has_switch_links"]

# NVLinks of one GPU: 18 to 36 (Rubin); xGMI links of one: 8. More is no count.
_MAX_LINKS: Final = 144

# "fffffff:ffff:ff" and "fffffff:ff:ff.0": not visible to the driver of this machine.
_HIDDEN: Final = re.compile(r"f{4,8}:f{2,4}:f{2}(\.[0-9a-f])?")

Kind = Literal["nvlink", "xgmi"]
_KINDS: Final[dict[str, Kind]] = {"nvlink": "nvlink", "xgmi": "xgmi"}


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A GPU, its ``<gpu>`` element if the dump has one, and the CPU above it."""

    part: FoundPart
    element: Element | None
    cpu: str


@dataclass(slots=True)
class FoundLinks:
    """What the GPUs' lists say."""

    links: list[PeerLink] = field(default_factory=list)
    switches: list[FoundPart] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Ends:
    """Links as their near ends list them; a count of None is unreadable."""

    counts: dict[tuple[str, str, Kind], int | None] = field(default_factory=dict)
    lines: dict[tuple[str, str, Kind], int] = field(default_factory=dict)
    to_itself: Counter[str] = field(default_factory=Counter)
    to_absent: Counter[str] = field(default_factory=Counter)

    def add(self, near: str, far: str, kind: Kind, count: int | None, line: int) -> None:
        """Add links of one entry to those of the same two ends."""
        key = (near, far, kind)
        before = self.counts.get(key, 0)
        self.counts[key] = None if count is None or before is None else before + count
        self.lines.setdefault(key, line)


def has_switch_links(host: Sequence[Element]) -> bool:
    """Return whether NVLinks of any GPU below these elements lead to an NVSwitch."""
    return any(
        link.tag == "nvlink" and _is_switch(link) for element in host for link in element.walk()
    )


def find_links(gpus: Sequence[FoundGpu], others: Collection[str], remarks: Remarks) -> FoundLinks:
    """Return the links of the GPUs of one host, and the NVSwitches at their ends.

    ``others`` are the names of the host's other parts, none of which can be an NVSwitch.
    """
    found = FoundLinks()
    by_key = {bus_key(gpu.part.name): gpu.part.name for gpu in gpus}
    switches: dict[str, FoundPart] = {}
    to_gpus, to_others = _Ends(), _Ends()
    for gpu in gpus:
        for link in gpu.element.children if gpu.element else ():
            if link.tag not in _KINDS:
                continue
            kind, count = _KINDS[link.tag], _count(link, remarks)
            target = link.get("target").strip()
            far = by_key.get(bus_key(target))
            if count == 0:
                continue
            if far == gpu.part.name:
                to_gpus.to_itself[far] += count or 0
            elif far is not None:
                to_gpus.add(gpu.part.name, far, kind, count, link.line)
            elif _is_cpu(link):
                to_others.add(gpu.part.name, gpu.cpu, kind, count, link.line)
            elif _is_switch(link) and target and target not in others:
                switch = switches.setdefault(
                    bus_key(target), FoundPart(target, "nvswitch", line=link.line)
                )
                to_others.add(gpu.part.name, switch.name, kind, count, link.line)
            else:
                to_gpus.to_absent[gpu.part.name] += count or 0
    found.links = [*_both_ways(to_gpus, remarks), *_one_way(to_others)]
    found.switches = list(switches.values())
    _say_what_is_lost(to_gpus, found, remarks)
    if any(_HIDDEN.fullmatch(switch.name.lower()) for switch in found.switches):
        found.assumptions.append(
            "the far ends of NVLinks are hidden from this machine; as NCCL does, they are taken "
            "for one NVSwitch that joins all GPUs"
        )
    return found


def _is_cpu(link: Element) -> bool:
    return link.get("tclass").strip().lower().removeprefix("0x") == "068001"


def _is_switch(link: Element) -> bool:
    tclass = link.get("tclass").strip()
    return not tclass or (pci_kind(tclass, "") == "nvswitch" and not _is_cpu(link))


def _count(link: Element, remarks: Remarks) -> int | None:
    """Return the number of parallel links; None if it is missing or no such number."""
    count = whole_number(link.get("count"), 0, _MAX_LINKS)
    if count is None:
        remarks.add(
            f"<{link.tag}> has count={link.get('count')[:20]!r}, no number from 0 to "
            f"{_MAX_LINKS}: the number of links is left open",
            link.line,
        )
    return count


def _both_ways(ends: _Ends, remarks: Remarks) -> list[PeerLink]:
    """Return the links between GPUs, each pair once; both ends list it, and should agree."""
    links = []
    for (near, far, kind), count in ends.counts.items():
        if (far, near, kind) not in ends.counts:
            remarks.add(
                f"{near} lists {kind} to {far}, {far} none to {near}: taken as {near} says",
                ends.lines[near, far, kind],
            )
        elif near > far:
            continue
        elif count != (back := ends.counts[far, near, kind]):
            known = [value for value in (count, back) if value is not None]
            count = min(known)
            remarks.add(
                f"{near} and {far} count the {kind} links between them differently; "
                f"the smaller is taken: {count}",
                ends.lines[near, far, kind],
            )
        links.append(PeerLink(near, far, kind, count, line=ends.lines[near, far, kind]))
    return links


def _one_way(ends: _Ends) -> list[PeerLink]:
    return [
        PeerLink(near, far, kind, count, line=ends.lines[near, far, kind])
        for (near, far, kind), count in ends.counts.items()
    ]


def _say_what_is_lost(ends: _Ends, found: FoundLinks, remarks: Remarks) -> None:
    if ends.to_itself:
        name, count = next(iter(ends.to_itself.items()))
        found.assumptions.append(
            f"the NVLinks of {len(ends.to_itself)} GPUs name the GPU itself as their far end "
            f"({name}: {count} links), as virtual machines do that hide the peer; planned without "
            "these links: add the pairs by hand if you know them"
        )
    for name, count in ends.to_absent.items():
        remarks.add(f"{name} has {count} links to what the dump does not show: left out")
