"""The report on gradients: bounds that nothing can beat, and what was best."""

from dataclasses import replace

import pytest

from benchmarks.gradient_sync import SHARED, bound_s, communication_bound_s, module, report
from benchmarks.lab import World
from benchmarks.lab.gradients import DDP_DEFAULT, Steps

DEFAULT = Steps(
    shape="lab-2x2",
    model_bytes=25_000_000,
    way=DDP_DEFAULT,
    is_planned=False,
    ratio=0.5,
    seconds=(3.9, 4.0, 4.4),
    compute_s=1.5,
    link_bytes=37.5e6,
    max_difference=0.0,
    world=World.draw(1, 4).model_dump(),
)


def test_each_of_two_hosts_sends_all_gradients_once_at_its_rate() -> None:
    assert communication_bound_s(DEFAULT) == pytest.approx(25e6 / 12.5e6)  # 100 Mbit/s
    assert communication_bound_s(replace(DEFAULT, shape="lab-2x4")) == pytest.approx(25e6 / 50e6)


def test_a_step_is_bound_by_the_slower_of_compute_and_network() -> None:
    assert bound_s(DEFAULT) == communication_bound_s(DEFAULT)
    assert bound_s(replace(DEFAULT, compute_s=9.0)) == 9.0


def test_the_report_names_the_best_way_its_share_and_its_speed_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = replace(DEFAULT, way=module(SHARED, 6_553_600), seconds=(2.5, 2.5, 2.5))
    worse = replace(DEFAULT, way=module(SHARED, 26_214_400), seconds=(3.0, 3.0, 3.0))
    report([replace(DEFAULT, ratio=0.0, compute_s=0.0), DEFAULT, worse, best])
    row = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("| lab-2x2")
    )
    assert "4.00 s ± 6% | 2.50 s ± 0% | module, hierarchical (shm), buckets of 6.6 MB" in row
    assert row.endswith("| 80% | 1.60 |")
