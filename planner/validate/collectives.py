"""Predictions of published collective measurements, by the planner's own compiler and prices.

Nothing is fitted here and no outcome is seen: a ``Question`` goes in. Questions about one machine,
call and choice of methods are priced in one vectorised call.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from planner.cost.collectives import choose, collective_terms
from planner.cost.defaults import library_default, library_methods
from planner.errors import InvalidInputError
from planner.hardware.protocols import Protocols, protocols_key
from planner.layout.candidates import Column
from planner.layout.groups import Group, lay_group
from planner.methods import OTHER_METHODS, OWN_METHODS
from planner.plan import Collective, Method
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric
from planner.validate.machines import Machine, machine_document, machine_of
from planner.validate.rows import Question

__all__ = ["Batch", "Prediction", "batches_of", "is_forced", "predict", "predictions_csv"]

# Words that say that the library chose.
_BY_LIBRARY: Final = {"-", "auto", "default", "baseline", "nccl", "rccl", "hccl", "oneccl"}
_PROTOCOLS: Final = ("ll", "ll128", "simple")
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions that differ in their ranks and sizes alone.

    Attributes:
        numbers: Of the questions, by position.
        fabric: Of their machine; of the protocols those that the source names.
        assumptions: What the columns leave open, in sentences.
        op: Operation.
        methods: All of the library, which chooses by its own rule, or what a source may mean.
        protocol: That the source names; empty = any.
        group: The groups, shape [rows].
        size_bytes: S, shape [rows].
    """

    numbers: tuple[int, ...]
    fabric: Fabric
    assumptions: tuple[str, ...]
    op: Collective
    methods: tuple[Method, ...]
    protocol: str
    group: Group
    size_bytes: Column

    def seconds(self, protocols: Protocols | None = None) -> tuple[Column, Column]:
        """Return the seconds of every row, and the method that is done, as an index.

        What the library takes by itself, or the cheapest of the methods that a source may mean.

        Args:
            protocols: Lines to price by; None: the fabric's own.
        """
        fabric = self.fabric
        if protocols is not None:
            is_named = self.protocol in _PROTOCOLS
            lines = protocols.only(self.protocol) if is_named else protocols
            fabric = replace(fabric, protocols=lines)
        if self.methods != library_methods(fabric, self.op):
            found = choose(self.op, fabric, self.group, self.size_bytes, self.methods)
            return found.seconds, found.index
        taken = library_default(self.op, fabric, self.group, self.size_bytes)
        by_method = [
            collective_terms(self.op, method, fabric, self.group, self.size_bytes).total_s()
            for method in self.methods
        ]
        return np.choose(taken, by_method), taken


def predict(
    questions: Sequence[Question],
    protocols: Mapping[str, Protocols] | None = None,
    *,
    with_curves: bool = False,
) -> list[Prediction]:
    """Return a prediction for each question, in their order.

    Args:
        questions: As ``planner.validate.rows.without_outcomes`` makes them.
        protocols: Lines to price by, by key; None: those of the product.
        with_curves: Whether curves that known boards carry count, as they do in plans. A table that
            holds the machines they were measured on would then be predicted by itself.
    """
    batches, said = batches_of(questions, with_curves=with_curves)
    for batch in batches:
        key = protocols_key(batch.fabric.architecture, batch.fabric.levels[0].kind)
        lines = None if protocols is None or key is None else protocols[key]
        seconds, index_of = batch.seconds(lines)
        for number, time_s, index in zip(
            batch.numbers, seconds.tolist(), index_of.tolist(), strict=True
        ):
            method, name = batch.methods[index], questions[number].id
            said[number] = (
                Prediction(name, time_s, method, batch.assumptions)
                if np.isfinite(time_s)
                else Prediction(name, None, skipped_reason=f"{method} cannot run here")
            )
    return [said[number] for number in range(len(questions))]


def batches_of(
    questions: Sequence[Question], *, with_curves: bool = False
) -> tuple[list[Batch], dict[int, Prediction]]:
    """Return the questions that can be priced, and for the others, by position, why not."""
    said: dict[int, Prediction] = {}
    alike = defaultdict[tuple[Machine, Collective, tuple[Method, ...], str], list[int]](list)
    built = {machine: _built(machine) for machine in dict.fromkeys(map(machine_of, questions))}
    for number, question in enumerate(questions):
        machine = machine_of(question)
        try:
            fabric, _ = _fabric(built[machine], question)
            methods = _methods(question, fabric)
            alike[machine, question.op, methods, _protocol(question)].append(number)
        except InvalidInputError as exc:
            said[number] = Prediction(question.id, None, skipped_reason=str(exc))
    found = []
    for (machine, op, methods, protocol), numbers in alike.items():
        fabric, assumptions = _fabric(built[machine], questions[numbers[0]])
        if not with_curves:
            fabric = replace(fabric, curves=())
        if protocol in _PROTOCOLS and fabric.protocols is not None:
            fabric = replace(fabric, protocols=fabric.protocols.only(protocol))
        elif protocol:
            assumptions = (*assumptions, f"protocol {protocol!r} is not known: whichever is best")
        degree = np.array([questions[number].num_ranks for number in numbers])
        size = np.array([questions[number].size_bytes for number in numbers], dtype=float)
        group = lay_group(fabric, degree, np.ones_like(degree))
        found.append(Batch(tuple(numbers), fabric, assumptions, op, methods, protocol, group, size))
    return found, said


def _protocol(question: Question) -> str:
    """Return the protocol that the source names; empty where it names none."""
    named = question.protocol.lower().partition("(")[0].strip()
    return "" if named in _BY_LIBRARY else named


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
    others = (method for method, _ in OTHER_METHODS.get(library, {}).get(op, ()))
    priced = (*own, *OWN_METHODS[library].get(op, ()), *others)
    found = tuple(method for method in _NAMED[named] if method in priced)
    if not found:
        raise InvalidInputError(
            f"{question.algorithm!r} is not priced for {op} of {library}", where="algorithm"
        )
    return found
