"""The hidden world: how long devices really compute, which the planner may find out by measuring.

Computing is emulated by sleeping: two cores cannot compute for eight ranks at once, but they can
sleep for them. A world file says how the time of every operation differs from what the planner
assumes (its prior). Nothing in the planner reads it.
"""

import random
import time
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field

from planner.documents import parse_json, validated
from planner.errors import InvalidInputError

__all__ = ["World"]

_FACTOR_RANGE: Final = (0.7, 1.5)
_SLOW_FACTOR_RANGE: Final = (1.2, 1.6)
_JITTER: Final = 0.02
# The kernel wakes a sleeper up to some 0.1 ms late.
_SPIN_S: Final = 1e-4


class World(BaseModel):
    """What the devices of a cluster do, in a way that a seed decides.

    Attributes:
        seed: Decides the factor of every operation, and the jitter.
        slow_rank: The rank whose device is slower than the others.
        slow_factor: How many times longer it takes.
        jitter: Standard deviation of one execution, as a share.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    slow_rank: int = Field(ge=0)
    slow_factor: float = Field(ge=1)
    jitter: float = Field(ge=0, lt=0.2)

    @classmethod
    def draw(cls, seed: int, world_size: int) -> Self:
        """Return the world of ``seed`` for ``world_size`` ranks.

        >>> World.draw(3, 8) == World.draw(3, 8)
        True

        Raises:
            InvalidInputError: There are no ranks.
        """
        if world_size < 1:
            raise InvalidInputError(f"a world of {world_size} ranks; needs 1 at least")
        dice = random.Random(f"{seed}/slow")
        return cls(
            seed=seed,
            slow_rank=dice.randrange(world_size),
            slow_factor=round(dice.uniform(*_SLOW_FACTOR_RANGE), 3),
            jitter=_JITTER,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the world in a file.

        Raises:
            InvalidInputError: It holds none.
        """
        return validated(cls, parse_json(path.read_bytes(), source=str(path)))

    def factor(self, op_name: str) -> float:
        """Return how many times its prior an operation takes: 0.7 to 1.5, equally likely."""
        return random.Random(f"{self.seed}/{op_name}").uniform(*_FACTOR_RANGE)

    def seconds(self, op_name: str, prior_s: float, rank: int, occurrence: int) -> float:
        """Return how long one execution takes; the same for the same arguments.

        Args:
            op_name: Which operation.
            prior_s: What the planner assumes it takes.
            rank: Whose device.
            occurrence: Number of the execution, so that two of them differ.
        """
        slow = self.slow_factor if rank == self.slow_rank else 1.0
        dice = random.Random(f"{self.seed}/{op_name}/{rank}/{occurrence}")
        return prior_s * self.factor(op_name) * slow * dice.gauss(1.0, self.jitter)

    def sleep(self, op_name: str, prior_s: float, rank: int, occurrence: int) -> float:
        """Take the time of one execution and return it, without the error of the sleep.

        A free core is needed for the last 0.1 ms only. Late by 6 us at 1 ms and 31 us at 10 ms in
        the median of 100, on a 2-core x86 machine that was busy; by milliseconds when both cores
        were taken at that moment.
        """
        end = time.perf_counter()
        seconds = self.seconds(op_name, prior_s, rank, occurrence)
        end += seconds
        time.sleep(max(0.0, end - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < end:
            pass
        return seconds
