"""Data-parallel steps on the lab: backward, whose time the hidden world says, and its gradients.

A model is a chain of layers of one square weight each. Backward through a layer writes a gradient
and sleeps for the rest of the time that the world gives the layer. A step here is backward and the
average of all gradients; the optimizer runs between steps, untimed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.calls import AXIS
from benchmarks.lab.cluster import RankContext
from benchmarks.lab.driver import Lab
from benchmarks.lab.world import World
from executor.collectives.communicator import Communicator, communicators
from executor.collectives.library import Library
from executor.collectives.protocol import Collectives
from executor.gradients.overlap import (
    OverlappedGradients,
    Reduce,
    ddp_bucket_cap_mb,
    ddp_comm_hook,
)
from executor.mesh import build_mesh
from executor.timing import Recorder
from planner.plan import Method, Plan

__all__ = [
    "DDP_DEFAULT",
    "FORCED",
    "LAYER_BYTES",
    "Steps",
    "Way",
    "measure",
    "planned_method",
]

Wrapper = Literal["ddp", "ddp hook", "module"]

_SIDE: Final = 500
LAYER_BYTES: Final = _SIDE * _SIDE * 4
_KINDS: Final = ("attention", "mlp")  # layers alternate; the world has a factor for each
_LEARNING_RATE: Final = 0.1
_TIMEOUT_S: Final = 1200.0
_MAX_THREADS: Final = 2

# What is measured whether or not the plan chooses it.
FORCED: Final = (
    Method("ring"),
    Method("hierarchical"),
    Method("hierarchical", "executor"),
    Method("hierarchical", "shm"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to synchronise gradients.

    Attributes:
        wrapper: Who makes the buckets, and overlaps them: DDP, DDP with our hook, or
            ``OverlappedGradients``.
        algorithm: Of the all_reduce.
        path: Of the all_reduce.
        bucket_bytes: Size at which a bucket is closed; None for DDP's default, 25 MiB after a
            first one of 1 MiB.
        num_threads: That reduce buckets, in turns and each on groups of its own; not of DDP.
    """

    wrapper: Wrapper
    algorithm: str
    path: str
    bucket_bytes: int | None
    num_threads: int = 1

    @property
    def method(self) -> Method:
        """How a bucket is reduced."""
        return Method(self.algorithm, self.path)  # type: ignore[arg-type]  # read from a file


DDP_DEFAULT: Final = Way("ddp", "ring", "library", None)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one way with one compute time.

    Attributes:
        shape: Name of the lab's topology.
        model_bytes: Of all gradients.
        way: How they were synchronised.
        is_planned: The plan's thresholds choose that method for these buckets.
        ratio: Compute of the slowest rank over communication of DDP's default; 0 is none.
        seconds: Of each step, from the last rank's start to the last rank's end.
        compute_s: Of the slowest rank, mean over the steps.
        link_bytes: Per step, over the busier direction of the busiest link of a host.
        max_difference: Of a parameter on any rank from that of DDP's default.
        world: What the devices did.
    """

    shape: str
    model_bytes: int
    way: Way
    is_planned: bool
    ratio: float
    seconds: tuple[float, ...]
    compute_s: float
    link_bytes: float
    max_difference: float
    world: dict[str, Any]

    @property
    def median_s(self) -> float:
        """Median of the seconds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Largest less smallest of the seconds, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


def planned_method(plan: Plan, bucket_bytes: int) -> Method:
    """Return what the plan's thresholds choose for a bucket."""
    return plan.method(AXIS, "all_reduce", bucket_bytes)


def measure(
    lab: Lab,
    plan: Plan,
    world: World,
    *,
    model_bytes: int,
    ratios_of: Mapping[Way, Sequence[float]],
    num_steps: int,
) -> Iterator[Steps]:
    """Yield DDP's default without compute, then every way at its ratios, DDP's default first.

    Args:
        lab: Running.
        plan: Of ``benchmarks.lab.calls.plan_on``, for this lab.
        world: What its devices do.
        model_bytes: Whole layers.
        ratios_of: What to measure, ``DDP_DEFAULT`` included.
        num_steps: Timed, of each way and ratio.
    """
    lab.run("benchmarks.lab.gradients:prepare", {"plan": plan.model_dump_json()})
    run = partial(_steps, lab, plan, world, model_bytes, num_steps=num_steps)
    [alone] = run(DDP_DEFAULT, [0.0], alone_s=0.0)
    yield alone
    for way in sorted(ratios_of, key=lambda way: way != DDP_DEFAULT):
        if ratios_of[way]:
            yield from run(way, ratios_of[way], alone_s=alone.median_s)


def _steps(
    lab: Lab,
    plan: Plan,
    world: World,
    model_bytes: int,
    way: Way,
    ratios: Sequence[float],
    *,
    alone_s: float,
    num_steps: int,
) -> list[Steps]:
    num_layers = model_bytes // LAYER_BYTES
    factor = float(np.mean([world.factor(kind) for kind in _KINDS])) * world.slow_factor
    priors_s = [ratio * alone_s / num_layers / factor for ratio in ratios for _ in range(num_steps)]
    with lab.counting() as crossed:
        answers = lab.run(
            "benchmarks.lab.gradients:train",
            {
                "way": way,
                "num_layers": num_layers,
                "world": world.model_dump(),
                "layer_priors_s": [0.0, *priors_s],  # the first opens connections: not counted
                "num_compared": num_steps + 1,  # as many as every way takes
            },
            timeout_s=_TIMEOUT_S,
        )
    spans = np.array([spans for spans, _ in answers])[:, 1:]  # [ranks, steps, (start, end)]
    seconds = spans[:, :, 1].max(axis=0) - spans[:, :, 0].max(axis=0)
    compute_s = [
        max(
            sum(_layer_s(world, prior_s, rank, step, layer) for layer in range(num_layers))
            for rank in range(lab.cluster.world_size)
        )
        for step, prior_s in enumerate(priors_s, start=1)
    ]
    host_links = [(link.lower, link.upper) for link in lab.cluster.links if link.host is not None]
    bucket_bytes = way.bucket_bytes or plan.sharding.gradient_bucket_bytes
    return [
        Steps(
            shape=lab.cluster.name,
            model_bytes=model_bytes,
            way=way,
            is_planned=way.method == planned_method(plan, bucket_bytes),
            ratio=ratio,
            seconds=tuple(seconds[first : first + num_steps].tolist()),
            compute_s=float(np.mean(compute_s[first : first + num_steps])),
            link_bytes=max(max(crossed[link]) for link in host_links) / (len(priors_s) + 1),
            max_difference=max(difference for _, difference in answers),
            world=world.model_dump(),
        )
        for first, ratio in zip(range(0, len(priors_s), num_steps), ratios, strict=True)
    ]


def _layer_s(world: World, prior_s: float, rank: int, step: int, layer: int) -> float:
    """Return the seconds of backward through one layer."""
    kind = _KINDS[layer % len(_KINDS)]
    return world.seconds(kind, prior_s, rank, step * 1000 + layer) if prior_s else 0.0


# ------------------------------------------------------------------------- on every rank

_COMMUNICATORS: list[Communicator] = []  # one for every thread
_OF_DEFAULT: dict[int, torch.Tensor] = {}  # by layers: parameters after the compared steps


def prepare(place: RankContext, *, plan: str) -> None:
    """Build the groups of a plan and what runs its choices and probes, once."""
    parsed = Plan.model_validate_json(plan)
    timeout = dist.distributed_c10d.default_pg_timeout
    while len(_COMMUNICATORS) < _MAX_THREADS:
        mesh = build_mesh(parsed, rank=place.rank, timeout=timeout)
        recorder = Recorder(mesh, backend="gloo")
        made = communicators(parsed, mesh, recorder, timeout_s=timeout.total_seconds())
        _COMMUNICATORS.append(made[AXIS])


class _TimedBackward(torch.autograd.Function):
    """A layer whose backward takes a time of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: "_Layer") -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return gradients that differ from rank to rank; writing them is part of the time."""
        end = time.perf_counter() + ctx.layer.backward_s
        (weight,) = ctx.saved_tensors
        gradient = weight - ctx.layer.target
        time.sleep(max(0.0, end - time.perf_counter()))
        return grads[0], gradient, None


class _Layer(nn.Module):
    """Pulls its weight towards ``target``."""

    def __init__(self, target: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_SIDE, _SIDE))
        self.target = target
        self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _TimedBackward.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y


def train(
    place: RankContext,
    *,
    way: Way,
    num_layers: int,
    world: dict[str, Any],
    layer_priors_s: Sequence[float],
    num_compared: int,
) -> tuple[list[tuple[float, float]], float]:
    """Take a step for each prior, from the same start as every other way.

    Returns:
        Start and end of each step (processes of one machine read one clock), and the largest
        difference of a parameter, after ``num_compared`` steps, from that of DDP's default.

    Raises:
        AssertionError: They differ by more than fp32 explains.
    """
    torch.manual_seed(num_layers)
    model = nn.Sequential(*(_Layer(target=place.rank + 1.0) for _ in range(num_layers)))
    layers = [layer for layer in model if isinstance(layer, _Layer)]
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    devices = World(**world)
    call, gradients = _wrapped(model, way)
    spans: list[tuple[float, float]] = []
    difference = 0.0
    for step, prior_s in enumerate(layer_priors_s):
        for number, layer in enumerate(layers):
            layer.backward_s = _layer_s(devices, prior_s, place.rank, step, number)
        loss = call(torch.ones(1, requires_grad=True)).sum()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        if gradients is not None:
            gradients.wait()
        spans.append((start, time.perf_counter()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=gradients is None)
        if len(spans) == num_compared:
            difference = _difference(way, layers)
    if gradients is not None:
        gradients.close()
    return spans, difference


def _wrapped(model: nn.Module, way: Way) -> tuple[nn.Module, OverlappedGradients | None]:
    """Return what to call, and what to wait for if backward does not."""
    num_ranks = dist.get_world_size()
    reduces = [_reduce(c, way.method) for c in _COMMUNICATORS[: way.num_threads]]
    if way.wrapper == "module":
        assert way.bucket_bytes is not None, "only DDP has a default"
        return model, OverlappedGradients(
            model.named_parameters(),
            reduces,
            bucket_bytes=way.bucket_bytes,
            divide_by=num_ranks,
        )
    cap_mb = None if way.bucket_bytes is None else ddp_bucket_cap_mb(way.bucket_bytes)
    # Ranks start from the same weights, so these need not be sent.
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb, init_sync=False)
    if way.wrapper == "ddp hook":
        ddp.register_comm_hook(None, ddp_comm_hook(reduces, divide_by=num_ranks))
    return ddp, None


def _reduce(communicator: Communicator, method: Method) -> Reduce:
    """Return a sum by ``method``, and by no other in its place."""
    collectives: Collectives = Library(communicator.group)
    if method != Method("ring"):
        runner = communicator.runner_of("all_reduce", method)
        assert runner.method == method, f"{runner.method} would run in the place of {method}"
        collectives = runner.collectives
    return lambda tensor: collectives.all_reduce(tensor, dist.ReduceOp.SUM)


def _difference(way: Way, layers: Sequence[_Layer]) -> float:
    """Return the largest difference from the parameters of DDP's default, which sets them."""
    flat = torch.cat([layer.weight.detach().view(-1) for layer in layers])
    if way == DDP_DEFAULT:
        _OF_DEFAULT.clear()
        _OF_DEFAULT[len(layers)] = flat
    torch.testing.assert_close(flat, _OF_DEFAULT[len(layers)])
    return float((flat - _OF_DEFAULT[len(layers)]).abs().max())
