"""Tensor and sequence parallelism: weights split over the tp group, and activations between them.

Calls per micro-batch and rank, in units of one activation (micro-batch x sequence x hidden):

* each attention and dense feed-forward: forward one all_gather of the normed input and one
  reduce_scatter of the output; backward the same two the other way round.
* the embedding: one reduce_scatter forward, one all_gather backward; the head: one all_gather
  forward, one reduce_scatter backward; the loss: 3 all_reduces of [micro-batch, sequence].

This is Megatron-LM's scheme (Shoeybi et al. 2019, arXiv 1909.08053) with sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198), but the gathered input is kept for the backward
instead of gathered again. Between the blocks a rank has 1/tp of the tokens; so the gradients of
norms and routers, which are whole on every rank, are partial and summed over tp once per step.

Weights are plain tensors and calls are made by hooks: a DTensor spends more CPU time on finding
out what to do in each layer than gloo on doing it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from executor.collectives.communicator import Communicator
from executor.decoder import Decoder

__all__ = ["shard_weights", "vocab_parallel_cross_entropy"]

_SEQUENCE = 1  # dimension of [B, S, h]


def shard_weights(decoder: Decoder, tp: Communicator) -> None:
    """Replace the weights of ``decoder`` by this rank's shards, in place, and hook in the calls.

    Every rank holds the same weights before (same seed), so nothing is sent. A weight shared by
    embedding and head stays shared.
    """
    family = decoder.family
    shards: dict[int, nn.Parameter] = {}

    def split(module: nn.Module, dim: int) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in shards:
                piece = parameter.detach().chunk(tp.size, dim)[tp.index].clone()
                shards[id(parameter)] = nn.Parameter(piece)
            setattr(module, name, shards[id(parameter)])

    for layer in decoder.layers:
        parts = dict(layer.named_modules())
        for name in family.columns:
            if name in parts:
                split(parts[name], dim=0)
        for name in family.rows:
            if name in parts:
                split(parts[name], dim=1)
                parts[name].register_forward_hook(_scattering(tp))
        attention_norm, feed_forward_norm = (parts[name] for name in family.input_norms)
        attention_norm.register_forward_hook(_gathering(tp))
        feed_forward = parts[family.feed_forward]
        if hasattr(feed_forward, "experts"):  # takes this rank's tokens; its shared expert all
            if (shared := getattr(feed_forward, "shared_expert", None)) is not None:
                shared.register_forward_pre_hook(lambda _, args: _gather_sequence(args[0], tp))
        else:
            feed_forward_norm.register_forward_hook(_gathering(tp))
    if decoder.embedding is not None:
        embedding = cast(nn.Embedding, decoder.embedding)
        split(embedding, dim=0)
        decoder.embedding = _VocabParallelEmbedding(embedding, tp)
    if decoder.head is not None:
        split(decoder.head.projection, dim=0)
        decoder.head.norm.register_forward_hook(_gathering(tp))


def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor, targets: torch.Tensor, tp: Communicator
) -> torch.Tensor:
    """Return the mean cross entropy over logits that are split by vocabulary.

    Args:
        logits_shard: [batch, sequence, vocabulary / tp], this rank's part.
        targets: [batch, sequence] token ids of the whole vocabulary.
        tp: The tensor-parallel ranks, in vocabulary order.
    """
    apply = cast(Callable[..., torch.Tensor], _VocabParallelCrossEntropy.apply)
    return apply(logits_shard, targets, tp).mean()


class _VocabParallelEmbedding(nn.Module):
    """Looks up the tokens of its rows; the sum over tp is scattered along the sequence."""

    def __init__(self, shard: nn.Embedding, tp: Communicator) -> None:
        super().__init__()
        self.weight = shard.weight
        self._tp = tp
        self._first = tp.index * shard.weight.shape[0]
        self._padding = None if shard.padding_idx is None else shard.padding_idx - self._first

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take all tokens [B, S], return this rank's part [B, S / tp, h]."""
        index = tokens - self._first
        is_mine = (index >= 0) & (index < self.weight.shape[0])
        padding = self._padding
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        found = functional.embedding(torch.where(is_mine, index, 0), self.weight, padding)
        return _scatter_sequence(found * is_mine.unsqueeze(-1), self._tp)


class _GatherSequence(torch.autograd.Function):
    """Joins the ranks' tokens; the gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.tp = tp
        return tp.all_gather(mine, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.reduce_scatter(grads[0], _SEQUENCE), None


class _ScatterSequence(torch.autograd.Function):
    """Sums the ranks' partial results and keeps this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.tp = tp
        return tp.reduce_scatter(partial, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.all_gather(grads[0], _SEQUENCE), None


def _gather_sequence(tensor: torch.Tensor, tp: Communicator) -> torch.Tensor:
    return cast(Callable[..., torch.Tensor], _GatherSequence.apply)(tensor, tp)


def _scatter_sequence(tensor: torch.Tensor, tp: Communicator) -> torch.Tensor:
    return cast(Callable[..., torch.Tensor], _ScatterSequence.apply)(tensor, tp)


def _gathering(tp: Communicator) -> Callable[..., torch.Tensor]:
    return lambda _module, _args, output: _gather_sequence(output, tp)


def _scattering(tp: Communicator) -> Callable[..., torch.Tensor]:
    return lambda _module, _args, output: _scatter_sequence(output, tp)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Log-sum-exp minus the target's logit; only [batch, sequence] is ever reduced."""

    @staticmethod
    def forward(
        ctx: Any, logits_shard: torch.Tensor, targets: torch.Tensor, tp: Communicator
    ) -> torch.Tensor:
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        width = logits.shape[-1]
        highest = tp.all_reduce(logits.amax(dim=-1), dist.ReduceOp.MAX)
        exponentials = (logits - highest.unsqueeze(-1)).exp()
        total = tp.all_reduce(exponentials.sum(dim=-1))
        index = targets - tp.index * width
        is_mine = (index >= 0) & (index < width)
        index = index.clamp(0, width - 1).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1) - highest
        target_logit = tp.all_reduce(torch.where(is_mine, picked, 0))
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), index, is_mine)
        ctx.dtype = logits_shard.dtype
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, index, is_mine = ctx.saved_tensors
        hit = is_mine.unsqueeze(-1).to(probabilities.dtype)
        grad = probabilities.scatter_add(-1, index, -hit)
        return (grad * grads[0].unsqueeze(-1)).to(ctx.dtype), None, None
