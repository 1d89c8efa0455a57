"""Logs of nccl-tests and rccl-tests, as runs with rows: no seconds are judged here.

Read are the tables of all versions (``error`` or ``#wrong``, with or without redop, root, in-place
and per-iteration columns), several in one file, behind the prefixes of launchers and with NCCL's
own lines between or inside rows, and the JSON of ``--output_file`` (nccl-tests 2.19, src/util.cu).
nccl-tests prints the first half of a row before it measures, so a log with ``NCCL_DEBUG=INFO`` on
the same stream has the halves lines apart: a row lasts until something else begins.

Lines that cannot be read are kept by number, with what is wrong with them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from planner.calibrate.nccl_choices import OPS, Choice, choice_in
from planner.documents import parse_json
from planner.errors import InvalidInputError
from planner.plan import Collective, Method

Library = Literal["nccl", "rccl"]

__all__ = ["SHARED_OUT", "Library", "Listed", "Log", "Row", "Run", "element_bytes", "read_log"]

# Operations whose count is one rank's part of S (nccl-tests, doc/PERFORMANCE.md).
SHARED_OUT: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}

# "0: ", "[1,0]<stdout>:", "node1: ", "[pod/x] ", in front of a line.
_PREFIX: Final = re.compile(
    r"\s*(?:\[[^\]]*\](?:<\w+>)?:?|[\w.-]+:(?=\s)|[\w.-]+\s*\||\d{4}-\d\d-\d\dT\S+)\s*"
)
_LIBRARY: Final = re.compile(r"(?:\[[^\]]*\] )?(\S+?):\d+:\d+ \[\d+\].*NCCL |NCCL version")
_GLUED: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?|N/A")
_HALF_ROW: Final = re.compile(
    rf"\s*([0-9]{{1,18}})\s+([0-9]{{1,18}})\s+({'|'.join(_ELEMENT_BYTES)})(?!\S)(.*)"
)
_RANK: Final = re.compile(
    r"#\s+Rank\s+([0-9]+)\s+(?:Group\s+([0-9]+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+dev"
    r"(?:ice\s+\d+\s+\[[^\]]*\]\s+(\S.*))?"
)
# What only one of the two says of itself, in its own lines or its benchmark's.
_LIBRARIES: Final[dict[Library, re.Pattern[bytes]]] = {
    "rccl": re.compile(rb"rccl-tests|RCCL version|NCCL version \S+\+hip"),
    "nccl": re.compile(rb"NCCL version \S+\+cuda"),
}
# Hypercube and alltoallv are benchmarks, too, of no operation here.
_BINARY: Final = re.compile(rf"\b({'|'.join(OPS)}|hypercube|alltoallv)_perf")
_BEGINS: Final = re.compile(r"# nThread|[nr]ccl-tests|Using devices|test starting|size +count")
_FIGURE: Final = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|nan|inf)|N/A", re.IGNORECASE)
_ROOT: Final = re.compile("-?[0-9]{1,18}")
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")

# algbw is S over time; more between what is printed is a slip of columns.
_BANDWIDTH_SLACK: Final = 0.05
_MAX_COMPLAINTS: Final = 20
_MAX_LINES: Final = 8
_LONGEST_LINE: Final = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One size of a table, out of place.

    Attributes:
        line: Of the text, from 1; in JSON the number of the result.
        size_bytes: S.
        count: Elements, as printed.
        element: Their type.
        redop: Reduction; empty where none is printed.
        root: Rank; None where none is printed.
        seconds: Of one call.
        busbw_over_algbw: The least and the greatest that the printed figures allow.
    """

    line: int
    size_bytes: int
    count: int
    element: str
    redop: str
    root: int | None
    seconds: float
    busbw_over_algbw: tuple[float, float]


class Listed(NamedTuple):
    """A rank of a run's list, at ``"line 7"`` of the log or ``"device 7"`` of the JSON."""

    at: str
    group: int
    rank: int
    host: str


@dataclass(slots=True)
class Run:
    """One call of a benchmark: what it says of itself, its rows and the library's choices.

    Attributes:
        binary: Name without ``_perf``; empty if the log does not give it.
        listed: Its ranks, by number in their group (of a split communicator), in order.
        devices: Names of the GPUs, as listed.
        num_ranks: Where the log counts ranks without listing all.
        rows: Those that could be read.
        choices: How the library says that it ran sizes.
        columns: Of its table's head; empty without one.
    """

    binary: str = ""
    listed: list[Listed] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    num_ranks: int | None = None
    rows: list[Row] = field(default_factory=list)
    choices: set[Choice] = field(default_factory=set)
    columns: tuple[str, ...] = ()

    @property
    def op(self) -> Collective | None:
        """Operation by the binary's name; None if the log does not say.

        Raises:
            InvalidInputError: It is none that is planned with.
        """
        if self.binary and self.binary not in OPS:
            raise InvalidInputError(
                f"{self.binary}_perf: no operation of this planner; leave this log out: known are "
                f"{', '.join(sorted(set(OPS.values())))}",
                where="nccl_tests",
            )
        return OPS[self.binary] if self.binary else None

    def shape(self) -> tuple[int, int] | None:
        """Return (ranks, nodes) of its groups; None if ranks are not listed.

        Raises:
            InvalidInputError: A rank is listed twice, groups are not alike, or lie unevenly on
                nodes.
        """
        listed = self._groups()
        ranks = sorted(rank for group in listed for rank in group)
        renumbered = all(sorted(group) == [*range(len(group))] for group in listed)
        if not listed or not (self.num_ranks or renumbered or ranks == [*range(len(ranks))]):
            return None
        on_hosts = [Counter(one.host for one in group.values()) for group in listed]
        shapes = {(count.total(), *sorted(count.values())) for count in on_hosts}
        size, *on_nodes = next(iter(shapes))
        if len(shapes) > 1 or len(set(on_nodes)) > 1:
            raise InvalidInputError(
                f"ranks lie unevenly: groups have {sorted(shapes)} (ranks, then those on each "
                "node); a curve needs as many in each group and on each node",
                where="nccl_tests",
            )
        return (self.num_ranks or size, len(on_nodes))

    def _groups(self) -> list[dict[int, Listed]]:
        """Return the listed ranks of each group, by their number."""
        groups: dict[int, dict[int, Listed]] = {}
        for one in self.listed:
            first = groups.setdefault(one.group, {}).setdefault(one.rank, one)
            if first is not one:
                raise InvalidInputError(
                    f"rank {one.rank} is listed twice, on {first.host} ({first.at}) and on "
                    f"{one.host} ({one.at}): several runs in one, as of nccl-tests without MPI on "
                    "each node; give a log of one run, or of each run its own part",
                    where="nccl_tests",
                )
        return [*groups.values()]

    def method(self, op: Collective, num_ranks: int, size_bytes: int) -> Method | None:
        """Return how the library ran a size; None if it did not say, or said several."""
        shared = num_ranks if op in SHARED_OUT else 1
        said = {
            choice.method
            for choice in self.choices
            if choice.op in (op, None)
            and choice.size_bytes * (shared if choice.is_part else 1) == size_bytes
        }
        return said.pop() if len(said) == 1 else None


@dataclass(frozen=True, slots=True)
class Log:
    """What a file holds.

    Attributes:
        source: Its name.
        runs: Those with rows.
        bad_lines: (line, why it was left out), in order; in JSON results are counted.
        library: That ran, where the text says it.
    """

    source: str
    runs: tuple[Run, ...]
    bad_lines: tuple[tuple[int, str], ...]
    library: Library | None = None

    def complaints(self) -> tuple[str, ...]:
        """Return what was left out, a sentence for each reason; of many reasons the first."""
        lines: dict[str, list[int]] = {}
        for line, reason in self.bad_lines:
            lines.setdefault(reason, []).append(line)
        said = [
            f"{self.source}: left out {_numbered(at)}: {reason}" for reason, at in lines.items()
        ]
        if len(said) > _MAX_COMPLAINTS:
            rest = sum(map(len, [*lines.values()][_MAX_COMPLAINTS:]))
            said[_MAX_COMPLAINTS:] = [f"{self.source}: left out {rest} more, for other reasons"]
        return tuple(said)


def _numbered(lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:_MAX_LINES]))
    more = f" and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    return f"line{'s' if len(lines) > 1 else ''} {shown}{more}"


def element_bytes(element: str) -> int | None:
    """Return the size of an element of a type as nccl-tests calls it; None for others."""
    return _ELEMENT_BYTES.get(element)


def read_log(text: bytes, *, source: str) -> Log:
    """Return the runs of a log, or of the JSON that ``--output_file`` wrote.

    Args:
        text: Content; bytes that are no UTF-8 are replaced.
        source: File name, for messages.

    Raises:
        InvalidInputError: It has no row that can be read, or is broken JSON.
    """
    runs, bad = _read_json(text, source) if text.lstrip()[:1] == b"{" else _read_lines(text)
    kept = tuple(run for run in runs if run.rows)
    if not kept:
        why = "; ".join(f"line {line}: {reason}" for line, reason in bad[:3])
        raise InvalidInputError(
            f"{source}: no row of nccl-tests or rccl-tests ({why or 'none looks like one'}); give "
            "the output of a run such as all_reduce_perf -b 1K -e 4G -f 2",
            where=source,
        )
    library = next((name for name, said in _LIBRARIES.items() if said.search(text)), None)
    return Log(source, kept, tuple(sorted(bad)), library)


# --------------------------------------------------------------------------------------- text


@dataclass(slots=True)
class _HalfRow:
    """A row whose figures may go on in later lines."""

    line: int
    size_bytes: int
    count: int
    element: str
    redop: str
    figures: list[str]


def _read_lines(text: bytes) -> tuple[list[Run], list[tuple[int, str]]]:
    runs, bad, hosts = [Run()], [], set[str]()
    half: _HalfRow | None = None
    in_table = False

    def close() -> None:
        if half is not None:
            row = _row(half, runs[-1].columns)
            if isinstance(row, Row):
                runs[-1].rows.append(row)
            else:
                bad.append((half.line, row))

    for number, whole in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        if len(whole) > _LONGEST_LINE:
            bad.append((number, f"longer than {_LONGEST_LINE} characters"))
            continue
        prefix = _PREFIX.match(whole)
        line = whole[prefix.end() :] if prefix else whole
        if choice := choice_in(line):
            runs[-1].choices.add(choice)
        if library := "NCCL" in line and _LIBRARY.search(line):
            line = _before(library, hosts)
        elif choice:
            line = ""
        begun = _HALF_ROW.match(line)
        if begun:
            close()
            half, in_table = _half_row(number, *begun.groups()), True
        elif line.lstrip().startswith("#") or not in_table:
            close()
            half = None
            if runs[-1].rows and _BEGINS.search(line) and "concluded" not in line:
                runs.append(Run())
            in_table = _note_head(number, line, runs[-1]) or (in_table and "(us)" in line)
        elif half is not None and (figures := _figures(line)) is not None:
            half.figures += figures
        elif line.strip():
            bad.append((number, f"no row of the table: {line.strip()[:60]!r}"))
    close()
    return runs, bad


def _before(library: re.Match[str], hosts: set[str]) -> str:
    """Return what stands before the library's words: half a row ends where their host begins.

    Args:
        library: Where they are.
        hosts: Names of hosts that began a line; a new one is added.
    """
    before, host = library.string[: library.start()], library[1]
    if host is None:
        return before
    if not before.strip():
        hosts.add(host)
        return ""
    for known in hosts:
        if host.endswith(known):
            return before + host.removesuffix(known)
    glued = _GLUED.match(host)
    return before + (glued[0] if glued else "")


def _half_row(line: int, size: str, count: str, element: str, rest: str) -> _HalfRow:
    redop = re.match(r"\s+([a-z]\w*)", rest)
    figures = _figures(rest[redop.end() :] if redop else rest)
    return _HalfRow(
        line,
        int(size),
        int(count),
        element,
        redop[1] if redop else "",
        figures if figures is not None else [rest.strip()],
    )


def _figures(text: str) -> list[str] | None:
    """Return the figures of a line without its timestamp; None if it has anything else."""
    words = _TIMESTAMP.sub("", text).split()
    return words if all(_FIGURE.fullmatch(word) for word in words) else None


def _note_head(number: int, line: str, run: Run) -> bool:
    """Take what a line says of the run; return whether it is the head of a table."""
    if (binary := _BINARY.search(line)) and "concluded" not in line:
        run.binary = binary[1]
    if rank := _RANK.search(line):
        run.listed.append(Listed(f"line {number}", int(rank[2] or 0), int(rank[1]), rank[3]))
        run.devices |= {rank[4].strip()} if rank[4] else set()
    words = line.split()
    if words[1:3] != ["size", "count"]:
        return False
    run.columns = tuple(words[1:])
    return True


def _row(half: _HalfRow, columns: Sequence[str]) -> Row | str:
    """Return a row, or what is wrong with it."""
    per_group = 8 if "i_min" in columns else 4
    has_root = "root" in columns or (
        not columns and (half.figures[:1] == ["-1"] or len(half.figures) % per_group == 1)
    )
    root, figures = half.figures[:has_root], half.figures[has_root:]
    are_figures = _figures(" ".join(half.figures)) is not None
    if not are_figures or len(figures) not in (per_group, 2 * per_group):
        is_cut = are_figures and len(figures) < 2 * per_group
        return (
            ("the row is cut off, or lacks a figure: " if is_cut else "")
            + f"after the type stands {' '.join(half.figures)[:60]!r}; need "
            + ("a root, " if has_root else "")
            + f"{per_group} figures out of place and as many in place"
        )
    if root and not _ROOT.fullmatch(root[0]):
        return f"its root is {root[0]!r}; need a rank, or -1"
    if "cputime" in columns:
        return "its time is the CPU's, not that of the call; measure without -C"
    return _checked(
        Row(
            half.line,
            half.size_bytes,
            half.count,
            half.element,
            half.redop,
            int(root[0]) if root else None,
            _number(figures[0]) * 1e-6,
            _ratio(figures[1], figures[2]),
        ),
        algbw=_number(figures[1]) * 1e9,
        slack=10.0 ** -_decimals(figures[1]) * 1e9,
        wrong=_number(figures[3]),
    )


def _checked(row: Row, *, algbw: float, slack: float, wrong: float) -> Row | str:
    """Return the row, or what is wrong with it. The old ``error`` is a fraction: no wrong element.

    Args:
        row: As read.
        algbw: As printed, bytes/s.
        slack: Its last digit, bytes/s.
        wrong: Elements with a wrong result; NaN = not checked.
    """
    if row.size_bytes <= 0:
        return f"size {row.size_bytes}: nothing was moved"
    if not 0 < row.seconds < math.inf:
        return f"took {row.seconds * 1e6:g} us; need a time"
    if wrong >= 1:
        return f"{wrong:g} wrong elements in the result: no time of a working transfer"
    rate = row.size_bytes / row.seconds
    if not abs(algbw - rate) <= slack + _BANDWIDTH_SLACK * rate:
        return (
            f"{row.size_bytes} bytes in {row.seconds * 1e6:g} us are {rate / 1e9:.4g} GB/s, "
            f"but its algbw is {algbw / 1e9:g}"
        )
    return row


def _number(text: str) -> float:
    return math.nan if text == "N/A" else float(text)


def _decimals(text: str) -> int:
    """Return the printed digits after the point; of powers of ten none are trusted."""
    return 0 if "e" in text.lower() else len(text.partition(".")[2])


def _ratio(algbw: str, busbw: str) -> tuple[float, float]:
    """Return the least and greatest busbw over algbw that round to what is printed."""
    algbw_half, busbw_half = (0.5 * 10.0 ** -_decimals(text) for text in (algbw, busbw))
    low, high = _number(algbw) - algbw_half, _number(algbw) + algbw_half
    if not low > 0:
        return 0.0, math.inf
    return (_number(busbw) - busbw_half) / high, (_number(busbw) + busbw_half) / low


# --------------------------------------------------------------------------------------- JSON


def _read_json(text: bytes, source: str) -> tuple[list[Run], list[tuple[int, str]]]:
    """Return the run of a JSON file. A process is listed by its first device alone."""
    document = parse_json(text, source=source)
    run, bad = Run(), []
    try:
        binary = _BINARY.search(str(document["args"][0]))
        run.binary = binary[1] if binary else ""
        config = document["config"]
        for number, device in enumerate(config["devices"], 1):
            group, rank, host = _whole(device, "group"), _whole(device, "rank"), device["hostname"]
            run.listed.append(Listed(f"device {number}", group, rank, str(host)))
            run.devices |= (
                {str(device["device_info"]).strip()} if "device_info" in device else set()
            )
        if len({one.group for one in run.listed}) == 1:
            per_process = _whole(config, "nthreads") * _whole(config, "ngpus")
            run.num_ranks = len(config["devices"]) * per_process
        for number, row in enumerate(_json_rows(document["results"]), 1):
            if isinstance(row, Row):
                run.rows.append(row)
            else:
                bad.append((number, row))
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise InvalidInputError(
            f"{source}: no JSON of nccl-tests: {type(exc).__name__} {exc} while reading args, "
            "config and results; give what --output_file wrote, or the log",
            where=source,
        ) from exc
    return [run], bad


def _json_rows(results: Sequence[dict[str, Any]]) -> Iterator[Row | str]:
    for number, result in enumerate(results, 1):
        try:
            yield _json_row(number, result)
        except ValueError as exc:
            yield str(exc)


def _json_row(number: int, result: dict[str, Any]) -> Row | str:
    """Return a row, or what is wrong with it.

    Raises:
        ValueError: With what is wrong with a value.
    """
    body = result["out_of_place"]
    if body is None or "cpu_time" in body:
        return "no out-of-place time of the call (-C measures the CPU's)"
    element, root = str(result["type"]), str(result["root"]).strip()
    if element not in _ELEMENT_BYTES:
        return f"type {element[:40]!r}: need one of {', '.join(_ELEMENT_BYTES)}"
    if root and not _ROOT.fullmatch(root):
        return f"its root is {root[:40]!r}; need a rank, or -1"
    algbw, busbw = _real(body, "alg_bw"), _real(body, "bus_bw")
    return _checked(
        Row(
            number,
            _whole(result, "size"),
            _whole(result, "count"),
            element,
            str(result["redop"]).strip(),
            int(root) if root else None,
            _real(body, "time") * 1e-6,
            _ratio(f"{algbw:f}", f"{busbw:f}"),
        ),
        algbw=algbw * 1e9,
        slack=1e-6 * 1e9,
        wrong=math.nan if body["nwrong"] is None else _real(body, "nwrong"),
    )


def _whole(owner: dict[str, Any], name: str) -> int:
    value = owner[name]
    if type(value) is not int or not 0 <= value < 10**18:
        raise ValueError(
            f"{name} {str(value)[:40]}: need a whole number, 0 or more, of at most 18 digits"
        )
    return value


def _real(owner: dict[str, Any], name: str) -> float:
    value = owner[name]
    if type(value) not in (int, float):
        raise ValueError(f"{name} {str(value)[:40]!r}: need a number")
    return float(value)
