"""The cluster as the collectives see it: nested levels, innermost first.

A level is what members of one *unit* talk over when they sit in different units of the level
below. Level 0 joins single GPUs (NVLink inside a node); the next joins nodes (a rail or leaf),
then leaves (the spine). ``planner.layout.groups`` lays axes on the levels;
``planner.cost.collectives`` prices them. Nothing else knows the network.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fabric", "Level", "LevelKind", "Library"]

LevelKind = Literal["nvlink", "pcie", "infiniband", "ethernet", "loopback"]
Library = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network.

    Attributes:
        name: Unique in the fabric; calibrations refer to it.
        kind: Decides which achieved fraction of the nominal bandwidth to expect.
        unit_size: GPUs whose traffic stays on this level or below.
        bytes_per_s: Nominal, one direction, per GPU, out of a unit of the level below, when all
            GPUs send, over links that one communicator can use.
        alpha_s: Latency of one hop.
        measured: True when a calibration replaced the figures; then no achieved fraction applies.
        source: Where the figures come from.
    """

    name: str
    kind: LevelKind
    unit_size: int
    bytes_per_s: float
    alpha_s: float
    source: str
    measured: bool = False


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
    """

    topology: str
    library: Library
    device: str
    num_gpus: int
    gpus_per_node: int
    cores_per_node: int | None
    levels: tuple[Level, ...]
