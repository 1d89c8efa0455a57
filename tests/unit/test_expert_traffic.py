"""Uneven experts: published oracles, brute force, and laws that tie them to the even case."""

import json
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.cli import app
from planner.cost.collectives import collective_terms
from planner.cost.expert_load import (
    dropped_share,
    expert_shares,
    parse_counts,
    rank_loads,
    replicated,
    skews,
)
from planner.cost.expert_strategies import Strategy, compare_strategies, expert_row
from planner.cost.expert_traffic import (
    compute_break_even_rows,
    copies_per_token,
    dispatch_bytes,
    even_size_bytes,
    exits,
    load_assumptions,
    matrix_bound_s,
    move_break_even_steps,
    replica_break_even_rows,
)
from planner.cost.memory import memory
from planner.cost.step import price
from planner.cost.work import Launches, block_work
from planner.documents import validated
from planner.errors import InvalidInputError
from planner.layout.groups import lay_group
from planner.model.spec import MixtureOfExperts
from planner.plan import ExpertLoad, Method, TrainingSpec
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import build_problem, resolve
from tests.unit.problems import NVLINK, fabric, problem, row

DIRECT = Method("direct")
EIGHT = MixtureOfExperts(num_experts=8, top_k=2, expert_hidden_size=16)
HOT = [9, 5, 3, 3, 2, 2, 1, 1]  # of Mixtral's 8; no expert has more than half
SCALED = {
    *("ep_dispatch", "ep_combine", "etp_gather", "etp_scatter"),
    *("experts_up", "experts_down", "expert_activation"),
}
REQUEST: dict[str, Any] = {
    "topology": "dgx-a100",
    "nodes": 4,
    "model": "mixtral-8x7b",
    "training": {"global_batch_size": 32, "seq_len": 1024},
    "constraints": {"tp": 1, "pp": 1, "cp": 1, "ep": 8, "dp": 32, "zero_stage": 1},
    "top_k": 0,
}


def load(*counts: float) -> dict[str, Any]:
    return {"counts": counts}


def shares_of(moe: MixtureOfExperts, **fields: Any) -> Any:
    return expert_shares(moe, 2, ExpertLoad(**fields))


def on_eight(expert_load: Any = None, model: str = "mixtral-8x7b", **training: Any) -> Any:
    return problem(model, seq_len=256, expert_load=expert_load, **training)


def strategies(expert_load: Any = None, ep: int = 8, **more: Any) -> dict[str, Strategy]:
    where = on_eight(expert_load, **more)
    return {one.name.split()[0]: one for one in compare_strategies(where, expert_row(where, ep))}


def group(ranks: int) -> Any:
    return lay_group(fabric(1024), np.array([ranks]), np.array([1]))


# --------------------------------------------------------------------------------- the load


def test_experts_lie_on_ranks_in_blocks() -> None:
    shares = shares_of(EIGHT, counts=HOT)
    assert rank_loads(shares, 4)[0] * sum(HOT) / 4 == pytest.approx([14, 6, 4, 2])
    assert skews(shares, 8) == pytest.approx((8 * 9 / 26, 8 * 9 / 26))
    assert skews(shares, 1) == (1.0, 1.0)


def test_time_waits_for_every_layers_hottest_and_memory_for_the_worst() -> None:
    even, hot = (1.0,) * 8, (2.0, 2.0, 0, 0, 0, 0, 0, 0)
    shares = shares_of(EIGHT, counts=(even, hot))
    assert skews(shares, 4) == pytest.approx((2.5, 4.0))


@given(exponent=st.floats(0, 8), top_k=st.integers(1, 8))
def test_a_zipf_load_is_one_that_tokens_with_different_experts_can_have(
    exponent: float, top_k: int
) -> None:
    moe = MixtureOfExperts(num_experts=8, top_k=top_k, expert_hidden_size=8)
    shares = shares_of(moe, zipf=exponent)[0]
    assert shares.sum() == pytest.approx(1)
    assert shares.min() >= 0
    assert shares.max() <= (1 + 1e-5) / top_k


def test_zipf_shares_follow_the_exponent_where_no_expert_is_full() -> None:
    moe = MixtureOfExperts(num_experts=64, top_k=1, expert_hidden_size=8)
    shares = np.sort(shares_of(moe, zipf=1)[0])[::-1]
    assert shares[0] / shares == pytest.approx(np.arange(1, 65))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([1, 2, 3], "rows of 3 counts, the model has 8 experts"),
        ([], "there are none; need 8 counts, one for each expert, in one row or in 2, one"),
        ([[1] * 8] * 3, "3 rows, the model has 2 layers"),
        ([0] * 8, "row 0 is all zero"),
        ([9, 1, 1, 1, 1, 1, 1, 1], "56.2% of its row"),
    ],
)
def test_counts_of_another_model_are_refused(counts: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        shares_of(EIGHT, counts=counts)


@pytest.mark.parametrize("fields", [{}, {"zipf": 1, "counts": HOT}, {"zipf": -1}, {"counts": [-1]}])
def test_a_load_says_one_thing(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"zipf|counts"):
        ExpertLoad(**fields)


def test_a_dense_model_has_no_load() -> None:
    asked = {**REQUEST, "model": "llama3-8b", "constraints": {}}
    asked["training"] = {**REQUEST["training"], "expert_load": {"zipf": 1}}
    with pytest.raises(InvalidInputError, match="llama3-8b is dense"):
        build_problem(resolve(PlanRequest.model_validate(asked)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"1,2\n3,4\n", [[1, 2], [3, 4]]),
        (b"1, 2,3", [[1, 2, 3]]),
        (b"1\n2\n\n3\n", [[1, 2, 3]]),
        (b" [1, 2]", [[1, 2]]),
        (b'{"counts": [[1, 2]]}', [[1, 2]]),
    ],
)
def test_counts_are_read_from_csv_and_json(text: bytes, found: Any) -> None:
    assert parse_counts(text, source="file") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"expert,count\n1,2", "line 1: 'expert' is not a number"),
        (b"1,2\n3,1_000", "line 2: '1_000' is not a number"),
        ("1,\uff12".encode(), "line 1: '\uff12' is not a number"),
        (b"1,,2", "line 1: '' is not a number"),
        (b"[1,", "not valid JSON"),
        (b'{"other": 1}', "need a list of counts"),
        (b"\xff,1", "is not UTF-8"),
        (b"", "has no counts; need one for each expert"),
        (b"\n\n", "has no counts; need one for each expert"),
        (b"[]", "has no counts; need one for each expert"),
        (b'{"counts": [[]]}', "has no counts; need one for each expert"),
    ],
)
def test_other_files_are_refused_by_name(text: bytes, said: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^counts\.csv.* {said}"):
        parse_counts(text, source="counts.csv")


@pytest.mark.parametrize("text", [b"[1,1,1,1,1,1,1,-1]", b"1\n1\n1\n1\n1\n1\n1\n-1\n"])
def test_a_wrong_cell_of_a_file_with_one_row_is_named(text: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^counts\[0\]\[7\] must be"):
        validated(ExpertLoad, {"counts": parse_counts(text, source="counts.csv")})


# ---------------------------------------------------------------------------------- pricing


def test_an_even_load_is_no_load() -> None:
    rows = row(ep=8, dp_shard=8)
    plain = price(on_eight(), rows)
    for even in ({"zipf": 0}, load(*[3] * 8)):
        assert price(on_eight(even), rows).step_time_s() == pytest.approx(plain.step_time_s())


def test_the_hottest_rank_decides_about_exchanges_and_experts_and_nothing_else() -> None:
    rows, skew = row(ep=8, dp_shard=8), 8 * 9 / 26
    pairs = zip(
        *(block_work(on_eight(asked), rows, "moe") for asked in (None, load(*HOT))), strict=True
    )
    for was, now in pairs:
        if isinstance(was, Launches):
            continue
        size = next(name for name in ("size_bytes", "flop", "num_bytes") if hasattr(was, name))
        scaled = skew if was.name in SCALED else 1
        assert getattr(now, size) == pytest.approx(getattr(was, size) * scaled), was.name
    assert {op.name for op in block_work(on_eight(), rows, "moe")} > SCALED


def test_one_rank_of_all_experts_never_waits() -> None:
    rows = row(dp_shard=8)
    assert price(on_eight(load(*HOT)), rows).step_time_s() == pytest.approx(
        price(on_eight(), rows).step_time_s()
    )


def test_memory_holds_the_hottest_rows_and_a_capacity_bounds_them() -> None:
    rows = row(ep=8, dp_shard=8)
    even, hot = (memory(on_eight(asked), rows) for asked in (None, load(*HOT)))
    assert hot.activations_bytes[0, 0] > 1.3 * even.activations_bytes[0, 0]
    sent, received = 1, 8 * 9 / 26
    grown = hot.moe_buffers_bytes[0, 0] / even.moe_buffers_bytes[0, 0]
    assert grown == pytest.approx((sent + received) / 2)
    padded: Any = {"expert_capacity": {"factor": 1.0}}
    even, hot = (memory(on_eight(asked, **padded), rows) for asked in (None, load(*HOT)))
    assert hot.total_bytes() == pytest.approx(even.total_bytes())


def test_a_capacity_drops_instead_of_waiting_and_the_plan_says_how_much() -> None:
    rows = row(ep=8, dp_shard=8)
    padded: Any = {"expert_capacity": {"factor": 1.0}}
    even, hot = on_eight(**padded), on_eight(load(*HOT), **padded)
    assert price(hot, rows).step_time_s() == pytest.approx(price(even, rows).step_time_s())
    (said,) = load_assumptions(hot, rows)
    beyond = sum(max(0, n / sum(HOT) - 1 / 8) for n in HOT)
    assert f"{beyond:.0%}"[:2] in said
    assert "2.77 times the rows of dropless" in said


def test_dropped_rows_are_those_of_a_binomial_draw() -> None:
    tokens, capacity, shares = 400, 100, np.array([[0.5, 0.25, 0.125, 0.125]])
    expected = 0.0
    for share in shares[0]:
        chance = min(1.0, 2 * share)
        draws = np.arange(tokens + 1)
        weights = [comb(tokens, int(n)) * chance**n * (1 - chance) ** (tokens - n) for n in draws]
        expected += float(np.array(weights) @ np.maximum(0, draws - capacity))
    found = dropped_share(shares, 2, tokens, capacity)
    assert found == pytest.approx(expected / (2 * tokens), rel=0.02)


def test_of_total_collapse_all_but_the_capacity_is_dropped() -> None:
    collapsed = np.array([[1.0, 0, 0, 0]])
    assert dropped_share(collapsed, 1, 1000, 300) == pytest.approx(1 - 300 / 1000)


def test_a_request_without_a_load_has_the_document_it_had() -> None:
    training = TrainingSpec(global_batch_size=1, seq_len=1)
    assert "expert_load" not in training.model_dump(mode="json")
    told = training.model_copy(update={"expert_load": ExpertLoad(zipf=1)})
    assert TrainingSpec.model_validate_json(told.model_dump_json()) == told


def test_a_plan_for_uneven_experts_is_slower_and_says_why() -> None:
    several = {**REQUEST["training"], "global_batch_size": 128}  # micro-batches
    hot = {**several, "expert_load": load(*HOT)}
    even, uneven = (
        make_plan(resolve(PlanRequest.model_validate({**REQUEST, "training": training})))
        for training in (several, hot)
    )
    assert uneven.prediction.step_time_s > 1.05 * even.prediction.step_time_s
    assert "experts are loaded evenly" in even.assumptions
    assert any("hottest of 8 expert ranks, which receives 2.77" in a for a in uneven.assumptions)
    assert even.id != uneven.id


# --------------------------------------------------------------------------- traffic matrices


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64, 512])
def test_an_even_matrix_takes_what_an_even_all_to_all_takes(ranks: int) -> None:
    size = 1e9
    even = np.full((ranks, ranks), size / ranks)
    terms = collective_terms("all_to_all", DIRECT, fabric(1024), group(ranks), np.array([size]))
    assert matrix_bound_s(fabric(1024), group(ranks), even) == pytest.approx(terms.transfer_s[0])
    assert even_size_bytes(even) == pytest.approx(size if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_hot_rank_is_priced_at_what_comes_in(ranks: int) -> None:
    loads = np.ones(ranks)
    loads[3], loads[4:] = 3, (ranks - 3 - 3) / (ranks - 4)
    matrix = dispatch_bytes(loads, 1e9)
    assert even_size_bytes(matrix) == pytest.approx(3e9)
    hot = collective_terms("all_to_all", DIRECT, fabric(64), group(ranks), np.array([3e9]))
    assert matrix_bound_s(fabric(64), group(ranks), matrix) == pytest.approx(hot.transfer_s[0])


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(0, 100), min_size=256, max_size=256))
def test_exits_carry_what_crosses_them_one_by_one(cells: list[int]) -> None:
    small = fabric(16, levels=(NVLINK, fabric().levels[1]))
    matrix = np.array(cells, dtype=float).reshape(16, 16)
    laid = lay_group(small, np.array([16]), np.array([1]))
    inner, outer = exits(small, laid, matrix)
    for unit in range(2):
        own = range(8 * unit, 8 * unit + 8)
        other = [rank for rank in range(16) if rank not in own]
        assert outer.out_bytes[unit] == sum(matrix[a, b] for a in own for b in other)
        assert outer.into_bytes[unit] == sum(matrix[a, b] for a in other for b in own)
    for rank in range(16):
        assert inner.into_bytes[rank] == sum(matrix[a, rank] for a in range(16) if a != rank)


def test_a_trunk_is_shared_and_a_nic_is_not() -> None:
    two_leaves = fabric(512)
    matrix = np.zeros((512, 512))
    matrix[0, 256:] = 1e6  # one rank to the other leaf
    _, nic, trunk = exits(two_leaves, group(512), matrix)
    assert nic.seconds == pytest.approx(256e6 / (0.94 * 50e9))
    assert trunk.seconds == pytest.approx(256e6 / (0.94 * 25e9 * 256))


# ------------------------------------------------------------------------------ deduplication


@pytest.mark.parametrize(("parts", "copies"), [(8, 5.295), (16, 6.52), (64, 7.68)])
def test_copies_of_deepseeks_tokens(parts: int, copies: float) -> None:
    # C(256 - 256/e, 8) / C(256, 8) by hand; DeepSeek-V3: 256 experts, 8 a token
    assert copies_per_token(256, 8, parts) == pytest.approx(copies, abs=0.005)


@pytest.mark.parametrize(
    ("experts", "top_k", "parts"), [(6, 2, 3), (8, 3, 4), (8, 8, 4), (6, 1, 6)]
)
def test_copies_are_the_mean_over_all_choices(experts: int, top_k: int, parts: int) -> None:
    each = experts // parts
    choices = list(combinations(range(experts), top_k))
    mean = np.mean([len({expert // each for expert in chosen}) for chosen in choices])
    assert copies_per_token(experts, top_k, parts) == pytest.approx(float(mean))


def test_node_limited_tokens_have_a_copy_for_every_node_they_may_go_to_at_most() -> None:
    limited = copies_per_token(256 // 8 * 4, 8, 4)  # 4 of 8 nodes
    assert limited < 4 < copies_per_token(256, 8, 8)


def test_a_part_with_everything_gets_one_copy_of_every_token() -> None:
    assert copies_per_token(256, 8, 8, share=1.0) == 8


def test_deduplication_saves_bytes_and_a_hot_rank_hurts_it_less() -> None:
    even, hot = (strategies(asked, model="deepseek-v3") for asked in (None, {"zipf": 1.0}))
    saved = even["all_to_all"].exchange_bytes / even["deduplicated"].exchange_bytes
    assert saved == pytest.approx(8 / 5.295, rel=1e-3)
    grown = [
        hot[name].exchange_bytes / even[name].exchange_bytes
        for name in ("all_to_all", "deduplicated")
    ]
    assert grown[0] > grown[1] > 1


# ------------------------------------------------------------------------------- break-evens


@pytest.mark.parametrize(
    ("expert_hidden_size", "rows"), [(2048, 3072), (768, 1152), (14336, 21504)]
)
def test_rows_that_pay_for_a_copy(expert_hidden_size: int, rows: float) -> None:
    # DeepSeek-V3, Qwen3-30B, Mixtral 8x7B: 1.5 f with bf16 gradients, 2.25 f with fp32
    alike = replica_break_even_rows(expert_hidden_size, weight_bytes=2, gradient_bytes=2)
    wide = replica_break_even_rows(expert_hidden_size, weight_bytes=2, gradient_bytes=4)
    assert (alike, wide) == (rows, 1.5 * rows)


@pytest.mark.parametrize(("bytes_per_s", "rows"), [(400e9, 667), (50e9, 5333)])
def test_rows_that_compute_longer_than_a_copy_travels(bytes_per_s: float, rows: float) -> None:
    found = compute_break_even_rows(400e12, bytes_per_s, weight_bytes=2, gradient_bytes=2)
    assert found == pytest.approx(rows, abs=1)
    h, f = 7168, 2048  # any: 18 h f R flop against 3 h f weights and as many gradients
    assert 18 * h * f * found / 400e12 == pytest.approx(6 * h * f * 2 / bytes_per_s)


def test_a_move_pays_when_what_it_saved_is_what_it_took() -> None:
    bytes_ = {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12}
    steps = move_break_even_steps(44e6, 50e9, 1e-3, **bytes_)
    assert steps * 1e-3 == pytest.approx(18 * 44e6 / 50e9)
    assert move_break_even_steps(44e6, 50e9, 0.0, **bytes_) == np.inf


# ------------------------------------------------------------------------------- strategies


def test_replicas_of_a_collapsed_rank_even_it_out() -> None:
    shares = np.zeros(64)
    shares[0] = 1
    assert [replicated(shares, 8, n)[0].max() for n in (0, 6, 7)] == pytest.approx([8, 2, 1])
    assert len(replicated(shares, 8, 99)[1]) == 7


@given(st.lists(st.integers(0, 50), min_size=16, max_size=16), st.sampled_from([1, 2, 4, 8]))
def test_replicas_move_rows_and_lose_none(counts: list[int], ep: int) -> None:
    shares = (np.array(counts) + 1) / (sum(counts) + 16)
    loads, replicas = replicated(shares, ep, 100)
    assert loads == pytest.approx(np.ones(ep))
    given_away = np.zeros(16)
    for replica in replicas:
        assert replica.home == replica.expert // (16 // ep) != replica.target
        given_away[replica.expert] += replica.share
    assert (given_away <= shares + 1e-9).all()


@pytest.mark.parametrize("asked", [None, load(*HOT), load(1, 1, 0, 0, 0, 0, 0, 0)])
def test_a_gather_to_the_hottest_rank_saves_nothing(asked: Any) -> None:
    ep = 4
    found = strategies(asked, ep)
    gather, plain = found["gather_to_one"], found["all_to_all"]
    assert gather.exchange_bytes == plain.exchange_bytes
    nothing_elsewhere = asked == load(1, 1, 0, 0, 0, 0, 0, 0)
    assert (gather.total_s == plain.total_s) is nothing_elsewhere
    assert gather.total_s >= plain.total_s


def test_a_copy_moves_its_weights_and_gradients_and_leaves_the_even_rows() -> None:
    even, hot = (strategies(asked, ep=2) for asked in (None, load(3, 1, 1, 1, 1, 1, 0, 0)))
    moved = hot["replicate"].exchange_bytes - even["all_to_all"].exchange_bytes
    assert hot["replicate"].skew == pytest.approx(1)
    assert moved == pytest.approx(3 * 4096 * 14336 * (2 + 4))  # bf16, fp32 gradients


@pytest.mark.parametrize("ep", [2, 4, 8, 16, 32])
def test_gathering_all_tokens_sends_less_iff_a_token_has_more_experts_than_ranks(ep: int) -> None:
    found = strategies(None, ep, model="deepseek-v3")
    counts = 8 * (256 + ep) * (ep - 1) / ep  # of the all_to_all alone
    plain = found["all_to_all"].exchange_bytes - counts
    assert found["all_gather"].exchange_bytes / plain == pytest.approx(ep / 8)


def test_one_rank_exchanges_nothing() -> None:
    for one in strategies(load(*HOT), ep=1).values():
        assert (one.exchange_s, one.exchange_bytes) == (0, 0)


def test_replicas_pay_where_rows_are_many_and_not_where_they_are_few() -> None:
    for tokens, pays in ((256, False), (32768, True)):
        where = problem("deepseek-v3", seq_len=tokens, expert_load={"zipf": 1.0})
        found = compare_strategies(where, expert_row(where, 8))
        copies = next(one for one in found if one.name.startswith("replicate"))
        assert (copies.total_s < found[0].total_s) is pays


def test_padding_to_the_fullest_sends_e_over_k_times_the_rows_of_a_collapse() -> None:
    found = strategies(load(1, 1, 0, 0, 0, 0, 0, 0))
    assert found["pad,"].skew == pytest.approx(8 / 2)
    assert found["pad,"].dropped == 0
    assert found["drop"].dropped == pytest.approx(1 - 2 / 8)


def test_a_row_needs_experts_and_ranks_for_them() -> None:
    for where, ep, said in (
        (on_eight(), 3, "does not divide the 8 experts .* one of 1, 2, 4, 8"),
        (problem("deepseek-v3", on=fabric(8)), 16, "ep=16: .* has 8 ranks; need at most"),
        (problem("llama3-8b"), 8, "dense"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            expert_row(where, ep)


def test_the_command_talks_of_ranks_and_divisors_and_never_of_nodes_that_nobody_gave() -> None:
    for topology, ep, said in (
        ("dgx-h100", "3", "need one of 1, 2, 4, 8, 16, 32, 64, 128, 256"),
        ("l40s-x8", "64", "ep=64: l40s-x8 has 8 ranks; need at most as many"),
    ):
        done = CliRunner().invoke(app, ["moe", "deepseek-v3", topology, "--ep", ep])
        assert isinstance(done.exception, InvalidInputError)
        assert said in str(done.exception)


def test_the_command_prints_a_table_and_a_document(tmp_path: Any) -> None:
    counts = tmp_path / "counts.csv"
    counts.write_text("\n".join(map(str, HOT)))
    words = ["moe", "mixtral-8x7b", "dgx-h100", "--ep", "8", "--counts", str(counts)]
    table = CliRunner().invoke(app, words)
    assert table.exit_code == 0, table.output
    assert "gather_to_one" in table.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert found["strategies"][0]["skew"] == pytest.approx(8 * 9 / 26)
    (inside, *_) = found["dispatch"]
    into_mean = 2 * 4096 * 4096 * 2 * 7 / 8  # k tokens, h, bf16
    assert max(inside["into_bytes"]) == pytest.approx(into_mean * 8 * 9 / 26)
    assert found["break_even"]["hottest_rows"] == pytest.approx(2 * 4096 * 7 / 8 * 8 * 9 / 26)
    assert found["break_even"]["bytes_rows"] == 2.25 * 14336
