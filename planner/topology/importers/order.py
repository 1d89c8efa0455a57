"""In which order the GPUs of a node are listed, so that whatever joins them joins a row of them.

``planner.topology.reach`` takes levels from the inside out: NVLink islands, then what is behind
one PCIe switch, then what is on one CPU. A group of a level must be consecutive ranks. Machines
number their GPUs by PCI bus id, which often, but not always, agrees.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from planner.hardware.gpus import GpuModel
from planner.topology.importers.dump import FoundPart
from planner.topology.importers.edges import Edge
from planner.topology.importers.peers import groups_of

__all__ = ["gpu_order", "order_remark", "root_of"]

_VISIBLE_DEVICES: Final = {
    "nccl": "CUDA_VISIBLE_DEVICES",
    "rccl": "HIP_VISIBLE_DEVICES",
    "hccl": "ASCEND_RT_VISIBLE_DEVICES",
    "oneccl": "ZE_AFFINITY_MASK",
}


def gpu_order(
    parts: Mapping[str, FoundPart], edges: Sequence[Edge], switches: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the GPUs, groups consecutive, else as they are in ``parts``.

    Args:
        parts: Of the node by name, those that are left out as well.
        edges: Links between GPUs and to NVSwitches.
        switches: Names of the NVSwitches.
    """
    gpus = [name for name, part in parts.items() if part.kind == "gpu"]
    joined = [(edge.a, edge.b) for edge in edges if edge.kind in ("nvlink", "xgmi")]
    behind = [(name, top) for name in gpus if (top := _top_switch(parts, name)) is not None]
    on_cpu = [(name, root_of(parts, name)) for name in gpus]
    everything = (*switches, *parts)
    rank = {name: number for number, name in enumerate(gpus)}
    keys: dict[str, list[int]] = {name: [number] for name, number in rank.items()}
    pairs: list[tuple[str, str]] = []
    for more in (joined, behind, on_cpu):
        pairs += more
        for group in groups_of(everything, pairs):
            members = [name for name in group if name in rank]
            for name in members:
                keys[name].insert(0, min(rank[member] for member in members))
    return tuple(sorted(gpus, key=lambda name: keys[name]))


def order_remark(order: Sequence[str], found: Sequence[str], model: GpuModel) -> str | None:
    """Return what to do where the order is not the machine's own."""
    numbers = [found.index(name) for name in order]
    if numbers == sorted(numbers):
        return None
    variable = _VISIBLE_DEVICES[model.library]
    return (
        "GPUs are listed so that those which share links, a PCIe switch or a CPU follow each "
        f"other; local ranks agree with {variable}={','.join(map(str, numbers))}"
    )


def root_of(parts: Mapping[str, FoundPart], name: str) -> str:
    """Return the name of the CPU that a part hangs on, or of the outermost part."""
    return _way_up(parts, name)[-1]


def _top_switch(parts: Mapping[str, FoundPart], name: str) -> str | None:
    above = [part for part in _way_up(parts, name)[1:] if parts[part].kind == "pcie_switch"]
    return above[-1] if above else None


def _way_up(parts: Mapping[str, FoundPart], name: str) -> list[str]:
    way = [name]
    while (parent := parts[way[-1]].parent) is not None:
        way.append(parent)
    return way
