"""Tell a lost peer from other errors, and say in one sentence which communication it broke.

gloo raises a bare ``RuntimeError`` for everything, so its text decides; torch's store has classes
of its own. What is not recognised is left as it was: a traceback is better than a wrong cause.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

from executor.errors import LostPeerError

__all__ = ["list_of_ranks", "lost_peer", "naming_lost_peers"]

# gloo/transport/tcp/pair.cc and unbound_buffer.cc ("Connection closed by peer", "Timed out
# waiting 5000ms for recv operation to complete", "Application timeout caused pair closure") and
# the texts of errno that they append: ECONNRESET, EPIPE, ECONNREFUSED.
_TEXT_OF_A_LOST_PEER: Final = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|timeout", re.IGNORECASE
)


def lost_peer(
    error: RuntimeError, doing: str, *, rank: int, others: Iterable[int]
) -> LostPeerError | None:
    """Return what to raise instead of ``error`` if a peer is gone; None for any other error.

    Args:
        error: What torch raised.
        doing: The communication, such as ``all_reduce on dp_cp``.
        rank: This rank, which survives.
        others: The ranks it talked to.
    """
    if not isinstance(error, dist.DistError) and not _TEXT_OF_A_LOST_PEER.search(str(error)):
        return None
    return LostPeerError(
        f"rank {rank} lost {_one_of(sorted(set(others) - {rank}))} during {doing}: "
        f"{_reason(str(error))}; see how that rank or its host ended, then start the job again"
    )


@contextmanager
def naming_lost_peers(doing: str, *, rank: int, world_size: int) -> Iterator[None]:
    """Turn a peer lost inside, in a communication of the whole world, into a ``LostPeerError``."""
    try:
        yield
    except RuntimeError as error:
        lost = lost_peer(error, doing, rank=rank, others=range(world_size))
        if lost is None:
            raise
        raise lost from error


def _reason(text: str) -> str:
    """Return the first sentence, without the source line that gloo puts before it.

    >>> _reason("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset. Typically ...")
    'Read error: Connection reset'
    """
    return re.sub(r"^\[[^\]]*:\d+\] ", "", text.partition("\n")[0]).partition(". ")[0].rstrip(".")


def _one_of(ranks: list[int]) -> str:
    """Return the ranks as words, of which one is meant.

    >>> _one_of([1]), _one_of([0, 2, 3])
    ('rank 1', 'one of ranks [0, 2, 3]')
    """
    return list_of_ranks(ranks) if len(ranks) == 1 else f"one of {list_of_ranks(ranks)}"


def list_of_ranks(ranks: list[int]) -> str:
    """Return the ranks as words, the first 16 of many.

    >>> list_of_ranks([1]), list_of_ranks([0, 2, 3])
    ('rank 1', 'ranks [0, 2, 3]')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks}" if len(ranks) <= 16 else f"ranks {str(ranks[:16])[:-1]}, ...]"
