"""Train a small Llama-shaped GPT on a book, the way a plan says.

    torchrun --nproc-per-node 4 examples/train_gpt.py --plan http://127.0.0.1:8000/plans/{id}

The plan decides layout, schedule, micro-batches, gradient reduction, precision and optimizer. Its
model is ``example-gpt`` or ``example-moe``, or the Llama or Mixtral that ``--config`` names. A plan
for one rank runs without torchrun. The first steps are timed and reported to the service that the
plan came from. COMMPLAN_TOKEN is the service's token, if it asks for one.

A rank exits with 2 if the plan or the options are refused, with 3 if it lost another rank.
"""

import argparse
import json
import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import executor
from executor.client import is_url, service_of
from planner.plan import CalibrationRun, Plan

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "planner" / "model" / "configs"
TEXT = HERE / "text" / "alice.txt"

# ---------------------------------------------------------------------------- the model
# Shapes: B micro-batch, S sequence, H hidden size, N heads on this rank, D head dimension.


@dataclass(frozen=True)
class GPTConfig:
    """The fields of a Hugging Face Llama or Mixtral ``config.json`` that this model reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    shared_expert_intermediate_size: int = 0

    @classmethod
    def from_file(cls, path: Path) -> "GPTConfig":
        """Return the config in a JSON file; fields this model does not read are left out."""
        found = {k: v for k, v in json.loads(path.read_text()).items() if v is not None}
        found = {**found.get("rope_parameters", {}), **found}  # where transformers 5 has the theta
        if "head_dim" not in found:
            found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves as in Llama."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
        angles = torch.outer(positions, config.rope_theta**-exponents).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn each pair of ``x`` [B, N, S, D] by the angle of its position, one of [S]."""
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        cos, sin = self.cos[positions].to(x.dtype), self.sin[positions].to(x.dtype)
        return x * cos + turned * sin


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what each position gathers from itself and those before, [B, N, S, D]."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads follows from the projections' width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core = causal_attention
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.rotary = Rotary(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take the hidden states of ``positions`` [S], return [B, S, H]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.core(self.rotary(q, positions), self.rotary(k, positions), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The likeliest experts of each token, and their weights, which add up to 1."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens [T, H], return weights and experts, [T, top_k] each."""
        weights, experts = functional.linear(x, self.weight).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), experts


class Experts(nn.Module):
    """SwiGLU experts, their weights in two tensors, as in Hugging Face's Mixtral."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        number, hidden, width = (
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(number, hidden, width))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return what one expert makes of its tokens [T, H]."""
        gate, up = functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, self.down_proj[expert])


class MixtureOfExperts(nn.Module):
    """Each token goes through its likeliest experts and, if there is one, the shared expert."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = FeedForward(config.hidden_size, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, H]."""
        tokens = x.flatten(0, 1)
        weights, experts = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for expert in range(len(self.experts.down_proj)):
            token, slot = torch.where(experts == expert)
            found = self.experts(tokens[token], expert) * weights[token, slot].unsqueeze(-1)
            out = out.index_add(0, token, found)
        out = out.view_as(x)
        return out if self.shared_expert is None else out + self.shared_expert(x)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = (
            MixtureOfExperts(config)
            if config.num_local_experts
            else FeedForward(config.hidden_size, config.intermediate_size)
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer, [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """Tokens [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each."""
        positions = torch.arange(tokens.shape[-1])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


# ----------------------------------------------------------------------------- the data


class Book:
    """Random windows of a text, one byte a token; step and seed alone decide which."""

    def __init__(self, path: Path, plan: Plan, seed: int) -> None:
        self._tokens = torch.tensor(list(path.read_bytes()), dtype=torch.int64)
        self._shape = (plan.training.global_batch_size, plan.training.seq_len)
        self._seed = seed

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of the whole global batch, [sequences, seq_len] each."""
        sequences, length = self._shape
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        starts = torch.randint(len(self._tokens) - length, (sequences, 1), generator=generator)
        windows = self._tokens[starts + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]


# ------------------------------------------------------------------------- the training


def main() -> None:
    """Train, print the loss on rank 0, and report the timed steps."""
    options = parse_arguments()
    rank_0 = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if rank_0 else logging.ERROR, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    token = os.environ.get("COMMPLAN_TOKEN")
    with executor.join(os.environ, timeout_s=options.timeout_s) as job:
        plan = executor.agree_on_plan(job, lambda: executor.load_plan(options.plan, token=token))
        config = executor.together(job, lambda: load_config(plan, options.config))
        torch.manual_seed(options.seed)
        model = GPT(config)
        trainer = executor.apply(plan, model, job=job, learning_rate=options.learning_rate)
        first_step = executor.load_checkpoint(trainer, options.resume) if options.resume else 0
        book = Book(options.text, plan, options.seed)
        run = train(job, trainer, book, options, first_step)
        if options.save:
            executor.save_checkpoint(trainer, options.save, step=first_step + num_steps(options))
        if run is not None:
            report(run, options, token)


def load_config(plan: Plan, path: Path | None) -> GPTConfig:
    """Return the config of the plan's model; refuse one that has no room for its sequences."""
    path = path or CONFIGS / f"{plan.model.name}.json"
    try:
        config = GPTConfig.from_file(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise executor.PlanMismatchError(
            f"{path} is no config of the plan's model {plan.model.name!r}: {exc!r}; name the "
            "config.json of a Llama or Mixtral with --config"
        ) from exc
    if plan.training.seq_len > config.max_position_embeddings:
        raise executor.PlanMismatchError(
            f"plan {plan.id} trains on sequences of {plan.training.seq_len} tokens, the model has "
            f"{config.max_position_embeddings} positions; plan for a shorter seq_len"
        )
    return config


def train(
    job: executor.Job,
    trainer: executor.Trainer,
    book: Book,
    options: argparse.Namespace,
    first_step: int,
) -> CalibrationRun | None:
    """Run all steps; return the timings of the timed ones on rank 0, if there are any."""
    probes = executor.run_probes(trainer) if options.repeats else ()
    timed: list[executor.StepResult] = []
    run = None
    for step in range(num_steps(options)):
        if step == options.warmup:
            trainer.recorder.clear()
        inputs, targets = (rows[trainer.my_rows()] for rows in book.batch(first_step + step))
        result = executor.timed_step(trainer, inputs, targets)
        loss = trainer.global_loss(result)
        if job.rank == 0:
            print(
                f"step {first_step + step:4d}  loss {loss:.12g}  {result.step_s:.3f} s", flush=True
            )
        if options.warmup <= step < options.warmup + options.repeats:
            timed.append(result)
        if timed and step == options.warmup + options.repeats - 1:
            run = executor.calibration_run(
                job, trainer, timed, num_warmup_steps=options.warmup, probes=probes
            )
    return run


def num_steps(options: argparse.Namespace) -> int:
    """Return how many steps this run takes, timed and untimed."""
    return int(options.steps or options.warmup + options.repeats)


def report(run: CalibrationRun, options: argparse.Namespace, token: str | None) -> None:
    """Send the run where asked: a file, a service, or the service the plan came from."""
    target = options.report or (service_of(options.plan) if is_url(options.plan) else None)
    if target is None:
        return
    if is_url(target):
        executor.post_run(target, run, token=token)
    else:
        executor.save_run(Path(target), run)
    print(f"timings of {len(run.ranks[0].step_s)} steps sent to {target}")


def parse_arguments() -> argparse.Namespace:
    """Return the options; ``--steps`` counts all steps, timed and untimed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", required=True, help="URL or JSON file")
    parser.add_argument("--steps", type=int, help="of this run; default: warmup + repeats")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before the timed ones")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save", type=Path, metavar="DIR", help="a checkpoint after the last step")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on from a checkpoint that any plan has saved; --text and --seed as then",
    )
    parser.add_argument("--report", help="file or service URL; default: the plan's service")
    parser.add_argument("--config", type=Path, help="config.json; default: the plan's bundled one")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=60.0,
        help="of every collective; a lost rank is noticed within it",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
