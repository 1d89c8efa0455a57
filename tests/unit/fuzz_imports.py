"""Damaged samples through the whole import, for as long as wanted.

``python -m tests.unit.fuzz_imports [SECONDS]`` spends so long on each format (60 by default) and
prints what came of it. A text that is neither imported nor refused in words, or takes more than a
second of CPU, is written to tests/samples/topology/found/ and ends the run with status 1: it
belongs into a test.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from planner.errors import InvalidInputError
from planner.topology.importers.cluster import import_topology
from planner.topology.importers.options import ImportOptions
from tests.unit.imported_samples import SAMPLES

__all__ = ["damaged"]

FOUND: Final = SAMPLES / "found"
NODE: Final = (SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt").read_text("utf-8")
_FABRICS: Final = ("slurm", "ibnetdiscover")
_SLOW_S: Final = 1.0


def damaged(text: str, other: str, chance: random.Random) -> str:
    """Return the text after one to four kinds of damage; ``other`` is what may get into it."""
    for _ in range(chance.randrange(1, 5)):
        text = chance.choice(_DAMAGES)(text or other, other, chance)
    return text


def _cut(text: str, _: str, chance: random.Random) -> str:
    start, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    return chance.choice((text[:end], text[start:], text[:start] + text[end:]))


def _shuffle(text: str, _: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    start, end = sorted(chance.randrange(len(lines) + 1) for _ in range(2))
    middle = lines[start:end]
    chance.shuffle(middle)
    return "".join([*lines[:start], *middle, *lines[end:]])


def _double(text: str, _: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines) + 1)
    return "".join(lines[: at + chance.randrange(30)] + lines[at:])


def _splice(text: str, other: str, chance: random.Random) -> str:
    at, start = chance.randrange(len(text) + 1), chance.randrange(len(other) + 1)
    return text[:at] + other[start : start + chance.randrange(2000)] + text[at:]


def _bytes(text: str, _: str, chance: random.Random) -> str:
    data = bytearray(text.encode())
    for _place in range(chance.randrange(1, 20)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(1, 256)
    return data.decode("utf-8", errors="replace")


def _words(text: str, other: str, chance: random.Random) -> str:
    words = other.split() or [""]
    parts = text.split(" ")
    for _place in range(chance.randrange(1, 6)):
        parts[chance.randrange(len(parts))] = chance.choice((*_HOSTILE, chance.choice(words)))
    return " ".join(parts)


_HOSTILE: Final = (
    "",
    "-1",
    "1e999",
    "9" * 400,
    "NaN",
    "n[1-999999999]",
    "[[",
    "\u0966",
    "]]>",
    "NV0",
)
_DAMAGES: Final[tuple[Callable[[str, str, random.Random], str], ...]] = (
    *(_cut, _shuffle, _double, _splice, _bytes, _words),
)


def _outcome(format_: str, text: str, gpu: str | None) -> str:
    """Return "imported" or "refused"; any other error is the caller's to report."""
    try:
        if format_ in _FABRICS:
            rate = ImportOptions(nic_gbps=400)
            import_topology(NODE, node_source="node", gpu="H200", fabric_text=text, options=rate)
        else:
            import_topology(text, node_source="node", gpu=gpu)
    except InvalidInputError:
        return "refused"
    return "imported"


def _samples() -> Iterator[tuple[str, list[str]]]:
    for folder in sorted(path for path in SAMPLES.iterdir() if path.is_dir() and path != FOUND):
        files = sorted(path for path in folder.iterdir() if path.name != "README.md")
        yield folder.name, [path.read_text("utf-8", errors="replace") for path in files]


def fuzz(format_: str, texts: list[str], seconds: float, seed: int) -> bool:
    """Damage and import for so long; return whether nothing went wrong."""
    chance, outcomes, slowest_s = random.Random(seed), Counter[str](), 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = damaged(chance.choice(texts), chance.choice(texts), chance)
        started = time.process_time()
        try:
            outcomes[_outcome(format_, text, chance.choice((None, "H100", "V100", "MI300X")))] += 1
        except Exception as exc:
            outcomes[f"broke: {type(exc).__name__}"] += 1
            _keep(format_, text)
        took_s = time.process_time() - started
        slowest_s = max(slowest_s, took_s)
        if took_s > _SLOW_S:
            outcomes["slow"] += 1
            _keep(format_, text)
    said = ", ".join(f"{count:,} {what}" for what, count in sorted(outcomes.items()))
    _say(f"{format_}: {said}; slowest {slowest_s:.2f} s")
    return set(outcomes) <= {"imported", "refused"}


def _keep(format_: str, text: str) -> None:
    FOUND.mkdir(exist_ok=True)
    Path(FOUND / f"{format_}-{abs(hash(text)):x}.txt").write_text(text, "utf-8")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = time.time_ns() % 1_000_000
    _say(f"seed {seed}")
    results = [fuzz(name, texts, seconds, seed) for name, texts in _samples()]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
