"""What a GPU model brings to a machine: its peaks, and the links that leave it.

A tool such as ``nvidia-smi topo -m`` prints counts only (NV18); what one link carries, and whether
switches stand behind it, depends on the model. The figures are in ``gpus.json`` beside this file,
each model with its source. How fast its kernels run is in ``planner.hardware.devices``.
"""

import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Final, Literal

from planner.errors import UnknownNameError
from planner.plan import Precision

__all__ = ["Architecture", "GpuModel", "architecture_of", "gpu_model", "gpu_models"]

Architecture = Literal[
    "kepler",
    "pascal",
    "volta",
    "turing",
    "ampere",
    "ada",
    "hopper",
    "blackwell",
    "gcn5",
    "cdna1",
    "cdna2",
    "cdna3",
    "cdna4",
    "gaudi",
    "xe2",
    "davinci",
    "other",
]

# Words that tools print and people leave out; none of them tells two models apart.
_FILLER: Final = re.compile(
    "nvidia|amd|intel|huawei|habana|tesla|geforce|instinct|radeon|graphics|generation|corporation|"
    "hbm2|hbm2e|hbm3|hbm3e|oam|gpu|accelerator|r|tm"
)
# The socket's generation follows from the GPU's, but for V100, whose SXM3 sits on NVSwitches.
_SOCKET: Final = re.compile(r"sxm[24-9]")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One accelerator as one rank sees it: a die (GCD) of MI250X, half a K80 board.

    Attributes:
        name: As people write it: "H100 SXM", "MI300X".
        aliases: As tools and tables print it.
        device: Name of the bundled device whose kernels are known, or None.
        memory_bytes: Of the data sheet.
        memory_bytes_per_s: Of the data sheet.
        peak_flop_per_s: Dense, by precision.
        link_kind: Of its direct links to other GPUs; None if it has PCIe only.
        num_links: Direct links of one GPU, 0 if it has none.
        link_bytes_per_s: One link, one direction, nominal; 0 if it has none.
        is_switched: Its boards of 8 or more put every link on NVSwitches.
        has_multicast: Those switches multicast and reduce (NVSwitch 3 and later).
        pcie_bytes_per_s: Its PCIe slot, one direction.
        is_coherent: It can hang on its CPU by C2C or Infinity Fabric in place of PCIe.
        library: What its collectives run on.
        architecture: By its maker's name: collectives run alike on GPUs of one.
        source: Where the figures come from.
    """

    name: str
    aliases: tuple[str, ...]
    device: str | None
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flop_per_s: dict[Precision, float]
    link_kind: Literal["nvlink", "xgmi"] | None
    num_links: int
    link_bytes_per_s: float
    is_switched: bool
    has_multicast: bool
    pcie_bytes_per_s: float
    is_coherent: bool
    library: Literal["nccl", "rccl", "hccl", "oneccl"]
    architecture: Architecture
    source: str


@cache
def gpu_models() -> tuple[GpuModel, ...]:
    """Return every known model, as listed in ``gpus.json``."""
    text = resources.files("planner.hardware").joinpath("gpus.json").read_text("utf-8")
    figures: dict[str, Any] = json.loads(text)
    return tuple(_read(name, values) for name, values in figures.items())


def gpu_model(name: str) -> GpuModel:
    """Return the model that ``name`` means, whether a tool printed it or a person typed it.

    Case, separators, vendor words and the order of words do not matter. A short name that several
    models share ("A100") means the one whose source says that it is the default.

    >>> gpu_model("NVIDIA A100-SXM4-80GB").name, gpu_model("a100").name
    ('A100 SXM 80GB', 'A100 SXM 80GB')
    >>> gpu_model("NVIDIA H100 PCIe").num_links
    12

    Raises:
        UnknownNameError: No model is called so.
    """
    models = _models_by_key()
    for key in _keys(name):
        if key in models:
            return models[key]
    known = [model.name for model in gpu_models()]
    raise UnknownNameError("GPU model", name, known, remedy=f"known: {', '.join(sorted(known))}")


@lru_cache(maxsize=256)
def architecture_of(device_name: str) -> Architecture:
    """Return the architecture of a device of ``devices.json`` or a GPU by any name.

    >>> architecture_of("h100-sxm-80gb"), architecture_of("NVIDIA L40S"), architecture_of("mine")
    ('hopper', 'ada', 'other')
    """
    for model in gpu_models():
        if model.device == device_name:
            return model.architecture
    try:
        return gpu_model(device_name).architecture
    except UnknownNameError:
        return "other"


@cache
def _models_by_key() -> dict[str, GpuModel]:
    return {
        key: model
        for model in gpu_models()
        for name in (model.name, *model.aliases)
        for key in _keys(name)
    }


def _keys(name: str) -> tuple[str, str]:
    """Return ``name`` bared to its words: as they stand, and sorted.

    >>> _keys("NVIDIA A100-SXM4-80GB")
    ('a100sxm80gb', '80gb a100 sxm')
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if not _FILLER.fullmatch(word)]
    words = [_SOCKET.sub("sxm", word) for word in words if word]
    return "".join(words), " ".join(sorted(words))


def _read(name: str, values: dict[str, Any]) -> GpuModel:
    return GpuModel(
        name=name,
        **{
            **values,
            "aliases": tuple(values["aliases"]),
            "link_bytes_per_s": float(values["link_bytes_per_s"]),
        },
    )
