"""The cluster as the collectives see it: nested levels, innermost first.

A level is what members of one *unit* talk over when they sit in different units of the level
below. Level 0 joins single GPUs (NVLink inside a node); the next joins nodes (a rail or leaf),
then leaves (the spine). ``planner.layout.groups`` lays axes on the levels;
``planner.cost.collectives`` prices them. Nothing else knows the network.
"""

from dataclasses import dataclass
from typing import Final, Literal

from planner.hardware.gpus import Architecture
from planner.hardware.protocols import Protocols
from planner.plan import CallPath, Collective, MeasuredCurve
from planner.topology.document import Library

__all__ = ["NETWORK_KINDS", "CallLevels", "Fabric", "Level", "LevelKind", "Mesh"]

LevelKind = Literal["nvlink", "xgmi", "pcie", "infiniband", "ethernet", "loopback"]
# Of levels that a GPU reaches by a NIC: the others share its links inside the host.
NETWORK_KINDS: Final = ("infiniband", "ethernet")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Direct links without a switch: a group reaches only what joins its own members.

    Of ``m`` members ``s`` apart, entry ``[s - 1][m - 1]`` is the part of the level's rate that
    each of them has: two GPUs of a full mesh of eight have one link of seven. The worst aligned
    group decides.

    Attributes:
        ring: When neighbours of a ring send, the best rings chosen.
        direct: When every member sends to every other over the link between them.
    """

    ring: tuple[tuple[float, ...], ...]
    direct: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network.

    Attributes:
        name: Unique in the fabric; calibrations refer to it.
        kind: Decides which achieved fraction of the nominal bandwidth to expect.
        unit_size: GPUs whose traffic stays on this level or below; of the largest unit.
        bytes_per_s: Nominal, one direction, per GPU, out of a unit of the level below, when all
            GPUs send, over links that one communicator can use; of the worst unit.
        alpha_s: Latency of one hop.
        measured: True when a calibration replaced the figures; then no achieved fraction applies.
        source: Where the figures come from.
        unit_sizes: Of every unit, in rank order, where they differ; None when all are equal.
        direct_share: Part of ``bytes_per_s`` that remains when every GPU sends for itself, rather
            than by the GPUs near the NICs as rings and trees do.
        mesh: Of a level of direct links.
        path: How messages leave: from GPU to GPU, read from GPU memory by the NIC, or staged
            through host memory; "mixed" when it depends on the NIC.
        multicast: Whether its switches copy and reduce.
        oversubscription: Senders over what goes up, of this level and those below together.
    """

    name: str
    kind: LevelKind
    unit_size: int
    bytes_per_s: float
    alpha_s: float
    source: str
    measured: bool = False
    unit_sizes: tuple[int, ...] | None = None
    direct_share: float = 1.0
    mesh: Mesh | None = None
    path: Literal["peer", "gpudirect", "staged", "mixed"] = "peer"
    multicast: bool = False
    oversubscription: float = 1.0


@dataclass(frozen=True, slots=True)
class CallLevels:
    """The levels as the calls of one operation by one path see them.

    Attributes:
        op: Operation.
        path: Who does it.
        levels: Innermost first.
        issue_s: Of posting one more message beside those under way.
    """

    op: Collective
    path: CallPath
    levels: tuple[Level, ...]
    issue_s: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """Levels, and the machine at their bottom.

    Attributes:
        topology: Name of the document it was compiled from.
        library: What runs the collectives.
        device: Name in ``planner.hardware.devices``.
        num_gpus: GPUs (ranks, on a CPU machine) of the whole fabric.
        gpus_per_node: GPUs that share a host.
        cores_per_node: CPU cores that the ranks of a host share when the device is the CPU
            itself; None when every rank has a device of its own.
        levels: Innermost first; the last has ``unit_size >= num_gpus``.
        nodes: Numbers of the nodes in rank order; None = the first ones.
        slowest_share: Speed of the slowest GPU over that of a healthy one.
        calls: Of operations and paths that were measured by themselves.
        architecture: Of the GPUs.
        sharp: Whether switches of the network reduce for the library (CollNet).
        protocols: How the library's calls run on them; None: as one line.
        curves: Measured seconds by size, which go before the model inside their range.
    """

    topology: str
    library: Library
    device: str
    num_gpus: int
    gpus_per_node: int
    cores_per_node: int | None
    levels: tuple[Level, ...]
    nodes: tuple[int, ...] | None = None
    slowest_share: float = 1.0
    calls: tuple[CallLevels, ...] = ()
    architecture: Architecture = "other"
    sharp: bool = False
    protocols: Protocols | None = None
    curves: tuple[MeasuredCurve, ...] = ()

    @property
    def host_levels(self) -> int:
        """How many levels are inside a host, or an NVLink domain; the innermost at least."""
        inside = [level for level in self.levels if level.kind not in NETWORK_KINDS]
        return max(1, len(inside))
