"""Every collective method on the lab's links: seconds, and bytes that crossed each link.

The calls are those of the executor: a plan whose probes name every method is laid on the lab, and
each method runs by the communicator that a training step would use.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lab.cluster import Cluster, Order, RankContext
from benchmarks.lab.driver import Lab
from executor.collectives.communicator import Communicator, communicators
from executor.measure import call_of
from executor.mesh import build_mesh
from executor.timing import Recorder
from planner.cost.algorithms import is_possible
from planner.cost.collectives import legal_methods
from planner.layout.groups import Group, lay_group
from planner.plan import Axis, Collective, Method, Plan, Probe
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.topology.fabric import Fabric

__all__ = ["AXIS", "OPS", "Call", "Problem", "measure", "plan_on", "problem_of"]

OPS: Final[tuple[Collective, ...]] = tuple(op for op in get_args(Collective) if op != "send_recv")
# Of all ranks: data parallelism without context parallelism.
AXIS: Final[Axis] = "dp_cp"
_ELEMENT: Final = torch.float32
# A first call opens connections and touches memory, which counts for little beyond this.
_COUNTS_AT_ONCE_S: Final = 1.0
# A sample is the median of calls that take about as long together: whoever gets a core first
# decides about a call of a millisecond.
_SAMPLE_S: Final = 0.06
_MOST_CALLS: Final = 60
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Call:
    """One method at one size.

    Attributes:
        shape: Name of the lab's topology.
        order: Of the ranks on the hosts.
        op: Operation.
        algorithm: Of the method that ran.
        path: Of the method that ran.
        size_bytes: nccl-tests' S.
        seconds: Samples, each the median of some calls; a call lasts from the last rank's start to
            the last rank's end. Methods take turns.
        link_bytes: Of one call, over the busier direction of the busiest link of a host, and of a
            leaf; empty on one host.
    """

    shape: str
    order: Order
    op: Collective
    algorithm: str
    path: str
    size_bytes: int
    seconds: tuple[float, ...]
    link_bytes: tuple[float, ...]

    @property
    def method(self) -> Method:
        """How it was done."""
        return Method(self.algorithm, self.path)  # type: ignore[arg-type]  # read from a file

    @property
    def median_s(self) -> float:
        """Median of the seconds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Largest less smallest of the seconds, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner is asked: a group of all ranks on the fabric of a lab's topology."""

    fabric: Fabric
    group: Group

    def methods(self, op: Collective) -> tuple[Method, ...]:
        """Return the methods that this group can run, the library's first."""
        legal = legal_methods(self.fabric, "executor", op)
        return tuple(method for method in legal if is_possible(op, method, self.group)[0])


def problem_of(document: TopologyDocument) -> Problem:
    """Return the planner's view of a lab whose ranks lie in natural order."""
    fabric = compile_fabric(document)
    return Problem(fabric, lay_group(fabric, np.array([fabric.num_gpus]), np.array([1])))


def measure(
    lab: Lab,
    document: TopologyDocument,
    sizes_bytes: Sequence[int],
    *,
    repeats: int,
    ops: tuple[Collective, ...] = OPS,
) -> Iterator[Call]:
    """Yield every method of every operation at every size, measured on ``lab``.

    Args:
        lab: Running.
        document: Its topology.
        sizes_bytes: Ascending; rounded to whole elements per rank.
        repeats: Samples of each.
        ops: Operations.
    """
    problem = problem_of(document)
    methods = {op: problem.methods(op) for op in ops}
    plan = plan_on(document, lab.cluster, methods).model_copy(update={"collectives": ()})
    lab.run("benchmarks.lab.calls:prepare", {"plan": plan.model_dump_json()})
    for op in ops:
        series = [_Series(lab, document.name, op, method) for method in methods[op]]
        for size_bytes in sizes_bytes:
            for one in series:
                one.start(size_bytes)
            for number in range(1, repeats + 1):
                for one in series:
                    one.sample_until(number)
            for one in series:
                yield one.call()


class _Series:
    """One method, measured at one size after the other."""

    def __init__(self, lab: Lab, shape: str, op: Collective, method: Method) -> None:
        self._lab, self._shape, self._op, self._method = lab, shape, op, method
        self._ran, self._size_bytes = method, 0
        self._samples: list[float] = []
        self._link_bytes: tuple[float, ...] = ()

    def start(self, size_bytes: int) -> None:
        """Begin with a size; a first call warms up, and says what crosses the links."""
        expected_s = self._samples[-1] if self._samples else 0.0
        self._size_bytes, self._samples = size_bytes, []
        with self._lab.counting() as crossed:
            first_s = self._run(1)
        self._link_bytes = _busiest(self._lab.cluster, crossed)
        self._together = min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_S / first_s)))
        if expected_s > _COUNTS_AT_ONCE_S:
            self._samples.append(first_s)

    def sample_until(self, number: int) -> None:
        """Take a sample if there are fewer."""
        if len(self._samples) < number:
            self._samples.append(self._run(self._together))

    def call(self) -> Call:
        """Return what was measured at this size."""
        return Call(
            shape=self._shape,
            order=self._lab.cluster.order,
            op=self._op,
            algorithm=self._ran.algorithm,
            path=self._ran.path,
            size_bytes=self._size_bytes,
            seconds=tuple(self._samples),
            link_bytes=self._link_bytes,
        )

    def _run(self, num_calls: int) -> float:
        """Return the median seconds of some calls."""
        results = self._lab.run(
            "benchmarks.lab.calls:run",
            {
                "op": self._op,
                "method": tuple(self._method),
                "size_bytes": self._size_bytes,
                "num_calls": num_calls,
            },
            timeout_s=_TIMEOUT_S,
        )
        self._ran, self._size_bytes = results[0][0], results[0][1]
        times = np.array([spans for _, _, spans in results])  # [ranks, calls, (start, end)]
        seconds = times[:, :, 1].max(axis=0) - times[:, :, 0].max(axis=0)
        return float(np.median(seconds))


def _busiest(
    cluster: Cluster, crossed: Mapping[tuple[str, str], tuple[int, int]]
) -> tuple[float, ...]:
    """Return the bytes over the busiest host link and, if there are any, trunk."""
    hosts = {(link.lower, link.upper) for link in cluster.links if link.host is not None}
    return tuple(
        float(max(max(crossed[link]) for link in links))
        for links in (hosts, crossed.keys() - hosts)
        if links
    )


def plan_on(
    document: TopologyDocument, cluster: Cluster, methods: Mapping[Collective, Sequence[Method]]
) -> Plan:
    """Return a data-parallel plan on the lab, with its own choices, and probes of ``methods``."""
    request = PlanRequest.model_validate(
        {
            "topology": document.model_dump(mode="json"),
            "model": "example-gpt",
            "training": {"global_batch_size": 64, "seq_len": 64, "precision": "fp32"},
            "framework": "executor",
            "constraints": {"dp": cluster.world_size, "zero_stage": 0},
        }
    )
    plan = make_plan(resolve(request))
    probes = [
        Probe(axis=AXIS, op=op, sizes_bytes=(1024,), algorithm=m.algorithm, path=m.path)
        for op, found in methods.items()
        for m in found
    ]
    leaves = _leaves(cluster, compile_fabric(document))
    rule = plan.ranks.model_copy(update={"units": cluster.units, "outer_units": leaves})
    return plan.model_copy(update={"probes": tuple(probes), "ranks": rule})


def _leaves(cluster: Cluster, fabric: Fabric) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks under every leaf; None where one switch joins all."""
    if len(fabric.levels) < 3:
        return None
    hosts_per_leaf = fabric.levels[1].unit_size // cluster.ranks_per_host
    return tuple(
        tuple(
            sorted(rank for unit in cluster.units[first : first + hosts_per_leaf] for rank in unit)
        )
        for first in range(0, len(cluster.units), hosts_per_leaf)
    )


# ------------------------------------------------------------------------- on every rank

_PREPARED: dict[str, Communicator] = {}


def prepare(place: RankContext, *, plan: str) -> None:
    """Build the groups of a plan and what runs its probes."""
    parsed = Plan.model_validate_json(plan)
    timeout = dist.distributed_c10d.default_pg_timeout
    mesh = build_mesh(parsed, rank=place.rank, timeout=timeout)
    recorder = Recorder(mesh, backend="gloo")
    made = communicators(parsed, mesh, recorder, timeout_s=timeout.total_seconds())
    _PREPARED["all"] = made[AXIS]


def run(
    place: RankContext, *, op: Collective, method: tuple[Any, Any], size_bytes: int, num_calls: int
) -> tuple[Method, int, list[tuple[float, float]]]:
    """Return the method that ran, S, and the start and end of each call.

    Processes of one machine read one clock, so starts and ends of ranks can be compared.
    """
    communicator = _PREPARED["all"]
    runner = communicator.runner_of(op, Method(*method))
    part = torch.ones(
        max(1, math.ceil(size_bytes / communicator.size / _ELEMENT.itemsize)), dtype=_ELEMENT
    )
    call = call_of(runner.collectives, op, communicator.group, part)
    spans = []
    for _ in range(num_calls):
        dist.barrier()
        start = time.perf_counter()
        call()
        spans.append((start, time.perf_counter()))
    return runner.method, part.nbytes * communicator.size, spans
