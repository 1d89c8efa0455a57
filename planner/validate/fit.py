"""How a library's calls run on an architecture, fitted to measured calls.

The lines of ``planner.hardware.protocols`` are fitted in logarithms against the function that
prices them. What the rows of one architecture do not show stays near the mean of the others that
were measured widely, and those near ``START``, which is NCCL's own tuning model (NCCL 2.30.7,
src/graph/tuning.cc) in round figures. A curve (one machine, operation and number of
ranks) counts as one, however many sizes it has, and its small and its large messages alike. Errors
beyond ``_ROBUST_ABOVE`` count linearly: that calls start late on one site is no physics.

First what happens inside hosts, for every architecture by itself, from calls on one node; then what
happens between hosts, for all of them together, from calls on several whose NICs are known.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from planner.hardware.protocols import Family, Protocol, Protocols, protocols_key
from planner.layout.candidates import Column
from planner.validate.collectives import Batch, Prediction, batches_of, predict
from planner.validate.rows import Outcome, Question, Row, outcome_of, without_outcomes
from planner.validate.scores import LARGE_BYTES

__all__ = ["START", "Measured", "fit_protocols", "leave_one_out", "measured_calls"]

# Relative errors beyond this count linearly.
_ROBUST_ABOVE: Final = 0.1
# A curve is trusted to 5 %, a start to a factor of e: the ratio weighs them. Hops are those of the
# links, a copy costs less than a send, and calls start as on other GPUs, but for a reason; networks
# are few.
_PRIOR_WEIGHT: Final = 0.05
_NETWORK_WEIGHT: Final = 0.1
_KNOWN_WEIGHT: Final = 0.15
_KNOWN: Final = ("hop", "own")
# What a source says of its rows, and what then does not count: a replayed graph has no launch. Of
# kernels beside the library nothing else is published.
_GRAPH: Final = "graph"
_ALWAYS_GRAPHS: Final = ("vllm", "oneshot", "twoshot")
_NOISY: Final = "noisy"
# Of what large transfers are taken to reach: then it is the nominal rate (``ACHIEVED_FRACTION``).
_MOST_SHARE: Final = 1.25
_MOST_NETWORK_SHARE: Final = 1.06
_MAX_STEPS: Final = 40
# So many curves make an architecture one that others are held near.
_WIDE: Final = 20

START: Final = Protocols(
    lines={
        "ring": (
            Protocol("ll, few channels", 7e-6, 1.0, 0.02, 1.0, 0.05),
            Protocol("ll", 9e-6, 1.0, 0.3, 1.0, 0.5),
            Protocol("ll128", 14e-6, 1.0, 0.75, 1.7, 0.9375),
            Protocol("simple", 25e-6, 3.0, 1.0, 2.8, 1.0),
        ),
        "switch": (
            Protocol("simple, few channels", 25e-6, 0.0, 0.45, 2.8, 1.0),
            Protocol("simple", 70e-6, 0.0, 0.73, 2.8, 1.0),
        ),
        "direct": (
            Protocol("ll", 8e-6, 1.0, 0.1, 1.0, 0.5),
            Protocol("simple, few channels", 12e-6, 1.0, 0.6, 2.8, 1.0),
            Protocol("simple", 25e-6, 1.0, 0.9, 2.8, 1.0),
        ),
        "copy": (Protocol("simple", 4e-6, 1.0, 0.3, 2.8, 1.0),),
    },
    own_share={"ring": 0.3, "switch": 0.0, "direct": 0.3, "copy": 0.0},
    source="NCCL 2.30.7 src/graph/tuning.cc, in round figures",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls that are priced in one go, and what they took.

    Attributes:
        machine: As the source calls it: what is left out together.
        key: Of ``protocols.json``; None where the library has no lines.
        batch: The calls.
        seconds: Measured, shape [rows].
        nics_known: Whether the source says what joins its nodes.
        num_nodes: That take part.
    """

    machine: str
    key: str | None
    batch: Batch
    seconds: Column
    nics_known: bool
    num_nodes: int

    def logs(self, protocols: Protocols) -> Column:
        """Return the logarithms of predicted over measured, shape [rows]."""
        return np.asarray(np.log(self.batch.seconds(protocols)[0] / self.seconds))

    def weights(self, in_curve: Mapping[tuple[object, ...], int]) -> Column:
        """Return the weight of every residual: each curve has 1 in all."""
        return np.array([in_curve[curve] for curve in self.curves()], dtype=float) ** -0.5

    def curves(self) -> list[tuple[object, ...]]:
        """Return the curve that each row belongs to."""
        return [
            (self.machine, self.batch.op, self.batch.methods, int(degree), size >= LARGE_BYTES)
            for degree, size in zip(self.batch.group.degree, self.batch.size_bytes, strict=True)
        ]


def measured_calls(rows: Sequence[Row]) -> list[Measured]:
    """Return the rows that can be priced and that count, in batches of one machine each."""
    by_machine: dict[str, list[tuple[Question, Outcome]]] = defaultdict(list)
    for row in rows:
        question, outcome = without_outcomes(row), outcome_of(row)
        if _counts(row, question, outcome):
            by_machine[outcome.machine].append((question, outcome))
    found = []
    for machine, pairs in by_machine.items():
        batches, _ = batches_of([question for question, _ in pairs])
        for batch in batches:
            first = pairs[batch.numbers[0]][0]
            seconds = np.array([pairs[number][1].time_s for number in batch.numbers])
            if not np.isfinite(batch.seconds(START)[0]).all():
                continue  # the method makes no sense for the group
            levels = batch.fabric.levels
            key = protocols_key(batch.fabric.architecture, levels[0].kind)
            nics = first.nics_per_node is not None
            found.append(Measured(machine, key, batch, seconds, nics, first.num_nodes))
    return found


def _counts(row: Row, question: Question, outcome: Outcome) -> bool:
    """Return whether a row says how long an eager call takes."""
    notes = row.cells.get("notes", "").lower()
    is_small = question.size_bytes is not None and question.size_bytes < LARGE_BYTES
    is_kernel = question.algorithm.lower().startswith(_ALWAYS_GRAPHS)
    is_odd = (_GRAPH in notes and not is_kernel) or (_NOISY in notes and is_small)
    return outcome.time_s is not None and not outcome.excluded and not is_odd


def fit_protocols(
    measured: Sequence[Measured], begin: Mapping[str, Protocols] | None = None
) -> dict[str, Protocols]:
    """Return the lines of every key that has calls on one node.

    Args:
        measured: Calls of all machines that are to count.
        begin: Where to begin looking; never where to end.
    """
    _, found = _fit_twice(_by_key(measured), begin or {})
    return _fit_between(measured, found)


def _fit_twice(
    by_key: Mapping[str, Sequence[Measured]], begin: Mapping[str, Protocols]
) -> tuple[dict[str, Protocols], dict[str, Protocols]]:
    """Return every key's lines near ``START``, and then near the other keys' lines."""
    first = {key: _fit_inside(own, START, begin.get(key)) for key, own in by_key.items()}
    return first, {
        key: _fit_inside(own, _prior(first, by_key, key), first[key]) for key, own in by_key.items()
    }


def _by_key(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Return the calls on one node by key."""
    found: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        if one.num_nodes == 1 and one.key is not None:
            found[one.key].append(one)
    return dict(found)


def _prior(
    first: Mapping[str, Protocols], by_key: Mapping[str, Sequence[Measured]], key: str
) -> Protocols:
    """Return the geometric mean of the other architectures that were measured widely.

    Args:
        first: Every key's lines, fitted near ``START``.
        by_key: Calls on one node.
        key: Of the architecture itself.
    """
    wide = [
        lines
        for other, lines in first.items()
        if other != key and len({c for one in by_key[other] for c in one.curves()}) >= _WIDE
    ]
    if not wide:
        return START
    means = [
        float(np.exp(np.mean([np.log(read(lines)) for lines in wide])))
        for read, _ in _INSIDE.values()
    ]
    return _written(START, _INSIDE.values(), means)


# ------------------------------------------------------------------------------ what is fitted

# One figure: read from, and put into, the lines.
_Read = Callable[[Protocols], float]
_Write = Callable[[Protocols, float], Protocols]


def _line_figure(family: Family, number: int, field: str) -> tuple[_Read, _Write]:
    def read(protocols: Protocols) -> float:
        return float(getattr(protocols.lines[family][number], field))

    def write(protocols: Protocols, value: float) -> Protocols:
        return _with(protocols, family, lambda at, _: at == number, field, value)

    return read, write


def _hop_figure(name: str) -> tuple[_Read, _Write]:
    """Of ring and direct lines but the ring's Simple, or of that alone."""
    is_simple = name == "simple"

    def read(protocols: Protocols) -> float:
        return protocols.lines["ring"][-1 if is_simple else 0].hop_ratio

    def write(protocols: Protocols, value: float) -> Protocols:
        last = len(protocols.lines["ring"]) - 1
        if is_simple:
            return _with(protocols, "ring", lambda at, _: at == last, "hop_ratio", value)
        protocols = _with(protocols, "ring", lambda at, _: at != last, "hop_ratio", value)
        return _with(protocols, "direct", lambda at, _: True, "hop_ratio", value)

    return read, write


def _own_figure(family: Family) -> tuple[_Read, _Write]:
    def read(protocols: Protocols) -> float:
        return protocols.own_share[family]

    def write(protocols: Protocols, value: float) -> Protocols:
        return replace(protocols, own_share={**protocols.own_share, family: value})

    return read, write


def _network_figure(name: str, field: str) -> tuple[_Read, _Write]:
    """Of one protocol in all families; few channels have a share of their own, and LL's hops."""
    is_share = field == "network_share"

    def belongs(line: Protocol) -> bool:
        if line.name == "ll, few channels":
            return name == (line.name if is_share else "ll")
        return line.name.split(",")[0] == name

    def read(protocols: Protocols) -> float:
        lines = (line for family in protocols.lines.values() for line in family)
        return next(float(getattr(line, field)) for line in lines if belongs(line))

    def write(protocols: Protocols, value: float) -> Protocols:
        for family in protocols.lines:
            protocols = _with(protocols, family, lambda _, line: belongs(line), field, value)
        return protocols

    return read, write


def _with(
    protocols: Protocols,
    family: Family,
    chosen: Callable[[int, Protocol], bool],
    field: str,
    value: float,
) -> Protocols:
    if field == "share":
        value = min(value, _MOST_SHARE)
    if field == "network_share":
        value = min(value, _MOST_NETWORK_SHARE)
    lines = tuple(
        replace(line, **{field: value}) if chosen(at, line) else line  # type: ignore[arg-type]
        for at, line in enumerate(protocols.lines[family])
    )
    return replace(protocols, lines={**protocols.lines, family: lines})


_INSIDE: Final[dict[tuple[str, str, str], tuple[_Read, _Write]]] = {
    **{
        (family, line.name, field): _line_figure(family, number, field)
        for family, lines in START.lines.items()
        for number, line in enumerate(lines)
        for field in ("launch_s", "share")
    },
    ("hop", "ll", ""): _hop_figure("ll"),
    ("hop", "simple", ""): _hop_figure("simple"),
    ("own", "ring", ""): _own_figure("ring"),
    ("own", "direct", ""): _own_figure("direct"),
}
_BETWEEN: Final[dict[tuple[str, str], tuple[_Read, _Write]]] = {
    **{
        (name, "hop"): _network_figure(name, "network_hop_ratio")
        for name in ("ll", "ll128", "simple")
    },
    **{
        (name, "share"): _network_figure(name, "network_share")
        for name in ("ll, few channels", "ll", "ll128", "simple")
    },
}


# --------------------------------------------------------------------------------------- fits


def _fit_inside(
    measured: Sequence[Measured], prior: Protocols, begin: Protocols | None
) -> Protocols:
    weights = [
        _KNOWN_WEIGHT if key[0] in _KNOWN or key[2] == "launch_s" else _PRIOR_WEIGHT
        for key in _INSIDE
    ]
    found = _solve(
        [read(prior) for read, _ in _INSIDE.values()],
        [read(begin or prior) for read, _ in _INSIDE.values()],
        np.array(weights),
        lambda values: _misses(measured, lambda _: _written(START, _INSIDE.values(), values)),
    )
    machines = ", ".join(dict.fromkeys(one.machine for one in measured))
    source = f"fitted to published calls on {machines}"
    return replace(_written(START, _INSIDE.values(), found), source=source)


def _fit_between(
    measured: Sequence[Measured], inside: Mapping[str, Protocols]
) -> dict[str, Protocols]:
    """Return the lines with what happens between hosts, the same in all of them."""
    several = [
        one for one in measured if one.num_nodes > 1 and one.nics_known and one.key in inside
    ]

    def all_written(values: Sequence[float]) -> dict[str, Protocols]:
        return {key: _written(one, _BETWEEN.values(), values) for key, one in inside.items()}

    def misses(values: Sequence[float]) -> Column:
        lines = all_written(values)
        return _misses(several, lambda one: lines[str(one.key)])

    start = [read(START) for read, _ in _BETWEEN.values()]
    weights = np.full(len(start), _NETWORK_WEIGHT)
    return all_written(_solve(start, start, weights, misses)) if several else dict(inside)


def _written(
    protocols: Protocols, figures: Iterable[tuple[_Read, _Write]], values: Sequence[float]
) -> Protocols:
    for (_, write), value in zip(figures, values, strict=True):
        protocols = write(protocols, value)
    return protocols


def _misses(measured: Sequence[Measured], lines: Callable[[Measured], Protocols]) -> Column:
    """Return weighted residuals, in which errors beyond ``_ROBUST_ABOVE`` count linearly."""
    in_curve = Counter(curve for one in measured for curve in one.curves())
    found = []
    for one in measured:
        logs = one.logs(lines(one)) / _ROBUST_ABOVE
        bent = np.sign(logs) * np.sqrt(2 * (np.sqrt(1 + logs**2) - 1)) * _ROBUST_ABOVE
        found.append(bent * one.weights(in_curve))
    return np.concatenate(found)


def _solve(
    start: Sequence[float],
    begin: Sequence[float],
    weights: Column,
    misses: Callable[[Sequence[float]], Column],
) -> list[float]:
    prior = np.log(start)

    def residuals(logs: Column) -> Column:
        return np.concatenate([misses(np.exp(logs).tolist()), weights * (logs - prior)])

    found = least_squares(residuals, np.log(begin), max_nfev=_MAX_STEPS).x
    return [float(value) for value in np.exp(found)]


def leave_one_out(rows: Sequence[Row], begin: Mapping[str, Protocols]) -> list[Prediction]:
    """Return predictions of every row by a fit on the rows of all other machines, in order.

    A machine has part in the lines of its own architecture, and in those between hosts; those are
    fitted anew without it. What its architecture is held near never had part in it.

    Args:
        rows: The table.
        begin: Lines to begin looking from, by key.
    """
    measured = measured_calls(rows)
    by_key = _by_key(measured)
    first, full = _fit_twice(by_key, begin)
    machines = [outcome_of(row).machine for row in rows]
    found: dict[int, Prediction] = {}
    for machine in dict.fromkeys(machines):
        numbers = [number for number, name in enumerate(machines) if name == machine]
        own = [one for one in measured if one.machine == machine]
        others = [one for one in measured if one.machine != machine]
        lines = dict(full)
        for key in {str(one.key) for one in own if one.num_nodes == 1 and one.key is not None}:
            rest, prior = _by_key(others).get(key, []), _prior(first, by_key, key)
            lines[key] = _fit_inside(rest, prior, prior) if rest else prior
        if any(one.num_nodes > 1 for one in own):
            lines = _fit_between(others, lines)
        questions = [without_outcomes(rows[number]) for number in numbers]
        found.update(zip(numbers, predict(questions, lines), strict=True))
    return [found[number] for number in range(len(rows))]
