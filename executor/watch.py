"""Timed stand-ins for the few functions of torch that every collective made in Python passes.

Methods of ``torch.distributed.ProcessGroup`` and ``Work.wait``, however the caller imported
``torch.distributed``'s functions; and for DTensor the ops of ``torch.ops._c10d_functional``. Each
calls what it stands for: tensors, works and the order of calls stay what they were. ``executor``
times its own steps by ``executor.timing``, which knows the axis of a call beforehand; here it is
found by the members of the group.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from executor.mesh import Mesh
from executor.timing import CallKey, Recorder, tensor_bytes
from planner.plan import AXES, Axis, Collective, Method, Plan

__all__ = ["BACKEND", "LeftOut", "StepSeconds", "Watch"]

BACKEND: Final = "gloo"  # whose calls end when the transfer does

# What a run holds: a reduce is in no plan.
_OPS: Final = frozenset(get_args(Collective)) - {"reduce"}

# Methods of ProcessGroup: the operation, which argument has its size S, and whether that is one
# rank's part of S. Some names are one method's old and new one.
_METHODS: Final[dict[str, tuple[Collective | None, int, bool]]] = {
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "allgather": ("all_gather", 0, False),
    "allgather_coalesced": ("all_gather", 0, False),
    "all_gather_single": ("all_gather", 0, False),
    "all_gather_single_coalesced": ("all_gather", 0, False),
    "_allgather_base": ("all_gather", 0, False),
    "allgather_into_tensor_coalesced": ("all_gather", 0, False),
    "reduce_scatter": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "alltoall": ("all_to_all", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "broadcast": ("broadcast", 0, False),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "send": ("send_recv", 0, False),
    "recv": ("send_recv", 0, False),
    "recv_anysource": ("send_recv", 0, False),
    "reduce": (None, 0, False),
    "barrier": (None, 0, False),
}

# Ops of _c10d_functional (the input first, the group last), likewise.
_FUNCTIONAL: Final[dict[str, tuple[Collective, bool]]] = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Calls in timed steps that the run does not hold.

    Attributes:
        ranks: Members of the group.
        op: The operation; empty where only the number of calls is known.
        reason: Why.
        num_calls: Calls on one rank, over all timed steps.
    """

    ranks: tuple[int, ...]
    op: str
    reason: str
    num_calls: int

    def __str__(self) -> str:
        """Return one line for the log."""
        return f"{self.num_calls} x {self.op or 'call'} on ranks {list(self.ranks)}: {self.reason}"


@dataclass(slots=True)
class StepSeconds:
    """Seconds of one step, filled in as it goes."""

    step_s: float = 0.0
    optimizer_s: float = 0.0
    blocked_s: float = 0.0

    @property
    def forward_backward_s(self) -> float:
        """Return what is left of the step: compute, and whatever else the loop body does."""
        return max(0.0, self.step_s - self.optimizer_s - self.blocked_s)


@dataclass(slots=True)
class _Call:
    """A call in flight; ``key`` is None if it is left out of the run."""

    key: CallKey | None
    ranks: tuple[int, ...]
    start: float
    issued_s: float = 0.0


class Watch:
    """The patches, and what they saw while a step was on."""

    def __init__(self, plan: Plan, rank: int) -> None:
        # The recorder uses its mesh only for calls that it makes or catches itself.
        self.recorder = Recorder(Mesh(rank, {}, {}, {}), backend=BACKEND)
        self._plan = plan
        self._step: StepSeconds | None = None
        # Neither keeps a work or a result alive: unobserved it might be gone by now. Results are
        # known by their storage, as in torch, since it is often a view that is waited for.
        self._works: MutableMapping[dist.Work, _Call] = WeakIdKeyDictionary()
        self._results: dict[int, _Call] = {}
        self._unfinished: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._left_out: Counter[tuple[tuple[int, ...], str, str]] = Counter()
        self._num_seen: Counter[dist.ProcessGroup] = Counter()
        self._optimizers_begun: list[tuple[float, float]] = []  # when, and blocked until then
        self._axes: dict[tuple[int, ...], list[Axis]] = {}

    @contextmanager
    def on(self) -> Iterator[StepSeconds]:
        """Record what is called inside, and yield the step's seconds, complete when it ends."""
        numbers = _sequence_numbers()
        self._num_seen.clear()
        self._optimizers_begun.clear()
        self._step = step = StepSeconds()
        start = time.perf_counter()
        try:
            yield step
        finally:
            step.step_s = time.perf_counter() - start
            self._step = None
        for group, number in _sequence_numbers().items():
            unseen = number - numbers.get(group, 0) - self._num_seen[group]
            if unseen and group.size() > 1:
                self._left_out[_ranks(group), "", "made below Python"] += unseen

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return the calls in steps that the recorder does not hold."""
        unfinished = {(*of, "never waited for"): n for of, n in self._unfinished.items() if n}
        return tuple(LeftOut(*of, n) for of, n in {**self._left_out, **unfinished}.items())

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Put timed functions in the place of torch's, and take them out again."""
        functional = torch.ops._c10d_functional
        with ExitStack() as undo:
            for name, (op, position, is_part) in _METHODS.items():
                method = self._timed_method(name, op, position, is_part)
                undo.enter_context(patch.object(dist.ProcessGroup, name, method))
            undo.enter_context(patch.object(dist.Work, "wait", self._timed_wait()))
            for name, (op, is_part) in _FUNCTIONAL.items():
                timed_op = self._timed_functional(getattr(functional, name), op, is_part)
                undo.enter_context(patch.object(functional, name, timed_op))
            timed_op = self._timed_wait_tensor(functional.wait_tensor)
            undo.enter_context(patch.object(functional, "wait_tensor", timed_op))
            undo.enter_context(self._timed_optimizers())
            yield

    def _timed_method(
        self, name: str, op: Collective | None, position: int, is_part: bool
    ) -> Callable[..., dist.Work]:
        original = getattr(dist.ProcessGroup, name)

        def timed(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
            if self._step is None or group.size() == 1:
                return original(group, *args, **kwargs)
            given = (*args, *kwargs.values())
            size = _bytes(given[position]) * (group.size() if is_part else 1) if op else 0
            peer = int(given[1]) if name in ("send", "recv") else None
            key = self._key(group, op or name, size, peer=peer, is_send=name == "send")
            with self._making(group, key) as call:
                work: dist.Work = original(group, *args, **kwargs)
            self._works[work] = call
            return work

        return timed

    def _timed_wait(self) -> Callable[..., bool]:
        original = dist.Work.wait

        def timed(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            with self._waiting(self._works.pop(work, None)):
                return original(work, *args, **kwargs)

        return timed

    def _timed_functional(
        self, original: Callable[..., Any], op: Collective, is_part: bool
    ) -> "_TimedOp":
        def timed(*args: Any) -> Any:
            group = _resolved(args[-1])
            if self._step is None or group.size() == 1:
                return original(*args)
            size = _bytes(args[0]) * (group.size() if is_part else 1)
            with self._making(group, self._key(group, op, size)) as call:
                result = original(*args)
            # Of several results the last is waited for last.
            self._results[_storage(result[-1] if isinstance(result, list) else result)] = call
            return result

        return _TimedOp(original, timed)

    def _timed_wait_tensor(self, original: Callable[..., torch.Tensor]) -> "_TimedOp":
        def timed(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not torch.Tensor:  # a wrapper waits for what it holds: here again
                return original(tensor)
            with self._waiting(self._results.pop(_storage(tensor), None)):
                return original(tensor)

        return _TimedOp(original, timed)

    @contextmanager
    def _timed_optimizers(self) -> Iterator[None]:
        begun = self._optimizers_begun

        def before(*_: Any) -> None:
            if self._step is not None:
                begun.append((time.perf_counter(), self._step.blocked_s))

        def after(*_: Any) -> None:
            if self._step is None or not begun:
                return
            start, blocked_before_s = begun.pop()
            if not begun:  # else one optimizer runs inside another, which counts it
                blocked_s = self._step.blocked_s - blocked_before_s
                self._step.optimizer_s += time.perf_counter() - start - blocked_s

        hooks = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _making(self, group: dist.ProcessGroup, key: CallKey | None) -> Iterator[_Call]:
        """Note that the enclosed call is made in Python, and yield it; complete when it returns."""
        number = _sequence_number(group)
        call = _Call(key, _ranks(group), time.perf_counter())
        yield call
        call.issued_s = time.perf_counter() - call.start
        self._num_seen[group] += _sequence_number(group) - number
        if key is not None:
            self._unfinished[call.ranks, key.op] += 1

    @contextmanager
    def _waiting(self, call: _Call | None) -> Iterator[None]:
        """Keep ``call`` once the enclosed wait for it is over; None is not the first wait."""
        start = time.perf_counter()
        yield
        blocked_s = time.perf_counter() - start
        if call is not None:
            blocked_s += call.issued_s
            if call.key is not None:
                self.recorder.note(call.key, call.start, blocked_s)
                self._unfinished[call.ranks, call.key.op] -= 1
        if self._step is not None:
            self._step.blocked_s += blocked_s

    def _key(
        self,
        group: dist.ProcessGroup,
        op: str,
        size_bytes: int,
        *,
        peer: int | None = None,
        is_send: bool = False,
    ) -> CallKey | None:
        """Return what the call is kept under, or None and count it as left out."""
        ranks = _ranks(group)
        if op not in _OPS:
            self._left_out[ranks, op, "no operation of a calibration run"] += 1
            return None
        known = cast(Collective, op)
        axis = self._axis(ranks, known)
        if axis is None:
            self._left_out[ranks, op, f"no group of the plan ({self._plan.layout})"] += 1
            return None
        if known == "send_recv":
            return self.recorder.p2p_key(axis, size_bytes, peer, is_send=is_send)
        algorithm = self.recorder.library_method(known, Method("ring")).algorithm
        return CallKey(axis, known, algorithm, size_bytes, len(ranks))

    def _axis(self, ranks: tuple[int, ...], op: Collective) -> Axis | None:
        """Return the axis with a group of exactly these ranks.

        Of several (dp and dp_cp without cp) it is the first that the plan chose an algorithm for,
        for this operation rather than another, else the first of ``AXES``.
        """
        if ranks not in self._axes:
            members = sorted(ranks)
            self._axes[ranks] = [
                axis
                for axis in AXES
                if any(sorted(group) == members for group in self._plan.groups(axis))
            ]
        axes = self._axes[ranks]
        chosen = {(choice.axis, choice.op) for choice in self._plan.collectives}
        chosen_axes = {axis for axis, _ in chosen}
        return min(
            axes, key=lambda axis: ((axis, op) not in chosen, axis not in chosen_axes), default=None
        )


class _TimedOp:
    """``call`` in the place of the op ``original``, of which it has everything else."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A graph that is being compiled keeps the op itself.
        timed = not torch.compiler.is_compiling() and not kwargs
        return (self._call if timed else self._original)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _resolved(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    """Return the group that a functional op was given, by itself or by name."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # stubs


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _sequence_number(group: dist.ProcessGroup) -> int:
    """Return how many calls ``group`` has made, from Python or not."""
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in the stubs


def _sequence_numbers() -> dict[dist.ProcessGroup, int]:
    return {group: _sequence_number(group) for group in c10d._world.pg_map}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: torch.Tensor | Sequence[Any]) -> int:
    """Return the bytes of a tensor, or of all in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensor_bytes(tensors)
    return sum(_bytes(part) for part in tensors)
