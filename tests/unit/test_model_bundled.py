"""Bundled models: the names, what they are read as, and where they come from."""

import json
from importlib.resources import files

import pytest

from planner.errors import UnknownNameError
from planner.model.bundled import load_model, model_names

NEEDED = {
    "deepseek-v3",
    "gpt3-175b",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
}
CONFIGS = files("planner.model") / "configs"


def test_names_are_sorted_and_hold_every_promised_model():
    assert set(model_names()) >= NEEDED
    assert list(model_names()) == sorted(model_names())
    assert "sources" not in model_names()


@pytest.mark.parametrize("name", model_names())
def test_every_bundled_model_loads_under_its_name(name):
    model = load_model(name)
    assert model.name == name
    assert model.source


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_every_published_model_names_its_origin_and_licence(name):
    entry = json.loads((CONFIGS / "sources.json").read_text())[name]
    assert set(entry) == {"model", "config", "licence_of_model"}
    assert entry["model"].split(",")[0] in load_model(name).source


def test_manifest_names_only_files_that_exist():
    assert set(json.loads((CONFIGS / "sources.json").read_text())) <= set(model_names())


@pytest.mark.parametrize("name", ["lama3-70b", "", "../spec", "sources", "llama3-8b.json"])
def test_unknown_name_lists_the_nearest(name):
    with pytest.raises(UnknownNameError) as caught:
        load_model(name)
    assert caught.value.where == "model"
    assert set(caught.value.nearest) <= set(model_names())
    if name == "lama3-70b":
        assert caught.value.nearest[0] == "llama3-70b"


def test_shapes_that_are_easily_read_wrong():
    deepseek, qwen, llama = map(load_model, ("deepseek-v3", "qwen3-30b-a3b", "llama3-405b"))
    assert deepseek.attention.kind == "mla"
    assert deepseek.moe_layers == tuple(range(3, 61))
    assert deepseek.experts is not None
    assert deepseek.experts.shared_hidden_size == 2048
    assert deepseek.num_mtp_modules == 1
    assert any("num_nextn_predict_layers is 1" in line for line in deepseek.assumptions)
    # 32 heads of 128 on a hidden size of 2048: head_dim is no quotient here.
    assert qwen.attention.kind == "gqa"
    assert (qwen.attention.head_dim, qwen.attention.qk_norm) == (128, "head")
    assert llama.num_layers == 126
