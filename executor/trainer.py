"""Make a module train the way a plan says."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from executor.checks import check_plan
from executor.collectives.communicator import Communicator, communicators
from executor.cut import cut_model
from executor.decoder import (
    Decoder,
    DecoderFamily,
    check_model,
    family_of,
    is_tied,
    mark_taken,
    weights_checksum,
)
from executor.errors import ExecutorError, PlanMismatchError
from executor.gradients.states import States
from executor.job import Job, current_job, together
from executor.mesh import Mesh, build_mesh
from executor.parallel.pipeline import build_pipeline
from executor.parallel.tensor import vocab_parallel_cross_entropy
from executor.peers import naming_lost_peers
from executor.shards.zero import share_out_states
from executor.timing import Recorder
from planner.plan import Axis, Plan

__all__ = ["StepResult", "Trainer", "apply"]

logger = logging.getLogger(__name__)

_DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}

# Runs forward and backward of all micro-batches of a step and returns their losses; empty away
# from the last pipeline stage.
ForwardBackward = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step on this rank, in seconds; what is left of ``step_s`` is the executor's own.

    Attributes:
        loss_sum: Sum of the micro-batches' mean losses; 0 away from the last pipeline stage.
        gradient_norm: Of the whole model, before clipping; None unless it was asked for.
        step_s: Wall time on this rank; all ranks start together, so the job's is the longest.
        forward_backward_s: Wall time of forward and backward, less what collectives blocked.
        optimizer_s: Dividing the gradients, the optimizer, and clearing the gradients.
        communication_s: Blocked in collectives, waits for other ranks included.
    """

    loss_sum: float
    gradient_norm: float | None
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
    communicators: dict[Axis, Communicator]
    chunks: tuple[Decoder, ...]
    states: tuple[States, ...]
    forward_backward: ForwardBackward
    optimizer: torch.optim.Optimizer
    max_gradient_norm: float | None
    # What ended a step, if one ended in an error: half of its gradients are still there.
    failures: list[str] = field(default_factory=list)

    def my_rows(self) -> slice:
        """Return which sequences of the global batch this rank trains on."""
        rows = self.plan.batch.micro_batch_size * self.plan.batch.num_micro_batches
        first = self.mesh.coordinates["dp"] * rows
        return slice(first, first + rows)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
        """Run one optimizer step on this rank's sequences.

        Args:
            inputs: Token ids [micro_batch_size * num_micro_batches, seq_len], whole sequences:
                of a sequence split over cp, this rank takes its part.
            targets: The token that follows each, same shape.

        Raises:
            PlanMismatchError: Another shape, or ids outside the vocabulary (every target counts:
                none can be masked); on this rank, the others lose it as a peer.
            LostPeerError: Another rank is gone.
            ExecutorError: An earlier step ended in an error.
        """
        self._check_batch(inputs, targets)
        if self.failures:
            raise ExecutorError(
                f"rank {self.mesh.rank}: an earlier step of this trainer ended in an error "
                f"({self.failures[0]}) and left gradients behind; build it again, or load the last "
                "checkpoint into a new one"
            )
        try:
            return self._step(inputs, targets)
        except BaseException as error:
            self.failures.append(repr(error))
            raise

    def close(self) -> None:
        """Give back groups and shared memory; all ranks call this together, and no step follows."""
        groups = {group.process_group for group in self.mesh.groups.values()}
        for split in self.mesh.splits.values():
            groups |= split.process_groups()
        for communicator in self.communicators.values():
            communicator.runners.close()
        for group in sorted((g for g in groups if g is not None), key=lambda g: g.group_name):
            dist.destroy_process_group(group)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> StepResult:
        start, blocked_before_s = time.perf_counter(), self.recorder.blocked_s
        positions = self.chunks[0].positions
        with self.recorder.watching():
            losses = self.forward_backward(inputs[:, positions], targets[:, positions])
        computed = time.perf_counter()
        blocked_inside_s = self.recorder.blocked_s - blocked_before_s
        for states in self.states:
            states.reduce()
        reduced, blocked_reduced_s = time.perf_counter(), self.recorder.blocked_s
        norm = self._update()
        end = time.perf_counter()
        blocked_in_update_s = self.recorder.blocked_s - blocked_reduced_s
        return StepResult(
            loss_sum=sum(float(loss.detach()) for loss in losses),
            gradient_norm=norm,
            step_s=end - start,
            forward_backward_s=max(0.0, computed - start - blocked_inside_s),
            optimizer_s=max(0.0, end - reduced - blocked_in_update_s),
            communication_s=self.recorder.blocked_s - blocked_before_s,
        )

    def global_loss(self, result: StepResult) -> float:
        """Return the mean loss of the global batch, on every rank. Not part of the timed step."""
        holds_it = self.mesh.coordinates["tp"] == 0
        total = torch.tensor([result.loss_sum if holds_it else 0.0], dtype=torch.float64)
        self._sum_over_world(total, "all_reduce of the loss on all ranks")
        return float(total) / self._num_losses()

    def _update(self) -> float | None:
        """Divide, clip, and take the optimizer's step; return the norm if it was needed."""
        # Sums over micro-batches and ranks become the gradient of the global batch's mean loss.
        gradients = [m.grad for s in self.states for m in s.masters if m.grad is not None]
        for gradient in gradients:
            gradient.div_(self._num_losses())
        norm = None
        if self.max_gradient_norm is not None:
            norm = self._gradient_norm()
            # as torch.nn.utils.clip_grad_norm_
            factor = min(1.0, self.max_gradient_norm / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
        self.optimizer.step()
        for states in self.states:
            states.publish()
        return norm

    def _gradient_norm(self) -> float:
        """Return the norm over all parameters: the squares of disjoint owners, summed."""
        squares = [states.sum_of_squares().to(torch.float64) for states in self.states]
        total = torch.stack(squares).sum().reshape(1)
        self._sum_over_world(total, "all_reduce of the gradient norm on all ranks")
        return float(total.sqrt())

    def _num_losses(self) -> int:
        """Return how many mean losses add up in a step: micro-batches of all dp and cp ranks."""
        layout = self.plan.layout
        return self.plan.batch.num_micro_batches * layout.dp * layout.cp

    def _sum_over_world(self, total: torch.Tensor, doing: str) -> None:
        world_size = self.plan.layout.world_size
        with naming_lost_peers(doing, rank=self.mesh.rank, world_size=world_size):
            dist.all_reduce(total)

    def _check_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        rows, size = self.my_rows(), self.plan.model.vocab_size
        needed = (rows.stop - rows.start, self.plan.training.seq_len)
        for name, ids in (("inputs", inputs), ("targets", targets)):
            if tuple(ids.shape) != needed:
                raise PlanMismatchError(
                    f"rank {self.mesh.rank}: {name} of this step have shape {list(ids.shape)}, "
                    f"plan {self.plan.id} needs {list(needed)} (sequences of this rank, seq_len); "
                    "pass batch[trainer.my_rows()]"
                )
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= size:
                raise PlanMismatchError(
                    f"rank {self.mesh.rank}: {name} of this step go from {low} to {high}, the "
                    f"vocabulary of plan {self.plan.id} from 0 to {size - 1}; masked targets "
                    "(-100) are not supported, fill sequences with tokens"
                )


def apply(
    plan: Plan,
    model: nn.Module,
    *,
    job: Job | None = None,
    learning_rate: float = 1e-3,
    max_gradient_norm: float | None = None,
    aux_loss_coefficient: float = 0.0,
    family: DecoderFamily | None = None,
) -> Trainer:
    """Cut ``model`` up in place and return what trains it. All ranks call this together.

    Args:
        plan: The same on all ranks (``executor.agree_on_plan``).
        model: The whole model with the same weights on every rank.
        job: This process's place in the job; left out: that of torch's default process group.
        learning_rate: Of the plan's optimizer.
        max_gradient_norm: To clip the norm of all gradients to; None leaves them.
        aux_loss_coefficient: Of the load-balance loss of layers with experts.
        family: What ``model`` looks like, if it is not one that ``executor.decoder`` knows.

    Raises:
        PlanMismatchError: The plan is for another world size or module, or options differ between
            ranks; on all ranks.
        UnsupportedPlanError: The plan has fields that cannot be honoured; on all ranks.
        LostPeerError: Another rank is gone.
    """
    job = job or current_job()
    options = f"learning_rate={learning_rate}, max_gradient_norm={max_gradient_norm}, "
    options += f"aux_loss_coefficient={aux_loss_coefficient}"
    # 1. Refuse before any group exists: a rank that refuses later would leave the others waiting.
    together(job, lambda: check_plan(plan, world_size=job.world_size, backend=job.backend))
    together(job, lambda: _check_options(learning_rate, max_gradient_norm, aux_loss_coefficient))
    family = together(job, lambda: _checked(plan, model, family))
    together(job, lambda: options, fingerprint=str, what="options of apply")
    together(job, lambda: weights_checksum(model), fingerprint=str, what="weights of the model")
    # 2. Groups, on all ranks in the same order.
    say = logger.info if job.rank == 0 else logger.debug
    say(
        "plan %s: %s, ZeRO-%d; building groups of %d ranks",
        plan.id,
        plan.layout,
        plan.sharding.zero_stage,
        job.world_size,
    )
    with naming_lost_peers("new_group on all ranks", rank=job.rank, world_size=job.world_size):
        mesh = build_mesh(plan, rank=job.rank, timeout=job.timeout)
        recorder = Recorder(mesh, backend=job.backend)
        comms = communicators(plan, mesh, recorder, timeout_s=job.timeout.total_seconds())
    # 3. The model, cut: stages, then the weights in them.
    say("cutting %s", type(model).__name__)
    tied = is_tied(model, family)
    mark_taken(model)
    for parameter in model.parameters():  # buffers, such as rotary frequencies, keep their dtype
        parameter.data = parameter.data.to(_dtype_of_parameters(plan))
    chunks = cut_model(plan, model, family, comms, aux_loss_coefficient)
    # 4. Who sums and updates what, last: it has the shapes of what is left.
    states = share_out_states(
        plan,
        chunks,
        comms,
        is_tied=tied,
        dtype=_DTYPES[plan.training.precision],
        gradient_dtype=_gradient_dtype(plan),
    )
    masters = [master for part in states for master in part.masters]
    say("ready: rank 0 updates %d parameters", sum(master.numel() for master in masters))
    return Trainer(
        plan=plan,
        mesh=mesh,
        recorder=recorder,
        communicators=comms,
        chunks=chunks,
        states=states,
        forward_backward=_forward_backward(plan, chunks, comms),
        optimizer=_optimizer(plan, masters, learning_rate),
        max_gradient_norm=max_gradient_norm,
    )


def _check_options(
    learning_rate: float, max_gradient_norm: float | None, aux_loss_coefficient: float
) -> None:
    given = {
        "learning_rate": (learning_rate, 0 <= learning_rate < math.inf),
        "max_gradient_norm": (
            max_gradient_norm,
            max_gradient_norm is None or 0 < max_gradient_norm < math.inf,
        ),
        "aux_loss_coefficient": (aux_loss_coefficient, 0 <= aux_loss_coefficient < math.inf),
    }
    wrong = [f"{name}={value}" for name, (value, is_right) in given.items() if not is_right]
    if wrong:
        raise PlanMismatchError(
            f"apply got {', '.join(wrong)}; need finite numbers, none below 0, and a "
            "max_gradient_norm above 0 (None does not clip)"
        )


def _checked(plan: Plan, model: nn.Module, family: DecoderFamily | None) -> DecoderFamily:
    family = family or family_of(model)
    check_model(plan.model, model, tp=plan.layout.tp, ep=plan.layout.ep, family=family)
    return family


def _dtype_of_parameters(plan: Plan) -> torch.dtype:
    """Return the dtype weights are kept in; FSDP2 keeps masters and gathers in the narrow one."""
    dtype = _DTYPES[plan.training.precision]
    return _gradient_dtype(plan) if plan.sharding.zero_stage == 3 else dtype


def _gradient_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype gradients are summed in; fp32 never narrows fp64."""
    dtype = _DTYPES[plan.training.precision]
    if plan.training.main_grads == "same":
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _optimizer(
    plan: Plan, tensors: list[torch.Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    if plan.training.optimizer == "sgd":
        return torch.optim.SGD(tensors, lr=learning_rate)
    return torch.optim.AdamW(tensors, lr=learning_rate)


def _forward_backward(
    plan: Plan, chunks: Sequence[Decoder], comms: dict[Axis, Communicator]
) -> ForwardBackward:
    loss = _loss(comms["tp"])
    if plan.layout.pp == 1:
        return partial(_micro_batch_loop, chunks[0], loss, plan.batch.micro_batch_size)
    dtype = _DTYPES[plan.training.precision]
    pipeline = build_pipeline(plan, chunks, comms["pp"].group, loss, dtype)
    has_embedding = any(chunk.embedding is not None for chunk in chunks)
    has_head = any(chunk.head is not None for chunk in chunks)

    def run_pipeline(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if has_head else {}
        pipeline.step(*((inputs,) if has_embedding else ()), return_outputs=False, **arguments)
        return losses

    return run_pipeline


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


def _loss(tp: Communicator) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if tp.size > 1:
        return lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, tp)
    return _mean_cross_entropy


def _mean_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide.flatten(0, 1), targets.flatten())
