"""`megatrain eval`: a model's loss on files, streamed block by block; no training state."""

import json
from collections.abc import Sequence
from dataclasses import replace

from megatrain.data import DataOptions, load_rows, load_tokenizer
from megatrain.engine import (
    Engine,
    EngineOptions,
    choose_device,
    free_device_bytes,
    step_plan,
)
from megatrain.evaluation import EvalResult, evaluate_rows
from megatrain.memory import BlockStore
from megatrain.models.hub import find_model
from megatrain.models.load import load_blocks
from megatrain.models.selection import Selection
from megatrain.models.weights import LoadReport
from megatrain.planner import check_fits, memory_need
from megatrain.preflight import check_model, find_gguf


def evaluate_model(
    model_path: str,
    data: Sequence[str],
    *,
    options: DataOptions,
    batch_size: int = 8,
    device: str = "auto",
    revision: str | None = None,
    cache_dir: str | None = None,
) -> EvalResult:
    """Loss and perplexity of a model (directory or id) on files, streamed block by block."""
    check_model(model_path)
    chosen = choose_device(device)
    dtype = "bfloat16" if chosen.type == "cuda" else "float32"
    name, gguf_file = find_gguf(model_path)
    files = find_model(name, gguf_file=gguf_file, revision=revision, cache_dir=cache_dir)
    blocks = load_blocks(files, compute_dtype=dtype, selection=Selection(evaluation=True))
    model = blocks.model
    files.fetch_weights()
    options = replace(options, vocab_size=model.vocab_size, max_positions=model.learned_positions)
    rows = load_rows(data, load_tokenizer(files.directory, gguf_file=gguf_file), options)
    engine_options = EngineOptions(max_grad_norm=0.0)
    plan = step_plan(model, engine_options)
    need = memory_need([b.layout for b in model.blocks], plan, gradient_dtype=dtype)
    check_fits(need, budget=None, device_free=free_device_bytes(chosen), to="evaluate")
    weights = blocks.weights(LoadReport(), complete=True)
    store = BlockStore.filled([block.layout for block in model.blocks], weights, device=chosen)
    engine = Engine(model, store, engine_options, device=chosen)
    result = evaluate_rows(engine, rows, batch_size)
    engine.close()
    store.close()
    return result


def describe(result: EvalResult) -> str:
    """One JSON line."""
    return json.dumps(
        {
            "loss": result.loss,
            "perplexity": result.perplexity,
            "supervised_tokens": result.supervised_tokens,
        }
    )
