"""Topology documents for the lab: its own, the planner's bundled ones, files."""

from importlib import resources
from pathlib import Path
from typing import Final

from planner.documents import parse_json
from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology, topology_names
from planner.topology.document import TopologyDocument, parse_topology

__all__ = ["LAB_TOPOLOGIES", "lab_topology", "with_nic_rate"]

LAB_TOPOLOGIES: Final = ("lab-2x2", "lab-2x4", "lab-4x2", "loopback")


def lab_topology(name: str) -> TopologyDocument:
    """Return the document of that name, of the lab's or the planner's, or in that file.

    Raises:
        InvalidInputError: There is none, or the file holds no topology.
    """
    if name in LAB_TOPOLOGIES:
        file = resources.files("benchmarks.lab").joinpath(f"topologies/{name}.json")
        return parse_topology(parse_json(file.read_bytes(), source=name))
    if name in topology_names():
        return load_topology(name)
    try:
        text = Path(name).read_bytes()
    except OSError as exc:
        raise InvalidInputError(
            f"topology {name!r}: no bundled name and no readable file ({exc.strerror}); the lab's "
            f"are {', '.join(LAB_TOPOLOGIES)}",
            where="topology",
        ) from exc
    return parse_topology(parse_json(text, source=name))


def with_nic_rate(document: TopologyDocument, bytes_per_s: float) -> TopologyDocument:
    """Return ``document`` with NICs of another rate, and trunks that follow it.

    Raises:
        InvalidInputError: It has no network, or the rate is out of range.
    """
    if document.network is None:
        raise InvalidInputError(
            f"topology {document.name!r} has no network whose rate could change", where="topology"
        )
    fields = document.model_dump(mode="json")
    fields["network"]["nic_bandwidth_bytes_per_s"] = bytes_per_s
    fields["description"] += f" Then its NICs were set to {bytes_per_s:g} bytes/s."
    return parse_topology(fields)
