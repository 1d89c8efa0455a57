"""A cluster as a file: one node type, repeated, and the network between the nodes.

The unit of a *node* is a host: what runs one ``torchrun``. Everything that repeats is written
once with a count, so that 4,096 nodes read as easily as one; what differs (other boards, weak
links, switches with fewer hosts) is written as the exception it is. Bandwidths are per direction,
every figure stands beside its source.

A component of kind ``gpu`` is one accelerator; of kind ``process``, one rank of a CPU machine,
which shares the node's ``cores`` with the others. A document has one or the other; the code
calls both *workers*. Documents come from users too, so every size here is bounded.
"""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from planner.documents import validated
from planner.errors import InvalidInputError
from planner.plan import Document, Precision
from planner.topology.checks import (
    MAX_ASSUMPTION_CHARS,
    MAX_ASSUMPTIONS,
    MAX_COMPONENTS_PER_NODE,
    MAX_DESCRIPTION_CHARS,
    MAX_SOURCE_CHARS,
    check_document,
)
from planner.topology.expand import SingleLink, merged_links

__all__ = [
    "HOST_NAME_PATTERN",
    "Component",
    "ComponentKind",
    "DeviceFigures",
    "HostName",
    "Identifier",
    "Impairment",
    "Island",
    "Library",
    "Link",
    "LinkKind",
    "Network",
    "NodeType",
    "NvlinkDomain",
    "Tier",
    "TopologyDocument",
    "parse_topology",
]

ComponentKind = Literal["gpu", "process", "cpu", "nvswitch", "pcie_switch", "nic"]
LinkKind = Literal["nvlink", "xgmi", "pcie", "c2c", "smp", "loopback"]
Library = Literal["nccl", "rccl", "hccl", "oneccl", "gloo", "mpi"]

# With less, a step would take longer than the universe is old, and numbers overflow.
_LEAST_FACTOR: Final = 1e-6

Name = Annotated[str, Field(min_length=1, max_length=120)]
HOST_NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"
HostName = Annotated[str, Field(pattern=HOST_NAME_PATTERN)]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
Source = Annotated[
    str, Field(min_length=1, max_length=MAX_SOURCE_CHARS, description="where figures come from")
]
NodeCount = Annotated[int, Field(ge=1, le=1_000_000)]
Units = Annotated[
    tuple[NodeCount, ...],
    Field(
        min_length=1,
        max_length=100_000,
        fail_fast=True,  # here and below: of a million wrong items the first is told
        description="nodes of each unit, in host order",
    ),
]


class Component(Document):
    """``count`` equal parts of a node, called id0, id1, ...; a single one is called id."""

    id: Identifier
    kind: ComponentKind
    count: int = Field(default=1, ge=1, le=MAX_COMPONENTS_PER_NODE)
    multicast: bool = Field(
        default=False, description="an nvswitch that copies and reduces (NVLink SHARP, NVLS)"
    )

    def names(self) -> tuple[str, ...]:
        """Return the name of each part."""
        if self.count == 1:
            return (self.id,)
        return tuple(f"{self.id}{i}" for i in range(self.count))


class Link(Document):
    """``count`` parallel links between each pair that ``pattern`` makes of two components.

    ``all`` joins each with each. ``blocks`` gives each of the fewer an equal, consecutive share
    of the more numerous (8 GPUs on 4 switches: gpu0, gpu1 on the first). An end is the id of a
    component or the name of one of its parts.
    """

    between: tuple[Identifier, Identifier]
    pattern: Literal["blocks", "all"] = "blocks"
    kind: LinkKind
    count: int = Field(default=1, ge=1, le=1024)
    bandwidth_bytes_per_s: float = Field(description="one link, one direction, 1e3 to 1e14")
    latency_s: float = Field(description="crossing the link once, 0 to 1")
    source: Source

    def label(self) -> str:
        """Return the link as people write it."""
        return f"{self.between[0]}->{self.between[1]}"


class NodeType(Document):
    """What one host is made of. Workers are numbered as listed; so are their local ranks."""

    components: tuple[Component, ...] = Field(min_length=1, max_length=256)
    links: tuple[Link, ...] = Field(min_length=1, max_length=4096, fail_fast=True)
    cores: int | None = Field(
        default=None, ge=1, le=4096, description="CPU cores that the processes of a node share"
    )
    source: Source

    def workers(self) -> tuple[str, ...]:
        """Return the names of the GPUs, or of the processes of a CPU machine, in rank order."""
        return tuple(n for c in self.components if c.kind in ("gpu", "process") for n in c.names())

    def names(self, kind: ComponentKind) -> tuple[str, ...]:
        """Return the names of the parts of ``kind``, in order."""
        return tuple(n for c in self.components if c.kind == kind for n in c.names())

    def count(self, kind: ComponentKind) -> int:
        """Return how many parts of ``kind`` a node has."""
        return sum(c.count for c in self.components if c.kind == kind)

    def single_links(self) -> tuple[SingleLink, ...]:
        """Return the link of every joined pair, parallel ones added up."""
        return tuple(merged_links(self).values())


class NvlinkDomain(Document):
    """NVSwitches outside the nodes: every GPU of ``num_nodes`` nodes is on every switch."""

    num_nodes: int = Field(ge=1, le=4096)
    units: Units | None = Field(
        default=None, description="nodes of each domain where they differ; none above num_nodes"
    )
    num_switches: int = Field(ge=1, le=1024)
    bandwidth_bytes_per_s: float = Field(description="GPU to one switch, one direction")
    latency_s: float = Field(description="GPU to switch, 0 to 1")
    multicast: bool = False
    source: Source


class Tier(Document):
    """One stage of switches; it joins the units of the tier below (nodes, for the first).

    Units are equal (``num_nodes``) or listed (``units``). ``oversubscription`` 2 means that all
    senders below share half of what they could send.
    """

    name: Identifier
    num_nodes: NodeCount | None = Field(
        default=None, description="nodes of one unit; null = the whole cluster, or as in units"
    )
    units: Units | None = None
    unit_names: (
        Annotated[tuple[HostName, ...], Field(min_length=1, max_length=100_000, fail_fast=True)]
        | None
    ) = Field(default=None, description="what its switches are called; else name and number")
    oversubscription: float = Field(default=1.0, description="1 to 1000")
    latency_s: float = Field(description="added to a message that comes up here, 0 to 1")
    source: Source


class Network(Document):
    """What joins the NICs. ``rail``: the i-th NICs of a unit share a switch; ``tree``: all do."""

    kind: Literal["infiniband", "ethernet"]
    layout: Literal["rail", "tree"]
    nic_bandwidth_bytes_per_s: float = Field(description="one NIC, one direction")
    nic_latency_s: float = Field(description="NIC to switch with the library's part, 0 to 1")
    gpudirect: Literal["off", "pxb", "phb"] = Field(
        default="pxb",
        description="how far from its GPU a NIC may be to read its memory: behind PCIe switches "
        "only, or on the same CPU; farther, and with off, messages pass through host memory",
    )
    in_network_reduction: bool = Field(
        default=False,
        exclude_if=lambda value: not value,
        description="its switches reduce for the library: SHARP, by a plugin of NCCL (CollNet)",
    )
    source: Source
    tiers: tuple[Tier, ...] = Field(min_length=1, max_length=8)


class DeviceFigures(Document):
    """A device that is not bundled, by its data sheet."""

    name: Name
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Precision, float] = Field(min_length=1)
    source: Source


class Island(Document):
    """Consecutive nodes that are not of the common type: another board, other GPUs."""

    first_node: int = Field(ge=0, le=1_000_000)
    num_nodes: NodeCount
    device: Name | DeviceFigures
    node: NodeType

    @property
    def device_name(self) -> str:
        """Name of the device, bundled or not."""
        return self.device if isinstance(self.device, str) else self.device.name


class Impairment(Document):
    """What does less than its figure says: a link, or a part, by their names in the graph.

    A part is a host (``n7``: its GPUs compute at ``factor`` of their speed), one GPU of it
    (``n7/gpu3``), or a NIC or switch (all its links carry ``factor``). 0 = down.
    """

    link: tuple[Name, Name] | None = None
    part: Name | None = None
    factor: float = Field(ge=0, lt=1, allow_inf_nan=False, description="of the healthy figure")
    source: Source = "stated by the user"

    @model_validator(mode="after")
    def _is_one_thing(self) -> "Impairment":
        if (self.link is None) == (self.part is None):
            raise ValueError("an impairment needs a link or a part, and not both")
        if 0 < self.factor < _LEAST_FACTOR:
            raise ValueError(
                f"factor={self.factor:g}: what has less than {_LEAST_FACTOR:g} left is down: give 0"
            )
        return self

    def names(self) -> frozenset[str]:
        """Return the ends of the link, in no order, or the part: what tells two apart."""
        return frozenset(self.link or (str(self.part),))

    def __str__(self) -> str:
        """Return it as the command line writes it: ``n7/nic0:rail0/rail0=0.5``."""
        what = ":".join(self.link) if self.link else self.part
        return f"{what}={'down' if self.factor == 0 else f'{self.factor:g}'}"


class TopologyDocument(Document):
    """A cluster of nodes. ``num_nodes`` of it, or which of them, is chosen when it is used."""

    schema_version: Literal[1] = 1
    name: Name
    description: str = Field(default="", max_length=MAX_DESCRIPTION_CHARS)
    library: Library
    device: Name | DeviceFigures
    default_nodes: NodeCount = 1
    max_nodes: NodeCount = 1
    hosts: tuple[HostName, ...] = Field(
        default=(),
        max_length=1_000_000,
        fail_fast=True,
        description="names of the nodes; else n0, n1, ...",
    )
    node: NodeType
    islands: tuple[Island, ...] = Field(default=(), max_length=64)
    nvlink_domain: NvlinkDomain | None = None
    network: Network | None = None
    impairments: tuple[Impairment, ...] = Field(default=(), max_length=4096, fail_fast=True)
    assumptions: tuple[Annotated[str, Field(max_length=MAX_ASSUMPTION_CHARS)], ...] = Field(
        default=(), max_length=MAX_ASSUMPTIONS
    )

    @property
    def device_name(self) -> str:
        """Name of the device, bundled or not."""
        return self.device if isinstance(self.device, str) else self.device.name

    @property
    def gpus_per_node(self) -> int:
        """GPUs, or processes of a CPU machine, of one node."""
        return len(self.node.workers())

    def host(self, node: int) -> str:
        """Return the name of a node, which its parts carry in the graph: ``n3/gpu0``."""
        return self.hosts[node] if self.hosts else f"n{node}"

    def island_of(self, node: int) -> Island | None:
        """Return the island that a node belongs to, None for the common type."""
        return next(
            (i for i in self.islands if i.first_node <= node < i.first_node + i.num_nodes), None
        )

    def type_number(self, node: int) -> int:
        """Return which type of node it is: the first node of its island, -1 for the common one."""
        island = self.island_of(node)
        return -1 if island is None else island.first_node

    def node_type(self, node: int) -> NodeType:
        """Return what a node is made of."""
        island = self.island_of(node)
        return self.node if island is None else island.node

    def checked_num_nodes(self, num_nodes: int | None) -> int:
        """Return ``num_nodes``, or the default for None.

        Raises:
            InvalidInputError: It is not a whole number from 1 to ``max_nodes``.
        """
        if num_nodes is None:
            return self.default_nodes
        whole = isinstance(num_nodes, int) and not isinstance(num_nodes, bool)
        if not whole or not 1 <= num_nodes <= self.max_nodes:
            raise InvalidInputError(
                f"topology {self.name!r}: nodes={num_nodes!r}; must be a whole number from 1 to "
                f"{self.max_nodes}",
                where="nodes",
            )
        return num_nodes

    @model_validator(mode="after")
    def _is_a_cluster(self) -> "TopologyDocument":
        try:
            check_document(self)
        except ValueError as exc:
            raise ValueError(f"topology {self.name!r}: {exc}") from exc
        return self


def parse_topology(data: object) -> TopologyDocument:
    """Return the document in ``data``, as ``planner.documents.parse_json`` read it.

    Raises:
        InvalidInputError: Saying which field of which topology is wrong, and what it needs.
    """
    try:
        return validated(TopologyDocument, data)
    except InvalidInputError as exc:
        text = str(exc)
        if not text.startswith("topology "):
            text = f"topology {_name_of(data)!r}: {text}"
        raise InvalidInputError(text, where=exc.where) from exc


def _name_of(data: object) -> str:
    return str(data.get("name", ""))[:120] if isinstance(data, dict) else ""
