"""The options of `megatrain train`: flat, with the names and defaults of Hugging Face and TRL.

Promise: strict types, no key that does nothing, no two keys that contradict each other.
"""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, model_validator

from megatrain.config.groups.data import HELD_OUT, DataKeys
from megatrain.config.groups.keys import Keys
from megatrain.config.groups.model import ModelKeys
from megatrain.config.groups.optimizer import OptimizerKeys
from megatrain.config.groups.run import RunKeys
from megatrain.config.groups.steps import StepKeys
from megatrain.config.groups.watching import WatchingKeys
from megatrain.config.mistakes import as_user_error
from megatrain.data.hub import HubDataset
from megatrain.data.names import DataNames

GROUPS: dict[str, type[Keys]] = {
    "Model": ModelKeys,
    "Data": DataKeys,
    "Steps": StepKeys,
    "Optimizer": OptimizerKeys,
    "Logging and evaluation": WatchingKeys,
    "Run": RunKeys,
}

OWN_KEYS = frozenset(
    {
        "gguf_file",
        "model_init",
        "tokenizer_name",
        "cache_dir",
        "config_overrides",
        "add_tokens",
        "add_special_tokens",
        "pad_vocab_to_multiple_of",
        "trainable",
        "frozen",
        "train_files",
        "eval_files",
        "dataset",
        "eval_dataset",
        "dataset_dir",
        "dataset_name",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "stopping_strategy",
        "eval_split",
        "dataset_format",
        "prompt_column",
        "completion_column",
        "excess_length_strategy",
        "dataset_cache_dir",
        "shuffle",
        "micro_batch_tokens",
        "tokens_per_step",
        "gradient_dtype",
        "allow_nonfinite_blocks",
        "overwrite_output_dir",
        "save_dtype",
        "max_shard_size",
        "checkpoint_memory",
        "save_on_signal",
        "stop_on_loss_spike",
        "early_stopping_patience",
        "early_stopping_threshold",
        "device",
        "host_memory",
        "disk_path",
        "disk_memory",
        "expert_parts",
        "gpu_memory",
        "offload",
        "trace",
        "trace_steps",
    }
)
"""Keys that neither TrainingArguments nor TRL's SFTConfig and ModelConfig have."""


# Pydantic takes the last base's fields first: this is the order of GROUPS.
class TrainConfig(RunKeys, WatchingKeys, OptimizerKeys, StepKeys, DataKeys, ModelKeys):
    """Options of `megatrain train`.

    Raises:
        UserError: with a part for each key that is unknown, missing or has a wrong value.
    """

    if not TYPE_CHECKING:  # for whom the keys are the signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise as_user_error(error, type(self).model_fields) from error

    def paths(self) -> dict[str, Any]:
        """What `megatrain.preflight.check_run` looks at, by its arguments' names."""
        return {
            "model": self.model_name_or_path,
            "gguf_file": self.gguf_file,
            "tokenizer": self.tokenizer_name,
            "train": self.train_names(),
            "held_out": self.eval_names(),
            "output_dir": self.output_dir,
            "overwrite": self.overwrite_output_dir,
            "resume": self.resume_from_checkpoint,
            "disk_path": self.disk_path,
        }

    def train_names(self) -> DataNames:
        """Data to train on."""
        return DataNames(
            files=self.train_files,
            registered=self.dataset,
            registry_dir=self.dataset_dir,
            hub=self._hub(self.dataset_train_split),
        )

    def eval_names(self) -> DataNames:
        """Data to evaluate, if it is not a part of that to train on."""
        return DataNames(
            files=self.eval_files,
            registered=self.eval_dataset,
            registry_dir=self.dataset_dir,
            hub=self._hub(self.dataset_test_split),
        )

    def _hub(self, split: str | None) -> HubDataset | None:
        if self.dataset_name is None or split is None:
            return None
        return HubDataset(name=self.dataset_name, config=self.dataset_config, split=split)

    def _saves_where_it_evaluates(self) -> bool:
        """As far as it is known before the number of steps is."""
        if self.save_strategy != self.eval_rhythm or self.save_strategy == "no":
            return False
        every = self.eval_steps
        if every is None or (self.save_steps < 1) != (every < 1):
            return True
        return (self.save_steps / every).is_integer()

    @model_validator(mode="after")
    def _has_no_key_without_effect(self) -> "TrainConfig":
        if self.attn_implementation is not None and "attn_implementation" in self.config_overrides:
            raise ValueError("attn_implementation stands in config_overrides too: keep one")
        if twice := set(self.add_tokens) & set(self.add_special_tokens):
            raise ValueError(f"in add_tokens and add_special_tokens: {', '.join(sorted(twice))}")
        self.check_schedule()
        self.check_watching(has_eval_data=any(getattr(self, key) for key in HELD_OUT))
        if self.load_best_model_at_end and not self._saves_where_it_evaluates():
            raise ValueError(
                "load_best_model_at_end needs save_strategy: epoch with eval_strategy: epoch, or"
                " both steps and a save_steps that is a multiple of eval_steps"
            )
        if self.gpu_memory is not None and self.device == "cpu":
            raise ValueError("gpu_memory needs a GPU, and device is cpu")
        if self.tokens_per_step is not None and self.gradient_accumulation_steps != 1:
            raise ValueError("tokens_per_step and gradient_accumulation_steps: keep one")
        if self.full_determinism and self.micro_batch_tokens == "auto":
            raise ValueError(
                "full_determinism needs a number for micro_batch_tokens: what auto chooses depends"
                " on rates that are measured (a run prints what it has chosen)"
            )
        if self.disk_memory is not None and self.disk_path is None:
            raise ValueError("disk_memory needs disk_path")
        if self.trace_steps is not None and self.trace is None:
            raise ValueError("trace_steps needs trace")
        if self.allow_nonfinite_blocks and self.max_grad_norm > 0:
            raise ValueError("allow_nonfinite_blocks needs max_grad_norm: 0")
        return self
