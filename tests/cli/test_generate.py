"""`megatrain generate` and `megatrain chat`, against transformers' `generate` on the directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.data.chat import end_of_turn
from megatrain.errors import UserError
from tests.tokenizers_for_tests import CHATML, LLAMA3, byte_tokenizer

SHORT = ["--max-new-tokens", "12"]
EOS, END_OF_TURN = 256, 258


def run(*arguments: str, typed: str = "") -> str:
    result = CliRunner().invoke(app, list(arguments), input=typed, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def expected(ids: list[int], *, stop: list[int], tokens: int = 12) -> str:
    model = AutoModelForCausalLM.from_pretrained("models/base").eval()
    text = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, eos_token_id=stop
    )
    return AutoTokenizer.from_pretrained("models/base").decode(
        text[0, len(ids) :], skip_special_tokens=True
    )


def tokens_of(text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained("models/base")(text)["input_ids"])


def test_a_prompt_is_gone_on_from(workspace: Path) -> None:
    found = run("generate", "models/base", "--prompt", "The quick", *SHORT)
    assert found == expected(tokens_of("The quick"), stop=[EOS]) + "\n"


def test_prompts_of_a_file_in_batches(workspace: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "The quick"},
        {"prompt": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    (workspace / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    arguments = ["generate", "models/base", "--prompts", "prompts.jsonl", *SHORT]
    found = [json.loads(line) for line in run(*arguments, "--batch-size", "2").splitlines()]
    assert [row["prompt"] for row in found] == [
        record.get("prompt", record.get("messages")) for record in records
    ]
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for row, text in zip(found, ["The quick", chat, chat.replace("Hi", "Hello")], strict=True):
        assert row["completion"] == expected(tokens_of(text), stop=[EOS, END_OF_TURN])
        assert row["finish_reason"] in ("stop", "length") and row["tokens"] <= 12


def test_the_chat_template_can_be_asked_for(workspace: Path) -> None:
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    found = run("generate", "models/base", "--prompt", "Hi", "--apply-chat-template", *SHORT)
    assert found == expected(tokens_of(chat), stop=[EOS, END_OF_TURN]) + "\n"


def test_what_is_drawn_depends_on_the_seed_alone(workspace: Path) -> None:
    def draw(seed: int) -> str:
        drawn = ["--temperature", "1.5", "--top-p", "0.95", "--seed", str(seed)]
        return run("generate", "models/base", "--prompt", "The quick", *SHORT, *drawn)

    assert draw(1) == draw(1) != draw(2)


def test_a_conversation_goes_on_with_all_that_was_said(workspace: Path) -> None:
    found = run("chat", "models/base", "--system", "Be brief.", *SHORT, typed="Hi\nAnd you?\n")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    first = expected(tokens_of(text), stop=[EOS, END_OF_TURN])
    text += f"{first}<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"
    second = expected(tokens_of(text), stop=[EOS, END_OF_TURN])
    assert found == f"{first}\n{second}\n"


@pytest.mark.parametrize(
    ("template", "ends"), [(CHATML, [258]), (LLAMA3, [261]), ("{{ messages[-1].content }}", [])]
)
def test_the_token_that_ends_a_turn_is_read_off_the_template(
    template: str, ends: list[int]
) -> None:
    assert end_of_turn(byte_tokenizer(template)) == ends


def test_the_models_positions_are_not_overrun(workspace: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=262, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained("short")
    byte_tokenizer().save_pretrained("short")
    with pytest.raises(UserError, match=r"16 positions.*\(--max-new-tokens\)"):
        run("generate", "short", "--prompt", "0123456789", "--max-new-tokens", "7")
    run("generate", "short", "--prompt", "0123456789", "--max-new-tokens", "6")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "neither or both"),
        (["--prompt", "a", "--prompts", "data/train.jsonl"], "neither or both"),
        (["--prompts", "data/train.jsonl"], "question"),
        (["--prompts", "absent.jsonl"], "absent"),
        (["--prompt", ""], "no token"),
        (["--prompt", "a", "--top-k", "5"], "greedy"),
        (["--prompt", "a", "--gpu-memory", "much"], "--gpu-memory: 'much'"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1"),
    ],
)
def test_bad_input_is_one_error(workspace: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run("generate", "models/base", *arguments)


def test_chat_needs_a_template(workspace: Path) -> None:
    byte_tokenizer(None).save_pretrained("models/base")
    (workspace / "models" / "base" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="chat template"):
        run("chat", "models/base", typed="Hi\n")
