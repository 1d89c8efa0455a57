"""Cut a model up: the layers of this rank's stages, its experts, its part of every weight."""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.collectives.communicator import Communicator
from executor.decoder import Decoder, DecoderFamily, has_experts
from executor.experts.layer import MoELayer
from executor.experts.replay import replaying_context
from executor.parallel.context import ContextAttention, local_positions
from executor.parallel.tensor import shard_weights
from planner.plan import Axis, Plan

__all__ = ["cut_model"]


def cut_model(
    plan: Plan,
    model: nn.Module,
    family: DecoderFamily,
    comms: dict[Axis, Communicator],
    aux_loss_coefficient: float,
) -> tuple[Decoder, ...]:
    """Return this rank's parts of ``model``, one per virtual stage, made of its own modules.

    Args:
        plan: Its layout, stages and recompute mode.
        model: The whole model; not to be used any more.
        family: What it looks like.
        comms: This rank's communicators.
        aux_loss_coefficient: Of the load-balance loss of layers with experts.
    """
    cp, tp = comms["cp"], comms["tp"]
    positions = local_positions(plan.training.seq_len, cp=cp.size, index=cp.index)
    core = ContextAttention(cp, plan.sharding.context_exchange)
    chunks = tuple(
        Decoder(model, family, stage, positions)
        for stage in plan.pipeline.stages
        if stage.pp_rank == comms["pp"].index
    )
    for chunk in chunks:
        for layer in chunk.layers:
            family.set_attention(layer, core)
            if has_experts(layer, family):
                _replace_experts(layer, plan, family, comms, aux_loss_coefficient)
        if tp.size > 1:
            shard_weights(chunk, tp)
    if plan.recompute == "full":
        _recompute_layers(chunks)
    return chunks


def _replace_experts(
    layer: nn.Module,
    plan: Plan,
    family: DecoderFamily,
    comms: dict[Axis, Communicator],
    aux_loss_coefficient: float,
) -> None:
    """Put this rank's experts, and the calls between them, in place of all experts."""
    block = layer.get_submodule(family.feed_forward)
    moe = MoELayer.from_block(
        block,
        ep=comms["ep"],
        tp=comms["tp"],
        cp=comms["cp"],
        capacity=plan.training.expert_capacity,
        # Mixtral always normalises; its relatives say
        norm_topk_prob=getattr(block.get_submodule("gate"), "norm_topk_prob", True),
        aux_loss_coefficient=aux_loss_coefficient,
        shared=getattr(block, "shared_expert", None),
    )
    layer.set_submodule(family.feed_forward, moe)


def _recompute_layers(chunks: Sequence[Decoder]) -> None:
    """Keep only each layer's input; the rest of the forward is run again in the backward.

    Inside the layer's hooks, so that FSDP2 gathers once for both; tokens go to the same experts
    again without another exchange of counts.
    """
    for chunk in chunks:
        for layer in chunk.layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, context_fn=replaying_context
            )
