"""What texts about machines never say and a document needs: latencies, and rates of some links.

All assumed figures of imported topologies stand here, each with its source. Bundled topologies use
the same, but where a machine's own were measured.
"""

import re
from typing import Final

from planner.hardware.gpus import GpuModel
from planner.units import format_rate

__all__ = [
    "BELOW_SPINE_LATENCY_S",
    "CPU_LATENCY_S",
    "ONE_STAGE_LATENCY_S",
    "ONE_SWITCH_LATENCY_S",
    "PCIE_LATENCY_S",
    "PCIE_LATENCY_SOURCE",
    "XGMI_LINKS_PER_PAIR",
    "coherent_link",
    "cpu_link",
    "nic_latency",
    "peer_latency",
]

PCIE_LATENCY_S: Final = 0.5e-6
PCIE_LATENCY_SOURCE: Final = (
    "Latency: half of the 1.0 us that NCCL 2.30 tuning.cc charges a PCI hop (LL)"
)
CPU_LATENCY_S: Final = 0.5e-6
_CPU_LATENCY_SOURCE: Final = "Latency assumed to be that of a PCIe link"

# One leaf switch and its cables; leaf and spine behind one name; two more switches and 100 m more
# fibre at 5 ns/m. Assumed.
ONE_SWITCH_LATENCY_S: Final = 0.2e-6
ONE_STAGE_LATENCY_S: Final = 0.4e-6
BELOW_SPINE_LATENCY_S: Final = 0.8e-6

# Pairs of GPUs that xGMI joins by more than one link, where the text does not count them: AMD
# Instinct MI300A documentation, two links between each two of four APUs.
XGMI_LINKS_PER_PAIR: Final = {"MI300A": 2}

_BLACKWELL: Final = re.compile(r"G?B\d")
_HOPPER: Final = re.compile(r"G?H\d")

# GPU to CPU, bytes/s in one direction.
_COHERENT: Final = {
    "GH200": (450e9, "NVIDIA GH200 data sheet: NVLink-C2C 900 GB/s both directions"),
    "GB200": (
        225e9,
        "NVIDIA GB200 data sheet: NVLink-C2C 900 GB/s both directions per superchip; half of it "
        "one way, assumed to be shared by its two GPUs",
    ),
    "GB300": (
        225e9,
        "NVIDIA GB300 data sheet: NVLink-C2C 900 GB/s both directions per superchip; half of it "
        "one way, assumed to be shared by its two GPUs",
    ),
    "MI250X": (36e9, "Frontier user guide: Infinity Fabric CPU-GPU, 36 + 36 GB/s per die"),
}

# CPU to CPU, bytes/s in one direction: NCCL 2.30, src/graph/topo.h.
_BETWEEN_CPUS: Final = {
    "POWER9": 32e9,
    "Emerald Rapids UPI": 40e9,
    "Sapphire Rapids UPI": 22e9,
    "Skylake UPI": 10e9,
    "Broadwell QPI": 6e9,
    "AMD": 16e9,
    "Arm": 6e9,
}


def peer_latency(model: GpuModel) -> tuple[float, str]:
    """Return the latency of one hop between two GPUs over their own links, and its source."""
    if model.link_kind == "xgmi":
        source = "0.8 us as RCCL's tuning table of MI300X charges an xGMI step of a ring (LL)"
        return 0.8e-6, f"Latency: {source}"
    fitted = "mean of all_reduce, all_gather and reduce_scatter fitted to nccl-tests times of"
    if _BLACKWELL.match(model.name):
        return 1.15e-6, f"Latency: 1.15 us per hop, {fitted} ai-dynamo/aiconfigurator (GB200)"
    if _HOPPER.match(model.name):
        return 0.8e-6, f"Latency: 0.8 us per hop, {fitted} ai-dynamo/aiconfigurator (H100)"
    return 0.9e-6, f"Latency: 0.9 us per hop, {fitted} ai-dynamo/aiconfigurator (A100)"


def coherent_link(model: GpuModel) -> tuple[float, str] | None:
    """Return bytes/s and source of the link of a GPU to its CPU that is no PCIe, if known."""
    if model.name not in _COHERENT:
        return None
    bytes_per_s, source = _COHERENT[model.name]
    return bytes_per_s, f"{source}. {_CPU_LATENCY_SOURCE}"


def cpu_link(model: str | None) -> tuple[float, str]:
    """Return bytes/s between two CPUs, and its source.

    Args:
        model: What a text calls the CPUs, or whose they must be; None where nothing tells.

    >>> cpu_link("x86_64 GenuineIntel 6 85")[0]
    10000000000.0
    """
    name = None if model is None else _cpu_name(model.lower())
    if name is None:
        name, said = "Sapphire Rapids UPI", "assumed as"
    else:
        said = f"{model}:"
    rate = _BETWEEN_CPUS[name]
    text = f"{said} {name} in NCCL 2.30 topo.h, {format_rate(rate, 'B/s')}"
    return rate, f"{text}. {_CPU_LATENCY_SOURCE}"


def _cpu_name(text: str) -> str | None:
    """Return which CPU of ``_BETWEEN_CPUS`` a text means; numbers of Intel as in NCCL's topo.cc."""
    if intel := re.search(r"genuineintel 6 (\d+)", text):
        number = int(intel[1])
        known = {207: "Emerald Rapids UPI", 143: "Sapphire Rapids UPI"}
        return known.get(number, "Skylake UPI" if number >= 85 else "Broadwell QPI")
    if "power" in text or "ppc64" in text:
        return "POWER9"
    if "amd" in text:
        return "AMD"
    return "Arm" if "aarch64" in text or "arm" in text else None


def nic_latency(model: GpuModel, *, over_tcp: bool) -> tuple[float, str]:
    """Return the latency from NIC to switch with the library's part, and its source."""
    if over_tcp:
        return 15e-6, "Latency: assumed, makes a hop some 30 us as a kernel TCP round takes"
    if _BLACKWELL.match(model.name):
        return 4.3e-6, (
            "Latency: makes a hop between nodes 11 us, as small all-reduces on two B200 nodes "
            "imply under NCCL's tree model"
        )
    return 2.7e-6, (
        "Latency: assumed as on DGX H100 (a hop of 7.6 us); NCCL 2.30 tuning.cc has 5.0 (LL) to "
        "14 (Simple)"
    )
