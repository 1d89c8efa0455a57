"""The models that come with commplan, by name: one JSON file each under ``configs/``.

A file is either a Hugging Face ``config.json`` as published or a ``ModelSpec``; its origin and
licence are in ``configs/sources.json``.
"""

from importlib.resources import files
from typing import Any, Final

from planner.documents import parse_json, validated
from planner.errors import UnknownNameError
from planner.model.huggingface import model_from_config
from planner.model.spec import ModelSpec

__all__ = ["load_model", "model_names"]

_CONFIGS: Final = files("planner.model") / "configs"
_MANIFEST: Final = "sources"


def model_names() -> tuple[str, ...]:
    """Return the names of the bundled models, sorted."""
    stems = {
        entry.name.removesuffix(".json")
        for entry in _CONFIGS.iterdir()
        if entry.name.endswith(".json")
    }
    return tuple(sorted(stems - {_MANIFEST}))


def load_model(name: str) -> ModelSpec:
    """Return a bundled model.

    Raises:
        UnknownNameError: No bundled model has this name; the nearest are listed.
    """
    if name not in model_names():
        raise UnknownNameError("model", name, model_names())
    document = _read(name)
    if "attention" in document:
        return validated(ModelSpec, document, source=name)
    spec = model_from_config(document, name)
    origin = _read(_MANIFEST).get(name)
    if origin is None:
        return spec
    return spec.model_copy(update={"source": f"{origin['model']} ({origin['config']})"})


def _read(name: str) -> Any:
    return parse_json((_CONFIGS / f"{name}.json").read_bytes(), source=f"{name}.json")
