"""A matrix of PCIe distances between the GPUs and NICs of a node, turned into a tree of parts.

On a clean machine the distances are an ultrametric, because each is the height of the first thing
that two devices have in common:

- PIX: one PCIe switch; the two hang on the same switch.
- PXB: several PCIe switches; their switches (or they themselves) hang on one switch above.
- PHB, NODE: the CPU; both hang on one CPU, by its root ports or by a switch of their own.
- SYS: the link between CPUs. A "CPU" here is a NUMA node: a socket, or a part of one.

Where cells contradict each other (a is near b and b near c, but a is far from c):

- A cell is outvoted by the third devices: each device that is near to exactly one of the two says
  they are far, each that is near to both says they are near; more votes win.
- What then still contradicts is taken as near: two devices behind the switch of a third are behind
  that switch.
- More than a third of all cells in contradiction is no machine: the text is refused.
- SYS between two devices of one NUMA node yields to the NUMA node: some boxes print SYS for all.

Devices whose cells say nothing (NVLink hides the PCIe distance between two GPUs) are joined by what
they have in common with the others, then by NUMA node, then by CPU affinity, and last put on the
CPU of their neighbour unless a SYS cell forbids it; the last two are assumptions and said.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.importers.dump import FoundPart, Remarks, TopologyTextError

__all__ = [
    "HOST",
    "MAX_NICS",
    "MULTIPLE",
    "SINGLE",
    "SYSTEM",
    "UNKNOWN",
    "Device",
    "Placement",
    "check_number_of_devices",
    "is_reserved",
    "place",
]

# Heights of the first common part; NVML names them SINGLE, MULTIPLE, HOSTBRIDGE and NODE, SYSTEM.
UNKNOWN: Final = 0
SINGLE: Final = 1
MULTIPLE: Final = 2
HOST: Final = 3
SYSTEM: Final = 4

_TOGETHER: Final = {
    HOST: "on one CPU",
    MULTIPLE: "behind common switches",
    SINGLE: "behind one switch",
}

MAX_NICS: Final = 256
_MAX_CONTRADICTING: Final = 1 / 3

Distances = NDArray[np.int8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or NIC before it has a place.

    Attributes:
        name: As printed.
        kind: What it is.
        line: Of its row (from 1), None if it has no row.
        numa: NUMA node(s), as printed.
        affinity: CPUs that the calling shell may use near it, as printed.
        model: What the text calls a GPU.
        is_coherent: On its CPU by NVLink-C2C or Infinity Fabric.
    """

    name: str
    kind: Literal["gpu", "nic"]
    line: int | None = None
    numa: str | None = None
    affinity: str | None = None
    model: str | None = None
    is_coherent: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The tree, and what was guessed for it."""

    parts: tuple[FoundPart, ...]
    assumptions: tuple[str, ...]


def check_number_of_devices(
    num_gpus: int, num_nics: int, *, source: str, line: int | None = None
) -> None:
    """Raise unless a node can have so many GPUs and NICs.

    Raises:
        TopologyTextError: There is no GPU, or more GPUs or NICs than any node has.
    """
    if num_gpus == 0:
        raise TopologyTextError(
            "lists no GPU; paste the whole output of the command", source=source, line=line
        )
    if num_gpus > MAX_GPUS_PER_NODE or num_nics > MAX_NICS:
        raise TopologyTextError(
            f"lists {num_gpus} GPUs and {num_nics} NICs; one node has at most "
            f"{MAX_GPUS_PER_NODE} and {MAX_NICS}: paste the listing of one node",
            source=source,
            line=line,
        )


def is_reserved(name: str) -> bool:
    """Tell whether ``place`` may give this name to a CPU or switch."""
    return re.fullmatch(r"(?:cpu|switch)\d+", name) is not None


def place(
    devices: Sequence[Device], distances: Distances, *, source: str, remarks: Remarks
) -> Placement:
    """Return the parts of a node: CPUs, switches, GPUs, NICs, parents before children.

    Args:
        devices: GPUs in the order of their numbers, then NICs.
        distances: Symmetric, ``[len(devices), len(devices)]``; ``UNKNOWN`` where no cell says.
        source: Of the text, for messages.
        remarks: Repairs are added.

    Raises:
        TopologyTextError: Too many cells contradict each other, or a device has the name of a CPU.
    """
    for device in devices:
        if is_reserved(device.name):
            raise TopologyTextError(
                f"has a device called {device.name}; call it otherwise",
                source=source,
                line=device.line,
            )
    everywhere = np.zeros(len(devices), dtype=np.int64)
    by_height: list[Labels] = []
    num_contradictions = 0
    for height in (HOST, MULTIPLE, SINGLE):
        within = by_height[-1] if by_height else everywhere
        labels, num_bad = _sets(devices, distances, height=height, within=within, remarks=remarks)
        by_height.append(labels)
        num_contradictions += num_bad
    num_known = int(np.count_nonzero(np.triu(distances)))
    if num_contradictions > num_known * _MAX_CONTRADICTING:
        raise TopologyTextError(
            f"{num_contradictions} of {num_known} cells contradict the others (a near b, b near c, "
            "a far from c): this is no matrix of one machine; run the command again",
            source=source,
        )
    hosts, assumptions = _cpus(devices, distances, by_height[0], remarks=remarks)
    return Placement(_parts(devices, hosts, by_height[1], by_height[2]), tuple(assumptions))


def _sets(
    devices: Sequence[Device],
    distances: Distances,
    *,
    height: int,
    within: Labels,
    remarks: Remarks,
) -> tuple[Labels, int]:
    """Return the set of each device at ``height``, and how many cells deny those sets."""
    same = within[:, None] == within[None, :]
    near = (distances > UNKNOWN) & (distances <= height) & same
    far = (distances > UNKNOWN) & ~near
    labels = _components(near)
    denied = far & same & (labels[:, None] == labels[None, :])
    if not denied.any():
        return labels, 0
    for_near, for_far = _votes(near, far)
    outvoted = (near & (for_far > for_near)) | (far & same & (for_near > for_far))
    labels = _components(near ^ outvoted)
    together = labels[:, None] == labels[None, :]
    wrong = np.triu((far & same & together) | (near & ~together))
    for is_near in (True, False):
        cells = np.argwhere(wrong & (together == is_near))
        for a, b in cells[:1]:
            more = f" (and {len(cells) - 1} more such cells)" if len(cells) > 1 else ""
            remarks.add(
                f"the cell of {devices[a].name} and {devices[b].name}{more} is outvoted by their "
                f"cells to the others: taken as {'' if is_near else 'not '}{_TOGETHER[height]}",
                devices[a].line,
            )
    return labels, int(np.count_nonzero(wrong))


def _votes(
    near: NDArray[np.bool_], far: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count for each pair the third devices that call them near and far."""
    n, f = near.astype(np.float64), far.astype(np.float64)
    return n @ n, n @ f + f @ n


def _components(near: NDArray[np.bool_]) -> Labels:
    """Label each device with the first device that it is joined to, over any number of others."""
    labels = np.full(len(near), -1, dtype=np.int64)
    for first in range(len(near)):
        if labels[first] >= 0:
            continue
        waiting = [first]
        labels[first] = first
        while waiting:
            reached = np.flatnonzero(near[waiting.pop()] & (labels < 0))
            labels[reached] = first
            waiting.extend(int(index) for index in reached)
    return labels


def _cpus(
    devices: Sequence[Device], distances: Distances, near: Labels, *, remarks: Remarks
) -> tuple[Labels, list[str]]:
    """Return the CPU of each device, from the sets that cells join, and what was assumed."""
    labels = near.copy()
    assumptions: list[str] = []
    _join(labels, [device.numa for device in devices])
    is_denied = _say_where_numa_wins(devices, distances, near, labels, remarks=remarks)
    _say_where_numa_differs(devices, labels, remarks=remarks)
    has_numa = {int(labels[i]) for i, device in enumerate(devices) if device.numa is not None}
    affinities = [
        None if int(labels[i]) in has_numa else device.affinity for i, device in enumerate(devices)
    ]
    allowed = _no_cell_says_system(distances, labels)
    if len(set(affinities) - {None}) and _join(labels, affinities, allowed=allowed):
        assumptions.append(
            "GPUs with the same CPU affinity are on one CPU unless their cell says SYS (the text "
            "has no NUMA node for them; the affinity is what the shell that ran the command may "
            "use)"
        )
    loose = _join_loose_gpus(devices, labels, allowed=allowed)
    if loose:
        assumptions.append(
            f"the text does not say on which CPU {_listed(loose)} hang: each is put on the CPU of "
            "its neighbour unless a cell forbids it"
        )
    is_blind = is_denied or any(device.is_coherent for device in devices)
    if is_blind and _spread_nics(devices, labels):
        assumptions.append(
            "the NICs are spread evenly over the CPUs in the order of the text, because it calls "
            "every one of them far from every GPU (SYS)"
        )
    return labels, assumptions


def _join(
    labels: Labels,
    keys: Sequence[Hashable | None],
    *,
    allowed: Callable[[int, int], bool] = lambda kept, joined: True,
) -> bool:
    """Join the sets of devices with one key, in order; return whether any were joined."""
    sets_of_key: dict[Hashable, list[int]] = {}
    is_joined = False
    for index, key in enumerate(keys):
        if key is None:
            continue
        sets = sets_of_key.setdefault(key, [])
        label = int(labels[index])
        if label in sets:
            continue
        kept = next((other for other in sets if allowed(other, label)), None)
        if kept is None:
            sets.append(label)
            continue
        labels[labels == label] = kept
        for others in sets_of_key.values():
            others[:] = list(dict.fromkeys(kept if other == label else other for other in others))
        is_joined = True
    return is_joined


def _no_cell_says_system(distances: Distances, labels: Labels) -> Callable[[int, int], bool]:
    def is_allowed(kept: int, joined: int) -> bool:
        between = distances[np.ix_(labels == kept, labels == joined)]
        return not bool((between == SYSTEM).any())

    return is_allowed


def _join_loose_gpus(
    devices: Sequence[Device], labels: Labels, *, allowed: Callable[[int, int], bool]
) -> list[str]:
    """Join sets of GPUs that no key places to a neighbour's; return the GPUs concerned."""
    gpus = [index for index, device in enumerate(devices) if device.kind == "gpu"]
    placed = {int(labels[i]) for i, device in enumerate(devices) if device.numa or device.affinity}
    loose = [index for index in gpus if int(labels[index]) not in placed]
    is_joined = False
    for index in loose:
        position, label = gpus.index(index), int(labels[index])
        for other in (*reversed(gpus[:position]), *gpus[position + 1 :]):
            kept = int(labels[other])
            if kept != label and allowed(kept, label):
                labels[labels == label] = kept
                is_joined = True
                break
    return [devices[index].name for index in loose] if is_joined else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} .. {names[-1]}"


def _say_where_numa_wins(
    devices: Sequence[Device],
    distances: Distances,
    near: Labels,
    labels: Labels,
    *,
    remarks: Remarks,
) -> bool:
    together = labels[:, None] == labels[None, :]
    apart_by_cells = near[:, None] != near[None, :]
    denied = np.argwhere(np.triu((distances == SYSTEM) & together & apart_by_cells))
    for a, b in denied[:1]:
        numa = devices[a].numa or devices[b].numa
        remarks.add(
            f"{devices[a].name} and {devices[b].name} read SYS though NUMA node {numa} has both "
            f"({len(denied)} such cells): taken as on one CPU",
            devices[a].line,
        )
    return len(denied) > 0


def _say_where_numa_differs(devices: Sequence[Device], labels: Labels, *, remarks: Remarks) -> None:
    first_of: dict[int, Device] = {}
    for label, device in zip(labels, devices, strict=True):
        if device.numa is None:
            continue
        first = first_of.setdefault(int(label), device)
        if first.numa != device.numa:
            remarks.add(
                f"{device.name} has NUMA node {device.numa} and {first.name} {first.numa}, though "
                "the cells put both on one CPU: taken as on one CPU",
                device.line,
            )


def _spread_nics(devices: Sequence[Device], labels: Labels) -> bool:
    """Put sets of NICs alone on the CPUs of GPUs in equal shares, if no NIC is near any GPU."""
    of_gpus = [int(labels[i]) for i, device in enumerate(devices) if device.kind == "gpu"]
    of_nics = [int(labels[i]) for i, device in enumerate(devices) if device.kind == "nic"]
    cpus, sets = list(dict.fromkeys(of_gpus)), list(dict.fromkeys(of_nics))
    if not sets or set(cpus) & set(sets):
        return False
    for index, label in enumerate(sets):
        labels[labels == label] = cpus[index * len(cpus) // len(sets)]
    return True


def _parts(
    devices: Sequence[Device], hosts: Labels, upper: Labels, lower: Labels
) -> tuple[FoundPart, ...]:
    """Return the tree; a switch for each set of two or more devices that is not all of a larger."""
    cpus: dict[int, FoundPart] = {}
    switches: dict[tuple[int, int], FoundPart] = {}
    leaves: list[FoundPart] = []
    for index, device in enumerate(devices):
        host = int(hosts[index])
        cpu = cpus.setdefault(host, FoundPart(f"cpu{len(cpus)}", "cpu"))
        parent = cpu.name
        size_above = 1 + len(devices)
        for height, labels in ((MULTIPLE, upper), (SINGLE, lower)):
            label = int(labels[index])
            size = int(np.count_nonzero(labels == label))
            if 1 < size < size_above:
                switch = FoundPart(f"switch{len(switches)}", "pcie_switch", parent=parent)
                parent = switches.setdefault((height, label), switch).name
                size_above = size
        leaves.append(
            FoundPart(
                device.name,
                device.kind,
                parent=parent,
                line=device.line,
                model=device.model,
                is_coherent=device.is_coherent,
            )
        )
    return (*cpus.values(), *switches.values(), *leaves)
