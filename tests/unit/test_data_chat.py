"""What the assistant wrote, shown as decoded text, against stock masks and rewriting templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain.data import DataOptions, Row, load_rows
from megatrain.data.chat import chat_row
from megatrain.errors import UserError
from tests.tokenizers_for_tests import CHATML, LLAMA3, REWRITING

CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
# An empty reasoning in the last turn only, and reasoning dropped from earlier ones (as Qwen3 does).
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set text = m['content'] or '' %}{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['name'] }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a reasoning that finished turns do not show (as DeepSeek-R1 does).
OPENING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|start|>{{ m['content'] }}{% else %}"
    "<|end|>{{ m['content'] }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|end|><think>\n{% endif %}"
)
# The whole conversation is closed by the end of sequence (as Phi-3 does).
CLOSING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
# The last turn ends in a token of its own, and turns begin with a channel (as gpt-oss does).
RETURNING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<final>"
    "{% endif %}|{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' and not"
    " add_generation_prompt %}<|eot|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# The prompt opens a reasoning with a line break, an empty one has none (as Nemotron does).
UNBROKEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}<|eot|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# The system turn moves to the last user turn, so that the beginning changes (as Mistral does).
MOVING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{% if loop.last or loop.index0 =="
    " messages | length - 2 %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}<|eot|>{% endif %}{% endfor %}"
)
# Three templates in which the marker shows that a turn has no surroundings of its own.
LENGTH_AT_FRONT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] | length > 20 %}!"
    "{% endif %}{% endfor %}" + OPENING
)
LENGTH_IN_REPLY = OPENING.replace(
    "<|start|>",
    "<|start|>{% if loop.index0 %}{{ messages[loop.index0 - 1]['content'] | length }}{% endif %}",
)
PADDED_BEFORE_SHORT = OPENING.replace(
    "<|eot|>",
    "<|eot|>{% if not loop.last and messages[loop.index]['content'] | length < 10 %}{{ ' ' * 30 }}"
    "{% endif %}",
)
BLANK_END = (
    "{% for m in messages %}### {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n<think>{% endif %}"
)
# Turns that begin and end in line breaks, which become one token.
BROKEN_LINES = (
    "{% for m in messages %}{{ '\n' + m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}assistant: {% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
OTHER_HEADER = (
    "{% for m in messages %}<|start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
MERGES = [("Ġ", "T"), ("ĠT", "w"), ("ĠTw", "o"), ("Ċ", "Ċ"), ("H", "e"), ("l", "l")]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


CHAT = [
    turn("system", "Be brief."),
    turn("user", "Hello?"),
    turn("assistant", "Hello."),
    turn("user", "2+2?"),
    turn("assistant", "4 é"),
]


def merging_tokenizer(template: str | None) -> Any:
    """Bytes and a few merges, so that tokens may span the borders of texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(first + second for first, second in MERGES)]
    inner = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=MERGES)
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    backend: Any = PreTrainedTokenizerFast
    tokenizer = backend(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


class WithoutOffsets:
    """The same tokenizer, posing as one that knows no offsets."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.eos_token_id, self.chat_template = inner.eos_token_id, inner.chat_template

    def __call__(self, text: str, **kwargs: Any) -> Any:
        assert "return_offsets_mapping" not in kwargs
        return self.inner(text, **kwargs)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return self.inner.apply_chat_template(conversation, **kwargs)

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        return str(self.inner.decode(token_ids, **kwargs))

    def save_pretrained(self, save_directory: str) -> Any:
        raise AssertionError(save_directory)


def pieces(row: Row, tokenizer: Any) -> list[str]:
    """Each run of supervised tokens as text."""
    runs: list[list[int]] = [[]]
    for token, weight in zip(row.input_ids, row.weights, strict=True):
        if weight:
            runs[-1].append(int(token))
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def chat_pieces(template: str, messages: list[dict[str, Any]]) -> list[str]:
    tokenizer = merging_tokenizer(template)
    row = chat_row(tokenizer, messages, "here", assistant_only=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert list(row.input_ids) == list(whole)
    return pieces(row, tokenizer)


def test_the_mask_equals_that_of_a_template_with_generation_marks() -> None:
    tokenizer = merging_tokenizer(CHATML)
    row = chat_row(tokenizer, CHAT, "here", assistant_only=True)
    marked = tokenizer.apply_chat_template(
        CHAT,
        chat_template=CHATML_MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert list(row.input_ids) == list(marked["input_ids"])
    assert [int(weight) for weight in row.weights] == list(marked["assistant_masks"])
    assert 0 < sum(marked["assistant_masks"]) < len(row.weights)


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (LLAMA3, "<|eot|>")])
def test_turns_are_told_apart_with_and_without_offsets(template: str, end: str) -> None:
    expected = [f"Hello.{end}", f"4 é{end}"]
    assert chat_pieces(template, CHAT) == expected
    slow = WithoutOffsets(merging_tokenizer(template))
    fast_row = chat_row(merging_tokenizer(template), CHAT, "here", assistant_only=True)
    slow_row = chat_row(slow, CHAT, "here", assistant_only=True)
    assert pieces(slow_row, slow) == expected
    assert list(slow_row.input_ids) == list(fast_row.input_ids)


def test_a_token_over_the_border_belongs_to_the_turn() -> None:
    chat = [turn("user", "a"), turn("assistant", "\nb")]
    assert chat_pieces(CHATML, chat) == ["\n\nb<|im_end|>\n"]
    slow = WithoutOffsets(merging_tokenizer(CHATML))
    row = chat_row(slow, chat, "here", assistant_only=True)
    assert pieces(row, slow) == ["\n\nb<|im_end|>\n"]


def test_a_token_over_the_end_belongs_to_the_turn() -> None:
    chat = [*CHAT[:3], turn("user", "c"), turn("assistant", "d")]
    assert chat_pieces(BROKEN_LINES, chat) == ["Hello.\n\n", "d\n"]
    slow = WithoutOffsets(merging_tokenizer(BROKEN_LINES))
    row = chat_row(slow, chat, "here", assistant_only=True)
    assert pieces(row, slow) == chat_pieces(BROKEN_LINES, chat)


def test_reasoning_that_a_template_drops_from_earlier_turns() -> None:
    chat = [
        turn("user", "a"),
        turn("assistant", "<think>\nhm\n</think>\n\nb"),
        turn("user", "c"),
        turn("assistant", "<think>\nso\n</think>\n\nd"),
    ]
    assert chat_pieces(THINKING, chat) == [
        "b<|im_end|>\n",
        "<think>\nso\n</think>\n\nd<|im_end|>\n",
    ]
    plain = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert chat_pieces(THINKING, plain) == [
        "b<|im_end|>\n",
        "<think>\n\n</think>\n\nd<|im_end|>\n",
    ]


def test_a_tool_call_without_content_is_a_turn() -> None:
    chat = [
        turn("user", "a"),
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
        turn("tool", "3"),
        turn("assistant", "three"),
    ]
    assert chat_pieces(THINKING, chat) == [
        "<call>add</call><|im_end|>\n",
        "<think>\n\n</think>\n\nthree<|im_end|>\n",
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OPENING, ["b<|eot|>", "d<|eot|>"]),
        (CLOSING, ["b<|end|>\n", "d<|end|>\n<|endoftext|>"]),
        (RETURNING, ["<final>|b<|end|>", "<final>|d<|eot|>"]),
        (UNBROKEN, ["</think>b<|im_end|>\n", "</think>d<|im_end|>\n"]),
    ],
    ids=["opening", "closing", "returning", "unbroken"],
)
def test_turns_whose_surroundings_change(template: str, expected: list[str]) -> None:
    chat = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert chat_pieces(template, chat) == expected


def test_contents_that_a_template_leaves_out_are_not_passed_over() -> None:
    chat = [turn("user", "a"), turn("assistant", "b")]
    with pytest.raises(UserError, match=r"leaves out the content .*message 0 \(user\)"):
        chat_row(merging_tokenizer(PARTS_ONLY), chat, "here", assistant_only=True)
    parts = [turn(m["role"], [{"type": "text", "text": m["content"]}]) for m in chat]
    assert chat_pieces(PARTS_ONLY, parts) == ["b<|eot|>"]


def test_a_conversation_that_the_assistant_begins() -> None:
    chat = [turn("assistant", "Hi"), turn("user", "a"), turn("assistant", "b")]
    assert chat_pieces(CHATML, chat) == ["Hi<|im_end|>\n", "b<|im_end|>\n"]


def test_an_empty_turn_still_teaches_its_end() -> None:
    assert chat_pieces(CHATML, [turn("user", "a"), turn("assistant", "")]) == ["<|im_end|>\n"]


@pytest.mark.parametrize("template", [REWRITING, MOVING, OTHER_HEADER])
def test_turns_that_cannot_be_told_apart_are_refused(template: str) -> None:
    with pytest.raises(UserError, match="at here: a chat template that rewrites earlier turns"):
        chat_row(merging_tokenizer(template), CHAT, "here", assistant_only=True)


@pytest.mark.parametrize(
    "template", [LENGTH_AT_FRONT, LENGTH_IN_REPLY, PADDED_BEFORE_SHORT, BLANK_END]
)
def test_a_turn_on_which_its_surroundings_depend_is_refused(template: str) -> None:
    chat = [
        turn("user", "a"),
        turn("assistant", "b" * 30),
        turn("user", "<|eot|>, they said"),
        turn("assistant", "d"),
    ]
    with pytest.raises(UserError, match="rewrites earlier turns"):
        chat_row(merging_tokenizer(template), chat, "here", assistant_only=True)


def test_a_completion_of_which_the_template_moves_the_prompt_is_refused() -> None:
    tokenizer = merging_tokenizer(MOVING)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        chat_row(tokenizer, CHAT, "here", assistant_only=False, prompt_messages=3)


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(UserError, match=r"at here: .*roles must alternate"):
        chat_row(merging_tokenizer(STRICT), CHAT, "here", assistant_only=True)
    parts = [turn("user", [{"type": "text", "text": "a"}]), turn("assistant", "b")]
    concatenating = "{% for m in messages %}{{ 'x' + m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="does not take them"):
        chat_row(merging_tokenizer(concatenating), parts, "here", assistant_only=True)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "no list of messages"),
        ("hello", "no list of messages"),
        (["hello"], r"without role or content \(number 0\)"),
        ([turn("user", "a"), {"role": "assistant"}], r"without role or content \(number 1\)"),
        ([turn("user", 3)], r"content that is a int \(message 0\)"),
        ([turn("user", "a"), turn("assistant", None)], r"content that is a NoneType \(message 1\)"),
        ([turn("user", "a"), turn("gpt", "b")], r"the role 'gpt' \(message 1\).*assistant"),
    ],
)
def test_bad_messages_are_named(messages: Any, found: str) -> None:
    with pytest.raises(UserError, match=f"chat messages at here: .*{found}"):
        chat_row(merging_tokenizer(CHATML), messages, "here", assistant_only=True)


def load(record: dict[str, Any], folder: Path, **options: Any) -> list[str]:
    path = folder / "a.jsonl"
    path.write_text(json.dumps(record))
    tokenizer = merging_tokenizer(CHATML)
    return pieces(load_rows(path, tokenizer, DataOptions(**options))[0], tokenizer)


def test_prompt_and_completion_as_messages_under_both_limits(tmp_path: Path) -> None:
    record = {
        "prompt": CHAT[:4],
        "completion": [CHAT[4], turn("user", "x"), turn("assistant", "y")],
    }
    last, end = "4 é<|im_end|>\n", "<|im_end|>\n"
    header = "<|im_start|>assistant\n"
    user = f"<|im_start|>user\nx{end}"
    assert load(record, tmp_path) == [last, f"y{end}"]
    both = load(record, tmp_path, completion_only_loss=False)
    assert both == [f"Hello.{end}", last, f"y{end}"]
    completion = load(record, tmp_path, assistant_only_loss=False)
    assert completion == [f"{last}{user}{header}y{end}"]
    [everything] = load(record, tmp_path, completion_only_loss=False, assistant_only_loss=False)
    assert everything.startswith("<|im_start|>system\nBe brief.")
    assert everything.endswith(completion[0])


def test_a_prompt_without_messages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:1: no list of messages"):
        load({"prompt": [], "completion": [turn("assistant", "a")]}, tmp_path)


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer("{{ tools | length if tools else 'no' }} tools " + CHATML)
    path = tmp_path / "a.jsonl"
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    begins = []
    for tools in ([tool], json.dumps([tool, tool]), None, ""):
        path.write_text(json.dumps({"messages": CHAT, "tools": tools}))
        row = load_rows(path, tokenizer, DataOptions())[0]
        begins.append(tokenizer.decode(row.input_ids[:8].tolist()))
    assert [text.split()[0] for text in begins] == ["1", "2", "no", "no"]
    for bad in ("{", "3", {"name": "add"}):
        path.write_text(json.dumps({"messages": CHAT, "tools": bad}))
        with pytest.raises(UserError, match=r"column 'tools' at .*a\.jsonl:1: a (str|dict)"):
            load_rows(path, tokenizer, DataOptions())


def test_prompt_and_completion_give_the_ids_of_their_sum(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(None)
    path = tmp_path / "a.jsonl"
    for prompt, completion, learnt in [
        ("One and one?", " Two", " Two<|endoftext|>"),
        ("Sum: ", "Two", " Two<|endoftext|>"),  # one token over the border
        ("Sum:", " Two<|endoftext|>", " Two<|endoftext|>"),
        ("a<|endoftext|>", "", "<|endoftext|>"),
        ("é", "中", "中<|endoftext|>"),
    ]:
        path.write_text(json.dumps({"prompt": prompt, "completion": completion}))
        row = load_rows(path, tokenizer, DataOptions())[0]
        closed = prompt + completion.removesuffix("<|endoftext|>")
        closed = closed if closed.endswith("<|endoftext|>") else closed + "<|endoftext|>"
        assert list(row.input_ids) == tokenizer(closed)["input_ids"]
        assert pieces(row, tokenizer) == [learnt]
        everything = load_rows(path, tokenizer, DataOptions(completion_only_loss=False))[0]
        assert everything.weights.all()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([*CHAT, turn("system", "late")], r"role 'system' after the role 'assistant' \(message 5"),
        ([turn("tool", "3"), *CHAT], r"role 'tool' at the beginning \(message 0"),
        ([turn("user", "a"), turn("tool", "3")], "'tool' after the role 'user'.*assistant's or"),
        ([turn("user", "a"), turn("developer", "b"), turn("assistant", "c")], "before all others"),
    ],
)
def test_roles_out_of_order_are_named(messages: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat_row(merging_tokenizer(CHATML), messages, "a.jsonl:1", assistant_only=True)


def test_two_turns_of_one_speaker_are_the_templates_matter() -> None:
    twice = [turn("user", "a"), turn("user", "b"), turn("assistant", "c"), turn("assistant", "d")]
    row = chat_row(merging_tokenizer(CHATML), twice, "", assistant_only=True)
    assert row.weights.any()
    with pytest.raises(UserError, match="roles must alternate"):
        chat_row(merging_tokenizer(STRICT), twice, "", assistant_only=True)
