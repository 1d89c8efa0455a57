"""hwloc's XML: ``lstopo --of xml``, versions 2 and 3; version 1 as far as it goes.

One CPU part stands for each group of cores with memory of its own (NUMA node), not for each
package: that is where hwloc hangs host bridges (an EPYC 7401 has four in a package, an EPYC of a
MI250X node too), and it is what NCCL calls a CPU. Memory without cores (of GPUs, CXL) is no CPU.
A host bridge is no switch: its ports go to the CPU on links of their own.

A GPU is a PCI device with an OS device of CUDA, NVML, RSMI, OpenCL or Level Zero, of which one GPU
may have several; where lstopo was built without them, PCI classes must do. Rates of links are
those that lstopo saw: an idle GPU lets its link fall back to the first generation, and such a
rate, slower than the device below, is left open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from planner.topology.importers.dump import (
    FoundPart,
    NodeDump,
    PeerLink,
    Remarks,
    TopologyTextError,
)
from planner.topology.importers.xml.lstopo_cpus import (
    all_objects,
    find_cpus,
    first_cpu,
    info,
    objects,
)
from planner.topology.importers.xml.lstopo_devices import (
    Function,
    find_gpus,
    find_nic_ports,
    gpu_part,
    gpus_in_order,
    link_bytes_per_s,
    pci_function,
)
from planner.topology.importers.xml.lstopo_links import find_matrices
from planner.topology.importers.xml.pci import (
    Branch,
    Device,
    bus_key,
    check_num_gpus,
    hang,
    slowest,
)
from planner.topology.importers.xml.reading import Element, check_root, read_xml, whole_number

__all__ = ["read_lstopo"]

_NO_MATRIX: Final = (
    "the XML has no matrix of NVLinks or xGMI (lstopo needs NVML or RSMI for it): "
    "GPUs are joined by PCIe alone"
)

# Lanes of PCIe 1 and 2 carry 0.25 and 0.5 GB/s; links of later generations are no whole quarters.
_OLD_LANE_BYTES_PER_S: Final = 0.25e9


@dataclass(slots=True)
class _Reading:
    """What is known while a machine is read; objects are known by their place in the text.

    Attributes:
        cpus: CPU part of each object that holds cores and memory, by ``id`` of its element.
        devices: GPUs and NICs, by bus id.
        coherent: Bus ids of GPUs that hang on their CPU, not on PCIe.
        nearest_cpu: CPU part above every bus id.
        below: What hangs on each CPU part.
        named: Part of an object, by "PCIDev:449", "OSDev:802", "Package:3".
        unplaced: Bridges above several CPU parts.
    """

    source: str
    remarks: Remarks
    cpus: dict[int, FoundPart] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    coherent: set[str] = field(default_factory=set)
    nearest_cpu: dict[str, str] = field(default_factory=dict)
    below: dict[str, list[Branch | Device]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)


def read_lstopo(text: str, source: str) -> NodeDump:
    """Return the node of an lstopo XML.

    PCIe parts have their bus ids as names, NICs the names of their OS devices, CPUs are
    ``cpu<NUMA node>``. GPUs are in the order of NVML or RSMI, else of CUDA, else of bus ids.
    lstopo prints no rates of NICs.

    Raises:
        TopologyTextError: It is no such XML, or has no GPU.
    """
    root = read_xml(text, source=source)
    check_root(root, "topology", needed="the output of lstopo --of xml", source=source)
    reading = _Reading(source, Remarks())
    major = _major(root, reading)
    machine = _machine(root, reading)
    reading.cpus = find_cpus(machine, reading.remarks)
    functions = _functions(machine, reading)
    found, by_class = find_gpus(functions, reading.remarks)
    if not found:
        raise TopologyTextError(
            "shows no GPU; run lstopo --of xml --whole-io on the node itself", source=source
        )
    check_num_gpus(len(found), source=source)
    found, numbered = gpus_in_order(found)
    _find_devices(machine, found, functions, major, reading)
    reading.coherent = _coherent(machine, reading)
    _place(machine, None, reading)
    parts = _hung(reading)
    gpus = [_with_cpu(gpu_part(gpu), parts, reading) for gpu in found]
    _name_objects(machine, functions, reading)
    matrices = find_matrices(root, reading.named, reading.remarks)
    switches = _switches(functions, matrices.links)
    return NodeDump(
        format="lstopo",
        parts=(
            *reading.cpus.values(),
            *(part for part in parts.values() if part.kind == "pcie_switch"),
            *gpus,
            *(part for part in parts.values() if part.kind == "nic"),
            *switches,
        ),
        links=matrices.links,
        remarks=reading.remarks.all(),
        assumptions=(
            *by_class,
            *numbered,
            *_say_unplaced(reading),
            *matrices.assumptions,
            *([_NO_MATRIX] if len(gpus) > 1 and not matrices.links else []),
        ),
    )


def _major(root: Element, reading: _Reading) -> int:
    """Return the major version of the format; hwloc 1 wrote none."""
    version = root.get("version")
    if not version:
        reading.remarks.add("written by hwloc 1: read without matrices of links", root.line)
        return 1
    major = whole_number(version.split(".")[0], 1, 99)
    if major is None or major > 3:
        raise TopologyTextError(
            f"version={version[:20]!r} of lstopo's XML is not known; 1, 2 and 3 are: export with "
            "lstopo --of xml --export-xml-flags v2",
            source=reading.source,
            line=root.line,
        )
    return major


def _machine(root: Element, reading: _Reading) -> Element:
    machines = [e for e in root.walk() if e.tag == "object" and e.get("type") == "Machine"]
    if not machines:
        raise TopologyTextError(
            "has no object of type Machine", source=reading.source, line=root.line
        )
    if len(machines) > 1:
        reading.remarks.add(f"has {len(machines)} machines: the first is read", machines[1].line)
    return machines[0]


def _functions(machine: Element, reading: _Reading) -> list[Function]:
    """Return the PCI devices; every bus id is there once."""
    lines: dict[str, int] = {}
    functions = []
    for element in all_objects(machine):
        if element.get("type") not in ("PCIDev", "Bridge"):
            continue
        name = element.get("pci_busid").strip()
        if not name:
            if element.get("type") == "PCIDev":
                raise TopologyTextError(
                    "PCIDev has no pci_busid", source=reading.source, line=element.line
                )
            continue
        if bus_key(name) in lines:
            raise TopologyTextError(
                f"pci_busid {name[:40]!r} is also in line {lines[bus_key(name)]}",
                source=reading.source,
                line=element.line,
            )
        lines[bus_key(name)] = element.line
        if element.get("type") == "PCIDev":
            functions.append(pci_function(element, reading.remarks))
    return functions


def _find_devices(
    machine: Element,
    gpus: Sequence[Function],
    functions: Sequence[Function],
    major: int,
    reading: _Reading,
) -> None:
    """Note GPUs and NICs by bus id; port names are unique."""
    taken = {element.get("pci_busid").strip() for element in all_objects(machine)}
    taken |= {cpu.name for cpu in reading.cpus.values()}
    ports = find_nic_ports(functions, major, reading.remarks)
    for function in functions:
        parts: list[FoundPart] = []
        for part in ports.get(function.name, ()):
            name = part.name
            while name in taken:
                name = f"{name}@{function.name}#{len(parts)}"
            taken.add(name)
            parts.append(replace(part, name=name))
        if parts:
            device = Device(tuple(parts), function.link_bytes_per_s)
            reading.devices[function.name] = device
    for gpu in gpus:
        reading.devices[gpu.name] = Device((gpu_part(gpu),), gpu.link_bytes_per_s)


def _place(element: Element, cpu: str | None, reading: _Reading) -> None:
    """Hang every tree of PCI on the CPU part around it, or on the first below."""
    if id(element) in reading.cpus:
        cpu = reading.cpus[id(element)].name
    children = objects(element)
    has_pci = any(child.get("type") in ("Bridge", "PCIDev") for child in children)
    near = cpu or (first_cpu(element, reading.cpus) if has_pci else "")
    for child in children:
        if child.get("type") not in ("Bridge", "PCIDev"):
            _place(child, cpu, reading)
            continue
        items = _tree(child, reading)
        for inner in all_objects(child):
            reading.nearest_cpu[inner.get("pci_busid").strip()] = near
        if not items:
            continue
        if cpu is None:
            reading.unplaced.append(child.get("pci_busid") or child.get("bridge_pci"))
        reading.below.setdefault(near, []).extend(items)


def _tree(element: Element, reading: _Reading) -> list[Branch | Device]:
    """Return a bridge or device with all below; a host bridge is only what hangs on it."""
    name = element.get("pci_busid").strip()
    below = [item for child in objects(element) for item in _tree(child, reading)]
    if element.get("type") == "PCIDev":
        is_on_pcie = name in reading.devices and name not in reading.coherent
        return [reading.devices[name], *below] if is_on_pcie else below
    if element.get("type") != "Bridge" or not below or not name:
        return below
    return [Branch(name, element.line, link_bytes_per_s(element, reading.remarks), tuple(below))]


def _coherent(machine: Element, reading: _Reading) -> set[str]:
    """Return bus ids of GPUs whose memory is a NUMA node of a CPU that is not POWER (Grace).

    On POWER9 it is one too, but there NVLinks to the CPU are listed as such.
    """
    if any("POWER" in info(element, "CPUModel").upper() for element in all_objects(machine)):
        return set()
    keys = {
        bus_key(info(element, "PCIBusID"))
        for element in all_objects(machine)
        if element.get("type") == "NUMANode" and element.get("subtype") == "GPUMemory"
    }
    return {name for name in reading.devices if bus_key(name) in keys}


def _hung(reading: _Reading) -> dict[str, FoundPart]:
    """Return the parts on PCIe by name, parents first."""
    idle: list[str] = []

    def rate(name: str, chain: Sequence[float | None], fastest: float | None) -> float | None:
        value = slowest(chain)
        if value is None or fastest is None or fastest <= value or value % _OLD_LANE_BYTES_PER_S:
            return value
        idle.append(name)
        return None

    parts: dict[str, FoundPart] = {}
    for cpu, items in reading.below.items():
        parts |= {part.name: part for part in hang(cpu, items, rate)}
    if idle:
        reading.remarks.add(
            f"links above {len(idle)} parts (first {idle[0]}) ran at PCIe 1 or 2, slower than what "
            "hangs on them, as links of idle GPUs do: their rates are left open"
        )
    return parts


def _with_cpu(gpu: FoundPart, parts: dict[str, FoundPart], reading: _Reading) -> FoundPart:
    """Return a GPU where it hangs: on PCIe, or on its CPU."""
    if gpu.name in parts:
        return parts[gpu.name]
    return replace(gpu, parent=reading.nearest_cpu[gpu.name], is_coherent=True)


def _name_objects(machine: Element, functions: Sequence[Function], reading: _Reading) -> None:
    """Note under which names matrices know the parts."""
    for function in functions:
        device = reading.devices.get(function.name)
        is_gpu = device is not None and device.parts[0].kind == "gpu"
        if is_gpu or function.kind == "nvswitch":
            for element in (function.element, *function.osdevs):
                reading.named[_object_name(element)] = function.name
    for element in all_objects(machine):
        if element.get("type") in ("Package", "NUMANode"):
            reading.named[_object_name(element)] = first_cpu(element, reading.cpus)


def _object_name(element: Element) -> str:
    return f"{element.get('type')}:{element.get('gp_index')}"


def _switches(functions: Sequence[Function], links: Sequence[PeerLink]) -> list[FoundPart]:
    ends = {end for link in links for end in (link.a, link.b)}
    return [
        FoundPart(function.name, "nvswitch", line=function.element.line)
        for function in functions
        if function.kind == "nvswitch" and function.name in ends
    ]


def _say_unplaced(reading: _Reading) -> list[str]:
    if not reading.unplaced:
        return []
    return [
        f"{len(reading.unplaced)} PCIe trees (first {reading.unplaced[0][:40]}) are equally near "
        "to several NUMA nodes: they are put on the first"
    ]
