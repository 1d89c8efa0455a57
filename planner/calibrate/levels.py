"""Alpha and bandwidth of every level, from collectives of all sizes and methods together.

Fitted in logarithms against the function that prices them: ring and hierarchy share the links they
go over. What the calls do not show (a level whose bytes hide behind a slower one, latency where
there is one size) stays near its prior.

Twice: all of the library's calls together, which prices what was not measured by itself; and each
operation by each path alone. There nothing is derived from another: gloo's reduce_scatter is an
emulated all_reduce, and shared memory copies where messages are sent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from planner.calibrate.apply import fitted_fabric, with_calls
from planner.cost.collectives import achieved_bytes_per_s, collective_terms, levels_for
from planner.errors import InvalidInputError
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.plan import CallFit, CallPath, Collective, LevelFit, Method
from planner.topology.checks import BANDWIDTH_RANGE_BYTES_PER_S, LATENCY_RANGE_S
from planner.topology.fabric import CallLevels, Fabric, Level

__all__ = ["WORST_RESIDUAL", "Transfer", "check_range", "fit_calls", "fit_levels"]

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

Levels = tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective at one size: its group on the levels, and how long it took.

    Attributes:
        op: Operation.
        method: How it was done, and by whom.
        group: Of one row, with more than one member.
        size_bytes: S, shape [1].
        seconds: Of the call on the rank that waited least.
    """

    op: Collective
    method: Method
    group: Group
    size_bytes: Column
    seconds: float


def fit_levels(fabric: Fabric, transfers: Iterable[Transfer]) -> tuple[Fabric, list[LevelFit]]:
    """Return the fabric with every level refitted that calls of the library span, and the fits.

    Raises:
        InvalidInputError: No latency and bandwidth that links can have explain the calls.
    """
    of_library = [transfer for transfer in transfers if transfer.method.path == "library"]
    if not of_library:
        return fabric, []
    fits = _fit(
        of_library,
        fabric.levels,
        lambda levels: replace(fabric, levels=levels, calls=()),
        "calls of the library",
    )
    return fitted_fabric(fabric, fits, source="fitted to the runs"), fits


def fit_calls(fabric: Fabric, transfers: Iterable[Transfer]) -> tuple[Fabric, list[CallFit]]:
    """Return the fabric with what the transfers say of each operation and path, and the fits.

    Args:
        fabric: Priors.
        transfers: On that fabric.

    Raises:
        InvalidInputError: As ``fit_levels``.
    """
    by_call: dict[tuple[Collective, CallPath], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_call[transfer.op, transfer.method.path].append(transfer)
    fits = []
    for (op, path), found in sorted(by_call.items()):

        def seen(levels: Levels, op: Collective = op, path: CallPath = path) -> Fabric:
            return replace(fabric, calls=(CallLevels(op, path, levels),))

        levels = _fit(found, levels_for(fabric, op, path), seen, f"{op} by {path}")
        fits.append(CallFit(op=op, path=path, levels=tuple(levels)))
    return with_calls(fabric, fits), fits


def _fit(
    transfers: Sequence[Transfer], prior: Levels, seen: Callable[[Levels], Fabric], what: str
) -> list[LevelFit]:
    """Return the fits of the levels that some transfer uses.

    Args:
        transfers: At least one.
        prior: Levels to begin with.
        seen: Makes the fabric that prices the transfers.
        what: The transfers in words.
    """
    points = [sum(_uses(t.group, depth) for t in transfers) for depth in range(len(prior))]
    used = [depth for depth, count in enumerate(points) if count]
    measured_s = np.array([transfer.seconds for transfer in transfers])
    hop_s = float(measured_s.min()) * _SHARE_OF_A_HOP
    start = np.log(
        [(prior[depth].alpha_s or hop_s, achieved_bytes_per_s(prior[depth])) for depth in used]
    ).ravel()

    def levels_at(logs: Column) -> Levels:
        figures = dict(zip(used, np.exp(logs).reshape(-1, 2).tolist(), strict=True))
        return tuple(
            replace(level, alpha_s=figures[depth][0], bytes_per_s=figures[depth][1], measured=True)
            if depth in figures
            else level
            for depth, level in enumerate(prior)
        )

    def ratios(logs: Column) -> Column:
        return _seconds(seen(levels_at(logs)), transfers) / measured_s

    def residuals(logs: Column) -> Column:
        return np.concatenate([np.log(ratios(logs)), _PRIOR_WEIGHT * (logs - start)])

    found = min(
        (
            least_squares(residuals, begin, loss="soft_l1", f_scale=_ROBUST_ABOVE)
            for begin in _starts(start)
        ),
        key=lambda result: float(result.cost),
    ).x
    residual = float(np.median(np.abs(ratios(found) - 1)))
    fitted = levels_at(found)
    for depth in used:
        _check_level(fitted[depth], what)
    if residual > WORST_RESIDUAL:
        raise InvalidInputError(
            f"the {len(transfers)} timings of {what} follow no latency and bandwidth: the best are "
            f"off by {residual:.0%} at the median; need at most {WORST_RESIDUAL:.0%}; time again "
            "on a machine that does nothing else",
            where="ranks.collectives",
        )
    return [
        LevelFit(
            level=fitted[depth].name,
            alpha_s=fitted[depth].alpha_s,
            bytes_per_s=fitted[depth].bytes_per_s,
            num_points=points[depth],
            residual=residual,
        )
        for depth in used
    ]


def _starts(prior: Column) -> list[Column]:
    """Return where to begin: at the prior, and there with each of several levels far slower.

    A level that the prior hides behind another shows no slope by which it could become the slowest.

    Args:
        prior: Logarithms of alpha and bytes/s by turns, shape [2 * levels].
    """
    rates = range(1, len(prior), 2) if len(prior) > 2 else ()
    return [prior, *(prior - np.log(_FAR_SLOWER) * (np.arange(len(prior)) == at) for at in rates)]


def _uses(group: Group, depth: int) -> bool:
    """Return whether the group has more members on the level than below it."""
    below = int(group.members[depth - 1][0]) if depth else 1
    return int(group.members[depth][0]) > below


def _seconds(fabric: Fabric, transfers: Sequence[Transfer]) -> Column:
    """Return the predicted seconds of every transfer, those of one method and group at once."""
    found = np.empty(len(transfers))
    together: dict[tuple[Collective, Method, int], list[int]] = defaultdict(list)
    for number, transfer in enumerate(transfers):
        together[transfer.op, transfer.method, id(transfer.group)].append(number)
    for (op, method, _), numbers in together.items():
        sizes = np.concatenate([transfers[number].size_bytes for number in numbers])
        group = transfers[numbers[0]].group.repeat(len(numbers))
        found[numbers] = collective_terms(op, method, fabric, group, sizes).total_s()
    return found


def _check_level(level: Level, what: str) -> None:
    name = f"level {level.name!r} of {what}"
    check_range(f"{name} at {level.alpha_s:.3g} s a hop", level.alpha_s, LATENCY_RANGE_S)
    rate = f"{name} at {level.bytes_per_s:.3g} bytes/s"
    check_range(rate, level.bytes_per_s, BANDWIDTH_RANGE_BYTES_PER_S)


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
