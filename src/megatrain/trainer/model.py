"""The model of a config, and how it is trained: all that does not depend on the data.

`prepare` and `planned` stand on it, so that a plan is that of the run.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatrain.checkpoint import Contents, pool_bytes
from megatrain.config import TrainConfig
from megatrain.config.groups.run import LEAST_CHECKPOINT_MEMORY
from megatrain.data import extend_tokenizer, load_tokenizer, num_token_ids, special_token_ids
from megatrain.data.tokenizer import Tokenizer
from megatrain.engine import EngineOptions
from megatrain.engine.options import AdamWOptions
from megatrain.layout import STATE, Purpose
from megatrain.models import BlockModel
from megatrain.models.hub import ModelFiles, find_model
from megatrain.models.load import LoadedBlocks, load_blocks
from megatrain.models.selection import Selection
from megatrain.optim import learning_rate_schedule
from megatrain.preflight import find_gguf
from megatrain.units import parse_bytes

COMPILE_BACKEND = "inductor"


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """What a config says of the model and of the engine."""

    tokenizer: Tokenizer
    blocks: LoadedBlocks
    """Whole layers."""
    options: EngineOptions


def load_run_model(config: TrainConfig, device: torch.device) -> RunModel:
    """Find and check it; no weights are read.

    Raises:
        UserError: for a model or tokenizer that is not there, or does not fit the config.
    """
    compute_dtype: str = config.dtype
    if config.dtype == "auto":
        compute_dtype = "bfloat16" if device.type == "cuda" else "float32"
    name, gguf_file = find_gguf(config.model_name_or_path, config.gguf_file)
    files = find_model(
        name, gguf_file=gguf_file, revision=config.model_revision, cache_dir=config.cache_dir
    )
    tokenizer = load_run_tokenizer(config, files)
    return RunModel(
        tokenizer=tokenizer,
        blocks=_load_blocks(config, files, tokenizer, compute_dtype),
        options=engine_options(config, device),
    )


def load_run_tokenizer(config: TrainConfig, files: ModelFiles) -> Tokenizer:
    """The model's own, or another's; with the tokens that are to be added."""
    if config.tokenizer_name is not None:
        files = find_model(config.tokenizer_name, key="tokenizer_name", cache_dir=config.cache_dir)
    tokenizer = load_tokenizer(
        files.directory, chat_template=config.chat_template_path, gguf_file=files.gguf_file
    )
    extend_tokenizer(tokenizer, tokens=config.add_tokens, special_tokens=config.add_special_tokens)
    return tokenizer


def _load_blocks(
    config: TrainConfig, files: ModelFiles, tokenizer: Tokenizer, compute_dtype: str
) -> LoadedBlocks:
    overrides = dict(config.config_overrides)
    if config.attn_implementation is not None:
        overrides["attn_implementation"] = config.attn_implementation
    if config.model_init == "random" and config.tokenizer_name is not None:
        overrides = special_token_ids(tokenizer) | overrides
    return load_blocks(
        files,
        compute_dtype=compute_dtype,
        selection=Selection(trainable=config.trainable, frozen=config.frozen),
        overrides=overrides,
        num_tokens=num_token_ids(tokenizer),
        multiple_of=config.pad_vocab_to_multiple_of,
        packing=config.packing,
    )


def size(text: str | None) -> int | None:
    """Bytes; None where nothing is said."""
    return None if text is None else parse_bytes(text)


def writes_checkpoints(config: TrainConfig) -> bool:
    """Whether any may be written."""
    return config.save_strategy != "no" or config.save_on_signal is True


def checkpoint_contents(config: TrainConfig, model: BlockModel) -> Contents | None:
    """Of a checkpoint, in the order in which training overwrites blocks; None: there is none."""
    if not writes_checkpoints(config):
        return None
    order = range(len(model.whole.blocks))
    return Contents.planned(
        model,
        max_shard_bytes=parse_bytes(config.max_shard_size),
        order=order if config.max_grad_norm > 0 else order[::-1],
        with_state=not config.save_only_model,
    )


def checkpoint_memory(config: TrainConfig, model: BlockModel) -> int:
    """Bytes for checkpoints on their way; 0 if none is to be written."""
    if not writes_checkpoints(config):
        return 0
    pool = pool_bytes(model, asked=size(config.checkpoint_memory), saved=saved_of(config))
    return max(pool, LEAST_CHECKPOINT_MEMORY)


def saved_of(config: TrainConfig) -> Sequence[Purpose]:
    """What of each block is in a checkpoint."""
    return (Purpose.WEIGHT,) if config.save_only_model else STATE


def learning_rate_of(config: TrainConfig, *, total_steps: int) -> Callable[[int], float]:
    """Of each step.

    Raises:
        UserError: for a schedule that is not there.
    """
    warmup = config.warmup_steps
    return learning_rate_schedule(
        config.lr_scheduler_type,
        learning_rate=config.learning_rate,
        warmup_steps=math.ceil(warmup * total_steps) if warmup < 1 else round(warmup),
        total_steps=total_steps,
        kwargs=config.lr_scheduler_kwargs,
    )


def engine_options(config: TrainConfig, device: torch.device) -> EngineOptions:
    """As far as they do not depend on the data."""
    tokens, compiles = config.micro_batch_tokens, config.torch_compile
    if compiles is None:
        compiles = device.type == "cuda"
    return EngineOptions(
        adamw=AdamWOptions(
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
        max_grad_norm=config.max_grad_norm,
        micro_batch_rows=config.per_device_train_batch_size,
        micro_batch_tokens=None if tokens == "auto" else tokens,
        gradient_dtype=config.gradient_dtype,
        always_with_graph=config.full_determinism,
        seed=config.seed,
        allow_nonfinite_blocks=config.allow_nonfinite_blocks,
        compile_backend=COMPILE_BACKEND if compiles else None,
        host_threads=None if device.type == "cuda" else os.cpu_count(),
    )
