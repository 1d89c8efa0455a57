"""Checkpoints by the names and shapes of the whole model, so that any layout resumes from them.

A checkpoint is a folder that torch.distributed.checkpoint writes, with master weights and optimizer
states under ``model``, ``exp_avg`` and ``exp_avg_sq``, and ``commplan.json``, which describes it.
Each rank writes and reads the boxes that it holds of the whole tensors (``executor.shards.boxes``),
so nothing is gathered. Ranks that hold the same box name it alike, and torch has one of them write
it.

Every save makes a new folder; the file ``latest`` beside it names the newest complete one and is
replaced in one step, after everything is on disk. A save that was cut off leaves a folder without
``commplan.json``, which nothing reads and which may be deleted.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from executor.errors import CheckpointError, LostPeerError
from executor.job import Job, current_job, together
from executor.peers import naming_lost_peers
from executor.shards.boxes import LoadPlanner, Piece, SavePlanner, WholeTensor, pieces
from executor.trainer import Trainer
from executor.version import own_version
from planner.plan import Document, ExpertCapacity, document_hash

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)

_DESCRIPTION: Final = "commplan.json"
_LATEST: Final = "latest"
_FOLDER_NAME: Final = re.compile(r"step-\d+(-\d+)?")

# What an optimizer keeps of each weight. AdamW also counts its steps, alike for all weights.
_STATE_NAMES: Final = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}

# By field of the description: what another value than the checkpoint's means for the loss.
_CONSEQUENCES: Final = {
    "model_fingerprint": "the weights fit, but the plan's model document is another",
    "precision": "the same steps round differently",
    "master_dtype": "master weights and optimizer states are converted",
    "global_batch_size": "the next steps train on other sequences",
    "seq_len": "the next steps train on other sequences",
    "learning_rate": "this job's holds",
    "max_gradient_norm": "this job's holds",
    "expert_capacity": "experts drop other tokens",
}

_AFRESH: Final = (
    "to start afresh from the weights alone, convert them with "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save and load its 'model' into the "
    "module before executor.apply"
)


class _Description(Document):
    """``commplan.json``: where the checkpoint comes from, and what its use depends on."""

    format: Literal[1] = 1
    commplan_version: str
    plan_id: str
    plan_hash: str
    layout: str
    step: int = Field(ge=0)
    optimizer: Literal["adamw", "sgd"]
    optimizer_steps: int = Field(ge=0)
    model_name: str
    model_fingerprint: str
    num_params: int
    precision: str
    master_dtype: str
    global_batch_size: int
    seq_len: int
    learning_rate: float
    max_gradient_norm: float | None
    expert_capacity: ExpertCapacity | None
    tokens_per_rank: int


# ------------------------------------------------------------------------- saving and loading


def save_checkpoint(trainer: Trainer, path: str | Path, *, step: int) -> Path:
    """Write a new checkpoint, make it the latest of ``path``, and return its folder.

    All ranks call this together, between steps. Each waits for the slowest writer as in any
    collective, so the job's timeout has to cover the writing of one rank's states.

    Random states, learning-rate schedules and the position in the data are the script's own;
    ``step`` tells it where to go on.

    Args:
        trainer: Of this rank.
        path: Folder of checkpoints, made if there is none; on a file system that all hosts share.
        step: Steps taken so far, the same on every rank.

    Raises:
        CheckpointError: It cannot be written; on all ranks. ``latest`` is what it was.
        PlanMismatchError: Ranks save to different folders or at different steps.
        LostPeerError: Another rank is gone.
    """
    job, root = current_job(), Path(path)
    with _during(f"saving checkpoint {root} of step {step}"):
        together(job, lambda: _name(root, step), fingerprint=str, what="checkpoints to save")
        made = together(job, lambda: _make_folder(root, step) if job.rank == 0 else None)
        folder = _of_rank_0(job, made)
        together(job, lambda: _check_visible(folder))
        with _on_all_ranks(job, f"checkpoint {folder} cannot be written"):
            save(
                _tensors(trainer, with_copies=False),
                storage_writer=FileSystemWriter(folder),
                planner=SavePlanner(),
            )
        description = _describe(trainer, step)
        together(job, lambda: _publish(folder, description) if job.rank == 0 else None)
    if job.rank == 0:
        logger.info("saved step %d in %s, from %s", step, folder, description.layout)
    return folder


def _name(root: Path, step: int) -> str:
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(
            f"step={step!r} of a checkpoint in {root}; need the steps taken so far"
        )
    return f"{root} of step {step}"


def load_checkpoint(trainer: Trainer, path: str | Path) -> int:
    """Fill a new trainer, of any layout, from a checkpoint; return the steps it had taken.

    All ranks call this together, between ``apply`` and the first step. Rank 0 logs what is not
    carried over, as a warning. torch reads a file of the folder with pickle: load only what you
    trust. After an error the trainer is of no use.

    Another optimizer than the checkpoint's is refused, as its states would be missing: the loss
    would jump while the resumed run looks like the old one.

    Args:
        trainer: Of this rank.
        path: Folder given to ``save_checkpoint``, whose latest checkpoint is taken, or the folder
            of one checkpoint.

    Raises:
        CheckpointError: There is none, it is broken, or it is of another model or optimizer; on
            all ranks.
        PlanMismatchError: Ranks find different checkpoints.
        LostPeerError: Another rank is gone.
    """
    job = current_job()
    with _during(f"loading checkpoint {path}"):
        folder, saved = together(
            job,
            lambda: _find(Path(path)),
            fingerprint=lambda found: f"{found[0]} ({document_hash(found[1])})",
            what="checkpoints",
        )
        own = _describe(trainer, saved.step)
        tensors = {
            f"{kind}.{name}": whole
            for kind, parts in _tensors(trainer, with_copies=True).items()
            for name, whole in parts.items()
        }
        together(job, lambda: _check_fit(folder, saved, own, tensors))
        with _on_all_ranks(job, f"checkpoint {folder} cannot be read"):
            load(tensors, storage_reader=FileSystemReader(folder), planner=LoadPlanner())
        _set_optimizer_steps(trainer, saved.optimizer_steps)
        for states in trainer.states:
            states.publish()
    if job.rank == 0:
        _tell_what_changed(folder, saved, own)
    return saved.step


@contextmanager
def _during(doing: str) -> Iterator[None]:
    """Name what the job was doing in the message about a lost peer."""
    try:
        yield
    except LostPeerError as lost:
        raise LostPeerError(f"{doing}: {lost}") from lost


@contextmanager
def _on_all_ranks(job: Job, failing: str) -> Iterator[None]:
    """Translate the errors of torch.distributed.checkpoint, which all ranks raise alike."""
    doing = "torch.distributed.checkpoint's exchange on all ranks"
    try:
        with naming_lost_peers(doing, rank=job.rank, world_size=job.world_size):
            yield
    except CheckpointException as exc:
        rank, (cause, _) = min(exc.failures.items(), key=lambda failure: failure[0])
        error = CheckpointError(
            f"rank {rank}: {failing}: {type(cause).__name__}: {cause}; free space, mend the file "
            "system, or name the folder of an older checkpoint"
        )
        error.agreed = True
        raise error from exc


# ---------------------------------------------------------------------- folders and documents


def _make_folder(root: Path, step: int) -> Path:
    """Make and return a folder for a checkpoint; those that exist are left alone."""
    with _saying_why(f"checkpoint {root} of step {step} cannot be made"):
        for number in count(1):
            folder = root / (f"step-{step}" if number == 1 else f"step-{step}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    raise AssertionError("numbers do not end")


def _of_rank_0(job: Job, folder: Path | None) -> Path:
    """Return the folder on every rank; only one has looked whether it exists, as caches last."""
    found = [folder]
    doing = "broadcast of the folder on all ranks"
    with naming_lost_peers(doing, rank=job.rank, world_size=job.world_size):
        dist.broadcast_object_list(found, src=0)
    assert found[0] is not None, "rank 0 has made it"
    return found[0]


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {folder}: rank 0 has made this folder, but it is not here; save to a "
            "file system that all hosts share, under the same path"
        )


def _publish(folder: Path, description: _Description) -> None:
    """Complete the checkpoint with its description, and only then make it the latest."""
    with _saying_why(f"checkpoint {folder} cannot be completed"):
        _replace(folder / _DESCRIPTION, description.model_dump_json(indent=1) + "\n")
        _replace(folder.parent / _LATEST, folder.name + "\n")


def _replace(file: Path, text: str) -> None:
    """Write ``file`` in one step: whatever happens, it is the old one or the whole new one."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)


@contextmanager
def _saying_why(failing: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise CheckpointError(f"{failing}: {exc}; free space or save to another folder") from exc


def _find(path: Path) -> tuple[Path, _Description]:
    """Return the folder of the checkpoint meant by ``path``, and its description."""
    folder = path if (path / _DESCRIPTION).is_file() else path / _latest(path)
    file = folder / _DESCRIPTION
    try:
        return folder, _Description.model_validate_json(file.read_bytes())
    except OSError as exc:
        raise CheckpointError(
            f"checkpoint {folder} is not complete: {file.name} cannot be read: {exc}; "
            f"name the folder of another one; there are: {_listed(path)}"
        ) from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise CheckpointError(
            f"checkpoint {folder}: {file.name} is not a description that commplan {own_version()} "
            f"reads: {where}: {first['msg']}; load it with the version that wrote it, or name the "
            f"folder of another one; there are: {_listed(folder.parent)}"
        ) from exc


def _latest(path: Path) -> str:
    try:
        name = (path / _LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(
            f"checkpoint {path}: there is neither {_DESCRIPTION} of one checkpoint nor {_LATEST} "
            f"of several: {exc}; name the folder that was saved to, or the folder of one "
            f"checkpoint; there are: {_listed(path)}"
        ) from exc
    if not _FOLDER_NAME.fullmatch(name):
        raise CheckpointError(
            f"checkpoint {path}: {_LATEST} holds {name[:40]!r}, needed: a name such as step-100; "
            f"name the folder of one checkpoint; there are: {_listed(path)}"
        )
    return name


def _listed(path: Path) -> str:
    """Return the complete checkpoints in ``path`` as words."""
    found = sorted(str(file.parent) for file in path.glob(f"step-*/{_DESCRIPTION}"))
    return ", ".join(found) or "none"


def _describe(trainer: Trainer, step: int) -> _Description:
    plan = trainer.plan
    tokens = plan.batch.micro_batch_size * plan.training.seq_len
    return _Description(
        commplan_version=own_version(),
        plan_id=plan.id,
        plan_hash=document_hash(plan),
        layout=str(plan.layout),
        step=step,
        optimizer=plan.training.optimizer,
        optimizer_steps=_optimizer_steps(trainer),
        model_name=plan.model.name,
        model_fingerprint=plan.model.fingerprint,
        num_params=plan.model.num_params,
        precision=plan.training.precision,
        master_dtype=str(trainer.states[0].masters[0].dtype).removeprefix("torch."),
        global_batch_size=plan.training.global_batch_size,
        seq_len=plan.training.seq_len,
        learning_rate=trainer.optimizer.param_groups[0]["lr"],
        max_gradient_norm=trainer.max_gradient_norm,
        expert_capacity=plan.training.expert_capacity,
        tokens_per_rank=tokens // (plan.layout.tp * plan.layout.cp),
    )


def _check_fit(
    folder: Path,
    saved: _Description,
    own: _Description,
    tensors: dict[str, WholeTensor],
) -> None:
    """Refuse another model and another optimizer, before anything is overwritten."""
    models = f"of {saved.model_name!r} for this job's {own.model_name!r}"
    if saved.num_params != own.num_params:
        raise CheckpointError(
            f"checkpoint {folder} {models}: it has {saved.num_params} parameters, needed "
            f"{own.num_params}; give the model that was saved, or another checkpoint"
        )
    if saved.optimizer != own.optimizer:
        raise CheckpointError(
            f"checkpoint {folder} has the states of optimizer {saved.optimizer}, plan "
            f"{own.plan_id} needs those of {own.optimizer}; plan with "
            f"optimizer={saved.optimizer}; {_AFRESH}"
        )
    shapes = _saved_shapes(folder)
    wrong = [
        f"{name} is {_shape_in_words(shapes.get(name))}, needed {[*whole.shape]}"
        for name, whole in tensors.items()
        if shapes.get(name) != whole.shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"checkpoint {folder} {models}: {wrong[0]}{more}; give the model that was saved, or "
            "another checkpoint"
        )


def _saved_shapes(folder: Path) -> dict[str, torch.Size]:
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as exc:  # pickle may raise anything on a broken file
        raise CheckpointError(
            f"checkpoint {folder}: .metadata of torch.distributed.checkpoint cannot be read: "
            f"{type(exc).__name__}: {exc}; name the folder of another one; there are: "
            f"{_listed(folder.parent)}"
        ) from exc
    found = metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in found if hasattr(entry, "size")}


def _shape_in_words(shape: torch.Size | None) -> str:
    return "missing" if shape is None else f"{[*shape]} there"


def _tell_what_changed(folder: Path, saved: _Description, own: _Description) -> None:
    """Log where the job goes on, and what of the old one it does not keep."""
    changes = [
        f"{field} {was} -> {now}: {consequence}"
        for field, consequence in _CONSEQUENCES.items()
        if (was := getattr(saved, field)) != (now := getattr(own, field))
    ]
    if own.expert_capacity is not None and saved.tokens_per_rank != own.tokens_per_rank:
        changes.append(
            f"tokens of a micro-batch on a rank {saved.tokens_per_rank} -> {own.tokens_per_rank}: "
            "experts' capacity is counted in them, so they drop other tokens"
        )
    logger.log(
        logging.WARNING if changes else logging.INFO,
        "resumed step %d from %s: plan %s (%s) -> plan %s (%s); not carried over: %s",
        saved.step,
        folder,
        saved.plan_id,
        saved.layout,
        own.plan_id,
        own.layout,
        "; ".join(changes) or "nothing",
    )


# ------------------------------------------------------------ what the optimizer works on


def _tensors(trainer: Trainer, *, with_copies: bool) -> dict[str, dict[str, WholeTensor]]:
    """Return this rank's boxes by kind (``model``, or the optimizer's state) and name.

    Args:
        trainer: Of this rank.
        with_copies: Of tied embeddings, also the last stage's. Its flat pieces are cut elsewhere
            than the original's, so that only one of them may be written.
    """
    kinds = ("model", *_STATE_NAMES[trainer.plan.training.optimizer])
    found: dict[str, dict[str, WholeTensor]] = {kind: {} for kind in kinds}
    for states in trainer.states:
        for piece in pieces(states, trainer.communicators):
            if piece.parameter.is_tied_copy and not with_copies:
                continue
            shape, offsets = _in_whole_model(trainer, piece)
            tensors = {"model": piece.master, **_state_of(trainer, piece.master)}
            for kind, parts in found.items():
                whole = parts.setdefault(piece.parameter.name, WholeTensor(shape, {}))
                whole.boxes[offsets] = piece.of(tensors[kind])
    return {kind: parts for kind, parts in found.items() if parts}


def _in_whole_model(trainer: Trainer, piece: Piece) -> tuple[torch.Size, torch.Size]:
    """Return the shape of a parameter in the whole model, and the piece's offsets in it."""
    split, dim = piece.parameter.split, piece.parameter.dim
    shape, offsets = list(piece.parameter.parameter.shape), list(piece.offsets)
    if split is not None:
        offsets[dim] += trainer.mesh.coordinates[split] * shape[dim]
        shape[dim] *= trainer.plan.layout.degree(split)
    return torch.Size(shape), torch.Size(offsets)


def _state_of(trainer: Trainer, master: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a master; before the first step, what it will begin with."""
    names = _STATE_NAMES[trainer.plan.training.optimizer]
    state: dict[str, Any] = trainer.optimizer.state[master]
    if names and not state:  # as torch.optim.AdamW does in its first step
        state["step"] = torch.tensor(0.0)
        state |= {name: torch.zeros_like(master) for name in names}
    return state


def _masters(trainer: Trainer) -> list[torch.Tensor]:
    return [master for states in trainer.states for master in states.masters]


def _optimizer_steps(trainer: Trainer) -> int:
    """Return how many steps the optimizer has counted, 0 if it does not count."""
    return int(_state_of(trainer, _masters(trainer)[0]).get("step", 0))


def _set_optimizer_steps(trainer: Trainer, steps: int) -> None:
    for master in _masters(trainer):
        if "step" in (state := _state_of(trainer, master)):
            state["step"].fill_(steps)
