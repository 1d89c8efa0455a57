"""Overlapped gradients are those of an all_reduce after backward, in one order on all ranks."""

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore  # public without their types
from torch.nn import functional

from executor.errors import ExecutorError, LostPeerError
from executor.gradients.overlap import (
    MissingGradientsError,
    OverlappedGradients,
    Reduce,
    ddp_bucket_cap_mb,
)
from executor.mesh import RankGroup
from tests.unit.gloo_ranks import on_ranks

FP64 = 8
FINGERPRINT = 9  # numbers that a thread sums before its first bucket
WITHIN_S = 10.0


class Tangled(nn.Module):
    """Tied weights, weights in other memory orders, and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.convolution = nn.Conv2d(2, 3, 2)
        in_channels_last = self.convolution.weight.to(memory_format=torch.channels_last)
        self.convolution.weight = nn.Parameter(in_channels_last.detach())
        self.transposed = nn.Parameter(torch.randn(5, 9).t())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.flatten()
        hidden = self.embedding(tokens) + self.frozen
        mixed = self.convolution(hidden.reshape(-1, 2, 3, 4)).sum((1, 2)) * self.scale
        rows = functional.pad(mixed, (0, 6)) @ self.transposed
        return functional.cross_entropy(self.head(hidden), tokens) + rows.square().mean()


def summing(group: RankGroup) -> Reduce:
    def reduce(tensor: torch.Tensor) -> None:
        assert group.process_group is not None
        group.process_group.allreduce([tensor]).wait()

    return reduce


def alone(model: nn.Module, reduce: Reduce = lambda _: None, **options: Any) -> OverlappedGradients:
    options = {"bucket_bytes": 1, "divide_by": 1, **options}
    return OverlappedGradients(model.named_parameters(), reduce, **options)


def train(
    model: nn.Module,
    index: int,
    finish_step: Callable[[], object],
    no_sync: Callable[[], Any] | None,
    *,
    set_to_none: bool,
) -> list[torch.Tensor]:
    """Train for three steps of three micro-batches, other ones on every rank; return weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.Generator().manual_seed(index)
    for _ in range(3):
        batches = torch.randint(7, (3, 2, 12), generator=tokens)
        if no_sync is not None:
            with no_sync():
                for batch in batches[:-1]:
                    model(batch).backward()
            batches = batches[-1:]
        for batch in batches:
            model(batch).backward()
        finish_step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [p.detach() for p in model.parameters()]


def test_buckets_take_turns_among_several_reductions_which_run_at_once() -> None:
    both_run = threading.Barrier(2)
    seen: list[list[int]] = [[], []]

    def reduce(turn: int, tensor: torch.Tensor) -> None:
        both_run.wait(WITHIN_S)
        seen[turn].append(tensor.numel())

    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in (4, 3, 2, 1)))
    gradients = OverlappedGradients(
        model.named_parameters(),
        [partial(reduce, 0), partial(reduce, 1)],
        bucket_bytes=1,
        divide_by=1,
    )
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    gradients.wait()
    # reversed, a flag behind each
    assert seen == [[FINGERPRINT, 2, 4], [FINGERPRINT, 3, 5]]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 40 * FP64, 1 << 20])
def test_training_equals_all_reduce_after_backward(bucket_bytes: int, set_to_none: bool) -> None:
    start = Tangled().double()

    def both(group: RankGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, plain, reduce = deepcopy(start), deepcopy(start), summing(group)

        def after_backward() -> None:
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    reduce(parameter.grad.div_(group.size))

        expected = train(plain, group.index, after_backward, None, set_to_none=set_to_none)
        overlapped = OverlappedGradients(
            model.named_parameters(), reduce, bucket_bytes=bucket_bytes, divide_by=group.size
        )
        got = train(
            model, group.index, overlapped.wait, overlapped.no_sync, set_to_none=set_to_none
        )
        return got, expected

    for got, expected in on_ranks(2, both):
        for mine, theirs, first in zip(got, expected, start.parameters(), strict=True):
            # Two summands in either order round alike: no tolerance.
            assert torch.equal(mine, theirs)
            assert torch.equal(mine, first) == (not first.requires_grad), "training moved it"


class Branches(nn.Module):
    """Branches of different sizes that are used in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (1, 20, 300)])

    def forward(self, order: tuple[int, ...]) -> torch.Tensor:
        total = torch.zeros(())
        for i in order:
            total = total + (self.parts[i] * (i + 1)).sum()
        return total


def test_buckets_go_in_one_order_whatever_order_gradients_come_in() -> None:
    def run(group: RankGroup) -> tuple[list[int], list[int], list[float]]:
        model, reduce = Branches(), summing(group)
        reached: list[int] = []
        reduced: list[int] = []

        def watched(tensor: torch.Tensor) -> None:
            reduced.append(tensor.numel())
            reduce(tensor)

        for part in model.parts:
            part.register_hook(lambda grad: reached.append(grad.numel()))
        gradients = OverlappedGradients(
            model.named_parameters(), watched, bucket_bytes=1, divide_by=3
        )
        orders = ((0, 1, 2), (2, 1, 0), (1, 2, 0))
        for _ in range(2):
            model(orders[group.index]).backward()
            gradients.wait()
            model.zero_grad()
            model(orders[group.index]).backward()
            gradients.wait()
        return reached[:3], reduced, [float(p.grad[0]) for p in model.parts if p.grad is not None]

    results = on_ranks(3, run)
    assert len({tuple(reached) for reached, _, _ in results}) == 3, "orders differ"
    for _, reduced, values in results:
        assert reduced == [FINGERPRINT, *[301, 21, 2] * 4]  # elements, and a flag
        assert values == pytest.approx([1.0, 2.0, 3.0])


def test_buckets_are_reduced_while_backward_runs() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Linear(4, 4))
    begun = threading.Event()
    gradients = alone(model, lambda _: begun.set())
    met = []
    first.weight.register_hook(lambda _: met.append(begun.wait(WITHIN_S)))  # type: ignore[no-untyped-call]
    model(torch.ones(1, 4)).sum().backward()
    assert met == [True], "a bucket was reduced before the last gradient was computed"
    assert gradients.wait() >= 0


@pytest.mark.parametrize("unused", ["error", "zero"])
def test_parameter_unused_on_one_rank(unused: Any) -> None:
    def run(group: RankGroup) -> tuple[Exception | None, list[float]]:
        model = Branches()
        gradients = OverlappedGradients(
            model.named_parameters(), summing(group), bucket_bytes=90, divide_by=2, unused=unused
        )
        raised = None
        model((0, 1, 2) if group.index == 0 else (0, 2)).backward()
        try:
            gradients.wait()
        except MissingGradientsError as error:
            raised = error
        return raised, [float(p.grad[0]) for p in model.parts if p.grad is not None]

    for raised, values in on_ranks(2, run):
        assert values == [1.0, 1.0, 3.0]
        if unused == "zero":
            assert raised is None
        else:
            assert isinstance(raised, MissingGradientsError), "on both ranks"
            assert raised.agreed
            assert raised.names == ("parts.1",)
            assert "'parts.1'" in str(raised)


def test_a_parameter_that_an_earlier_micro_batch_used_is_not_missing() -> None:
    model = Branches()
    gradients = alone(model)
    with gradients.no_sync():
        model((0, 1)).backward()
    model((0, 2)).backward()
    gradients.wait()
    assert [float(p.grad[0]) for p in model.parts if p.grad is not None] == [2.0, 2.0, 3.0]
    model((0, 2)).backward()
    with pytest.raises(MissingGradientsError):  # the step before does not count
        gradients.wait()


def test_many_missing_parameters_are_counted_and_few_named() -> None:
    gradients = alone(nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)]))
    with pytest.raises(MissingGradientsError, match=r"8 parameters.* and 3 more") as caught:
        gradients.wait()
    assert len(caught.value.names) == 8


def test_a_step_without_a_synchronised_backward_is_reduced_by_wait() -> None:
    model = Branches()
    reduced: list[int] = []
    gradients = alone(model, lambda tensor: reduced.append(tensor.numel()), bucket_bytes=1 << 20)
    with gradients.no_sync():
        model((0, 1, 2)).backward()
    assert reduced == []
    gradients.wait()
    assert reduced == [FINGERPRINT, 1 + 20 + 300 + 3]


def test_an_error_of_the_thread_is_raised_by_wait_and_nothing_is_sent_any_more() -> None:
    model = Branches()
    calls: list[int] = []

    def reduce(tensor: torch.Tensor) -> None:
        calls.append(tensor.numel())
        if len(calls) == 3:
            raise LostPeerError("rank 1 is gone")

    gradients = alone(model, reduce)
    for _ in range(2):
        model((0, 1, 2)).backward()
        with pytest.raises(LostPeerError, match="rank 1 is gone"):
            gradients.wait()
    assert calls == [FINGERPRINT, 301, 21]


@pytest.mark.parametrize("synchronises", [True, False])
def test_backward_before_wait_is_refused(synchronises: bool) -> None:
    def backward(model: Branches, gradients: OverlappedGradients) -> None:
        with nullcontext() if synchronises else gradients.no_sync():
            model((0, 1, 2)).backward()

    model = Branches()
    gradients = alone(model)
    model((0, 1, 2)).backward()
    with pytest.raises(ExecutorError, match=r"^wait\(\) was not called .*'parts\.\d'.*no_sync"):
        backward(model, gradients)
    gradients.wait()
    model.zero_grad()
    model((0, 1, 2)).backward()
    gradients.wait()
    assert [float(p.grad[0]) for p in model.parts if p.grad is not None] == [1.0, 2.0, 3.0]


def end_by_close(gradients: list[OverlappedGradients]) -> None:
    gradients[0].close()
    gradients[0].close()


def end_by_collection(gradients: list[OverlappedGradients]) -> None:
    gradients.clear()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("end", [end_by_close, end_by_collection])
def test_an_end_without_wait_is_logged_once(
    caplog: pytest.LogCaptureFixture, end: Callable[[list[OverlappedGradients]], None], waits: bool
) -> None:
    model = Branches()
    gradients = [alone(model)]
    model((0, 1, 2)).backward()
    if waits:
        gradients[0].wait()
    end(gradients)
    del gradients
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (0 if waits else 1)
    assert all("wait() was not called after the last" in message for message in warned)


def test_a_process_that_ends_without_wait_says_so() -> None:
    script = (
        "import torch; from executor.gradients.overlap import OverlappedGradients\n"
        "model = torch.nn.Linear(2, 2)\n"
        "gradients = OverlappedGradients(\n"
        "    model.named_parameters(), lambda _: None, bucket_bytes=1, divide_by=1)\n"
        "model(torch.ones(2)).sum().backward()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr.count("wait() was not called") == 1


def as_second_rank_has_it(differs: str) -> tuple[nn.Module, dict[str, int]]:
    """Return a model, and options, of which one thing is not as the first rank has it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 2, bias=False)).double()
    options = {"bucket_bytes": 40 * FP64, "num_reduces": 2}
    if differs in options:
        options[differs] = 1
    elif differs == "order":
        model = nn.Sequential(*reversed(model))
    elif differs == "dtype":
        model = model.float()
    elif differs == "memory format":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
    elif differs == "requires_grad":
        model[0].bias.requires_grad_(False)
    return model, options


@pytest.mark.parametrize(
    "differs",
    ["bucket_bytes", "num_reduces", "order", "dtype", "memory format", "requires_grad", "nothing"],
)
def test_different_buckets_are_an_error_on_all_ranks(differs: str) -> None:
    store = HashStore()

    def run(group: RankGroup) -> list[Exception]:
        own = PrefixStore("second", store)
        second = dist.ProcessGroupGloo(own, group.index, group.size, timedelta(seconds=WITHIN_S))
        model, options = as_second_rank_has_it(differs if group.index == 1 else "nothing")
        reduces = [
            summing(group),
            summing(replace(group, process_group=cast(dist.ProcessGroup, second))),
        ]
        gradients = OverlappedGradients(
            model.named_parameters(),
            reduces[: options["num_reduces"]],
            bucket_bytes=options["bucket_bytes"],
            divide_by=group.size,
        )
        raised: list[Exception] = []
        for _ in range(2):
            model.zero_grad()
            sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
            try:
                gradients.wait()
            except ExecutorError as error:
                raised.append(error)
        return raised

    for raised in on_ranks(3, run):
        assert len(raised) == (0 if differs == "nothing" else 2)
        for error in raised:
            assert isinstance(error, ExecutorError)
            assert error.agreed
            assert "the 3 ranks have different buckets" in str(error)


def test_gradients_stay_views_in_the_memory_order_of_their_parameters() -> None:
    model = Tangled().double()
    gradients = alone(model, bucket_bytes=1 << 20)
    places = []
    for set_to_none in (False, True, False):
        model(torch.arange(24).reshape(2, 12) % 7).backward()
        gradients.wait()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        places.append([grad.data_ptr() for grad in found.values()])
        for name, grad in found.items():
            assert grad.stride() == model.get_parameter(name).stride()
        assert len({grad.untyped_storage().data_ptr() for grad in found.values()}) == 1
        model.zero_grad(set_to_none=set_to_none)
    assert places[0] == places[1] == places[2]


def test_buckets_are_filled_in_reverse_order_by_dtype() -> None:
    model = nn.Module()
    for i, (size, dtype) in enumerate(
        [(100, torch.float32), (8, torch.bfloat16), (30, torch.float32), (90, torch.float32)]
    ):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size, dtype=dtype)))
    # p3 alone fills a bucket of 300 bytes; p2 and p0 do together; p1 is of another dtype.
    assert alone(model, bucket_bytes=300).bucket_sizes_bytes == (91 * 4, 132 * 4, 9 * 2)
    assert alone(model, bucket_bytes=1).bucket_sizes_bytes == (91 * 4, 31 * 4, 9 * 2, 101 * 4)


def test_what_cannot_be_is_refused_in_words() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bucket_bytes=0 and 2 such parameters"):
        alone(model, bucket_bytes=0)
    with pytest.raises(ValueError, match="0 such parameters"):
        alone(model.requires_grad_(False))
    with pytest.raises(ValueError, match=r"'weight' is on meta.*use DDP"):
        alone(nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("closes", [True, False])
def test_no_hook_and_no_thread_outlive_the_object(closes: bool) -> None:
    before = set(threading.enumerate())
    model = Branches()
    calls: list[torch.Tensor] = []
    gradients = alone(model, calls.append)
    (thread,) = set(threading.enumerate()) - before
    if closes:
        gradients.close()
        with pytest.raises(ExecutorError, match=r"after close\(\)"):
            gradients.wait()
    else:
        del gradients
    model((0, 1, 2)).backward()
    assert calls == []
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_ddp_counts_binary_megabytes() -> None:
    for bucket_bytes in (1, 25_000_000, 2**20 * 3 + 1):
        assert int(ddp_bucket_cap_mb(bucket_bytes) * 1024 * 1024) == bucket_bytes
