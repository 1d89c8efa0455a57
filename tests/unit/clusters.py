"""Small clusters that tests describe: parts, links, networks, documents."""

from typing import Any

from planner.topology.document import Impairment, TopologyDocument, parse_topology
from planner.topology.fabric import Fabric
from planner.topology.impair import degraded

SOURCE = "made up"


def part(name: str, kind: str, count: int = 1) -> dict[str, Any]:
    """Return a component."""
    return {"id": name, "kind": kind, "count": count}


def link(a: str, b: str, kind: str, bytes_per_s: float, **more: Any) -> dict[str, Any]:
    """Return a link with a latency of 1 us."""
    figures = {"bandwidth_bytes_per_s": bytes_per_s, "latency_s": 1e-6, "source": SOURCE}
    return {"between": [a, b], "kind": kind, **figures, **more}


def tier(name: str, num_nodes: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a tier without oversubscription."""
    return {"name": name, "num_nodes": num_nodes, "latency_s": 1e-7, "source": SOURCE, **more}


def network(nic_bytes_per_s: float, *tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a network whose NICs share switches; one tier if none is given."""
    nic = {"nic_bandwidth_bytes_per_s": nic_bytes_per_s, "nic_latency_s": 1e-6}
    above = list(tiers) or [tier("leaf")]
    return {
        "kind": "infiniband",
        "layout": "tree",
        **nic,
        "tiers": above,
        "source": SOURCE,
        **more,
    }


def cluster(
    parts: list[dict[str, Any]], links: list[dict[str, Any]], num_nodes: int = 1, **more: Any
) -> TopologyDocument:
    """Return a document of ``num_nodes`` nodes made of ``parts`` and ``links``."""
    return parse_topology(
        {
            "name": "made-up",
            "library": "nccl",
            "device": "a100-sxm-80gb",
            "default_nodes": num_nodes,
            "max_nodes": num_nodes,
            "node": {"components": parts, "links": links, "source": SOURCE},
            **more,
        }
    )


def shape(fabric: Fabric) -> list[tuple[str, int, float]]:
    """Return name, unit and bytes/s of every level."""
    return [(level.name, level.unit_size, level.bytes_per_s) for level in fabric.levels]


def changed(document: TopologyDocument, **changes: Any) -> TopologyDocument:
    """Return ``document`` with other fields."""
    return parse_topology({**document.model_dump(mode="json"), **changes})


def weak(document: TopologyDocument, factor: float, *ends: str) -> TopologyDocument:
    """Return ``document`` with one link, or one part, at ``factor`` of its figure."""
    if len(ends) == 2:
        return degraded(document, [Impairment(link=(ends[0], ends[1]), factor=factor)])
    return degraded(document, [Impairment(part=ends[0], factor=factor)])
