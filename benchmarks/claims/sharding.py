"""Claims about what ranks share out: the memory of ZeRO, and its gathers."""

from collections.abc import Iterator
from typing import Any

from benchmarks.claims.claim import Claim, Verdict, as_times, gpt, laid
from planner.cost.memory import memory
from planner.cost.work import Communication, rank_work
from planner.model.blocks import num_blocks, parameter_count
from planner.units import format_bytes, format_count

__all__ = ["claims", "num_gathers", "zero_savings"]

_RANKS = 64
_PROMISED = (4.0, 8.0, 64.0)


def claims() -> Iterator[Claim]:
    """Yield the claims of this file."""
    yield zero()
    yield gathers()


def zero_savings(main_grads: str, *, whole: bool = False) -> list[float]:
    """Return how many times less memory ZeRO-1, 2 and 3 need on 64 ranks than ZeRO-0.

    Args:
        main_grads: As of ``planner.plan.TrainingSpec``.
        whole: Of everything that a rank holds, and not of weights, gradients and optimizer alone.
    """
    held = []
    for stage in range(4):
        problem, one = laid(
            "llama3-8b",
            "dgx-a100",
            8,
            {"dp": _RANKS, "zero_stage": stage},
            global_batch_size=_RANKS,
            seq_len=4096,
            main_grads=main_grads,
        )
        parts = memory(problem, one)
        states = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes
        held.append(float((parts.total_bytes() if whole else states).max()))
    return [held[0] / one for one in held[1:]]


def zero() -> Claim:
    """The first two are limits for many ranks, of states alone; the third is their number."""
    same, fp32 = zero_savings("same"), zero_savings("fp32")
    total = zero_savings("same", whole=True)

    def near(found: list[float]) -> bool:
        return all(abs(a / b - 1) < 0.2 for a, b in zip(found, _PROMISED, strict=True))

    verdict: Verdict = "holds" if near(total) else ("only if" if near(same) else "wrong")
    said = [" / ".join(map(as_times, one)) for one in (same, fp32, total)]
    return Claim(
        11,
        "ZeRO-1, 2, 3 save 4x, 8x, 64x of the memory",
        f"{said[0]} of weights, gradients and optimizer of llama3-8b on {_RANKS} ranks, AdamW and "
        f"bf16 gradients; {said[1]} with fp32 gradients; {said[2]} of all that a rank of dgx-a100 "
        "holds with one sequence of 4,096 tokens, bf16 gradients.",
        verdict,
        "16 bytes a parameter become 4 + 12/n, 2 + 14/n and 16/n: 4x and 8x are what many ranks "
        f"come near, and 64x is nothing but {_RANKS} ranks. Activations, logits, gathered layers "
        "and buffers stay as they are.",
    )


def num_gathers(zero_stage: int, num_micro_batches: int = 1) -> tuple[float, float, float]:
    """Return a step's all_gathers of layers and of the ends, and a GPU's parameters at rest.

    Of 10 B parameters in 100 layers on 1,024 ranks.
    """
    model = gpt("GPT of 10 B", num_layers=100, hidden_size=2880, num_heads=30)
    layout: dict[str, Any] = {"dp": 1024, "zero_stage": zero_stage}
    batch = 1024 * num_micro_batches
    problem, one = laid(model, "dgx-a100", 128, layout, global_batch_size=batch, seq_len=2048)
    calls = [
        op
        for op in rank_work(problem, one)
        if isinstance(op, Communication) and op.op == "all_gather"
    ]
    layers, ends = (
        sum(float(op.repeats[0]) for op in calls if (op.unit == "dense") is of_layers)
        for of_layers in (True, False)
    )
    assert num_blocks(model)["dense"] == 100, "as the claim has it"
    at_rest = parameter_count(model) / (1024 if zero_stage == 3 else 1)
    return layers, ends, at_rest


def gathers() -> Claim:
    """Weights are gathered for the forward, given back, and gathered for the backward."""
    layers, ends, at_rest = num_gathers(3)
    of_zero_2, _, held = num_gathers(2)
    per_layer = 2 * held / 100
    return Claim(
        12,
        "10B on 1,024 GPUs: 10 M parameters each; 100 layers are 100 all_gathers",
        f"{format_count(at_rest)} each with ZeRO-3 (GPT shape of 100 layers, hidden size 2,880, on "
        f"128 nodes of dgx-a100), and {layers:.0f} all_gathers of layers in every micro-batch, "
        f"{ends:.0f} more of the ends. {of_zero_2:.0f} a step are ZeRO-2's, which leaves all "
        f"{format_count(held)} on every rank.",
        "wrong" if layers != 100 else "holds",
        "ZeRO-3 gives a layer's weights back after the forward and gathers them again for the "
        f"backward, in each micro-batch; each time a rank has some {format_bytes(per_layer)} of a "
        "layer whole.",
    )
