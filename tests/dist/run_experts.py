"""Worker of the tests: layers of experts on four ranks beside a dense loop in one process.

``run_experts.py OUT``: runs every case of ``CASES``; rank 0 writes {case: [each rank's finding]} to
OUT. A finding has the largest relative difference from the dense loop of the outputs and of each
gradient, and how often which call was recorded.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import executor
from executor.collectives.communicator import Communicator, communicators
from executor.experts.gate import (
    likeliest_experts,
    router_probabilities,
    sequence_balance_loss,
)
from executor.experts.layer import Experts, MoELayer, Router
from executor.experts.replay import replaying_context
from executor.mesh import build_mesh
from executor.timing import Recorder
from planner.plan import Axis, ExpertCapacity, Plan
from planner.routing import expert_capacity
from tests.dist.plans import make_plan

NUM_RANKS, NUM_EXPERTS, TOP_K, BATCH = 4, 8, 2, 2
NUM_FEATURES = 5  # of a token, besides one that is 1 on the rank it belongs to
HIDDEN, WIDTH = NUM_FEATURES + NUM_RANKS, 5


@dataclass(frozen=True)
class Case:
    """One layer on four ranks.

    Attributes:
        degrees: Of the plan.
        seq_lens: Tokens of a sequence on each rank; a micro-batch has ``BATCH`` sequences.
        favoured: Experts that a rank's tokens go to, one set for each rank; none: as it comes.
        summed: The loss is the sum of the outputs, so that its gradient is an expanded number.
        strided: The layer's input is not contiguous.
        reroutes: The gate would choose other experts when it is run again.
        micro_batches: Forward all of them, then backward in the same order.
    """

    degrees: dict[str, int] = field(default_factory=lambda: {"dp": 4, "ep": 4})
    seq_lens: tuple[int, ...] = (5,) * NUM_RANKS
    favoured: tuple[tuple[int, ...], ...] = ()
    capacity: ExpertCapacity | None = None
    aux_loss_coefficient: float = 0.0
    gather_when_hot: bool = True
    summed: bool = False
    strided: bool = False
    shared: bool = False
    recompute: bool = False
    reroutes: bool = False
    micro_batches: int = 1

    def plan(self) -> Plan:
        return make_plan(**self.degrees)  # type: ignore[arg-type]  # degrees alone

    def rows_of_expert(self, rank: int) -> int:
        """Return the capacity of the experts for the tokens of ``rank``."""
        assert self.capacity is not None
        return expert_capacity(
            BATCH * self.seq_lens[rank],
            NUM_EXPERTS,
            TOP_K,
            self.capacity.factor,
            self.capacity.convention,
            self.capacity.min_capacity,
            self.capacity.alignment,
        )


EP2, EP1 = {"dp": 4, "ep": 2}, {"dp": 4}
TP_CP, CP_DP = {"tp": 2, "cp": 2, "ep": 4}, {"cp": 2, "dp": 2, "ep": 4}
HOT = ((4, 5),) * NUM_RANKS  # both on member 2 of four
CASES: dict[str, Case] = {
    "ep4": Case(),
    "ep2": Case(EP2),
    "ep1": Case(EP1),
    "shared expert": Case(shared=True),
    "input not contiguous": Case(strided=True),
    "expanded gradient": Case(summed=True),
    "ranks without tokens": Case(seq_lens=(5, 0, 7, 0)),
    "no tokens": Case(seq_lens=(0, 0, 0, 0)),
    "experts without tokens": Case(favoured=((1, 4),) * NUM_RANKS),
    "collapse": Case(favoured=HOT),
    "collapse by all_to_all": Case(favoured=HOT, gather_when_hot=False),
    "collapse, expanded gradient": Case(favoured=HOT, summed=True),
    "collapse ep2": Case(EP2, favoured=((0, 3),) * NUM_RANKS),
    "collapse ep1": Case(EP1, favoured=HOT),
    "collapse, uneven": Case(favoured=HOT, seq_lens=(5, 4, 5, 5)),
    "collapse, a rank without tokens": Case(favoured=HOT, seq_lens=(5, 0, 5, 5)),
    "collapse but for one rank": Case(favoured=((4, 5), (4, 5), (0, 1), (4, 5))),
    "each rank to another": Case(favoured=((2, 3), (4, 5), (6, 7), (0, 1))),
    "padded": Case(capacity=ExpertCapacity(factor=4.0)),
    "padded, probability": Case(capacity=ExpertCapacity(factor=0.8, convention="deepspeed")),
    "padded, position": Case(capacity=ExpertCapacity(factor=0.8, drop="position")),
    "padded ep2": Case(EP2, capacity=ExpertCapacity(factor=1.0, alignment=4)),
    "padded ep1": Case(EP1, capacity=ExpertCapacity(factor=0.5, min_capacity=2)),
    "padded, collapse": Case(favoured=HOT, capacity=ExpertCapacity(factor=1.0)),
    "padded, expanded gradient": Case(summed=True, capacity=ExpertCapacity(factor=1.0)),
    "padded, all dropped": Case(capacity=ExpertCapacity(factor=0.1, convention="floor")),
    "padded, no tokens": Case(seq_lens=(0,) * NUM_RANKS, capacity=ExpertCapacity(factor=1.0)),
    "recompute": Case(recompute=True),
    "recompute, two in flight": Case(recompute=True, micro_batches=2),
    "recompute, collapse": Case(recompute=True, favoured=HOT),
    "recompute, padded": Case(recompute=True, capacity=ExpertCapacity(factor=0.8)),
    "recompute, rerouted": Case(recompute=True, reroutes=True, micro_batches=2),
    "recompute, rerouted, padded": Case(
        recompute=True, reroutes=True, capacity=ExpertCapacity(factor=0.8)
    ),
    "recompute, ranks without tokens": Case(recompute=True, seq_lens=(0, 6, 0, 3)),
    "balance over tp and cp": Case(TP_CP, micro_batches=2, aux_loss_coefficient=0.3),
    "balance over cp": Case(CP_DP, aux_loss_coefficient=0.3),
    "balance, uneven": Case(TP_CP, seq_lens=(5, 0, 3, 1), aux_loss_coefficient=0.3),
    "balance, recompute": Case(
        TP_CP, recompute=True, reroutes=True, micro_batches=2, aux_loss_coefficient=0.3
    ),
}


@dataclass(frozen=True)
class Weights:
    """Of a whole layer, the same on all ranks."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Each rank's tokens, and what its outputs are multiplied with in the loss."""

    tokens: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]


Found = dict[str, torch.Tensor]


def main() -> None:
    torch.set_num_interop_threads(1)
    found: dict[str, Any] = {}
    with executor.join(os.environ, timeout_s=60.0) as job:
        for name, case in CASES.items():
            findings: list[Any] = [None] * job.world_size
            dist.all_gather_object(findings, run_case(job, case))
            found[name] = findings
        if job.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


def run_case(job: executor.Job, case: Case) -> dict[str, Any]:
    plan = case.plan()
    mesh = build_mesh(plan, rank=job.rank, timeout=job.timeout)
    recorder = Recorder(mesh, backend=job.backend)
    comms = communicators(plan, mesh, recorder, timeout_s=60)
    torch.manual_seed(0)
    weights = some_weights(case)
    batches = [some_batch(case) for _ in range(case.micro_batches)]
    mine = distributed(case, comms, weights, batches, job.rank)
    calls = Counter[tuple[str, str, int]]()
    for timing in recorder.timings():
        calls[timing.axis, timing.op, timing.size_bytes] += len(timing.seconds)
    mine["balance"] = torch.stack([balance(b.tokens[job.rank], weights, comms) for b in batches])
    for name in ("router", "shared"):  # of which every rank has a part
        comms["ep"].all_reduce(mine[name])
    expected = dense(case, plan, comms["ep"].group.ranks, weights, batches, job.rank)
    return {
        "calls": [[*call, count] for call, count in calls.items()],
        "differences": {name: difference(mine[name], expected[name]) for name in expected},
    }


def some_weights(case: Case) -> Weights:
    router = torch.randn(NUM_EXPERTS, HIDDEN, dtype=torch.float64)
    for rank, experts in enumerate(case.favoured):
        router[list(experts), NUM_FEATURES + rank] += 100.0
    return Weights(
        router=router,
        gate_up=torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.float64),
        down=torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, dtype=torch.float64),
        shared=torch.randn(HIDDEN, HIDDEN, dtype=torch.float64) * case.shared,
    )


def some_batch(case: Case) -> MicroBatch:
    tokens, cotangents = [], []
    for rank, seq_len in enumerate(case.seq_lens):
        own = torch.randn(BATCH, seq_len, HIDDEN, dtype=torch.float64)
        own[..., NUM_FEATURES:] = 0.0
        own[..., NUM_FEATURES + rank] = 1.0
        tokens.append(own)
        cotangents.append(torch.ones_like(own) if case.summed else torch.randn_like(own))
    return MicroBatch(tuple(tokens), tuple(cotangents))


def distributed(
    case: Case,
    comms: dict[Axis, Communicator],
    weights: Weights,
    batches: list[MicroBatch],
    rank: int,
) -> Found:
    """Return this rank's outputs and gradients from the layer under test."""
    ep = comms["ep"]
    count = NUM_EXPERTS // ep.size
    own = slice(ep.index * count, (ep.index + 1) * count)
    shared = nn.Linear(HIDDEN, HIDDEN, bias=False)
    shared.weight = nn.Parameter(weights.shared.clone())
    layer = MoELayer(
        Router(nn.Parameter(weights.router.clone())),
        Experts(
            nn.Parameter(weights.gate_up[own].clone()),
            nn.Parameter(weights.down[own].clone()),
            functional.silu,
        ),
        top_k=TOP_K,
        ep=ep,
        tp=comms["tp"],
        cp=comms["cp"],
        capacity=case.capacity,
        aux_loss_coefficient=case.aux_loss_coefficient,
        shared=shared if case.shared else None,
        gather_when_hot=case.gather_when_hot,
    )
    inputs, outputs = [], []
    for batch in batches:
        tokens = batch.tokens[rank]
        if case.strided:
            tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
            assert not tokens.is_contiguous()
        inputs.append(tokens.clone().requires_grad_())
        if case.recompute:
            again = checkpoint(layer, inputs[-1], use_reentrant=False, context_fn=replaying_context)
            outputs.append(again)
        else:
            outputs.append(layer(inputs[-1]))
    with choosing_other_experts(case.reroutes):
        for batch, output in zip(batches, outputs, strict=True):
            loss = output.sum() if case.summed else (output * batch.cotangents[rank]).sum()
            loss.backward()
    gradients = {
        "router": layer.gate.weight.grad,
        "gate_up": layer.experts.gate_up_proj.grad,
        "down": layer.experts.down_proj.grad,
        "shared": shared.weight.grad if case.shared else torch.zeros_like(weights.shared),
        "tokens": torch.stack([tokens.grad for tokens in inputs if tokens.grad is not None]),
    }
    found = {"outputs": torch.stack(outputs).detach()}
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has left the graph"
        found[name] = gradient
    return found


def balance(
    tokens: torch.Tensor, weights: Weights, comms: dict[Axis, Communicator]
) -> torch.Tensor:
    """Return the balance loss as each rank has it."""
    probabilities = router_probabilities(tokens, weights.router)
    experts = likeliest_experts(probabilities, TOP_K)
    return sequence_balance_loss(probabilities, experts, comms["tp"], comms["cp"])


@contextmanager
def choosing_other_experts(active: bool) -> Iterator[None]:
    def unlikeliest(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
        return probabilities.topk(top_k, dim=-1, largest=False).indices

    with (
        patch("executor.experts.layer.likeliest_experts", unlikeliest) if active else nullcontext()
    ):
        yield


def dense(
    case: Case,
    plan: Plan,
    ranks: tuple[int, ...],
    weights: Weights,
    batches: list[MicroBatch],
    rank: int,
) -> Found:
    """Return what ``rank`` should find: a loop over the routes of all ranks of its ep group.

    The balance loss of a sequence is that of its tokens on all ranks, times cp: gradients are
    divided by cp after they were summed.
    """
    leaves = {
        name: getattr(weights, name).clone().requires_grad_()
        for name in ("router", "gate_up", "down", "shared")
    }
    held = Weights(**leaves)
    loss = held.router.sum() * 0.0
    inputs, outputs, balances = [], [], []
    for batch in batches:
        tokens = {r: batch.tokens[r].clone().requires_grad_() for r in ranks}
        sequences: dict[int, list[torch.Tensor]] = {}
        for r in ranks:
            output = dense_layer(case, r, tokens[r], held)
            loss = loss + (output * batch.cotangents[r]).sum()
            sequences.setdefault(plan.coordinates(r)["dp"], []).append(tokens[r])
            if r == rank:
                inputs.append(tokens[r])
                outputs.append(output.detach())
        for dp, parts in sequences.items():
            whole = dense_balance(torch.cat(parts, dim=1), held.router)
            loss = loss + case.aux_loss_coefficient * plan.layout.cp * whole
            if dp == plan.coordinates(rank)["dp"]:
                balances.append(whole.detach())
    wanted = {**leaves, **{f"tokens{i}": own for i, own in enumerate(inputs)}}
    gradients = torch.autograd.grad(loss, tuple(wanted.values()), materialize_grads=True)
    found = dict(zip(wanted, gradients, strict=True))
    count = NUM_EXPERTS // len(ranks)
    first = ranks.index(rank) * count
    return {
        "outputs": torch.stack(outputs),
        "balance": torch.stack(balances),
        "router": found["router"],
        "gate_up": found["gate_up"][first : first + count],
        "down": found["down"][first : first + count],
        "shared": found["shared"] * case.shared,
        "tokens": torch.stack([found[f"tokens{i}"] for i in range(len(inputs))]),
    }


def dense_layer(case: Case, rank: int, tokens: torch.Tensor, weights: Weights) -> torch.Tensor:
    flat = tokens.reshape(-1, HIDDEN)
    probabilities = (flat @ weights.router.T).softmax(dim=-1)
    likeliest = probabilities.argsort(dim=-1, descending=True)[:, :TOP_K].tolist()
    kept = kept_routes(case, rank, probabilities.tolist(), likeliest)
    rows = []
    for t, experts in enumerate(likeliest):
        row = weights.shared @ flat[t] * case.shared
        total = probabilities[t, experts].sum()
        for e in experts:
            if (t, e) in kept:
                gate, up = (weights.gate_up[e] @ flat[t]).chunk(2)
                output = weights.down[e] @ (functional.silu(gate) * up)
                row = row + probabilities[t, e] / total * output
        rows.append(row)
    return torch.stack(rows).view_as(tokens) if rows else tokens * 1.0


def kept_routes(
    case: Case, rank: int, probabilities: list[list[float]], likeliest: list[list[int]]
) -> set[tuple[int, int]]:
    """Return the (token, expert) pairs that are not dropped."""
    kept = set()
    for e in range(NUM_EXPERTS):
        tokens = [t for t, experts in enumerate(likeliest) if e in experts]
        if case.capacity is not None:
            if case.capacity.drop == "probability":
                tokens.sort(key=lambda t: -probabilities[t][e])
            tokens = tokens[: case.rows_of_expert(rank)]
        kept |= {(t, e) for t in tokens}
    return kept


def dense_balance(tokens: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Return the mean of DeepSeek-V3's loss over whole sequences, [batch, seq, h]."""
    losses = []
    for sequence in tokens:
        probabilities = (sequence @ router.T).softmax(dim=-1)
        chosen = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
        for experts in probabilities.topk(TOP_K).indices.tolist():
            chosen[experts] += 1
        share = chosen * NUM_EXPERTS / (TOP_K * max(1, len(sequence)))
        losses.append((share * (probabilities.sum(dim=0) / max(1, len(sequence)))).sum())
    return torch.stack(losses).mean()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    assert found.shape == expected.shape
    if not found.numel():
        return 0.0
    scale = float(expected.abs().max()) or 1.0
    return float((found - expected).abs().max()) / scale


if __name__ == "__main__":
    main()
