"""A hierarchical all_reduce is an all_reduce, however the ranks lie on the units.

The ranks are threads and the calls are made by hand, because gloo would have to be started for
every division into units; it runs this code in tests/dist.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.collectives.hierarchical import hierarchical_all_reduce
from executor.mesh import RankGroup, SplitGroup

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@dataclass
class Group:
    """A process group of threads: all put in a tensor, and all get what every one put in."""

    size: int
    sent_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._given: dict[int, torch.Tensor] = {}
        self._here = threading.Barrier(self.size, timeout=10)

    def swap(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._given[index] = tensor.clone()
        self._here.wait()
        found = [self._given[number] for number in range(self.size)]
        self._here.wait()
        if index == 0:
            self.sent_bytes.append(tensor.numel() * tensor.element_size())
        return found


class ThreadedDist:
    """The calls of torch.distributed that are used, for ranks that are threads.

    Where torch leaves a result undefined, such as what a reduce leaves on other ranks than its
    root, this leaves nonsense.
    """

    ReduceOp = dist.ReduceOp

    def __init__(self) -> None:
        self.rank = threading.local()

    def all_reduce(self, tensor: torch.Tensor, *, op: Any, group: Group) -> None:
        tensor.copy_(_combined(group.swap(self._index(group), tensor), op))

    def reduce(self, tensor: torch.Tensor, *, op: Any, group: Group, group_dst: int) -> None:
        index = self._index(group)
        total = _combined(group.swap(index, tensor), op)
        tensor.copy_(total if index == group_dst else torch.full_like(total, -99))

    def broadcast(self, tensor: torch.Tensor, *, group: Group, group_src: int) -> None:
        tensor.copy_(group.swap(self._index(group), tensor)[group_src])

    def reduce_scatter_single(
        self, shard: torch.Tensor, whole: torch.Tensor, *, op: Any, group: Group
    ) -> None:
        index = self._index(group)
        total = _combined(group.swap(index, whole), op)
        whole.fill_(-99)
        shard.copy_(total.chunk(group.size)[index])

    def all_gather_single(self, whole: torch.Tensor, shard: torch.Tensor, *, group: Group) -> None:
        whole.copy_(torch.cat(group.swap(self._index(group), shard)))

    def _index(self, group: Group) -> int:
        found: int = self.rank.index[id(group)]
        return found


def _combined(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    stacked = torch.stack(list(tensors))
    return stacked.sum(0) if op == SUM else stacked.amax(0)


def splits_of(units: Sequence[Sequence[int]]) -> tuple[dict[int, SplitGroup], list[Group]]:
    """Return each rank's end of the split group, and the groups across units."""
    is_even = len({len(unit) for unit in units}) == 1
    across = (
        list(zip(*units, strict=True))
        if is_even
        else [tuple(u[0] for u in units), *((r,) for u in units for r in u[1:])]
    )
    inside_of, across_of = _ends([tuple(unit) for unit in units]), _ends(across)
    splits = {
        rank: SplitGroup(inside_of[rank], across_of[rank], is_even) for rank in sorted(inside_of)
    }
    found: list[Any] = [end.process_group for end in across_of.values() if end.index == 0]
    return splits, [group for group in found if group is not None]


def _ends(groups: Sequence[tuple[int, ...]]) -> dict[int, RankGroup]:
    ends = {}
    for ranks in groups:
        group: Any = Group(len(ranks)) if len(ranks) > 1 else None
        for index, rank in enumerate(ranks):
            ends[rank] = RankGroup(ranks, index, group)
    return ends


def reduce_everywhere(
    units: Sequence[Sequence[int]], tensors: dict[int, torch.Tensor], op: Any
) -> list[Group]:
    """Reduce ``tensors`` in place on a thread per rank; return the groups across units."""
    splits, groups_across = splits_of(units)
    threaded = ThreadedDist()

    def run(rank: int) -> None:
        split = splits[rank]
        threaded.rank.index = {
            id(end.process_group): end.index for end in (split.inside, split.across)
        }
        hierarchical_all_reduce(tensors[rank], split, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.collectives.hierarchical.dist", threaded)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in splits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return groups_across


@st.composite
def divisions(draw: Callable[..., Any]) -> list[list[int]]:
    """Return ranks 0, 1, ... in any order, on units of any sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = draw(st.permutations(range(sum(sizes))))
    return [[ranks.pop() for _ in range(size)] for size in sizes]


@settings(deadline=None, max_examples=60)
@given(units=divisions(), num_elements=st.integers(1, 13), op=st.sampled_from([SUM, MAX]))
def test_every_rank_gets_what_one_all_reduce_gives(
    units: list[list[int]], num_elements: int, op: Any
) -> None:
    ranks = sorted(rank for unit in units for rank in unit)
    generator = torch.manual_seed(num_elements)
    tensors = {
        rank: torch.randint(-9, 9, (num_elements,), generator=generator).double() for rank in ranks
    }
    expected = _combined(list(tensors.values()), op)
    reduce_everywhere(units, tensors, op)
    for rank in ranks:
        assert torch.equal(tensors[rank], expected), f"rank {rank} of {units}"


@pytest.mark.parametrize(
    ("units", "messages"),
    [([[0, 1], [2, 3]], [48, 48]), ([[0, 1, 2], [3]], [96]), ([[0], [1]], [96])],
    ids=["even", "uneven", "one each"],
)
def test_a_unit_sends_the_message_once_in_as_many_pieces_as_it_has_ranks(
    units: list[list[int]], messages: list[int]
) -> None:
    tensors = {rank: torch.ones(12).double() for unit in units for rank in unit}
    across = reduce_everywhere(units, tensors, SUM)
    assert [size for group in across for size in group.sent_bytes] == messages
