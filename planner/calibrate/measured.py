"""Measured curves from the rows of logs: whose they are, and which laws they break.

A curve is what was measured: of one size measured often the median, nothing smoothed. Logs of
other machines than the topology's are refused, and so are curves of groups that it has not. What
cannot be so is said beside it: time that falls as the size grows, more bandwidth than links have.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from planner.calibrate.nccl_tests import SHARED_OUT, Log, Row, Run, element_bytes
from planner.cost.curves import matching
from planner.cost.traffic import lower_bound_s
from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.gpus import GpuModel, gpu_model
from planner.layout.groups import lay_group
from planner.plan import Calibration, Collective, MeasuredCurve, Method, document_hash
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument
from planner.units import counted, format_bytes, format_seconds

__all__ = ["Given", "broken_laws", "check_groups", "check_machine", "curves_of", "with_curves"]

_MAX_TRIED: Final = 5
# Between two sizes a run's times wander by a few per cent: nccl-tests prints means of 20 calls.
_NOISE: Final = 0.1


class Given(NamedTuple):
    """What is said beside a log of what it does not say itself; None where nothing is.

    Attributes:
        op: Operation.
        num_ranks: Of logs that do not list ranks and whose figures do not give them.
        num_nodes: Of logs that do not list ranks.
    """

    op: Collective | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None


class _Group(NamedTuple):
    op: Collective
    num_ranks: int
    num_nodes: int


class _Sample(NamedTuple):
    seconds: float
    method: Method | None
    source: str


def curves_of(logs: Sequence[Log], given: Sequence[Given] = ()) -> tuple[MeasuredCurve, ...]:
    """Return the curves of all logs together, by operation, group and method.

    Sizes in a row that the library says it ran by one method are a curve of that method; where
    it says nothing, ``algorithm`` is None.

    Args:
        logs: As read.
        given: Of each log; empty where nothing is.

    Raises:
        InvalidInputError: A log lacks what it is not given, or contradicts what it is.
    """
    samples: dict[_Group, dict[int, list[_Sample]]] = defaultdict(lambda: defaultdict(list))
    for log, beside in zip(logs, given or [Given()] * len(logs), strict=True):
        for run in log.runs:
            try:
                group = _group(run, beside)
            except InvalidInputError as exc:
                where = f"{log.source}, from line {run.rows[0].line}"
                raise InvalidInputError(f"{where}: {exc}", where=exc.where) from exc
            for row in run.rows:
                method = run.method(group.op, group.num_ranks, row.size_bytes)
                sample = _Sample(row.seconds, method, log.source)
                samples[group][row.size_bytes].append(sample)
    return tuple(curve for group in sorted(samples) for curve in _by_method(group, samples[group]))


def _by_method(group: _Group, samples: dict[int, list[_Sample]]) -> Iterator[MeasuredCurve]:
    """Yield a curve for each run of sizes that one method did."""

    def method_of(size: int) -> Method | None:
        said = {sample.method for sample in samples[size]}
        return said.pop() if len(said) == 1 else None

    for method, run in groupby(sorted(samples), key=method_of):
        sizes = tuple(run)
        sources = dict.fromkeys(sample.source for size in sizes for sample in samples[size])
        yield MeasuredCurve(
            op=group.op,
            algorithm=method.algorithm if method else None,
            path=method.path if method else "library",
            group_size=group.num_ranks,
            num_nodes=group.num_nodes,
            sizes_bytes=sizes,
            seconds=tuple(median(sample.seconds for sample in samples[size]) for size in sizes),
            source=", ".join(sources),
        )


# ----------------------------------------------------------------------- whose the rows are


def _group(run: Run, given: Given) -> _Group:
    """Return the operation and group of a run: as listed, else by its figures, else as given."""
    shape = run.shape()
    said = Given(run.op or _op_by_columns(run), *(shape or ()))
    for option, own, beside in zip(("op", "ranks", "num-nodes"), said, given, strict=True):
        if own is not None and beside not in (None, own):
            raise InvalidInputError(
                f"it says {own} itself, where --{option} {beside} is given; leave that out, or "
                "give one for each log, in their order",
                where=option,
            )
    found = said.op or given.op
    if found is None:
        raise InvalidInputError(
            "which operation it is, neither the name of a binary nor the columns say; give it "
            "with --op, as --op all_gather",
            where="op",
        )
    fewest, most = _possible_ranks(found, run.rows)
    if fewest > most or fewest == math.inf:
        raise InvalidInputError(
            f"it is no {found} of any number of ranks: {_figures_of(found, run.rows)}; check "
            + ("the log" if said.op else "--op"),
            where="op",
        )
    ranks = said.num_ranks or given.num_ranks or (fewest if fewest == most else None)
    if ranks is None:
        known = "" if most == math.inf else f" (by busbw over algbw {fewest:.0f} to {most:.0f})"
        raise InvalidInputError(
            f"how many ranks ran, is not in it{known}; give it with --ranks", where="ranks"
        )
    if not fewest <= ranks <= most:
        who, what = ("it lists", "the log") if said.num_ranks else ("given are", "--op and --ranks")
        of = f"{fewest:.0f}" if fewest == most else f"{fewest:.0f} to {most:.0f}"
        raise InvalidInputError(
            f"{who} {ranks:.0f} ranks, but as {found} its figures are those of {of}: "
            f"{_figures_of(found, run.rows)}; check {what}",
            where="ranks",
        )
    nodes = said.num_nodes or given.num_nodes
    if nodes is None:
        raise InvalidInputError(
            f"on how many nodes the {ranks:.0f} ranks ran, is not in it; give it with --num-nodes",
            where="num_nodes",
        )
    if ranks < 2 or nodes < 1 or ranks % nodes:
        raise InvalidInputError(
            f"{ranks:.0f} ranks on {nodes} nodes; need two ranks or more, equally many on each",
            where="num_nodes",
        )
    return _Group(found, int(ranks), nodes)


def _op_by_columns(run: Run) -> Collective | None:
    """Return the operation by what its table has: parts of S, a reduction, a root.

    Of new tables all_gather and all_to_all look alike, and so do gather and scatter. In old ones
    all_gather alone has neither a redop nor a root column (nccl-tests, src/*.cu before 2.13).
    """
    parts = {_parts_of_size(row) for row in run.rows}
    if None in parts:
        return None
    is_shared = parts != {1}
    reduces = all(row.redop not in ("", "none") for row in run.rows)
    is_rooted = all(row.root is not None and row.root >= 0 for row in run.rows)
    if reduces:
        return "reduce_scatter" if is_shared else "reduce" if is_rooted else "all_reduce"
    if not is_shared:
        return "broadcast" if is_rooted else "send_recv"
    is_old = run.columns and not {"redop", "root"} & {*run.columns}
    return "all_gather" if is_old else None


def _parts_of_size(row: Row) -> int | None:
    """Return S over the bytes of the printed count: the ranks that share S, or 1."""
    width = element_bytes(row.element)
    if not width or not row.count or row.size_bytes % (row.count * width):
        return None
    return row.size_bytes // (row.count * width)


def _possible_ranks(op: Collective, rows: Sequence[Row]) -> tuple[float, float]:
    """Return the fewest and most ranks that all rows allow.

    By the count where ranks share S, else for all_reduce by busbw over algbw, ``r = 2 (n-1)/n``,
    so ``n = 2 / (2 - r)``, as exactly as they are printed.
    """
    fewest, most = 2.0, math.inf
    for row in rows:
        if op in SHARED_OUT:
            parts = _parts_of_size(row)
            low, high = (parts, parts) if parts else (fewest, most)
        elif op == "all_reduce":
            low, high = (2 / (2 - r) if r < 2 else math.inf for r in row.busbw_over_algbw)
        else:
            continue
        fewest = max(fewest, low if low == math.inf else math.ceil(low))
        most = min(most, high)
    return fewest, most if most == math.inf else math.floor(most)


def _figures_of(op: Collective, rows: Sequence[Row]) -> str:
    """Return by which figures of the rows ``_possible_ranks`` goes, and what ``op`` would have."""
    if op == "all_reduce":
        low = max(row.busbw_over_algbw[0] for row in rows)
        high = min(row.busbw_over_algbw[1] for row in rows)
        ratio = low if high == math.inf else (low + high) / 2
        return f"busbw over algbw is {ratio:.3g}, where n ranks have 2 (n-1)/n"
    parts = sorted({parts for row in rows if (parts := _parts_of_size(row))})
    counts = ", ".join("S" if part == 1 else f"S/{part}" for part in parts)
    return f"counts are {counts}, where n ranks have S/n"


# ----------------------------------------------------------------------------- whose machine


def check_machine(log: Log, document: TopologyDocument) -> str:
    """Return what of a log's GPUs could not be compared with the topology's; empty if nothing.

    Raises:
        InvalidInputError: It lists GPUs of another model, or ran another library.
    """
    has = [document.device_name, *(island.device_name for island in document.islands)]
    models, ours = [*map(_model, has)], f"{', '.join(dict.fromkeys(has))} of {document.name}"
    listed = sorted({name for run in log.runs for name in run.devices})
    known = {name: model for name in listed if (model := _model(name)) is not None}
    wrong = ""
    for library in [log.library] if log.library else [model.library for model in known.values()]:
        if library != document.library:
            wrong = (
                f"is of {library.upper()}, where {document.name} runs {document.library.upper()}"
            )
    for name, model in known.items():
        if model not in models and None not in models:
            wrong = f"lists {name!r}, none of the {ours}"
    if wrong:
        raise InvalidInputError(
            f"{log.source}: {wrong}; {_what_to_try([*known.values()])}", where="topology"
        )
    if not listed:
        return f"{log.source}: lists no GPUs; taken for the {ours}"
    if strange := ", ".join(name for name in listed if name not in known):
        return f"{log.source}: lists {strange}, no known GPU; taken for the {ours}"
    return ""


def _model(device_name: str) -> GpuModel | None:
    try:
        return gpu_model(device_name)
    except UnknownNameError:
        return None


def _what_to_try(measured: Sequence[GpuModel]) -> str:
    like = [one for one in topology_names() if _model(load_topology(one).device_name) in measured]
    tries = f", as {', '.join(like[:_MAX_TRIED])}" if like else ""
    return f"give the topology that was measured{tries}, or leave the log out"


# ------------------------------------------------------------------------------------- laws


def check_groups(curves: Sequence[MeasuredCurve], document: TopologyDocument) -> None:
    """Refuse curves of which none is like a group that the topology can have.

    Raises:
        InvalidInputError: So it is.
    """
    reasons = [_misplaced(curve, document) for curve in curves]
    if all(reasons):
        raise InvalidInputError(
            f"nothing would use these curves: {_name(curves[0])}: {reasons[0]}; check --topology, "
            "and --ranks and --num-nodes where they are given",
            where="num_nodes",
        )


def broken_laws(curve: MeasuredCurve, document: TopologyDocument) -> tuple[str, ...]:
    """Return what of a curve cannot be, or is of no use on a topology: a sentence each.

    Bandwidth is checked on groups that fill their nodes: of fewer ranks each may have more of
    the links than the levels' rates, which are for all senders.
    """
    said = (_falling(curve), _misplaced(curve, document) or _too_fast(curve, document))
    return tuple(f"{_name(curve)}: {sentence}" for sentence in said if sentence)


def _name(curve: MeasuredCurve) -> str:
    name = f"{curve.op} of {curve.group_size} ranks on {counted(curve.num_nodes, 'node')}"
    return name + (f" by {Method(curve.algorithm, curve.path)}" if curve.algorithm else "")


def _falling(curve: MeasuredCurve) -> str:
    seconds = np.array(curve.seconds)
    ratio = seconds[1:] / seconds[:-1]
    falls = np.flatnonzero(ratio < 1 - _NOISE)
    if not len(falls):
        return ""
    at = int(ratio.argmin())
    return (
        f"time falls as the size grows, {counted(len(falls), 'time')}, most from "
        f"{format_seconds(seconds[at])} at {format_bytes(curve.sizes_bytes[at])} to "
        f"{format_seconds(seconds[at + 1])} at {format_bytes(curve.sizes_bytes[at + 1])}: another "
        "protocol, or a disturbed run"
    )


def _misplaced(curve: MeasuredCurve, document: TopologyDocument) -> str:
    """Return why no group of a topology is like the curve's; empty if one is."""
    if curve.num_nodes <= document.max_nodes:
        fabric = replace(compile_fabric(document, curve.num_nodes), curves=(curve,))
        strides = np.arange(1, fabric.num_gpus // curve.group_size + 1)
        groups = lay_group(fabric, np.full(len(strides), curve.group_size), strides)
        if len(strides) and matching(fabric, curve.op, groups):
            return ""
    return (
        f"topology {document.name} has {counted(document.max_nodes, 'node')} of "
        f"{document.gpus_per_node}: no group there is like it"
    )


def _too_fast(curve: MeasuredCurve, document: TopologyDocument) -> str:
    if curve.group_size != curve.num_nodes * document.gpus_per_node:
        return ""
    fabric = compile_fabric(document, curve.num_nodes)
    group = lay_group(fabric, np.array([curve.group_size]), np.array([1]))
    sizes, seconds = np.array(curve.sizes_bytes, dtype=float), np.array(curve.seconds)
    bound = lower_bound_s(curve.op, fabric, group.repeat(len(sizes)), sizes)
    if not (seconds < bound).any():
        return ""
    at, how_often = int((seconds / bound).argmin()), int((seconds < bound).sum())
    return (
        f"faster than the links of {document.name} at {counted(how_often, 'size')}, "
        f"most at {format_bytes(sizes[at])}: {format_seconds(seconds[at])}, they need "
        f"{format_seconds(bound[at])}; check the topology"
    )


# ------------------------------------------------------------------------------ calibration


def with_curves(
    calibration: Calibration | None, topology: str, curves: Sequence[MeasuredCurve]
) -> Calibration:
    """Return the calibration with these curves; without one, one that has nothing else.

    Raises:
        InvalidInputError: It is of another topology.
    """
    fields: dict[str, Any] = {
        "schema_version": 1,
        "topology": topology,
        "levels": [],
        "compute_scale": 1.0,
        "optimizer_scale": 1.0,
        "host_overhead_s": 0.0,
        "residual": 0.0,
        "run_hashes": [],
    }
    if calibration is not None:
        if calibration.topology != topology:
            raise InvalidInputError(
                f"the runs are of {calibration.topology!r}, the logs of {topology!r}; calibrate "
                "each topology by itself",
                where="topology",
            )
        fields = calibration.model_dump(mode="json", exclude={"id"})
    fields["curves"] = [curve.model_dump(mode="json") for curve in curves]
    return Calibration.model_validate({**fields, "id": document_hash(fields)})
