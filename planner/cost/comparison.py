"""Every way to run one collective side by side: what it costs, why, and why not."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from planner.cost.collectives import (
    bases_of,
    choose,
    collective_terms,
    explain_call,
    legal_methods,
    thresholds,
)
from planner.cost.defaults import (
    chooses_knowingly,
    known_methods,
    library_default,
    library_methods,
    why_not,
)
from planner.cost.sharing import needs_no_processor, processors_taken
from planner.cost.traffic import bytes_per_level, lower_bound_s
from planner.errors import InvalidInputError, UnknownNameError
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import OTHER_METHODS, OWN_METHODS, library_rules
from planner.plan import Basis, Collective, Framework, Method, SizeThreshold
from planner.topology.fabric import Fabric

__all__ = [
    "SIZES_BYTES",
    "AtSize",
    "Comparison",
    "Price",
    "Way",
    "check_algorithms",
    "compare_methods",
    "comparison_document",
]

SIZES_BYTES: Final = tuple(1 << power for power in (10, 13, 16, 19, 22, 25, 28, 31, 33))
_MOST_BYTES: Final = 10**15

# "others" run on the same GPUs, but no plan holds them.
RunBy = Literal["library", "executor", "others"]


@dataclass(frozen=True, slots=True)
class Way:
    """A method for an operation.

    Attributes:
        method: Its name, and who runs it unless it is the library's.
        run_by: Who has it.
        why: Where that is said.
        since: First version of the library that has it; empty where all in use do.
        why_not: Why it cannot run here; empty where it can.
    """

    method: str
    run_by: RunBy
    why: str
    since: str
    why_not: str


@dataclass(frozen=True, slots=True)
class Price:
    """One call.

    Attributes:
        method: As in ``Way``.
        seconds: All of it.
        launch_s: Of ``seconds``, before the first byte moves.
        latency_s: Of ``seconds``, hops.
        transfer_s: Of ``seconds``, bytes over the slowest level.
        protocols: Lines of time by size that its calls of the library take.
        bottleneck: Level that its bytes keep busy longest.
        sent_bytes: By level, of a rank, mean over the group.
        processors: SMs or CUs of a rank that it holds, or cores of a CPU; None where not known.
        basis: What ``seconds`` rests on.
    """

    method: str
    seconds: float
    launch_s: float
    latency_s: float
    transfer_s: float
    protocols: tuple[str, ...]
    bottleneck: str
    sent_bytes: dict[str, float]
    processors: float | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class AtSize:
    """All ways at one size, the library's first.

    Attributes:
        size_bytes: S as in nccl-tests.
        prices: Of what can run.
        cheapest: Of what a plan can hold.
        cheapest_s: Its seconds.
        margin: How much longer the next takes, a fraction; None where there is no other.
        library_default: What the library takes by itself; None where it has no choice, or nobody
            knows.
        default_loses: How much longer that takes than the cheapest, a fraction.
        bound_s: Below which no algorithm comes at nominal rates.
    """

    size_bytes: int
    prices: tuple[Price, ...]
    cheapest: str
    cheapest_s: float
    margin: float | None
    library_default: str | None
    default_loses: float | None
    bound_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One operation on one group.

    Attributes:
        op: Operation.
        framework: Whose calls a plan can hold.
        ways: All that there are, those of no avail included.
        sizes: In the order asked for.
        thresholds: The cheapest by size, of what a plan can hold.
    """

    op: Collective
    framework: Framework
    ways: tuple[Way, ...]
    sizes: tuple[AtSize, ...]
    thresholds: tuple[SizeThreshold, ...]


def check_algorithms(fabric: Fabric, ops: Iterable[Collective], names: Iterable[str]) -> None:
    """Refuse algorithms that nobody has for any of ``ops``.

    Raises:
        UnknownNameError: One of ``names`` is such.
    """
    ops = tuple(ops)
    known = sorted({method.algorithm for op in ops for method in known_methods(fabric, op)})
    for name in names:
        if name not in known:
            of = ops[0] if len(ops) == 1 else "these operations"
            remedy = f"known for {of}: {', '.join(known)}"
            raise UnknownNameError("algorithm", name, known, remedy=remedy)


def compare_methods(
    op: Collective,
    fabric: Fabric,
    group: Group,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    algorithms: Collection[str] = (),
    framework: Framework = "executor",
) -> Comparison:
    """Return every way to run ``op`` on a group (one row) by size.

    Args:
        op: Operation.
        fabric: Levels and library.
        group: One row, of two ranks or more.
        sizes_bytes: S as in nccl-tests.
        algorithms: The only ones to list; none lists all. The cheapest is that of all.
        framework: Whose calls a plan can hold: the library's own, and with "executor" ours too.

    Raises:
        InvalidInputError: A size is not between 1 byte and a petabyte, or nothing here runs ``op``.
    """
    legal = legal_methods(fabric, framework, op)
    if not legal:
        raise InvalidInputError(
            f"op={op}: {fabric.library} on {fabric.topology} has no way to run it; try another, "
            "for example all_reduce",
            where="op",
        )
    for size in sizes_bytes:
        if not 1 <= size <= _MOST_BYTES:
            raise InvalidInputError(
                f"size={size:,}: need bytes from 1 to {_MOST_BYTES:,}, as nccl-tests counts them, "
                "for example 1048576",
                where="size",
            )
    ways = {
        method: _way(fabric, op, method, group, framework)
        for method in known_methods(fabric, op)
        if not algorithms or method.algorithm in algorithms
    }
    running = [method for method, way in ways.items() if not way.why_not]
    sizes, wide = np.array(sizes_bytes, dtype=float), group.repeat(len(sizes_bytes))
    prices = [_prices(op, method, fabric, wide, sizes) for method in running]
    chosen = choose(op, fabric, wide, sizes, legal)
    library = library_methods(fabric, op)
    taken = library_default(op, fabric, wide, sizes) if chooses_knowingly(fabric, op) else None
    default_s = np.choose(
        0 if taken is None else taken,
        [collective_terms(op, one, fabric, wide, sizes).total_s() for one in library],
    )
    bound = lower_bound_s(op, fabric, wide, sizes)
    found = []
    for number, size in enumerate(sizes_bytes):
        here = tuple(of_method[number] for of_method in prices)
        best_s, next_s = float(chosen.seconds[number]), float(chosen.runner_up_s[number])
        default = None if taken is None else str(library[taken[number]])
        found.append(
            AtSize(
                size_bytes=size,
                prices=here,
                cheapest=str(legal[chosen.index[number]]),
                cheapest_s=best_s,
                margin=next_s / best_s - 1 if len(legal) > 1 and np.isfinite(next_s) else None,
                library_default=default,
                default_loses=None if taken is None else float(default_s[number]) / best_s - 1,
                bound_s=float(bound[number]),
            )
        )
    best = thresholds(op, fabric, group, legal)
    return Comparison(op, framework, tuple(ways.values()), tuple(found), best)


def comparison_document(
    fabric: Fabric, group: Group, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """Return comparisons on one group as JSON has them, with the levels that they talk of."""
    levels = [
        {
            "name": level.name,
            "kind": level.kind,
            "path": level.path,
            "members": int(members[0]),
            "bytes_per_s": level.bytes_per_s,
            "alpha_s": level.alpha_s,
            "measured": level.measured,
            "source": level.source,
        }
        for level, members in zip(fabric.levels, group.members, strict=True)
    ]
    return {
        "topology": fabric.topology,
        "num_nodes": fabric.num_gpus // fabric.gpus_per_node,
        "ranks": int(group.degree[0]),
        "stride": int(group.stride[0]),
        "library": fabric.library,
        "levels": levels,
        "operations": [
            {
                **asdict(one),
                "thresholds": [step.model_dump(mode="json") for step in one.thresholds],
            }
            for one in comparisons
        ],
    }


def _way(fabric: Fabric, op: Collective, method: Method, group: Group, framework: Framework) -> Way:
    others = dict(OTHER_METHODS.get(fabric.library, {}).get(op, ()))
    rules = [r for r in library_rules(fabric.library, op) if Method(r.algorithm) == method]
    run_by: RunBy = "library"
    why, since = (rules[0].why, rules[0].since) if rules else ("", "")
    if method in others:
        run_by, why = "others", others[method]
    elif method in OWN_METHODS[fabric.library].get(op, ()):
        run_by, why = "executor", "groups and calls of our executor"
    reason = why_not(fabric, op, method, group)
    if not reason and run_by == "executor" and framework != "executor":
        reason = f"{fabric.library} does not have it, our executor has: --framework executor"
    return Way(str(method), run_by, why, since, reason)


def _prices(
    op: Collective, method: Method, fabric: Fabric, group: Group, sizes_bytes: Column
) -> list[Price]:
    """Return one price a row."""
    told = explain_call(op, method, fabric, group, sizes_bytes)
    sent = bytes_per_level(op, method, fabric, group, sizes_bytes)
    names = [level.name for level in fabric.levels]
    bases = bases_of(op, method, fabric, group, sizes_bytes)
    total_s, busiest = told.terms.total_s(), told.bottleneck()
    held = np.full(len(sizes_bytes), np.nan)
    if needs_no_processor(method):
        held = np.zeros(len(sizes_bytes))
    elif method in library_methods(fabric, op):
        held = processors_taken(op, fabric, group, sizes_bytes)
    return [
        Price(
            method=str(method),
            seconds=float(total_s[row]),
            launch_s=float(told.terms.fixed_s[row]),
            latency_s=float(told.terms.latency_s[row]),
            transfer_s=float(told.terms.transfer_s[row]),
            protocols=tuple(str(names_of[row]) for names_of in told.protocols),
            bottleneck=names[busiest[row]],
            sent_bytes={name: float(column[row]) for name, column in zip(names, sent, strict=True)},
            processors=None if np.isnan(held[row]) else float(held[row]),
            basis=bases[row],
        )
        for row in range(len(sizes_bytes))
    ]
