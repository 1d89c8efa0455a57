"""What a request means: documents for names, nodes for an allocation, a problem for the search."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.calibrate.apply import calibrated_fabric
from planner.cost.expert_load import expert_shares
from planner.cost.problem import Problem
from planner.errors import InvalidInputError
from planner.frameworks import refused_model, refused_training
from planner.hardware.devices import Device, custom_device, device
from planner.model.blocks import block_flop_per_token, block_kinds, layer_kinds
from planner.model.bundled import load_model
from planner.model.huggingface import model_from_config
from planner.model.spec import ModelSpec
from planner.pipeline.partition import split_table
from planner.plan import Calibration, Plan, document_hash
from planner.request import HuggingFaceModel, PlanRequest
from planner.search.space import pipelines
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric, first_nodes
from planner.topology.document import DeviceFigures, TopologyDocument
from planner.topology.placement import allocated_nodes

__all__ = [
    "ResolvedRequest",
    "build_problem",
    "planned_nodes",
    "resolve",
    "slowest_device",
    "topology_fingerprint",
]


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with its documents in place of their names.

    Attributes:
        request: As it came.
        topology: The cluster.
        nodes: Numbers of the nodes asked for, ascending.
        model: The model.
        hosts: Names of an allocation's nodes, by number; empty without an allocation.
        assumptions: Of reading the allocation.
    """

    request: PlanRequest
    topology: TopologyDocument
    nodes: tuple[int, ...]
    model: ModelSpec
    hosts: dict[int, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def host(self, node: int) -> str:
        """Return the name of a node, the allocation's where there is one."""
        return self.hosts.get(node) or self.topology.host(node)


def resolve(request: PlanRequest) -> ResolvedRequest:
    """Return the request with bundled names looked up and configs read.

    Raises:
        UnknownNameError: No bundled topology or model has that name.
        InvalidInputError: A config cannot be planned, ``nodes`` is out of range, or the topology
            does not have the nodes of the allocation.
    """
    topology = (
        load_topology(request.topology) if isinstance(request.topology, str) else request.topology
    )
    if isinstance(request.model, str):
        model = load_model(request.model)
    elif isinstance(request.model, HuggingFaceModel):
        model = model_from_config(request.model.huggingface, request.model.name)
    else:
        model = request.model
    if request.allocation is None:
        return ResolvedRequest(request, topology, first_nodes(topology, request.nodes), model)
    nodes, hosts, assumed = allocated_nodes(topology, request.allocation)
    return ResolvedRequest(request, topology, nodes, model, hosts, (assumed,) if assumed else ())


def planned_nodes(resolved: ResolvedRequest, plan: Plan) -> tuple[int, ...]:
    """Return the nodes that a plan of this request runs on: weak ones may be left out.

    Raises:
        InvalidInputError: The topology does not have a host of the plan.
    """
    if plan.ranks.hosts is None:
        return resolved.nodes
    numbers = {resolved.host(node): node for node in range(resolved.topology.max_nodes)}
    unknown = [host for host in plan.ranks.hosts if host not in numbers]
    if unknown:
        raise InvalidInputError(
            f"plan {plan.id} runs on {unknown[0]!r}, which topology {resolved.topology.name!r} "
            "does not have; give the topology that was planned for",
            where="topology",
        )
    return tuple(sorted(numbers[host] for host in plan.ranks.hosts))


def topology_fingerprint(topology: TopologyDocument) -> str:
    """Return what a calibration is filed under: the hash of what the document says.

    Fields left at their default do not count, so that a new one changes no fingerprint.
    """
    return document_hash(topology.model_dump(mode="json", exclude_defaults=True))


def build_problem(
    resolved: ResolvedRequest,
    calibration: Calibration | None = None,
    nodes: Sequence[int] | None = None,
) -> Problem:
    """Return what the cost model needs: fabric, device, splits, measured scales.

    Args:
        resolved: What is asked for.
        calibration: Measured constants.
        nodes: Where it runs; None = the nodes asked for.

    Raises:
        InvalidInputError: The device cannot compute in the requested precision.
    """
    request, model = resolved.request, resolved.model
    nodes = resolved.nodes if nodes is None else nodes
    prior = compile_fabric(resolved.topology, nodes)
    hardware = slowest_device(resolved.topology, nodes)
    _check_precision(hardware, request)
    _check_length(model, request.training.seq_len)
    _check_training(model, request)
    return Problem(
        model=model,
        training=request.training,
        fabric=calibrated_fabric(prior, calibration),
        device=hardware,
        splits=split_table(
            layer_kinds(model),
            pipelines(model, prior.num_gpus, request.constraints),
            {
                kind: block_flop_per_token(
                    model, kind, request.training.seq_len, request.training.packing
                )
                for kind in block_kinds(model)
            },
            model.num_mtp_modules,
        ),
        framework=request.framework,
        compute_scale=1.0 if calibration is None else calibration.compute_scale,
        optimizer_scale=1.0 if calibration is None else calibration.optimizer_scale,
        host_overhead_s=0.0 if calibration is None else calibration.host_overhead_s,
    )


def slowest_device(topology: TopologyDocument, nodes: Sequence[int]) -> Device:
    """Return the device of the nodes; of several the slowest, with the least memory of any.

    Ranks wait for each other, and every rank holds as much.
    """
    islands = {id(island): island for node in nodes if (island := topology.island_of(node))}
    common = any(topology.island_of(node) is None for node in nodes) if islands else True
    given = [topology.device] if common else []
    found = [_device(one, topology) for one in (*given, *(i.device for i in islands.values()))]
    slowest = min(found, key=lambda one: max(one.peak_flop_per_s.values()))
    shared = set.intersection(*(set(one.peak_flop_per_s) for one in found))
    return replace(
        slowest,
        memory_bytes=min(one.memory_bytes for one in found),
        capacity_bytes=min(one.capacity_bytes for one in found),
        peak_flop_per_s={p: v for p, v in slowest.peak_flop_per_s.items() if p in shared},
    )


def _device(given: str | DeviceFigures, topology: TopologyDocument) -> Device:
    """Return the bundled device, or the one whose figures the document gives."""
    if isinstance(given, str):
        return device(given)
    return custom_device(
        name=given.name,
        memory_bytes=given.memory_bytes,
        memory_bytes_per_s=given.memory_bytes_per_s,
        peak_flop_per_s=given.peak_flop_per_s,
        source=given.source,
        is_cpu=topology.node.cores is not None,
    )


def _check_length(model: ModelSpec, seq_len: int) -> None:
    if model.learned_positions and seq_len > model.learned_positions:
        raise InvalidInputError(
            f"training.seq_len={seq_len}: {model.name} has {model.learned_positions} learned "
            "positions; use at most that many, or a spec with more learned_positions",
            where="training.seq_len",
        )


def _check_training(model: ModelSpec, request: PlanRequest) -> None:
    """Refuse what no layout makes run: on this framework, or with this model."""
    if refused := refused_training(request.framework, request.training):
        where, why = refused
        raise InvalidInputError(f"{where}={why}", where=where)
    if refused := refused_model(request.framework, model, request.training):
        where, why = refused
        raise InvalidInputError(f"{model.name}: {where}={why}", where=where)
    capacity = request.training.expert_capacity
    if capacity is not None and model.experts is None:
        raise InvalidInputError(
            f"training.expert_capacity of factor {capacity.factor:g}: {model.name} is dense; "
            "need a model with experts, or leave it out",
            where="training.expert_capacity",
        )

    for name in ("dispatcher", "overlap_experts"):
        asked = getattr(request.training, name)
        if model.experts is None and asked != type(request.training).model_fields[name].default:
            raise InvalidInputError(
                f"training.{name}={asked!r}: {model.name} is dense; need a model with experts, or "
                "leave it out",
                where=f"training.{name}",
            )
    load = request.training.expert_load
    if load is None:
        return
    if model.experts is None:
        raise InvalidInputError(
            f"training.expert_load: {model.name} is dense; need a model with experts, or leave it "
            "out",
            where="training.expert_load",
        )
    expert_shares(model.experts, len(model.moe_layers), load)


def _check_precision(hardware: Device, request: PlanRequest) -> None:
    if request.training.precision not in hardware.peak_flop_per_s:
        raise InvalidInputError(
            f"training.precision={request.training.precision!r}: {hardware.name} computes in "
            f"{', '.join(hardware.peak_flop_per_s)}",
            where="training.precision",
        )
