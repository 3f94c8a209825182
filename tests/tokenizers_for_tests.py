"""A real byte-level tokenizer, built in a second, with published turn structures."""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
REWRITING = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}[{{ m['content'] }}]"
    "{% endif %}{% endfor %}"
)
TEMPLATES = Path(__file__).parent / "templates"
MARKUP = re.compile(r"<[|｜][^|｜>]*[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens of the templates above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class PublishedTemplate:
    """A template of tests/templates, and the tokens that its models begin and end texts with."""

    name: str
    bos: str
    eos: str

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a byte, and the special tokens that stand in the template."""
        template = (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")
        tokenizer = byte_tokenizer(template)
        special = sorted({*MARKUP.findall(template), self.bos, self.eos})
        tokenizer.add_special_tokens(
            {"bos_token": self.bos, "eos_token": self.eos, "extra_special_tokens": special}
        )
        return tokenizer


LLAMA_TOKENS = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
GEMMA_TOKENS = {"bos": "<bos>", "eos": "<eos>"}
QWEN_TOKENS = {"bos": "<|endoftext|>", "eos": "<|im_end|>"}
DEEPSEEK_TOKENS = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}
MISTRAL_TOKENS = {"bos": "<s>", "eos": "</s>"}
PUBLISHED = {
    name: PublishedTemplate(name=name, **tokens)
    for name, tokens in {
        "smollm2": {"bos": "<|im_start|>", "eos": "<|im_end|>"},
        "llama3": LLAMA_TOKENS,
        "llama3_1": LLAMA_TOKENS,
        "llama3_2": LLAMA_TOKENS,
        "gemma": GEMMA_TOKENS,
        "gemma3": GEMMA_TOKENS,
        "phi3": {"bos": "<s>", "eos": "<|endoftext|>"},
        "qwen2_5": QWEN_TOKENS,
        "qwen3": QWEN_TOKENS,
        "deepseekv3": DEEPSEEK_TOKENS,
        "deepseek_r1_distill": DEEPSEEK_TOKENS,
        "mistral_v3": MISTRAL_TOKENS,
        "mistral_v13": MISTRAL_TOKENS,
    }.items()
}


def save_tiny_model(folder: Path, **changes: object) -> None:
    """A two-layer Llama and its tokenizer, as a model directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 262,
        "eos_token_id": 256,
        "bos_token_id": 256,
    } | changes
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def save_tiny_gguf(path: Path) -> None:
    """A two-layer Llama and a byte-level tokenizer in one GGUF file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.numerics.gguf_files import write_gguf

    tokens = [*SPECIAL[:3], *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokens),
    )
    write_gguf(path, LlamaForCausalLM(config), "llama", tokens=tokens, merges=["t h", "th e"])
