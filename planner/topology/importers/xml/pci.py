"""PCI as topology texts print it: classes, devices, link rates, and trees of bridges.

A tree has a bridge for every port; of a chain of bridges with one child each only the slowest link
matters, so chains are folded and only bridges where the tree forks become switches.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.importers.dump import FoundPart, TopologyTextError

__all__ = [
    "Branch",
    "Device",
    "PciKind",
    "bus_key",
    "bus_order",
    "check_num_gpus",
    "gpu_model",
    "hang",
    "is_virtual_function",
    "lane_bytes_per_s",
    "pci_kind",
    "slowest",
]

PciKind = Literal["gpu", "nic", "bridge", "nvswitch", "other"]

# Display chips of management controllers and virtual machines: ASPEED, Matrox, Bochs, QEMU,
# Cirrus, VMware, virtio, Hyper-V (pci.ids).
_DISPLAY_VENDORS: Final = frozenset(
    ("1a03", "102b", "1234", "1b36", "1013", "15ad", "1af4", "1414")
)
# The same, of a vendor that makes GPUs too: ATI's ES1000, Rage XL and RV100 (pci.ids).
_DISPLAY_DEVICES: Final = frozenset(("1002:515e", "1002:4752", "1002:5159"))

# Virtual functions of ConnectX-4 to ConnectX-7 and BlueField (15b3 in pci.ids).
_VIRTUAL_FUNCTIONS: Final = frozenset(
    ["15b3:1014", "15b3:1016", "15b3:1018", "15b3:101a", "15b3:101c", "15b3:101e"]
)

# vendor:device of pci.ids 2026.08.22 (https://pci-ids.ucw.cz), only where it names one product:
# 1002:740c is MI250X or MI250, and 1002:66a1 has three.
_MODELS: Final = {
    "10de:15f8": "NVIDIA Tesla P100 PCIe 16GB",
    "10de:15f9": "NVIDIA Tesla P100 SXM2 16GB",
    "10de:1db1": "NVIDIA Tesla V100 SXM2 16GB",
    "10de:1db4": "NVIDIA Tesla V100 PCIe 16GB",
    "10de:1db5": "NVIDIA Tesla V100 SXM2 32GB",
    "10de:1db6": "NVIDIA Tesla V100 PCIe 32GB",
    "10de:1db8": "NVIDIA Tesla V100 SXM3 32GB",
    "10de:1eb8": "NVIDIA Tesla T4",
    "10de:20b0": "NVIDIA A100 SXM4 40GB",
    "10de:20b1": "NVIDIA A100 PCIe 40GB",
    "10de:20b2": "NVIDIA A100 SXM4 80GB",
    "10de:20b5": "NVIDIA A100 PCIe 80GB",
    "10de:20b7": "NVIDIA A30 PCIe",
    "10de:20bd": "NVIDIA A800 SXM4 40GB",
    "10de:20f1": "NVIDIA A100 PCIe 40GB",
    "10de:20f3": "NVIDIA A800 SXM4 80GB",
    "10de:20f5": "NVIDIA A800 PCIe 80GB",
    "10de:2204": "NVIDIA GeForce RTX 3090",
    "10de:2230": "NVIDIA RTX A6000",
    "10de:2235": "NVIDIA A40",
    "10de:2236": "NVIDIA A10",
    "10de:2237": "NVIDIA A10G",
    "10de:2321": "NVIDIA H100L 94GB",
    "10de:2322": "NVIDIA H800 PCIe",
    "10de:2324": "NVIDIA H800",
    "10de:2329": "NVIDIA H20",
    "10de:232c": "NVIDIA H20 HBM3e",
    "10de:2330": "NVIDIA H100 SXM5 80GB",
    "10de:2331": "NVIDIA H100 PCIe",
    "10de:2335": "NVIDIA H200 SXM 141GB",
    "10de:2337": "NVIDIA H100 SXM5 64GB",
    "10de:2338": "NVIDIA H100 SXM5 96GB",
    "10de:2339": "NVIDIA H100 SXM5 94GB",
    "10de:233b": "NVIDIA H200 NVL",
    "10de:2342": "NVIDIA GH200 120GB / 480GB",
    "10de:2348": "NVIDIA GH200 144G HBM3e",
    "10de:2684": "NVIDIA GeForce RTX 4090",
    "10de:26b1": "NVIDIA RTX 6000 Ada Generation",
    "10de:26b5": "NVIDIA L40",
    "10de:26b9": "NVIDIA L40S",
    "10de:27b8": "NVIDIA L4",
    "10de:2901": "NVIDIA B200",
    "10de:2941": "NVIDIA GB200",
    "10de:2b85": "NVIDIA GeForce RTX 5090",
    "10de:2bb5": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "10de:2e12": "NVIDIA GB10",
    "10de:3182": "NVIDIA B300 SXM6 AC",
    "10de:31c2": "NVIDIA GB300",
    "10de:31c3": "NVIDIA GB300",
    "1002:738c": "AMD Instinct MI100",
    "1002:738e": "AMD Instinct MI100",
    "1002:7408": "AMD Instinct MI250X",
    "1002:740f": "AMD Instinct MI210",
    "1002:74a0": "AMD Instinct MI300A",
    "1002:74a1": "AMD Instinct MI300X",
    "1002:74a2": "AMD Instinct MI308X",
    "1002:74a5": "AMD Instinct MI325X",
    "1002:74b5": "AMD Instinct MI300X",
    "1002:74b9": "AMD Instinct MI325X",
    "1002:75a0": "AMD Instinct MI350X",
    "1002:75a3": "AMD Instinct MI355X",
}

# GT/s of a PCIe generation -> bytes/s of one lane and direction: 8b/10b for the first two,
# 128b/130b to the fifth; the sixth sends flits of 256 bytes, 242 of them not check bytes.
_LANES: Final = {
    2.5: 0.25e9,
    5.0: 0.5e9,
    8.0: 8e9 / 8 * 128 / 130,
    16.0: 16e9 / 8 * 128 / 130,
    32.0: 32e9 / 8 * 128 / 130,
    64.0: 64e9 / 8 * 242 / 256,
}


def _hex(text: str) -> str:
    return text.strip().lower().removeprefix("0x")


def _device_key(vendor: str, device: str) -> str:
    return f"{_hex(vendor)}:{_hex(device)}"


def check_num_gpus(num_gpus: int, *, source: str) -> None:
    """Check that a text shows one host: eight MI300X in eight partitions each are 64 GPUs.

    Raises:
        TopologyTextError: More than any host has.
    """
    if num_gpus > MAX_GPUS_PER_NODE:
        raise TopologyTextError(
            f"shows {num_gpus} GPUs, more than the {MAX_GPUS_PER_NODE} of any host; give one host",
            source=source,
        )


def gpu_model(vendor: str, device: str) -> str | None:
    """Return the product of these PCI ids where pci.ids names exactly one.

    >>> gpu_model("0x10de", "0x2330"), gpu_model("1002", "740c")
    ('NVIDIA H100 SXM5 80GB', None)
    """
    return _MODELS.get(_device_key(vendor, device))


def is_virtual_function(vendor: str, device: str) -> bool:
    """Return whether the device is a virtual function of a NIC (SR-IOV)."""
    return _device_key(vendor, device) in _VIRTUAL_FUNCTIONS


def pci_kind(class_code: str, vendor: str, device: str = "") -> PciKind:
    """Return what a PCI class means for a topology; a display chip is no GPU.

    Codes as NCCL reads them (its src/graph/topo.cc: 0604 and 0801 are bridges, 02 NICs, 03 and 12
    GPUs, 0680 NVSwitches), two to six hexadecimal digits.

    >>> pci_kind("0x030200", "0x10de"), pci_kind("0300", "1a03"), pci_kind("0x12", "")
    ('gpu', 'other', 'gpu')
    >>> pci_kind("0300", "1002", "515e")
    'other'
    """
    code = _hex(class_code)
    if code[:4] in ("0604", "0801"):
        return "bridge"
    if code[:4] == "0680":
        return "nvswitch"
    if code[:2] == "02":
        return "nic"
    if code[:2] in ("03", "12"):
        is_display = _device_key(vendor, device) in _DISPLAY_DEVICES
        return "other" if is_display or _hex(vendor) in _DISPLAY_VENDORS else "gpu"
    return "other"


_BUS_ID: Final = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,4}):([0-9a-f]{1,2})\.([0-9a-f])")


def bus_key(text: str) -> str:
    """Return a PCI bus id in one form: nvidia-smi prints eight digits of domain, sysfs four.

    >>> bus_key("00000000:1B:00.0") == bus_key("0000:1b:00.0")
    True
    """
    lowered = text.strip().lower()
    match = _BUS_ID.fullmatch(lowered)
    if match is None:
        return lowered
    return ":".join(f"{int(part or '0', 16):x}" for part in match.groups())


def bus_order(text: str) -> list[int]:
    """Return a bus id as numbers, to sort by.

    >>> sorted(["000a:01:00.0", "0002:01:00.0"], key=bus_order)
    ['0002:01:00.0', '000a:01:00.0']
    """
    return [int(part, 16) for part in re.findall(r"[0-9a-f]{1,16}", bus_key(text))]


def lane_bytes_per_s(speed: str) -> float | None:
    """Return bytes/s of one PCIe lane and direction; None if the text names no generation.

    >>> round(16 * lane_bytes_per_s("16.0 GT/s PCIe") / 1e9, 1), lane_bytes_per_s("Unknown")
    (31.5, None)
    """
    match = re.match(r"\s*([0-9]{1,3}(?:\.[0-9])?) *GT/s", speed)
    return _LANES.get(float(match.group(1))) if match else None


@dataclass(frozen=True, slots=True)
class Device:
    """One PCI device: a GPU, or a NIC with its ports (they are one device to its neighbours)."""

    parts: tuple[FoundPart, ...]
    link_bytes_per_s: float | None

    @property
    def fastest(self) -> float | None:
        """Rate of its link."""
        return self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Branch:
    """A bridge, its link up, and what hangs on it; ``fastest`` is the best link of a device."""

    name: str
    line: int
    link_bytes_per_s: float | None
    below: tuple["Branch | Device", ...]
    fastest: float | None = field(init=False)

    def __post_init__(self) -> None:
        """Keep what would be asked for at every level above."""
        known = [item.fastest for item in self.below if item.fastest is not None]
        object.__setattr__(self, "fastest", max(known, default=None))


# (name of the part, links of the folded chain from the top down, fastest device from here down)
# -> what the chain carries.
ChainRate = Callable[[str, Sequence[float | None], float | None], float | None]


def slowest(rates: Sequence[float | None]) -> float | None:
    """Return the smallest known rate."""
    return min((rate for rate in rates if rate is not None), default=None)


def hang(
    parent: str,
    below: Sequence[Branch | Device],
    rate: ChainRate,
    chain: tuple[float | None, ...] = (),
) -> list[FoundPart]:
    """Return the parts of a tree, parents first, with chains of bridges folded.

    Args:
        parent: Name of what the tree hangs on.
        below: The tree; no branch is empty.
        rate: Rate of a folded chain of links.
        chain: Links folded so far.
    """
    parts: list[FoundPart] = []
    for item in below:
        links = (*chain, item.link_bytes_per_s)
        if isinstance(item, Device):
            parts += [
                replace(part, parent=parent, link_bytes_per_s=rate(part.name, links, item.fastest))
                for part in item.parts
            ]
        elif len(item.below) > 1:
            switch = FoundPart(item.name, "pcie_switch", parent, item.line)
            parts.append(replace(switch, link_bytes_per_s=rate(item.name, links, item.fastest)))
            parts += hang(item.name, item.below, rate)
        else:
            parts += hang(parent, item.below, rate, links)
    return parts
