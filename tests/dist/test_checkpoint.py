"""A job resumes from the checkpoint of another layout and world size, with the same loss."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.dist.cases import STEPS, Case, case, train_whole
from tests.dist.jobs import EXAMPLE, ROOT, TINY_CONFIG, Ended, run
from tests.dist.plans import make_plan
from tests.dist.run_checkpoint import __file__ as worker

pytestmark = pytest.mark.dist

HALF = STEPS // 2
# 12,501 elements of 8 bytes: no bucket divides evenly, and its pieces begin inside rows.
ZERO_1 = {"zero_stage": 1, "bucket_bytes": 12_501 * 8}
FSDP = {"zero_stage": 3}


@dataclass(frozen=True)
class Resumed:
    """A job of four ranks, and the one that goes on from its checkpoint."""

    old: Case
    new: Case

    @property
    def name(self) -> str:
        return f"{self.old.name} to {self.new.name}"


def resumed(model: str, old: dict[str, Any], new: dict[str, Any], **options: Any) -> Resumed:
    def half(layout: dict[str, Any]) -> Case:
        degrees = {key: n for key, n in layout.items() if key not in (*ZERO_1, "micro_batch_size")}
        words = [f"{n}" if key == "order" else f"{key}{n}" for key, n in degrees.items()]
        zero = layout.get("zero_stage")
        words += [f"zero-{zero}"] if zero else []
        batch = {"micro_batch_size": 2}
        return case(" ".join([model, *words]), model, steps=HALF, **(batch | layout), **options)

    return Resumed(half(old), half(new))


RESUMED = (
    resumed("gpt-dense", {"dp": 4}, {"tp": 2, "pp": 2}),
    resumed(
        "gpt-dense",
        {"dp": 4, "dp_shard": 4, **ZERO_1},
        {"dp": 2, "dp_shard": 2, **FSDP},
        max_gradient_norm=0.5,
    ),
    resumed(
        "gpt-dense", {"tp": 2, "dp": 2, "dp_shard": 2, **FSDP}, {"dp": 2, "dp_shard": 2, **ZERO_1}
    ),
    resumed("gpt-tied", {"pp": 2, "dp": 2, "dp_shard": 2, **ZERO_1}, {"dp": 2}),
    resumed(
        "gpt-experts",
        {"ep": 4, "dp": 4, "dp_shard": 4, **ZERO_1},
        {"tp": 2, "ep": 2, "dp": 2, "dp_shard": 2, **ZERO_1},
    ),
    resumed("hf-llama", {"tp": 2, "pp": 2}, {"dp": 2, "dp_shard": 2, **FSDP}),
)
MORE = (
    resumed("gpt-dense", {"dp": 4, "dp_shard": 4, **FSDP}, {"dp": 1}),
    resumed("gpt-experts", {"ep": 2, "dp": 4, "dp_shard": 4, **FSDP}, {"ep": 2, "dp": 2}),
    resumed(
        "gpt-dense",
        {"tp": 2, "pp": 2},
        {"pp": 2, "dp": 2, "dp_shard": 2, "order": "tp-cp-ep-pp-dp", **FSDP},
    ),
    resumed("gpt-dense", {"tp": 2, "pp": 2}, {"dp": 2}),
    resumed("gpt-dense", {"cp": 2, "tp": 2}, {"pp": 2, "virtual_stages": 2, "dp": 2}),
    resumed("gpt-tied", {"dp": 4, "dp_shard": 2, **FSDP}, {"pp": 2, "tp": 2}),
    resumed("gpt-experts", {"ep": 4, "dp": 4}, {"ep": 2, "pp": 2, "dp": 2}),
    resumed("gpt-odd", {"dp": 4, "dp_shard": 4, **FSDP}, {"dp": 4, "dp_shard": 4, **ZERO_1}),
    resumed(
        "gpt-dense",
        {"pp": 2, "dp": 2, "dp_shard": 2, "order": "tp-cp-ep-pp-dp", **ZERO_1},
        {"pp": 2, "dp": 2, "dp_shard": 2, **ZERO_1},
    ),
)
ALL = [
    pytest.param(one, id=one.name, marks=[pytest.mark.long] * (one in MORE))
    for one in (*RESUMED, *MORE)
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def losses(checkpoints: Path, pairs: tuple[Resumed, ...]) -> dict[str, list[float]]:
    """Train half the steps on four ranks, the others on as many, in the same job, or on fewer."""
    old = [one.old.as_dict() | folders(checkpoints, one, "old") for one in pairs]
    found: dict[str, list[float]] = {}
    for num_ranks in (4, 2, 1):
        new = [
            one.new.as_dict() | folders(checkpoints, one, "new")
            for one in pairs
            if one.new.plan.layout.world_size == num_ranks
        ]
        if old or new:
            found |= trained(checkpoints, [*old, *new], num_ranks=num_ranks)
        old = []
    return found


def losses_of(checkpoints: Path, one: Resumed) -> dict[str, list[float]]:
    """Return the losses of the jobs that ``one`` was trained in."""
    return losses(checkpoints, MORE if one in MORE else RESUMED)


def folders(checkpoints: Path, one: Resumed, half: str) -> dict[str, Any]:
    old = str(checkpoints / one.name)
    new = f"{old}, resumed"
    return {"name": f"{one.name}: {half}"} | (
        {"resume": None, "save": old} if half == "old" else {"resume": old, "save": new}
    )


def trained(folder: Path, jobs: list[dict[str, Any]], *, num_ranks: int) -> dict[str, list[float]]:
    for rank, end in enumerate(started(folder, jobs, num_ranks)):
        assert end.code == 0, f"rank {rank}: {end.stderr[-3000:]}"
    found: dict[str, list[float]] = json.loads((folder / "losses.json").read_text())
    return found


def started(folder: Path, jobs: Iterable[dict[str, Any]], num_ranks: int) -> list[Ended]:
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    arguments = [worker, str(folder / "jobs.json"), str(folder)]
    return run([arguments] * num_ranks, within_s=300)


@pytest.mark.parametrize("one", ALL)
def test_resumed_losses_are_those_of_one_uninterrupted_process(
    one: Resumed, checkpoints: Path
) -> None:
    found = losses_of(checkpoints, one)
    whole, _, _ = train_whole(one.old.model, one.old.max_gradient_norm)
    assert found[f"{one.name}: old"] == pytest.approx(whole[:HALF], rel=1e-9)
    assert found[f"{one.name}: new"] == pytest.approx(whole[HALF:], rel=1e-9)


@pytest.mark.parametrize("one", ALL)
def test_last_checkpoint_holds_the_parameters_of_the_whole_model(
    one: Resumed, checkpoints: Path, tmp_path: Path
) -> None:
    """As torch's own tool reads it, which knows nothing of commplan."""
    losses_of(checkpoints, one)
    folder = checkpoints / f"{one.name}, resumed"
    assert (folder / "latest").read_text() == f"step-{STEPS}\n"
    dcp_to_torch_save(folder / f"step-{STEPS}", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")["model"]
    _, _, whole = train_whole(one.old.model, one.old.max_gradient_norm)
    assert set(found) == set(whole)
    for name, parameter in whole.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("doing", ["saving", "loading"])
def test_lost_rank_is_named_with_the_checkpoint_which_survives(doing: str, tmp_path: Path) -> None:
    one = case("dp2", dp=2, steps=1).as_dict()
    kept, folder = str(tmp_path / "kept"), tmp_path / "kept"
    jobs = [
        one | {"name": "first", "resume": None, "save": kept},
        one | {"name": "second", "resume": kept, "save": kept, "leaves_while": doing},
    ]
    survivor, _ = started(tmp_path, jobs, 2)
    assert survivor.code == 3
    assert f"{doing} checkpoint {kept}" in survivor.stderr
    assert "rank 0 lost rank 1 during torch.distributed.checkpoint" in survivor.stderr
    assert (folder / "latest").read_text() == "step-1\n"
    whole, _, _ = train_whole(one["model"])
    again = one | {"name": "again", "resume": kept, "save": kept, "steps": 1}
    assert trained(tmp_path, [again], num_ranks=2)["again"] == pytest.approx([whole[1]], rel=1e-9)
    # the folder that was begun is left alone
    expected = {"step-1", "step-2", "latest"} | ({"step-2-2"} if doing == "saving" else set())
    assert {path.name for path in folder.iterdir()} == expected


def example(num_ranks: int, tmp_path: Path, *options: str, **layout: Any) -> Any:
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan(precision="fp32", **layout).model_dump_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = f"--nproc-per-node={num_ranks}"
    given = ["--plan", str(plan), "--config", str(TINY_CONFIG), "--warmup", "1", "--repeats", "2"]
    return subprocess.run(
        [*torchrun, ranks, str(EXAMPLE), *given, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def steps_of(output: str) -> dict[int, float]:
    found = re.findall(r"^step +(\d+)  loss (\S+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.long
def test_example_saves_and_resumes_under_another_plan(tmp_path: Path) -> None:
    saved, folder = (
        example(2, tmp_path, "--save", str(tmp_path / "saved"), dp=2),
        tmp_path / "saved",
    )
    assert saved.returncode == 0, saved.stderr
    assert list(steps_of(saved.stdout)) == [0, 1, 2]
    done = example(1, tmp_path, "--resume", str(folder), "--save", str(folder))
    assert done.returncode == 0, done.stderr
    assert "resumed step 3" in done.stderr
    assert (folder / "latest").read_text() == "step-6\n"
    whole = steps_of(example(1, tmp_path, "--steps", "6").stdout)
    assert steps_of(saved.stdout) | steps_of(done.stdout) == pytest.approx(whole, rel=1e-5)


def test_example_refuses_a_missing_checkpoint_once(tmp_path: Path) -> None:
    done = example(2, tmp_path, "--resume", str(tmp_path / "nothing"), dp=2)
    assert done.stderr.count("refused: rank 0: checkpoint") == 1
    assert "there is neither commplan.json of one checkpoint nor latest" in done.stderr
