"""The page of all claims: docs/claims.md."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from benchmarks.claims import collectives, experts, layouts, sharding, steps
from benchmarks.claims.claim import Claim
from benchmarks.prose import wrapped

__all__ = ["PAGE", "every_claim", "page"]

PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "claims.md"
_HEAD: Final = """\
# Claims

What is often said about distributed training, and what this planner says: the same functions that
price a plan, on bundled clusters, and on bundled models unless a shape is given. Nothing is fitted
to a claim, and nothing was measured for this page; how near the functions come to measurements is
in the [README](../README.md#how-accurate-so-far). *Only if* holds under a condition that the claim
leaves out. Written by `python -m benchmarks.claims --write` (code: `benchmarks/claims/`).
"""
_GROUPS: Final = (
    ("Steps", steps),
    ("Collectives", collectives),
    ("Memory and gathers", sharding),
    ("Layouts", layouts),
    ("Experts", experts),
)


def every_claim() -> dict[str, list[Claim]]:
    """Return all claims by group."""
    return {title: list(module.claims()) for title, module in _GROUPS}


def page(groups: Mapping[str, Sequence[Claim]]) -> str:
    """Return the page of ``every_claim()``."""
    listed = sorted(chain(*groups.values()), key=lambda claim: claim.number)
    parts = [_HEAD, _overview(listed)]
    for title, claims in groups.items():
        parts += [f"## {title}\n", *(_section(claim) for claim in claims)]
    return "\n".join(parts).rstrip() + "\n"


def _overview(claims: Sequence[Claim]) -> str:
    rows = [f"| {claim.number} | {claim.said} | {claim.verdict} |" for claim in claims]
    return "\n".join(["| | claim | verdict |", "|---|---|---|", *rows, ""])


def _section(claim: Claim) -> str:
    verdict = claim.verdict.capitalize()
    paragraphs = (f"**{verdict}.** Ours: {claim.figure}", claim.why)
    title = f"### {claim.number}. {claim.said}"
    return "\n\n".join([title, *map(wrapped, paragraphs)]) + "\n"
