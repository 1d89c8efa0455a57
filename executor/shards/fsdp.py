"""ZeRO-3: torch's FSDP2 shares out parameters; its calls go through our communicators.

Units are each layer, the experts of each layer, the embedding, and norm with head (these two
together if they are tied). In every
micro-batch a unit is gathered before its forward and again before its backward, and its gradients
are scattered after it. Over dp_replicate (hybrid sharding) the shards' gradients are summed once
per step. torch's own mesh has no say in that: FSDP2 sees the shard axis alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from executor.collectives.communicator import Communicator
from executor.decoder import Decoder, has_experts
from executor.gradients.buffer import GradientBuffer, in_buffer_order
from executor.gradients.states import bucket_layout, sum_of_squares
from executor.shards.parameters import LocalParameter

__all__ = ["FullyShardedStates", "shard_fully"]


def shard_fully(
    chunks: Iterable[Decoder],
    *,
    dense: Communicator,
    experts: Communicator,
    dtype: torch.dtype,
) -> None:
    """Share out the parameters of ``chunks``, in place.

    Args:
        chunks: Already cut by tp and ep; their parameters are in the gradients' dtype.
        dense: Shares out everything but experts; at least two ranks.
        experts: Shares out experts, unless it is one rank: they stay whole then.
        dtype: To compute in.
    """
    for chunk in chunks:
        for layer in chunk.layers:
            kept_out: list[nn.Parameter] = []
            if has_experts(layer, chunk.family):
                whole = layer.get_submodule(f"{chunk.family.feed_forward}.experts")
                kept_out = list(whole.parameters())
                if experts.size > 1:
                    _share_out(whole, experts, dtype)
                    kept_out = []
                else:
                    whole.to(dtype)
            _share_out(layer, dense, dtype, kept_out)
        ends = [end for end in (chunk.embedding, chunk.head) if end is not None]
        if len(ends) == 2 and _have_a_parameter_in_common(*ends):
            # One parameter can lie in one unit only, and one of two modules only inside another.
            _share_out(ends, dense, dtype)
            fully_shard(chunk, mesh=_mesh(dense))
        else:
            for end in ends:
                _share_out(end, dense, dtype)


def _have_a_parameter_in_common(one: nn.Module, other: nn.Module) -> bool:
    return not set(one.parameters()).isdisjoint(other.parameters())


def _mesh(ranks: Communicator) -> DeviceMesh:
    assert ranks.group.process_group is not None, "there is something to share out"
    return DeviceMesh.from_group(ranks.group.process_group, "cpu", mesh_dim_names=(ranks.axis,))


def _share_out(
    modules: nn.Module | list[nn.Module],
    ranks: Communicator,
    dtype: torch.dtype,
    kept_out: Sequence[nn.Parameter] = (),
) -> None:
    unit = modules[0] if isinstance(modules, list) else modules
    held = next(unit.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if held == dtype else dtype,
        reduce_dtype=None if held == dtype else held,
        cast_forward_inputs=False,
    )
    fully_shard(
        modules,
        mesh=_mesh(ranks),
        reshard_after_forward=True,  # FSDP2 would keep a unit that lies in no other unit
        mp_policy=policy,
        ignored_params=set(kept_out),
    )
    assert isinstance(unit, FSDPModule), "fully_shard makes it one"
    unit.set_custom_all_gather(_RecordedAllGather(ranks))
    unit.set_custom_reduce_scatter(_RecordedReduceScatter(ranks))
    # Gradients are summed here, and divided once by all tokens of the step.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


class _Recorded:
    """What both of FSDP2's calls have in common: whom they go to, and ordinary memory."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RecordedAllGather(_Recorded, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._ranks.all_gather_into(output_tensor, input_tensor)
        return None


class _RecordedReduceScatter(_Recorded, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._ranks.reduce_scatter_into(output_tensor, input_tensor)
        return None


class FullyShardedStates:
    """States of parameters that FSDP2 has shared out; each rank updates its own shards."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        *,
        tp: Communicator,
        pp: Communicator,
        replicate: Communicator | None,
        bucket_bytes: int,
    ) -> None:
        """Take over the shards.

        Args:
            parameters: Of one kind, at least one; DTensors on the axis that shares them out.
            tp: Completes partial gradients.
            pp: Completes tied gradients.
            replicate: Ranks with the same shards; None where there are none.
            bucket_bytes: Of gradients in one all_reduce over ``replicate``.
        """
        self.parameters = in_buffer_order(parameters)
        self._tp, self._pp, self._replicate = tp, pp, replicate
        self.masters = [_local(p.parameter) for p in self.parameters]
        dtype = self.masters[0].dtype
        shapes = [master.shape for master in self.masters]
        buckets, size = bucket_layout(
            sum(shape.numel() for shape in shapes),
            element_bytes=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            num_shards=1,
        )
        self.gradients = GradientBuffer(
            self.parameters, shapes, dtype=dtype, num_elements=max(1, buckets * size)
        )
        self._buckets = torch.split(self.gradients.flat, max(1, size))
        for master, view in zip(self.masters, self.gradients.views, strict=True):
            master.grad = view

    def reduce(self) -> None:
        """Take what FSDP2 has summed over the shard axis, and sum it over the replicas."""
        for p, view in zip(self.parameters, self.gradients.views, strict=True):
            if p.parameter.grad is None:  # an empty shard
                continue
            view.add_(_local(p.parameter.grad))
            p.parameter.grad = None
        self.gradients.complete(self._tp, self._pp)
        if self._replicate is not None:
            for bucket in self._buckets:
                self._replicate.all_reduce(bucket)

    def sum_of_squares(self) -> torch.Tensor:
        """Return that of the gradients which no other rank counts, a scalar."""
        skipped = self.gradients.num_skipped(self._tp)
        return sum_of_squares([self.gradients.flat[skipped:]], self._replicate)

    def publish(self) -> None:
        """Clear the gradients: the masters are the shards themselves."""
        self.gradients.flat.zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard this rank holds, sharing its memory."""
    with torch.no_grad():
        assert isinstance(tensor, DTensor), "FSDP2 made it one"
        return tensor.to_local().detach()
