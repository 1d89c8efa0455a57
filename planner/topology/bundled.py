"""The topologies that come with the package: ``topologies/*.json``.

``topologies/machines.csv`` says which of them describes each machine that published measurements
were taken on, and what had to be assumed.
"""

import csv
import json
from functools import cache
from importlib import resources

from planner.errors import UnknownNameError
from planner.topology.document import TopologyDocument, parse_topology

__all__ = ["load_topology", "machine_topologies", "topology_names"]


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
        raise UnknownNameError("topology", name, topology_names(), remedy="or give its file")
    text = resources.files("topologies").joinpath(f"{name}.json").read_text("utf-8")
    return parse_topology(json.loads(text))


def machine_topologies() -> dict[tuple[str, str], str]:
    """Return the topology of every machine that published measurements name.

    Keys are (file, machine): ("collectives", the machine as that table prints it), or
    ("training_runs", "SOURCE/GPU", its ``source_id`` and ``gpu``).
    """
    text = resources.files("topologies").joinpath("machines.csv").read_text("utf-8")
    return {
        (row["file"], row["machine"]): row["topology"] for row in csv.DictReader(text.splitlines())
    }
