"""NCCL's and RCCL's topology XML: NCCL_TOPO_DUMP_FILE, and the files for NCCL_TOPO_FILE.

``<system>`` holds ``<cpu>`` (one NUMA node each) holds nested ``<pci>`` holds ``<gpu>`` with its
links, or ``<nic>`` with one ``<net>`` per port. A dump shows what one job used. The files that
clouds ship have ``<pci>`` alone, from which NCCL finds the rest at run time; there PCI classes
must do. A dump of an NVLink domain of several hosts (MNNVL) tells them apart by ``host_hash``; the
first is read. Sources: NCCL's src/graph/xml.cc and topo.cc, RCCL's tools/topo_expl.
"""

from collections.abc import Sequence
from typing import Final

from planner.topology.importers.dump import FoundPart, NodeDump, Remarks, TopologyTextError
from planner.topology.importers.xml.nccl_links import FoundGpu, find_links, has_switch_links
from planner.topology.importers.xml.nccl_parts import (
    Reading,
    gpu_device,
    link_bytes_per_s,
    nic_ports,
    pci_ids,
)
from planner.topology.importers.xml.pci import (
    Branch,
    Device,
    bus_key,
    bus_order,
    check_num_gpus,
    hang,
    pci_kind,
    slowest,
)
from planner.topology.importers.xml.reading import Element, check_root, read_xml, whole_number

__all__ = ["read_nccl_xml"]

_KNOWN_TAGS: Final = {
    "system": {"cpu"},
    "cpu": {"pci", "nic"},
    "pci": {"pci", "gpu", "nic", "pcilink"},
    "nic": {"net"},
    "gpu": {"nvlink", "xgmi", "c2c"},
}


def read_nccl_xml(text: str, source: str) -> NodeDump:
    """Return the node of an NCCL topology XML.

    PCIe parts keep their bus ids as names, NICs the names NCCL uses, CPUs are ``cpu<numaid>``.
    GPUs are in the order of ``dev``; in a file without, of their bus ids.

    Raises:
        TopologyTextError: It is no such XML, or has no GPU.
    """
    root = read_xml(text, source=source)
    check_root(root, "system", needed="the file of NCCL_TOPO_DUMP_FILE", source=source)
    hosts: dict[str, list[Element]] = {}
    for cpu in root.all("cpu"):
        hosts.setdefault(cpu.get("host_hash"), []).append(cpu)
    if not hosts:
        raise TopologyTextError("has no <cpu>; give the whole file", source=source, line=root.line)
    host = next(iter(hosts.values()))
    reading = _reading(host, source)
    _remark_unknown_tags([root, *host], reading.remarks)
    parts = _tree(host, reading)
    gpus, assumptions = _in_order(reading)
    if not gpus:
        bare = any(e.tag == "pci" and not e.get("class") for cpu in host for e in cpu.walk())
        raise TopologyTextError(
            "shows no GPU, neither a <gpu> nor a PCI device of class 0x03 or 0x12"
            + ("; devices without class are for NCCL to look up on the machine" if bare else "")
            + ": give the file of NCCL_TOPO_DUMP_FILE of a job on the node",
            source=source,
        )
    check_num_gpus(len(gpus), source=source)
    others = {part.name for part in parts if part.kind != "gpu"}
    links = find_links(gpus, others, reading.remarks)
    _say_left_out(reading)
    order = [gpu.part for gpu in gpus]
    by_name = {part.name: part for part in parts}
    return NodeDump(
        format="nccl-xml",
        parts=(
            *(part for part in parts if part.kind in ("cpu", "pcie_switch")),
            *(by_name.get(part.name, part) for part in order),
            *(part for part in parts if part.kind == "nic"),
            *links.switches,
        ),
        links=tuple(links.links),
        remarks=reading.remarks.all(),
        assumptions=(*assumptions, *links.assumptions, *_several_hosts(hosts)),
    )


def _reading(host: Sequence[Element], source: str) -> Reading:
    elements = [element for cpu in host for element in cpu.walk()]
    return Reading(
        source=source,
        remarks=Remarks(),
        has_nets=any(element.tag == "net" for element in elements),
        gpu_ids={pci_ids(element) for element in elements if element.all("gpu")},
        names={element.get("busid").strip() for element in elements},
    )


def _remark_unknown_tags(host: Sequence[Element], remarks: Remarks) -> None:
    unknown: dict[tuple[str, str], int] = {}
    for top in host:
        for element in top.walk() if top.tag == "cpu" else (top,):
            known = _KNOWN_TAGS.get(element.tag, set())
            for child in element.children:
                if child.tag not in known:
                    unknown.setdefault((child.tag[:40], element.tag[:40]), child.line)
    for (tag, parent), line in unknown.items():
        remarks.add(f"<{tag}> in <{parent}> is not known: left out", line)


def _tree(host: Sequence[Element], reading: Reading) -> list[FoundPart]:
    """Return CPUs, switches, NICs and GPUs that hang on PCIe, parents first."""
    parts: dict[str, FoundPart] = {}
    below: dict[str, list[Branch | Device]] = {}
    for index, cpu in enumerate(host):
        numa = whole_number(cpu.get("numaid"), -1, 65_535)
        if numa is None:
            reading.remarks.add(f"<cpu> has numaid={cpu.get('numaid')[:20]!r}", cpu.line)
        name = f"cpu{index if numa is None else numa}"
        if name in parts:
            reading.remarks.add(f"{name} is listed twice: taken as one", cpu.line)
        said = (cpu.get(key)[:40] for key in ("arch", "vendor", "familyid", "modelid"))
        model = " ".join(filter(None, said)) or None
        parts.setdefault(name, FoundPart(name, "cpu", line=cpu.line, model=model))
        reading.names.add(name)
        below.setdefault(name, []).extend(_below(cpu, name, reading))
    slow: list[str] = []

    def rate(name: str, chain: Sequence[float | None], fastest: float | None) -> float | None:
        value = slowest(chain)
        if value is not None and fastest is not None and value < fastest / 4:
            slow.append(name)
        return value

    hung = [part for name, items in below.items() for part in hang(name, items, rate)]
    if slow:
        reading.remarks.add(
            f"the link above {len(slow)} parts (first {slow[0]}) is printed at less than a quarter "
            "of what hangs below it: taken as printed"
        )
    return [*parts.values(), *hung]


def _below(parent: Element, cpu: str, reading: Reading) -> list[Branch | Device]:
    """Return what hangs on a CPU or a bridge."""
    items: list[Branch | Device] = []
    for child in parent.children:
        if child.tag == "pci":
            items += _pci(child, cpu, reading)
        elif child.tag == "nic" and parent.tag == "cpu":
            items += nic_ports(child.all("net"), None, reading)
    return items


def _pci(pci: Element, cpu: str, reading: Reading) -> Sequence[Branch | Device]:
    """Return a PCI element as a device or a branch; nothing if it has no part."""
    name = _bus_id(pci, reading)
    below = _below(pci, cpu, reading)
    if pci.all("pcilink"):
        reading.leave_out("<pcilink> between PCIe switches", name)
    if pci.all("gpu") or _is_idle_gpu(pci, reading):
        return [*gpu_device(pci, name, cpu, reading), *below]
    if below:
        link = link_bytes_per_s(pci, reading)
        return [Branch(name, pci.line, link, (*below, *_ports_of(pci, reading)))]
    if any(nic.all("net") for nic in pci.all("nic")):
        return _ports_of(pci, reading)
    match pci_kind(pci.get("class"), *pci_ids(pci)):
        case "nic" if not reading.has_nets:
            part = FoundPart(name, "nic", line=pci.line)
            return [Device((part,), link_bytes_per_s(pci, reading))]
        case "nic":
            reading.leave_out("NIC without a port in the dump (down, or not used by the job)", name)
        case "gpu":
            reading.leave_out("display device without <gpu>", name)
        case "other" | "nvswitch":
            reading.leave_out(f"PCI device of class {pci.get('class')[:12]!r}", name)
    return []


def _ports_of(pci: Element, reading: Reading) -> Sequence[Branch | Device]:
    nets = [net for nic in pci.all("nic") for net in nic.all("net")]
    return nic_ports(nets, link_bytes_per_s(pci, reading), reading) if nets else []


def _bus_id(pci: Element, reading: Reading) -> str:
    name = pci.get("busid").strip()
    if not name:
        raise TopologyTextError("<pci> has no busid", source=reading.source, line=pci.line)
    key = bus_key(name)
    if key not in reading.lines:
        reading.lines[key] = pci.line
        return name
    if pci.all("gpu") or _is_idle_gpu(pci, reading):
        raise TopologyTextError(
            f"busid {name[:40]!r} is also in line {reading.lines[key]}; one host has it once",
            source=reading.source,
            line=pci.line,
        )
    reading.repeated.append(pci.line)
    return reading.unique(name, "")


def _is_idle_gpu(pci: Element, reading: Reading) -> bool:
    """Return whether a device without ``<gpu>`` is one: by class; where others have it, by id."""
    if pci_kind(pci.get("class"), *pci_ids(pci)) != "gpu":
        return False
    return not reading.gpu_ids or pci_ids(pci) in reading.gpu_ids


def _in_order(reading: Reading) -> tuple[list[FoundGpu], list[str]]:
    """Return the GPUs in the order of their numbers, and what was assumed about it."""
    gpus = reading.gpus
    numbers = [
        whole_number(gpu.element.get("dev"), 0, 65_535) if gpu.element else None for gpu in gpus
    ]
    if None not in numbers and len(set(numbers)) == len(numbers):
        pairs = zip(numbers, gpus, strict=True)
        return [gpu for _, gpu in sorted(pairs, key=lambda pair: pair[0] or 0)], []
    gpus = sorted(gpus, key=lambda gpu: bus_order(gpu.part.name))
    assumed = ["GPUs are numbered by their bus ids, as nvidia-smi does; the file has no numbers"]
    if not reading.gpu_ids:
        assumed.append(
            "the file is one that NCCL is given (NCCL_TOPO_FILE), no dump: it has no "
            "NVLinks and no NIC rates; NCCL_TOPO_DUMP_FILE of a job on the node has them"
        )
    return gpus, assumed


def _say_left_out(reading: Reading) -> None:
    if reading.repeated:
        reading.remarks.add(
            f"{len(reading.repeated)} bridges or NICs have the busid of another part, as files "
            "edited by hand have: taken as parts of their own",
            reading.repeated[0],
        )
    for what, count in reading.left_out.items():
        reading.remarks.add(f"left out: {count} x {what} (first {reading.examples[what][:40]!r})")


def _several_hosts(hosts: dict[str, list[Element]]) -> list[str]:
    """Return what is assumed when the dump has several hosts."""
    if len(hosts) == 1:
        return []
    num_gpus = [sum(e.tag == "gpu" for cpu in host for e in cpu.walk()) for host in hosts.values()]
    text = f"the dump has {len(hosts)} hosts, of which the first is planned"
    if len(set(num_gpus)) > 1:
        text += f"; they show different numbers of GPUs ({min(num_gpus)} to {max(num_gpus)})"
    joined = [has_switch_links(host) for host in hosts.values()]
    if all(joined):
        return [f"{text}; NVLinks of all lead to NVSwitches: one NVLink domain of {len(hosts)}"]
    return [f"{text}; NVLinks of {sum(joined)} of them lead to NVSwitches"]
