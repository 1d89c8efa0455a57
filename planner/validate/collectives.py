"""Predictions of published collective measurements, by the planner's own compiler and prices.

Nothing is fitted here and no outcome is seen: a ``Question`` goes in. Questions about one machine,
call and choice of methods are priced in one vectorised call.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.cost.collectives import choose, library_methods
from planner.errors import InvalidInputError
from planner.layout.groups import lay_group
from planner.methods import OWN_METHODS
from planner.plan import Collective, Method
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from planner.validate.machines import Machine, machine_document, machine_of
from planner.validate.rows import Question

__all__ = ["Prediction", "is_forced", "predict", "predictions_csv"]

# Words that say that the library chose.
_BY_LIBRARY: Final = {"-", "auto", "default", "baseline", "nccl", "rccl", "hccl", "oneccl"}
# What a source calls an algorithm, brackets left out -> what it may mean here.
_ONE_SHOT, _TWO_SHOT = Method("one_shot"), Method("two_shot")
_SENDS: Final = (Method("direct"), Method("point_to_point"))
_NAMED: Final[dict[str, tuple[Method, ...]]] = {
    "ring": (Method("ring"),),
    "tree": (Method("tree"),),
    "nvls": (Method("nvls"),),
    "nvlstree": (Method("nvls_tree"),),
    "collnet": (Method("collnet"),),
    "pat": (Method("pat"),),
    "p2p": _SENDS,
    "direct": _SENDS,
    "oneshot multicast": (_ONE_SHOT,),
    "twoshot multicast": (_TWO_SHOT,),
    "twoshot multicast lamport": (_TWO_SHOT,),
    "vllm custom/graph": (_ONE_SHOT, _TWO_SHOT),
    "sdma": (Method("copy_engine", "mori"), Method("copy_engine", "nccl_zero_cta")),
}
# Expert parallelism: their sizes are those of tokens.
_BY_TOKENS: Final = ("deepep", "uccl-ep", "nccl-ep", "nvlinktwosided", "nvlinkonesided")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is said of one question: seconds, or why there are none.

    Attributes:
        id: Of the question.
        time_s: None where the question was skipped.
        method: By which the call is done, for those seconds.
        assumptions: What the columns leave open, in sentences.
        skipped_reason: Empty where there are seconds.
    """

    id: str
    time_s: float | None
    method: Method | None = None
    assumptions: tuple[str, ...] = ()
    skipped_reason: str = ""


def predict(questions: Sequence[Question]) -> list[Prediction]:
    """Return a prediction for each question, in their order.

    Args:
        questions: As ``planner.validate.rows.without_outcomes`` makes them.
    """
    said: dict[int, Prediction] = {}
    alike = defaultdict[tuple[Machine, Collective, tuple[Method, ...]], list[int]](list)
    built = {machine: _built(machine) for machine in dict.fromkeys(map(machine_of, questions))}
    for number, question in enumerate(questions):
        machine = machine_of(question)
        try:
            fabric, _ = _fabric(built[machine], question)
            alike[machine, question.op, _methods(question, fabric)].append(number)
        except InvalidInputError as exc:
            said[number] = Prediction(question.id, None, skipped_reason=str(exc))
    for (machine, _, methods), numbers in alike.items():
        asked = [questions[number] for number in numbers]
        fabric, assumptions = _fabric(built[machine], asked[0])
        found = _priced(asked, fabric, methods, assumptions)
        said.update(zip(numbers, found, strict=True))
    return [said[number] for number in range(len(questions))]


def is_forced(question: Question) -> bool:
    """Return whether the source made the library take an algorithm, or brought its own.

    What is only claimed is no proof: the library may have chosen another.
    """
    claimed = "claimed" in question.algorithm.lower()
    return not claimed and not set(_named(question).split()) <= _BY_LIBRARY


def predictions_csv(predictions: Iterable[Prediction]) -> str:
    """Return the predictions as a table, one line each."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("id", "predicted_time_s", "assumptions", "skipped_reason"))
    for p in predictions:
        time_s = "" if p.time_s is None else f"{p.time_s:.9g}"
        lines.writerow((p.id, time_s, "; ".join(p.assumptions), p.skipped_reason))
    return text.getvalue()


def _named(question: Question) -> str:
    """Return the name of the algorithm, without what stands in brackets."""
    return question.algorithm.lower().partition("(")[0].strip()


def _built(machine: Machine) -> tuple[Fabric, tuple[str, ...]] | str:
    """Return the fabric of a machine and what it assumes, or why there is none."""
    try:
        document = machine_document(machine)
        return compile_fabric(document), document.assumptions
    except InvalidInputError as exc:
        return str(exc)


def _fabric(
    built: tuple[Fabric, tuple[str, ...]] | str, question: Question
) -> tuple[Fabric, tuple[str, ...]]:
    """Return the fabric, of a question that can be priced on it.

    Raises:
        InvalidInputError: With the reason why it cannot.
    """
    if question.algorithm.lower().startswith(_BY_TOKENS):
        raise InvalidInputError(
            f"the size of {question.algorithm!r} is that of tokens, not S of nccl-tests",
            where="algorithm",
        )
    if question.size_bytes is None:
        raise InvalidInputError("size_bytes is not given", where="size_bytes")
    if question.num_ranks == 1:
        raise InvalidInputError("one rank makes no call", where="n_ranks")
    if isinstance(built, str):
        raise InvalidInputError(built, where="gpu")
    return built


def _methods(question: Question, fabric: Fabric) -> tuple[Method, ...]:
    """Return the methods that "algorithm" may mean, of those that are priced.

    Raises:
        InvalidInputError: None of them is.
    """
    op, library = question.op, fabric.library
    own = library_methods(fabric, op)
    if not is_forced(question):
        if not own:
            raise InvalidInputError(f"no method of {library} is priced for {op}", where="op")
        return own
    named = _named(question)
    if named not in _NAMED:
        raise InvalidInputError(f"no method is known for {question.algorithm!r}", where="algorithm")
    priced = (*own, *OWN_METHODS[library].get(op, ()))
    found = tuple(method for method in _NAMED[named] if method in priced)
    if not found:
        raise InvalidInputError(
            f"{question.algorithm!r} is not priced for {op} of {library}", where="algorithm"
        )
    return found


def _priced(
    questions: Sequence[Question],
    fabric: Fabric,
    methods: tuple[Method, ...],
    assumptions: tuple[str, ...],
) -> list[Prediction]:
    """Return the seconds of questions that differ in their ranks and sizes alone."""
    degree = np.array([question.num_ranks for question in questions])
    group = lay_group(fabric, degree, np.ones_like(degree))
    sizes = np.array([question.size_bytes for question in questions], dtype=float)
    found = choose(questions[0].op, fabric, group, sizes, methods)
    return [
        Prediction(question.id, time_s, methods[index], assumptions)
        if np.isfinite(time_s)
        else Prediction(question.id, None, skipped_reason=f"{methods[index]} cannot run here")
        for question, time_s, index in zip(
            questions, found.seconds.tolist(), found.index.tolist(), strict=True
        )
    ]
