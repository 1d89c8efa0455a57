"""A plan in words and shares, the same on the command line and on the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from planner.plan import Plan, StageMemory
from planner.units import format_bytes, format_rate, format_seconds

__all__ = [
    "Part",
    "basis",
    "headline",
    "launch_command",
    "memory_parts",
    "peak_stage",
    "time_parts",
]

_TIME_LABELS: Final = {
    "compute_s": "compute",
    "tp_exposed_s": "tensor parallel, exposed",
    "cp_exposed_s": "context parallel, exposed",
    "ep_exposed_s": "expert parallel, exposed",
    "dp_exposed_s": "data parallel, exposed",
    "pp_exposed_s": "pipeline sends, exposed",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "host_s": "host overhead",
}


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
        f"{plan.layout} with micro-batches of {plan.batch.micro_batch_size}, "
        f"{format_seconds(prediction.step_time_s)} a step "
        f"({format_seconds(prediction.interval.low_s)} to "
        f"{format_seconds(prediction.interval.high_s)}), "
        f"{format_rate(prediction.tokens_per_s, 'tokens/s')}{mfu}, "
        f"{format_bytes(stage.total_bytes)} of {format_bytes(stage.capacity_bytes)} in use."
    )


def basis(plan: Plan) -> str:
    """Return in one sentence what the figures rest on."""
    calibration = plan.provenance.calibration.rstrip(".")
    return f"Basis: {calibration}; interval: {plan.prediction.interval.basis.rstrip('.')}."


def peak_stage(plan: Plan) -> StageMemory:
    """Return the stage closest to its memory's limit."""
    return max(plan.memory, key=lambda stage: stage.total_bytes / max(stage.capacity_bytes, 1))


def time_parts(plan: Plan) -> list[Part]:
    """Return where the step time goes, in seconds, without the parts that are zero."""
    breakdown = plan.prediction.breakdown
    total = breakdown.total_s() or 1.0
    return [
        Part(number, _TIME_LABELS[key], seconds, seconds / total)
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


def launch_command(plan: Plan, plan_source: str) -> str:
    """Return the torchrun line that starts ``plan`` on every node.

    Args:
        plan: What to run.
        plan_source: URL or file that the training script reads the plan from. Megatron-LM reads
            no plan: its line has the plan's choices as arguments, and leaves model and data open.
    """
    per_node = min(plan.ranks.ranks_per_node, plan.layout.world_size)
    nodes = -(-plan.layout.world_size // per_node)
    where = (
        "--standalone"
        if nodes == 1
        else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    )
    script = (
        f"examples/train_gpt.py --plan {plan_source}"
        if plan.framework == "executor"
        else f"pretrain_gpt.py $MODEL_AND_DATA_ARGS {' '.join(_megatron_arguments(plan))}"
    )
    return f"torchrun {where} --nproc-per-node {per_node} {script}"


def _megatron_arguments(plan: Plan) -> Iterator[str]:
    """Yield Megatron-LM's arguments for what the plan decides.

    Names as of Megatron-LM d98e8a64 (megatron/training/arguments.py and the dataclasses it is
    made from); the layout's letters as in its docs on custom pipeline layouts: E embedding,
    t decoder layer, L loss, | between stages.
    """
    layout, sharding = plan.layout, plan.sharding
    yield f"--tensor-model-parallel-size {layout.tp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    yield f"--context-parallel-size {layout.cp}"
    if layout.ep * layout.etp > 1:
        yield f"--expert-model-parallel-size {layout.ep}"
        yield f"--expert-tensor-parallel-size {layout.etp}"
    if layout.pp > 1:
        stages = "|".join(
            "E" * stage.embedding + "t" * stage.num_layers + "L" * stage.head
            for stage in plan.pipeline.stages
        )
        yield f"--pipeline-model-parallel-layout '{stages}'"
    yield f"--micro-batch-size {plan.batch.micro_batch_size}"
    yield f"--global-batch-size {plan.training.global_batch_size}"
    yield f"--seq-length {plan.training.seq_len}"
    if plan.training.precision in ("bf16", "fp16"):
        yield f"--{plan.training.precision}"
    if sharding.sequence_parallel:
        yield "--sequence-parallel"
    if sharding.zero_stage == 1:
        yield "--use-distributed-optimizer"
    elif sharding.zero_stage > 1:
        shared = "optim_grads" if sharding.zero_stage == 2 else "optim_grads_params"
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {shared}"
    if sharding.overlap_gradient_reduce:
        yield "--overlap-grad-reduce"
    if sharding.overlap_parameter_gather:
        yield "--overlap-param-gather"
    if plan.recompute == "selective":
        yield "--recompute-granularity selective"
    elif plan.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
