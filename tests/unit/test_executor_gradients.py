"""The flat buffer adds up, cuts into buckets, and the optimizer works on wide copies."""

import torch
from torch import nn

from executor.gradients.buffer import GradientBuffer, MasterWeights


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)


def test_backwards_add_up_and_leave_no_other_gradient() -> None:
    model, twin = small_model(torch.float64), small_model(torch.float64)
    buffer = GradientBuffer(list(model.parameters()), torch.float64)
    for seed in (1, 2, 3):
        inputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.manual_seed(seed))
        for module in (model, twin):
            module(inputs).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.equal(buffer.flat, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buckets_cover_the_buffer_and_share_its_memory() -> None:
    model = small_model(torch.float32)
    buffer = GradientBuffer(list(model.parameters()), torch.float32)
    buckets = buffer.buckets(bucket_bytes=50)  # 12 whole elements of 4 bytes
    assert [bucket.numel() for bucket in buckets] == [12, 12, 8]
    buckets[2].fill_(7.0)
    assert buffer.flat[-8:].tolist() == [7.0] * 8


def test_a_bucket_smaller_than_an_element_still_holds_one() -> None:
    buffer = GradientBuffer(list(small_model(torch.float64).parameters()), torch.float64)
    assert {bucket.numel() for bucket in buffer.buckets(bucket_bytes=1)} == {1}


def test_bf16_weights_move_by_steps_that_bf16_cannot_add() -> None:
    """A hundred steps of 1e-4 vanish in bf16 next to 1.0; the fp32 master keeps them."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    buffer = GradientBuffer([weight], torch.float32)
    masters = MasterWeights([weight], buffer)
    optimizer = torch.optim.SGD(masters.tensors, lr=1.0)
    for _ in range(100):
        buffer.flat.fill_(1e-4)
        masters.update(optimizer)
    assert weight.dtype == torch.bfloat16
    assert torch.allclose(weight.float(), torch.full((4,), 0.99), atol=4e-3)
    assert not torch.equal(weight, torch.ones(4, dtype=torch.bfloat16))


def test_same_dtype_masters_are_the_weights_themselves() -> None:
    weight = nn.Parameter(torch.ones(4))
    masters = MasterWeights([weight], GradientBuffer([weight], torch.float32))
    assert masters.tensors[0].data_ptr() == weight.data_ptr()
