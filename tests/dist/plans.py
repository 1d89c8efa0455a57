"""Valid plans for small jobs, made by hand: the executor's tests do not depend on the planner."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.plan import (
    Algorithm,
    Axis,
    BatchSplit,
    Breakdown,
    CallPath,
    Collective,
    CollectiveChoice,
    ContextExchange,
    ExpertCapacity,
    Interval,
    Layout,
    MemoryParts,
    Method,
    ModelSummary,
    Pipeline,
    Plan,
    Prediction,
    Probe,
    Provenance,
    RankOrder,
    RankRule,
    ScheduleName,
    Sharding,
    SizeThreshold,
    Stage,
    StageMemory,
    TrainingSpec,
)

# examples/train_gpt.py with tests/dist/tiny-gpt.json.
TINY = ModelSummary(
    name="tiny-gpt",
    num_layers=4,
    hidden_size=32,
    vocab_size=256,
    num_params=2 * 256 * 32 + 32 + 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32),
    num_active_params=1,
    fingerprint="tiny",
)


def stages_of(
    pp: int, num_layers: int, layers: tuple[int, ...] | None = None, virtual_stages: int = 1
) -> tuple[Stage, ...]:
    """Return ``pp * virtual_stages`` stages with ``layers`` layers each, or as even as possible."""
    stages = pp * virtual_stages
    counts = layers or tuple(
        num_layers // stages + (1 if stage < num_layers % stages else 0) for stage in range(stages)
    )
    return tuple(
        Stage(
            pp_rank=stage % pp,
            chunk=stage // pp,
            first_layer=sum(counts[:stage]),
            num_layers=count,
            embedding=stage == 0,
            head=stage == stages - 1,
        )
        for stage, count in enumerate(counts)
    )


def all_reduce_choice(
    layout: Layout, axis: Axis, algorithm: Algorithm, path: CallPath = "library"
) -> CollectiveChoice:
    """Return the choice of one method for gradients of every size."""
    return CollectiveChoice(
        axis=axis,
        op="all_reduce",
        group_size=layout.degree(axis),
        size_bytes=1 << 20,
        algorithm=algorithm,
        path=path,
        predicted_s=0.01,
        runner_up=None,
        runner_up_s=None,
        thresholds=(SizeThreshold(up_to_bytes=None, algorithm=algorithm, path=path),),
    )


def choice_of(
    layout: Layout, axis: Axis, op: Collective, steps: Sequence[tuple[int | None, Method]]
) -> CollectiveChoice:
    """Return the choice of methods by size, the last of them open."""
    algorithm, path = steps[-1][1]
    return all_reduce_choice(layout, axis, algorithm, path).model_copy(
        update={
            "op": op,
            "thresholds": tuple(
                SizeThreshold(up_to_bytes=size, algorithm=m.algorithm, path=m.path)
                for size, m in steps
            ),
        }
    )


def make_plan(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = 1,
    dp_shard: int = 1,
    virtual_stages: int = 1,
    zero_stage: int = 0,
    context_exchange: ContextExchange = "ring",
    model: ModelSummary = TINY,
    schedule: ScheduleName | None = None,
    layers: tuple[int, ...] | None = None,
    micro_batch_size: int = 1,
    global_batch_size: int = 8,
    seq_len: int = 16,
    precision: str = "fp64",
    optimizer: str = "adamw",
    ranks_per_node: int = 4,
    ranks_per_unit: int | None = None,
    units: tuple[tuple[int, ...], ...] | None = None,
    outer_units: tuple[tuple[int, ...], ...] | None = None,
    order: RankOrder = "tp-cp-ep-dp-pp",
    gradient_algorithm: Algorithm = "ring",
    methods: Mapping[tuple[Axis, Collective], Sequence[tuple[int | None, Method]]] | None = None,
    bucket_bytes: int = 100_000,
    probes: tuple[Probe, ...] = (),
    expert_capacity: ExpertCapacity | None = None,
    **changes: Any,
) -> Plan:
    """Return a plan for one layout; ``changes`` replace whole fields of the plan.

    ``dp`` counts replicas, ``dp_shard`` of them share out states. Tensor parallelism is always
    sequence parallel. The innermost fabric unit is the emulated host unless ``ranks_per_unit`` or
    ``units`` say otherwise. ``methods`` are what other collectives take up to which size.
    """
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp_shard=dp_shard,
        dp_replicate=dp // dp_shard,
        virtual_stages=virtual_stages,
    )
    parts = MemoryParts(**dict.fromkeys(MemoryParts.model_fields, 0))
    fields: dict[str, Any] = {
        "id": f"test-tp{tp}-pp{pp}-dp{dp}",
        "topology": "local-gloo",
        "model": model,
        "framework": "executor",
        "training": TrainingSpec.model_validate(
            {
                "global_batch_size": global_batch_size,
                "seq_len": seq_len,
                "precision": precision,
                "optimizer": optimizer,
                "expert_capacity": expert_capacity,
            }
        ),
        "layout": layout,
        "ranks": RankRule(
            order=order,
            ranks_per_node=ranks_per_node,
            ranks_per_unit=ranks_per_unit or ranks_per_node,
            units=units,
            outer_units=outer_units,
        ),
        "batch": BatchSplit(
            micro_batch_size=micro_batch_size,
            num_micro_batches=global_batch_size // (micro_batch_size * dp),
        ),
        "pipeline": Pipeline(
            schedule=schedule or _usual_schedule(pp, virtual_stages),
            stages=stages_of(pp, model.num_layers, layers, virtual_stages),
        ),
        "sharding": Sharding(
            zero_stage=zero_stage,
            sequence_parallel=tp > 1,
            context_exchange=context_exchange,
            overlap_gradient_reduce=False,
            overlap_parameter_gather=False,
            gradient_bucket_bytes=bucket_bytes,
        ),
        "recompute": "none",
        "collectives": (
            all_reduce_choice(layout, "dp_cp", gradient_algorithm),
            all_reduce_choice(layout, "edp", gradient_algorithm),
        )
        if methods is None
        else tuple(choice_of(layout, axis, op, steps) for (axis, op), steps in methods.items()),
        "prediction": _some_prediction(),
        "memory": tuple(
            StageMemory(pp_rank=rank, parts=parts, total_bytes=0, capacity_bytes=1)
            for rank in range(pp)
        ),
        "ops": (),
        "probes": probes,
        "runners_up": (),
        "rejected": (),
        "num_candidates": 1,
        "assumptions": (),
        "provenance": Provenance(
            commplan_version="test",
            calibration_id=None,
            calibration="none",
            simulated=False,
            sources=(),
        ),
    }
    return Plan(**(fields | changes))


def _usual_schedule(pp: int, virtual_stages: int) -> ScheduleName:
    if pp == 1:
        return "none"
    return "1f1b" if virtual_stages == 1 else "interleaved_1f1b"


def _some_prediction() -> Prediction:
    return Prediction(
        step_time_s=1.0,
        interval=Interval(low_s=0.5, high_s=2.0, basis="made up for a test"),
        breakdown=Breakdown(**dict.fromkeys(Breakdown.model_fields, 0.0)),
        tokens_per_s=1.0,
        tokens_per_s_per_gpu=1.0,
        model_flop_per_step=1.0,
        mfu=None,
        bubble_fraction=0.0,
    )
