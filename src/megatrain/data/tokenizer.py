"""The model's own tokenizer and chat template.

Promise: a directory is read from the disk alone, the network is never asked.  A padding token is
not needed: rows are padded on the right with any token, unsupervised.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import UserError


class Tokenizer(Protocol):
    """What the data room uses of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any
    is_fast: bool
    added_tokens_decoder: dict[int, Any]
    """Special tokens and others that were added whole, by id."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Token ids (and offsets) of a text."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """A conversation as the text that the model was trained on."""

    def add_tokens(self, new_tokens: list[str], special_tokens: bool = False) -> int:
        """Give new tokens ids behind the others; returns how many were new."""

    def get_vocab(self) -> dict[str, int]:
        """Id of every token, added ones included."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        """Text of token ids."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files."""


def load_tokenizer(
    model_path: str | Path,
    *,
    chat_template: str | None = None,
    gguf_file: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model directory, or of a GGUF file in it.

    Args:
        model_path: directory.
        gguf_file: name of the GGUF file at `model_path` from whose header transformers builds it.
        chat_template: a Jinja template, or the path of a `.jinja` file, instead of the model's own.

    Raises:
        UserError: if there is none that loads, or no such template file.
    """
    from transformers import AutoTokenizer

    asked = f"the tokenizer of {model_path}"
    change = (
        "name a model that has one with tokenizer_name, or copy tokenizer.json and"
        " tokenizer_config.json into the directory"
    )
    template = None if chat_template is None else _template_text(chat_template)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(model_path),
            local_files_only=True,
            **({} if gguf_file is None else {"gguf_file": gguf_file}),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            asked=asked,
            found=f"none that loads ({said.rstrip('.:')})",
            change=change
            if gguf_file is None
            else "start from a directory with safetensors weights and a tokenizer",
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # built of a config.json alone
        raise UserError(
            asked=asked,
            found="no token beside the special ones: its files are not there",
            change=change,
        )
    if template is not None:
        tokenizer.chat_template = template
    loaded: Tokenizer = tokenizer
    return loaded


def extend_tokenizer(
    tokenizer: Tokenizer, *, tokens: Sequence[str] = (), special_tokens: Sequence[str] = ()
) -> None:
    """Add tokens in the order given; what the tokenizer has already keeps its id.

    Args:
        tokenizer: changed in place, and saved with the model.
        tokens: ordinary tokens.
        special_tokens: such as are never split and are left out of decoded text.
    """
    tokenizer.add_tokens(list(special_tokens), special_tokens=True)
    tokenizer.add_tokens(list(tokens))


def num_token_ids(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs for every id of the tokenizer."""
    return 1 + max(tokenizer.get_vocab().values())


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """What the config of a model from scratch says of this tokenizer, by key.

    No padding token: training needs none, and the embedding of one would never be trained.
    """
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }


def _template_text(chat_template: str) -> str:
    if not chat_template.endswith(".jinja"):
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            asked=f"the chat template {chat_template}",
            found="no such file that can be read as UTF-8",
            change="give the path of a .jinja file, or the template itself",
        ) from error
