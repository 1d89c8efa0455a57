"""What joins the nodes of an imported topology: from a text about the fabric, or from options."""

from dataclasses import dataclass
from typing import Final, Literal

from planner.errors import InvalidInputError
from planner.hardware.gpus import GpuModel
from planner.topology.document import Network, NvlinkDomain, Tier
from planner.topology.importers.dump import FabricDump
from planner.topology.importers.figures import nic_latency, peer_latency
from planner.topology.importers.node import BuiltNode
from planner.topology.importers.options import ImportOptions
from planner.topology.importers.stages import found_stages, stated_stages, tiers_of
from planner.units import format_rate

__all__ = ["Joined", "join_nodes"]

_GBIT_BYTES: Final = 1e9 / 8
_RAIL_NICS: Final = 4
# Nodes that are planned for unless asked, of a cluster of which a text names many.
_DEFAULT_NODES: Final = 4


_OF_NETWORK: Final = ("layout", "leaf_nodes", "oversubscription", "kind", "gpudirect", "nic_gbps")


@dataclass(frozen=True, slots=True)
class Joined:
    """How nodes are joined.

    Attributes:
        max_nodes: How many there are.
        default_nodes: How many to plan for unless asked.
        hosts: Their names, if known.
        domain: NVSwitches outside the nodes.
        network: Between NICs.
        assumptions: What was guessed, in sentences for the user.
    """

    max_nodes: int
    default_nodes: int
    hosts: tuple[str, ...]
    domain: NvlinkDomain | None
    network: Network | None
    assumptions: tuple[str, ...]


def join_nodes(
    node: BuiltNode,
    model: GpuModel,
    fabric: FabricDump | None,
    options: ImportOptions,
    *,
    source: str,
) -> Joined:
    """Return what joins nodes of one kind.

    Args:
        node: Each of them.
        model: Its GPUs.
        fabric: What a text says of the fabric, or None.
        options: What the user says.
        source: What to call that text in messages and sources.

    Raises:
        InvalidInputError: An option contradicts the text, is not of use here, or is missing.
    """
    return _Joiner(node, model, fabric, options, source).join()


class _Joiner:
    """What is known while nodes are joined."""

    def __init__(
        self,
        node: BuiltNode,
        model: GpuModel,
        fabric: FabricDump | None,
        options: ImportOptions,
        source: str,
    ) -> None:
        self.node, self.model, self.fabric = node, model, fabric
        self.options, self.source = options, source
        self.said: list[str] = []
        self.max_nodes = self._max_nodes()
        self.domain_units = self._domain_units()

    def join(self) -> Joined:
        domain = self._domain()
        network = None
        if self.max_nodes > max(self.domain_units or (1,)):
            network = self._network()
        else:
            self._check_no_network_options()
        return Joined(
            max_nodes=self.max_nodes,
            default_nodes=self._default_nodes(),
            hosts=self.fabric.hosts if self.fabric else (),
            domain=domain,
            network=network,
            assumptions=tuple(dict.fromkeys(self.said)),
        )

    # ------------------------------------------------------------------------- how many nodes

    def _max_nodes(self) -> int:
        nodes = self.options.nodes
        if self.fabric is None:
            return nodes or self.options.domain_nodes or 1
        hosts = len(self.fabric.hosts)
        if hosts == 0:
            if nodes is None:
                raise InvalidInputError(
                    f"{self.source} names no nodes; say how many there are (nodes)", where="nodes"
                )
            return nodes
        if nodes is not None and nodes > hosts:
            raise InvalidInputError(
                f"nodes={nodes} but {self.source} has {hosts} hosts; ask for {hosts} at most",
                where="nodes",
            )
        self.said.append(
            f"all {hosts} hosts of {self.source} are taken to be nodes like the one imported"
        )
        return hosts

    def _default_nodes(self) -> int:
        if self.options.nodes is not None:
            return self.options.nodes
        largest = max(self.domain_units) if self.domain_units else _DEFAULT_NODES
        return min(self.max_nodes, largest)

    def _check_no_network_options(self) -> None:
        given = [name for name in _OF_NETWORK if getattr(self.options, name) is not None]
        if given and self.max_nodes == 1:
            raise InvalidInputError(
                f"{given[0]} is about what joins nodes, of which there is one; say how many there "
                "are (nodes), or give a text about the fabric",
                where=given[0],
            )
        if given:
            raise InvalidInputError(
                f"{given[0]} is about the network, but all {self.max_nodes} nodes are in one "
                "NVLink domain; leave it out, or ask for more nodes",
                where=given[0],
            )

    # -------------------------------------------------------------------- NVLink between nodes

    def _domain_units(self) -> tuple[int, ...] | None:
        """Return the nodes of each NVLink domain, None where there is none."""
        wanted, found = self.options.domain_nodes, self.fabric.domains if self.fabric else None
        has_rack = self.model.is_switched and self.model.is_coherent
        if wanted is not None and found is not None and wanted != max(found.units):
            raise InvalidInputError(
                f"domain_nodes={wanted} but the {found.name}s of {self.source} have "
                f"{max(found.units)} nodes; leave it out",
                where="domain_nodes",
            )
        if not has_rack:
            if wanted is not None:
                raise InvalidInputError(
                    f"domain_nodes={wanted}, but {self.model.name} has no NVLink between nodes; "
                    "leave it out",
                    where="domain_nodes",
                )
            if found is not None:
                self.said.append(
                    f"{self.model.name} has no NVLink between nodes: the {found.name}s of "
                    f"{self.source} are taken as its innermost switches, not as NVLink domains"
                )
            return None
        if wanted is None and found is None:
            self.said.append(
                f"{self.model.name} may share NVSwitches with other nodes: domain_nodes "
                "(--domain-nodes 18 for an NVL72) says how many; planned as if this node were alone"
            )
            return None
        if found is not None:
            self.said.append(
                f"each {found.name} of {self.source} is taken as one NVLink domain (in practice it "
                "is; Slurm does not say)"
            )
        units = found.units if found is not None else self._split(wanted or 1)
        return self._checked_domain(units)

    def _split(self, size: int) -> tuple[int, ...]:
        """Return domains of ``size`` nodes, none across two of the innermost switches."""
        tiers = self.fabric.tiers if self.fabric else ()
        of_leaf = tiers[0].units if tiers else (self.max_nodes,)
        if tiers:
            self.said.append(
                f"NVLink domains are taken to be runs of {size} hosts, none under two "
                f"{tiers[0].name}s: {self.source} does not show them"
            )
        return tuple(min(size, unit - start) for unit in of_leaf for start in range(0, unit, size))

    def _checked_domain(self, units: tuple[int, ...]) -> tuple[int, ...]:
        on_switches = self.node.on_switches
        joined_inside = any(link.kind == "nvlink" for link in self.node.links)
        if joined_inside:
            raise InvalidInputError(
                f"the GPUs of a node have their NVLinks to each other, so none are left for "
                f"NVSwitches outside it: {self.model.name} is not in an NVLink domain here",
                where="domain_nodes",
            )
        if on_switches is None:
            self.said.append(
                f"the text shows no NVLinks: all {self.model.num_links} of {self.model.name} are "
                "assumed to be on the NVSwitches of its domain"
            )
        return units

    def _domain(self) -> NvlinkDomain | None:
        if self.domain_units is None:
            return None
        model, units = self.model, self.domain_units
        latency_s, latency_source = peer_latency(model)
        equal = len(set(units)) == 1
        num_switches = self.node.on_switches or model.num_links
        return NvlinkDomain(
            num_nodes=max(units),
            units=None if equal else units,
            num_switches=num_switches,
            bandwidth_bytes_per_s=model.link_bytes_per_s,
            latency_s=latency_s / 2,
            multicast=model.has_multicast,
            source=f"{model.name}: each of {num_switches} links of "
            f"{format_rate(model.link_bytes_per_s, 'B/s')} per direction to another NVSwitch. "
            f"{latency_source}",
        )

    # ---------------------------------------------------------------------------- the network

    def _network(self) -> Network:
        if self.node.num_nics == 0:
            raise InvalidInputError(
                f"{self.max_nodes} nodes need a network, but the text about the node shows no "
                "NIC (a container may hide them: run the tool on the host); give one that does: "
                "nvidia-smi topo -m, the file of NCCL_TOPO_DUMP_FILE (on AMD RCCL writes it), or "
                "lstopo --of xml",
                where="node",
            )
        rate, rate_source = self._nic_rate()
        kind, layout = self._kind(), self._layout()
        gpudirect = self.options.gpudirect or "pxb"
        if self.options.gpudirect is None:
            self.said.append(
                "NICs read the memory of GPUs behind the same PCIe switch, farther ones get it "
                "through host memory: GPUDirect as NCCL has it by default (--gpudirect)"
            )
        over_tcp = kind == "ethernet" and gpudirect == "off"
        latency_s, latency_source = nic_latency(self.model, over_tcp=over_tcp)
        return Network(
            kind=kind,
            layout=layout,
            nic_bandwidth_bytes_per_s=rate,
            nic_latency_s=latency_s,
            gpudirect=gpudirect,
            source=f"{rate_source}. {latency_source}",
            tiers=self._tiers(layout),
        )

    def _nic_rate(self) -> tuple[float, str]:
        """Return bytes/s of one NIC and who says so: the user, the fabric, or the node."""
        stated = self.options.nic_gbps
        fabric = self.fabric.nic_bytes_per_s if self.fabric else None
        node = self.node.nic_bytes_per_s
        found = [rate for rate in (fabric, node) if rate is not None]
        if self.fabric and self.fabric.nics_per_host not in (None, self.node.num_nics):
            self.said.append(
                f"the node has {self.node.num_nics} NICs, the hosts of {self.source} have "
                f"{self.fabric.nics_per_host} on its switches: the node's are planned with "
                "(--nics names them)"
            )
        if stated is None and not found:
            raise InvalidInputError(
                "no text gives the rate of the NICs; say it: --nic-gbps 400", where="nic_gbps"
            )
        rate = found[0] if stated is None else stated * _GBIT_BYTES
        others = [other for other in found if other != rate]
        if others:
            self.said.append(
                f"NICs are planned with {rate / _GBIT_BYTES:g} Gbit/s; the texts also have "
                f"{', '.join(f'{other / _GBIT_BYTES:g}' for other in others)}"
            )
        if stated is not None:
            return rate, f"{stated:g} Gbit/s per NIC, stated by the user"
        who = self.source if fabric is not None else "the text about the node"
        return rate, f"{rate / _GBIT_BYTES:g} Gbit/s per NIC: {who}"

    def _kind(self) -> Literal["infiniband", "ethernet"]:
        found = self.fabric.kind if self.fabric else None
        if found is not None and self.options.kind not in (None, found):
            raise InvalidInputError(
                f"kind={self.options.kind} but {self.source} is of {found}; leave it out",
                where="kind",
            )
        if found is None and self.options.kind is None:
            self.said.append("the network is taken to be InfiniBand (--kind)")
        return found or self.options.kind or "infiniband"

    def _layout(self) -> Literal["rail", "tree"]:
        if self.options.layout is not None:
            return self.options.layout
        layout: Literal["rail", "tree"] = "rail" if self.node.num_nics >= _RAIL_NICS else "tree"
        meaning = (
            "the i-th NICs of all nodes share a switch" if layout == "rail" else "all share it"
        )
        self.said.append(
            f"layout {layout} is assumed for {self.node.num_nics} NICs a node: {meaning} (--layout)"
        )
        return layout

    def _tiers(self, layout: Literal["rail", "tree"]) -> tuple[Tier, ...]:
        if self.fabric is None:
            found, said = stated_stages(self.options, layout, self.max_nodes)
        else:
            found, said = found_stages(
                self.fabric,
                self.options,
                max_nodes=self.max_nodes,
                with_blocks=self.domain_units is None,
                source=self.source,
            )
        tiers, more = tiers_of(
            found,
            self.options,
            max_nodes=self.max_nodes,
            domain_units=self.domain_units,
            hosts=self.fabric.hosts if self.fabric else (),
            source=self.source if self.fabric else "stated by the user, or assumed",
        )
        self.said += [*said, *more]
        return tiers
