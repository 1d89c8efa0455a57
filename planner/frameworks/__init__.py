"""One file per target: what it can run, as rules with reasons."""

from planner.frameworks import executor, megatron
from planner.frameworks.rules import COMMON_RULES, Rule
from planner.methods import OWN_METHODS
from planner.model.spec import ModelSpec
from planner.plan import Collective, Framework, Method, TrainingSpec

__all__ = [
    "keeps_expert_outputs",
    "keeps_gathered_inputs",
    "overlaps_data_parallel",
    "overlaps_tensor_parallel",
    "own_methods",
    "refused_model",
    "refused_training",
    "rules_for",
    "stops_recompute_early",
]


def rules_for(framework: Framework) -> tuple[Rule, ...]:
    """Return the rules a layout must obey to run on ``framework``, the general ones first."""
    return (*COMMON_RULES, *{"megatron": megatron.RULES, "executor": executor.RULES}[framework])


def overlaps_data_parallel(framework: Framework) -> bool:
    """Return whether gradient reduction and parameter gathering run beside compute."""
    return {
        "megatron": megatron.OVERLAP_DATA_PARALLEL,
        "executor": executor.OVERLAP_DATA_PARALLEL,
    }[framework]


def overlaps_tensor_parallel(framework: Framework) -> bool:
    """Return whether the sum of an input gradient runs beside the weight gradient's product."""
    return {
        "megatron": megatron.OVERLAP_TENSOR_PARALLEL,
        "executor": executor.OVERLAP_TENSOR_PARALLEL,
    }[framework]


def keeps_gathered_inputs(framework: Framework) -> bool:
    """Return whether inputs gathered over tp are kept whole for the weight gradient.

    Otherwise a rank keeps its shard and gathers once more.
    """
    return {
        "megatron": megatron.KEEPS_GATHERED_INPUTS,
        "executor": executor.KEEPS_GATHERED_INPUTS,
    }[framework]


def keeps_expert_outputs(framework: Framework) -> bool:
    """Return whether what experts return, and rows in their order, are kept for the backward.

    Otherwise rows are weighted by their gates before the last product, and only its input is kept.
    """
    return {
        "megatron": megatron.KEEPS_EXPERT_OUTPUTS,
        "executor": executor.KEEPS_EXPERT_OUTPUTS,
    }[framework]


def stops_recompute_early(framework: Framework) -> bool:
    """Return whether a recomputed forward ends at the last tensor that the backward needs."""
    return {
        "megatron": megatron.STOPS_RECOMPUTE_EARLY,
        "executor": executor.STOPS_RECOMPUTE_EARLY,
    }[framework]


def refused_training(framework: Framework, training: TrainingSpec) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) where no layout makes ``training`` run."""
    return {
        "megatron": megatron.refused_training,
        "executor": executor.refused_training,
    }[framework](training)


def refused_model(
    framework: Framework, model: ModelSpec, training: TrainingSpec
) -> tuple[str, str] | None:
    """Return (field, what is wrong and what to try) where no layout makes ``model`` run."""
    return {
        "megatron": megatron.refused_model,
        "executor": executor.refused_model,
    }[framework](model, training)


def own_methods(framework: Framework, library: str, op: Collective) -> tuple[Method, ...]:
    """Return how ``framework`` can run ``op`` beside the calls of the ``library``."""
    if framework == "megatron":  # collectives are NCCL's own
        return ()
    return OWN_METHODS[library].get(op, ())
