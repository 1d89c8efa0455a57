"""How a library's calls run on GPUs of one architecture: its protocols, as lines of time by size.

A protocol trades latency for bandwidth: NCCL's LL stores a flag beside every 4 bytes, LL128 one
beside every 120, Simple waits for whole slices (NCCL 2.30.7, src/graph/tuning.cc). Each is a line
here, and a call takes the lowest, as a tuner does::

    seconds = launch_s + ratio * latency of the hops + bytes / (share * what large transfers reach)

Few channels and many are lines of their own. Algorithms that move data alike share them: a
*family*. The figures are in ``protocols.json`` beside this file, fitted to published measurements
by ``benchmarks/fit_collectives.py``, which writes it; each entry says from what.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from planner.hardware.gpus import Architecture

__all__ = [
    "Family",
    "Protocol",
    "Protocols",
    "protocols_by_key",
    "protocols_from",
    "protocols_key",
    "protocols_of",
]

# ring: from neighbour to neighbour, in rings, chains and trees; switch: NVSwitches reduce and copy;
# direct: grouped sends; copy: kernels or engines that load and store in peers' memory.
Family = Literal["ring", "switch", "direct", "copy"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """One line of time by size.

    Attributes:
        name: As the library calls it, and with how many channels where that makes two lines.
        launch_s: One call, before the first byte moves.
        hop_ratio: Latency of a hop inside a host, over the level's.
        share: Of what large transfers are taken to reach inside a host (``ACHIEVED_FRACTION``).
        network_hop_ratio: As ``hop_ratio``, between hosts.
        network_share: As ``share``, between hosts.
    """

    name: str
    launch_s: float
    hop_ratio: float = 1.0
    share: float = 1.0
    network_hop_ratio: float = 1.0
    network_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Protocols:
    """All lines of one library on one architecture and kind of link.

    Attributes:
        lines: By family, at least one each.
        own_share: By family: what a byte that a member copies for itself costs, over one that it
            sends inside a host.
        source: What the figures rest on.
    """

    lines: Mapping[Family, tuple[Protocol, ...]]
    own_share: Mapping[Family, float]
    source: str

    @property
    def largest_share(self) -> float:
        """Share of the line that reaches most: what a measured level's rate is of."""
        return max(line.share for lines in self.lines.values() for line in lines)

    @property
    def largest_network_share(self) -> float:
        """The same of levels between hosts."""
        return max(line.network_share for lines in self.lines.values() for line in lines)

    def only(self, name: str) -> "Protocols":
        """Return the lines of the protocol ``name``, in families that have it."""
        kept = {
            family: tuple(line for line in lines if line.name.split(",")[0] == name) or lines
            for family, lines in self.lines.items()
        }
        return replace(self, lines=kept)


def protocols_of(architecture: Architecture, kind: str) -> Protocols | None:
    """Return the lines of GPUs of an architecture joined by links of ``kind``; None: not known.

    An architecture that nobody measured has those of the nearest that was, as its source says;
    GPUs that only a network joins have those of their architecture's own links.
    """
    key = protocols_key(architecture, kind)
    return None if key is None else protocols_by_key()[key]


def protocols_key(architecture: Architecture, kind: str) -> str | None:
    """Return the entry of ``protocols.json`` whose lines such GPUs have, if any."""
    for one in (kind, "nvlink", "xgmi", "pcie"):
        if f"{architecture}/{one}" in _entries():
            key = f"{architecture}/{one}"
            return str(_entries()[key].get("as", key))
    return None


@cache
def _entries() -> dict[str, Any]:
    text = resources.files("planner.hardware").joinpath("protocols.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def protocols_by_key() -> dict[str, Protocols]:
    """Return all lines that were fitted, by architecture and kind of link."""
    return {key: protocols_from(e) for key, e in _entries().items() if "as" not in e}


def protocols_from(values: Mapping[str, Any]) -> Protocols:
    """Return the lines of one entry of ``protocols.json``."""
    lines = {
        family: tuple(Protocol(**line) for line in values["lines"][family])
        for family in get_args(Family)
    }
    return Protocols(lines, dict(values["own_share"]), values["source"])
