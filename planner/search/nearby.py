"""Does one layout fit, what fills every stage of it, and which small change would make it fit.

Changes are tried one at a time, each by the cost model that prices every candidate: memory, bytes
sent, step time. The smallest is the one that slows a step least.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from planner.cost.memory import memory
from planner.cost.problem import Problem, held_gradient_bytes, weight_bytes
from planner.cost.sharing import moved_bytes
from planner.cost.step import price, timed_ops
from planner.cost.work import Communication, HostCopy
from planner.errors import PlannerError
from planner.frameworks import refused_training, rules_for
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates, replaced
from planner.layout.groups import axis_group
from planner.plan import Layout, MemoryParts, StageMemory, TrainingSpec
from planner.search.layers import fewest_recomputed
from planner.search.space import legal_rows

__all__ = [
    "Change",
    "HostTraffic",
    "MemoryReport",
    "memory_report",
    "nearby_changes",
    "stage_memory",
    "training_changes",
]


_PRICED: Final = 24


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a layout, as the cost model prices it.

    Attributes:
        what: In words.
        fields: Of the layout or of ``training``, with their new values.
        peak_bytes: Of the fullest rank, with the change.
        saved_bytes: Less than before.
        sent_bytes: More than before that a rank sends and copies per step; below 0, less.
        slower_by: Fraction of the step time; below 0 it is faster, None where it has no price.
    """

    what: str
    fields: dict[str, Any]
    peak_bytes: float
    saved_bytes: float
    sent_bytes: float
    slower_by: float | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of one layout.

    Attributes:
        layout: Which.
        stages: One entry per distinct pipeline rank, at its earliest rank.
        capacity_bytes: Of a rank.
        headroom_bytes: Of the fullest; below 0 it does not fit.
        host: What offloading moves and asks of the host's link; None without.
        changes: Found to fit, the smallest first; empty where the layout fits as it is, or where
            neither one change nor two together do.
        notes: Rules that the layout breaks, and what is left open.
    """

    layout: Layout
    stages: tuple[StageMemory, ...]
    capacity_bytes: float
    headroom_bytes: float
    host: "HostTraffic | None"
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What offloading asks of the link between a GPU and its host.

    Attributes:
        bytes_per_step: Of a rank, both ways together.
        needed_bytes_per_s: To hide it behind the step's compute.
        link_bytes_per_s: That the GPU's link moves.
        exposed_s: Of a step, that is not hidden.
    """

    bytes_per_step: float
    needed_bytes_per_s: float
    link_bytes_per_s: float
    exposed_s: float


def memory_report(problem: Problem, one: Candidates) -> MemoryReport:
    """Return the memory of the one candidate, and changes if it does not fit."""
    stages = stage_memory(problem, one)
    headroom = problem.capacity_bytes - max(stage.total_bytes for stage in stages)
    return MemoryReport(
        layout=one.layout(0),
        stages=stages,
        capacity_bytes=problem.capacity_bytes,
        headroom_bytes=headroom,
        host=_host_traffic(problem, one),
        changes=() if headroom >= 0 else nearby_changes(problem, one),
        notes=tuple(_notes(problem, one)),
    )


def stage_memory(problem: Problem, one: Candidates) -> tuple[StageMemory, ...]:
    """Return the memory of every distinct pipeline rank of one candidate, at its earliest rank."""
    parts = memory(problem, one).by_name()
    split, found = int(one.split[0]), []
    for profile in np.flatnonzero(problem.splits.multiplicity[split] > 0):
        rounded = MemoryParts(
            **{name: round(float(part[0, profile])) for name, part in parts.items()}
        )
        found.append(
            StageMemory(
                pp_rank=int(problem.splits.first_rank[split, profile]),
                parts=rounded,
                total_bytes=rounded.total_bytes(),
                capacity_bytes=round(problem.capacity_bytes),
            )
        )
    return tuple(sorted(found, key=lambda stage: stage.pp_rank))


def nearby_changes(problem: Problem, one: Candidates) -> tuple[Change, ...]:
    """Return changes of a layout that fit, those that slow a step least first.

    Single changes, or where none fits, two together. Tried are: sequence parallelism, recompute
    (cheap tensors, as few layers as fit, all), a smaller micro-batch, sharding more states, wider
    tp, pp, cp or ep, fewer chunks, a fused loss, narrower moments or gradients, and states on the
    host.
    """
    base = _Tried("", {}, problem, one)
    fitting = [tried for tried in _tried(base) if _fits(tried)]
    if not fitting:
        two = (second for first in _tried(base) for second in _tried(first))
        fitting = [tried for tried in two if _fits(tried)]
    # of many pairs those with the largest peak change least; pricing takes longer than memory
    fitting = sorted(fitting, key=lambda tried: -_peak(tried.problem, tried.one))[:_PRICED]
    before, sent, peak = _step_s(problem, one), _sent_bytes(problem, one), _peak(problem, one)
    found: dict[str, Change] = {}
    for tried in fitting:
        now = _peak(tried.problem, tried.one)
        after, extra = _step_s(tried.problem, tried.one), _sent_bytes(tried.problem, tried.one)
        slower = after / before - 1 if after is not None and before is not None else None
        moved = extra - sent if extra is not None and sent is not None else 0.0
        found[json.dumps(tried.fields, sort_keys=True, default=str)] = Change(
            tried.what, tried.fields, now, peak - now, moved, slower
        )
    return tuple(
        sorted(found.values(), key=lambda c: (c.slower_by is None, c.slower_by or 0.0, c.what))
    )


def _fits(tried: "_Tried") -> bool:
    if not len(legal_rows(tried.problem, tried.one, {})):
        return False
    return _peak(tried.problem, tried.one) <= tried.problem.capacity_bytes


def _peak(problem: Problem, one: Candidates) -> float:
    return float(memory(problem, one).total_bytes().max())


def _step_s(problem: Problem, one: Candidates) -> float | None:
    try:
        return float(price(problem, one).step_time_s()[0])
    except PlannerError:
        return None


def _sent_bytes(problem: Problem, one: Candidates) -> float | None:
    """Return bytes that a rank sends to others, and over the host's link, per step."""
    try:
        ops = timed_ops(problem, one)
    except PlannerError:
        return None
    sizes = 0.0
    for op in ops:
        timed = op.timed.op
        if isinstance(timed, Communication):
            group = axis_group(problem.fabric, one, timed.axis)
            sent = moved_bytes(timed.op, group, timed.size_bytes)
            sizes += float(sent[0] * op.repeats[0])
        elif isinstance(timed, HostCopy) and timed.over == "link":
            sizes += float(timed.num_bytes[0] * op.repeats[0])
    return sizes


def _host_traffic(problem: Problem, one: Candidates) -> HostTraffic | None:
    if not problem.training.offload:
        return None
    try:
        ops = timed_ops(problem, one)
        compute = float(price(problem, one).compute_s[0])
    except PlannerError:
        return None
    moved = took = exposed = 0.0
    for op in ops:
        copy = op.timed.op
        if isinstance(copy, HostCopy) and copy.over == "link":
            moved += float(copy.num_bytes[0] * op.repeats[0])
            took += float(op.timed.seconds[0] * op.repeats[0])
            exposed += float(op.exposed_s[0])
    return HostTraffic(moved, moved / compute, moved / took if took else 0.0, exposed)


def _notes(problem: Problem, one: Candidates) -> Iterator[str]:
    for rule in rules_for(problem.framework):
        if np.asarray(rule.breaks(one, problem.model, problem.training)).any():
            yield f"{problem.framework} refuses it ({rule.name}): {rule.reason}"
    training = problem.training
    if not training.fused_attention:
        yield "score matrices are stored; their reading and writing is not in the step time"
    if "optimizer" in training.offload:
        yield "the host updates its states at an assumed rate of its memory"


# ------------------------------------------------------------------------------ what is tried


class _Tried(NamedTuple):
    """A changed problem and candidate, with what was changed in words and in fields."""

    what: str
    fields: dict[str, Any]
    problem: Problem
    one: Candidates

    def further(
        self, what: str, fields: dict[str, Any], problem: Problem, one: Candidates
    ) -> "_Tried":
        """Return one more change on top of this one."""
        joined = f"{self.what} and {what}" if self.what else what
        training = {**self.fields.get("training", {}), **fields.get("training", {})}
        both = {**self.fields, **fields, **({"training": training} if training else {})}
        return _Tried(joined, both, problem, one)


def _tried(base: _Tried) -> Iterator[_Tried]:
    """Yield every change that can be made."""
    problem, one = base.problem, base.one
    for what, columns in _columns(problem, one):
        candidate = _with(problem, one, columns)
        if candidate is not None:
            yield base.further(what, columns, problem, candidate)
    if int(one.recompute[0]) != RECOMPUTE_MODES.index("full"):
        some = fewest_recomputed(problem, one)
        if len(some):
            layers = int(some.recompute_layers[0])
            fields = {"recompute": "full", "recompute_layers": layers}
            yield base.further(f"recompute {layers} layers of every stage", fields, problem, some)
    for what, fields in training_changes(problem.training):
        training = TrainingSpec.model_validate({**problem.training.model_dump(), **fields})
        if refused_training(problem.framework, training) is None:
            changed = replace(problem, training=training)
            yield base.further(what, {"training": fields}, changed, one)


def _columns(problem: Problem, one: Candidates) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (words, new fields) of changes to the layout on as many ranks, or on twice as many."""
    at = {name: int(getattr(one, name)[0]) for name in ("tp", "pp", "cp", "ep", "zero_stage")}
    micro, recompute = int(one.micro_batch_size[0]), int(one.recompute[0])
    if at["tp"] > 1 and not one.sequence_parallel[0]:
        yield "sequence parallelism", {"sequence_parallel": True}
    if recompute == RECOMPUTE_MODES.index("none"):
        yield "recompute what is cheap and large (selective)", {"recompute": "selective"}
    if recompute != RECOMPUTE_MODES.index("full") or one.recompute_layers[0]:
        yield "recompute all layers", {"recompute": "full", "recompute_layers": 0}
    smaller = micro // 2
    while smaller >= 1:
        yield f"micro-batches of {smaller}", {"micro_batch_size": smaller}
        smaller //= 2
    shares = {1: "optimizer", 2: "optimizer and gradients", 3: "all states"}
    is_shared = int(one.dp[0] * one.cp[0]) > 1
    for zero in range(at["zero_stage"] + 1, 4 if is_shared else 2):
        what = (
            f"share out {shares[zero]}" if is_shared else "the distributed optimizer, of one rank"
        )
        yield f"ZeRO-{zero}: {what}", {"zero_stage": zero}
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            wider = {axis: at[axis] * times, "dp": int(one.dp[0]) / times}
            yield f"{axis}={at[axis] * times}, dp over {times}", wider
    if problem.model.experts is not None:
        for times in (2, 4, 8):
            yield f"ep={at['ep'] * times}", {"ep": at["ep"] * times}
    if one.virtual_stages[0] > 1:
        yield "one chunk per stage", {"virtual_stages": 1}


def training_changes(
    training: TrainingSpec, *, exact: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (words, new fields) of changes to how it is trained.

    Args:
        training: As it is.
        exact: Leave out what computes with narrower numbers.
    """
    if not training.fused_attention:
        yield "fused attention", {"fused_attention": True}
    if training.fused_loss == "none":
        yield "a fused loss", {"fused_loss": "cross_entropy"}
    if training.fused_loss != "linear":
        yield "a loss fused with the head (Liger)", {"fused_loss": "linear"}
    is_wider = held_gradient_bytes(training) > weight_bytes(training)
    if is_wider and not exact:
        yield "gradients accumulated in 16 bits", {"main_grads": "same"}
    if training.optimizer == "adamw" and training.moments == "fp32" and not exact:
        yield "moments in bf16", {"moments": "bf16"}
    if "optimizer" not in training.offload:
        kept = tuple(part for part in training.offload if part != "optimizer")
        yield "optimizer states on the host", {"offload": (*kept, "optimizer")}


def _with(problem: Problem, one: Candidates, fields: dict[str, Any]) -> Candidates | None:
    """Return the candidate with ``fields`` changed, None where they do not multiply out."""
    values = dict(fields)
    dp = values.pop("dp", int(one.dp[0]))
    if dp < 1 or dp != int(dp):
        return None
    zero = values.get("zero_stage", int(one.zero_stage[0]))
    replicate = int(one.dp_replicate[0]) if zero and int(one.zero_stage[0]) else 1
    replicate = replicate if dp % replicate == 0 else 1
    shard, replicate = (int(dp) // replicate, replicate) if zero else (1, int(dp))
    pp = values.get("pp", int(one.pp[0]))
    chunks = values.get("virtual_stages", int(one.virtual_stages[0])) if pp > 1 else 1
    splits = problem.splits.rows(pp, chunks)
    micro = values.get("micro_batch_size", int(one.micro_batch_size[0]))
    batch = problem.training.global_batch_size
    if not len(splits) or batch % (shard * replicate * micro):
        return None
    schedule = "none" if pp == 1 else ("interleaved_1f1b" if chunks > 1 else "1f1b")
    if "recompute" in values:
        values["recompute"] = RECOMPUTE_MODES.index(values["recompute"])
    values |= {
        "pp": pp,
        "dp_shard": shard,
        "dp_replicate": replicate,
        "virtual_stages": chunks,
        "split": int(splits[0]),
        "micro_batch_size": micro,
        "num_micro_batches": batch // (shard * replicate * micro),
    }
    if pp != one.pp[0] or chunks != one.virtual_stages[0]:
        values["schedule"] = [*SCHEDULES].index(schedule)  # type: ignore[arg-type]
    if values.get("tp", 1) > 1 and one.tp[0] == 1:
        values["sequence_parallel"] = True
    changed = replaced(one, **{name: np.array([value]) for name, value in values.items()})
    stage = int(changed.tp[0] * changed.cp[0] * shard * replicate)
    fits = stage % int(changed.ep[0] * changed.etp[0]) == 0
    return changed if fits else None
