"""The model's own tokenizer and chat template."""

from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import UserError


class Tokenizer(Protocol):
    """What the data room uses of a transformers tokenizer."""

    eos_token_id: int | None
    chat_template: Any
    is_fast: bool

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Token ids (and offsets) of a text."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """A conversation as the text that the model was trained on."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        """Text of token ids."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files."""


def load_tokenizer(path: str | Path, *, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model directory or id.

    Raises:
        UserError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            asked=f"the tokenizer of {path}",
            found=f"none that loads ({str(error).strip().splitlines()[0].rstrip('.')})",
            change="copy tokenizer.json and tokenizer_config.json into the model directory",
        ) from error
    loaded: Tokenizer = tokenizer
    return loaded
