"""PCI devices of an lstopo XML: which are GPUs and NICs, what they are called, in which order."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from planner.topology.importers.dump import FoundPart, Remarks
from planner.topology.importers.xml.interfaces import virtual_kind
from planner.topology.importers.xml.lstopo_cpus import info
from planner.topology.importers.xml.pci import (
    PciKind,
    bus_order,
    gpu_model,
    is_virtual_function,
    pci_kind,
)
from planner.topology.importers.xml.reading import Element, real_number, whole_number

__all__ = [
    "Function",
    "find_gpus",
    "find_nic_ports",
    "gpu_part",
    "gpus_in_order",
    "link_bytes_per_s",
    "pci_function",
]

# Best first: the first two number what is in the machine, CUDA what a process may use.
_BACKENDS: Final = ("NVML", "RSMI", "AMDSMI", "CUDA", "LevelZero", "OpenCL")
_NAMES: Final = re.compile(r"(nvml|rsmi|amdsmi|cuda|ze|opencl)\d.*")
_BY_NAME: Final = {backend.lower(): backend for backend in _BACKENDS} | {"ze": "LevelZero"}

# osdev_type: a number in hwloc 1 and 2, bits since 3 (its include/hwloc.h).
_NETWORK, _OPENFABRICS = 2, 3
_NETWORK_BIT, _OPENFABRICS_BIT = 1 << 4, 1 << 5
_ACTIVE: Final = "4"  # PortNState of an OpenFabrics port that is up

_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*")
_CRAY: Final = "17db"
_AMD: Final = "1002"
_MAX_GB_PER_S: Final = 10_000


@dataclass(frozen=True, slots=True)
class Function:
    """One PCI device of the XML.

    Attributes:
        name: Its bus id.
        osdevs: Its OS devices.
        backends: The first OS device of each way to reach a GPU.
    """

    element: Element
    name: str
    kind: PciKind
    vendor: str
    device: str
    link_bytes_per_s: float | None
    osdevs: tuple[Element, ...]
    backends: Mapping[str, Element]


def link_bytes_per_s(element: Element, remarks: Remarks) -> float | None:
    """Return bytes/s of ``pci_link_speed``, which is in GB/s; None for 0, which is unknown."""
    text = element.get("pci_link_speed")
    rate = real_number(text, 0, _MAX_GB_PER_S)
    if rate is None and text.strip():
        remarks.add(f"pci_link_speed={text[:20]!r} is no rate: left open", element.line)
    return rate * 1e9 if rate else None


def pci_function(element: Element, remarks: Remarks) -> Function:
    """Return a ``PCIDev`` object; one with an unreadable type has no kind."""
    match = _TYPE.fullmatch(element.get("pci_type").strip().lower())
    class_code, vendor, device = match.groups() if match else ("", "", "")
    osdevs = tuple(e for e in element.walk() if e.get("type") == "OSDev")
    backends: dict[str, Element] = {}
    for osdev in osdevs:
        if (backend := _backend(osdev)) is not None:
            backends.setdefault(backend, osdev)
    # A switch has no OS device; what a driver reaches as a GPU is one whatever else is said of it.
    is_switch = element.get("subtype") == "NVSwitch" and not backends
    known: PciKind | None = "nvswitch" if is_switch else "gpu" if backends else None
    return Function(
        element=element,
        name=element.get("pci_busid").strip(),
        kind=known or pci_kind(class_code, vendor, device),
        vendor=vendor,
        device=device,
        link_bytes_per_s=link_bytes_per_s(element, remarks),
        osdevs=osdevs,
        backends=backends,
    )


def _backend(osdev: Element) -> str | None:
    """Return which of ``_BACKENDS`` an OS device is of; None for cards, disks and networks."""
    named = _NAMES.fullmatch(osdev.get("name"))
    candidates = (
        osdev.get("subtype"),
        info(osdev, "Backend"),
        _BY_NAME[named.group(1)] if named else "",
    )
    backend = next((name for name in candidates if name in _BACKENDS), None)
    if backend == "OpenCL" and info(osdev, "OpenCLDeviceType") not in ("GPU", ""):
        return None
    return backend


def find_gpus(functions: Sequence[Function], remarks: Remarks) -> tuple[list[Function], list[str]]:
    """Return the GPUs, and what was assumed to find them."""
    reached = [function for function in functions if function.backends]
    candidates = [function for function in functions if function.kind == "gpu"]
    if not reached:
        assumed = (
            "lstopo was built without CUDA, NVML, RSMI, OpenCL and Level Zero: every PCI device "
            "of a display or accelerator class is taken for a GPU"
        )
        return candidates, [assumed] if candidates else []
    ids = {(function.vendor, function.device) for function in reached}
    names = {function.name for function in reached}
    gpus = list(reached)
    for function in candidates:
        if function.name in names:
            continue
        if (function.vendor, function.device) in ids:
            remarks.add(f"{function.name} is a GPU that no driver reached: kept")
            gpus.append(function)
        else:
            remarks.add(f"{function.name} is a display device that no driver reached: left out")
    return gpus, []


def gpu_part(function: Function) -> FoundPart:
    """Return a GPU with the model that its driver gives, else that of its PCI ids.

    AMD's driver names boards ("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"), PCI ids the product.
    """
    backends = function.backends
    models = [info(backends[name], "GPUModel") for name in _BACKENDS if name in backends]
    model = next((model for model in models if model), None)
    by_ids = gpu_model(function.vendor, function.device)
    if by_ids and function.vendor == _AMD:
        model = by_ids
    return FoundPart(
        function.name,
        "gpu",
        line=function.element.line,
        model=model or by_ids or info(function.element, "PCIDevice") or None,
    )


def gpus_in_order(gpus: Sequence[Function]) -> tuple[list[Function], list[str]]:
    """Return GPUs in the order of their numbers, and what was assumed about it."""
    for backend in _BACKENDS:
        osdevs = [gpu.backends.get(backend) for gpu in gpus]
        numbers = [_digits(osdev.get("name")) for osdev in osdevs if osdev is not None]
        if len(set(numbers)) == len(gpus):
            pairs = sorted(zip(numbers, range(len(gpus)), strict=True))
            return [gpus[index] for _, index in pairs], []
    ordered = sorted(gpus, key=lambda gpu: bus_order(gpu.name))
    return ordered, ["GPUs are numbered by their bus ids, as nvidia-smi does"]


def _digits(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", name))


def find_nic_ports(
    functions: Sequence[Function], major: int, remarks: Remarks
) -> dict[str, tuple[FoundPart, ...]]:
    """Return the NIC ports of each device that has some, by its bus id.

    Fabric NICs are OpenFabrics devices, one port each or one part per port that is up, and
    Slingshot and BXI devices. Ethernet interfaces beside them are for management; where there is
    no fabric NIC, they are the NICs.
    """
    fabric = {f.name: _fabric_ports(f, major, remarks) for f in functions if _fabric(f, major)}
    fabric = _without_virtual_functions(fabric, functions, remarks)
    ethernet = {
        function.name: osdevs
        for function in functions
        if function.name not in fabric and (osdevs := _of_type(function, major, fabric=False))
    }
    if fabric:
        names = [osdev.get("name") for osdevs in ethernet.values() for osdev in osdevs]
        if names:
            remarks.add(
                f"left out: {len(names)} Ethernet interfaces beside fabric NICs "
                f"(first {names[0][:40]!r})"
            )
        return fabric
    if ethernet:
        remarks.add("no OpenFabrics or Slingshot device: Ethernet interfaces are taken as NICs")
    return {
        name: tuple(_port(osdev.get("name"), osdev) for osdev in osdevs)
        for name, osdevs in ethernet.items()
    }


def _fabric(function: Function, major: int) -> list[Element]:
    """Return the OpenFabrics devices of a function, else the one that names its Slingshot NIC."""
    openfabrics = _of_type(function, major, fabric=True)
    if openfabrics:
        return openfabrics
    others = [
        osdev
        for osdev in function.osdevs
        if osdev.get("subtype") in ("Slingshot", "BXI")
        or re.fullmatch(r"(cxi|hsn|bxi)\d+", osdev.get("name"))
        or (function.vendor == _CRAY and _is_type(osdev, major, fabric=False))
    ]
    # One NIC is an interface (hsn0) and a device (cxi0); libfabric, and so NCCL, says cxi0.
    return sorted(others, key=lambda osdev: not osdev.get("name").startswith("cxi"))[:1]


def _of_type(function: Function, major: int, *, fabric: bool) -> list[Element]:
    return [
        osdev
        for osdev in function.osdevs
        if _is_type(osdev, major, fabric=fabric)
        and osdev.get("name")
        and virtual_kind(osdev.get("name")) is None
    ]


def _is_type(osdev: Element, major: int, *, fabric: bool) -> bool:
    number = whole_number(osdev.get("osdev_type"), 0, 1 << 20)
    if number is None:
        return False
    if major >= 3:
        is_fabric = bool(number & _OPENFABRICS_BIT)
        return is_fabric if fabric else bool(number & _NETWORK_BIT) and not is_fabric
    return number == (_OPENFABRICS if fabric else _NETWORK)


def _fabric_ports(function: Function, major: int, remarks: Remarks) -> tuple[FoundPart, ...]:
    parts = []
    for osdev in _fabric(function, major):
        states = {
            int(match.group(1)): child.get("value").strip()
            for child in osdev.all("info")
            if (match := re.fullmatch(r"Port(\d{1,3})State", child.get("name")))
        }
        name = osdev.get("name")
        up = sorted(port for port, state in states.items() if state.startswith(_ACTIVE))
        if states and not up:
            remarks.add(f"{name} has no port that is up: left out", osdev.line)
        elif len(up) > 1:
            parts += [_port(f"{name}:{port}", osdev) for port in up]
        else:
            parts.append(_port(name, osdev))
    return tuple(parts)


def _port(name: str, osdev: Element) -> FoundPart:
    return FoundPart(name, "nic", line=osdev.line)


def _without_virtual_functions(
    ports: dict[str, tuple[FoundPart, ...]], functions: Sequence[Function], remarks: Remarks
) -> dict[str, tuple[FoundPart, ...]]:
    """Return the ports without those of virtual functions, where the NICs themselves are shown.

    In a virtual machine the function is all there is of the NIC.
    """
    virtual = {f.name for f in functions if is_virtual_function(f.vendor, f.device)} & ports.keys()
    if not virtual or len(virtual) == len(ports):
        return ports
    remarks.add(f"left out: {len(virtual)} virtual functions of NICs (first {min(virtual)})")
    return {name: parts for name, parts in ports.items() if name not in virtual}
