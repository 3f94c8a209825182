"""Model ids: one revision for everything, from a cache that is made by hand, without a network."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.models import hub
from megatrain.models.source import weight_names
from megatrain.trainer import Trainer
from tests.tokenizers_for_tests import save_tiny_model

from .test_commands import GOOD, ROOT, run

OLD, NEW = "a" * 40, "b" * 40
NAME = "org/tiny"


@pytest.fixture
def cache(workspace: Path) -> Path:
    """Two revisions: `main` is the newer, with other weights, more layers and one token more."""
    save_tiny_model(workspace / "new", num_hidden_layers=3, vocab_size=270, hidden_size=16)
    tokenizer = AutoTokenizer.from_pretrained("new")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained("new")
    folder = workspace / "hub" / "models--org--tiny"
    for commit, source in ((OLD, "models/base"), (NEW, "new")):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (folder / "blobs").mkdir(exist_ok=True)
        for file in Path(source).iterdir():
            blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    (folder / "refs" / "v1").write_text(OLD)
    return workspace / "hub"


def loss_of(*arguments: str) -> float:
    return float(json.loads(run("eval", *arguments).stdout.splitlines()[-1])["loss"])


def test_weights_config_and_tokenizer_are_of_the_revision_asked_for(cache: Path) -> None:
    data = ("data/text", "--max-length", "64")
    expected = {"v1": loss_of("models/base", *data), "main": loss_of("new", *data)}
    assert expected["v1"] != expected["main"]
    for revision, loss in expected.items():
        options = ("--model-revision", revision, "--cache-dir", "hub")
        assert loss_of(NAME, *data, *options) == loss
        keys = {"model_name_or_path": NAME, "cache_dir": "hub", "model_revision": revision}
        config, _ = make_config(GOOD | keys | {"learning_rate": 0.0, "output_dir": revision})
        trainer = Trainer(config, quiet=True)
        newer = revision == "main"
        assert len(trainer.model.container) == (3 if newer else 2)
        assert ("<new>" in trainer.tokenizer.get_vocab()) == newer
        trainer.train()
        mine = AutoModelForCausalLM.from_pretrained(revision)
        theirs = AutoModelForCausalLM.from_pretrained("new" if newer else "models/base")
        state = theirs.state_dict()
        assert all(bool((t == state[n]).all()) for n, t in mine.state_dict().items())
        assert str(cache) not in (Path(revision) / "config.json").read_text()


def test_a_commit_is_a_revision_and_the_default_is_main(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert hub.find_model(NAME, revision=OLD).directory.name == OLD
    files = hub.find_model(NAME)
    directory = files.directory
    assert directory.name == NEW
    assert files.fetch_weights() == [directory / "model.safetensors"]


@pytest.mark.process
def test_the_environment_is_honoured(cache: Path) -> None:
    more = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "megatrain", "eval", NAME, "data/text", "--max-length", "64"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | more
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["loss"] == loss_of("new", "data/text", "--max-length", "64")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_name_or_path": "org/none"}, "org/none: no such directory, and no such model id"),
        ({"model_revision": "v9"}, "org/tiny at revision v9: no such"),
        ({"model_name_or_path": "models/base", "model_revision": "v1"}, "which has no revisions"),
    ],
)
def test_what_is_not_there_is_one_error_before_anything_is_read_or_allocated(
    keys: dict[str, Any], message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    for name in ("prepare.load_corpus", "model.load_blocks", "model.load_tokenizer"):
        monkeypatch.setattr(f"megatrain.trainer.{name}", never)
    values = GOOD | {"model_name_or_path": NAME, "cache_dir": str(cache)} | keys
    config, _ = make_config(values)
    with pytest.raises(UserError, match=message) as caught:
        Trainer(config, quiet=True)
    assert len(str(caught.value).splitlines()) == 1


def test_eval_of_an_id_that_is_not_there_is_one_error(cache: Path) -> None:
    with pytest.raises(UserError, match="org/none: no such directory, and no such model id"):
        run("eval", "org/none", "data/text", "--cache-dir", str(cache))


def test_a_cache_without_the_weights_is_told_before_data_is_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models--org--tiny" / "snapshots" / NEW / "model.safetensors").unlink()

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    monkeypatch.setattr("megatrain.trainer.prepare.load_corpus", never)
    config, _ = make_config(GOOD | {"model_name_or_path": NAME, "cache_dir": str(cache)})
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        Trainer(config, quiet=True)


def test_only_what_is_needed_is_downloaded(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    small = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    small += ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"]
    small += ["vocab.json", "merges.txt"]
    others = ["pytorch_model.bin", "model.gguf", "tf_model.h5", "consolidated.safetensors"]
    others += ["onnx/model.onnx", "onnx/config.json", "original/model.safetensors", "README.md"]
    others += ["original/consolidated.00.pth", "model.fp16.safetensors", "modeling_own.py"]
    folder = workspace / "snapshots" / NEW
    folder.mkdir(parents=True)
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fetched: list[str] = []
    revisions = []

    def download(name: str, *, revision: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        names = list(filter_repo_objects([*small, *shards, *others], **patterns))
        fetched.extend(names)
        revisions.append(revision)
        for name in names:
            (folder / name).touch()
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.find_model(NAME, revision="main").directory == folder
    assert sorted(fetched) == sorted(small)
    assert weight_names(folder) == shards
    fetched.clear()
    hub.ModelFiles(name=NAME, directory=folder).fetch_weights()
    assert sorted(fetched) == shards
    assert revisions == ["main", NEW]  # weights of the same commit, wherever main has gone
