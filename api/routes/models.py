"""``/models``: the bundled models."""

from fastapi import APIRouter

from api.schemas import ModelView
from planner.model.blocks import mtp_parameter_count, num_blocks, parameter_count
from planner.model.bundled import load_model, model_names

__all__ = ["router"]

router = APIRouter(prefix="/models", tags=["models"])


@router.get("")
def list_models() -> list[ModelView]:
    """List the bundled models."""
    return [_view(name) for name in model_names()]


@router.get("/{name}")
def read_model(name: str) -> ModelView:
    """Return one model and its parameter counts."""
    return _view(name)


def _view(name: str) -> ModelView:
    spec = load_model(name)
    return ModelView(
        name=name,
        num_params=parameter_count(spec),
        num_active_params=parameter_count(spec, active=True),
        num_mtp_params=mtp_parameter_count(spec),
        num_blocks=num_blocks(spec),
        spec=spec,
    )
