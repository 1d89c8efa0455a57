"""In how many segments the executor's collectives send: it cuts by this, the model prices it.

Real numbers, of which the executor takes the whole part: seconds must not fall as messages grow.

A message costs what a link could have carried meanwhile, alpha / beta, beside its own bytes. Only
the root of that figure decides, so one does for all links.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from planner.plan import Collective

__all__ = [
    "SHARED_CAPACITY_BYTES",
    "SHARED_SMALL_BYTES",
    "chain_segments",
    "hierarchy_pieces",
    "shared_barriers",
    "tree_segments",
]

# Over loopback the smallest message takes 18 us and 1 MiB 277 us: one message is 64 KiB (torch 2.13
# gloo, two processes). On four emulated hosts at 200 Mbit/s a tree all_reduce of 4 MiB takes as
# long with a quarter of it, 1.2 times as long with four times as much.
_MESSAGE_COST_BYTES: Final = 64 * 2**10

# Of a piece that is scattered inside, reduced across and gathered: on 2 hosts of 4 ranks, 400
# Mbit/s and two busy cores, four buckets of 6.5 MB took 0.64 s by pieces of 1 or 2 MiB, 0.78 s by
# half a MiB, 0.74 s whole.
_MESSAGES_OF_A_PIECE: Final = 4

# Shared memory of a group, in halves of a slot for each member.
SHARED_CAPACITY_BYTES: Final = 16 * 2**20
# Up to here one barrier and reading everything is faster than two barriers and reading one's part
# twice: measured with 2, 4 and 8 ranks on two cores, where they meet between 256 KiB and 1 MiB.
SHARED_SMALL_BYTES: Final = 256 * 2**10

Count = npt.NDArray[np.float64]
Number = float | npt.NDArray[np.float64]


def chain_segments(size_bytes: Number, num_members: Number) -> Count:
    """Return the segments of a broadcast along a chain, at least 1.

    k segments take (k + n - 2) (cost + S/k): least at k**2 = S (n - 2) / cost.

    >>> float(chain_segments(2**20, 6))
    8.0
    """
    return _root(size_bytes * np.maximum(num_members - 2, 0))


def tree_segments(size_bytes: Number, height: Number) -> Count:
    """Return the segments of what goes up a tree of that height and down again, at least 1.

    K segments take (K + 2 h - 1) (cost + S/K): least at K**2 = (2 h - 1) S / cost.

    >>> float(tree_segments(3 * 2**20, 2))
    12.0
    """
    return _root(size_bytes * np.maximum(2 * height - 1, 0))


def hierarchy_pieces(size_bytes: Number) -> Count:
    """Return the pieces of a hierarchical all_reduce, at least 1; each is on one level at a time.

    >>> float(hierarchy_pieces(4 * 2**20))
    4.0
    """
    return _root(size_bytes / _MESSAGES_OF_A_PIECE)


def shared_barriers(op: Collective, size_bytes: Number, num_members: Number) -> Count:
    """Return the barriers of a collective in shared memory: one a round, each of a slot at most.

    >>> float(shared_barriers("all_reduce", 2**26, 4))
    64.0
    """
    size, n = np.asarray(size_bytes, dtype=float), np.asarray(num_members, dtype=float)
    slot = SHARED_CAPACITY_BYTES / 2 / n
    if op in ("all_gather", "broadcast"):  # every member's slot holds a part of the whole
        return np.maximum(1.0, np.ceil(size / n / slot))
    rounds = np.maximum(1.0, np.ceil(size / slot))
    if op == "all_reduce":
        return np.where(size <= np.minimum(SHARED_SMALL_BYTES, slot), 1.0, 2 * rounds)
    return rounds


def _root(bytes_of_messages: Number) -> Count:
    return np.maximum(1.0, np.sqrt(np.asarray(bytes_of_messages) / _MESSAGE_COST_BYTES))
