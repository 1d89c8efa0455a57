"""Every way to synchronise gradients trains the same, and sends the bytes of its formula."""

import pytest

from benchmarks.gradient_sync import SHARED, module
from benchmarks.lab import Lab, World, lab_topology, with_nic_rate
from benchmarks.lab.calls import plan_on
from benchmarks.lab.gradients import DDP_DEFAULT, FORCED, Way, measure

pytestmark = pytest.mark.lab

NUM_BYTES = 4_000_000


@pytest.mark.usefixtures("possible")
def test_all_ways_train_the_same_and_send_what_they_must() -> None:
    document = with_nic_rate(lab_topology("lab-2x2"), 125e6)
    ways = [
        *(module(method, NUM_BYTES // 2) for method in FORCED),
        module(SHARED, NUM_BYTES // 4, num_threads=2),
        Way("ddp hook", *SHARED, NUM_BYTES // 2),
    ]
    with Lab(document) as lab:
        plan, world = (
            plan_on(document, lab.cluster, {"all_reduce": FORCED}),
            World.draw(1, lab.cluster.world_size),
        )
        found = list(
            measure(
                lab,
                plan,
                world,
                model_bytes=NUM_BYTES,
                ratios_of=dict.fromkeys([*ways, DDP_DEFAULT], (0.5,)),
                num_steps=1,
            )
        )
    assert [steps.way for steps in found] == [DDP_DEFAULT, DDP_DEFAULT, *ways]
    for steps in found:
        assert steps.max_difference < 1e-5
        rings = 1.5 if steps.way.algorithm == "ring" else 1.0  # 2 (n - 1) / n, or 2 (H - 1) / H
        assert steps.link_bytes == pytest.approx(rings * NUM_BYTES, rel=0.03)
        assert min(steps.seconds) >= steps.compute_s * 0.9  # but for jitter
