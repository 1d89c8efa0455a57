"""One file per target: what it can run, as rules with reasons."""

from planner.frameworks import executor, megatron
from planner.frameworks.rules import COMMON_RULES, Rule
from planner.plan import Framework

__all__ = ["overlaps_data_parallel", "rules_for"]


def rules_for(framework: Framework) -> tuple[Rule, ...]:
    """Return the rules a layout must obey to run on ``framework``, the general ones first."""
    return (*COMMON_RULES, *{"megatron": megatron.RULES, "executor": executor.RULES}[framework])


def overlaps_data_parallel(framework: Framework) -> bool:
    """Return whether gradient reduction and parameter gathering run beside compute."""
    return {
        "megatron": megatron.OVERLAP_DATA_PARALLEL,
        "executor": executor.OVERLAP_DATA_PARALLEL,
    }[framework]
