"""What this project's own executor can run so far; it refuses the rest by name."""

from typing import Final

import numpy as np

from planner.frameworks.rules import Rule, schedule_is
from planner.layout.candidates import RECOMPUTE_MODES, Candidates, Column
from planner.model.spec import Attention, ModelSpec
from planner.plan import Axis, Collective, TrainingSpec

__all__ = ["HIERARCHICAL", "OVERLAP_DATA_PARALLEL", "RULES"]

# Gradients are reduced after the last backward.
OVERLAP_DATA_PARALLEL: Final = False


def _axes_not_built(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return (c.cp > 1) | (c.ep > 1) | (c.etp > 1)


def _sharded(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return (c.zero_stage > 0) | (c.dp_shard > 1)


def _interleaved(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return schedule_is(c, "interleaved_1f1b")


def _sequence_parallel(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return np.asarray(c.sequence_parallel)


def _kv_heads_below_tp(c: Candidates, model: ModelSpec, training: TrainingSpec) -> Column:
    heads = model.attention.num_kv_heads if isinstance(model.attention, Attention) else 1
    return heads % c.tp != 0


def _selective_recompute(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return c.recompute == RECOMPUTE_MODES.index("selective")


def _too_few_micro_batches(c: Candidates, _: ModelSpec, training: TrainingSpec) -> Column:
    return (c.pp > 1) & (c.num_micro_batches < c.pp)


# executor/gradients: reduce_scatter inside the unit, all_reduce across, all_gather inside.
HIERARCHICAL: Final[frozenset[tuple[Axis, Collective]]] = frozenset({("dp_cp", "all_reduce")})

RULES: Final = (
    Rule("executor-axes", "the executor runs dp, tp and pp so far", _axes_not_built),
    Rule("executor-zero", "the executor keeps whole optimizer states (zero_stage 0)", _sharded),
    Rule("executor-interleaving", "the executor runs gpipe and 1f1b so far", _interleaved),
    Rule(
        "executor-sequence-parallel",
        "the executor's tensor parallelism keeps activations whole",
        _sequence_parallel,
    ),
    Rule("executor-kv-heads", "tp must divide the key/value heads", _kv_heads_below_tp),
    Rule(
        "executor-recompute",
        "the executor recomputes whole layers or nothing",
        _selective_recompute,
    ),
    Rule(
        "executor-micro-batches",
        "torch's 1F1B needs num_micro_batches >= pp",
        _too_few_micro_batches,
    ),
)
