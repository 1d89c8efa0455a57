"""What a fabric's library has for an operation, what it takes by itself, and why not the rest."""

from typing import Final

import numpy as np

from planner.cost.algorithms import NEEDED_OF_GROUP, is_possible
from planner.cost.nccl_tuner import ALGORITHMS, default_choice
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import (
    LIBRARY_RULES,
    OTHER_METHODS,
    OWN_METHODS,
    LibraryRule,
    Need,
    library_rules,
)
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric

__all__ = ["chooses_knowingly", "known_methods", "library_default", "library_methods", "why_not"]

_NEEDS: Final[dict[Need, str]] = {
    "multicast": "switches at the innermost level that reduce",
    "network": "a second level",
    "sharp": "a plugin by which switches of the network reduce",
}


def library_methods(fabric: Fabric, op: Collective) -> tuple[Method, ...]:
    """Return how the library of this fabric can run ``op`` there."""
    return tuple(
        Method(rule.algorithm)
        for rule in library_rules(fabric.library, op)
        if not _missing(fabric, rule)
    )


def _missing(fabric: Fabric, rule: LibraryRule) -> list[str]:
    """Return what the machine lacks."""
    has = {
        "multicast": fabric.levels[0].multicast,
        "network": len(fabric.levels) > 1,
        "sharp": fabric.sharp,
    }
    return [_NEEDS[need] for need in rule.needs if not has[need]]


def known_methods(fabric: Fabric, op: Collective) -> tuple[Method, ...]:
    """Return every way to run ``op`` on such devices, those that this fabric lacks included.

    What its library has, what other libraries of GPUs have, what we bring, what others bring.
    """
    library = fabric.library
    gpu_libraries = [name for name in LIBRARY_RULES if name != "gloo"]
    libraries = [library] if library == "gloo" else [library, *gpu_libraries]
    found = [Method(rule.algorithm) for name in libraries for rule in library_rules(name, op)]
    found += OWN_METHODS[library].get(op, ())
    found += [method for method, _ in OTHER_METHODS.get(library, {}).get(op, ())]
    return tuple(dict.fromkeys(found))


def why_not(fabric: Fabric, op: Collective, method: Method, group: Group | None = None) -> str:
    """Return why ``method`` cannot run ``op``; empty where it can.

    Args:
        fabric: Library and machine.
        op: Operation.
        method: Any.
        group: Of one row; None asks about the machine alone.
    """
    rules = [rule for rule in library_rules(fabric.library, op) if Method(rule.algorithm) == method]
    brought = (
        *OWN_METHODS[fabric.library].get(op, ()),
        *(other for other, _ in OTHER_METHODS.get(fabric.library, {}).get(op, ())),
    )
    if not rules and method not in brought:
        return f"{fabric.library} does not have it"
    missing = _missing(fabric, rules[0]) if rules else []
    if missing:
        return f"needs {' and '.join(missing)}"
    if group is not None and not is_possible(op, method, group)[0]:
        return f"needs {NEEDED_OF_GROUP[method.algorithm]}"
    return ""


def chooses_knowingly(fabric: Fabric, op: Collective) -> bool:
    """Return whether the library has a choice, and what it takes is known."""
    return fabric.library in ("nccl", "rccl", "gloo") and len(library_methods(fabric, op)) > 1


def library_default(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> Column:
    """Return which of ``library_methods`` the library takes by itself, index [rows].

    Where its model of itself names one that it does not have here, or that the group cannot have,
    the first.
    """
    methods = library_methods(fabric, op)
    if len(methods) < 2:
        return np.zeros(len(size_bytes), dtype=int)
    taken = default_choice(op, fabric, group, size_bytes, sharp=fabric.sharp).algorithm
    number_of = {method.algorithm: number for number, method in enumerate(methods)}
    found = np.array([number_of.get(name, 0) for name in ALGORITHMS])[taken]
    possible = np.stack([is_possible(op, method, group) for method in methods])
    return np.where(possible[found, np.arange(len(found))], found, 0)
