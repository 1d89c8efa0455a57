"""Copy engines run only the calls they can, all ranks take the same path, and say which and why.

No GPU: torch's CUDA side, its symmetric memory and mori are fakes whose copies are gloo's.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from executor.collectives.copy_conditions import (
    MORI_MAX_SHARD_BYTES,
    CopyEngineFacts,
    agreed,
    gather_facts,
    ran_with_copy_engine,
    refusal,
)
from executor.collectives.copy_engine import (
    CopyEngineCollectives,
    MoriCopyEngine,
    NcclCopyEngine,
    Route,
    with_copy_engine,
)
from executor.collectives.protocol import Splits
from executor.errors import ExecutorError
from executor.mesh import RankGroup
from planner.plan import CallPath, Collective
from tests.unit.gloo_ranks import on_ranks

MIB = 1 << 20
CPU = torch.device("cpu")
BF16 = torch.bfloat16

NVIDIA = CopyEngineFacts(
    known=1,
    on_nccl=1,
    nccl_version=22800,
    cuda_driver=12050,
    symmetric_memory=1,
    windows=1,
    zero_cta=1,
    one_domain=1,
)
AMD = CopyEngineFacts(known=1, on_rccl=1, one_domain=1, is_world=1, mori=1, mori_sdma=1)
READY: dict[CallPath, CopyEngineFacts] = {"nccl_zero_cta": NVIDIA, "mori": AMD}


# ----------------------------------------------------------------------------- the conditions


@pytest.mark.parametrize("path", READY)
def test_an_all_gather_that_meets_every_condition_runs(path: CallPath) -> None:
    assert refusal(path, "all_gather", READY[path], MIB, BF16) is None


def test_an_all_to_all_runs_on_nccl_alone() -> None:
    assert refusal("nccl_zero_cta", "all_to_all", NVIDIA, MIB, BF16) is None
    assert "only gathers" in str(refusal("mori", "all_to_all", AMD, MIB, BF16))


@pytest.mark.parametrize(
    ("path", "changed", "words"),
    [
        ("nccl_zero_cta", {"known": 0}, "could not read"),
        ("nccl_zero_cta", {"on_nccl": 0}, "not NCCL on NVIDIA"),
        ("nccl_zero_cta", {"nccl_version": 22707}, "NCCL is 2.27.7 on a rank; needs 2.28"),
        ("nccl_zero_cta", {"nccl_version": 0}, "NCCL is unknown"),
        ("nccl_zero_cta", {"cuda_driver": 12040}, "CUDA 12.4; needs CUDA 12.5"),
        ("nccl_zero_cta", {"symmetric_memory": 0}, "no symmetric memory"),
        ("nccl_zero_cta", {"windows": 0}, "NCCL_WIN_ENABLE=0"),
        ("nccl_zero_cta", {"zero_cta": 0}, "NCCL_CTA_POLICY=2"),
        ("nccl_zero_cta", {"one_domain": 0}, "several load/store domains"),
        ("mori", {"known": 0}, "could not read"),
        ("mori", {"on_rccl": 0}, "not RCCL on AMD"),
        ("mori", {"mori": 0}, "install mori 1.2.0"),
        ("mori", {"mori_sdma": 0}, "MORI_ENABLE_SDMA"),
        ("mori", {"is_world": 0}, "not all ranks of the job"),
        ("mori", {"one_domain": 0}, "several load/store domains"),
    ],
)
def test_a_fact_that_fails_alone_is_named(
    path: CallPath, changed: dict[str, int], words: str
) -> None:
    facts = replace(READY[path], **changed)
    assert words in str(refusal(path, "all_gather", facts, MIB, BF16))


@pytest.mark.parametrize("path", READY)
@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("all_reduce", "only copy"),
        ("reduce_scatter", "only copy"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("broadcast", "broadcast"),
    ],
)
def test_other_operations_are_the_librarys(path: CallPath, op: Collective, words: str) -> None:
    assert words in str(refusal(path, op, READY[path], MIB, BF16))


@pytest.mark.parametrize("path", READY)
def test_nothing_is_left_to_the_library(path: CallPath) -> None:
    assert "nothing to copy" in str(refusal(path, "all_gather", READY[path], 0, BF16))


def test_blackwell_takes_copy_engines_by_size_alone() -> None:
    facts = replace(NVIDIA, zero_cta=0, blackwell=1, nccl_version=22902)

    def runs(op: Collective, size: int, facts: CopyEngineFacts) -> bool:
        return refusal("nccl_zero_cta", op, facts, size, BF16) is None

    assert runs("all_gather", 8 * MIB + 1, facts)
    assert not runs("all_gather", 8 * MIB, facts)
    assert not runs("all_to_all", 8 * MIB + 1, facts)
    assert not runs("all_gather", 8 * MIB + 1, replace(facts, blackwell=0))
    assert not runs("all_gather", 8 * MIB + 1, replace(facts, nccl_version=22809))


@pytest.mark.parametrize(
    ("size", "dtype", "words"),
    [
        (6, torch.uint8, "multiple of 4"),
        (MORI_MAX_SHARD_BYTES + 4, torch.float32, "gather in parts"),
        (MORI_MAX_SHARD_BYTES + 8, torch.float64, "gather in parts"),  # the buffer's bytes
        (MORI_MAX_SHARD_BYTES // 2 + 4, BF16, "gather in parts"),  # 64 Mi elements
        (MIB, torch.complex64, "complex64"),
        (MIB, torch.bool, "bool"),
    ],
)
def test_moris_sizes_and_dtypes(size: int, dtype: torch.dtype, words: str) -> None:
    assert words in str(refusal("mori", "all_gather", AMD, size, dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_moris_largest_shard_runs(dtype: torch.dtype) -> None:
    largest = min(MORI_MAX_SHARD_BYTES, 64 * MIB * dtype.itemsize)
    assert refusal("mori", "all_gather", AMD, largest, dtype) is None


def test_a_path_without_gpus_is_refused() -> None:
    assert "shm is no copy engine" in str(refusal("shm", "all_gather", NVIDIA, MIB, BF16))


# ---------------------------------------------------------------------------------- the facts


def runtime(**changes: Any) -> Any:
    """Return what ``gather_facts`` reads of a torch on an H100, or what ``changes`` make of it."""
    values = {"hip": None, "nccl": (2, 30, 7), "driver": 13000, "capability": (9, 0), **changes}
    return SimpleNamespace(
        version=SimpleNamespace(hip=values["hip"]),
        cuda=SimpleNamespace(
            nccl=SimpleNamespace(version=lambda: values["nccl"]),
            get_device_capability=lambda device: values["capability"],
        ),
        distributed=SimpleNamespace(get_world_size=lambda: 4),
        _C=SimpleNamespace(
            **(
                {}
                if values["driver"] is None
                else {"_cuda_getDriverVersion": lambda: values["driver"]}
            )
        ),
    )


SYMMETRIC = SimpleNamespace(set_backend=0, empty=0, rendezvous=0, is_symm_mem_tensor=0)
MODULES = {
    "torch.distributed._symmetric_memory": SYMMETRIC,
    "mori.ccl": SimpleNamespace(AllgatherSdma=0),
    "mori.shmem": SimpleNamespace(),
}


def facts_of(
    *,
    backend: str = "nccl",
    policy: int = 2,
    environment: dict[str, str] | None = None,
    modules: dict[str, Any] | None = None,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    units: tuple[tuple[int, ...], ...] = (),
    **changes: Any,
) -> CopyEngineFacts:
    inside = SimpleNamespace(
        name=lambda: backend,
        options=SimpleNamespace(config=SimpleNamespace(cta_policy=policy)),
    )
    group = RankGroup(ranks, 0, cast(Any, SimpleNamespace(_get_backend=lambda _: inside)), units)

    def find(name: str) -> Any:
        found = MODULES if modules is None else modules
        if name not in found:
            raise ImportError(name)
        return found[name]

    env = {"MORI_ENABLE_SDMA": "1"} if environment is None else environment
    return gather_facts(group, CPU, env, runtime=runtime(**changes), find=find)


def test_facts_of_an_h100_that_is_ready() -> None:
    assert facts_of() == replace(
        NVIDIA, nccl_version=23007, cuda_driver=13000, is_world=1, mori=1, mori_sdma=1
    )


def test_facts_of_an_amd_gpu_that_is_ready() -> None:
    found = facts_of(hip="7.12", nccl=None)
    assert found == replace(AMD, zero_cta=1, windows=1)
    assert refusal("mori", "all_gather", found, MIB, BF16) is None


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"backend": "gloo"}, "on_nccl", 0),
        ({"hip": "7.12"}, "on_nccl", 0),
        ({"nccl": (2, 28, 9, "suffix")}, "nccl_version", 22809),
        ({"driver": None}, "cuda_driver", 0),
        ({"modules": {}}, "symmetric_memory", 0),
        (
            {"modules": {"torch.distributed._symmetric_memory": SimpleNamespace(empty=0)}},
            "symmetric_memory",
            0,
        ),
        ({"environment": {"NCCL_WIN_ENABLE": "0"}}, "windows", 0),
        ({"environment": {"NCCL_CUMEM_ENABLE": "0"}}, "windows", 0),
        ({"policy": 0}, "zero_cta", 0),
        ({"policy": 1}, "zero_cta", 0),
        ({"policy": -(1 << 31)}, "zero_cta", 0),  # NCCL_CONFIG_UNDEF_INT
        ({"policy": 0, "environment": {"NCCL_CTA_POLICY": "2"}}, "zero_cta", 1),
        ({"policy": 0, "environment": {"NCCL_CTA_POLICY": "efficiency|zero"}}, "zero_cta", 1),
        ({"environment": {"NCCL_CTA_POLICY": "DEFAULT"}}, "zero_cta", 0),  # it overrides
        ({"capability": (10, 0)}, "blackwell", 1),
        (
            {"capability": (10, 3), "environment": {"NCCL_SYM_CE_THRESHOLD": "1"}},
            "blackwell",
            0,
        ),
        ({"units": ((0, 1), (2, 3))}, "one_domain", 0),
        ({"units": ((0, 1, 2, 3),)}, "one_domain", 1),
        ({"ranks": (0, 1)}, "is_world", 0),
        ({"ranks": (0, 2, 1, 3)}, "is_world", 0),
        ({"modules": {"mori.shmem": 0, "mori.ccl": SimpleNamespace()}}, "mori", 0),
        ({"modules": {"mori.ccl": MODULES["mori.ccl"]}}, "mori", 0),
        ({"environment": {}}, "mori_sdma", 0),
        ({"environment": {"MORI_ENABLE_SDMA": "Off"}}, "mori_sdma", 0),
    ],
)
def test_each_fact_is_read(changes: dict[str, Any], field: str, value: int) -> None:
    assert getattr(facts_of(**changes), field) == value


def test_this_torch_without_gpus_has_no_copy_engine() -> None:
    def action(group: RankGroup) -> list[Route]:
        made = with_copy_engine("nccl_zero_cta", group, CPU, {}, cast(Any, None))
        return [made.route("all_gather", MIB, BF16)]

    # no job is initialized, so that the facts cannot even be read
    assert (
        on_ranks(2, action)
        == [[Route("library", "a rank could not read its facts; its log says why")]] * 2
    )


# ------------------------------------------------------------------------------ the agreement


class Counted:
    """A process group whose all_reduces are counted."""

    def __init__(self, group: Any) -> None:
        self._group, self.num_calls = group, 0

    def allreduce(self, tensors: list[torch.Tensor], op: Any) -> Any:
        self.num_calls += 1
        return self._group.allreduce(tensors, op)


def agreement(reads: list[Callable[[], CopyEngineFacts]]) -> list[CopyEngineFacts]:
    def action(group: RankGroup) -> CopyEngineFacts:
        counted = Counted(group.process_group)
        found = agreed(replace(group, process_group=cast(Any, counted)), CPU, reads[group.index])
        assert counted.num_calls == 1
        return found

    return on_ranks(len(reads), action)


def test_ranks_that_are_alike_agree_on_what_they_are() -> None:
    assert agreement([lambda: NVIDIA] * 3) == [NVIDIA] * 3


def test_what_one_rank_lacks_no_rank_uses_and_all_know_why() -> None:
    old = replace(NVIDIA, cuda_driver=12020)
    found = agreement([lambda: NVIDIA, lambda: old, lambda: NVIDIA])
    reasons = {refusal("nccl_zero_cta", "all_gather", facts, MIB, BF16) for facts in found}
    assert reasons == {"a rank's driver is CUDA 12.2; needs CUDA 12.5 or later"}


def test_a_rank_that_fails_alone_makes_all_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> CopyEngineFacts:
        raise OSError("libcuda.so.1 is gone")

    found = agreement([lambda: NVIDIA, lambda: NVIDIA, broken])
    assert found == [CopyEngineFacts()] * 3
    assert "libcuda.so.1 is gone" in caplog.text


def test_a_rank_alone_agrees_with_itself() -> None:
    assert agreed(RankGroup((0,), 0, None), CPU, lambda: NVIDIA) == NVIDIA


# --------------------------------------------------------------------------------- the choice


class Recorded:
    """Collectives that say which of them were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        self.calls.append("all_gather")

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        self.calls.append("all_to_all")


def test_each_call_takes_its_path_and_is_counted() -> None:
    engine, library, starts = Recorded(), Recorded(), []

    def start() -> Recorded:
        starts.append(1)
        return engine

    made = CopyEngineCollectives("nccl_zero_cta", NVIDIA, start, library)
    made.all_gather(torch.empty(0), torch.empty(0))
    assert (starts, library.calls) == ([], ["all_gather"])
    for _ in range(2):
        made.all_gather(torch.empty(8), torch.empty(4))
    made.all_to_all(torch.empty(4), torch.empty(4), None, None)
    made.all_to_all(torch.empty(4), torch.empty(4), [1, 3], [1, 3])
    assert starts == [1]
    assert engine.calls == ["all_gather", "all_gather", "all_to_all"]
    assert library.calls == ["all_gather", "all_to_all"]
    assert made.ran == {
        Route("library", "there is nothing to copy"): 1,
        Route("nccl_zero_cta", None): 3,
        Route("library", "NCCL has no copy-engine all_to_all of counted pieces"): 1,
    }


def test_all_ranks_take_the_library_when_one_refuses() -> None:
    def action(group: RankGroup) -> Any:
        mine = AMD if group.index else replace(AMD, mori=0)
        library = Recorded()
        facts = agreed(group, CPU, lambda: mine)
        made = CopyEngineCollectives("mori", facts, Recorded, library)
        made.all_gather(torch.empty(6), torch.empty(2))
        return library.calls, dict(made.ran)

    calls, ran = (
        ["all_gather"],
        {
            Route(
                "library",
                "a rank's Python has no mori.ccl.AllgatherSdma; install mori 1.2.0 or later",
            ): 1
        },
    )
    assert on_ranks(3, action) == [(calls, ran)] * 3


# -------------------------------------------------------------------------------- the engines


class FakeMemory:
    """torch.distributed._symmetric_memory: memory of the CPU, and who asked for it."""

    def __init__(self) -> None:
        self.backend = ""
        self.known: dict[int, torch.Tensor] = {}
        self.registered: list[int] = []

    def set_backend(self, name: str) -> None:
        self.backend = name

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        self.known[made.data_ptr()] = made
        return made

    def is_symm_mem_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.known

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> None:
        assert self.is_symm_mem_tensor(tensor)
        self.registered.append(tensor.numel())


class FakeCalls:
    """torch.distributed on gloo's thread ranks; every end must be symmetric, every call async."""

    def __init__(self, memory: FakeMemory, index: int) -> None:
        self._memory, self._index = memory, index
        self.num_calls = 0

    def all_gather_single(
        self, whole: torch.Tensor, shard: torch.Tensor, *, group: Any, async_op: bool
    ) -> Any:
        self._check(whole, shard, async_op)
        assert shard.data_ptr() == whole.data_ptr() + self._index * shard.nbytes, "not in place"
        return group._allgather_base(whole, shard)

    def all_to_all_single(
        self, received: torch.Tensor, rows: torch.Tensor, *, group: Any, async_op: bool
    ) -> Any:
        self._check(received, rows, async_op)
        return group.alltoall_base(received, rows, [], [])

    def _check(self, output: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
        assert async_op, "a call on the default stream"
        blocks = {memory.untyped_storage().data_ptr() for memory in self._memory.known.values()}
        assert {end.untyped_storage().data_ptr() for end in (output, source)} <= blocks
        self.num_calls += 1


def rows_of(member: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count * 3).reshape(count, 3) % 5 + 7 * member).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.bool, torch.float8_e4m3fn])
def test_nccls_engine_gathers_in_symmetric_memory(dtype: torch.dtype) -> None:
    def action(group: RankGroup) -> Any:
        memory = FakeMemory()
        calls = FakeCalls(memory, group.index)
        engine = NcclCopyEngine(group, CPU, memory=memory, calls=calls)
        found = []
        for count in (5, 2, 8):
            whole = torch.empty(3 * count, 3).to(dtype)
            engine.all_gather(whole, rows_of(group.index, count, dtype))
            expected = torch.cat([rows_of(member, count, dtype) for member in range(3)])
            found.append(torch.equal(whole.view(torch.uint8), expected.view(torch.uint8)))
        return found, memory.backend, len(memory.registered), calls.num_calls

    # three sizes, of which the second fits into the first's buffer
    assert on_ranks(3, action) == [([True] * 3, "NCCL", 2, 3)] * 3


def test_a_whole_of_symmetric_memory_is_filled_directly() -> None:
    def action(group: RankGroup) -> Any:
        memory = FakeMemory()
        engine = NcclCopyEngine(group, CPU, memory=memory, calls=FakeCalls(memory, group.index))
        whole = memory.empty(2 * 4, dtype=torch.float32, device=CPU)
        engine.all_gather(whole, torch.full((4,), float(group.index)))
        return whole.tolist(), memory.registered, len(memory.known)

    assert on_ranks(2, action) == [([0.0] * 4 + [1.0] * 4, [8], 1)] * 2


def test_nccls_engine_exchanges_equal_pieces_only() -> None:
    def action(group: RankGroup) -> torch.Tensor:
        memory = FakeMemory()
        engine = NcclCopyEngine(group, CPU, memory=memory, calls=FakeCalls(memory, group.index))
        rows = rows_of(group.index, 4, torch.float32)
        received = torch.empty_like(rows)
        engine.all_to_all(received, rows, None, None)
        with pytest.raises(ExecutorError, match="counted pieces"):
            engine.all_to_all(received, rows, [1, 3], [1, 3])
        return received

    for member, received in enumerate(on_ranks(2, action)):
        sent = [rows_of(other, 4, torch.float32)[2 * member : 2 * member + 2] for other in (0, 1)]
        assert torch.equal(received, torch.cat(sent))


class FakeMori:
    """mori.ccl, mori.shmem and what of torch they need, on one of gloo's thread ranks."""

    def __init__(
        self, group: RankGroup, *, accepts: bool = True, rank: int = -1, status: int = 0
    ) -> None:
        self.group, self.accepts, self.status = group, accepts, status
        self.rank = group.index if rank < 0 else rank
        self.names: list[tuple[str, str]] = []
        self.buffers: tuple[int, int] | None = None

    def find(self, name: str) -> Any:
        if name == "mori.ccl":
            return SimpleNamespace(AllgatherSdma=self._made)
        return SimpleNamespace(
            shmem_torch_process_group_init=self._started,
            shmem_mype=lambda: self.rank,
            shmem_npes=lambda: self.group.size,
        )

    @property
    def runtime(self) -> Any:
        register = SimpleNamespace(
            _register_process_group=lambda name, group: self.names.append((name, group))
        )
        return SimpleNamespace(
            _C=SimpleNamespace(_distributed_c10d=register),
            distributed=SimpleNamespace(group=SimpleNamespace(WORLD="world")),
            cuda=SimpleNamespace(current_stream=lambda: "a stream"),
        )

    def _started(self, name: str) -> int:
        assert (name, "world") in self.names, "mori looks the group up by its name"
        return self.status

    def _made(self, rank: int, size: int, **sizes: Any) -> Any:
        assert (rank, size) == (self.group.index, self.group.size)
        assert sizes["copy_output_to_user"] is True
        self.buffers = (sizes["input_buffer_size"], sizes["output_buffer_size"])
        return self._gather

    def _gather(self, shard: torch.Tensor, whole: torch.Tensor, count: int, stream: Any) -> bool:
        assert (count, stream) == (shard.numel(), "a stream")
        if self.accepts:
            cast(Any, self.group.process_group)._allgather_base(whole, shard).wait()
        return self.accepts


def test_moris_engine_gathers() -> None:
    def action(group: RankGroup) -> Any:
        mori = FakeMori(group)
        engine = MoriCopyEngine(group, find=mori.find, runtime=mori.runtime)
        whole = torch.empty(2, 3)
        engine.all_gather(whole, rows_of(group.index, 1, torch.float32))
        return whole.tolist(), mori.buffers

    expected = torch.cat([rows_of(0, 1, torch.float32), rows_of(1, 1, torch.float32)]).tolist()
    buffers = (MORI_MAX_SHARD_BYTES, 2 * MORI_MAX_SHARD_BYTES)
    assert on_ranks(2, action) == [(expected, buffers)] * 2


def test_mori_that_sees_other_ranks_or_refuses_is_an_error() -> None:
    group = RankGroup((0, 1), 0, None)
    for mori, words in (
        (FakeMori(group, rank=1), "status 0 as rank 1 of 2; needed 0, as rank 0 of 2"),
        (FakeMori(group, status=3), "status 3 as rank 0 of 2"),
    ):
        with pytest.raises(ExecutorError, match=words):
            MoriCopyEngine(group, find=mori.find, runtime=mori.runtime)
    refusing = FakeMori(group, accepts=False)
    engine = MoriCopyEngine(group, find=refusing.find, runtime=refusing.runtime)
    with pytest.raises(ExecutorError, match="12 bytes per rank"):
        engine.all_gather(torch.empty(6), torch.empty(3))


def test_what_the_engines_call_is_in_this_torch() -> None:
    memory = __import__("torch.distributed._symmetric_memory", fromlist=["empty"])
    for name in vars(SYMMETRIC):
        assert callable(getattr(memory, name))
    assert callable(dist.all_gather_single)
    assert callable(dist.all_to_all_single)


# ------------------------------------------------------------------------------- the evidence

BY_COPIES = "h0:1:2 [0] NCCL INFO AllGather [Copy Engine]: 4096 Bytes -> cudaMemcpy; CE sync\n"
BY_NETWORK = "h0:1:2 [0] NCCL INFO AllGather [Hierarchical CE]: 4096 Bytes -> RMA proxy + CE\n"
BY_KERNEL = (
    "h0:1:2 [0] NCCL INFO AllGather: 512 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"
)
BY_SYMMETRIC = "h0:1:2 [0] NCCL INFO AllGather [Symmetric]: 4096 Bytes -> Kernel AllGather_LL\n"
EXCHANGE = "h0:1:2 [0] NCCL INFO AlltoAll [Copy Engine]: 4096 Bytes -> cudaMemcpy\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("h0:1:2 [0] NCCL INFO AllReduce: 512 Bytes -> Algo RING proto LL\n", None),
        (EXCHANGE, None),
        (BY_COPIES, True),
        (BY_NETWORK, True),
        (BY_KERNEL, False),
        (BY_SYMMETRIC, False),
        (BY_COPIES + BY_SYMMETRIC, False),
    ],
)
def test_nccls_log_says_what_ran(log: str, expected: bool | None) -> None:
    assert ran_with_copy_engine(log) is expected


def test_nccls_log_is_read_by_size_and_operation() -> None:
    log = BY_COPIES + BY_KERNEL + EXCHANGE
    assert ran_with_copy_engine(log, shard_bytes=4096) is True
    assert ran_with_copy_engine(log, shard_bytes=512) is False
    assert ran_with_copy_engine(log, shard_bytes=1) is None
    assert ran_with_copy_engine(log, op="all_to_all") is True
