"""Pipeline parallelism: torch's stages and runtime, in the planner's order.

torch 2.13 has schedules of its own, but publishes a wrong order for one of them
(``Schedule1F1B``: off by one on the last stage) and refuses what needs no refusal (fewer
micro-batches than stages). Its runtime takes any order, so it is given the one that was priced.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from executor.mesh import RankGroup
from planner.pipeline.schedules import schedule_order
from planner.plan import Plan

__all__ = ["PipelineRuntime", "build_pipeline"]

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


class PipelineRuntime(_PipelineScheduleRuntime):
    """torch's runtime with a given order of forwards and backwards on every rank."""

    def __init__(
        self,
        stages: list[PipelineStage],
        num_micro_batches: int,
        loss: LossFunction,
        order: dict[int, list[_Action | None]],
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # untyped in torch
            stages, num_micro_batches, loss_fn=loss, scale_grads=False
        )
        self.pipeline_order = order
        self._prepare_schedule_with_comms(order)


def build_pipeline(
    plan: Plan,
    chunks: Sequence[nn.Module],
    group: RankGroup,
    loss: LossFunction,
    dtype: torch.dtype,
) -> PipelineRuntime:
    """Return what runs forward and backward of all micro-batches on this rank.

    Shapes are static and given here, so torch has nothing to find out in the first step. Losses
    are left unscaled: the gradients are divided once, after they are summed.

    Args:
        plan: With pp > 1.
        chunks: This rank's stages, already sharded; chunk c is stage ``c * pp + index``.
        group: The pp group.
        loss: (output of the last stage, targets) to the mean loss of a micro-batch.
        dtype: Of the activations.
    """
    # A lost peer is one sentence: the runtime would log its whole schedule as well.
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
    layout = plan.layout
    tokens_here = plan.training.seq_len // layout.cp
    batch = plan.batch.micro_batch_size
    tokens = torch.empty(batch, tokens_here, dtype=torch.int64, device="meta")
    hidden = _like(batch, tokens_here // layout.tp, plan.model.hidden_size, dtype=dtype)
    logits = _like(batch, tokens_here, plan.model.vocab_size // layout.tp, dtype=dtype)
    num_stages = len(plan.pipeline.stages)
    stages = [
        PipelineStage(
            chunk,
            number,
            num_stages,
            torch.device("cpu"),
            input_args=(tokens if plan.pipeline.stages[number].embedding else hidden,),
            output_args=(logits if plan.pipeline.stages[number].head else hidden,),
            group=group.process_group,
        )
        for number, chunk in zip(range(group.index, num_stages, group.size), chunks, strict=True)
    ]
    return PipelineRuntime(stages, plan.batch.num_micro_batches, loss, _order(plan))


def _order(plan: Plan) -> dict[int, list[_Action | None]]:
    order = schedule_order(
        plan.pipeline.schedule,
        num_stages=plan.layout.pp,
        num_micro_batches=plan.batch.num_micro_batches,
        virtual_stages=plan.layout.virtual_stages,
    )
    return {
        rank: [
            _Action(action.chunk * plan.layout.pp + rank, _KINDS[action.kind], action.micro_batch)
            for action in actions
        ]
        for rank, actions in enumerate(order)
    }


def _like(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)
