"""One file per target: what it can run, as rules with reasons."""

from planner.frameworks import executor, megatron
from planner.frameworks.rules import COMMON_RULES, Rule
from planner.plan import Axis, Collective, Framework

__all__ = ["overlaps_data_parallel", "rules_for", "runs_hierarchical"]


def rules_for(framework: Framework) -> tuple[Rule, ...]:
    """Return the rules a layout must obey to run on ``framework``, the general ones first."""
    return (*COMMON_RULES, *{"megatron": megatron.RULES, "executor": executor.RULES}[framework])


def overlaps_data_parallel(framework: Framework) -> bool:
    """Return whether gradient reduction and parameter gathering run beside compute."""
    return {
        "megatron": megatron.OVERLAP_DATA_PARALLEL,
        "executor": executor.OVERLAP_DATA_PARALLEL,
    }[framework]


def runs_hierarchical(framework: Framework, axis: Axis, op: Collective) -> bool:
    """Return whether ``framework`` can run ``op`` on ``axis`` inside units and then across them.

    NCCL has no such algorithm: it takes groups of groups, made by the framework.
    """
    return (axis, op) in {
        "megatron": megatron.HIERARCHICAL,
        "executor": executor.HIERARCHICAL,
    }[framework]
