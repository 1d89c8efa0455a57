"""A plan in words and shares, the same on the command line and on the page."""

from dataclasses import dataclass
from typing import Final

from planner.plan import Plan, StageMemory
from planner.units import format_bytes, format_rate, format_seconds

__all__ = ["Part", "headline", "launch_command", "memory_parts", "peak_stage", "time_parts"]

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
        key: Field of the plan it comes from.
        label: For people.
        amount: Seconds or bytes.
        share: Of the whole, 0..1.
    """

    key: str
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


def peak_stage(plan: Plan) -> StageMemory:
    """Return the stage closest to its memory's limit."""
    return max(plan.memory, key=lambda stage: stage.total_bytes / max(stage.capacity_bytes, 1))


def time_parts(plan: Plan) -> list[Part]:
    """Return where the step time goes, in seconds, without the parts that are zero."""
    breakdown = plan.prediction.breakdown
    amounts = {_TIME_LABELS[key]: (key, value) for key, value in breakdown.model_dump().items()}
    total = breakdown.total_s() or 1.0
    return [Part(k, label, v, v / total) for label, (k, v) in amounts.items() if v > 0]


def memory_parts(stage: StageMemory) -> list[Part]:
    """Return what fills a rank of ``stage``, in bytes, as shares of its capacity."""
    return [
        Part(key, key.removesuffix("_bytes").replace("_", " "), value, value / stage.capacity_bytes)
        for key, value in stage.parts.model_dump().items()
        if value > 0
    ]


def launch_command(plan: Plan, plan_source: str) -> str:
    """Return the torchrun line that starts ``plan`` on every node.

    Args:
        plan: What to run.
        plan_source: URL or file that the training script reads the plan from.
    """
    per_node = min(plan.ranks.ranks_per_node, plan.layout.world_size)
    nodes = -(-plan.layout.world_size // per_node)
    where = (
        "--standalone"
        if nodes == 1
        else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    )
    return f"torchrun {where} --nproc-per-node {per_node} train.py --plan {plan_source}"
