"""What a run is made of, before any state is allocated: tokenizer, blocks, rows, options.

Promise: whatever of a config can be known to fail has failed by the end of `prepare_run`.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatrain.checkpoint import Contents
from megatrain.config import TrainConfig
from megatrain.config.groups.run import LEAST_CHECKPOINT_MEMORY
from megatrain.data import (
    ChosenRows,
    Corpus,
    DataNames,
    DataOptions,
    DatasetStats,
    MixtureOrder,
    PackedSampler,
    Row,
    Sampler,
    StepSampler,
    TokenCache,
    default_cache_dir,
    extend_tokenizer,
    find_sources,
    load_corpus,
    load_tokenizer,
    num_token_ids,
    special_token_ids,
    split_rows,
)
from megatrain.data.tokenizer import Tokenizer
from megatrain.engine import EngineOptions, choose_device, step_plan
from megatrain.engine.options import AdamWOptions
from megatrain.models import BlockModel
from megatrain.models.hub import ModelFiles, find_model
from megatrain.models.load import LoadedBlocks, load_blocks
from megatrain.models.selection import Selection
from megatrain.optim import learning_rate_schedule
from megatrain.placing import (
    Budgets,
    check_offload_of_parts,
    check_options_and_memory,
    default_checkpoint_memory,
    device_limit,
    parts_that_fit,
)
from megatrain.planner import read_offload
from megatrain.preflight import find_gguf
from megatrain.units import parse_bytes

LENGTH_BUCKETS = 4
"""Lengths to which rows are padded when layers are compiled, each for its length."""
COMPILE_BACKEND = "inductor"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The rows of a run."""

    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    stats: DatasetStats
    """Counts of the training files, held-out rows included."""
    longest: int
    """Tokens of the longest sample, held-out ones included."""
    train_lengths: npt.NDArray[np.int64]
    """Tokens of each training row."""
    digest: str
    """Of the rows of the training files, held-out ones included; of a mixture, with its weights."""
    order: MixtureOrder | None
    """Which of train_rows an epoch takes; None: all."""
    parts: dict[str, dict[str, float]]
    """Rows, tokens and rows an epoch of each part of the training data, by name."""
    formats: Sequence[str]
    """Of the training files, as asked for or found."""
    files: Sequence[Path]
    """What was read, held-out files included."""
    notes: Sequence[str]
    """What became of the token cache, if it is to be told."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that a config stands for."""

    device: torch.device
    compute_dtype: str
    """bfloat16 or float32."""
    tokenizer: Tokenizer
    blocks: LoadedBlocks
    options: EngineOptions
    memory: Budgets
    contents: Contents | None
    """Of a checkpoint; None if none is to be written."""
    data: RunData
    longest: int
    """Tokens of the longest row of any step or evaluation."""
    sampler: Sampler
    total_steps: int
    learning_rate: Callable[[int], float]


def prepare_run(config: TrainConfig, *, fetch_weights: bool = True) -> PreparedRun:
    """Find, read and check everything that a config names.

    Args:
        config: what is asked for.
        fetch_weights: the model's weights are needed; not if a checkpoint takes their place.

    Raises:
        UserError: for the first thing that does not fit the rest.
    """
    device = choose_device(config.device)
    compute_dtype: str = config.dtype
    if config.dtype == "auto":
        compute_dtype = "bfloat16" if device.type == "cuda" else "float32"
    name, gguf_file = find_gguf(config.model_name_or_path, config.gguf_file)
    files = find_model(
        name, gguf_file=gguf_file, revision=config.model_revision, cache_dir=config.cache_dir
    )
    tokenizer = load_run_tokenizer(config, files)
    blocks = _load_blocks(config, files, tokenizer, compute_dtype)
    if fetch_weights and config.model_init == "pretrained":
        files.fetch_weights()
    options = _engine_options(config, device)
    blocks = _in_parts(config, blocks, options, device)
    contents = _contents(config, blocks.model)
    memory = _checked_memory(config, blocks.model, options, device, writes=contents is not None)
    _learning_rate(config, total_steps=max(config.max_steps, 1))  # its name, before data is read
    data = load_data(config, tokenizer, blocks.model)
    sampler = make_sampler(config, data, blocks.model)
    total_steps = config.max_steps
    if total_steps <= 0:
        total_steps = sampler.steps_in(config.num_train_epochs)
    longest = data.longest
    if isinstance(sampler, PackedSampler):
        longest = max(longest, sampler.longest)
    return PreparedRun(
        device=device,
        compute_dtype=compute_dtype,
        tokenizer=tokenizer,
        blocks=blocks,
        # Quarters of the longest row: at most four lengths to compile for.
        options=replace(options, length_multiple=math.ceil(longest / LENGTH_BUCKETS)),
        longest=longest,
        memory=memory,
        contents=contents,
        data=data,
        sampler=sampler,
        total_steps=total_steps,
        learning_rate=_learning_rate(config, total_steps=total_steps),
    )


def make_sampler(config: TrainConfig, data: RunData, model: BlockModel | None = None) -> Sampler:
    """The rows of each step, packed or one by one; no row is longer than a model has positions."""
    if config.tokens_per_step is None:
        return _sampler(config, data, model, rows_per_step=config.rows_per_step())
    numbers = slice(None) if data.order is None else data.order(0)
    rows = _sampler(config, data, model, rows_per_step=1).rows_in(0)
    mean = float(data.train_lengths[numbers].sum()) / rows
    return _sampler(config, data, model, rows_per_step=config.rows_per_step(mean))


def _sampler(
    config: TrainConfig, data: RunData, model: BlockModel | None, *, rows_per_step: int
) -> Sampler:
    if not config.packing:
        return StepSampler(
            len(data.train_rows if data.order is None else data.order),
            rows_per_step,
            seed=config.seed,
            shuffle=config.shuffle,
            order=data.order,
        )
    positions = None if model is None else model.learned_positions
    return PackedSampler(
        data.train_lengths,
        rows_per_step,
        capacity=min(config.max_length, positions or config.max_length),
        seed=config.seed,
        shuffle=config.shuffle,
        order=data.order,
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


def _in_parts(
    config: TrainConfig, blocks: LoadedBlocks, options: EngineOptions, device: torch.device
) -> LoadedBlocks:
    """As asked for, or as a layer needs that is too large for the GPU."""
    parts, limit = config.expert_parts, device_limit(device, _bytes(config.gpu_memory))
    if parts is None and limit is not None:
        parts = parts_that_fit(blocks.model, options, limit=limit)
    blocks = blocks if parts is None else blocks.in_parts(parts)
    check_offload_of_parts(config.offload or {}, blocks.model)
    return blocks


def _bytes(size: str | None) -> int | None:
    return None if size is None else parse_bytes(size)


def _contents(config: TrainConfig, model: BlockModel) -> Contents | None:
    """Of a checkpoint, in the order in which training overwrites blocks."""
    if config.save_strategy == "no" and config.save_on_signal is not True:
        return None
    order = range(len(model.whole.blocks))
    return Contents.planned(
        model,
        max_shard_bytes=parse_bytes(config.max_shard_size),
        order=order if config.max_grad_norm > 0 else order[::-1],
        with_state=not config.save_only_model,
    )


def _checked_memory(
    config: TrainConfig,
    model: BlockModel,
    options: EngineOptions,
    device: torch.device,
    *,
    writes: bool,
) -> Budgets:
    sizes = (config.gpu_memory, config.host_memory, config.checkpoint_memory, config.disk_memory)
    gpu, host, checkpoint, disk = map(_bytes, sizes)
    if checkpoint is None:
        checkpoint = max(default_checkpoint_memory(model), LEAST_CHECKPOINT_MEMORY)
    budgets = Budgets(
        gpu=gpu,
        host=host,
        checkpoint=checkpoint if writes else 0,
        disk_path=None if config.disk_path is None else Path(config.disk_path),
        disk=disk,
        offload=read_offload(
            config.offload,
            step_plan(model, options),
            has_gpu=device.type == "cuda",
            has_disk=config.disk_path is not None,
        ),
    )
    check_options_and_memory(model, options, device=device, budgets=budgets)
    return budgets


def load_data(
    config: TrainConfig, tokenizer: Tokenizer, model: BlockModel | None = None
) -> RunData:
    """Tokenise all files; with a model, what it has no token or position for is refused."""
    options = DataOptions(
        max_length=config.max_length,
        format=config.dataset_format,
        prompt_column=config.prompt_column,
        completion_column=config.completion_column,
        excess_length_strategy=config.excess_length_strategy,
        completion_only_loss=config.completion_only_loss,
        assistant_only_loss=config.assistant_only_loss,
        vocab_size=None if model is None else model.vocab_size,
        max_positions=None if model is None else model.learned_positions,
    )
    notes: list[str] = []
    cache = TokenCache(config.dataset_cache_dir or default_cache_dir(), notes.append)

    def load(names: DataNames) -> Corpus:
        return load_corpus(
            find_sources(names), tokenizer, options, cache=cache, processes=config.dataset_num_proc
        )

    rows = load(config.train_names())
    held_out: Sequence[Row] = []
    training: Sequence[Row] = rows
    lengths = rows.lengths
    longest = rows.stats.longest
    files, keep = rows.files, None
    if config.eval_names():
        held_out = of_files = load(config.eval_names())
        longest = max(longest, of_files.stats.longest)
        files += of_files.files
    elif config.eval_split:
        keep, hold = split_rows(rows, config.eval_split, seed=config.seed)
        training, held_out = ChosenRows(rows, keep), ChosenRows(rows, hold)
        lengths = lengths[keep]
    order = rows.order(
        keep, strategy=config.stopping_strategy, seed=config.seed, shuffle=config.shuffle
    )
    return RunData(
        train_rows=training,
        eval_rows=held_out,
        stats=rows.stats,
        longest=longest,
        train_lengths=lengths,
        digest=rows.digest,
        order=order,
        parts=rows.described(order),
        formats=rows.formats,
        files=files,
        notes=notes,
    )


def _learning_rate(config: TrainConfig, *, total_steps: int) -> Callable[[int], float]:
    warmup = config.warmup_steps
    return learning_rate_schedule(
        config.lr_scheduler_type,
        learning_rate=config.learning_rate,
        warmup_steps=math.ceil(warmup * total_steps) if warmup < 1 else round(warmup),
        total_steps=total_steps,
        kwargs=config.lr_scheduler_kwargs,
    )


def _engine_options(config: TrainConfig, device: torch.device) -> EngineOptions:
    compiles = config.torch_compile
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
        micro_batch_tokens=config.micro_batch_tokens,
        gradient_dtype=config.gradient_dtype,
        always_with_graph=config.full_determinism,
        seed=config.seed,
        allow_nonfinite_blocks=config.allow_nonfinite_blocks,
        compile_backend=COMPILE_BACKEND if compiles else None,
        host_threads=None if device.type == "cuda" else os.cpu_count(),
    )
