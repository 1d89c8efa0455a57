"""The calls that the executor makes are those that the plan was priced with: op, group, bytes.

``python -m tests.dist.test_calls`` prints them side by side.
"""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from planner.plan import CalibrationRun, ExpertCapacity, Plan
from planner.planning import make_plan
from planner.request import Constraints, PlanRequest
from planner.resolving import resolve
from tests.dist.cases import MODELS, Case
from tests.dist.test_layouts import Trained, train_all

pytestmark = pytest.mark.dist

STEPS = 2  # the first one is not recorded
FP64 = 8

# (axis, op, ranks of the group, bytes) -> calls per step
Calls = Counter[tuple[str, str, int, int]]


def planned(
    name: str,
    model: str = "gpt-dense",
    *,
    ranks: int = 4,
    recompute: str = "none",
    capacity: ExpertCapacity | None = None,
    **held: Any,
) -> Case:
    """Return a case with the planner's own plan for one layout; what is not held is 1 or off."""
    off = dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "virtual_stages", "dp_shard"), 1)
    fixed = off | {"zero_stage": 0, "micro_batch_size": 2, "recompute": recompute} | held
    request = PlanRequest.model_validate(
        {
            "topology": "local-gloo",
            "nodes": 1 if ranks == 4 else ranks // 4,
            "model": {"huggingface": as_huggingface(model), "name": model},
            "training": {
                "global_batch_size": 16,
                "seq_len": 32,
                "precision": "fp64",
                "optimizer": "adamw",
                "expert_capacity": capacity,
            },
            "constraints": Constraints.model_validate(fixed),
            "framework": "executor",
            "calibration": "none",
        }
    )
    return Case(name, make_plan(resolve(request)), model, STEPS, None, 0.0)


def as_huggingface(model: str) -> dict[str, Any]:
    kind = "mixtral" if "num_local_experts" in MODELS[model] else "llama"
    architecture = {"mixtral": "MixtralForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    return {
        "model_type": kind,
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **MODELS[model],
    }


CASES = {
    c.name: c
    for c in (
        planned("dp4"),
        planned("dp4 zero-1", dp_shard=4, zero_stage=1),
        planned("dp4 fsdp2", dp_shard=4, zero_stage=3),
        planned("dp4 fsdp2 recompute", dp_shard=4, zero_stage=3, recompute="full"),
        planned("tp2 dp2", tp=2),
        planned("tp2 dp2 recompute", tp=2, recompute="full"),
        planned("tp2 dp2 zero-1", tp=2, dp_shard=2, zero_stage=1),
        planned("tp2 dp2 fsdp2", tp=2, dp_shard=2, zero_stage=3),
        planned("pp2 dp2 1f1b", pp=2, schedule="1f1b"),
        planned("pp2 dp2 gpipe", pp=2, schedule="gpipe"),
        planned("pp2 dp2 interleaved", pp=2, virtual_stages=2),
        planned(
            "pp2 dp2 zero-1 dp outermost",
            pp=2,
            dp_shard=2,
            zero_stage=1,
            schedule="1f1b",
            order="tp-cp-ep-pp-dp",
        ),
        planned("pp4", pp=4, schedule="1f1b"),
        planned("tp2 pp2", tp=2, pp=2, schedule="1f1b"),
        planned("tied pp2 dp2", "gpt-tied", pp=2, schedule="1f1b"),
        planned("tied dp4", "gpt-tied"),
        planned("tied dp4 fsdp2", "gpt-tied", dp_shard=4, zero_stage=3),
        planned("dp4 hsdp", dp_shard=2, zero_stage=3),
        planned("cp4 ring", cp=4, context_exchange="ring"),
        planned("cp4 all_gather", cp=4, context_exchange="all_gather"),
        planned("cp2 tp2 recompute", cp=2, tp=2, context_exchange="ring", recompute="full"),
        planned("cp2 dp2 fsdp2", cp=2, context_exchange="ring", dp_shard=2, zero_stage=3),
        planned("ep4", "gpt-experts", ep=4),
        planned("ep4 recompute", "gpt-experts", ep=4, recompute="full"),
        planned("ep4 padded", "gpt-experts", ep=4, capacity=ExpertCapacity(factor=1.25)),
        planned("ep2 dp4 zero-1", "gpt-experts", ep=2, dp_shard=4, zero_stage=1),
        planned("ep2 dp4 fsdp2", "gpt-experts", ep=2, dp_shard=4, zero_stage=3),
        planned("tp2 ep4 dp2", "gpt-experts", tp=2, ep=4),
        planned("ep2 pp2 dp2", "gpt-experts", ep=2, pp=2, schedule="1f1b"),
    )
}


@cache
def trained() -> dict[str, Trained]:
    return train_all(CASES.values(), 4, within_s=240)


def calls_of_plan(plan: Plan) -> Calls:
    """Return the calls of the pipeline rank that the plan prices."""
    counts: Calls = Counter()
    for op in plan.ops:
        if op.op is not None and op.axis is not None and op.group_size > 1 and op.repeats:
            counts[op.axis, op.op, op.group_size, round(op.size_bytes)] += round(op.repeats)
    return counts


def calls_made(name: str, rank: int) -> Calls:
    """Return what ``rank`` called per step; a message is counted where it is sent."""
    timed = CalibrationRun.model_validate(trained()[name].found["run"])
    counts: Calls = Counter()
    for c in timed.ranks[rank].collectives:
        if not c.is_probe and c.is_send is not False:
            assert len(c.seconds) % (STEPS - 1) == 0
            counts[c.axis, c.op, c.group_size, c.size_bytes] += len(c.seconds) // (STEPS - 1)
    return counts


def priced_ranks(plan: Plan) -> list[int]:
    """Return the ranks whose calls the plan lists: those of one pipeline rank, in these cases."""
    [stage] = {op.pp_rank for op in plan.ops}
    return [rank for rank in range(plan.layout.world_size) if plan.coordinates(rank)["pp"] == stage]


@pytest.mark.parametrize("name", CASES)
def test_calls_made_are_the_calls_priced(name: str) -> None:
    plan = CASES[name].plan
    for rank in priced_ranks(plan):
        assert calls_made(name, rank) == calls_of_plan(plan)


def print_table() -> None:
    for name, c in CASES.items():
        plan, made = c.plan, calls_made(name, priced_ranks(c.plan)[0])
        wanted = calls_of_plan(plan)
        print(f"{name}: {plan.layout}, {plan.batch.num_micro_batches} micro-batches")
        for axis, op, size, num_bytes in sorted({*made, *wanted}):
            key = axis, op, size, num_bytes
            verdict = "" if made[key] == wanted[key] else "  DIFFERS"
            print(
                f"  {axis:12} {op:15} {size:3} ranks {num_bytes:9} B"
                f"  plan {wanted[key]:4}  made {made[key]:4}{verdict}"
            )


if __name__ == "__main__":
    print_table()
