"""Imports go one way: down the order below, and never across to what a layer must not know.

The order is that of the architecture (CONTRIBUTING.md, "Where things are"), keyed on the first path
component under ``planner/``. A new room fails here until it has been given a place.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parent.parent

# From the ground up. A room imports itself and rooms of lower floors; rooms of one floor do not
# know each other.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "errors units constants",
        "plan",
        "routing segments methods documents",
        "hardware",
        "topology model",
        "request",
        "layout",
        "frameworks",
        "pipeline",
        "cost",
        "simulate",
        "search",
        "calibrate validate",
        "resolving",
        "planning reviewing summary",
        "tables",
        "run_tables",
        "cli",
    )
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}

# What each package must not import, at the top of a file or inside a function.
FORBIDDEN = {
    "planner": {"api", "executor", "torch", "fastapi", "sqlalchemy"},
    "api": {"executor", "torch"},
    "executor": {"api", "fastapi", "sqlalchemy"},
}
# The planner's pure leaves: all that a training job needs of it.
LEAVES = {"plan", "errors", "units", "pipeline", "routing", "segments", "methods"}


class Import(NamedTuple):
    """``file`` (relative to the repository) imports ``module`` in ``line``."""

    file: str
    line: int
    module: str


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Yield every import of ``source``, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # ``from planner import plan`` imports planner.plan as much as ``import planner.plan``.
            yield from (
                Import(file, node.lineno, f"{node.module}.{alias.name}") for alias in node.names
            )


def imports_in(package: str) -> list[Import]:
    """Return every import under ``package/``."""
    return [
        found
        for path in sorted((REPO / package).rglob("*.py"))
        for found in imports_of(path.read_text(), path.relative_to(REPO).as_posix())
    ]


def room_of(dotted: str) -> str:
    """Return the room of ``planner.room.more``; empty for the bare package."""
    return dotted.split(".")[1] if "." in dotted else ""


def room_of_file(file: str) -> str:
    """Return the room of a file: its first path component under ``planner/``."""
    return Path(file).parts[1].removesuffix(".py")


def climbs(found: Import) -> bool:
    """Return whether a file of the planner imports a room that is not below its own.

    What ``planner/__init__`` itself defines (the version) lies below every room.
    """
    if found.module.split(".")[0] != "planner":
        return False
    here, there = room_of_file(found.file), room_of(found.module)
    return here != there and FLOOR_OF.get(there, -1) >= FLOOR_OF.get(here, -1)


def is_forbidden(package: str, found: Import) -> bool:
    """Return whether ``found`` crosses to a package that ``package`` must not know."""
    return found.module.split(".")[0] in FORBIDDEN[package]


def test_every_room_has_a_floor() -> None:
    rooms = {room_of_file(path.relative_to(REPO).as_posix()) for path in REPO.glob("planner/*.py")}
    rooms |= {path.parent.name for path in REPO.glob("planner/*/__init__.py")}
    assert rooms - {"__init__"} <= FLOOR_OF.keys()


def test_planner_imports_go_down_only() -> None:
    assert [found for found in imports_in("planner") if climbs(found)] == []


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_package_does_not_import_across(package: str) -> None:
    assert [found for found in imports_in(package) if is_forbidden(package, found)] == []


def test_executor_imports_only_leaves_of_the_planner() -> None:
    of_planner = [f for f in imports_in("executor") if f.module.split(".")[0] == "planner"]
    assert [found for found in of_planner if room_of(found.module) not in LEAVES] == []


def test_upward_imports_are_seen_wherever_they_hide() -> None:
    source = (
        "import planner.search.rank\n"
        "from planner import cli\n"
        "def f():\n    from planner.topology.fabric import Fabric\n"
        "from planner.cost.work import work\n"
        "import numpy\n"
        "from planner import __version__\n"
    )
    found = imports_of(source, "planner/cost/step.py")
    assert [
        module for _, _, module in found if climbs(Import("planner/cost/step.py", 0, module))
    ] == [
        "planner.search.rank",
        "planner.cli",
    ]


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a new interpreter holds after ``statement``."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("planner.plan", {"networkx", "torch", "fastapi", "numpy", "scipy"}),
        ("planner.planning", {"torch", "fastapi", "sqlalchemy"}),
        ("api.app", {"torch", "executor"}),
        ("executor.client", {"torch", "networkx", "fastapi"}),
    ],
)
def test_module_stays_light(module: str, absent: set[str]) -> None:
    assert loaded_by(f"import {module}") & absent == set()
