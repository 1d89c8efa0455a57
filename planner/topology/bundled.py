"""The topologies that come with the package: ``topologies/*.json``."""

import json
from functools import cache
from importlib import resources

from planner.errors import UnknownNameError
from planner.topology.document import TopologyDocument, parse_topology

__all__ = ["load_topology", "topology_names"]


@cache
def topology_names() -> tuple[str, ...]:
    """Return the names of the bundled topologies, sorted."""
    files = resources.files("topologies").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def load_topology(name: str) -> TopologyDocument:
    """Return the bundled topology called ``name``.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in topology_names():
        raise UnknownNameError("topology", name, topology_names())
    text = resources.files("topologies").joinpath(f"{name}.json").read_text("utf-8")
    return parse_topology(json.loads(text))
