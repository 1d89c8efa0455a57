"""Layout candidates as columns: one numpy array per field, one row per candidate.

One row and a million rows run through the same code. Fields that are a choice of words hold the
index of the word (``CONTEXT_EXCHANGES``, ``RANK_ORDERS``, ``RECOMPUTE_MODES``, ``SCHEDULES``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from planner.plan import ContextExchange, Layout, RankOrder, RecomputeMode, ScheduleName

__all__ = [
    "CONTEXT_EXCHANGES",
    "DP_OUTERMOST",
    "RANK_ORDERS",
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "Candidates",
    "Column",
    "concatenate",
    "distinct",
    "replaced",
]

# A column: shape [rows], or anything that broadcasts to it.
Column: TypeAlias = npt.NDArray[Any]

CONTEXT_EXCHANGES: Final[tuple[ContextExchange, ...]] = get_args(ContextExchange)
RANK_ORDERS: Final[tuple[RankOrder, ...]] = get_args(RankOrder)
DP_OUTERMOST: Final = RANK_ORDERS.index("tp-cp-ep-pp-dp")
RECOMPUTE_MODES: Final[tuple[RecomputeMode, ...]] = get_args(RecomputeMode)
SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)


# Mixed-radix keys of distinct(): a wide column is renumbered, and a key near overflow too.
_MAX_SPAN: Final = 4096
_MAX_KEY: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns of shape [rows]; degrees as in ``planner.plan.Layout``.

    ``split`` is a row of the problem's ``planner.pipeline.partition.SplitTable``.
    ``recompute_layers`` counts the layers of every chunk that are recomputed, 0 = all of them.
    """

    tp: Column
    cp: Column
    pp: Column
    ep: Column
    etp: Column
    dp_shard: Column
    dp_replicate: Column
    virtual_stages: Column
    schedule: Column
    split: Column
    micro_batch_size: Column
    num_micro_batches: Column
    recompute: Column
    recompute_layers: Column
    zero_stage: Column
    sequence_parallel: Column
    context_exchange: Column
    order: Column

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Column:
        """Data-parallel degree."""
        return self.dp_shard * self.dp_replicate

    @property
    def stage_size(self) -> Column:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> Column:
        """Data-parallel degree of the experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def stages_between(self) -> Column:
        """Runs of tp * cp ranks from one data-parallel rank to the next.

        With data parallelism outermost one of every stage; 1 where a stage's ranks are consecutive.
        """
        return np.where((self.order == DP_OUTERMOST) & (self.dp > 1), self.pp, 1)

    def take(self, rows: npt.NDArray[Any] | slice) -> "Candidates":
        """Return the chosen rows: indices, a mask or a slice."""
        return Candidates(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def with_recompute(self, mode: RecomputeMode) -> "Candidates":
        """Return the same rows with another recompute mode, of all layers."""
        return replace(
            self,
            recompute=np.full(len(self), RECOMPUTE_MODES.index(mode)),
            recompute_layers=np.zeros(len(self), dtype=np.int64),
        )

    def layout(self, row: int) -> Layout:
        """Return the degrees of one row as the contract spells them."""
        return Layout(**{name: int(getattr(self, name)[row]) for name in Layout.model_fields})


def replaced(candidates: Candidates, **columns: Column) -> Candidates:
    """Return the same rows with other ``columns``."""
    return replace(candidates, **columns)


def concatenate(parts: Sequence[Candidates]) -> Candidates:
    """Return the rows of all ``parts``, in order."""
    return Candidates(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Candidates)}
    )


def distinct(candidates: Candidates, names: Sequence[str]) -> tuple[Candidates, Column]:
    """Return one row per distinct value of the columns ``names``, and each row's index in them.

    A term is priced on the columns it depends on and gathered: a million rows have a few hundred
    distinct (tp, cp, ep, etp, micro-batch).
    """
    key = np.zeros(len(candidates), dtype=np.int64)
    for name in names:
        column = np.asarray(getattr(candidates, name), dtype=np.int64)
        low = int(column.min(initial=0))
        span = int(column.max(initial=0)) - low + 1
        if span > _MAX_SPAN:
            values, column = np.unique(column, return_inverse=True)
            low, span = 0, len(values)
        if key.max(initial=0) > _MAX_KEY // span:
            _, key = np.unique(key, return_inverse=True)
        key = key * span + (column - low)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return candidates.take(first), inverse
