"""A plan in words and shares, the same on the command line and on the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from planner.model.bundled import model_names
from planner.plan import (
    CollectiveChoice,
    Layout,
    Plan,
    RankOrder,
    RecomputeMode,
    StageMemory,
    TrainingSpec,
    Waiting,
)
from planner.search.explain import PART_LABELS
from planner.units import counted, format_bytes, format_count, format_rate, format_seconds

__all__ = [
    "Part",
    "Traffic",
    "basis",
    "closeness",
    "headline",
    "launch_command",
    "launch_notes",
    "layout_rows",
    "memory_parts",
    "ordered",
    "peak_stage",
    "recompute_words",
    "some_of",
    "time_parts",
    "traffic",
    "waiting",
]


_SHOWN_HOSTS: Final = 3
_WORTH_WAITING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a whole.

    Attributes:
        number: Place in the document; the same part has the same one in every plan.
        label: For people.
        amount: Seconds or bytes.
        share: Of the whole, 0..1.
    """

    number: int
    label: str
    amount: float
    share: float


def headline(plan: Plan) -> str:
    """Return the answer in one sentence."""
    prediction, stage = plan.prediction, peak_stage(plan)
    mfu = "" if prediction.mfu is None else f", MFU {100 * prediction.mfu:.1f} %"
    return (
        f"{plan.model.name} on {plan.layout.world_size:,} ranks of {plan.topology}: run it as "
        f"{ordered(plan.layout, plan.ranks.order)} with ZeRO-{plan.sharding.zero_stage}, "
        f"{_recompute(plan)} and micro-batches of {plan.batch.micro_batch_size}, "
        f"{format_seconds(prediction.step_time_s)} a step "
        f"({format_seconds(prediction.interval.low_s)} to "
        f"{format_seconds(prediction.interval.high_s)}), "
        f"{format_rate(prediction.tokens_per_s, 'tokens/s')}{mfu}, "
        f"{format_bytes(stage.total_bytes)} of {format_bytes(stage.capacity_bytes)} in use."
    )


def ordered(layout: Layout, order: RankOrder) -> str:
    """Return the layout in words, with the order of its axes where it is not the usual one."""
    return f"{layout}{', dp outermost' if order == 'tp-cp-ep-pp-dp' else ''}"


def basis(plan: Plan) -> str:
    """Return in one sentence what the figures rest on."""
    calibration = plan.provenance.calibration.rstrip(".")
    return f"Basis: {calibration}; interval: {plan.prediction.interval.basis.rstrip('.')}."


def closeness(choice: CollectiveChoice) -> str:
    """Return how close a collective comes to its bound, as ``94 %``; empty without a bound."""
    if not choice.bound_s or not choice.predicted_s:
        return ""
    return f"{100 * choice.bound_s / choice.predicted_s:.0f} %"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What axes send over levels: bytes of a rank and step, None where an axis does not go.

    Attributes:
        levels: Names, innermost first.
        axes: For each axis, one size a level.
    """

    levels: tuple[str, ...]
    axes: dict[str, tuple[float | None, ...]]


def traffic(plan: Plan) -> Traffic:
    """Return which axis crosses which level with how many bytes."""
    sent = {(c.axis, c.level): c.bytes_per_step for c in plan.crossings}
    levels = tuple(dict.fromkeys(c.level for c in sorted(plan.crossings, key=lambda c: c.depth)))
    axes = dict.fromkeys(crossing.axis for crossing in plan.crossings)
    return Traffic(levels, {a: tuple(sent.get((a, level)) for level in levels) for a in axes})


def some_of(hosts: Sequence[str]) -> str:
    """Return a few names and how many more: ``n3, n4 and 14 more``."""
    shown = ", ".join(hosts[:_SHOWN_HOSTS])
    more = len(hosts) - _SHOWN_HOSTS
    return f"{shown} and {more:,} more" if more > 0 else shown


def waiting(wait: Waiting) -> str:
    """Return what healthy nodes under the fewest switches would gain, in one sentence."""
    if wait.gain < _WORTH_WAITING:
        return (
            "As many healthy nodes under the fewest switches would save less than "
            f"{100 * _WORTH_WAITING:g} % of a step: nothing to wait for."
        )
    return (
        f"As many healthy nodes under the fewest switches, as {some_of(wait.hosts)}, would take "
        f"{format_seconds(wait.step_time_s)} a step: {100 * wait.gain:.1f} % less."
    )


def peak_stage(plan: Plan) -> StageMemory:
    """Return the stage closest to its memory's limit."""
    return max(plan.memory, key=lambda stage: stage.total_bytes / max(stage.capacity_bytes, 1))


def time_parts(plan: Plan) -> list[Part]:
    """Return where the step time goes, in seconds, without the parts that are zero."""
    breakdown = plan.prediction.breakdown
    total = breakdown.total_s() or 1.0
    return [
        Part(number, PART_LABELS[key], seconds, seconds / total)
        for number, (key, seconds) in enumerate(breakdown.model_dump().items())
        if seconds > 0
    ]


def memory_parts(stage: StageMemory) -> list[Part]:
    """Return what fills a rank of ``stage``, in bytes, as shares of its capacity."""
    return [
        Part(
            number, key.removesuffix("_bytes").replace("_", " "), size, size / stage.capacity_bytes
        )
        for number, (key, size) in enumerate(stage.parts.model_dump().items())
        if size > 0
    ]


def layout_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return (what, how) of every decision but the collectives, in words."""
    batch, training = plan.batch, plan.training
    model, params = plan.model, f"{format_count(plan.model.num_params)} parameters"
    if _has_experts(plan):
        params += f" ({format_count(model.num_active_params)} active)"
    return [
        ("ranks", f"{plan.layout} (order {plan.ranks.order}, {plan.ranks.ranks_per_node} a node)"),
        (
            "batch",
            f"{training.global_batch_size:,} sequences of {training.seq_len:,} tokens = "
            f"micro-batch {batch.micro_batch_size} x {batch.num_micro_batches} micro-batches "
            f"x dp {plan.layout.dp}",
        ),
        ("pipeline", _pipeline(plan)),
        ("sharding", ", ".join(_sharding(plan))),
        ("model", f"{params}, {training.precision}, {training.optimizer}"),
    ]


def launch_command(plan: Plan, plan_source: str) -> str:
    """Return the torchrun line that starts ``plan`` on every node.

    Args:
        plan: What to run.
        plan_source: URL or file that the training script reads the plan from. Megatron-LM reads
            no plan: its line has the plan's choices as arguments, and leaves model and data open;
            ``launch_notes`` says what it cannot carry.
    """
    per_node = min(plan.ranks.ranks_per_node, plan.layout.world_size)
    nodes = -(-plan.layout.world_size // per_node)
    if nodes == 1:
        where = "--standalone"
    elif plan.ranks.hosts is None:
        where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    else:  # c10d would number the nodes itself
        where = f"--nnodes {nodes} --node-rank $NODE_RANK --master-addr {plan.ranks.hosts[0]}"
    if plan.framework == "executor":
        # the example finds the config of a bundled model by its name
        config = "" if plan.model.name in model_names() else " --config config.json"
        script = f"examples/train_gpt.py --plan {plan_source}{config}"
        return f"torchrun {where} --nproc-per-node {per_node} {script}"
    script = f"pretrain_gpt.py $MODEL_AND_DATA_ARGS {' '.join(_megatron_arguments(plan))}"
    return f"{_megatron_environment(plan)}torchrun {where} --nproc-per-node {per_node} {script}"


def launch_notes(plan: Plan) -> list[str]:
    """Return what the launch line leaves open or cannot say, one sentence each."""
    notes = list(_placement_notes(plan))
    if plan.framework == "executor":
        return notes
    return [
        f"argument names are those of Megatron-LM {_MEGATRON}; no Megatron was at hand to run them",
        "$MODEL_AND_DATA_ARGS (sizes of the model, tokenizer, data, learning rate) is yours",
        "NCCL picks the algorithm of each collective; the plan's choices are not forced on it",
        *_megatron_omissions(plan),
        *notes,
    ]


def _pipeline(plan: Plan) -> str:
    """Return schedule and layers of the stages, equal neighbours told once."""
    stages = plan.pipeline.stages
    if len(stages) == 1:
        return f"one stage of {stages[0].num_layers} layers"
    runs = [(size, len(list(run))) for size, run in groupby(stage.num_layers for stage in stages)]
    layers = (
        f"{runs[0][0]} layers each"
        if len(runs) == 1
        else f"{', '.join(f'{count} of {size}' for size, count in runs)} layers"
    )
    chunks = plan.layout.virtual_stages
    each = f" ({chunks} on each of {plan.layout.pp} ranks)" if chunks > 1 else ""
    return f"{plan.pipeline.schedule}, {len(stages)} stages{each}: {layers}"


def _sharding(plan: Plan) -> Iterator[str]:
    sharding, capacity = plan.sharding, plan.training.expert_capacity
    yield f"ZeRO-{sharding.zero_stage}"
    yield "sequence parallel" if sharding.sequence_parallel else "no sequence parallel"
    if plan.layout.cp > 1:
        yield (
            "keys and values in a ring"
            if sharding.context_exchange == "ring"
            else ("keys and values gathered")
        )
    if capacity is not None:
        yield f"experts padded to a capacity of {capacity.factor:g} ({capacity.convention})"
    yield _recompute(plan)


def _recompute(plan: Plan) -> str:
    return recompute_words(plan.recompute, plan.recompute_layers)


def recompute_words(mode: RecomputeMode, layers: int | None) -> str:
    """Return what is recomputed, as ``no recompute`` or ``full recompute of 3 layers a stage``."""
    some = "" if layers is None else f" of {counted(layers, 'layer')} a stage"
    return f"{'no' if mode == 'none' else mode} recompute{some}"


def _has_experts(plan: Plan) -> bool:
    active = plan.model.num_active_params
    return active < plan.model.num_params or any(op.block.startswith("moe") for op in plan.ops)


# -------------------------------------------------------------------------------- Megatron-LM

# Names as in megatron/training/arguments.py and the dataclasses its arguments are made from.
_MEGATRON: Final = "core 0.20 (d98e8a64)"


def _is_fsdp(plan: Plan) -> bool:
    return plan.sharding.zero_stage >= 2


def _megatron_environment(plan: Plan) -> str:
    """Return the variable without which Megatron refuses to start, or an empty string.

    Its argument checks want 1 for tp or cp before Blackwell, and more than 1 for Megatron FSDP;
    32 is what its own FSDP tests set. With experts' calls beside compute they leave 1 or 32 to
    choose, by what is to overlap.
    """
    if _is_fsdp(plan) or plan.training.overlap_experts:
        return "CUDA_DEVICE_MAX_CONNECTIONS=32 "
    return "CUDA_DEVICE_MAX_CONNECTIONS=1 " if plan.layout.tp * plan.layout.cp > 1 else ""


def _megatron_arguments(plan: Plan) -> Iterator[str]:
    """Yield Megatron-LM's arguments for what the plan decides, ``_MEGATRON``'s names."""
    yield from _degree_arguments(plan)
    yield from _training_arguments(plan)
    yield from _memory_arguments(plan.training, plan.model.num_layers)
    yield from _sharding_arguments(plan)
    if plan.recompute == "selective":
        modules = "layernorm moe_act" if _has_experts(plan) else "layernorm"
        yield f"--recompute-granularity selective --recompute-modules {modules}"
    elif plan.recompute == "full":
        method, layers = (
            ("uniform", 1) if plan.recompute_layers is None else (("block", plan.recompute_layers))
        )
        yield f"--recompute-granularity full --recompute-method {method}"
        yield f"--recompute-num-layers {layers}"


def _degree_arguments(plan: Plan) -> Iterator[str]:
    """Yield the degrees and the stages.

    Letters as in Megatron's docs on custom pipeline layouts: E embedding, t decoder layer, m module
    for multi-token prediction, L loss, | between stages.
    """
    layout = plan.layout
    yield f"--tensor-model-parallel-size {layout.tp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    yield f"--context-parallel-size {layout.cp}"
    if plan.ranks.order == "tp-cp-ep-pp-dp":
        yield "--use-tp-pp-dp-mapping"
    if layout.cp > 1:
        exchange = {"ring": "p2p", "all_gather": "all_gather"}[plan.sharding.context_exchange]
        yield f"--cp-comm-type {exchange}"
    if _has_experts(plan) or layout.ep * layout.etp > 1:
        yield f"--expert-model-parallel-size {layout.ep}"
        yield f"--expert-tensor-parallel-size {layout.etp}"
        deepep = "flex --moe-flex-dispatcher-backend deepep"
        dispatcher = deepep if _deduplicates(plan) else "alltoall"
        yield f"--moe-token-dispatcher-type {dispatcher} --moe-grouped-gemm"
        if plan.training.overlap_experts:
            yield "--overlap-moe-expert-parallel-comm"
    if (capacity := plan.training.expert_capacity) is not None:
        policy = {"probability": "probs", "position": "position"}[capacity.drop]
        yield f"--moe-expert-capacity-factor {capacity.factor:g} --moe-pad-expert-input-to-capacity"
        yield f"--moe-token-drop-policy {policy}"
    if plan.model.num_mtp_modules:
        yield f"--mtp-num-layers {plan.model.num_mtp_modules}"
    if layout.pp > 1:
        stages = "|".join(
            "E" * stage.embedding
            + "t" * stage.num_layers
            + ("m" * plan.model.num_mtp_modules + "L") * stage.head
            for stage in plan.pipeline.stages
        )
        yield f"--pipeline-model-parallel-layout '{stages}'"


def _training_arguments(plan: Plan) -> Iterator[str]:
    training = plan.training
    yield f"--micro-batch-size {plan.batch.micro_batch_size}"
    yield f"--global-batch-size {training.global_batch_size}"
    yield f"--seq-length {training.seq_len}"
    yield f"--optimizer {'adam' if training.optimizer == 'adamw' else training.optimizer}"
    if training.launch == "cuda_graph":
        yield "--cuda-graph-impl local"
    low = {"fp8": "--fp8-format hybrid", "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8"}
    low["nvfp4"] = "--fp4-format e2m1 --fp4-recipe nvfp4"
    if training.precision == "bf16" or training.precision in low:
        yield "--bf16"
        if training.precision in low:
            yield low[training.precision]
        if training.main_grads == "same":
            yield "--grad-reduce-in-bf16"
    elif training.precision == "fp16":
        yield "--fp16"
        if training.main_grads == "fp32":
            yield "--accumulate-allreduce-grads-in-fp32"


def _memory_arguments(training: TrainingSpec, layers: int) -> Iterator[str]:
    """Yield what decides how states and activations are kept."""
    if not training.fused_attention:
        yield "--attention-backend unfused"
    if training.fused_loss == "cross_entropy":
        yield "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
    if training.moments != "fp32" or "optimizer" in training.offload:
        yield "--use-precision-aware-optimizer"
    if training.moments != "fp32":
        yield f"--exp-avg-dtype {training.moments} --exp-avg-sq-dtype {training.moments}"
    if "optimizer" in training.offload:
        yield "--optimizer-cpu-offload"
    if "activations" in training.offload:
        yield f"--cpu-offloading-num-layers {training.offload_layers or layers}"


def _sharding_arguments(plan: Plan) -> Iterator[str]:
    sharding, replicas = plan.sharding, plan.layout.dp_replicate
    if sharding.sequence_parallel:
        yield "--sequence-parallel"
        if plan.training.overlap_products:
            yield "--tp-comm-overlap"
    if _is_fsdp(plan):
        shared = "optim_grads" if sharding.zero_stage == 2 else "optim_grads_params"
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {shared}"
        yield "--ckpt-format fsdp_dtensor --init-model-with-meta-device"
    else:
        if sharding.zero_stage == 1:
            yield "--use-distributed-optimizer"
        yield f"--ddp-bucket-size {_bucket_elements(plan)}"
    if replicas > 1 and sharding.zero_stage > 0:
        yield f"--num-distributed-optimizer-instances {replicas}"
        if _is_fsdp(plan):
            yield "--outer-dp-sharding-strategy no_shard"
    if sharding.overlap_gradient_reduce:
        yield "--overlap-grad-reduce"
    if sharding.overlap_parameter_gather and sharding.zero_stage > 0:
        yield "--overlap-param-gather"


def _deduplicates(plan: Plan) -> bool:
    """Return whether DeepEP is called; it refuses one rank alone (moe/token_dispatcher.py)."""
    several = plan.layout.ep * plan.layout.etp > 1
    return several and plan.training.dispatcher == "deduplicated"


def _bucket_elements(plan: Plan) -> int:
    """Return the gradients in a bucket; Megatron counts them, the plan counts their bytes."""
    same = {"fp32": 4, "fp64": 8}.get(plan.training.precision, 2)
    width = same if plan.training.main_grads == "same" else max(4, same)
    return max(1, plan.sharding.gradient_bucket_bytes // width)


def _megatron_omissions(plan: Plan) -> Iterator[str]:
    """Yield what the plan decides and Megatron has no argument for."""
    sharding = plan.sharding
    if plan.training.packing is not None:
        yield "packing documents into sequences is your data's, in $MODEL_AND_DATA_ARGS"
    if plan.training.precision == "fp64":
        yield "precision fp64 is left out: Megatron does not train in it"
    if plan.pipeline.schedule == "gpipe":
        yield "schedule gpipe is left out: Megatron runs 1F1B, plain or interleaved"
    if plan.training.overlap_products and not sharding.sequence_parallel:
        yield "--tp-comm-overlap is left out: it needs sequence parallelism"
    if plan.training.dispatcher == "deduplicated" and not _deduplicates(plan):
        yield "DeepEP is left out: experts are on one rank, and no token is sent"
    if _is_fsdp(plan):
        yield (
            f"gradient buckets of {sharding.gradient_bucket_bytes:,} bytes are left out: Megatron "
            "FSDP sends layer by layer"
        )
    elif sharding.zero_stage == 0:
        if plan.layout.dp_replicate > 1 and plan.layout.dp_shard > 1:
            yield (
                f"dp_shard {plan.layout.dp_shard} x dp_replicate {plan.layout.dp_replicate} is "
                "left out: with ZeRO-0 nothing is shared out"
            )
        if sharding.overlap_parameter_gather:
            yield "--overlap-param-gather is left out: with ZeRO-0 no parameters are gathered"


def _placement_notes(plan: Plan) -> Iterator[str]:
    """Yield what the operator must arrange before torchrun: nodes, their order, unused GPUs."""
    if plan.ranks.hosts is not None and len(plan.ranks.hosts) > 1:
        yield (
            "start the line on every node; $NODE_RANK is its place, from 0, in "
            f"{some_of(plan.ranks.hosts)} (ranks.hosts of the plan): neighbours share switches"
        )
    elif plan.layout.world_size > plan.ranks.ranks_per_node:
        yield "start the line on every node; $HEAD_NODE is the name of one of them, the same on all"
    order = plan.ranks.node_permutation
    if order is not None and list(order) != sorted(order):
        nodes = ", ".join(map(str, order))
        yield f"start the nodes with --node-rank 0, 1, ... in this order: {nodes}"
    if plan.ranks.left_out_gpus:
        gpus = ", ".join(map(str, plan.ranks.left_out_gpus))
        yield f"GPUs {gpus} stay unused: hide them with CUDA_VISIBLE_DEVICES"
