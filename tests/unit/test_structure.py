"""House rules that no linter knows."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FORBIDDEN_CALLS = {"hasattr"}
LIGHT = ["megatrain", "megatrain.cli", "megatrain.config", "megatrain.monitor", "megatrain.data"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "src"))


def test_there_are_sources() -> None:
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_stay_short_and_documented(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_probed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"line {node.lineno}"


@pytest.mark.process
def test_what_runs_before_the_first_check_imports_nothing_heavy() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'transformers'}} & set(sys.modules))"
    path = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=path)
    assert done.stdout.strip() == "set()"
