"""``/topologies``: the bundled clusters, those imported, and what the collectives see of them."""

from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter, Response

from api.schemas import (
    DegradedTopology,
    ImportedTopology,
    LevelView,
    TopologyDegrade,
    TopologyImport,
    TopologySummary,
    TopologyView,
)
from api.strict import StrictRoute
from planner.resolving import topology_fingerprint
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric, live_nodes
from planner.topology.document import TopologyDocument
from planner.topology.drawing.cluster import draw_svg
from planner.topology.fabric import Level
from planner.topology.impair import degraded, parse_impairments
from planner.topology.importers.cluster import import_topology

__all__ = ["router"]

# A drawing has styles of its own, and nothing else that a browser would load or run.
_DRAWING_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Referrer-Policy": "same-origin",
}

router = APIRouter(prefix="/topologies", tags=["topologies"], route_class=StrictRoute)


@router.get("")
def list_topologies() -> list[TopologySummary]:
    """List the bundled topologies."""
    return [_summary(load_topology(name)) for name in topology_names()]


# Before the route below, which would take the ending for a part of the name.
@router.get(
    "/{name}.svg",
    response_class=Response,
    responses={200: {"content": {"image/svg+xml": {}}, "description": "a drawing"}},
)
def draw_topology(name: str, nodes: int | None = None) -> Response:
    """Return a drawing of a bundled topology, of all its nodes or of the first ``nodes``."""
    drawing = draw_svg(load_topology(name), nodes)
    return Response(drawing, media_type="image/svg+xml", headers=_DRAWING_HEADERS)


@router.get("/{name}")
def read_topology(name: str, nodes: int | None = None) -> TopologyView:
    """Return a topology document and the levels of the fabric compiled from it."""
    return _view(load_topology(name), nodes)


@router.post("/import")
def import_from_tools(request: TopologyImport) -> ImportedTopology:
    """Return the topology of what the tools of a cluster print, at its default number of nodes.

    Post the document as ``topology`` of a request to plan with it; nothing is stored.
    """
    found = import_topology(
        request.node,
        node_source="node",
        gpu=request.gpu,
        fabric_text=request.fabric,
        options=request.options(),
    )
    view = _view(found.document, None)
    return ImportedTopology(**dict(view), remarks=found.remarks)


@router.post("/degrade")
def degrade(request: TopologyDegrade) -> DegradedTopology:
    """Return the topology with weak or broken parts, and its levels before and after.

    Post the document as ``topology`` of a request to plan with it; nothing is stored.
    """
    given = request.topology
    document = load_topology(given) if isinstance(given, str) else given
    after = degraded(document, parse_impairments(request.link, request.node))
    view = _view(after, live_nodes(after))
    before = compile_fabric(document, live_nodes(document))
    return DegradedTopology(**dict(view), before=tuple(map(_level, before.levels)))


def _view(document: TopologyDocument, nodes: int | Sequence[int] | None) -> TopologyView:
    fabric = compile_fabric(document, nodes)
    return TopologyView(
        document=document,
        fingerprint=topology_fingerprint(document),
        nodes=fabric.num_gpus // fabric.gpus_per_node,
        num_gpus=fabric.num_gpus,
        levels=tuple(_level(level) for level in fabric.levels),
    )


def _summary(document: TopologyDocument) -> TopologySummary:
    return TopologySummary(
        name=document.name,
        description=document.description,
        device=document.device_name,
        gpus_per_node=document.gpus_per_node,
        default_nodes=document.default_nodes,
        max_nodes=document.max_nodes,
    )


def _level(level: Level) -> LevelView:
    return LevelView(
        name=level.name,
        kind=level.kind,
        unit_size=level.unit_size,
        bytes_per_s=level.bytes_per_s,
        alpha_s=level.alpha_s,
        measured=level.measured,
        source=level.source,
        unit_sizes=level.unit_sizes,
        direct_share=level.direct_share,
        path=level.path,
        multicast=level.multicast,
        oversubscription=level.oversubscription,
    )
