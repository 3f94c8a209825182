"""What a run is made of, before any state is allocated: tokenizer, blocks, rows, options.

Promise: whatever of a config can be known to fail has failed by the end of `prepare_run`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatrain.checkpoint import Contents
from megatrain.config import TrainConfig
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
    find_sources,
    load_corpus,
    split_rows,
)
from megatrain.data.tokenizer import Tokenizer
from megatrain.engine import EngineOptions, choose_device, step_plan
from megatrain.models import BlockModel
from megatrain.models.active import flops_per_token
from megatrain.models.load import LoadedBlocks
from megatrain.placing import (
    Budgets,
    check_offload_of_parts,
    check_options_and_memory,
    device_limit,
    parts_that_fit,
)
from megatrain.planner import read_offload
from megatrain.trainer.model import (
    checkpoint_contents,
    checkpoint_memory,
    learning_rate_of,
    load_run_model,
    size,
)

LENGTH_BUCKETS = 4
"""Lengths to which rows are padded when layers are compiled, each for its length."""


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

    @cached_property
    def flops_per_token(self) -> float | None:
        """6N; see `megatrain.models.active`."""
        return flops_per_token(self.blocks.model)


def prepare_run(config: TrainConfig, *, fetch_weights: bool = True) -> PreparedRun:
    """Find, read and check everything that a config names.

    Args:
        config: what is asked for.
        fetch_weights: the model's weights are needed; not if a checkpoint takes their place.

    Raises:
        UserError: for the first thing that does not fit the rest.
    """
    device = choose_device(config.device)
    model = load_run_model(config, device)
    tokenizer, options = model.tokenizer, model.options
    if fetch_weights and config.model_init == "pretrained":
        model.blocks.files.fetch_weights()
    blocks = _in_parts(config, model.blocks, options, device)
    contents = checkpoint_contents(config, blocks.model)
    memory = _checked_memory(config, blocks.model, options, device)
    learning_rate_of(config, total_steps=max(config.max_steps, 1))  # its name, before data is read
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
        compute_dtype=blocks.model.compute_dtype,
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
        learning_rate=learning_rate_of(config, total_steps=total_steps),
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


def _in_parts(
    config: TrainConfig, blocks: LoadedBlocks, options: EngineOptions, device: torch.device
) -> LoadedBlocks:
    """As asked for, or as a layer needs that is too large for the GPU."""
    parts, limit = config.expert_parts, device_limit(device, size(config.gpu_memory))
    if parts is None and limit is not None:
        parts = parts_that_fit(blocks.model, options, limit=limit)
    blocks = blocks if parts is None else blocks.in_parts(parts)
    check_offload_of_parts(config.offload or {}, blocks.model)
    return blocks


def _checked_memory(
    config: TrainConfig,
    model: BlockModel,
    options: EngineOptions,
    device: torch.device,
) -> Budgets:
    budgets = Budgets(
        gpu=size(config.gpu_memory),
        host=size(config.host_memory),
        checkpoint=checkpoint_memory(config, model),
        disk_path=None if config.disk_path is None else Path(config.disk_path),
        disk=size(config.disk_memory),
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
        text_column=config.dataset_text_field,
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
        losses = rows.stats.losses_in_words()
        keep, hold = split_rows(rows, config.eval_split, seed=config.seed, losses=losses)
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
