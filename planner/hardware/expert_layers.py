"""Seconds of a whole fused layer of experts, as serving libraries run it and tables measure it.

A plan does not price such layers: it prices their products, activation functions and copies one by
one (``planner.cost.work``). Here the same product prices, with what surrounds them, are held
against whole measured layers, balanced and skewed.
"""

import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import InvalidInputError
from planner.hardware.devices import Device, device_of_tables
from planner.hardware.kernel_tables import SMOOTHNESS, Columns, Points, read_table, rows_where
from planner.hardware.kernels import grouped_gemm_s, memory_bound_s
from planner.hardware.power_law import power_law_skew
from planner.hardware.surfaces import Surface, fit_surface
from planner.plan import Precision

__all__ = [
    "ExpertLayers",
    "expert_layer_s",
    "is_gated",
    "is_measured_layer",
    "layer_model_s",
    "layer_points",
    "routing_exponent",
]

Array = NDArray[np.float64]

_POWER_LAW: Final = re.compile(r"power_law_([0-9]{1,3}(?:\.[0-9]{1,6})?)")
_MAX_EXPONENT: Final = 8
# Of activations, whatever the operands of products are cast to.
_RESULT_BYTES: Final = 2

# Layers of experts with two matrices, by (hidden_size, inter_size): the tables do not say it.
# Nemotron-3 (Nano, Super) has squared-ReLU experts, mlp_hidden_act "relu2" in its config.json.
_NOT_GATED: Final = {(2688, 1856), (4096, 2688)}


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Whole fused layers of experts, columns or numbers that broadcast.

    Attributes:
        tokens: Of all ranks; every rank has them all.
        hidden_size: Of a token.
        width: Of an expert on this rank.
        top_k: Experts per token.
        num_experts: Of all ranks.
        ep: Ranks that share the experts out.
        gated: Experts have three matrices, not two.
    """

    tokens: ArrayLike
    hidden_size: ArrayLike
    width: ArrayLike
    top_k: ArrayLike
    num_experts: ArrayLike
    ep: ArrayLike
    gated: ArrayLike = True

    def columns(self) -> tuple[Array, ...]:
        """Return the fields in order, as arrays of one shape."""
        found = (np.asarray(getattr(self, f.name), dtype=np.float64) for f in fields(self))
        return np.broadcast_arrays(*found)


def expert_layer_s(
    device: Device, precision: Precision, layers: ExpertLayers, routing: str = "balanced"
) -> Array:
    """Return the seconds of layers on the hottest of their ranks.

    Args:
        device: Whose.
        precision: Of the operands.
        layers: Which.
        routing: "balanced", or "power_law_" and an exponent.

    Raises:
        InvalidInputError: The device has no peak in ``precision``, or the routing is neither.
    """
    seconds = layer_model_s(device, precision, layers, _skew(layers, routing))
    surface = _surface(device.tables, routing) if device.tables else None
    if surface is None:
        return seconds
    position, at = _place(layers)
    return seconds * np.exp(surface(position.ravel(), at.reshape(-1, 5))).reshape(seconds.shape)


def layer_model_s(
    device: Device, precision: Precision, layers: ExpertLayers, skew: ArrayLike = 1.0
) -> Array:
    """Return what the products and what surrounds them should take.

    Every rank has all tokens, routes them, computes those of its own experts and adds up: the
    two grouped products, the activation function, copies of rows into expert order and back
    (``layer_row_passes`` over routed rows, ``layer_token_passes`` over tokens,
    ``layer_choice_bytes`` for every token and choice), and ``layer_fixed_s``.

    Args:
        device: Whose.
        precision: Of the operands.
        layers: Which.
        skew: Rows of the hottest rank over the mean; 1 is even.

    Raises:
        InvalidInputError: The device has no peak in ``precision``.
    """
    figures = device.figures
    tokens, hidden_size, width, top_k, num_experts, ep, gated = layers.columns()
    skew = np.asarray(skew, dtype=np.float64)
    groups = num_experts / ep
    rows = tokens * top_k / num_experts * skew
    up, uneven = (1.0 + gated) * width, skew > 1
    products = grouped_gemm_s(device, precision, rows, up, hidden_size, groups, uneven=uneven)
    products = products + grouped_gemm_s(
        device, precision, rows, hidden_size, width, groups, uneven=uneven
    )
    beta = _RESULT_BYTES
    routed = rows * groups * hidden_size * beta * figures.layer_row_passes
    routed = routed + tokens * hidden_size * beta * figures.layer_token_passes
    routed = routed + tokens * top_k * figures.layer_choice_bytes
    activation = memory_bound_s(device, (1.0 + up / width) * width * rows * groups * beta)
    return products + activation + routed / device.memory_bytes_per_s + figures.layer_fixed_s


def layer_points(device: Device, columns: Columns) -> Points:
    """Return where measured layers of one routing lie over ``layer_model_s``."""
    names = (
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        "moe_ep_size", "time_us",
    )  # fmt: skip
    tokens, hidden_size, inter, top_k, num_experts, tp, ep, time_us = (
        columns[name].astype(float) for name in names
    )
    gated = is_gated(hidden_size, inter)
    layers = ExpertLayers(tokens, hidden_size, inter / tp, top_k, num_experts, ep, gated)
    skew = _skew(layers, str(columns["distribution"][0]))
    model = layer_model_s(device, "bf16", layers, skew)
    return Points(*_place(layers), np.log(time_us * 1e-6 / model))


def _place(layers: ExpertLayers) -> tuple[Array, Array]:
    """Return position and coordinates of layers on their surface, shapes [...] and [..., 5]."""
    tokens, hidden_size, width, top_k, num_experts, ep, _ = layers.columns()
    at = (hidden_size, width, num_experts / ep, tokens * top_k / num_experts, ep)
    return np.log2(tokens), np.log2(np.stack(at, axis=-1))


@cache
def _surface(tables: str, routing: str) -> Surface | None:
    """Return log(measured / modelled) of layers of one routing; None if unmeasured."""
    chosen = rows_where(read_table(tables, "moe_layer"), "distribution", routing)
    if not chosen:
        return None
    return fit_surface(*layer_points(device_of_tables(tables), chosen), SMOOTHNESS["moe_layer"])


def routing_exponent(routing: str) -> float | None:
    """Return the exponent of a power law, or None of a balanced load.

    >>> routing_exponent("power_law_1.2"), routing_exponent("balanced")
    (1.2, None)

    Raises:
        InvalidInputError: It is neither, or no such law can be drawn from.
    """
    if routing == "balanced":
        return None
    law = _POWER_LAW.fullmatch(routing)
    exponent = float(law[1]) if law else 0.0
    if not 0 < exponent <= _MAX_EXPONENT or exponent == 1:
        raise InvalidInputError(
            f"distribution={routing[:60]!r}; need 'balanced', or 'power_law_' and an exponent "
            f"above 0, at most {_MAX_EXPONENT} and not 1, as power_law_1.2",
            where="distribution",
        )
    return exponent


def is_measured_layer(device: Device, routing: str) -> bool:
    """Return whether layers of experts of that routing were measured for the device."""
    return device.tables is not None and _surface(device.tables, routing) is not None


def _skew(layers: ExpertLayers, routing: str) -> Array:
    """Return rows of the hottest rank over the mean under a table's routing; 1 if balanced."""
    tokens, *_, num_experts, ep, _ = layers.columns()
    exponent = routing_exponent(routing)
    if exponent is None:
        return np.ones(tokens.shape)
    shapes = np.stack([tokens.ravel(), num_experts.ravel(), ep.ravel()], axis=1)
    distinct, back = np.unique(shapes, axis=0, return_inverse=True)
    skews = [power_law_skew(int(t), int(e), int(p), exponent) for t, e, p in distinct]
    return np.array(skews)[back.reshape(-1)].reshape(tokens.shape)


def is_gated(hidden_size: Array, inter_size: Array) -> NDArray[np.bool_]:
    """Return whether experts have three matrices; a table does not say it."""
    shapes = zip(hidden_size.astype(int), inter_size.astype(int), strict=True)
    return np.array([shape not in _NOT_GATED for shape in shapes], dtype=bool)
