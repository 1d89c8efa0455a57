"""What the user says about a cluster where no text says it."""

from typing import Literal

from pydantic import Field

from planner.plan import Document
from planner.topology.document import Name

__all__ = ["ImportOptions"]


class ImportOptions(Document):
    """What a text about one node leaves open, where no text about the fabric says it."""

    name: Name = Field(default="imported", description="of the topology")
    nodes: int | None = Field(
        default=None, ge=1, le=1_000_000, description="how many; with a fabric, the default"
    )
    nic_gbps: float | None = Field(
        default=None, ge=0.1, le=100_000, description="rate of one NIC, Gbit/s, one direction"
    )
    nics: tuple[Name, ...] = Field(
        default=(), max_length=64, description="which NICs carry training; else the fastest"
    )
    layout: Literal["rail", "tree"] | None = Field(
        default=None, description="rail: the i-th NICs share a switch; tree: all do"
    )
    leaf_nodes: int | None = Field(
        default=None, ge=1, le=100_000, description="nodes under one leaf; else one stage for all"
    )
    oversubscription: float | None = Field(
        default=None, ge=1, le=1000, description="what enters a leaf over what goes up; else 1"
    )
    kind: Literal["infiniband", "ethernet"] | None = None
    gpudirect: Literal["off", "pxb", "phb"] | None = Field(
        default=None, description="how far from its GPU a NIC may be to read its memory"
    )
    domain_nodes: int | None = Field(
        default=None, ge=1, le=4096, description="nodes on the same NVSwitches; 18 in an NVL72"
    )
