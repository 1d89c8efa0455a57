"""One layout on one cluster, as a problem and the candidate it is: what a review looks at."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from planner.cost.problem import Problem
from planner.documents import validated
from planner.errors import InvalidInputError
from planner.hardware.devices import usable_bytes
from planner.hardware.gpus import gpu_model
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    DP_OUTERMOST,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
)
from planner.model.blocks import parameter_count
from planner.plan import RecomputeMode, ScheduleName, TrainingSpec
from planner.request import Constraints, PlanRequest
from planner.resolving import build_problem, resolve
from planner.units import format_count
from planner.validate.configurations import joint_of
from planner.validate.machines import Machine, machine_document

__all__ = ["LAYOUT_FIELDS", "layout_problem", "layout_title"]

LAYOUT_FIELDS: Final = tuple(Constraints.model_fields)
_GPUS_A_NODE: Final = 8
# Schedules that a rank can run with more than one chunk of layers.
_OF_CHUNKS: Final = ("interleaved_1f1b", "zb_v")


def layout_problem(
    *,
    model: Any,
    layout: dict[str, Any],
    topology: Any,
    nodes: int | None,
    device: str | None,
    training: dict[str, Any],
    framework: str,
) -> tuple[Problem, Candidates]:
    """Return the problem of one layout and the layout as its one candidate.

    What ``layout`` leaves open: data parallelism over the ranks that are left (of ``nodes``, or
    none), sharded unless dp_shard, dp_replicate or zero_stage say else, ZeRO-1 where there are
    shards, sequence parallelism with tp, micro-batches of one sequence, no recompute, 1F1B.

    Args:
        model: As of a request.
        layout: Fields of ``Constraints``.
        topology: As of a request, or None with a ``device``.
        nodes: Of the topology; None: as many as the layout needs.
        device: A GPU by name, in nodes of eight.
        training: Fields of ``TrainingSpec``; the batch may be left out.
        framework: As of a request.

    Raises:
        InvalidInputError: The layout does not multiply out, its fields contradict each other, or
            the request cannot be.
    """
    if (topology is None) == (device is None):
        raise InvalidInputError(
            "need one of --topology and --device: what the layout runs on", where="--topology"
        )
    held = validated(Constraints, layout)
    tp, pp, cp = held.tp or 1, held.pp or 1, held.cp or 1
    if nodes is not None and topology is not None and held.dp is None and held.dp_shard is None:
        dp = _ranks_left(model, topology, nodes, framework, training, tp * pp * cp)
    else:
        dp = held.dp or (held.dp_shard or 1) * (held.dp_replicate or 1)
    micro = held.micro_batch_size or 1
    spec = validated(TrainingSpec, {"global_batch_size": dp * micro * 4 * pp, **_tuples(training)})
    world = tp * pp * cp * dp
    where = _machine(device, world) if device is not None else topology
    fields = {"topology": where, "model": model, "training": spec, "framework": framework}
    request = validated(PlanRequest, {**fields, "nodes": 1, "calibration": "none"})
    per_node = build_problem(resolve(request)).fabric.num_gpus
    needed = nodes if nodes is not None else -(-world // per_node)
    request = request.model_copy(update={"nodes": needed, "constraints": Constraints()})
    problem = build_problem(resolve(request))
    if world > problem.fabric.num_gpus:
        raise InvalidInputError(
            f"--layout: tp({tp}) * pp({pp}) * cp({cp}) * dp({dp}) = {world} ranks, but there are "
            f"{problem.fabric.num_gpus} GPUs; need at most as many, or more --nodes",
            where="--layout",
        )
    cuts = [
        p
        for p in range(1, problem.model.num_layers + 1)
        if _fills(tp * cp * dp * p, p, per_node, nodes)
    ]
    return problem, _candidate(problem, held, dp, micro, cuts)


def _fills(world: int, pp: int, per_node: int, nodes: int | None) -> bool:
    """Return whether a pipeline of ``pp`` ranks divides the GPUs of the nodes that it takes."""
    gpus = per_node * (-(-world // per_node) if nodes is None else nodes)
    return world <= gpus and gpus % pp == 0


def _tuples(training: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, one word of ``offload`` as the only one."""
    offload = training.get("offload")
    return {**training, "offload": [offload]} if isinstance(offload, str) else training


def _ranks_left(
    model: Any,
    topology: Any,
    nodes: int,
    framework: str,
    training: dict[str, Any],
    taken: int,
) -> int:
    """Return the data-parallel degree that fills ``nodes``."""
    request = validated(
        PlanRequest,
        {
            "topology": topology,
            "model": model,
            "framework": framework,
            "nodes": nodes,
            "training": {"global_batch_size": 1, **_tuples(training)},
        },
    )
    world = build_problem(resolve(request)).fabric.num_gpus
    if world % taken:
        raise InvalidInputError(
            f"--layout: tp * pp * cp = {taken} does not divide the {world} GPUs of {nodes} nodes; "
            "give dp, or other nodes",
            where="--layout",
        )
    return world // taken


def _machine(device: str, world: int) -> dict[str, Any]:
    """Return nodes of eight GPUs of a name, as a topology's document."""
    gpu = gpu_model(device)
    nodes = -(-world // _GPUS_A_NODE)
    kind = joint_of(gpu)
    per_node = 4 if kind == "nvl_domain" else _GPUS_A_NODE
    document = machine_document(
        Machine(
            gpu=gpu.name,
            library=None,
            plugin=None,
            num_nodes=nodes * _GPUS_A_NODE // per_node,
            gpus_per_node=per_node,
            num_gpus=per_node,
            intra_kind=kind,
            intra_bytes_per_s=None,
            nics_per_node=None,
            nic_bytes_per_s=None,
        )
    )
    fields = document.model_dump(mode="json")
    if gpu.device is None:
        fields["device"] = {
            "name": gpu.name,
            "memory_bytes": usable_bytes(gpu),
            "memory_bytes_per_s": gpu.memory_bytes_per_s,
            "peak_flop_per_s": dict(gpu.peak_flop_per_s),
            "source": gpu.source,
        }
    return fields


def _candidate(
    problem: Problem, held: Constraints, dp: int, micro: int, cuts: Sequence[int]
) -> Candidates:
    """Return the layout as a candidate; pipelines of a length in ``cuts`` may be offered instead.

    Raises:
        InvalidInputError: Fields contradict each other.
    """
    tp, cp, pp, chunks = held.tp or 1, held.cp or 1, held.pp or 1, held.virtual_stages or 1
    schedule = _schedule(held, pp, chunks)
    splits = problem.splits.rows(pp, chunks)
    if not len(splits):
        raise _no_cut(problem, pp, chunks, cuts)
    batch = problem.training.global_batch_size
    if batch % (dp * micro):
        raise _refusal(
            f"dp({dp}) * micro_batch_size({micro}) must divide the {batch} sequences of a step; "
            f"try --global-batch {dp * micro * 4 * pp}"
        )
    shard, replicate, zero = _sharding(held, dp, cp)
    _refuse_idle(held, tp=tp, cp=cp, pp=pp, dp=dp)
    ep, etp = _expert_degrees(problem, held, tp * cp * dp)
    recompute, layers = _recompute(held, max(problem.splits.layers[int(splits[0])]))
    values = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": ep,
        "etp": etp,
        "dp_shard": shard,
        "dp_replicate": replicate,
        "virtual_stages": chunks,
        "schedule": SCHEDULES.index(schedule),
        "split": int(splits[0]),
        "micro_batch_size": micro,
        "num_micro_batches": batch // (dp * micro),
        "recompute": RECOMPUTE_MODES.index(recompute),
        "recompute_layers": layers,
        "zero_stage": zero,
        "sequence_parallel": tp > 1 if held.sequence_parallel is None else held.sequence_parallel,
        "context_exchange": CONTEXT_EXCHANGES.index(held.context_exchange or "ring"),
        "order": RANK_ORDERS.index(held.order or RANK_ORDERS[0]),
    }
    return Candidates(**{name: np.array([value]) for name, value in values.items()})


def _refusal(message: str) -> InvalidInputError:
    return InvalidInputError(f"--layout: {message}", where="--layout")


def _schedule(held: Constraints, pp: int, chunks: int) -> ScheduleName:
    """Return the schedule that is held, or the usual one of such a pipeline."""
    if pp == 1 and chunks > 1:
        raise _refusal(f"virtual_stages={chunks} needs pp of at least 2; leave it out, or give pp")
    usual: ScheduleName = "none" if pp == 1 else ("interleaved_1f1b" if chunks > 1 else "1f1b")
    asked = held.schedule or usual
    if pp == 1 and asked != "none":
        raise _refusal(f"schedule={asked} needs pp of at least 2; try schedule=none, or give pp")
    if pp > 1 and asked == "none":
        raise _refusal(f"schedule=none cannot run pp({pp}); try schedule={usual}")
    if asked == "interleaved_1f1b" and chunks == 1:
        raise _refusal(f"schedule={asked} needs virtual_stages of at least 2; try virtual_stages=2")
    if chunks > 1 and asked not in _OF_CHUNKS:
        raise _refusal(
            f"schedule={asked} has one chunk of layers per rank, but virtual_stages={chunks}; try "
            "schedule=interleaved_1f1b, or leave virtual_stages out"
        )
    return asked


def _no_cut(problem: Problem, pp: int, chunks: int, cuts: Sequence[int]) -> InvalidInputError:
    """Say which pipelines there are instead: of as many chunks, or as long."""
    table = problem.splits
    lengths = sorted({int(p) for p in table.pp[table.virtual_stages == chunks]} & {*cuts})
    counts = sorted({int(v) for v in table.virtual_stages[table.pp == pp]})
    tries = [
        f"{name}={', '.join(map(str, found))}"
        for name, found in (("pp", lengths), ("virtual_stages", counts))
        if found
    ]
    return _refusal(
        f"pp({pp}) * virtual_stages({chunks}) does not cut the {problem.model.num_layers} layers "
        f"evenly but for the ends, with pp a divisor of the {problem.fabric.num_gpus} GPUs of the "
        f"nodes; try {' or '.join(tries) or 'fewer stages'}"
    )


def _sharding(held: Constraints, dp: int, cp: int) -> tuple[int, int, int]:
    """Return dp_shard, dp_replicate and the ZeRO stage: dp is the product of the first two."""
    shard, replicate = held.dp_shard, held.dp_replicate
    if shard is None and replicate is None:
        shard = 1 if held.zero_stage == 0 else dp
    shard = shard or dp // (replicate or 1)
    replicate = replicate or dp // shard
    if shard * replicate != dp:
        by = f"dp_shard({held.dp_shard})" if held.dp_shard else "dp_shard"
        times = f"dp_replicate({held.dp_replicate})" if held.dp_replicate else "dp_replicate"
        made = f" = {shard * replicate}" if held.dp_shard and held.dp_replicate else ""
        instead = f"dp={shard * replicate}, or " if shard * replicate else ""
        raise _refusal(
            f"dp({dp}) must be {by} * {times}{made}; try {instead}leave one out of the three"
        )
    zero = int(shard * cp > 1) if held.zero_stage is None else held.zero_stage
    if zero == 0 and shard > 1:
        raise _refusal(
            f"zero_stage=0 shares nothing out, but dp_shard is {shard}; try dp_replicate={dp} in "
            "its place, or zero_stage=1"
        )
    if zero and dp > 1 and shard * cp == 1:
        raise _refusal(
            f"zero_stage={zero} has no ranks to share over: dp_replicate is all of dp({dp}); try "
            f"dp_shard={dp} in its place, or zero_stage=0"
        )
    return shard, replicate, zero


def _refuse_idle(held: Constraints, *, tp: int, cp: int, pp: int, dp: int) -> None:
    """Refuse choices about an axis that is off."""
    if held.sequence_parallel and tp == 1:
        raise _refusal("sequence_parallel=true needs tp of at least 2; leave it out, or give tp")
    if held.context_exchange not in (None, "ring") and cp == 1:
        raise _refusal(
            f"context_exchange={held.context_exchange} needs cp of at least 2; leave it out, or "
            "give cp"
        )
    is_outermost = held.order is not None and RANK_ORDERS.index(held.order) == DP_OUTERMOST
    if is_outermost and (pp == 1 or dp == 1 or cp > 1):
        raise _refusal(
            f"order={held.order} needs dp and pp of at least 2 and no cp, but dp is {dp}, pp {pp}, "
            f"cp {cp}; leave it out"
        )


def _expert_degrees(problem: Problem, held: Constraints, stage: int) -> tuple[int, int]:
    """Return ep and etp of the ``stage`` ranks of a pipeline stage."""
    ep, etp = held.ep or 1, held.etp or 1
    if stage % (ep * etp):
        raise _refusal(f"ep({ep}) * etp({etp}) must divide the {stage} ranks of a stage")
    if ep * etp > 1 and problem.model.experts is None:
        raise _refusal(
            f"ep({ep}) * etp({etp}), but {problem.model.name} has no experts; leave them out"
        )
    return ep, etp


def _recompute(held: Constraints, most: int) -> tuple[RecomputeMode, int]:
    """Return the mode and the layers of every chunk, of at most ``most``; 0 = all."""
    layers = held.recompute_layers or 0
    mode = held.recompute or ("full" if layers else "none")
    if layers and mode != "full":
        raise _refusal(
            f"recompute={mode} has no recompute_layers, but {layers} are given; try "
            "recompute=full, or leave recompute_layers out"
        )
    if layers > most:
        raise _refusal(
            f"recompute_layers={layers} must be at most {most}, the layers of the largest stage; "
            "try recompute=full alone, which recomputes all"
        )
    return mode, layers


def layout_title(problem: Problem, one: Candidates) -> str:
    """Return model, layout, batch and device of a candidate in one line."""
    layout, training = one.layout(0), problem.training
    mode = RECOMPUTE_MODES[int(one.recompute[0])]
    some = f" of {int(one.recompute_layers[0])} layers" if one.recompute_layers[0] else ""
    return (
        f"{problem.model.name} ({format_count(parameter_count(problem.model))} parameters), "
        f"{layout}, ZeRO-{int(one.zero_stage[0])}, {'no' if mode == 'none' else mode} "
        f"recompute{some}, micro-batches of {int(one.micro_batch_size[0])} x "
        f"{training.seq_len:,} tokens, {training.precision}, on {layout.world_size:,} x "
        f"{problem.device.name}"
    )
