"""Direct and pairwise collectives: the right results, the bytes of a full exchange, and no more."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.collectives.direct import Direct
from executor.collectives.pairwise import Pairwise
from executor.collectives.protocol import Op
from executor.collectives.reduction import REDUCIBLE
from executor.mesh import RankGroup
from tests.unit.collective_checks import check_op
from tests.unit.gloo_ranks import Sent, on_ranks

SUM, AVG, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN
BYTES = 4  # of a float32

REDUCTIONS = [(op, dtype) for op, dtypes in REDUCIBLE.items() for dtype in dtypes]
REDUCING = ["all_reduce", "reduce_scatter", "reduce"]
MOVING = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]
ODD_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16]


def sent_bytes(
    size: int,
    numel: int,
    call: str,
    root: int = 0,
    method: type[Direct] | type[Pairwise] = Direct,
) -> list[list[int]]:
    """Return the bytes that each member sent to each; every shard or piece has ``numel``."""

    def member(group: RankGroup) -> list[int]:
        shard, whole = torch.ones(numel), torch.ones(size * numel)
        at_root = whole if group.index == root else None
        arguments = {
            "all_reduce": (shard, SUM),
            "all_gather": (whole, shard),
            "reduce_scatter": (shard, whole, SUM),
            "all_to_all": (torch.empty_like(whole), whole, None, None),
            "broadcast": (shard, root),
            "reduce": (shard, SUM, root),
            "gather": (at_root, shard, root),
            "scatter": (shard, at_root, root),
        }
        getattr(method(group), call)(*arguments[call])
        counted = group.process_group
        return [counted.bytes_to[to] if isinstance(counted, Sent) else 0 for to in range(size)]

    return on_ranks(size, member)


@given(
    size=st.integers(1, 9),
    call=st.sampled_from([*REDUCING, *MOVING]),
    numel=st.one_of(st.integers(0, 20), st.integers(0, 5_000)),
    reduction=st.sampled_from(REDUCTIONS),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_results_are_those_of_the_built_in(
    size: int, call: str, numel: int, reduction: tuple[Op, torch.dtype], data: st.DataObject
) -> None:
    op, dtype = reduction
    root = data.draw(st.integers(0, size - 1))
    check_op(Direct, call, size, numel, dtype, op, (), root)


@given(
    size=st.integers(1, 9),
    numel=st.integers(0, 500),
    dtype=st.sampled_from([*REDUCIBLE[SUM], *ODD_DTYPES]),
)
@settings(max_examples=15, deadline=None)
def test_pairwise_all_to_all_is_that_of_the_built_in(
    size: int, numel: int, dtype: torch.dtype
) -> None:
    check_op(Pairwise, "all_to_all", size, numel, dtype, SUM, ())


@pytest.mark.parametrize("numel", [2, 7], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("op", REDUCIBLE, ids=str)
def test_every_reduction_of_every_dtype(op: Op, numel: int) -> None:
    for dtype in REDUCIBLE[op]:
        check_op(Direct, "all_reduce", 3, numel, dtype, op, ())


@pytest.mark.parametrize("call", MOVING)
def test_dtypes_that_gloo_does_not_know_are_moved(call: str) -> None:
    for dtype in ODD_DTYPES:
        check_op(Direct, call, 3, 5, dtype, SUM, (), root=1)


@given(size=st.integers(2, 9), numel=st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_all_reduce_sends_every_part_to_its_reducer_and_back(size: int, numel: int) -> None:
    sent = sent_bytes(size, numel, "all_reduce")
    parts = [BYTES * len(part) for part in torch.ones(numel).tensor_split(size)]
    for member, to in enumerate(sent):
        for other in set(range(size)) - {member}:
            two_shot = parts[other] + parts[member]
            assert to[other] == (two_shot if numel >= size else BYTES * numel)


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_to_all"])
def test_every_member_sends_one_shard_to_every_other(call: str) -> None:
    expected = [[BYTES * 13 * (to != member) for to in range(5)] for member in range(5)]
    assert sent_bytes(5, 13, call) == expected
    if call == "all_to_all":
        assert sent_bytes(5, 13, call, method=Pairwise) == expected


@pytest.mark.parametrize("call", ["broadcast", "scatter"])
def test_the_root_alone_sends_to_all(call: str) -> None:
    sent = sent_bytes(4, 13, call, root=2)
    assert sent == [[BYTES * 13 * (member == 2 != to) for to in range(4)] for member in range(4)]


@pytest.mark.parametrize("call", ["reduce", "gather"])
def test_all_send_to_the_root_alone(call: str) -> None:
    sent = sent_bytes(4, 13, call, root=2)
    assert sent == [[BYTES * 13 * (member != 2 == to) for to in range(4)] for member in range(4)]


@pytest.mark.parametrize("op", [SUM, AVG, MIN])
@pytest.mark.parametrize("numel", [4, 1001], ids=["one_shot", "two_shot"])
def test_all_members_get_the_same_bits(numel: int, op: Op) -> None:
    def reduced(group: RankGroup) -> torch.Tensor:
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(group.index))
        tensor[0] = -0.0 if group.index % 2 else 0.0  # equal, yet not the same
        Direct(group).all_reduce(tensor, op)
        return tensor.view(torch.int32)

    first, *others = on_ranks(7, reduced)
    assert all(torch.equal(first, other) for other in others)


def test_a_sum_does_not_depend_on_the_member_that_does_it() -> None:
    def reduced(group: RankGroup) -> torch.Tensor:
        whole = torch.randn(33, generator=torch.Generator().manual_seed(group.index)).repeat(5)
        shard = torch.empty(33)
        Direct(group).reduce_scatter(shard, whole, SUM)
        return shard

    first, *others = on_ranks(5, reduced)
    assert all(torch.equal(first, other) for other in others)


def test_scatter_takes_a_tensor_that_is_not_contiguous() -> None:
    whole = torch.arange(12.0).view(4, 3).t()

    def scattered(group: RankGroup) -> torch.Tensor:
        shard = torch.empty(4)
        Direct(group).scatter(shard, whole if group.index == 1 else None, 1)
        return shard

    assert torch.equal(torch.stack(on_ranks(3, scattered)), whole)


def test_what_gloo_cannot_reduce_is_refused_before_a_message_is_sent() -> None:
    def refused(group: RankGroup) -> int:
        direct, shard, whole = Direct(group), torch.ones(2).int(), torch.ones(4).int()
        with pytest.raises(RuntimeError, match="int32"):
            direct.all_reduce(shard, AVG)
        with pytest.raises(RuntimeError, match="int32"):
            direct.reduce_scatter(shard, whole, AVG)
        with pytest.raises(RuntimeError, match="int32"):
            direct.reduce(shard, AVG, 0)
        counted = group.process_group
        assert isinstance(counted, Sent)
        return counted.num_messages

    assert on_ranks(2, refused) == [0, 0]
