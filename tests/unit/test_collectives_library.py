"""The library's calls give what the protocol promises, also where gloo alone would not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # public without its type

from executor.collectives.library import Library
from executor.mesh import RankGroup
from tests.unit.collective_checks import check_op
from tests.unit.gloo_ranks import on_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
MOVING = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


def library(group: RankGroup) -> Library:
    """Return the library on a process group such as ``init_process_group`` makes of a backend."""
    backend: Any = group.process_group
    if backend is None:
        return Library(group)
    made: Any = dist.ProcessGroup(HashStore(), group.index, group.size)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend._group)
    return Library(replace(group, process_group=made))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e5m2, torch.complex64], ids=str)
@pytest.mark.parametrize("call", MOVING)
def test_every_dtype_is_moved(call: str, dtype: torch.dtype) -> None:
    for size, numel in ((3, 5), (1, 5), (2, 0)):
        check_op(library, call, size, numel, dtype, SUM, (), root=size - 1)


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "reduce"])
def test_reductions_are_gloos_and_spare_their_input(call: str) -> None:
    for size, numel in ((3, 5), (1, 5), (2, 0)):
        check_op(library, call, size, numel, torch.bfloat16, AVG, (), root=size - 1)


def test_the_parts_of_a_tensor_that_is_not_contiguous_are_scattered() -> None:
    columns = torch.arange(12.0).view(3, 4).t()  # [4, 3], two rows a member

    def received(group: RankGroup) -> torch.Tensor:
        shard = torch.empty(2, 3)
        library(group).scatter(shard, columns if group.index == 1 else None, 1)
        return shard

    assert torch.equal(torch.cat(on_ranks(2, received)), columns)
