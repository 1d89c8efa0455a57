"""A published run -> the problem and the one candidate that the cost model prices.

Cells that a source left empty take the defaults below, each one a sentence in ``assumptions``.
What a column has no word for follows from the framework and its time: how gradients are kept,
whether score matrices are stored: ``planner.validate.habits``.

Names of rows, sources and models are not looked at. That is less than it sounds: the statements of
the notes that ``published.FACTS`` knows were written down from this one table, and most of them
stand in the notes of a single source, so that there they say as much as its name would. Which, is
in docs/memory.md. A table of other runs gains from them only where its notes use the same words.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, TypeVar, get_args

import numpy as np

from planner.cost.problem import Problem
from planner.cost.step import price
from planner.documents import validated
from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.devices import Device, device_of
from planner.hardware.gpus import GpuModel, gpu_model
from planner.hardware.roofline import peak_of
from planner.layout.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates, replaced
from planner.model.blocks import BlockKind, block_flop_per_token, block_kinds, layer_kinds
from planner.model.bundled import load_model, model_names
from planner.model.spec import Attention, LatentAttention, MixtureOfExperts, ModelSpec
from planner.pipeline.partition import SplitTable, balanced_layers, split_table, splits_of
from planner.plan import Document, Precision, ScheduleName, TrainingSpec
from planner.search.layers import fewest_recomputed
from planner.search.rank import peak_memory_bytes
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from planner.validate.habits import UNKNOWN_FRAMEWORK, Habit, attention_of, habits_of, waits_of
from planner.validate.machines import Machine, machine_document
from planner.validate.published import LIMITS, Run

__all__ = ["Configuration", "configuration", "joint_of"]

_SCHEDULES: Final[Mapping[str, ScheduleName]] = {
    "1f1b": "1f1b",
    "interleaved": "interleaved_1f1b",
    "gpipe": "gpipe",
    "zb-1p": "zb_1p",
    "zb-h1": "zb_1p",
    "zb-2p": "zb_2p",
    "zb-h2": "zb_2p",
    "zb-v": "zb_v",
    "zbv": "zb_v",
}
_GPT2_VOCABULARY: Final = 51_200  # 50,257 padded to a multiple of 1,024 over tp, as Megatron does
# Tried where a run does not print them.
_MICRO_BATCHES: Final = (1, 2, 4, 8)
_CHUNKS: Final = (2, 3, 4, 5, 6, 7, 8, 12)
# 1F1B is what an interleaved schedule is too, where a source does not say how many chunks.
_MAY_INTERLEAVE: Final = ("", "1f1b", "interleaved")
_NEVER_INTERLEAVES: Final = "deepspeed|fsdp|jax|paxml"
# The narrow products of the one published family with latent attention (2412.19437).
_LATENT: Final = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Head dimensions that kernels exist for, where hidden / heads is none of them.
_HEAD_DIMS: Final = (64, 128, 256)
_MAX_NAME_LENGTH: Final = 120  # of a ``ModelSpec``

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run as the cost model sees it.

    Attributes:
        problem: Model, training, fabric, device.
        candidate: The run's layout, one row.
        assumptions: What the columns leave open, in sentences.
    """

    problem: Problem
    candidate: Candidates
    assumptions: tuple[str, ...]


def configuration(run: Run) -> Configuration:
    """Return the problem and the candidate of a run.

    Raises:
        InvalidInputError: The columns do not say enough, or contradict each other.
    """
    if run.micro_batch is None:
        return _fastest(run)
    _refuse_beyond_limits(run)
    said: list[str] = []
    degrees = _degrees(run, said)
    habits = habits_of(run.framework)
    said += [habit.why for habit in habits] or [UNKNOWN_FRAMEWORK]
    gpu = _gpu(run)
    model = _model(run, degrees["tp"], said)
    training = _training(run, model, gpu, habits, degrees, said)
    chunks, schedule, splits = _pipeline(run, model, training, degrees["pp"], said)
    problem = Problem(
        model=model,
        training=training,
        fabric=_fabric(run, gpu),
        device=_device(gpu, training.precision),
        splits=splits,
        framework="megatron",
    )
    dp, micro_batch = degrees["dp"], run.micro_batch
    zero = _zero_stage(run, dp, said)
    shard = dp if zero else 1
    if run.zero_or_fsdp == "hsdp":
        node = max(1, (run.gpus_per_node or 8) // (degrees["tp"] * degrees["cp"]))
        shard = node if dp % node == 0 else dp
        said.append(f"hsdp shards over {shard} ranks, those of a node")
    values = {
        **{name: degrees[name] for name in ("tp", "cp", "pp", "ep", "etp")},
        "dp_shard": shard,
        "dp_replicate": dp // shard,
        "virtual_stages": chunks,
        "schedule": SCHEDULES.index(schedule),
        "split": 0,
        "micro_batch_size": micro_batch,
        "num_micro_batches": max(1, training.global_batch_size // (dp * micro_batch)),
        "recompute": 0,
        "recompute_layers": 0,
        "zero_stage": zero,
        "sequence_parallel": _sequence_parallel(run, degrees["tp"], habits, said),
        "context_exchange": 0,
        "order": 0,
    }
    candidate = Candidates(**{name: np.array([value]) for name, value in values.items()})
    candidate = _with_recompute(run, problem, candidate, said)
    return Configuration(problem, candidate, tuple(said))


def _fastest(run: Run) -> Configuration:
    """Return the fastest of what fits, of a run whose micro-batch is not printed.

    Who publishes a run has tuned it. Where a micro-batch is not printed, chunks of a pipeline are
    not either; both are tried together, each with the least recomputation that fits. Where weights
    are sharded memory is short, and the micro-batch is one sequence.
    """
    is_open = (run.pp or 1) > 1 and run.vpp is None and run.schedule in _MAY_INTERLEAVE
    is_sharded = run.zero_or_fsdp in ("2", "3", "hsdp")
    is_open = is_open and not re.search(_NEVER_INTERLEAVES, run.framework.lower())
    stages, layers = run.pp or 1, run.layers or 1
    chunks = [v for v in _CHUNKS if is_open and layers % (stages * v) == 0]
    tried: list[tuple[bool, float, int, Configuration]] = []
    for micro_batch in _MICRO_BATCHES[: 1 if is_sharded else None]:
        for vpp in (run.vpp, *chunks):
            try:
                found = configuration(replace(run, micro_batch=micro_batch, vpp=vpp))
            except InvalidInputError:
                if micro_batch == _MICRO_BATCHES[0] and vpp == run.vpp:
                    raise
                continue
            batch, layout = found.problem.training.global_batch_size, found.candidate
            is_asked = run.global_batch in (None, batch)
            if tried and (not is_asked or batch % (int(layout.dp[0]) * micro_batch)):
                continue
            needed = peak_memory_bytes(found.problem, found.candidate)[0]
            beyond = bool(needed > found.problem.capacity_bytes)
            tried.append((beyond, _step_time_s(found) / batch, len(tried), found))
    best = min(tried, key=lambda one: one[:3])[-1]
    layout = best.candidate
    how = f"micro_batch is not printed: {layout.micro_batch_size[0]}"
    if chunks:
        how += f", in {layout.virtual_stages[0]} chunks a rank"
    if len(tried) > 1:
        how += ", the fastest that fits"
    return replace(best, assumptions=(how, *best.assumptions))


def _step_time_s(found: Configuration) -> float:
    """Return the predicted step time; infinite of a schedule that has none."""
    try:
        return float(price(found.problem, found.candidate).step_time_s()[0])
    except InvalidInputError:
        return math.inf


def _refuse_beyond_limits(run: Run) -> None:
    """Refuse a cell that no model or training can have."""
    for name, (_, most) in LIMITS.items():
        value = getattr(run, name)
        if value is not None and value > most:
            raise InvalidInputError(f"{name}={value} must be at most {most}", where=name)
    if len(run.model) > _MAX_NAME_LENGTH:
        raise InvalidInputError(
            f"model={run.model[:20]!r}... has {len(run.model)} characters; need at most "
            f"{_MAX_NAME_LENGTH}",
            where="model",
        )
    if run.sequence_parallel.lower() not in ("", "true", "false"):
        raise InvalidInputError(
            f"sequence_parallel={run.sequence_parallel!r} must be one of true, false, or empty",
            where="sequence_parallel",
        )


def _document(
    kind: type[DocumentT], run: Run, columns: Sequence[str], fields: Mapping[str, Any]
) -> DocumentT:
    """Return ``fields`` as a document; what is wrong with it is told with the cells it is from.

    Raises:
        InvalidInputError: They contradict each other, or exceed what is planned for.
    """
    try:
        return validated(kind, dict(fields))
    except InvalidInputError as exc:
        cells = ", ".join(f"{c}={getattr(run, c)}" for c in columns if getattr(run, c) is not None)
        raise InvalidInputError(f"{cells}: {exc}", where=columns[0]) from exc


def _needed(run: Run, *names: str) -> None:
    if missing := [name for name in names if getattr(run, name) in (None, "")]:
        raise InvalidInputError(f"{', '.join(missing)} not given", where=missing[0])


def _degrees(run: Run, said: list[str]) -> dict[str, int]:
    """Return tp, cp, pp, dp, ep and etp."""
    _needed(run, "n_gpus", "layers", "hidden", "seq_len", "gpu")
    tp, pp, cp, ep = run.tp or 1, run.pp or 1, run.cp or 1, run.ep or 1
    assert run.n_gpus is not None, "checked above"
    dp, left = divmod(run.n_gpus, tp * pp * cp)
    if left or not dp:
        raise InvalidInputError(
            f"tp({tp}) * pp({pp}) * cp({cp}) does not divide n_gpus={run.n_gpus}", where="n_gpus"
        )
    if run.heads is not None and run.heads % tp:
        raise InvalidInputError(f"tp({tp}) does not divide heads={run.heads}", where="tp")
    if not run.moe_experts:
        return {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": 1, "etp": 1}
    if run.moe_experts % ep:
        raise InvalidInputError(
            f"ep({ep}) does not divide moe_experts={run.moe_experts}", where="ep"
        )
    stage = tp * cp * dp
    if stage % ep:
        raise InvalidInputError(
            f"ep({ep}) does not divide the {stage} ranks of a stage", where="ep"
        )
    split = tp > 1 and "experts_whole" not in run.facts and stage % (ep * tp) == 0
    etp = tp if split else 1
    if tp > 1 and "experts_whole" not in run.facts:
        said.append(f"expert tensor parallelism is not printed: {etp}, Megatron's default of tp")
    return {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}


def _gpu(run: Run) -> GpuModel:
    """Return the GPU that the column names: with what follows the name of its chip, or without.

    Brackets, the size of the memory and the kind of board may follow; most boards are SXM.
    """
    bare = run.gpu.partition("(")[0].strip()
    short = re.sub(r"[- ]\d+ ?GB\b", "", bare, flags=re.I)
    chip = re.sub(r"[- ](SXM\d?|OAM|NVL|PCIe)$", "", short, flags=re.I).replace("-", " ")
    for name in (run.gpu, bare, f"{bare} SXM", short, chip, f"{chip} SXM"):
        with suppress(UnknownNameError):
            return gpu_model(name)
    return gpu_model(run.gpu)


def _device(gpu: GpuModel, precision: Precision) -> Device:
    """Return what computes; refuses a precision that it does not have."""
    found = device_of(gpu)
    peak_of(found, precision)
    return found


def _fabric(run: Run, gpu: GpuModel) -> Fabric:
    """Return the cluster that the columns describe."""
    assert run.n_gpus is not None, "checked by _degrees"
    per_node = min(run.gpus_per_node or 8, run.n_gpus)
    nodes = -(-run.n_gpus // per_node)
    fabric = _compiled(
        Machine(
            gpu=gpu.name,
            library=None,
            plugin=None,
            num_nodes=nodes,
            gpus_per_node=max(per_node, run.gpus_per_node or per_node),
            num_gpus=per_node if nodes > 1 else max(per_node, run.gpus_per_node or per_node),
            intra_kind=joint_of(gpu),
            intra_bytes_per_s=None,
            nics_per_node=run.nics_per_node,
            nic_bytes_per_s=run.nic_bytes_per_s,
        )
    )
    return replace(fabric, num_gpus=run.n_gpus)


def joint_of(gpu: GpuModel) -> str:
    """Return what joins the GPUs of a node, as tables of machines call it: the usual board's."""
    if gpu.link_kind == "xgmi":
        return "xgmi"
    if gpu.link_kind is None or not gpu.is_switched:
        return "pcie"
    return "nvl_domain" if gpu.is_coherent else "nvswitch"


@cache
def _compiled(machine: Machine) -> Fabric:
    return compile_fabric(machine_document(machine))


# -------------------------------------------------------------------------------- the model


def _model(run: Run, tp: int, said: list[str]) -> ModelSpec:
    """Return the shape that the columns describe.

    A feed-forward of four hidden sizes is GPT's: two matrices, layer norms, embeddings tied to the
    head. Others are gated, with norms by root mean square and a head of its own.
    """
    assert run.hidden is not None, "checked by _degrees"
    assert run.layers is not None, "checked by _degrees"
    for name in model_names():
        if _has_shape(bundled := load_model(name), run):
            return bundled.model_copy(update={"name": run.model or name})
    width = run.ffn_hidden or 4 * run.hidden
    is_gpt = width == 4 * run.hidden and not run.moe_experts
    said.append(
        "two feed-forward matrices, tied embeddings: the width is 4 hidden"
        if is_gpt
        else "three feed-forward matrices, embeddings not tied: the width is not 4 hidden"
    )
    if run.vocab is None:
        said.append(f"vocab is not printed: {_GPT2_VOCABULARY:,}")
    experts = None
    moe_layers: tuple[int, ...] = ()
    if run.moe_experts:
        _needed(run, "moe_topk")
        assert run.moe_topk is not None, "checked above"
        inner = run.moe_ffn_hidden or width
        if run.moe_topk > run.moe_experts:
            raise InvalidInputError(
                f"moe_topk={run.moe_topk} must be at most moe_experts={run.moe_experts}",
                where="moe_topk",
            )
        experts = _document(
            MixtureOfExperts,
            run,
            ("moe_experts", "moe_topk", "moe_ffn_hidden", "moe_shared_experts"),
            {
                "num_experts": run.moe_experts,
                "top_k": run.moe_topk,
                "expert_hidden_size": inner,
                "shared_hidden_size": inner * (run.moe_shared_experts or 0),
            },
        )
        dense = 3 if "three_dense_layers" in run.facts else 0
        moe_layers = tuple(range(dense, run.layers))
    fields = {
        "name": run.model or "published run",
        "source": "columns of the table",
        "num_layers": run.layers,
        "hidden_size": run.hidden,
        "vocab_size": run.vocab or _GPT2_VOCABULARY,
        "attention": _attention(run, tp, said),
        "feed_forward": {"hidden_size": width, "gated": not is_gpt},
        "experts": experts,
        "moe_layers": moe_layers,
        "norm": "layer" if is_gpt else "rms",
        "tied_embeddings": is_gpt,
    }
    columns = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "moe_experts", "moe_ffn_hidden")
    return _document(ModelSpec, run, columns, fields)


def _has_shape(model: ModelSpec, run: Run) -> bool:
    """Return whether every printed size is that of a bundled model."""
    a, moe = model.attention, model.experts
    asked = {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn_hidden": model.feed_forward.hidden_size,
        "heads": a.num_heads,
        "kv_heads": a.num_kv_heads if isinstance(a, Attention) else a.num_heads,
        "vocab": model.vocab_size,
        "moe_experts": moe.num_experts if moe else 0,
        "moe_ffn_hidden": moe.expert_hidden_size if moe else 0,
    }
    return all((getattr(run, name) or 0) == size for name, size in asked.items())


def _attention(run: Run, tp: int, said: list[str]) -> Attention | LatentAttention:
    assert run.hidden is not None, "checked by _degrees"
    heads = run.heads
    if heads is None:
        hidden = run.hidden
        step = math.lcm(tp, run.kv_heads or 1)
        fitting = [n for n in range(step, hidden + 1, step) if hidden % n == 0]
        if not fitting:
            raise InvalidInputError(
                f"heads is not given, and no multiple of tp={tp} and kv_heads={run.kv_heads or 1} "
                f"divides hidden={hidden}; give heads",
                where="heads",
            )
        heads = min(fitting, key=lambda n: abs(hidden / n - 128))
        said.append(f"heads are not printed: {heads}, of about 128")
    if "latent_attention" in run.facts:
        said.append("latent attention has the ranks and widths of DeepSeek-V3's")
        return _document(LatentAttention, run, ("heads",), {"num_heads": heads, **_LATENT})
    if heads % (run.kv_heads or heads):
        raise InvalidInputError(
            f"heads={heads} must be a multiple of kv_heads={run.kv_heads}", where="kv_heads"
        )
    dim, rest = divmod(run.hidden, heads)
    if rest or (run.kv_heads not in (None, heads) and dim not in _HEAD_DIMS):
        dim = min((d for d in _HEAD_DIMS if d >= dim), default=dim)
        said.append(f"hidden / heads is no head dimension: {dim}")
    fields = {"num_heads": heads, "num_kv_heads": run.kv_heads or heads, "head_dim": dim}
    return _document(Attention, run, ("heads", "kv_heads", "hidden"), fields)


# ----------------------------------------------------------------------------- how it is trained


def _training(
    run: Run,
    model: ModelSpec,
    gpu: GpuModel,
    habits: list[Habit],
    degrees: Mapping[str, int],
    said: list[str],
) -> TrainingSpec:
    fields: dict[str, Any] = {}
    for habit in reversed(habits):
        fields |= habit.training
    precision = run.precision.lower()
    if precision and precision not in get_args(Precision):
        raise InvalidInputError(
            f"precision={run.precision!r} must be one of {', '.join(get_args(Precision))}",
            where="precision",
        )
    if not precision:
        precision = "fp16" if gpu.architecture == "volta" else "bf16"
        said.append(f"precision is not printed: {precision}")
    is_megatron = "megatron" in run.framework.lower()
    if precision == "fp16" and is_megatron:
        fields.setdefault("main_grads", "both")
    if "fp32_accumulation" in run.facts:
        fields["main_grads"] = "both"
    fields |= attention_of(run, model, gpu, said)
    fields |= waits_of(run, said)
    if "optimizer_on_cpu" in run.facts:
        fields["offload"] = ("gradients", "optimizer")
    if run.offloaded_layers:
        fields["offload"] = (*fields.get("offload", ()), "activations")
        fields["offload_layers"] = run.offloaded_layers
    if model.experts is not None and "capacity_factor_1" in run.facts:
        fields["expert_capacity"] = {"factor": 1.0}
    assert run.micro_batch is not None, "configuration tries some"
    batch, least = run.global_batch, degrees["dp"] * run.micro_batch
    if batch is None:
        batch = least * 4 * degrees["pp"]
        said.append(f"global_batch is not printed: {batch:,}, four micro-batches per stage")
    if batch < least:
        said.append(f"global_batch={batch} is less than one micro-batch a rank: {least}")
        batch = least
    assert run.seq_len is not None, "checked by _degrees"
    fields |= {"global_batch_size": batch, "seq_len": run.seq_len, "precision": precision}
    columns = ("seq_len", "global_batch", "precision", "n_gpus", "micro_batch", "offloaded_layers")
    return _document(TrainingSpec, run, columns, fields)


def _zero_stage(run: Run, dp: int, said: list[str]) -> int:
    if run.zero_or_fsdp == "hsdp":
        return 3
    if run.zero_or_fsdp in ("0", "1", "2", "3"):
        return int(run.zero_or_fsdp)
    if run.zero_or_fsdp:
        raise InvalidInputError(
            f"zero_or_fsdp={run.zero_or_fsdp!r} must be one of 0, 1, 2, 3, hsdp",
            where="zero_or_fsdp",
        )
    if dp > 1:
        said.append("zero_or_fsdp is not printed: 1, a distributed optimizer")
    return 1


def _sequence_parallel(run: Run, tp: int, habits: list[Habit], said: list[str]) -> bool:
    if tp == 1:
        return False
    if run.sequence_parallel:
        return run.sequence_parallel.lower() == "true"
    usual = bool(run.moe_experts) or any(habit.sequence_parallel for habit in habits)
    said.append(f"sequence_parallel is not printed: {'on' if usual else 'off'}")
    return usual


def _pipeline(
    run: Run, model: ModelSpec, training: TrainingSpec, pp: int, said: list[str]
) -> tuple[int, ScheduleName, SplitTable]:
    """Return chunks per rank, the schedule, and the split of the layers."""
    chunks = run.vpp or 1 if pp > 1 else 1
    if run.schedule == "interleaved" and pp > 1 and chunks == 1:
        chunks = next((v for v in (2, 3, 4) if model.num_layers % (pp * v) == 0), 1)
        said.append(f"vpp is not printed: {chunks}")
    schedule: ScheduleName = "none"
    if pp > 1:
        if run.schedule and run.schedule not in _SCHEDULES:
            raise InvalidInputError(f"schedule {run.schedule!r} is not known", where="schedule")
        usual = "interleaved" if chunks > 1 else "1f1b"
        schedule = _SCHEDULES[run.schedule or usual]
        if schedule in ("1f1b", "interleaved_1f1b"):
            schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    kinds, stages = layer_kinds(model), pp * chunks
    costs: dict[BlockKind, float] = {
        kind: block_flop_per_token(model, kind, training.seq_len) for kind in block_kinds(model)
    }
    counted = run.facts & {"ends_hold_one_layer_less", "ends_count_as_layers"}
    # with both ends counted as layers, they may be all that the first and last stage hold
    ends_fill = stages == len(kinds) + 2
    if stages > len(kinds) and not ends_fill:
        raise InvalidInputError(
            f"layers={len(kinds)} do not fill the {stages} stages of pp={pp} * vpp={chunks}; need "
            "at most as many stages as layers",
            where="pp" if pp > len(kinds) else "vpp",
        )
    if counted or (len(kinds) % stages and (len(kinds) + 2) % stages == 0):
        layers = _with_short_ends(len(kinds), stages)
        said.append("embedding and head count as a layer each")
    else:
        layers = balanced_layers([1.0] * len(kinds), stages)
    if pp == 1:
        return (
            1,
            schedule,
            split_table(kinds, [(1, 1)], costs, num_mtp_modules=model.num_mtp_modules),
        )
    return chunks, schedule, splits_of(kinds, [(pp, chunks)], [layers], model.num_mtp_modules)


def _with_short_ends(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return layers per stage, where embedding and head take the place of one.

    >>> _with_short_ends(6, 4), _with_short_ends(2, 4)
    ((1, 2, 2, 1), (0, 1, 1, 0))
    """
    if num_layers + 2 == stages:
        return (0, *[1] * num_layers, 0)
    return balanced_layers([1.0] * num_layers, stages, first_extra=1, last_extra=1)


def _with_recompute(
    run: Run, problem: Problem, candidate: Candidates, said: list[str]
) -> Candidates:
    """Return the candidate with the printed mode, or the least that fits where none is printed.

    What torch's users call selective recomputes some of the layers, and how many is not printed:
    every second, as torchtitan does by default, or more.
    """
    is_torch = re.search("fsdp|torchtitan|torchtune", run.framework.lower())
    of_layers = run.recompute == "selective" and is_torch
    if run.recompute in RECOMPUTE_MODES and not of_layers:
        return candidate.with_recompute(run.recompute)
    if run.recompute not in ("", *RECOMPUTE_MODES):
        raise InvalidInputError(
            f"recompute={run.recompute!r} must be one of {', '.join(RECOMPUTE_MODES)}",
            where="recompute",
        )
    some = fewest_recomputed(problem, candidate)
    tried = {
        "none": candidate.with_recompute("none"),
        "selective": candidate.with_recompute("selective"),
        f"{'' if not len(some) else int(some.recompute_layers[0])} layers of every stage": some,
        "full": candidate.with_recompute("full"),
    }
    if of_layers:
        half = -(
            -problem.model.num_layers // (2 * int(candidate.pp[0] * candidate.virtual_stages[0]))
        )
        every_second = replaced(candidate.with_recompute("full"), recompute_layers=np.array([half]))
        tried = {"every second layer": every_second} | tried
        del tried["none"], tried["selective"]
    capacity = problem.capacity_bytes
    fitting = [
        name
        for name, found in tried.items()
        if len(found) and peak_memory_bytes(problem, found)[0] <= capacity
    ]
    least = fitting[0] if fitting else "full"
    unsaid = "how many layers are recomputed" if of_layers else "recompute"
    said.append(f"{unsaid} is not printed: {least}, the least that fits")
    return tried[least]
