"""Units for people: the only place that converts seconds, bytes and flop for print, or reads them.

Inside, in files and on the wire everything is seconds, bytes, flop, bytes/s and flop/s.
"""

import re
from fractions import Fraction
from typing import Final

__all__ = [
    "counted",
    "format_bytes",
    "format_count",
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "parse_number",
    "parse_whole",
]

_PREFIXES: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kmgt]?)(i?b|)", re.I | re.A)
# What float() and int() also read is refused: 1_000, nan, digits of other scripts.
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]{1,3})?", re.I | re.A)
_WHOLE: Final = re.compile("[-+]?[0-9]{1,18}")


def format_seconds(seconds: float) -> str:
    """Return seconds with three significant digits.

    >>> format_seconds(0.0123456), format_seconds(77.01), format_seconds(0)
    ('12.3 ms', '77.0 s', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(num_bytes: float) -> str:
    """Return bytes in powers of 1000 (kB, MB, GB, TB).

    >>> format_bytes(80e9), format_bytes(512), format_bytes(1_500_000)
    ('80.0 GB', '512 B', '1.50 MB')
    """
    return _scaled(num_bytes, "B")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size as people write it, or as nccl-tests takes it.

    A prefix alone counts in powers of 1024, as in nccl-tests (src/common.cu, parsesize); with B it
    is decimal, with iB binary.

    >>> [parse_bytes(size) for size in ("1024", "1K", "1.5KiB", "64MB")]
    [1024, 1024, 1536, 64000000]

    Raises:
        ValueError: It is no size, or no whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if found and (found[2] or found[3].lower() != "ib"):
        base = 1000 if found[3].lower() == "b" else 1024
        size = Fraction(found[1]) * base ** _PREFIXES[found[2].lower()]
        if size.denominator == 1:
            return int(size)
    raise ValueError(
        f"{text[:40]!r}: need whole bytes, for example 1048576, 1M or 1MiB (all the same), or 1MB "
        "(1000000)"
    )


def parse_number(text: str) -> float:
    """Return a number written with the digits 0 to 9; infinite where it is too large.

    >>> parse_number("1.5e3"), parse_number(" -4")
    (1500.0, -4.0)

    Raises:
        ValueError: It is none.
    """
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{text[:40]!r} is not a number; need the digits 0 to 9, as 1000 or 1.5e3")
    return float(text)


def parse_whole(text: str) -> int:
    """Return a whole number written with the digits 0 to 9, at most 18 of them.

    Raises:
        ValueError: It is none.
    """
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(
            f"{text[:40]!r} is not a whole number; need the digits 0 to 9, at most 18 of them"
        )
    return int(text)


def format_rate(per_second: float, unit: str) -> str:
    """Return a rate such as bytes/s or flop/s.

    >>> format_rate(4.5e11, "B/s"), format_rate(9.89e14, "flop/s")
    ('450 GB/s', '989 Tflop/s')
    """
    return _scaled(per_second, unit)


def format_count(count: float) -> str:
    """Return a large count, parameters for example.

    >>> format_count(8_030_261_248), format_count(512)
    ('8.03 B', '512')
    """
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)} {suffix}"
    return f"{count:g}"


def counted(count: int, what: str) -> str:
    """Return a count of things.

    >>> counted(1, "node"), counted(4096, "node")
    ('1 node', '4,096 nodes')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{value:g} {unit}"


def _three_digits(value: float) -> str:
    digits = max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f}"
