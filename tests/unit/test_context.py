"""Zig-zag shares out causal attention evenly; a group of one calls nothing."""

from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from executor.collectives.communicator import Communicator
from executor.collectives.methods import Runners
from executor.mesh import Mesh, RankGroup
from executor.parallel.context import ContextAttention, local_positions, visible_part
from executor.timing import Recorder
from planner.plan import ContextExchange
from tests.dist.plans import make_plan

DEGREES = (1, 2, 3, 4, 8)
SEQ_LEN = 48


def positions(cp: int) -> list[torch.Tensor]:
    return [local_positions(SEQ_LEN, cp=cp, index=index) for index in range(cp)]


def is_visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return queries.unsqueeze(-1) >= keys


@pytest.mark.parametrize("cp", DEGREES)
def test_positions_partition_the_sequence_in_ascending_order(cp: int) -> None:
    held = positions(cp)
    assert sorted(torch.cat(held).tolist()) == list(range(SEQ_LEN))
    assert all(p.dtype == torch.int64 and p.shape == (SEQ_LEN // cp,) for p in held)
    assert all(p.tolist() == sorted(p.tolist()) for p in held)


@pytest.mark.parametrize("cp", DEGREES)
def test_every_rank_has_the_same_pairs_of_query_and_visible_key(cp: int) -> None:
    pairs = [int(is_visible(p, torch.arange(SEQ_LEN)).sum()) for p in positions(cp)]
    assert set(pairs) == {SEQ_LEN * (SEQ_LEN + 1) // 2 // cp}


@pytest.mark.parametrize("cp", DEGREES)
def test_the_visible_part_of_a_block_is_all_that_causality_allows(cp: int) -> None:
    held = positions(cp)
    for index, queries in enumerate(held):
        for owner, keys in enumerate(held):
            rows, seen = visible_part(index, owner, SEQ_LEN // cp)
            taken = torch.zeros(len(queries), len(keys), dtype=torch.bool)
            taken[rows, seen] = True
            if owner == index:
                taken = taken.tril()
            assert torch.equal(taken, is_visible(queries, keys))


@pytest.mark.parametrize("cp", DEGREES)
def test_every_rank_computes_equally_many_pairs_in_every_hop(cp: int) -> None:
    local = SEQ_LEN // cp
    for hop in range(cp):
        pairs = set()
        for index in range(cp):
            rows, seen = visible_part(index, (index - hop) % cp, local)
            pairs.add(len(range(local)[rows]) * len(range(local)[seen]))
        assert pairs == {local * local if hop == 0 else local * local // 2}


def test_a_sequence_that_leaves_unequal_chunks_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"seq_len=10 must be a multiple of 2 \* cp = 4"):
        local_positions(10, cp=2, index=0)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_alone_it_is_torchs_attention_and_calls_nothing(exchange: ContextExchange) -> None:
    plan = make_plan(context_exchange=exchange)
    alone = RankGroup((0,), 0, None)
    mesh = Mesh(rank=0, coordinates={"cp": 0}, groups={"cp": alone}, splits={})
    recorder = Recorder(mesh, backend="gloo")
    attention = ContextAttention(Communicator("cp", alone, Runners(), plan, recorder), exchange)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    out = attention(q, k, v, scale=0.3)
    expected = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.equal(out, expected)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert recorder.timings() == ()


class Mirror:
    """Stands for the first of two ranks, the other one holding the same; notes what happens."""

    size, index = 2, 0

    def __init__(self) -> None:
        self.events: list[str] = []
        self._on_its_way = torch.empty(0)

    def start_ring_pass(self, tensor: torch.Tensor) -> "Mirror":
        self.events.append("start")
        self._on_its_way = tensor
        return self

    def wait(self) -> torch.Tensor:
        self.events.append("wait")
        return self._on_its_way

    def einsum(self, *args: Any) -> torch.Tensor:
        if self.events[-1] != "compute":
            self.events.append("compute")
        return torch.functional.einsum(*args)


def test_the_ring_computes_while_keys_and_values_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror()
    monkeypatch.setattr(torch, "einsum", mirror.einsum)
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    out = ContextAttention(cast(Communicator, mirror), "ring")(q, k, v)
    assert mirror.events == ["start", "compute", "wait", "compute"]
    torch.autograd.grad(out.sum(), (q, k, v))
    # of the backward's passes only the last, of the gradients, has no block left to hide under
    assert mirror.events[4:] == ["start", "compute", "wait", "compute", "start", "wait"]
