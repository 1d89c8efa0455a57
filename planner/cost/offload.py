"""What offloading moves between a GPU and its host, and how fast: ops of their own.

Optimizer states on the host: gradients go down, the host updates, weights come up, once per step,
with nothing to hide under. Gradients leave as they are reduced, weights come for every forward and
backward, activations leave and come back: these hide under compute, as far as it lasts.
"""

import numpy as np

from planner.constants import ACHIEVED_FRACTION, HOST_MEMORY_BYTES_PER_S, NVME_BYTES_PER_S
from planner.cost.memory import activation_bytes, offloaded_share
from planner.cost.problem import Problem, gradient_bytes, held_weight_bytes
from planner.cost.shares import fullest_profile, rank_parameters, recomputed_share, shards
from planner.cost.work import HostCopy, optimizer_moved_bytes
from planner.errors import InvalidInputError, UnknownNameError
from planner.hardware.gpus import GpuModel, gpu_model, gpu_models
from planner.layout.candidates import Candidates, Column
from planner.model.blocks import BLOCK_KINDS
from planner.topology.importers.figures import coherent_link

__all__ = ["host_copy_s", "host_work", "link_bytes_per_s"]


def host_work(problem: Problem, c: Candidates) -> list[HostCopy]:
    """Return the copies of a step on the pipeline rank with most parameters; none without offload.

    Args:
        problem: What stays fixed.
        c: Candidates.
    """
    training = problem.training
    if not training.offload:
        return []
    held = rank_parameters(problem, c)
    fullest, rows = fullest_profile(*held), np.arange(len(c))
    dense, experts = (params[rows, fullest] for params in held)

    def shared(from_zero_stage: int) -> Column:
        is_shared = c.zero_stage >= from_zero_stage
        return dense / np.where(is_shared, shards(c), 1) + experts / np.where(is_shared, c.edp, 1)

    once, m = np.ones(len(c)), c.num_micro_batches
    gradients, weights = gradient_bytes(training), held_weight_bytes(training)
    ops = []
    if "optimizer" in training.offload:
        down = 0 if "gradients" in training.offload else gradients
        states = shared(1)
        ops.append(HostCopy("offload_update", once, states * (down + weights), "link", False))
        moved = states * optimizer_moved_bytes(training)
        ops.append(HostCopy("optimizer", once, moved, "memory", False))
    if "gradients" in training.offload:
        times = np.where(c.zero_stage >= 2, m, 1)
        ops.append(HostCopy("offload_gradients", times * once, shared(2) * gradients, "link", True))
    if "weights" in training.offload:
        ops.append(HostCopy("offload_weights", 2 * m * once, shared(3) * weights, "link", True))
    if "activations" in training.offload:
        kept = _kept_bytes(problem, c, fullest)
        ops.append(HostCopy("offload_activations", 2 * m * once, kept, "link", True))
    return ops


def _kept_bytes(problem: Problem, c: Candidates, profile: Column) -> Column:
    """Return activations of one micro-batch that leave a rank of ``profile``, [rows]."""
    counts = problem.splits.counts[c.split, profile]
    redone = recomputed_share(c, counts)
    kept = np.zeros(len(c))
    for index, kind in enumerate(BLOCK_KINDS):
        if counts[:, index].any():
            of_mode = activation_bytes(problem, c, kind)
            plain = activation_bytes(problem, c.with_recompute("none"), kind)
            kept += counts[:, index] * (redone * of_mode + (1 - redone) * plain)
    return kept * offloaded_share(problem, counts[:, None, :])[:, 0]


def host_copy_s(problem: Problem, op: HostCopy) -> Column:
    """Return seconds of one copy, or of the host's own update."""
    if op.over == "memory":
        return np.asarray(op.num_bytes / HOST_MEMORY_BYTES_PER_S.value)
    return np.asarray(op.num_bytes / link_bytes_per_s(problem))


def link_bytes_per_s(problem: Problem) -> float:
    """Return what moves between a GPU and its host, or a drive of it, one direction.

    Raises:
        InvalidInputError: The device is no known GPU, so its link is not known either.
    """
    if problem.training.offload_to == "nvme":
        return NVME_BYTES_PER_S.value
    name = problem.device.name
    found = next((model for model in gpu_models() if model.device == name), None)
    try:
        model: GpuModel = found or gpu_model(name)
    except UnknownNameError as exc:
        raise InvalidInputError(
            f"training.offload: the link of device {name!r} to its host is not known; need a GPU "
            f"by one of its names, or no offload ({exc})",
            where="training.offload",
        ) from exc
    coherent = coherent_link(model)
    nominal = coherent[0] if coherent else model.pcie_bytes_per_s
    return nominal * ACHIEVED_FRACTION["pcie"].value
