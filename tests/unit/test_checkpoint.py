"""What a checkpoint refuses, says and keeps, in a job of one rank."""

import errno
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import executor
from executor.checkpoint import load_checkpoint, save_checkpoint
from executor.errors import CheckpointError
from executor.shards.boxes import boxes_of_range
from planner.plan import ExpertCapacity
from tests.dist.cases import build_model, summary_of, train_gpt
from tests.dist.plans import make_plan


@pytest.fixture(autouse=True)
def job() -> Iterator[executor.Job]:
    threads = torch.get_num_threads()
    with executor.join({}) as joined:
        yield joined
    torch.set_num_threads(threads)


def trainer_of(
    model: str = "gpt-dense", *, seed: int = 0, learning_rate: float = 1e-3, **layout: Any
) -> executor.Trainer:
    torch.manual_seed(seed)
    plan = make_plan(model=summary_of(model), **layout)
    return executor.apply(plan, build_model(model), learning_rate=learning_rate)


def losses_of(trainer: executor.Trainer, first: int, steps: int) -> list[float]:
    book = train_gpt.Book(train_gpt.TEXT, trainer.plan, seed=0)
    batches = (book.batch(step) for step in range(first, first + steps))
    return [trainer.global_loss(trainer.step(*batch)) for batch in batches]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a checkpoint of a model that took one step."""
    trainer = trainer_of()
    losses_of(trainer, 0, 1)
    return save_checkpoint(trainer, tmp_path / "saved", step=1).parent


# ---------------------------------------------------------------------------------- the boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numbered = torch.arange(math.prod(shape)).view(shape)
    for start in range(math.prod(shape) + 1):
        for stop in range(math.prod(shape) + 1):
            boxes = boxes_of_range(shape, start, stop)
            found = [
                numbered[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]
                for offsets, sizes in boxes
            ]
            elements = torch.cat([box.flatten() for box in found]).tolist() if found else []
            assert elements == list(range(start, stop))
            assert all(
                tuple(box.shape) == sizes for box, (_, sizes) in zip(found, boxes, strict=True)
            )
            assert len(boxes) <= 2 * len(shape) - 1
            assert len({offsets for offsets, _ in boxes}) == len(boxes)


# ---------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "numbers", [{"precision": "bf16"}, {"precision": "fp32"}, {"optimizer": "sgd"}], ids=str
)
def test_resumed_run_repeats_the_uninterrupted_one_exactly(
    numbers: dict[str, Any], tmp_path: Path
) -> None:
    """Of bf16, the fp32 masters have to be kept."""
    old = trainer_of(**numbers)
    losses_of(old, 0, 2)
    save_checkpoint(old, tmp_path, step=2)
    new = trainer_of(seed=1, **numbers)
    assert load_checkpoint(new, tmp_path) == 2
    assert losses_of(new, 2, 3) == losses_of(old, 2, 3)


def test_checkpoint_before_the_first_step_is_a_start(tmp_path: Path) -> None:
    old, new = trainer_of(), trainer_of(seed=1)
    save_checkpoint(old, tmp_path, step=0)
    assert load_checkpoint(new, tmp_path) == 0
    assert losses_of(new, 0, 3) == losses_of(old, 0, 3)


def test_each_save_has_a_folder_and_any_of_them_can_be_named(saved: Path) -> None:
    trainer = trainer_of(seed=1)
    names = [save_checkpoint(trainer, saved, step=step).name for step in (1, 7, 1)]
    assert names == ["step-1-2", "step-7", "step-1-3"]
    assert (saved / "latest").read_text() == "step-1-3\n"
    assert load_checkpoint(trainer, saved / "step-7") == 7


def test_failed_write_is_refused_and_leaves_the_last_checkpoint(saved: Path) -> None:
    full = patch.object(FileSystemWriter, "write_data", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(CheckpointError, match=r"step-2 cannot be written: .*full") as caught:
        save_checkpoint(trainer_of(), saved, step=2)
    assert caught.value.agreed
    assert load_checkpoint(trainer_of(), saved) == 1


# ------------------------------------------------------------------------------ what is said


def test_what_is_not_carried_over_is_said_in_one_line(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="executor.checkpoint"):
        load_checkpoint(trainer_of(), saved)
        changed = trainer_of(
            precision="fp32", global_batch_size=4, seq_len=8, learning_rate=5e-4, dp=1
        )
        load_checkpoint(changed, saved)
    same, other = caplog.records
    assert (same.levelno, other.levelno) == (logging.INFO, logging.WARNING)
    assert same.getMessage().endswith("not carried over: nothing")
    assert other.getMessage().endswith(
        "not carried over: precision fp64 -> fp32: the same steps round differently; "
        "master_dtype float64 -> float32: master weights and optimizer states are converted; "
        "global_batch_size 8 -> 4: the next steps train on other sequences; "
        "seq_len 16 -> 8: the next steps train on other sequences; "
        "learning_rate 0.001 -> 0.0005: this job's holds"
    )


def test_capacity_in_other_micro_batches_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capacity = ExpertCapacity(factor=1.0)
    save_checkpoint(trainer_of("gpt-experts", expert_capacity=capacity), tmp_path, step=0)
    other = trainer_of("gpt-experts", expert_capacity=capacity, micro_batch_size=2)
    load_checkpoint(other, tmp_path)
    assert "tokens of a micro-batch on a rank 16 -> 32" in caplog.text


# -------------------------------------------------------------------------- what is refused


def rewrite(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no latest": (
        lambda root: (root / "latest").unlink(),
        r"neither commplan.json of one checkpoint nor latest of several.*there are: .*step-1$",
    ),
    "a strange latest": (
        lambda root: (root / "latest").write_text("../elsewhere"),
        r"latest holds '\.\./elsewhere', needed: a name such as step-100",
    ),
    "latest of a lost folder": (
        lambda root: (root / "latest").write_text("step-9\n"),
        r"step-9 is not complete: commplan.json cannot be read",
    ),
    "a description cut short": (
        lambda root: cut_short(root / "step-1" / "commplan.json"),
        r"not a description that commplan .* reads: the whole file: Invalid JSON",
    ),
    "a later format": (
        lambda root: rewrite(root / "step-1" / "commplan.json", format=2),
        r"not a description that commplan .* reads: format: Input should be 1",
    ),
    "an unknown field": (
        lambda root: rewrite(root / "step-1" / "commplan.json", loss_scale=2.0),
        r"reads: loss_scale: Extra inputs are not permitted; load it with the version",
    ),
    "no table of tensors": (
        lambda root: (root / "step-1" / ".metadata").unlink(),
        r"\.metadata of torch.distributed.checkpoint cannot be read: FileNotFoundError",
    ),
    "a table cut short": (
        lambda root: cut_short(root / "step-1" / ".metadata"),
        r"\.metadata of torch.distributed.checkpoint cannot be read: ",
    ),
    "no tensors": (
        lambda root: (root / "step-1" / "__0_0.distcp").unlink(),
        r"step-1 cannot be read: FileNotFoundError",
    ),
    "tensors cut short": (
        lambda root: cut_short(root / "step-1" / "__0_0.distcp"),
        r"step-1 cannot be read: ",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoint_is_refused(what: str, saved: Path) -> None:
    breaking, message = BROKEN[what]
    breaking(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(trainer_of(), saved)
    assert caught.value.agreed


def test_other_model_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has \d+ parameters, needed \d+"):
        load_checkpoint(trainer_of("gpt-tied"), saved)


def test_other_shapes_and_names_are_refused_before_anything_is_loaded(saved: Path) -> None:
    trainer = trainer_of("gpt-experts", seed=1)
    before = [master.clone() for states in trainer.states for master in states.masters]
    rewrite(saved / "step-1" / "commplan.json", num_params=trainer.plan.model.num_params)
    with pytest.raises(CheckpointError, match=r"mlp.gate.weight is missing, needed \[8, 32\]"):
        load_checkpoint(trainer, saved)
    after = [master for states in trainer.states for master in states.masters]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))


def test_other_optimizer_is_refused_with_a_way_out(saved: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"states of optimizer adamw, .* needs those of sgd; .*dcp_to_torch"
    ):
        load_checkpoint(trainer_of(optimizer="sgd"), saved)


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file of step 3 cannot be made: .*Not a directory"):
        save_checkpoint(trainer_of(), tmp_path / "file", step=3)
