"""planner.documents: strict JSON, and pydantic's complaints in the planner's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.documents import MAX_DEPTH, parse_json, validated
from planner.errors import InvalidInputError
from planner.plan import TrainingSpec, canonical_json
from planner.request import PlanRequest

TRAINING = {"global_batch_size": 8, "seq_len": 128}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1 column 2"),
        (b"\xff", "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper"),
        (b"[" * 200_000, "nested"),
        (b'"\\ud800"', "UTF-8"),
    ],
)
def test_what_is_no_strict_json_is_refused_with_the_reason(text: bytes, said: str) -> None:
    with pytest.raises(InvalidInputError, match=r"f\.json: ") as caught:
        parse_json(text, source="f.json")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_key_given_twice_is_found_among_a_hundred_thousand() -> None:
    # looked for one by one it would take a minute and a half
    keys = ",".join(f'"k{i}":0' for i in range(100_000))
    with pytest.raises(InvalidInputError, match="'k99999' appears twice"):
        parse_json(f'{{{keys},"k99999":1}}', source="f.json")


def test_errors_beyond_those_read_are_counted() -> None:
    unknown = {f"k{i}": 0 for i in range(20_000)}
    with pytest.raises(InvalidInputError, match=r"k0 is not a known field.*; and 19996 more$"):
        validated(TrainingSpec, {**TRAINING, **unknown})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**29), 10**29) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_strict_json_comes_back_as_it_was(value: object) -> None:
    assert parse_json(canonical_json({"value": value}), source="f") == {"value": value}


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        ({"model": None}, "model", "got null"),
        ({"nodes": 0}, "nodes", "greater than or equal to 1, got 0; try 1"),
        ({"nodes": 10**25}, "nodes", "try 1000000"),
        ({"modle": 1}, "modle", "not a known field"),
        ({"training": {**TRAINING, "optimizer": "adam"}}, "training.optimizer", "try 'adamw'"),
        ({"training": {"seq_len": 1}}, "training.global_batch_size", "is missing"),
        ({"constraints": {"tp": "x" * 500}}, "constraints.tp", "..."),
        ({"topology": {"name": "t"}}, "topology.library", "is missing"),
        ({"model": {"huggingface": 3}}, "model.huggingface", "dictionary, got 3"),
        ({"model": {"name": 5, "attention": 0}}, "model.name", "string, got 5"),
        ({"top_k": True, "framework": []}, "framework", "got a list of 0"),
    ],
)
def test_an_invalid_request_is_told_where_what_and_what_to_try(
    change: dict[str, object], where: str, said: str
) -> None:
    request = {"topology": "t", "model": "m", "training": TRAINING, **change}
    with pytest.raises(InvalidInputError) as caught:
        validated(PlanRequest, request)
    assert caught.value.where == where
    assert said in str(caught.value)
    for tag in ("ModelSpec", "HuggingFaceModel", "TopologyDocument", "constrained"):
        assert tag not in str(caught.value)


def test_many_errors_are_counted_not_listed() -> None:
    with pytest.raises(InvalidInputError, match="and 5 more") as caught:
        validated(TrainingSpec, dict.fromkeys("abcdefg"), source="file.json")
    assert str(caught.value).startswith("file.json: ")


def test_a_bad_item_is_told_once_and_not_as_a_list_that_is_too_short() -> None:
    packing = {"lengths": ["1"], "counts": [True]}
    with pytest.raises(InvalidInputError) as caught:
        validated(TrainingSpec, {**TRAINING, "packing": packing})
    assert str(caught.value) == (
        "packing.lengths[0] must be an integer, got '1'; "
        "packing.counts[0] must be an integer, got true"
    )
    with pytest.raises(InvalidInputError, match="at least 1 item"):
        validated(TrainingSpec, {**TRAINING, "packing": {"lengths": [], "counts": [1]}})


def test_a_rule_across_fields_speaks_its_own_words() -> None:
    with pytest.raises(InvalidInputError, match="attention: num_heads") as caught:
        validated(
            PlanRequest,
            {
                "topology": "t",
                "training": TRAINING,
                "model": {
                    "name": "m",
                    "source": "test",
                    "num_layers": 1,
                    "hidden_size": 8,
                    "vocab_size": 8,
                    "attention": {"kind": "gqa", "num_heads": 3, "num_kv_heads": 2, "head_dim": 4},
                    "feed_forward": {"hidden_size": 8},
                },
            },
        )
    assert caught.value.where == "model.attention"


@pytest.mark.parametrize("field", ["inference", "max_output_tokens", "ttft"])
def test_inference_requests_are_refused_by_name(field: str) -> None:
    request = {
        "topology": "dgx-h100",
        "model": "llama3-8b",
        "training": {"global_batch_size": 8, "seq_len": 128},
        field: True,
    }
    with pytest.raises(InvalidInputError, match=rf"{field}: inference is not planned for"):
        validated(PlanRequest, request)
