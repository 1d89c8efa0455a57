"""The hidden world keeps to its laws, and the planner knows nothing of it."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import World
from planner.errors import InvalidInputError

pytestmark = pytest.mark.lab

REPO = Path(__file__).parents[2]
WORLD = World.draw(seed=7, world_size=8)
OPS = [f"op{number}" for number in range(300)]


def test_the_same_seed_makes_the_same_world_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "world.json"
    arguments = ("world", "--seed", "7", "--ranks", "8", "-o", str(file))
    subprocess.run((sys.executable, "-m", "benchmarks.lab", *arguments), check=True)
    there = World.load(file)
    assert there == WORLD
    assert there.seconds("attention", 0.1, 3, 5) == WORLD.seconds("attention", 0.1, 3, 5)
    assert World.draw(seed=8, world_size=8).factor("attention") != WORLD.factor("attention")


def test_factors_fill_the_range_from_0_7_to_1_5() -> None:
    factors = [WORLD.factor(op) for op in OPS]
    assert 0.7 <= min(factors) < 0.72
    assert 1.48 < max(factors) <= 1.5
    assert statistics.mean(factors) == pytest.approx(1.1, abs=0.05)


def test_one_execution_differs_from_another_by_two_percent() -> None:
    rank = (WORLD.slow_rank + 1) % 8
    times = [WORLD.seconds("attention", 0.1, rank, number) for number in range(2000)]
    assert statistics.stdev(times) / statistics.mean(times) == pytest.approx(0.02, rel=0.1)
    assert statistics.mean(times) == pytest.approx(0.1 * WORLD.factor("attention"), rel=0.005)


def test_one_rank_is_slower_by_its_factor() -> None:
    means = [
        statistics.mean(WORLD.seconds("attention", 0.1, rank, n) for n in range(500))
        for rank in range(8)
    ]
    usual = statistics.median(means)
    assert [r for r, mean in enumerate(means) if mean > 1.1 * usual] == [WORLD.slow_rank]
    assert max(means) / usual == pytest.approx(WORLD.slow_factor, rel=0.01)
    slow = {World.draw(seed, 8).slow_rank for seed in range(100)}
    assert slow == set(range(8)), "which one, the seed decides"


def test_time_is_in_proportion_to_the_prior() -> None:
    assert WORLD.seconds("a", 0.2, 0, 0) == pytest.approx(2 * WORLD.seconds("a", 0.1, 0, 0))


def test_a_file_that_is_no_world_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "world.json"
    file.write_text('{"seed": 1}')
    with pytest.raises(InvalidInputError, match="slow_rank"):
        World.load(file)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a world of 0 ranks"):
        World.draw(1, 0)


@pytest.mark.parametrize("package", ["planner", "api"])
def test_the_planner_never_reads_the_world(package: str) -> None:
    files = sorted((REPO / package).rglob("*.py"))
    assert files
    for file in files:
        text = file.read_text()
        assert not {"slow_rank", "slow_factor", "benchmarks.lab"} & set(_words(text)), file


def _words(source: str) -> list[str]:
    """Return the names, keys and imported modules of a file, and their packages."""
    words: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                words.append(word)
            case ast.Constant(value=str(word)):
                words.append(word)
            case ast.Import(names=names):
                words += [".".join(name.name.split(".")[:2]) for name in names]
            case ast.ImportFrom(module=str(module), names=names):
                words += [".".join(f"{module}.{name.name}".split(".")[:2]) for name in names]
    return words
