"""Sum gradients over the data-parallel ranks, bucket by bucket, as the plan chose."""

import torch
import torch.distributed as dist

from executor.mesh import Mesh, SplitGroup
from executor.timing import CallKey, Recorder, tensor_bytes
from planner.plan import Plan

__all__ = ["hierarchical_all_reduce", "reduce_buckets"]


def reduce_buckets(
    buckets: tuple[torch.Tensor, ...], plan: Plan, mesh: Mesh, recorder: Recorder
) -> None:
    """Replace each bucket by its sum over dp_cp.

    The plan is asked for every bucket's size: ``hierarchical`` runs here, everything else is the
    library's all_reduce, and a group of one calls nothing.
    """
    group = mesh.groups["dp_cp"]
    if group.process_group is None:
        return
    for bucket in buckets:
        size = tensor_bytes(bucket)
        if plan.algorithm("dp_cp", "all_reduce", size) == "hierarchical":
            assert mesh.split_dp_cp is not None, "build_mesh splits dp_cp for such a plan"
            with recorder.call(CallKey("dp_cp", "all_reduce", "hierarchical", size, group.size)):
                hierarchical_all_reduce(bucket, mesh.split_dp_cp)
        else:
            algorithm = recorder.algorithm_that_runs("dp_cp", "all_reduce", size)
            with recorder.call(CallKey("dp_cp", "all_reduce", algorithm, size, group.size)):
                dist.all_reduce(bucket, group=group.process_group)


def hierarchical_all_reduce(bucket: torch.Tensor, split: SplitGroup) -> None:
    """Sum ``bucket`` in place: reduce_scatter in the unit, all_reduce across, all_gather back.

    Each unit sends 1/n of the bucket per rank to the others instead of all of it (n = ranks of
    the unit). A size that n does not divide is padded with zeros in a copy.
    """
    size = split.inside.size
    padding = -bucket.numel() % size
    padded = torch.cat([bucket, bucket.new_zeros(padding)]) if padding else bucket
    shard = padded
    if split.inside.process_group is not None:
        shard = padded.new_empty(padded.numel() // size)
        dist.reduce_scatter_single(shard, padded, group=split.inside.process_group)
    if split.across.process_group is not None:
        dist.all_reduce(shard, group=split.across.process_group)
    if split.inside.process_group is not None:
        dist.all_gather_single(padded, shard, group=split.inside.process_group)
    if padding:
        bucket.copy_(padded[: bucket.numel()])
