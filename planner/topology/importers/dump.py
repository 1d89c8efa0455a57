"""What a reader found in a text: the parts of one node, or the switches between nodes.

Readers (one file per format) turn text into a ``NodeDump`` or a ``FabricDump`` and know nothing
of topology documents; ``node`` and ``cluster`` turn dumps into documents and know nothing of
formats. What a text leaves open stays None here: it is guessed in one place, and said.
"""

import codecs
from dataclasses import dataclass, field
from typing import Final, Literal

from planner.errors import InvalidInputError

__all__ = [
    "MAX_TEXT_BYTES",
    "FabricDump",
    "FoundPart",
    "FoundTier",
    "NodeDump",
    "PeerLink",
    "Remark",
    "Remarks",
    "TopologyTextError",
    "checked_text",
]

# A real dump of a large fabric has some megabytes; ten are read in well under a second.
MAX_TEXT_BYTES: Final = 16_000_000
_MAX_REMARKS: Final = 100


class TopologyTextError(InvalidInputError):
    """A text that is no topology of its format; ``line`` counts from 1, None = the whole text."""

    def __init__(self, message: str, *, source: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(_at(source, line) + message, where=source)


@dataclass(frozen=True, slots=True)
class Remark:
    """Something a reader repaired or left out, and in which line (from 1; None = throughout)."""

    line: int | None
    text: str

    def __str__(self) -> str:
        """Return the remark as it is shown."""
        return self.text if self.line is None else f"line {self.line}: {self.text}"

    def of(self, source: str) -> str:
        """Return the remark as it is shown beside those of other texts."""
        return f"{_at(source, self.line)}{self.text}"


@dataclass(slots=True)
class Remarks:
    """Collects the remarks of one reader; after a hundred it only counts."""

    found: list[Remark] = field(default_factory=list)
    num_more: int = 0

    def add(self, text: str, line: int | None = None) -> None:
        """Note one remark; the same text in the same line once."""
        if len(self.found) == _MAX_REMARKS:
            self.num_more += 1  # not compared: a hostile text has a million of them
            return
        remark = Remark(line, text)
        if remark not in self.found:
            self.found.append(remark)

    def all(self) -> tuple[Remark, ...]:
        """Return what was noted, in order."""
        more = (Remark(None, f"and {self.num_more} more remarks"),) if self.num_more else ()
        return (*self.found, *more)


@dataclass(frozen=True, slots=True)
class FoundPart:
    """One part of a node, and where it hangs in the tree of PCIe switches and CPUs.

    Attributes:
        name: Unique in the dump, as printed: "GPU0", "mlx5_0", "0000:17:00.0", "cpu0".
        kind: What it is.
        parent: Name of the switch or CPU it hangs on; None for a CPU (the CPUs are joined to each
            other) and for an NVSwitch.
        line: Where it was found.
        model: What the dump calls a GPU, if it does: "NVIDIA H100 80GB HBM3", "gfx942". Of a CPU
            its vendor, family and model, as "GenuineIntel 6 143".
        bytes_per_s: Rate of a NIC, one direction, if the dump says.
        link_bytes_per_s: PCIe to the parent, one direction, if the dump says.
        is_coherent: A GPU on its CPU by NVLink-C2C or Infinity Fabric (Grace, MI300A), not PCIe.
    """

    name: str
    kind: Literal["gpu", "nic", "pcie_switch", "cpu", "nvswitch"]
    parent: str | None = None
    line: int | None = None
    model: str | None = None
    bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    is_coherent: bool = False


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Direct links between two parts: GPU and GPU, GPU and NVSwitch, GPU and CPU (POWER).

    Attributes:
        a: Name of a part.
        b: Name of another.
        kind: nvlink or xgmi.
        count: Parallel links, if the dump counts them. Between two GPUs it may be the links of
            either to NVSwitches that the dump does not show: who builds the graph decides.
        bytes_per_s: Of all of them together, one direction, if the dump says.
        line: Where it was found.
    """

    a: str
    b: str
    kind: Literal["nvlink", "xgmi"]
    count: int | None = None
    bytes_per_s: float | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class NodeDump:
    """One node as its own tools see it.

    Attributes:
        format: Of the text, as the command line names it: "nvidia-smi", "nccl-xml", ...
        parts: Parents before children; GPUs in the order of their numbers.
        links: Each pair once.
        remarks: What was repaired or left out.
        assumptions: What was guessed, in sentences for the user.
    """

    format: str
    parts: tuple[FoundPart, ...]
    links: tuple[PeerLink, ...]
    remarks: tuple[Remark, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundTier:
    """One stage of switches (or of NVLink domains).

    Attributes:
        name: "leaf", "spine", "core", "block"; lower-case identifier, unique in the dump.
        units: Hosts under each unit, in the order of ``FabricDump.hosts``; they add up to all.
        unit_names: Of the switches, same length.
        oversubscription: What all hosts below could send over what goes up from here; None where
            the text does not say. 1 = as much goes up as comes from below.
    """

    name: str
    units: tuple[int, ...]
    unit_names: tuple[str, ...]
    oversubscription: float | None = None


@dataclass(frozen=True, slots=True)
class FabricDump:
    """What joins the nodes.

    Attributes:
        format: Of the text: "slurm-conf", "slurm-yaml", "ibnetdiscover".
        hosts: Names, in an order in which the hosts of every unit are consecutive.
        tiers: Innermost first, each unit inside one unit of the next; may be empty.
        domains: NVLink domains (Slurm blocks), if the text has them.
        kind: Of the network, if the text says.
        nics_per_host: If the text says.
        nic_bytes_per_s: One NIC, one direction, if the text says.
        remarks: What was repaired or left out.
        assumptions: What was guessed, in sentences for the user.
    """

    format: str
    hosts: tuple[str, ...]
    tiers: tuple[FoundTier, ...]
    domains: FoundTier | None = None
    kind: Literal["infiniband", "ethernet"] | None = None
    nics_per_host: int | None = None
    nic_bytes_per_s: float | None = None
    remarks: tuple[Remark, ...] = ()
    assumptions: tuple[str, ...] = ()


def _at(source: str, line: int | None) -> str:
    return f"{source}: " if line is None else f"{source}, line {line}: "


def checked_text(text: str | bytes, *, source: str) -> str:
    """Return the text that a reader may look at: decoded, of bounded size, not binary.

    Bytes that are no UTF-8 become U+FFFD: readers match codes, not prose. UTF-16 with a byte order
    mark is what PowerShell writes for ">".

    Raises:
        TopologyTextError: It is empty, larger than ``MAX_TEXT_BYTES`` or binary.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise TopologyTextError(
            f"has more than {MAX_TEXT_BYTES:,} bytes; paste the output of one command for one "
            "node, or of one fabric",
            source=source,
        )
    decoded = _decoded(text) if isinstance(text, bytes) else text
    if "\0" in decoded:
        raise TopologyTextError("is binary; save the text of the command", source=source)
    if not decoded.strip():
        raise TopologyTextError("is empty; paste the output of the command", source=source)
    return decoded


def _decoded(text: bytes) -> str:
    is_utf_16 = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return text.decode("utf-16" if is_utf_16 else "utf-8-sig", errors="replace")
