"""Gradients add up in one buffer, are counted once, and the optimizer sees what it would alone."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from executor.collectives.communicator import Communicator, communicators
from executor.gradients.buffer import GradientBuffer, in_buffer_order
from executor.gradients.states import FlatStates, bucket_layout
from executor.mesh import build_mesh
from executor.shards.parameters import LocalParameter
from executor.timing import Recorder
from planner.plan import Axis
from tests.dist.plans import make_plan


@dataclass
class Peers:
    """Stands for the other ranks of an axis: they hold zeros, but for what they ``exchange``."""

    size: int
    index: int
    theirs: float = 0.0
    reduced: list[torch.Tensor] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor.clone())
        return tensor

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        self.asked.append(peer)
        return torch.full_like(tensor, self.theirs)

    def reduce_scatter_into(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        shard.copy_(whole.chunk(self.size)[self.index])

    def all_gather_into(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        whole.zero_()
        whole.chunk(self.size)[self.index].copy_(shard)


def peers(size: int, index: int = 0, theirs: float = 0.0) -> Communicator:
    return cast(Communicator, Peers(size, index, theirs))


@pytest.fixture(scope="module")
def alone() -> dict[Axis, Communicator]:
    """Return the communicators of a job of one rank, which call nothing."""
    plan = make_plan()
    mesh = build_mesh(plan, rank=0, timeout=timedelta(seconds=1))
    return communicators(plan, mesh, Recorder(mesh, backend="gloo"), timeout_s=1)


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def local(model: nn.Module) -> list[LocalParameter]:
    return [LocalParameter(name, p, None, 0) for name, p in model.named_parameters()]


def flat_states(
    parameters: list[LocalParameter], alone: dict[Axis, Communicator], **changes: Any
) -> FlatStates:
    usual: dict[str, Any] = {
        "tp": alone["tp"],
        "pp": alone["pp"],
        "shard": None,
        "replicate": None,
        "bucket_bytes": 50,
        "dtype": torch.float64,
    }
    return FlatStates(parameters, **(usual | changes))


def backward(model: nn.Module, seed: int) -> None:
    parameter = next(model.parameters())
    inputs = torch.randn(4, 3, generator=torch.manual_seed(seed)).to(parameter.dtype)
    model(inputs).square().mean().backward()


# --------------------------------------------------------------------------------- buckets


@given(
    num_elements=st.integers(1, 10_000),
    element_bytes=st.sampled_from([2, 4, 8]),
    bucket_bytes=st.integers(1, 50_000),
    num_shards=st.integers(1, 16),
)
def test_buckets_are_equal_hold_everything_and_waste_little(
    num_elements: int, element_bytes: int, bucket_bytes: int, num_shards: int
) -> None:
    buckets, size = bucket_layout(
        num_elements, element_bytes=element_bytes, bucket_bytes=bucket_bytes, num_shards=num_shards
    )
    assert size % num_shards == 0
    assert buckets * size >= num_elements
    assert buckets * size - num_elements < buckets * num_shards, "below a shard's row per bucket"
    wanted = -(-num_elements * element_bytes // bucket_bytes)
    assert buckets == max(1, wanted)
    assert (size - num_shards) * element_bytes < bucket_bytes


# ---------------------------------------------------------------------------- the one buffer


def some_parameters() -> list[LocalParameter]:
    def parameter(name: str, size: int, **kind: Any) -> LocalParameter:
        return LocalParameter(name, nn.Parameter(torch.zeros(size)), None, 0, **kind)

    return [
        parameter("embedding", 5, tied_stage=1),
        parameter("norm", 2, is_partial=True),
        parameter("weight", 4),
        parameter("router", 3, is_partial=True),
        parameter("head", 5, tied_stage=0),
    ]


def test_tied_copies_lie_first_then_partial_then_the_rest_in_model_order() -> None:
    ordered = in_buffer_order(some_parameters())
    assert [p.name for p in ordered] == ["head", "norm", "router", "embedding", "weight"]


def some_buffer() -> GradientBuffer:
    parameters = in_buffer_order(some_parameters())
    buffer = GradientBuffer(
        parameters,
        [p.parameter.shape for p in parameters],
        dtype=torch.float64,
        num_elements=24,
    )
    for number, view in enumerate(buffer.views, start=1):
        view.fill_(number)
    return buffer


def test_views_fill_the_buffer_without_gaps_and_padding_stays_zero() -> None:
    expected = [1.0] * 5 + [2.0] * 2 + [3.0] * 3 + [4.0] * 5 + [5.0] * 4 + [0.0] * 5
    assert some_buffer().flat.tolist() == expected


def test_partial_gradients_alone_are_summed_over_tp_in_one_call() -> None:
    buffer, tp = some_buffer(), Peers(2, 0)
    buffer.complete(cast(Communicator, tp), peers(2, theirs=10.0))
    [partial] = tp.reduced
    assert partial.tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_both_copies_of_a_tied_embedding_get_the_sum() -> None:
    buffer, pp = some_buffer(), Peers(2, 0, theirs=10.0)
    buffer.complete(peers(2), cast(Communicator, pp))
    assert pp.asked == [0, 1], "the head's other copy is on stage 0, the embedding's on stage 1"
    head, _, _, embedding, weight = (view.tolist() for view in buffer.views)
    assert head == [11.0] * 5
    assert embedding == [14.0] * 5
    assert weight == [5.0] * 4


@pytest.mark.parametrize(("tp_index", "skipped"), [(0, 5), (1, 10)])
def test_a_copy_is_counted_nowhere_and_what_is_whole_on_every_tp_rank_once(
    tp_index: int, skipped: int
) -> None:
    assert some_buffer().num_skipped(peers(2, tp_index)) == skipped


# --------------------------------------------------------------------------------- states


def test_backwards_add_up_and_leave_no_other_gradient(alone: dict[Axis, Communicator]) -> None:
    model, twin = small_model(), small_model()
    states = flat_states(local(model), alone)
    for seed in (1, 2, 3):
        backward(model, seed)
        backward(twin, seed)
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.equal(states.gradients.flat[: len(expected)], expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("is_shared_out", [False, True])
@pytest.mark.parametrize("bucket_bytes", [8, 100, 1 << 20])
def test_alone_it_trains_as_plain_adamw(
    is_shared_out: bool, bucket_bytes: int, alone: dict[Axis, Communicator]
) -> None:
    model, twin = small_model(), small_model()
    shard = alone["dp_shard_cp"] if is_shared_out else None
    replicate = alone["dp_cp"]
    states = flat_states(
        local(model), alone, shard=shard, replicate=replicate, bucket_bytes=bucket_bytes
    )
    own = torch.optim.AdamW(states.masters, lr=1e-2)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(5):
        plain.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            backward(model, seed)
            backward(twin, seed)
        states.reduce()
        squares = sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None)
        assert float(states.sum_of_squares()) == pytest.approx(squares, rel=1e-12)
        own.step()
        states.publish()
        plain.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("tp_index", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
def test_over_all_shards_every_gradient_is_counted_once(
    num_shards: int, tp_index: int, bucket_bytes: int
) -> None:
    """Tied copies and, beyond the first tp rank, partial gradients count for nothing."""
    total = 0.0
    for index in range(num_shards):
        states = FlatStates(
            some_parameters(),
            tp=peers(2, tp_index),
            pp=peers(2),
            shard=peers(num_shards, index),
            replicate=None,
            bucket_bytes=bucket_bytes,
            dtype=torch.float64,
        )
        for number, view in enumerate(states.gradients.views, start=1):
            view.fill_(number)
        states.reduce()
        total += float(states.sum_of_squares())
    partial = 2 * 2**2 + 3 * 3**2 if tp_index == 0 else 0
    assert total == partial + 5 * 4**2 + 4 * 5**2


@pytest.mark.parametrize(("index", "expected"), [(0, 180.0), (1, 0.0)])
def test_of_equal_replicas_the_first_counts(
    index: int, expected: float, alone: dict[Axis, Communicator]
) -> None:
    parameter = LocalParameter("weight", nn.Parameter(torch.zeros(5)), None, 0)
    states = flat_states([parameter], alone, replicate=peers(2, index))
    states.gradients.views[0].fill_(6.0)
    assert float(states.sum_of_squares()) == expected


@pytest.mark.parametrize("num_shards", [2, 3])
def test_a_shard_moves_its_own_part_of_every_bucket(
    num_shards: int, alone: dict[Axis, Communicator]
) -> None:
    """The other ranks' parts come out of the gather, here as zeros."""
    moved = torch.zeros(0)
    for index in range(num_shards):
        parameter = LocalParameter("w", nn.Parameter(torch.ones(10).double()), None, 0)
        states = flat_states([parameter], alone, shard=peers(num_shards, index), bucket_bytes=40)
        states.gradients.views[0].fill_(1.0)
        states.reduce()
        torch.optim.SGD(states.masters, lr=0.25).step()
        states.publish()
        mine = parameter.parameter.detach()
        moved = mine if index == 0 else moved + mine
        assert set(mine.tolist()) == {0.0, 0.75}
        assert not states.gradients.flat.any()
    assert moved.tolist() == [0.75] * 10, "together the shards cover every element once"


def test_bf16_weights_move_by_steps_that_bf16_cannot_add(alone: dict[Axis, Communicator]) -> None:
    """A hundred steps of 1e-4 vanish in bf16 next to 1.0; the fp32 master keeps them."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter = LocalParameter("weight", weight, None, 0)
    states = flat_states([parameter], alone, dtype=torch.float32)
    optimizer = torch.optim.SGD(states.masters, lr=1.0)
    for _ in range(100):
        states.gradients.flat.fill_(1e-4)
        optimizer.step()
        states.publish()
    assert weight.dtype == torch.bfloat16
    assert torch.allclose(weight.float(), torch.full((4,), 0.99), atol=4e-3)
    assert not torch.equal(weight, torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "is_same"), [(torch.float64, True), (torch.float32, False)], ids=str
)
def test_masters_of_the_same_dtype_are_the_weights_themselves(
    dtype: torch.dtype, is_same: bool, alone: dict[Axis, Communicator]
) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    states = flat_states([LocalParameter("weight", weight, None, 0)], alone)
    assert (states.masters[0].data_ptr() == weight.data_ptr()) is is_same


def test_gradients_of_narrow_weights_add_up_in_the_wide_buffer(
    alone: dict[Axis, Communicator],
) -> None:
    """In bf16, 256 + 1 is 256."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    states = flat_states([LocalParameter("w", weight, None, 0)], alone, dtype=torch.float32)
    for gradient in (256.0, 1.0):
        (weight * gradient).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert states.gradients.views[0].item() == 257.0
