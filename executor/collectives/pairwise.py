"""all_to_all one pair at a time: a member's link carries one message each way."""

import torch

from executor.collectives.direct import pieces
from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Splits
from executor.mesh import RankGroup

__all__ = ["Pairwise"]


class Pairwise:
    """The all_to_all of one group in n - 1 steps (``protocol.Collectives``).

    In step i a member sends to the i-th after it and receives from the i-th before it, so that
    everyone has one sender and one receiver, as in MPICH's long all-to-all (Thakur, Rabenseifner
    and Gropp 2005, doi:10.1177/1094342005051521).
    """

    def __init__(self, group: RankGroup) -> None:
        self._size, self._index = group.size, group.index
        self._messages = Messages(group)

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th piece of ``rows`` to member i; fill ``received`` in member order."""
        into = pieces(received, out_splits, self._size)
        out = pieces(rows, in_splits, self._size)
        into[self._index].copy_(out[self._index].view_as(into[self._index]))
        for step in range(1, self._size):
            source = (self._index - step) % self._size
            target = (self._index + step) % self._size
            incoming = self._messages.receive(into[source], source)
            wait(incoming, self._messages.send(out[target], target))
