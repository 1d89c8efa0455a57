"""Slurm's host lists, ``n[001-016,020]``: a guard over python-hostlist, which knows the grammar.

What python-hostlist would accept and nobody has (a range of a billion hosts, a name of a
megabyte) is counted and refused before it is expanded. White space between names parts them, as
in Slurm and as ``scontrol show hostnames`` prints them.
"""

import math
import re
from collections.abc import Iterable
from typing import Final

import hostlist

from planner.topology.importers.dump import TopologyTextError

__all__ = ["MAX_HOSTS", "collect", "expand", "natural_key"]

# A hundred times the largest machine of today; expanding as many takes a quarter of a second.
MAX_HOSTS: Final = 1_048_576
_MAX_NAME_CHARS: Final = 255  # of a DNS name (RFC 1035, 2.3.4)
_MAX_BRACKETS_PER_NAME: Final = 16
_MAX_DIGITS: Final = 18

# The library's own guard, which it offers to be set; 100,000 refuses machines that exist
# (Fugaku has 158,976 nodes), and what passes here was counted already.
hostlist.MAX_SIZE = MAX_HOSTS

_PIECE = re.compile(r"\[[^\[\]]*\]|[^\[\]]+|[\[\]]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_BLANKS = re.compile(r"\s+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{_MAX_NAME_CHARS}}}")
_NUMBER = re.compile(r"([0-9]+)")


def expand(
    text: str, *, source: str, line: int | None = None, max_hosts: int = MAX_HOSTS
) -> list[str]:
    """Return the names that a host list stands for, in its order; a name twice stays twice.

    Args:
        text: For instance ``n[9-11],login1``.
        source: What the text is called in messages.
        line: Where it was found, from 1.
        max_hosts: Refuse more names than this.

    Raises:
        TopologyTextError: It is no host list, names nothing, or names too much.

    >>> expand("n[9-11],d[01-02]x", source="topology.conf")
    ['n9', 'n10', 'n11', 'd01x', 'd02x']
    """
    try:
        list_text = _with_commas(text)
        _check_size(list_text, max_hosts)
        names: list[str] = hostlist.expand_hostlist(list_text, allow_duplicates=True)
        if not names:
            raise hostlist.BadHostlist("it names no host")
    except hostlist.BadHostlist as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise TopologyTextError(
            f"{shown!r} is no list of hosts: {error}; write it as Slurm does, n[001-016,020]",
            source=source,
            line=line,
        ) from error
    return names


def collect(hosts: Iterable[str]) -> str:
    """Return names as one host list, for print; sorted, each name once.

    Names that a host list cannot hold are listed one by one.

    >>> collect(["n9", "n10", "n11", "x"])
    'n[9-11],x'
    """
    names = list(dict.fromkeys(hosts))
    if all(_PLAIN_NAME.fullmatch(name) for name in names):
        return str(hostlist.collect_hostlist(names))
    return ", ".join(sorted(names, key=natural_key))


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sorting key that puts n2 before n10.

    >>> sorted(["n10", "n2", "a"], key=natural_key)
    ['a', 'n2', 'n10']
    """
    parts = _NUMBER.split(name)
    # Every second part is a number, so parts of one place compare with each other.
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts)), name


def _with_commas(text: str) -> str:
    """Return the list with commas for the white space between names."""
    pieces = (
        piece if piece.startswith("[") else _BLANKS.sub(",", piece) for piece in _pieces(text)
    )
    return "".join(pieces)


def _pieces(text: str) -> list[str]:
    """Split into brackets and what is between them."""
    pieces: list[str] = _PIECE.findall(text)
    if "[" in pieces or "]" in pieces:
        raise hostlist.BadHostlist("brackets do not match")
    return pieces


def _check_size(text: str, max_hosts: int) -> None:
    """Count the names before any is made.

    Raises:
        hostlist.BadHostlist: Too many, or a name too long or of control characters.
    """
    total = 0
    counts: list[int] = []
    num_chars = 0
    for piece in (*_pieces(text), ","):
        if piece.startswith("["):
            count, digits = _bracket_size(piece)
            counts.append(count)
            num_chars += digits
            _check_name(num_chars, len(counts))
            continue
        if _CONTROL.search(piece):
            raise hostlist.BadHostlist("a name has a control character")
        first, *rest = piece.split(",")
        num_chars += len(first)
        _check_name(num_chars, len(counts))
        if rest:
            # A name ends at every comma; those between the first and the last have no brackets.
            total += (math.prod(counts) if num_chars else 0) + sum(map(bool, rest[:-1]))
            _check_name(max(map(len, rest)), 0)
            counts, num_chars = [], len(rest[-1])
        if total > max_hosts:
            raise hostlist.BadHostlist(f"it names {total:,} hosts, more than {max_hosts:,}")


def _check_name(num_chars: int, num_brackets: int) -> None:
    if num_chars > _MAX_NAME_CHARS or num_brackets > _MAX_BRACKETS_PER_NAME:
        raise hostlist.BadHostlist(
            f"a name has more than {_MAX_NAME_CHARS} characters or {_MAX_BRACKETS_PER_NAME} "
            "brackets"
        )


def _bracket_size(bracket: str) -> tuple[int, int]:
    """Return how many numbers a bracket stands for, and the digits of the longest."""
    count = 0
    most_digits = 0
    for item in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise hostlist.BadHostlist(f"bad range {item[:40]!r}")
        most_digits = max(most_digits, *(len(end) for end in match.groups("")))
        if most_digits > _MAX_DIGITS:
            raise hostlist.BadHostlist(f"a number has more than {_MAX_DIGITS} digits")
        low, high = int(match[1]), int(match[2] or match[1])
        count += max(0, high - low) + 1
    return count, most_digits
