"""What a collective shares: levels with other collectives, the device with compute beside it.

**Levels.** Collectives that run at the same time fill each other's gaps: the bytes of all of them
pass a level at its rate, latencies pass side by side (``shared_s``).

**The device.** A collective of NCCL or RCCL is a kernel of one block per channel, and a block has a
processor (SM, CU) to itself; copy engines (SDMA on AMD) need none. Either way every byte that a
rank moves is read from its memory once and written once. While a collective runs, compute beside
it loses that part of its rate::

    lost share = processors taken / processors + memory traffic / memory rate

so a product takes ``1 / (1 - lost share)`` as long, and a collective of ``T`` seconds costs the
compute ``lost share * T``. What was measured against it is in docs/cost_model.md: adding both parts
is right for products and attention between A100, and too little between MI355X.

A CPU rank sends with a part of its own core (``LOOPBACK_SENDER_CORES``, which is measured), and
takes from compute what spare cores of the host do not give.

Left out: the collective gets slower too, as the kernels it meets hold memory and cache; tiles that
no longer divide evenly over the processors that are left; NCCL_MAX_NCHANNELS and its like.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from planner.constants import LOOPBACK_SENDER_CORES, MEMORY_PASSES, UNKNOWN_LOST_SHARE
from planner.cost.algorithms import PASSES, members_below
from planner.cost.nccl_graphs import Reach, reach_of
from planner.cost.nccl_tuner import default_choice
from planner.cost.rates import rate_of
from planner.hardware.devices import Device
from planner.layout.candidates import Column
from planner.layout.groups import Group, lay_group
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric

__all__ = [
    "Processors",
    "level_shares",
    "lost_share",
    "moved_bytes",
    "needs_no_processor",
    "processors_taken",
    "shared_s",
]

# Compute units of AMD's GPUs, of a die where that is one rank (data sheets of MI50, MI100, MI250X,
# MI300X, MI355X). Other devices bring their own.
_COMPUTE_UNITS: Final = {"gcn5": 60, "cdna1": 120, "cdna2": 110, "cdna3": 304, "cdna4": 256}
# Blocks of RCCL on MI300 and MI350 by GPUs of the node: 32 channels of two, 48 of four, 56 CUs of
# eight (ROCm/rccl#2073; a log of four MI355X has 48, ROCm/rocm-systems#11253).
_RCCL_BLOCKS: Final = ((2, 4, 8), (32, 48, 56))
_RCCL_BLOCKS_OF: Final = ("cdna3", "cdna4")
# Channels between one pair (NCCL 2.30.7 src/graph/paths.cc, src/enqueue.cc): at most two for each
# link, or one for each 14 GB/s of a NIC (NCCL_P2P_PER_CHANNEL_NET_BW); inside a host no more than
# its share of all channels, but for what exceeds 16 MiB on each.
_PAIR_CHANNELS_OF_LINK: Final = 2
_PAIR_CHANNEL_BYTES_PER_S: Final = 14e9
_PAIR_CHANNEL_BYTES: Final = 2.0**24
# Of a message that gives every channel enough to do: what runs beside compute comes in buckets.
_LARGE_BYTES: Final = 2.0**30


# ---------------------------------------------------------------------------------- levels


def shared_s(alone_s: Sequence[Column], levels_s: Sequence[Sequence[Column]]) -> Column:
    """Return seconds until all of several collectives are done that begin together, [rows].

    Each waits its latency, then moves its bytes over all its levels at one pace. A level is busy
    while it has bytes, so it is done with those that begin last after all that it owes them; of
    levels the slowest counts. On one level that is exact, however the rate is shared out; with
    several nothing can be faster. Equal shares of every level take longer where a collective that
    one level holds up leaves another idle: of draws in tests/unit/test_sharing.py the median is the
    same and the worst a quarter more.

    Args:
        alone_s: Of each by itself, shape [rows].
        levels_s: Of each, seconds that its bytes keep every level busy, [collectives][levels];
            the largest, off ``alone_s``, is latency.

    >>> two, none = np.array([2.0]), np.array([0.0])
    >>> shared_s([two, two], [[two, none], [two, none]])
    array([4.])
    >>> shared_s([two, two], [[two, none], [none, two]])
    array([2.])
    """
    if len(alone_s) == 1:
        return alone_s[0]
    done = np.maximum.reduce(list(alone_s))
    starts = [a - np.maximum.reduce(b) for a, b in zip(alone_s, levels_s, strict=True)]
    for busy in zip(*levels_s, strict=True):
        for start in starts:
            owed = sum(
                np.where(other >= start, s, 0.0) for other, s in zip(starts, busy, strict=True)
            )
            done = np.maximum(done, start + owed)
    return np.asarray(done)


def level_shares(fabric: Fabric, group: Group) -> list[Column]:
    """Return how much of a collective's transfer each level is busy, [rows] of each, 0 to 1.

    Of a ring, which sends the same bytes out of a unit on every level that it enters.
    """
    seconds = [
        np.where(inside > below, 1 / (below * rate_of(level, group, inside, direct=False)), 0.0)
        for level, below, inside in zip(
            fabric.levels, members_below(group), group.members, strict=True
        )
    ]
    slowest = np.maximum.reduce(seconds)
    return [one / np.where(slowest > 0, slowest, 1.0) for one in seconds]


# ---------------------------------------------------------------------------------- device


def lost_share(
    device: Device, fabric: Fabric, taken: Column, moved_bytes: Column, seconds: Column
) -> Column:
    """Return the part of compute's rate that a collective beside it takes, 0 to 1, [rows].

    Args:
        device: What computes.
        fabric: Whose library runs the collective.
        taken: ``processors_taken`` by it, shape [rows]; NaN is not known.
        moved_bytes: That a rank sends, shape [rows].
        seconds: Of the collective, shape [rows].
    """
    if fabric.cores_per_node is not None:
        ranks = min(fabric.gpus_per_node, fabric.num_gpus)
        spare = max(0.0, fabric.cores_per_node / ranks - 1)
        return np.clip(taken - spare, 0.0, 1.0)
    num_processors = _COMPUTE_UNITS.get(fabric.architecture, device.num_processors)
    passes = MEMORY_PASSES.value * moved_bytes / device.memory_bytes_per_s
    with np.errstate(invalid="ignore", divide="ignore"):
        share = taken / num_processors + np.where(seconds > 0, passes / seconds, 0.0)
    return np.clip(np.where(np.isnan(share), UNKNOWN_LOST_SHARE.value, share), 0.0, 1.0)


def moved_bytes(op: Collective, group: Group, size_bytes: Column) -> Column:
    """Return the bytes that a rank sends at least, and as many that it receives, [rows]."""
    if op == "send_recv":
        return size_bytes * (group.degree > 1)
    return PASSES.get(op, 1) * size_bytes * (group.degree - 1) / group.degree


def needs_no_processor(method: Method) -> bool:
    """Return whether engines of a GPU move the data: a CPU copies by itself (``shm``)."""
    return method.algorithm == "copy_engine" and method.path != "shm"


def processors_taken(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> Column:
    """Return the processors of a rank's device that a call of the library takes, [rows].

    SMs or CUs of a GPU: as many as the library's own choice has channels for a large call; of a CPU
    the part of a core. NaN where the library's kernels are not known (HCCL, oneCCL). Copy engines
    take none.

    Args:
        op: Operation.
        fabric: Levels, architecture and library.
        group: The groups' lie on the levels, shape [rows].
        size_bytes: S, shape [rows], which counts for a send_recv alone.

    Raises:
        InvalidInputError: The library does not run ``op``.
    """
    several, rows = group.degree > 1, len(group.degree)
    if fabric.library == "gloo":
        held = 0.0 if fabric.cores_per_node is None else LOOPBACK_SENDER_CORES.value
        return np.where(several, held, 0.0)
    if fabric.library not in ("nccl", "rccl"):
        return np.where(several, np.nan, 0.0)
    by_pairs = op in ("all_to_all", "send_recv", "gather", "scatter")
    ring: Collective = "all_gather" if by_pairs else op
    channels = default_choice(ring, fabric, group, np.full(rows, _LARGE_BYTES)).channels
    reach = reach_of(fabric, group, None)
    if fabric.architecture in _RCCL_BLOCKS_OF:
        channels = np.where(reach.gpus > 1, np.interp(reach.gpus, *_RCCL_BLOCKS), channels)
    if by_pairs:
        channels = _power_of_two(np.ceil, channels)
    if op == "send_recv":
        channels = _pair_channels(reach, group, size_bytes, channels)
    return np.where(several, channels, 0.0)


def _pair_channels(reach: Reach, group: Group, size_bytes: Column, channels: Column) -> Column:
    """Return how many of the ``channels`` one pair takes; behind switches it can have all."""
    of_nic = _power_of_two(np.ceil, np.ceil(reach.nic_bytes_per_s / _PAIR_CHANNEL_BYTES_PER_S))
    of_links = np.where(reach.is_switched, channels, _PAIR_CHANNELS_OF_LINK)
    most = np.minimum(channels, np.where(reach.nodes > 1, of_nic, of_links))
    share = np.minimum(most, _power_of_two(np.floor, channels / group.degree))
    needed = _power_of_two(np.ceil, size_bytes / _PAIR_CHANNEL_BYTES)
    return np.where(reach.nodes > 1, most, np.clip(needed, share, most))


def _power_of_two(rounded: np.ufunc, count: Column) -> Column:
    return np.asarray(2.0 ** rounded(np.log2(np.maximum(count, 1.0))))


class Processors:
    """``processors_taken`` on one fabric, worked out once for every group however often asked."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._known: dict[tuple[Collective, int], float] = {}

    def taken(self, op: Collective, group: Group, size_bytes: Column) -> Column:
        """Return the processors that a call takes, shape [rows]."""
        if op == "send_recv":
            return processors_taken(op, self._fabric, group, size_bytes)
        op = "all_gather" if op == "reduce_scatter" else op  # the same rings
        keys = group.degree * (self._fabric.num_gpus + 1) + group.stride
        distinct, first, rows = np.unique(keys, return_index=True, return_inverse=True)
        new = [at for at, key in enumerate(distinct.tolist()) if (op, key) not in self._known]
        if new:
            degree, stride = group.degree[first[new]], group.stride[first[new]]
            laid = lay_group(self._fabric, degree, stride)
            found = processors_taken(op, self._fabric, laid, np.zeros(len(new)))
            for at, taken in zip(new, found.tolist(), strict=True):
                self._known[op, int(distinct[at])] = taken
        return np.array([self._known[op, key] for key in distinct.tolist()])[rows]
