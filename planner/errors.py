"""Errors a caller of the planner can catch, as one small tree.

::

    PlannerError
    ├── InvalidInputError       fix the input
    │   └── UnknownNameError    no bundled thing has that name
    └── InfeasiblePlanError     the input is fine, nothing fits

A message says what, where, got, needed, and what to try. Callers catch by class and read
attributes; nobody parses text.
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["InfeasiblePlanError", "InvalidInputError", "PlannerError", "UnknownNameError"]


class PlannerError(Exception):
    """Base of every error the planner raises on purpose."""


class InvalidInputError(PlannerError):
    """The input is wrong; ``where`` is the path of the offending field, as in JSON."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class UnknownNameError(InvalidInputError):
    """No bundled thing has this name; ``nearest`` lists up to three that look like it.

    ``remedy`` ends the message: what else there is, or what else can be given.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, remedy: str = "") -> None:
        self.kind = kind
        self.name = name
        names = sorted(known)
        folded = {known_name.casefold(): known_name for known_name in names}
        close = get_close_matches(name.casefold(), folded, n=3, cutoff=0.4)
        self.nearest = [folded[match] for match in close] or names[:3]
        super().__init__(
            f"no {kind} is called {name!r}; nearest: {', '.join(self.nearest)}"
            + (f"; {remedy}" if remedy else ""),
            where=kind,
        )


class InfeasiblePlanError(PlannerError):
    """The input is valid, but no layout fits.

    Attributes:
        rejected: How many candidates fell to each reason.
        suggestion: The smallest change found that makes it fit, as fields of a request, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rejected: dict[str, int] | None = None,
        suggestion: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.rejected = rejected or {}
        self.suggestion = suggestion

    def most_rejected(self) -> list[tuple[str, int]]:
        """Return (reason, count) of ``rejected``, most frequent first, as plans list them."""
        return sorted(self.rejected.items(), key=lambda item: -item[1])
