"""Which options may change between a checkpoint and the run that goes on from it.

Promise: every key of the config is in one of three sets; a change is free, told, or refused,
never ignored.  `micro_batch_tokens: auto` is no change: it goes on with what the checkpoint has.
"""

import json
from collections.abc import Mapping
from typing import Any

from megatrain.config.options import TrainConfig

FREE = frozenset(
    {
        "cache_dir",
        "dataset_cache_dir",
        "dataset_num_proc",
        "model_init",  # weights come from the checkpoint
        "dtype",  # what auto means is compared instead
        "per_device_eval_batch_size",
        "output_dir",
        "overwrite_output_dir",
        "save_dtype",
        "max_shard_size",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "save_on_signal",
        "checkpoint_memory",
        "resume_from_checkpoint",
        "load_best_model_at_end",
        "metric_for_best_model",
        "early_stopping_patience",
        "early_stopping_threshold",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "report_to",
        "stop_on_loss_spike",
        "run_name",
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
        "host_memory",
        "disk_path",
        "disk_memory",
        "gpu_memory",
        "offload",
        "trace",
        "trace_steps",
        "allow_nonfinite_blocks",
    }
)
"""Changes no number of the training."""
TOLD = frozenset(
    {
        # Compared by what is in them:
        "model_name_or_path",
        "model_revision",
        "gguf_file",
        "tokenizer_name",
        "train_files",
        "eval_files",
        "dataset",
        "eval_dataset",
        "dataset_dir",
        "dataset_name",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "device",
        # The same rows a step, else another sum:
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "tokens_per_step",
        "micro_batch_tokens",
        "attn_implementation",
        "expert_parts",
        "torch_compile",
        "full_determinism",
        # From here on another training:
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "gradient_dtype",
    }
)
"""May be changed on purpose; the change is told."""
REFUSED = frozenset(TrainConfig.model_fields) - FREE - TOLD
"""Makes another model or other rows: a position in the data would mean nothing."""


def changes(before: Mapping[str, Any], now: TrainConfig) -> tuple[list[str], list[str]]:
    """(refused, told) differences in words, such as `seed: 1, was 2`.

    Args:
        before: the config in the checkpoint; a key that it lacks had its default.
        now: of this run.
    """
    refused: list[str] = []
    told: list[str] = []
    for name, info in TrainConfig.model_fields.items():
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        was = before.get(name, default)
        value = json.loads(json.dumps(getattr(now, name)))  # as it comes out of a file
        goes_on = name == "micro_batch_tokens" and value == "auto" and was is not None
        if name in FREE or was == value or goes_on:
            continue
        (told if name in TOLD else refused).append(f"{name}: {value}, was {was}")
    return refused, told
