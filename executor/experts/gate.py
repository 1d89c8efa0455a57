"""Which experts a token goes to, with what weight, which routes a capacity drops, how balanced.

A *route* is one of the k experts of one token. Letters: T tokens on this rank, B sequences, S of
their tokens here, E experts of the layer, k experts per token, h hidden size.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch.nn import functional

from executor.collectives.communicator import Communicator
from executor.experts.replay import planned

__all__ = [
    "attach_loss",
    "likeliest_experts",
    "rank_in_expert",
    "route_weights",
    "router_probabilities",
    "sequence_balance_loss",
]

DropPolicy = Literal["probability", "position"]


def router_probabilities(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return each token's probabilities over the experts, [T, E], in fp32 or fp64.

    Args:
        tokens: [T, h].
        weight: Of the router, [E, h].
    """
    logits = functional.linear(tokens, weight)
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def likeliest_experts(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the ``top_k`` likeliest experts of each token, likeliest first, [T, k]."""
    return probabilities.topk(top_k, dim=-1).indices


def route_weights(
    probabilities: torch.Tensor, experts: torch.Tensor, *, norm_topk_prob: bool
) -> torch.Tensor:
    """Return what each expert's output is multiplied with, [T, k].

    Args:
        probabilities: [T, E].
        experts: [T, k].
        norm_topk_prob: A token's weights add up to one (Mixtral), before any of its routes is
            dropped: those that are kept are not scaled up, as in Megatron-LM.
    """
    weights = probabilities.gather(-1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) if norm_topk_prob else weights


def rank_in_expert(
    probabilities: torch.Tensor, experts: torch.Tensor, drop: DropPolicy
) -> torch.Tensor:
    """Return each route's place among the routes to the same expert, from 0, [T, k].

    A capacity of C keeps the places below C. Only routes are compared, and by their probability
    (before renormalisation), never by logits: a negative logit loses no place to experts that were
    not chosen (what DeepSpeed 0.19.0 repaired in its pull request 7986).

    Args:
        probabilities: [T, E].
        experts: [T, k].
        drop: ``probability``: the likeliest come first, the earlier token of two alike.
            ``position``: the first tokens come first, whichever choice of theirs it is, as in
            DeepSpeed's top-k gate and Megatron-LM.
    """
    flat = experts.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if drop == "probability":
        order = probabilities.gather(-1, experts).flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]
    counts = flat.bincount(minlength=probabilities.shape[-1])
    first = counts.cumsum(0) - counts
    places = torch.empty_like(flat)
    places[order] = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    return places.view_as(experts)


def sequence_balance_loss(
    probabilities: torch.Tensor, experts: torch.Tensor, tp: Communicator, cp: Communicator
) -> torch.Tensor:
    """Return the load-balance loss of B sequences: the mean of E / k · sum over i of f_i · P_i.

    f_i is the share of a sequence's tokens that chose expert i, P_i their mean probability of it:
    DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20) with softmax
    affinities, which for k = 1 is Switch's (arXiv 2101.03961, equation 4). It is 1 where experts
    are chosen evenly. Being a mean over sequences, it depends on no layout; routes that a capacity
    drops count. Calls one all_reduce of [2, B, E] over tp and one over cp.

    Args:
        probabilities: Of this rank's tokens, [B, S, E].
        experts: Theirs, [B, S, k].
        tp: Ranks that hold other tokens of the same sequences (sequence parallelism).
        cp: Likewise (context parallelism).

    Returns:
        The same number on all those ranks. Its gradient reaches this rank's own tokens alone, f is
        constant: summed over the ranks, gradients are those of the loss, once.
    """
    local = probabilities.sum(dim=1)

    def summed() -> torch.Tensor:
        counts = torch.zeros_like(local).scatter_add_(
            -1, experts.flatten(1), torch.ones_like(experts.flatten(1), dtype=local.dtype)
        )
        return cp.all_reduce(tp.all_reduce(torch.stack((counts, local.detach()))))

    counts, probability = planned(summed)
    num_experts, top_k = probabilities.shape[-1], experts.shape[-1]
    tokens = (counts.sum(dim=-1, keepdim=True) / top_k).clamp(min=1)
    probability = probability + (local - local.detach())
    per_sequence = (counts / tokens * (probability / tokens)).sum(dim=-1)
    return per_sequence.mean() * num_experts / top_k


def attach_loss(output: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``output``, whose backward also starts that of ``loss``, with ``scale`` as gradient.

    So a layer of any pipeline stage has a loss of its own (Megatron-LM's ``MoEAuxLossAutoScaler``).
    Gradients are later divided by num_micro_batches · dp · cp, because every rank's main loss is
    the mean over its own tokens; a loss of whole sequences that each of the cp ranks has is
    therefore scaled with cp.
    """
    return cast(Callable[..., torch.Tensor], _AttachLoss.apply)(output, loss, scale)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.gradient = torch.full_like(loss, scale)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], ctx.gradient, None
