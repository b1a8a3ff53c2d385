"""The rules that keep the tree what it is: arrows, no cycles, no hidden state, no heavy imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from launch.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("ds_engine", "models", "preprocessing", "launch")

# What each part may import of ours, besides itself and ds_engine.errors.
ARROWS = {
    "ds_engine.errors": (),
    "ds_engine.config": (),
    "ds_engine.parallel": ("ds_engine.config",),
    "ds_engine.pipeline": ("ds_engine.parallel", "ds_engine.config"),
    "ds_engine.data": ("ds_engine.config",),
    "ds_engine.training": (
        "ds_engine.pipeline",
        "ds_engine.data",
        "ds_engine.parallel",
        "ds_engine.config",
    ),
    "ds_engine.inference": ("ds_engine.pipeline", "ds_engine.parallel", "ds_engine.config"),
    "ds_engine.synthetic": ("ds_engine.pipeline", "ds_engine.parallel"),
    "ds_engine.verify": ("ds_engine.pipeline", "ds_engine.parallel", "ds_engine.config"),
    "models": ("ds_engine.pipeline", "ds_engine.parallel", "ds_engine.config"),
    "preprocessing": (
        "ds_engine.data.indexed",
        "ds_engine.data.indexed_writer",
        "ds_engine.data.objective",
        "ds_engine.config",
    ),
    "launch": ("ds_engine", "models", "preprocessing"),
}
DEEPSPEED = ("ds_engine.pipeline", "ds_engine.training.engine", "ds_engine.training.checkpoint")
ENVIRONMENT = ("launch", "ds_engine.parallel.context")
NO_TORCH = (
    "ds_engine.config",
    "ds_engine.parallel.dims",
    "preprocessing",
    "models.config",
    "models.t5_config",
    "models.bert_config",
    "models.layout_rules",
    "models.registry",
    "launch.cli",
    "launch.check",
    "launch.check_objective",
    "launch.labels",
    "launch.commands.config",
)
HEAVY = ("torch", "deepspeed", "wandb", "matplotlib", "rich", "datasets", "transformers")
LIGHT = ("torch", "deepspeed")  # what a module may import at its top, if its layer may at all


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of all modules imported anywhere in a tree; `from a import b` gives a.b if a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide arrows; write the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def top_level(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Try):
            yield from imports(node)


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for name, tree in TREES.items():
        part = next((part for part in ARROWS if inside(name, (part,))), None)
        if part is None:
            assert name == "ds_engine", f"{name} belongs to no part; add it to ARROWS"
            continue
        allowed = ("ds_engine.errors", part, *ARROWS[part])
        wrong += [
            f"{name} imports {target}"
            for target in imports(tree)
            if target.split(".")[0] in PACKAGES and not inside(target, allowed)
        ]
    assert wrong == []


def test_deepspeed_stays_in_its_layers() -> None:
    users = {
        name
        for name, tree in TREES.items()
        if any(inside(target, ("deepspeed",)) for target in imports(tree))
    }
    assert {name for name in users if not inside(name, DEEPSPEED)} == set()


def test_no_import_cycles() -> None:
    graph = {
        name: {target for target in imports(tree) if target in MODULES and target != name}
        for name, tree in TREES.items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    wrong = [
        f"{name} imports {target} at its top"
        for name, tree in TREES.items()
        for target in top_level(tree)
        if inside(target, HEAVY) and (not inside(target, LIGHT) or inside(name, NO_TORCH))
    ]
    assert wrong == []


def test_no_global_and_no_environment_outside_of_launch() -> None:
    wrong = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{name}: global in line {node.lineno}")
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            if reads and not inside(name, ENVIRONMENT):
                wrong.append(f"{name}: environment in line {node.lineno}")
    assert wrong == []


def test_files_are_short_and_inits_empty() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {path: len(path.read_text().splitlines()) for path in [*MODULES.values(), *tests]}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 400}
    assert long == {}
    full = [str(p) for p in MODULES.values() if p.name == "__init__.py" and p.read_text().strip()]
    assert full == []


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("name", NO_TORCH)
def test_light_modules_load_nothing_heavy(name) -> None:
    names = [module for module in MODULES if inside(module, (name,))]
    lines = "; ".join(f"import {module}" for module in names)
    loaded = python(f"import sys; {lines}; print(*sys.modules)").split()
    assert set(HEAVY) & set(loaded) == set()


def test_every_command_has_its_module() -> None:
    assert [name for name, (module, _) in COMMANDS.items() if module not in MODULES] == []


def test_help_answers_at_once() -> None:
    code = """
import resource, sys, time
from launch.cli import main
sys.argv = ["ds-engine", "--help"]
try:
    main()
except SystemExit:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""
    assert float(python(code).split()[-1]) < 0.5


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=False, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    home = re.compile(rb"/(home|Users|root|work)/[A-Za-z]")
    wrong = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content and home.search(content):
            wrong.append(name)
    assert wrong == []
