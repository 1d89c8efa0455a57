"""Which NICs of a node carry the traffic of training, and which serve storage and logins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from planner.errors import InvalidInputError
from planner.topology.importers.dump import FoundPart, NodeDump
from planner.units import format_rate

__all__ = ["ChosenNics", "choose_nics"]

_SAME_RATE: Final = 0.99
_MAX_NAMES: Final = 12


@dataclass(frozen=True, slots=True)
class ChosenNics:
    """The NICs that are planned with.

    Attributes:
        parts: In the order of the text.
        bytes_per_s: Of each; None where the text does not say.
        assumptions: Which were left out, and why.
    """

    parts: tuple[FoundPart, ...]
    bytes_per_s: float | None
    assumptions: tuple[str, ...]


def choose_nics(dump: NodeDump, wanted: Sequence[str], *, source: str) -> ChosenNics:
    """Return the NICs named in ``wanted``; without names, the fastest.

    Raises:
        InvalidInputError: ``wanted`` names a NIC that the text does not have.
    """
    nics = tuple(part for part in dump.parts if part.kind == "nic")
    if wanted:
        return _named(nics, wanted, source)
    rates = [nic.bytes_per_s for nic in nics if nic.bytes_per_s is not None]
    if not rates:
        return ChosenNics(nics, None, _many(nics, dump))
    best = max(rates)
    kept = tuple(nic for nic in nics if (nic.bytes_per_s or 0.0) >= best * _SAME_RATE)
    return ChosenNics(
        kept, min(rate for nic in kept if (rate := nic.bytes_per_s)), _left(nics, kept)
    )


def _named(nics: Sequence[FoundPart], wanted: Sequence[str], source: str) -> ChosenNics:
    by_name = {nic.name: nic for nic in nics}
    for name in wanted:
        if name not in by_name:
            there = ", ".join([*by_name][:_MAX_NAMES]) or "none"
            raise InvalidInputError(
                f"{source}: has no NIC {name!r}; there are {there}", where="nics"
            )
    kept = tuple(nic for nic in nics if nic.name in set(wanted))
    rates = [nic.bytes_per_s for nic in kept]
    known = [rate for rate in rates if rate is not None]
    left = tuple(f"NIC {nic.name} is left out: not named" for nic in nics if nic not in kept)
    return ChosenNics(kept, min(known) if len(known) == len(rates) else None, left)


def _left(nics: Sequence[FoundPart], kept: Sequence[FoundPart]) -> tuple[str, ...]:
    best = max(nic.bytes_per_s or 0.0 for nic in kept)
    said = []
    for nic in nics:
        if nic not in kept:
            known = nic.bytes_per_s
            rate = "of unknown rate" if known is None else format_rate(known, "B/s")
            said.append(
                f"NIC {nic.name} is left out: {rate}, others have {format_rate(best, 'B/s')}; "
                "--nics names which to use"
            )
    return tuple(said)


def _many(nics: Sequence[FoundPart], dump: NodeDump) -> tuple[str, ...]:
    num_gpus = sum(part.kind == "gpu" for part in dump.parts)
    if len(nics) <= num_gpus:
        return ()
    return (
        f"all {len(nics)} NICs are planned with though there are {num_gpus} GPUs: where some "
        "serve storage, name the others with --nics",
    )
