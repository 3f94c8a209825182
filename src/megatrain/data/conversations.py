"""ShareGPT and Alpaca records as messages, with every turn, tool call and system text kept."""

import json
from typing import Any

from megatrain.data.files import Record
from megatrain.data.turns import Message
from megatrain.errors import UserError

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Who speaks, by `from`; a `function_call` holds the JSON of one call or of several."""

ALPACA_COLUMNS = ("instruction", "output")
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
"""As published: https://github.com/tatsu-lab/stanford_alpaca#data-release"""


def sharegpt_messages(record: Record) -> list[Message]:
    """`conversations` of {from, value}, or of {role, content}; a `system` column goes first.

    Raises:
        UserError: naming the turn that is neither.
    """
    turns = record.value.get("conversations")
    asked = f"conversations at {record.place}"
    if not isinstance(turns, list):
        raise _not_turns(asked, f"a {type(turns).__name__}")
    messages = _system(record)
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise _not_turns(asked, f"a {type(turn).__name__} (turn {number})")
        if "role" in turn and "from" not in turn:
            messages.append(turn)
            continue
        speaker, value = turn.get("from"), turn.get("value")
        if speaker not in SHAREGPT_ROLES or not isinstance(value, str):
            found = f"from '{speaker}' (turn {number})"
            raise _not_turns(asked, found if isinstance(value, str) else f"no value {found}")
        message: Message = {"role": SHAREGPT_ROLES[speaker], "content": value}
        if speaker == "function_call":
            message = {"role": "assistant", "content": "", "tool_calls": _calls(value, asked)}
        if turn.get("weight") is not None:
            message["weight"] = turn["weight"]
        messages.append(message)
    return messages


def alpaca_messages(record: Record) -> list[Message]:
    """`history` (pairs), then instruction and input as one question, then output.

    Raises:
        UserError: for a column that is no text, or a history that is no list of pairs.
    """
    messages = _system(record)
    history = record.value.get("history") or []
    asked = f"history at {record.place}"
    if not isinstance(history, list):
        raise _not_pairs(asked, f"a {type(history).__name__}")
    for number, pair in enumerate(history):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise _not_pairs(asked, f"entry {number} that is none")
        messages += [_message("user", pair[0]), _message("assistant", pair[1])]
    instruction, given, output = _alpaca_texts(record)
    question = "\n".join(text for text in (instruction, given) if text)
    return [*messages, _message("user", question), _message("assistant", output)]


def alpaca_pair(record: Record) -> tuple[str, str]:
    """Prompt and completion with the text that Alpaca was trained on, for a base model.

    Raises:
        UserError: for a column that is no text, or turns that this text has no place for.
    """
    for column in ("history", "system"):
        if record.value.get(column):
            raise UserError(
                asked=f"column '{column}' at {record.place}",
                found="a tokenizer without a chat template, and no place for it in Alpaca's prompt",
                change="give a chat template (chat_template_path), or leave the column out",
            )
    instruction, given, output = _alpaca_texts(record)
    form = ALPACA_PROMPT_WITH_INPUT if given else ALPACA_PROMPT
    return form.format(instruction=instruction, input=given), output


def _alpaca_texts(record: Record) -> tuple[str, str, str]:
    texts = []
    for column in ("instruction", "input", "output"):
        value = record.value.get(column)
        value = "" if value is None and column == "input" else value
        if not isinstance(value, str):
            raise UserError(
                asked=f"column '{column}' (str) at {record.place}",
                found=f"a {type(value).__name__}",
                change="mend the record",
            )
        texts.append(value)
    return texts[0], texts[1], texts[2]


def _system(record: Record) -> list[Message]:
    text = record.value.get("system")
    if text is not None and not isinstance(text, str):
        raise UserError(
            asked=f"column 'system' (str) at {record.place}",
            found=f"a {type(text).__name__}",
            change="mend the record",
        )
    return [_message("system", text)] if text else []


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _calls(value: str, asked: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
    except json.JSONDecodeError as error:
        raise _not_turns(asked, f"a function_call that is no JSON ({error.msg})") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise _not_turns(asked, "a function_call without a name")
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for call in calls
    ]


def _not_turns(asked: str, found: str) -> UserError:
    known = ", ".join(SHAREGPT_ROLES)
    change = f'use [{{"from": "human", "value": "..."}}, ...] with from one of {known}'
    return UserError(asked=asked, found=found, change=change)


def _not_pairs(asked: str, found: str) -> UserError:
    return UserError(asked=asked, found=found, change='use [["question", "answer"], ...]')
