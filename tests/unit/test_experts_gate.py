"""Gate against brute force: who is kept, with what weight, and how balanced it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.experts.gate import (
    DropPolicy,
    attach_loss,
    likeliest_experts,
    rank_in_expert,
    route_weights,
    router_probabilities,
    sequence_balance_loss,
)
from tests.unit.test_experts import ALONE

DROPS: tuple[DropPolicy, ...] = ("probability", "position")


def brute_force_places(
    probabilities: list[list[float]], experts: list[list[int]], drop: DropPolicy
) -> list[list[int]]:
    """Return the place of each route: how many routes to the same expert come before it."""

    def comes_before(other: int, token: int, expert: int) -> bool:
        mine, its = probabilities[token][expert], probabilities[other][expert]
        if drop == "position" or its == mine:
            return other < token
        return its > mine

    return [
        [
            sum(expert in chosen and comes_before(o, t, expert) for o, chosen in enumerate(experts))
            for expert in own
        ]
        for t, own in enumerate(experts)
    ]


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities [T, E], many of them equal, and the experts [T, k]."""
    num_tokens, num_experts = draw(st.integers(0, 12)), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, num_experts))
    row = st.lists(
        st.sampled_from([-2.0, -1.0, 0.0, 3.0]), min_size=num_experts, max_size=num_experts
    )
    rows = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    logits = torch.tensor(rows, dtype=torch.float64).view(num_tokens, num_experts)
    probabilities = logits.softmax(dim=-1)
    return probabilities, likeliest_experts(probabilities, top_k)


@settings(deadline=None)  # the first call of an operator is slow
@given(routings(), st.sampled_from(DROPS))
def test_places_equal_brute_force(
    routing: tuple[torch.Tensor, torch.Tensor], drop: DropPolicy
) -> None:
    probabilities, experts = routing
    found = rank_in_expert(probabilities, experts, drop)
    assert found.tolist() == brute_force_places(probabilities.tolist(), experts.tolist(), drop)


@pytest.mark.parametrize("drop", DROPS)
def test_negative_logits_drop_nothing(drop: DropPolicy) -> None:
    """DeepSpeed 0.18 put unselected zeros above selected negative logits, and dropped them all."""
    logits = -1.0 - torch.rand(64, 8, generator=torch.Generator().manual_seed(0))
    probabilities = router_probabilities(logits, torch.eye(8))
    experts = likeliest_experts(probabilities, 2)
    fullest = int(experts.flatten().bincount().max())
    assert bool((rank_in_expert(probabilities, experts, drop) < fullest).all())


def test_a_tight_capacity_is_filled_whatever_the_sign_of_logits() -> None:
    logits = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    capacity = 6
    masks = []
    for shift in (-1000.0, 0.0, 1000.0):
        probabilities = (logits + shift).softmax(dim=-1)
        experts = likeliest_experts(probabilities, 2)
        mask = rank_in_expert(probabilities, experts, "probability") < capacity
        sizes = experts.flatten().bincount(minlength=8)
        assert int(mask.sum()) == int(sizes.clamp(max=capacity).sum())
        masks.append(mask)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[1], masks[2])


@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_probabilities_are_at_least_single_precision(
    given_dtype: torch.dtype, computed: torch.dtype
) -> None:
    found = router_probabilities(torch.randn(3, 4).to(given_dtype), torch.eye(4).to(given_dtype))
    assert found.dtype == computed
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3, dtype=computed))


def test_weights_are_probabilities_or_add_up_to_one() -> None:
    probabilities = torch.tensor([[0.5, 0.1, 0.4]])
    experts = likeliest_experts(probabilities, 2)
    assert experts.tolist() == [[0, 2]]
    plain = route_weights(probabilities, experts, norm_topk_prob=False)
    torch.testing.assert_close(plain, torch.tensor([[0.5, 0.4]]))
    normed = route_weights(probabilities, experts, norm_topk_prob=True)
    torch.testing.assert_close(normed, torch.tensor([[5 / 9, 4 / 9]]))


def test_even_routing_has_balance_loss_one_and_collapse_the_number_of_experts() -> None:
    tokens = torch.arange(8)
    even = torch.full((3, 8, 4), 0.25)
    experts = torch.stack((tokens % 4, (tokens + 1) % 4), dim=-1).expand(3, 8, 2)
    torch.testing.assert_close(
        sequence_balance_loss(even, experts, ALONE, ALONE), torch.tensor(1.0)
    )
    collapsed = torch.zeros(3, 8, 4)
    collapsed[..., 2] = 1.0
    to_one = torch.full((3, 8, 1), 2)
    found = sequence_balance_loss(collapsed, to_one, ALONE, ALONE)
    torch.testing.assert_close(found, torch.tensor(4.0))


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.data())
def test_balance_loss_and_its_gradient_equal_the_formula(
    batch: int, seq_len: int, num_experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(batch * 100 + seq_len)
    logits = torch.randn(batch, seq_len, num_experts, dtype=torch.float64, generator=generator)
    probabilities = logits.softmax(dim=-1).requires_grad_()
    experts = probabilities.topk(top_k, dim=-1).indices
    loss = sequence_balance_loss(probabilities, experts, ALONE, ALONE)
    torch.autograd.backward(loss)
    share = torch.nn.functional.one_hot(experts, num_experts).sum(dim=(1, 2)).double() / seq_len
    factor = num_experts / top_k / batch
    expected = factor * (share * probabilities.detach().mean(dim=1)).sum()
    torch.testing.assert_close(loss.detach(), expected)
    assert probabilities.grad is not None
    gradient = (factor * share / seq_len).unsqueeze(1).expand_as(probabilities)
    torch.testing.assert_close(probabilities.grad, gradient)


def test_an_attached_loss_is_scaled_and_changes_no_output() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = attach_loss(x * 3, (x * x).sum(), scale=0.5)
    assert output.tolist() == [3.0, 6.0]
    torch.autograd.backward((output * torch.tensor([10.0, 20.0])).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [30.0 + 0.5 * 2.0, 60.0 + 0.5 * 4.0]
