"""Every legal layout with its micro-batches, recompute and ZeRO choices, as columns.

First the degrees (``tp·cp·dp·pp = etp·ep·edp·pp = world``), then what can vary within a layout.
Rows that break a rule are dropped and counted under the rule's name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from planner.cost.problem import Problem
from planner.errors import InvalidInputError
from planner.frameworks import rules_for
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    DP_OUTERMOST,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
    concatenate,
)
from planner.model.spec import ModelSpec
from planner.request import Constraints
from planner.search.orders import rank_orders

__all__ = ["Space", "divisors", "enumerate_candidates", "legal_rows", "pipelines"]

# Larger micro-batches only cost memory: a GPU is full with a few thousand tokens.
MAX_MICRO_BATCH_SIZE: Final = 64
MAX_VIRTUAL_STAGES: Final = 12
_FULL: Final = RECOMPUTE_MODES.index("full")
_MAX_ROWS: Final = 20_000_000


class _Degrees(NamedTuple):
    """One factorization; fields are columns of ``Candidates``."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    dp_shard: int
    dp_replicate: int
    virtual_stages: int
    zero_stage: int
    context_exchange: int
    order: int

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_shard * self.dp_replicate


@dataclass(frozen=True, slots=True)
class Space:
    """Candidates that obey all rules, and how many fell to each rule.

    ``num_candidates`` counts both.
    """

    candidates: Candidates
    rejected: dict[str, int]
    num_candidates: int


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def pipelines(model: ModelSpec, world_size: int, constraints: Constraints) -> list[tuple[int, int]]:
    """Return the (pp, virtual stages) that leave every stage a layer; interleaving needs pp >= 2.

    Chunks are of one length, but the first and the last may lack a layer (they have embedding and
    head): shorter chunks elsewhere would only make the others wait.
    """
    found: list[tuple[int, int]] = []
    for pp in divisors(world_size):
        if pp > model.num_layers:
            break
        chunks = range(1, min(MAX_VIRTUAL_STAGES, model.num_layers // pp) + 1) if pp > 1 else [1]
        found += [
            (pp, v)
            for v in chunks
            if (v == 1 or -model.num_layers % (pp * v) <= 2)
            and _allowed(constraints.pp, pp)
            and _allowed(constraints.virtual_stages, v)
        ]
    return found


def enumerate_candidates(problem: Problem, constraints: Constraints) -> Space:
    """Return the space of one request.

    Raises:
        InvalidInputError: No layout can be built at all: a constraint contradicts the world
            size, or the batch divides over no data-parallel degree.
    """
    batch = problem.training.global_batch_size
    layouts = list(_layouts(problem, constraints))
    if not layouts:
        raise InvalidInputError(_no_layout(problem, constraints), where="constraints")
    divisible = [layout for layout in layouts if batch % layout.dp == 0]
    if not divisible:
        raise InvalidInputError(
            _no_batch(batch, {layout.dp for layout in layouts}), where="training"
        )
    rejected: dict[str, int] = {}
    if len(layouts) > len(divisible):
        rejected["batch: dp must divide global_batch_size"] = len(layouts) - len(divisible)
    legal = [
        legal_rows(problem, block, rejected) for block in _blocks(problem, divisible, constraints)
    ]
    total = sum(len(c) for c in legal) + sum(rejected.values())
    if not legal:
        raise InvalidInputError(_no_variant(problem, divisible, constraints), where="constraints")
    return Space(concatenate(legal), rejected, total)


def legal_rows(problem: Problem, block: Candidates, rejected: dict[str, int]) -> Candidates:
    """Return the rows that break no rule; count the others under the first rule they break."""
    keep = np.ones(len(block), dtype=bool)
    for rule in rules_for(problem.framework):
        broken = np.asarray(rule.breaks(block, problem.model, problem.training)) & keep
        if broken.any():
            name = f"{rule.name}: {rule.reason}"
            rejected[name] = rejected.get(name, 0) + int(broken.sum())
            keep &= ~broken
    return block.take(keep)


def _layouts(problem: Problem, constraints: Constraints) -> Iterator[_Degrees]:
    """Yield every factorization of the world."""
    model, world = problem.model, problem.fabric.num_gpus
    largest_tp = min(model.attention.num_heads, world)
    for pp, v in pipelines(model, world, constraints):
        for tp in divisors(world // pp):
            if tp > largest_tp or not _allowed(constraints.tp, tp):
                continue
            for cp in divisors(world // pp // tp):
                if not _allowed(constraints.cp, cp):
                    continue
                dp = world // (pp * tp * cp)
                if not _allowed(constraints.dp, dp):
                    continue
                for (ep, etp), (shard, replicate, zero), exchange, order in _choices(
                    problem, constraints, tp=tp, cp=cp, dp=dp, pp=pp
                ):
                    yield _Degrees(tp, cp, pp, ep, etp, shard, replicate, v, zero, exchange, order)


def _choices(
    problem: Problem, constraints: Constraints, *, tp: int, cp: int, dp: int, pp: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int, int], int, int]]:
    """Yield ((ep, etp), (dp_shard, dp_replicate, ZeRO), exchange of keys, order) of one layout."""
    for order in rank_orders(problem.fabric, tp=tp, cp=cp, dp=dp, pp=pp, held=constraints.order):
        stride = tp * cp * (pp if order == DP_OUTERMOST else 1)  # of data-parallel ranks
        yield from product(
            _expert_degrees(problem.model, tp, tp * cp * dp, constraints),
            _sharding(problem, stride, cp, dp, constraints),
            _context_exchanges(cp, constraints),
            (order,),
        )


def _context_exchanges(cp: int, constraints: Constraints) -> list[int]:
    """Return the ways that cp ranks exchange keys and values; alone there is nothing to choose."""
    words = CONTEXT_EXCHANGES if cp > 1 else ("ring",)
    return [
        CONTEXT_EXCHANGES.index(word)
        for word in words
        if _allowed(constraints.context_exchange, word)
    ]


def _expert_degrees(
    model: ModelSpec, tp: int, stage_size: int, constraints: Constraints
) -> list[tuple[int, int]]:
    """Return (ep, etp): experts whole or split as widely as the dense layers."""
    if model.experts is None:
        degrees = [(1, 1)]
    else:
        degrees = [
            (ep, etp)
            for etp in sorted({1, tp})
            for ep in divisors(model.experts.num_experts)
            if stage_size % (ep * etp) == 0
        ]
    return [
        (ep, etp)
        for ep, etp in degrees
        if _allowed(constraints.ep, ep) and _allowed(constraints.etp, etp)
    ]


def _sharding(
    problem: Problem, stride: int, cp: int, dp: int, constraints: Constraints
) -> list[tuple[int, int, int]]:
    """Return (dp_shard, dp_replicate, zero_stage): replicas, full sharding, sharding in a unit.

    Hybrid sharding keeps the shard group inside one unit of a fabric level, or makes it as large
    as asked; it is offered for ZeRO-1 and 3 on dense models. ``stride`` is from one data-parallel
    rank to the next.
    """
    found = [(1, dp, 0)]
    if dp > 1:
        found += [(dp, 1, zero) for zero in (1, 2, 3)]
        if problem.model.experts is None:
            units = {
                size for lv in problem.fabric.levels for size in lv.unit_sizes or (lv.unit_size,)
            }
            sizes = {size // stride for size in units}
            sizes |= {constraints.dp_shard or 1, dp // (constraints.dp_replicate or dp)}
            found += [
                (shard, dp // shard, zero)
                for shard in sorted(sizes)
                if 1 < shard < dp and dp % shard == 0
                for zero in (1, 3)
            ]
    elif cp > 1:  # cp ranks share out dense states even where dp is 1
        found += [(1, 1, 1)]
    return [
        (shard, replicate, zero)
        for shard, replicate, zero in found
        if _allowed(constraints.dp_shard, shard)
        and _allowed(constraints.dp_replicate, replicate)
        and _allowed(constraints.zero_stage, zero)
    ]


def _blocks(
    problem: Problem, layouts: Sequence[_Degrees], constraints: Constraints
) -> Iterator[Candidates]:
    """Yield layouts crossed with their variants, one block per (pp, virtual stages, dp).

    Blocks keep what is rejected from ever lying in memory together.
    """
    groups: dict[tuple[int, int, int], list[_Degrees]] = {}
    for layout in layouts:
        groups.setdefault((layout.pp, layout.virtual_stages, layout.dp), []).append(layout)
    batch, num_rows = problem.training.global_batch_size, 0
    held = constraints.recompute_layers or 0
    for (pp, v, dp), members in groups.items():
        variants = list(_variants(problem, pp, v, batch // dp, constraints))
        num_rows += len(members) * len(variants)
        if num_rows > _MAX_ROWS:
            raise InvalidInputError(
                f"the request spans more than {_MAX_ROWS} candidates; hold tp, pp or "
                "micro_batch_size fixed in constraints",
                where="constraints",
            )
        if variants and len(block := _cross(members, variants, batch, held)):
            yield block


def _cross(
    layouts: Sequence[_Degrees], variants: Sequence[tuple[int, ...]], batch: int, held_layers: int
) -> Candidates:
    """Return every layout with every variant."""
    degrees = np.repeat(np.array(layouts, dtype=np.int64), len(variants), axis=0)
    variant = np.tile(np.array(variants, dtype=np.int64), (len(layouts), 1))
    real = (degrees[:, 0] > 1) | (variant[:, 4] == 0)  # sequence parallel needs tp
    degrees, variant = degrees[real], variant[real]
    columns = dict(zip(_Degrees._fields, degrees.T, strict=True))
    split, schedule, micro_batch_size, recompute, sequence_parallel = variant.T
    sequences = columns["dp_shard"] * columns["dp_replicate"] * micro_batch_size
    return Candidates(
        **columns,
        schedule=schedule,
        split=split,
        micro_batch_size=micro_batch_size,
        num_micro_batches=batch // sequences,
        recompute=recompute,
        recompute_layers=np.where(recompute == _FULL, held_layers, 0),
        sequence_parallel=sequence_parallel.astype(bool),
    )


def _variants(
    problem: Problem, pp: int, v: int, sequences: int, constraints: Constraints
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (split, schedule, micro-batch, recompute, sequence parallel) of one pipeline."""
    schedules = ["none"] if pp == 1 else (["interleaved_1f1b"] if v > 1 else ["1f1b", "gpipe"])
    micro_batches = [d for d in divisors(sequences) if d <= MAX_MICRO_BATCH_SIZE]
    held_layers = constraints.recompute_layers
    splits = [
        split
        for split in problem.splits.rows(pp, v)
        if held_layers is None or held_layers <= max(problem.splits.layers[split])
    ]
    for split, schedule, micro, recompute, sequence_parallel in product(
        splits, schedules, micro_batches, RECOMPUTE_MODES, (False, True)
    ):
        if (
            _allowed(constraints.schedule, schedule)
            and _allowed(constraints.micro_batch_size, micro)
            and _allowed(constraints.recompute, recompute)
            and (held_layers is None or recompute == "full")
            and _allowed(constraints.sequence_parallel, sequence_parallel)
        ):
            yield (
                int(split),
                [*SCHEDULES].index(schedule),  # type: ignore[arg-type]  # from the list above
                micro,
                RECOMPUTE_MODES.index(recompute),
                int(sequence_parallel),
            )


def _allowed(constraint: object, value: object) -> bool:
    return constraint is None or constraint == value


def _no_layout(problem: Problem, constraints: Constraints) -> str:
    """Say which constraint cannot be met, or which to drop; what is offered was tried."""
    world, held = problem.fabric.num_gpus, constraints.model_dump(exclude_none=True)
    said = ", ".join(f"{name}={value}" for name, value in held.items())
    for name, value in held.items():
        alone = Constraints.model_validate({name: value})
        if not any(True for _ in _layouts(problem, alone)):
            return (
                f"constraints.{name}={value}: no layout of {world} ranks has it; "
                f"{_why_never(problem, name)}"
            )
    enough = [
        name
        for name in held
        if any(True for _ in _layouts(problem, constraints.model_copy(update={name: None})))
    ]
    drop = f"dropping {' or '.join(enough)} helps" if enough else "drop several of them"
    return f"no layout of {world} ranks satisfies all of {said} together; {drop}"


def _why_never(problem: Problem, name: str) -> str:
    model, world = problem.model, problem.fabric.num_gpus
    degrees = f"a degree must divide the {world} ranks"
    reasons = {
        "tp": f"{degrees}, and be at most the {model.attention.num_heads} attention heads",
        "pp": f"{degrees}, and be at most the {model.num_layers} layers",
        "virtual_stages": f"at most {MAX_VIRTUAL_STAGES}, and pp * virtual_stages must cut the "
        f"{model.num_layers} layers evenly but for the ends",
        "zero_stage": "sharing out needs data-parallel or context-parallel ranks",
        "dp_shard": f"{degrees}; with experts, shards fill all of dp",
        "context_exchange": "gathering keys and values needs context-parallel ranks",
        "order": "dp outermost needs dp and pp of at least 2, and no context-parallel ranks",
    }
    if name in ("ep", "etp"):
        if model.experts is None:
            return f"{model.name} has no experts; leave it out"
        return (
            f"ep must divide the {model.experts.num_experts} experts, etp is 1 or tp, and both "
            "must divide the ranks of a stage"
        )
    return reasons.get(name, degrees)


def _no_batch(batch: int, degrees: set[int]) -> str:
    smallest = min(degrees)
    nearest = max(1, round(batch / smallest)) * smallest
    return (
        f"global_batch_size={batch} divides over none of the data-parallel degrees "
        f"{sorted(degrees)[:8]}; try global_batch_size={nearest}"
    )


def _no_variant(problem: Problem, layouts: Sequence[_Degrees], constraints: Constraints) -> str:
    """Say which constraint leaves no schedule or micro-batch; the one named was tried alone."""
    mode, layers = constraints.recompute, constraints.recompute_layers
    if layers is not None and mode not in (None, "full"):
        return (
            f"constraints.recompute={mode} has no recompute_layers, but recompute_layers={layers}; "
            "try recompute=full, or leave one of them out"
        )
    batch = problem.training.global_batch_size
    shapes = {(layout.pp, layout.virtual_stages) for layout in layouts}
    most = max(
        max(problem.splits.layers[split])
        for shape in shapes
        for split in problem.splits.rows(*shape)
    )
    shares = sorted({batch // layout.dp for layout in layouts})
    reasons = {
        "schedule": "'none' needs pp=1, '1f1b' and 'gpipe' pp >= 2, 'interleaved_1f1b' also "
        "virtual_stages >= 2; of zb_1p, zb_2p and zb_v only the memory is known (commplan memory)",
        "sequence_parallel": "sequence parallelism needs tp >= 2",
        "micro_batch_size": "must divide the sequences of a data-parallel rank "
        f"({', '.join(map(str, shares[:8]))} here) and be at most {MAX_MICRO_BATCH_SIZE}",
        "recompute_layers": f"must be at most {most}, the layers of the largest stage there is; "
        "recompute=full without it recomputes all",
    }
    for name, reason in reasons.items():
        value = getattr(constraints, name)
        without = constraints.model_copy(update={name: None})
        if value is not None and any(True for _ in _blocks(problem, layouts, without)):
            return f"constraints.{name}={value} fits none of the layouts left: {reason}"
    held = ", ".join(
        f"{name}={getattr(constraints, name)}"
        for name in reasons
        if getattr(constraints, name) is not None
    )
    return f"nothing is left under {held} together; drop several of them"
