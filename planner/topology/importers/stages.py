"""The stages of switches between nodes, innermost first, as tiers of a document."""

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from planner.errors import InvalidInputError
from planner.topology.checks import OVERSUBSCRIPTION_RANGE, is_switch_of
from planner.topology.document import HOST_NAME_PATTERN, Tier
from planner.topology.importers.dump import FabricDump, FoundTier
from planner.topology.importers.figures import (
    BELOW_SPINE_LATENCY_S,
    ONE_STAGE_LATENCY_S,
    ONE_SWITCH_LATENCY_S,
)
from planner.topology.importers.options import ImportOptions

__all__ = ["found_stages", "stated_stages", "tiers_of"]

_MAX_NAMES_TRIED: Final = 16
_SHOWN: Final = 2


def stated_stages(
    options: ImportOptions, layout: Literal["rail", "tree"], max_nodes: int
) -> tuple[list[FoundTier], list[str]]:
    """Return leaves and a spine as the user states them, and what was assumed.

    Raises:
        InvalidInputError: Oversubscription of leaves is stated, but there is one stage.
    """
    leaf = options.leaf_nodes
    if leaf is None or leaf >= max_nodes:
        if options.oversubscription is not None:
            raise InvalidInputError(
                f"oversubscription={options.oversubscription:g} is between leaves and what joins "
                "them, but there is one stage; say how many nodes are under a leaf (leaf_nodes), "
                "fewer than there are",
                where="oversubscription",
            )
        full = f"one full stage of switches joins {max_nodes} nodes (--leaf-nodes)"
        return [FoundTier("fabric", (max_nodes,), ())], [full] if leaf is None else []
    whole, rest = divmod(max_nodes, leaf)
    units = (leaf,) * whole + ((rest,) if rest else ())
    name = "rail" if layout == "rail" else "leaf"
    return [FoundTier(name, units, ()), FoundTier("spine", (max_nodes,), ())], []


def found_stages(
    fabric: FabricDump, options: ImportOptions, *, max_nodes: int, with_blocks: bool, source: str
) -> tuple[list[FoundTier], list[str]]:
    """Return the stages of a fabric, one more where nothing joins the last, and what was assumed.

    What lies above a switch that joins all hosts, nothing passes: it is left out.

    Args:
        fabric: As read.
        options: What the user says beside it.
        max_nodes: Of the cluster.
        with_blocks: Blocks are no NVLink domains, so they are the innermost stage.
        source: What to call the text.

    Raises:
        InvalidInputError: The user states leaves that the text has.
    """
    if options.leaf_nodes is not None:
        raise InvalidInputError(
            f"leaf_nodes={options.leaf_nodes}, but {source} says which nodes are under a leaf; "
            "leave it out",
            where="leaf_nodes",
        )
    blocks = [fabric.domains] if fabric.domains is not None and with_blocks else []
    found = [*blocks, *fabric.tiers]
    whole = (max_nodes,)
    if not found:
        one = f"one stage of switches joins all hosts: {source} has none"
        return [FoundTier("fabric", whole, ())], [one]
    joining = next((number for number, stage in enumerate(found, 1) if stage.units == whole), None)
    if joining is not None:
        above = ", ".join(stage.name for stage in found[joining:])
        name = found[joining - 1].name
        idle = (
            f"one {name} joins all hosts, what is above it ({above}) joins nothing more: left out"
        )
        return found[:joining], [idle] if above else []
    names = found[-1].unit_names
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    top = (
        f"nothing in {source} joins {', '.join(names[:_SHOWN])}{more}: one more stage of switches "
        "above them is assumed"
    )
    return [*found, FoundTier("top", whole, ())], [top]


def tiers_of(
    stages: Sequence[FoundTier],
    options: ImportOptions,
    *,
    max_nodes: int,
    domain_units: Sequence[int] | None,
    hosts: Sequence[str],
    source: str,
) -> tuple[tuple[Tier, ...], list[str]]:
    """Return the tiers of a document, and what was assumed.

    What a stage lets go up thins what reaches the next: a tier of a document has the figure of
    the stage below it.

    Args:
        stages: Innermost first; the last has one unit.
        options: ``oversubscription`` is that of the first stage.
        max_nodes: Of the cluster.
        domain_units: Nodes of each NVLink domain, if there are any.
        hosts: Names that no tier may have with a number behind it.
        source: Who says so.
    """
    said: list[str] = []
    full = [stage.name for stage in stages[:-1] if stage.oversubscription is None]
    tiers: list[Tier] = []
    named = _are_named(stages, hosts)
    goes_up = 1.0
    for number, stage in enumerate(stages):
        latency_s, what = _latency(number, len(stages))
        name = _free_name(stage.name, hosts, [tier.name for tier in tiers])
        tiers.append(
            Tier(
                name=name,
                units=None if stage.units == (max_nodes,) else stage.units,
                unit_names=stage.unit_names if named and stage.unit_names else None,
                oversubscription=min(OVERSUBSCRIPTION_RANGE[1], goes_up),
                latency_s=latency_s,
                source=f"{source}. Latency assumed: {what}",
            )
        )
        goes_up = max(1.0, stage.oversubscription or 1.0)
        if number == 0 and options.oversubscription is not None:
            if stage.oversubscription is not None:
                said.append(
                    f"oversubscription {options.oversubscription:g} above {stage.name} is the "
                    f"user's; {source} has {stage.oversubscription:.3g}"
                )
            goes_up = options.oversubscription
            full = [name for name in full if name != stage.name]
    if full:
        said.append(
            f"as much goes up from {', '.join(full)} as enters (--oversubscription says otherwise "
            "of the first): no text says how much does"
        )
    return _with_equal_units(tiers, domain_units), said


def _are_named(stages: Sequence[FoundTier], hosts: Sequence[str]) -> bool:
    """Return whether a document can have the names that the text has for switches.

    A last stage that was assumed has one switch and no name.
    """
    names = [name for stage in stages for name in stage.unit_names]
    complete = all(len(stage.unit_names) == len(stage.units) for stage in stages[:-1])
    return (
        bool(names)
        and complete
        and len({*names, *hosts}) == len(names) + len(hosts)
        and all(re.fullmatch(HOST_NAME_PATTERN, name) for name in names)
        and not any(is_switch_of(tier, name) for tier in ("domain", "top") for name in names)
    )


def _latency(number: int, num_stages: int) -> tuple[float, str]:
    if number:
        return BELOW_SPINE_LATENCY_S, "two more switches and 100 m more fibre"
    if num_stages > 1:
        return ONE_SWITCH_LATENCY_S, "one switch and its cables"
    return ONE_STAGE_LATENCY_S, "leaf, spine and cables"


def _with_equal_units(
    tiers: Iterable[Tier], domain_units: Sequence[int] | None
) -> tuple[Tier, ...]:
    """Write the size of units once where all are equal, but for a last that is not full."""
    short: list[Tier] = []
    below = 1 if domain_units is None else _size(domain_units)
    for tier in tiers:
        size = None if tier.units is None else _size(tier.units)
        if size and below and size > below and size % below == 0:
            tier = tier.model_copy(update={"num_nodes": size, "units": None})
        else:
            size = None
        short.append(tier)
        below = size
    return tuple(short)


def _size(units: Sequence[int]) -> int | None:
    """Return the size of equal units, the last perhaps smaller; None if they differ."""
    return units[0] if set(units[:-1]) <= {units[0]} and units[-1] <= units[0] else None


def _free_name(name: str, hosts: Sequence[str], taken: Sequence[str]) -> str:
    """Return ``name``, or one like it that is no other tier's, nor a host's but for its number.

    Raises:
        InvalidInputError: Hosts have all the names that are tried.
    """
    for number in range(_MAX_NAMES_TRIED):
        tried = f"{name[:16]}{'-switch' if number else ''}{'-x' * (number - 1)}"
        if tried not in taken and not any(is_switch_of(tried, host) for host in hosts):
            return tried
    raise InvalidInputError(
        f"hosts are called like every name for the switches of a {name}; rename them",
        where="fabric",
    )
