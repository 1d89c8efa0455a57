"""What may hide under what: the one table.

``step`` reads a rule as a budget: a collective that runs beside compute is exposed only beyond
the compute it may hide under, and takes SMs from what it hides under (``OVERLAP_SLOWDOWN``).
No other file has an overlap factor. Sends between stages are in the pipeline law.
"""

from typing import Final, Literal

import numpy as np

from planner.constants import OVERLAP_SLOWDOWN
from planner.layout.candidates import Column

__all__ = ["BLOCK_OVERLAPS", "RANK_OVERLAPS", "exposed_s"]

# Block op -> the ops of the same block and pass that it runs beside.
#   tp regather: while the input gradient of the same product is computed (2205.05198, 4.2.2)
#   cp ring:     the next keys and values travel while the present ones are used (2310.01889);
#                an all_gather of them is waited for (Megatron-LM, cp_comm_type)
BLOCK_OVERLAPS: Final[dict[str, tuple[str, ...]]] = {
    "attention_tp_regather": ("attention_q", "attention_kv", "attention_qkv"),
    "ffn_tp_regather": ("ffn_up",),
    "shared_expert_tp_regather": ("shared_expert_up",),
    "head_tp_regather": ("head",),
    "cp_ring": ("attention_core",),
}

# Rank op -> pass. Gradients travel while earlier layers go backward, parameters while layers
# before theirs go forward; in the last or first micro-batch, or in each of them with ZeRO-2 / 3.
# The first parameters find nothing to hide under, the last gradients nothing left: one call of
# each pass (``Communication.edges``) is always exposed.
RANK_OVERLAPS: Final[dict[str, Literal["forward", "backward"]]] = {
    "gradient_reduce": "backward",
    "gradient_scatter": "backward",
    "gradient_replica_reduce": "backward",
    "expert_gradient_reduce": "backward",
    "expert_gradient_scatter": "backward",
    "parameter_gather": "forward",
    "parameter_regather": "backward",
    "expert_parameter_gather": "forward",
    "expert_parameter_regather": "backward",
}


def exposed_s(total_s: Column, budget_s: Column, always_s: Column | float = 0.0) -> Column:
    """Return the seconds a collective adds to the step, shape [rows].

    Args:
        total_s: Of the collective.
        budget_s: Compute it may hide under.
        always_s: The part that nothing can hide.
    """
    exposed = np.minimum(total_s, np.maximum(total_s - budget_s, always_s))
    return exposed + OVERLAP_SLOWDOWN.value * (total_s - exposed)
