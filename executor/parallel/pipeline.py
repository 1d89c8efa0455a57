"""Pipeline parallelism: keep one stage of the model, and run torch's schedule over it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from executor.decoder import DecoderNames
from executor.mesh import RankGroup
from planner.plan import Plan, Stage

__all__ = ["build_schedule", "keep_stage"]

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def keep_stage(model: nn.Module, stage: Stage, names: DecoderNames) -> None:
    """Drop from ``model``, in place, what other pipeline ranks hold."""
    layers = list(model.get_submodule(names.layers).children())
    kept = layers[stage.first_layer : stage.first_layer + stage.num_layers]
    setattr(model, names.layers, nn.ModuleList(kept))
    if not stage.embedding:
        setattr(model, names.embedding, None)
    if not stage.head:
        setattr(model, names.norm, None)
        setattr(model, names.head, None)


def build_schedule(
    plan: Plan, module: nn.Module, group: RankGroup, loss: LossFunction, dtype: torch.dtype
) -> PipelineScheduleSingle:
    """Return torch's schedule for this rank's stage.

    Shapes are static and given here, so torch has nothing to find out in the first step. Losses
    are left unscaled: the gradients are divided once, after they are summed.

    Args:
        plan: Its schedule is gpipe or 1f1b.
        module: What ``keep_stage`` left, already sharded.
        group: The pp group; stage i is its i-th rank.
        loss: (output of the last stage, targets) to the mean loss of a micro-batch.
        dtype: Of the activations.
    """
    stage = plan.pipeline.stages[group.index]
    batch = (plan.batch.micro_batch_size, plan.training.seq_len)
    tokens = torch.empty(batch, dtype=torch.int64, device="meta")
    hidden = torch.empty(
        *batch, plan.model.hidden_size, dtype=dtype, device="meta", requires_grad=True
    )
    logits = torch.empty(
        *batch,
        plan.model.vocab_size // plan.layout.tp,
        dtype=dtype,
        device="meta",
        requires_grad=True,
    )
    pipeline_stage = PipelineStage(
        module,
        group.index,
        group.size,
        torch.device("cpu"),
        input_args=(tokens if stage.embedding else hidden,),
        output_args=(logits if stage.head else hidden,),
        group=group.process_group,
    )
    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    return schedules[plan.pipeline.schedule](
        pipeline_stage, plan.batch.num_micro_batches, loss_fn=loss, scale_grads=False
    )
