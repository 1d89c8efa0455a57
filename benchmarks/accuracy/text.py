"""Figures and tables for print."""

from collections.abc import Iterable, Sequence

from planner.validate.run_scores import Errors

__all__ = ["NONE", "cells_of", "percent", "signed", "table", "times"]

NONE = "-"


def percent(part: float | None) -> str:
    """Return a fraction for print.

    >>> percent(0.1434), percent(None)
    ('14.3 %', '-')
    """
    return NONE if part is None else f"{100 * part:.1f} %"


def signed(part: float) -> str:
    """Return a fraction with its sign.

    >>> signed(0.02), signed(-0.1), signed(-0.0001)
    ('+2.0 %', '-10.0 %', '+0.0 %')
    """
    return f"{round(100 * part, 1) + 0.0:+.1f} %"


def times(factor: float) -> str:
    """Return a ratio for print.

    >>> times(1.293)
    '1.29x'
    """
    return f"{factor:.2f}x"


def cells_of(errors: Errors) -> tuple[str, str, str, str]:
    """Return median, 90th percentile, mean and bias."""
    sizes = (errors.median_error, errors.p90_error, errors.mean_error)
    return *map(percent, sizes), signed(errors.bias)  # type: ignore[return-value]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, a blank line after it.

    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    head, rule, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, rule.replace(" ", ""), *body, ""])
