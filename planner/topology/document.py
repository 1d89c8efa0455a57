"""A cluster as a file: one node type, repeated, and the network between the nodes.

The unit of a *node* is a host: what runs one ``torchrun``. Everything that repeats is written
once with a count, so that 4,096 nodes read as easily as one. Bandwidths are per direction,
every figure stands beside its source.

A component of kind ``gpu`` is one accelerator; of kind ``process``, one rank of a CPU machine,
which shares the node's ``cores`` with the others. A document has one or the other; the code
calls both *workers*. Documents come from users too, so every size here is bounded.
"""

import math
from collections.abc import Iterator
from itertools import combinations, product
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from planner.documents import validated
from planner.errors import InvalidInputError
from planner.plan import Document

__all__ = [
    "BANDWIDTH_RANGE_BYTES_PER_S",
    "LATENCY_RANGE_S",
    "Component",
    "ComponentKind",
    "DeviceFigures",
    "Link",
    "LinkKind",
    "Network",
    "NodeType",
    "NvlinkDomain",
    "SingleLink",
    "Tier",
    "TopologyDocument",
    "parse_topology",
]

ComponentKind = Literal["gpu", "process", "cpu", "nvswitch", "pcie_switch", "nic"]
LinkKind = Literal["nvlink", "pcie", "c2c", "smp", "loopback"]

Name = Annotated[str, Field(min_length=1, max_length=120)]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
Source = Annotated[str, Field(min_length=1, max_length=1000, description="where figures come from")]

# What a figure may be. Wider than any machine: refused is only what must be a slip of the pen
# (bits for bytes, GB/s for B/s, ms for s).
BANDWIDTH_RANGE_BYTES_PER_S: Final = (1e3, 1e14)
LATENCY_RANGE_S: Final = (0.0, 1.0)
_OVERSUBSCRIPTION_RANGE: Final = (1.0, 1000.0)
_MEMORY_RANGE_BYTES: Final = (1e6, 1e14)
_FLOP_RANGE_PER_S: Final = (1e6, 1e18)

_MAX_COMPONENTS_PER_NODE: Final = 1024
_MAX_LINKS_PER_NODE: Final = 4096
_MAX_GPUS_PER_NODE: Final = 64
_MAX_WORKERS: Final = 1 << 20


class Component(Document):
    """``count`` equal parts of a node, called id0, id1, ...; a single one is called id."""

    id: Identifier
    kind: ComponentKind
    count: int = Field(default=1, ge=1, le=_MAX_COMPONENTS_PER_NODE)

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
    links: tuple[Link, ...] = Field(min_length=1, max_length=4096)
    cores: int | None = Field(
        default=None, ge=1, le=4096, description="CPU cores that the processes of a node share"
    )
    source: Source

    def workers(self) -> tuple[str, ...]:
        """Return the names of the GPUs, or of the processes of a CPU machine, in rank order."""
        return tuple(n for c in self.components if c.kind in ("gpu", "process") for n in c.names())

    def count(self, kind: ComponentKind) -> int:
        """Return how many parts of ``kind`` a node has."""
        return sum(c.count for c in self.components if c.kind == kind)


class NvlinkDomain(Document):
    """NVSwitches outside the nodes: every GPU of ``num_nodes`` nodes is on every switch."""

    num_nodes: int = Field(ge=1, le=4096)
    num_switches: int = Field(ge=1, le=1024)
    bandwidth_bytes_per_s: float = Field(description="GPU to one switch, one direction")
    latency_s: float = Field(description="GPU to switch, 0 to 1")
    source: Source


class Tier(Document):
    """One stage of switches; it joins the units of the tier below (nodes, for the first).

    ``oversubscription`` 2 means that all senders below share half of what they could send.
    """

    name: Identifier
    num_nodes: int | None = Field(
        default=None, ge=1, le=1_000_000, description="nodes of one unit; null = the whole cluster"
    )
    oversubscription: float = Field(default=1.0, description="1 to 1000")
    latency_s: float = Field(description="added to a message that comes up here, 0 to 1")
    source: Source


class Network(Document):
    """What joins the NICs. ``rail``: the i-th NICs of a unit share a switch; ``tree``: all do."""

    kind: Literal["infiniband", "ethernet"]
    layout: Literal["rail", "tree"]
    nic_bandwidth_bytes_per_s: float = Field(description="one NIC, one direction")
    nic_latency_s: float = Field(description="NIC to switch with the library's part, 0 to 1")
    source: Source
    tiers: tuple[Tier, ...] = Field(min_length=1, max_length=8)


class DeviceFigures(Document):
    """A device that is not bundled, by its data sheet."""

    name: Name
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Literal["bf16", "fp16", "fp8", "fp32", "fp64"], float] = Field(
        min_length=1
    )
    source: Source


class TopologyDocument(Document):
    """A cluster of equal nodes. ``num_nodes`` of it is chosen when it is used."""

    schema_version: Literal[1] = 1
    name: Name
    description: str = Field(default="", max_length=2000)
    library: Literal["nccl", "gloo"]
    device: Name | DeviceFigures
    default_nodes: int = Field(default=1, ge=1, le=1_000_000)
    max_nodes: int = Field(default=1, ge=1, le=1_000_000)
    node: NodeType
    nvlink_domain: NvlinkDomain | None = None
    network: Network | None = None
    assumptions: tuple[Annotated[str, Field(max_length=1000)], ...] = Field(
        default=(), max_length=64
    )

    @property
    def device_name(self) -> str:
        """Name of the device, bundled or not."""
        return self.device if isinstance(self.device, str) else self.device.name

    @property
    def gpus_per_node(self) -> int:
        """GPUs, or processes of a CPU machine, of one node."""
        return len(self.node.workers())

    def node_links(self) -> tuple["SingleLink", ...]:
        """Return the link of every joined pair of one node, parallel ones added up."""
        return tuple(_merged_links(self.node).values())

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
            _check_figures(self)
            _check_components(self)
            _check_size(self)
            _check_network(self)
            _check_connected(self)
        except ValueError as exc:
            raise ValueError(f"topology {self.name!r}: {exc}") from exc
        return self


class SingleLink(NamedTuple):
    """One expanded link of a node; ``bandwidth_bytes_per_s`` counts the parallel ones."""

    a: str
    b: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float


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


# ------------------------------------------------------------------------------- expansion


def _parts_by_end(node: NodeType) -> dict[str, tuple[str, ...]]:
    """Return what every possible end of a link stands for: a component, or one of its parts."""
    parts = {name: (name,) for component in node.components for name in component.names()}
    return parts | {component.id: component.names() for component in node.components}


def _ends(parts: dict[str, tuple[str, ...]], link: Link) -> tuple[tuple[str, ...], ...]:
    """Return the parts at both ends of a link.

    Raises:
        ValueError: No component has that id, no part that name.
    """
    for end in link.between:
        if end not in parts:
            raise ValueError(
                f"link {link.label()} ends at {end!r}, which is no component; there are "
                f"{', '.join(sorted(parts)[:12])}"
            )
    return tuple(parts[end] for end in link.between)


def _expand(parts: dict[str, tuple[str, ...]], link: Link) -> Iterator[SingleLink]:
    left, right = _ends(parts, link)
    if left == right:
        pairs = list(combinations(left, 2)) if link.pattern == "all" else []
    elif link.pattern == "all":
        pairs = list(product(left, right))
    else:
        pairs = _blocks(left, right, link)
    for a, b in pairs:
        yield SingleLink(a, b, link.kind, link.count * link.bandwidth_bytes_per_s, link.latency_s)


def _merged_links(node: NodeType) -> dict[frozenset[str], SingleLink]:
    """Return one link per joined pair.

    Raises:
        ValueError: A link joins a part to itself, or two kinds of link join one pair.
    """
    merged: dict[frozenset[str], SingleLink] = {}
    parts = _parts_by_end(node)
    for link in node.links:
        for single in _expand(parts, link):
            pair = frozenset((single.a, single.b))
            if len(pair) == 1:
                raise ValueError(f"link {link.label()} joins {single.a} to itself")
            before = merged.get(pair)
            if before is not None:
                if before.kind != single.kind:
                    raise ValueError(
                        f"{single.a} and {single.b} are joined by {before.kind} and by "
                        f"{single.kind}; let one of them pass through a switch or cpu"
                    )
                single = before._replace(
                    bandwidth_bytes_per_s=before.bandwidth_bytes_per_s
                    + single.bandwidth_bytes_per_s,
                    latency_s=max(before.latency_s, single.latency_s),
                )
            merged[pair] = single
    return merged


def _blocks(left: tuple[str, ...], right: tuple[str, ...], link: Link) -> list[tuple[str, str]]:
    more, fewer = max(len(left), len(right)), min(len(left), len(right))
    if more % fewer:
        raise ValueError(
            f"link {link.label()} shares {more} ends among {fewer}, which does not come out even; "
            'use pattern "all" or name the parts one by one'
        )
    return [(left[i * len(left) // more], right[i * len(right) // more]) for i in range(more)]


# ---------------------------------------------------------------------------------- checks


def _check_range(what: str, value: float, allowed: tuple[float, float]) -> None:
    low, high = allowed
    if not (math.isfinite(value) and low <= value <= high):
        positive = "> 0, " if low > 0 else ""
        raise ValueError(f"{what}={value:g}; must be {positive}from {low:g} to {high:g}")


def _check_figures(document: TopologyDocument) -> None:
    for what, value, allowed in _figures(document):
        _check_range(what, value, allowed)


def _figures(document: TopologyDocument) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Yield (what has which field, value, range) of every physical figure."""
    carriers: list[tuple[str, Any]] = [
        (f"link {link.label()}", link) for link in document.node.links
    ]
    if document.nvlink_domain is not None:
        carriers.append(("nvlink_domain", document.nvlink_domain))
    for carrier, value in carriers:
        bandwidth = value.bandwidth_bytes_per_s
        yield f"{carrier} has bandwidth_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
        yield f"{carrier} has latency_s", value.latency_s, LATENCY_RANGE_S
    if (net := document.network) is not None:
        bandwidth = net.nic_bandwidth_bytes_per_s
        yield "network has nic_bandwidth_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
        yield "network has nic_latency_s", net.nic_latency_s, LATENCY_RANGE_S
        for tier in net.tiers:
            oversubscription = tier.oversubscription
            yield f"tier {tier.name} has latency_s", tier.latency_s, LATENCY_RANGE_S
            yield (
                f"tier {tier.name} has oversubscription",
                oversubscription,
                _OVERSUBSCRIPTION_RANGE,
            )
    if isinstance(document.device, DeviceFigures):
        yield "device has memory_bytes", document.device.memory_bytes, _MEMORY_RANGE_BYTES
        bandwidth = document.device.memory_bytes_per_s
        yield "device has memory_bytes_per_s", bandwidth, BANDWIDTH_RANGE_BYTES_PER_S
        for precision, peak in document.device.peak_flop_per_s.items():
            yield f"device has peak_flop_per_s[{precision}]", peak, _FLOP_RANGE_PER_S


def _check_components(document: TopologyDocument) -> None:
    node = document.node
    if sum(c.count for c in node.components) > _MAX_COMPONENTS_PER_NODE:
        raise ValueError(f"a node may have {_MAX_COMPONENTS_PER_NODE} components at most")
    seen: set[str] = set()
    for component in node.components:
        for name in {component.id, *component.names()}:
            if name in seen:
                raise ValueError(f"component {name!r} occurs twice; give each its own id")
            seen.add(name)
    gpus, processes = node.count("gpu"), node.count("process")
    if bool(gpus) == bool(processes):
        raise ValueError(
            f"a node needs gpus or processes, one kind; got {gpus} gpus, {processes} processes"
        )
    if bool(processes) != (node.cores is not None):
        raise ValueError(
            f"node.cores={node.cores} with {processes} processes; give the cores of a machine "
            "whose ranks are processes, and only of one"
        )
    if gpus > _MAX_GPUS_PER_NODE:
        raise ValueError(f"a node has {gpus} gpus; at most {_MAX_GPUS_PER_NODE}")
    _check_links(node)


def _check_links(node: NodeType) -> None:
    num_links = 0
    parts = _parts_by_end(node)
    for link in node.links:
        left, right = (len(names) for names in _ends(parts, link))
        num_links += left * right if link.pattern == "all" else max(left, right)
        if num_links > _MAX_LINKS_PER_NODE:
            raise ValueError(f"a node may have {_MAX_LINKS_PER_NODE} links at most")
        if not any(True for _ in _expand(parts, link)):
            raise ValueError(
                f"link {link.label()} joins nothing; between parts of one component use pattern "
                '"all"'
            )


def _check_size(document: TopologyDocument) -> None:
    if document.default_nodes > document.max_nodes:
        raise ValueError(
            f"default_nodes={document.default_nodes} exceeds max_nodes={document.max_nodes}"
        )
    workers = document.gpus_per_node * document.max_nodes
    if workers > _MAX_WORKERS:
        raise ValueError(
            f"max_nodes={document.max_nodes} with {document.gpus_per_node} GPUs each is {workers} "
            f"GPUs; at most {_MAX_WORKERS}"
        )


def _check_network(document: TopologyDocument) -> None:
    domain, network = document.nvlink_domain, document.network
    if domain is not None and document.node.count("gpu") == 0:
        raise ValueError("nvlink_domain joins GPUs, but the node has none")
    if network is None:
        reach = domain.num_nodes if domain is not None else 1
        if document.max_nodes > reach:
            raise ValueError(
                f"max_nodes={document.max_nodes} but nothing joins more than {reach} nodes; "
                "give network, or lower max_nodes"
            )
        return
    if document.node.count("nic") == 0:
        raise ValueError("network joins NICs, but the node has none; add a component of kind nic")
    _check_tiers(network, below=domain.num_nodes if domain is not None else 1)
    last = network.tiers[-1]
    if last.num_nodes is not None and last.num_nodes < document.max_nodes:
        raise ValueError(
            f"tier {last.name}, the last, joins {last.num_nodes} nodes but "
            f"max_nodes={document.max_nodes}; its num_nodes may be null"
        )


def _check_tiers(network: Network, below: int) -> None:
    names = [tier.name for tier in network.tiers]
    if len(set(names)) != len(names) or {"nvlink", "pcie", "loopback"} & set(names):
        raise ValueError(f"tiers need distinct names other than those of links; got {names}")
    for tier in network.tiers[:-1]:
        if tier.num_nodes is None:
            raise ValueError(f"tier {tier.name} has num_nodes=null; only the last tier may")
    for tier in network.tiers:
        if tier.num_nodes is None:
            continue
        if tier.num_nodes <= below or tier.num_nodes % below:
            raise ValueError(
                f"tier {tier.name} has num_nodes={tier.num_nodes}; must be more than, and a "
                f"multiple of, the {below} nodes of a unit below"
            )
        below = tier.num_nodes


def _check_connected(document: TopologyDocument) -> None:
    """Every worker has a link, workers reach each other, NICs are reached by a worker."""
    neighbours: dict[str, set[str]] = {
        name: set() for c in document.node.components for name in c.names()
    }
    for link in document.node_links():
        neighbours[link.a].add(link.b)
        neighbours[link.b].add(link.a)
    workers = document.node.workers()
    if document.nvlink_domain is None and not neighbours[workers[0]]:
        raise ValueError(f"{workers[0]} has no link; add one, for example to the cpu over PCIe")
    start = workers if document.nvlink_domain is not None else workers[:1]
    reached, frontier = set(start), list(start)
    while frontier:
        for name in neighbours[frontier.pop()] - reached:
            reached.add(name)
            frontier.append(name)
    nics = [n for c in document.node.components if c.kind == "nic" for n in c.names()]
    for name in (*workers, *nics):
        if name not in reached:
            raise ValueError(
                f"{name} is not connected to {workers[0]}; add a link, for example over PCIe"
            )
