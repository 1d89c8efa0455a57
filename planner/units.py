"""Units for people: the only place that converts seconds, bytes and flop for print.

Inside, in files and on the wire everything is seconds, bytes, flop, bytes/s and flop/s.
"""

__all__ = ["counted", "format_bytes", "format_count", "format_rate", "format_seconds"]


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
