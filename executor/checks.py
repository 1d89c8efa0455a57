"""Which plans this executor can run: one list of what it cannot honour, each by name."""

from collections.abc import Iterable, Iterator
from typing import Final

from executor.errors import PlanMismatchError, UnsupportedPlanError
from planner.methods import OWN_METHODS
from planner.plan import (
    Algorithm,
    Axis,
    Collective,
    CollectiveChoice,
    Method,
    Plan,
    TrainingSpec,
)

__all__ = ["check_plan", "unsupported_fields"]

# What gloo's own call may be planned as: it is run whatever the name is.
_AS_LIBRARY: Final[dict[Collective, frozenset[Algorithm]]] = {
    "send_recv": frozenset({"point_to_point"}),
    "all_to_all": frozenset({"singleton", "direct", "pairwise"}),
    "gather": frozenset({"singleton", "direct"}),
    "scatter": frozenset({"singleton", "direct"}),
}
# Of the training, what the executor does in one way, its default.
_ONE_WAY: Final = (
    *("master_weights", "moments", "foreach_optimizer", "fused_attention", "dropout"),
    *("fused_kernels", "fused_loss", "buffer_bytes", "gathers"),
    *("offload", "offload_layers", "offload_to", "launch", "no_overlap"),
    *("overlap_products", "overlap_experts", "dispatcher", "attention_kernel"),
    "recompute_stops_early",
)
_NEVER_CALLED: Final[tuple[Collective, ...]] = ("reduce",)
_RINGS_AND_TREES: Final[frozenset[Algorithm]] = frozenset({"singleton", "ring", "tree"})


def check_plan(plan: Plan, *, world_size: int, backend: str = "gloo") -> None:
    """Check that ``plan`` fits a job of ``world_size`` ranks and asks for nothing unknown here.

    Raises:
        PlanMismatchError: The world size differs.
        UnsupportedPlanError: Naming every field that cannot be honoured.
    """
    needed = plan.layout.world_size
    if world_size != needed:
        raise PlanMismatchError(
            f"plan {plan.id} is for {needed} ranks ({plan.layout}), this job has {world_size}; "
            f"start {needed} processes, or plan for {world_size} GPUs"
        )
    if backend != "gloo":
        raise UnsupportedPlanError(
            f"this job runs on {backend}, and the executor has run on gloo alone so far; try "
            "init_process_group('gloo')"
        )
    fields = tuple(unsupported_fields(plan))
    if fields:
        raise UnsupportedPlanError(
            f"plan {plan.id} asks for what this executor cannot do: {'; '.join(fields)}; "
            "plan again with framework='executor' and constraints that turn these off",
            fields,
        )


def unsupported_fields(plan: Plan) -> Iterator[str]:
    """Yield every field of ``plan`` that would have to be ignored, with its value."""
    layout, sharding = plan.layout, plan.sharding
    if plan.framework != "executor":
        yield f"framework={plan.framework!r}"
    if layout.etp > 1:
        yield f"layout.etp={layout.etp}"
    if sharding.zero_stage == 2:
        yield "sharding.zero_stage=2"
    if sharding.zero_stage == 0 and layout.dp_shard > 1:
        yield f"layout.dp_shard={layout.dp_shard} with sharding.zero_stage=0"
    if sharding.zero_stage == 3 and layout.degree("dp_shard_cp") == 1:
        yield "sharding.zero_stage=3 with one rank to share with (dp_shard * cp = 1)"
    if layout.tp > 1 and not sharding.sequence_parallel:
        yield f"layout.tp={layout.tp} with sharding.sequence_parallel=false"
    if sharding.sequence_parallel and layout.tp == 1:
        yield "sharding.sequence_parallel=true with layout.tp=1"
    for flag in ("overlap_gradient_reduce", "overlap_parameter_gather"):
        if getattr(sharding, flag):
            yield f"sharding.{flag}=true"
    yield from _unsupported_sequence(plan)
    if plan.training.packing is not None:
        yield "training.packing (attention does not stop at the ends of documents)"
    if plan.model.num_mtp_modules:
        yield f"model.num_mtp_modules={plan.model.num_mtp_modules}"
    if plan.recompute_layers is not None:
        yield f"recompute_layers={plan.recompute_layers}"
    if plan.recompute == "selective":
        yield "recompute='selective'"
    for name in _ONE_WAY:
        if (asked := getattr(plan.training, name)) != TrainingSpec.model_fields[name].default:
            yield f"training.{name}={asked!r}"
    if plan.training.main_grads == "both":
        yield "training.main_grads='both' (fp32 gradients alone are kept)"
    if plan.training.precision in ("fp16", "fp8", "mxfp8", "nvfp4"):
        yield f"training.precision={plan.training.precision!r}"
    if plan.training.precision == "bf16" and plan.training.main_grads == "same":
        yield "training.main_grads='same' with bf16 (gradients are summed in fp32)"
    if plan.ranks.node_permutation is not None:
        yield "ranks.node_permutation (order the hosts in the launcher instead)"
    if plan.ranks.left_out_gpus:
        yield f"ranks.left_out_gpus={list(plan.ranks.left_out_gpus)}"
    yield from _unsupported_pipeline(plan)
    for choice in plan.collectives:
        yield from _unsupported_choice(plan, choice)
    for probe in plan.probes:
        if probe.op in _NEVER_CALLED:
            yield f"probes: {probe.op} on {probe.axis}, which no training job calls"
        elif probe.algorithm is not None:
            method = Method(probe.algorithm, probe.path)
            yield from _unsupported_methods(plan, probe.axis, probe.op, [method])


def _unsupported_sequence(plan: Plan) -> Iterator[str]:
    """Yield why the sequence cannot be cut: two chunks per cp rank, each part over tp."""
    tp, cp, seq_len = plan.layout.tp, plan.layout.cp, plan.training.seq_len
    if cp > 1 and seq_len % (2 * cp):
        yield f"training.seq_len={seq_len} with cp={cp} (need a multiple of {2 * cp})"
    elif seq_len % (cp * tp):
        yield f"training.seq_len={seq_len} with tp*cp={tp * cp} (need a multiple of it)"


def _unsupported_pipeline(plan: Plan) -> Iterator[str]:
    pp, pipeline = plan.layout.pp, plan.pipeline
    v = plan.layout.virtual_stages
    if pp == 1 and v > 1:
        yield f"layout.virtual_stages={v} with layout.pp=1"
    expected = {"none"} if pp == 1 else ({"gpipe", "1f1b"} if v == 1 else {"interleaved_1f1b"})
    if pipeline.schedule not in expected:
        yield f"pipeline.schedule={pipeline.schedule!r} with pp={pp}, virtual_stages={v}"
    stages = [(s.pp_rank, s.chunk, s.embedding, s.head) for s in pipeline.stages]
    last = pp * v - 1
    if stages != [(n % pp, n // pp, n == 0, n == last) for n in range(pp * v)]:
        yield (
            f"pipeline.stages (need {pp * v}, in turn on the pp ranks, the embedding on the first "
            "and the head on the last)"
        )
    if pp > 1 and any(stage.num_layers == 0 for stage in pipeline.stages):
        yield "pipeline.stages with no layer"


def _unsupported_choice(plan: Plan, choice: CollectiveChoice) -> Iterator[str]:
    """Yield the methods of a choice that nothing here implements."""
    if choice.op in _NEVER_CALLED:
        yield f"collectives: {choice.op} on {choice.axis}, which no training job calls"
    elif plan.layout.degree(choice.axis) > 1:
        yield from _unsupported_methods(plan, choice.axis, choice.op, choice.methods())


def _unsupported_methods(
    plan: Plan, axis: Axis, op: Collective, methods: Iterable[Method]
) -> Iterator[str]:
    of_library = map(Method, _AS_LIBRARY.get(op, _RINGS_AND_TREES))
    known = {*of_library, *OWN_METHODS["gloo"].get(op, ())}
    for method in sorted(methods):
        if method not in known:
            yield f"collectives: {method} for {op} on {axis}"
        elif method.algorithm == "three_level" and plan.ranks.outer_units is None:
            yield f"collectives: {method} for {op} on {axis} without ranks.outer_units"
