"""DDP with our hook, and a plain module with overlapped gradients, train what DDP trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.jobs import run
from tests.dist.run_gradients import STEPS

pytestmark = pytest.mark.dist

NUM_RANKS = 2
WEIGHTS_BYTES = 2 * (32 * 64 + 64 + 64 * 32 + 32) * 8


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank found."""
    out = tmp_path_factory.mktemp("gradients") / "found"
    worker = str(Path(__file__).with_name("run_gradients.py"))
    for rank, end in enumerate(run([[worker, str(out)]] * NUM_RANKS, within_s=60)):
        assert end.code == 0, f"rank {rank}: {end.stderr[-2000:]}"
    return [torch.load(f"{out}.{rank}") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", ["hook", "plain"])
def test_parameters_are_those_of_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        for mine, ddps, first_ranks in zip(found[name], found["ddp"], ranks[0]["ddp"], strict=True):
            # Two summands in either order round alike: no tolerance.
            assert torch.equal(mine, ddps)
            assert torch.equal(mine, first_ranks)


def test_one_synchronisation_per_step_in_the_buckets_of_ddp(ranks: list[dict[str, Any]]) -> None:
    bucket_bytes = WEIGHTS_BYTES // 2  # two layers pass BUCKET_BYTES, which one does not
    flags_bytes = 4 * 8  # of the two weights and two biases in a bucket
    for found in ranks:
        # DDP begins with one bucket, and cuts it by what it saw in the first backward.
        assert found["hook sizes"] == [WEIGHTS_BYTES] + [bucket_bytes] * 2 * (STEPS - 1)
        fingerprint_bytes = 9 * 8  # of the buckets, once: all ranks must have the same
        buckets = [bucket_bytes + flags_bytes] * 2 * STEPS
        assert found["plain sizes"] == [fingerprint_bytes, *buckets]


def test_an_error_of_the_thread_is_raised_by_backward_of_ddp(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["errors"] == ["rank 9 is gone"] * 2
