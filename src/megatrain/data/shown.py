"""What a chat template leaves out without a word, each a refusal: otherwise a model is trained to
say nothing where it should call a tool, or to answer a question that it never saw.

Contents (a role that the template does not know), parts of contents, tools, tool calls, and the
reasoning of the last turn.  Reasoning of earlier turns is left out by design: the model does not
see it either when it is used.

Price: a rendering for each content that is short or repeated, and one where there are tools.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatrain.data.tool_calls import called_names
from megatrain.data.turns import Conversation, Message, Span
from megatrain.errors import UserError

TELLING = 16
"""Characters of a text that is not found by accident."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages hold it; transformers gives templates each by the other names."""


def check_all_shown(chat: Conversation, whole: str, spans: Mapping[int, Span]) -> None:
    """Refuse a conversation of which the template leaves something out.

    Args:
        chat: the conversation.
        whole: its text.
        spans: characters of each assistant's turn, where they are known.

    Raises:
        UserError: naming the message and what is left out.
    """
    if chat.tools and _same_without_tools(chat, whole):
        raise _refusal(chat, "the descriptions of tools")
    for number, message in enumerate(chat.messages):
        start, end = spans.get(number, (0, len(whole)))
        turn = whole[start:end]
        missing = _missing(chat, message, number, whole, turn)
        if number == len(chat.messages) - 1 and message["role"] == "assistant":
            missing = missing or _missing_at_the_end(message, whole)
        if missing:
            raise _refusal(chat, f"{missing} of message {number} ({message['role']})")


def _missing(
    chat: Conversation, message: Message, number: int, whole: str, turn: str
) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if any(str(text).strip() not in turn for text in texts) or str(content) in whole:
            return "the parts"
    elif content and content.strip():
        text = content.strip()
        told = len(text) >= TELLING and text in turn and whole.count(text) == 1
        if not told and chat.marked(chat.messages, number) is None:
            return "the content (or shows it twice)"
    names = called_names(message)
    if any(turn.count(name) < names.count(name) for name in names):
        return "the tool calls"
    return None


def _missing_at_the_end(message: Message, whole: str) -> str | None:
    """Of the last turn nothing may be dropped; white space may change.

    The generation prompt may have opened its reasoning, so not only the turn is searched.
    """
    squeezed = _squeezed(whole)
    if any(_squeezed(str(message.get(key) or "")) not in squeezed for key in REASONING):
        return "the reasoning"
    content: Any = message.get("content")
    if isinstance(content, str) and _squeezed(content) not in squeezed:
        return "a part of the content"
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _same_without_tools(chat: Conversation, whole: str) -> bool:
    try:
        return replace(chat, tools=None).render(chat.messages) == whole
    except UserError:
        return False


def _refusal(chat: Conversation, left_out: str) -> UserError:
    return UserError(
        asked=f"chat messages at {chat.place}",
        found=f"a chat template that leaves out {left_out}",
        change="leave it out of the data, or give a template that shows it (chat_template_path)",
    )
