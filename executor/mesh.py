"""Process groups of every axis of a plan, and of the fabric units inside an axis."""

from collections.abc import Callable, Iterable, Sequence
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

    def process_groups(self) -> set[dist.ProcessGroup | None]:
        """Return the process groups of all levels."""
        above = self.above.process_groups() if self.above is not None else set()
        return {self.inside.process_group, self.across.process_group, *above}


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
    builder = _Builder(rank, plan.ranks.unit_of, timeout)
    groups = {axis: builder.mine(plan.groups(axis)) for axis in AXES}
    splits = {
        axis: _split(
            builder, plan.groups(axis), [plan.ranks.unit_of, plan.ranks.outer_unit_of][:depth]
        )
        for axis in AXES
        if groups[axis].size > 1 and (depth := _depth_of_hierarchies(plan, axis))
    }
    return Mesh(rank=rank, coordinates=plan.coordinates(rank), groups=groups, splits=splits)


class _Builder:
    """Creates each group of ranks once."""

    def __init__(self, rank: int, unit_of: Callable[[int], int], timeout: timedelta) -> None:
        self.rank = rank
        self._unit_of = unit_of
        self._timeout = timeout
        self._known: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def mine(
        self, all_groups: Iterable[tuple[int, ...]], unit_of: Callable[[int], int] | None = None
    ) -> RankGroup:
        """Create all groups and return the one this rank is in, its units of the innermost level.

        ``unit_of`` names the units of another level.
        """
        found: tuple[int, ...] | None = None
        for ranks in all_groups:
            if ranks not in self._known:
                self._known[ranks] = self._create(ranks)
            if self.rank in ranks:
                found = ranks
        assert found is not None, f"rank {self.rank} is in no group of {list(all_groups)}"
        units = _by_unit(found, unit_of or self._unit_of)
        return RankGroup(
            found,
            found.index(self.rank),
            self._known[found],
            tuple(tuple(map(found.index, unit)) for unit in units) if len(units) > 1 else (),
        )

    def _create(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        created = dist.new_group(list(ranks), timeout=self._timeout, sort_ranks=False)
        return created if isinstance(created, dist.ProcessGroup) else None


def _depth_of_hierarchies(plan: Plan, axis: Axis) -> int:
    """Return how many levels of units the collectives that are planned on the axis tell apart."""
    depths = {"hierarchical": 1, "three_level": 2}
    algorithms = [
        method.algorithm
        for choice in plan.collectives
        if choice.axis == axis
        for method in choice.methods()
    ]
    algorithms += [
        probe.algorithm for probe in plan.probes if probe.axis == axis if probe.algorithm
    ]
    return max((depths.get(algorithm, 0) for algorithm in algorithms), default=0)


def _by_unit(ranks: tuple[int, ...], unit_of: Callable[[int], int]) -> list[tuple[int, ...]]:
    """Return the ranks by unit, in order of their first."""
    units: dict[int, list[int]] = {}
    for rank in ranks:
        units.setdefault(unit_of(rank), []).append(rank)
    return [tuple(unit) for unit in units.values()]


def _split(
    builder: _Builder,
    groups: Iterable[tuple[int, ...]],
    unit_of: Sequence[Callable[[int], int]],
) -> SplitGroup:
    """Split all ``groups`` by unit, what is across by the next level's; return this rank's."""
    inside: list[tuple[int, ...]] = []
    across: list[tuple[int, ...]] = []
    is_even = True
    for ranks in groups:
        units = _by_unit(ranks, unit_of[0])
        inside += units
        if len({len(unit) for unit in units}) == 1:
            across += list(zip(*units, strict=True))
            continue
        across.append(tuple(unit[0] for unit in units))
        across += [(rank,) for unit in units for rank in unit[1:]]
        if builder.rank in ranks:
            is_even = False
    return SplitGroup(
        builder.mine(inside),
        builder.mine(across, *unit_of[1:2]),
        is_even,
        above=_split(builder, across, unit_of[1:]) if len(unit_of) > 1 else None,
    )
