"""The CPU parts of an lstopo XML: groups of cores with memory of their own."""

from collections.abc import Iterator, Mapping
from typing import Final

from planner.topology.importers.dump import FoundPart, Remarks
from planner.topology.importers.xml.reading import Element, whole_number

__all__ = ["all_objects", "find_cpus", "first_cpu", "info", "objects"]

_MEMORY: Final = ("NUMANode", "MemCache")
_IO: Final = ("Bridge", "PCIDev", "OSDev", "Misc")


def objects(element: Element) -> list[Element]:
    """Return the objects right below an object."""
    return element.all("object")


def all_objects(element: Element) -> Iterator[Element]:
    """Yield an object and all below, parents first."""
    stack = [element]
    while stack:
        found = stack.pop()
        yield found
        stack.extend(reversed(objects(found)))


def info(element: Element, name: str) -> str:
    """Return the value of an ``<info>`` of an object; empty if it has none."""
    for child in element.children:
        if child.tag == "info" and child.get("name") == name:
            return child.get("value").strip()
    return ""


def find_cpus(machine: Element, remarks: Remarks) -> dict[int, FoundPart]:
    """Return the CPU part of each object that holds cores and memory, by ``id`` of its element.

    Packages, if the XML shows no memory; the machine, if it shows none of those either.
    """
    holders = list(_holders(machine))
    if not holders:
        packages = [e for e in all_objects(machine) if e.get("type") in ("Package", "Socket")]
        holders = [(package, package) for package in packages] or [(machine, machine)]
    model = _model(machine)
    cpus: dict[int, FoundPart] = {}
    taken: set[str] = set()
    for holder, numbered in holders:
        name = f"cpu{whole_number(numbered.get('os_index'), 0, 1 << 20) or 0}"
        if name in taken:
            remarks.add(f"{name} is there twice: the second is renamed", holder.line)
            name = f"{name}@{holder.line}"
        taken.add(name)
        cpus[id(holder)] = FoundPart(name, "cpu", line=holder.line, model=model)
    return cpus


def _model(machine: Element) -> str | None:
    """Return vendor, family and model of the first package that names them, or its name."""
    for element in (machine, *all_objects(machine)):
        numbers = [info(element, f"CPU{key}") for key in ("Vendor", "FamilyNumber", "ModelNumber")]
        if name := " ".join(filter(None, numbers)) or info(element, "CPUModel"):
            return name[:80]
    return None


def _holders(element: Element) -> Iterator[tuple[Element, Element]]:
    """Yield the innermost objects with memory of their own, and the NUMA node that numbers each.

    In hwloc 2 memory is a child of what is near it; in hwloc 1 a NUMANode contains its cores.
    """
    memories = [m for m in _memories(element) if m.get("subtype") != "GPUMemory"]
    below: list[tuple[Element, Element]] = []
    for child in objects(element):
        if child.get("type") not in _IO and (child.get("type") not in _MEMORY or objects(child)):
            below += _holders(child)
    if below:
        yield from below
    elif element.get("type") == "NUMANode":
        yield element, element
    elif memories:
        yield element, min(memories, key=lambda m: whole_number(m.get("os_index"), 0, 1 << 20) or 0)


def _memories(element: Element) -> Iterator[Element]:
    """Yield the NUMA nodes right below an object, through memory-side caches."""
    for child in objects(element):
        if child.get("type") == "NUMANode":
            yield child
        elif child.get("type") == "MemCache":
            yield from _memories(child)


def first_cpu(element: Element, cpus: Mapping[int, FoundPart]) -> str:
    """Return the name of the first CPU part in an object, or of the first of all."""
    inside = (cpus[id(e)].name for e in all_objects(element) if id(e) in cpus)
    return next(inside, next(iter(cpus.values())).name)
