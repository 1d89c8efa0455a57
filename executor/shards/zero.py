"""Who keeps, sums and updates what: the states of a plan's ZeRO stage."""

from collections.abc import Sequence

import torch

from executor.collectives.communicator import Communicator
from executor.decoder import Decoder
from executor.gradients.states import FlatStates, States
from executor.shards.fsdp import FullyShardedStates, shard_fully
from executor.shards.parameters import LocalParameter, local_parameters
from planner.plan import Axis, Plan

__all__ = ["share_out_states"]


def share_out_states(
    plan: Plan,
    chunks: Sequence[Decoder],
    comms: dict[Axis, Communicator],
    *,
    is_tied: bool,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> tuple[States, ...]:
    """Return the states of dense parameters and, if there are any, of experts.

    Dense gradients are summed over dp and cp, those of experts over edp, on which experts are the
    same. The states are shared out over all of those ranks, but over dp_shard and cp where
    parameters are replicated over dp_replicate.

    Args:
        plan: Its ZeRO stage, layout and bucket size.
        chunks: This rank's parts of the model; changed in place.
        comms: This rank's communicators.
        is_tied: Whether head and embedding of the whole model are one parameter.
        dtype: To compute in.
        gradient_dtype: To sum gradients and keep master weights in.
    """
    zero, bucket_bytes = plan.sharding.zero_stage, plan.sharding.gradient_bucket_bytes
    if zero == 3:
        shard_fully(chunks, dense=comms["dp_shard_cp"], experts=comms["edp"], dtype=dtype)

    def flat(
        parameters: list[LocalParameter],
        shard: Communicator | None,
        replicate: Communicator | None,
    ) -> States:
        return FlatStates(
            parameters,
            tp=comms["tp"],
            pp=comms["pp"],
            shard=shard,
            replicate=replicate,
            bucket_bytes=bucket_bytes,
            dtype=gradient_dtype,
        )

    def fully_sharded(parameters: list[LocalParameter], replicate: Communicator | None) -> States:
        return FullyShardedStates(
            parameters,
            tp=comms["tp"],
            pp=comms["pp"],
            replicate=replicate,
            bucket_bytes=bucket_bytes,
        )

    parameters = local_parameters(chunks, tp=plan.layout.tp, pp=plan.layout.pp, is_tied=is_tied)
    dense = [p for p in parameters if not p.is_expert]
    experts = [p for p in parameters if p.is_expert]
    if zero == 0:
        states = [flat(dense, None, comms["dp_cp"])]
    elif zero == 1:
        states = [flat(dense, comms["dp_shard_cp"], comms["dp_replicate"])]
    else:
        states = [fully_sharded(dense, comms["dp_replicate"])]
    if experts and zero == 0:
        states.append(flat(experts, None, comms["edp"]))
    elif experts and zero == 3 and comms["edp"].size > 1:
        states.append(fully_sharded(experts, None))
    elif experts:
        states.append(flat(experts, comms["edp"], None))
    return tuple(states)
