"""What a legality rule is: data, with a reason that the plan shows.

Rules of the mathematics hold for every target; each target adds its own in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.layout.candidates import SCHEDULES, Candidates, Column
from planner.layout.groups import regular
from planner.model.spec import Attention, ModelSpec
from planner.plan import TrainingSpec

__all__ = ["COMMON_RULES", "Rule", "schedule_is", "tp_without_sequence_parallel"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason why a candidate cannot run.

    Attributes:
        name: Short, in kebab case; rejections are counted under it.
        reason: Said to the user, with what to try.
        breaks: ``(candidates, model, training) -> mask`` of the rows that break the rule, [rows].
    """

    name: str
    reason: str
    breaks: Callable[[Candidates, ModelSpec, TrainingSpec], Column]


def schedule_is(candidates: Candidates, *names: str) -> Column:
    """Return a mask of the rows whose schedule is one of ``names``."""
    return np.isin(candidates.schedule, [SCHEDULES.index(n) for n in SCHEDULES if n in names])


def tp_without_sequence_parallel(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    """Return a mask of the rows that split products over tp and keep whole activations between."""
    return (c.tp > 1) & ~c.sequence_parallel


def _heads_do_not_split(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    return model.attention.num_heads % c.tp != 0


def _kv_heads_do_not_split(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    heads = model.attention.num_kv_heads if isinstance(model.attention, Attention) else 0
    if not heads:
        return np.zeros(len(c), dtype=bool)
    return (heads % c.tp != 0) & (c.tp % heads != 0)


def _feed_forward_does_not_split(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    dense = len(model.moe_layers) < model.num_layers
    shared = model.experts.shared_hidden_size if model.experts else 0
    bad = np.zeros(len(c), dtype=bool)
    if dense:
        bad |= model.feed_forward.hidden_size % c.tp != 0
    if shared:
        bad |= shared % c.tp != 0
    return bad


def _experts_do_not_split(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    if model.experts is None:
        return (c.ep > 1) | (c.etp > 1)
    return (model.experts.num_experts % c.ep != 0) | (model.experts.expert_hidden_size % c.etp != 0)


def _moe_tp_without_sequence_parallel(
    c: Candidates, model: ModelSpec, training: TrainingSpec
) -> Column:
    return tp_without_sequence_parallel(c, model, training) & (model.experts is not None)


def _cp_does_not_split_the_sequence(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return (c.cp > 1) & (training.seq_len % (2 * c.cp) != 0)


def _tp_does_not_split_the_sequence(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.sequence_parallel & (training.seq_len % (c.cp * c.tp) != 0)


def _too_few_micro_batches(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    interleaved = schedule_is(c, "interleaved_1f1b")
    return interleaved & (c.num_micro_batches % c.pp != 0)


def _experts_lie_in_another_order(
    c: Candidates, model: ModelSpec, training: TrainingSpec
) -> Column:
    return ~regular(c, has_experts=model.experts is not None)


def _zero_bubble(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return schedule_is(c, "zb_1p", "zb_2p", "zb_v")


def _unlike_layers_recomputed(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    return (c.recompute_layers > 0) & (0 < len(model.moe_layers) < model.num_layers)


COMMON_RULES: Final = (
    Rule("heads-split-over-tp", "tp must divide the attention heads", _heads_do_not_split),
    Rule(
        "kv-heads-split-over-tp",
        "tp and the key/value heads must divide one another",
        _kv_heads_do_not_split,
    ),
    Rule(
        "ffn-splits-over-tp",
        "tp must divide the feed-forward width",
        _feed_forward_does_not_split,
    ),
    Rule(
        "experts-split-over-ep",
        "ep must divide the experts and etp their width; a dense model has neither",
        _experts_do_not_split,
    ),
    Rule(
        "moe-with-tp-needs-sequence-parallel",
        "with tp the tokens must be sharded before they are dispatched to experts",
        _moe_tp_without_sequence_parallel,
    ),
    Rule(
        "sequence-splits-over-cp",
        "seq_len must be a multiple of 2 cp: each rank takes an early and a late chunk",
        _cp_does_not_split_the_sequence,
    ),
    Rule(
        "sequence-splits-over-tp",
        "sequence parallelism needs seq_len / cp to be a multiple of tp",
        _tp_does_not_split_the_sequence,
    ),
    Rule(
        "interleaving-needs-full-rounds",
        "interleaved 1F1B needs num_micro_batches to be a multiple of pp",
        _too_few_micro_batches,
    ),
    Rule(
        "zero-bubble-schedules-have-no-price",
        "of zb_1p, zb_2p and zb_v the memory is known, and no framework planned for runs them; use "
        "1f1b or interleaved_1f1b",
        _zero_bubble,
    ),
    Rule(
        "some-layers-recomputed-need-one-kind",
        "of dense layers and layers with experts all are recomputed or none: which would matter",
        _unlike_layers_recomputed,
    ),
    # Megatron-LM asserts it (core/parallel_state.py, initialize_model_parallel; a dense model has
    # etp = tp, ep = 1). The executor would run such plans; nothing here can price them.
    Rule(
        "dp-outermost-needs-equal-dp",
        "dp outermost needs one data-parallel size of experts and the rest: etp * ep = tp, cp = 1",
        _experts_lie_in_another_order,
    ),
)
