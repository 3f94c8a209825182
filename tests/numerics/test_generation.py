"""Text over streamed layers equals transformers' own `generate`, token for token, in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.engine import LayerStream
from megatrain.errors import UserError
from megatrain.evaluation.generation import Decoding, Generator, check_prompt
from megatrain.memory import BlockStore
from megatrain.models import BlockModel, build_on_meta, split_model
from megatrain.models.selection import Selection
from megatrain.models.whole import whole_model
from tests.models.tiny import tiny_configs
from tests.tokenizers_for_tests import byte_tokenizer

FAMILIES = [
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe", "gpt_oss",
    "phi3", "mamba2", "qwen3_next", "gemma4_text",
]  # fmt: skip
PROMPTS = [[5, 17, 3, 44, 8, 21, 60, 9, 14, 7, 33], [7, 12, 90], [4, 80, 41, 3, 3, 9]]
PAD = 2  # the end-of-sequence token of most tiny configs
CPU = torch.device("cpu")


@contextmanager
def streamed(reference: Any, *, resident: frozenset[int]) -> Iterator[Any]:
    """The same model over a store of its weights."""
    config = reference.config
    model = split_model(
        build_on_meta(config, compute_dtype="float32"),
        compute_dtype="float32",
        selection=Selection(evaluation=True),
    )
    state = dict(reference.named_parameters())
    layouts = [block.layout for block in model.blocks]
    source = (
        (block.index, {p.name: state[p.name] for s in block.layout.segments for p in s.params})
        for block in model.blocks
    )
    store = BlockStore.filled(layouts, source, device=CPU, resident=resident)
    stream = LayerStream(model, store, device=CPU)
    model.hf_model.generation_config = reference.generation_config
    _take_buffers(reference, model)
    with whole_model(model, stream.outside(), stream.weights) as hf_model:
        yield hf_model
    store.close()


def _take_buffers(reference: Any, model: BlockModel) -> None:
    buffers = dict(reference.named_buffers())
    for name, buffer in model.hf_model.named_buffers():
        buffer.copy_(buffers[name])


def reference_of(family: str) -> Any:
    torch.manual_seed(1)
    config = next(tiny_configs(family))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():  # larger than usual, so that texts vary
            param.copy_(torch.randn_like(param) * 0.3)
    return model


def texts(hf_model: Any, batch: list[list[int]], decoding: Decoding) -> list[list[int]]:
    generator = Generator(hf_model, byte_tokenizer(), decoding, stop_ids=[])
    return [completion.token_ids for completion in generator.complete(batch)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    reference = reference_of(family)
    decoding = Decoding(max_new_tokens=12)
    with streamed(reference, resident=frozenset()) as hf_model:
        for prompt in PROMPTS:
            expected = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12
            )[0, len(prompt) :].tolist()
            assert texts(hf_model, [prompt], decoding) == [expected]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_a_batch_is_what_transformers_makes_of_it(family: str) -> None:
    reference = reference_of(family)
    length = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in PROMPTS])
    expected = reference.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=PAD
    )[:, length:].tolist()
    with streamed(reference, resident=frozenset()) as hf_model:
        found = texts(hf_model, PROMPTS, Decoding(max_new_tokens=12))
    assert [each + [PAD] * (12 - len(each)) for each in found] == expected


def test_where_weights_live_changes_nothing() -> None:
    reference = reference_of("llama")
    found = []
    for resident in (frozenset(), frozenset({0, 4}), frozenset({0, 2, 4}), frozenset(range(5))):
        with streamed(reference, resident=resident) as hf_model:
            found.append(hf_model(torch.tensor(PROMPTS[:1])).logits)
    assert all(torch.equal(found[0], logits) for logits in found)


def test_what_is_drawn_is_what_transformers_draws() -> None:
    reference = reference_of("llama")
    chosen = {"temperature": 0.8, "top_p": 0.9, "top_k": 30}
    torch.manual_seed(7)
    expected = reference.generate(
        torch.tensor(PROMPTS[:1]), do_sample=True, max_new_tokens=20, **chosen
    )[0, len(PROMPTS[0]) :].tolist()
    with streamed(reference, resident=frozenset()) as hf_model:
        decoding = Decoding(max_new_tokens=20, seed=7, **chosen)
        assert texts(hf_model, PROMPTS[:1], decoding) == [expected]
        assert texts(hf_model, PROMPTS[:1], replace(decoding, seed=8)) != [expected]


def test_a_stop_token_ends_the_text() -> None:
    reference = reference_of("llama")
    decoding = Decoding(max_new_tokens=12)
    with streamed(reference, resident=frozenset()) as hf_model:
        (whole,) = texts(hf_model, PROMPTS[:1], decoding)
        stop = whole[4]
        generator = Generator(hf_model, byte_tokenizer(), decoding, stop_ids=[stop])
        (ended,) = generator.complete(PROMPTS[:1])
    assert ended.token_ids == whole[: whole.index(stop) + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == byte_tokenizer().decode(ended.token_ids[:-1])


def test_the_models_own_habits_hold() -> None:
    """A repetition penalty of generation_config.json counts in greedy decoding too."""
    reference = reference_of("llama")
    reference.generation_config.repetition_penalty = 1.7
    expected = reference.generate(torch.tensor(PROMPTS[:1]), do_sample=False, max_new_tokens=12)
    with streamed(reference, resident=frozenset()) as hf_model:
        assert texts(hf_model, PROMPTS[:1], Decoding(max_new_tokens=12)) == [
            expected[0, len(PROMPTS[0]) :].tolist()
        ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.9}, "greedy"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Decoding(**options).check()


def test_prompts_that_nothing_can_follow_are_refused() -> None:
    decoding = Decoding(max_new_tokens=10)
    with pytest.raises(UserError, match="no token"):
        check_prompt([], "--prompt", decoding, max_positions=None)
    check_prompt([1] * 6, "--prompt", decoding, max_positions=16)
    with pytest.raises(UserError, match="16 positions"):
        check_prompt([1] * 7, "--prompt", decoding, max_positions=16)
