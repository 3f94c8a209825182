"""The benchmark of one layer: what its variants compute, and what its rows say."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks import block_speed
from transformers import Qwen3MoeConfig

from megatrain.models import build_on_meta, split_model
from megatrain.models.initialise import init_block_weights
from megatrain.models.passes import backward

TINY = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    hidden_size=32,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
)


def test_both_ways_back_are_the_same_work() -> None:
    model = split_model(build_on_meta(TINY, compute_dtype="float32"), compute_dtype="float32")
    weights = dict(init_block_weights(model, seed=0))
    prefix = model.layer_prefix(0)
    local = {name.removeprefix(prefix): tensor for name, tensor in weights[1].items()}
    x, calls, _ = model.prologue(weights[0], torch.arange(10).reshape(2, 5))
    outgoing, run = torch.randn_like(x), partial(model.layer, 0)
    sums = {name: torch.zeros_like(tensor) for name, tensor in local.items()}

    d_x, _ = backward(run, local, x, calls[0], {}, (), {"": outgoing}, sums, True)
    found = block_speed.as_checkpointed(run, local, x, calls[0], outgoing)

    for ours, theirs in zip([d_x, *sums.values()], found, strict=True):
        assert ours is not None
        torch.testing.assert_close(theirs, ours)


def test_rows_name_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TINY.save_pretrained(tmp_path / "tiny")
    output = tmp_path / "rows.jsonl"
    sizes = ["--rows", "2", "--length", "8", "--repeats", "1", "--device", "cpu"]
    variants = ["--variants", "transformers", "eager"]

    block_speed.main([str(tmp_path / "tiny"), *sizes, *variants, "--output", str(output)])

    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["what"] for row in rows] == ["one layer, transformers", "one layer, eager"]
    assert all(row["model"] == "tiny" and row["backward_ms"] > 0 for row in rows)
    assert capsys.readouterr().out.count("\n") == 2
