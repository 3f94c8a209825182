"""A real byte-level tokenizer, built in a second, with published turn structures."""

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
