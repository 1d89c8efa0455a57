"""When copy engines of GPUs can run a collective: facts, conditions, and what all ranks agree on.

The conditions are those of NCCL 2.30.7 (``src/ce_coll.cc``, ``ncclCeAvailable``;
``src/enqueue.cc``, ``taskAppend``; user guide, "Zero-CTA Optimization"), PyTorch ("Copy Engine
Collectives"), mori 1.2.2 (``python/mori/ccl/collective.py``) and DeepSpeed
(``deepspeed/comm/mori.py``). **They never let a call through on hardware in this project.** Whether
a copy engine is worth it (chunks of at least 1 MiB, under compute) is the planner's business.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist

from executor.mesh import RankGroup
from planner.plan import CallPath, Collective

__all__ = [
    "MORI_MAX_SHARD_BYTES",
    "CopyEngineFacts",
    "agreed",
    "gather_facts",
    "ran_with_copy_engine",
    "refusal",
]

logger = logging.getLogger(__name__)

# mori's transit buffers are made once, for shards of so many elements of 4 bytes each
# (deepspeed/comm/mori.py: init(max_numel)).
_MORI_MAX_NUMEL: Final = 64 << 20
MORI_MAX_SHARD_BYTES: Final = 4 * _MORI_MAX_NUMEL
_MORI_DTYPES: Final = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
# NCCL_SYM_CE_THRESHOLD's default. NCCL compares it with the elements of a shard, and ours are
# sent as bytes.
_BLACKWELL_THRESHOLD_BYTES: Final = 8 << 20
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter")
_NEVER: Final = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class CopyEngineFacts:
    """What a rank knows of itself and its group. Numbers, so that a group can take the least.

    Attributes:
        known: 1 once the others have been read.
        on_nccl: 1 where the group's backend is NCCL, on NVIDIA.
        on_rccl: 1 where it is RCCL, on AMD.
        nccl_version: As NCCL_VERSION_CODE, 23007 for 2.30.7; 0 = unknown.
        cuda_driver: As the driver gives it, 12050 for CUDA 12.5; 0 = unknown.
        symmetric_memory: 1 where this torch has what ``NcclCopyEngine`` calls.
        windows: 1 unless NCCL's symmetric windows are turned off by the environment.
        zero_cta: 1 where the group's CTA policy includes ZERO.
        blackwell: 1 where NCCL takes copy engines by size alone: compute capability 10 or later,
            and NCCL_SYM_CE_THRESHOLD not set.
        one_domain: 1 where all ranks of the group load and store each other's memory.
        is_world: 1 where the group is all ranks of the job, in rank order.
        mori: 1 where this Python has what ``MoriCopyEngine`` calls.
        mori_sdma: 1 where MORI_ENABLE_SDMA is on.
    """

    known: int = 0
    on_nccl: int = 0
    on_rccl: int = 0
    nccl_version: int = 0
    cuda_driver: int = 0
    symmetric_memory: int = 0
    windows: int = 0
    zero_cta: int = 0
    blackwell: int = 0
    one_domain: int = 0
    is_world: int = 0
    mori: int = 0
    mori_sdma: int = 0


# ---------------------------------------------------------------------------------- the facts


def gather_facts(
    group: RankGroup,
    device: torch.device,
    environment: Mapping[str, str],
    *,
    runtime: Any = torch,
    find: Callable[[str], Any] = import_module,
) -> CopyEngineFacts:
    """Return what this rank knows; no communication, and nothing is changed.

    Args:
        group: With its process group made: the CTA policy is read from it.
        device: Of this rank's tensors.
        environment: Variables of this process.
        runtime: The torch module.
        find: Imports a module by name, or raises ImportError.
    """
    backend = _backend(group, device)
    is_nccl = backend is not None and backend.name() == "nccl"
    is_amd = runtime.version.hip is not None
    on_nccl = is_nccl and not is_amd
    return CopyEngineFacts(
        known=1,
        on_nccl=int(on_nccl),
        on_rccl=int(is_nccl and is_amd),
        nccl_version=_version_code(runtime.cuda.nccl.version()) if on_nccl else 0,
        cuda_driver=_cuda_driver(runtime) if on_nccl else 0,
        symmetric_memory=int(on_nccl and _has_symmetric_memory(find)),
        windows=int(_is_on(environment, "NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE")),
        zero_cta=int(is_nccl and _is_zero_cta(backend, environment)),
        blackwell=int(
            on_nccl
            and runtime.cuda.get_device_capability(device) >= (10, 0)
            and "NCCL_SYM_CE_THRESHOLD" not in environment
        ),
        one_domain=int(len(group.units) <= 1),
        is_world=int(group.ranks == tuple(range(runtime.distributed.get_world_size()))),
        mori=int(_has_mori(find)),
        mori_sdma=int(environment.get("MORI_ENABLE_SDMA", "").strip().lower() not in _NEVER),
    )


def _backend(group: RankGroup, device: torch.device) -> Any:
    """Return what makes the group's calls on ``device``: torch hides it inside the group."""
    inside = getattr(group.process_group, "_get_backend", None)
    return group.process_group if inside is None else inside(device)


def _version_code(version: tuple[Any, ...]) -> int:
    major, minor, patch = version[:3]
    return int(major * 10000 + minor * 100 + patch)


def _cuda_driver(runtime: Any) -> int:
    """Return the newest CUDA that the driver can run; torch 2.13 has it in private only."""
    version = getattr(runtime._C, "_cuda_getDriverVersion", None)
    return int(version()) if version is not None else 0


def _is_on(environment: Mapping[str, str], *names: str) -> bool:
    return all(environment.get(name, "1") != "0" for name in names)


def _is_zero_cta(backend: Any, environment: Mapping[str, str]) -> bool:
    """Return whether ZERO is among the policies; the environment overrides the group's config.

    Words joined by ``|``, or one of the digits before NCCL 2.29 (``src/init.cc``).
    """
    words = environment.get("NCCL_CTA_POLICY")
    if words is not None:
        return words.startswith("2") or "ZERO" in words.upper().split("|")
    policy = getattr(backend.options.config, "cta_policy", 0)
    return policy > 0 and bool(policy & 2)  # NCCL_CTA_POLICY_ZERO; unset is negative


def _has_symmetric_memory(find: Callable[[str], Any]) -> bool:
    """Return whether the private module is there with all that torch 2.13 has in it."""
    try:
        module = find("torch.distributed._symmetric_memory")
    except ImportError:
        return False
    return all(
        hasattr(module, name)
        for name in ("set_backend", "empty", "rendezvous", "is_symm_mem_tensor")
    )


def _has_mori(find: Callable[[str], Any]) -> bool:
    """Return whether mori is there, with the class that releases from 1.2.0 on have."""
    try:
        find("mori.shmem")
        return hasattr(find("mori.ccl"), "AllgatherSdma")
    except ImportError:
        return False


def agreed(
    group: RankGroup, device: torch.device, read: Callable[[], CopyEngineFacts]
) -> CopyEngineFacts:
    """Return the least of all ranks' facts, the same on every rank: one all_reduce(MIN).

    Decisions that rest on them alone are the same on every rank, so none waits for another in a
    call that the other does not make. A rank on which ``read`` fails has no facts: then none has,
    and all take the library's call.

    Args:
        group: All of its ranks must call this together.
        device: One that the group's backend can reduce on.
        read: Returns this rank's facts.
    """
    try:
        facts = read()
    except Exception as error:  # any: the others are already waiting for this rank's numbers
        logger.warning("no copy engines, the facts could not be read: %s", error)
        facts = CopyEngineFacts()
    if group.process_group is None:
        return facts
    least = torch.tensor(astuple(facts), dtype=torch.int64, device=device)
    group.process_group.allreduce([least], dist.ReduceOp.MIN).wait()
    return CopyEngineFacts(*least.tolist())


# ----------------------------------------------------------------------------- the conditions


def refusal(
    path: CallPath, op: Collective, facts: CopyEngineFacts, shard_bytes: int, dtype: torch.dtype
) -> str | None:
    """Return which condition of a call fails and what would meet it; None if it can run.

    Args:
        path: Who is asked to run it.
        op: Operation.
        facts: Agreed by the group.
        shard_bytes: What a rank puts in: a shard to gather, all rows to exchange.
        dtype: Of the tensors.
    """
    if path == "nccl_zero_cta":
        return next(_against_nccl(op, facts, shard_bytes), None)
    if path == "mori":
        return next(_against_mori(op, facts, shard_bytes, dtype), None)
    return f"{path} is no copy engine of GPUs; those are nccl_zero_cta and mori"


def _against_all(op: Collective, facts: CopyEngineFacts, shard_bytes: int) -> Iterator[str]:
    if op in _REDUCTIONS:
        yield f"copy engines only copy, and {op} reduces; it needs the library"
    if shard_bytes == 0:
        yield "there is nothing to copy"
    if not facts.known:
        yield "a rank could not read its facts; its log says why"
    if not facts.one_domain:
        yield (
            "the group spans several load/store domains; it needs one, such as a node's NVLink, "
            "or a hierarchy whose inner part is this call"
        )


def _against_nccl(op: Collective, facts: CopyEngineFacts, shard_bytes: int) -> Iterator[str]:
    yield from _against_all(op, facts, shard_bytes)
    if op not in ("all_gather", "all_to_all"):
        yield f"torch reaches NCCL's copy engines by all_gather and all_to_all, and this is {op}"
    if not facts.on_nccl:
        yield "the backend of a rank is not NCCL on NVIDIA; needs init_process_group('nccl')"
    if facts.nccl_version < 22800:
        yield f"NCCL is {_dotted(facts.nccl_version)} on a rank; needs 2.28 or later"
    if facts.cuda_driver < 12050:
        yield f"a rank's driver is CUDA {_cuda(facts.cuda_driver)}; needs CUDA 12.5 or later"
    if not facts.symmetric_memory:
        yield "a rank's torch has no symmetric memory as torch 2.13 has it; needs torch 2.13"
    if not facts.windows:
        yield "NCCL_WIN_ENABLE=0 or NCCL_CUMEM_ENABLE=0 turns symmetric windows off; unset both"
    if not (facts.zero_cta or _by_size_alone(op, facts, shard_bytes)):
        yield (
            "the group's CTA policy is not ZERO; set NCCL_CTA_POLICY=2 before the group is made, "
            "or give it options with cta_policy=NCCL_CTA_POLICY_ZERO"
        )


def _by_size_alone(op: Collective, facts: CopyEngineFacts, shard_bytes: int) -> bool:
    """Return whether NCCL takes copy engines unasked, as it does since 2.29.2 (NVIDIA/nccl#2003).

    It also wants direct NVLinks between all, which cannot be read from here.
    """
    return (
        op == "all_gather"
        and bool(facts.blackwell)
        and facts.nccl_version >= 22902
        and shard_bytes > _BLACKWELL_THRESHOLD_BYTES
    )


def _against_mori(
    op: Collective, facts: CopyEngineFacts, shard_bytes: int, dtype: torch.dtype
) -> Iterator[str]:
    yield from _against_all(op, facts, shard_bytes)
    if op != "all_gather":
        yield f"mori only gathers here, and this is {op}; it needs the library"
    if not facts.on_rccl:
        yield "the backend of a rank is not RCCL on AMD; needs a ROCm torch and its 'nccl' backend"
    if not facts.mori:
        yield "a rank's Python has no mori.ccl.AllgatherSdma; install mori 1.2.0 or later"
    if not facts.mori_sdma:
        yield "MORI_ENABLE_SDMA is off on a rank; set it to 1 on every rank before the start"
    if not facts.is_world:
        yield "the group is not all ranks of the job in rank order, which is all mori is bound to"
    if dtype not in _MORI_DTYPES:
        yield f"DeepSpeed sends no {dtype} by mori; needs one of {_names(_MORI_DTYPES)}"
    if shard_bytes % 4:
        yield f"a shard has {shard_bytes} bytes; mori needs a multiple of 4: pad it"
    if shard_bytes > min(MORI_MAX_SHARD_BYTES, _MORI_MAX_NUMEL * dtype.itemsize):
        yield (
            f"a shard has {shard_bytes} bytes of {dtype}; mori's buffer takes {_MORI_MAX_NUMEL} "
            f"elements and {MORI_MAX_SHARD_BYTES} bytes: gather in parts"
        )


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _dotted(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}" if code else "unknown"


def _cuda(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}" if code else "unknown"


# ------------------------------------------------------------------------------- the evidence

# "AllGather [Copy Engine]: 1024 Bytes -> cudaMemcpy" and "[Hierarchical CE]" (src/ce_coll.cc), by
# SMs "[Symmetric]" (src/scheduler/symmetric_sched.cc) or nothing (src/enqueue.cc), NCCL 2.30.7.
_CALL_IN_LOG: Final = re.compile(r"\b(AllGather|AlltoAll)(?: \[([\w ]+)\])?: (\d+) Bytes ->")
_NAME_IN_LOG: Final[dict[Collective, str]] = {"all_gather": "AllGather", "all_to_all": "AlltoAll"}


def ran_with_copy_engine(
    nccl_log: str, *, op: Collective = "all_gather", shard_bytes: int | None = None
) -> bool | None:
    """Return whether NCCL ran all such calls by copy engines; None if its log names none.

    NCCL writes them with NCCL_DEBUG=INFO and TUNING among NCCL_DEBUG_SUBSYS, on rank 0 of a group.
    An all_to_all of sends and receives, which is how it falls back, is not in the log.

    Args:
        nccl_log: Text of the log.
        op: all_gather or all_to_all.
        shard_bytes: Only calls in which a rank sends so many bytes to each other; None = all.

    >>> ran_with_copy_engine("h0:7:9 [0] NCCL INFO AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy")
    True
    """
    engines = [
        match[2]
        for match in _CALL_IN_LOG.finditer(nccl_log)
        if match[1] == _NAME_IN_LOG[op] and shard_bytes in (None, int(match[3]))
    ]
    return all(name in ("Copy Engine", "Hierarchical CE") for name in engines) if engines else None
