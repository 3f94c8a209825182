"""`megatrain generate` and `megatrain chat`: text from a model whose layers may be streamed."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatrain.data.chat import end_of_turn
from megatrain.data.prompts import Prompt, prompt_ids
from megatrain.data.turns import Message
from megatrain.evaluation.generation import Completion, Decoding, Generator, check_prompt
from megatrain.opening import ModelChoice, OpenModel

TO = "generate"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A prompt and what was written behind it."""

    prompt: Prompt
    completion: Completion

    def describe(self) -> str:
        """One JSON line."""
        return json.dumps(
            {
                "prompt": self.prompt.value,
                "completion": self.completion.text,
                "tokens": len(self.completion.token_ids),
                "finish_reason": self.completion.finish_reason,
            },
            ensure_ascii=False,
        )


def generate(
    choice: ModelChoice,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    batch_size: int = 8,
    write: Callable[[str], None] | None = None,
) -> Iterator[Generated]:
    """Completions of prompts, in their order.

    Args:
        choice: the model.
        prompts: texts, or messages for its chat template.
        decoding: how tokens are chosen.
        batch_size: prompts of one batch.
        write: given the text of a single prompt as it comes.

    Raises:
        UserError: for a model or a prompt that cannot be used, before weights are loaded.
    """
    decoding.check()
    opened = OpenModel(choice, to=TO)
    tokenizer, positions = opened.tokenizer, opened.model.learned_positions
    every = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, every, strict=True):
        check_prompt(ids, prompt.place, decoding, max_positions=positions)
    stop_ids = end_of_turn(tokenizer) if any(prompt.is_chat for prompt in prompts) else []
    with opened.weights() as store, opened.whole(store) as whole, whole() as hf_model:
        generator = Generator(hf_model, tokenizer, decoding, stop_ids=stop_ids)
        for start in range(0, len(prompts), batch_size):
            batch = slice(start, start + batch_size)
            completions = generator.complete(every[batch], write)
            for prompt, completion in zip(prompts[batch], completions, strict=True):
                yield Generated(prompt=prompt, completion=completion)


def chat(
    choice: ModelChoice,
    decoding: Decoding,
    *,
    system: str | None,
    read: Callable[[], str | None],
    write: Callable[[str], None],
) -> None:
    """A conversation; the model is given all of it for each turn.

    Args:
        choice: the model.
        decoding: how tokens are chosen.
        system: what goes before the first turn.
        read: the user's next turn; None ends the conversation.
        write: given the assistant's text as it comes.

    Raises:
        UserError: for a model that cannot be used or has no chat template, before weights are
            loaded; or a conversation that grows too long for it.
    """
    decoding.check()
    opened = OpenModel(choice, to=TO)
    tokenizer, positions = opened.tokenizer, opened.model.learned_positions
    stop_ids = end_of_turn(tokenizer)
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with opened.weights() as store, opened.whole(store) as whole, whole() as hf_model:
        generator = Generator(hf_model, tokenizer, decoding, stop_ids=stop_ids)
        while (text := read()) is not None:
            messages.append({"role": "user", "content": text})
            turn = Prompt(value=messages, place="the conversation")
            ids = prompt_ids(tokenizer, turn)
            check_prompt(ids, turn.place, decoding, max_positions=positions)
            (completion,) = generator.complete([ids], write)
            write("\n")
            messages.append({"role": "assistant", "content": completion.text})
