"""Tensor parallelism: weights split over the tp group, activations whole on every rank.

Calls per micro-batch and rank, in units of one activation (micro-batch x sequence x hidden):

* each layer: 2 all_reduces forward (after the row-parallel weights), 2 backward (at the input of
  each block; the weights of a block share one conversion, so their gradients are summed first).
* the embedding: 1 forward. The head: 1 backward. The loss: 3 of [micro-batch, sequence].

This is Megatron-LM's scheme (Shoeybi et al. 2019, arXiv 1909.08053) without sequence parallelism.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from executor.decoder import DecoderNames
from executor.mesh import RankGroup
from executor.timing import CallKey, Recorder, tensor_bytes

__all__ = ["shard_weights", "vocab_parallel_cross_entropy"]


def shard_weights(model: nn.Module, group: RankGroup, names: DecoderNames) -> None:
    """Replace the weights of ``model`` by their shards on this rank, in place.

    Every rank holds the same weights before (same seed), so nothing is sent. Parts that are None
    belong to another pipeline rank.
    """
    assert group.process_group is not None, "tp > 1"
    mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",))
    layer_styles: dict[str, ParallelStyle] = {
        **{name: _shared_input() for name in names.blocks},
        **{name: ColwiseParallel() for name in names.columns},
        **{name: RowwiseParallel() for name in names.rows},
    }
    for layer in model.get_submodule(names.layers).children():
        parallelize_module(layer, mesh, layer_styles, src_data_rank=None)
    ends: dict[str, ParallelStyle] = {
        names.embedding: RowwiseParallel(input_layouts=Replicate()),
        names.head: ColwiseParallel(),
    }
    for name, style in ends.items():
        if getattr(model, name) is not None:
            parallelize_module(model, mesh, {name: style}, src_data_rank=None)


def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor, targets: torch.Tensor, group: RankGroup, recorder: Recorder
) -> torch.Tensor:
    """Return the mean cross entropy over logits that are split by vocabulary.

    Args:
        logits_shard: [batch, sequence, vocabulary / tp], this rank's part.
        targets: [batch, sequence] token ids of the whole vocabulary.
        group: The tp group, in vocabulary order.
        recorder: Times the three all_reduces.
    """
    apply = cast(Callable[..., torch.Tensor], _VocabParallelCrossEntropy.apply)
    return apply(logits_shard, targets, group, recorder).mean()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Log-sum-exp minus the target's logit; only [batch, sequence] is ever reduced."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_shard: torch.Tensor,
        targets: torch.Tensor,
        group: RankGroup,
        recorder: Recorder,
    ) -> torch.Tensor:
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        width = logits.shape[-1]
        highest = logits.amax(dim=-1)
        _all_reduce(highest, dist.ReduceOp.MAX, group, recorder)
        exponentials = (logits - highest.unsqueeze(-1)).exp()
        total = exponentials.sum(dim=-1)
        _all_reduce(total, dist.ReduceOp.SUM, group, recorder)
        index = targets - group.index * width
        is_mine = (index >= 0) & (index < width)
        index = index.clamp(0, width - 1).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1) - highest
        target_logit = torch.where(is_mine, picked, 0)
        _all_reduce(target_logit, dist.ReduceOp.SUM, group, recorder)
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), index, is_mine)
        ctx.dtype = logits_shard.dtype
        return total.log() - target_logit

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, index, is_mine = ctx.saved_tensors
        hit = is_mine.unsqueeze(-1).to(probabilities.dtype)
        grad = probabilities.scatter_add(-1, index, -hit)
        return (grad * grads[0].unsqueeze(-1)).to(ctx.dtype), None, None, None


def _shared_input() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


def _all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: RankGroup, recorder: Recorder
) -> None:
    size = tensor_bytes(tensor)
    algorithm = recorder.algorithm_that_runs("tp", "all_reduce", size)
    with recorder.call(CallKey("tp", "all_reduce", algorithm, size, group.size)):
        dist.all_reduce(tensor, op=op, group=group.process_group)
