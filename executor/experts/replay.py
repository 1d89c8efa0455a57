"""What a recomputed forward must not decide anew: routing, counts, and which path rows take.

Activation recompute runs a layer's forward a second time. Routing it again could give other rows
than the saved shapes, and would exchange the counts again. So decisions go through ``planned``, and
``replaying_context`` makes a checkpoint's second forward take the first one's::

    checkpoint(layer, hidden, use_reentrant=False, context_fn=replaying_context)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

__all__ = ["planned", "replaying_context"]

DecisionT = TypeVar("DecisionT")


def planned(decide: Callable[[], DecisionT]) -> DecisionT:
    """Return what ``decide`` returns, or in a recompute what it returned in the first forward."""
    current = _CURRENT.get()
    return decide() if current is None else current.take(decide)


def replaying_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward and of its recompute, as checkpoint's ``context_fn``.

    Each call has its own store, so micro-batches in flight do not mix. A checkpoint inside another
    one's recompute records what the outer one replays. The second context can be entered again
    (``retain_graph``), and left before all decisions were taken (early stop).
    """
    decisions: list[Any] = []
    return (
        _Entering(lambda: _Recording(decisions, _CURRENT.get())),
        _Entering(lambda: _Replaying(decisions)),
    )


class _Source(Protocol):
    def take(self, decide: Callable[[], DecisionT]) -> DecisionT: ...


class _Recording:
    def __init__(self, decisions: list[Any], outer: _Source | None) -> None:
        self._decisions, self._outer = decisions, outer

    def take(self, decide: Callable[[], DecisionT]) -> DecisionT:
        decision = decide() if self._outer is None else self._outer.take(decide)
        self._decisions.append(decision)
        return decision


class _Replaying:
    def __init__(self, decisions: list[Any]) -> None:
        self._left = iter(tuple(decisions))

    def take(self, decide: Callable[[], DecisionT]) -> DecisionT:
        decision: DecisionT = next(self._left)
        return decision


class _Entering(AbstractContextManager[None]):
    def __init__(self, source: Callable[[], _Source]) -> None:
        self._source = source
        self._before: Token[_Source | None] | None = None

    def __enter__(self) -> None:
        self._before = _CURRENT.set(self._source())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._before is not None, "left without having been entered"
        _CURRENT.reset(self._before)


# The autograd engine recomputes in a thread of its own on an accelerator: a context variable is
# that thread's alone.
_CURRENT: Final[ContextVar[_Source | None]] = ContextVar("decisions of a checkpoint", default=None)
