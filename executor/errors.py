"""Errors of the executor, as one small tree.

::

    ExecutorError
    ├── PlanSourceError       the plan cannot be read, or the report not delivered
    ├── CheckpointError       a checkpoint cannot be written, read, or taken over
    ├── PlanMismatchError     the plan is for another job: world size, module, or other ranks' plan
    ├── UnsupportedPlanError  the plan asks for something this executor cannot do
    └── LostPeerError         another rank died, hangs, or cannot be reached any more

A message says what, got, needed, and what to try. ``executor.job`` raises the same error on every
rank, so that no rank waits for one that has left. A lost peer is the exception: each survivor says
what it was doing.
"""

__all__ = [
    "CheckpointError",
    "ExecutorError",
    "LostPeerError",
    "PlanMismatchError",
    "PlanSourceError",
    "UnsupportedPlanError",
]


class ExecutorError(Exception):
    """Base of every error the executor raises on purpose.

    Attributes:
        agreed: True once every rank of the job raises this same error.
    """

    agreed: bool = False


class PlanSourceError(ExecutorError):
    """A plan could not be read from its file or URL, or a report not sent there."""


class CheckpointError(ExecutorError):
    """A checkpoint could not be written or read, or is another model's or optimizer's."""


class PlanMismatchError(ExecutorError):
    """The plan and the job (world size, module, plans of the other ranks) do not fit."""


class UnsupportedPlanError(ExecutorError):
    """The plan has fields this executor cannot honour; ``fields`` names them."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class LostPeerError(ExecutorError):
    """A rank that this one talked to is gone; the message names both and the communication."""
