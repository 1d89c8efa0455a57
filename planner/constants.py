"""Every number of the cost model that is no device or link figure, with its origin.

``spread`` is the relative uncertainty of the figure. "assumed" marks one that nobody published
in this form; the rest name their source.
"""

from dataclasses import dataclass
from typing import Final

__all__ = [
    "ACHIEVED_FRACTION",
    "ATTENTION_BACKWARD_FLOP_RATIO",
    "CACHED",
    "CALIBRATED_SPREAD",
    "COLLECTIVE_LAUNCH_S",
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "FRAGMENTATION",
    "GRADIENT_BUCKET_BYTES",
    "GRAPH_LAUNCH_S",
    "HOST_MEMORY_BYTES_PER_S",
    "LOOPBACK_SENDER_CORES",
    "MEMORY_PASSES",
    "MEMORY_SPREAD",
    "MESSAGE_ISSUE_S",
    "NVME_BYTES_PER_S",
    "OLDER_ATTENTION",
    "PATH_ALPHA",
    "PATH_RATE",
    "STEP_SPREAD",
    "TREE_EFFICIENCY",
    "UNKNOWN_LOST_SHARE",
    "USABLE_MEMORY",
    "Constant",
]


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure of the cost model.

    Attributes:
        value: In ``unit``.
        unit: "s", "bytes", or "1" for a fraction.
        applies_to: Op class it enters.
        spread: Relative uncertainty, one standard deviation.
        source: Where it comes from.
    """

    value: float
    unit: str
    applies_to: str
    spread: float
    source: str


_NCCL = "NCCL 2.30.7 src/graph/tuning.cc"

# Fixed cost of one call, before the first byte moves.
COLLECTIVE_LAUNCH_S: Final[dict[str, Constant]] = {
    "nccl": Constant(
        10e-6,
        "s",
        "collective",
        0.3,
        "small messages on one node: 7 us on H100, 13 on A100, 10 on GB200 (nccl-tests tables of "
        "ai-dynamo/aiconfigurator, benchmarks/fit_link_latency.py)",
    ),
    "rccl": Constant(
        12e-6,
        "s",
        "collective",
        0.3,
        "RCCL base latency (LL, LL128) of Tree and Ring in its tuning tables; small all_reduce 13 "
        "to 23 us on 8 MI300X, eager (ROCm blog)",
    ),
    "hccl": Constant(10e-6, "s", "collective", 0.5, "assumed as NCCL"),
    "oneccl": Constant(10e-6, "s", "collective", 0.5, "assumed as NCCL"),
    "mpi": Constant(5e-6, "s", "collective", 0.5, "assumed: half of NCCL's, for want of a kernel"),
    "gloo": Constant(
        70e-6, "s", "collective", 0.5, "torch 2.13 gloo, 4 processes: all_reduce of one rank 68 us"
    ),
}

# Achieved share of a link's nominal bandwidth in large ring collectives.
ACHIEVED_FRACTION: Final[dict[str, Constant]] = {
    "nvlink": Constant(
        0.80,
        "1",
        "collective",
        0.05,
        "ring busbw 361-368 of 450 GB/s on H100, 235 of 300 on A100 (nccl-tests, ml-engineering)",
    ),
    "xgmi": Constant(
        0.71,
        "1",
        "collective",
        0.05,
        "all_reduce busbw 313-319 of 448 GB/s on 8 MI300X (ROCm blog, rccl-tests)",
    ),
    "pcie": Constant(
        0.80, "1", "collective", 0.1, "Gen4 x16 ring 24.7 of 31 GB/s (ml-engineering)"
    ),
    "infiniband": Constant(
        0.94, "1", "collective", 0.05, "NDR 46-49 of 50 GB/s per NIC (NCCL maintainers)"
    ),
    "ethernet": Constant(0.82, "1", "collective", 0.1, "A3 Ultra 2 nodes 329 of 400 GB/s"),
    "loopback": Constant(
        1.0, "1", "collective", 0.5, "the figure of the topology is itself measured"
    ),
}

# Part of a core that a sending rank keeps busy over loopback.
LOOPBACK_SENDER_CORES: Final = Constant(
    0.5,
    "1",
    "loopback",
    0.5,
    "2 and 4 ranks on 2 x86 cores move the same 1.3 GB/s each (torch 2.13 gloo, all_reduce of "
    "16 MiB), so a sender takes half a core at most; more ranks were not measured",
)
TREE_EFFICIENCY: Final = Constant(0.92, "1", "all_reduce tree", 0.05, f"{_NCCL}, Tree 0.92 busBw")
# Posting one more message beside those under way.
_ISSUE = Constant(1e-6, "s", "direct", 0.5, "assumed: one more message of a grouped send")
MESSAGE_ISSUE_S: Final[dict[str, Constant]] = {
    **dict.fromkeys(("nccl", "rccl", "hccl", "oneccl", "mpi"), _ISSUE),
    "gloo": Constant(
        50e-6,
        "s",
        "direct",
        0.5,
        "of 10, 50, 100 and 200 us the one that leaves least of latencies on 2 hosts of 4 ranks "
        "(benchmarks/collective_choice.py)",
    ),
}
# Of other paths over those of the library's calls: latency of a hop and of posting a message, and
# rate over loopback.
_LOOPBACK = (
    "4 ranks on 2 x86 cores, torch 2.13 gloo: geometric mean of what was fitted to all_reduce, "
    "all_gather, reduce_scatter and broadcast (benchmarks/collective_choice.py, loopback); posting "
    "a message alike: 0.48 in a gather, 2 hosts of 4 ranks"
)
PATH_ALPHA: Final[dict[str, Constant]] = {
    "executor": Constant(0.43, "1", "collective", 0.5, _LOOPBACK),
    "shm": Constant(0.41, "1", "collective", 0.5, _LOOPBACK),
}
PATH_RATE: Final[dict[str, Constant]] = {
    "executor": Constant(0.82, "1", "collective", 0.5, _LOOPBACK),
    "shm": Constant(1.92, "1", "collective", 0.5, _LOOPBACK),
}
# What a collective beside compute costs it (planner.cost.sharing).
MEMORY_PASSES: Final = Constant(
    2.0,
    "1",
    "compute beside a collective",
    0.25,
    "memory traffic of a byte sent: two passes at least, three with user buffers (an NCCL "
    "maintainer, NVIDIA/nccl#1428); two fit the kernels timed there",
)
UNKNOWN_LOST_SHARE: Final = Constant(
    0.15,
    "1",
    "compute beside a collective",
    0.5,
    "assumed, for HCCL and oneCCL alone: their kernels are not modelled",
)
# What a captured graph costs beside the time of its kernels; issued one by one they cost
# ``planner.cost.step_constants``' launch_s.
GRAPH_LAUNCH_S: Final = Constant(
    1e-9,
    "s",
    "launch",
    1.0,
    "a captured graph is launched in about 2.5 us, left out here, and 1 ns a node (NVIDIA, "
    "Constant Time Launch for Straight-Line CUDA Graphs, 2024)",
)
# Time of older attention kernels over the fastest that an architecture has, by generation.
_FLASH_2: Final = "FlashAttention-3 is 1.5 to 2 times as fast as 2 on H100 (2407.08608)"
_FLASH_1: Final = (
    "FlashAttention-2 is 1.7 to 3 times as fast as 1, 1.3 to 2.5 times as fast as that in Triton "
    "(2307.08691, section 4.1): the geometric means"
)
OLDER_ATTENTION: Final[dict[str, dict[str, Constant]]] = {
    "flash2": {
        "hopper": Constant(1.65, "1", "attention", 0.15, _FLASH_2),
        "blackwell": Constant(2.5, "1", "attention", 0.3, f"assumed; on Hopper {_FLASH_2}"),
    },
    "flash1": {
        "": Constant(2.26, "1", "attention", 0.2, _FLASH_1),
        "hopper": Constant(2.26 * 1.65, "1", "attention", 0.2, f"{_FLASH_1}; {_FLASH_2}"),
        "blackwell": Constant(2.26 * 2.5, "1", "attention", 0.4, f"assumed; elsewhere {_FLASH_1}"),
    },
    "triton": {
        "": Constant(1.80, "1", "attention", 0.2, _FLASH_1),
        "hopper": Constant(1.80 * 1.65, "1", "attention", 0.2, f"{_FLASH_1}; {_FLASH_2}"),
        "blackwell": Constant(1.80 * 2.5, "1", "attention", 0.4, f"assumed; elsewhere {_FLASH_1}"),
    },
}
ATTENTION_BACKWARD_FLOP_RATIO: Final = Constant(
    2.5, "1", "attention", 0.0, "five matrix products against two (FlashAttention-2, 2307.08691)"
)
_GPU_LIBRARIES: Final = ("nccl", "rccl", "hccl", "oneccl", "mpi")
_MEMORY_SOURCE: Final = (
    "context, communicators and fragmentation together by hand on the medians of three sources "
    "that print what the device has in use (BLOOM, FLAG, INTEM: commplan validate memory)"
)
CONTEXT_BYTES: Final[dict[str, Constant]] = {
    **dict.fromkeys(
        _GPU_LIBRARIES,
        Constant(
            1.5e9,
            "bytes",
            "memory",
            0.5,
            "device context with all kernels loaded, BLAS and library workspaces: 0.5 to 2 GB on "
            f"A100 and H100 (torch issue trackers); {_MEMORY_SOURCE}",
        ),
    ),
    "gloo": Constant(0.3e9, "bytes", "memory", 0.5, "assumed: a Python process with torch"),
}
# Bytes that a rank can allocate over those of the data sheet: a sheet's GB of HBM is 2**30 bytes,
# of which the driver keeps about 1 %. Other devices have the bytes they are given.
_HBM = Constant(
    1.06,
    "1",
    "memory",
    0.01,
    "CUDA counts 79.1 to 79.3 GiB on A100 and H100 of 80 GB, 39.4 on A100 of 40, 139.8 on H200 of "
    "141, 178.4 on B200 of 180, 31.7 on V100 of 32 (torch.cuda total_memory in issue trackers)",
)
USABLE_MEMORY: Final[dict[str, Constant]] = {
    "hbm": _HBM,
    "": Constant(1.0, "1", "memory", 0.06, "GDDR with ECC, hosts, and figures of a document"),
}
COMMUNICATOR_BYTES: Final[dict[str, Constant]] = {
    **dict.fromkeys(
        _GPU_LIBRARIES,
        Constant(
            0.6e9,
            "bytes",
            "memory",
            0.5,
            "per group of two or more: 16 to 32 channels with 4 MiB and LL128 buffers to and from "
            "ring and tree neighbours (NCCL 2.30 src/include/nccl_common.h, NCCL_BUFFSIZE); not "
            f"seen by the allocator (pytorch#147179); {_MEMORY_SOURCE}",
        ),
    ),
    "gloo": Constant(0.0, "bytes", "memory", 0.0, "gloo keeps no device buffers"),
}
FRAGMENTATION: Final = Constant(
    0.05,
    "1",
    "memory",
    0.5,
    "holes that the allocator cannot fill, 5 to 10 % of what it holds by its users; a run with 74 "
    "GiB allocated (ZB) leaves room for no more on 80 GB",
)
# Not needed to run: torch gives blocks without use back before it fails.
CACHED: Final = Constant(
    0.05,
    "1",
    "memory as devices and allocators show it",
    0.5,
    f"blocks kept for reuse; figures of allocated memory (ZB) are met without; {_MEMORY_SOURCE}",
)
# What offloaded states are updated at, and come from a drive at, of one GPU of eight a node.
HOST_MEMORY_BYTES_PER_S: Final = Constant(
    45e9,
    "bytes/s",
    "offloaded optimizer",
    0.5,
    "assumed: 0.6 of two sockets of eight channels DDR5-4800 (2 x 307 GB/s) for eight GPUs",
)
NVME_BYTES_PER_S: Final = Constant(
    6e9, "bytes/s", "offload to NVMe", 0.5, "assumed: one PCIe 4.0 x4 drive for every GPU"
)
# Megatron's default: max(40e6, 1e6 * dp) parameters; torch DDP 25 MiB.
GRADIENT_BUCKET_BYTES: Final[dict[str, Constant]] = {
    "megatron": Constant(160e6, "bytes", "dp", 0.0, "Megatron-LM: 40 M parameters in fp32"),
    "executor": Constant(25 * 2**20, "bytes", "dp", 0.0, "torch DDP bucket_cap_mb = 25"),
}
CALIBRATED_SPREAD: Final = Constant(
    0.25,
    "1",
    "step",
    0.0,
    "layouts not calibrated on were off by up to 24 % in make demo, two layouts on one 2-core "
    "machine; elsewhere assumed the same",
)
MEMORY_SPREAD: Final = Constant(
    0.075,
    "1",
    "memory",
    0.0,
    "published runs are met within 7.5 % in the median and 17.5 % at the 90th percentile, mostly "
    "predicted too low (commplan validate memory)",
)
# Of |predicted / measured - 1|: four of five published runs are met within it, each predicted with
# constants fitted on other sources.
STEP_SPREAD: Final[dict[str, Constant]] = {
    "dense": Constant(
        0.16,
        "1",
        "step",
        0.0,
        "four of five published runs of dense models are met within 16 %, each by constants fitted "
        "on other sources (docs/accuracy.md)",
    ),
    "experts": Constant(
        0.31,
        "1",
        "step",
        0.0,
        "four of five published runs of models with experts are met within 31 %, each by constants "
        "fitted on other sources (docs/accuracy.md)",
    ),
}
