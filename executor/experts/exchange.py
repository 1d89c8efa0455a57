"""Rows to the ranks of their experts and back, with gradients.

Of T tokens with k experts each, a rank sends T · k rows (*dropless*), in order of expert, or
exactly C rows to every expert (*padded*: zeros where there are fewer, and no counts are exchanged).
Expert e is on member e // (E / ep) of the ep group.

* dropless: one all_to_all of int64 [ep, E / ep + 1] tells every rank what it will get; then
  ``dispatch`` and ``combine`` are an all_to_all of uneven pieces each. Where all rows of all ranks
  go to one and the same rank, they are a gather and a scatter. That is unanimous, because the
  counts exchange carries who would agree to it.
* padded: an all_to_all of even pieces each.
* a group of one calls nothing.

What is recorded as the size of an all_to_all is the token side's rows, T · k · h or E · C · h times
the bytes per element, in both directions, forward and backward. A rank or expert without rows stays
in the autograd graph, so every rank enters every collective of the backward. A recompute
(``executor.experts.replay``) sends what the first forward sent, by the same plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from executor.collectives.communicator import Communicator

__all__ = ["ExchangePlan", "ExpertExchange"]

_NOT_HOT: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """The way of one micro-batch's rows through one layer; ``dispatch`` and ``combine`` share it.

    Attributes:
        experts: Of every token, [T, k].
        routes: Those that are sent, as indices into ``experts.flatten()``.
        slots: Row of the sent buffer that each of them takes; None: the i-th takes the i-th, and
            they are in order of expert.
        num_sent: Rows of the sent buffer.
        sent_splits: Rows to each rank; None: evenly many.
        received_splits: Rows from each rank; None: evenly many.
        by_expert: Received row of each row that the experts see; None: as they come.
        rows_per_expert: Rows of each expert of this rank.
        hot: Member of the group that gets all rows of all ranks, or None.
    """

    experts: torch.Tensor
    routes: torch.Tensor
    slots: torch.Tensor | None
    num_sent: int
    sent_splits: list[int] | None
    received_splits: list[int] | None
    by_expert: torch.Tensor | None
    rows_per_expert: list[int]
    hot: int | None

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each of ``routes``."""
        return self.routes // self.experts.shape[1]


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Exchanges rows between tokens and experts over the ep group.

    Attributes:
        ep: Ranks among which the experts are shared out.
        num_experts: On all of them together, a multiple of ``ep.size``.
        gather_when_hot: Whether total collapse is gathered and scattered; otherwise it is an
            all_to_all of uneven pieces like everything else. The same on all ranks.
    """

    ep: Communicator
    num_experts: int
    gather_when_hot: bool = True

    def plan_dropless(self, experts: torch.Tensor) -> ExchangePlan:
        """Return the way of all routes of ``experts`` [T, k]; exchanges the counts."""
        flat = experts.flatten()
        sent = flat.bincount(minlength=self.num_experts).view(self.ep.size, -1)
        message = torch.cat((sent, self._vote(sent).expand(self.ep.size, 1)), dim=1)
        received = self.ep.all_to_all(message)
        to_ranks, of_ranks = torch.stack((message, received)).tolist()  # the one wait
        counts = [row[:-1] for row in of_ranks]
        return ExchangePlan(
            experts=experts,
            routes=flat.argsort(stable=True),
            slots=None,
            num_sent=flat.numel(),
            sent_splits=[sum(row[:-1]) for row in to_ranks],
            received_splits=[sum(row) for row in counts],
            by_expert=self._by_expert(received[:, :-1]),
            rows_per_expert=[sum(column) for column in zip(*counts, strict=True)],
            hot=self._elected({row[-1] for row in of_ranks}),
        )

    def plan_padded(
        self, experts: torch.Tensor, places: torch.Tensor, capacity: int
    ) -> ExchangePlan:
        """Return the way of the routes whose place is below ``capacity``; calls nothing.

        All ranks of the group must have one capacity, so equally many tokens.

        Args:
            experts: [T, k].
            places: Of each route among those to its expert, [T, k] (``gate.rank_in_expert``).
            capacity: Rows that every expert gets of every rank.
        """
        slots = experts * capacity + places
        routes = (places < capacity).flatten().nonzero().squeeze(1)
        per_rank = self.num_experts // self.ep.size
        received = experts.new_full((self.ep.size, per_rank), capacity)
        return ExchangePlan(
            experts=experts,
            routes=routes,
            slots=slots.flatten()[routes],
            num_sent=self.num_experts * capacity,
            sent_splits=None,
            received_splits=None,
            by_expert=self._by_expert(received),
            rows_per_expert=[self.ep.size * capacity] * per_rank,
            hot=None,
        )

    def dispatch(self, tokens: torch.Tensor, plan: ExchangePlan) -> torch.Tensor:
        """Return the rows for this rank's experts, [rows, h], one expert's after the other's.

        Args:
            tokens: Of this rank, [T, h].
            plan: The way they take.
        """
        rows = tokens.index_select(0, plan.tokens)
        if plan.slots is not None:
            rows = _placed(rows, plan.slots, plan.num_sent)
        rows = self._send(rows, plan)
        return rows if plan.by_expert is None else rows.index_select(0, plan.by_expert)

    def combine(
        self, rows: torch.Tensor, weights: torch.Tensor, plan: ExchangePlan
    ) -> torch.Tensor:
        """Return each token's weighted sum of its experts' outputs, [T, h].

        Args:
            rows: Outputs for what ``dispatch`` returned, [rows, h].
            weights: Of every route, [T, k]; those of dropped routes are not used.
            plan: The way the rows came.
        """
        dtype = rows.dtype
        if plan.by_expert is not None:
            rows = _placed(rows, plan.by_expert, rows.shape[0])
        rows = self._send_back(rows, plan)
        if plan.slots is not None:
            rows = rows.index_select(0, plan.slots)
        weighted = rows * weights.flatten().index_select(0, plan.routes).unsqueeze(1)
        total = weighted.new_zeros(weights.shape[0], rows.shape[1])
        return total.index_add(0, plan.tokens, weighted).to(dtype)

    def _vote(self, sent: torch.Tensor) -> torch.Tensor:
        """Return rows · ep + the rank that all rows of ``sent`` [ep, E / ep] go to, or -1.

        Rows are part of it because a gather needs equally many of every rank.
        """
        to_rank = sent.sum(dim=1)
        num_rows = to_rank.sum()
        is_hot = (to_rank.max() == num_rows) & (num_rows > 0) & self.gather_when_hot
        return torch.where(is_hot, num_rows * self.ep.size + to_rank.argmax(), _NOT_HOT)

    def _elected(self, votes: set[int]) -> int | None:
        """Return the member that every rank voted for, all with equally many rows, or None."""
        return votes.pop() % self.ep.size if len(votes) == 1 and _NOT_HOT not in votes else None

    def _by_expert(self, received: torch.Tensor) -> torch.Tensor | None:
        """Return the order that turns rows by (rank, expert) [ep, E / ep] into rows by expert."""
        if self.ep.size == 1:
            return None
        experts = torch.arange(received.shape[1], device=received.device).repeat(self.ep.size)
        return experts.repeat_interleave(received.flatten()).argsort(stable=True)

    def _send(self, rows: torch.Tensor, plan: ExchangePlan) -> torch.Tensor:
        if self.ep.size == 1:
            return rows
        if plan.hot is not None:
            return _apply(_Gather, rows, self.ep, plan.hot)
        return _apply(
            _AllToAll, rows, self.ep, plan.sent_splits, plan.received_splits, plan.num_sent
        )

    def _send_back(self, rows: torch.Tensor, plan: ExchangePlan) -> torch.Tensor:
        if self.ep.size == 1:
            return rows
        if plan.hot is not None:
            return _apply(_Scatter, rows, self.ep, plan.hot, plan.num_sent)
        return _apply(
            _AllToAll, rows, self.ep, plan.received_splits, plan.sent_splits, plan.num_sent
        )


def _placed(rows: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return [num_rows, h] with ``rows`` at ``index`` and zeros elsewhere."""
    return rows.new_zeros(num_rows, rows.shape[1]).index_copy(0, index, rows)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return cast(Callable[..., torch.Tensor], function.apply)(*arguments)


class _AllToAll(torch.autograd.Function):
    """Rows there; gradients back by the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        ep: Communicator,
        in_splits: list[int] | None,
        out_splits: list[int] | None,
        num_recorded: int,
    ) -> torch.Tensor:
        ctx.call = ep, in_splits, out_splits, num_recorded
        return _all_to_all(rows, ep, in_splits, out_splits, num_recorded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ep, in_splits, out_splits, num_recorded = ctx.call
        grad = _all_to_all(grads[0], ep, out_splits, in_splits, num_recorded)
        return grad, None, None, None, None


class _Gather(torch.autograd.Function):
    """All ranks' equally many rows to ``root``, which scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ep: Communicator, root: int) -> torch.Tensor:
        ctx.call = ep, root, rows.shape[0]
        return _gather(rows, ep, root)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scatter(grads[0], *ctx.call), None, None


class _Scatter(torch.autograd.Function):
    """An equal piece of ``root``'s rows to every rank, from which it gathers their gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ep: Communicator, root: int, num_rows: int
    ) -> torch.Tensor:
        ctx.call = ep, root
        return _scatter(rows, ep, root, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], *ctx.call), None, None, None


def _all_to_all(
    rows: torch.Tensor,
    ep: Communicator,
    in_splits: list[int] | None,
    out_splits: list[int] | None,
    num_recorded: int,
) -> torch.Tensor:
    size_bytes = num_recorded * rows.shape[1] * rows.element_size()
    return ep.all_to_all(rows, in_splits, out_splits, size_bytes=size_bytes)


def _gather(rows: torch.Tensor, ep: Communicator, root: int) -> torch.Tensor:
    """Return all ranks' rows on ``root``, and none, [0, h], elsewhere."""
    gathered = ep.gather(rows, root)
    return rows.new_empty(0, rows.shape[1]) if gathered is None else gathered


def _scatter(rows: torch.Tensor, ep: Communicator, root: int, num_rows: int) -> torch.Tensor:
    """Return this rank's ``num_rows`` of the rows that ``root`` has."""
    pieces = torch.split(rows, num_rows) if ep.index == root else None
    return ep.scatter(pieces, rows.new_empty(num_rows, rows.shape[1]), root)
