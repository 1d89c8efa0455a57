"""Ring and halving-doubling: equal to gloo's collectives, and to their formulas in bytes."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.collectives import ring
from executor.collectives.halving import HalvingDoubling
from executor.collectives.protocol import Op
from executor.collectives.reduction import REDUCIBLE
from executor.collectives.ring import Ring
from executor.mesh import RankGroup
from tests.unit.collective_checks import check_op, leave_together, small_integers
from tests.unit.gloo_ranks import Sent, on_ranks

SUM = dist.ReduceOp.SUM
BOTH = pytest.mark.parametrize("make", [Ring, HalvingDoubling])
METHODS_AND_OPS = [
    *((Ring, op) for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")),
    *((HalvingDoubling, op) for op in ("all_reduce", "all_gather", "reduce_scatter")),
]
REDUCTIONS = [(op, dtype) for op, dtypes in REDUCIBLE.items() for dtype in dtypes]
ALL_DTYPES = (*REDUCIBLE[SUM], torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)
INTERLEAVED = ((0, 2, 4, 6), (1, 3, 5, 7))


@st.composite
def laid_members(draw: st.DrawFn) -> list[list[int]]:
    members = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = draw(st.lists(st.integers(1, len(members)), max_size=3, unique=True).map(sorted))
    return [members[i:j] for i, j in zip([0, *cuts], [*cuts, len(members)], strict=True) if i < j]


@given(
    st.sampled_from(METHODS_AND_OPS),
    laid_members(),
    st.integers(0, 40),
    st.sampled_from(REDUCTIONS),
    st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_every_size_group_and_reduction_equals_the_built_in(
    method: tuple[Any, str],
    units: list[list[int]],
    numel: int,
    reduction: tuple[Op, torch.dtype],
    root: int,
) -> None:
    size = sum(len(unit) for unit in units)
    make, op_name = method
    reduce_op, dtype = reduction
    check_op(make, op_name, size, numel, dtype, reduce_op, units, root % size)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("make", "op_name"),
    [(Ring, "all_gather"), (Ring, "broadcast"), (HalvingDoubling, "all_gather")],
)
def test_dtypes_that_are_never_reduced_are_still_moved(
    make: Any, op_name: str, dtype: torch.dtype
) -> None:
    check_op(make, op_name, 6, 5, dtype, SUM, units=(), root=3)


@pytest.mark.parametrize("op_name", ["all_reduce", "reduce_scatter"])
def test_room_for_two_pieces_is_enough(op_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_SCRATCH_BYTES", 1)
    check_op(Ring, op_name, 6, 1000, torch.float32, SUM, units=())


@BOTH
def test_what_gloo_refuses_is_refused_before_any_message_and_all_else_equals_it(make: Any) -> None:
    def compare(group: RankGroup) -> None:
        made, counted = make(group), cast(Sent, group.process_group)
        for reduce_op, dtype in product(REDUCIBLE, ALL_DTYPES):
            ours, gloos = (small_integers(7, dtype, seed=group.index) for _ in range(2))
            if reduced_by_gloo(group, gloos, reduce_op):
                made.all_reduce(ours, reduce_op)
                if dtype == torch.bool:  # gloo adds the bytes, so its True may be a 2
                    gloos = gloos.view(torch.uint8) != 0
                torch.testing.assert_close(ours, gloos)
                continue
            before = counted.num_messages
            with pytest.raises(RuntimeError, match="cannot reduce"):
                made.all_reduce(ours, reduce_op)
            with pytest.raises(RuntimeError, match="cannot reduce"):
                made.reduce_scatter(ours[:1], ours[:3], reduce_op)
            assert counted.num_messages == before

    on_ranks(3, compare)


@BOTH
def test_a_refusal_names_the_dtype_and_what_would_do(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"torch.int32 by AVG: it takes float32, .*; convert"):
        make(RankGroup((0,), 0, None)).all_reduce(
            torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG
        )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_members_hold_the_same_bits_and_errors_are_no_larger_than_gloos(
    make: Any, dtype: torch.dtype
) -> None:
    def held(member: int) -> torch.Tensor:
        return torch.randn(4096, generator=torch.Generator().manual_seed(member)).to(dtype)

    def reduce(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ours, gloos = held(group.index), held(group.index)
        make(group).all_reduce(ours, SUM)
        assert reduced_by_gloo(group, gloos, SUM)
        return ours, gloos

    exact = torch.stack([held(member).double() for member in range(8)]).sum(0)
    results = on_ranks(8, reduce)
    assert all(torch.equal(ours, results[0][0]) for ours, _ in results)
    ours_error, gloos_error = ((r.double() - exact).square().mean().sqrt() for r in results[0])
    assert ours_error <= 1.05 * gloos_error


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_on_a_ring_each_member_sends_the_formula_to_the_next_only(size: int) -> None:
    s_bytes = size * 40
    passed = s_bytes * (size - 1) // size
    expected = {"all_reduce": 2 * passed, "all_gather": passed, "reduce_scatter": passed}
    for op_name, num_bytes in expected.items():
        assert bytes_sent(Ring, op_name, size, s_bytes) == {
            (member, (member + 1) % size): num_bytes for member in range(size)
        }


@pytest.mark.parametrize("units", [(), INTERLEAVED, ((5, 0, 3), (1, 2), (7, 4, 6))])
@pytest.mark.parametrize("root", [0, 3])
def test_a_broadcast_sends_all_bytes_once_over_every_link_but_that_to_the_root(
    units: Sequence[Sequence[int]], root: int
) -> None:
    circle = RankGroup(tuple(range(8)), 0, None, tuple(tuple(unit) for unit in units)).circle
    links = zip(circle, (*circle[1:], circle[0]), strict=True)
    sent_bytes = bytes_sent(Ring, "broadcast", 8, 1 << 18, units, root)
    assert sent_bytes == {(a, b): 1 << 18 for a, b in links if b != root}


@pytest.mark.parametrize("units", [INTERLEAVED, ((5, 0, 3), (1, 2), (7, 4, 6))])
def test_a_ring_leaves_every_unit_by_one_link_however_ranks_are_numbered(
    units: Sequence[Sequence[int]],
) -> None:
    leaving = bytes_leaving_units(bytes_sent(Ring, "all_reduce", 8, 640, units), units)
    assert leaving == dict.fromkeys(range(len(units)), 2 * 7 * 640 // 8)


def test_halving_sends_its_largest_piece_to_the_nearest_and_only_the_smallest_out() -> None:
    s_bytes = 640
    sent_bytes = bytes_sent(HalvingDoubling, "all_reduce", 8, s_bytes, INTERLEAVED)
    circle = [member for unit in INTERLEAVED for member in unit]
    assert sent_bytes == {
        (circle[at], circle[at ^ distance]): 2 * (s_bytes // 2 // distance)
        for at in range(8)
        for distance in (1, 2, 4)
    }
    assert bytes_leaving_units(sent_bytes, INTERLEAVED) == {0: s_bytes, 1: s_bytes}


@pytest.mark.parametrize("op_name", ["all_gather", "reduce_scatter"])
def test_halving_and_doubling_alone_send_half_of_an_all_reduce(op_name: str) -> None:
    both = bytes_sent(HalvingDoubling, "all_reduce", 8, 640, INTERLEAVED)
    alone = bytes_sent(HalvingDoubling, op_name, 8, 640, INTERLEAVED)
    assert alone == {pair: num_bytes // 2 for pair, num_bytes in both.items()}


@pytest.mark.parametrize(
    ("op_name", "given_bytes", "returned_bytes"),
    [("all_reduce", 480, 480), ("all_gather", 80, 480), ("reduce_scatter", 480, 80)],
)
def test_a_surplus_member_sends_and_gets_what_the_docstring_says(
    op_name: str, given_bytes: int, returned_bytes: int
) -> None:
    sent_bytes = bytes_sent(HalvingDoubling, op_name, 6, 480)
    for first, second in ((0, 1), (2, 3)):
        assert {b: n for (a, b), n in sent_bytes.items() if a == second} == {first: given_bytes}
        assert sent_bytes[first, second] == returned_bytes


def bytes_sent(
    make: Callable[[RankGroup], Any],
    op_name: str,
    size: int,
    s_bytes: int,
    units: Sequence[Sequence[int]] = (),
    root: int = 0,
) -> dict[tuple[int, int], int]:
    """Return the bytes of one call by (sender, receiver); S as nccl-tests counts it."""

    def call(group: RankGroup) -> Counter[int]:
        made, whole = make(group), torch.ones(s_bytes, dtype=torch.uint8)
        shard = torch.ones(s_bytes // size, dtype=torch.uint8)
        calls: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: made.all_reduce(whole, SUM),
            "all_gather": lambda: made.all_gather(whole, shard),
            "reduce_scatter": lambda: made.reduce_scatter(shard, whole, SUM),
            "broadcast": lambda: made.broadcast(whole, root),
        }
        calls[op_name]()
        leave_together(group)
        return cast(Sent, group.process_group).bytes_to

    by_sender = on_ranks(size, call, units=units)
    return {(a, b): n for a, sent_to in enumerate(by_sender) for b, n in sent_to.items()}


def bytes_leaving_units(
    sent_bytes: dict[tuple[int, int], int], units: Sequence[Sequence[int]]
) -> Counter[int]:
    unit_of = {member: number for number, unit in enumerate(units) for member in unit}
    leaving: Counter[int] = Counter()
    for (a, b), num_bytes in sent_bytes.items():
        if unit_of[a] != unit_of[b]:
            leaving[unit_of[a]] += num_bytes
    return leaving


def reduced_by_gloo(group: RankGroup, tensor: torch.Tensor, reduce_op: Op) -> bool:
    """Reduce ``tensor`` by gloo's own all_reduce; False if gloo refuses."""
    assert group.process_group is not None
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(reduce_op)
    try:
        group.process_group.allreduce([tensor], options).wait()
    except RuntimeError:
        return False
    return True
