"""Sends and receives between members of a group: what our own algorithms are made of.

``ProcessGroup.send`` and ``recv`` rather than ``torch.distributed.isend``: the recorder replaces
that one while it watches torch's pipelining, and it checks for longer than a small message takes.
"""

import torch
import torch.distributed as dist

from executor.mesh import RankGroup

__all__ = ["Messages", "wait"]

_TAG = 0


class Messages:
    """This rank's messages to and from the members of a group. Empty tensors are not sent."""

    def __init__(self, group: RankGroup) -> None:
        self.size, self.index = group.size, group.index
        self._group = group.process_group

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        """Start sending a contiguous tensor to a member; keep it unchanged until waited for."""
        if self._group is None or not tensor.numel():
            return None
        return self._group.send([tensor], to, _TAG)

    def receive(self, tensor: torch.Tensor, of: int) -> dist.Work | None:
        """Start filling a contiguous tensor with the next message of a member."""
        if self._group is None or not tensor.numel():
            return None
        return self._group.recv([tensor], of, _TAG)


def wait(*works: dist.Work | None) -> None:
    """Wait for messages in turn."""
    for work in works:
        if work is not None:
            work.wait()
