"""In how many segments the executor's collectives send: it cuts by this, the model prices it.

Real numbers, of which the executor takes the whole part: seconds must not fall as messages grow.

A message costs what a link could have carried meanwhile, alpha / beta, beside its own bytes. Only
the root of that figure decides, so one does for all links.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["chain_segments", "hierarchy_pieces", "tree_segments"]

# Over loopback the smallest message takes 18 us and 1 MiB 277 us: one message is 64 KiB (torch 2.13
# gloo, two processes). On four emulated hosts at 200 Mbit/s a tree all_reduce of 4 MiB takes as
# long with a quarter of it, 1.2 times as long with four times as much.
_MESSAGE_COST_BYTES: Final = 64 * 2**10

# Of a piece that is scattered inside, reduced across and gathered: on 2 hosts of 4 ranks, 400
# Mbit/s and two busy cores, four buckets of 6.5 MB took 0.64 s by pieces of 1 or 2 MiB, 0.78 s by
# half a MiB, 0.74 s whole.
_MESSAGES_OF_A_PIECE: Final = 4

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


def _root(bytes_of_messages: Number) -> Count:
    return np.maximum(1.0, np.sqrt(np.asarray(bytes_of_messages) / _MESSAGE_COST_BYTES))
