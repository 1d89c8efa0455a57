"""Laws that hold for every legal method of every operation, on CPUs and on GPUs."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import collectives
from planner.cost.algorithms import is_possible
from planner.cost.collectives import (
    Choice,
    Terms,
    choose,
    collective_terms,
    legal_methods,
    thresholds,
)
from planner.layout.candidates import Column
from planner.layout.groups import Group, lay_group
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric, Level
from tests.unit.problems import fabric

# Hosts of 4 ranks, leaves of 4 hosts, a slow spine; 96 ranks do not fill their leaves evenly.
LAB = fabric(
    96,
    library="gloo",
    levels=(
        Level("loopback", "loopback", 4, 1.3e9, 100e-6, "test"),
        Level("leaf", "ethernet", 16, 3e6, 200e-6, "test"),
        Level("spine", "ethernet", 96, 1.5e6, 300e-6, "test"),
    ),
)
GPUS = fabric(4096)
FABRICS = {"gloo": LAB, "nccl": GPUS}
OPS: tuple[Collective, ...] = get_args(Collective)
CASES = [
    pytest.param(name, op, method, id=f"{name}-{op}-{method}")
    for name, on in FABRICS.items()
    for op in OPS
    for method in legal_methods(on, "executor", op)
]
CHOICES = [
    pytest.param(name, op, id=f"{name}-{op}")
    for name, on in FABRICS.items()
    for op in OPS
    if legal_methods(on, "executor", op)
]
# Even and uneven, on one level, two and three, one member per unit, all of a fabric.
DEGREES = np.array([2, 3, 4, 8, 16, 32, 64, 96, 2, 4, 12, 8, 6, 24, 5])
STRIDES = np.array([1, 1, 1, 1, 1, 1, 1, 1, 4, 16, 4, 2, 16, 4, 7])
LARGEST = 1 << 33


def lay(on: Fabric, degrees: Column = DEGREES, strides: Column = STRIDES) -> Group:
    return lay_group(on, degrees, strides)


def priced(op: Collective, method: Method, on: Fabric, size: float, group: Group) -> Terms:
    """Return the terms of every row of ``group``, those where the method is impossible as 0."""
    terms = collective_terms(op, method, on, group, np.full(len(group.degree), size))
    possible = is_possible(op, method, group)
    return Terms(*(getattr(terms, name) * possible for name in Terms.__slots__))


@pytest.mark.parametrize(("name", "op", "method"), CASES)
def test_some_group_can_use_every_method_and_one_rank_pays_for_none(
    name: str, op: Collective, method: Method
) -> None:
    on = FABRICS[name]
    alone = lay(on, np.array([1, 1]), np.array([1, 16]))
    assert not collective_terms(op, method, on, alone, np.full(2, 1e9)).total_s().any()
    several = priced(op, method, on, 1e6, lay(on))
    assert (several.total_s() > 0).any()
    for part in (several.fixed_s, several.latency_s, several.transfer_s):
        assert np.isfinite(part).all()
        assert (part >= 0).all()


@pytest.mark.parametrize(("name", "op", "method"), CASES)
def test_larger_messages_never_take_less(name: str, op: Collective, method: Method) -> None:
    group = lay(FABRICS[name])
    times = np.stack(
        [
            priced(op, method, FABRICS[name], size, group).total_s()
            for size in np.geomspace(1, LARGEST, 67)
        ]
    )
    assert (np.diff(times, axis=0) >= -1e-12 * times[1:]).all()


@pytest.mark.parametrize(("name", "op", "method"), CASES)
def test_twice_the_bandwidth_halves_the_transfer_alone(
    name: str, op: Collective, method: Method
) -> None:
    slow = FABRICS[name]
    levels = tuple(replace(level, bytes_per_s=2 * level.bytes_per_s) for level in slow.levels)
    before, after = (
        priced(op, method, on, 1e7, lay(slow)) for on in (slow, replace(slow, levels=levels))
    )
    assert after.transfer_s == pytest.approx(before.transfer_s / 2, rel=1e-12)
    assert (after.latency_s == before.latency_s).all()
    assert (after.fixed_s == before.fixed_s).all()


@pytest.mark.parametrize("path", ["library", "executor"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_hierarchies_on_one_level_are_flat(op: Collective, path: str) -> None:
    """But for the calls; where there is one member per unit too."""
    group = lay(LAB, np.array([2, 3, 4, 4]), np.array([1, 1, 1, 4]))
    flat_of = {"library": Method("tree" if op == "broadcast" else "ring")}
    flat = flat_of.get(path, Method("ring", "executor"))
    sizes = np.full(4, 2.5e5)  # one piece
    expected = collective_terms(op, flat, LAB, group, sizes)
    if path == "library" and op == "all_reduce":  # a scatter that gloo emulates, and a gather
        parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        within = [collective_terms(part, flat, LAB, group, sizes) for part in parts]
        inside = group.members[0] > 1
        latency = np.where(inside, sum(w.latency_s for w in within), expected.latency_s)
        transfer = np.where(inside, sum(w.transfer_s for w in within), expected.transfer_s)
        expected = Terms(expected.fixed_s, latency, transfer)
    found = collective_terms(op, Method("hierarchical", flat.path), LAB, group, sizes)
    assert found.latency_s == pytest.approx(expected.latency_s)
    assert found.transfer_s == pytest.approx(expected.transfer_s)


@pytest.mark.parametrize(("name", "op"), CHOICES)
def test_the_choice_is_the_cheapest_of_what_is_possible(name: str, op: Collective) -> None:
    on, group = FABRICS[name], lay(FABRICS[name])
    methods = legal_methods(on, "executor", op)
    for size in (1.0, 1e4, 1e6, 1e9):
        best = choose(op, on, group, np.full(len(DEGREES), size), methods)
        for row, index in enumerate(best.index):
            one = lay(on, DEGREES[row : row + 1], STRIDES[row : row + 1])
            seconds = [
                float(priced(op, method, on, size, one).total_s()[0])
                for method in methods
                if is_possible(op, method, one)[0]
            ]
            assert best.seconds[row] == min(seconds)
            assert is_possible(op, methods[index], one)[0]
            if len(methods) > 1:
                assert best.runner_up_s[row] == sorted([*seconds, np.inf])[1]


@pytest.mark.parametrize(("name", "op"), CHOICES)
@settings(max_examples=12, deadline=None)
@given(row=st.integers(0, len(DEGREES) - 1), data=st.data())
def test_thresholds_are_the_choice_at_every_size(
    name: str, op: Collective, row: int, data: st.DataObject
) -> None:
    on = FABRICS[name]
    group = lay(on, DEGREES[row : row + 1], STRIDES[row : row + 1])
    methods = legal_methods(on, "executor", op)
    steps = thresholds(op, on, group, methods)
    closed = [step.up_to_bytes for step in steps[:-1]]
    assert closed == sorted(set(closed), key=lambda size: size or 0)
    assert steps[-1].up_to_bytes is None
    some = data.draw(st.lists(st.floats(10, 33), min_size=20, max_size=20))
    edges = [size + off for size in closed if size for off in (0, 1)]
    sizes = np.array([*(int(2**power) for power in some), *edges], dtype=float)
    best = choose(op, on, group.repeat(len(sizes)), sizes, methods)
    for size, index in zip(sizes, best.index, strict=True):
        step = next(s for s in steps if s.up_to_bytes is None or size <= s.up_to_bytes)
        assert Method(step.algorithm, step.path) == methods[index], size


def test_a_method_that_is_best_for_less_than_an_octave_has_its_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three lines that cross at 40000 and 50000 bytes."""

    def lines(
        op: Collective, on: Fabric, group: Group, sizes: Column, methods: tuple[Method, ...]
    ) -> Choice:
        seconds = np.stack([sizes, sizes / 2 + 20e3, sizes * 0 + 45e3])
        first = seconds.argmin(axis=0)
        return Choice(methods, first, seconds.min(axis=0), first, seconds.min(axis=0))

    monkeypatch.setattr(collectives, "choose", lines)
    methods = (Method("ring"), Method("tree"), Method("direct"))
    group = lay(LAB, np.array([4]), np.array([1]))
    found = [
        (step.up_to_bytes, step.algorithm)
        for step in collectives.thresholds("all_reduce", LAB, group, methods)
    ]
    assert found == [(40000, "ring"), (50000, "tree"), (None, "direct")]
