"""Gradients sent in fewer bytes: seconds and bytes of lossy all_reduces beside the exact one.

For people to look at: no plan holds a compressed collective, for no framework that plans are made
for is told to run one, and whether training survives the loss is not this model's to say. All of
it is modelled, not validated.

A scheme is existing collectives, each by its cheapest method (``planner.cost.collectives``), and
kernels that read and write memory (``planner.hardware.kernels``). Of a buffer of ``E`` elements of
``b`` bytes on each of ``n`` ranks, ``Q = E + 4 E/256`` bytes with a scale per block, ``k`` kept:

===========  ==========================================  ========================================
scheme       collectives, with nccl-tests' size          bytes of the kernels
===========  ==========================================  ========================================
exact        all_reduce bE
bf16         all_reduce 2E                               2 (b + 2) E: there and back
fp8, int8    all_to_all Q, all_gather Q                  bE + Q, Q + Q/n, Q + bE
int8_gather  all_gather nQ                               bE + Q, nQ + bE
top_k        all_gather 6nk: 2 of value, 4 of index      8bE + (6 + b) k + (6 + 2b) nk
power_sgd    all_reduce b E/h r for P, again for Q       11bE
===========  ==========================================  ========================================

fp8 and int8 are reduced in fp32 between the two collectives: sums of int8 overflow. top_k adds what
it left out before (3 bE), selects by radix in 4 passes over 32-bit keys, and adds all ranks' pairs
to a cleared buffer. PowerSGD (arXiv 1905.13727) passes as torch's powerSGD_hook does: add the error
3, keep a copy 2, P, Q and back 3, the new error 3; its matrices are taken as ``h`` wide and high,
4,096 or what the buffer has, and each column of P as one kernel to make orthogonal.

A hierarchical form is exact inside units, on all bytes (reduce_scatter, all_gather), and lossy
across them, on the shard of each member. Calls and kernels follow each other: nothing overlaps, in
pieces or beside compute, and what kernels take from compute beside them is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np

from planner.cost.collectives import choose, legal_methods
from planner.cost.traffic import bytes_per_level
from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.devices import Device
from planner.hardware.kernels import memory_bound_s
from planner.layout.candidates import Column
from planner.layout.groups import Group, inner_group, lay_group, outer_group
from planner.plan import Collective
from planner.topology.fabric import Fabric
from planner.units import counted, format_bytes, format_seconds, parse_number, parse_whole

__all__ = [
    "BASIS",
    "NEEDS",
    "Compared",
    "Scheme",
    "calls_of_scheme",
    "compare",
    "default_schemes",
    "parse_scheme",
    "ranks_group",
    "why_not",
]

Kind = Literal["exact", "bf16", "fp8", "int8", "int8_gather", "top_k", "power_sgd"]
Form = Literal["flat", "hierarchical"]

_LOSSY: Final[tuple[Kind, ...]] = get_args(Kind)[1:]
BASIS: Final = "modelled, not validated"
# What would run each; nothing of it is written into a plan.
NEEDS: Final[dict[Kind, str]] = {
    "bf16": "Megatron --grad-reduce-in-bf16; torch DDP bf16_compress_hook",
    "fp8": "a DDP communication hook of your own",
    "int8": "DeepSpeed ZeRO++ zero_quantized_gradients (qgZ: int4, in two hops); of gathered "
    "weights zero_quantized_weights (qwZ)",
    "int8_gather": "torch DDP quantization_pertensor_hook",
    "top_k": "a DDP communication hook of your own, with error feedback",
    "power_sgd": "torch DDP powerSGD_hook with PowerSGDState(matrix_approximation_rank=RANK)",
}
_ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2}
_BLOCK: Final = 256
_SCALE_BYTES: Final = 4
_PAIR_BYTES: Final = 6
_SIDE: Final = 4096
_MOST_BYTES: Final = 10**15


@dataclass(frozen=True, slots=True)
class Scheme:
    """How gradients are made smaller.

    Attributes:
        kind: Way.
        density: Part of the elements that top_k keeps, in (0, 1].
        rank: Of power_sgd, from 1 to the side of its matrices.

    Raises:
        InvalidInputError: One of them is out of range.
    """

    kind: Kind
    density: float = 0.01
    rank: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise InvalidInputError(
                f"top_k={self.density:g}: need the part of the elements to keep, above 0 and at "
                "most 1, for example top_k=0.01",
                where="scheme",
            )
        if not 1 <= self.rank <= _SIDE:
            raise InvalidInputError(
                f"power_sgd={self.rank}: need a rank from 1 to {_SIDE}, the side of the matrices, "
                "for example power_sgd=4",
                where="scheme",
            )

    def __str__(self) -> str:
        """Return it as ``parse_scheme`` reads it."""
        amount = {"top_k": f"={self.density:g}", "power_sgd": f"={self.rank}"}
        return self.kind + amount.get(self.kind, "")


@dataclass(frozen=True, slots=True)
class Compared:
    """One scheme in one form, columns of shape [rows].

    Attributes:
        scheme: What is done.
        form: Everywhere, or across units only.
        num_calls: Collectives, one after the other.
        seconds: Of all; infinite where the group has no equal units, for the hierarchical form.
        kernel_s: Of its kernels.
        inside_s: Of being exact inside units, for the hierarchical form.
        sent_bytes: That a rank sends over each level, and receives; mean over the group.
        gain: Seconds of the exact all_reduce over these; below 1 it loses.
    """

    scheme: Scheme
    form: Form
    num_calls: int
    seconds: Column
    kernel_s: Column
    inside_s: Column
    sent_bytes: tuple[Column, ...]
    gain: Column


@dataclass(frozen=True, slots=True)
class _Call:
    """Seconds of one collective, [rows], and what a rank sends over each level, [levels, rows]."""

    seconds: Column
    sent_bytes: Column


def parse_scheme(text: str) -> Scheme:
    """Return the scheme of a name, with its density or rank.

    Raises:
        InvalidInputError: There is none of that name, or its figure is wrong.

    >>> str(parse_scheme("top_k=0.05")), str(parse_scheme("power_sgd"))
    ('top_k=0.05', 'power_sgd=4')
    """
    name, equals, amount = (part.strip() for part in text.partition("="))
    kind = next((one for one in _LOSSY if one == name), None)
    if kind is None:
        remedy = f"known: {', '.join(_LOSSY)}; with figures as top_k=0.01 and power_sgd=4"
        raise UnknownNameError("scheme", name, _LOSSY, remedy=remedy)
    if not equals:
        return Scheme(kind)
    try:
        if kind == "top_k":
            return Scheme(kind, density=parse_number(amount))
        if kind == "power_sgd":
            return Scheme(kind, rank=parse_whole(amount))
    except ValueError as exc:
        raise InvalidInputError(
            f"scheme {text[:60]!r}: {exc}; try top_k=0.01 or power_sgd=4", where="scheme"
        ) from exc
    raise InvalidInputError(
        f"scheme {text[:60]!r}: {kind} takes no figure; write {kind}", where="scheme"
    )


def default_schemes(precision: str = "fp32") -> tuple[Scheme, ...]:
    """Return every lossy scheme for a buffer of that precision."""
    return tuple(Scheme(kind) for kind in _LOSSY if kind != precision)


def ranks_group(fabric: Fabric, num_ranks: int, stride: int = 1) -> Group:
    """Return the group of ``num_ranks`` ranks ``stride`` apart, one row.

    Raises:
        InvalidInputError: The fabric has not as many, or there is nobody to send to.
    """
    if num_ranks < 2 or stride < 1 or num_ranks * stride > fabric.num_gpus:
        raise InvalidInputError(
            f"ranks={num_ranks}, stride={stride}: need 2 ranks or more, 1 or more apart, within "
            f"the {fabric.num_gpus:,} of {fabric.topology}; or ask for more nodes",
            where="ranks",
        )
    return lay_group(fabric, np.array([num_ranks]), np.array([stride]))


def calls_of_scheme(
    scheme: Scheme, num_ranks: Column, num_elements: Column, element_bytes: int
) -> list[tuple[Collective, Column]]:
    """Return the collectives of a scheme with their sizes in bytes, shape [rows].

    >>> calls_of_scheme(Scheme("int8"), np.array([8]), np.array([1024.0]), 4)
    [('all_to_all', array([1040.])), ('all_gather', array([1040.]))]
    """
    n, elements = num_ranks, num_elements
    match scheme.kind:
        case "exact":
            return [("all_reduce", element_bytes * elements)]
        case "bf16":
            return [("all_reduce", 2 * elements)]
        case "fp8" | "int8":
            quantised = _quantised(elements)
            return [("all_to_all", quantised), ("all_gather", quantised)]
        case "int8_gather":
            return [("all_gather", n * _quantised(elements))]
        case "top_k":
            return [("all_gather", _PAIR_BYTES * n * _kept(scheme, elements))]
        case "power_sgd":
            side = np.minimum(_SIDE, np.sqrt(elements))
            factor = element_bytes * elements / side * np.minimum(scheme.rank, side)
            return [("all_reduce", factor), ("all_reduce", factor)]


def _quantised(elements: Column) -> Column:
    """Return bytes of one-byte elements and the scales of their blocks."""
    return elements + _SCALE_BYTES * np.ceil(elements / _BLOCK)


def _kept(scheme: Scheme, elements: Column) -> Column:
    return np.maximum(1.0, scheme.density * elements)


def _kernels(scheme: Scheme, n: Column, elements: Column, b: int) -> tuple[Column | float, int]:
    """Return bytes that the kernels read and write, and how many kernels there are."""
    match scheme.kind:
        case "exact":
            return 0.0, 0
        case "bf16":
            return 2 * (b + 2) * elements, 2
        case "fp8" | "int8":
            return 2 * b * elements + (3 + 1 / n) * _quantised(elements), 3
        case "int8_gather":
            return 2 * b * elements + (1 + n) * _quantised(elements), 2
        case "top_k":
            pairs = _kept(scheme, elements) * (_PAIR_BYTES + b + (_PAIR_BYTES + 2 * b) * n)
            return 8 * b * elements + pairs, 8
        case "power_sgd":
            return 11 * b * elements, 6 + scheme.rank


def compare(
    fabric: Fabric,
    device: Device,
    group: Group,
    size_bytes: Column,
    schemes: Sequence[Scheme] | None = None,
    *,
    precision: str = "fp32",
) -> tuple[Compared, ...]:
    """Return the exact all_reduce, then every scheme flat and, if any row has units, hierarchical.

    Args:
        fabric: Levels.
        device: Whose memory the kernels read and write.
        group: Who reduces, shape [rows] or one row for all sizes.
        size_bytes: Of the buffer on one rank as it is reduced exactly, shape [rows].
        schemes: What to compare with; None = ``default_schemes``.
        precision: Of the buffer: fp32 or bf16.

    Raises:
        InvalidInputError: A size is not between 1 byte and a petabyte, a group has one rank, the
            precision is another, or bf16 is a scheme for a buffer that is bf16.
    """
    lossy = default_schemes(precision) if schemes is None else tuple(schemes)
    _check(group, size_bytes, lossy, precision)
    b = _ELEMENT_BYTES[precision]
    elements = np.asarray(size_bytes, dtype=float) / b
    laid = group.repeat(len(elements)) if len(group.degree) == 1 else group
    forms: list[Form] = ["flat", "hierarchical"] if laid.has_hierarchy().any() else ["flat"]
    exact = _priced(fabric, device, laid, elements, Scheme("exact"), "flat", b)
    found = [
        _priced(fabric, device, laid, elements, scheme, form, b)
        for scheme in lossy
        for form in forms
    ]
    return tuple(replace(one, gain=exact.seconds / one.seconds) for one in (exact, *found))


def _check(group: Group, size_bytes: Column, schemes: Sequence[Scheme], precision: str) -> None:
    for size in np.asarray(size_bytes, dtype=float):
        if not 1 <= size <= _MOST_BYTES:
            raise InvalidInputError(
                f"size={size:g}: need the bytes of the buffer on one rank, from 1 to "
                f"{_MOST_BYTES:,}",
                where="size",
            )
    if (group.degree < 2).any():
        raise InvalidInputError(
            "a group of one rank sends nothing; need 2 ranks or more", where="ranks"
        )
    if precision not in _ELEMENT_BYTES:
        raise InvalidInputError(
            f"precision {precision!r}: need what the gradients are reduced in, one of "
            f"{', '.join(_ELEMENT_BYTES)}",
            where="precision",
        )
    if precision in [scheme.kind for scheme in schemes]:
        raise InvalidInputError(
            f"scheme {precision}: the buffer is {precision} already, so that is exact; leave it "
            "out, or compare with a buffer of --precision fp32",
            where="scheme",
        )


def _priced(
    fabric: Fabric,
    device: Device,
    group: Group,
    elements: Column,
    scheme: Scheme,
    form: Form,
    b: int,
) -> Compared:
    """Return one scheme in one form, its gain left at 1."""
    inside: list[_Call] = []
    senders, part = group, elements
    if form == "hierarchical":
        inner, senders = inner_group(group), outer_group(group)
        part = elements / inner.degree
        exact: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        inside = [_call(op, fabric, inner, b * elements) for op in exact]
    calls = [
        _call(op, fabric, senders, size)
        for op, size in calls_of_scheme(scheme, senders.degree, part, b)
    ]
    num_bytes, num_kernels = _kernels(scheme, senders.degree, part, b)
    kernel_s = memory_bound_s(device, num_bytes + 0 * part, num_kernels) / fabric.slowest_share
    inside_s = np.sum([call.seconds for call in inside], axis=0) + 0 * part
    seconds = inside_s + np.sum([call.seconds for call in calls], axis=0) + kernel_s
    possible = group.has_hierarchy() if form == "hierarchical" else True
    return Compared(
        scheme,
        form,
        num_calls=len(inside) + len(calls),
        seconds=np.where(possible, seconds, np.inf),
        kernel_s=kernel_s,
        inside_s=inside_s,
        sent_bytes=tuple(np.sum([call.sent_bytes for call in (*inside, *calls)], axis=0)),
        gain=np.ones(len(part)),
    )


def _call(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> _Call:
    """Return one call by its cheapest method, of what the library or the executor has for it."""
    methods = legal_methods(fabric, "executor", op)
    choice = choose(op, fabric, group, size_bytes, methods)
    sent = np.array([bytes_per_level(op, how, fabric, group, size_bytes) for how in methods])
    return _Call(choice.seconds, sent[choice.index, :, np.arange(len(size_bytes))].T)


def why_not(found: Sequence[Compared], one: Compared, row: int = 0) -> str:
    """Return why a scheme loses to the exact all_reduce, or to bf16; empty if it does not.

    Args:
        found: What ``compare`` returned, the exact one first.
        one: Which of them.
        row: Of its columns.
    """
    exact, seconds, kernel_s = found[0], one.seconds[row], one.kernel_s[row]
    if one is exact:
        return ""
    if np.isinf(seconds):
        return "the group has no equal units to be exact inside of"
    if one.gain[row] > 1:
        return _bf16_instead(found, one, row)
    if _leaving(one, row) >= _leaving(exact, row):
        return _more_bytes(found, one, row)
    exact_s, sending_s = exact.seconds[row], seconds - kernel_s
    if sending_s < exact_s:
        saved = format_seconds(exact_s - sending_s)
        return f"sending is {saved} faster, but its kernels take {format_seconds(kernel_s)}"
    calls = f"sends less, but its {counted(one.num_calls, 'call')} take {format_seconds(sending_s)}"
    if one.form == "hierarchical":
        calls += f", {format_seconds(one.inside_s[row])} of it exact inside units"
    return f"{calls}; exact takes {format_seconds(exact_s)}"


def _bf16_instead(found: Sequence[Compared], one: Compared, row: int) -> str:
    """Return that bf16 is at least as fast, if it is: it loses less of the gradients."""
    halves = [float(other.seconds[row]) for other in found if other.scheme.kind == "bf16"]
    if one.scheme.kind == "bf16" or min(halves, default=np.inf) > one.seconds[row]:
        return ""
    return f"faster than exact, but bf16 takes {format_seconds(min(halves))}"


def _more_bytes(found: Sequence[Compared], one: Compared, row: int) -> str:
    """Return why no fewer bytes leave the units."""
    own, exactly = _leaving(one, row), _leaving(found[0], row)
    more = f"sends {format_bytes(own)} where exact sends {format_bytes(exactly)}"
    inside, *beyond = (sent[row] > 0 for sent in one.sent_bytes)
    if one.form == "flat" and inside and any(beyond):
        return f"{more}: units do not add up what they have before it leaves them"
    if one.scheme.kind == "top_k":
        return f"{more}: less only below a density of {one.scheme.density * exactly / own:.2g}"
    return f"{more}: what it gathers grows with the ranks"


def _leaving(one: Compared, row: int) -> float:
    """Return what a rank sends out of its innermost unit, or inside the only one."""
    inside, *beyond = (float(sent[row]) for sent in one.sent_bytes)
    return sum(beyond) or inside
