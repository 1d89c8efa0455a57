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

    ``process_group`` is None where this rank is alone: then there is nothing to call.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """One axis split by unit: ``inside`` my unit, and ``across`` units at my position inside.

    A unit is one of the innermost fabric level, ``RankRule.ranks_per_unit`` consecutive ranks.
    """

    inside: RankGroup
    across: RankGroup


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's groups. ``split_dp_cp`` is None unless the plan reduces hierarchically."""

    rank: int
    coordinates: dict[Axis, int]
    groups: dict[Axis, RankGroup]
    split_dp_cp: SplitGroup | None


def build_mesh(plan: Plan, *, rank: int, timeout: timedelta) -> Mesh:
    """Build the groups of every axis; all ranks must call this together.

    ``new_group`` is collective over the world, so every rank creates every group in the same
    order. ``sort_ranks=False`` keeps the order of the plan, which is the order of the ring. Axes
    that have the same members (dp and dp_cp without cp) share one group.
    """
    builder = _Builder(rank, timeout)
    groups = {axis: builder.mine(plan.groups(axis)) for axis in AXES}
    return Mesh(
        rank=rank,
        coordinates=plan.coordinates(rank),
        groups=groups,
        split_dp_cp=_split_by_unit(plan, builder) if _reduces_hierarchically(plan) else None,
    )


class _Builder:
    """Creates each group of ranks once."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank = rank
        self._timeout = timeout
        self._known: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def mine(self, all_groups: Iterable[tuple[int, ...]]) -> RankGroup:
        """Create all groups and return the one this rank is in."""
        found: RankGroup | None = None
        for ranks in all_groups:
            if ranks not in self._known:
                self._known[ranks] = self._create(ranks)
            if self._rank in ranks:
                found = RankGroup(ranks, ranks.index(self._rank), self._known[ranks])
        assert found is not None, f"rank {self._rank} is in no group of {list(all_groups)}"
        return found

    def _create(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        created = dist.new_group(list(ranks), timeout=self._timeout, sort_ranks=False)
        return created if isinstance(created, dist.ProcessGroup) else None


def _reduces_hierarchically(plan: Plan) -> bool:
    return any(
        (choice.axis, choice.op) == ("dp_cp", "all_reduce")
        and "hierarchical" in {choice.algorithm, *(t.algorithm for t in choice.thresholds)}
        for choice in plan.collectives
    )


def _split_by_unit(plan: Plan, builder: _Builder) -> SplitGroup:
    """Split the dp_cp groups by unit; ``executor.checks`` has seen that units hold equally many."""
    inside: list[tuple[int, ...]] = []
    across: list[tuple[int, ...]] = []
    for ranks in plan.groups("dp_cp"):
        units: dict[int, list[int]] = {}
        for rank in ranks:
            units.setdefault(rank // plan.ranks.ranks_per_unit, []).append(rank)
        inside += [tuple(members) for members in units.values()]
        across += list(zip(*units.values(), strict=True))
    return SplitGroup(inside=builder.mine(inside), across=builder.mine(across))
