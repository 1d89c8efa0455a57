"""What a step takes and refuses, in a job of one rank; and the configs that the example reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import executor
from tests.dist.cases import build_model, summary_of, train_gpt
from tests.dist.plans import make_plan


@pytest.fixture(autouse=True)
def job() -> Iterator[executor.Job]:
    threads = torch.get_num_threads()
    with executor.join({}) as joined:
        yield joined
    torch.set_num_threads(threads)


def a_trainer() -> executor.Trainer:
    torch.manual_seed(0)
    return executor.apply(make_plan(model=summary_of("gpt-dense")), build_model("gpt-dense"))


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("targets", (3, 2), -100, "targets of this step go from -100 to"),
        ("targets", (0, 0), 256, "to 256, the vocabulary of plan"),
        ("inputs", (7, 15), 300, "to 300, the vocabulary of plan"),
        ("inputs", (7, 15), -1, "inputs of this step go from -1 to"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    name: str, place: tuple[int, int], value: int, said: str
) -> None:
    trainer = a_trainer()
    inputs, targets = (
        rows.clone() for rows in train_gpt.Book(train_gpt.TEXT, trainer.plan, 0).batch(0)
    )
    {"inputs": inputs, "targets": targets}[name][place] = value
    with pytest.raises(executor.PlanMismatchError) as refused:
        trainer.step(inputs, targets)
    assert said in str(refused.value)
    assert "from 0 to 255" in str(refused.value)


def test_another_shape_is_refused_with_what_to_pass() -> None:
    trainer = a_trainer()
    inputs, targets = train_gpt.Book(train_gpt.TEXT, trainer.plan, 0).batch(0)
    with pytest.raises(executor.PlanMismatchError, match=r"shape \[8, 15\].* needs \[8, 16\]"):
        trainer.step(inputs[:, 1:], targets)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"max_gradient_norm": 0.0},
        {"max_gradient_norm": -1.0},
        {"aux_loss_coefficient": float("inf")},
    ],
    ids=str,
)
def test_options_that_would_train_backwards_or_not_at_all_are_refused(
    options: dict[str, Any],
) -> None:
    [name] = options
    plan, model = make_plan(model=summary_of("gpt-dense")), build_model("gpt-dense")
    with pytest.raises(executor.PlanMismatchError, match=f"apply got {name}="):
        executor.apply(plan, model, **options)


def test_a_module_is_taken_apart_once() -> None:
    model = build_model("gpt-dense")
    plan = make_plan(model=summary_of("gpt-dense"))
    executor.apply(plan, model)
    with pytest.raises(executor.PlanMismatchError, match=r"GPT was taken apart .* build it again"):
        executor.apply(plan, model)


def test_a_trainer_whose_step_failed_takes_no_other() -> None:
    trainer = a_trainer()
    batch = train_gpt.Book(train_gpt.TEXT, trainer.plan, 0).batch(0)
    hook = trainer.chunks[0].layers[3].register_forward_hook(_broken)
    with pytest.raises(ZeroDivisionError):
        trainer.step(*batch)
    hook.remove()
    with pytest.raises(executor.ExecutorError, match=r"earlier step .*ZeroDivisionError"):
        trainer.step(*batch)


def _broken(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("model", ["hf-llama", "gpt-dense"])
def test_bf16_computes_what_the_module_computes_in_bf16(model: str) -> None:
    """Rotary frequencies stay in their own dtype; masters and gradients are fp32."""
    plan = make_plan(model=summary_of(model), precision="bf16", seq_len=64)
    torch.manual_seed(0)
    whole = build_model(model)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    tokens = torch.arange(64).unsqueeze(0) * 3 % 256
    with torch.no_grad():
        out = whole(tokens)
    torch.manual_seed(0)
    trainer = executor.apply(plan, build_model(model))
    with torch.no_grad():
        found = trainer.chunks[0](tokens)
    torch.testing.assert_close(found, out if model == "gpt-dense" else out.logits, rtol=0, atol=0)
    for states in trainer.states:
        assert {m.dtype for m in states.masters} == {torch.float32}
        assert {m.grad.dtype for m in states.masters if m.grad is not None} == {torch.float32}
        assert {p.parameter.dtype for p in states.parameters} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "2"}, "RANK is 2, WORLD_SIZE 2"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "RANK is 0, WORLD_SIZE 2, LOCAL_WORLD_SIZE 0"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
    ],
)
def test_an_environment_that_describes_no_job_is_refused(
    environment: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given = environment if len(environment) == 1 and "not set" in said else usual | environment
    with pytest.raises(SystemExit) as ended, executor.join(given):
        pass
    assert ended.value.code == 2
    assert f"refused: {said}" in capsys.readouterr().err


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_the_example_reads_the_configs_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    config.save_pretrained(tmp_path)
    found = train_gpt.GPTConfig.from_file(tmp_path / "config.json")
    assert found.head_dim == 8
    assert found.rope_theta == config.rope_parameters["rope_theta"]
    assert found.num_local_experts == getattr(config, "num_local_experts", 0)


def test_a_file_that_is_no_config_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(executor.PlanMismatchError, match="num_attention_heads"):
        train_gpt.load_config(make_plan(), tmp_path / "config.json")
