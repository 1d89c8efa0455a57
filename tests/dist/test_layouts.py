"""Every layout trains what one process trains: losses, norms and parameters after 20 steps.

``python -m tests.dist.test_layouts`` prints the table of differences.
"""

import json
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from planner.pipeline.schedules import schedule_order
from planner.plan import (
    CalibrationRun,
    Collective,
    ExpertCapacity,
    Method,
    Probe,
    RankOrder,
    document_hash,
)
from tests.dist.cases import STEPS, Case, case, train_whole
from tests.dist.jobs import run

pytestmark = pytest.mark.dist

OPS = tuple(op for op in get_args(Collective) if op != "reduce")  # which training never calls
PROBES = (
    Probe(axis="tp", op="all_reduce", sizes_bytes=(4096,)),  # one rank: nothing to measure
    *(Probe(axis="dp_cp", op=op, sizes_bytes=(4096, 1 << 16)) for op in OPS),
)
FP64 = 8
# 12,501 elements: no bucket divides evenly over shards or the ranks of a unit.
ODD = 12_501 * FP64
CLIP = 0.5  # below every norm of these models, so that clipping acts
HIERARCHICAL: dict[str, Any] = {"gradient_algorithm": "hierarchical", "bucket_bytes": ODD}
ZERO_1: dict[str, Any] = {"zero_stage": 1, "bucket_bytes": ODD, "max_gradient_norm": CLIP}
DP_OUTERMOST: RankOrder = "tp-cp-ep-pp-dp"
FSDP: dict[str, Any] = {"zero_stage": 3, "max_gradient_norm": CLIP}
NOTHING_DROPPED = ExpertCapacity(factor=4.0)  # 8 experts, top 2: room for every token
# By position: by probability, rounding decides about a token now and then.
DROPPING = ExpertCapacity(factor=1.0, drop="position")
SHARED = Method("copy_engine", "shm")
HALVING = Method("halving_doubling", "executor")
INSIDE_AND_ACROSS = Method("hierarchical", "shm")
BY_SIZE = (
    (4096, Method("direct", "executor")),
    (50_000, INSIDE_AND_ACROSS),
    (None, Method("tree", "executor")),
)

FOUR_RANKS = (
    case("dp4", dp=4, probes=PROBES),
    case("dp4 hierarchical", dp=4, ranks_per_unit=2, **HIERARCHICAL),
    case("dp4 zero-1", dp=4, dp_shard=4, **ZERO_1),
    case("dp4 fsdp2", dp=4, dp_shard=4, **FSDP),
    case("tp2 dp2", tp=2, dp=2, micro_batch_size=2, max_gradient_norm=CLIP),
    case("pp2 dp2 interleaved", pp=2, dp=2, virtual_stages=2, max_gradient_norm=CLIP),
    case("tp2 pp2", tp=2, pp=2, micro_batch_size=2, max_gradient_norm=CLIP),
    case("cp4 ring", micro_batch_size=4, cp=4, max_gradient_norm=CLIP),
    case("ep4 dropless", "gpt-experts", dp=4, ep=4, max_gradient_norm=CLIP),
    case("ep4 dropping", "gpt-experts", dp=4, ep=4, expert_capacity=DROPPING),
    case(
        "tp2 ep4 dp2",
        "gpt-shared-expert",
        micro_batch_size=2,
        tp=2,
        dp=2,
        ep=4,
        max_gradient_norm=CLIP,
    ),
    case(
        "ep2 pp2 dp2", "gpt-experts", micro_batch_size=2, dp=2, ep=2, pp=2, max_gradient_norm=CLIP
    ),
    case("llama tp2 pp2", "hf-llama", micro_batch_size=4, tp=2, pp=2),
    case(
        "dp4 by size",
        dp=4,
        ranks_per_unit=2,
        bucket_bytes=ODD,
        methods={("dp_cp", "all_reduce"): BY_SIZE},
        probes=(Probe(axis="dp_cp", op="all_reduce", sizes_bytes=(4096, 16384)),),
    ),
    case(
        "dp4 fsdp2 shared memory and across",
        dp=4,
        dp_shard=4,
        units=((0, 2), (1, 3)),
        methods={
            ("dp_shard_cp", op): ((None, INSIDE_AND_ACROSS),)
            for op in ("reduce_scatter", "all_gather")
        },
        **FSDP,
    ),
    case(
        "tp2 dp2 shared memory",
        tp=2,
        dp=2,
        micro_batch_size=2,
        methods={
            ("dp_cp", "all_reduce"): ((None, SHARED),),
            **{("tp", op): ((None, SHARED),) for op in ("all_reduce", "reduce_scatter")},
            ("tp", "all_gather"): ((None, SHARED),),
        },
    ),
    case("mixtral ep4", "hf-mixtral", dp=4, ep=4),
)
EIGHT_RANKS = (
    case("tp2 pp2 dp2", micro_batch_size=2, tp=2, pp=2, dp=2, max_gradient_norm=CLIP),
    case("dp8 one rank per host", dp=8, ranks_per_node=1, **HIERARCHICAL),
    case(
        "dp8 three levels",
        dp=8,
        ranks_per_unit=2,
        outer_units=((0, 1, 2, 3), (4, 5, 6, 7)),
        bucket_bytes=ODD,
        methods={("dp_cp", "all_reduce"): ((None, Method("three_level", "shm")),)},
    ),
)
MORE_ON_FOUR = (
    case("tied pp2 dp2", "gpt-tied", pp=2, dp=2, max_gradient_norm=CLIP),
    case("ep4 padded", "gpt-experts", dp=4, ep=4, expert_capacity=NOTHING_DROPPED),
    case("ep4 aux loss", "gpt-experts", dp=4, ep=4, aux_loss_coefficient=0.1),
    case(
        "dp4 zero-1 halving",
        dp=4,
        dp_shard=4,
        methods={
            ("dp_shard_cp", op): ((None, HALVING),) for op in ("reduce_scatter", "all_gather")
        },
        **ZERO_1,
    ),
    case(
        "ep4 in two steps",
        "gpt-experts",
        dp=4,
        ep=4,
        ranks_per_unit=2,
        methods={("ep", "all_to_all"): ((None, Method("hierarchical", "executor")),)},
    ),
    case("pp2 dp2 1f1b", pp=2, dp=2),
    case("ep2 dp4 hierarchical", "gpt-experts", dp=4, ep=2, ranks_per_unit=2, **HIERARCHICAL),
    case("pp2 dp2 uneven", pp=2, dp=2, layers=(3, 1)),
    case("ep2 pp2 dp2 dp outermost", "gpt-experts", dp=2, ep=2, pp=2, order=DP_OUTERMOST),
    case("dp4 not clipped", dp=4, max_gradient_norm=100.0),
    case("dp4 hsdp", dp=4, dp_shard=2, **FSDP),
    case("pp2 dp2 gpipe", pp=2, dp=2, schedule="gpipe"),
    case("cp4 all_gather", micro_batch_size=4, cp=4, context_exchange="all_gather"),
    case("cp2 tp2", micro_batch_size=4, cp=2, tp=2),
    case("tied tp2 dp2 zero-1", "gpt-tied", micro_batch_size=2, tp=2, dp=2, dp_shard=2, **ZERO_1),
    case("ep4 recompute", "gpt-experts", dp=4, ep=4, recompute="full"),
    case("ep2 dp4 fsdp2", "gpt-experts", dp=4, dp_shard=4, ep=2, **FSDP),
    case("tp2 dp2 fsdp2", micro_batch_size=2, tp=2, dp=2, dp_shard=2, **FSDP),
    case("pp2 dp2 fsdp2", micro_batch_size=2, pp=2, dp=2, dp_shard=2, **FSDP),
    case("ep4 shared expert", "gpt-shared-expert", dp=4, ep=4),
    case("tied dp4 fsdp2", "gpt-tied", dp=4, dp_shard=4, **FSDP),
    case("pp4 2 micro-batches", pp=4, micro_batch_size=4),
    case("dp4 zero-1 in units", dp=4, dp_shard=2, **ZERO_1),
    case("dp4 fsdp2 recompute", dp=4, dp_shard=4, recompute="full", **FSDP),
    case("tp2 dp2 recompute", tp=2, dp=2, micro_batch_size=2, recompute="full"),
    case("tp2 dp2 zero-1", micro_batch_size=2, tp=2, dp=2, dp_shard=2, **ZERO_1),
    case("pp4 1f1b", micro_batch_size=2, pp=4),
    case("pp2 dp2 interleaved recompute", pp=2, dp=2, virtual_stages=2, recompute="full"),
    case("cp2 dp2 ring recompute", micro_batch_size=2, cp=2, dp=2, recompute="full"),
    case("cp2 dp2 fsdp2", micro_batch_size=2, cp=2, dp=2, dp_shard=2, **FSDP),
    case("cp2 pp2 all_gather", micro_batch_size=2, cp=2, pp=2, context_exchange="all_gather"),
    case("tied pp2 dp2 fsdp2", "gpt-tied", micro_batch_size=2, pp=2, dp=2, dp_shard=2, **FSDP),
    case("tied tp2 pp2", "gpt-tied", micro_batch_size=2, tp=2, pp=2),
    case("dp4 recompute", dp=4, recompute="full"),
    case("ep4 fsdp2", "gpt-experts", dp=4, dp_shard=4, ep=4, **FSDP),
    case("ep2 dp4 zero-1", "gpt-experts", dp=4, dp_shard=4, ep=2, **ZERO_1),
    case("mixtral tp2 pp2 ep2", "hf-mixtral", micro_batch_size=2, tp=2, pp=2, ep=2),
    case("llama cp2 dp2", "hf-llama-tied", micro_batch_size=2, cp=2, dp=2),
    case("cp2 tp2 ep2 aux loss", "gpt-experts", cp=2, tp=2, ep=2, aux_loss_coefficient=0.1),
)
MORE_ON_EIGHT = (
    case("dp8 hosts of 3 and 5", dp=8, units=((0, 1, 2), (3, 4, 5, 6, 7)), **HIERARCHICAL),
    case("dp8 hosts interleaved", dp=8, units=((0, 2, 4, 6), (1, 3, 5, 7)), **HIERARCHICAL),
    case(
        "tp2 pp2 dp2 zero-1 dp outermost",
        micro_batch_size=2,
        tp=2,
        pp=2,
        dp=2,
        dp_shard=2,
        order=DP_OUTERMOST,
        **ZERO_1,
    ),
    case("ep4 pp2 dp4", "gpt-experts", dp=4, ep=4, pp=2, max_gradient_norm=CLIP),
    case("cp2 tp2 dp2", micro_batch_size=2, cp=2, tp=2, dp=2, max_gradient_norm=CLIP),
    case(
        "tp2 pp2 dp2 interleaved zero-1",
        micro_batch_size=2,
        tp=2,
        pp=2,
        dp=2,
        virtual_stages=2,
        dp_shard=2,
        **ZERO_1,
    ),
    case("cp2 pp2 dp2 dp outermost", micro_batch_size=2, cp=2, pp=2, dp=2, order=DP_OUTERMOST),
    case("pp2 dp4 dp outermost hierarchical", pp=2, dp=4, order=DP_OUTERMOST, **HIERARCHICAL),
    case("tp2 cp2 dp2 hsdp", micro_batch_size=2, tp=2, cp=2, dp=2, dp_shard=2, **FSDP),
    case(
        "ep2 dp8 hosts interleaved",
        "gpt-experts",
        dp=8,
        ep=2,
        units=((0, 1, 4, 5), (2, 3, 6, 7)),
        **HIERARCHICAL,
    ),
)
LONG = {c.name for c in (*MORE_ON_FOUR, *MORE_ON_EIGHT)}
CASES = {c.name: c for c in (*FOUR_RANKS, *EIGHT_RANKS, *MORE_ON_FOUR, *MORE_ON_EIGHT)}
ALL = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES]

# Mixtral of transformers routes in fp32 whatever its weights are; this executor does not narrow.
TOLERANCE = {"hf-mixtral": 1e-6}


class Trained(NamedTuple):
    """What a job has left of one case."""

    found: dict[str, Any]
    parts: list[list[tuple[str, int, int, torch.Tensor]]]  # by rank


def train_all(cases: Iterable[Case], num_ranks: int, *, within_s: float) -> dict[str, Trained]:
    """Train all cases in one job."""
    cases = list(cases)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_text(json.dumps([c.as_dict() for c in cases]))
        worker = str(Path(__file__).with_name("train_layouts.py"))
        ends = run([[worker, str(folder / "cases"), name]] * num_ranks, within_s=within_s)
        for rank, end in enumerate(ends):
            assert end.code == 0, f"rank {rank}: {end.stderr[-2000:]}"
        return {c.name: _read(folder, c.name.replace(" ", "_"), num_ranks) for c in cases}


def _read(folder: Path, stem: str, num_ranks: int) -> Trained:
    return Trained(
        json.loads((folder / f"{stem}.json").read_text()),
        [torch.load(folder / f"{stem}.{rank}.pt") for rank in range(num_ranks)],
    )


def trained(name: str) -> Trained:
    """Return what is left of one case; it was trained in a job with the others like it."""
    jobs = {FOUR_RANKS: 4, EIGHT_RANKS: 8, MORE_ON_FOUR: 4, MORE_ON_EIGHT: 8}
    for cases, num_ranks in jobs.items():
        if CASES[name] in cases:
            return train_once(cases, num_ranks)[name]
    raise AssertionError(f"{name} is in no job")


@cache
def train_once(cases: tuple[Case, ...], num_ranks: int) -> dict[str, Trained]:
    return train_all(cases, num_ranks, within_s=400)


def trained_alone(c: Case) -> Trained:
    """Train in the executor with one rank what plain torch has no words for: the same batches."""
    capacity, coefficient = c.plan.training.expert_capacity, c.aux_loss_coefficient
    alone = case(
        "alone", c.model, steps=STEPS, expert_capacity=capacity, aux_loss_coefficient=coefficient
    )
    return train_once((alone,), 1)["alone"]


def needs_executor(c: Case) -> bool:
    dropping = c.plan.training.expert_capacity not in (None, NOTHING_DROPPED)
    return dropping or c.aux_loss_coefficient > 0


def whole(parts: list[list[tuple[str, int, int, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Return the parameters of the whole model; ranks that hold the same part agree on it."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    dims = {}
    for rank in parts:
        for name, dim, index, part in rank:
            dims[name] = dim
            known = found.setdefault(name, {}).setdefault(index, part)
            torch.testing.assert_close(part, known, rtol=1e-12, atol=1e-15)
    return {
        name: torch.cat([pieces[index] for index in sorted(pieces)], dims[name])
        for name, pieces in found.items()
    }


def differences(name: str) -> tuple[float, float, float]:
    """Return the largest relative difference of losses, norms and parameters (by tensor)."""
    c, run_of_case = CASES[name], trained(name)
    if needs_executor(c):
        alone = trained_alone(c)
        losses, parameters = alone.found["losses"], whole(alone.parts)
        norms: list[float] = []
    else:
        losses, norms, parameters = train_whole(c.model, c.max_gradient_norm)
    mine = whole(run_of_case.parts)
    assert mine.keys() == parameters.keys()
    assert len(run_of_case.found["losses"]) == len(losses) == STEPS
    return (
        _largest(zip(run_of_case.found["losses"], losses, strict=True)),
        _largest(zip(run_of_case.found["norms"], norms, strict=True)) if norms else 0.0,
        max(float((mine[key] - value).norm() / value.norm()) for key, value in parameters.items()),
    )


def _largest(pairs: Iterable[tuple[float, float]]) -> float:
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


@pytest.mark.parametrize("name", ALL)
def test_training_equals_one_process(name: str) -> None:
    c = CASES[name]
    tolerance = TOLERANCE.get(c.model, 1e-9)
    assert max(differences(name)) < tolerance
    norms = trained(name).found["norms"]
    assert all((norm is None) == (c.max_gradient_norm is None) for norm in norms)
    assert all(norm is None or norm > CLIP for norm in norms), "clipping acted"


def test_dropping_and_balancing_change_the_training() -> None:
    """So that the cases above would notice if tokens were kept, or the loss left out."""
    plain, _, _ = train_whole("gpt-experts")
    for name in ("ep4 dropping", "ep4 aux loss"):
        losses = trained(name).found["losses"]
        assert abs(losses[-1] - plain[-1]) > 1e-6 * plain[-1]


@pytest.mark.parametrize("name", ALL)
def test_run_validates_and_times_every_rank(name: str) -> None:
    c = CASES[name]
    timed = CalibrationRun.model_validate(trained(name).found["run"])
    assert timed.plan_hash == document_hash(c.plan)
    assert timed.backend == "gloo"
    assert [timings.rank for timings in timed.ranks] == list(range(c.plan.layout.world_size))
    for timings in timed.ranks:
        assert len(timings.step_s) == STEPS - 1
        for step, compute, optimizer, comm in zip(
            timings.step_s,
            timings.forward_backward_s,
            timings.optimizer_s,
            timings.communication_s,
            strict=True,
        ):
            assert 0 < compute + optimizer + comm <= step


@pytest.mark.parametrize("name", [p for p in ALL if CASES[str(p.values[0])].has_own_methods])
def test_what_ran_is_what_was_planned_for_its_size(name: str) -> None:
    plan = CASES[name].plan
    timed = CalibrationRun.model_validate(trained(name).found["run"])
    seen = set()
    for timings in timed.ranks:
        ran = {
            (call.axis, call.op, call.size_bytes): Method(call.algorithm, call.path)
            for call in timings.collectives
            if any((call.axis, call.op) == (choice.axis, choice.op) for choice in plan.collectives)
        }
        assert {key[:2] for key in ran} == {(one.axis, one.op) for one in plan.collectives}
        assert ran == {key: plan.method(*key) for key in ran}
        seen |= set(ran.values())
    assert seen == {method for choice in plan.collectives for method in choice.methods()}


def test_probes_are_timed_on_every_rank() -> None:
    timed = CalibrationRun.model_validate(trained("dp4").found["run"])
    for timings in timed.ranks:
        probes = [c for c in timings.collectives if c.is_probe]
        assert [(c.axis, c.op, c.size_bytes, c.group_size) for c in probes] == [
            ("dp_cp", op, size_bytes, 2 if op == "send_recv" else 4)
            for op in OPS
            for size_bytes in (4096, 1 << 16)
        ]
        assert all(len(c.seconds) == 5 and min(c.seconds) > 0 for c in probes)


def test_send_and_receive_lists_pair_up() -> None:
    """Stage 0 lists forward then backward messages, and so does stage 1: same lengths, in order."""
    timed = CalibrationRun.model_validate(trained("pp2 dp2 1f1b").found["run"])
    first, last = (
        [c for c in timed.ranks[rank].collectives if c.op == "send_recv"] for rank in (0, 2)
    )
    assert len(first) == len(last) == 2
    assert {len(c.seconds) for c in (*first, *last)} == {4 * (STEPS - 1)}


@pytest.mark.parametrize("name", [p for p in ALL if CASES[str(p.values[0])].plan.layout.pp > 1])
def test_torch_runs_the_planners_order(name: str) -> None:
    plan = CASES[name].plan
    pp = plan.layout.pp
    planned = schedule_order(
        plan.pipeline.schedule,
        num_stages=pp,
        num_micro_batches=plan.batch.num_micro_batches,
        virtual_stages=plan.layout.virtual_stages,
    )
    for rank, order in enumerate(trained(name).found["orders"]):
        stage = plan.coordinates(rank)["pp"]
        assert order == [f"{a.chunk * pp + stage}{a.kind}{a.micro_batch}" for a in planned[stage]]


def print_table() -> None:
    print(f"{'layout':34} {'model':18} {'loss':>8} {'norm':>8} {'params':>8}")
    for name, c in CASES.items():
        loss, norm, parameters = differences(name)
        print(f"{name:34} {c.model:18} {loss:8.1e} {norm:8.1e} {parameters:8.1e}")


if __name__ == "__main__":
    print_table()
