"""The parts of an NCCL topology XML: what one ``<pci>`` or ``<nic>`` element stands for."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from planner.topology.importers.dump import FoundPart, Remarks
from planner.topology.importers.xml.interfaces import virtual_kind
from planner.topology.importers.xml.nccl_links import FoundGpu
from planner.topology.importers.xml.pci import Device, gpu_model, lane_bytes_per_s
from planner.topology.importers.xml.reading import Element, whole_number
from planner.units import format_rate

__all__ = ["Reading", "gpu_device", "link_bytes_per_s", "nic_ports", "pci_ids"]

# 10,000 Mb/s is what NCCL writes for a socket interface whose rate the driver does not tell.
_DEFAULT_MBPS: Final = 10_000
_MAX_MBPS: Final = 10_000_000

# gcnArch as RCCL's older dumps write it; newer ones say "gfx942".
_GCN: Final = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "942": "gfx942", "950": "gfx950"}

# MI300A: GPU and CPU in one package, joined by Infinity Fabric (pci.ids).
_APU: Final = ("1002", "74a0")

# Bridges that QEMU emulates, whose links say 2.5 GT/s x1 whatever passes through: its root port,
# Intel's 3420, TI's XIO3130 up and down (pci.ids; QEMU's docs/pcie.txt).
_VIRTUAL_BRIDGES: Final = (
    ("1b36", "000c"),
    ("8086", "3420"),
    ("104c", "8232"),
    ("104c", "8233"),
)


@dataclass(slots=True)
class Reading:
    """What is known while one host is read.

    Attributes:
        has_nets: The dump lists ports, so a NIC without one was not up, or not used.
        gpu_ids: PCI ids of the GPUs that have a ``<gpu>``; empty for a file without.
        names: Of parts, and all bus ids.
        repeated: Lines of bridges and NICs with the bus id of another.
        left_out: What was left out, and how often.
    """

    source: str
    remarks: Remarks
    has_nets: bool
    gpu_ids: set[tuple[str, str]]
    names: set[str]
    lines: dict[str, int] = field(default_factory=dict)
    repeats: Counter[str] = field(default_factory=Counter)
    repeated: list[int] = field(default_factory=list)
    gpus: list[FoundGpu] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def leave_out(self, what: str, example: str) -> None:
        """Count something that is left out."""
        self.left_out[what] += 1
        self.examples.setdefault(what, example)

    def unique(self, name: str, suffix: str) -> str:
        """Return a name that no part and no bus id has yet."""
        candidate = name
        while candidate in self.names:
            self.repeats[name] += 1
            number = self.repeats[name] + 1
            candidate = f"{name}:{suffix}" if number == 2 and suffix else f"{name}#{number}"
        self.names.add(candidate)
        return candidate


def pci_ids(pci: Element) -> tuple[str, str]:
    """Return vendor and device without 0x; empty where the file has none."""
    vendor, device = (pci.get(name).lower().removeprefix("0x") for name in ("vendor", "device"))
    return vendor, device


def link_bytes_per_s(pci: Element, reading: Reading) -> float | None:
    """Return bytes/s of a PCIe link; None where a virtual machine shows none, or its bridge's."""
    if pci_ids(pci) in _VIRTUAL_BRIDGES:
        return None
    speed, width_text = pci.get("link_speed").strip(), pci.get("link_width").strip()
    lane = lane_bytes_per_s(speed)
    width = whole_number(width_text, 0, 64)
    if (speed and lane is None) or (width_text and width is None):
        reading.leave_out("PCIe link of unknown speed or width", pci.get("busid"))
    return lane * width if lane and width else None


def gpu_device(pci: Element, name: str, cpu: str, reading: Reading) -> list[Device]:
    """Note a GPU, and return its device if it hangs on PCIe and not on the CPU."""
    elements = pci.all("gpu")
    element = elements[0] if elements else None
    if len(elements) > 1:
        reading.leave_out("further <gpu> of one device (several ranks, or a GPU in parts)", name)
    if element is None and reading.gpu_ids:
        reading.remarks.add(f"{name} has no <gpu>: the job did not use it; kept", pci.line)
    part = FoundPart(name, "gpu", cpu, line=pci.line, model=_model(pci, element))
    coherent = _coherent(pci, element, reading)
    if coherent is not None:
        part = replace(part, is_coherent=True, link_bytes_per_s=coherent or None)
    reading.gpus.append(FoundGpu(part, element, cpu))
    return [] if part.is_coherent else [Device((part,), link_bytes_per_s(pci, reading))]


def _coherent(pci: Element, element: Element | None, reading: Reading) -> float | None:
    """Return bytes/s to the CPU by NVLink-C2C or Infinity Fabric, 0 if unknown; None for PCIe.

    ``<c2c>`` has the MB/s of one link and the number of links (NCCL's src/graph/topo.cc).
    """
    if element is not None and element.all("c2c"):
        c2c = element.all("c2c")[0]
        rate = whole_number(c2c.get("bw"), 1, 10_000_000)
        count = whole_number(c2c.get("count"), 1, 144)
        if rate is None or count is None:
            reading.remarks.add("<c2c> has no usable bw and count: its rate is left open", c2c.line)
            return 0.0
        return rate * 1e6 * count
    return 0.0 if pci_ids(pci) == _APU else None


def _model(pci: Element, element: Element | None) -> str | None:
    """Return the product by its PCI ids, else AMD's name of the architecture, else None.

    ``sm`` names a family, no product: 90 is H100, H200, H800, H20 and GH200.
    """
    model = gpu_model(pci.get("vendor"), pci.get("device"))
    if model or element is None:
        return model
    gcn = element.get("gcn").strip()
    return _GCN.get(gcn) or (gcn if re.fullmatch(r"gfx[0-9a-f]{3,5}", gcn) else None)


def nic_ports(nets: Iterable[Element], link: float | None, reading: Reading) -> list[Device]:
    """Return the ports of a NIC, without virtual interfaces, as one device if any are left."""
    parts = []
    for net in nets:
        name = net.get("name").strip() or f"net{net.get('dev').strip()[:8]}"
        virtual = virtual_kind(name)
        if virtual is not None:
            reading.leave_out(f"{virtual} interface", name)
        elif net.get("net").strip() == "0":
            reading.leave_out("<net> for something else than send and receive", name)
        else:
            name = reading.unique(name, net.get("port").strip()[:8])
            parts.append(FoundPart(name, "nic", line=net.line, bytes_per_s=_rate(net, reading)))
    _remark_shared_link(parts, link, reading)
    return [Device(tuple(parts), link)] if parts else []


def _rate(net: Element, reading: Reading) -> float | None:
    """Return bytes/s of a port; None where the dump has no rate or only NCCL's default."""
    mbps = whole_number(net.get("speed"), 1, _MAX_MBPS)
    if mbps is None:
        reading.leave_out("rate of a NIC that is no number of Mb/s", net.get("name"))
    elif mbps == _DEFAULT_MBPS and net.get("gdr").strip() == "0":
        reading.leave_out("rate of a NIC that is NCCL's default of 10 Gb/s", net.get("name"))
        return None
    return None if mbps is None else mbps * 1e6 / 8


def _remark_shared_link(parts: Sequence[FoundPart], link: float | None, reading: Reading) -> None:
    wanted = sum(part.bytes_per_s or 0.0 for part in parts)
    if len(parts) > 1 and link is not None and wanted > link:
        reading.remarks.add(
            f"{' and '.join(part.name for part in parts)} share one PCIe link of "
            f"{format_rate(link, 'B/s')}, less than their ports' {format_rate(wanted, 'B/s')}",
            parts[0].line,
        )
