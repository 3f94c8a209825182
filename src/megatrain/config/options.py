"""The options of `megatrain train`: flat, with the names and defaults of Hugging Face and TRL.

Promise: strict types, no key that does nothing, no two keys that contradict each other.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatrain.units import parse_bytes

GROUPS = {
    "model_name_or_path": "Model",
    "train_files": "Data",
    "num_train_epochs": "Steps",
    "learning_rate": "Optimizer",
    "output_dir": "Run",
}
"""The first key of each group, in the order of the class below."""

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
        "eval_split",
        "dataset_format",
        "prompt_column",
        "completion_column",
        "shuffle",
        "micro_batch_tokens",
        "gradient_dtype",
        "allow_nonfinite_blocks",
        "overwrite_output_dir",
        "save_dtype",
        "max_shard_size",
        "checkpoint_memory",
        "save_on_signal",
        "stop_on_loss_spike",
        "device",
        "host_memory",
        "gpu_memory",
        "trace",
        "trace_steps",
    }
)
"""Keys that neither TrainingArguments nor TRL's SFTConfig and ModelConfig have."""

LEAST_CHECKPOINT_MEMORY = 2**20

ATTENTION = ("eager", "sdpa")
NO_ATTENTION = {
    "flash_attention_2": "it needs the flash-attn package",
    "flash_attention_3": "it needs the flash-attn package",
    "flex_attention": "not tried with layers that run one by one",
}
"""Attention that transformers has and megatrain does not, and why."""


def _check_attention(value: Any) -> None:
    if value not in ATTENTION:
        why = NO_ATTENTION.get(value, "no such attention here") if isinstance(value, str) else ""
        raise ValueError(f"{why or 'not a name'}; use {' or '.join(ATTENTION)}")


class TrainConfig(BaseModel):
    """Options of `megatrain train`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    model_name_or_path: str = Field(description="Directory of a Hugging Face model, or its id.")
    model_revision: str | None = Field(None, description="Revision of a model id.")
    cache_dir: str | None = Field(
        None, description="Where downloaded models are kept; default: HF_HUB_CACHE."
    )
    gguf_file: str | None = Field(
        None,
        description="Name of a GGUF file in that directory or repository, to start from its"
        " dequantised weights; a model_name_or_path that ends in .gguf means the same.",
    )
    model_init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Load the weights, or draw them as the model's own code would."
    )
    tokenizer_name: str | None = Field(
        None,
        description="Directory or id of a model whose tokenizer to use (and to save), if not"
        " model_name_or_path. With model_init: random its begin and end tokens become the model's.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of weights and activations; auto: bfloat16 on a GPU, float32 on the"
        " CPU. Masters and moments are fp32 either way.",
    )
    trainable: list[str] = Field(
        default_factory=list,
        description="Train only what matches: globs over parameter names (*norm*), layers[-4:],"
        " embed, head. The rest costs no optimizer state, and no backward below it.",
    )
    frozen: list[str] = Field(
        default_factory=list, description="Patterns of the same kinds; what matches is not trained."
    )
    attn_implementation: str | None = Field(
        None, description="Attention code of transformers: eager or sdpa; default: its own choice."
    )
    config_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to the model's config, by its own keys, or as a=1,b=2.",
    )
    add_tokens: list[str] = Field(
        default_factory=list,
        description="Ordinary tokens to add to the tokenizer; the embedding grows if it must.",
    )
    add_special_tokens: list[str] = Field(
        default_factory=list,
        description="The same for special tokens: never split, left out of decoded text.",
    )
    pad_vocab_to_multiple_of: int | None = Field(
        None, ge=1, description="Round the rows of embedding and head up to a multiple of this."
    )

    train_files: list[str] = Field(
        min_length=1,
        description="Files, folders or globs: .jsonl, .json, .txt, .csv, .tsv (all of them also"
        " as .gz, .bz2, .xz), .parquet, .arrow.",
    )
    eval_files: list[str] = Field(default_factory=list, description="Held-out files.")
    eval_split: float = Field(
        0.0, ge=0, description="Rows of train_files to hold out: a count, or a share below 1."
    )
    dataset_format: Literal[
        "auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca", "tokens"
    ] = Field(
        "auto", description="Format of the records; auto looks at the columns of the first one."
    )
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")
    completion_column: str = Field("completion", description="Column that holds the completion.")
    completion_only_loss: bool = Field(True, description="Do not train on the prompt.")
    assistant_only_loss: bool = Field(
        True, description="Train on the assistant's turns only (TRL's default is false)."
    )
    chat_template_path: str | None = Field(
        None, description="A .jinja file to use (and to save) instead of the model's chat template."
    )
    max_length: int = Field(1024, ge=2, description="Tokens per row; the rest is cut off.")
    shuffle: bool = Field(True, description="Permute the rows in each epoch, by seed.")

    num_train_epochs: float = Field(3.0, gt=0, description="Passes over the data.")
    max_steps: int = Field(-1, description="Optimizer steps; overrides epochs if positive.")
    per_device_train_batch_size: int = Field(
        8, ge=1, description="Rows of one micro-batch, unless micro_batch_tokens is set."
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="A step has this many times per_device_train_batch_size rows."
    )
    per_device_eval_batch_size: int = Field(8, ge=1, description="Rows of an evaluation batch.")
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="Padded tokens of one micro-batch; the step's rows stay the same."
    )

    learning_rate: float = Field(5e-5, ge=0, description="Peak learning rate.")
    lr_scheduler_type: str = Field("linear", description="A Hugging Face schedule's name.")
    lr_scheduler_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the schedule."
    )
    warmup_steps: float = Field(
        0.0, ge=0, description="Steps of linear warm-up; below 1: a share of all steps."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay; not on biases and norms.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Clip the global gradient norm; 0 turns clipping off."
    )
    gradient_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="dtype in which a summed gradient waits; by default the compute dtype."
    )
    allow_nonfinite_blocks: bool = Field(
        False,
        description="Without clipping: skip the update of a block whose gradient is not finite and"
        " go on, instead of ending the run.",
    )

    output_dir: str = Field(description="Where checkpoints, the model and the log go.")
    overwrite_output_dir: bool = Field(False, description="Write over an earlier run there.")
    save_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the saved model; auto: the compute dtype."
    )
    max_shard_size: str = Field("5GB", description="Largest weights file.")
    save_strategy: Literal["steps", "epoch", "no"] = Field(
        "steps",
        description="When checkpoints are written: every save_steps, or after each epoch, and in"
        " both cases after the last step; or never (the final model is written all the same).",
    )
    save_steps: float = Field(
        500.0, gt=0, description="Steps between checkpoints; below 1: a share of all steps."
    )
    save_total_limit: int | None = Field(
        None, ge=1, description="Checkpoints to keep, beside the best one; default: all."
    )
    save_only_model: bool = Field(
        False, description="Checkpoints without training state: only the weights, no resuming."
    )
    save_on_signal: Literal["auto"] | bool = Field(
        "auto",
        description="Write a checkpoint when SIGTERM or SIGINT ends the run; auto: for SIGTERM only"
        " if it is written within the 30 s that schedulers commonly leave.",
    )
    checkpoint_memory: str | None = Field(
        None,
        description="Memory for what is copied and not written yet while training goes on, such as"
        " 8GiB; default: the state of two blocks.",
    )
    resume_from_checkpoint: bool | str | None = Field(
        None,
        description="auto: go on from the last whole checkpoint in output_dir, if there is one;"
        " true: the same, and it must be there; or a checkpoint's directory.",
    )
    load_best_model_at_end: bool = Field(
        False, description="Write the model of the best checkpoint at the end, not the last."
    )
    logging_steps: int = Field(1, ge=1, description="Log every so many steps.")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list,
        description="Trackers that get the rows of log.jsonl too; each needs its package.",
    )
    run_name: str | None = Field(
        None, description="What trackers call the run; default: the name of output_dir."
    )
    stop_on_loss_spike: bool = Field(
        False,
        description="End the run, with a checkpoint, at a loss far above the median of the last 50"
        " steps; it is told in any case.",
    )
    eval_steps: int | None = Field(
        None, ge=1, description="Evaluate every so many steps, besides before and after training."
    )
    seed: int = Field(42, ge=0, description="Key of order, initialisation and dropout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where blocks are computed.")
    host_memory: str | None = Field(
        None, description="Host memory that the run may use, such as 100GiB; default: what is free."
    )
    gpu_memory: str | None = Field(
        None,
        description="GPU memory that the run may use, such as 24GiB; default: what is free. What is"
        " to spare holds state and activations that then need not be moved or computed again.",
    )
    trace: str | None = Field(
        None,
        description="Write a trace of trace_steps steps to this file, which"
        " https://ui.perfetto.dev opens: what each lane did when.",
    )
    trace_steps: int | None = Field(
        None,
        ge=1,
        description="Steps in the trace, by default 2; a run's first steps are left out.",
    )
    torch_compile: bool | None = Field(
        None, description="Compile layers and loss; default: on a GPU, unless there is dropout."
    )
    full_determinism: bool = Field(
        False, description="Deterministic kernels on the GPU: the same bits in every run."
    )

    def paths(self) -> dict[str, Any]:
        """What `megatrain.preflight.check_run` looks at, by its arguments' names."""
        return {
            "model": self.model_name_or_path,
            "gguf_file": self.gguf_file,
            "tokenizer": self.tokenizer_name,
            "train_files": self.train_files,
            "eval_files": self.eval_files,
            "output_dir": self.output_dir,
            "overwrite": self.overwrite_output_dir,
            "resume": self.resume_from_checkpoint,
        }

    @field_validator("max_shard_size", "host_memory", "gpu_memory", "checkpoint_memory")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None and parse_bytes(value) == 0:
            raise ValueError(f"'{value}' is no room at all")
        return value

    @field_validator("checkpoint_memory")
    @classmethod
    def _holds_a_few_buffers(cls, value: str | None) -> str | None:
        if value is not None and parse_bytes(value) < LEAST_CHECKPOINT_MEMORY:
            raise ValueError("at least 1MiB")
        return value

    @field_validator("warmup_steps", "eval_split", "save_steps")
    @classmethod
    def _is_a_count_or_a_share(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError("a count is a whole number, a share is below 1")
        return value

    @field_validator("max_steps")
    @classmethod
    def _is_minus_one_or_positive(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("give a positive number, or -1 to count epochs")
        return value

    @field_validator("attn_implementation")
    @classmethod
    def _is_attention_that_is_there(cls, value: str | None) -> str | None:
        if value is not None:
            _check_attention(value)
        return value

    @field_validator("config_overrides")
    @classmethod
    def _has_attention_that_is_there(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "attn_implementation" in value:
            _check_attention(value["attn_implementation"])
        return value

    @field_validator("add_tokens", "add_special_tokens")
    @classmethod
    def _are_tokens(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("a token is not empty")
        return value

    @field_validator("chat_template_path")
    @classmethod
    def _is_a_template_file(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".jinja"):
            raise ValueError(
                "give a file whose name ends in .jinja (what a tokenizer's chat_template.jinja"
                " needs beside it: add_special_tokens)"
            )
        return value

    @model_validator(mode="after")
    def _has_no_key_without_effect(self) -> "TrainConfig":
        if self.attn_implementation is not None and "attn_implementation" in self.config_overrides:
            raise ValueError("attn_implementation stands in config_overrides too: keep one")
        if twice := set(self.add_tokens) & set(self.add_special_tokens):
            raise ValueError(f"in add_tokens and add_special_tokens: {', '.join(sorted(twice))}")
        if self.eval_files and self.eval_split:
            raise ValueError("eval_files and eval_split exclude each other")
        if self.eval_steps is not None and not (self.eval_files or self.eval_split):
            raise ValueError("eval_steps needs eval_files or eval_split")
        if self.load_best_model_at_end:
            whole = self.eval_steps is not None and (self.save_steps / self.eval_steps).is_integer()
            if self.save_strategy != "steps" or not whole:
                raise ValueError(
                    "load_best_model_at_end needs save_strategy: steps and a save_steps that is a"
                    " multiple of eval_steps"
                )
        if self.gpu_memory is not None and self.device == "cpu":
            raise ValueError("gpu_memory needs a GPU, and device is cpu")
        if self.trace_steps is not None and self.trace is None:
            raise ValueError("trace_steps needs trace")
        if self.allow_nonfinite_blocks and self.max_grad_norm > 0:
            raise ValueError("allow_nonfinite_blocks needs max_grad_norm: 0")
        return self
