"""Scores are those of `lm_eval --model hf` on the same directory; skipped without lm_eval."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.errors import UserError
from tests.checkpoint.runs import train

TASKS: dict[str, dict[str, Any]] = {
    "sums": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
RECORDS = [
    {
        "question": f"What is {i} + {i % 3}?" + " Think." * (i % 4),
        # One-token answers of one context, and longer ones.
        "choices": [" 1", " 2", " 3"] if i % 2 else ["one", "the number two", f"{i}"],
        "answer": i % 3,
        "text": f"The quick brown fox, number {i}, jumps over the lazy dog. " * (1 + i % 5),
    }
    for i in range(20)
]


@pytest.fixture
def task_folder(workspace: Path) -> str:
    (workspace / "data" / "tasks.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    folder = workspace / "tasks"
    folder.mkdir()
    for name, task in TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(workspace / "data" / "tasks.jsonl")}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return str(folder)


@pytest.fixture
def trained(workspace: Path) -> tuple[str, str]:
    """(a checkpoint, the directory that was exported from it)."""
    train(max_steps=2, save_steps=2)
    result = CliRunner().invoke(app, ["export", "out/checkpoint-2", "exported"])
    assert result.exit_code == 0, result.exception
    return "out/checkpoint-2", "exported"


def answers(samples: list[dict[str, Any]]) -> list[list[Any]]:
    """What the model said to every request, by sample; numbers and texts apart."""
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def flat(value: Any) -> list[Any]:
    return (
        [leaf for item in value for leaf in flat(item)]
        if isinstance(value, list | tuple)
        else [value]
    )


@pytest.mark.filterwarnings("default")
def test_a_checkpoint_scores_as_lm_eval_says_of_what_is_exported_from_it(
    trained: tuple[str, str], task_folder: str
) -> None:
    lm_eval = pytest.importorskip("lm_eval", exc_type=ImportError)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    options = ["--tasks", ",".join(TASKS), "--include-path", task_folder, "--max-length", "96"]
    keep = ["--output", "scores.json", "--log-samples", "--batch-size", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, ["lm-eval", trained[0], *options, *keep])
    assert result.exit_code == 0, result.exception
    ours = json.loads(Path("scores.json").read_text())
    reference = HFLM(
        pretrained=trained[1], device="cpu", dtype="float32", batch_size=3, max_length=96
    )
    expected = lm_eval.simple_evaluate(
        model=reference,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=task_folder),
        log_samples=True,
    )
    lines = {row["task"]: row for row in map(json.loads, result.stdout.splitlines())}
    for name in TASKS:
        assert lines[name]["samples"] == len(RECORDS)
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-5), metric
                assert lines[name][metric] == ours["results"][name][metric]
        found = flat(answers(ours["samples"][name]))
        for mine, theirs in zip(found, flat(answers(expected["samples"][name])), strict=True):
            if isinstance(theirs, float):
                assert mine == pytest.approx(theirs, abs=2e-4)
            else:  # whether greedy decoding gives it, or what was written
                assert mine == theirs
        assert any(isinstance(leaf, float) for leaf in found) == (name != "writing")


def test_without_lm_eval_it_is_said_how_to_get_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"megatrain\[lm-eval\]"):
        CliRunner().invoke(
            app, ["lm-eval", "models/base", "--tasks", "sums"], catch_exceptions=False
        )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "sumz"], "there is .*sums"),
        (["--tasks", "sums", "--include-path", "nowhere"], "no such folder"),
        (["--tasks", "sums", "--log-samples"], "--output"),
    ],
)
def test_bad_input_is_one_error(
    workspace: Path, task_folder: str, arguments: list[str], words: str
) -> None:
    pytest.importorskip("lm_eval", exc_type=ImportError)
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(
            app,
            ["lm-eval", "models/base", "--include-path", task_folder, *arguments],
            catch_exceptions=False,
        )
