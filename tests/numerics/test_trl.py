"""The same run in TRL's SFTTrainer and here, where TRL is installed: a tiny model, a few steps."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks import trl_parity
from benchmarks.trl_parity import Run, compared, megatrain_run, several_turns, trl_run

from megatrain.data.chat import chat_row
from tests.tokenizers_for_tests import PUBLISHED, TEMPLATES, save_tiny_model
from tests.unit.test_chat_templates import CALLING, HELLO, TOOLS, TURNS
from tests.unit.test_data_chat import turn

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]

CHATS = [
    [turn("user", f"{i} + {i}?"), turn("assistant", f"It is {2 * i}" + "!" * (i % 7))]
    for i in range(16)
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama whose template writes ChatML as SmolLM2's does."""
    save_tiny_model(tmp_path / "model")
    shutil.copy(TEMPLATES / "smollm2.jinja", tmp_path / "model" / "chat_template.jinja")
    return tmp_path / "model"


@pytest.mark.parametrize("max_length", [256, 130], ids=["whole", "cut"])
def test_supervised_tokens_losses_and_norms(
    model: Path, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trl_parity.OPTIONS, "learning_rate", 1e-2)  # so that a wrong update shows
    run = Run(
        model=model,
        conversations=CHATS,
        max_length=max_length,
        batch=2,
        accumulation=2,
        steps=4,
    )
    found = compared(megatrain_run(run), trl_run(run))
    assert found["samples_with_the_same_supervised_tokens"] == 16
    assert found["largest_relative_difference_loss"] < 1e-5
    assert found["largest_relative_difference_grad_norm"] < 1e-4
    assert found["losses"][-1] < 0.99 * found["losses"][0]


def test_packed(model: Path) -> None:
    """All rows in each step: both make the same rows, in another order."""
    run = Run(
        model=model,
        conversations=CHATS,
        max_length=400,
        batch=16,
        accumulation=1,
        steps=3,
        packing=True,
    )
    found = compared(megatrain_run(run), trl_run(run))
    assert found["supervised_tokens"] == found["supervised_tokens_trl"]
    assert found["samples_with_the_same_supervised_tokens"] == 16
    assert found["largest_relative_difference_loss"] < 1e-5
    assert found["largest_relative_difference_grad_norm"] < 1e-4


def test_one_step_is_the_same_however_it_is_split(model: Path) -> None:
    found = trl_parity.scaling(model, CHATS, 256)
    for key in ("loss", "grad_norm"):
        values = [outcome[key] for outcome in found.values()]
        assert values == pytest.approx([values[0]] * 4, rel=1e-5)


def test_several_turns_have_the_mask_of_a_template_marked_by_hand(model: Path) -> None:
    ours, theirs = several_turns(model, CHATS)
    assert ours == theirs
    assert all(map(len, ours))


def trl_mask(name: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer: Any = PUBLISHED[name].tokenizer()
    template = trl.chat_template_utils.get_training_chat_template(tokenizer)
    found = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    mask: list[int] = found["assistant_masks"]
    return mask


@pytest.mark.parametrize("name", ["llama3", "gemma", "gemma3", "phi3"])
@pytest.mark.parametrize("messages", [HELLO, TURNS], ids=["one", "several"])
def test_masks_are_those_of_trls_training_templates(
    name: str, messages: list[dict[str, Any]]
) -> None:
    row = chat_row(PUBLISHED[name].tokenizer(), messages, "here", assistant_only=True)
    assert (row.weights > 0).astype(int).tolist() == trl_mask(name, messages)


@pytest.mark.parametrize(
    ("name", "messages", "tools", "header", "turns"),
    [
        ("qwen2_5", TURNS, None, 1, 2),
        ("qwen2_5", CALLING, TOOLS, 1, 2),
        ("deepseekv3", TURNS, None, 1, 2),
    ],
)
def test_trl_counts_parts_of_the_generation_prompt_as_well(
    name: str, messages: list[dict[str, Any]], tools: Any, header: int, turns: int
) -> None:
    """Qwen2.5's line break and DeepSeek's <｜Assistant｜>, which the model in use is given."""
    row = chat_row(PUBLISHED[name].tokenizer(), messages, "here", assistant_only=True, tools=tools)
    ours, theirs = (row.weights > 0).astype(int), trl_mask(name, messages, tools=tools)
    assert sum(theirs) - sum(ours) == header * turns
    assert all(theirs[index] for index in ours.nonzero()[0])
