"""A feed-forward layer of experts that are shared out over the ep group."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from executor.collectives.communicator import Communicator
from executor.errors import PlanMismatchError, UnsupportedPlanError
from executor.experts.exchange import ExchangePlan, ExpertExchange
from executor.experts.gate import (
    attach_loss,
    likeliest_experts,
    rank_in_expert,
    route_weights,
    router_probabilities,
    sequence_balance_loss,
)
from executor.experts.replay import planned
from planner.plan import ExpertCapacity
from planner.routing import expert_capacity

__all__ = ["Experts", "MoELayer", "Router"]

Activation = Callable[[torch.Tensor], torch.Tensor]


class Router(nn.Module):
    """Holds the router's weight [E, h]; the same on every rank."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Experts(nn.Module):
    """This rank's experts, gated feed-forwards without bias, as Mixtral's of ``transformers``.

    Args:
        gate_up_proj: [experts here, 2f, h].
        down_proj: [experts here, h, f].
        act_fn: Of the gate.
    """

    def __init__(
        self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, act_fn: Activation
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn

    def forward(self, rows: torch.Tensor, rows_per_expert: list[int]) -> torch.Tensor:
        """Return the experts' outputs for ``rows`` [rows, h], one expert's after the other's.

        An expert without rows computes on [0, h], so that its weights get a gradient of zeros.
        """
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = []
        for own, (gate_up, down) in zip(torch.split(rows, rows_per_expert), weights, strict=True):
            gate, up = functional.linear(own, gate_up).chunk(2, dim=-1)
            outputs.append(functional.linear(self.act_fn(gate) * up, down))
        return torch.cat(outputs)


class MoELayer(nn.Module):
    """Routes each token to ``top_k`` of E experts, of which this rank has E / ep.

    Parameters are named as in Mixtral of ``transformers``: ``gate.weight``,
    ``experts.gate_up_proj``, ``experts.down_proj``, and ``shared_expert``'s own.

    Args:
        gate: The router of all E experts.
        experts: This rank's: those from ``ep.index * E / ep`` on.
        top_k: Experts per token.
        ep: Ranks among which the experts are shared out.
        tp: Ranks with other tokens of the same sequences; used for the balance loss alone.
        cp: Likewise.
        capacity: Rows that an expert takes of each rank; None: all (dropless).
        norm_topk_prob: A token's weights add up to one (Mixtral).
        aux_loss_coefficient: Of ``gate.sequence_balance_loss``, which is added to the gradients
            (``gate.attach_loss``), so to no loss that is reported; 0 = off.
        shared: A dense expert of all tokens, [B, S, h] -> [B, S, h], whose output is added.
        gather_when_hot: See ``ExpertExchange``.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        top_k: int,
        ep: Communicator,
        tp: Communicator,
        cp: Communicator,
        capacity: ExpertCapacity | None = None,
        norm_topk_prob: bool = True,
        aux_loss_coefficient: float = 0.0,
        shared: nn.Module | None = None,
        gather_when_hot: bool = True,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared
        self.top_k = top_k
        self.capacity = capacity
        self.norm_topk_prob = norm_topk_prob
        self.aux_loss_coefficient = aux_loss_coefficient
        self._exchange = ExpertExchange(ep, gate.weight.shape[0], gather_when_hot)
        self._tp, self._cp = tp, cp

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        *,
        ep: Communicator,
        tp: Communicator,
        cp: Communicator,
        capacity: ExpertCapacity | None = None,
        norm_topk_prob: bool = True,
        aux_loss_coefficient: float = 0.0,
        shared: nn.Module | None = None,
    ) -> "MoELayer":
        """Return the layer that computes a whole ``block`` with this rank's experts alone.

        Its parameters are the block's own, of which those of the experts are cut in place.

        Args:
            block: With ``gate.weight``, ``gate.top_k``, ``experts.gate_up_proj``,
                ``experts.down_proj`` and ``experts.act_fn``, as Mixtral's of ``transformers``.
            ep: See ``MoELayer``, as for everything that follows.
            tp: Likewise.
            cp: Likewise.
            capacity: Likewise.
            norm_topk_prob: Likewise.
            aux_loss_coefficient: Likewise.
            shared: Likewise.

        Raises:
            PlanMismatchError: The ranks cannot share out the experts evenly.
            UnsupportedPlanError: The block adds noise to its input.
        """
        jitter = getattr(block, "jitter_noise", 0.0)
        if jitter:
            raise UnsupportedPlanError(
                f"{type(block).__name__} multiplies its input with noise ({jitter=}), which the "
                "executor's experts do not; set router_jitter_noise to 0"
            )
        gate = Router(block.get_parameter("gate.weight"))
        experts = Experts(
            _cut_in_place(block, "experts.gate_up_proj", ep),
            _cut_in_place(block, "experts.down_proj", ep),
            cast(Activation, block.get_submodule("experts").act_fn),
        )
        return cls(
            gate,
            experts,
            top_k=cast(int, block.get_submodule("gate").top_k),
            ep=ep,
            tp=tp,
            cp=cp,
            capacity=capacity,
            norm_topk_prob=norm_topk_prob,
            aux_loss_coefficient=aux_loss_coefficient,
            shared=shared,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, S, h] for this rank's tokens [B, S, h]; all ranks of ep call it together."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        probabilities = router_probabilities(tokens, self.gate.weight)
        plan = planned(lambda: self._plan(probabilities.detach()))
        weights = route_weights(probabilities, plan.experts, norm_topk_prob=self.norm_topk_prob)
        rows = self.experts(self._exchange.dispatch(tokens, plan), plan.rows_per_expert)
        output = self._exchange.combine(rows, weights, plan).view(hidden.shape)
        if self.aux_loss_coefficient and torch.is_grad_enabled():
            output = self._balanced(output, probabilities, plan.experts)
        return output if self.shared_expert is None else output + self.shared_expert(hidden)

    def _plan(self, probabilities: torch.Tensor) -> ExchangePlan:
        experts = likeliest_experts(probabilities, self.top_k)
        if self.capacity is None:
            return self._exchange.plan_dropless(experts)
        num_tokens, num_experts = probabilities.shape
        rows = expert_capacity(
            num_tokens,
            num_experts,
            self.top_k,
            self.capacity.factor,
            self.capacity.convention,
            self.capacity.min_capacity,
            self.capacity.alignment,
        )
        places = rank_in_expert(probabilities, experts, self.capacity.drop)
        return self._exchange.plan_padded(experts, places, rows)

    def _balanced(
        self, output: torch.Tensor, probabilities: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        by_sequence = output.shape[:2]
        loss = sequence_balance_loss(
            torch.unflatten(probabilities, 0, by_sequence),
            torch.unflatten(experts, 0, by_sequence),
            self._tp,
            self._cp,
        )
        return attach_loss(output, loss, self.aux_loss_coefficient * self._cp.size)


def _cut_in_place(block: nn.Module, name: str, ep: Communicator) -> nn.Parameter:
    """Leave only this rank's experts of a parameter [E, ...], and return it."""
    parameter = block.get_parameter(name)
    num_experts = parameter.shape[0]
    if num_experts % ep.size:
        raise PlanMismatchError(
            f"{type(block).__name__} has {num_experts} experts, which ep={ep.size} ranks cannot "
            f"share out evenly; make a plan whose ep divides {num_experts}"
        )
    count = num_experts // ep.size
    parameter.data = parameter.data[ep.index * count : (ep.index + 1) * count].clone()
    return parameter
