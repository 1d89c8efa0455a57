"""What may hide under what: the one table.

``step`` reads a rule as a budget: a collective that runs beside compute is exposed only beyond
the compute it may hide under, and slows what it hides under by what it takes of the device
(``planner.cost.sharing``). No other file has an overlap factor. Sends between stages are in the
pipeline law.

Collectives beside the same pass run one after the other, those of the experts beside those of the
rest. torch keeps a stream for every process group; Megatron-LM has one data-parallel group for
dense parameters and one for experts, each with its own chain of asynchronous buckets
(core/distributed/param_and_grad_buffer.py), and FSDP gathers and scatters on the group of its
unit. So within either nothing runs at once: not a gather and a scatter, nor, on one more stream, a
shard and its reduction over replicas. Between both the levels are shared (``sharing.shared_s``).
The executor reduces after the last backward, and one thing at a time.

A block's own collectives (tp, cp, ep) run meanwhile on groups of theirs, and compute waits for
them. Their seconds are no budget here: as it should be where gradients need the same level, too
slow where they cross the network while tp stays inside the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import numpy as np

from planner.cost.problem import Problem
from planner.cost.sharing import shared_s
from planner.cost.work import Communication
from planner.layout.candidates import Column
from planner.plan import Phase

__all__ = [
    "BLOCK_OVERLAPS",
    "RANK_OVERLAPS",
    "Beside",
    "BesidePass",
    "block_overlap",
    "exposed_s",
    "rank_overlap",
]

_FORWARDS: Final[tuple[Phase, ...]] = ("forward", "recompute")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a block's collective runs beside.

    Attributes:
        phase: Of the ops.
        ops: Of the same block; empty for all that compute.
        share: Of their time; the rest hides something else.
        option: Of ``TrainingSpec`` that switches it on; empty where nothing has to.
        in_chunks: Only what is left of one chunk of tp, the first or last, finds nothing to hide
            under.
    """

    phase: Phase
    ops: tuple[str, ...] = ()
    share: float = 1.0
    option: str = ""
    in_chunks: bool = False


def _column_split(part: str, into: tuple[str, ...], *sums: str) -> dict[tuple[str, Phase], Beside]:
    """Return what the backward's collectives of a product split by its output run beside.

    The stored input is gathered once more while its input gradient is computed, and the input
    gradient is summed over ranks while its weight gradient is (Megatron-LM, 2205.05198, 4.2.2;
    core/tensor_parallel/layers.py).
    """
    found: dict[tuple[str, Phase], Beside] = {
        (f"{part}_tp_regather", "weight_gradient"): Beside("backward", into)
    }
    for name in sums:
        found[f"{part}_tp_{name}", "backward"] = Beside("weight_gradient", into)
    return found


def _pair(
    part: str, into: tuple[str, ...], out_of: tuple[str, ...]
) -> dict[tuple[str, Phase], Beside]:
    """Return what the collectives around a pair of products run beside.

    With ``--tp-comm-overlap`` those that the first one's backward does not hide run in chunks
    beside the product that reads or writes them (Transformer Engine, userbuffers; it has them for
    qkv, proj, fc1 and fc2, not for the head).
    """
    chunks = partial(Beside, option="overlap_products", in_chunks=True)
    found = _column_split(part, into, "gather", "reduce")
    found[f"{part}_tp_scatter", "backward"] = chunks("backward", out_of)
    for phase in _FORWARDS:
        found[f"{part}_tp_gather", phase] = chunks(phase, into)
        found[f"{part}_tp_scatter", phase] = chunks(phase, out_of)
    return found


_CORE: Final = ("attention_core", "attention_scores", "attention_softmax", "attention_context")
_QKV: Final = ("attention_q", "attention_kv", "attention_qkv")
# (Block op, phase) -> what it runs beside.
#   cp ring: the next keys and values travel while the present ones are used (2310.01889); an
#            all_gather of them is waited for (Megatron-LM, cp_comm_type)
#   experts: of two micro-batches one computes while the other's tokens travel, there and back
BLOCK_OVERLAPS: Final[dict[tuple[str, Phase], Beside]] = {
    **_pair("attention", _QKV, ("attention_out",)),
    **_pair("ffn", ("ffn_up",), ("ffn_down",)),
    **_pair("shared_expert", ("shared_expert_up",), ("shared_expert_down",)),
    **_column_split("mtp", ("mtp_projection",), "gather"),
    **_column_split("head", ("head",), "scatter", "reduce"),
    **{("cp_ring", phase): Beside(phase, _CORE) for phase in (*_FORWARDS, "backward")},
    **{
        (name, phase): Beside(phase, share=0.5, option="overlap_experts")
        for name in ("ep_dispatch", "ep_combine")
        for phase in (*_FORWARDS, "backward")
    },
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


def block_overlap(problem: Problem, op: Communication) -> Beside | None:
    """Return what a block's collective runs beside; None = it is waited for."""
    beside = BLOCK_OVERLAPS.get((op.name, op.phase))
    if beside and beside.option:
        return beside if getattr(problem.training, beside.option) else None
    if beside and op.phase == "backward" and op.axis == "tp":
        return beside if problem.overlaps_tensor_parallel else None
    return beside


def rank_overlap(problem: Problem, op: Communication) -> Literal["forward", "backward"] | None:
    """Return the pass that a rank's collective runs beside; None = it is waited for."""
    return RANK_OVERLAPS.get(op.name) if problem.overlaps_data_parallel else None


def exposed_s(
    total_s: Column,
    budget_s: Column,
    lost_share: Column | float = 0.0,
    always_s: Column | float = 0.0,
) -> Column:
    """Return the seconds a collective adds to the step, shape [rows].

    While it runs beside compute, that goes on at ``1 - lost_share`` of its rate. So either compute
    ends last, ``lost_share`` of the hidden seconds late, or the collective does.

    Args:
        total_s: Of the collective.
        budget_s: Compute it may hide under, as long as it takes alone.
        lost_share: Of compute's rate, while the collective runs.
        always_s: The part that nothing can hide.

    >>> exposed_s(np.array([2.0, 10.0]), np.array([8.0, 8.0]), 0.25)
    array([0.5, 2.5])
    """
    return BesidePass(budget_s).add(total_s, lost_share, always_s)


@dataclass(slots=True)
class BesidePass:
    """Collectives of a rank beside one forward or backward, added one by one.

    Attributes:
        budget_s: Compute of the pass, shape [rows].
    """

    budget_s: Column
    _alone_s: dict[bool, Column] = field(default_factory=dict)
    _levels_s: dict[bool, list[Column]] = field(default_factory=dict)
    _slowed_s: Column | float = 0.0
    _exposed_s: Column | float = 0.0

    def add(
        self,
        total_s: Column,
        lost_share: Column | float,
        always_s: Column | float,
        level_shares: Sequence[Column] = (),
        *,
        of_experts: bool = False,
    ) -> Column:
        """Return the seconds that one more collective adds to the pass, shape [rows].

        Args:
            total_s: Of all its calls in the pass.
            lost_share: As in ``exposed_s``.
            always_s: The part that nothing can hide.
            level_shares: Part of ``total_s`` that each level is busy.
            of_experts: Whether it runs in the experts' chain rather than the others'.
        """
        always = np.minimum(total_s, always_s)
        busy = [share * total_s for share in level_shares]
        if of_experts in self._alone_s:
            self._alone_s[of_experts] = self._alone_s[of_experts] + total_s
            before = self._levels_s[of_experts]
            self._levels_s[of_experts] = [a + b for a, b in zip(before, busy, strict=True)]
        else:
            self._alone_s[of_experts], self._levels_s[of_experts] = total_s, busy
        done = shared_s(list(self._alone_s.values()), list(self._levels_s.values()))
        self._slowed_s = self._slowed_s + always + lost_share * (total_s - always)
        exposed = np.maximum(done - self.budget_s, self._slowed_s)
        added, self._exposed_s = exposed - self._exposed_s, exposed
        return added
