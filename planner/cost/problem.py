"""What stays fixed over all candidates of one request."""

from dataclasses import dataclass
from typing import Final

from planner.cost.step_constants import PLAIN, StepConstants, step_constants
from planner.frameworks import overlaps_data_parallel, overlaps_tensor_parallel
from planner.hardware.devices import Device
from planner.hardware.roofline import OPERAND_BYTES
from planner.model.spec import ModelSpec
from planner.pipeline.partition import SplitTable
from planner.plan import Framework, Precision, TrainingSpec
from planner.topology.fabric import Fabric

__all__ = [
    "ELEMENT_BYTES",
    "Problem",
    "gradient_bytes",
    "held_gradient_bytes",
    "held_weight_bytes",
    "optimizer_bytes",
    "product_input_bytes",
    "weight_bytes",
]

# Bytes of one moment beside its fp32 scale: blocks of 256 (bitsandbytes, 2110.02861).
_MOMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}
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
        constants: In place of those that the device has.
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
    constants: StepConstants | None = None

    @property
    def step_constants(self) -> StepConstants:
        """The figures of a training step; on CPUs those of kernels and calls hold as they are."""
        if self.constants is not None:
            return self.constants
        return PLAIN if self.fabric.cores_per_node is not None else step_constants()

    @property
    def jitter(self) -> float:
        """Standard deviation of a rank's compute over ranks, of the mean."""
        asked = self.training.jitter
        return self.step_constants.jitter if asked is None else asked

    @property
    def capacity_bytes(self) -> float:
        """What one rank can allocate."""
        return self.device.capacity_bytes

    @property
    def overlaps_data_parallel(self) -> bool:
        """Whether gradient reduction and parameter gathering run beside compute."""
        asked = "data_parallel" not in self.training.no_overlap
        return asked and overlaps_data_parallel(self.framework)

    @property
    def overlaps_tensor_parallel(self) -> bool:
        """Whether tensor parallelism's sums of input gradients run beside compute."""
        asked = "tensor_parallel" not in self.training.no_overlap
        return asked and overlaps_tensor_parallel(self.framework)


def weight_bytes(training: TrainingSpec) -> int:
    """Return bytes of one stored weight or activation element."""
    return ELEMENT_BYTES[training.precision]


def held_weight_bytes(training: TrainingSpec) -> int:
    """Return bytes of one weight where it rests; ``weight_bytes`` is what it is computed with."""
    width = weight_bytes(training)
    return max(4, width) if training.master_weights == "only" else width


def product_input_bytes(training: TrainingSpec) -> float:
    """Return bytes of one kept input of a matrix product: cast ones are kept as they are read."""
    return min(OPERAND_BYTES[training.precision], weight_bytes(training))


def gradient_bytes(training: TrainingSpec) -> int:
    """Return bytes of one accumulated gradient element, as it is sent."""
    same = ELEMENT_BYTES[training.precision]
    return same if training.main_grads in ("same", "both") else max(4, same)


def held_gradient_bytes(training: TrainingSpec) -> int:
    """Return bytes that one gradient takes: as computed, accumulated, or both."""
    fp32_copy = 4 if training.main_grads == "both" and weight_bytes(training) < 4 else 0
    return gradient_bytes(training) + fp32_copy


def optimizer_bytes(training: TrainingSpec) -> float:
    """Return optimizer state per parameter: moments, and a master copy of 16-bit weights.

    >>> optimizer_bytes(TrainingSpec(global_batch_size=1, seq_len=1))
    12
    """
    width = weight_bytes(training)
    moment = (
        max(_MOMENT_BYTES["fp32"], width)
        if training.moments == "fp32"
        else (_MOMENT_BYTES[training.moments])
    )
    moments = 2 * moment if training.optimizer == "adamw" else 0
    return moments + (4 if width < 4 and training.master_weights == "copy" else 0)
