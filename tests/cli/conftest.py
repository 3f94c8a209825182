"""A directory as a user has it: models, data, the shipped examples."""

import json
import shutil
from pathlib import Path

import pytest

from tests.tokenizers_for_tests import save_tiny_gguf, save_tiny_model

ROOT = Path(__file__).parents[2]


def write_recipes_data(data: Path, pairs: list[dict[str, str]]) -> None:
    """What the recipes name beside that: Alpaca, ShareGPT, GSM8K."""
    alpaca = [{"instruction": p["question"], "input": "", "output": p["answer"]} for p in pairs]
    (data / "alpaca.json").write_text(json.dumps(alpaca * 3))
    turns = [("human", "question"), ("gpt", "answer")]
    chats = [[{"from": who, "value": p[column]} for who, column in turns] for p in pairs]
    (data / "sharegpt.json").write_text(json.dumps([{"conversations": chat} for chat in chats]))
    (data / "gsm8k").mkdir()
    for part in ("train", "test"):
        (data / "gsm8k" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        shutil.copy(data / "chat.jsonl", data / "gsm8k" / f"chat-{part}.jsonl")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model and one data file of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a name is not looked up
    monkeypatch.setattr("megatrain.trainer.report.can_plot", lambda: False)  # a second a run
    for name in ("base", "instruct", "shape"):
        save_tiny_model(tmp_path / "models" / name)
    (tmp_path / "models" / "shape" / "model.safetensors").unlink()
    save_tiny_gguf(tmp_path / "models" / "base.gguf")
    shutil.copytree(tmp_path / "models" / "base", tmp_path / "runs" / "demo" / "base")
    shapes = tmp_path / "configs" / "shapes"
    shapes.mkdir(parents=True)
    for folder in (ROOT / "configs" / "shapes").glob("*/"):
        if folder.name != "llama-50m":
            (shapes / folder.name).symlink_to(folder)
    shape = shapes / "llama-50m"  # a smaller one under its name
    shape.mkdir()
    shutil.copy(tmp_path / "models" / "shape" / "config.json", shape)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    data = tmp_path / "data"
    (data / "text").mkdir(parents=True)
    (data / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    pairs = [{"question": f"{i}+1?", "answer": f" {i + 1}"} for i in range(24)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    turns = [
        {
            "messages": [
                {"role": "user", "content": f"{i}"},
                {"role": "assistant", "content": f"{i}!"},
            ]
        }
        for i in range(60)
    ]
    (data / "chat.jsonl").write_text("\n".join(map(json.dumps, turns)))
    write_recipes_data(data, pairs)
    return tmp_path
