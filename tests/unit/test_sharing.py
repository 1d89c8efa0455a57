"""What collectives share, held against laws, a fluid played out, and what was published."""

from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from planner.constants import LOOPBACK_SENDER_CORES, MEMORY_PASSES, UNKNOWN_LOST_SHARE
from planner.cost.sharing import (
    Processors,
    level_shares,
    lost_share,
    moved_bytes,
    processors_taken,
    shared_s,
)
from planner.hardware.devices import Device, device
from planner.layout.groups import Group, lay_group
from planner.plan import Collective
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from tests.unit.problems import fabric

Numbers = npt.NDArray[np.float64]


def shared(alone_s: Numbers, levels_s: Numbers) -> float:
    """Return ``shared_s`` of collectives [n] on levels [n, levels]."""
    columns = [[np.array([busy]) for busy in one] for one in levels_s]
    return float(shared_s([np.array([one]) for one in alone_s], columns)[0])


# ---------------------------------------------------------------------------------- levels


def fair_share(wanted: Numbers) -> float:
    """Return the most that anyone gets of a level's rate, 1, which is shared out equally."""
    left, share = 1.0, np.inf
    for number, want in enumerate(np.sort(wanted)):
        share = left / (len(wanted) - number)
        if want > share:
            return share
        left -= want
    return np.inf


def paces(demand: Numbers) -> Numbers:
    """Return the paces that equal shares of every level leave, 1 as alone."""
    shares = np.full(demand.shape[1], np.inf)
    limits = np.ones_like(demand)
    for _ in range(20):
        for level in range(len(shares)):
            others = np.delete(limits, level, axis=1).min(axis=1, initial=1.0)
            shares[level] = fair_share(demand[:, level] * others)
            limits[:, level] = np.minimum(1.0, shares[level] / np.maximum(demand[:, level], 1e-9))
    return limits.min(axis=1)


def played_s(alone_s: Numbers, levels_s: Numbers) -> float:
    """Return when the last is done: every collective waits its latency, then moves at its pace."""
    transfer = levels_s.max(axis=1)
    starts, left = alone_s - transfer, transfer.copy()
    demand = levels_s / np.maximum(transfer, 1e-300)[:, None]
    now = 0.0
    while (left > 1e-12).any():
        moving = (starts <= now + 1e-12) & (left > 1e-12)
        pace = np.zeros(len(left))
        pace[moving] = paces(demand[moving])
        waits = starts[starts > now + 1e-12] - now
        ends = left[moving] / pace[moving]
        step = min([*waits, *ends])
        left = left - step * pace
        now += step
    return max(now, float(starts.max()))


def draws(num_levels: int, count: int) -> list[tuple[Numbers, Numbers]]:
    random = np.random.default_rng(num_levels)
    found = []
    for _ in range(count):
        number = random.integers(2, 5)
        busy = random.random((number, num_levels)) * (random.random((number, num_levels)) < 0.7)
        busy[:, 0] += 0.01
        found.append((busy.max(axis=1) + random.random(number), busy))
    return found


@pytest.mark.parametrize(("alone_s", "levels_s"), draws(1, 40))
def test_on_one_level_it_is_what_a_fluid_takes(alone_s: Numbers, levels_s: Numbers) -> None:
    assert shared(alone_s, levels_s) == pytest.approx(played_s(alone_s, levels_s))


@pytest.mark.parametrize("num_levels", [2, 3])
def test_on_several_levels_a_fluid_takes_no_less_and_rarely_more(num_levels: int) -> None:
    ratios = np.array([played_s(a, b) / shared(a, b) for a, b in draws(num_levels, 80)])
    assert ratios.min() > 1 - 1e-9
    assert np.median(ratios) < 1.005
    assert ratios.max() < 1.25


def test_two_equal_ones_on_a_level_take_twice_as_long() -> None:
    assert shared(np.array([3.0, 3.0]), np.array([[3.0, 1.0], [3.0, 1.0]])) == 6


def test_on_different_levels_they_take_no_longer_than_the_longer() -> None:
    assert shared(np.array([3.0, 5.0]), np.array([[3.0, 0.0], [0.0, 4.0]])) == 5


def test_bytes_add_up_and_latencies_do_not() -> None:
    """Two calls of 1 s latency and 2 s of bytes: 1 + 4 s, not 6."""
    assert shared(np.array([3.0, 3.0]), np.array([[2.0], [2.0]])) == 5
    assert shared(np.array([3.0, 3.0]), np.array([[0.0], [0.0]])) == 3


@pytest.mark.parametrize(("alone_s", "levels_s"), draws(3, 20))
def test_no_level_carries_more_than_its_rate(alone_s: Numbers, levels_s: Numbers) -> None:
    """Nor is anything done before it would be alone, nor later than one after the other."""
    found = shared(alone_s, levels_s)
    assert found >= levels_s.sum(axis=0).max()
    assert alone_s.max() <= found <= alone_s.sum() + 1e-9
    order = np.argsort(alone_s)
    assert shared(alone_s[order], levels_s[order]) == pytest.approx(found)


def test_a_ring_is_as_long_on_a_level_as_its_bytes_take_there() -> None:
    """8 GPUs a node at 450 GB/s, 50 GB/s each out of it: members of a node share its exit."""
    on = fabric(32, architecture="hopper")
    inside, rail, spine = level_shares(on, lay_group(on, np.array([8, 32, 4]), np.array([1, 1, 8])))
    achieved = {"nvlink": 0.80 * 450, "infiniband": 0.94 * 50}
    assert inside == pytest.approx([1, 1, 0])
    assert rail == pytest.approx([0, achieved["nvlink"] / (8 * achieved["infiniband"]), 1])
    assert spine == pytest.approx([0, 0, 0])


# -------------------------------------------------------------------------------- processors


@cache
def compiled(topology: str, nodes: int = 1) -> Fabric:
    return compile_fabric(load_topology(topology), nodes)


def taken(
    op: Collective, on: Fabric, degree: int, stride: int = 1, size_bytes: float = 1e9
) -> float:
    return float(processors_taken(op, on, group(on, degree, stride), np.array([size_bytes]))[0])


def group(on: Fabric, degree: int, stride: int = 1) -> Group:
    return lay_group(on, np.array([degree]), np.array([stride]))


@pytest.mark.parametrize(
    ("topology", "op", "degree", "blocks"),
    [
        ("dgx-h100", "all_gather", 8, 24),  # twice the 12 rings of a log of 8 H100
        ("dgx-h100", "reduce_scatter", 8, 24),
        ("dgx-h100", "all_reduce", 8, 16),  # NVLS: 16 channels (NCCL 2.30.7, transport/nvls.cc)
        ("dgx-a100", "all_gather", 8, 24),
        ("dgx-h100", "all_gather", 1, 0),
        ("mi300x-8x400-roce", "all_gather", 8, 56),  # ROCm/rccl#2073: 56 CUs of 8 ranks
        ("mi355x-8x400-roce", "all_gather", 4, 48),  # ROCm/rocm-systems#11253: Channel 00/48
        ("mi300x-8x400-roce", "send_recv", 8, 2),  # one link to each
    ],
)
def test_a_call_takes_a_processor_for_every_channel(
    topology: str, op: Collective, degree: int, blocks: int
) -> None:
    assert taken(op, compiled(topology), degree) == blocks


def test_between_hosts_few_channels_fill_a_nic() -> None:
    on = compiled("dgx-h100", 4)
    assert taken("all_gather", on, 4, stride=8) < taken("all_gather", on, 8)
    assert taken("send_recv", on, 4, stride=8) == 4  # 50 GB/s by 14 each


@pytest.mark.parametrize(
    ("degree", "size_mib", "blocks"), [(2, 1, 16), (8, 1, 4), (8, 64, 4), (8, 65, 8), (8, 4096, 32)]
)
def test_a_pair_takes_its_share_of_32_channels_until_each_has_16_mib(
    degree: int, size_mib: int, blocks: int
) -> None:
    """NCCL 2.30.7 src/enqueue.cc, addP2pToPlan; 32: the power of two from 24 on."""
    on = compiled("dgx-h100")
    assert taken("send_recv", on, degree, size_bytes=size_mib * 2.0**20) == blocks


def test_looking_up_says_what_asking_says() -> None:
    on = compiled("dgx-h100", 4)
    groups = lay_group(on, np.array([1, 2, 8, 4, 8, 32, 2]), np.array([1, 1, 1, 8, 1, 1, 1]))
    known, sizes = Processors(on), np.geomspace(1e6, 1e9, 7)
    ops: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")
    for op in (*ops, *ops):
        expected = processors_taken(op, on, groups, sizes)
        assert known.taken(op, groups, sizes).tolist() == expected.tolist()


# ------------------------------------------------------------------------------- lost share


def share(what: Device, on: Fabric, blocks: float, bytes_per_s: float) -> float:
    """Return the lost share beside a collective that sends so fast."""
    columns = (np.array([value]) for value in (blocks, bytes_per_s, 1.0))
    return float(lost_share(what, on, *columns)[0])


H100 = device("h100-sxm-80gb")


def test_compute_loses_processors_and_memory_traffic() -> None:
    on = fabric()
    assert share(H100, on, 33, 0.0) == pytest.approx(33 / 132)
    assert share(H100, on, 0, 335e9) == pytest.approx(MEMORY_PASSES.value * 0.1)
    both = share(H100, on, 33, 335e9)
    assert both == pytest.approx(share(H100, on, 33, 0.0) + share(H100, on, 0, 335e9))
    assert share(H100, on, 200, 0.0) == 1


def test_engines_leave_the_processors_alone_and_still_need_the_memory() -> None:
    """A copy engine against NCCL at the same rate: what is left is the traffic."""
    on = compiled("dgx-h100")
    by_kernel = share(H100, on, taken("all_gather", on, 8), 360e9)
    assert 0 < share(H100, on, 0, 360e9) < by_kernel
    twice = replace(H100, memory_bytes_per_s=2 * H100.memory_bytes_per_s)
    assert share(twice, on, 0, 360e9) == pytest.approx(share(H100, on, 0, 360e9) / 2)


@pytest.mark.parametrize(("cores", "spare"), [(8, 0.0), (10, 0.25), (12, 0.5), (64, 7.0), (4, 0.0)])
def test_a_cpu_rank_sends_with_its_own_core_unless_some_are_spare(cores: int, spare: float) -> None:
    """8 ranks; a sender keeps half a core busy (LOOPBACK_SENDER_CORES, measured)."""
    on = fabric(8, library="gloo", cores_per_node=cores)
    held = taken("send_recv", on, 8)
    assert held == LOOPBACK_SENDER_CORES.value
    expected = max(0.0, LOOPBACK_SENDER_CORES.value - spare)
    assert share(device("cpu-core"), on, held, 1e9) == pytest.approx(expected)


def test_of_unknown_kernels_the_assumed_share_is_taken() -> None:
    on = fabric(8, library="hccl")
    assert share(H100, on, taken("all_gather", on, 8), 1e9) == UNKNOWN_LOST_SHARE.value


@pytest.mark.parametrize(
    ("op", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)]
)
def test_moved_is_what_busbw_counts(op: Collective, passes: int) -> None:
    found = moved_bytes(op, group(fabric(), 8), np.array([800.0]))
    assert found == pytest.approx([passes * 700])


# What was measured; the same table is in docs/cost_model.md.


@pytest.mark.parametrize(
    ("kernel", "beside_s", "alone_s"), [("gemm", 2.08, 1.18), ("attention", 0.33, 0.18)]
)
def test_kernels_on_a100_lose_what_was_timed(kernel: str, beside_s: float, alone_s: float) -> None:
    """NVIDIA/nccl#1428: GPT on A100-SXM4-80GB, kernels beside an all_gather, in ms.

    The ring's rate is ml-engineering's 235 GB/s on the same machine.
    """
    on = compiled("dgx-a100")
    lost = share(device("a100-sxm-80gb"), on, taken("all_gather", on, 8), 235e9)
    assert 1 / (1 - lost) == pytest.approx(beside_s / alone_s, rel=0.05)


MI355X_MEMORY = 8e12
RCCL_GB, SDMA_GB = {"all_gather": 333, "reduce_scatter": 326}, 361


@pytest.mark.parametrize(("op", "measured"), [("all_gather", 1.23), ("reduce_scatter", 1.25)])
def test_a_product_on_mi355x_loses_somewhat_more_than_predicted(
    op: Collective, measured: float
) -> None:
    """ROCm/mori#200: both one after the other, over both at once; 8 GPUs, a product of 16384^3.

    How long the product takes is not said: what SDMA's 1.41 for an all_gather leaves it.
    """
    what = replace(H100, memory_bytes_per_s=MI355X_MEMORY)
    on = compiled("mi355x-8x400-roce")
    by_engines = share(what, on, 0, SDMA_GB * 1e9)
    product = (1 - 1.41 * by_engines) / 0.41  # over the seconds of the all_gather by SDMA
    call = SDMA_GB / RCCL_GB[op]
    lost = share(what, on, taken(op, on, 8), RCCL_GB[op] * 1e9)
    predicted = (product + call) / (product + lost * call)
    assert measured < predicted == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(
    ("topology", "memory", "bytes_per_s"),
    [("mi300x-8x400-roce", 5.3e12, 310e9), ("mi355x-8x400-roce", 8e12, 370e9)],
)
def test_a_product_beside_engines_is_as_much_faster_as_was_measured(
    topology: str, memory: float, bytes_per_s: float
) -> None:
    """ROCm/mori#441, 2 x 8 GPUs: 1.11 to 1.33 times; rates of rings are rccl-tests' there."""
    on, what = compiled(topology, 2), replace(H100, memory_bytes_per_s=memory)
    by_kernel = share(what, on, taken("all_gather", on, 16), bytes_per_s)
    by_engines = share(what, on, 0, bytes_per_s)
    assert 1.11 < (1 - by_engines) / (1 - by_kernel) < 1.33
