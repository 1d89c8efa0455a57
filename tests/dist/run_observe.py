"""Worker of the tests: foreign loops on four ranks, observed and not, in one job.

``run_observe.py PLAN OUT``: PLAN is for tp 2 and dp 2 in two shards. Rank 0 writes to OUT, for each
loop, the run and what was left out; for loops that train also {"plain", "observed"}: each rank's
losses, parameters and calls per group.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import P2POp, ProcessGroup, Work, batch_isend_irecv, irecv, isend
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

from executor.observer import Observer, observe
from planner.plan import Plan

STEPS = 4  # one of them to warm up
WIDTH = 24
Loop = Callable[[Observer | None], dict[str, Any]]


class Groups:
    """The script's own groups: tensor parallel (0, 1), data parallel (0, 2), and (0, 3)."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.tp, self.dp = self.mesh.get_group("tp"), self.mesh.get_group("dp")
        self.crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])  # type: ignore[no-untyped-call]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    plan = Plan.model_validate_json(Path(sys.argv[1]).read_text())
    groups = Groups()
    found: dict[str, Any] = {}
    for name, loop in (
        ("every call", lambda observer: make_every_call(groups, observer)),
        ("asynchronous", lambda observer: rely_on_overlap(groups, observer)),
        ("fsdp and tp", lambda observer: train(sharded(groups.mesh), observer)),
        ("ddp", lambda observer: train(replicated(), observer)),
    ):
        found[name] = observed(plan, loop)
    found["patched"] = after_an_exception(plan)
    if groups.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def observed(plan: Plan, loop: Loop) -> dict[str, Any]:
    """Run ``loop`` by itself, then observed."""
    plain = everywhere(loop(None))
    with observe(plan) as observer:
        seen = loop(observer)
    return {
        "plain": plain,
        "observed": everywhere(seen),
        "run": observer.run.model_dump(mode="json") if observer.run else None,
        "left_out": [
            [left.ranks, left.op, left.reason, left.num_calls] for left in observer.left_out
        ],
    }


def everywhere(mine: Any) -> list[Any]:
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    return results


def step(observer: Observer | None) -> Any:
    return nullcontext() if observer is None else observer.step()


# ---------------------------------------------------------------------------- the loops


def make_every_call(groups: Groups, observer: Observer | None) -> dict[str, Any]:
    """Make each collective in each of its forms; sizes tell them apart."""
    sums = []
    for _ in range(STEPS):
        with step(observer):
            sums.append(every_call(groups))
    with step(observer):
        # nobody waits for it; held, since gloo gives up a send whose work is dropped
        held = dist.isend(torch.ones(2), group=groups.dp, group_dst=1 - groups.dp.rank())
        dist.recv(torch.empty(2), group=groups.dp, group_src=1 - groups.dp.rank())
        dist.barrier(group=groups.dp)
    del held
    return {"sums": sums}


def every_call(groups: Groups) -> float:
    tp, dp, peer = groups.tp, groups.dp, 1 - groups.dp.rank()
    mine = torch.full((4,), float(groups.rank))
    whole = torch.arange(8.0) + groups.rank
    out: list[torch.Tensor] = []

    out += [mine.clone()]
    dist.all_reduce(out[-1], group=dp)  # 16 B
    pieces = [torch.empty(4), torch.empty(4)]
    dist.all_gather(pieces, mine, group=tp)  # 32 B
    out += pieces
    out += [torch.empty(8)]
    dist.all_gather_single(out[-1], mine, group=dp)  # 32 B
    out += [torch.empty(4)]
    dist.reduce_scatter_single(out[-1], whole, group=dp)  # 32 B
    out += [torch.empty(2)]
    dist.reduce_scatter(out[-1], list(mine.chunk(2)), group=tp)  # 16 B
    sent, kept = (3, 5) if dp.rank() == 0 else (1, 7)
    out += [torch.empty(4) if dp.rank() == 0 else torch.empty(12)]
    splits = ([3, 1], [3, 5]) if dp.rank() == 0 else ([5, 7], [1, 7])
    assert sum(splits[1]) == sent + kept
    dist.all_to_all_single(out[-1], whole, *splits, group=dp)  # 32 B
    out += [mine.double()]
    dist.broadcast(out[-1], group=tp, group_src=0)  # 32 B
    gathered = [torch.empty(4), torch.empty(4)] if dp.rank() == 0 else None
    dist.gather(mine, gathered, group=dp, group_dst=0)  # 32 B
    out += gathered or []
    out += [torch.empty(4)]
    dist.scatter(out[-1], [mine, mine + 1] if tp.rank() == 0 else None, group=tp, group_src=0)
    out += [torch.empty(3)]
    # named before observing began: torch compares the function with its own
    operations = [
        P2POp(isend, torch.ones(3), group=dp, group_peer=peer),
        P2POp(irecv, out[-1], group=dp, group_peer=peer),
    ]
    for work in batch_isend_irecv(operations):
        work.wait()
    out += [funcol.all_reduce(mine, "sum", tp) + 0]
    out += [funcol.all_gather_single(mine, 0, dp) + 0]
    out += [funcol.reduce_scatter_single(whole, "sum", 0, tp) + 0]
    dist.barrier(group=tp)
    out += [mine.clone()]
    dist.reduce(out[-1], group=tp, group_dst=0)
    out += [mine.clone()]
    dist.all_reduce(out[-1], group=groups.crossed)
    return sum(float(tensor.sum()) for tensor in out)


def rely_on_overlap(groups: Groups, observer: Observer | None) -> dict[str, Any]:
    """Let one rank of dp join a call only after the other has gone on: waiting would never end."""
    store = c10d._get_default_store()
    kinds = []
    for number in range(2):
        with step(observer):
            key = f"{observer is None} {number} {groups.tp.rank()}"
            if groups.dp.rank() == 1:
                store.wait([key], timedelta(seconds=20))
            work = dist.all_reduce(torch.ones(6), group=groups.dp, async_op=True)
            later = funcol.all_reduce(torch.ones(7), "sum", groups.dp)
            if groups.dp.rank() == 0:
                store.set(key, "went on")
            assert work is not None
            kinds.append(f"{type(work).__name__} {isinstance(work, Work)} {type(later).__name__}")
            work.wait()
            work.wait()  # the second wait for the same work is no call
            assert float(later.sum()) == 14.0
    return {"kinds": kinds}


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Return a model in tensor parallel, its blocks in FSDP2 over dp."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
    ]
    for block in blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return nn.Sequential(*blocks)


def replicated() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))


def train(model: nn.Module, observer: Observer | None) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank() // 2)
    batch = torch.randn(8, WIDTH)
    before = numbers_of_calls()
    losses = []
    for _ in range(STEPS):
        with step(observer):
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    calls = {ranks: number - before[ranks] for ranks, number in numbers_of_calls().items()}
    parameters = [
        parameter.to_local() if hasattr(parameter, "to_local") else parameter
        for parameter in model.parameters()
    ]
    return {
        "losses": losses,
        "parameters": [parameter.detach().tolist() for parameter in parameters],
        "calls": {str(ranks): number for ranks, number in calls.items() if number},
    }


def numbers_of_calls() -> dict[tuple[int, ...], int]:
    return {
        tuple(dist.get_process_group_ranks(group)): group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in torch's stubs
        for group in c10d._world.pg_map
    }


# ------------------------------------------------------------------------------ and after


def after_an_exception(plan: Plan) -> dict[str, Any]:
    """Return what torch's functions are before, while and after a block that raises."""
    before = replaced_ones()
    try:
        with observe(plan) as observer:
            inside = replaced_ones()
            raise KeyError("the script's own")
    except KeyError:
        pass
    after = replaced_ones()
    return {
        "inside": [name for name in before if before[name] is not inside[name]],
        "after": [name for name in before if before[name] is not after[name]],
        "hooks": len(optim._global_optimizer_pre_hooks) + len(optim._global_optimizer_post_hooks),
        "run": observer.run,
    }


def replaced_ones() -> dict[str, Any]:
    functional = torch.ops._c10d_functional
    return {
        **{f"group.{name}": value for name, value in vars(ProcessGroup).items()},
        **{f"work.{name}": value for name, value in vars(Work).items()},
        **{
            f"functional.{name}": getattr(functional, name)
            for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")
        },
    }


if __name__ == "__main__":
    main()
