"""Imports run one way, and what needs no model needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sinks"

# From the bottom up. A module imports from its own layer and those below it; a new module needs a place here.
LAYERS = [
    {"background", "commandline", "errors", "tokens"},
    {"answers", "detection", "diagnosis", "files", "noise", "processes", "provenance", "schema", "trajectories"},
    {"attention", "checkpoints", "families", "fused", "kernels", "masking", "models", "recording"},
    {
        "arguments",
        "autoregressive",
        "likelihood",
        "observer",
        "remasking",
        "replay",
        "runs",
        "samplers",
        "sampling",
        "style",
        "tiny",
        "writer",
    },
    {
        "evaluation",
        "fitting",
        "harness",
        "inference",
        "plan",
        "frames",
        "heatmaps",
        "plotting",
        "prompts",
        "report",
        "statistics",
        "summary",
        "text_axis",
        "video",
    },
    {"gallery", "sweep"},
]
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}


def module_name(path: Path) -> str:
    """The name of a module in the table above: all of sinks/tiny is one."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports when it runs; what only a type checker reads does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    unread = {id(inner) for node in checked for statement in node.body for inner in ast.walk(statement)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("sinks.")} - {"__init__"}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))


def test_every_module_has_a_place() -> None:
    assert {module_name(path) for path in FILES} <= set(HEIGHT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    upwards = {name for name in imports(path) if HEIGHT[name] > HEIGHT[module_name(path)]}
    assert upwards == set()


def test_no_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(module_name(path), set()).update(imports(path) - {module_name(path)})
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_a_script(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names.isdisjoint(SCRIPTS)


def test_light_modules_import_no_torch() -> None:
    light = ("detection", "runs", "writer", "trajectories", "gallery", "report")
    code = f"import sys, {', '.join(f'sinks.{name}' for name in light)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_file_fits() -> None:
    long = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in [*FILES, *ROOT.glob("*.py")]}
    assert {name: lines for name, lines in long.items() if lines > 350} == {}


def test_no_function_is_longer_than_fifty_lines() -> None:
    functions = [
        (path.name, node)
        for path in [*FILES, *ROOT.glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [(file, node.name) for file, node in functions if code_lines(node) > 50] == []


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    docstring = ast.get_docstring(function, clean=False)
    return lines - (0 if docstring is None else docstring.count("\n") + 1)
