"""What ``rocm-smi --showtopo`` and ``amd-smi topology`` say of a node, in whatever table form.

Both print what the Linux driver (drivers/gpu/drm/amd/amdkfd/kfd_crat.c and kfd_topology.c) keeps
of the links between GPUs:

- Weight of an XGMI pair: 15 for each hop, so 15 is a direct link and 30 is two hops over a third
  GPU. 13 is the inside of one package (partitions of one GPU), 41 = 13 + 15 + 13 is partitions of
  two packages that a link joins. 0 is printed where the driver does not say.
- Weight of a PCIe pair: 20 for each GPU to its CPU, and between the CPUs their NUMA distance on
  top. So 40 is one CPU, more is two. PCIe switches are not in it.
- Hops: 1 for every XGMI pair, direct or not (ROCm/rocm-systems issue 5763). Not used.
- Bandwidth "min-max" in MB/s, one direction: one link and all links of the pair, so max / min is
  their number; max is 0 for a pair that is not direct. Drivers before 2025 print 50000 for a link
  of every GPU model (a constant, 16 lanes of 25 GT/s), which therefore says nothing of the rate.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from planner.topology.importers.dump import NodeDump, PeerLink, Remarks, TopologyTextError
from planner.topology.importers.smi.matrix import (
    HOST,
    SYSTEM,
    Device,
    check_number_of_devices,
    place,
)
from planner.topology.importers.smi.printed_models import printed_models

__all__ = ["PairFacts", "XgmiNode", "node_dump"]

_HOP: Final = 15
_INSIDE_PACKAGE: Final = 13
_BETWEEN_PARTITIONS: Final = 2 * _INSIDE_PACKAGE + _HOP
_ONE_CPU: Final = 40
_CONSTANT_MBYTES_PER_S: Final = 50_000
_MAX_LINKS: Final = 16
_MAX_WEIGHT: Final = 10_000
_BANDWIDTH: Final = re.compile(r"(\d{1,8})-(\d{1,8})")
_MODEL_WITH_CPU: Final = re.compile(r"\bMI300A\b")


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What the cells of two GPUs say; None where they do not."""

    link: Literal["XGMI", "PCIE"] | None = None
    weight: int | None = None
    bandwidth: str | None = None


@dataclass(slots=True)
class XgmiNode:
    """Cells of one node by name of row and column, as printed, per table.

    Attributes:
        gpus: Names in order, with the line of each.
        numa: NUMA node of a GPU, by name.
        weights: Of pairs of names.
        types: Of pairs of names: XGMI, PCIE and what is neither.
        bandwidths: Of pairs of names.
    """

    gpus: dict[str, int | None] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)
    weights: dict[tuple[str, str], str] = field(default_factory=dict)
    types: dict[tuple[str, str], str] = field(default_factory=dict)
    bandwidths: dict[tuple[str, str], str] = field(default_factory=dict)


def node_dump(
    node: XgmiNode, *, format_: str, text: str, source: str, remarks: Remarks
) -> NodeDump:
    """Return the parts and XGMI links of a node.

    Args:
        node: What the tables say.
        format_: As the command line names it.
        text: The whole of it: names the GPUs, if anything does.
        source: What to call it in messages.
        remarks: Repairs are added.

    Raises:
        TopologyTextError: No GPU, too many, or nothing said of most pairs.
    """
    check_number_of_devices(len(node.gpus), 0, source=source)
    models = printed_models(text.split("\n"))
    is_coherent = _MODEL_WITH_CPU.search(text) is not None
    devices = [
        Device(
            name,
            "gpu",
            line,
            node.numa.get(name),
            model="MI300A" if is_coherent else models.get(number, models.get(-1)),
            is_coherent=is_coherent,
        )
        for number, (name, line) in enumerate(node.gpus.items())
    ]
    facts = _facts(node, devices, source=source, remarks=remarks)
    assumptions: list[str] = []
    links = _links(devices, facts, assumptions=assumptions, remarks=remarks)
    distances = np.zeros((len(devices), len(devices)), dtype=np.int8)
    for (a, b), fact in facts.items():
        if fact.link == "PCIE" and fact.weight:
            distances[a, b] = distances[b, a] = HOST if fact.weight <= _ONE_CPU else SYSTEM
    placement = place(devices, distances, source=source, remarks=remarks)
    if is_coherent:
        assumptions.append("the GPUs share a package with their CPU, because the text says MI300A")
    else:
        assumptions.append(
            "GPUs hang on their CPU directly: the text says nothing of PCIe switches and NICs"
        )
    return NodeDump(
        format_,
        placement.parts,
        tuple(links),
        remarks.all(),
        (*assumptions, *placement.assumptions),
    )


def _facts(
    node: XgmiNode, devices: Sequence[Device], *, source: str, remarks: Remarks
) -> dict[tuple[int, int], PairFacts]:
    """Return what is said of each pair (a < b), from either of its cells."""
    facts: dict[tuple[int, int], PairFacts] = {}
    for b in range(len(devices)):
        for a in range(b):
            fact = _fact(node, devices[a], devices[b], remarks=remarks)
            if fact.link is not None:
                facts[a, b] = fact
    num_pairs = len(devices) * (len(devices) - 1) // 2
    if len(facts) * 2 < num_pairs:
        raise TopologyTextError(
            f"says of {len(facts)} of {num_pairs} pairs of its {len(devices)} GPUs whether XGMI or "
            "PCIe joins them; paste the whole output, with the weights and link types",
            source=source,
        )
    if len(facts) < num_pairs:
        remarks.add(f"nothing is said of {num_pairs - len(facts)} of {num_pairs} pairs of GPUs")
    return facts


def _fact(node: XgmiNode, first: Device, second: Device, *, remarks: Remarks) -> PairFacts:
    """Read one pair; of two weights that differ the larger counts, of two types PCIe."""
    both = ((first.name, second.name), (second.name, first.name))
    types = [node.types[pair].upper() for pair in both if pair in node.types]
    weights = [node.weights[pair] for pair in both if pair in node.weights]
    for values in (types, weights):
        if len(set(values)) > 1:
            remarks.add(
                f"{first.name} and {second.name} read {values[0]} one way and {values[1]} the "
                "other: taken as the farther",
                first.line,
            )
    numbers = [int(text) for text in weights if text.isdecimal() and len(text) < 6]
    weight = max((number for number in numbers if number < _MAX_WEIGHT), default=None)
    link = _link_of(types, weight)
    bandwidth = next((node.bandwidths[pair] for pair in both if pair in node.bandwidths), None)
    return PairFacts(link, weight, bandwidth)


def _link_of(types: Sequence[str], weight: int | None) -> Literal["XGMI", "PCIE"] | None:
    """Return the kind of link; by weight where there is no type (PCIe starts at 40)."""
    if "PCIE" in types:
        return "PCIE"
    if "XGMI" in types:
        return "XGMI"
    if not weight:
        return None
    return "XGMI" if weight < _ONE_CPU or weight == _BETWEEN_PARTITIONS else "PCIE"


def _links(
    devices: Sequence[Device],
    facts: Mapping[tuple[int, int], PairFacts],
    *,
    assumptions: list[str],
    remarks: Remarks,
) -> list[PeerLink]:
    """Return the direct XGMI links."""
    links: list[PeerLink] = []
    without_weight = indirect = 0
    for (a, b), fact in sorted(facts.items()):
        if fact.link != "XGMI":
            continue
        low, high = _bandwidth(fact)
        is_direct, is_known = _directness(fact, low, high)
        without_weight += not is_known
        indirect += not is_direct
        if is_direct:
            links.append(_link(devices[a], devices[b], fact, low, high, remarks=remarks))
    if without_weight:
        assumptions.append(
            f"{without_weight} XGMI pairs without a weight are taken as direct links: hops do not "
            "tell"
        )
    if indirect:
        remarks.add(f"{indirect} pairs of GPUs reach each other by XGMI over a third GPU: no link")
    if any(fact.weight == _BETWEEN_PARTITIONS for fact in facts.values()):
        assumptions.append(
            "pairs of weight 41 are partitions of two packages and share the one link between them"
        )
    return links


def _bandwidth(fact: PairFacts) -> tuple[int, int]:
    """Return the rates of one and of all links in MB/s; zeros if not printed."""
    found = _BANDWIDTH.fullmatch(fact.bandwidth or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _directness(fact: PairFacts, low: int, high: int) -> tuple[bool, bool]:
    """Return whether an XGMI pair has a link of its own, and whether the text says so."""
    if fact.weight:
        return fact.weight in (_HOP, _INSIDE_PACKAGE, _BETWEEN_PARTITIONS), True
    return not (low and not high), bool(low)


def _link(
    first: Device, second: Device, fact: PairFacts, low: int, high: int, *, remarks: Remarks
) -> PeerLink:
    count, rest = divmod(high, low) if low and fact.weight != _INSIDE_PACKAGE else (0, 0)
    is_counted = 1 <= count <= _MAX_LINKS and rest == 0
    rate = high * 1e6 if is_counted and low != _CONSTANT_MBYTES_PER_S else None
    if is_counted and rate is None:
        remarks.add(
            "50000 MB/s a link is what older drivers print for every GPU: taken for the number of "
            "links, not for their rate"
        )
    return PeerLink(
        first.name,
        second.name,
        "xgmi",
        count if is_counted else None,
        bytes_per_s=rate,
        line=first.line,
    )
