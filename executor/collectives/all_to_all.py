"""An all_to_all that sends one message to another unit instead of one to each of its members."""

from collections.abc import Mapping, Sequence

import torch

from executor.collectives.direct import pieces
from executor.collectives.messages import Messages, wait
from executor.collectives.protocol import Splits
from executor.mesh import RankGroup

__all__ = ["TwoLevelAllToAll"]


class TwoLevelAllToAll:
    """all_to_all in two phases over one group: inside each unit, then across units.

    A member's *position* is its index in its unit. In phase 1, rows for the member at position q of
    any unit go to the one at q modulo g of the sender's own unit of g members. In phase 2, that
    one sends what it has from its whole unit to each of those it serves, in one message. Among U
    units of g members, a member sends (g - 1) + (U - 1) messages instead of n - 1; uneven splits
    add g - 1 small ones. Across units go the same bytes as in one phase, inside a unit more.
    """

    def __init__(self, group: RankGroup) -> None:
        self._size, self._index = group.size, group.index
        self._messages = Messages(group)
        self._units = group.units or (tuple(range(group.size)),)
        self._unit = next(unit for unit in self._units if group.index in unit)
        self._others = [member for member in self._unit if member != group.index]
        self._served = {member: self._served_by(member, self._unit) for member in self._unit}

    def all_to_all(
        self, received: torch.Tensor, rows: torch.Tensor, in_splits: Splits, out_splits: Splits
    ) -> None:
        """Send the i-th piece of ``rows`` to member i; fill ``received`` in member order.

        Args:
            received: [rows, ...].
            rows: [rows, ...].
            in_splits: Rows for each member. None = evenly many, then on all members.
            out_splits: Rows from each member. None as ``in_splits`` is.
        """
        sent = [piece.view(-1) for piece in pieces(rows, in_splits, self._size)]
        into = [piece.view(-1) for piece in pieces(received, out_splits, self._size)]
        lengths = self._lengths_inside([piece.numel() for piece in sent], in_splits is None)
        self._cross(self._collect(sent, lengths), into)

    def _served_by(self, member: int, unit: Sequence[int]) -> list[int]:
        """Return whom a member of ``unit`` passes its unit's rows to; of its own unit, itself."""
        position, size = unit.index(member), len(unit)
        return [to for other in self._units for to in other[position::size]]

    def _lengths_inside(self, mine: list[int], are_alike: bool) -> Mapping[int, Sequence[int]]:
        """Return the elements that each member of this unit has for each member of the group."""
        if are_alike:
            return dict.fromkeys(self._unit, mine)
        lengths = {member: torch.tensor(mine) for member in self._unit}
        works = [self._messages.receive(lengths[member], member) for member in self._others]
        own = lengths[self._index]
        wait(*works, *(self._messages.send(own, member) for member in self._others))
        return {member: tensor.tolist() for member, tensor in lengths.items()}

    def _collect(
        self, sent: Sequence[torch.Tensor], lengths: Mapping[int, Sequence[int]]
    ) -> dict[int, torch.Tensor]:
        """Phase 1: return what the unit has for each member that this one serves, in unit order."""
        served = self._served[self._index]
        bundles = {
            member: torch.cat([sent[to] for to in self._served[member]]) for member in self._unit
        }
        arrived = {self._index: bundles[self._index]}
        works = []
        for member in self._others:
            arrived[member] = sent[0].new_empty(sum(lengths[member][to] for to in served))
            works.append(self._messages.receive(arrived[member], member))
        wait(*works, *(self._messages.send(bundles[member], member) for member in self._others))
        parts = {
            member: _cut(arrived[member], [lengths[member][to] for to in served])
            for member in self._unit
        }
        return {
            to: torch.cat([parts[member][place] for member in self._unit])
            for place, to in enumerate(served)
        }

    def _cross(self, outgoing: Mapping[int, torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Phase 2: send to the members that this one serves; fill ``into``, a part per member."""
        position = self._unit.index(self._index)
        works, arrived = [], []
        for unit in self._units:
            parts = [into[member] for member in unit]
            if unit is self._unit:
                bundle = outgoing[self._index]
            else:
                bundle = into[0].new_empty(sum(part.numel() for part in parts))
                works.append(self._messages.receive(bundle, unit[position % len(unit)]))
            arrived.append((bundle, parts))
        works += [
            self._messages.send(bundle, to) for to, bundle in outgoing.items() if to != self._index
        ]
        wait(*works)
        for bundle, parts in arrived:
            for part, piece in zip(parts, _cut(bundle, [p.numel() for p in parts]), strict=True):
                part.copy_(piece)


def _cut(bundle: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split(bundle, list(lengths))
