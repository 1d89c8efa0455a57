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
