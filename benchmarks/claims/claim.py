"""A claim with our figure, and the clusters, models and layouts that several claims share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from planner.cost.problem import Problem
from planner.cost.step import Priced, price
from planner.layout.candidates import Candidates
from planner.layout.groups import Group, lay_group
from planner.model.spec import ModelSpec
from planner.reviewing import layout_problem
from planner.topology.bundled import load_topology
from planner.topology.compile import compile_fabric
from planner.topology.fabric import Fabric

__all__ = [
    "Claim",
    "Verdict",
    "as_share",
    "as_times",
    "fabric_of",
    "gpt",
    "laid",
    "ranks",
    "row",
    "step_s",
    "waiting_share",
]

Verdict = Literal["holds", "only if", "wrong"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said, and what we find.

    Attributes:
        number: By which other pages may name it.
        said: The claim.
        figure: Ours, and of what cluster, model and layout.
        verdict: Derived from the figure wherever it hinges on one.
        why: In a sentence or two.
    """

    number: int
    said: str
    figure: str
    verdict: Verdict
    why: str


def as_share(share: float) -> str:
    """Return a fraction for print.

    >>> as_share(0.254), as_share(0.004)
    ('25 %', '0.4 %')
    """
    percent = 100 * share
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def as_times(factor: float) -> str:
    """Return a factor for print.

    >>> as_times(4.8), as_times(64)
    ('4.8x', '64x')
    """
    return f"{factor:.3g}x"


def row(value: float) -> Any:
    """Return a column of one row."""
    return np.array([value])


@cache
def fabric_of(topology: str, num_nodes: int) -> Fabric:
    """Return some nodes of a bundled cluster."""
    return compile_fabric(load_topology(topology), num_nodes)


def ranks(fabric: Fabric, degree: int, stride: int = 1) -> Group:
    """Return a group, one row."""
    return lay_group(fabric, row(degree), row(stride))


def laid(
    model: str | ModelSpec,
    topology: str,
    num_nodes: int,
    layout: Mapping[str, Any],
    **training: Any,
) -> tuple[Problem, Candidates]:
    """Return one layout on nodes of a bundled cluster; ``commplan memory`` has the same defaults.

    Args:
        model: Bundled name, or a shape.
        topology: Bundled name.
        num_nodes: Of it; the layout may need fewer GPUs than they have.
        layout: Fields of ``planner.request.Constraints``, dp among them.
        training: Fields of ``planner.plan.TrainingSpec``.
    """
    return layout_problem(
        model=model,
        layout=dict(layout),
        topology=topology,
        nodes=num_nodes,
        device=None,
        training=training,
        framework="megatron",
    )


def step_s(problem: Problem, candidate: Candidates) -> float:
    """Return the step time of the one candidate."""
    return float(price(problem, candidate).step_time_s()[0])


def waiting_share(priced: Priced) -> float:
    """Return the part of a step that waits for messages: what hides beside compute is not in it."""
    waiting = (
        priced.tp_exposed_s
        + priced.cp_exposed_s
        + priced.ep_exposed_s
        + priced.dp_exposed_s
        + priced.pp_exposed_s
    )
    return float((waiting / priced.step_time_s())[0])


def gpt(
    name: str, *, num_layers: int, hidden_size: int, num_heads: int, **fields: Any
) -> ModelSpec:
    """Return a model of GPT's shape: feed-forward of four hidden sizes, two matrices, tied ends.

    Args:
        name: Of the model.
        num_layers: Of the model.
        hidden_size: Of the model.
        num_heads: Of attention, none shared.
        fields: More fields of ``ModelSpec``.
    """
    return ModelSpec.model_validate(
        {
            "name": name,
            "source": "the shape that a claim speaks of",
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "vocab_size": 51_200,
            "attention": {
                "num_heads": num_heads,
                "num_kv_heads": num_heads,
                "head_dim": hidden_size // num_heads,
                "bias": True,
            },
            "feed_forward": {"hidden_size": 4 * hidden_size, "gated": False, "bias": True},
            "norm": "layer",
            "learned_positions": 2048,
            "tied_embeddings": True,
            **fields,
        }
    )
