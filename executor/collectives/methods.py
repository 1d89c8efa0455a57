"""Which object runs a planned method, and what runs in its place where that is impossible."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

import torch
import torch.distributed as dist

from executor.collectives.all_to_all import TwoLevelAllToAll
from executor.collectives.direct import Direct
from executor.collectives.halving import HalvingDoubling
from executor.collectives.hierarchical import Hierarchical, LevelCollectives
from executor.collectives.library import Library
from executor.collectives.pairwise import Pairwise
from executor.collectives.protocol import Collectives
from executor.collectives.ring import Ring
from executor.collectives.shared import SharedMemory
from executor.collectives.tree import Tree
from executor.errors import UnsupportedPlanError
from executor.mesh import Mesh, RankGroup, SplitGroup
from planner.methods import OWN_METHODS
from planner.plan import Axis, Collective, Method, Plan

__all__ = ["Runner", "Runners", "methods_of", "runners"]

logger = logging.getLogger(__name__)

# Algorithms of our own messages on the whole group.
_FLAT: Final[dict[Method, Callable[[RankGroup], object]]] = {
    Method("ring", "executor"): Ring,
    Method("halving_doubling", "executor"): HalvingDoubling,
    Method("tree", "executor"): Tree,
    Method("direct", "executor"): Direct,
    Method("pairwise", "executor"): Pairwise,
}


@dataclass(frozen=True, slots=True)
class Runner:
    """What runs a method on this rank.

    Attributes:
        method: The one that runs: the planned one, or what replaces it on all ranks of the group.
        collectives: Runs it.
    """

    method: Method
    collectives: Collectives


def methods_of(plan: Plan, axis: Axis) -> dict[Collective, list[Method]]:
    """Return what ``plan`` has on ``axis`` beside the library's own calls, in a fixed order."""
    found: dict[Collective, set[Method]] = {}
    for choice in plan.collectives:
        if choice.axis == axis:
            found.setdefault(choice.op, set()).update(choice.methods())
    for probe in plan.probes:
        if probe.axis == axis and probe.algorithm is not None:
            found.setdefault(probe.op, set()).add(Method(probe.algorithm, probe.path))
    return {
        op: sorted(found[op].intersection(OWN_METHODS["gloo"].get(op, ()))) for op in sorted(found)
    }


@dataclass(frozen=True, slots=True)
class Runners:
    """What runs the methods of one axis.

    Attributes:
        by_method: For each operation.
        shared: The memory that some of them share.
    """

    by_method: Mapping[tuple[Collective, Method], Runner] = field(default_factory=dict)
    shared: tuple[SharedMemory, ...] = ()

    def close(self) -> None:
        """Let go of shared memory; nothing runs afterwards."""
        for memory in self.shared:
            memory.close()


def runners(plan: Plan, axis: Axis, mesh: Mesh, *, timeout_s: float) -> Runners:
    """Return what runs the methods of an axis; all ranks of the world call this together.

    Where shared memory cannot be had on every host of the group, all its ranks take messages
    instead of it in hierarchies, and the library's call instead of a copy engine, which is then
    missing here; the first rank of the members that cannot have it says why.
    """
    builder = _Builder(mesh.groups[axis], mesh.splits.get(axis), timeout_s)
    by_method = {
        (op, method): runner
        for op, methods in methods_of(plan, axis).items()
        for method in methods
        if builder.group.process_group is not None
        if (runner := builder.runner(op, method)) is not None
    }
    return Runners(by_method, builder.memories())


class _Builder:
    """Makes each kind of collectives of one group once."""

    def __init__(self, group: RankGroup, split: SplitGroup | None, timeout_s: float) -> None:
        self.group = group
        self._split = split
        self._timeout_s = timeout_s
        self._made: dict[Method, Runner | None] = {}
        self._shared: dict[tuple[int, ...], SharedMemory | None] = {}

    def runner(self, op: Collective, method: Method) -> Runner | None:
        if op == "all_to_all" and method.algorithm == "hierarchical":
            return _runner(method, TwoLevelAllToAll(self.group))
        if method not in self._made:
            self._made[method] = self._make(method)
        return self._made[method]

    def _make(self, method: Method) -> Runner | None:
        if method in _FLAT:
            return _runner(method, _FLAT[method](self.group))
        if method.algorithm != "copy_engine":
            return self._hierarchy(method)
        shared = self._open(self.group)
        return None if shared is None else _runner(method, shared)

    def _hierarchy(self, method: Method) -> Runner:
        split = self._split
        assert split is not None, "the mesh splits the groups of hierarchies"
        shared = self._open(split.inside) if method.path == "shm" else None
        if method.path == "shm" and shared is None:
            method = Method(method.algorithm, "executor")
        flat = Library if method.path == "library" else Ring
        inside = shared or flat(split.inside)
        across: LevelCollectives = flat(split.across)
        if method.algorithm == "three_level":
            above = split.above
            assert above is not None, "the mesh splits across twice for three levels"
            across = Hierarchical(flat(above.inside), flat(above.across), above, split.across)
        return _runner(method, Hierarchical(inside, across, split, self.group))

    def memories(self) -> tuple[SharedMemory, ...]:
        return tuple(memory for memory in self._shared.values() if memory is not None)

    def _open(self, members: RankGroup) -> SharedMemory | None:
        """Return memory that ``members`` share; None if anybody in the whole group has none."""
        if members.ranks not in self._shared:
            self._shared[members.ranks] = self._agreed(members)
        return self._shared[members.ranks]

    def _agreed(self, members: RankGroup) -> SharedMemory | None:
        shared, reason = None, ""
        try:
            shared = SharedMemory.open(members, timeout_s=self._timeout_s)
        except UnsupportedPlanError as error:
            reason = str(error)
        all_have = torch.tensor(int(shared is not None))
        dist.all_reduce(all_have, op=dist.ReduceOp.MIN, group=self.group.process_group)
        if all_have:
            return shared
        if members.index == 0:
            logger.warning(
                "ranks %s do without shared memory: %s",
                list(self.group.ranks),
                reason or "other hosts of the group have none",
            )
        if shared is not None:
            shared.close()
        return None


def _runner(method: Method, collectives: object) -> Runner:
    """Return the runner; of the protocol an object has what ``OWN_METHODS`` says."""
    return Runner(method, cast(Collectives, collectives))
