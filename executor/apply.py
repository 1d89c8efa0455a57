"""Make a module train the way a plan says."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.checks import check_plan
from executor.decoder import DecoderNames, check_model
from executor.gradients.buffer import GradientBuffer, MasterWeights
from executor.gradients.reduce import reduce_buckets
from executor.job import Job, together
from executor.mesh import Mesh, build_mesh
from executor.parallel.pipeline import build_schedule, keep_stage
from executor.parallel.tensor import shard_weights, vocab_parallel_cross_entropy
from executor.peers import naming_lost_peers
from executor.timing import Recorder
from planner.plan import Plan

__all__ = ["StepResult", "Trainer", "apply_plan"]

_DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# Runs forward and backward of all micro-batches of a step and returns their losses; empty away
# from the last pipeline stage.
ForwardBackward = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step on this rank, in seconds; what is left of ``step_s`` is the executor's own.

    Attributes:
        loss_sum: Sum of the micro-batches' mean losses; 0 away from the last pipeline stage.
        step_s: Wall time on this rank; all ranks start together, so the job's is the longest.
        forward_backward_s: Wall time of forward and backward, less what collectives blocked.
        optimizer_s: Dividing the gradients, the optimizer, and clearing the gradients.
        communication_s: Blocked in collectives, waits for other ranks included.
    """

    loss_sum: float
    step_s: float
    forward_backward_s: float
    optimizer_s: float
    communication_s: float


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model under a plan, on this rank. ``step`` takes this rank's share of the batch."""

    plan: Plan
    mesh: Mesh
    recorder: Recorder
    module: nn.Module
    gradients: GradientBuffer
    buckets: tuple[torch.Tensor, ...]
    forward_backward: ForwardBackward
    optimizer: torch.optim.Optimizer
    masters: MasterWeights

    def my_rows(self) -> slice:
        """Return which sequences of the global batch this rank trains on."""
        rows = self.plan.batch.micro_batch_size * self.plan.batch.num_micro_batches
        first = self.mesh.coordinates["dp"] * rows
        return slice(first, first + rows)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
        """Run one optimizer step on this rank's sequences.

        Args:
            inputs: Token ids [micro_batch_size * num_micro_batches, seq_len].
            targets: The token that follows each, same shape.
        """
        start, blocked_before_s = time.perf_counter(), self.recorder.blocked_s
        with self.recorder.watching():
            losses = self.forward_backward(inputs, targets)
        computed = time.perf_counter()
        blocked_inside_s = self.recorder.blocked_s - blocked_before_s
        reduce_buckets(self.buckets, self.plan, self.mesh, self.recorder)
        reduced = time.perf_counter()
        # Sums over micro-batches and ranks become the gradient of the global batch's mean loss.
        self.gradients.flat.div_(self.plan.batch.num_micro_batches * self.plan.layout.dp)
        self.masters.update(self.optimizer)
        self.gradients.flat.zero_()
        end = time.perf_counter()
        return StepResult(
            loss_sum=sum(float(loss.detach()) for loss in losses),
            step_s=end - start,
            forward_backward_s=max(0.0, computed - start - blocked_inside_s),
            optimizer_s=end - reduced,
            communication_s=self.recorder.blocked_s - blocked_before_s,
        )

    def global_loss(self, result: StepResult) -> float:
        """Return the mean loss of the global batch, on every rank. Not part of the timed step."""
        holds_it = self.mesh.coordinates["tp"] == 0
        total = torch.tensor([result.loss_sum if holds_it else 0.0], dtype=torch.float64)
        with naming_lost_peers(
            "all_reduce of the loss on all ranks",
            rank=self.mesh.rank,
            world_size=self.plan.layout.world_size,
        ):
            dist.all_reduce(total)
        return float(total) / (self.plan.batch.num_micro_batches * self.plan.layout.dp)


def apply_plan(
    job: Job,
    plan: Plan,
    model: nn.Module,
    *,
    learning_rate: float,
    names: DecoderNames | None = None,
) -> Trainer:
    """Cut ``model`` up in place and return what trains it. All ranks call this together.

    Args:
        job: This process's place in the job.
        plan: The same on all ranks (``executor.job.agree_on_plan``).
        model: The whole model with the same weights on every rank.
        learning_rate: Of the plan's optimizer.
        names: Where the parts of the model are, if not where Hugging Face's Llama has them.

    Raises:
        PlanMismatchError: The plan is for another world size or module; on all ranks.
        UnsupportedPlanError: The plan has fields that cannot be honoured; on all ranks.
        LostPeerError: Another rank is gone.
    """
    names = names or DecoderNames()
    # 1. Refuse before any group exists: a rank that refuses later would leave the others waiting.
    together(job, lambda: check_plan(plan, world_size=job.world_size))
    together(job, lambda: check_model(plan.model, model, tp=plan.layout.tp, names=names))
    # 2. Groups, on all ranks in the same order.
    with naming_lost_peers("new_group on all ranks", rank=job.rank, world_size=job.world_size):
        mesh = build_mesh(plan, rank=job.rank, timeout=job.timeout)
    recorder = Recorder(plan, mesh, backend=job.backend)
    # 3. The dtype, before shards and stages take over the weights.
    dtype = _DTYPES[plan.training.precision]
    model.to(dtype)
    # 4. The stage before the shards: what another rank holds need not be cut.
    keep_stage(model, plan.pipeline.stages[mesh.coordinates["pp"]], names)
    # 5. The shards.
    if plan.layout.tp > 1:
        shard_weights(model, mesh.groups["tp"], names)
    # 6. Recomputation after the shards, so that it replays their collectives too.
    if plan.recompute == "full":
        _recompute_layers(model, names)
    # 7. The buffer last of the model's changes: it has the shapes of what is left.
    parameters = list(model.parameters())
    gradients = GradientBuffer(parameters, _gradient_dtype(plan, dtype))
    masters = MasterWeights(parameters, gradients)
    return Trainer(
        plan=plan,
        mesh=mesh,
        recorder=recorder,
        module=model,
        gradients=gradients,
        buckets=gradients.buckets(plan.sharding.gradient_bucket_bytes),
        forward_backward=_forward_backward(plan, model, mesh, recorder, dtype),
        optimizer=_optimizer(plan, masters.tensors, learning_rate),
        masters=masters,
    )


def _gradient_dtype(plan: Plan, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype gradients are summed in; fp32 never narrows fp64."""
    if plan.training.main_grads == "same":
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _optimizer(
    plan: Plan, tensors: list[torch.Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    if plan.training.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=learning_rate)
    return torch.optim.AdamW(tensors, lr=learning_rate)


def _recompute_layers(model: nn.Module, names: DecoderNames) -> None:
    """Keep only each layer's input; the rest of the forward is run again in the backward."""
    for layer in model.get_submodule(names.layers).children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _forward_backward(
    plan: Plan, model: nn.Module, mesh: Mesh, recorder: Recorder, dtype: torch.dtype
) -> ForwardBackward:
    loss = _loss(plan, mesh, recorder)
    if plan.layout.pp == 1:
        return partial(_micro_batch_loop, model, loss, plan.batch.micro_batch_size)
    schedule = build_schedule(plan, model, mesh.groups["pp"], loss, dtype)
    stage = plan.pipeline.stages[mesh.coordinates["pp"]]

    def run_schedule(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if stage.head else {}
        schedule.step(*((inputs,) if stage.embedding else ()), return_outputs=False, **arguments)
        return losses

    return run_schedule


def _micro_batch_loop(
    model: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    micro_batch_size: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> list[torch.Tensor]:
    losses = []
    pieces = zip(
        torch.split(inputs, micro_batch_size), torch.split(targets, micro_batch_size), strict=True
    )
    for tokens, wanted in pieces:
        value = loss(model(tokens), wanted)
        value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        losses.append(value)
    return losses


def _loss(
    plan: Plan, mesh: Mesh, recorder: Recorder
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if plan.layout.tp > 1:
        group = mesh.groups["tp"]
        return lambda logits, targets: vocab_parallel_cross_entropy(
            logits, targets, group, recorder
        )
    return _mean_cross_entropy


def _mean_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide.flatten(0, 1), targets.flatten())
