"""Claims about mixtures of experts: what they send, how long that takes, when they pay."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.claims.claim import Claim, Verdict, as_share, as_times, gpt, laid, step_s
from planner.constants import STEP_SPREAD
from planner.cost.problem import Problem
from planner.cost.seconds import seconds
from planner.cost.step import price
from planner.cost.traffic import bytes_per_level
from planner.cost.work import Communication, Gemm, block_work
from planner.hardware.roofline import peak_of
from planner.layout.candidates import Candidates
from planner.layout.groups import axis_group
from planner.model.blocks import BlockKind, parameter_count
from planner.model.bundled import load_model
from planner.model.spec import ModelSpec
from planner.plan import Axis
from planner.units import format_bytes, format_count, format_rate, format_seconds

__all__ = ["claims", "layer_bytes"]

_MODELS: Final = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def claims() -> Iterator[Claim]:
    """Yield the claims of this file."""
    yield against_dense()
    yield times_of_a_layer()
    yield conditions()


def layer_bytes(problem: Problem, one: Candidates, kind: BlockKind, axis: Axis) -> float:
    """Return what a rank sends over an axis for a layer, forward and backward of a micro-batch."""
    fabric, group, found = problem.fabric, axis_group(problem.fabric, one, axis), 0.0
    for op in seconds(problem, one, block_work(problem, one, kind)):
        if isinstance(op.op, Communication) and op.op.axis == axis and op.choice is not None:
            way = op.choice.methods[int(op.choice.index[0])]
            sent = bytes_per_level(op.op.op, way, fabric, group, op.op.size_bytes)
            found += sum(float(level[0]) for level in sent) * float(op.op.repeats[0])
    return found


def against_dense() -> Claim:
    """By top_k, and by how many tokens the ranks share."""
    ratios, training = [], {"global_batch_size": 8, "seq_len": 4096}
    for name in _MODELS:
        model = load_model(name)
        dense = model.model_copy(update={"experts": None, "moe_layers": (), "num_mtp_modules": 0})
        cases: tuple[tuple[ModelSpec, dict[str, int], BlockKind, Axis], ...] = (
            (model, {"ep": 8, "dp": 8}, "moe", "ep"),
            (dense, {"tp": 8, "dp": 1}, "dense", "tp"),
        )
        found = [
            layer_bytes(*laid(spec, "dgx-h100", 1, layout, **training), kind, axis)
            for spec, layout, kind, axis in cases
        ]
        ratios.append(found[0] / found[1])
    chosen = [load_model(name).experts for name in _MODELS]
    said = ", ".join(
        f"{as_times(ratio)} in {name} (top {moe.top_k})"
        for name, ratio, moe in zip(_MODELS, ratios, chosen, strict=True)
        if moe is not None
    )
    near = [0.75 <= ratio / 4 <= 1.25 for ratio in ratios]
    verdict: Verdict = "holds" if all(near) else ("only if" if any(near) else "wrong")
    return Claim(
        15,
        "A mixture of experts communicates 4x what a dense layer does",
        f"a rank's exchanges of a micro-batch over ep 8 are {said} of what the same model with "
        "dense layers sends over tp 8 (dgx-h100, one sequence of 4,096 tokens).",
        verdict,
        "It goes with top_k: four exchanges of k rows a token against gathers and scatters of one. "
        "And tp 8 sends that for one sequence, ep 8 for eight: per token it is "
        f"{as_times(min(ratios) / 8)} to {as_times(max(ratios) / 8)}. A dense layer without tensor "
        "parallelism sends nothing but gradients.",
    )


def _layer_s(problem: Problem, one: Candidates, names: Sequence[str]) -> float:
    """Return the forward of the ops of those names in a layer of experts."""
    timed = seconds(problem, one, block_work(problem, one, "moe"))
    return sum(
        float(op.total_s[0]) for op in timed if op.op.phase == "forward" and op.op.name in names
    )


def times_of_a_layer() -> Claim:
    """Four times without a batch: what links and GPUs they would be the times of."""
    said_s = {"experts": 12e-3, "dispatch": 8e-3, "combine": 5e-3, "gating": 1.5e-3}
    experts = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 8192, "gated": False}
    layers = tuple(range(24))
    model = gpt(
        "MoE", num_layers=24, hidden_size=2048, num_heads=16, experts=experts, moe_layers=layers
    )
    layout = {"ep": 8, "dp": 8}
    problem, one = laid(model, "dgx-a100", 1, layout, global_batch_size=8, seq_len=2048)
    names = {
        "experts": ("experts_up", "experts_down", "expert_activation"),
        "dispatch": ("ep_dispatch",),
        "combine": ("ep_combine",),
        "gating": ("router", "permute"),
    }
    ours_s = {part: _layer_s(problem, one, of) for part, of in names.items()}
    work = [op for op in block_work(problem, one, "moe") if op.phase == "forward"]
    flop = sum(
        float((op.flop * op.repeats)[0])
        for op in work
        if isinstance(op, Gemm) and op.name in names["experts"]
    )
    sent = sum(
        float((op.size_bytes * op.repeats)[0]) * 7 / 8
        for op in work
        if isinstance(op, Communication) and op.name == "ep_dispatch"
    )
    times = {part: said_s[part] / ours_s[part] for part in said_s}
    apart = max(times.values()) / min(times.values())
    rate = format_rate(sent / said_s["dispatch"], "B/s")
    peak = format_rate(peak_of(problem.device, "bf16"), "flop/s")
    return Claim(
        16,
        "8 A100, sequence 2,048, hidden size 2,048: experts 12 ms, dispatch 8, combine 5, gating "
        "1.5",
        f"the batch is not said; for one sequence a GPU, 8 experts of 8,192, top 2, on a node of "
        f"dgx-a100 we have {format_seconds(ours_s['experts'])}, "
        f"{format_seconds(ours_s['dispatch'])}, {format_seconds(ours_s['combine'])} and "
        f"{format_seconds(ours_s['gating'])} forward.",
        "holds" if apart < 2 and max(times.values()) < 2 else "wrong",
        f"For that batch they make {format_rate(flop / said_s['experts'], 'flop/s')} on GPUs of "
        f"{peak} and {rate} over links of "
        f"{format_rate(problem.fabric.levels[0].bytes_per_s, 'B/s')}, and no other batch explains "
        f"both: experts are {as_times(times['experts'])} ours, dispatch "
        f"{as_times(times['dispatch'])}. Dispatch and combine send the same {format_bytes(sent)}. "
        "Our gating is router and permutation; the top-k kernels in it are not priced.",
    )


def conditions() -> Claim:
    """One case against each condition."""
    moe = ModelSpec.model_validate(
        {
            "name": "MoE of 6.9 B",
            "source": "the shape that a claim speaks of",
            "num_layers": 16,
            "hidden_size": 2048,
            "vocab_size": 50_304,
            "attention": {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128},
            "feed_forward": {"hidden_size": 8192},
            "experts": {"num_experts": 64, "top_k": 8, "expert_hidden_size": 1024},
            "moe_layers": tuple(range(16)),
        }
    )
    dense = moe.model_copy(update={"experts": None, "moe_layers": ()})
    total, active = parameter_count(moe), parameter_count(moe, active=True)
    on, slower, shares = "hgx-h100-8x400-roce", [], []
    for num_nodes, ep, dp in ((1, 4, 4), (16, 8, 128), (16, 64, 128)):
        training = {"global_batch_size": 16 * dp, "seq_len": 4096}
        sparse = laid(moe, on, num_nodes, {"ep": ep, "dp": dp, "micro_batch_size": 2}, **training)
        plain = laid(dense, on, num_nodes, {"dp": dp, "micro_batch_size": 2}, **training)
        priced = price(*sparse)
        slower.append(step_s(*sparse) / step_s(*plain))
        shares.append(float((priced.ep_exposed_s / priced.step_time_s())[0]))
    few, many, across = slower
    pays = [one < total / active for one in (few, many)]
    return Claim(
        17,
        "Experts pay only above 10B, on 8 GPUs and more, with as many experts as GPUs, over "
        "InfiniBand",
        f"{format_count(total)} parameters, {format_count(active)} active, 64 experts, top 8, on "
        f"{on}: {as_times(total / active)} the parameters of the dense model of as much compute "
        f"cost {as_times(few)} its step on 4 GPUs (ep 4), {as_times(many)} on 128 in groups of 8, "
        f"{as_times(across)} with ep 64.",
        "wrong" if all(pays) else ("only if" if any(pays) else "holds"),
        "Below 10 B, on fewer than 8 GPUs, with fewer experts than GPUs and with RoCE between "
        "nodes they add less time than parameters. What counts is whether the exchange leaves the "
        f"node: it is {as_share(shares[1])} of a step inside and {as_share(shares[2])} across. "
        "Four of five published steps with experts are met within "
        f"{as_share(STEP_SPREAD['experts'].value)} ([accuracy.md](accuracy.md)), and what the "
        "parameters are worth is not ours to say.",
    )
