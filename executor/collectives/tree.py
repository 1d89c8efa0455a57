"""Double binary tree: half of a tensor goes up and down each of two trees.

Sanders, Speck and Traeff 2009, doi:10.1016/j.parco.2009.09.001; NCCL's tree is one. The leaves of a
binary tree, half of its members, only ever send up; so the second tree has for leaves what is inner
in the first, and each carries half of the tensor. The trees join the units of a fabric: members of
a unit are a chain behind its head, its first member in one tree and its last in the other.

Each tree has n - 1 edges, of which units - 1 lie between units, and an all_reduce of S bytes sends
S/2 up and S/2 down each: 2 S (n - 1) in all, 2 S (units - 1) between units.

A broadcast is the way down and a reduce the way up, on the same trees hung up at the root. A
binomial tree is less deep, by half at most, but its root sends S log2(n); here it sends S/2 to each
neighbour it has in a tree, and S enters every unit once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Op
from executor.collectives.reduction import accumulate, average, require_reducible
from executor.mesh import RankGroup
from planner.segments import tree_segments

__all__ = ["Tree", "double_binary_tree"]

_Parents = Mapping[int, int | None]  # of every member; None for the root


class Tree:
    """The collectives of one group on two binary trees (``protocol.Collectives``)."""

    def __init__(self, group: RankGroup) -> None:
        self._size, self._index = group.size, group.index
        self._messages = Messages(group)
        self._trees = double_binary_tree(group.units or [(m,) for m in range(group.size)])
        self._places: dict[int | None, list[_Place]] = {}

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduce each half up its tree and send it down again: all get the bits of its root."""
        require_reducible(tensor, op)
        halves = self._halves(tensor, None)
        _run([*(_Up(half, op, self._size) for half in halves), *(_Down(half) for half in halves)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Send ``tensor`` down both trees from ``root``."""
        _run([_Down(half) for half in self._halves(tensor, root)])

    def reduce(self, tensor: torch.Tensor, op: Op, root: int) -> None:
        """Reduce ``tensor`` up both trees to ``root``; elsewhere it holds partial results."""
        require_reducible(tensor, op)
        _run([_Up(half, op, self._size) for half in self._halves(tensor, root)])

    def _halves(self, tensor: torch.Tensor, root: int | None) -> "list[_Half]":
        """Return what goes through each tree, hung up at ``root`` or as it grew."""
        if root not in self._places:
            self._places[root] = [_place(tree, root, self._index) for tree in self._trees]
        places = self._places[root]
        height = max(place.height for place in places)
        flat = tensor.view(-1)
        middle = flat.numel() // 2
        return [
            _Half(self._messages, place, height, _segments(half, height))
            for place, half in zip(places, (flat[:middle], flat[middle:]), strict=True)
        ]


def double_binary_tree(units: Sequence[Sequence[int]]) -> tuple[_Parents, _Parents]:
    """Return the parents of every member in two trees, of which no unit is inner in both.

    The second tree is the first one shifted by a unit, with the other ends of units as heads.

    >>> double_binary_tree([(0,), (1,), (2,), (3,)])
    ({0: 1, 1: 3, 2: 1, 3: None}, {1: 2, 2: 0, 3: 2, 0: None})
    """
    turned = [unit[::-1] for unit in units]
    return _parents(units), _parents([*turned[1:], turned[0]])


def _parents(chains: Sequence[Sequence[int]]) -> _Parents:
    """Return the parents in a binary tree of chains, whose heads come first."""
    parents: dict[int, int | None] = {}
    for position, chain in enumerate(chains, start=1):
        above = _position_above(position, len(chains))
        parents[chain[0]] = chains[above - 1][0] if above else None
        parents.update((member, before) for before, member in pairwise(chain))
    return parents


def _position_above(position: int, count: int) -> int:
    """Return the parent of a position in 1..count, 0 for the root, in the tree in sorted order.

    The lowest set bit of a position is 2**(its height), so odd ones are the leaves.

    >>> [_position_above(position, 6) for position in range(1, 7)]
    [2, 4, 2, 0, 6, 4]
    """
    lowest = position & -position
    above = (position ^ lowest) | (lowest << 1)
    return above if above <= count else position ^ lowest


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a member is in a tree; depth and height in edges from the root."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def _place(tree: _Parents, root: int | None, member: int) -> _Place:
    parents = tree if root is None else _hung_at(tree, root)

    def depth(below: int) -> int:
        above = parents[below]
        return 0 if above is None else 1 + depth(above)

    children = tuple(child for child, parent in parents.items() if parent == member)
    return _Place(parents[member], children, depth(member), max(map(depth, parents)))


def _hung_at(tree: _Parents, root: int) -> _Parents:
    """Return the tree with ``root`` at the top: the edges above it are turned round."""
    turned = dict(tree)
    below: int | None = None
    member: int | None = root
    while member is not None:
        turned[member] = below
        below, member = member, tree[member]
    return turned


def _segments(half: torch.Tensor, height: int) -> tuple[torch.Tensor, ...]:
    """Return the segments of [numel] that travel one behind the other, all alike but the last."""
    count = int(tree_segments(half.nbytes, height))
    return torch.split(half, max(1, -(-half.numel() // count)))


@dataclass(frozen=True, slots=True)
class _Half:
    """What goes through one tree, at this member.

    Attributes:
        messages: To and from the other members.
        place: Of this member.
        height: Of the higher of both trees.
        segments: Of this half of the tensor.
    """

    messages: Messages
    place: _Place
    height: int
    segments: tuple[torch.Tensor, ...]


class _Up:
    """A half on its way up: the children's segments are reduced into ours, which is sent on."""

    def __init__(self, half: _Half, op: Op, size: int) -> None:
        self.start = half.height - half.place.depth
        self.segments = half.segments
        self._messages, self._place, self._op, self._size = half.messages, half.place, op, size
        # Two buffers per child: one is reduced while the next segment arrives in the other.
        first = half.segments[0]
        shape = (2, len(half.place.children), first.numel())
        self._buffers = [list(turn.unbind()) for turn in first.new_empty(shape).unbind()]
        self._coming: list[list[dist.Work | None]] = [[], []]
        self._sent: list[dist.Work | None] = []

    def receive(self, number: int) -> None:
        """Post the receives of a segment."""
        numel, turn = self.segments[number].numel(), number % 2
        self._coming[turn] = [
            self._messages.receive(buffer[:numel], child)
            for buffer, child in zip(self._buffers[turn], self._place.children, strict=True)
        ]

    def pass_on(self, number: int) -> None:
        """Reduce a segment and send it up."""
        segment, turn = self.segments[number], number % 2
        for buffer, work in zip(self._buffers[turn], self._coming[turn], strict=True):
            wait(work)
            accumulate(segment, buffer[: segment.numel()], self._op)
        if self._place.parent is None:
            average(segment, self._op, self._size)
        else:
            self._sent.append(self._messages.send(segment, self._place.parent))

    def finish(self) -> None:
        """Wait for all that was sent."""
        wait(*self._sent)


class _Down:
    """A half on its way down: each segment is received in its place and sent on."""

    def __init__(self, half: _Half) -> None:
        self.start = half.height + half.place.depth
        self.segments = half.segments
        self._messages, self._place = half.messages, half.place
        self._coming: list[dist.Work | None] = [None, None]
        self._sent: list[dist.Work | None] = []

    def receive(self, number: int) -> None:
        """Post the receive of a segment."""
        if self._place.parent is not None:
            self._coming[number % 2] = self._messages.receive(
                self.segments[number], self._place.parent
            )

    def pass_on(self, number: int) -> None:
        """Send a segment to the children."""
        wait(self._coming[number % 2])
        for child in self._place.children:
            self._sent.append(self._messages.send(self.segments[number], child))

    def finish(self) -> None:
        """Wait for all that was sent."""
        wait(*self._sent)


def _run(lanes: Sequence[_Up | _Down]) -> None:
    """Take all segments along all lanes, by the steps of one clock that all members share.

    Segment k goes up from depth d in step ``height - d + k`` and down in step ``height + d + k``,
    so a message is received one step after it was sent. Members keep no pace with each other, but
    do what they do in this order: nobody waits in a circle, and the messages of two members, which
    have no other mark than their order, are received in the order of sending.
    """
    begin = min(lane.start for lane in lanes)
    end = max(lane.start + len(lane.segments) for lane in lanes)
    for step in range(begin - 1, end):
        for lane in lanes:
            if 0 <= step + 1 - lane.start < len(lane.segments):
                lane.receive(step + 1 - lane.start)
        for lane in lanes:
            if 0 <= step - lane.start < len(lane.segments):
                lane.pass_on(step - lane.start)
    for lane in lanes:
        lane.finish()
