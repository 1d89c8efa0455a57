"""A layer of experts on one rank: beside Mixtral's of transformers, and what replay decides."""

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from executor.collectives.communicator import Communicator
from executor.collectives.methods import Runners
from executor.errors import PlanMismatchError, UnsupportedPlanError
from executor.experts.exchange import ExpertExchange
from executor.experts.gate import likeliest_experts, rank_in_expert
from executor.experts.layer import MoELayer
from executor.experts.replay import planned, replaying_context
from executor.mesh import Mesh, RankGroup
from executor.timing import Recorder
from planner.plan import ExpertCapacity
from tests.dist.plans import make_plan

NUM_EXPERTS, HIDDEN, WIDTH = 6, 8, 12


def member(index: int, size: int) -> Communicator:
    """Return an end of an axis that has nobody to call."""
    plan = make_plan()
    group = RankGroup(tuple(range(size)), index, None)
    mesh = Mesh(rank=index, coordinates={}, groups={}, splits={})
    return Communicator("ep", group, Runners(), plan, Recorder(mesh, backend="gloo"))


ALONE = member(0, 1)


def mixtral_block(*, jitter: float = 0.0) -> nn.Module:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        router_jitter_noise=jitter,
    )
    torch.manual_seed(0)
    block: nn.Module = MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call]  # untyped
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block


def layer_of(block: nn.Module, **options: object) -> MoELayer:
    return MoELayer.from_block(block, ep=ALONE, tp=ALONE, cp=ALONE, **options)  # type: ignore[arg-type]  # options by name


def gradients(module: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return outputs and gradients of a loss that weighs every output differently."""
    tokens = tokens.clone().requires_grad_()
    module.zero_grad()
    output = module(tokens)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert tokens.grad is not None
    return found | {"output": output.detach(), "tokens": tokens.grad}


def test_layer_computes_mixtrals_block_and_calls_nothing() -> None:
    tokens = torch.randn(2, 7, HIDDEN)
    expected = gradients(mixtral_block(), tokens)
    found = gradients(layer_of(mixtral_block()), tokens)
    assert (
        found.keys()
        == expected.keys()
        == {
            "output",
            "tokens",
            "gate.weight",
            "experts.gate_up_proj",
            "experts.down_proj",
        }
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-4)
    assert ALONE.recorder.timings() == ()


def test_a_block_is_cut_in_place_and_its_parameters_stay_the_same_objects() -> None:
    whole, block = mixtral_block(), mixtral_block()
    before = dict(block.named_parameters())
    layer = MoELayer.from_block(block, ep=member(1, 3), tp=ALONE, cp=ALONE)
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert torch.equal(after[name], whole.get_parameter(name)[2:4])
        assert after[name].untyped_storage().nbytes() == after[name].numel() * 4
    assert torch.equal(after["gate.weight"], whole.get_parameter("gate.weight"))


def test_experts_that_ranks_cannot_share_out_are_refused() -> None:
    with pytest.raises(PlanMismatchError, match=r"MixtralSparseMoeBlock has 6 experts.*ep=4"):
        MoELayer.from_block(mixtral_block(), ep=member(0, 4), tp=ALONE, cp=ALONE)


def test_noise_is_refused() -> None:
    with pytest.raises(UnsupportedPlanError, match=r"jitter=0\.1"):
        layer_of(mixtral_block(jitter=0.1))


def test_dtype_of_the_tokens_is_kept() -> None:
    layer = layer_of(mixtral_block()).to(torch.bfloat16)
    assert layer(torch.randn(1, 5, HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_dropped_tokens_get_nothing_and_experts_without_rows_zero_gradients() -> None:
    capacity = ExpertCapacity(factor=0.01, convention="floor")
    found = gradients(layer_of(mixtral_block(), capacity=capacity), torch.randn(1, 9, HIDDEN))
    assert len(found) == 5
    assert not any(tensor.any() for tensor in found.values())


def test_padded_rows_each_have_a_slot_of_their_expert() -> None:
    exchange = ExpertExchange(ALONE, NUM_EXPERTS)
    probabilities = torch.rand(40, NUM_EXPERTS)
    experts = likeliest_experts(probabilities, 2)
    plan = exchange.plan_padded(experts, rank_in_expert(probabilities, experts, "position"), 10)
    assert plan.slots is not None
    assert plan.num_sent == NUM_EXPERTS * 10
    assert len(set(plan.slots.tolist())) == plan.routes.numel() < experts.numel()
    assert torch.equal(plan.slots // 10, experts.flatten()[plan.routes])


def test_the_gradient_of_unused_weights_is_zero_not_none() -> None:
    exchange = ExpertExchange(ALONE, NUM_EXPERTS)
    tokens = torch.randn(0, HIDDEN, requires_grad=True)
    plan = exchange.plan_dropless(torch.empty(0, 2, dtype=torch.int64))
    weights = torch.ones(0, 2, requires_grad=True)
    output = exchange.combine(exchange.dispatch(tokens, plan), weights, plan)
    torch.autograd.backward(output.sum())
    assert tokens.grad is not None
    assert weights.grad is not None


# ------------------------------------------------------------------- replay


class Decides(nn.Module):
    """Multiplies with a number that is another one each time it is decided."""

    def __init__(self, numbers: Callable[[], int]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = planned(self.numbers)
        return (x * x).sin() * factor


recomputing = partial(checkpoint, use_reentrant=False, context_fn=replaying_context)


def numbers() -> tuple[Callable[[], int], list[int]]:
    """Return a source of 1, 2, 3, ... and the list of what it gave."""
    given: list[int] = []
    source = count(1)

    def following() -> int:
        given.append(next(source))
        return given[-1]

    return following, given


def derivative(x: torch.Tensor) -> torch.Tensor:
    return 2 * x * (x * x).cos()


def test_without_a_checkpoint_everything_is_decided_anew() -> None:
    source, given = numbers()
    assert [planned(source), planned(source)] == [1, 2]
    assert given == [1, 2]


def test_a_recompute_decides_nothing() -> None:
    source, given = numbers()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    recomputing(nn.Sequential(Decides(source), Decides(source)), x).sum().backward()
    assert given == [1, 2]
    x2 = x.detach().clone().requires_grad_()
    again = iter((1, 2))
    nn.Sequential(*(Decides(lambda: next(again)) for _ in range(2)))(x2).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-15, atol=0)


def test_micro_batches_in_flight_do_not_mix() -> None:
    source, given = numbers()
    layer = Decides(source)
    inputs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    outputs = [recomputing(layer, x) for x in inputs]
    for i in (1, 0, 2):
        outputs[i].sum().backward()
        torch.testing.assert_close(inputs[i].grad, derivative(inputs[i].detach()) * (i + 1))
    assert given == [1, 2, 3]


def test_a_checkpoint_inside_another_decides_once() -> None:
    source, given = numbers()
    inner = Decides(source)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    # the square needs the inner result: the outer recompute does not stop before it
    recomputing(lambda y: recomputing(inner, y).square(), x).sum().backward()
    assert given == [1]
    inner_result = x.detach().square().sin()
    torch.testing.assert_close(x.grad, 2 * inner_result * derivative(x.detach()))


def test_a_graph_that_is_kept_can_be_recomputed_again() -> None:
    source, given = numbers()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    loss = recomputing(Decides(source), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert given == [1]
    torch.testing.assert_close(x.grad, 2 * derivative(x.detach()))


def test_an_error_in_a_checkpoint_ends_its_recording() -> None:
    def fails(_: torch.Tensor) -> torch.Tensor:
        planned(lambda: 1)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        recomputing(fails, torch.zeros(1, requires_grad=True))
    assert [planned(lambda: 2), planned(lambda: 3)] == [2, 3]
