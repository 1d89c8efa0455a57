"""One layout on one cluster, as a problem and the candidate it is: what a review looks at."""

from typing import Any, Final

import numpy as np

from planner.cost.problem import Problem
from planner.documents import validated
from planner.errors import InvalidInputError
from planner.hardware.devices import usable_bytes
from planner.hardware.gpus import gpu_model
from planner.layout.candidates import (
    CONTEXT_EXCHANGES,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    Candidates,
)
from planner.model.blocks import parameter_count
from planner.plan import TrainingSpec
from planner.request import Constraints, PlanRequest
from planner.resolving import build_problem, resolve
from planner.units import format_count
from planner.validate.configurations import joint_of
from planner.validate.machines import Machine, machine_document

__all__ = ["LAYOUT_FIELDS", "layout_problem", "layout_title"]

LAYOUT_FIELDS: Final = tuple(Constraints.model_fields)
_GPUS_A_NODE: Final = 8


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
    none), ZeRO-1 where there is any, sequence parallelism with tp, micro-batches of one sequence,
    no recompute, 1F1B.

    Args:
        model: As of a request.
        layout: Fields of ``Constraints``.
        topology: As of a request, or None with a ``device``.
        nodes: Of the topology; None: as many as the layout needs.
        device: A GPU by name, in nodes of eight.
        training: Fields of ``TrainingSpec``; the batch may be left out.
        framework: As of a request.

    Raises:
        InvalidInputError: The layout does not multiply out, or the request cannot be.
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
    return problem, _candidate(problem, held, dp, micro)


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


def _candidate(problem: Problem, held: Constraints, dp: int, micro: int) -> Candidates:
    tp, pp, chunks = held.tp or 1, held.pp or 1, held.virtual_stages or 1
    zero = held.zero_stage if held.zero_stage is not None else int(dp * (held.cp or 1) > 1)
    replicate = held.dp_replicate or (1 if zero else dp)
    splits = problem.splits.rows(pp, chunks)
    batch = problem.training.global_batch_size
    if not len(splits):
        raise InvalidInputError(
            f"--layout: pp({pp}) * virtual_stages({chunks}) does not cut the "
            f"{problem.model.num_layers} layers evenly but for the ends",
            where="--layout",
        )
    if batch % (dp * micro) or dp % replicate:
        raise InvalidInputError(
            f"--layout: dp({dp}) * micro_batch_size({micro}) must divide the {batch} sequences of "
            f"a step, and dp_replicate({replicate}) dp; try --global-batch {dp * micro * 4 * pp}",
            where="--layout",
        )
    stage = tp * (held.cp or 1) * dp
    ep, etp = held.ep or 1, held.etp or 1
    if stage % (ep * etp):
        raise InvalidInputError(
            f"--layout: ep({ep}) * etp({etp}) must divide the {stage} ranks of a stage",
            where="--layout",
        )
    usual = "none" if pp == 1 else ("interleaved_1f1b" if chunks > 1 else "1f1b")
    layers = held.recompute_layers or 0
    values = {
        "tp": tp,
        "cp": held.cp or 1,
        "pp": pp,
        "ep": ep,
        "etp": etp,
        "dp_shard": dp // replicate,
        "dp_replicate": replicate,
        "virtual_stages": chunks,
        "schedule": [*SCHEDULES].index(held.schedule or usual),  # type: ignore[arg-type]
        "split": int(splits[0]),
        "micro_batch_size": micro,
        "num_micro_batches": batch // (dp * micro),
        "recompute": RECOMPUTE_MODES.index(held.recompute or ("full" if layers else "none")),
        "recompute_layers": layers,
        "zero_stage": zero,
        "sequence_parallel": tp > 1 if held.sequence_parallel is None else held.sequence_parallel,
        "context_exchange": CONTEXT_EXCHANGES.index(held.context_exchange or "ring"),
        "order": RANK_ORDERS.index(held.order or RANK_ORDERS[0]),
    }
    return Candidates(**{name: np.array([value]) for name, value in values.items()})


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
