"""From what a reader found in one node to the components and links of a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.gpus import GpuModel, gpu_model, gpu_models
from planner.topology.checks import MAX_GPUS_PER_NODE
from planner.topology.document import Component, Link
from planner.topology.importers.dump import FoundPart, NodeDump, TopologyTextError
from planner.topology.importers.edges import Edge, shortest
from planner.topology.importers.figures import (
    CPU_LATENCY_S,
    PCIE_LATENCY_S,
    PCIE_LATENCY_SOURCE,
    coherent_link,
    cpu_link,
)
from planner.topology.importers.nics import choose_nics
from planner.topology.importers.order import gpu_order, order_remark, root_of
from planner.topology.importers.peers import find_peers
from planner.units import format_rate

__all__ = ["BuiltNode", "build_node", "choose_model"]

_IDS: Final = {
    "gpu": "gpu",
    "nvswitch": "nvswitch",
    "pcie_switch": "pcie",
    "nic": "nic",
    "cpu": "cpu",
}


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """A node as a document has it.

    Attributes:
        components: GPUs first.
        links: Between them.
        named: Name in the text of every part, by its name in the document.
        num_nics: That are planned with.
        nic_bytes_per_s: Of each, where the text says.
        on_switches: Links of a GPU to NVSwitches; None where it has links to GPUs, or none.
        assumptions: What was guessed, in sentences for the user.
    """

    components: tuple[Component, ...]
    links: tuple[Link, ...]
    named: Mapping[str, str]
    num_nics: int
    nic_bytes_per_s: float | None
    on_switches: int | None
    assumptions: tuple[str, ...]


def choose_model(dump: NodeDump, gpu: str | None, *, source: str) -> tuple[GpuModel, str | None]:
    """Return the GPU that the user named, else the text; and what to say where they differ.

    Raises:
        InvalidInputError: Nobody names it, the text names several, or the name is not known.
    """
    printed = list(dict.fromkeys(p.model for p in dump.parts if p.kind == "gpu" and p.model))
    if gpu is not None:
        model = gpu_model(gpu)
        others = [name for name in printed if _known(name) is not model]
        said = f"the GPUs are planned as {model.name}; {source} calls them {', '.join(others[:4])}"
        return model, said if others else None
    models = {name: _known(name) for name in printed}
    found = [model for model in models.values() if model is not None]
    if len({model.name for model in found}) > 1:
        raise InvalidInputError(
            f"{source}: has GPUs of several models ({', '.join(printed[:4])}); a job runs at the "
            "pace of the slowest: name that one with --gpu",
            where="gpu",
        )
    if not found or None in models.values():
        called = f"calls it {printed[0][:80]!r}, which is not known" if printed else "does not say"
        known = ", ".join(model.name for model in gpu_models())
        raise InvalidInputError(
            f"name the GPU, for example --gpu H100: {source} {called} (known: {known})",
            where="gpu",
        )
    return found[0], None


def _known(name: str) -> GpuModel | None:
    try:
        return gpu_model(name)
    except UnknownNameError:
        return None


def build_node(
    dump: NodeDump,
    model: GpuModel,
    *,
    source: str,
    nics: Sequence[str] = (),
    in_domain: bool = False,
) -> BuiltNode:
    """Return the components and links of a node.

    Args:
        dump: What the reader found.
        model: Of all its GPUs.
        source: What to call the text in messages and sources.
        nics: Names of the NICs to plan with; none = the fastest.
        in_domain: NVSwitches outside the node take the GPUs' links; they are left out here.

    Raises:
        InvalidInputError: The node has no GPU, links that such GPUs cannot have, or not the NICs.
    """
    return _Builder(dump, model, source, tuple(nics), in_domain).build()


@dataclass(slots=True)
class _Builder:
    """What is known while one node is put together."""

    dump: NodeDump
    model: GpuModel
    source: str
    nics: tuple[str, ...]
    in_domain: bool
    parts: dict[str, FoundPart] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def build(self) -> BuiltNode:
        self.parts = {part.name: part for part in self.dump.parts}
        gpus = [name for name, part in self.parts.items() if part.kind == "gpu"]
        if not gpus:
            raise TopologyTextError("shows no GPU", source=self.source)
        if len(gpus) > MAX_GPUS_PER_NODE:
            raise TopologyTextError(
                f"shows {len(gpus)} GPUs; a node has {MAX_GPUS_PER_NODE} at most: give the text of "
                "one node",
                source=self.source,
            )
        peers = find_peers(self.dump, self.model, source=self.source)
        chosen = choose_nics(self.dump, self.nics, source=self.source)
        order = gpu_order(self.parts, peers.edges, peers.switches)
        self.said += [*peers.assumptions, *chosen.assumptions]
        if remark := order_remark(order, gpus, self.model):
            self.said.append(remark)
        outside = self.in_domain and peers.on_switches is not None
        linked = {edge.b for edge in peers.edges} if not outside else set()
        switches = [name for name in peers.switches if name in linked]
        self.edges = [edge for edge in peers.edges if edge.kind == "c2c" or not outside]
        kept = [*order, *(nic.name for nic in chosen.parts)]
        above = self._add_host_links(kept)
        names = self._names([*order, *switches, *above["pcie_switch"], *kept[len(order) :]], above)
        self._add_cpu_links(above["cpu"])
        components = self._components(names, order)
        return BuiltNode(
            components=components,
            links=shortest(
                (replace(edge, a=names[edge.a], b=names[edge.b]) for edge in self.edges), components
            ),
            named={name: found for found, name in names.items() if found in self.parts},
            num_nics=len(chosen.parts),
            nic_bytes_per_s=chosen.bytes_per_s,
            on_switches=peers.on_switches,
            assumptions=tuple(dict.fromkeys(self.said)),
        )

    # ------------------------------------------------------------------- towards the CPUs

    def _add_host_links(self, kept: Sequence[str]) -> dict[str, list[str]]:
        """Link every part to what it hangs on; return the switches and CPUs above them."""
        used: set[str] = set()
        assumed: set[float] = set()
        to_cpu = {(edge.a, edge.b) for edge in self.edges if edge.kind == "c2c"}
        waiting = [*kept, *(cpu for _, cpu in to_cpu)]
        while waiting:
            name = waiting.pop(0)
            parent = self.parts[name].parent
            if name in used or parent is None:
                used.add(name)
                continue
            used.add(name)
            waiting.append(parent)
            if (name, parent) not in to_cpu:
                self._add_host_link(self.parts[name], parent, assumed)
        if assumed:
            self.said.append(
                f"PCIe links whose rate {self.source} does not say are taken as the slot of "
                f"{self.model.name}: {format_rate(self.model.pcie_bytes_per_s, 'B/s')}"
            )
        return {
            kind: [name for name, part in self.parts.items() if part.kind == kind and name in used]
            for kind in ("pcie_switch", "cpu")
        }

    def _add_host_link(self, part: FoundPart, parent: str, assumed: set[float]) -> None:
        if part.kind == "gpu" and part.is_coherent:
            self._add_coherent_link(part)
            return
        rate = part.link_bytes_per_s
        if rate is None:
            rate = self.model.pcie_bytes_per_s
            assumed.add(rate)
            text = f"PCIe of a slot of {self.model.name}, assumed"
        else:
            text = f"{self.source} ({self.dump.format}): PCIe"
        text = f"{text}. {PCIE_LATENCY_SOURCE}"
        self.edges.append(Edge(part.name, parent, "pcie", rate, PCIE_LATENCY_S, text))

    def _add_coherent_link(self, part: FoundPart) -> None:
        cpu = root_of(self.parts, part.name)
        known = coherent_link(self.model)
        rate = part.link_bytes_per_s
        if rate is not None:
            text = f"{self.source} ({self.dump.format}). Latency assumed to be that of a PCIe link"
        elif known is not None:
            rate, text = known
        else:
            rate = self.model.pcie_bytes_per_s
            text = "assumed as fast as PCIe, with its latency"
            self.said.append(
                f"the link of {self.model.name} to its CPU is assumed as fast as PCIe: "
                f"{format_rate(rate, 'B/s')}"
            )
        self.edges.append(Edge(part.name, cpu, "c2c", rate, CPU_LATENCY_S, text))

    def _add_cpu_links(self, cpus: Sequence[str]) -> None:
        if len(cpus) < 2:
            return
        rate, text = cpu_link(self.parts[cpus[0]].model or self._cpu_by_its_links())
        self.said.append(
            f"{len(cpus)} CPUs (or NUMA nodes), each joined to each at {format_rate(rate, 'B/s')}: "
            f"{text}"
        )
        self.edges += [
            Edge(one, other, "smp", rate, CPU_LATENCY_S, text)
            for number, one in enumerate(cpus)
            for other in cpus[number + 1 :]
        ]

    def _cpu_by_its_links(self) -> str | None:
        """Return whose CPUs they must be: few are joined to GPUs by more than PCIe."""
        if not any(edge.kind == "c2c" for edge in self.edges):
            return None
        if self.model.link_kind == "xgmi":
            return "AMD"
        return "aarch64 (Grace)" if self.model.is_coherent else "POWER9"

    # ---------------------------------------------------------------------------- names

    def _names(self, listed: Sequence[str], above: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the name in the document of each part: gpu0, gpu1, ..., or gpu for a lone one."""
        by_kind: dict[str, list[str]] = {}
        for name in (*listed, *above["cpu"]):
            by_kind.setdefault(self._kind(name), []).append(name)
        return {
            found: _IDS[kind] + (str(number) if len(names) > 1 else "")
            for kind, names in by_kind.items()
            for number, found in enumerate(names)
        }

    def _kind(self, name: str) -> str:
        return self.parts[name].kind if name in self.parts else "nvswitch"

    def _components(self, names: Mapping[str, str], order: Sequence[str]) -> tuple[Component, ...]:
        counts: dict[str, int] = {}
        for found in names:
            counts[self._kind(found)] = counts.get(self._kind(found), 0) + 1
        assert counts["gpu"] == len(order), "every GPU has a name"
        return tuple(
            Component(
                id=_IDS[kind],
                kind=kind,
                count=count,
                multicast=kind == "nvswitch" and self.model.has_multicast,
            )
            for kind, count in counts.items()
        )
