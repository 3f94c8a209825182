"""Tool calls of the assistant, in the two forms that chat templates take.

OpenAI's messages hold the arguments as JSON text, Hugging Face's templates want the object: those
of Qwen2.5 and Llama-3.1 would quote a text once more, and the model would learn that.  DeepSeek's
want the text.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from megatrain.data.turns import Message
from megatrain.errors import UserError


def with_object_arguments(messages: Sequence[Message], place: str) -> list[Message]:
    """Messages whose calls have objects as arguments; beside a call, no content is an empty one.

    Raises:
        UserError: for calls that are none, or arguments that are not the JSON of an object.
    """
    return [
        message | {"content": _content(message), "tool_calls": _calls(message, number, place)}
        if message.get("tool_calls")
        else message
        for number, message in enumerate(messages)
    ]


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same with the arguments as JSON text."""
    return [
        message
        | {"tool_calls": [_with_arguments(call, _as_text) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def called_names(message: Message) -> list[str]:
    """The functions that a message calls."""
    return [str(_function(call)["name"]) for call in message.get("tool_calls") or []]


def _content(message: Message) -> Any:
    # transformers leaves None out before it renders, and templates add contents to texts.
    content = message.get("content")
    return "" if content is None else content


def _calls(message: Message, number: int, place: str) -> list[dict[str, Any]]:
    asked = f"tool calls at {place} (message {number})"
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(_function(call), dict) and _function(call).get("name")
        for call in calls
    ):
        raise UserError(
            asked=asked,
            found="no list of calls with a name each",
            change='use [{"type": "function", "function": {"name": ..., "arguments": {...}}}, ...]',
        )

    def parsed(arguments: Any) -> Any:
        try:
            found = json.loads(arguments) if isinstance(arguments, str) else arguments
        except json.JSONDecodeError:
            found = arguments
        if not isinstance(found, dict):
            raise UserError(
                asked=asked,
                found=f"arguments that are no JSON object ({arguments!r})",
                change='give an object of argument names, such as {"city": "Paris"}, or its JSON',
            )
        return found

    return [_with_arguments(call, parsed) for call in calls]


def _as_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _function(call: dict[str, Any]) -> Any:
    """Name and arguments stand under "function", or in the call itself."""
    return call.get("function", call)


def _with_arguments(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    function = _function(call)
    changed = function | {"arguments": change(function.get("arguments") or {})}
    return call | {"function": changed} if "function" in call else changed
