"""The comparison with other trainers: that their work is the same, and what its rows say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import peers
from torch import nn
from torch.nn import functional as F

from megatrain import bencher
from megatrain.bencher import BenchOptions

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_peer_starts_and_trains_as_megatrain_does(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": tied}))
    for module in (peers, bencher):
        monkeypatch.setattr(module, "LEARNING_RATE", 0.05)  # so that a wrong update shows
    work = BenchOptions(
        model=str(tmp_path),
        rows=4,
        length=12,
        micro_rows=2,
        steps=3,
        warmup_steps=1,
        max_grad_norm=0.1,
        device="cpu",
        compile=False,
    )
    ours, plain = (
        peers.measure(peers.PEERS[name], work, torch.device("cpu"))
        for name in ("megatrain", "vram")
    )
    assert plain["losses"] == pytest.approx(ours["losses"], abs=1e-4)
    assert plain["losses"][-1] != pytest.approx(plain["losses"][0], abs=1e-2)
    assert plain["parameters"] == ours["parameters"]
    assert plain["loss_head"] == "chunks"


def test_loss_in_chunks_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOSS_CHUNK_TOKENS", 3)
    weight = nn.Parameter(torch.randn(11, 5, dtype=torch.float64))
    x, labels = torch.randn(8, 5, dtype=torch.float64), torch.arange(8)
    head = peers.LossHead(weight, None)
    (gradient,) = torch.autograd.grad(head(x, labels), weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(x @ weight.T, labels), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_a_peer_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "absent", peers.Peer(needs="no_such_package"))
    row = peers.in_process("absent", BenchOptions(model="none"), timeout_s=1)
    assert row == {"error": "no_such_package is not installed"}


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("a\n[rank0]: torch.OutOfMemoryError: CUDA out of memory.\nWarning: x", 1, "torch.OutOf"),
        ("ValueError: first\nmegatrain.errors.UserError: last\n", 1, "megatrain.errors.UserError"),
        ("said this", 3, "said this"),
        ("", 3, "exit code 3"),
        ("", -9, "ended by SIGKILL"),
    ],
)
def test_the_reason_of_a_failure(text: str, code: int, expected: str) -> None:
    assert peers.reason(text, code).startswith(expected)


def test_table_compares_with_the_first_row() -> None:
    figures: dict[str, Any] = {
        "tokens_per_second": 10.0,
        "tflops_6n": 2.0,
        "host_rss_bytes": 2**31,
        "losses": [3.0, 2.5],
    }
    first = {"peer": "a", "seconds_per_step_p50": 2.0, "device_process_bytes": 2**30} | figures
    second = {"peer": "b", "seconds_per_step_p50": 3.0} | figures
    lost = {"peer": "c", "error": "no memory"}
    lines = [line.split() for line in peers.table([first, second, lost]).splitlines()[1:]]
    assert lines[0] == ["a", "2.000", "1.00", "10", "2.0", "1.0", "2.0", "3.0000", "to", "2.5000"]
    assert lines[1][:3] == ["b", "3.000", "1.50"]
    assert lines[1][5:7] == ["-", "2.0"]
    assert lines[2] == ["c", "no", "memory"]
    assert peers.table([lost, second]).splitlines()[2].split()[2] == "-"
