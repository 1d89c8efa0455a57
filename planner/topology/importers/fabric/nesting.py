"""Hosts under switches under switches, as tiers of units that lie inside each other.

Real trees are not clean: a host hangs on one leaf switch per rail, a leaf on several parallel
spines, one leaf directly on the core. A *unit* of the first tier is therefore a set of leaf
switches that share hosts; a unit of a higher tier is what switches of that stage join. Units
only ever grow together from one stage to the next, so they nest by construction.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from planner.topology.importers.dump import FoundTier, Remarks
from planner.topology.importers.hostlist import collect, natural_key

__all__ = ["Nest", "Switch", "nest", "switch_list"]

_TIER_NAMES: Final = ("leaf", "spine", "core")
_MAX_NAME_CHARS: Final = 80


class Switch(NamedTuple):
    """A switch above the leaves: its id, the name to show, and the ids of what it joins."""

    id: str
    name: str
    below: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """What ``nest`` found.

    Attributes:
        hosts: In an order in which every unit's hosts are consecutive.
        tiers: Innermost first.
        unit_of_host: First-tier unit of each host, any number.
        unit_of_switch: One first-tier unit below each switch, leaves included.
        labels: ``labels[tier][first-tier unit]``: equal for what one unit of that tier holds.
    """

    hosts: tuple[str, ...]
    tiers: tuple[FoundTier, ...]
    unit_of_host: Mapping[str, int]
    unit_of_switch: Mapping[str, int]
    labels: tuple[tuple[int, ...], ...]


def _tier_name(position: int) -> str:
    """Return the name of a stage, counted from the hosts: leaf, spine, core, tier4, ..."""
    return _TIER_NAMES[position] if position < len(_TIER_NAMES) else f"tier{position + 1}"


def switch_list(names: Iterable[str]) -> str:
    """Return names of switches in short: a host list, or the first and how many more."""
    ordered = sorted(set(names), key=natural_key)
    if len(ordered) == 1:
        return ordered[0]
    text = collect(ordered)
    return text if len(text) <= _MAX_NAME_CHARS else f"{ordered[0]} and {len(ordered) - 1} more"


def nest(
    leaves_of: Mapping[str, Sequence[str]],
    leaf_names: Mapping[str, str],
    stages: Sequence[Sequence[Switch]],
    remarks: Remarks,
) -> Nest:
    """Return hosts and tiers of a network of switches.

    Args:
        leaves_of: Host to the leaf switches it hangs on, at least one. Units come in the order
            of their first host here; inside a unit hosts are sorted by name.
        leaf_names: Leaf switch to the name to show.
        stages: Switches above the leaves, stage by stage; ``below`` names leaves or switches of
            any lower stage (unknown ids have no hosts below them and do not count).
        remarks: Is told what had to be repaired.
    """
    unit_of_leaf, unit_of_host = _rail_units(leaves_of, remarks)
    num_units = 1 + max(unit_of_host.values(), default=-1)
    unit_of = dict(unit_of_leaf)
    parent = list(range(num_units))
    labels = [tuple(parent)]
    names = [_unit_names(labels[0], unit_of_leaf, leaf_names, ())]
    for stage in stages:
        for switch in stage:
            below = [unit_of[id_] for id_ in switch.below if id_ in unit_of]
            for unit in below:
                parent[_root(parent, unit)] = _root(parent, below[0])
            if below:
                unit_of[switch.id] = below[0]
        labels.append(tuple(_root(parent, unit) for unit in range(num_units)))
        here = {switch.id: unit_of[switch.id] for switch in stage if switch.id in unit_of}
        shown = {switch.id: switch.name for switch in stage}
        names.append(_unit_names(labels[-1], here, shown, (labels[-2], names[-1])))
    hosts = _ordered(unit_of_host, labels)
    tiers = tuple(
        _tier(_tier_name(position), [label[unit_of_host[host]] for host in hosts], shown)
        for position, (label, shown) in enumerate(zip(labels, names, strict=True))
    )
    return Nest(hosts, tiers, unit_of_host, unit_of, tuple(labels))


def _rail_units(
    leaves_of: Mapping[str, Sequence[str]], remarks: Remarks
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the unit of every leaf and of every host.

    Hosts on the same leaves are one unit, and sets of leaves that overlap are too. The most
    frequent sets go first, so that one host with a cable in the wrong rack joins a unit but
    does not join two units to one.
    """
    leaf_sets = {host: tuple(sorted(set(leaves))) for host, leaves in leaves_of.items()}
    counts = Counter(leaf_sets.values())
    unit_of_leaf: dict[str, int] = {}
    unit_of_set: dict[tuple[str, ...], int] = {}
    num_units = 0
    for leaf_set in sorted(counts, key=lambda leaf_set: (-counts[leaf_set], leaf_set)):
        owners = Counter(unit_of_leaf[leaf] for leaf in leaf_set if leaf in unit_of_leaf)
        unit = min(owners, key=lambda unit: (-owners[unit], unit)) if owners else num_units
        num_units = max(num_units, unit + 1)
        unit_of_set[leaf_set] = unit
        for leaf in leaf_set:
            unit_of_leaf.setdefault(leaf, unit)
        if len(owners) > 1:
            hosts = [host for host, leaves in leaf_sets.items() if leaves == leaf_set]
            remarks.add(
                f"{switch_list(hosts)}: on leaf switches of {len(owners)} units; counted with the "
                "one that has most of these switches"
            )
    return unit_of_leaf, {host: unit_of_set[leaf_set] for host, leaf_set in leaf_sets.items()}


def _root(parent: list[int], unit: int) -> int:
    """Return what stands for the set of ``unit``; shortens the way there."""
    while parent[unit] != unit:
        parent[unit] = parent[parent[unit]]
        unit = parent[unit]
    return unit


def _unit_names(
    labels: Sequence[int],
    unit_of_switch: Mapping[str, int],
    shown: Mapping[str, str],
    below: tuple[Sequence[int], Mapping[int, str]] | tuple[()],
) -> dict[int, str]:
    """Return label to name: of the switches of this stage, else the name it had one below."""
    switches: dict[int, list[str]] = {}
    for id_, unit in unit_of_switch.items():
        switches.setdefault(labels[unit], []).append(shown[id_])
    names = {label: switch_list(found) for label, found in switches.items()}
    if below:
        labels_below, names_below = below
        for unit, label in enumerate(labels):
            names.setdefault(label, names_below[labels_below[unit]])
    return names


def _ordered(unit_of_host: Mapping[str, int], labels: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Return hosts with the units of every tier together, outermost first."""
    first: list[dict[int, int]] = [{} for _ in labels]
    for position, unit in enumerate(unit_of_host.values()):
        for seen, label in zip(first, labels, strict=True):
            seen.setdefault(label[unit], position)
    places = {
        unit: tuple(
            seen[label[unit]] for seen, label in zip(reversed(first), reversed(labels), strict=True)
        )
        for unit in set(unit_of_host.values())
    }
    return tuple(
        sorted(unit_of_host, key=lambda host: (places[unit_of_host[host]], natural_key(host)))
    )


def _tier(name: str, labels: Iterable[int], shown: Mapping[int, str]) -> FoundTier:
    """Return the tier whose units are the runs of equal labels."""
    runs = [(label, sum(1 for _ in run)) for label, run in groupby(labels)]
    return FoundTier(
        name=name,
        units=tuple(size for _, size in runs),
        unit_names=tuple(shown[label] for label, _ in runs),
    )
