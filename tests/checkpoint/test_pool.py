"""What checkpoints on their way may take: as asked for, and never more than a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatrain.checkpoint import BufferPool, Snapshot, checkpoints, pool_bytes
from megatrain.checkpoint.snapshot import LARGEST_BUFFER
from megatrain.cli import app
from megatrain.layout import STATE
from tests.tokenizers_for_tests import save_tiny_model

from .runs import KEYS, tensors_of, trainer

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
KINDS: list[dict[str, Any]] = [
    {},
    {"save_only_model": True},
    {"frozen": ["model.embed_tokens.*", "model.layers.0.*"]},
    {"dtype": "bfloat16"},
]


def save_large_model() -> None:
    """Large enough for several buffers."""
    save_tiny_model(Path("models/large"), **LARGE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_no_larger_than_a_checkpoint(kind: dict[str, Any], workspace: Path) -> None:
    save_large_model()
    made = trainer(model_name_or_path="models/large", checkpoint_memory="1TiB", **kind)
    nbytes = made.run.contents.nbytes
    pool = made.run.memory.checkpoint
    assert nbytes <= pool <= nbytes + LARGEST_BUFFER + 2**20, "padding of parameters"
    assert made._plan().need.host["checkpoint"] == pool
    assert nbytes < BufferPool(pool, pin=False).nbytes <= pool, "one buffer stays free"
    less = {"checkpoint_memory": "20MiB", "output_dir": "other"}
    smaller = trainer(model_name_or_path="models/large", **less, **kind)
    assert smaller.run.memory.checkpoint == 20 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_plan_counts_no_more_either(kind: dict[str, Any], workspace: Path) -> None:
    save_large_model()
    keys = {"dtype": "float32"} | KEYS | kind
    keys |= {"model_name_or_path": "models/large", "checkpoint_memory": "1TiB"}
    Path("planned.yaml").write_text(yaml.safe_dump(keys))
    machine = ("--gpu", "RTX-4090", "--host-memory", "64GiB", "--host-bandwidth", "100GB")
    result = CliRunner().invoke(app, ["plan", "planned.yaml", *machine, "--json"])
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)["bytes"]
    expected = trainer(**keys).run
    assert found["host"]["checkpoint"] == expected.memory.checkpoint
    on_disk = found["disk"]["a checkpoint"]
    assert on_disk == pytest.approx(expected.contents.nbytes, rel=0.01)
    assert on_disk + LARGEST_BUFFER == expected.memory.checkpoint


def test_with_such_a_pool_all_is_copied_before_anything_is_written(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, copied = Snapshot._write, list[bool]()

    def wait_first(snapshot: Snapshot) -> None:
        copied.append(all(each.wait(10) for each in snapshot._copied.values()))
        write(snapshot)

    monkeypatch.setattr(Snapshot, "_write", wait_first)
    save_large_model()
    keys = {"model_name_or_path": "models/large", "max_steps": 2, "save_steps": 1}
    trainer(checkpoint_memory="1TiB", **keys).train()
    assert list(checkpoints(Path("out"))) == [1, 2] and copied == [True, True]
    monkeypatch.undo()
    monkeypatch.chdir(workspace)
    trainer(checkpoint_memory="20MiB", output_dir="small", **keys).train()
    assert tensors_of(Path("out/checkpoint-2")) == tensors_of(Path("small/checkpoint-2"))


def test_two_blocks_may_be_more_than_a_checkpoint(workspace: Path) -> None:
    """Of a model whose embedding is most of it."""
    save_tiny_model(Path("models/wide"), vocab_size=300_000, tie_word_embeddings=True)
    run = trainer(model_name_or_path="models/wide").run
    model, contents = run.blocks.model, run.contents
    two = 2 * max(sum(map(block.layout.nbytes, STATE)) for block in model.blocks)
    assert pool_bytes(model) <= contents.nbytes + LARGEST_BUFFER + 2**20 < two
