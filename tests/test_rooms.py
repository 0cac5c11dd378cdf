"""The rooms of the tree import in one direction, and the pure ones do without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import smpar

ROOT = Path(smpar.__file__).parent
# A room imports only from those before it.
ROOMS = ["errors", "mesh", "config", "trace", "schedule", "planner", "comm", "ranks", "slices", "stage", "observe",
         "runtime", "nn", "model", "optimizer", "amp", "probe", "describe", "advisor", "api", "emulate",
         "cli"]  # fmt: skip
PURE = ["smpar.errors", "smpar.mesh", "smpar.config", "smpar.planner.partition", "smpar.planner.pipeline",
        "smpar.planner.cluster", "smpar.planner.plans", "smpar.planner.search", "smpar.schedule",
        "smpar.emulate"]  # fmt: skip


def imported(path: Path) -> set[str]:
    """The rooms that a file imports when it is loaded or run (not those only its types need)."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            parts = node.module.split(".")
            if parts[0] == "smpar":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found - {"_native"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_before_it(room: str) -> None:
    files = [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else sorted((ROOT / room).rglob("*.py"))
    assert files
    allowed = {*ROOMS[: ROOMS.index(room)], room}
    late = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in imported(path) - allowed}
    assert not late


def test_every_room_has_its_place() -> None:
    there = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert there - {"__init__", "__main__", "_native"} == set(ROOMS)


@pytest.mark.parametrize("module", PURE)
def test_pure_rooms_import_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_the_compiled_core_is_loaded_without_torch() -> None:
    code = "import sys; from smpar import _native; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
