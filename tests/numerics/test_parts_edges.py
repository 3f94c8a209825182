"""Experts in parts where it is easily wrong: idle parts, few trained, mixed layers.

Each case is two steps, every gradient, moment and master of which must be those of plain PyTorch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.errors import UserError
from megatrain.exporter import export_model
from megatrain.schedule import Spill
from tests.checkpoint.runs import train, train_until
from tests.cli.conftest import workspace
from tests.tokenizers_for_tests import byte_tokenizer

from .harness import (
    Reference,
    assert_steps_equal,
    make_engine,
    make_rows,
    reference_model,
)
from .test_parts import LEARNING_RATE, OPTIONS, config_of, masters_of

__all__ = ["workspace"]

EXPERTS = 8
STEPS = [make_rows(4, seed) for seed in (7, 8)]
BIAS = "e_score_correction_bias"


def two_layers(kind: str, **changes: Any) -> Any:
    return config_of(kind, num_hidden_layers=2, **changes)


def row_of(words: Sequence[int]) -> Row:
    weights = np.ones(len(words), dtype=np.float32)
    weights[0] = 0.0
    return Row(input_ids=np.array(words), weights=weights)


def pair(
    config: Any,
    options: EngineOptions,
    *,
    parts: int,
    frozen: Sequence[str] = (),
    prepare: Callable[[Any], None] = lambda model: None,
) -> tuple[Engine, Reference]:
    """The same weights and buffers in parts, and in plain PyTorch."""
    model = reference_model(config)
    prepare(model)
    engine = make_engine(
        config, masters_of(model), options=options, frozen=frozen, expert_parts=parts
    )
    for name, buffer in model.named_buffers():
        engine.model.hf_model.get_buffer(name).copy_(buffer)
    reference = Reference(
        model,
        learning_rate=LEARNING_RATE,
        max_grad_norm=options.max_grad_norm,
        rows_per_micro=options.micro_batch_rows,
        frozen=names_like(model, frozen),
    )
    return engine, reference


def names_like(model: Any, patterns: Sequence[str]) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    return {name for name in names if any(fnmatchcase(name, each) for each in patterns)}


def check(
    config: Any,
    *,
    parts: int = 3,
    clip: float = 0.05,
    steps: Sequence[Sequence[Row]] = STEPS,
    options: EngineOptions = OPTIONS,
    **others: Any,
) -> None:
    options = replace(options, max_grad_norm=clip)
    engine, reference = pair(config, options, parts=parts, **others)
    assert_steps_equal(engine, reference, steps, learning_rate=LEARNING_RATE)


@pytest.fixture
def nan_where_nothing_is_written() -> Iterator[None]:
    """Memory that an operation leaves as it was then shows in every sum that it gets into."""
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    yield
    deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_where_nothing_is_written")
@pytest.mark.parametrize(("parts", "clip"), [(3, 0.05), (EXPERTS, 0.0)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"])
def test_parts_without_a_token(kind: str, parts: int, clip: float) -> None:
    """Two words reach four experts at most: the others have moments only in the second step."""
    words = [row_of([7, 50, 50, 7, 7, 50]), row_of([50, 7, 7, 50])]
    check(two_layers(kind), parts=parts, clip=clip, steps=[STEPS[0], words, words[1:]])


def test_grouped_products_leave_rows_of_other_parts_unwritten(
    nan_where_nothing_is_written: None,
) -> None:
    """What the test before is about: without it, it would prove nothing."""
    offsets = torch.tensor([1, 2], dtype=torch.int32)
    output = F.grouped_mm(torch.ones(4, 16), torch.ones(2, 16, 16), offs=offsets)
    assert output.isnan().any(1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("parts", [3, 5, EXPERTS])
def test_every_token_is_computed_by_its_own_experts_only(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where parts would be single experts: they are of two."""
    config = config_of("mixtral", num_hidden_layers=1)
    engine = make_engine(config, masters_of(reference_model(config)), expert_parts=parts)
    computed, grouped_mm = [], F.grouped_mm

    def counting(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        computed.append(int(offs[-1]))
        return grouped_mm(x, weight, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", counting)
    (row,) = make_rows(1)
    engine.evaluate([row])
    products = 2  # up and down
    assert sum(computed) == products * len(row.input_ids) * config.num_experts_per_tok


ROUTERS = ["*.mlp.gate.weight", "*.router.*"]
OUTSIDE = ["*embed*", "*attn*", "*norm*", "lm_head*"]
DENSE = ["*.mlp.gate_proj*", "*.mlp.up_proj*", "*.mlp.down_proj*", "*shared_experts*"]
FROZEN: dict[str, Sequence[str]] = {
    "all but routers": ROUTERS,
    "experts": [*OUTSIDE, *DENSE, *ROUTERS],
    "routers": [*OUTSIDE, *DENSE, "*.mlp.experts.*"],
    "experts of one layer": [*OUTSIDE, *DENSE, *ROUTERS, "*.layers.[02].*"],
    "second halves of experts": [*OUTSIDE, *DENSE, *ROUTERS, "*.experts.gate_up_proj*"],
    "embedding": ["*.layers.*", "*.norm.*", "lm_head*"],
}


SOME = [("qwen3_moe", 0.0, "routers"), ("qwen3_moe", 0.0, "experts of one layer")]
SOME += [("deepseek_v3", 0.05, trained) for trained in FROZEN]


@pytest.mark.parametrize(("kind", "clip", "trained"), SOME)
def test_only_some_trained(kind: str, clip: float, trained: str) -> None:
    config = config_of(kind)
    names = {name for name, _ in reference_model(config).named_parameters()}
    frozen = [each for each in FROZEN[trained] if any(fnmatchcase(n, each) for n in names)]
    check(config, clip=clip, frozen=frozen)


def test_only_biases_of_experts_trained() -> None:
    check(two_layers("gpt_oss"), frozen=[*OUTSIDE, "*.router.*", "*_proj"])


def draw_bias(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.normal_(std=0.5)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_correction_of_the_choice_of_experts(groups: int) -> None:
    """Another one in each layer: buffers that one cut of all layers is given."""
    config = config_of("deepseek_v3", n_group=groups, topk_group=(groups + 1) // 2)
    check(config, prepare=draw_bias)


def biases(folder: Path | str) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: each for name, each in model.named_buffers() if name.endswith(BIAS)}


def test_a_correction_goes_where_the_model_goes(workspace: Path) -> None:
    model = reference_model(config_of("deepseek_v3", vocab_size=262))
    draw_bias(model)
    model.save_pretrained("mixture")
    byte_tokenizer().save_pretrained("mixture")
    changes: dict[str, Any] = {"model_name_or_path": "mixture", "dtype": "bfloat16", "max_steps": 3}
    train_until(2, **changes, expert_parts=4)
    train(**changes, expert_parts=3, resume_from_checkpoint=True)
    export_model(Path("out/checkpoint-3"), Path("exported"), dtype="bfloat16")
    expected = biases("mixture")
    assert len(expected) == 2
    for folder in ("out/checkpoint-2", "out/checkpoint-3", "out", "exported"):
        found = biases(folder)
        assert all(torch.equal(found[name], each) for name, each in expected.items()), folder


def experts_of(kind: str, count: int, chosen: int) -> Any:
    names = {"gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
    groups = {"n_group": 1} if kind == "deepseek_v3" else {}
    counts = {names.get(kind, "num_experts"): count, "num_experts_per_tok": chosen}
    return two_layers(kind, **counts, **groups)


@pytest.mark.parametrize(
    ("kind", "count", "chosen", "parts"),
    [
        ("gpt_oss", EXPERTS, EXPERTS, EXPERTS),
        ("gpt_oss", EXPERTS, 1, 5),
        ("deepseek_v3", EXPERTS, 1, EXPERTS),
        ("deepseek_v3", 7, 7, 3),
        ("deepseek_v3", 2, 2, 2),
    ],
)
def test_any_number_of_experts(kind: str, count: int, chosen: int, parts: int) -> None:
    check(experts_of(kind, count, chosen), parts=parts)


def test_a_single_expert() -> None:
    check(experts_of("qwen3_moe", 1, 1), parts=2)


LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "every second is dense": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 5}),
    "the last is dense": ("qwen3_moe", {"mlp_only_layers": [2], "norm_topk_prob": True}),
    "clipped queries": ("olmoe", {"clip_qkv": 0.05, "norm_topk_prob": True}),
    "sliding and full": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "dense ones first": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "batched products": ("gpt_oss", {"experts_implementation": "batched_mm"}),
}


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_of_several_kinds(layers: str) -> None:
    kind, changes = LAYERS[layers]
    check(config_of(kind, **changes))


def test_a_loop_over_experts_is_refused() -> None:
    config = config_of("mixtral", experts_implementation="eager")
    with pytest.raises(UserError, match="experts_implementation eager"):
        make_engine(config, {}, expert_parts=2)


@pytest.mark.parametrize(("kind", "clip"), [("qwen3_moe", 0.05), ("deepseek_v3", 0.0)])
def test_tied_and_of_uneven_length_wherever_inputs_wait(kind: str, clip: float) -> None:
    config = config_of(kind, tie_word_embeddings=True)
    saved = frozenset({2, 5, 6, 9})
    spill = Spill(blocks=frozenset({1, 7, 10, 11}), input_bytes=2 * 12 * 32 * 4, num_micro=4)
    options = replace(OPTIONS, saved=saved, spill=spill)
    check(config, clip=clip, options=options, steps=[make_rows(7, 3), make_rows(5, 4)])


@pytest.mark.parametrize("parts", [3, EXPERTS])
def test_evaluation_between_steps(parts: int) -> None:
    """The loss of the same rows, before an update and after it."""
    engine, reference = pair(two_layers("gpt_oss"), OPTIONS, parts=parts)
    for _ in range(2):
        expected = reference.step(STEPS[0])
        sums = engine.evaluate(STEPS[0])
        assert sums.loss_sum / sums.weight_sum == pytest.approx(expected.loss, rel=5e-6)
        engine.step(STEPS[0], learning_rate=LEARNING_RATE)
