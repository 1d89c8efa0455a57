"""Alpha and bandwidth of every level, from collectives of all sizes and methods together.

Fitted in logarithms against the function that prices them: ring and hierarchy share the links they
go over. What the calls do not show (a level whose bytes hide behind a slower one, latency where
there is one size) stays near its prior.

Twice: all calls together, which prices what was not measured by itself; and each operation by each
path alone, with what posting a message takes. There nothing is derived from another: gloo's
reduce_scatter is an emulated all_reduce, and shared memory copies where messages are sent. Where
all methods measured post to all at once, hop and posts are known by their sum only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from planner.calibrate.apply import fitted_fabric
from planner.cost.collectives import collective_terms
from planner.cost.rates import achieved_bytes_per_s, calls_of
from planner.errors import InvalidInputError
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.plan import CallFit, CallPath, Collective, LevelFit, Method
from planner.topology.checks import BANDWIDTH_RANGE_BYTES_PER_S, LATENCY_RANGE_S
from planner.topology.fabric import CallLevels, Fabric, Level

__all__ = ["WORST_RESIDUAL", "Transfer", "check_range", "fit_transfers"]

# A fit whose median point is off by its own size says nothing.
WORST_RESIDUAL: Final = 1.0
# A measured call is trusted to 5 %, a prior to a factor of e: the ratio weighs them.
_PRIOR_WEIGHT: Final = 0.05
# Of the quickest call: a hop, where the prior has no latency, whose logarithm is no place to start.
_SHARE_OF_A_HOP: Final = 0.1
# Enough to make any level the slowest.
_FAR_SLOWER: Final = 1000.0
# Relative errors beyond this count linearly: a disturbed call is no physics.
_ROBUST_ABOVE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective at one size: its group on the levels, and how long it took.

    Attributes:
        fabric: Priors of the cluster as that run saw it.
        op: Operation.
        method: How it was done, and by whom.
        group: Of one row, with more than one member, on the levels of ``fabric``.
        size_bytes: S, shape [1].
        seconds: Of the call on the rank that waited least.
    """

    fabric: Fabric
    op: Collective
    method: Method
    group: Group
    size_bytes: Column
    seconds: float


def fit_transfers(transfers: Sequence[Transfer]) -> tuple[list[LevelFit], list[CallFit]]:
    """Return what the transfers say of every level, and of each operation by each path.

    Calls of all paths count for a level, each by what its path makes of it: where one path was
    measured alone, the others must not look better for want of a measurement.

    Raises:
        InvalidInputError: No latency and bandwidth that links can have explain the calls.
    """
    if not transfers:
        return [], []
    bare = _on_other_fabrics(transfers, lambda fabric: replace(fabric, calls=()))
    levels, _ = _fit(bare, _seen_by_library, _levels_replaced, "all calls", with_issue=False)
    fitted = _on_other_fabrics(
        bare, lambda fabric: fitted_fabric(fabric, levels, source="fitted to the runs")
    )
    by_call: dict[tuple[Collective, CallPath], list[Transfer]] = defaultdict(list)
    for one in fitted:
        by_call[one.op, one.method.path].append(one)
    calls = []
    for (op, path), of_call in sorted(by_call.items()):
        what = f"{op} by {path}"
        fits, issue_s = _fit(of_call, _seen_by_path, _calls_replaced, what, with_issue=True)
        calls.append(CallFit(op=op, path=path, levels=tuple(fits), issue_s=issue_s))
    return levels, calls


def _on_other_fabrics(
    transfers: Sequence[Transfer], changed: Callable[[Fabric], Fabric]
) -> list[Transfer]:
    """Return the transfers on changed fabrics; those of one fabric share one as before."""
    fabrics = {id(one.fabric): one.fabric for one in transfers}
    others = {key: changed(fabric) for key, fabric in fabrics.items()}
    return [replace(one, fabric=others[id(one.fabric)]) for one in transfers]


def _seen_by_library(transfer: Transfer) -> CallLevels:
    return calls_of(transfer.fabric, transfer.op, "library")


def _levels_replaced(fabric: Fabric, found: CallLevels) -> Fabric:
    return replace(fabric, levels=found.levels)


def _seen_by_path(transfer: Transfer) -> CallLevels:
    return calls_of(transfer.fabric, transfer.op, transfer.method.path)


def _calls_replaced(fabric: Fabric, found: CallLevels) -> Fabric:
    return replace(fabric, calls=(found,))


def _fit(
    transfers: Sequence[Transfer],
    seen: Callable[[Transfer], CallLevels],
    with_figures: Callable[[Fabric, CallLevels], Fabric],
    what: str,
    *,
    with_issue: bool,
) -> tuple[list[LevelFit], float]:
    """Return the fits of the levels that some transfer uses, innermost first, and seconds a post.

    Args:
        transfers: At least one; of one library, and of one path to fit posts.
        seen: Levels and seconds a post to begin with.
        with_figures: Makes the fabric that prices transfers by others.
        what: The transfers in words.
        with_issue: Whether posting a message is fitted too; else it stays.
    """
    points: Counter[str] = Counter()
    priors: dict[str, Level] = {}
    for transfer in sorted(transfers, key=lambda transfer: len(transfer.fabric.levels)):
        for depth, level in enumerate(seen(transfer).levels):
            if _uses(transfer.group, depth):
                points[level.name] += 1
                priors.setdefault(level.name, level)
    measured_s = np.array([transfer.seconds for transfer in transfers])
    hop_s = float(measured_s.min()) * _SHARE_OF_A_HOP
    figures = [(level.alpha_s or hop_s, achieved_bytes_per_s(level)) for level in priors.values()]
    prior_issue_s = seen(transfers[0]).issue_s
    start = np.log([*chain(*figures), *([prior_issue_s] if with_issue else [])])

    def figures_at(logs: Column) -> tuple[dict[str, tuple[float, float]], float]:
        values = np.exp(logs).tolist()
        issue_s = values.pop() if with_issue else prior_issue_s
        return dict(zip(priors, zip(values[::2], values[1::2], strict=True), strict=True)), issue_s

    def ratios(logs: Column) -> Column:
        by_level, issue_s = figures_at(logs)
        found = np.empty(len(transfers))
        for numbers in _alike(transfers):
            first = transfers[numbers[0]]
            before = seen(first)
            levels = tuple(_at(level, by_level.get(level.name)) for level in before.levels)
            fabric = with_figures(first.fabric, replace(before, levels=levels, issue_s=issue_s))
            found[numbers] = _seconds(fabric, [transfers[number] for number in numbers])
        return found / measured_s

    def residuals(logs: Column) -> Column:
        return np.concatenate([np.log(ratios(logs)), _PRIOR_WEIGHT * (logs - start)])

    found = min(
        (
            least_squares(residuals, begin, loss="soft_l1", f_scale=_ROBUST_ABOVE)
            for begin in _starts(start, len(priors))
        ),
        key=lambda result: float(result.cost),
    ).x
    residual = float(np.median(np.abs(ratios(found) - 1)))
    fitted, issue_s = figures_at(found)
    for name, (alpha_s, bytes_per_s) in fitted.items():
        _check_level(name, alpha_s, bytes_per_s, what)
    check_range(f"posting a message of {what} at {issue_s:.3g} s", issue_s, LATENCY_RANGE_S)
    if residual > WORST_RESIDUAL:
        raise InvalidInputError(
            f"the {len(transfers)} timings of {what} follow no latency and bandwidth: the best are "
            f"off by {residual:.0%} at the median; need at most {WORST_RESIDUAL:.0%}; time again "
            "on a machine that does nothing else",
            where="ranks.collectives",
        )
    fits = [
        LevelFit(
            level=name,
            alpha_s=alpha_s,
            bytes_per_s=bytes_per_s,
            num_points=points[name],
            residual=residual,
        )
        for name, (alpha_s, bytes_per_s) in fitted.items()
    ]
    return fits, issue_s


def _at(level: Level, figures: tuple[float, float] | None) -> Level:
    if figures is None:
        return level
    alpha_s, bytes_per_s = figures
    return replace(level, alpha_s=alpha_s, bytes_per_s=bytes_per_s, measured=True)


def _starts(prior: Column, num_levels: int) -> list[Column]:
    """Return where to begin: at the prior, and there with each of several levels far slower.

    A level that the prior hides behind another shows no slope by which it could become the slowest.

    Args:
        prior: Logarithms of alpha and bytes/s of the levels by turns, and of others.
        num_levels: How many levels.
    """
    rates = range(1, 2 * num_levels, 2) if num_levels > 1 else ()
    return [prior, *(prior - np.log(_FAR_SLOWER) * (np.arange(len(prior)) == at) for at in rates)]


def _uses(group: Group, depth: int) -> bool:
    """Return whether the group has more members on the level than below it."""
    below = int(group.members[depth - 1][0]) if depth else 1
    return int(group.members[depth][0]) > below


def _alike(transfers: Sequence[Transfer]) -> list[list[int]]:
    """Return the numbers of transfers of one fabric, operation, method and group."""
    together: dict[tuple[int, Collective, Method, int], list[int]] = defaultdict(list)
    for number, one in enumerate(transfers):
        together[id(one.fabric), one.op, one.method, id(one.group)].append(number)
    return list(together.values())


def _seconds(fabric: Fabric, alike: Sequence[Transfer]) -> Column:
    """Return the predicted seconds of transfers that differ in size alone."""
    first = alike[0]
    sizes = np.concatenate([transfer.size_bytes for transfer in alike])
    group = first.group.repeat(len(alike))
    return collective_terms(first.op, first.method, fabric, group, sizes).total_s()


def _check_level(name: str, alpha_s: float, bytes_per_s: float, what: str) -> None:
    level = f"level {name!r} of {what}"
    check_range(f"{level} at {alpha_s:.3g} s a hop", alpha_s, LATENCY_RANGE_S)
    rate = f"{level} at {bytes_per_s:.3g} bytes/s"
    check_range(rate, bytes_per_s, BANDWIDTH_RANGE_BYTES_PER_S)


def check_range(what: str, value: float, allowed: tuple[float, float]) -> None:
    """Return if a fitted ``value`` is one that machines have.

    Raises:
        InvalidInputError: It lies outside ``allowed``, both ends of which are possible.
    """
    if not allowed[0] <= value <= allowed[1]:
        raise InvalidInputError(
            f"the timings put {what}; possible is {allowed[0]:g} to {allowed[1]:g}; check that "
            "they are in seconds and sizes in bytes",
            where="ranks",
        )
