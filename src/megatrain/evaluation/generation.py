"""Text that a model writes: greedy or sampled, prompts in batches, by transformers' own `generate`.

Prompts of a batch are padded on the left and masked.  Greedy decoding is transformers'
`generate(do_sample=False)` token for token, the cache of keys and values (or of states) included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import UserError
from megatrain.models.whole import TextWriter


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are chosen, with the names of transformers."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: the likeliest token each time (greedy); above 0: drawn."""
    top_p: float | None = None
    """Draw from the likeliest tokens that have this probability together.  None, as of `top_k`:
    what the model's generation_config.json says, else transformers' default."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; 0: from all of them."""
    seed: int = 0
    """Of what is drawn."""

    def check(self) -> None:
        """Refuse what would be ignored or makes no sense.

        Raises:
            UserError: naming it.
        """
        if self.max_new_tokens < 1:
            raise UserError(
                asked=f"max_new_tokens: {self.max_new_tokens}",
                found="nothing to write",
                change="use 1 or more",
            )
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                asked=f"temperature: {self.temperature}",
                found="no number from 0",
                change="use 0 for greedy decoding, or a number such as 0.7",
            )
        given = [name for name in ("top_p", "top_k") if getattr(self, name) is not None]
        if given and self.temperature == 0:
            raise UserError(
                asked=f"{' and '.join(given)} with temperature: 0",
                found="greedy decoding, which draws nothing",
                change="give a temperature, such as 1.0, or leave it out",
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                asked=f"top_p: {self.top_p}", found="no probability", change="use up to 1"
            )
        if self.top_k is not None and self.top_k < 0:
            raise UserError(
                asked=f"top_k: {self.top_k}", found="less than 0", change="use 0 or more"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `generate`."""
        if self.temperature == 0:
            # As transformers has them unset: a model's own would only be warned of.
            neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens} | neutral
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"do_sample": True, "max_new_tokens": self.max_new_tokens} | given


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was written behind one prompt."""

    text: str
    """Without special tokens."""
    token_ids: list[int]
    """With the token that ended it, if one did."""
    finish_reason: str
    """stop: an end-of-sequence token; length: max_new_tokens."""


class Generator:
    """Writes behind prompts.

    Args:
        hf_model: a transformers model, ready to be called.
        tokenizer: its own.
        decoding: how tokens are chosen.
        stop_ids: tokens that end a text, beside those of the model's generation config.
    """

    def __init__(
        self,
        hf_model: Any,
        tokenizer: Any,
        decoding: Decoding,
        *,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._model, self._tokenizer, self._decoding = hf_model, tokenizer, decoding
        own = hf_model.generation_config.eos_token_id
        own = [own] if isinstance(own, int) else list(own or ())
        if not own and tokenizer.eos_token_id is not None:
            own = [tokenizer.eos_token_id]
        self._stop_ids = list(dict.fromkeys([*own, *stop_ids]))
        torch.manual_seed(decoding.seed)

    def complete(
        self, prompts: Sequence[Sequence[int]], write: Callable[[str], None] | None = None
    ) -> list[Completion]:
        """Completions of one batch of prompts.

        Args:
            prompts: their token ids.
            write: given the text of a single prompt as it comes.
        """
        length = max(map(len, prompts))
        filler = self._stop_ids[0] if self._stop_ids else 0
        ids = torch.full((len(prompts), length), filler)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        device = self._model.device
        written = self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            eos_token_id=self._stop_ids or None,
            pad_token_id=filler,
            streamer=None if write is None else TextWriter(self._tokenizer, write),
            **self._decoding.arguments,
        )
        return [self._completion(row[length:].tolist()) for row in written]

    def _completion(self, ids: list[int]) -> Completion:
        ends = [place for place, token in enumerate(ids) if token in self._stop_ids]
        kept = ids[: ends[0]] if ends else ids
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        ids = ids[: len(kept) + 1]
        return Completion(text=text, token_ids=ids, finish_reason="stop" if ends else "length")


def check_prompt(
    ids: Sequence[int], place: str, decoding: Decoding, *, max_positions: int | None
) -> None:
    """Refuse a prompt that the model cannot go on from.

    Args:
        ids: its tokens.
        place: where it stands, for errors.
        decoding: how many tokens are to follow.
        max_positions: tokens for which the model has positions; None: any number.

    Raises:
        UserError: if it is empty, or the text might grow beyond the model's positions.
    """
    if not ids:
        raise UserError(asked=f"text behind {place}", found="no token", change="say something")
    if max_positions is not None and len(ids) + decoding.max_new_tokens > max_positions:
        raise UserError(
            asked=f"{decoding.max_new_tokens} tokens behind the {len(ids)} of {place}",
            found=f"a model that has {max_positions} positions",
            change="ask for fewer (max_new_tokens), or shorten the prompt",
        )
