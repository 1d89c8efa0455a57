"""What the lab emulates of a topology document: hosts, ranks on them, switches, links."""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final, Literal

import networkx as nx

from planner.errors import InvalidInputError
from planner.topology.document import NodeType, TopologyDocument
from planner.topology.graph import build_graph

__all__ = ["Cluster", "Link", "Order", "RankContext", "cluster_of"]

Order = Literal["natural", "interleaved"]

# The network of a lab is its own: no address or port can be taken.
_FIRST_ADDRESS: Final = IPv4Address("10.0.0.1")
_MASTER_PORT: Final = 29500

# What a host may consist of: its processes share memory, loopback and one NIC, at no set rate.
_PARTS: Final = ("process", "cpu", "nic")
_LINKS: Final = (("loopback", {"process", "cpu"}), ("pcie", {"cpu", "nic"}))


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two vertices of the document's graph.

    Attributes:
        lower: The NIC ("n0/nic"), or the switch of the lower tier.
        upper: The switch.
        bytes_per_s: Its rate, each way.
        host: Number of the host whose NIC it is; None between switches.
    """

    lower: str
    upper: str
    bytes_per_s: float
    host: int | None


@dataclass(frozen=True, slots=True)
class RankContext:
    """What an experiment's function is told of its place.

    Attributes:
        rank: In the default process group.
        world_size: Ranks of the cluster.
        local_rank: On its host.
        local_world_size: Ranks of its host.
        host: Name of its host.
        units: Ranks of every host, ascending.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """An emulated cluster; without links it is one host.

    Attributes:
        name: That of the document.
        hosts: Names of the hosts.
        ranks_per_host: Processes on each.
        order: Rank r is on host r // ranks_per_host (natural) or r % hosts (interleaved).
        switches: Vertices of the graph.
        links: Of hosts to switches and among switches.
    """

    name: str
    hosts: tuple[str, ...]
    ranks_per_host: int
    order: Order
    switches: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the cluster."""
        return len(self.hosts) * self.ranks_per_host

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every host, ascending."""
        if self.order == "interleaved":
            return tuple(
                tuple(range(host, self.world_size, len(self.hosts)))
                for host in range(len(self.hosts))
            )
        firsts = range(0, self.world_size, self.ranks_per_host)
        return tuple(tuple(range(first, first + self.ranks_per_host)) for first in firsts)

    def host_of(self, rank: int) -> int:
        """Return the number of the host that ``rank`` is on."""
        return next(host for host, ranks in enumerate(self.units) if rank in ranks)

    def address(self, host: int) -> str:
        """Return the IP address of a host: its NIC's, or loopback if it is the only one."""
        return str(_FIRST_ADDRESS + host) if self.links else "127.0.0.1"

    def context(self, rank: int) -> RankContext:
        """Return the place of ``rank``."""
        host = self.host_of(rank)
        return RankContext(
            rank=rank,
            world_size=self.world_size,
            local_rank=self.units[host].index(rank),
            local_world_size=self.ranks_per_host,
            host=self.hosts[host],
            units=self.units,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of ``rank``: those of torchrun, gloo's interface, one thread."""
        place = self.context(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "MASTER_ADDR": self.address(self.host_of(0)),
            "MASTER_PORT": str(_MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0" if self.links else "lo",
            "OMP_NUM_THREADS": "1",
        }


def cluster_of(document: TopologyDocument, order: Order = "natural") -> Cluster:
    """Return what the lab emulates of the default nodes of ``document``.

    Raises:
        InvalidInputError: The document has something that the lab cannot emulate.
    """
    graph = build_graph(document)
    nodes = range(document.default_nodes)
    for node in nodes:
        _check_node(document, node)
    links = _links(graph)
    joined = {link.host for link in links}
    for node in nodes if len(nodes) > 1 else ():
        if node not in joined:
            raise _refused(document, f"the NIC of host {document.host(node)} is down")
    return Cluster(
        name=document.name,
        hosts=tuple(document.host(node) for node in nodes),
        ranks_per_host=document.gpus_per_node,
        order=order,
        switches=tuple(name for name, part in graph.nodes.items() if part["kind"] == "switch"),
        links=links,
    )


def _check_node(document: TopologyDocument, node: int) -> None:
    kind, host = document.node_type(node), document.host(node)
    if kind.count("gpu"):
        raise _refused(
            document,
            f"host {host} has {kind.count('gpu')} GPUs; the lab needs workers of kind 'process'",
        )
    if kind.count("nic") > 1 or (document.default_nodes > 1 and not kind.count("nic")):
        raise _refused(document, f"host {host} has {kind.count('nic')} NICs; the lab gives each 1")
    if kind.count("cpu") > 1:
        raise _refused(document, f"host {host} has {kind.count('cpu')} CPUs; the lab gives each 1")
    if foreign := _foreign(kind):
        raise _refused(
            document,
            f"host {host}: {foreign[0]} is not emulated; a host has processes joined to one cpu by "
            "loopback, and the cpu to one nic by pcie",
        )
    slow = next((i for i in document.impairments if (i.part or "").split("/")[0] == host), None)
    if slow is not None and slow.part not in {f"{host}/{nic}" for nic in kind.names("nic")}:
        raise _refused(
            document, f"impairment {slow}: the lab slows links only; a world file slows ranks"
        )


def _foreign(node: NodeType) -> list[str]:
    """Return the links and parts of a node that no host of the lab has."""
    kinds = {name: c.kind for c in node.components for name in (c.id, *c.names())}
    links = [
        f"{link.kind} {'-'.join(link.between)}"
        for link in node.links
        if (link.kind, {kinds[end] for end in link.between}) not in _LINKS
    ]
    return links + [f"{c.kind} {c.id}" for c in node.components if c.kind not in _PARTS]


def _links(graph: nx.Graph[str]) -> tuple[Link, ...]:
    """Return the edges of the network: those with a switch at one end, or both."""
    links = []
    for a, b, edge in graph.edges(data=True):
        kinds = {end: graph.nodes[end]["kind"] for end in (a, b)}
        if "switch" not in kinds.values():
            continue
        lower, upper = (b, a) if kinds[b] == "nic" else (a, b)
        host = graph.nodes[lower].get("node")
        links.append(Link(lower, upper, edge["bandwidth_bytes_per_s"], host))
    return tuple(links)


def _refused(document: TopologyDocument, why: str) -> InvalidInputError:
    return InvalidInputError(f"topology {document.name!r}: {why}", where="topology")
