"""What a caller asks for: ``PlanRequest``, the body of ``POST /plan``."""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from planner.model.spec import ModelSpec
from planner.plan import (
    ContextExchange,
    Degree,
    Document,
    Framework,
    RankOrder,
    RecomputeLayers,
    RecomputeMode,
    ScheduleName,
    TrainingSpec,
)
from planner.topology.document import HostName, TopologyDocument

__all__ = ["Constraints", "HuggingFaceModel", "PlanRequest"]

Name = Annotated[str, Field(min_length=1, max_length=120)]

_UNNAMED: Final = "huggingface"
_REPOSITORY: Final = re.compile(r"(?:.*/)?([A-Za-z0-9][A-Za-z0-9._-]{0,119})")


class HuggingFaceModel(Document):
    """A model given as the ``config.json`` of a Hugging Face repository."""

    huggingface: dict[str, Any]
    name: Name = _UNNAMED


def _config_or_spec(value: Any) -> Any:
    """Return a bare ``config.json`` as the ``HuggingFaceModel`` it means, other models as given.

    Raises:
        ValueError: It is an object that is no model of any kind.
    """
    if not isinstance(value, dict) or "huggingface" in value or "attention" in value:
        return value
    if "model_type" in value or "architectures" in value:
        path = value.get("_name_or_path")
        repository = _REPOSITORY.fullmatch(path) if isinstance(path, str) else None
        return {"huggingface": value, "name": repository[1] if repository else _UNNAMED}
    raise ValueError(
        "need a bundled name (GET /models, commplan model list), a spec (commplan model show NAME "
        "--json prints one), or the config.json of a Hugging Face repository (it has model_type); "
        "got an object with none of model_type, architectures, attention, huggingface"
    )


Model = Annotated[Name | ModelSpec | HuggingFaceModel, BeforeValidator(_config_or_spec)]


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
    recompute_layers: RecomputeLayers = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    sequence_parallel: bool | None = None
    context_exchange: ContextExchange | None = None
    order: RankOrder | None = Field(
        default=None, description="of axes over ranks; the second needs dp and pp, and no cp"
    )


class PlanRequest(Document):
    """A cluster, a model and a batch; everything else has a default."""

    topology: Name | TopologyDocument
    nodes: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="null = the topology's own default"
    )
    allocation: Annotated[tuple[HostName, ...], Field(fail_fast=True)] | None = Field(
        default=None,
        min_length=1,
        max_length=100_000,
        description="names of the nodes that the scheduler gave, in place of nodes",
    )
    model: Model = Field(
        description="bundled name, spec, or the config.json of a Hugging Face repository as it is"
    )
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

    @model_validator(mode="after")
    def _says_how_many_once(self) -> "PlanRequest":
        if self.allocation is not None and self.nodes not in (None, len(self.allocation)):
            raise ValueError(
                f"nodes={self.nodes} but allocation names {len(self.allocation)}; leave nodes out"
            )
        return self
