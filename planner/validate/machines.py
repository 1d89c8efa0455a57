"""A machine as a table describes it in a few columns -> a topology document.

The columns name the GPU, what joins the GPUs of a node, at which rate, and the NICs. The rest is
assumed as the importers of ``planner.topology`` assume it, and every assumption is a sentence in
the document. One node is described whole; of several, only the GPUs that take part, with the NICs
nearest them. The network between nodes is one stage of switches with full bisection.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.gpus import GpuModel, gpu_model
from planner.topology.document import Library, TopologyDocument, parse_topology
from planner.topology.importers.figures import (
    CPU_LATENCY_S,
    ONE_STAGE_LATENCY_S,
    PCIE_LATENCY_S,
    PCIE_LATENCY_SOURCE,
    XGMI_LINKS_PER_PAIR,
    coherent_link,
    cpu_link,
    nic_latency,
    peer_latency,
)
from planner.units import counted, format_rate
from planner.validate.rows import Plugin, Question

__all__ = ["Machine", "machine_document", "machine_of"]

Joint = Literal["switch", "mesh", "pairs", "domain", "pcie"]

# GPUs of an NVLink domain: 18 trays of 4, NVIDIA GB200 NVL72.
_RACK_GPUS: Final = 72
# A node with so many GPUs has two CPUs, and PCIe switches where its GPUs have nothing better.
_LARGE_NODE_GPUS: Final = 8
_RAIL_NICS: Final = 4
_GEN4_X16_BYTES_PER_S: Final = 31.5e9
_GBIT_BYTES: Final = 1e9 / 8

# NICs a GPU, and the rate of one: the vendor's reference machine (DGX-1 V100, DGX A100, DGX H100,
# DGX B200, GB200 NVL72; AMD's 8-GPU Instinct platforms).
_STANDARD_NICS: Final[tuple[tuple[str, float, float], ...]] = (
    ("V100 SXM", 0.5, 100 * _GBIT_BYTES),
    ("A100 SXM", 1.0, 200 * _GBIT_BYTES),
    ("A800 SXM", 1.0, 200 * _GBIT_BYTES),
    *((name, 1.0, 400 * _GBIT_BYTES) for name in ("H100 SXM", "H200 SXM", "H800 SXM", "H20")),
    *((name, 1.0, 400 * _GBIT_BYTES) for name in ("B200", "GB200")),
    *((name, 1.0, 400 * _GBIT_BYTES) for name in ("MI300X", "MI325X", "MI350X", "MI355X")),
)
# From NIC to switch by aws-ofi-nccl, with the reason, as in the bundled topologies of EC2.
_EFA_V1: Final = 35.4e-6, "a hop of 73 us as on p4de; aws-ofi-nccl 2daf7d30 reports 75 us"
_EFA_V2: Final = 13.4e-6, "a hop of 29 us as on p5; aws-ofi-nccl 2daf7d30 reports 75 us"
_EFA_V3: Final = 12e-6, "nine tenths of p5's, as 18 us to 20 in aws-ofi-nccl's own tuning model"
_ROCE: Final = 6.4e-6, "a hop of 15 us: a small all_gather over two A3 Ultra nodes takes 54 us"
_EMERALD_RAPIDS: Final = "GenuineIntel 6 207"
_OLD_GPUS: Final = ("pascal", "volta", "turing", "ampere")

_JOINTS: Final[dict[str, Joint]] = {
    "nvswitch": "switch",
    "nvlink_pairs": "pairs",
    "nvl_domain": "domain",
    "xgmi": "mesh",
    "pcie": "pcie",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything of a question that its fabric depends on.

    Attributes as of ``Question``, and ``num_gpus`` of a node that are described.
    """

    gpu: str
    library: Library | None
    plugin: Plugin | None
    num_nodes: int
    gpus_per_node: int
    num_gpus: int
    intra_kind: str
    intra_bytes_per_s: float | None
    nics_per_node: int | None
    nic_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class _Nics:
    """NICs near the GPUs of a node, bytes/s of one, and who says so."""

    count: int
    bytes_per_s: float
    source: str


def machine_of(question: Question) -> Machine:
    """Return the machine that a question is about."""
    several = question.num_nodes > 1
    return Machine(
        gpu=question.gpu,
        library=question.library,
        plugin=question.plugin,
        num_nodes=question.num_nodes,
        gpus_per_node=question.gpus_per_node,
        num_gpus=question.num_ranks // question.num_nodes if several else question.gpus_per_node,
        intra_kind=question.intra_kind,
        intra_bytes_per_s=question.intra_bytes_per_s,
        nics_per_node=question.nics_per_node,
        nic_bytes_per_s=question.nic_bytes_per_s,
    )


def machine_document(machine: Machine) -> TopologyDocument:
    """Return the document; its assumptions say what the columns leave open.

    Raises:
        InvalidInputError: The columns do not say enough, with what is missing.
    """
    return _Builder(machine).build()


class _Builder:
    """What is known while a document is put together."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.said: list[str] = []
        self.model = self._model()
        self.num_gpus = machine.num_gpus
        self.joint = self._joint()
        self.peer_bytes_per_s = self._peer_rate()
        self.components: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []

    def build(self) -> TopologyDocument:
        m = self.machine
        self._say_used()
        domain = self._domain() if self.joint == "domain" else None
        in_reach = domain["num_nodes"] if domain else 1
        nics = self._nics() if m.num_nodes > in_reach else None
        gpus = self._add("gpu", "gpu", self.num_gpus)
        self._add_peers(gpus)
        self._add_host(gpus, nics.count if nics else 0)
        return parse_topology(
            {
                "name": f"{counted(m.num_nodes, 'node')} of {self.num_gpus} x {self.model.name}"[
                    :120
                ],
                "library": m.library or self.model.library,
                "device": self.model.device or self.model.name,
                "default_nodes": m.num_nodes,
                "max_nodes": m.num_nodes,
                "node": {
                    "components": self.components,
                    "links": self.links,
                    "source": f"the columns of the table; {self.model.name}: {self.model.source}",
                },
                "nvlink_domain": domain,
                "network": self._network(nics) if nics else None,
                "assumptions": tuple(dict.fromkeys(self.said)),
            }
        )

    # ----------------------------------------------------------------------------- what it is

    def _model(self) -> GpuModel:
        m = self.machine
        try:
            return gpu_model(m.gpu)
        except UnknownNameError:
            pass
        if m.intra_kind not in _JOINTS and m.intra_kind != "nvlink":
            raise InvalidInputError(
                f"GPU {m.gpu!r} is not known, and intra_kind={m.intra_kind!r} does not say what "
                "joins its GPUs",
                where="gpu",
            )
        pcie = m.intra_kind == "pcie" and m.intra_bytes_per_s
        self.said.append(
            f"GPU {m.gpu!r} is not known: what the columns say, latencies as of A100"
            + ("" if pcie else ", PCIe 4.0 x16")
        )
        kind: Literal["nvlink", "xgmi"] = "xgmi" if m.intra_kind == "xgmi" else "nvlink"
        return GpuModel(
            name=m.gpu[:80] or "unnamed",
            aliases=(),
            device=None,
            memory_bytes=0.0,
            memory_bytes_per_s=0.0,
            peak_flop_per_s={},
            link_kind=None if m.intra_kind == "pcie" else kind,
            num_links=0,
            link_bytes_per_s=0.0,
            is_switched=m.intra_kind in ("nvswitch", "nvl_domain"),
            has_multicast=False,
            pcie_bytes_per_s=pcie or _GEN4_X16_BYTES_PER_S,
            is_coherent=False,
            library="rccl" if kind == "xgmi" else "nccl",
            architecture="other",
            source="not known",
        )

    def _joint(self) -> Joint:
        """Return what joins the GPUs of a node."""
        kind, model, gpus = self.machine.intra_kind, self.model, self.machine.gpus_per_node
        if kind in _JOINTS:
            return _JOINTS[kind]
        if kind not in ("", "nvlink"):
            raise InvalidInputError(
                f"intra_kind={kind!r} is not known; known: {', '.join(_JOINTS)}, nvlink",
                where="intra_kind",
            )
        on_switches = model.is_switched and (gpus >= _LARGE_NODE_GPUS or model.is_coherent)
        if kind == "" and model.link_kind is None:
            found: Joint = "pcie"
        elif kind == "nvlink" or model.is_switched or model.link_kind == "xgmi":
            found = "switch" if on_switches else "mesh"
        else:
            found = "pairs" if "SXM" not in model.name else "mesh"
        if self.num_gpus > 1:
            words = {"switch": "NVSwitches", "mesh": "links of each to each", "pairs": "pairs"}
            self.said.append(
                f"intra_kind is {kind or 'not given'}: {words.get(found, 'PCIe')} between "
                f"{gpus} x {model.name}"
            )
        return found

    def _peer_rate(self) -> float:
        """Return bytes/s of one GPU to its peers, over links of its own."""
        stated, model = self.machine.intra_bytes_per_s, self.model
        if self.joint == "pcie" or (self.num_gpus == 1 and self.joint != "domain"):
            return 0.0
        if stated is not None:
            return stated
        rate = model.num_links * model.link_bytes_per_s
        if rate == 0:
            raise InvalidInputError(
                f"intra_GBps_per_gpu is not given, and links of {model.name!r} are not known",
                where="intra_GBps_per_gpu",
            )
        self.said.append(
            f"intra_GBps_per_gpu is not given: {format_rate(rate, 'B/s')} by the data sheet of "
            f"{model.name}"
        )
        return rate

    def _say_used(self) -> None:
        m = self.machine
        if self.num_gpus < m.gpus_per_node:
            self.said.append(
                f"{self.num_gpus} of {m.gpus_per_node} GPUs of each node take part: the first, "
                "with the NICs nearest them"
            )

    # ------------------------------------------------------------------------ parts and links

    def _add(self, name: str, kind: str, count: int, **more: bool) -> list[str]:
        """Add ``count`` equal parts, and return their names."""
        if count:
            self.components.append({"id": name, "kind": kind, "count": count, **more})
        return [name] if count == 1 else [f"{name}{number}" for number in range(count)]

    def _link(
        self, a: str, b: str, kind: str, rate: float, latency_s: float, source: str, **more: str
    ) -> None:
        self.links.append(
            {
                "between": (a, b),
                "kind": kind,
                "bandwidth_bytes_per_s": rate,
                "latency_s": latency_s,
                "source": source,
                **more,
            }
        )

    def _add_peers(self, gpus: Sequence[str]) -> None:
        model, rate = self.model, self.peer_bytes_per_s
        if self.num_gpus == 1 or self.joint in ("pcie", "domain"):
            return
        latency_s, latency_source = peer_latency(model)
        source = f"intra_GBps_per_gpu, or the data sheet of {model.name}. {latency_source}"
        kind = "xgmi" if model.link_kind == "xgmi" else "nvlink"
        if self.joint == "switch":
            self._add("nvswitch", "nvswitch", 1, multicast=model.has_multicast)
            self._link("gpu", "nvswitch", kind, rate, latency_s / 2, source, pattern="all")
        elif self.joint == "mesh":
            peer_rate = rate / self._num_peers()
            self._link("gpu", "gpu", kind, peer_rate, latency_s, source, pattern="all")
        else:
            for first in range(0, self.num_gpus - 1, 2):
                self._link(gpus[first], gpus[first + 1], kind, rate, latency_s, source)

    def _num_peers(self) -> int:
        """Return among how many peers a GPU of a mesh divides its links."""
        model, peers = self.model, self.machine.gpus_per_node - 1
        if model.link_kind != "xgmi" or model.num_links == 0:
            return peers
        if peers > model.num_links:
            self.said.append(
                f"the {peers + 1} GPUs of a node are joined each to each, though {model.name} has "
                f"{model.num_links} links"
            )
        # Boards come whole, however many of their GPUs a node is said to have.
        return max(peers, model.num_links // XGMI_LINKS_PER_PAIR.get(model.name, 1))

    def _add_host(self, gpus: Sequence[str], num_nics: int) -> None:
        """Join GPUs and NICs to CPUs: by C2C, over PCIe switches, or straight."""
        model = self.model
        coherent = coherent_link(model) if model.link_kind == "nvlink" else None
        cpu_of = self._cpus()
        nics = self._add("nic", "nic", num_nics)
        cpus = self._add("cpu", "cpu", max(cpu_of) + 1)
        switches = self._add("pcie", "pcie_switch", 0 if coherent else self._num_switches(num_nics))
        for number, gpu in enumerate(gpus):
            if coherent is not None:
                self._link(
                    gpu, cpus[cpu_of[number]], "c2c", coherent[0], CPU_LATENCY_S, coherent[1]
                )
            elif switches:
                self._link_pcie(gpu, switches[number * len(switches) // len(gpus)])
            else:
                self._link_pcie(gpu, cpus[cpu_of[number]])
        for number, nic in enumerate(nics):
            near = cpus[cpu_of[number * len(gpus) // len(nics)]]
            self._link_pcie(
                nic, switches[number * len(switches) // len(nics)] if switches else near
            )
        for number, switch in enumerate(switches):
            first_gpu = -(-number * len(gpus) // len(switches))
            self._link_pcie(switch, cpus[cpu_of[first_gpu]])
        if len(cpus) > 1:
            rate, source = cpu_link(self._cpu_model())
            self._link("cpu", "cpu", "smp", rate, CPU_LATENCY_S, source, pattern="all")
            if self.joint in ("pcie", "pairs"):
                self.said.append(f"between the two CPUs of a node: {source}")
        elif self.joint == "pcie" and len(gpus) > 1:
            self.said.append("all GPUs of a node are on one CPU")

    def _link_pcie(self, part: str, above: str) -> None:
        source = f"PCIe of {self.model.name}. {PCIE_LATENCY_SOURCE}"
        self._link(part, above, "pcie", self._pcie_rate(), PCIE_LATENCY_S, source)

    def _cpu_model(self) -> str | None:
        """Return CPUs of the time of the GPU where that is later than what is assumed anyway."""
        return _EMERALD_RAPIDS if self.model.architecture == "blackwell" else None

    def _pcie_rate(self) -> float:
        stated = self.machine.intra_bytes_per_s
        return stated if self.joint == "pcie" and stated else self.model.pcie_bytes_per_s

    def _cpus(self) -> list[int]:
        """Return the CPU of each GPU."""
        gpus = self.machine.gpus_per_node
        large = gpus >= _LARGE_NODE_GPUS or (self.joint == "pairs" and gpus > 2)
        sockets = 2 if large and self.joint != "domain" else 1
        return [gpu * sockets // gpus for gpu in range(self.num_gpus)]

    def _num_switches(self, num_nics: int) -> int:
        """Return the number of PCIe switches above the GPUs."""
        if num_nics:
            return math.gcd(self.num_gpus, num_nics)
        if self.joint != "pcie" or self.machine.gpus_per_node < _LARGE_NODE_GPUS:
            return 0
        self.said.append("two GPUs behind each PCIe switch")
        return math.ceil(self.num_gpus / 2)

    # ------------------------------------------------------------------------- between nodes

    def _domain(self) -> dict[str, Any]:
        """Return the NVLink domain: racks that are equally full."""
        m, model = self.machine, self.model
        most = max(1, _RACK_GPUS // m.gpus_per_node)
        racks = math.ceil(m.num_nodes / most)
        if racks > 1:
            self.said.append(f"the {m.num_nodes} nodes are spread evenly over {racks} racks")
        latency_s, latency_source = peer_latency(model)
        switches = max(1, model.num_links)
        return {
            "num_nodes": math.ceil(m.num_nodes / racks),
            "num_switches": switches,
            "bandwidth_bytes_per_s": self.peer_bytes_per_s / switches,
            "latency_s": latency_s / 2,
            "multicast": model.has_multicast,
            "source": f"intra_GBps_per_gpu, or the data sheet of {model.name}. {latency_source}",
        }

    def _network(self, nics: _Nics) -> dict[str, Any]:
        plugin = self.machine.plugin
        latency_s, latency_source = self._nic_latency(nics.bytes_per_s)
        self.said.append("between nodes is one stage of switches with full bisection")
        if plugin is None:
            self.said.append("the network is InfiniBand")
        return {
            "kind": "infiniband" if plugin is None else "ethernet",
            "layout": "rail" if nics.count >= _RAIL_NICS else "tree",
            "nic_bandwidth_bytes_per_s": nics.bytes_per_s,
            "nic_latency_s": latency_s,
            "source": f"{nics.source}. {latency_source}",
            "tiers": [
                {
                    "name": "fabric",
                    "latency_s": ONE_STAGE_LATENCY_S,
                    "source": "one full stage and its latency are assumed",
                }
            ],
        }

    def _nics(self) -> _Nics:
        m = self.machine
        count, rate = m.nics_per_node, m.nic_bytes_per_s
        source = "nics_per_node and nic_gbps"
        if count is None or rate is None:
            name = self.model.name
            standard = next((s for s in _STANDARD_NICS if name.startswith(s[0])), None)
            if standard is None:
                raise InvalidInputError(
                    f"nics_per_node or nic_gbps is not given, and no standard is known for {name}",
                    where="nics_per_node" if count is None else "nic_gbps",
                )
            _, per_gpu, usual = standard
            count = math.ceil(per_gpu * m.gpus_per_node) if count is None else count
            rate = usual if rate is None else rate
            source = f"the vendor's standard for {name}"
            self.said.append(
                f"nics_per_node or nic_gbps is not given: {counted(count, 'NIC')} of "
                f"{rate / _GBIT_BYTES:g} Gb/s as is standard for {m.gpus_per_node} x {name}"
            )
        if count == 0:
            raise InvalidInputError(
                f"nics_per_node=0 cannot join {m.num_nodes} nodes", where="nics_per_node"
            )
        return _Nics(math.ceil(count * self.num_gpus / m.gpus_per_node), rate, source)

    def _nic_latency(self, rate: float) -> tuple[float, str]:
        plugin = self.machine.plugin
        if plugin == "gib":
            return _ROCE[0], f"Latency: {_ROCE[1]}"
        if plugin != "aws-ofi-nccl":
            return nic_latency(self.model, over_tcp=plugin == "tcpx")
        if self.model.architecture in _OLD_GPUS:
            latency_s, reason = _EFA_V1
        else:
            latency_s, reason = _EFA_V2 if rate <= 100 * _GBIT_BYTES else _EFA_V3
        return latency_s, f"Latency: {reason}"
