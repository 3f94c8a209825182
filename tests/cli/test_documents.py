"""Every command that the documents show is run; every link leads somewhere."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts.generate_plans_docs import SHOWN
from typer.testing import CliRunner

from megatrain.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "configs" / "shapes" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(r"^(?:\.venv/bin/)?megatrain (.*)$", re.MULTILINE)

SHORT = ["--max_steps", "2", "--max_length", "64", "--overwrite_output_dir", "true"]


def commands() -> list[str]:
    return [match for path in DOCUMENTS for match in COMMAND.findall(path.read_text())]


def test_the_commands_shown_run_in_the_order_shown(workspace: Path) -> None:
    found = commands()
    shown = (ROOT / "docs" / "memory.md").read_text()
    answers = {match["command"]: match["output"] for match in SHOWN.finditer(shown)}
    assert len(answers) >= 8
    assert {command.split()[0] for command in found} >= {"train", "eval"}
    for command in found:
        arguments = shlex.split(command)
        if arguments[0] == "train":
            arguments += SHORT
        if arguments[0] == "lm-eval" and find_spec("lm_eval") is None:
            continue
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (command, result.exception)
        if command in answers:
            assert result.stdout == answers[command], f"{command}: run make docs"


def test_python_in_the_readme_runs(workspace: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(code, {})
    assert Path("runs/python/model.safetensors").is_file()


def test_python_in_the_quickstart_runs(workspace: Path) -> None:
    CliRunner().invoke(app, ["train", "examples/sft.yaml", *SHORT])
    text = (ROOT / "docs" / "quickstart.md").read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, names)
    assert "model" in names
    assert Path("runs/rows/model.safetensors").is_file()
    assert Path("runs/smoothed/model.safetensors").is_file()


def test_what_the_recipes_show_runs(workspace: Path) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    made = Path("data/gsm8k/chat-train.jsonl")
    made.unlink()
    exec(code, {})
    assert '"role": "assistant"' in made.read_text()
    (config,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    Path("shortest.yaml").write_text(config)
    result = CliRunner().invoke(app, ["train", "shortest.yaml", *SHORT])
    assert result.exit_code == 0, result.exception
    assert Path("runs/alpaca/model.safetensors").is_file()


def test_the_make_targets_shown_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        for target in re.findall(r"`make ([a-z-]+)", path.read_text()):
            assert target in targets, (path.name, target)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [DOCUMENTS[0], ROOT / "docs" / "architecture.md"])
def test_rooms_and_files_named_exist(path: Path) -> None:
    package = ROOT / "src" / "megatrain"
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", path.read_text()):
        candidates = (ROOT / name, package / name)
        assert any(candidate.exists() for candidate in candidates), name
