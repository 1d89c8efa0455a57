"""How far predictions are from what was measured: by machine and class, and when ranking methods.

A class is single-node, two nodes, or three and more, each below and from 1 MiB. The error of a row
is |predicted - measured| / measured; of a machine in a class the median and the mean over its
rows; of a class the median over machines, so that a machine with many rows counts once. Rows whose
notes say EXCLUDE are counted and left out.

Of ``benchmarks/data/collectives.csv``, the machines "A100 SXM4 80GB HGX", "B200 HGX", "GB200 NVL
tray", "H100 HGX", "8x L40S PCIe server" and "8x RTX PRO 6000 server" are the same measurements of
ai-dynamo/aiconfigurator as ``nccl_single_node.csv.gz``, on which figures of the planner rest:
errors there are no test of those figures.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean, median
from typing import Final

from planner.validate.collectives import Prediction, is_forced
from planner.validate.rows import Outcome, Question, Row, outcome_of, without_outcomes

__all__ = ["BARS", "LARGE_BYTES", "ClassScore", "MachineScore", "Ranking", "Scores", "score"]

LARGE_BYTES: Final = 1 << 20
_SMALL: Final = "< 1 MiB"
_LARGE: Final = ">= 1 MiB"
_NODES: Final = {1: "single node", 2: "two nodes"}
_MORE_NODES: Final = "three and more"
# Of fewer the median says nothing.
_FEWEST_MACHINES: Final = 3
# What the median over machines should stay below; no bar is set for more nodes.
BARS: Final[Mapping[tuple[str, str], float]] = {
    ("single node", _LARGE): 0.08,
    ("single node", _SMALL): 0.15,
    ("two nodes", _LARGE): 0.15,
    ("two nodes", _SMALL): 0.30,
}


@dataclass(frozen=True, slots=True)
class MachineScore:
    """Errors of one machine in one class.

    Attributes:
        machine: As the source calls it.
        nodes: "single node", "two nodes", "three and more".
        size: "< 1 MiB" or ">= 1 MiB".
        num_rows: That have a prediction and a measured time.
        median_error: Of |predicted - measured| / measured.
        mean_error: Of the same.
        median_ratio: Of predicted over measured: below 1 is too fast.
    """

    machine: str
    nodes: str
    size: str
    num_rows: int
    median_error: float
    mean_error: float
    median_ratio: float


@dataclass(frozen=True, slots=True)
class ClassScore:
    """All machines in one class.

    Attributes:
        nodes: As of a machine.
        size: As of a machine.
        num_machines: That have rows in it.
        num_rows: Of all.
        median_error: Median of the machines' median errors.
        bar: That it should stay below; None where none is set.
        is_kept: Whether it does; None without a bar, and of too few machines to judge.
    """

    nodes: str
    size: str
    num_machines: int
    num_rows: int
    median_error: float
    bar: float | None
    is_kept: bool | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where two methods were forced for one call on one machine: does the model pick the faster?

    Attributes:
        num_pairs: Of rows that differ in the method alone.
        num_right: Whose faster one is the one predicted to be.
        lost_s: Over all pairs, measured seconds of the pick beyond those of the faster.
        best_s: Over all pairs, measured seconds of the faster.
        median_loss: Of the pairs where the pick is the slower, how much longer it takes, over the
            time of the faster; 0 without such pairs.
        worst_loss: The same, the greatest.
    """

    num_pairs: int
    num_right: int
    lost_s: float
    best_s: float
    median_loss: float
    worst_loss: float


@dataclass(frozen=True, slots=True)
class Scores:
    """All of it.

    Attributes:
        machines: By name, then class.
        classes: Over machines.
        ranking: Of forced methods.
        num_rows: Of the table.
        num_predicted: With a prediction.
        num_scored: That entered the scores.
        num_excluded: Marked EXCLUDE.
        num_unmeasured: With a prediction, but neither a time nor a bandwidth.
        skipped: Reason -> rows, most frequent first.
    """

    machines: tuple[MachineScore, ...]
    classes: tuple[ClassScore, ...]
    ranking: Ranking
    num_rows: int
    num_predicted: int
    num_scored: int
    num_excluded: int
    num_unmeasured: int
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Scored:
    question: Question
    prediction: Prediction
    machine: str
    predicted_s: float
    measured_s: float

    @property
    def kind(self) -> tuple[str, str]:
        size = self.question.size_bytes or 0
        return (
            _NODES.get(self.question.num_nodes, _MORE_NODES),
            _SMALL if size < LARGE_BYTES else _LARGE,
        )

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def score(rows: Sequence[Row], predictions: Sequence[Prediction]) -> Scores:
    """Return the scores of predictions of ``rows``, in their order."""
    outcomes = [outcome_of(row) for row in rows]
    scored = list(_scored(rows, outcomes, predictions))
    machines = _machine_scores(scored)
    made = [
        outcome
        for outcome, prediction in zip(outcomes, predictions, strict=True)
        if prediction.time_s is not None
    ]
    reasons = Counter(p.skipped_reason for p in predictions if p.time_s is None)
    return Scores(
        machines=machines,
        classes=_class_scores(machines),
        ranking=_ranking(scored),
        num_rows=len(rows),
        num_predicted=len(made),
        num_scored=len(scored),
        num_excluded=sum(outcome.excluded for outcome in outcomes),
        num_unmeasured=sum(o.time_s is None and not o.excluded for o in made),
        skipped=dict(reasons.most_common()),
    )


def _scored(
    rows: Sequence[Row], outcomes: Sequence[Outcome], predictions: Sequence[Prediction]
) -> Iterator[_Scored]:
    for row, outcome, prediction in zip(rows, outcomes, predictions, strict=True):
        if prediction.time_s is None or outcome.time_s is None or outcome.excluded:
            continue
        yield _Scored(
            without_outcomes(row), prediction, outcome.machine, prediction.time_s, outcome.time_s
        )


def _machine_scores(scored: Sequence[_Scored]) -> tuple[MachineScore, ...]:
    found = defaultdict[tuple[str, str, str], list[_Scored]](list)
    for one in scored:
        found[one.machine, *one.kind].append(one)
    return tuple(
        MachineScore(
            *key,
            num_rows=len(ones),
            median_error=median(one.error for one in ones),
            mean_error=fmean(one.error for one in ones),
            median_ratio=median(one.predicted_s / one.measured_s for one in ones),
        )
        for key, ones in sorted(found.items())
    )


def _class_scores(machines: Sequence[MachineScore]) -> tuple[ClassScore, ...]:
    classes = product((*_NODES.values(), _MORE_NODES), (_SMALL, _LARGE))
    found = {kind: [m for m in machines if (m.nodes, m.size) == kind] for kind in classes}
    return tuple(_class_score(*kind, members) for kind, members in found.items() if members)


def _class_score(nodes: str, size: str, members: Sequence[MachineScore]) -> ClassScore:
    bar = BARS.get((nodes, size))
    error = median(member.median_error for member in members)
    return ClassScore(
        nodes=nodes,
        size=size,
        num_machines=len(members),
        num_rows=sum(member.num_rows for member in members),
        median_error=error,
        bar=bar,
        is_kept=None if bar is None or len(members) < _FEWEST_MACHINES else error <= bar,
    )


def _ranking(scored: Sequence[_Scored]) -> Ranking:
    calls = defaultdict[tuple[object, ...], list[_Scored]](list)
    for one in scored:
        if is_forced(one.question):
            q = one.question
            calls[one.machine, q.op, q.num_nodes, q.num_ranks, q.size_bytes].append(one)
    pairs = [
        sorted(pair, key=lambda one: one.predicted_s)
        for ones in calls.values()
        for pair in combinations(ones, 2)
        if pair[0].prediction.method != pair[1].prediction.method
    ]
    wrong = [(pick, best) for pick, best in pairs if pick.measured_s > best.measured_s]
    losses = [pick.measured_s / best.measured_s - 1 for pick, best in wrong] or [0.0]
    return Ranking(
        num_pairs=len(pairs),
        num_right=len(pairs) - len(wrong),
        lost_s=sum(pick.measured_s - best.measured_s for pick, best in wrong),
        best_s=sum(min(one.measured_s for one in pair) for pair in pairs),
        median_loss=median(losses),
        worst_loss=max(losses),
    )
