"""Every legality rule with rows that break it and rows that do not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from planner.errors import InvalidInputError
from planner.frameworks import refused_model, refused_training, rules_for
from planner.model.bundled import load_model
from planner.model.spec import Attention, ModelSpec, Window
from planner.plan import Framework, TrainingSpec
from planner.request import PlanRequest
from planner.resolving import build_problem, resolve
from tests.unit.problems import row

LLAMA = load_model("llama3-8b")  # 32 heads, 8 key/value heads, feed-forward 2**11 x 7
MIXTRAL = load_model("mixtral-8x7b")  # 8 experts of 2**11 x 7, no shared one
DEEPSEEK = load_model("deepseek-v3")  # latent attention, 128 heads
WINDOWED = LLAMA.model_copy(update={"window": Window(size=4096, layers=(0, 2))})


def with_shared_expert(width: int) -> ModelSpec:
    """Return Mixtral with a shared expert; every layer is a mixture, so no dense width counts."""
    assert MIXTRAL.experts is not None
    experts = MIXTRAL.experts.model_copy(update={"shared_hidden_size": width})
    ffn = MIXTRAL.feed_forward.model_copy(update={"hidden_size": 7})
    return MIXTRAL.model_copy(update={"experts": experts, "feed_forward": ffn})


def with_heads(num_heads: int, num_kv_heads: int) -> ModelSpec:
    attention = Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128)
    return LLAMA.model_copy(update={"attention": attention})


@dataclass(frozen=True)
class Case:
    """A row that breaks a rule, or does not."""

    framework: Framework
    rule: str
    breaks: bool
    degrees: dict[str, Any]
    model: ModelSpec = LLAMA
    seq_len: int = 8192
    training: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sign = "breaks" if self.breaks else "keeps"
        return f"{self.model.name}-{self.degrees}-{sign}-{self.rule}"


def cases(framework: Framework, rule: str, *rows: tuple[Any, ...]) -> list[Case]:
    """Return one case per (breaks, degrees[, model[, seq_len[, training]]])."""
    return [Case(framework, rule, *of_row) for of_row in rows]


def interleaved(m: int) -> dict[str, Any]:
    chunks = {"pp": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
    return {**chunks, "num_micro_batches": m}


REPLICAS = {"pp": 2, "dp_replicate": 4, "schedule": "1f1b", "order": "tp-cp-ep-pp-dp"}
WHOLE, SHARDED = {"sequence_parallel": False}, {"sequence_parallel": True}

COMMON = [
    *cases(
        "megatron",
        "heads-split-over-tp",
        (True, {"tp": 3}),
        (True, {"tp": 64}),
        (False, {"tp": 32}),
    ),
    *cases(
        "megatron",
        "kv-heads-split-over-tp",
        (True, {"tp": 6}, with_heads(12, 4)),
        (False, {"tp": 2}, with_heads(12, 4)),
        (False, {"tp": 12}, with_heads(12, 4)),
        (False, {"tp": 6}, DEEPSEEK),
    ),
    *cases(
        "megatron",
        "ffn-splits-over-tp",
        (True, {"tp": 3}),
        (False, {"tp": 7}),
        (True, {"tp": 8}, with_shared_expert(100)),
        (False, {"tp": 4}, with_shared_expert(100)),
        (False, {"tp": 3}, MIXTRAL),
    ),
    *cases(
        "megatron",
        "experts-split-over-ep",
        (True, {"ep": 3}, MIXTRAL),
        (True, {"etp": 3}, MIXTRAL),
        (True, {"ep": 16}, MIXTRAL),
        (False, {"ep": 8, "etp": 2}, MIXTRAL),
        (True, {"ep": 2}),
        (True, {"etp": 2}),
        (False, {}),
    ),
    *cases(
        "megatron",
        "moe-with-tp-needs-sequence-parallel",
        (True, {"tp": 2, **WHOLE}, MIXTRAL),
        (False, {"tp": 2, **SHARDED}, MIXTRAL),
        (False, {"tp": 1, **WHOLE}, MIXTRAL),
        (False, {"tp": 2, **WHOLE}),
    ),
    *cases(
        "megatron",
        "sequence-splits-over-cp",
        (True, {"cp": 4}, LLAMA, 8196),
        (False, {"cp": 4}, LLAMA, 8200),
        (False, {"cp": 1}, LLAMA, 8195),
    ),
    *cases(
        "megatron",
        "sequence-splits-over-tp",
        (True, {"tp": 4, "cp": 2, **SHARDED}, LLAMA, 8196),
        (False, {"tp": 4, "cp": 1, **SHARDED}, LLAMA, 8196),
        (False, {"tp": 4, "cp": 2, **WHOLE}, LLAMA, 8196),
    ),
    *cases(
        "megatron",
        "interleaving-needs-full-rounds",
        (True, interleaved(6)),
        (True, interleaved(2)),
        (False, interleaved(8)),
        (False, {"pp": 4, "schedule": "1f1b", "num_micro_batches": 6}),
    ),
    *cases(
        "megatron",
        "zero-bubble-schedules-have-no-price",
        (True, {"pp": 4, "schedule": "zb_1p"}),
        (True, {"pp": 4, "schedule": "zb_2p"}),
        (True, {"pp": 4, "schedule": "zb_v"}),
        (False, {"pp": 4, "schedule": "1f1b"}),
    ),
    *cases(
        "megatron",
        "some-layers-recomputed-need-one-kind",
        (True, {"recompute": "full", "recompute_layers": 2}, DEEPSEEK),
        (False, {"recompute": "full", "recompute_layers": 2}, MIXTRAL),
        (False, {"recompute": "full"}, DEEPSEEK),
    ),
    *cases(
        "megatron",
        "dp-outermost-needs-equal-dp",
        (True, {**REPLICAS, "tp": 2, "ep": 1}, MIXTRAL),
        (True, {**REPLICAS, "tp": 2, "ep": 4}, MIXTRAL),
        (True, {**REPLICAS, "cp": 2}),
        (False, {**REPLICAS, "tp": 2, "ep": 2}, MIXTRAL),
        (False, {**REPLICAS, "tp": 2, "etp": 2}, MIXTRAL),
        (False, {**REPLICAS, "tp": 2}),
        (False, {**REPLICAS, "tp": 2, "pp": 1}, MIXTRAL),
        (False, {**REPLICAS, "tp": 2, "dp_replicate": 1}, MIXTRAL),
        (False, {**REPLICAS, "tp": 2, "order": "tp-cp-ep-dp-pp"}, MIXTRAL),
    ),
]

MEGATRON = [
    *cases(
        "megatron",
        "megatron-kv-heads",
        (True, {"tp": 16}),
        (False, {"tp": 8}),
        (False, {"tp": 16}, DEEPSEEK),
    ),
    *cases(
        "megatron",
        "megatron-sequence-parallel",
        (True, {"tp": 2, **WHOLE}),
        (False, {"tp": 2, **SHARDED}),
        (False, {"tp": 1, **WHOLE}),
    ),
    *cases(
        "megatron",
        "megatron-window-no-ring",
        (True, {"cp": 2, "context_exchange": "ring"}, WINDOWED),
        (False, {"cp": 2, "context_exchange": "all_gather"}, WINDOWED),
        (False, {"cp": 1, "context_exchange": "ring"}, WINDOWED),
        (False, {"cp": 2, "context_exchange": "ring"}),
    ),
    *cases(
        "megatron",
        "megatron-no-gpipe",
        (True, {"pp": 2, "schedule": "gpipe"}),
        (False, {"pp": 2, "schedule": "1f1b"}),
        (False, interleaved(8)),
    ),
    *cases(
        "megatron",
        "megatron-fsdp-no-pipeline",
        (True, {"zero_stage": 2, "pp": 2}),
        (True, {"zero_stage": 3, "pp": 2}),
        (False, {"zero_stage": 1, "pp": 2}),
        (False, {"zero_stage": 3, "pp": 1}),
    ),
    *cases(
        "megatron",
        "megatron-fsdp-no-etp",
        (True, {"zero_stage": 2, "etp": 2}, MIXTRAL),
        (False, {"zero_stage": 1, "etp": 2}, MIXTRAL),
        (False, {"zero_stage": 3, "etp": 1}, MIXTRAL),
        (False, {"zero_stage": 3, "etp": 2}),
    ),
]

MEGATRON += [
    *cases(
        "megatron",
        "megatron-offload-alone",
        (True, {"recompute": "full"}, LLAMA, 8192, {"offload": ("activations",)}),
        (True, {"pp": 2}, LLAMA, 8192, {"offload": ("activations",)}),
        (False, {}, LLAMA, 8192, {"offload": ("activations",)}),
        (False, {"pp": 2, "recompute": "full"}),
    ),
    *cases(
        "megatron",
        "megatron-precision-aware-optimizer",
        (True, {"dp_replicate": 2}, LLAMA, 8192, {"moments": "bf16"}),
        (True, {"dp_replicate": 2}, LLAMA, 8192, {"offload": ("optimizer",)}),
        (False, {"dp_shard": 2, "zero_stage": 1}, LLAMA, 8192, {"moments": "bf16"}),
        (False, {"dp_replicate": 2}),
    ),
]

BESIDE = {"overlap_experts": True}
MEGATRON += cases(
    "megatron",
    "megatron-overlap-experts",
    (True, {"ep": 1}, MIXTRAL, 8192, BESIDE),
    (True, {"ep": 2, "pp": 2, "schedule": "1f1b"}, MIXTRAL, 8192, BESIDE),
    (True, {"ep": 2, "recompute": "full"}, MIXTRAL, 8192, BESIDE),
    (False, {"ep": 2, "recompute": "selective"}, MIXTRAL, 8192, BESIDE),
    (False, {"ep": 2, **interleaved(8)}, MIXTRAL, 8192, BESIDE),
    (False, {"pp": 2, "schedule": "1f1b", "recompute": "full"}, MIXTRAL),
)

EXECUTOR = [
    *cases(
        "executor",
        "executor-experts-whole",
        (True, {"tp": 2, "etp": 2, **SHARDED}, MIXTRAL),
        (False, {"tp": 2, "ep": 2, **SHARDED}, MIXTRAL),
    ),
    *cases(
        "executor",
        "executor-zero",
        (True, {"zero_stage": 2, "dp_shard": 2}),
        (False, {"zero_stage": 0, "dp_replicate": 2}),
        (False, {"zero_stage": 1, "dp_shard": 2}),
        (False, {"zero_stage": 3, "dp_shard": 2, "dp_replicate": 2}),
    ),
    *cases(
        "executor",
        "executor-sequence-parallel",
        (True, {"tp": 2, **WHOLE}),
        (False, {"tp": 2, **SHARDED}),
        (False, {"tp": 1, **WHOLE}),
    ),
    *cases(
        "executor",
        "executor-kv-heads",
        (True, {"tp": 16}),
        (False, {"tp": 8}),
        (True, {"tp": 2}, DEEPSEEK),
    ),
    *cases(
        "executor",
        "executor-recompute",
        (True, {"recompute": "selective"}),
        (False, {"recompute": "full"}),
        (False, {"recompute": "none"}),
    ),
    *cases(
        "executor",
        "executor-recompute-layers",
        (True, {"recompute": "full", "recompute_layers": 2}),
        (False, {"recompute": "full"}),
    ),
]

CASES = [*COMMON, *MEGATRON, *EXECUTOR]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_is_broken_by_what_it_names_and_by_nothing_else(case: Case) -> None:
    rule = next(r for r in rules_for(case.framework) if r.name == case.rule)
    training = TrainingSpec(global_batch_size=64, seq_len=case.seq_len, **case.training)
    assert bool(rule.breaks(row(**case.degrees), case.model, training)[0]) is case.breaks


@pytest.mark.parametrize("framework", get_args(Framework))
def test_every_rule_has_a_case_of_each_kind(framework: Framework) -> None:
    covered = {(case.rule, case.breaks) for case in CASES}
    for rule in rules_for(framework):
        assert {(rule.name, True), (rule.name, False)} <= covered


# What the executor's own tests run, alone and together.
RUNS: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 2, "context_exchange": "all_gather"},
    {"tp": 2, "cp": 2, "dp_replicate": 2, **SHARDED},
    {"pp": 4, "schedule": "1f1b", "num_micro_batches": 3},
    {"pp": 4, "schedule": "gpipe", "num_micro_batches": 3},
    interleaved(8),
    {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 1},
    {"dp_shard": 2, "pp": 2, "schedule": "1f1b", "num_micro_batches": 2, "zero_stage": 3},
    {"tp": 2, "dp_shard": 2, "recompute": "full", **SHARDED},
]


@pytest.mark.parametrize("degrees", RUNS, ids=str)
def test_the_executor_runs_every_axis(degrees: dict[str, Any]) -> None:
    training = TrainingSpec(global_batch_size=64, seq_len=8192)
    for degrees_of_model, model in ((degrees, LLAMA), ({**degrees, "ep": 2}, MIXTRAL)):
        for rule in rules_for("executor"):
            assert not rule.breaks(row(**degrees_of_model), model, training)[0], rule.name


def test_what_no_layout_makes_run_is_said_by_field() -> None:
    def refused(framework: Framework, **training: Any) -> str | None:
        spec = {"global_batch_size": 64, "seq_len": 8192, **training}
        found = refused_training(framework, TrainingSpec.model_validate(spec))
        return None if found is None else found[0]

    for precision in ("fp16", "fp8"):
        assert refused("executor", precision=precision) == "training.precision"
        assert refused("megatron", precision=precision) is None
    for precision in ("bf16", "fp32", "fp64"):
        assert refused("executor", precision=precision) is None
    for name, value in (("convention", "tutel"), ("min_capacity", 4), ("alignment", 8)):
        asked = {"factor": 1.25, name: value}
        path = f"training.expert_capacity.{name}"
        assert refused("megatron", expert_capacity=asked) == path
        assert refused("executor", expert_capacity=asked) is None
    assert refused("megatron", expert_capacity={"factor": 1.25}) is None


def varied(model: ModelSpec, **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate({**model.model_dump(), **fields})


def with_shared(**fields: Any) -> ModelSpec:
    assert MIXTRAL.experts is not None
    experts = {**MIXTRAL.experts.model_dump(), "shared_hidden_size": 4096, **fields}
    return varied(MIXTRAL, experts=experts)


CHUNKED = {"size": 4096, "kind": "chunked", "layers": (0,)}
SINKS = {**LLAMA.attention.model_dump(), "sinks": True}
# model, and what is refused of it by Megatron-LM and by the executor
MODELS: dict[str, tuple[ModelSpec, str | None, str | None]] = {
    "llama": (LLAMA, None, None),
    "mixtral": (MIXTRAL, None, None),
    "shared expert": (with_shared(), None, None),
    "gated shared expert": (with_shared(shared_mix="gate"), None, None),
    "residual experts": (with_shared(shared_mix="coefficients"), "experts.shared_mix", None),
    "normed shared expert": (with_shared(shared_norm=True), "experts.shared_norm", None),
    "parallel": (
        varied(LLAMA, parallel_attention=True), "parallel_attention", "parallel_attention",
    ),
    "one norm": (
        varied(LLAMA, parallel_attention=True, layer_norms=1),
        "parallel_attention",
        "parallel_attention",
    ),
    "four norms": (varied(LLAMA, layer_norms=4), None, "layer_norms"),
    "window": (WINDOWED, None, "window"),
    "chunks": (varied(LLAMA, window=CHUNKED), "window.kind", "window"),
    "whole chunks": (varied(LLAMA, window={**CHUNKED, "size": 8192}), None, "window"),
    "latent": (DEEPSEEK.model_copy(update={"num_mtp_modules": 0}), None, "attention.kind"),
    "mtp": (varied(LLAMA, num_mtp_modules=1), None, "num_mtp_modules"),
    "mtp with positions": (
        varied(LLAMA, num_mtp_modules=1, learned_positions=8192),
        "num_mtp_modules",
        "num_mtp_modules",
    ),
    "sinks": (varied(LLAMA, attention=SINKS), None, "attention.sinks"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_no_layout_makes_run_is_refused_by_field(name: str) -> None:
    model, *expected = MODELS[name]
    training = TrainingSpec(global_batch_size=64, seq_len=8192)
    for framework, part in zip(("megatron", "executor"), expected, strict=True):
        found = refused_model(framework, model, training)  # type: ignore[arg-type]
        assert (found and found[0]) == (part and f"model.{part}")
        if found is not None:
            assert "try " in found[1]


def test_the_executor_trains_no_packed_documents() -> None:
    packing = {"lengths": [4096], "counts": [2]}
    training = TrainingSpec.model_validate(
        {"global_batch_size": 64, "seq_len": 8192, "packing": packing}
    )
    assert refused_training("megatron", training) is None
    found = refused_training("executor", training)
    assert found is not None
    assert found[0] == "training.packing"


@pytest.mark.parametrize(
    ("name", "value", "megatron_has_it"),
    [
        ("main_grads", "both", False),
        ("master_weights", "only", False),
        ("moments", "bf16", True),
        ("moments", "int8", False),
        ("foreach_optimizer", True, False),
        ("fused_attention", False, True),
        ("dropout", True, True),
        ("fused_kernels", False, False),
        ("fused_loss", "cross_entropy", True),
        ("fused_loss", "linear", False),
        ("buffer_bytes", 1, False),
        ("gathers", "matrix", False),
        ("offload", ("optimizer",), True),
        ("offload", ("activations",), True),
        ("offload", ("weights",), False),
        ("offload", ("gradients", "optimizer"), False),
        ("offload_to", "nvme", False),
        ("launch", "cuda_graph", True),
        ("launch", "blocking", False),
        ("no_overlap", ("data_parallel",), True),
        ("no_overlap", ("tensor_parallel",), False),
        ("overlap_products", True, True),
        ("overlap_experts", True, True),
        ("dispatcher", "deduplicated", True),
        ("attention_kernel", "flash2", False),
        ("attention_kernel", "flash1", False),
    ],
)
def test_what_a_framework_does_in_one_way_is_refused_where_it_cannot_be_had(
    name: str, value: Any, megatron_has_it: bool
) -> None:
    training = TrainingSpec(global_batch_size=64, seq_len=8192, **{name: value})
    for framework, has_it in (("megatron", megatron_has_it), ("executor", False)):
        found = refused_training(framework, training)  # type: ignore[arg-type]  # two of its words
        assert (found is None) is has_it
        assert found is None or found[0] == f"training.{name}"


def test_what_megatron_cannot_do_together_is_refused_by_field() -> None:
    """Its checks: core/transformer/transformer_config.py."""
    fields = {"global_batch_size": 64, "seq_len": 8192}
    capacity = {"expert_capacity": {"factor": 1.25}}
    for asked, path in (
        ({"dispatcher": "deduplicated", **capacity}, "training.dispatcher"),
        ({"overlap_experts": True, "precision": "fp32"}, "training.overlap_experts"),
    ):
        found = refused_training("megatron", TrainingSpec.model_validate({**fields, **asked}))
        assert found is not None
        assert found[0] == path
    beside = TrainingSpec.model_validate({**fields, "overlap_experts": True})
    one, two = (
        refused_model("megatron", varied(MIXTRAL, num_mtp_modules=modules), beside)
        for modules in (1, 2)
    )
    assert one is None
    assert two is not None
    assert two[0] == "model.num_mtp_modules"


@pytest.mark.parametrize(("name", "value"), [("dispatcher", "deduplicated"), *BESIDE.items()])
def test_what_is_asked_of_experts_needs_some(name: str, value: Any) -> None:
    training = {"global_batch_size": 64, "seq_len": 8192, name: value}
    asked = {"topology": "dgx-h100", "nodes": 2, "training": training}
    with pytest.raises(InvalidInputError, match="llama3-8b is dense") as refusal:
        build_problem(resolve(PlanRequest.model_validate({**asked, "model": "llama3-8b"})))
    assert refusal.value.where == f"training.{name}"
    build_problem(resolve(PlanRequest.model_validate({**asked, "model": "mixtral-8x7b"})))


def test_the_general_rules_hold_for_every_target() -> None:
    general = {case.rule for case in COMMON}
    for framework in get_args(Framework):
        assert general <= {rule.name for rule in rules_for(framework)}


def test_graphs_are_not_captured_of_dropless_experts() -> None:
    fields = {"global_batch_size": 64, "seq_len": 8192, "launch": "cuda_graph"}
    dropless = TrainingSpec.model_validate(fields)
    padded = TrainingSpec.model_validate({**fields, "expert_capacity": {"factor": 1.0}})
    found = refused_model("megatron", MIXTRAL, dropless)
    assert found is not None
    assert found[0] == "training.launch"
    assert refused_model("megatron", MIXTRAL, padded) is None
    assert refused_model("megatron", LLAMA, dropless) is None
