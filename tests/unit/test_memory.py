"""Bytes per rank against published tables."""

from typing import Any, get_args

import numpy as np
import pytest

from planner.constants import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION
from planner.cost.memory import activation_bytes, memory
from planner.cost.problem import Problem
from planner.model.blocks import parameter_count
from planner.model.bundled import load_model
from planner.plan import Framework
from tests.unit.problems import fabric, problem, row

FRAMEWORKS = get_args(Framework)

# Korthikanti et al. 2205.05198, table 2, evaluated for GPT-3 175B (h 12288, a 96), s 2048, b 1,
# t 8; MB per layer.
UNFUSED: dict[str, Any] = {"fused_attention": False}
GPT3: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({"tp": 1}, UNFUSED, 2868.9),
    ({"tp": 8}, UNFUSED, 578.8),
    ({"tp": 8, "sequence_parallel": True}, UNFUSED, 358.6),
    ({"tp": 8, "sequence_parallel": True}, {}, 107.0),
    ({"tp": 8, "sequence_parallel": True, "recompute": "selective"}, UNFUSED, 107.0),
    ({"tp": 8, "recompute": "full"}, {}, 50.3),
    ({"tp": 8, "recompute": "full", "sequence_parallel": True}, {}, 6.3),
]


@pytest.mark.parametrize(("degrees", "options", "expected_mb"), GPT3)
def test_activations_of_gpt3(degrees: dict[str, Any], options: Any, expected_mb: float) -> None:
    base = problem("gpt3-175b", seq_len=2048, dropout=True, **options)
    found = activation_bytes(base, row(**degrees), "dense")[0]
    if options == {} and "recompute" not in degrees:  # ours also keeps 4 bytes per head: lse
        found -= 4 * 96 * 2048 / 8
    assert found / 1e6 == pytest.approx(expected_mb, abs=0.06)


def llama_style_bytes_per_token(h: int, a: int, g: int, d: int, f: int) -> int:
    return 8 * h + 4 * a * d + 4 * g * d + 4 * a + 6 * f


def test_activations_of_a_gated_layer_with_grouped_queries() -> None:
    base = problem("llama3-8b", seq_len=4096)
    expected = 4096 * llama_style_bytes_per_token(4096, 32, 8, 128, 14336)
    assert activation_bytes(base, row(), "dense")[0] == expected
    sharded = activation_bytes(base, row(tp=4, cp=2, sequence_parallel=True), "dense")[0]
    assert sharded == expected / 8


def state_bytes(base: Problem, **degrees: Any) -> float:
    parts = memory(base, row(**degrees))
    return float((parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes).max())


# ZeRO (1910.02054): 16 bytes per parameter; at 64 ranks 3.8x, 7.2x, 64x smaller. The paper's
# gradients are 16-bit.
@pytest.mark.parametrize(("zero", "times"), [(1, 3.8), (2, 7.2), (3, 64.0)])
def test_zero_shrinks_states_as_published(zero: int, times: float) -> None:
    base = problem("llama3-8b", main_grads="same")
    whole = state_bytes(base, dp_replicate=64)
    assert whole == 16 * parameter_count(base.model)
    assert whole / state_bytes(base, dp_shard=64, zero_stage=zero) == pytest.approx(times, abs=0.1)


def test_megatron_keeps_18_bytes_and_shares_12_of_them() -> None:
    base, n = problem("llama3-8b"), 8
    assert state_bytes(base) == 18 * parameter_count(base.model)
    expected = (6 + 12 / n) * parameter_count(base.model)
    assert state_bytes(base, dp_shard=n, zero_stage=1) == pytest.approx(expected)


def test_full_precision_needs_no_master_copy() -> None:
    base = problem("llama3-8b", precision="fp32")
    assert state_bytes(base) == (4 + 4 + 8) * parameter_count(base.model)


def test_175b_at_tp8_pp8_fits_64_a100_as_it_ran() -> None:
    """Korthikanti et al., table 5: 175B trained with tp 8, pp 8, full recompute, on 80 GB."""
    base = problem("gpt3-175b", pipelines=((8, 3),), seq_len=2048, global_batch_size=64)
    one = row(
        tp=8,
        pp=8,
        virtual_stages=3,
        schedule="interleaved_1f1b",
        num_micro_batches=64,
        recompute="full",
        sequence_parallel=True,
    )
    total = memory(base, one).total_bytes().max()
    assert 45e9 < total < 80e9 < base.capacity_bytes


def test_the_first_rank_holds_most_micro_batches() -> None:
    base = problem("llama3-8b", pipelines=((4, 1),))
    one = row(pp=4, schedule="1f1b", num_micro_batches=8)
    kept = memory(base, one).activations_bytes[0]
    first = base.splits.first_rank[0]
    used = base.splits.multiplicity[0] > 0
    order = np.argsort(first[used])
    assert (np.diff(kept[used][order]) < 0).all()


def test_gpipe_holds_all_micro_batches_and_1f1b_at_most_the_stages() -> None:
    base = problem("llama3-8b", pipelines=((4, 1),))
    held = {
        schedule: memory(
            base, row(pp=4, schedule=schedule, num_micro_batches=16)
        ).activations_bytes[0, 0]
        for schedule in ("gpipe", "1f1b")
    }
    assert held["gpipe"] == pytest.approx(4 * held["1f1b"])


@pytest.mark.parametrize("change", [{"tp": 2}, {"cp": 2}, {"recompute": "selective"}])
def test_memory_falls_with_every_degree_that_shares_activations(change: dict[str, Any]) -> None:
    base = problem("llama3-8b")
    whole = memory(base, row()).activations_bytes.max()
    assert memory(base, row(**change)).activations_bytes.max() < whole


def test_recompute_never_needs_more_than_keeping_everything() -> None:
    base = problem("deepseek-v3", seq_len=4096)
    kept = [
        memory(base, row(recompute=mode, ep=8, dp_shard=8)).activations_bytes.max()
        for mode in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


# ------------------------------------------------------- activations by tensor and recompute
# Per token and layer in 16 bit, taken apart as Korthikanti et al. (2205.05198, section 4.1) do:
# two norms keep input and output (8 h), attention q, k, v and output (4 a d + 4 g d) and its
# log-sum-exp (4 a), a gated feed-forward of width f three tensors (6 f). A mixture (2401.04088)
# has k (6 fe + 4 h) + 2 k h instead of 6 f, where gates weigh what experts return, as in this
# project's executor; Megatron-LM's weigh before the last product and keep k (6 fe + 2 h).

LLAMA3_8B = 8 * 4096 + 4 * 32 * 128 + 4 * 8 * 128 + 4 * 32 + 6 * 14336
MIXTRAL = 8 * 4096 + 4 * 32 * 128 + 4 * 8 * 128 + 4 * 32
MIXTRAL += 2 * (6 * 14336 + 4 * 4096) + 2 * 2 * 4096
# Latent attention (2412.19437): q, k 192 wide and v, output 128 of 128 heads; latents 1536 + 576.
DEEPSEEK_LATENT = 2 * (1536 + 512 + 64)
DEEPSEEK_HEADS = 2 * 128 * (2 * 192 + 2 * 128) + 4 * 128
DEEPSEEK = 8 * 7168 + DEEPSEEK_HEADS + DEEPSEEK_LATENT
DEEPSEEK += 8 * (6 * 2048 + 4 * 7168) + 2 * 8 * 7168 + 6 * 2048


@pytest.mark.parametrize(
    ("model", "kind", "recompute", "per_token"),
    [
        ("llama3-8b", "dense", "none", LLAMA3_8B),
        ("llama3-8b", "dense", "selective", LLAMA3_8B - 4 * 4096),
        ("llama3-8b", "dense", "full", 2 * 4096),
        ("mixtral-8x7b", "moe", "none", MIXTRAL),
        ("mixtral-8x7b", "moe", "selective", MIXTRAL - 4 * 4096 - 2 * 2 * 14336),
        ("mixtral-8x7b", "moe", "full", 2 * 4096),
        ("deepseek-v3", "moe", "none", DEEPSEEK),
        ("deepseek-v3", "moe", "selective", DEEPSEEK - 4 * 7168 - 2 * 8 * 2048),
    ],
)
def test_activations_per_token(model: str, kind: Any, recompute: str, per_token: int) -> None:
    base = problem(model, seq_len=4096, framework="executor")
    kept = activation_bytes(base, row(recompute=recompute), kind)[0]
    assert kept == 4096 * per_token
    weighed = {"mixtral-8x7b": 2 * 4 * 4096, "deepseek-v3": 8 * 4 * 7168}.get(model, 0)
    less = 0 if recompute == "full" else weighed
    megatron = problem(model, seq_len=4096)
    assert activation_bytes(megatron, row(recompute=recompute), kind)[0] == 4096 * (
        per_token - less
    )
    shared = row(recompute=recompute, tp=4, cp=2, sequence_parallel=True, micro_batch_size=2)
    found = activation_bytes(megatron, shared, kind)[0]
    assert found == pytest.approx(4096 * 2 / 8 * (per_token - less))


def test_without_sequence_parallelism_latents_and_routed_rows_stay_whole() -> None:
    base = problem("deepseek-v3", seq_len=4096)
    split = DEEPSEEK_HEADS + 6 * 2048  # heads and the shared expert
    found = activation_bytes(base, row(tp=4), "moe")[0]
    weighed = 8 * 4 * 7168  # kept by frameworks that weigh what experts return
    assert found == pytest.approx(4096 * (DEEPSEEK - weighed - split + split / 4))


def test_a_rank_keeps_at_least_one_key_value_head() -> None:
    base = problem("llama3-8b", seq_len=4096)
    inside = 4 * 32 * 128 + 4 * 16 * 128 + 4 * 32 + 6 * 14336  # 8 heads on 16 ranks: one each
    found = activation_bytes(base, row(tp=16, sequence_parallel=True), "dense")[0]
    assert found == pytest.approx(4096 / 16 * (8 * 4096 + inside))


# Of the block in use: gradients of the three widest tensors, of a gated feed-forward.
GRADIENTS = 6 * 14336


def test_recomputing_holds_one_whole_layer_besides_the_inputs() -> None:
    base = problem("llama3-8b", seq_len=4096, fused_loss="linear")
    ends = 2 * 2 * 4096  # input and output of the norm before the head
    for mode, layers, redone in (
        ("full", 32 * 2 * 4096, LLAMA3_8B - 2 * 4096),
        ("none", 32 * LLAMA3_8B, 0),
    ):
        found = memory(base, row(recompute=mode))
        assert found.activations_bytes[0].tolist() == [4096 * (layers + ends)]
        assert found.working_bytes[0].tolist() == [4096 * (redone + GRADIENTS)]


# ------------------------------------------------------------------------ what else is held


def test_logits_are_on_the_rank_with_the_head_only() -> None:
    """16 bit, an fp32 copy and the softmax, split over tp: s b V (2 + 4 + 4) / t."""
    base = problem("llama3-8b", pipelines=((2, 1),), seq_len=4096)
    one = row(pp=2, tp=4, cp=2, micro_batch_size=2)
    found = memory(base, one).logits_bytes[0]
    order = np.argsort(base.splits.first_rank[0])
    assert found[order].tolist() == [0.0, 4096 * 2 / 2 * 128256 * (2 + 4 + 4) / 4]


LARGEST = 4096 * 128256 + 4096  # Llama-3-8B's head with its norm; larger than a layer


@pytest.mark.parametrize(
    ("degrees", "held"),
    [
        ({"zero_stage": 3, "dp_shard": 8}, 2 * 2 + 4),
        ({"zero_stage": 2, "dp_shard": 8}, 4),
        ({"zero_stage": 1, "dp_shard": 8}, 0),
        ({"zero_stage": 3, "cp": 8}, 2 * 2 + 4),
        ({"zero_stage": 3}, 0),
    ],
)
def test_units_in_use_are_whole(degrees: dict[str, Any], held: int) -> None:
    """16-bit weights of the unit in use and the next (FSDP, 2304.11277); one of fp32 gradients."""
    assert memory(problem("llama3-8b"), row(**degrees)).gathered_bytes.max() == held * LARGEST


def test_context_ranks_share_states_too() -> None:
    base = problem("llama3-8b")
    together = state_bytes(base, dp_shard=2, cp=4, zero_stage=3)
    assert together == pytest.approx(18 * parameter_count(base.model) / 8)


MIXTRAL_EXPERTS = 32 * 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("zero", "whole_bytes", "shared_bytes"), [(0, 18, 0), (1, 6, 12), (2, 2, 16), (3, 0, 18)]
)
def test_expert_states_are_shared_over_the_experts_ranks(
    zero: int, whole_bytes: int, shared_bytes: int
) -> None:
    """8 ranks, ep 4: a quarter of the experts each, their states over 2; the rest over 8."""
    base = problem("mixtral-8x7b")
    not_experts = parameter_count(base.model) - MIXTRAL_EXPERTS
    expected = not_experts * (whole_bytes + shared_bytes / 8)
    expected += MIXTRAL_EXPERTS / 4 * (whole_bytes + shared_bytes / 2)
    assert state_bytes(base, dp_shard=8, ep=4, zero_stage=zero) == pytest.approx(expected)


def test_expert_tensor_ranks_split_the_experts() -> None:
    base = problem("mixtral-8x7b")
    whole, split = (
        memory(base, row(tp=4, ep=2, etp=etp, sequence_parallel=True)).weights_bytes.max()
        for etp in (1, 2)
    )
    assert whole - split == pytest.approx(2 * MIXTRAL_EXPERTS / 2 / 2)


@pytest.mark.parametrize(
    ("degrees", "copies"),
    [
        ({}, 0),
        ({"ep": 2}, 1 + 1),
        ({"ep": 2, "tp": 4, "etp": 2, "sequence_parallel": True}, (1 + 2) / 4),
    ],
)
def test_a_dispatch_has_send_and_receive_buffers(degrees: dict[str, Any], copies: float) -> None:
    """Two 16-bit copies of a token are sent; etp ranks receive each other's rows."""
    found = memory(problem("mixtral-8x7b"), row(**degrees)).moe_buffers_bytes.max()
    assert found == copies * 8192 * 2 * 4096 * 2
    assert memory(problem("llama3-8b"), row()).moe_buffers_bytes.max() == 0


def test_a_capacity_is_held_and_sent_whole() -> None:
    """E C rows instead of k T: GShard's buffers (2006.16668)."""
    plain = problem("mixtral-8x7b", seq_len=4096)
    base = problem("mixtral-8x7b", seq_len=4096, expert_capacity={"factor": 2.0})
    one, rows = row(ep=2, dp_shard=2), 8 * (4096 * 2 // 8 * 2)
    assert memory(base, one).moe_buffers_bytes.max() == 2 * rows * 4096 * 2
    grown = [activation_bytes(at, one, "moe")[0] for at in (base, plain)]
    assert grown[0] - grown[1] == (rows - 4096 * 2) * 2 * (3 * 14336 + 4096)


def test_gathered_keys_and_values_are_held_while_in_use() -> None:
    """One layer's, of all context-parallel ranks, with their gradients in the backward."""
    base = problem("llama3-8b", fused_loss="linear")
    ring, gathered = (
        memory(base, row(cp=4, tp=2, context_exchange=exchange)).working_bytes.max()
        for exchange in ("ring", "all_gather")
    )
    assert gathered - ring == 2 * 8192 * 2 * (8 / 2) * 128 * 2
    alone = memory(base, row(context_exchange="all_gather")).working_bytes.max()
    assert alone == memory(base, row()).working_bytes.max()


@pytest.mark.parametrize(
    ("model", "kind", "inputs"),
    [
        ("llama3-8b", "dense", 2),
        ("mixtral-8x7b", "moe", 1),  # experts read a rank's own tokens
        ("llama3-8b", "head", 1),
        ("llama3-8b", "embedding", 0),
    ],
)
def test_the_executor_keeps_what_it_gathered(model: str, kind: Any, inputs: int) -> None:
    """Whole inputs of split products instead of shards; of experts also what they return, twice."""
    one, hidden = row(tp=4, sequence_parallel=True), 8192 * 4096 * 2
    returned = 2 * 2 * hidden if kind == "moe" else 0
    kept, alone = (
        {
            framework: activation_bytes(problem(model, framework=framework), at, kind)[0]
            for framework in FRAMEWORKS
        }
        for at in (one, row())
    )
    assert kept["executor"] - kept["megatron"] == inputs * hidden * 3 / 4 + returned / 4
    assert alone["executor"] - alone["megatron"] == returned


def test_the_executors_shared_expert_gathers_an_input_of_its_own() -> None:
    one, hidden = row(tp=4, sequence_parallel=True), 8192 * 7168 * 2
    whole, shards = (
        activation_bytes(problem("deepseek-v3", framework=framework), one, "moe")[0]
        for framework in ("executor", "megatron")
    )
    returned = 2 * 8 * hidden / 4
    assert whole - shards == hidden * 3 / 4 + hidden + returned


def test_logits_wider_than_fp32_are_copied_as_they_are() -> None:
    found = memory(problem("llama3-8b", precision="fp64"), row()).logits_bytes.max()
    assert found == 8192 * 128256 * (8 + 8 + 8)


def test_the_last_stage_holds_a_copy_of_tied_embeddings() -> None:
    def last(tied: bool, pp: int) -> float:
        spec = load_model("llama3-8b").model_copy(update={"tied_embeddings": tied})
        base = problem(spec, pipelines=((pp, 1),))
        order = np.argmax(base.splits.first_rank[0])
        return float(memory(base, row(pp=pp, tp=2)).weights_bytes[0, order])

    assert last(True, 2) == last(False, 2)
    assert last(False, 1) - last(True, 1) == 2 * 4096 * 128256 / 2


@pytest.mark.parametrize(
    ("model", "degrees", "groups"),
    [
        ("llama3-8b", {}, 0),
        ("llama3-8b", {"tp": 2}, 1),
        ("llama3-8b", {"dp_replicate": 2}, 1),
        ("llama3-8b", {"pp": 2}, 1),
        ("llama3-8b", {"cp": 2}, 2),  # the ring, and gradients over dp x cp
        ("llama3-8b", {"tp": 2, "cp": 2, "dp_shard": 2, "pp": 2}, 4),
        ("mixtral-8x7b", {"dp_shard": 4}, 2),  # dp and edp
        ("mixtral-8x7b", {"dp_shard": 4, "ep": 4}, 2),  # dp and ep
        ("mixtral-8x7b", {"dp_shard": 8, "ep": 2, "etp": 2}, 4),
    ],
)
def test_every_group_of_several_has_buffers(
    model: str, degrees: dict[str, Any], groups: int
) -> None:
    base = problem(model, pipelines=((degrees.get("pp", 1), 1),))
    each = COMMUNICATOR_BYTES["nccl"].value
    found = memory(base, row(**degrees)).communicators_bytes.max()
    assert found == pytest.approx((groups + (groups > 0)) * each)  # and that of the world


def test_the_librarys_own_memory_counts() -> None:
    one = row(tp=2)
    for library in ("nccl", "gloo"):
        found = memory(problem("llama3-8b", on=fabric(library=library)), one)
        assert found.communicators_bytes.max() == 2 * COMMUNICATOR_BYTES[library].value
        held = found.total_bytes() - found.communicators_bytes - found.reserve_bytes
        expected = CONTEXT_BYTES[library].value + FRAGMENTATION.value * held
        assert found.reserve_bytes == pytest.approx(expected)
    assert COMMUNICATOR_BYTES["nccl"].value > COMMUNICATOR_BYTES["gloo"].value
    assert FRAGMENTATION.value > 0


def test_a_profile_that_a_split_does_not_use_is_empty() -> None:
    base = problem("llama3-8b", pipelines=((1, 1), (4, 1)))
    used = base.splits.multiplicity[0] > 0
    total = memory(base, row()).total_bytes()[0]
    assert not used.all()
    assert (total[~used] == 0).all()
    assert (total[used] > 0).all()


def test_expert_tensor_parallelism_holds_the_rows_of_all_its_ranks() -> None:
    """Per routed row: 3 widths of the experts / etp on etp times the rows, and etp of the hidden
    size, the input of the experts."""
    base = problem("mixtral-8x7b", seq_len=4096)
    rows = 4096 / 4 * 2
    kept = {
        etp: activation_bytes(base, row(tp=4, etp=etp, sequence_parallel=True), "moe")[0]
        for etp in (1, 4)
    }
    assert kept[4] - kept[1] == rows * 2 * 4096 * (4 - 1)


def test_gathering_over_etp_needs_a_buffer_without_ep_too() -> None:
    base = problem("mixtral-8x7b", seq_len=4096)
    one = row(tp=4, etp=4, sequence_parallel=True)
    assert memory(base, one).moe_buffers_bytes.max() == 4096 / 4 * 2 * (1 + 4) * 4096 * 2


# --------------------------------------------------------- how states and passes are kept


@pytest.mark.parametrize(
    ("training", "degrees", "expected"),
    [
        ({}, {}, 2 + 4 + 12),
        ({"main_grads": "same"}, {}, 2 + 2 + 12),
        ({"main_grads": "both"}, {}, 2 + 6 + 12),
        ({"optimizer": "sgd"}, {}, 2 + 4 + 4),
        ({"master_weights": "only"}, {}, 4 + 4 + 8),  # torch FSDP: fp32 shards
        ({"master_weights": "none"}, {}, 2 + 4 + 8),
        ({"moments": "bf16"}, {}, 2 + 4 + 4 + 4),
        ({"moments": "int8"}, {}, 2 + 4 + 4 + 2 * (1 + 4 / 256)),
        ({"offload": ("optimizer",)}, {}, 2 + 4),
        ({"offload": ("optimizer", "gradients")}, {}, 2),
        ({"offload": ("weights",)}, {}, 4 + 12),
    ],
)
def test_states_per_parameter(
    training: dict[str, Any], degrees: dict[str, Any], expected: float
) -> None:
    base = problem("llama3-8b", **training)
    assert state_bytes(base, **degrees) == pytest.approx(
        expected * parameter_count(base.model), rel=1e-12
    )


def test_the_step_needs_room_only_where_the_backward_leaves_none() -> None:
    """fp32 copies of 16-bit gradients, 4 bytes; torch's list of square roots, 4 bytes more."""
    params = parameter_count(load_model("llama3-8b"))
    for training, per_parameter in (
        ({"main_grads": "fp32"}, 0),
        ({"main_grads": "same"}, 4),
        ({"main_grads": "same", "foreach_optimizer": True}, 8),
        ({"main_grads": "same", "foreach_optimizer": True, "optimizer": "sgd"}, 4),
        ({"main_grads": "same", "foreach_optimizer": True, "offload": ("optimizer",)}, 0),
    ):
        base = problem("llama3-8b", seq_len=128, **training)
        parts = memory(base, row(recompute="full"))
        of_pass = parts.activations_bytes + parts.logits_bytes + parts.gathered_bytes
        found = float((parts.working_bytes + of_pass)[0].max())
        of_backward = memory(problem("llama3-8b", seq_len=128), row(recompute="full"))
        in_backward = of_backward.working_bytes + of_backward.activations_bytes
        backward = float((in_backward + of_backward.logits_bytes)[0].max())
        assert found == pytest.approx(max(per_parameter * params, backward), rel=1e-9)
        longer = problem("llama3-8b", seq_len=65536, **training)
        plain = problem("llama3-8b", seq_len=65536)
        assert memory(longer, row()).working_bytes == memory(plain, row()).working_bytes


def test_every_shard_adds_up_to_the_whole() -> None:
    base = problem("mixtral-8x7b")
    whole = memory(base, row(dp_replicate=1))
    shards = memory(base, row(dp_shard=8, ep=4, zero_stage=3))
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert 8 * getattr(shards, name).max() == pytest.approx(getattr(whole, name).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused_attention": False, "dropout": True},
        {"fused_kernels": False},
        {"precision": "fp8"},
        {"fused_loss": "cross_entropy"},
        {"offload": ("activations",)},
    ],
)
def test_memory_never_falls_with_layers_batch_or_length(options: dict[str, Any]) -> None:
    spec = load_model("llama3-8b")
    for mode in ("none", "selective", "full"):
        totals = []
        for layers, micro, length in ((16, 1, 1024), (32, 1, 1024), (32, 2, 1024), (32, 2, 4096)):
            grown = spec.model_copy(update={"num_layers": layers})
            base = problem(grown, seq_len=length, **options)
            one = row(micro_batch_size=micro, recompute=mode)
            totals.append(float(memory(base, one).total_bytes().max()))
        assert totals == sorted(totals)
        assert totals[0] < totals[-1]


def test_unfused_kernels_keep_what_they_cast() -> None:
    """Two norms keep their input in fp32 (8 h more), the gate is kept after its function (2 f)."""
    fused, unfused = (
        activation_bytes(problem("llama3-8b", fused_kernels=on), row(), "dense")[0]
        for on in (True, False)
    )
    assert unfused - fused == 8192 * (8 * 4096 + 2 * 14336)


def test_fp8_keeps_inputs_of_products_in_eight_bits() -> None:
    """Both norms' outputs, the attention's, and what the last product reads: one byte less each."""
    wide, narrow = (
        activation_bytes(problem("llama3-8b", precision=precision), row(), "dense")[0]
        for precision in ("bf16", "fp8")
    )
    assert wide - narrow == 8192 * (2 * 4096 + 32 * 128 + 14336)


@pytest.mark.parametrize(
    ("fused", "per_logit"), [("none", 2 + 4 + 4), ("cross_entropy", 2), ("linear", 0)]
)
def test_a_fused_loss_holds_fewer_logits(fused: str, per_logit: int) -> None:
    found = memory(problem("llama3-8b", fused_loss=fused), row()).logits_bytes.max()
    assert found == 8192 * 128256 * per_logit


def test_modules_are_gathered_one_by_one_where_asked() -> None:
    """DeepSpeed: two of the largest matrix, here a gated feed-forward's first two."""
    spec = load_model("llama3-8b").model_copy(update={"vocab_size": 1024})
    for unit, params in (("layer", None), ("matrix", 2 * 4096 * 14336)):
        base = problem(spec, gathers=unit)
        found = memory(base, row(dp_shard=8, zero_stage=3)).gathered_bytes.max()
        layer = sum(
            (2 * 4096 * 4096, 2 * 4096 * 1024, 3 * 4096 * 14336, 2 * 4096)  # q o, k v, ffn, norms
        )
        assert found == (params or layer) * (2 * 2 + 4)


def test_offloaded_activations_leave_two_layers_of_them() -> None:
    base = problem("llama3-8b", seq_len=4096)
    gone = problem("llama3-8b", seq_len=4096, offload=("activations",))
    half = problem("llama3-8b", seq_len=4096, offload=("activations",), offload_layers=16)
    kept = [memory(b, row()).activations_bytes.max() for b in (base, half, gone)]
    ends = 4096 * 2 * 2 * 4096
    assert kept[0] == 32 * 4096 * LLAMA3_8B + ends
    assert kept[1] == pytest.approx(kept[0] / 2)
    assert kept[2] == 0
    working = memory(problem("llama3-8b", seq_len=4096, fused_loss="linear"), row()).working_bytes
    brought = memory(
        problem("llama3-8b", seq_len=4096, fused_loss="linear", offload=("activations",)), row()
    ).working_bytes
    assert (brought - working).max() == 2 * 4096 * LLAMA3_8B


def test_a_rank_can_allocate_what_cuda_counts_and_not_what_the_sheet_says() -> None:
    """A100 and H100 of 80 GB: 79.1 to 79.3 GiB, by torch.cuda."""
    base = problem("llama3-8b")
    assert 78.5 < base.capacity_bytes / 2**30 < 79.4
    cores = problem("llama3-8b", on=fabric(device="cpu-core"))
    assert cores.capacity_bytes == cores.device.memory_bytes


# ------------------------------------------------------------------ part of the layers


def test_memory_falls_evenly_with_every_recomputed_layer() -> None:
    base = problem("llama3-8b", pipelines=((4, 2),), fused_loss="linear")
    fields = {"pp": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"}
    common = {**fields, "num_micro_batches": 8}
    none = memory(base, row(**common)).activations_bytes.max()
    kept = [
        memory(base, row(**common, recompute="full", recompute_layers=n)).activations_bytes.max()
        for n in (1, 2, 3, 4)
    ]
    assert np.diff([none, *kept]) == pytest.approx(kept[0] - none)
    assert kept[0] < none
    every = memory(base, row(**common, recompute="full")).activations_bytes.max()
    assert kept[-1] == pytest.approx(every)  # four layers a chunk are all of them
