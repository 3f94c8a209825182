"""Published chat templates: every assistant turn with its end-of-turn token, nothing else.

What is supervised is shown as decoded text.  A conversation that a template cannot show whole is
refused, never trained with a part missing.
"""

import json
from typing import Any

import pytest

from megatrain.data.chat import chat_row
from megatrain.errors import UserError
from tests.tokenizers_for_tests import PUBLISHED, byte_tokenizer
from tests.unit.test_data_chat import pieces, turn

HELLO = [turn("user", "Hello there?"), turn("assistant", "Hi.")]
TURNS = [*HELLO, turn("user", "2+2?"), turn("assistant", "It is 4 é.")]
SYSTEM = [turn("system", "Be brief."), *TURNS]
SPACES = [turn("user", " Hello? "), turn("assistant", " Hi. \n")]
ADD = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALL = {"type": "function", "id": "abcdefghi", "function": ADD}
RESULT = turn("tool", "4", tool_call_id="abcdefghi", name="add")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
CALLING = [
    turn("system", "Be brief."),
    turn("user", "2+2?"),
    turn("assistant", None, tool_calls=[CALL]),
    RESULT,
    turn("assistant", "It is 4 é."),
]
THINKING = [
    turn("user", "1+1?"),
    turn("assistant", "<think>\nOne more.\n</think>\n\nIt is 2."),
    turn("user", "2+2?"),
    turn("assistant", "<think>\nTwo more.\n</think>\n\nIt is 4."),
]
NO_THOUGHT = "<think>\n\n</think>\n\n"

ENDS = {
    "smollm2": "<|im_end|>\n",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>\n",
    "gemma3": "<end_of_turn>\n",
    "phi3": "<|end|>\n",
    "qwen2_5": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "mistral_v3": "</s>",
    "mistral_v13": "</s>",
}
BEGINNINGS = {"mistral_v3": " "}
"""What the template puts before each reply, where no generation prompt has it."""
LAST_BEGINNINGS = {"qwen3": NO_THOUGHT}
"""The same for the last reply alone."""
LAST_ENDS = {"phi3": "<|endoftext|>"}
TRIMMING = ("llama3", "llama3_1", "llama3_2", "gemma", "gemma3")


def supervised(name: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    tokenizer = PUBLISHED[name].tokenizer()
    row = chat_row(tokenizer, messages, "here", assistant_only=True, **options)
    return pieces(row, tokenizer)


def expected(name: str, *replies: str) -> list[str]:
    texts = [BEGINNINGS.get(name, "") + reply + ENDS[name] for reply in replies]
    texts[-1] = LAST_BEGINNINGS.get(name, "") + texts[-1] + LAST_ENDS.get(name, "")
    return texts


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_turn_and_several_without_a_system_turn(name: str) -> None:
    assert supervised(name, HELLO) == expected(name, "Hi.")
    assert supervised(name, TURNS) == expected(name, "Hi.", "It is 4 é.")


@pytest.mark.parametrize("name", PUBLISHED)
def test_several_turns_after_a_system_turn(name: str) -> None:
    if name == "gemma":
        with pytest.raises(UserError, match="System role not supported"):
            supervised(name, SYSTEM)
    elif name == "mistral_v3":  # the system's text stands in the last user's turn
        with pytest.raises(UserError, match="rewrites earlier turns"):
            supervised(name, SYSTEM)
        assert supervised(name, [SYSTEM[0], *HELLO]) == [" Hi.</s>"]
        assert supervised(name, SYSTEM, prompt_messages=4) == [" It is 4 é.</s>"]
    else:
        assert supervised(name, SYSTEM) == expected(name, "Hi.", "It is 4 é.")


@pytest.mark.parametrize("name", PUBLISHED)
def test_white_space_at_the_borders_is_the_templates(name: str) -> None:
    reply = "Hi." if name in TRIMMING else " Hi. \n"
    assert supervised(name, SPACES) == expected(name, reply)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ids_are_those_of_the_template(name: str) -> None:
    tokenizer: Any = PUBLISHED[name].tokenizer()
    row = chat_row(tokenizer, TURNS, "here", assistant_only=True)
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)
    if name == "llama3_2":  # its own rendering has today's date
        assert "Today Date: 26 Jul 2024" in tokenizer.decode(row.input_ids)
    else:
        assert list(row.input_ids) == rendered["input_ids"]


@pytest.mark.parametrize("name", ["gemma", "mistral_v3"])
def test_roles_out_of_order_are_the_templates_refusal(name: str) -> None:
    chat = [turn("assistant", "Hi."), turn("user", "Hello?"), turn("assistant", "Yes.")]
    with pytest.raises(UserError, match=r"roles must alternate|must start with a user"):
        supervised(name, chat)


LLAMA_CALL = '{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>'
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>\n'
CALLS = {
    "llama3_1": [LLAMA_CALL, "It is 4 é.<|eot_id|>"],
    "llama3_2": [LLAMA_CALL, "It is 4 é.<|eot_id|>"],
    "qwen2_5": [QWEN_CALL, "It is 4 é.<|im_end|>\n"],
    "qwen3": [QWEN_CALL, f"{NO_THOUGHT}It is 4 é.<|im_end|>\n"],
    "mistral_v3": [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 2}, "id": "abcdefghi"}]</s>',
        " It is 4 é.</s>",
    ],
    "mistral_v13": ['[TOOL_CALLS]add[ARGS]{"a": 2, "b": 2}</s>', "It is 4 é.</s>"],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_tool_calls(name: str, as_text: bool) -> None:
    """Arguments may come as an object or, as at OpenAI, as text."""
    arguments = json.dumps(ADD["arguments"]) if as_text else ADD["arguments"]
    call = CALL | {"function": ADD | {"arguments": arguments}}
    chat = [*CALLING[:2], turn("assistant", None, tool_calls=[call]), *CALLING[3:]]
    assert supervised(name, chat, tools=TOOLS) == CALLS[name]


def test_tool_calls_of_a_template_that_takes_arguments_as_text() -> None:
    call = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 2, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    )
    reply = "It is 4 é.<｜end▁of▁sentence｜>"
    assert supervised("deepseekv3", CALLING) == [call, reply]
    with pytest.raises(UserError, match="leaves out the descriptions of tools"):
        supervised("deepseekv3", CALLING, tools=TOOLS)


def test_tools_that_move_with_the_last_question() -> None:
    chat = [*CALLING[1:], turn("user", "3+3?"), turn("assistant", "It is 6.")]
    with pytest.raises(UserError, match="rewrites earlier turns"):
        supervised("mistral_v3", chat, tools=TOOLS)
    assert supervised("mistral_v13", chat, tools=TOOLS) == [*CALLS["mistral_v13"], "It is 6.</s>"]


@pytest.mark.parametrize("name", ["smollm2", "llama3", "phi3", "deepseek_r1_distill"])
def test_tool_calls_that_a_template_does_not_show_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"leaves out the (tool calls|content)|rewrites"):
        supervised(name, CALLING)
    with pytest.raises(UserError, match="leaves out the descriptions of tools"):
        supervised(name, HELLO, tools=TOOLS)


@pytest.mark.parametrize("name", ["gemma", "gemma3"])
def test_tool_calls_that_a_template_does_not_take_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="does not take them"):
        supervised(name, CALLING[1:])


def test_words_beside_a_tool_call_that_the_template_drops_are_refused() -> None:
    chat = [CALLING[1], turn("assistant", "Let me see.", tool_calls=[CALL]), *CALLING[3:]]
    with pytest.raises(UserError, match=r"leaves out the content .*message 1 \(assistant\)"):
        supervised("llama3_1", chat, tools=TOOLS)
    assert supervised("qwen2_5", chat, tools=TOOLS)[0] == f"Let me see.\n{QWEN_CALL}"


def test_a_role_that_the_template_passes_over_is_refused() -> None:
    with pytest.raises(UserError, match=r"leaves out the content .*message 0 \(developer\)"):
        supervised("qwen2_5", [turn("developer", "Be brief."), *HELLO])


def test_parts_that_a_template_drops_or_prints_as_python_are_refused() -> None:
    parts = [turn("user", [{"type": "text", "text": "Hello?"}]), turn("assistant", "Hi.")]
    for name in ("qwen3", "llama3"):
        with pytest.raises(UserError, match=r"leaves out the parts of message 0 \(user\)"):
            supervised(name, parts)
    assert supervised("gemma3", parts) == ["Hi.<end_of_turn>\n"]


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2_5", "gemma", "mistral_v13"])
def test_reasoning_in_the_contents_is_kept_by_templates_that_do_not_know_it(name: str) -> None:
    contents = [message["content"] for message in THINKING[1::2]]
    assert supervised(name, THINKING) == expected(name, *contents)


def test_reasoning_of_earlier_turns_that_qwen3_drops() -> None:
    end = "<|im_end|>\n"
    last = THINKING[3]["content"]
    assert supervised("qwen3", THINKING) == [f"It is 2.{end}", last + end]
    apart = [*THINKING[:3], turn("assistant", "It is 4.", reasoning_content="Two more.")]
    assert supervised("qwen3", apart) == [f"It is 2.{end}", last + end]


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_reasoning_of_the_last_turn_that_deepseek_drops_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"leaves out a part of the content of message 3"):
        supervised(name, THINKING)


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"qwen3"}))
def test_reasoning_in_a_key_that_a_template_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"leaves out the reasoning of message 1"):
        supervised(name, [HELLO[0], turn("assistant", "Hi.", reasoning_content="Greet.")])


def test_reasoning_that_the_generation_prompt_opens() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    row = chat_row(tokenizer, THINKING[2:], "here", assistant_only=True)
    assert pieces(row, tokenizer) == ["Two more.\n</think>\n\nIt is 4.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ("add", "no list of calls"),
        ([{"function": {"arguments": {}}}], "no list of calls with a name"),
        (
            [{"function": {"name": "add", "arguments": "a=2"}}],
            r"arguments that are no JSON object \('a=2'\)",
        ),
        ([{"name": "add", "arguments": [2]}], r"arguments that are no JSON object"),
    ],
)
def test_bad_tool_calls_are_named(calls: Any, found: str) -> None:
    chat = [CALLING[1], turn("assistant", "", tool_calls=calls)]
    with pytest.raises(UserError, match=rf"tool calls at here \(message 1\): {found}"):
        supervised("qwen2_5", chat)
