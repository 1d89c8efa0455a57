"""What stays fixed over all candidates of one request."""

from dataclasses import dataclass
from typing import Final

from planner.hardware.devices import Device
from planner.model.spec import ModelSpec
from planner.pipeline.partition import SplitTable
from planner.plan import Framework, Precision, TrainingSpec
from planner.topology.fabric import Fabric

__all__ = ["ELEMENT_BYTES", "Problem", "gradient_bytes", "weight_bytes"]

# Bytes of a stored weight or activation; below 16 bits bf16 is stored, and cast for the matmul.
ELEMENT_BYTES: Final[dict[Precision, int]] = {
    "bf16": 2,
    "fp16": 2,
    "fp8": 2,
    "mxfp8": 2,
    "nvfp4": 2,
    "fp32": 4,
    "fp64": 8,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One request, resolved.

    Attributes:
        model: What is trained.
        training: Batch, sequence, precision, optimizer.
        fabric: The cluster; measured levels if there is a calibration.
        device: What computes.
        splits: Layer partitions that candidates refer to.
        framework: What will run the plan.
        compute_scale: Measured over prior seconds of forward and backward; 1 = prior.
        optimizer_scale: The same for the optimizer.
        host_overhead_s: Per step, outside compute and collectives.
    """

    model: ModelSpec
    training: TrainingSpec
    fabric: Fabric
    device: Device
    splits: SplitTable
    framework: Framework
    compute_scale: float = 1.0
    optimizer_scale: float = 1.0
    host_overhead_s: float = 0.0


def weight_bytes(training: TrainingSpec) -> int:
    """Return bytes of one stored weight or activation element."""
    return ELEMENT_BYTES[training.precision]


def gradient_bytes(training: TrainingSpec) -> int:
    """Return bytes of one accumulated gradient element."""
    same = ELEMENT_BYTES[training.precision]
    return same if training.main_grads == "same" else max(4, same)
