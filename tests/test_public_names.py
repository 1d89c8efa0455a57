"""``__all__`` of every public module is what the module defines.

A function that registers itself with an object of its module (``@router.get("/plans")``,
``@app.command()``) is reached through that object and need not be listed.
"""

import ast
import importlib
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PACKAGES = ("planner", "executor", "api", "topologies")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_modules() -> list[str]:
    """Return the dotted names of all modules without a leading underscore in their path."""
    files = [path for package in PACKAGES for path in (REPO / package).rglob("*.py")]
    dotted = [".".join(path.relative_to(REPO).with_suffix("").parts) for path in files]
    modules = [name.removesuffix(".__init__") for name in dotted]
    return sorted(name for name in modules if "._" not in name)


def body_of(module: str) -> list[ast.stmt]:
    """Return the top-level statements of ``module`` without its docstring."""
    path = REPO.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    return tree.body[1:] if ast.get_docstring(tree) is not None else tree.body


def defined_in(body: list[ast.stmt]) -> set[str]:
    """Return the public functions and classes that ``body`` defines and does not just register."""
    here = {
        target.id
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return {
        statement.name
        for statement in body
        if isinstance(statement, Definition)
        and not statement.name.startswith("_")
        and not any(registrar(decorator) in here for decorator in statement.decorator_list)
    }


def registrar(decorator: ast.expr) -> str:
    """Return ``router`` of ``@router.get(...)``; empty for a decorator of another form."""
    match decorator:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name
    return ""


@pytest.mark.parametrize("module", public_modules())
def test_all_lists_every_public_definition_and_nothing_absent(module: str) -> None:
    body = body_of(module)
    if not body:  # the __init__ of a folder that only groups modules
        return
    loaded = importlib.import_module(module)
    assert hasattr(loaded, "__all__"), f"{module} has no __all__"
    listed = set(loaded.__all__)
    assert {name for name in listed if not hasattr(loaded, name)} == set()
    assert defined_in(body) - listed == set()
    assert len(listed) == len(loaded.__all__)


def test_definitions_are_seen() -> None:
    source = (
        "def a(): ...\n@frozen\nclass B: ...\nasync def c(): ...\ndef _d(): ...\nE = 1\n"
        "router = Router()\n@router.get('/f')\ndef f(): ...\n@functools.cache(1)\ndef g(): ...\n"
    )
    assert defined_in(ast.parse(source).body) == {"a", "B", "c", "g"}


def test_modules_are_found() -> None:
    assert {"planner", "planner.plan", "planner.topology.fabric", "api"} <= set(public_modules())
