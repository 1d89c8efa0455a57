"""What offloading moves, how long that takes, and what of it hides."""

from typing import Any

import pytest

from planner.constants import ACHIEVED_FRACTION, HOST_MEMORY_BYTES_PER_S, NVME_BYTES_PER_S
from planner.cost.memory import memory
from planner.cost.offload import host_work, link_bytes_per_s
from planner.cost.problem import Problem
from planner.cost.step import price, timed_ops
from planner.cost.work import HostCopy
from planner.errors import InvalidInputError
from planner.model.blocks import parameter_count
from tests.unit.problems import fabric, problem, row

SHARDED: dict[str, Any] = {"dp_shard": 8, "zero_stage": 3, "num_micro_batches": 4}


def moved(base: Problem, **degrees: Any) -> dict[str, float]:
    return {
        op.name: float(op.num_bytes[0] * op.repeats[0])
        for op in host_work(base, row(**degrees))
        if op.over == "link"
    }


def test_nothing_moves_without_offload() -> None:
    assert host_work(problem("llama3-8b"), row(**SHARDED)) == []


@pytest.mark.parametrize(
    ("parts", "name", "per_parameter"),
    [
        (("optimizer",), "offload_update", 4 + 2),  # fp32 gradients down, 16-bit weights up
        (("optimizer", "gradients"), "offload_update", 2),
        (("optimizer", "gradients"), "offload_gradients", 4 * 4),  # each of four micro-batches
        (("weights",), "offload_weights", 2 * 2 * 4),  # for each forward and backward
    ],
)
def test_states_move_by_the_parameter(
    parts: tuple[str, ...], name: str, per_parameter: int
) -> None:
    base = problem("llama3-8b", offload=parts)
    expected = per_parameter * parameter_count(base.model) / 8
    assert moved(base, **SHARDED)[name] == pytest.approx(expected)


@pytest.mark.parametrize(("zero", "shares"), [(0, 1), (1, 8), (2, 8), (3, 8)])
def test_an_offloaded_optimizer_moves_the_states_of_its_share(zero: int, shares: int) -> None:
    """Shared out from ZeRO-1 on, though weights are from ZeRO-3 on alone."""
    base = problem("llama3-8b", offload=("optimizer",))
    found = moved(base, **{**SHARDED, "zero_stage": zero})["offload_update"]
    assert found == pytest.approx(6 * parameter_count(base.model) / shares)


@pytest.mark.parametrize(("mode", "layers"), [("none", 0), ("selective", 0), ("full", 0),
                                              ("full", 1), ("full", 20)])  # fmt: skip
def test_activations_leave_and_come_back_once_a_micro_batch(mode: str, layers: int) -> None:
    whole = problem("llama3-8b", seq_len=4096)
    base = problem("llama3-8b", seq_len=4096, offload=("activations",))
    one = {**SHARDED, "recompute": mode, "recompute_layers": layers}
    kept = memory(whole, row(**one)).activations_bytes.max()
    assert moved(base, **one)["offload_activations"] == pytest.approx(2 * 4 * kept)


def test_a_link_twice_as_fast_halves_what_it_takes() -> None:
    base = problem("llama3-8b", offload=("optimizer",))
    nominal = 63e9  # PCIe 5.0 x16 of an H100
    assert link_bytes_per_s(base) == nominal * ACHIEVED_FRACTION["pcie"].value
    older = problem("llama3-8b", offload=("optimizer",), on=fabric(device="a100-sxm-80gb"))
    assert link_bytes_per_s(older) == pytest.approx(link_bytes_per_s(base) / 2)
    drives = problem("llama3-8b", offload=("optimizer",), offload_to="nvme")
    assert link_bytes_per_s(drives) == NVME_BYTES_PER_S.value
    found = {
        op.timed.op.name: float(op.timed.seconds[0])
        for b in (base, older)
        for op in timed_ops(b, row(**SHARDED))
        if isinstance(op.timed.op, HostCopy) and b is older
    }
    there = {
        op.timed.op.name: float(op.timed.seconds[0])
        for op in timed_ops(base, row(**SHARDED))
        if isinstance(op.timed.op, HostCopy)
    }
    assert found["offload_update"] == pytest.approx(2 * there["offload_update"])


def test_a_coherent_link_is_the_gpus_own() -> None:
    grace = problem("llama3-8b", offload=("optimizer",), on=fabric(device="gb200"))
    assert link_bytes_per_s(grace) > 2 * link_bytes_per_s(problem("llama3-8b"))


def test_copies_hide_under_compute_and_the_hosts_update_does_not() -> None:
    plain = price(problem("llama3-8b"), row(**SHARDED))
    hidden = price(problem("llama3-8b", offload=("weights",)), row(**SHARDED))
    assert hidden.step_time_s()[0] == plain.step_time_s()[0]
    short = problem("llama3-8b", seq_len=64, offload=("weights",))
    before = price(problem("llama3-8b", seq_len=64), row(**SHARDED))
    assert price(short, row(**SHARDED)).step_time_s()[0] > before.step_time_s()[0]
    update = price(problem("llama3-8b", offload=("optimizer",)), row(**SHARDED))
    assert update.optimizer_s[0] > 5 * plain.optimizer_s[0]


def test_the_host_updates_at_the_rate_of_its_memory_with_nothing_beside() -> None:
    """AdamW reads fp32 gradients, reads and writes 12 bytes of states, and writes 16-bit weights.

    Long sequences leave compute for many times the copies, and still none of it hides.
    """
    base = problem("llama3-8b", seq_len=65536, offload=("optimizer",))
    ops = {
        op.timed.op.name: op
        for op in timed_ops(base, row(**SHARDED))
        if isinstance(op.timed.op, HostCopy)
    }
    params = parameter_count(base.model) / 8
    update, copies = ops["optimizer"], ops["offload_update"]
    expected = params * (4 + 2 * 12 + 2) / HOST_MEMORY_BYTES_PER_S.value
    assert update.exposed_s[0] == pytest.approx(expected)
    assert copies.exposed_s[0] == pytest.approx(params * 6 / link_bytes_per_s(base))
    assert price(base, row(**SHARDED)).compute_s[0] > 10 * copies.exposed_s[0]


def test_copies_add_up_to_the_breakdown() -> None:
    base = problem("llama3-8b", seq_len=64, offload=("weights", "optimizer", "activations"))
    one = row(**SHARDED)
    ops = [op for op in timed_ops(base, one) if op.timed.op.phase == "step"]
    exposed = sum(float(op.exposed_s[0]) for op in ops if not hasattr(op.timed.op, "axis"))
    assert exposed == pytest.approx(price(base, one).optimizer_s[0])


def test_a_device_without_a_known_link_is_refused_by_name() -> None:
    cores = problem("example-gpt", offload=("optimizer",), on=fabric(device="cpu-core"))
    with pytest.raises(InvalidInputError, match="link of device 'cpu-core'"):
        link_bytes_per_s(cores)


def test_copies_share_the_compute_that_they_hide_under() -> None:
    """Weights and activations each hide alone, on a link so slow that both together do not."""
    one = row(**SHARDED)
    for length in (2048, 4096, 8192, 16384):
        alone = [
            price(problem("llama3-8b", seq_len=length, offload=(part,), offload_to="nvme"), one)
            for part in ("weights", "activations")
        ]
        plain = price(problem("llama3-8b", seq_len=length), one).optimizer_s[0]
        both = problem(
            "llama3-8b", seq_len=length, offload=("weights", "activations"), offload_to="nvme"
        )
        apart = sum(float(p.optimizer_s[0] - plain) for p in alone)
        together = float(price(both, one).optimizer_s[0] - plain)
        copies = [op for op in timed_ops(both, one) if isinstance(op.timed.op, HostCopy)]
        took = sum(float(op.timed.total_s[0]) for op in copies)
        compute = float(price(problem("llama3-8b", seq_len=length), one).compute_s[0])
        assert together == pytest.approx(max(0.0, took - compute), rel=1e-6)
        assert together > apart
