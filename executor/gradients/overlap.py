"""Gradients summed over ranks while backward still runs, for plain modules and for DDP.

Gradients lie in flat buckets, in the reverse of the order in which parameters were registered,
which is about the order in which backward reaches them. As soon as a bucket is complete, one
background thread reduces it; computing goes on meanwhile, as torch and gloo release the GIL.

The thread takes buckets one by one, in an order that is the same on all ranks whatever order
gradients become ready in: a bucket waits for those before it. So ranks cannot wait for each other
in a circle, and one group of ranks is enough. Given several functions that reduce, each gets a
thread and buckets take turns: while one bucket is summed inside the hosts, another may cross.

A group is its thread's from the first synchronised backward of a step to its end. Give it a
process group that nothing else uses: calls of two threads on one group may be matched with the
wrong calls of another rank, and sum up the wrong data without an error.

Before its first bucket each thread sums a fingerprint of the buckets over the ranks (9 numbers of
fp64, once): tensors of different sizes would end the process in gloo, or hang, or add up the wrong
gradients.

A step::

    gradients = OverlappedGradients(
        model.named_parameters(), dp.all_reduce, bucket_bytes=25_000_000, divide_by=dp.size
    )
    with gradients.no_sync():
        loss(first_micro_batch).backward()
    loss(last_micro_batch).backward()
    exposed_s = gradients.wait()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""

import hashlib
import logging
import queue
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, with its type
from torch.autograd import Variable
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from executor.errors import ExecutorError

__all__ = [
    "DdpHook",
    "MissingGradientsError",
    "OverlappedGradients",
    "Reduce",
    "ddp_bucket_cap_mb",
    "ddp_comm_hook",
]

logger = logging.getLogger(__name__)

Reduce = Callable[[torch.Tensor], object]  # sums a flat tensor over the ranks in place
DdpHook = Callable[[Any, GradBucket], Future[torch.Tensor]]

_Jobs = queue.SimpleQueue[tuple[torch.Tensor, Future[torch.Tensor]] | None]  # None: the end
_Named = tuple[str, nn.Parameter]
_NUM_NAMES_SHOWN: Final = 5
_END_WITHIN_S: Final = 1.0


class MissingGradientsError(ExecutorError):
    """Backward did not reach ``names`` on at least one rank; every rank raises this error."""

    agreed = True

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(repr(name) for name in names[:_NUM_NAMES_SHOWN])
        more = len(names) - _NUM_NAMES_SHOWN
        super().__init__(
            f"{len(names)} parameters got no gradient on at least one rank in this step: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + "; use them in the loss on every rank, set requires_grad=False, or count them as "
            "zero with unused='zero'"
        )
        self.names = tuple(names)


class _ReductionThread:
    """Reduces and averages tensors one by one, in the order in which they are handed in.

    Once a reduction failed, ranks no longer agree on what comes next: every later tensor fails
    with the same error, and nothing is sent. The thread ends when this object is collected, or
    the interpreter ends.
    """

    def __init__(self, reduce: Reduce, divide_by: float) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # A daemon, so that a rank which failed need not wait for a reduction that hangs.
        thread = threading.Thread(
            target=_serve, args=(self._jobs, reduce, divide_by), name="gradients", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """Return a future of ``tensor``, reduced in place."""
        if not self.close.alive:
            raise ExecutorError(
                "gradients are not reduced any more after close(): make a new OverlappedGradients"
            )
        reduced: Future[torch.Tensor] = Future()
        self._jobs.put((tensor, reduced))
        return reduced


def _listed(reduce: Reduce | Sequence[Reduce]) -> Sequence[Reduce]:
    return [reduce] if callable(reduce) else reduce


def _serve(jobs: _Jobs, reduce: Reduce, divide_by: float) -> None:
    failure: Exception | None = None
    while (job := jobs.get()) is not None:
        tensor, reduced = job
        try:
            if failure is None:
                # Before the sum, as DDP does: a sum of many ranks may overflow 16 bits.
                reduce(tensor if divide_by == 1 else tensor.div_(divide_by))
        except Exception as error:
            failure = error
        if failure is None:
            reduced.set_result(tensor)
        else:
            reduced.set_exception(failure)  # type: ignore[arg-type]  # takes any exception


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the garbage collector runs in any thread
        # The interpreter must not end under a thread that is about to leave torch: it may abort.
        thread.join(_END_WITHIN_S)


@dataclass(slots=True, eq=False)
class _Gradient:
    """The place of one parameter's gradient in a bucket, and how far this step is with it."""

    name: str
    parameter: nn.Parameter
    view: torch.Tensor
    is_there: bool = False  # some backward of the step reached it
    is_final: bool = False  # the synchronised backward did

    @torch.no_grad()
    def bring_home(self) -> None:
        """Have the parameter's gradient lie in the bucket: none is zeros, another is copied."""
        grad = self.parameter.grad
        if grad is None:
            self.view.zero_()
        elif grad is not self.view:
            self.view.copy_(grad)
        self.parameter.grad = self.view


class _Bucket:
    """Gradients of one dtype in one flat tensor, followed by a flag for each.

    Flags are summed along: above 0 where some rank has no gradient, so that all ranks know.
    """

    def __init__(self, parameters: Sequence[_Named]) -> None:
        sizes = [parameter.numel() for _, parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=parameters[0][1].dtype)
        *pieces, self.missing = torch.split(self.flat, [*sizes, len(sizes)])
        self.gradients = [
            _Gradient(name, parameter, _like(parameter, piece))
            for (name, parameter), piece in zip(parameters, pieces, strict=True)
        ]
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.num_open = len(self.gradients)
        for gradient in self.gradients:
            gradient.is_there = gradient.is_final = False

    def complete(self) -> torch.Tensor:
        """Return the flat tensor, with zeros and a flag where backward did not come."""
        for gradient in self.gradients:
            if not gradient.is_final:
                gradient.bring_home()
        self.missing.copy_(torch.tensor([not gradient.is_there for gradient in self.gradients]))
        return self.flat

    def names_missing(self) -> list[str]:
        """Return the parameters that some rank had no gradient of, once reduced."""
        pairs = zip(self.gradients, self.missing.tolist(), strict=True)
        return [gradient.name for gradient, missing in pairs if missing]


def _like(parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    """Return ``piece`` as a view with the parameter's shape and order of dimensions in memory."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)


def _in_buckets(parameters: Sequence[_Named], bucket_bytes: int) -> list[list[_Named]]:
    """Cut the reversed parameters into buckets of one dtype, each closed once it is full.

    DDP's rule: a bucket takes the parameter that fills it, so it may be larger by all but one byte
    of that (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size).
    """
    closed: list[list[_Named]] = []
    filling: dict[torch.dtype, list[_Named]] = {}
    filled_bytes: Counter[torch.dtype] = Counter()
    for name, parameter in reversed(parameters):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append((name, parameter))
        filled_bytes[dtype] += parameter.numel() * dtype.itemsize
        if filled_bytes[dtype] >= bucket_bytes:
            closed.append(filling.pop(dtype))
            del filled_bytes[dtype]
    return [*closed, *filling.values()]


def _fingerprint(buckets: Sequence[_Bucket], num_reduces: int) -> torch.Tensor:
    """Return [9]: 1, the four 16-bit words of a hash of the buckets, and the words' squares.

    Their sums over the ranks are exact in fp64 up to 2**21 ranks.
    """
    layout = [
        [(g.name, tuple(g.view.shape), g.view.stride(), g.view.dtype) for g in bucket.gradients]
        for bucket in buckets
    ]
    digest = hashlib.sha256(repr((num_reduces, layout)).encode()).digest()
    words = torch.tensor(struct.unpack("<4H", digest[:8]), dtype=torch.float64)
    return torch.cat([words.new_ones(1), words, words.square()])


def _check_same_buckets(reduce: Reduce, fingerprint: torch.Tensor) -> None:
    """Raise on all ranks if fingerprints differ.

    A rank whose n-fold has the sums' words and squares knows that the words' variance is zero: so
    either every rank finds its own, or none does.
    """
    summed = fingerprint.clone()
    reduce(summed)
    num_ranks = summed[0]
    if not torch.equal(summed, num_ranks * fingerprint):
        error = ExecutorError(
            f"the {num_ranks:.0f} ranks have different buckets of gradients, which cannot be "
            "summed; on all ranks give OverlappedGradients the same named parameters (names, "
            "order, shapes, dtypes, memory formats, requires_grad), the same bucket_bytes and as "
            "many reductions"
        )
        error.agreed = True
        raise error


def _after_check(reduce: Reduce, fingerprint: torch.Tensor) -> Reduce:
    """Return ``reduce``, which before its first sum checks that ranks have the same buckets."""
    is_checked = False

    def checked(tensor: torch.Tensor) -> None:
        nonlocal is_checked
        if not is_checked:
            _check_same_buckets(reduce, fingerprint)
            is_checked = True
        reduce(tensor)

    return checked


class OverlappedGradients:
    """Gradients of a plain module, averaged over ranks beside backward.

    Gradients live in the buckets and ``parameter.grad`` is a view, so micro-batches add up in
    place. ``zero_grad(set_to_none=False)`` keeps it so; after ``set_to_none=True``, the default,
    the first backward makes gradients elsewhere and they are copied in. As in DDP, gradients that
    are not zeroed are averaged again together with the new ones.

    Attributes:
        bucket_sizes_bytes: In the order of their reduction, flags of missing gradients included.
    """

    def __init__(
        self,
        named_parameters: Iterable[_Named],
        reduce: Reduce | Sequence[Reduce],
        *,
        bucket_bytes: int,
        divide_by: float,
        unused: Literal["error", "zero"] = "error",
    ) -> None:
        """Lay out buckets and watch the parameters.

        Args:
            named_parameters: As ``module.named_parameters()``, in the same order on all ranks.
                Tied ones count once, those that need no gradient not at all.
            reduce: Sums a flat contiguous tensor over the ranks in place: a communicator's
                ``all_reduce``, or that of any implementation of collectives. Gets buckets in their
                dtype and, once, a fingerprint in fp64, whose sum must be exact. Of several, each
                gets a thread, and the buckets take turns.
            bucket_bytes: A bucket is closed once it holds as much; the same on all ranks.
            divide_by: The number of ranks, for their average; 1 for the sum.
            unused: What it is if backward does not reach a parameter: an error on all ranks, or a
                gradient of zeros on this one (an optimizer with momentum or weight decay then
                moves a parameter that no rank used; with ``grad=None`` it would not).

        Raises:
            ValueError: ``bucket_bytes`` is below 1, no parameter needs a gradient, or one lies on
                another device than the CPU.
        """
        names = {p: name for name, p in named_parameters if p.requires_grad}
        if bucket_bytes < 1 or not names:
            raise ValueError(
                "OverlappedGradients needs bucket_bytes >= 1 and a parameter with requires_grad, "
                f"got bucket_bytes={bucket_bytes} and {len(names)} such parameters"
            )
        for parameter, name in names.items():
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"parameter {name!r} is on {parameter.device}, but the background thread knows "
                    "no streams: keep it on the CPU, or use DDP, which overlaps NCCL by itself"
                )
        named = [(name, parameter) for parameter, name in names.items()]
        self._buckets = [_Bucket(part) for part in _in_buckets(named, bucket_bytes)]
        self.bucket_sizes_bytes = tuple(bucket.flat.nbytes for bucket in self._buckets)
        self._unused = unused
        self._synchronises = True
        self._started: list[Future[torch.Tensor]] = []
        reduces = _listed(reduce)
        fingerprint = _fingerprint(self._buckets, len(reduces))
        self._threads = [
            _ReductionThread(_after_check(one, fingerprint), divide_by) for one in reduces
        ]
        # torch hides these hooks from the garbage collector: with more than a weak reference,
        # neither this object nor the parameters would ever be freed.
        owner = weakref.ref(self)
        hooks: list[RemovableHandle] = [
            gradient.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_tell, owner, bucket, gradient)
            )
            for bucket in self._buckets
            for gradient in bucket.gradients
        ]
        self._stop_watching = weakref.finalize(self, _end_watch, hooks, self._started)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up inside: for every backward of a step but the last, as DDP's ``no_sync``.

        A step of which every backward is inside is reduced by ``wait``, beside nothing.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def wait(self) -> float:
        """Finish the step: return once all gradients are averaged.

        To be called once per step, after its last backward and before the optimizer.

        Returns:
            Seconds that this call blocked: what was not hidden.

        Raises:
            ExecutorError: On all ranks, in the first step, if their buckets differ.
            MissingGradientsError: On all ranks, if backward missed a parameter on one and
                ``unused`` is "error". The gradients are averaged with zeros in its place.
            Exception: What ``reduce`` raised in the thread (``LostPeerError`` by a communicator);
                from then on by every call, as ranks may have stopped at different buckets.
        """
        start = time.perf_counter()
        try:
            while len(self._started) < len(self._buckets):
                self._start_next()
            for reduced in self._started:
                reduced.wait()
        finally:
            self._started.clear()
            for bucket in self._buckets:
                bucket.restart()
        blocked_s = time.perf_counter() - start
        names = [name for bucket in self._buckets for name in bucket.names_missing()]
        if names and self._unused == "error":
            raise MissingGradientsError(names)
        return blocked_s

    def close(self) -> None:
        """Stop watching the parameters, which keep their gradients, and end the thread.

        In the middle of a step it logs a warning, as the end of the object or the process does.
        """
        self._stop_watching()
        for thread in self._threads:
            thread.close()

    def _accumulated(self, bucket: _Bucket, gradient: _Gradient) -> None:
        if gradient.is_final:
            raise ExecutorError(
                "wait() was not called after the last synchronised backward (or that backward "
                f"itself came twice to a parameter): {gradient.name!r} has its gradient, and its "
                "bucket may be on its way already; call wait() once per step, put earlier "
                "backwards of the step into no_sync(), and checkpoint with use_reentrant=False"
            )
        gradient.bring_home()
        gradient.is_there = True
        if not self._synchronises:
            return
        gradient.is_final = True
        bucket.num_open -= 1
        while len(self._started) < len(self._buckets) and not self._next.num_open:
            self._start_next()

    @property
    def _next(self) -> _Bucket:
        return self._buckets[len(self._started)]

    def _start_next(self) -> None:
        thread = self._threads[len(self._started) % len(self._threads)]
        self._started.append(thread.submit(self._next.complete()))


def _tell(
    owner: weakref.ref[OverlappedGradients], bucket: _Bucket, gradient: _Gradient, _: torch.Tensor
) -> None:
    gradients = owner()
    assert gradients is not None, "hooks are removed with their object"
    gradients._accumulated(bucket, gradient)


def _end_watch(hooks: Sequence[RemovableHandle], started: Sequence[object]) -> None:
    for hook in hooks:
        hook.remove()
    if started:
        # Logged, not raised or warned: this may run in the garbage collector, or at exit.
        logger.warning(
            "OverlappedGradients ended in the middle of a step: wait() was not called after the "
            "last synchronised backward, so its gradients are not averaged"
        )


def ddp_comm_hook(reduce: Reduce | Sequence[Reduce], *, divide_by: float) -> DdpHook:
    """Return a hook for ``DistributedDataParallel.register_comm_hook(None, hook)``.

    DDP makes the buckets (``bucket_cap_mb=ddp_bucket_cap_mb(...)``) and hands them out in the same
    order on all ranks; the background thread reduces them by ``reduce`` instead of DDP's own
    all_reduce. What it raises is raised by ``backward()``, now and in all later steps. DDP's
    ``join()`` calls hooks outside of backward, which torch refuses here.

    Args:
        reduce: Sums a flat contiguous tensor over the ranks in place, on a group that DDP does not
            use (it broadcasts buffers and the order of its buckets on its own); or several that do
            so, each on groups of its own.
        divide_by: The number of ranks.
    """
    threads = [_ReductionThread(one, divide_by) for one in _listed(reduce)]
    at_end_of_backward = Variable._execution_engine.queue_callback

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        reduced = threads[bucket.index() % len(threads)].submit(buffer)
        # DDP cannot read an error from a future. It gets the buffer in any case, ends its backward
        # in a callback of its own, and the error is raised by one that is queued behind that.
        at_end_of_backward(lambda: at_end_of_backward(lambda: _raise_from(reduced)))
        return reduced.then(lambda _: buffer)

    return hook


def _raise_from(reduced: Future[torch.Tensor]) -> None:
    reduced.wait()


def ddp_bucket_cap_mb(bucket_bytes: int) -> float:
    """Return DDP's ``bucket_cap_mb``, which counts 2**20 bytes.

    >>> ddp_bucket_cap_mb(26_214_400)
    25.0
    """
    return bucket_bytes / 2**20
