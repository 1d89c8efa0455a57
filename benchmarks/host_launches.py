"""What the host needs for a decoder layer: where the fit of ``launch_s`` starts.

    python -m benchmarks.host_launches

transformers' Llama and GPT-2, so narrow that a layer has nothing to compute, on one thread: forward
and backward of 24 layers less those of 2, over the kernels that the planner lists for such a layer
(``planner.cost.work``). What is left is Python, dispatch and autograd. Least of 20 runs.
"""

import os
import time
from typing import Any, Final

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.claims.claim import laid
from planner.cost.work import Launches, block_work

MODELS: Final[dict[str, Any]] = {
    "llama": lambda layers: LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            vocab_size=128,
        )
    ),
    "gpt2": lambda layers: GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=64, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0
        )
    ),
}
MANY, FEW = 24, 2
REPEATS: Final = 20


def main() -> None:
    """Print microseconds for a layer and for a listed kernel."""
    torch.set_num_threads(1)
    forward_kernels, backward_kernels = listed_kernels()
    print(f"{'model':6} {'recomputed':10} {'forward':>8} {'backward':>9} {'a kernel':>9}")
    for name, made in MODELS.items():
        for again in (False, True):
            many, few = (seconds(made(layers), again) for layers in (MANY, FEW))
            forward, backward = (
                (a - b) / (MANY - FEW) * 1e6 for a, b in zip(many, few, strict=True)
            )
            kernels = forward_kernels * (2 if again else 1) + backward_kernels
            each = (forward + backward) / kernels
            print(f"{name:6} {again!s:10} {forward:5.0f} us {backward:6.0f} us {each:6.1f} us")


def listed_kernels() -> tuple[float, float]:
    """Return the kernels of a dense layer on one rank, forward and backward."""
    problem, one = laid("llama3-8b", "dgx-h100", 1, {}, seq_len=4096, global_batch_size=8)
    listed = {
        op.phase: float(op.num_kernels[0])
        for op in block_work(problem, one, "dense")
        if isinstance(op, Launches)
    }
    return listed["forward"], listed["backward"]


def seconds(model: Any, again: bool) -> tuple[float, float]:
    """Return the least seconds of a forward, and of a backward."""
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
    model.train()
    tokens = torch.randint(0, 128, (1, 4))
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        middle = time.perf_counter()
        loss.backward()
        taken.append((middle - start, time.perf_counter() - middle))
    return min(forward for forward, _ in taken), min(backward for _, backward in taken)


if __name__ == "__main__":
    main()
