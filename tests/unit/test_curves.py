"""Curves are exact where they were measured, silent elsewhere, and used for groups like theirs."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibrate.apply import calibrated_fabric
from planner.calibrate.measured import with_curves
from planner.cost.collectives import basis_of, collective_terms
from planner.cost.curves import matching, measured_s
from planner.cost.defaults import library_default, library_methods
from planner.layout.groups import lay_group
from planner.plan import LevelFit, MeasuredCurve, Method
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric


def curve(
    points: dict[int, float], *, ranks: int = 8, nodes: int = 1, op: str = "all_reduce"
) -> MeasuredCurve:
    fields = {"op": op, "group_size": ranks, "num_nodes": nodes, "source": "test"}
    sizes = tuple(sorted(points))
    seconds = tuple(points[size] for size in sizes)
    return MeasuredCurve.model_validate({**fields, "sizes_bytes": sizes, "seconds": seconds})


POINTS = st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-7, 1e3), min_size=1, max_size=9)

# ------------------------------------------------------------------------------ interpolation


@given(POINTS)
def test_measured_sizes_have_the_measured_seconds_to_the_last_bit(points: dict[int, float]) -> None:
    one = curve(points)
    sizes = np.array(one.sizes_bytes, dtype=float)
    assert measured_s(one, sizes).tolist() == list(one.seconds)


@given(POINTS, st.lists(st.floats(1, 1e12), min_size=2, max_size=20))
def test_between_neighbours_seconds_go_one_way_and_outside_there_are_none(
    points: dict[int, float], sizes: list[float]
) -> None:
    one = curve(points)
    first, last = one.sizes_bytes[0], one.sizes_bytes[-1]
    asked = np.array(sorted(sizes))
    found = measured_s(one, asked)
    assert (np.isnan(found) == ((asked < first) | (asked > last))).all()
    for (low, at_low), (high, at_high) in itertools.pairwise(sorted(points.items())):
        inside = found[(asked > low) & (asked < high)]
        sign = np.sign(at_high - at_low)
        walk = sign * np.array([at_low, *inside, at_high])
        assert (np.diff(walk) >= -1e-12 * abs(walk[:-1])).all()


def test_a_power_law_is_met_everywhere() -> None:
    """A straight line in logarithms: seconds = 3e-9 S**0.8."""
    one = curve({size: 3e-9 * size**0.8 for size in (10, 1000, 70_000, 1 << 30)})
    sizes = np.geomspace(10, 1 << 30, 50).clip(10, 1 << 30)
    assert measured_s(one, sizes) == pytest.approx(3e-9 * sizes**0.8, rel=1e-12)


def test_nothing_and_less_than_the_first_size_are_outside_without_a_warning() -> None:
    assert np.isnan(measured_s(curve({8: 1e-5, 16: 2e-5}), np.array([0.0, 7.9, 16.1]))).all()


# ------------------------------------------------------------------------------------- groups


def with_shapes(fabric: Fabric, *shapes: tuple[int, int]) -> Fabric:
    """Return the fabric with curves of groups of (ranks, nodes)."""
    return replace(
        fabric, curves=tuple(curve({8: 1e-5}, ranks=n, nodes=nodes) for n, nodes in shapes)
    )


def matched(fabric: Fabric, degree: int, stride: int) -> set[tuple[int, int]]:
    """Return the shapes of the curves that fit a group."""
    group = lay_group(fabric, np.array([degree]), np.array([stride]))
    return {(one.group_size, one.num_nodes) for one, _ in matching(fabric, "all_reduce", group)}


@pytest.mark.parametrize("num_nodes", [3, 4])
def test_behind_switches_curves_fit_by_ranks_and_nodes_alone(num_nodes: int) -> None:
    """Brute force over the groups of nodes of 8 GPUs behind NVSwitches."""
    pairs = itertools.product((2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 3, 4))
    shapes = {(ranks, nodes) for ranks, nodes in pairs if ranks % nodes == 0}
    fabric = with_shapes(compile_fabric(load_topology("dgx-h100"), num_nodes), *sorted(shapes))
    for degree, stride in itertools.product((2, 3, 4, 6, 8, 12, 16, 32), (1, 2, 3, 4, 8, 16)):
        span = degree * stride
        if fabric.num_gpus % span:
            continue
        firsts = [block + at for block in range(0, 8 * num_nodes, span) for at in range(stride)]
        on_nodes = {
            tuple(Counter((first + i * stride) // 8 for i in range(degree)).values())
            for first in firsts
        }
        is_even = len({count for counts in on_nodes for count in counts}) == 1
        expected = {(degree, len(counts)) for counts in on_nodes if is_even} & shapes
        assert matched(fabric, degree, stride) == expected, (degree, stride, on_nodes)


def test_rows_are_told_apart() -> None:
    fabric = with_shapes(compile_fabric(load_topology("dgx-h100"), 2), (8, 1), (2, 2))
    group = lay_group(fabric, np.array([8, 2, 2, 1]), np.array([1, 8, 1, 1]))
    rows = {one.group_size: mask.tolist() for one, mask in matching(fabric, "all_reduce", group)}
    assert rows == {8: [True, False, False, False], 2: [False, True, False, False]}
    assert matching(fabric, "all_gather", group) == []


def test_of_direct_links_only_neighbours_are_alike() -> None:
    fabric = with_shapes(compile_fabric(load_topology("dgx1-v100"), 2), (2, 1), (4, 1), (2, 2))
    assert matched(fabric, 2, 1) == {(2, 1)}
    assert matched(fabric, 4, 1) == {(4, 1)}
    assert matched(fabric, 2, 4) == matched(fabric, 4, 2) == set()
    assert matched(fabric, 2, 8) == {(2, 2)}


def test_on_pcie_ranks_behind_other_switches_are_not_alike() -> None:
    fabric = with_shapes(compile_fabric(load_topology("rtx-pro-6000-x8")), (2, 1), (4, 1), (8, 1))
    assert len(fabric.levels) > 1
    assert matched(fabric, 2, 1) == {(2, 1)}
    assert matched(fabric, 8, 1) == {(8, 1)}
    assert matched(fabric, 2, 4) == matched(fabric, 4, 2) == set()


def test_in_an_nvlink_domain_nodes_still_count() -> None:
    fabric = with_shapes(compile_fabric(load_topology("gb200-nvl72"), 2), (4, 1), (8, 2), (4, 2))
    assert matched(fabric, 4, 1) == {(4, 1)}
    assert matched(fabric, 8, 1) == {(8, 2)}
    assert matched(fabric, 4, 2) == {(4, 2)}


# -------------------------------------------------------------------------------- calibration


def test_curves_of_a_calibration_go_before_those_of_the_board() -> None:
    fabric = compile_fabric(load_topology("dgx-h100"), 1)
    own = curve({8: 1e-5, 16: 2e-5})
    calibration = with_curves(None, "dgx-h100", (own,))
    assert fabric.curves
    assert calibrated_fabric(fabric, calibration).curves == (own, *fabric.curves)
    assert calibrated_fabric(fabric, None).curves == fabric.curves
    fit = LevelFit(level="nvlink", alpha_s=1e-6, bytes_per_s=4e11, num_points=9, residual=0.01)
    fitted = calibration.model_copy(update={"levels": (fit,)})
    assert calibrated_fabric(fabric, fitted).curves == (own,)


# ------------------------------------------------------------------------------------- prices

BARE = replace(compile_fabric(load_topology("dgx-h100"), 1), curves=())
GROUP = lay_group(BARE, np.array([8]), np.array([1]))
RING, TREE, NVLS = Method("ring"), Method("tree"), Method("nvls")


def price(method: Method, size: float, *curves: MeasuredCurve, on: Fabric = BARE) -> float:
    sizes = np.array([size])
    fabric = replace(on, curves=curves)
    return float(collective_terms("all_reduce", method, fabric, GROUP, sizes).total_s()[0])


def basis(method: Method, size: float, *curves: MeasuredCurve) -> str:
    fabric = replace(BARE, curves=curves)
    return basis_of("all_reduce", method, fabric, GROUP, np.array([size]))


SLOW = curve({1 << 16: 1e-3, 1 << 20: 2e-3, 1 << 24: 4e-3})  # of whatever the library took


def test_what_the_library_takes_is_measured_and_its_other_methods_keep_their_distance() -> None:
    size = float(1 << 20)
    taken = library_methods(BARE, "all_reduce")[
        int(library_default("all_reduce", BARE, GROUP, np.array([size]))[0])
    ]
    assert price(taken, size, SLOW) == pytest.approx(2e-3, rel=1e-12)
    assert basis(taken, size, SLOW) == "measured"
    for method in {RING, TREE, NVLS} - {taken}:
        distance = price(method, size) / price(taken, size)
        assert price(method, size, SLOW) == pytest.approx(2e-3 * distance, rel=1e-12)
        assert basis(method, size, SLOW) == "modelled"


def test_a_curve_of_a_method_goes_before_that_of_the_library_and_says_nothing_of_others() -> None:
    own = curve({1 << 16: 5e-3, 1 << 24: 5e-3}).model_copy(update={"algorithm": "tree"})
    for order in ((own, SLOW), (SLOW, own)):
        assert price(TREE, 2.0**20, *order) == pytest.approx(5e-3, rel=1e-12)
        assert price(RING, 2.0**20, *order) == price(RING, 2.0**20, SLOW)
    assert price(RING, 2.0**20, own) == price(RING, 2.0**20)


def test_the_executors_curves_and_kernels_of_others_are_none_of_the_librarys() -> None:
    executors = SLOW.model_copy(update={"path": "executor"})
    assert price(RING, 2.0**20, executors) == price(RING, 2.0**20)
    assert price(Method("one_shot"), 2.0**20, SLOW) == price(Method("one_shot"), 2.0**20)


def test_below_its_first_size_a_curve_only_caps() -> None:
    assert price(RING, 2.0**10, SLOW) == price(RING, 2.0**10)
    quick = curve({1 << 20: 1e-6, 1 << 21: 2e-6})
    assert price(RING, 2.0**19, quick) == pytest.approx(1e-6, rel=1e-12)
    assert basis(RING, 2.0**10, SLOW) == "modelled"


def test_above_its_last_size_what_was_missed_grows_with_the_transfer_alone() -> None:
    """A late start stays a late start; a slow link stays slow."""
    late = curve({1024: 1e-3, 2048: 1e-3})
    assert price(RING, 2.0**30, late) - price(RING, 2.0**30) < 3 * 1e-3
    end = 2.0**30
    slow = curve({1 << 29: 1.5 * price(NVLS, end / 2), 1 << 30: 1.5 * price(NVLS, end)})
    assert price(NVLS, 4 * end, slow) == pytest.approx(1.5 * price(NVLS, 4 * end), rel=0.05)


def test_what_was_measured_at_a_size_goes_before_what_ended_below_it() -> None:
    short = curve({1024: 1e-3, 2048: 1e-3})
    assert price(RING, 2.0**17, short, SLOW) == price(RING, 2.0**17, SLOW)
    assert price(RING, 2.0**17, SLOW, short) == price(RING, 2.0**17, SLOW)
