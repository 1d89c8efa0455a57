"""Reader of ``nvidia-smi topo -m``: the matrix of GPUs and NICs that NVIDIA's driver prints.

What the cells mean is in the driver's own legend, whose sentences changed over the years while the
codes did not (SOC is the old SYS). NV# says how many NVLinks a GPU has towards another GPU, over a
bridge, a mesh or NVSwitches: which of them, the matrix does not say, so links are handed on as they
are printed. It also hides how far the two GPUs are apart on PCIe; ``matrix`` places them by their
cells to NICs and by NUMA node.

Where the two cells of a pair differ, the farther is taken: a plan that leaves a path unused costs
less than one that counts on a path which is not there. Of two NV# the smaller is taken.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from planner.topology.importers.dump import (
    FoundPart,
    NodeDump,
    PeerLink,
    Remarks,
    TopologyTextError,
)
from planner.topology.importers.smi.matrix import (
    HOST,
    MULTIPLE,
    SINGLE,
    SYSTEM,
    UNKNOWN,
    Device,
    check_number_of_devices,
    is_reserved,
    place,
)
from planner.topology.importers.smi.nvidia_smi_listing import (
    Listing,
    Row,
    chosen_listing,
    columns_of,
    is_affinity,
    is_gpu,
)
from planner.topology.importers.smi.printed_models import printed_models
from planner.topology.importers.smi.rows import clean_lines

__all__ = ["read_nvidia_smi"]

_HEIGHTS: Final = {
    "PIX": SINGLE,
    "PXB": MULTIPLE,
    "PHB": HOST,
    "NODE": HOST,
    "SYS": SYSTEM,
    "SOC": SYSTEM,
}
_LEGEND_ENTRY: Final = re.compile(r"(?:^|[\s>:])(NIC\d{1,4})\s{0,8}:\s{0,8}([\w.\-]{1,64})$")
_PCI_ONLY: Final = re.compile(r"\btopo\s{1,4}(?:-mp|--matrix_pci)\b")
# A Grace CPU prints its own NUMA node and one for each MIG instance of each of its GPUs; x86 has at
# most four NUMA nodes in a socket.
_MAX_NUMA_NODES_OF_A_SOCKET: Final = 4
# In matrices that people or language models write from memory.
_CPU: Final = re.compile(r"CPU\d{0,3}")
_MAX_REMARKS_OF_A_KIND: Final = 8
# Fewer than this share of cells known between GPUs: the listing is cut.
_MIN_KNOWN: Final = 1 / 2


def read_nvidia_smi(text: str, source: str) -> NodeDump:
    """Return the node that ``nvidia-smi topo -m`` printed.

    Args:
        text: Output of the command, with whatever stands around it.
        source: What to call the text in messages.

    Raises:
        TopologyTextError: There is no such matrix in it, it is cut so short that GPUs cannot be
            placed, or it contradicts itself.
    """
    remarks = Remarks()
    lines = clean_lines(text, source=source, remarks=remarks)
    listing = chosen_listing(lines, source=source, remarks=remarks)
    columns = columns_of(listing, source=source, remarks=remarks)
    devices = _devices(listing, columns, source=source, remarks=remarks)
    cells = _cells(listing, columns, devices, source=source, remarks=remarks)
    devices = _named_nics(_coherent(devices), _nic_names(lines, listing.line), remarks=remarks)
    devices = _with_models(devices, printed_models(lines))
    distances = np.zeros((len(devices), len(devices)), dtype=np.int8)
    for (a, b), cell in cells.items():
        distances[a, b] = distances[b, a] = _HEIGHTS.get(cell, UNKNOWN)
    placement = place(devices, distances, source=source, remarks=remarks)
    links = tuple(
        PeerLink(devices[a].name, devices[b].name, "nvlink", int(cell[2:]), line=devices[a].line)
        for (a, b), cell in sorted(cells.items())
        if cell.startswith("NV")
    )
    assumptions = [*_coherent_assumption(devices), *placement.assumptions]
    if not links and any(_PCI_ONLY.search(line) for line in lines):
        assumptions.append(
            "the text is of topo -mp, which shows no NVLinks: run nvidia-smi topo -m"
        )
    if _hides_switches(placement.parts, links):
        assumptions.append(
            "PCIe switches between GPUs with NVLink and no near NIC are not in the matrix: such "
            "GPUs hang on their CPU directly"
        )
    return NodeDump("nvidia-smi", placement.parts, links, remarks.all(), tuple(assumptions))


def _devices(
    listing: Listing, columns: Sequence[str], *, source: str, remarks: Remarks
) -> list[Device]:
    """Return GPUs in the order of their numbers, then NICs in the order of the columns."""
    gpus = sorted((n for n in columns if is_gpu(n)), key=lambda name: int(name[3:]))
    nics = [name for name in columns if not is_gpu(name) and not _CPU.fullmatch(name)]
    if len(gpus) + len(nics) < len(columns):
        remarks.add("left out: a column of CPUs, which nvidia-smi does not print", listing.line)
    check_number_of_devices(len(gpus), len(nics), source=source, line=listing.line)
    devices: list[Device] = []
    for name in gpus:
        row = listing.rows.get(name)
        if row is None:
            remarks.add(f"{name} has no row: its cells are taken from its column", listing.line)
            devices.append(Device(name, "gpu"))
        else:
            devices.append(_gpu(row, listing.tail_columns, remarks=remarks))
    missing = [name for name in nics if name not in listing.rows]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        remarks.add(
            f"no row for {', '.join(missing[:4])}{more}: taken from the columns", listing.line
        )
    for name in sorted(listing.rows.keys() - set(columns)):
        remarks.add(f"left out: {name} has no column", listing.rows[name].line)
    return devices + [
        Device(name, "nic", row.line if (row := listing.rows.get(name)) else None) for name in nics
    ]


def _gpu(row: Row, tail_columns: Sequence[str], *, remarks: Remarks) -> Device:
    """Return a GPU with what the affinity columns say of it.

    A column may be empty, and which one is then told by form: the first is the CPUs, an "N/A" at
    the end the last column.
    """
    tail = re.sub(r",\s+(?=\d)", ",", " ".join(row.tail)).split()
    if tail and not all(token == "N/A" or is_affinity(token) for token in tail):
        kept = [t for t in tail if t == "N/A" or is_affinity(t)]
        remarks.add(
            f"{row.name}: {' '.join(tail)[:40]!r} is no affinity; read as far as it is", row.line
        )
        tail = kept
    columns = list(tail_columns) or ["cpu", "numa", "gpu_numa"]
    values: dict[str, str] = {}
    if len(tail) < len(columns) and tail and tail[-1] == "N/A":
        values[columns.pop()] = tail.pop()
    values |= dict(zip(columns, tail, strict=False))
    known = {column: value for column, value in values.items() if value != "N/A"}
    coherent = (
        known.get("gpu_numa", "").isdigit()
        or _num_nodes(known.get("numa")) > _MAX_NUMA_NODES_OF_A_SOCKET
    )
    return Device(
        row.name, "gpu", row.line, known.get("numa"), known.get("cpu"), is_coherent=coherent
    )


def _num_nodes(numa: str | None) -> int:
    """Count the NUMA nodes of a list such as "0,2-17"."""
    ranges = [part.partition("-") for part in (numa or "").rstrip(",").split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _cells(
    listing: Listing,
    columns: Sequence[str],
    devices: Sequence[Device],
    *,
    source: str,
    remarks: Remarks,
) -> dict[tuple[int, int], str]:
    """Return the cell of each pair of devices (numbers a < b); pairs without one are left out."""
    index = {device.name: number for number, device in enumerate(devices)}
    stated: dict[tuple[int, int], list[str]] = {}
    for a, b, cell in _stated(listing, columns, index, remarks=remarks):
        stated.setdefault((min(a, b), max(a, b)), []).append(cell)
    cells = {pair: max(both, key=_farness) for pair, both in stated.items()}
    differing = [pair for pair, both in stated.items() if len(set(both)) > 1]
    for a, b in differing[:_MAX_REMARKS_OF_A_KIND]:
        remarks.add(
            f"{devices[a].name} and {devices[b].name} read {' and '.join(stated[a, b])}, one each "
            f"way: taken as {cells[a, b]}",
            devices[a].line or devices[b].line,
        )
    if len(differing) > _MAX_REMARKS_OF_A_KIND:
        remarks.add(f"{len(differing)} pairs in all read one thing each way: taken as the farther")
    num_gpus = sum(device.kind == "gpu" for device in devices)
    num_known = sum(b < num_gpus for _, b in cells)
    if num_known < num_gpus * (num_gpus - 1) / 2 * _MIN_KNOWN:
        raise TopologyTextError(
            f"has cells for {num_known} of {num_gpus * (num_gpus - 1) // 2} pairs of its "
            f"{num_gpus} GPUs: it is cut off; paste the whole output of nvidia-smi topo -m",
            source=source,
            line=listing.line,
        )
    return cells


def _stated(
    listing: Listing, columns: Sequence[str], index: Mapping[str, int], *, remarks: Remarks
) -> Iterator[tuple[int, int, str]]:
    """Yield device, device and cell for each readable cell off the diagonal."""
    for row in listing.rows.values():
        if row.name not in index:
            continue
        a = index[row.name]
        if len(row.cells) < len(columns):
            remarks.add(
                f"the row of {row.name} has {len(row.cells)} of {len(columns)} cells: the rest is "
                "taken from the columns",
                row.line,
            )
        elif len(row.cells) > len(columns):
            remarks.add(f"left out: cells of {row.name} beyond the last column", row.line)
        for name, cell in zip(columns, row.cells, strict=False):
            if name not in index:
                continue
            b = index[name]
            is_nvlink = cell.startswith("NV") and cell[2:].isdigit()
            is_of_gpus = row.name.startswith("GPU") and name.startswith("GPU")
            if (a == b) != (cell == "X"):
                remarks.add(f"left out: {cell} in the cell of {row.name} and {name}", row.line)
            elif a != b and (cell in _HEIGHTS or (is_nvlink and is_of_gpus and int(cell[2:]))):
                yield a, b, "SYS" if cell == "SOC" else cell
            elif a != b:
                remarks.add(
                    f"left out: {cell[:20]!r} in the cell of {row.name} and {name}", row.line
                )


def _farness(cell: str) -> tuple[int, int]:
    """Order cells from near to far; more NVLinks are nearer, NODE is farther than PHB."""
    if cell.startswith("NV"):
        return UNKNOWN, -int(cell[2:])
    return _HEIGHTS[cell], int(cell == "NODE")


def _with_models(devices: Sequence[Device], models: Mapping[int, str]) -> list[Device]:
    """Return the devices, GPUs with what the text around the matrix calls them."""
    return [
        replace(device, model=models.get(int(device.name[3:]), models.get(-1)))
        if device.kind == "gpu"
        else device
        for device in devices
    ]


def _coherent(devices: Sequence[Device]) -> list[Device]:
    """Return the devices with all GPUs coherent or none: there is no half Grace node.

    A GPU whose row is cut off before the affinity columns has no say.
    """
    heard = [device.is_coherent for device in devices if device.numa or device.affinity]
    is_grace = bool(heard) and all(heard)
    return [replace(device, is_coherent=is_grace and device.kind == "gpu") for device in devices]


def _coherent_assumption(devices: Sequence[Device]) -> list[str]:
    if not any(device.is_coherent for device in devices):
        return []
    return [
        "the GPUs hang on their CPUs by NVLink-C2C (Grace), because the text gives them NUMA nodes "
        "of their own: SYS between GPU and NIC is not far there"
    ]


def _nic_names(lines: Sequence[str], first_line: int) -> dict[str, str]:
    """Return the names that the NIC legend gives, the first for each number.

    The legend below the matrix counts; one above it (of another node, or of shuffled lines) only
    if there is none below.
    """
    for part in (lines[first_line - 1 :], lines):
        names: dict[str, str] = {}
        for line in part:
            if "NIC" in line and (found := _LEGEND_ENTRY.search(line.rstrip())):
                names.setdefault(found[1], found[2])
        if names:
            return names
    return {}


def _named_nics(
    devices: Sequence[Device], names: Mapping[str, str], *, remarks: Remarks
) -> list[Device]:
    """Return the devices with the legend's names for NICs, where these are unique."""
    taken = {device.name for device in devices}
    named: list[Device] = []
    for device in devices:
        name = names.get(device.name) if device.kind == "nic" else None
        if name in taken or (name and is_reserved(name)):
            remarks.add(f"the NIC legend calls {device.name} {name}, as another part is called")
            name = None
        taken.add(name or device.name)
        named.append(replace(device, name=name or device.name))
    return named


def _hides_switches(parts: Sequence[FoundPart], links: Sequence[PeerLink]) -> bool:
    """Tell whether two GPUs with NVLink hang on one CPU directly, by PCIe as far as is known."""
    cpu_of = {
        part.name: part.parent
        for part in parts
        if part.kind == "gpu" and not part.is_coherent and str(part.parent).startswith("cpu")
    }
    return any(link.a in cpu_of and cpu_of[link.a] == cpu_of.get(link.b) for link in links)
