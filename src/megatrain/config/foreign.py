"""Keys of other trainers that are not options here, each with what becomes of it and why.

`MET` holds what megatrain does anyway: the accepted values are taken with a notice.  `REFUSED`
holds what it does not do: only the values that ask for nothing are let through, silently.
Together with `TrainConfig` they name every field of transformers' TrainingArguments and of TRL's
SFTConfig, which a test checks, so that no such key is ever "unknown" and none is ignored.
"""

from dataclasses import dataclass
from typing import Any

SYNONYMS = {
    "base_model": "model_name_or_path",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "sample_packing": "packing",
    "neat_packing": "packing",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "warmup_ratio": "warmup_steps",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "adam_beta_1": "adam_beta1",
    "adam_beta_2": "adam_beta2",
    "torch_dtype": "dtype",
    "tokenizer_config": "tokenizer_name",
    "tokenizer_name_or_path": "tokenizer_name",
    "dataset_path": "train_files",
    "train_file": "train_files",
    "eval_dataset_path": "eval_files",
    "validation_file": "eval_files",
    "val_set_size": "eval_split",
    "preprocessing_num_workers": "dataset_num_proc",
    "dataset_processes": "dataset_num_proc",
    "tokenized_path": "dataset_cache_dir",
    "dataset_prepared_path": "dataset_cache_dir",
    "evaluation_strategy": "eval_strategy",
    "early_stopping_steps": "early_stopping_patience",
    "chat_template_jinja": "chat_template_path",
    "revision_of_model": "model_revision",
    "overrides_of_model_config": "config_overrides",
    "new_special_tokens": "add_special_tokens",
    "tokens": "add_tokens",
    "make_vocab_size_divisible_by": "pad_vocab_to_multiple_of",
    "export_dtype": "save_dtype",
}
"""Names that LLaMA-Factory, Axolotl, older TRL and common scripts use for the same thing."""


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """One key of another trainer."""

    accepted: tuple[Any, ...] | None
    """Values that are taken; None: every value."""
    why: str

    def accepts(self, value: Any) -> bool:
        """Whether a config may say this; `False` and 0 are not the same, 0 and 0.0 are."""
        if self.accepted is None:
            return True
        kinds = [(isinstance(each, bool), each) for each in self.accepted]
        return (isinstance(value, bool), value) in kinds


MET: dict[str, ForeignKey] = {}
REFUSED: dict[str, ForeignKey] = {}


def _met(names: str, why: str, *accepted: Any) -> None:
    MET.update(dict.fromkeys(names.split(), ForeignKey(accepted=accepted or None, why=why)))


def _refused(names: str, why: str, *accepted: Any) -> None:
    key = ForeignKey(accepted=(None, False, *accepted), why=why)
    REFUSED.update(dict.fromkeys(names.split(), key))


_met("bf16", "dtype decides, and auto is bfloat16 on a GPU; masters are fp32 always", True, False)
_met("bf16_full_eval", "evaluation computes in the same dtype as training", True, False)
_met(
    "gradient_checkpointing gradient_checkpointing_kwargs"
    " activation_checkpointing activation_checkpointing_kwargs",
    "blocks are recomputed in backward, unless there is room for their activations",
)
_met(
    "optim",
    "the optimizer is AdamW with fp32 masters and moments",
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
)
_met("do_train", "train always trains", True, False)
_met("do_eval", "eval_strategy and eval_on_start decide", True, False, None)
_met(
    "logging_nan_inf_filter",
    "steps without a finite loss are left out of a row's mean, and counted as skipped_steps",
)
_met("include_num_input_tokens_seen", "tokens are always counted, padding never")
_met("log_on_each_node save_on_each_node", "there is one node")
_met("disable_tqdm", "the progress display gives way to plain lines where there is no terminal")
_met("use_cpu no_cuda", "true is taken as device: cpu", True, False, None)
_met("prediction_loss_only", "evaluation takes the loss only")
_met(
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object",
    "evaluation keeps sums only, no predictions",
)
_met("greater_is_better", "the lowest loss or perplexity is the best", None, False)
_met("ignore_data_skip", "the position in the data costs nothing to find", False)
_met("use_cache", "training keeps no cache of keys and values", False)
_met("use_liger_kernel", "logits are computed in chunks, of supervised tokens only, as it is")
_met(
    "average_tokens_across_devices",
    "the loss is divided by the step's supervised tokens, on one device",
)
_met(
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"
    " dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
    "rows are tokenised before the first step; no loader runs beside training",
)
_met("remove_unused_columns", "only the columns that a format needs are read")
_met("overwrite_cache", "tokenised rows are found by content, so that none is ever stale")
_met("shuffle_dataset", "shuffle permutes the rows in each epoch")
_met("train_sampling_strategy", "shuffle: false is the sequential order", "random")
_met("length_column_name", "rows are not grouped by length")
_met("truncation_mode", "the end of a long row is cut off", "keep_start")
_met("pad_token", "padding is on the right, is not counted and carries no loss")
_met("packing_strategy", "whole samples are packed best-fit, kept apart from each other", "bfd")
_met(
    "eval_packing eval_sample_packing",
    "held-out rows are not packed, which changes no loss",
    True,
    False,
    None,
)
_met("loss_type", "the loss is cross-entropy in chunks of tokens", "nll", "chunked_nll", None)
_met("stage", "dataset_format says what the rows are", "sft", "pt")
_met("finetuning_type", "trainable and frozen say what is trained", "full", "freeze")
_met("ddp_timeout", "there is one process")
_met("resize_vocab", "the embedding grows when the tokenizer has tokens without a row", True)
_met("mean_resizing_embeddings", "new rows are drawn around the mean of the old ones", True)

_refused(
    "deepspeed fsdp fsdp_config accelerator_config parallelism_config",
    "megatrain does its own offload, on one device",
    "",
)
_refused(
    "ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters"
    " ddp_static_graph",
    "there is one process",
)
_refused("local_rank", "there is one process", -1, 0)
_refused("fp16 fp16_full_eval", "float16 is not a compute dtype here: use dtype: bfloat16")
_refused("tf32", "fp32 computes in fp32: use dtype: bfloat16 for speed")
_refused("optim_args optim_target_modules", "the optimizer is AdamW, set by the adam_ keys")
_refused(
    "label_smoothing_factor",
    "the loss is cross-entropy; Trainer(config, loss=...) takes any other",
    0,
    0.0,
)
_refused("neftune_noise_alpha", "not supported")
_refused(
    "router_aux_loss_coef",
    "auxiliary losses of routers are not computed; null is taken as 0, whatever the model's config"
    " declares",
    0,
    0.0,
)
_refused(
    "train_on_inputs train_on_prompt",
    "completion_only_loss: false and assistant_only_loss: false train on everything",
)
_refused("mask_history", "weight: 0 in a message leaves it out")
_refused(
    "use_wandb wandb_project wandb_entity wandb_name", "use report_to: [wandb], and run_name", ""
)
_refused("swanlab_project use_swanlab", "use report_to", "")
_met(
    "plot_loss", "a picture of the losses is drawn at the end, if matplotlib is there", True, False
)
_refused("torch_compile_backend", "inductor in its default mode is what is used", "inductor")
_refused("torch_compile_mode", "inductor in its default mode is what is used", "default")
_refused("liger_kernel_config", "liger-kernel is not used")
_refused("torch_empty_cache_steps", "device buffers are allocated once")
_refused(
    "auto_find_batch_size", "micro_batch_tokens: auto does it; only the order of sums changes", 0
)
_refused("log_level", "messages are not graded", "passive", "info")
_refused("log_level_replica", "there is one process", "warning")
_refused(
    "project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "set the tracker's own environment variables",
    "huggingface",
    "trackio",
)
_refused("eval_delay", "use eval_on_start: false, and eval_steps or eval_strategy", 0, 0.0)
_refused("include_for_metrics batch_eval_metrics", "evaluation takes the loss only", [])
_refused("enable_jit_checkpoint", "save_on_signal: true writes a checkpoint when a signal comes")
_refused(
    "restore_callback_states_from_checkpoint",
    "callbacks begin anew; early_stopping_patience does not",
)
_refused(
    "push_to_hub hub_token hub_private_repo hub_model_id hub_always_push hub_revision",
    "use megatrain export --push-to-hub afterwards",
)
_refused("hub_strategy", "use megatrain export --push-to-hub afterwards", "every_save")
_refused("data_seed", "seed is the key of the order too")
_refused("dataloader_drop_last", "the last step of an epoch may be short")
_refused("group_by_length", "rows are not grouped by length")
_refused(
    "template",
    "the tokenizer's own chat template is used; chat_template_path gives another",
    "",
)
_refused("label_names", "labels come from the columns of the format", [])
_refused("debug", "there is no such debug mode", "", [])
_refused("skip_memory_metrics", "memory is printed before training, not traced", True)
_met("mix_strategy", "data sets without weights are put one after the other", "concat")
_refused(
    "interleave_probs",
    "write weights beside the names: dataset or train_files: {NAME: 0.7, OTHER: 0.3}",
)
_refused(
    "streaming dataset_streaming", "data is read once, in bounded memory, and kept on the disk"
)
_refused("max_samples", "keep so many records in a file of their own")
_refused("datasets", "use train_files, dataset or dataset_name")
_refused("do_predict", "use megatrain eval afterwards")
_refused(
    "padding_free pad_to_multiple_of",
    "rows are padded to the longest of their micro-batch, compiled ones to a quarter of the longest"
    " row; packing: true leaves little to pad",
)
_refused("model_init_kwargs", "use the flat keys of this config, or config_overrides", {})
_refused("dataset_kwargs", "use the flat keys of this config", {})
_refused("overrides_of_model_kwargs", "use config_overrides", {})
_refused("rope_scaling", "use config_overrides: {rope_parameters: {rope_type: ..., factor: ...}}")
_refused("flash_attn flash_attention", "use attn_implementation: sdpa", "auto", "sdpa")
_refused("resize_token_embeddings_to_32x", "use pad_vocab_to_multiple_of: 32")
_refused("special_tokens", "use add_special_tokens, a list", {})
_refused("trust_remote_code", "only architectures that transformers itself has are trained")
_refused("shrink_embeddings", "the vocabulary never shrinks")
_refused("freeze_trainable_layers", "use trainable: ['layers[-N:]']")
_refused("freeze_trainable_modules freeze_extra_modules", "use trainable, patterns", "all")
_refused("unfrozen_parameters", "use trainable: globs over parameter names", [])
_refused("eos_token", "the tokenizer's own end-of-sequence token is used")
_met(
    "activation_offloading",
    "inputs of layers wait on the host where GPU memory is short, and only there",
    True,
    False,
)
_refused("load_in_8bit load_in_4bit quantization_bit", "training is at full precision")
_refused("use_peft adapter lora_rank lora_r lora_alpha lora_target", "all parameters are trained")
