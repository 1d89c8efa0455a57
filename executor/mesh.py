"""Process groups of every axis of a plan, and of the fabric units inside an axis."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from planner.plan import AXES, Axis, Plan

__all__ = ["Mesh", "RankGroup", "SplitGroup", "build_mesh"]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks this process communicates with on one axis, in axis order.

    Attributes:
        ranks: Of the members.
        index: Of this rank among them.
        process_group: None where this rank is alone: then there is nothing to call.
        units: Members (their indices) by unit of the innermost fabric level, in axis order; empty
            where all lie on one.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    units: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def circle(self) -> tuple[int, ...]:
        """Return the members' indices, those of a unit next to each other.

        >>> RankGroup((0, 1, 2, 3), 0, None, units=((0, 2), (1, 3))).circle
        (0, 2, 1, 3)
        """
        members = tuple(member for unit in self.units for member in unit)
        return members or tuple(range(self.size))


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """One axis split by unit of the innermost fabric level (``RankRule.unit_of``).

    Attributes:
        inside: The group's ranks on this rank's unit.
        across: One rank of every unit: those at this rank's position inside, if units hold
            equally many of the group; else the first of each, and the others are alone.
        is_even: Units hold equally many.
        above: ``across`` split by unit of the next level, for collectives of three levels.
    """

    inside: RankGroup
    across: RankGroup
    is_even: bool
    above: "SplitGroup | None" = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups; ``splits`` has the axes that the plan reduces hierarchically."""

    rank: int
    coordinates: dict[Axis, int]
    groups: dict[Axis, RankGroup]
    splits: dict[Axis, SplitGroup]


def build_mesh(plan: Plan, *, rank: int, timeout: timedelta) -> Mesh:
    """Build the groups of every axis; all ranks must call this together.

    ``new_group`` is collective over the world, so every rank creates every group in the same
    order. ``sort_ranks=False`` keeps the order of the plan, which is the order of the ring. Axes
    that have the same members (dp and dp_cp without cp) share one group.
    """
    builder = _Builder(rank, timeout)
    groups = {axis: builder.mine(plan.groups(axis)) for axis in AXES}
    splits = {
        axis: _split_by_unit(plan, axis, builder)
        for axis in AXES
        if _is_hierarchical(plan, axis) and groups[axis].size > 1
    }
    return Mesh(rank=rank, coordinates=plan.coordinates(rank), groups=groups, splits=splits)


class _Builder:
    """Creates each group of ranks once."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self._timeout = timeout
        self._known: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def mine(self, all_groups: Iterable[tuple[int, ...]]) -> RankGroup:
        """Create all groups and return the one this rank is in."""
        found: RankGroup | None = None
        for ranks in all_groups:
            if ranks not in self._known:
                self._known[ranks] = self._create(ranks)
            if self.rank in ranks:
                found = RankGroup(ranks, ranks.index(self.rank), self._known[ranks])
        assert found is not None, f"rank {self.rank} is in no group of {list(all_groups)}"
        return found

    def _create(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        created = dist.new_group(list(ranks), timeout=self._timeout, sort_ranks=False)
        return created if isinstance(created, dist.ProcessGroup) else None


def _is_hierarchical(plan: Plan, axis: Axis) -> bool:
    return any(
        choice.axis == axis and any(m.algorithm == "hierarchical" for m in choice.methods())
        for choice in plan.collectives
    )


def _split_by_unit(plan: Plan, axis: Axis, builder: _Builder) -> SplitGroup:
    inside: list[tuple[int, ...]] = []
    across: list[tuple[int, ...]] = []
    is_even = True
    for ranks in plan.groups(axis):
        units: dict[int, list[int]] = {}
        for rank in ranks:
            units.setdefault(plan.ranks.unit_of(rank), []).append(rank)
        inside += [tuple(members) for members in units.values()]
        if len({len(members) for members in units.values()}) == 1:
            across += list(zip(*units.values(), strict=True))
            continue
        across.append(tuple(members[0] for members in units.values()))
        across += [(rank,) for members in units.values() for rank in members[1:]]
        if builder.rank in ranks:
            is_even = False
    return SplitGroup(builder.mine(inside), builder.mine(across), is_even)
