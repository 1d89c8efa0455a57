"""What a caller asks for: ``PlanRequest``, the body of ``POST /plan``."""

from typing import Annotated, Any

from pydantic import Field

from planner.model.spec import ModelSpec
from planner.plan import Degree, Document, Framework, RecomputeMode, ScheduleName, TrainingSpec
from planner.topology.document import TopologyDocument

__all__ = ["Constraints", "HuggingFaceModel", "PlanRequest"]

Name = Annotated[str, Field(min_length=1, max_length=120)]


class HuggingFaceModel(Document):
    """A model given as the ``config.json`` of a Hugging Face repository."""

    huggingface: dict[str, Any]
    name: Name = "huggingface"


class Constraints(Document):
    """Fields to hold fixed; what is left null is searched."""

    tp: Degree | None = None
    pp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    etp: Degree | None = None
    dp: Degree | None = Field(default=None, description="dp_shard * dp_replicate")
    dp_shard: Degree | None = None
    dp_replicate: Degree | None = None
    virtual_stages: Degree | None = None
    micro_batch_size: Degree | None = None
    schedule: ScheduleName | None = None
    recompute: RecomputeMode | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    sequence_parallel: bool | None = None


class PlanRequest(Document):
    """A cluster, a model and a batch; everything else has a default."""

    topology: Name | TopologyDocument
    nodes: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="null = the topology's own default"
    )
    model: Name | ModelSpec | HuggingFaceModel
    training: TrainingSpec
    constraints: Constraints = Constraints()
    framework: Framework = Field(
        default="megatron", description="whose rules a layout must obey: what will run it"
    )
    top_k: int = Field(default=5, ge=0, le=50, description="runners-up to list")
    calibration: Name = Field(
        default="latest",
        description="'latest' for this topology if there is one, 'none', or a calibration id",
    )
