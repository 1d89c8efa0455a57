"""all_reduce inside the units of a fabric and then across them."""

import torch
import torch.distributed as dist

from executor.mesh import RankGroup, SplitGroup

__all__ = ["hierarchical_all_reduce"]


def hierarchical_all_reduce(
    tensor: torch.Tensor,
    split: SplitGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce ``tensor`` in place: inside the unit, across units, and back.

    Where units hold equally many ranks of the group (n each), every rank carries 1/n across:
    reduce_scatter, all_reduce, all_gather; a size that n does not divide is padded with zeros in a
    copy. Where they do not, the first rank of each unit carries all of it: reduce, all_reduce,
    broadcast. Either way a unit sends the same bytes to the others.
    """
    if split.is_even:
        _by_shards(tensor, split.inside, split.across, op)
    else:
        _by_leaders(tensor, split.inside, split.across, op)


def _by_shards(
    tensor: torch.Tensor, inside: RankGroup, across: RankGroup, op: dist.ReduceOp.RedOpType
) -> None:
    flat = tensor.view(-1)
    padding = -flat.numel() % inside.size
    padded = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    shard = padded
    if inside.process_group is not None:
        shard = padded.new_empty(padded.numel() // inside.size)
        dist.reduce_scatter_single(shard, padded, op=op, group=inside.process_group)
    if across.process_group is not None:
        dist.all_reduce(shard, op=op, group=across.process_group)
    if inside.process_group is not None:
        dist.all_gather_single(padded, shard, group=inside.process_group)
    if padding:
        flat.copy_(padded[: flat.numel()])


def _by_leaders(
    tensor: torch.Tensor, inside: RankGroup, across: RankGroup, op: dist.ReduceOp.RedOpType
) -> None:
    if inside.process_group is not None:
        dist.reduce(tensor, op=op, group=inside.process_group, group_dst=0)
    if inside.index == 0 and across.process_group is not None:
        dist.all_reduce(tensor, op=op, group=across.process_group)
    if inside.process_group is not None:
        dist.broadcast(tensor, group=inside.process_group, group_src=0)
