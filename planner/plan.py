"""The contract: ``Plan`` goes down to the executor, ``CalibrationRun`` comes back up.

Pydantic and the standard library only, so that a training script can import it without
pulling in the planner. Units are in the names. Ranks follow one of Megatron's orders
(``parallel_state``): of the axes in ``RankRule.order`` the leftmost varies fastest.

Two generators lay axes over the same ranks of one pipeline stage, in either order::

    dense    tp · cp · dp         with dp = dp_shard · dp_replicate, dp_shard the faster
    expert   etp · ep · edp       with etp · ep · edp = tp · cp · dp
"""

import hashlib
import json
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails

__all__ = [
    "AXES",
    "Algorithm",
    "Axis",
    "Basis",
    "BatchSplit",
    "Breakdown",
    "Calibration",
    "CalibrationRun",
    "CallFit",
    "CallPath",
    "Collective",
    "CollectiveChoice",
    "CollectiveTiming",
    "ContextExchange",
    "Crossing",
    "Document",
    "ExpertCapacity",
    "ExpertLoad",
    "Framework",
    "Interval",
    "Launch",
    "Layout",
    "LevelFit",
    "MeasuredCurve",
    "MemoryParts",
    "Method",
    "ModelSummary",
    "Offloaded",
    "Packing",
    "Phase",
    "Pipeline",
    "PlacementOption",
    "Plan",
    "Precision",
    "Prediction",
    "Probe",
    "Provenance",
    "RankOrder",
    "RankRule",
    "RankTimings",
    "RecomputeLayers",
    "RecomputeMode",
    "RejectedReason",
    "RunnerUp",
    "ScheduleName",
    "Sharding",
    "SizeThreshold",
    "Stage",
    "StageMemory",
    "TimedOp",
    "TrainingSpec",
    "Waiting",
    "canonical_json",
    "coordinates",
    "document_hash",
    "groups",
]

# Axes that have groups. "dp" joins dp_shard and dp_replicate; "dp_cp" joins dp and cp, over
# which dense gradients are reduced; "dp_shard_cp" shares out parameters and optimizer states;
# "edp" is what is left for experts after etp and ep.
Axis = Literal[
    "tp",
    "cp",
    "dp",
    "dp_shard",
    "dp_replicate",
    "dp_cp",
    "dp_shard_cp",
    "pp",
    "etp",
    "ep",
    "edp",
]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
]
# hierarchical = inside units of the innermost fabric level, then across them; three_level = across
# the units of the next level too; nvls = switches inside a domain copy and reduce, nvls_tree = so
# inside, trees across; collnet = the network's switches reduce (SHARP); pat = parallel aggregated
# trees; one_shot = every member reads all of every other, two_shot = its shard, then gathers;
# copy_engine = copies in memory that all members can load and store, without sends (by DMA engines
# on GPUs, by the cores where "GPUs" are cores); deduplicated = a token goes once to a rank or node,
# however many of its experts are there.
Algorithm = Literal[
    "singleton",
    "ring",
    "tree",
    "halving_doubling",
    "hierarchical",
    "three_level",
    "nvls",
    "nvls_tree",
    "collnet",
    "pat",
    "direct",
    "pairwise",
    "one_shot",
    "two_shot",
    "copy_engine",
    "deduplicated",
    "point_to_point",
]
# Who runs it: the backend's own call (of a hierarchy, one per part), this project's executor by
# sends and receives, shared memory of a host (of a hierarchy, inside units), NCCL's copy engine
# calls, mori's.
CallPath = Literal["library", "executor", "shm", "nccl_zero_cta", "mori"]
# zb_1p and zb_2p are the zero-bubble schedules with room for p and 2p micro-batches, zb_v the
# V-shaped one (2401.10241, 2405.15362): their memory is known, no framework here runs them.
ScheduleName = Literal["none", "gpipe", "1f1b", "interleaved_1f1b", "zb_1p", "zb_2p", "zb_v"]
RecomputeMode = Literal["none", "selective", "full"]
# Of stages and data-parallel ranks the second are outermost with Megatron's --use-tp-pp-dp-mapping.
RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
# How attention gets the keys and values of other context-parallel ranks: passed around in a ring
# beside the compute, or gathered before it.
ContextExchange = Literal["ring", "all_gather"]
Framework = Literal["executor", "megatron"]
# How a rank issues its kernels: one by one, or as graphs that it captured.
Launch = Literal["eager", "cuda_graph", "blocking"]
# Of matrix products; below 16 bits, weights and activations are stored in bf16 and cast for them.
Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32", "fp64"]
# backward = gradients of the inputs; "step" ops happen once per optimizer step.
Phase = Literal["forward", "backward", "weight_gradient", "recompute", "step"]

Offloaded = Literal["weights", "gradients", "optimizer", "activations"]

Degree = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=0)]
RecomputeLayers = Annotated[
    int | None,
    Field(
        ge=1,
        exclude_if=lambda layers: layers is None,
        description="of every stage, of which 'full' recomputes as many; null = all",
    ),
]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
Load = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Method(NamedTuple):
    """How a collective is done, and by whom."""

    algorithm: Algorithm
    path: CallPath = "library"

    def __str__(self) -> str:
        """Return the algorithm, and who runs it unless it is the library: ``ring (executor)``."""
        return self.algorithm if self.path == "library" else f"{self.algorithm} ({self.path})"


class Document(BaseModel):
    """A frozen value that is read from or written to the outside; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def canonical_json(value: BaseModel | dict[str, Any]) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces. Hashes are taken of it."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def document_hash(value: BaseModel | dict[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- what is trained, and how


class ExpertCapacity(Document):
    """How many tokens an expert takes of one rank's micro-batch; the others skip it.

    Every expert then receives exactly that many rows, padded with zeros, and no counts are
    exchanged. It changes the mathematics, so it is asked for and never planned.
    """

    factor: float = Field(gt=0, le=1024, allow_inf_nan=False, description="1 = balanced routing")
    convention: Literal["deepspeed", "megatron", "tutel", "floor"] = "megatron"
    min_capacity: int = Field(default=0, ge=0, le=1 << 31)
    alignment: int = Field(default=1, ge=1, le=1 << 20, description="rounded up to a multiple")
    drop: Literal["probability", "position"] = Field(
        default="probability", description="which tokens stay: the likeliest, or the first"
    )


def _rows(value: Any, rows: ValidatorFunctionWrapHandler) -> Any:
    """Return counts as rows, of one row as the only one: its cells are named as they stand."""
    if not isinstance(value, list | tuple) or any(isinstance(v, list | tuple) for v in value):
        return rows(value)
    try:
        return rows([value])
    except ValidationError as exc:
        errors = [
            InitErrorDetails(
                type=error["type"],
                loc=error["loc"][1:],
                input=error["input"],
                ctx=error.get("ctx", {}),
            )
            for error in exc.errors()
        ]
        raise ValidationError.from_exception_data(exc.title, errors) from exc


class ExpertLoad(Document):
    """How uneven routing is expected to be; null in its place is even."""

    zipf: float | None = Field(
        default=None,
        ge=0,
        le=8,
        allow_inf_nan=False,
        description="the i-th popular expert receives 1/i**zipf; 0 is even",
    )
    counts: Annotated[tuple[tuple[Load, ...], ...], WrapValidator(_rows)] | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="tokens that each expert received, in one row or one for each layer with "
        "experts; only their proportions count",
    )

    @model_validator(mode="after")
    def _says_it_once(self) -> "ExpertLoad":
        if (self.zipf is None) == (self.counts is None):
            raise ValueError("need one of zipf and counts; leave expert_load out for an even load")
        return self


class Packing(Document):
    """Lengths of the documents that fill the sequences; a token attends within its own alone.

    ``counts[i]`` documents have ``lengths[i]`` tokens, as they lie in a sequence: one that is cut
    at its end counts as two. Only the proportions of the counts matter.
    """

    lengths: tuple[Annotated[int, Field(strict=True, ge=1, le=16_777_216)], ...] = Field(
        min_length=1, max_length=65_536, description="tokens"
    )
    counts: tuple[Annotated[int, Field(strict=True, ge=1, le=10**15)], ...] = Field(
        min_length=1, max_length=65_536, description="documents of each length"
    )

    @model_validator(mode="after")
    def _one_count_each(self) -> "Packing":
        if len(self.lengths) != len(self.counts):
            raise ValueError(
                f"{len(self.lengths)} lengths but {len(self.counts)} counts; need one count for "
                "each length"
            )
        return self


class TrainingSpec(Document):
    """One optimizer step: how many sequences, how long, in which numbers."""

    global_batch_size: int = Field(ge=1, le=1_000_000, description="sequences per step")
    seq_len: int = Field(ge=1, le=16_777_216, description="tokens per sequence")
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    main_grads: Literal["fp32", "same", "both"] = Field(
        default="fp32",
        description="dtype gradients are accumulated in; same = as computed, both = as computed "
        "and an fp32 copy beside them",
    )
    expert_capacity: ExpertCapacity | None = Field(
        default=None, description="of a model with experts; null = dropless"
    )
    # Left out of documents that do not say it: their hashes stay what they were.
    expert_load: ExpertLoad | None = Field(
        default=None,
        exclude_if=lambda load: load is None,
        description="of a model with experts; null = even",
    )
    launch: Launch = Field(
        default="eager",
        exclude_if=lambda how: how == "eager",
        description="how kernels are issued: one by one, as captured graphs, or each waiting for "
        "the one before (CUDA_LAUNCH_BLOCKING=1)",
    )
    jitter: float | None = Field(
        default=None,
        ge=0,
        le=1,
        exclude_if=lambda spread: spread is None,
        description="standard deviation of a rank's compute over ranks, of the mean; a step waits "
        "for the slowest; null = as fitted to published runs, 0 = all ranks alike",
    )
    no_overlap: tuple[Literal["data_parallel", "tensor_parallel"], ...] = Field(
        default=(),
        exclude_if=lambda waiting: not waiting,
        description="whose collectives nothing runs beside: gradients and parameters, or the sums "
        "of tensor parallelism in the backward",
    )
    overlap_products: bool = Field(
        default=False,
        exclude_if=lambda chunks: not chunks,
        description="gathers and scatters of sequence parallelism run chunk by chunk beside the "
        "product they feed or follow (--tp-comm-overlap)",
    )
    dispatcher: Literal["all_to_all", "deduplicated"] = Field(
        default="all_to_all",
        exclude_if=lambda how: how == "all_to_all",
        description="of a model with experts; deduplicated: a token goes to a node once and on to "
        "its ranks there (DeepEP, HybridEP)",
    )
    overlap_experts: bool = Field(
        default=False,
        exclude_if=lambda beside: not beside,
        description="tokens of one micro-batch travel while another computes "
        "(--overlap-moe-expert-parallel-comm)",
    )
    packing: Packing | None = Field(
        default=None,
        exclude_if=lambda packing: packing is None,
        description="documents in a sequence; null = one as long as the sequence",
    )
    master_weights: Literal["copy", "only", "none"] = Field(
        default="copy",
        exclude_if=lambda kept: kept == "copy",
        description="of 16-bit weights in fp32: a copy beside them; fp32 alone, cast where used "
        "(torch FSDP); or none",
    )
    moments: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32", exclude_if=lambda dtype: dtype == "fp32", description="dtype of AdamW's"
    )
    foreach_optimizer: bool = Field(
        default=False,
        exclude_if=lambda used: not used,
        description="the update runs unfused over lists of tensors, as torch's foreach AdamW",
    )
    fused_attention: bool = Field(
        default=True,
        exclude_if=lambda fused: fused,
        description="false: score matrices are stored, as before FlashAttention",
    )
    attention_kernel: Literal["fastest", "flash2", "flash1", "triton"] = Field(
        default="fastest",
        exclude_if=lambda kernel: kernel == "fastest",
        description="fused attention of which generation: what runs fastest on the GPU today "
        "(FlashAttention-3, cuDNN), FlashAttention-2, the first, or that in Triton",
    )
    recompute_stops_early: bool = Field(
        default=False,
        exclude_if=lambda early: not early,
        description="a recomputed forward ends at the last tensor that the backward needs "
        "(torch.utils.checkpoint without reentrant autograd)",
    )
    dropout: bool = Field(
        default=False,
        exclude_if=lambda used: not used,
        description="after attention and feed-forward, and on the scores",
    )
    fused_kernels: bool = Field(
        default=True,
        exclude_if=lambda fused: fused,
        description="norms and gated activations are one kernel each; false: torch's operations "
        "one by one, which keep what they cast",
    )
    fused_loss: Literal["none", "cross_entropy", "linear"] = Field(
        default="none",
        exclude_if=lambda fused: fused == "none",
        description="none: softmax in fp32 beside the logits; cross_entropy: gradients in place of "
        "16-bit logits; linear: with the head, in pieces, so that logits are never whole (Liger)",
    )
    buffer_bytes: int = Field(
        default=0,
        ge=0,
        le=1 << 40,
        exclude_if=lambda size: size == 0,
        description="flat buffers that gradients and weights are copied through to be sent",
    )
    gathers: Literal["layer", "matrix"] = Field(
        default="layer",
        exclude_if=lambda unit: unit == "layer",
        description="what ZeRO-3 gathers at once",
    )

    offload: tuple[Offloaded, ...] = Field(
        default=(),
        exclude_if=lambda parts: not parts,
        description="what rests in the host's memory and comes over for its use",
    )
    offload_layers: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda layers: layers is None,
        description="of a rank, whose activations are offloaded; null = all",
    )
    offload_to: Literal["cpu", "nvme"] = Field(
        default="cpu", exclude_if=lambda where: where == "cpu"
    )

    @model_validator(mode="after")
    def _documents_fit(self) -> "TrainingSpec":
        longest = max(self.packing.lengths) if self.packing else 0
        if longest > self.seq_len:
            raise ValueError(
                f"packing.lengths: {longest} tokens, but a sequence holds seq_len={self.seq_len}; "
                "cut longer documents at that length, or give a longer seq_len"
            )
        return self

    @model_validator(mode="after")
    def _offload_is_said_once(self) -> "TrainingSpec":
        for part in self.offload:
            if self.offload.count(part) > 1:
                raise ValueError(f"offload names {part} twice; name each part once")
        if self.offload_layers is not None and "activations" not in self.offload:
            raise ValueError(
                f"offload_layers={self.offload_layers} counts layers whose activations are "
                f"offloaded, but offload names {', '.join(self.offload) or 'nothing'}; add "
                "activations to offload, or leave offload_layers out"
            )
        return self


class ModelSummary(Document):
    """What the executor checks a live module against."""

    name: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_params: int = Field(ge=1)
    num_active_params: int = Field(ge=1)
    num_mtp_modules: int = Field(
        default=0, ge=0, exclude_if=lambda n: n == 0, description="beside the parameters above"
    )
    fingerprint: str


class Layout(Document):
    """Degrees of every parallel axis; 1 = off."""

    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1
    dp_shard: Degree = 1
    dp_replicate: Degree = 1
    virtual_stages: Degree = Field(default=1, description="model chunks per pipeline rank")

    @model_validator(mode="after")
    def _experts_fit_the_same_ranks(self) -> "Layout":
        if self.stage_size % (self.etp * self.ep):
            raise ValueError(
                f"etp({self.etp}) * ep({self.ep}) must divide the {self.stage_size} ranks of a "
                f"stage (tp * cp * dp); try ep={_largest_divisor(self.stage_size, self.ep)}, etp=1"
            )
        return self

    @property
    def dp(self) -> int:
        """Data-parallel degree, sharded and replicated together."""
        return self.dp_shard * self.dp_replicate

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.stage_size * self.pp

    def degree(self, axis: Axis) -> int:
        """Return the size of a group of ``axis``."""
        if axis == "dp_cp":
            return self.dp * self.cp
        if axis == "dp_shard_cp":
            return self.dp_shard * self.cp
        return int(getattr(self, axis))

    def __str__(self) -> str:
        """Return the degrees that are on, as ``tp8 pp4 dp2``."""
        shown = [(name, getattr(self, name)) for name in ("tp", "cp", "pp", "ep", "etp")]
        dp = (
            [("dp", self.dp)]
            if 1 in (self.dp_shard, self.dp_replicate)
            else [("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)]
        )
        parts = [f"{name}{degree}" for name, degree in [*shown, *dp] if degree > 1]
        if self.virtual_stages > 1:
            parts.append(f"v{self.virtual_stages}")
        return " ".join(parts) or "one rank"


class RankRule(Document):
    """How coordinates become ranks, and ranks become GPUs."""

    order: RankOrder = "tp-cp-ep-dp-pp"
    ranks_per_node: int = Field(ge=1, description="ranks that one host starts")
    ranks_per_unit: int = Field(
        ge=1,
        description="ranks on one unit of the innermost fabric level; hierarchical collectives "
        "work inside and then across such units",
    )
    node_permutation: tuple[int, ...] | None = Field(
        default=None, description="node of the i-th block of ranks; null = as listed"
    )
    left_out_gpus: tuple[int, ...] = ()
    units: tuple[tuple[int, ...], ...] | None = Field(
        default=None,
        description="ranks of each unit; null = blocks of ranks_per_unit consecutive ranks",
    )
    outer_units: tuple[tuple[int, ...], ...] | None = Field(
        default=None,
        description="ranks of each unit of the next fabric level, across which three_level "
        "collectives work last; null = one unit holds all",
    )
    hosts: tuple[str, ...] | None = Field(
        default=None,
        description="host of the i-th block of ranks (torchrun's node rank i); null = any order",
    )

    def unit_of(self, rank: int) -> int:
        """Return the number of the unit that ``rank`` lies on.

        >>> RankRule(ranks_per_node=4, ranks_per_unit=4).unit_of(5)
        1
        >>> RankRule(ranks_per_node=4, ranks_per_unit=4, units=((0, 2), (1, 3))).unit_of(2)
        0
        """
        if self.units is None:
            return rank // self.ranks_per_unit
        return next(number for number, ranks in enumerate(self.units) if rank in ranks)

    def outer_unit_of(self, rank: int) -> int:
        """Return the number of the unit of the next level that ``rank`` lies on.

        >>> rule = RankRule(ranks_per_node=1, ranks_per_unit=1, outer_units=((0, 1), (2, 3)))
        >>> rule.outer_unit_of(2)
        1
        """
        if self.outer_units is None:
            return 0
        return next(number for number, ranks in enumerate(self.outer_units) if rank in ranks)


class BatchSplit(Document):
    """global_batch_size = micro_batch_size * num_micro_batches * dp."""

    micro_batch_size: int = Field(ge=1, description="sequences per micro-batch per dp rank")
    num_micro_batches: int = Field(ge=1, description="micro-batches per step per dp rank")


class Stage(Document):
    """Consecutive layers on one pipeline rank; ``chunk`` counts the virtual stages there."""

    pp_rank: int = Field(ge=0)
    chunk: int = Field(ge=0)
    first_layer: int = Field(ge=0)
    num_layers: int = Field(ge=0)
    embedding: bool
    head: bool


class Pipeline(Document):
    """Schedule and stages, in model order."""

    schedule: ScheduleName
    stages: tuple[Stage, ...] = Field(min_length=1)


class Sharding(Document):
    """What ranks of a replica share out, and when they exchange it."""

    zero_stage: int = Field(
        ge=0,
        le=3,
        description="data-parallel ranks share out: 1 optimizer, 2 and gradients, 3 and parameters",
    )
    sequence_parallel: bool
    context_exchange: ContextExchange = "ring"
    overlap_gradient_reduce: bool
    overlap_parameter_gather: bool
    gradient_bucket_bytes: int = Field(
        ge=1024, le=1 << 40, description="gradients are reduced in flat buffers of about this size"
    )


# ---------------------------------------------------------------------- the decisions, priced


class SizeThreshold(Document):
    """Use ``algorithm`` for messages up to ``up_to_bytes``; null = all larger ones."""

    up_to_bytes: Bytes | None
    algorithm: Algorithm
    path: CallPath = "library"


# measured: by a curve of the same call on such nodes; modelled: by a model whose kind was compared
# with published measurements; not validated: modelled, and no data says how well.
Basis = Literal["measured", "modelled", "not validated"]


class CollectiveChoice(Document):
    """The algorithm for one operation on one axis, by size."""

    axis: Axis
    op: Collective
    group_size: int = Field(ge=1)
    size_bytes: Bytes = Field(description="the size this plan sends most, nccl-tests' S")
    algorithm: Algorithm
    path: CallPath = "library"
    predicted_s: Seconds
    runner_up: Algorithm | None
    runner_up_path: CallPath = "library"
    runner_up_s: Seconds | None
    thresholds: tuple[SizeThreshold, ...]
    bound_s: Seconds | None = Field(
        default=None, description="below which no algorithm comes at nominal link rates"
    )
    basis: Basis = Field(default="modelled", description="of predicted_s")
    library_default: Algorithm | None = Field(
        default=None,
        description="what the library takes by itself at size_bytes; null where it has no choice",
    )
    library_default_s: Seconds | None = None

    @model_validator(mode="after")
    def _thresholds_ascend(self) -> "CollectiveChoice":
        ends = [step.up_to_bytes for step in self.thresholds]
        closed = [end for end in ends if end is not None]
        if closed != sorted(set(closed)) or ends != [*closed, *([None] * (len(ends) > 0))]:
            raise ValueError(
                f"thresholds of {self.op} on {self.axis} end at {ends}; need them ascending, and "
                "null for the last alone"
            )
        return self

    def method_for(self, size_bytes: int) -> Method:
        """Return how a message of ``size_bytes`` is sent."""
        for threshold in self.thresholds:
            if threshold.up_to_bytes is None or size_bytes <= threshold.up_to_bytes:
                return Method(threshold.algorithm, threshold.path)
        return Method(self.algorithm, self.path)

    def methods(self) -> frozenset[Method]:
        """Return every method that some size takes."""
        return frozenset(
            {
                Method(self.algorithm, self.path),
                *(Method(step.algorithm, step.path) for step in self.thresholds),
            }
        )


class TimedOp(Document):
    """One kind of work on the pipeline rank that decides about it, and what it costs."""

    name: str
    phase: Phase
    block: str = Field(description="block kind the op belongs to; empty = the whole rank")
    pp_rank: Count = Field(
        default=0,
        description="pipeline rank that does it so often: of forward and backward the slowest, of "
        "gradients and parameters the one with most of them",
    )
    axis: Axis | None = None
    op: Collective | None = None
    algorithm: Algorithm | None = None
    path: CallPath = "library"
    group_size: int = Field(default=1, ge=1)
    size_bytes: Bytes = 0
    flop: float = Field(default=0, ge=0)
    memory_bytes: float = Field(default=0, ge=0)
    seconds: Seconds = Field(description="one occurrence")
    repeats: float = Field(ge=0, description="occurrences per step")
    exposed_s: Seconds = Field(description="per step, after overlap")


class Breakdown(Document):
    """Where the step time goes on the slowest pipeline rank; the parts add up to it."""

    compute_s: Seconds
    tp_exposed_s: Seconds
    cp_exposed_s: Seconds
    ep_exposed_s: Seconds
    dp_exposed_s: Seconds
    pp_exposed_s: Seconds
    bubble_s: Seconds
    optimizer_s: Seconds
    launch_s: Seconds = Field(default=0.0, description="the device waits for the host's launches")
    straggler_s: Seconds = Field(default=0.0, description="the wait for the slowest rank")
    host_s: Seconds

    def total_s(self) -> float:
        """Return the sum of the parts: the step time."""
        return float(sum(self.model_dump().values()))


class Interval(Document):
    """The range the step time is expected in, and what that rests on."""

    low_s: Seconds
    high_s: Seconds
    basis: str


class Prediction(Document):
    """What the plan is expected to do."""

    step_time_s: Seconds
    interval: Interval
    breakdown: Breakdown
    tokens_per_s: Rate
    tokens_per_s_per_gpu: Rate
    model_flop_per_step: Rate
    mfu: float | None = Field(
        default=None, ge=0, le=1, description="of the dense peak; null where no peak is published"
    )
    bubble_fraction: float = Field(ge=0, lt=1, description="of the step time")


class MemoryParts(Document):
    """Bytes on one rank, by part."""

    weights_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    gathered_bytes: Bytes = Field(
        description="whole units of sharded weights and gradients while they are in use"
    )
    activations_bytes: Bytes
    logits_bytes: Bytes
    moe_buffers_bytes: Bytes
    communicators_bytes: Bytes
    reserve_bytes: Bytes = Field(description="context and fragmentation")
    working_bytes: Bytes = Field(
        default=0,
        description="what the block in use, or the optimizer's step, needs beyond the other parts",
    )

    def total_bytes(self) -> int:
        """Return the sum of the parts."""
        return int(sum(self.model_dump().values()))


class StageMemory(Document):
    """Memory of a rank of one pipeline stage."""

    pp_rank: int = Field(ge=0)
    parts: MemoryParts
    total_bytes: Bytes
    capacity_bytes: Bytes


class RunnerUp(Document):
    """A layout that fits and came later, and what it loses where."""

    layout: Layout
    order: RankOrder = "tp-cp-ep-dp-pp"
    micro_batch_size: int
    recompute: RecomputeMode
    recompute_layers: RecomputeLayers = None
    zero_stage: int
    step_time_s: Seconds
    slower_by: float = Field(description="fraction of the winner's step time")
    peak_memory_bytes: Bytes
    why: str

    def recompute_label(self) -> str:
        """Return the mode, and of how many layers a stage if not of all: ``full 3``."""
        some = "" if self.recompute_layers is None else f" {self.recompute_layers}"
        return f"{self.recompute}{some}"


class RejectedReason(Document):
    """How many candidates one rule removed."""

    reason: str
    count: int = Field(ge=1)


class Crossing(Document):
    """What one axis sends over one level of the fabric, per rank and step (mean over ranks)."""

    axis: Axis
    level: str
    depth: Count = Field(description="of the level, 0 = innermost")
    bytes_per_step: float = Field(ge=0)


class PlacementOption(Document):
    """Nodes that the job could run on, and the step time there."""

    choice: Literal["keep", "drop", "move"]
    num_nodes: int = Field(ge=1)
    left_out: tuple[str, ...] = Field(description="hosts asked for and not used")
    added: tuple[str, ...] = Field(description="hosts used in their place")
    step_time_s: Seconds | None = Field(description="null = nothing fits there")
    is_chosen: bool


class Waiting(Document):
    """What as many healthy nodes under the fewest switches would gain."""

    hosts: tuple[str, ...] = Field(description="such nodes, as an example")
    step_time_s: Seconds
    gain: float = Field(description="part of the step time saved")


class Probe(Document):
    """A measurement that the executor takes before training, to price what it did not run."""

    axis: Axis
    op: Collective
    algorithm: Algorithm | None = Field(default=None, description="null = the planned method")
    path: CallPath = "library"
    sizes_bytes: tuple[Annotated[int, Field(ge=1, le=1 << 33)], ...] = Field(max_length=32)


class Provenance(Document):
    """What the figures rest on."""

    commplan_version: str
    calibration_id: str | None
    calibration: str = Field(description="one sentence: measured here, or priors")
    simulated: bool = Field(description="false: closed form only")
    sources: tuple[str, ...]


class Plan(Document):
    """Everything the executor needs, and the reasons. ``id`` hashes request and calibration."""

    schema_version: Literal[1] = 1
    id: str
    topology: str
    model: ModelSummary
    framework: Framework
    training: TrainingSpec
    layout: Layout
    ranks: RankRule
    batch: BatchSplit
    pipeline: Pipeline
    sharding: Sharding
    recompute: RecomputeMode
    recompute_layers: RecomputeLayers = None
    collectives: tuple[CollectiveChoice, ...]
    prediction: Prediction
    memory: tuple[StageMemory, ...]
    ops: tuple[TimedOp, ...]
    probes: tuple[Probe, ...]
    runners_up: tuple[RunnerUp, ...]
    rejected: tuple[RejectedReason, ...]
    num_candidates: int = Field(ge=1)
    crossings: tuple[Crossing, ...] = ()
    placements: tuple[PlacementOption, ...] = Field(
        default=(), description="empty when all nodes are healthy and alike"
    )
    waiting: Waiting | None = Field(
        default=None, description="null where the nodes in use are as good as any"
    )
    assumptions: tuple[str, ...]
    provenance: Provenance

    @model_validator(mode="after")
    def _parts_agree(self) -> "Plan":
        sequences = self.batch.micro_batch_size * self.batch.num_micro_batches * self.layout.dp
        if sequences != self.training.global_batch_size:
            raise ValueError(
                f"batch: micro_batch_size({self.batch.micro_batch_size}) * num_micro_batches"
                f"({self.batch.num_micro_batches}) * dp({self.layout.dp}) = {sequences}, but "
                f"global_batch_size={self.training.global_batch_size}"
            )
        layers = [
            layer
            for stage in self.pipeline.stages
            for layer in range(stage.first_layer, stage.first_layer + stage.num_layers)
        ]
        if layers != list(range(self.model.num_layers)):
            raise ValueError(
                f"pipeline.stages hold {len(layers)} layers in the order {layers[:8]}...; "
                f"need each of the {self.model.num_layers} layers exactly once, in model order"
            )
        chosen = [(choice.axis, choice.op) for choice in self.collectives]
        for axis, op in chosen:
            if chosen.count((axis, op)) > 1:
                raise ValueError(f"collectives choose {op} on {axis} twice; give one choice")
        for field in ("units", "outer_units"):
            units = getattr(self.ranks, field)
            placed = sorted(rank for unit in units or () for rank in unit)
            if units is not None and placed != list(range(self.layout.world_size)):
                raise ValueError(
                    f"ranks.{field} hold the ranks {placed[:8]}...; need each of "
                    f"0..{self.layout.world_size - 1} exactly once"
                )
        return self

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the position of ``rank`` in its group of every axis.

        Raises:
            ValueError: ``rank`` lies outside 0 .. world_size - 1.
        """
        return coordinates(self.layout, rank, self.ranks.order)

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the ranks of every group of ``axis``; the groups partition the world."""
        return groups(self.layout, axis, self.ranks.order)

    def method(self, axis: Axis, op: Collective, size_bytes: int) -> Method:
        """Return the planned method; a group of one, or an unplanned call, is the default.

        The executor evaluates this for every message; a plan without a choice for ``axis`` and
        ``op`` leaves the call to the library (ring is what gloo and NCCL fall back to).
        """
        if self.layout.degree(axis) == 1:
            return Method("singleton")
        for choice in self.collectives:
            if (choice.axis, choice.op) == (axis, op):
                return choice.method_for(size_bytes)
        return Method("ring")


# ------------------------------------------------------------------------- ranks and groups


def _axis_stride(layout: Layout, axis: Axis) -> int:
    """Return the distance between neighbours of a group of ``axis``, in ranks of one stage."""
    strides: dict[Axis, int] = {
        "tp": 1,
        "cp": layout.tp,
        "dp": layout.tp * layout.cp,
        "dp_shard": layout.tp * layout.cp,
        "dp_replicate": layout.tp * layout.cp * layout.dp_shard,
        "dp_cp": layout.tp,
        "dp_shard_cp": layout.tp,
        "etp": 1,
        "ep": layout.etp,
        "edp": layout.etp * layout.ep,
    }
    return strides[axis]


def _run_of_stage(layout: Layout, order: RankOrder) -> int:
    """Return how many consecutive ranks one stage has before it is the next one's turn."""
    return layout.stage_size if order == "tp-cp-ep-dp-pp" else layout.tp * layout.cp


def coordinates(layout: Layout, rank: int, order: RankOrder = "tp-cp-ep-dp-pp") -> dict[Axis, int]:
    """Return the position of ``rank`` in its group of every axis.

    >>> c = coordinates(Layout(tp=2, cp=2, dp_shard=2, pp=2), 13)
    >>> c["tp"], c["cp"], c["dp"], c["pp"]
    (1, 0, 1, 1)
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is not in 0..{layout.world_size - 1}")
    run = _run_of_stage(layout, order)
    number, place_in_run = divmod(rank, run)
    round_, stage = divmod(number, layout.pp)
    place = round_ * run + place_in_run  # among the ranks of the stage
    return {
        axis: stage if axis == "pp" else place // _axis_stride(layout, axis) % layout.degree(axis)
        for axis in AXES
    }


def groups(
    layout: Layout, axis: Axis, order: RankOrder = "tp-cp-ep-dp-pp"
) -> list[tuple[int, ...]]:
    """Return the groups of ``axis`` by their first rank, each in axis order.

    >>> groups(Layout(tp=2, dp_shard=2, pp=2), "dp")
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    >>> groups(Layout(tp=2, dp_shard=2, pp=2), "dp", "tp-cp-ep-pp-dp")
    [(0, 4), (1, 5), (2, 6), (3, 7)]
    """
    run = _run_of_stage(layout, order)
    stages = [
        [
            rank
            for start in range(stage * run, layout.world_size, layout.pp * run)
            for rank in range(start, start + run)
        ]
        for stage in range(layout.pp)
    ]
    if axis == "pp":
        return list(zip(*stages, strict=True))
    stride, span = _axis_stride(layout, axis), _axis_stride(layout, axis) * layout.degree(axis)
    return sorted(
        tuple(ranks[start : start + span : stride])
        for ranks in stages
        for block in range(0, layout.stage_size, span)
        for start in range(block, block + stride)
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)


# ------------------------------------------------------------------------- what comes back up


class CollectiveTiming(Document):
    """Calls of one collective with one size on one rank, in the order they were made.

    The seconds of call *i* include waiting for the other ranks; over the ranks of a group the
    smallest of the *i*-th calls is the transfer itself.
    """

    axis: Axis
    op: Collective
    algorithm: Algorithm
    path: CallPath = "library"
    size_bytes: Bytes
    group_size: int = Field(ge=2)
    seconds: tuple[Seconds, ...] = Field(min_length=1)
    is_probe: bool = False
    peer: int | None = Field(
        default=None, ge=0, description="of a message: the other end, by position in the axis"
    )
    is_send: bool | None = Field(
        default=None, description="of a message; one that is received in return is part of it"
    )


class RankTimings(Document):
    """What one rank measured. Sequences have one entry per timed step."""

    rank: int = Field(ge=0)
    host: str
    step_s: tuple[Seconds, ...] = Field(min_length=1, description="wall time of each step")
    forward_backward_s: tuple[Seconds, ...] = Field(
        description="compute in forward and backward: wall time less the collectives inside"
    )
    optimizer_s: tuple[Seconds, ...]
    communication_s: tuple[Seconds, ...] = Field(
        description="stood still in collectives, waits for other ranks included"
    )
    collectives: tuple[CollectiveTiming, ...] = Field(default=(), max_length=20_000)


class CalibrationRun(Document):
    """One timed run of one plan: the document that goes back to the planner."""

    schema_version: Literal[1] = 1
    plan_id: str
    plan_hash: str
    topology: str
    backend: str
    executor_version: str
    torch_version: str
    num_warmup_steps: int = Field(ge=0, le=1_000_000)
    ranks: tuple[RankTimings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_rank_once(self) -> "CalibrationRun":
        found = [timings.rank for timings in self.ranks]
        if found != list(range(len(found))):
            raise ValueError(
                f"ranks must be 0..{len(found) - 1}, each once and in order; got {found}"
            )
        steps = {len(timings.step_s) for timings in self.ranks}
        if len(steps) != 1:
            raise ValueError(f"every rank must time the same number of steps; got {sorted(steps)}")
        return self


class LevelFit(Document):
    """Alpha and bandwidth of one fabric level as measured."""

    level: str
    alpha_s: Seconds
    bytes_per_s: Rate
    num_points: int = Field(ge=1)
    residual: float = Field(ge=0, description="median relative error of the fit")


class CallFit(Document):
    """Alpha and bandwidth per level of one operation by one path, and what posting a message takes.

    None is derived from another. Where all methods measured post to all at once, only the sum of
    hop and posts is known.
    """

    op: Collective
    path: CallPath
    levels: tuple[LevelFit, ...] = Field(min_length=1)
    issue_s: Seconds | None = Field(
        default=None, description="of one more message beside those under way; None: the prior"
    )


class MeasuredCurve(Document):
    """Seconds of one operation by size: a benchmark's table, or a library's own log.

    ``sizes_bytes`` are nccl-tests' S. The group has equally many members on each of its nodes.
    """

    op: Collective
    algorithm: Algorithm | None = Field(
        default=None, description="null = whichever the library took by itself"
    )
    path: CallPath = "library"
    group_size: int = Field(ge=2)
    num_nodes: int = Field(ge=1, description="hosts that the group lies on")
    sizes_bytes: tuple[Annotated[int, Field(ge=1, le=1 << 50)], ...] = Field(min_length=1)
    seconds: tuple[Annotated[float, Field(ge=1e-9, le=1e6)], ...] = Field(min_length=1)
    source: str

    @model_validator(mode="after")
    def _sizes_ascend(self) -> "MeasuredCurve":
        if list(self.sizes_bytes) != sorted(set(self.sizes_bytes)):
            raise ValueError("sizes_bytes must ascend, each once")
        if len(self.sizes_bytes) != len(self.seconds):
            raise ValueError(
                f"{len(self.sizes_bytes)} sizes_bytes but {len(self.seconds)} seconds; need as many"
            )
        if self.group_size % self.num_nodes:
            raise ValueError(
                f"group_size={self.group_size} on num_nodes={self.num_nodes}; need equally many "
                "members on each node"
            )
        return self


class Calibration(Document):
    """Constants refitted on one cluster. ``id`` hashes everything else."""

    schema_version: Literal[1] = 1
    id: str
    topology: str
    levels: tuple[LevelFit, ...] = Field(description="all operations together")
    calls: tuple[CallFit, ...] = Field(
        default=(), description="operations and paths measured well enough to be told apart"
    )
    curves: tuple[MeasuredCurve, ...] = Field(
        default=(), description="of the library's calls, measured by a benchmark"
    )
    compute_scale: Rate = Field(description="measured over prior seconds, forward and backward")
    optimizer_scale: Rate = Field(description="measured over prior seconds of the optimizer")
    host_overhead_s: Seconds = Field(description="per step, outside compute and collectives")
    residual: float = Field(
        ge=0, description="relative error of the step time on the runs it rests on, median"
    )
    run_hashes: tuple[str, ...]
