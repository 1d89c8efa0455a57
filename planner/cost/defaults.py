"""What a fabric's library has for an operation, and what it takes by itself."""

import numpy as np

from planner.cost.nccl_tuner import ALGORITHMS, default_choice
from planner.layout.candidates import Column
from planner.layout.groups import Group
from planner.methods import library_rules
from planner.plan import Collective, Method
from planner.topology.fabric import Fabric

__all__ = ["library_default", "library_methods"]


def library_methods(fabric: Fabric, op: Collective) -> tuple[Method, ...]:
    """Return how the library of this fabric can run ``op`` there."""
    has = {
        "multicast": fabric.levels[0].multicast,
        "network": len(fabric.levels) > 1,
        "sharp": fabric.sharp,
    }
    return tuple(
        Method(rule.algorithm)
        for rule in library_rules(fabric.library, op)
        if all(has[need] for need in rule.needs)
    )


def library_default(op: Collective, fabric: Fabric, group: Group, size_bytes: Column) -> Column:
    """Return which of ``library_methods`` the library takes by itself, index [rows].

    Where its model of itself names one that it does not have here, the first.
    """
    methods = library_methods(fabric, op)
    if len(methods) < 2:
        return np.zeros(len(size_bytes), dtype=int)
    taken = default_choice(op, fabric, group, size_bytes, sharp=fabric.sharp).algorithm
    number_of = {method.algorithm: number for number, method in enumerate(methods)}
    return np.array([number_of.get(name, 0) for name in ALGORITHMS])[taken]
