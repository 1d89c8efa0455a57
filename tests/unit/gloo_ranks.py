"""Ranks that are threads of this process, joined by real gloo groups over loopback sockets."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # public without their types

from executor.mesh import RankGroup, SplitGroup

__all__ = ["Sent", "on_ranks", "split_by_units"]

ResultT = TypeVar("ResultT")

_TIMEOUT = timedelta(seconds=20)


class Sent:
    """A process group of which the bytes sent to each member are counted; receives pass."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.bytes_to: Counter[int] = Counter()
        self.num_messages = 0
        self.parts: list[Sent] = []  # kept as long: a group that closes breaks who still connects

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        self.bytes_to[to] += sum(t.numel() * t.element_size() for t in tensors)
        self.num_messages += 1
        return self._group.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def on_ranks(
    size: int,
    action: Callable[[RankGroup], ResultT],
    *,
    units: Sequence[Sequence[int]] = (),
) -> list[ResultT]:
    """Return what ``action`` returns on each rank of a group of ``size``; raise what one raises.

    The group's ``process_group`` is a ``Sent``, None for a single rank.
    """
    store, results, errors = HashStore(), {}, []
    all_done = threading.Barrier(size)

    def run(index: int) -> None:
        try:
            group = Sent(dist.ProcessGroupGloo(store, index, size, _TIMEOUT)) if size > 1 else None
            ranks, laid = tuple(range(size)), tuple(tuple(unit) for unit in units)
            results[index] = action(
                RankGroup(ranks, index, cast("dist.ProcessGroup | None", group), laid)
            )
            # A group that closes breaks those that still connect to it. Not by gloo's barrier: it
            # raises what calls of the group before it raised, if they have not been cleared away.
            all_done.wait(_TIMEOUT.total_seconds())
        except BaseException as error:
            errors.append(error)
            all_done.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(size)]


def split_by_units(whole: RankGroup, units: Sequence[Sequence[int]], store: Store) -> SplitGroup:
    """Return this rank's end of the group split by ``units``, on gloo groups of their own.

    Args:
        whole: All ranks.
        units: Ranks of each unit.
        store: One that all ranks share, for these groups alone.
    """
    is_even = len({len(unit) for unit in units}) == 1
    across = (
        list(zip(*units, strict=True))
        if is_even
        else [tuple(unit[0] for unit in units), *((r,) for unit in units for r in unit[1:])]
    )
    mine = whole.ranks[whole.index]

    def end(groups: Sequence[Sequence[int]], name: str) -> RankGroup:
        ranks = next(tuple(group) for group in groups if mine in group)
        if len(ranks) == 1:
            return RankGroup(ranks, 0, None)
        own = PrefixStore(f"{name}{ranks}", store)
        group = Sent(dist.ProcessGroupGloo(own, ranks.index(mine), len(ranks), _TIMEOUT))
        cast(Sent, whole.process_group).parts.append(group)
        return RankGroup(ranks, ranks.index(mine), cast(dist.ProcessGroup, group))

    return SplitGroup(end(units, "inside"), end(across, "across"), is_even)
