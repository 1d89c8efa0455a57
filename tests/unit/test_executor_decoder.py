"""The module must be the plan's model, and tensor parallelism must not cut a head."""

import pytest
from torch import nn

from executor.decoder import DecoderNames, check_model
from executor.errors import PlanMismatchError
from planner.plan import ModelSummary


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.k_proj = nn.Linear(8, 4, bias=False)
        self.v_proj = nn.Linear(8, 4, bias=False)
        self.o_proj = nn.Linear(8, 8, bias=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Block()
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(8, 16, bias=False)
        self.mlp.up_proj = nn.Linear(8, 16, bias=False)
        self.mlp.down_proj = nn.Linear(16, 8, bias=False)


class Model(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, 10, bias=False)


PER_LAYER = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
SUMMARY = ModelSummary(
    name="eight",
    num_layers=2,
    hidden_size=8,
    vocab_size=10,
    num_params=2 * 10 * 8 + 8 + 2 * PER_LAYER,
    num_active_params=1,
    fingerprint="x",
)


def test_the_plans_model_passes() -> None:
    check_model(SUMMARY, Model())


def test_every_figure_that_differs_is_named() -> None:
    with pytest.raises(PlanMismatchError) as refusal:
        check_model(SUMMARY, Model(num_layers=3))
    assert "num_layers is 3 in the module, 2 in the plan" in str(refusal.value)
    assert f"num_params is {SUMMARY.num_params + PER_LAYER} in the module" in str(refusal.value)
    assert "hidden_size" not in str(refusal.value)


@pytest.mark.parametrize(
    ("tp", "what"),
    [
        (2, "the 1 heads or rows of self_attn.k_proj"),
        (3, "tp=3 does not divide vocab_size 10"),
        (3, "the 16 heads or rows of mlp.gate_proj"),
    ],
)
def test_tensor_parallelism_that_cuts_through_a_unit_is_refused(tp: int, what: str) -> None:
    with pytest.raises(PlanMismatchError, match=what):
        check_model(SUMMARY, Model(), tp=tp)


def test_unknown_names_say_how_to_pass_others() -> None:
    with pytest.raises(PlanMismatchError, match="pass names="):
        check_model(SUMMARY, Model(), names=DecoderNames(layers="blocks"))
