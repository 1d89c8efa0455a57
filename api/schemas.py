"""What the service answers beside the planner's own documents."""

from typing import Annotated, Literal

from pydantic import Field

from planner.model.blocks import BlockKind
from planner.model.spec import ModelSpec
from planner.plan import Document
from planner.topology.document import TopologyDocument
from planner.topology.importers.dump import MAX_TEXT_BYTES
from planner.topology.importers.options import ImportOptions

__all__ = [
    "CalibrationSummary",
    "DegradedTopology",
    "ErrorAnswer",
    "ErrorBody",
    "Health",
    "ImportedTopology",
    "LevelView",
    "ModelView",
    "TopologyDegrade",
    "TopologyImport",
    "TopologySummary",
    "TopologyView",
]


# Of a million wrong ones the first is told; no document holds more than 4,096.
Impaired = Annotated[
    tuple[Annotated[str, Field(max_length=300)], ...], Field(max_length=4096, fail_fast=True)
]


class ErrorBody(Document):
    """What is wrong: read ``type`` and ``where``, show ``message``."""

    message: str = Field(description="what, where, got, needed, what to try")
    where: str = Field(description="path of the offending field, or empty")
    type: str
    nearest: tuple[str, ...] | None = Field(default=None, description="names that look alike")
    suggestion: dict[str, object] | None = Field(
        default=None, description="fields of a request that would fit"
    )
    rejected: dict[str, int] | None = Field(
        default=None, description="how many candidates fell to each reason"
    )


class ErrorAnswer(Document):
    """The one shape of every error."""

    error: ErrorBody


class Health(Document):
    """Whether the service can do its work."""

    status: Literal["ok", "failing"]
    version: str
    database: Literal["ok", "unreachable"]


class TopologySummary(Document):
    """One line of the list of bundled topologies."""

    name: str
    description: str
    device: str
    gpus_per_node: int
    default_nodes: int
    max_nodes: int


class LevelView(Document):
    """One level of a compiled fabric; see ``planner.topology.fabric.Level``."""

    name: str
    kind: str
    unit_size: int
    bytes_per_s: float
    alpha_s: float
    measured: bool
    source: str
    unit_sizes: tuple[int, ...] | None
    direct_share: float
    path: str
    multicast: bool
    oversubscription: float


class TopologyView(Document):
    """A topology document and what the collectives see of it, at ``nodes`` nodes."""

    document: TopologyDocument
    fingerprint: str
    nodes: int
    num_gpus: int
    levels: tuple[LevelView, ...]


class TopologyImport(ImportOptions):
    """Texts that tools printed on a cluster, and what they leave open."""

    node: str = Field(
        max_length=MAX_TEXT_BYTES,
        description="output of nvidia-smi topo -m, rocm-smi --showtopo or amd-smi topology, "
        "NCCL's topology XML, or lstopo's",
    )
    gpu: str | None = Field(
        default=None, max_length=120, description="its GPUs, as H100, where the text is silent"
    )
    fabric: str | None = Field(
        default=None,
        max_length=MAX_TEXT_BYTES,
        description="Slurm's topology.conf or topology.yaml, or output of ibnetdiscover",
    )

    def options(self) -> ImportOptions:
        """Return what the texts leave open."""
        texts = {"node", "gpu", "fabric"}
        return ImportOptions.model_validate(self.model_dump(exclude=texts))


class ImportedTopology(TopologyView):
    """An imported topology; what was guessed is in ``document.assumptions``."""

    remarks: tuple[str, ...] = Field(description="what was repaired or left out, with its line")


class TopologyDegrade(Document):
    """A topology, and what of it is weak or broken."""

    topology: Annotated[str, Field(max_length=120)] | TopologyDocument
    link: Impaired = Field(
        default=(), description="A:B=FACTOR or A:B=down, as n7/nic0:rail0/rail0=0.5"
    )
    node: Impaired = Field(
        default=(), description="NAME=FACTOR or NAME=down: a host, GPU, NIC or switch, as n7=0.8"
    )


class DegradedTopology(TopologyView):
    """A topology with weak or broken parts, of all nodes that are up."""

    before: tuple[LevelView, ...] = Field(description="the levels without the new ones")


class ModelView(Document):
    """A model with its parameter counts."""

    name: str
    num_params: int
    num_active_params: int
    num_mtp_params: int = Field(description="of multi-token prediction, beside num_params")
    num_blocks: dict[BlockKind, int] = Field(description="in forward order")
    spec: ModelSpec


class CalibrationSummary(Document):
    """One line of the list of calibrations, newest first."""

    id: str
    topology: str
    num_runs: int
    created_at: str = Field(description="UTC, ISO 8601")
