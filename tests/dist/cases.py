"""Layouts and models that are trained in tests, and the same training in one process."""

import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from planner.plan import ModelSummary, Plan
from tests.dist.jobs import EXAMPLE
from tests.dist.plans import TINY, make_plan

sys.path.insert(0, str(EXAMPLE.parent))
import train_gpt  # an example, not a package: its folder has to be on the path first

__all__ = [
    "MODELS",
    "STEPS",
    "Case",
    "build_model",
    "case",
    "summary_of",
    "train_gpt",
    "train_whole",
]

STEPS = 20
LEARNING_RATE = 1e-3

_DENSE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
_EXPERTS = {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}

# "gpt-*" are examples/train_gpt.py, the others are built by transformers.
MODELS: dict[str, dict[str, Any]] = {
    "gpt-dense": _DENSE,
    "gpt-tied": _DENSE | {"tie_word_embeddings": True},
    "gpt-experts": _DENSE | _EXPERTS,
    "gpt-shared-expert": _DENSE | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "hf-llama": _DENSE,
    "hf-llama-tied": _DENSE | {"tie_word_embeddings": True},
    "hf-mixtral": _DENSE | _EXPERTS,
}


@dataclass(frozen=True)
class Case:
    """One plan to train a model under, by name."""

    name: str
    plan: Plan
    model: str
    steps: int
    max_gradient_norm: float | None
    aux_loss_coefficient: float

    @property
    def has_own_methods(self) -> bool:
        """Whether every collective with a choice is one of the executor's own."""
        methods = {method for choice in self.plan.collectives for method in choice.methods()}
        return all(method.path != "library" for method in methods)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.model_dump(mode="json")}


def case(
    name: str,
    model: str = "gpt-dense",
    *,
    steps: int = STEPS,
    max_gradient_norm: float | None = None,
    aux_loss_coefficient: float = 0.0,
    **layout: Any,
) -> Case:
    """Return a case; ``layout`` is what ``tests.dist.plans.make_plan`` takes."""
    plan = make_plan(model=summary_of(model), **layout)
    return Case(name, plan, model, steps, max_gradient_norm, aux_loss_coefficient)


def build_model(name: str) -> nn.Module:
    config = MODELS[name]
    if name.startswith("gpt-"):
        return train_gpt.GPT(train_gpt.GPTConfig(**config))
    import transformers

    own: dict[str, Any] = {
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",
        "pad_token_id": None,
    }
    if name == "hf-mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, **own))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, **own))


@cache
def summary_of(name: str) -> ModelSummary:
    model = build_model(name)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return TINY.model_copy(update={"name": name, "num_params": num_params})


@cache
def train_whole(
    model_name: str, max_gradient_norm: float | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train with plain torch: no executor, the whole batch at once.

    Returns losses, gradient norms (where they are clipped) and the parameters after the last step.
    """
    plan = make_plan()
    torch.manual_seed(0)
    model = build_model(model_name).to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    book = train_gpt.Book(train_gpt.TEXT, plan, seed=0)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = book.batch(step)
        out = model(inputs)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if max_gradient_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3, "it learns"
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
