"""The tables of docs/collectives.md that follow from the code.

``python -m tests.unit.collectives_page`` writes them anew; ``test_library_rules`` fails while page
and code differ. The table of thresholds is ``benchmarks.collective_thresholds``'s.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from planner.hardware.protocols import Family, Protocol, protocols_by_key
from planner.methods import LIBRARY_RULES, OTHER_METHODS, OWN_METHODS, is_validated
from planner.plan import Collective, Method
from planner.validate.fit import START

__all__ = ["DOCS", "with_tables"]

DOCS = Path(__file__).parent.parent.parent / "docs" / "collectives.md"
# As they stand in every family that has them.
PROTOCOLS = ("ll, few channels", "ll", "ll128", "simple, few channels", "simple")


def with_tables(text: str) -> str:
    """Return the page with the tables of today."""
    tables = {
        "lines": _lines(),
        "network": _network(),
        "rules": _rules(),
        "others": _others(),
        "validated": _validated(),
    }
    for name, rows in tables.items():
        start, end = (f"<!-- {name}: {edge} -->" for edge in ("start", "end"))
        found = re.search(f"{re.escape(start)}.*{re.escape(end)}", text, re.DOTALL)
        assert found is not None, f"docs/collectives.md needs the lines {start} and {end}"
        text = f"{text[: found.start()]}{start}\n{_table(rows)}\n{end}{text[found.end() :]}"
    return text


_WITH_SWITCHES = ("hopper/nvlink", "blackwell/nvlink")


def _table(rows: Iterable[Iterable[str]]) -> str:
    heads, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([heads, "|" + "---|" * (heads.count("|") - 1), *lines])


def _lines() -> list[list[str]]:
    found = [["GPUs, link", "family", *PROTOCOLS, "own"]]
    every = protocols_by_key()
    for key, protocols in sorted(every.items()):
        others = [lines for name, lines in every.items() if name != key] + [START]
        for family in get_args(Family):
            if family == "switch" and key not in _WITH_SWITCHES:
                continue
            lines = {line.name: line for line in protocols.lines[family]}
            alike = [{line.name: line for line in other.lines[family]} for other in others]
            cells = [
                _line(lines[name], [other[name] for other in alike]) if name in lines else ""
                for name in PROTOCOLS
            ]
            own = protocols.own_share[family]
            star = "*" * any(_same(own, other.own_share[family]) for other in others)
            found.append([key, family, *cells, f"{own:.3g}{star}" if own else ""])
    return found


def _line(line: Protocol, others: Iterable[Protocol]) -> str:
    """Return launch, ratio and share, with a star on each that no measurement moved."""
    figures = (
        ("launch_s", f"{1e6 * line.launch_s:.3g} us"),
        ("hop_ratio", f"{line.hop_ratio:.3g}"),
        ("share", f"{line.share:.3g}"),
    )
    return ", ".join(
        text + "*" * any(_same(getattr(line, name), getattr(other, name)) for other in others)
        for name, text in figures
    )


def _same(a: float, b: float) -> bool:
    """Whether two figures are one: a fit that moved both would not end so near."""
    return a == b or abs(a - b) < 2e-3 * abs(b)


def _network() -> list[list[str]]:
    """Return what holds between hosts: fitted for all GPUs together."""
    alike = {
        (line.name, line.network_hop_ratio, line.network_share)
        for protocols in protocols_by_key().values()
        for lines in protocols.lines.values()
        for line in lines
    }
    found = [["protocol", "latency of a hop over the level's", "share of its rate"]]
    order = sorted(alike, key=lambda one: PROTOCOLS.index(one[0]))
    return [*found, *([name, f"{ratio:.3g}", f"{share:.3g}"] for name, ratio, share in order)]


def _rules() -> list[list[str]]:
    found = [["algorithm", "libraries", "operations", "needs", "since", "where it is said"]]
    for rule in dict.fromkeys(rule for rules in LIBRARY_RULES.values() for rule in rules):
        having = ", ".join(name for name, rules in LIBRARY_RULES.items() if rule in rules)
        ops, needs = ", ".join(rule.ops), ", ".join(rule.needs)
        found.append([rule.algorithm, having, ops, needs, rule.since, rule.why])
    return found


def _others() -> list[list[str]]:
    found = [["library", "method", "operations", "who"]]
    for library, by_op in OTHER_METHODS.items():
        ways = dict.fromkeys(way for ways in by_op.values() for way in ways)
        for method, who in ways:
            ops = [op for op, ways in by_op.items() if (method, who) in ways]
            found.append([library, str(method), ", ".join(ops), who])
    return found


def _validated() -> list[list[str]]:
    """Return, by library, which priced methods were compared with measurements."""
    found = [["library", "operation", "compared with measurements", "not"]]
    for libraries in (("nccl", "rccl", "hccl", "oneccl"), ("gloo",), ("mpi",)):
        for op in get_args(Collective):
            methods = _methods(libraries, op)
            yes, no = (
                ", ".join(str(m) for m in methods if is_validated(libraries[0], op, m) is way)
                for way in (True, False)
            )
            if methods:
                found.append([", ".join(libraries), op, yes, no])
    return found


def _methods(libraries: Iterable[str], op: Collective) -> list[Method]:
    ways = [
        method
        for library in libraries
        for method in (
            *(Method(rule.algorithm) for rule in LIBRARY_RULES[library] if op in rule.ops),
            *OWN_METHODS[library].get(op, ()),
            *(other for other, _ in OTHER_METHODS.get(library, {}).get(op, ())),
        )
    ]
    return list(dict.fromkeys(ways))


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text("utf-8")), "utf-8")
