"""Runs a plan: torch.distributed training as planned, and its timings back.

Names are loaded on first use, so that ``executor.client`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.checkpoint import load_checkpoint, save_checkpoint
    from executor.checks import check_plan
    from executor.client import load_plan, post_run, save_run
    from executor.decoder import DecoderFamily, check_model
    from executor.errors import (
        CheckpointError,
        ExecutorError,
        LostPeerError,
        PlanMismatchError,
        PlanSourceError,
        UnsupportedPlanError,
    )
    from executor.gradients.overlap import (
        MissingGradientsError,
        OverlappedGradients,
        ddp_bucket_cap_mb,
        ddp_comm_hook,
    )
    from executor.job import Job, agree_on_plan, current_job, join, together
    from executor.measure import calibration_run, run_probes, timed_step
    from executor.nccl import NcclSettings, group_options, nccl_settings
    from executor.observer import Observer, observe
    from executor.trainer import StepResult, Trainer, apply
    from executor.watch import LeftOut

__all__ = [
    "CheckpointError",
    "DecoderFamily",
    "ExecutorError",
    "Job",
    "LeftOut",
    "LostPeerError",
    "MissingGradientsError",
    "NcclSettings",
    "Observer",
    "OverlappedGradients",
    "PlanMismatchError",
    "PlanSourceError",
    "StepResult",
    "Trainer",
    "UnsupportedPlanError",
    "agree_on_plan",
    "apply",
    "calibration_run",
    "check_model",
    "check_plan",
    "current_job",
    "ddp_bucket_cap_mb",
    "ddp_comm_hook",
    "group_options",
    "join",
    "load_checkpoint",
    "load_plan",
    "nccl_settings",
    "observe",
    "post_run",
    "run_probes",
    "save_checkpoint",
    "save_run",
    "timed_step",
    "together",
]

_NAMES_OF = {
    "checkpoint": ("load_checkpoint", "save_checkpoint"),
    "checks": ("check_plan",),
    "client": ("load_plan", "post_run", "save_run"),
    "decoder": ("DecoderFamily", "check_model"),
    "errors": (
        "CheckpointError",
        "ExecutorError",
        "LostPeerError",
        "PlanMismatchError",
        "PlanSourceError",
        "UnsupportedPlanError",
    ),
    "gradients.overlap": (
        "MissingGradientsError",
        "OverlappedGradients",
        "ddp_bucket_cap_mb",
        "ddp_comm_hook",
    ),
    "job": ("Job", "agree_on_plan", "current_job", "join", "together"),
    "measure": ("calibration_run", "run_probes", "timed_step"),
    "nccl": ("NcclSettings", "group_options", "nccl_settings"),
    "observer": ("Observer", "observe"),
    "trainer": ("StepResult", "Trainer", "apply"),
    "watch": ("LeftOut",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    return getattr(import_module(f"executor.{_MODULE_OF[name]}"), name)
