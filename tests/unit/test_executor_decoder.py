"""The module must be the plan's model, in one piece, and no degree may cut through a unit."""

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from executor.decoder import DecoderFamily, check_model, family_of, weights_checksum
from executor.errors import PlanMismatchError
from planner.plan import ModelSummary
from tests.dist.jobs import EXAMPLE

sys.path.insert(0, str(EXAMPLE.parent))
import train_gpt  # an example, not a package: its folder has to be on the path first

DENSE: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
EXPERTS: dict[str, Any] = DENSE | {"num_local_experts": 6, "num_experts_per_tok": 2}


def gpt(**changes: Any) -> nn.Module:
    return train_gpt.GPT(train_gpt.GPTConfig(**(DENSE | {"rope_theta": 1e4} | changes)))


def gpt_with_experts() -> nn.Module:
    return gpt(num_local_experts=6, num_experts_per_tok=2)


def llama(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(**(DENSE | {"pad_token_id": None} | changes))
    return transformers.LlamaForCausalLM(config)


def mixtral(**changes: Any) -> nn.Module:
    config = transformers.MixtralConfig(**(EXPERTS | {"pad_token_id": None} | changes))
    return transformers.MixtralForCausalLM(config)


def summary_of(model: nn.Module, **changes: Any) -> ModelSummary:
    """Return the plan's figures for this module, some of them changed."""
    figures = {
        "name": "eight",
        "num_layers": 2,
        "hidden_size": 8,
        "vocab_size": 30,
        "num_params": sum(p.numel() for p in model.parameters()),
        "num_active_params": 1,
        "fingerprint": "x",
    }
    return ModelSummary(**(figures | changes))


def refusal(model: nn.Module, summary: ModelSummary | None = None, **degrees: Any) -> str:
    with pytest.raises(PlanMismatchError) as refused:
        check_model(summary or summary_of(model), model, **degrees)
    message = str(refused.value)
    assert message.startswith(f"module {type(model).__name__} ")
    return message


@pytest.mark.parametrize(
    "build", [gpt, gpt_with_experts, llama, mixtral], ids=lambda build: build.__name__
)
def test_known_families_pass_whole_and_cut(build: Any) -> None:
    model = build()
    check_model(summary_of(model), model)
    ep = 3 if build in (gpt_with_experts, mixtral) else 1
    check_model(summary_of(model), model, tp=2, ep=ep)


def test_tied_embeddings_count_once_and_pass() -> None:
    for model in (gpt(tie_word_embeddings=True), llama(tie_word_embeddings=True)):
        check_model(summary_of(model), model, tp=2)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=30)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), gpt2()], ids=lambda m: type(m).__name__)
def test_a_module_of_no_family_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(PlanMismatchError) as refused:
        family_of(module)
    assert f"module {type(module).__name__} is of no family" in str(refused.value)
    assert "LlamaForCausalLM, MixtralForCausalLM, GPT" in str(refused.value)
    assert "pass family=DecoderFamily(" in str(refused.value)
    assert "is of no family" in refusal(module, summary_of(module))


def test_every_figure_that_differs_is_named() -> None:
    model = gpt()
    message = refusal(model, summary_of(model, num_layers=3, vocab_size=31, num_params=7))
    assert "is not the plan's model 'eight'" in message
    assert "num_layers is 2 in the module, 3 in the plan" in message
    assert "vocab_size is 30 in the module, 31 in the plan" in message
    assert "in the module, 7 in the plan" in message
    assert "hidden_size" not in message


class Parts(nn.Module):
    """A layer like those of the families, of parts that tests take away or add to."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def without(model: nn.Module, part: str) -> nn.Module:
    parent, _, name = part.rpartition(".")
    delattr(model.get_submodule(parent), name)
    return model


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (gpt, "embed_tokens"),
        (gpt, "layers"),
        (gpt, "norm"),
        (gpt, "lm_head"),
        (gpt, "layers.1.self_attn"),
        (gpt, "layers.1.mlp"),
        (gpt, "layers.0.post_attention_layernorm"),
        (gpt_with_experts, "layers.1.mlp.gate"),
        (gpt_with_experts, "layers.1.mlp.gate.weight"),
        (gpt_with_experts, "layers.1.mlp.gate.top_k"),
        (gpt_with_experts, "layers.1.mlp.experts.gate_up_proj"),
        (gpt_with_experts, "layers.1.mlp.experts.act_fn"),
        (mixtral, "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_part_that_is_missing_is_named(build: Any, part: str) -> None:
    model = build()
    message = refusal(without(model, part))
    assert "lacks a part that its family needs" in message
    assert part.rpartition(".")[2] in message
    assert "pass family=" in message


def test_experts_in_a_list_of_modules_are_refused() -> None:
    model = gpt()
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    model.get_submodule("layers.0").mlp = Parts(gate=nn.Linear(8, 4), experts=experts)
    assert "gate_up_proj" in refusal(model)


def test_names_of_another_family_say_how_to_pass_others() -> None:
    family = family_of(gpt())
    other = DecoderFamily(
        embedding=family.embedding,
        layers="blocks",
        norm=family.norm,
        head=family.head,
        run_layer=family.run_layer,
        set_attention=family.set_attention,
    )
    assert "blocks" in refusal(gpt(), family=other)


@pytest.mark.parametrize(
    ("tp", "what"),
    [
        (4, "tp=4 does not divide the 2 heads or rows of self_attn.k_proj"),
        (4, "tp=4 does not divide vocab_size 30"),
        (8, "tp=8 does not divide the 4 heads or rows of self_attn.q_proj"),
        (5, "tp=5 does not divide the 12 heads or rows of mlp.gate_proj"),
    ],
)
def test_tensor_parallelism_that_cuts_through_a_unit_is_refused(tp: int, what: str) -> None:
    for model in (gpt(), llama()):
        message = refusal(model, tp=tp)
        assert "cannot be cut as planned" in message
        assert what in message


@pytest.mark.parametrize(
    ("ep", "build", "what"),
    [
        (4, mixtral, "ep=4 does not divide 6 experts"),
        (4, gpt_with_experts, "ep=4 does not divide 6 experts"),
        (2, llama, "ep=2 has no experts to share out"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(ep: int, build: Any, what: str) -> None:
    assert what in refusal(build(), ep=ep)


def test_biases_are_refused_only_where_tp_would_count_them_wrongly() -> None:
    model = llama(attention_bias=True, mlp_bias=True)
    check_model(summary_of(model), model)
    message = refusal(model, tp=2)
    assert "tp=2 would add the bias of self_attn.o_proj 2 times" in message
    assert "tp=2 would add the bias of mlp.down_proj 2 times" in message
    assert "q_proj" not in message, "a bias of outputs is split with them"
    with_bias = gpt()
    with_bias.lm_head = nn.Linear(8, 30)
    check_model(summary_of(with_bias), with_bias)
    assert "tp=2 does not split the bias of lm_head" in refusal(with_bias, tp=2)


@pytest.mark.parametrize(
    ("build", "setting", "value"),
    [
        (llama, "attention_dropout", 0.1),
        (mixtral, "attention_dropout", 0.1),
        (mixtral, "sliding_window", 8),
        (mixtral, "router_jitter_noise", 0.01),
        (mixtral, "output_router_logits", True),
    ],
)
def test_settings_that_would_be_ignored_are_refused(build: Any, setting: str, value: Any) -> None:
    message = refusal(build(**{setting: value}))
    assert "would train differently here" in message
    assert f"config.{setting}={value} (need " in message


def test_a_rotary_embedding_that_follows_the_longest_position_is_refused() -> None:
    """A rank of cp sees some positions only, so ranks would turn by different angles."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "rope_type='dynamic', which depends on" in refusal(llama(rope_parameters=dynamic))


def test_parameters_outside_the_parts_are_refused() -> None:
    model = gpt()
    model.positions = nn.Embedding(16, 8)
    assert "parameter positions.weight has no place" in refusal(model)


def test_parameters_that_the_expert_layer_does_not_know_are_refused() -> None:
    model = gpt(num_local_experts=6, shared_expert_intermediate_size=4)
    check_model(summary_of(model), model)
    block: Any = model.get_submodule("layers.1.mlp")
    block.shared_expert_gate = nn.Linear(8, 1, bias=False)
    block.experts.down_bias = nn.Parameter(torch.zeros(6, 8))
    message = refusal(model)
    assert "parameter layers.1.mlp.shared_expert_gate.weight has no place" in message
    assert "parameter layers.1.mlp.experts.down_bias has no place" in message
    assert "layers.0" not in message


def test_frozen_parameters_are_refused() -> None:
    model = llama()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    assert "parameter model.norm.weight is frozen" in refusal(model)


def test_the_checksum_tells_values_shapes_and_names_apart() -> None:
    def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(seed)
        return gpt().to(dtype)

    assert weights_checksum(model()) == weights_checksum(model())
    assert weights_checksum(model()) != weights_checksum(model(seed=1))
    assert weights_checksum(model()) != weights_checksum(model(dtype=torch.bfloat16))
    changed = model()
    with torch.no_grad():
        changed.get_parameter("layers.1.mlp.down_proj.weight")[-1, -1] += 1e-6
    assert weights_checksum(changed) != weights_checksum(model())
    zeros = [nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)]
    for layer in zeros:
        nn.init.zeros_(layer.weight)
    assert weights_checksum(zeros[0]) != weights_checksum(zeros[1])
