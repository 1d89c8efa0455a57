"""What the planner counts is what the executor sends: bytes by level, and of the busiest exits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore  # public without their types

from executor.collectives.all_to_all import TwoLevelAllToAll
from executor.collectives.direct import Direct
from executor.collectives.halving import HalvingDoubling
from executor.collectives.hierarchical import Hierarchical
from executor.collectives.pairwise import Pairwise
from executor.collectives.ring import Ring
from executor.collectives.tree import Tree
from executor.mesh import RankGroup
from planner.cost.algorithms import is_possible
from planner.cost.collectives import legal_methods
from planner.cost.traffic import busiest_exits, bytes_per_level
from planner.layout.groups import Group, lay_group
from planner.methods import OWN_METHODS
from planner.plan import Collective, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.document import Library
from planner.topology.fabric import Fabric, Level
from tests.unit.gloo_ranks import on_ranks, split_by_units
from tests.unit.messages import Message, busiest_of_level, mean_by_level, messages
from tests.unit.problems import fabric

NUMEL = 1440  # of fp32; every group below divides it, and its parts
SIZE = 4.0 * NUMEL
OPS: tuple[Collective, ...] = get_args(Collective)
Sizes = tuple[int, ...]


def on_levels(sizes: Sequence[int], library: Library = "gloo") -> Fabric:
    """Return ranks in units of these sizes."""
    levels = tuple(
        Level(f"l{i}", "ethernet" if i else "loopback", size, 1e9, 1e-6, "test")
        for i, size in enumerate(sizes)
    )
    return fabric(sizes[-1], levels=levels, library=library)


def group_of(on: Fabric, degree: int, stride: int = 1) -> Group:
    return lay_group(on, np.array([degree]), np.array([stride]))


def possible_methods(on: Fabric, op: Collective, group: Group) -> list[Method]:
    return [m for m in legal_methods(on, "executor", op) if is_possible(op, m, group)[0]]


def assert_bytes(
    sent: Sequence[Message], op: Collective, method: Method, on: Fabric, group: Group
) -> None:
    """Raise AssertionError where ``sent`` are not the bytes that the planner says."""
    sizes, num_bytes = [level.unit_size for level in on.levels], np.array([SIZE])
    num_senders = int(group.degree[0]) - (op == "send_recv")
    mean = [float(b[0]) for b in bytes_per_level(op, method, on, group, num_bytes)]
    assert mean == pytest.approx(mean_by_level(sent, sizes, num_senders)), (op, method)
    exits = [float(b[0]) for b in busiest_exits(op, method, on, group, num_bytes)]
    counted = busiest_of_level(sent, sizes)
    # Copies in memory leave nothing; a broadcast on two levels says so itself; the channels of
    # NCCL's trees have different heads.
    apart = method == Method("tree") and op == "all_reduce"
    own = slice(
        apart or method.path == "shm" or (op, method[0]) == ("broadcast", "hierarchical"), None
    )
    assert exits[own] == pytest.approx(counted[own]), (op, method)


def is_exact(method: Method, group: Group) -> bool:
    """Return whether outer levels cut a double tree into blocks of 2**k units."""
    if method.algorithm != "tree":
        return True
    units = [int(m[0] // group.members[0][0]) for m in group.members[1:-1]]
    return all(count.bit_count() == 1 for count in units)


# -------------------------------------------------------- what the implementations really send


def hierarchy(whole: RankGroup, sizes: Sizes, store: Any, *, three: bool) -> tuple[Any, list[Any]]:
    """Return rings on two levels or three, and the groups that they send on."""
    units = [range(at, at + sizes[0]) for at in range(0, whole.size, sizes[0])]
    split = split_by_units(whole, units, PrefixStore(f"units{three}", store))
    across: Any = Ring(split.across)
    groups = [split.inside, split.across]
    if three:
        per_pod, num_pods = sizes[1] // sizes[0], whole.size // sizes[1]
        pods = tuple(tuple(range(p * per_pod, (p + 1) * per_pod)) for p in range(num_pods))
        mates = [[split.across.ranks[unit] for unit in pod] for pod in pods]
        above = split_by_units(split.across, mates, PrefixStore("pods", store))
        upper = replace(split.across, units=pods)
        across = Hierarchical(Ring(above.inside), Ring(above.across), above, upper)
        groups = [split.inside, above.inside, above.across]
    return Hierarchical(Ring(split.inside), across, split, whole), groups


def call(made: Any, op: Collective, size: int, index: int) -> None:
    """Run ``op`` with S = 4 * NUMEL bytes, root 0."""
    whole, shard = torch.ones(NUMEL), torch.ones(NUMEL // size)
    held = whole if index == 0 else None
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (whole, dist.ReduceOp.SUM),
        "all_gather": (whole, shard),
        "reduce_scatter": (shard, whole, dist.ReduceOp.SUM),
        "all_to_all": (torch.empty_like(whole), whole, None, None),
        "broadcast": (whole, 0),
        "gather": (held, shard, 0),
        "scatter": (shard, held, 0),
    }
    getattr(made, op)(*arguments[op])


@cache
def really_sent(sizes: Sizes) -> dict[tuple[Collective, Method], list[Message]]:
    """Return the messages of every method of the executor, counted where they are sent."""
    units = [tuple(range(at, at + sizes[0])) for at in range(0, sizes[-1], sizes[0])]
    on, store = on_levels(sizes), HashStore()
    group = group_of(on, sizes[-1])
    flat = {
        "ring": Ring,
        "tree": Tree,
        "halving_doubling": HalvingDoubling,
        "direct": Direct,
        "pairwise": Pairwise,
    }

    def run(whole: RankGroup) -> dict[tuple[Collective, Method], list[Message]]:
        made: dict[str, tuple[Any, list[Any]]] = {
            algorithm: (make(whole), [whole]) for algorithm, make in flat.items()
        }
        for algorithm, num_levels in (("hierarchical", 2), ("three_level", 3)):
            if len(sizes) >= num_levels:
                made[algorithm] = hierarchy(whole, sizes, store, three=num_levels == 3)
        found = {}
        for op, methods in sorted(OWN_METHODS["gloo"].items()):
            for method in methods:
                if method.path != "executor" or method not in possible_methods(on, op, group):
                    continue
                what, groups = made[method.algorithm]
                if (op, method.algorithm) == ("all_to_all", "hierarchical"):
                    what, groups = TwoLevelAllToAll(whole), [whole]
                for one in groups:
                    if one.process_group is not None:
                        one.process_group.bytes_to.clear()
                call(what, op, whole.size, whole.index)
                found[op, method] = [
                    (whole.index, one.ranks[to], float(num_bytes))
                    for one in groups
                    if one.process_group is not None
                    for to, num_bytes in one.process_group.bytes_to.items()
                ]
        return found

    ends = on_ranks(sizes[-1], run, units=units if len(units) > 1 else ())
    return {key: [message for end in ends for message in end[key]] for key in ends[0]}


@pytest.mark.parametrize("sizes", [(4,), (2, 6), (2, 8), (1, 2, 4), (2, 4, 8)], ids=str)
def test_the_executor_sends_what_the_planner_counts(sizes: Sizes) -> None:
    on, found = on_levels(sizes), really_sent(sizes)
    group = group_of(on, sizes[-1])
    expected = {
        (op, method)
        for op in OPS
        for method in possible_methods(on, op, group)
        if method.path == "executor"
    }
    assert found.keys() == expected
    for (op, method), sent in found.items():
        assert_bytes(sent, op, method, on, group)
        listed = messages(op, method, "gloo", range(sizes[-1]), sizes, SIZE)
        assert busiest_of_level(listed, sizes) == pytest.approx(busiest_of_level(sent, sizes))


# ------------------------------------------------------------- any group that fills its units


def groups_of(degree: int, stride: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the groups that partition the ranks."""
    span = degree * stride
    return [
        tuple(range(block + start, block + span, stride))
        for block in range(0, num_ranks, span)
        for start in range(stride)
    ]


def all_even(degree: int, stride: int, sizes: Sequence[int]) -> bool:
    """Return whether every group has as many members in every unit that any of them enters."""
    groups = groups_of(degree, stride, sizes[-1])
    return all(
        len({n for ranks in groups for n in Counter(rank // size for rank in ranks).values()}) == 1
        for size in sizes
    )


@st.composite
def lies(draw: st.DrawFn, library: Library = "gloo") -> tuple[Fabric, tuple[int, ...], Group]:
    """Return up to three levels, and one of the groups of an axis that all fill units evenly."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    sizes = np.cumprod(factors).tolist()
    world = sizes[-1]
    assume(world <= 36)
    pairs = [(d, s) for d in range(2, world + 1) for s in range(1, world // d + 1)]
    fitting = [(d, s) for d, s in pairs if world % (d * s) == 0 and all_even(d, s, sizes)]
    assume(fitting)
    degree, stride = draw(st.sampled_from(fitting))
    ranks = draw(st.sampled_from(groups_of(degree, stride, world)))
    on = on_levels(sizes, library)
    return on, ranks, group_of(on, degree, stride)


@pytest.mark.parametrize("library", ["gloo", "nccl"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_on_levels_are_those_of_who_sends_to_whom(
    library: Library, data: st.DataObject
) -> None:
    on, ranks, group = data.draw(lies(library))
    sizes = [level.unit_size for level in on.levels]
    for op in OPS:
        for method in possible_methods(on, op, group):
            if not is_exact(method, group):
                continue
            sent = list(messages(op, method, library, ranks, sizes, SIZE))
            assert_bytes(sent, op, method, on, group)


@settings(max_examples=30, deadline=None)
@given(lies())
def test_keys_and_values_go_round(lie: tuple[Fabric, tuple[int, ...], Group]) -> None:
    on, ranks, group = lie
    found = bytes_per_level(
        "send_recv", Method("point_to_point"), on, group, np.array([SIZE]), closed=True
    )
    round_ = [(a, b, SIZE) for a, b in pairwise([*ranks, ranks[0]])]
    expected = mean_by_level(round_, [level.unit_size for level in on.levels], len(ranks))
    assert [float(size[0]) for size in found] == pytest.approx(expected)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.sampled_from(["dgx-h100", "dgx1-v100", "frontier", "lassen", "meta-24k-h100-roce"]),
    st.integers(1, 12),
    st.integers(1, 96),
    st.sampled_from([1, 2, 3, 8]),
)
def test_no_byte_is_lost_on_uneven_groups_either(
    name: str, nodes: int, degree: int, stride: int
) -> None:
    on = compile_fabric(load_topology(name), nodes)
    assume(degree * stride <= on.num_gpus)
    group = group_of(on, degree, stride)
    for op, algorithm, factor in (
        ("all_reduce", "ring", 2),
        ("all_reduce", "tree", 2),
        ("all_gather", "ring", 1),
        ("all_to_all", "direct", 1),
    ):
        sent = bytes_per_level(op, Method(algorithm), on, group, np.array([SIZE]))  # type: ignore[arg-type]
        assert all(size[0] >= 0 for size in sent)
        total = sum(float(size[0]) for size in sent)
        assert total == pytest.approx(factor * SIZE * (degree - 1) / degree)
